// Package datapathtest is the suite that every [datapath.Datapath] passes, for those in Warren and for
// those of others:
//
//	func TestDatapath(t *testing.T) {
//		datapathtest.Run(t, datapathtest.Harness{
//			New: func(t testing.TB) datapath.Datapath { return mine.New() },
//		})
//	}
//
// A harness names what its datapath lacks, so that a skipped case says why. Every reading has to name
// its driver ([datapath.Host]), since people are shown it. The package also has the
// scenarios of Plan in testdata, in a text form with names in place of keys.
package datapathtest
