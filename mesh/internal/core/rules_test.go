package core_test

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// The rules are those of the design; this node is always m.

const soon = 20 * time.Millisecond // longer than the window

// found is a running device of this node, with peers a and b of an earlier start.
func found() *fakeDevice {
	d := newDevice()
	d.model = *datapath.NewModel(datapath.State{
		Device: datapath.Device{Key: privateKey("m"), ListenPort: 40000, MTU: 1420},
		Local:  set("10.99.0.0/16"),
		Peers: map[key.Public]datapath.Peer{
			publicKey("a"): {Endpoint: netip.MustParseAddrPort("203.0.113.77:7"), Prefixes: set("10.1.0.0/16")},
			publicKey("b"): {Prefixes: set("10.2.0.0/16")},
		},
		Routes: map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.1.0.0/16"): {}, netip.MustParsePrefix("10.2.0.0/16"): {}},
	})
	d.hears(publicKey("a"), epoch.Add(-time.Minute))
	return d
}

func TestRule01_NothingIsRemovedBeforeTheFirstReset(t *testing.T) {
	s := simOn(t, found())
	s.step(announce())
	s.run(time.Hour) // the registry does not answer
	s.wantOps()
	s.wantPeers("a 10.1.0.0/16", "b 10.2.0.0/16")
	if s.m.View().Ready || s.settles > 0 {
		t.Error("ready without a Reset")
	}
	s.step(reset(good(rec("a", "10.1.0.0/16"))))
	s.run(soon)
	s.wantOps("remove routes 10.2.0.0/16", "remove peer b", "remove local 10.99.0.0/16")
	if !s.m.View().Ready || s.settles != 1 {
		t.Error("not ready")
	}
}

func TestRule02_DeletedWhileTheWatchWasDown(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16"), rec("b", "10.2.0.0/16"))
	s.step(core.RegistryFailed{Err: errTest})
	s.run(time.Hour)
	s.wantOps()
	s.step(reset(good(rec("a", "10.1.0.0/16"))))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16")
	s.wantNoCondition(view.RegistryDown, "", "")

	// It comes back as a new node, and its next deletion is seen.
	s.step(put(good(rec("b", "10.2.0.0/16"))))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16", "b 10.2.0.0/16")
	s.step(deleted("b"))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16")
	s.step(deleted("b", "never"))
	s.take()
	s.run(soon)
	s.wantOps()
}

func TestRule03_AnIdenticalRecordCausesNoWrite(t *testing.T) {
	a := rec("a", "10.1.0.0/16", "203.0.113.1:51820")
	s := up(t, a)
	for range 3 {
		s.step(put(good(a)))
		s.run(soon)
		s.step(reset(good(a)))
		s.run(soon)
		s.step(put(core.Opened{Node: "a", Same: true}))
		s.run(soon)
		a.Sequence++ // says nothing new of what matters here
	}
	s.wantOps()
}

func TestRule04_OneBadPeerBlocksNobody(t *testing.T) {
	s := newSim(t)
	var tried []time.Time
	broken := true
	s.dev.fail = func(op datapath.Op) error {
		if p, ok := op.(datapath.PutPeer); ok && p.Key == publicKey("a") {
			tried = append(tried, s.now)
			if broken {
				return errTest
			}
		}
		return nil
	}
	s.start(rec("a", "10.1.0.0/16"), rec("b", "10.2.0.0/16"))
	s.wantPeers("b 10.2.0.0/16")
	s.wantCondition(view.OpFailed, "a", "peer "+publicKey("a").String())

	// It is retried after 1 s, 2 s, 4 s and so on to a minute, each up to a quarter more or less, for ever,
	// and others are not held up.
	s.run(24 * time.Hour)
	for i := 1; i < len(tried); i++ {
		want := min(time.Second<<min(i-1, 10), time.Minute)
		if got := tried[i].Sub(tried[i-1]); got < want*3/4 || got > want*5/4 {
			t.Fatalf("retry %d after %v, want %v", i, got, want)
		}
	}
	if n := len(tried); n < 1400/5*4 {
		t.Errorf("%d retries in a day", n)
	}
	s.step(put(good(rec("c", "10.3.0.0/16"))))
	s.run(soon)
	s.wantPeers("b 10.2.0.0/16", "c 10.3.0.0/16")

	broken = false
	s.run(75 * time.Second)
	s.wantPeers("a 10.1.0.0/16", "b 10.2.0.0/16", "c 10.3.0.0/16")
	s.wantNoCondition(view.OpFailed, "a", "")

	// The next failure begins with a second again.
	broken, tried = true, nil
	s.step(put(good(rec("a", "10.1.0.0/16", "10.11.0.0/16"))))
	s.run(3 * time.Second)
	if len(tried) < 2 || tried[1].Sub(tried[0]) > 1250*time.Millisecond {
		t.Errorf("tried at %v", tried)
	}
}

func TestRule04_WhatFailedTogetherIsNotRetriedTogether(t *testing.T) {
	s := newSim(t)
	at := map[time.Time]bool{}
	s.dev.fail = func(op datapath.Op) error {
		if _, ok := op.(datapath.PutPeer); ok {
			at[s.now] = true
			return errTest
		}
		return nil
	}
	s.start(rec("a"), rec("b"), rec("c"), rec("d"), rec("x"), rec("y"))
	clear(at)
	s.run(1300 * time.Millisecond)
	if len(at) < 5 {
		t.Errorf("6 peers were retried at %d times", len(at))
	}
}

// A prefix moves to a peer that fails: it stays where it is, and the device is not written in a circle.
func TestRule04_AMoveWaitsForItsNewPeer(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16", "10.11.0.0/16"), rec("b"))
	broken := true
	s.dev.fail = func(op datapath.Op) error {
		if p, ok := op.(datapath.PutPeer); ok && p.Key == publicKey("b") && broken {
			return errTest
		}
		return nil
	}
	s.step(put(good(rec("a", "10.12.0.0/16")), good(rec("b", "10.1.0.0/16"))))
	s.run(time.Minute)
	s.wantPeers("a 10.1.0.0/16 10.12.0.0/16", "b")
	s.step(deleted("a"))
	s.run(time.Minute)
	s.wantPeers("a 10.1.0.0/16", "b")
	broken = false
	s.run(75 * time.Second)
	s.wantPeers("b 10.1.0.0/16")
	if cs := s.m.View().Conditions; len(cs) > 0 {
		t.Errorf("conditions %v", cs)
	}
}

// A route that cannot be removed keeps its peer; all else of the peer goes.
func TestRule04_ARouteThatStaysKeepsItsPeer(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16", "10.2.0.0/16"), rec("b", "10.3.0.0/16"))
	broken := true
	s.dev.fail = func(op datapath.Op) error {
		if r, ok := op.(datapath.RemoveRoutes); ok && broken && r.Prefixes.Has(netip.MustParsePrefix("10.1.0.0/16")) {
			return errTest
		}
		return nil
	}
	s.step(deleted("a"))
	s.run(soon)
	s.step(deleted("b"))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16 10.2.0.0/16") // they went in one op, which failed
	broken = false
	s.run(2 * time.Second)
	s.wantPeers()
}

// What cannot be is not asked for again until something else is wanted.
func TestRule08_PermanentErrorsAreNotRetried(t *testing.T) {
	s := newSim(t)
	tried := 0
	s.dev.fail = func(op datapath.Op) error {
		if p, ok := op.(datapath.PutPeer); ok && p.Key == publicKey("a") && !p.Peer.Prefixes.Has(netip.MustParsePrefix("10.3.0.0/16")) {
			tried++
			return fmt.Errorf("this peer: %w", errors.ErrUnsupported)
		}
		return nil
	}
	s.start(rec("a", "10.1.0.0/16"), rec("b"))
	s.run(24 * time.Hour)
	if tried != 1 {
		t.Errorf("tried %d times", tried)
	}
	c, ok := s.condition(view.OpFailed, "a", "")
	if !ok || c.Remedy != "this datapath cannot do it" {
		t.Errorf("condition %v", c)
	}
	// Peers that rely on it do not have it tried, either.
	s.step(put(good(rec("b", "10.2.0.0/16"))))
	s.run(time.Minute)
	s.step(put(good(rec("b")), good(rec("a", "10.1.0.0/16", "10.2.0.0/16"))))
	s.run(24 * time.Hour)
	if tried != 2 {
		t.Errorf("tried %d times after one change", tried)
	}
	s.wantPeers("b 10.2.0.0/16")
	s.step(put(good(rec("a", "10.2.0.0/16", "10.3.0.0/16"))))
	s.run(soon)
	s.wantPeers("a 10.2.0.0/16 10.3.0.0/16", "b")
	s.wantNoCondition(view.OpFailed, "a", "")
}

func TestRule08_ANewerValueIsTriedAtOnce(t *testing.T) {
	s := newSim(t)
	s.dev.fail = func(op datapath.Op) error {
		if p, ok := op.(datapath.PutPeer); ok && p.Peer.Prefixes.Has(netip.MustParsePrefix("10.1.0.0/16")) {
			return errTest
		}
		return nil
	}
	s.start(rec("a", "10.1.0.0/16"))
	s.run(10 * time.Minute)
	s.step(put(good(rec("a", "10.2.0.0/16"))))
	s.run(soon)
	s.wantPeers("a 10.2.0.0/16")
	s.wantNoCondition(view.OpFailed, "a", "")
}

// The newer value comes while the older one is being applied, and fails.
func TestRule08_ANewerValueBesideAFailure(t *testing.T) {
	s := up(t, rec("a"))
	s.dev.fail = func(op datapath.Op) error {
		if p, ok := op.(datapath.PutPeer); ok && p.Peer.Prefixes.Has(netip.MustParsePrefix("10.1.0.0/16")) {
			return errTest
		}
		return nil
	}
	s.lag = true
	s.step(put(good(rec("a", "10.1.0.0/16"))))
	s.run(soon) // being applied
	s.step(put(good(rec("a", "10.2.0.0/16"))))
	s.lag = false
	s.answer()
	s.run(soon)
	s.wantPeers("a 10.2.0.0/16")
}

// What failed and is no longer wanted is forgotten, with its condition.
func TestRule08_WhatIsNoLongerWantedIsForgotten(t *testing.T) {
	s := newSim(t)
	for _, permanent := range []bool{false, true} {
		s.dev.fail = func(op datapath.Op) error {
			if p, ok := op.(datapath.PutPeer); ok && p.Key == publicKey("a") {
				if permanent {
					return errors.ErrUnsupported
				}
				return errTest
			}
			return nil
		}
		if permanent {
			s.step(put(good(rec("a", "10.1.0.0/16"))))
			s.run(soon)
		} else {
			s.start(rec("a", "10.1.0.0/16"))
		}
		s.wantCondition(view.OpFailed, "a", "")
		s.step(deleted("a"))
		s.run(soon)
		s.wantPeers()
		if cs := s.m.View().Conditions; len(cs) > 0 {
			t.Errorf("conditions %v", cs)
		}
	}
}

// Whoever mends by hand what Warren could not ends the retries.
func TestRule08_WhatCameRightByItself(t *testing.T) {
	s := newSim(t)
	s.dev.fail = func(op datapath.Op) error {
		if _, ok := op.(datapath.AddLocal); ok {
			return errors.ErrUnsupported
		}
		return nil
	}
	s.start()
	s.step(announce("10.5.0.0/16"))
	s.run(soon)
	s.wantCondition(view.OpFailed, "m", "local 10.5.0.0/16")
	s.dev.edit(func(st *datapath.State) { st.Local = set("10.5.0.0/16") })
	s.run(s.cfg.Audit)
	s.wantNoCondition(view.OpFailed, "m", "")
}

// One address that cannot be had does not keep the device from accepting what it announces.
func TestRule04_OneBadAddressBlocksNothing(t *testing.T) {
	s := newSim(t, func(c *core.Config) { c.Addresses = set("10.9.0.1/32") })
	s.dev.fail = func(op datapath.Op) error {
		if _, ok := op.(datapath.AddAddrs); ok {
			return errTest
		}
		return nil
	}
	s.step(announce("10.5.0.0/16"))
	s.step(reset(good(rec("a", "10.1.0.0/16"))))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16")
	s.wantCondition(view.OpFailed, "m", "address 10.9.0.1")
	s.step(announce("10.6.0.0/16"))
	s.run(soon)
	if local := s.dev.model.State().Local; !local.Has(netip.MustParsePrefix("10.6.0.0/16")) {
		t.Errorf("accepts %v", local)
	}
	if r := s.m.View().Self.Record; !r.Addresses.IsEmpty() || !r.Prefixes.Has(netip.MustParsePrefix("10.6.0.0/16")) {
		t.Errorf("announces %v, which it has not got", r.Reachable())
	}
}

// An Apply that fails as a whole, against its contract, is retried with backoff as well.
func TestRule04_AnApplyThatFailsAsAWhole(t *testing.T) {
	s := up(t)
	s.dev.whole = errTest
	s.step(put(good(rec("a", "10.1.0.0/16"))))
	s.run(time.Hour)
	if n := len(s.take()); n < 50 || n > 200 {
		t.Errorf("%d ops in an hour", n)
	}
	s.dev.whole = nil
	s.run(75 * time.Second)
	s.wantPeers("a 10.1.0.0/16")
	if cs := s.m.View().Conditions; len(cs) > 0 {
		t.Errorf("conditions %v", cs)
	}
}

// A device that cannot be made is tried again, and nothing is put on it meanwhile.
func TestRule08_ADeviceThatCannotBeMade(t *testing.T) {
	for _, test := range []struct {
		err         error
		least, most int
	}{{errTest, 60, 90}, {errors.ErrUnsupported, 1, 1}} {
		s := newSim(t)
		s.dev.fail = func(datapath.Op) error { return test.err }
		s.step(announce("10.5.0.0/16"))
		s.step(reset(good(rec("a", "10.1.0.0/16"))))
		s.run(time.Hour)
		tried := 0
		for _, op := range s.take() {
			if _, ok := op.(datapath.SetDevice); ok {
				tried++
			}
		}
		if tried < test.least || tried > test.most {
			t.Errorf("%v: tried %d times in an hour", test.err, tried)
		}
		s.wantCondition(view.OpFailed, "m", "device")
		if cs := s.m.View().Conditions; len(cs) != 1 {
			t.Errorf("%v: conditions %v", test.err, cs)
		}
		if s.m.View().Ready {
			t.Errorf("%v: ready without a device", test.err)
		}
		if errors.Is(test.err, errors.ErrUnsupported) {
			continue
		}
		s.dev.fail = nil
		s.run(75 * time.Second)
		s.wantPeers("a 10.1.0.0/16")
		if cs := s.m.View().Conditions; len(cs) > 0 {
			t.Errorf("%v: conditions %v", test.err, cs)
		}
	}
}

// A driver that says it set the device and did not is not believed, and not asked in a circle.
func TestRule04_ADeviceThatDoesNotTakeWhatIsSet(t *testing.T) {
	s := newSim(t, func(c *core.Config) { c.MTU = 9000 })
	stubborn := true
	s.dev.after = func(datapath.Op) {
		if stubborn {
			s.dev.edit(func(st *datapath.State) {
				if st.Device.Exists() {
					st.Device.MTU = 1420
				}
			})
		}
	}
	s.step(announce())
	s.step(reset(good(rec("a", "10.1.0.0/16"))))
	s.run(time.Hour)
	n := 0
	for _, op := range s.take() {
		if _, ok := op.(datapath.SetDevice); ok {
			n++
		}
	}
	if n < 60 || n > 90 {
		t.Errorf("set %d times in an hour", n)
	}
	s.wantCondition(view.OpFailed, "m", "device")
	s.wantPeers("a 10.1.0.0/16")
	stubborn = false
	s.run(75 * time.Second)
	s.wantNoCondition(view.OpFailed, "m", "")
}

// A device that others remove as soon as it is made is not made in a circle.
func TestRule04_ADeviceThatVanishesAtOnce(t *testing.T) {
	s := newSim(t)
	s.dev.after = func(op datapath.Op) { s.dev.vanish() }
	s.step(announce())
	s.step(reset())
	s.run(time.Hour)
	if n := len(s.take()); n > 100 {
		t.Errorf("%d ops in an hour", n)
	}
}

func TestRule04_AReadingThatFails(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16"))
	s.dev.unread = errTest
	s.run(s.cfg.Audit)
	s.wantCondition(view.DeviceUnreadable, "m", "")
	s.step(put(good(rec("b", "10.2.0.0/16")))) // what is known of the device still holds
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16", "b 10.2.0.0/16")
	s.dev.tries = 0
	for i := range 600 { // which have to be searched for
		s.step(put(good(rec("c", fmt.Sprintf("203.0.113.%d:1", i%200)))))
		s.run(time.Second)
	}
	if s.dev.tries > 20 {
		t.Errorf("tried to read %d times in 10 minutes", s.dev.tries)
	}
	s.step(deleted("c"))
	s.dev.unread = nil
	s.run(75 * time.Second)
	s.wantNoCondition(view.DeviceUnreadable, "m", "")
}

func TestRule05_AChangedKeyReplacesThePeer(t *testing.T) {
	a := rec("a", "10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "203.0.113.1:51820")
	s := newSim(t, func(c *core.Config) { c.Endpoints = nil })
	s.start(a)
	s.step(put(good(withKey(a, "x"))))
	s.run(soon)
	s.wantOps("put peer x endpoint=203.0.113.1:51820 keepalive=25s + 10.1.0.0/16 10.2.0.0/16 10.3.0.0/16", "remove peer a")
	s.wantPeers("x 10.1.0.0/16 10.2.0.0/16 10.3.0.0/16")
	if routes := s.dev.model.State().Routes; len(routes) != 3 {
		t.Errorf("routes %v", routes)
	}
}

func TestRule06_ARestartAdoptsTheDevice(t *testing.T) {
	s := simOn(t, found(), func(c *core.Config) { c.Starts = core.Starts{Epoch: 4, Generation: 2} })
	before := s.dev.model.State().Clone()
	own := rec("m")
	own.Instance, own.Epoch, own.Generation, own.Sequence = "01", 4, 2, 7
	s.step(announce("10.99.0.0/16"))
	// a has roamed: its record names another place than the one at which it answers.
	s.step(reset(good(rec("a", "10.1.0.0/16", "203.0.113.1:51820")), good(rec("b", "10.2.0.0/16")), good(own)))
	puts, starts := s.puts, s.starts
	s.run(time.Hour)
	s.wantOps()
	if !s.dev.model.State().Equal(before) {
		t.Error("the device changed")
	}
	if len(puts) != 1 || puts[0].Epoch != 5 || puts[0].Generation != 2 || puts[0].Sequence != 1 {
		t.Errorf("published %+v", puts)
	}
	if len(starts) != 1 || starts[0] != (core.Starts{Epoch: 5, Generation: 2, Port: 40000}) {
		t.Errorf("to be kept: %v", starts)
	}
}

func TestRule06_GenerationCountsDevices(t *testing.T) {
	// The folder was lost, the registry remembers.
	s := newSim(t)
	own := rec("m")
	own.Epoch, own.Generation = 8, 3
	s.step(announce())
	s.step(reset(good(own)))
	if r := s.m.View().Self.Record; r.Epoch != 9 || r.Generation != 4 {
		t.Errorf("a new device: epoch %d, generation %d", r.Epoch, r.Generation)
	}
	s.run(soon)
	s.take()
	s.dev.vanish()
	s.run(time.Minute)
	if len(s.puts) != 1 || s.puts[0].Generation != 5 || len(s.starts) != 1 || s.starts[0].Generation != 5 {
		t.Errorf("after the device was lost: published %+v, kept %v", s.puts, s.starts)
	}

	// Found at the start, and lost before the registry answered.
	s = simOn(t, found(), func(c *core.Config) { c.Starts = core.Starts{Epoch: 4, Generation: 2} })
	s.step(announce())
	s.dev.vanish()
	s.run(time.Minute)
	s.step(reset())
	if r := s.m.View().Self.Record; r.Generation != 3 {
		t.Errorf("lost before the first Reset: generation %d", r.Generation)
	}

	// A device with a key that is not this node's is none of its devices, and its port is not announced.
	d := found()
	d.edit(func(st *datapath.State) { st.Device.Key = privateKey("stranger") })
	s = simOn(t, d, func(c *core.Config) {
		c.Starts = core.Starts{Epoch: 4, Generation: 2}
		c.PortFirst = 50000
	})
	s.step(reset())
	s.step(announce())
	s.run(soon)
	for _, r := range s.puts {
		if r.Generation != 3 || r.Endpoints[0].Port != 50000 {
			t.Errorf("published %+v", r)
		}
	}
	if len(s.puts) == 0 {
		t.Error("not published")
	}
}

func TestRule07_HostPrefixes(t *testing.T) {
	s := newSim(t, func(c *core.Config) {
		c.Addresses = prefixes.Must(prefixes.Host(netip.MustParseAddr("10.9.0.1")), prefixes.Host(netip.MustParseAddr("2001:db8::1")))
	})
	a := rec("a")
	a.Addresses = prefixes.Must(prefixes.Host(netip.MustParseAddr("::ffff:10.9.0.2")), prefixes.Host(netip.MustParseAddr("2001:db8::2")))
	s.start(a)
	s.wantPeers("a 10.9.0.2/32 2001:db8::2/128")
	st := s.dev.model.State()
	if st.Addrs != set("10.9.0.1/32", "2001:db8::1/128") || s.m.View().Self.Record.Addresses != st.Addrs {
		t.Errorf("has %v, announces %v", st.Addrs, s.m.View().Self.Record.Addresses)
	}
	// They are the source of traffic into the mesh, each in its family.
	for r, src := range st.Routes {
		if want := map[bool]string{true: "10.9.0.1", false: "2001:db8::1"}[r.Addr().Is4()]; src.String() != want {
			t.Errorf("route %v from %v", r, src)
		}
	}
}

func TestRule09_WithdrawnFromTheRecordAtOnceAndFromTheDeviceLater(t *testing.T) {
	p := netip.MustParsePrefix("10.5.0.0/16")
	s := up(t)
	s.step(announce("10.5.0.0/16"))
	s.run(soon)
	if r := s.m.View().Self.Record; !r.Prefixes.Has(p) {
		t.Fatalf("announces %v", r.Prefixes)
	}
	s.take()
	s.unput = errTest // the registry is slow to take it
	s.step(announce())
	if len(s.puts) != 1 || s.puts[0].Prefixes.Has(p) {
		t.Fatalf("published %+v", s.puts)
	}
	s.run(time.Hour)
	if !s.m.View().Self.Local.Has(p) {
		t.Fatal("others still send here, and it is no longer accepted")
	}
	s.unput = nil
	s.answerPut()
	s.run(s.cfg.Linger - time.Millisecond)
	if !s.m.View().Self.Local.Has(p) {
		t.Error("what is on its way is no longer accepted")
	}
	s.run(soon)
	if s.m.View().Self.Local.Has(p) {
		t.Error("still accepted")
	}
}

// What was never published needs no record without it to be out.
func TestRule09_WithdrawnBeforeItWasPublished(t *testing.T) {
	s := up(t)
	s.lag = true
	s.step(announce("10.5.0.0/16"))
	s.run(soon) // being applied
	s.step(announce())
	s.lag = false
	s.answer()
	s.run(s.cfg.Linger + soon)
	if local := s.m.View().Self.Local; !local.IsEmpty() {
		t.Errorf("accepts %v", local)
	}
	if len(s.puts) != 0 {
		t.Errorf("published %v", s.puts)
	}
}

func TestRule10_TheLowestIDHasAPrefix(t *testing.T) {
	a, b := rec("a", "10.1.0.0/16", "10.11.0.0/16"), rec("b", "10.1.0.0/16", "10.12.0.0/16")
	for _, order := range [][]core.Records{
		{put(good(a)), put(good(b))}, {put(good(b)), put(good(a))}, {put(good(a), good(b))}, {reset(good(b), good(a))},
		{put(good(b)), put(good(a)), deleted("a"), put(good(a))},
	} {
		s := up(t)
		for _, in := range order {
			s.step(in)
			s.run(soon)
		}
		s.wantPeers("a 10.1.0.0/16 10.11.0.0/16", "b 10.12.0.0/16")
		s.wantCondition(view.PrefixConflict, "b", "10.1.0.0/16")
		s.wantNoCondition(view.PrefixConflict, "a", "")
		want := []view.Withheld{{Node: "b", Prefix: netip.MustParsePrefix("10.1.0.0/16"), Kind: view.PrefixConflict, Winner: "a"}}
		if got := s.m.View().Withheld; !slices.Equal(got, want) {
			t.Errorf("withheld %v", got)
		}
		// When the winner lets go the loser has it, in one step.
		s.take()
		s.step(put(good(rec("a", "10.11.0.0/16"))))
		s.run(soon)
		s.wantOps("put peer b + 10.1.0.0/16")
		s.wantNoCondition(view.PrefixConflict, "b", "")
	}
}

func TestRule10_OverlapIsNoConflict(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16"), rec("b", "10.1.2.0/24"))
	s.wantPeers("a 10.1.0.0/16", "b 10.1.2.0/24")
	if cs := s.m.View().Conditions; len(cs) > 0 {
		t.Errorf("conditions %v", cs)
	}
}

func TestRule10_TheLoserIsTold(t *testing.T) {
	s := up(t, rec("a", "10.5.0.0/16"))
	s.step(announce("10.5.0.0/16"))
	s.run(soon)
	s.wantCondition(view.PrefixConflict, "m", "10.5.0.0/16") // everywhere else it goes to a
	s.wantCondition(view.LocalWins, "a", "10.5.0.0/16")
	s.wantPeers("a")
	s.step(put(good(rec("a"))))
	s.run(soon)
	if cs := s.m.View().Conditions; len(cs) > 0 {
		t.Errorf("conditions %v", cs)
	}
}

func TestRule11_OneKeyOneNode(t *testing.T) {
	a, b := withKey(rec("a", "10.1.0.0/16"), "x"), withKey(rec("b", "10.2.0.0/16", "203.0.113.2:1"), "x")
	for _, order := range [][]core.Records{{put(good(a)), put(good(b))}, {put(good(b)), put(good(a))}, {reset(good(a), good(b))}} {
		s := up(t)
		for _, in := range order {
			s.step(in)
			s.run(soon)
		}
		s.wantPeers("x 10.1.0.0/16")
		s.wantCondition(view.KeyConflict, "a", "")
		s.wantCondition(view.KeyConflict, "b", "")
		if p, _ := s.m.View().Peer("b"); !p.SetAside {
			t.Error("b is not set aside")
		}
		s.take()
		s.step(deleted("b")) // the winner is not touched
		s.run(soon)
		s.wantOps()
		s.wantNoCondition(view.KeyConflict, "a", "")
		s.step(put(good(b)))
		s.step(deleted("a"))
		s.run(soon)
		s.wantPeers("x 10.2.0.0/16")
		if p, _ := s.peer("x"); p.Endpoint.String() != "203.0.113.2:1" {
			t.Errorf("b is sent to at %v", p.Endpoint)
		}
		s.wantNoCondition(view.KeyConflict, "b", "")
	}
}

func TestRule11_ManyNodesOneKey(t *testing.T) {
	s := up(t, withKey(rec("a"), "x"), withKey(rec("b"), "x"), withKey(rec("c"), "x"), withKey(rec("d"), "x"))
	says := func(id, what string) {
		t.Helper()
		if c, _ := s.condition(view.KeyConflict, id, ""); !strings.Contains(c.Message, what) {
			t.Errorf("%s is told %q, want %q", id, c.Message, what)
		}
	}
	says("a", "claimed by b and 2 more; this node has it")
	says("d", "claimed by a, which has it")
	s.step(deleted("a"))
	says("b", "claimed by c and 1 more; this node has it")
	says("d", "claimed by b, which has it")
	s.step(deleted("b"))
	s.step(deleted("c"))
	s.run(soon)
	s.wantPeers("x")
	if cs := s.m.View().Conditions; len(cs) > 0 {
		t.Errorf("conditions %v", cs)
	}
}

// The session that the key had with the node before says nothing of the node that has the key now.
func TestRule11_AKeyThatPassesOnIsSearchedAnew(t *testing.T) {
	s := up(t, withKey(rec("a", "203.0.113.1:1"), "x"), withKey(rec("b", "203.0.113.2:1"), "x"))
	s.dev.hears(publicKey("x"), s.now)
	s.run(2 * time.Second)
	s.step(deleted("a"))
	s.run(soon)
	if p, _ := s.peer("x"); p.Endpoint.String() != "203.0.113.2:1" {
		t.Errorf("b is sent to at %v", p.Endpoint)
	}
}

func TestRule12_SelfIsTheID(t *testing.T) {
	// Another node with this node's key is not this node, and not its peer.
	s := up(t, withKey(rec("a", "10.1.0.0/16"), "m"), withKey(rec("z", "10.2.0.0/16"), "m"))
	s.step(announce("10.5.0.0/16"))
	s.run(soon)
	s.wantPeers()
	for _, id := range []string{"a", "m", "z"} {
		s.wantCondition(view.KeyConflict, id, "")
	}
	for _, w := range s.m.View().Withheld {
		if w.Kind != view.KeyConflict || w.Winner == w.Node {
			t.Errorf("withheld %+v", w)
		}
	}
	if r := s.m.View().Self.Record; !r.Prefixes.Has(netip.MustParsePrefix("10.5.0.0/16")) {
		t.Errorf("announces %v", r.Prefixes)
	}
	// Once it has a key of its own it is a peer.
	s.step(put(good(rec("a", "10.1.0.0/16"))))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16")
	s.step(deleted("a"))
	s.run(soon)
	// A record of this node's with another key is still this node's.
	s.step(put(good(withKey(rec("m", "10.7.0.0/16"), "y"))))
	s.run(soon)
	s.wantPeers()
	if _, ok := s.m.View().Peer("m"); ok {
		t.Error("this node is a peer of its own")
	}
}

func TestRule13_LocalNetworksWin(t *testing.T) {
	s := newSim(t, func(c *core.Config) { c.Addresses = set("10.9.0.1/32") })
	s.dev.host.Connected = set("192.168.1.0/24")
	s.start(rec("a", "192.168.1.0/24", "192.168.1.128/25", "192.168.0.0/16", "10.9.0.1/32", "10.1.0.0/16"))
	s.wantPeers("a 10.1.0.0/16 192.168.0.0/16")
	s.wantCondition(view.LocalWins, "a", "192.168.1.0/24")
	s.wantCondition(view.LocalWins, "a", "192.168.1.128/25")
	s.wantCondition(view.LocalWins, "a", "10.9.0.1/32")

	s.step(announce("10.1.0.0/17", "10.1.128.0/17")) // two halves are the whole
	s.run(soon)
	s.wantPeers("a 192.168.0.0/16")
	s.step(announce("10.1.0.0/17"))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16 192.168.0.0/16")
	s.wantNoCondition(view.LocalWins, "a", "10.1.0.0/16")

	s.dev.host.Connected = set("10.1.0.0/16") // the host moved to another network
	s.run(s.cfg.Audit)
	s.wantPeers("a 192.168.0.0/16 192.168.1.0/24 192.168.1.128/25")
}

// An exit node announces all there is, and has peers all the same.
func TestRule13_AnExitNodeHasPeers(t *testing.T) {
	s := newSim(t, func(c *core.Config) {
		c.Addresses = set("10.9.0.1/32")
		c.Accept = func(string, netip.Prefix) bool { return true }
	})
	s.start(rec("a", "10.1.0.0/16", "10.9.0.1/32", "0.0.0.0/0"), rec("b", "128.0.0.0/1"))
	s.step(announce("0.0.0.0/0"))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16", "b 128.0.0.0/1")
	s.step(announce())
	s.run(soon)
	s.wantPeers("a 0.0.0.0/0 10.1.0.0/16", "b 128.0.0.0/1")
}

// A prefix with an endpoint of its own node inside would carry that node's packets to itself.
func TestRule14_EndpointsInsideThePrefix(t *testing.T) {
	s := newSim(t)
	s.dev.host.Underlay = datapath.UnderlayShared
	loops := rec("a", "192.0.2.0/24", "10.1.0.0/16", "192.0.2.7:51820")
	s.start(loops)
	s.wantPeers("a 10.1.0.0/16")
	s.wantCondition(view.EndpointLoops, "a", "192.0.2.0/24")
	if p, _ := s.peer("a"); p.Endpoint.String() != "192.0.2.7:51820" {
		t.Errorf("a is sent to at %v", p.Endpoint)
	}
	s.step(put(good(rec("a", "192.0.2.0/24", "10.1.0.0/16", "203.0.113.2:51820"))))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16 192.0.2.0/24")
	s.wantNoCondition(view.EndpointLoops, "a", "")

	// Where encrypted packets are marked out of the tunnel there is no loop.
	s.step(put(good(loops)))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16")
	s.dev.host.Underlay = datapath.UnderlaySeparate
	s.run(s.cfg.Audit)
	s.wantPeers("a 10.1.0.0/16 192.0.2.0/24")
	s.wantNoCondition(view.EndpointLoops, "a", "")
}

// An endpoint inside what goes to another node is not used, and does nothing to that node: anyone could
// publish one.
func TestRule14_EndpointsInsideAnothersPrefix(t *testing.T) {
	s := newSim(t)
	s.dev.host.Underlay = datapath.UnderlayShared
	s.start(rec("b", "10.2.0.0/16", "203.0.113.2:7"))
	at := func(want string) {
		t.Helper()
		s.wantPeers("b 10.2.0.0/16", "x")
		if p, _ := s.peer("x"); p.Endpoint.String() != want {
			t.Errorf("x is sent to at %v, want %s", p.Endpoint, want)
		}
	}
	s.step(put(good(rec("x", "10.2.0.5:1"))))
	s.run(soon)
	at("invalid AddrPort")
	s.wantCondition(view.EndpointLoops, "x", "10.2.0.5:1")
	s.wantCondition(view.EndpointUnusable, "x", "")
	c, _ := s.condition(view.EndpointLoops, "x", "")
	for _, name := range []string{"endpoint 10.2.0.5:1 of x", "prefix 10.2.0.0/16 of b"} {
		if !strings.Contains(c.Message, name) {
			t.Errorf("%q does not name the %s", c.Message, name)
		}
	}
	s.step(put(good(rec("x", "10.2.0.5:1", "203.0.113.9:1"))))
	s.run(soon)
	at("203.0.113.9:1")
	s.wantNoCondition(view.EndpointUnusable, "x", "")
	s.wantCondition(view.EndpointLoops, "x", "10.2.0.5:1")

	// Set aside it is not sent to at all.
	s.step(put(good(withKey(rec("x", "10.2.0.5:1"), "b"))))
	s.run(soon)
	s.wantPeers("b 10.2.0.0/16")
	s.wantNoCondition(view.EndpointLoops, "x", "")
	s.step(put(good(rec("x", "10.2.0.5:1"))))
	s.run(soon)
	s.wantCondition(view.EndpointLoops, "x", "10.2.0.5:1")

	// The same by what another node does.
	s.step(put(good(withKey(rec("a"), "x"))))
	s.run(soon)
	s.wantNoCondition(view.EndpointLoops, "x", "")
	s.step(deleted("a"))
	s.run(soon)
	s.wantCondition(view.EndpointLoops, "x", "10.2.0.5:1")

	// With the prefix goes what it did.
	s.step(put(good(rec("b", "203.0.113.2:7"))))
	s.run(soon)
	s.wantNoCondition(view.EndpointLoops, "x", "")
	s.wantPeers("b", "x")
	if p, _ := s.peer("x"); p.Endpoint.String() != "10.2.0.5:1" {
		t.Errorf("x is sent to at %v", p.Endpoint)
	}

	// One that answered is left when there is another, and else kept.
	s.dev.hears(publicKey("x"), s.now)
	s.run(s.cfg.Audit)
	s.step(put(good(rec("b", "10.2.0.0/16", "203.0.113.2:7"))))
	s.run(soon)
	at("10.2.0.5:1")
	s.wantCondition(view.EndpointLoops, "x", "10.2.0.5:1")
	s.step(put(good(rec("x", "10.2.0.5:1", "203.0.113.9:1"))))
	s.run(soon)
	at("203.0.113.9:1")
	s.take()
	s.run(10 * time.Minute)
	at("203.0.113.9:1")
	if len(s.raised)+len(s.cleared) > 0 {
		t.Errorf("raised %v, cleared %v", s.raised, s.cleared)
	}
	s.step(deleted("x"))
	s.wantNoCondition(view.EndpointLoops, "x", "")
}

func TestRule18_ForwardingGoesOnWithoutTheRegistry(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16"))
	s.step(core.RegistryFailed{Err: errTest})
	s.wantCondition(view.RegistryDown, "", "")
	s.run(24 * time.Hour)
	s.wantOps()
	s.dev.edit(func(st *datapath.State) { delete(st.Peers, publicKey("a")); clear(st.Routes) })
	s.run(s.cfg.Audit) // it is still looked after
	s.wantPeers("a 10.1.0.0/16")
	s.step(put())
	s.wantNoCondition(view.RegistryDown, "", "")
}

// Handshake times are the device's wall clock, which may be set; they are not compared with this node's.
func TestRule19_ClockStepsChangeNothing(t *testing.T) {
	for _, step := range []time.Duration{-100 * 365 * 24 * time.Hour, 100 * 365 * 24 * time.Hour} {
		s := up(t, rec("a", "10.1.0.0/16", "203.0.113.1:1", "203.0.113.2:1"))
		for i := range 20 {
			s.dev.hears(publicKey("a"), s.now.Add(time.Duration(i%2)*step))
			s.run(20 * time.Second)
		}
		s.wantOps()
		s.wantNoCondition(view.NoHandshake, "a", "")
	}
}

func TestRule19_RecordsEndAndComeBack(t *testing.T) {
	s := up(t)
	o := good(rec("a", "10.1.0.0/16", "0.0.0.0/0"))
	o.NotBefore, o.NotAfter = s.now.Add(time.Minute), s.now.Add(2*time.Minute)
	s.step(put(o))
	s.run(59 * time.Second)
	s.wantPeers()
	s.wantCondition(view.RecordExpired, "a", "")
	s.run(2 * time.Second)
	s.wantPeers("a 10.1.0.0/16")
	s.wantNoCondition(view.RecordExpired, "a", "")
	s.run(58 * time.Second)
	s.wantPeers("a 10.1.0.0/16")
	s.step(put(bad("a", errTest))) // what is refused stays so when the last good one ends
	s.run(2 * time.Second)
	s.wantPeers()
	s.wantCondition(view.RecordExpired, "a", "")
	s.wantCondition(view.RecordRefused, "a", "")
	s.wantNoCondition(view.PrefixRefused, "a", "")

	// Renewed a moment ahead of this node's clock: the old one serves until then.
	o.NotBefore, o.NotAfter = s.now, s.now.Add(time.Minute)
	s.step(put(o))
	s.run(soon)
	s.take()
	renewed := o
	renewed.Record = rec("a", "10.2.0.0/16")
	renewed.NotBefore, renewed.NotAfter = s.now.Add(5*time.Second), time.Time{}
	s.step(put(renewed))
	s.run(4 * time.Second)
	s.wantPeers("a 10.1.0.0/16")
	s.run(2 * time.Second)
	s.wantPeers("a 10.2.0.0/16")
	s.run(24 * time.Hour)
	s.wantPeers("a 10.2.0.0/16")
	if cs := s.m.View().Conditions; len(cs) > 0 {
		t.Errorf("conditions %v", cs)
	}
}

// Many records with bounds end in their order, whatever order they came in.
func TestRule19_BoundsInAnyOrder(t *testing.T) {
	s := up(t)
	for _, i := range []int{3, 1, 4, 0, 2} {
		o := good(withKey(rec(string(rune('p'+i))), string(rune('p'+i))))
		o.NotAfter = s.now.Add(time.Duration(10+i) * time.Minute)
		s.step(put(o))
	}
	s.step(deleted("r"))
	s.run(10*time.Minute - time.Second)
	for left := 4; left > 0; left-- {
		if n := len(s.dev.model.State().Peers); n != left {
			t.Fatalf("%d peers at %v, want %d", n, s.now, left)
		}
		s.run(time.Minute)
		if left == 3 {
			s.run(time.Minute) // r's
		}
	}
}

func TestRule22_NoSecretInAnyText(t *testing.T) {
	s := newSim(t)
	s.dev.fail = func(op datapath.Op) error { return fmt.Errorf("failed: %v", op) }
	s.step(announce("10.5.0.0/16"))
	s.step(reset(good(rec("a", "10.1.0.0/16"))))
	s.run(time.Minute)
	s.dev.fail = nil
	s.run(time.Hour)
	secret := privateKey("m").Base64()
	text := strings.Join(s.log, "\n") + fmt.Sprintf("%v %+v %#v", s.m.View(), s.m.View(), s.m.View()) + fmt.Sprintf("%v %+v %#v", s.ops, s.ops, s.ops)
	text += fmt.Sprintf("%v %+v %#v", s.cfg, s.cfg, s.cfg)
	if len(secret) < 40 || strings.Contains(text, secret) || !strings.Contains(text, "set device") {
		t.Error("a private key is in a text")
	}
}

func TestRule23_NoDefaultRoutesUnlessAllowed(t *testing.T) {
	wide := rec("a", "0.0.0.0/0", "128.0.0.0/1", "10.0.0.0/8", "12.0.0.0/7", "::/0", "2000::/3", "2001::/16", "172.16.0.1/32", "127.0.0.1/32", "fe80::/64", "224.0.0.0/4")
	s := up(t, wide)
	s.wantPeers("a 10.0.0.0/8 172.16.0.1/32 2001::/16")
	for _, p := range []string{"0.0.0.0/0", "128.0.0.0/1", "12.0.0.0/7", "::/0", "2000::/3", "127.0.0.1/32", "fe80::/64", "224.0.0.0/4"} {
		s.wantCondition(view.PrefixRefused, "a", p)
	}
	s.step(put(good(rec("a", "0.0.0.0/0"))))
	if n := len(s.m.View().Conditions); n != 1 {
		t.Errorf("%d conditions for one prefix", n)
	}
	s.step(deleted("a"))
	s.wantNoCondition(view.PrefixRefused, "a", "")

	s = newSim(t, func(c *core.Config) { c.Accept = func(node string, p netip.Prefix) bool { return node == "a" } })
	s.start(wide, rec("b", "10.2.0.0/16"))
	s.wantPeers("a 0.0.0.0/0 10.0.0.0/8 12.0.0.0/7 128.0.0.0/1 172.16.0.1/32 ::/0 2000::/3 2001::/16", "b")
	s.wantCondition(view.PrefixRefused, "b", "10.2.0.0/16")
	s.wantCondition(view.PrefixRefused, "a", "127.0.0.1/32") // which no policy can allow
}

// A record has room for many thousand prefixes: what is wrong with them is a few lines, whatever order
// it comes in, and the View has all of it.
func TestConditionsAreFewHoweverManyPrefixes(t *testing.T) {
	many := func(id, under string) record.Record {
		r := rec(id)
		p := netip.MustParsePrefix(under)
		b := p.Addr().As4()
		var all []netip.Prefix
		for i := range 1000 {
			all = append(all, netip.PrefixFrom(netip.AddrFrom4([4]byte{b[0], b[1], byte(i >> 6), byte(i << 2)}), 30))
		}
		r.Prefixes = prefixes.Must(all...)
		return r
	}
	for _, test := range []struct {
		kind    view.Kind
		node    string
		under   string
		records []record.Record
	}{
		{view.PrefixRefused, "a", "169.254.0.0/16", []record.Record{many("a", "169.254.0.0/16")}},
		{view.PrefixConflict, "b", "10.1.0.0/16", []record.Record{many("b", "10.1.0.0/16"), many("a", "10.1.0.0/16")}},
		{view.LocalWins, "a", "10.250.0.0/16", []record.Record{many("a", "10.250.0.0/16")}},
	} {
		s := up(t)
		s.step(announce("10.250.0.0/16"))
		for _, r := range test.records {
			s.step(put(good(r)))
		}
		s.run(soon)
		if n := len(s.raised) + len(s.cleared); n != 9 {
			t.Errorf("%s: %d lines", test.kind, n)
		}
		want := []string{""}
		for i := range 8 {
			want = append(want, strings.TrimSuffix(test.under, "0/16")+fmt.Sprint(4*i)+"/30")
		}
		slices.Sort(want)
		var got []string
		for c := range s.m.View().Find(test.kind) {
			got = append(got, c.Subject)
			if c.Node != test.node || c.Subject == "" && !strings.Contains(c.Message, "992 more") {
				t.Errorf("there is %v", c)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", test.kind, got, want)
		}
		if n := len(s.m.View().Withheld); n != 1000 {
			t.Errorf("%s: %d withheld", test.kind, n)
		}

		// With fewer there is one for each again.
		first := test.records[0]
		var kept []netip.Prefix
		for p := range first.Prefixes.All() {
			kept = append(kept, p)
		}
		first.Prefixes = prefixes.Must(kept[500:503]...)
		s.step(put(good(first)))
		s.run(soon)
		got = nil
		for c := range s.m.View().Find(test.kind) {
			got = append(got, c.Subject)
		}
		want = nil
		for _, p := range kept[500:503] {
			want = append(want, p.String())
		}
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", test.kind, got, want)
		}
		s.step(deleted("a"))
		s.step(deleted("b"))
		if cs := s.m.View().Conditions; len(cs) != 0 {
			t.Errorf("left: %v", cs)
		}
	}
}

// Others do not choose what on this host, or on its link, is sent to.
func TestEndpointsOfTheHostItselfAreRefused(t *testing.T) {
	for _, test := range []struct {
		own, other string
		used       bool
	}{
		{"198.51.100.1:0", "127.0.0.1:53", false},
		{"198.51.100.1:0", "127.1.2.3:53", false},
		{"198.51.100.1:0", "[::1]:53", false},
		{"", "127.0.0.1:53", true}, // it may be tried out on one host, too
		{"127.0.0.1:0", "127.0.0.1:53", true},
		{"127.0.0.1:0", "[::1]:53", true},
		{"[::1]:0", "127.0.0.1:53", true},
		{"127.0.0.1:0", "0.0.0.1:53", false},
		{"127.0.0.1:0", "240.0.0.1:53", false},
		{"127.0.0.1:0", "169.254.169.254:80", false},
		{"127.0.0.1:0", "[fe80::1]:80", false},
		{"198.51.100.1:0", "192.168.1.1:80", true},
	} {
		s := newSim(t, func(c *core.Config) {
			c.Endpoints = nil
			if test.own != "" {
				c.Endpoints = []record.Endpoint{record.EndpointFrom(netip.MustParseAddrPort(test.own))}
			}
		})
		s.start(rec("a", test.other))
		p, ok := s.peer("a")
		if !ok || p.Endpoint.IsValid() != test.used {
			t.Errorf("%s, published to a node at %q, is sent to: %v, %v", test.other, test.own, p.Endpoint, ok)
		}
		if _, ok := s.condition(view.EndpointUnusable, "a", ""); ok == test.used {
			t.Errorf("%s, published to a node at %q: conditions %v", test.other, test.own, s.m.View().Conditions)
		}
	}
}

// Another program, or another mesh, that uses the same device is said to do so, and is not raced.
func TestADeviceThatIsContested(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16"))
	stranger := func() {
		s.dev.edit(func(st *datapath.State) { st.Device.Key = privateKey("stranger") })
		s.step(core.Touched{})
	}
	repairs := 0
	s.dev.after = func(op datapath.Op) {
		if _, ok := op.(datapath.SetDevice); ok {
			repairs++
		}
	}
	s.run(time.Minute)
	for range 100 { // it is back every time
		if s.dev.model.State().Device.Key == s.cfg.Key {
			stranger()
		}
		s.run(100 * time.Millisecond)
	}
	if repairs < 5 || repairs > 10 {
		t.Errorf("%d repairs in 10 s", repairs)
	}
	c, ok := s.condition(view.DeviceContested, "m", "")
	if !ok || !strings.Contains(c.Message, publicKey("stranger").Short()) || strings.Contains(c.Message, privateKey("stranger").Base64()) {
		t.Errorf("the condition is %v", c)
	}
	if len(s.raised) != 1 {
		t.Errorf("raised %v", s.raised)
	}
	s.run(s.cfg.Audit)
	s.wantCondition(view.DeviceContested, "m", "")
	s.run(2 * s.cfg.Audit)
	s.wantNoCondition(view.DeviceContested, "m", "")
	s.wantPeers("a 10.1.0.0/16")

	// One that is taken away is no contest.
	s.dev.vanish()
	s.run(s.cfg.Audit)
	s.wantNoCondition(view.DeviceContested, "m", "")
}

// Another program that keeps undoing something is not raced, and is said to do so; one that does so now and
// then is put right within a second.
func TestADeviceThatIsUndone(t *testing.T) {
	for what, undo := range map[string]func(*datapath.State){
		"route 10.1.0.0/16":               func(st *datapath.State) { delete(st.Routes, netip.MustParsePrefix("10.1.0.0/16")) },
		"peer " + publicKey("a").String(): func(st *datapath.State) { delete(st.Peers, publicKey("a")) },
	} {
		s := up(t, rec("a", "10.1.0.0/16"))
		s.run(time.Minute)
		ops := 0
		s.dev.after = func(datapath.Op) { ops++ }
		broken := func(d time.Duration) bool {
			was := ops
			s.dev.edit(undo)
			s.step(core.Touched{})
			s.run(d)
			return ops == was
		}
		for range 5 {
			if broken(time.Second) {
				t.Errorf("%s: undone for the first time in a while, and not put right within a second", what)
			}
			s.run(10 * s.cfg.Audit)
			s.wantNoCondition(view.DeviceContested, "m", "")
		}
		ops = 0
		for range 100 {
			broken(100 * time.Millisecond)
		}
		if ops < 5 || ops > 20 { // one or two a repair, which is one a second
			t.Errorf("%s: undone for 10 s, and put right with %d ops", what, ops)
		}
		c, ok := s.condition(view.DeviceContested, "m", "")
		if !ok || !strings.Contains(c.Message, what) {
			t.Errorf("%s: the condition is %v", what, c)
		}
		s.run(3 * s.cfg.Audit)
		s.wantNoCondition(view.DeviceContested, "m", "")
		s.wantPeers("a 10.1.0.0/16")
	}
}

// The port that peers know is put back, where another program changed it and any port would have done.
func TestAPortThatIsChanged(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16"))
	port := s.dev.model.State().Device.ListenPort
	for range 2 {
		s.dev.edit(func(st *datapath.State) { st.Device.ListenPort = port + 1 })
		s.step(core.Touched{})
		s.run(2 * time.Second)
		if got := s.dev.model.State().Device.ListenPort; got != port {
			t.Errorf("the port is %d, want %d", got, port)
		}
	}
}

// What fails is tried again soon once something around it changed, and a route once there is its address.
func TestWhatFailsIsHastened(t *testing.T) {
	s := newSim(t, func(c *core.Config) { c.Addresses = set("10.9.0.1/32") })
	broken, tries := true, 0
	s.dev.fail = func(op datapath.Op) error {
		switch op.(type) {
		case datapath.AddAddrs, datapath.AddRoutes:
			if tries++; broken {
				return errTest
			}
		}
		return nil
	}
	s.start(rec("a", "10.1.0.0/16"))
	s.run(10 * time.Minute) // as rarely as it gets
	broken = false
	s.step(core.Touched{})
	s.run(3 * time.Second)
	if st := s.dev.model.State(); st.Addrs.Len() != 1 || len(st.Routes) != 1 {
		t.Errorf("3 s after something changed: addresses %v, routes %v", st.Addrs, st.Routes)
	}
	s.wantNoCondition(view.OpFailed, "a", "route 10.1.0.0/16")

	// A host on which something changes all the time is no reason to try all the time.
	broken, tries = true, 0
	s.step(put(good(rec("a", "10.1.0.0/16", "10.2.0.0/16"))))
	s.run(10 * time.Minute)
	tries = 0
	for range 600 {
		s.step(core.Touched{})
		s.run(100 * time.Millisecond)
	}
	if tries > 14 {
		t.Errorf("%d tries in a minute", tries)
	}
}

// Nobody is given ::1 as a part of something wider. 127.0.0.0/8 has no wider prefix that is narrow enough.
func TestRule23_LoopbackInsideIsRefused(t *testing.T) {
	all := rec("a", "::/0", "::/8", "::/16", "::/96", "::/127", "1::/16", "0.0.0.0/0")
	s := newSim(t, func(c *core.Config) { c.Accept = func(string, netip.Prefix) bool { return true } })
	s.start(all)
	s.wantPeers("a 0.0.0.0/0 ::/0 1::/16")
	for _, p := range []string{"::/8", "::/16", "::/96", "::/127"} {
		s.wantCondition(view.PrefixRefused, "a", p)
	}
	s = up(t, all)
	s.wantPeers("a 1::/16")
}

// Whatever a record under this node's ID says, its counts do not begin anew.
func TestCountsDoNotWrap(t *testing.T) {
	s := newSim(t)
	s.step(announce())
	own := rec("m")
	own.Epoch, own.Generation, own.Sequence = math.MaxUint64, math.MaxUint64, math.MaxUint64
	s.step(reset(good(own)))
	s.run(soon)
	check := func() {
		t.Helper()
		if r := s.m.View().Self.Record; r.ID == "" || r.Epoch != math.MaxUint64 || r.Generation != math.MaxUint64 {
			t.Errorf("published is %+v", r)
		}
	}
	check()
	s.dev.vanish() // one device more
	s.step(core.Touched{})
	s.run(2 * s.cfg.Audit)
	check()
}

func TestRule24_SilenceIsNoFailure(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16", "203.0.113.1:1", "203.0.113.2:1"))
	s.run(24 * time.Hour) // nobody wants anything of a
	s.wantOps()
	s.wantNoCondition(view.NoHandshake, "a", "")

	s.dev.sends(publicKey("a"), 148)
	s.run(40 * time.Second)
	if s.endpoint() != "203.0.113.2:1" {
		t.Errorf("sent to at %v", s.endpoint())
	}
	s.wantNoCondition(view.NoHandshake, "a", "") // the other one is still to be tried
	s.dev.sends(publicKey("a"), 148)
	s.run(40 * time.Second)
	s.wantCondition(view.NoHandshake, "a", "")
}

// endpoint returns where peer a is sent to.
func (s *sim) endpoint() string {
	p, _ := s.peer("a")
	return p.Endpoint.String()
}

func TestEndpoints_TheNextIsTriedUntilOneAnswers(t *testing.T) {
	s := up(t, rec("a", "203.0.113.1:1", "203.0.113.2:1", "203.0.113.2:1", "203.0.113.3:1"))
	var tried []string
	var at []time.Time
	for range 40 {
		if e := s.endpoint(); len(tried) == 0 || tried[len(tried)-1] != e {
			tried, at = append(tried, e), append(at, s.now)
		}
		s.dev.sends(publicKey("a"), 148)
		s.run(time.Second)
	}
	want := []string{"203.0.113.1:1", "203.0.113.2:1", "203.0.113.3:1", "203.0.113.1:1"}
	if len(tried) < 4 || !slices.Equal(tried[:4], want) {
		t.Fatalf("tried %v", tried)
	}
	for i := 1; i < 4; i++ {
		if d := at[i].Sub(at[i-1]); d < 5*time.Second || d > 9*time.Second {
			t.Errorf("tried for %v", d)
		}
	}
	s.wantCondition(view.NoHandshake, "a", "")
	s.take()
	now := s.endpoint()
	s.dev.hears(publicKey("a"), s.now)
	s.run(2 * time.Second)
	s.wantNoCondition(view.NoHandshake, "a", "")
	s.run(time.Hour)
	s.wantOps()
	if s.endpoint() != now {
		t.Errorf("from %v to %v", now, s.endpoint())
	}
}

func TestEndpoints_RoamingIsKept(t *testing.T) {
	a := rec("a", "10.1.0.0/16", "203.0.113.1:1")
	s := up(t, a)
	s.dev.hears(publicKey("a"), s.now)
	s.dev.edit(func(st *datapath.State) {
		p := st.Peers[publicKey("a")]
		p.Endpoint = netip.MustParseAddrPort("198.51.100.99:9")
		st.Peers[publicKey("a")] = p
	})
	s.run(2 * time.Second)
	a = rec("a", "10.1.0.0/16", "203.0.113.1:1", "203.0.113.5:1", "10.2.0.0/16")
	s.step(put(good(a)))
	s.run(time.Minute)
	s.wantOps("put peer a + 10.2.0.0/16", "add routes 10.2.0.0/16")
	if s.endpoint() != "198.51.100.99:9" {
		t.Errorf("overwritten with %v", s.endpoint())
	}

	// A device created anew has lost its session, so its record says more than where it was.
	a.Generation++
	s.step(put(good(a)))
	s.run(soon)
	if s.endpoint() != "203.0.113.1:1" {
		t.Errorf("after the device was lost: %v", s.endpoint())
	}
	s.dev.hears(publicKey("a"), s.now)
	s.run(2 * time.Second)
	a.Generation++
	s.take()
	s.step(put(good(a))) // it still is where its record says
	s.run(soon)
	s.wantOps()
}

func TestEndpoints_AProvenOneThatFallsSilent(t *testing.T) {
	s := up(t, rec("a", "203.0.113.1:1", "203.0.113.2:1"))
	s.dev.hears(publicKey("a"), s.now)
	s.run(time.Hour)
	s.wantOps()
	s.dev.sends(publicKey("a"), 400) // data, and what WireGuard sends to ask why nothing comes
	s.run(20 * time.Second)
	s.wantOps() // an answer may still come
	s.run(20 * time.Second)
	s.wantCondition(view.NoHandshake, "a", "")
	if s.endpoint() != "203.0.113.2:1" {
		t.Errorf("still at %v", s.endpoint())
	}
	s.dev.hears(publicKey("a"), s.now)
	s.run(2 * time.Second)
	s.wantNoCondition(view.NoHandshake, "a", "")

	// With nowhere else to go it stays, is said, and is said to be over.
	s = up(t, rec("a", "203.0.113.1:1"))
	s.dev.hears(publicKey("a"), s.now)
	s.run(2 * time.Second)
	s.dev.sends(publicKey("a"), 400)
	s.run(40 * time.Second)
	s.wantCondition(view.NoHandshake, "a", "")
	s.wantOps()
	s.dev.hears(publicKey("a"), s.now)
	s.run(16 * time.Second)
	s.wantNoCondition(view.NoHandshake, "a", "")
}

// A device may not count what the host had no route for, as Linux does not: then it says so.
func TestEndpoints_WithoutARoute(t *testing.T) {
	s := up(t, rec("a", "[2001:db8::1]:1", "203.0.113.2:1"))
	noRoute := func(is bool) {
		st := s.dev.stats[publicKey("a")]
		st.NoRoute = is
		s.dev.stats[publicKey("a")] = st
	}
	s.dev.after = func(op datapath.Op) {
		if o, ok := op.(datapath.PutPeer); ok {
			noRoute(o.Peer.Endpoint.Addr().Is6())
		}
	}
	noRoute(true)
	s.run(3 * time.Second)
	if s.endpoint() != "203.0.113.2:1" {
		t.Fatalf("still at %v", s.endpoint())
	}
	s.wantNoCondition(view.NoHandshake, "a", "") // the other one is still to be tried
	s.dev.hears(publicKey("a"), s.now)
	s.run(24 * time.Hour)
	s.wantNoCondition(view.NoHandshake, "a", "")
	s.take()

	// The route to a proven one is lost: for a while that means nothing.
	noRoute(true)
	s.run(20 * time.Second)
	noRoute(false)
	s.run(time.Minute)
	noRoute(true)
	s.run(20 * time.Second)
	s.wantOps()
	s.wantNoCondition(view.NoHandshake, "a", "")
	noRoute(false)
	s.run(time.Minute)
	s.dev.after = func(datapath.Op) { noRoute(true) } // neither has one
	noRoute(true)
	s.run(time.Minute)
	c, _ := s.condition(view.NoHandshake, "a", "")
	if !strings.Contains(c.Message, "no route to ") || !strings.Contains(c.Remedy, "network is up") {
		t.Errorf("condition %v", c)
	}
	s.take()
	s.run(time.Hour)
	if n := len(s.take()); n > 3600/15+60 {
		t.Errorf("%d ops in an hour", n)
	}

	// With nowhere else to go it stays. The condition is over when there is a route, though nobody sends anything.
	s = up(t, rec("a", "203.0.113.2:1"))
	noRoute(true)
	s.run(time.Minute)
	s.wantCondition(view.NoHandshake, "a", "")
	s.dev.hears(publicKey("a"), s.now)
	noRoute(false)
	s.run(time.Minute)
	s.wantNoCondition(view.NoHandshake, "a", "")
	noRoute(true)
	s.run(time.Minute)
	s.wantCondition(view.NoHandshake, "a", "")
	noRoute(false)
	s.run(time.Minute)
	s.wantNoCondition(view.NoHandshake, "a", "")
	s.wantOps()
}

// An answer may come between the reading that finds a candidate silent and the change to the next one. It proves the
// one that it came from.
func TestEndpoints_AnAnswerThatIsLate(t *testing.T) {
	for _, late := range []bool{true, false} {
		s := up(t, rec("a", "203.0.113.1:1", "203.0.113.2:1"))
		s.dev.sends(publicKey("a"), 148)
		s.run(2 * time.Second)
		s.planned = func([]datapath.Op) { // the next is about to be put
			s.planned = nil
			if late {
				s.dev.hears(publicKey("a"), s.now.Add(-time.Millisecond))
			} else {
				s.dev.hears(publicKey("a"), s.now.Add(time.Millisecond))
			}
		}
		s.run(30 * time.Second)
		want := map[bool]string{true: "203.0.113.1:1", false: "203.0.113.2:1"}[late]
		if s.planned != nil || s.endpoint() != want {
			t.Errorf("late is %v: at %v", late, s.endpoint())
		}
		s.wantNoCondition(view.NoHandshake, "a", "")
		s.take()
		s.run(time.Hour)
		s.wantOps()
	}
}

// Keepalives that nobody has to answer are no sign that an endpoint is dead.
func TestEndpoints_KeepalivesAreNoSilence(t *testing.T) {
	s := newSim(t, func(c *core.Config) { c.Endpoints = nil })
	s.start(rec("a", "203.0.113.1:1", "203.0.113.2:1"))
	s.dev.hears(publicKey("a"), s.now)
	s.run(2 * time.Second)
	s.take()
	for range 100 {
		s.dev.sends(publicKey("a"), 32)
		s.run(25 * time.Second)
	}
	s.wantOps()
	s.wantNoCondition(view.NoHandshake, "a", "")
}

func TestEndpoints_APeerThatTheDeviceLost(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16", "203.0.113.1:1"))
	s.dev.hears(publicKey("a"), s.now)
	s.run(2 * time.Second)
	s.dev.edit(func(st *datapath.State) { delete(st.Peers, publicKey("a")) })
	delete(s.dev.stats, publicKey("a"))
	s.step(core.Touched{})
	s.run(2 * time.Second)
	s.wantPeers("a 10.1.0.0/16")
	if s.endpoint() != "203.0.113.1:1" {
		t.Errorf("back at %v", s.endpoint())
	}
}

func TestEndpoints_OnlyThoseTheHostCanSendTo(t *testing.T) {
	a := rec("a", "[2001:db8::1]:1", "203.0.113.1:1", "[fe80::1%eth0]:1", "example.net:1")
	for _, test := range []struct {
		host datapath.Host
		want string
	}{
		{datapath.Host{IPv4: true, IPv6: true}, "[2001:db8::1]:1"},
		{datapath.Host{IPv4: true}, "203.0.113.1:1"},
		{datapath.Host{IPv6: true}, "[2001:db8::1]:1"},
		{datapath.Host{}, "invalid AddrPort"},
	} {
		s := newSim(t)
		s.dev.host = test.host
		s.start(a)
		if s.endpoint() != test.want {
			t.Errorf("host %+v: sent to at %v", test.host, s.endpoint())
		}
		if _, ok := s.condition(view.EndpointUnusable, "a", ""); ok != (test.want == "invalid AddrPort") {
			t.Errorf("host %+v: conditions %v", test.host, s.m.View().Conditions)
		}
	}
	// The host gets IPv4, and loses it.
	s := newSim(t)
	s.dev.host = datapath.Host{IPv6: true}
	s.start(rec("a", "203.0.113.1:1"))
	s.wantCondition(view.EndpointUnusable, "a", "")
	s.dev.host.IPv4 = true
	s.run(s.cfg.Audit)
	if s.endpoint() != "203.0.113.1:1" {
		t.Errorf("sent to at %v", s.endpoint())
	}
	s.wantNoCondition(view.EndpointUnusable, "a", "")
}

func TestEndpoints_ThisNodesOwnIsNobodys(t *testing.T) {
	s := up(t, rec("a", "198.51.100.1:40000", "203.0.113.1:1")) // the first is this node's
	if s.endpoint() != "203.0.113.1:1" {
		t.Errorf("a is sent to at %v", s.endpoint())
	}
}

func TestEndpoints_TheRecordNamesOthersBeforeOneAnswered(t *testing.T) {
	s := up(t, rec("a", "203.0.113.1:1", "203.0.113.2:1"))
	s.step(put(good(rec("a", "203.0.113.3:1", "203.0.113.1:1"))))
	s.run(soon)
	s.wantOps() // the one on trial is still named
	s.step(put(good(rec("a", "203.0.113.3:1"))))
	s.run(soon)
	if s.endpoint() != "203.0.113.3:1" {
		t.Errorf("sent to at %v", s.endpoint())
	}
	// What was tried before is not held against it.
	s.dev.sends(publicKey("a"), 148)
	s.run(4 * time.Second)
	s.step(put(good(rec("a", "203.0.113.5:1", "203.0.113.6:1"))))
	s.run(soon)
	s.dev.sends(publicKey("a"), 148)
	s.run(3 * time.Second)
	if s.endpoint() != "203.0.113.5:1" {
		t.Errorf("sent to at %v", s.endpoint())
	}
	s.run(5 * time.Second)
	if s.endpoint() != "203.0.113.6:1" {
		t.Errorf("sent to at %v", s.endpoint())
	}
	s.step(put(good(rec("a"))))
	s.run(soon)
	s.step(put(good(rec("a", "203.0.113.4:1"))))
	s.run(soon)
	if s.endpoint() != "203.0.113.4:1" {
		t.Errorf("sent to at %v", s.endpoint())
	}
}

func TestKeepalive(t *testing.T) {
	for _, test := range []struct {
		keepalive time.Duration
		callable  bool
		want      time.Duration
	}{
		{0, true, 0}, {0, false, core.KeepaliveNAT}, {7 * time.Second, true, 7 * time.Second}, {-1, false, 0},
	} {
		s := newSim(t, func(c *core.Config) {
			c.Keepalive = test.keepalive
			if !test.callable {
				c.Endpoints = nil
			}
		})
		s.start(rec("a"))
		if p, _ := s.peer("a"); p.Keepalive != test.want {
			t.Errorf("%+v: keepalive %v", test, p.Keepalive)
		}
	}
}

func TestPorts(t *testing.T) {
	port := func(s *sim) uint16 { return s.dev.model.State().Device.ListenPort }
	ports := func(first, last uint16) func(*core.Config) {
		return func(c *core.Config) { c.PortFirst, c.PortLast = first, last }
	}
	t.Run("any", func(t *testing.T) {
		s := up(t)
		if port(s) == 0 || s.m.View().Self.Record.Endpoints[0].Port != port(s) {
			t.Errorf("port %d, announced %v", port(s), s.m.View().Self.Record.Endpoints)
		}
	})
	t.Run("fixed", func(t *testing.T) {
		s := newSim(t, ports(5000, 5000))
		s.dev.taken[5000] = true
		s.step(announce())
		s.step(reset())
		s.run(time.Hour)
		s.wantCondition(view.PortInUse, "m", "")
		s.wantNoCondition(view.OpFailed, "m", "")
		if n := len(s.take()); n < 60 || n > 90*3 {
			t.Errorf("%d ops in an hour", n)
		}
		delete(s.dev.taken, 5000)
		s.run(75 * time.Second)
		s.wantNoCondition(view.PortInUse, "m", "")
		if port(s) != 5000 {
			t.Errorf("port %d", port(s))
		}
	})
	t.Run("range", func(t *testing.T) {
		s := newSim(t, ports(5000, 5003))
		for p := uint16(5000); p < 5003; p++ {
			s.dev.taken[p] = true
		}
		s.start()
		if port(s) != 5003 {
			t.Errorf("port %d", port(s))
		}
		s.wantNoCondition(view.PortInUse, "m", "")
		if e := s.m.View().Self.Record.Endpoints[0]; e.Port != 5003 {
			t.Errorf("announced %v", e)
		}
	})
	t.Run("whole range taken", func(t *testing.T) {
		s := newSim(t, ports(5000, 5003))
		for p := uint16(5000); p <= 5003; p++ {
			s.dev.taken[p] = true
		}
		var tried []time.Time
		s.dev.after = func(op datapath.Op) {
			if o, ok := op.(datapath.SetDevice); ok && o.Device.ListenPort == 5000 {
				tried = append(tried, s.now)
			}
		}
		s.step(announce())
		s.step(reset())
		s.run(10 * time.Minute)
		for i := 1; i < len(tried); i++ {
			want := min(time.Second<<min(i-1, 10), time.Minute)
			if got := tried[i].Sub(tried[i-1]); got < want*3/4 || got > want*5/4 {
				t.Errorf("round %d after %v, want %v", i, got, want)
			}
		}
		if len(tried) < 10 {
			t.Errorf("%d rounds", len(tried))
		}
		s.wantCondition(view.PortInUse, "m", "")
	})
	t.Run("adopted", func(t *testing.T) {
		d := found()
		d.edit(func(st *datapath.State) { st.Device.ListenPort = 5002 })
		s := simOn(t, d, ports(5000, 5003))
		s.step(announce())
		s.run(time.Minute)
		s.wantOps()
	})
}

func TestRecord_PutAgainWhenLost(t *testing.T) {
	s := up(t)
	s.run(time.Minute)
	s.bare = true
	for _, lose := range []core.Records{deleted("m"), reset()} {
		s.step(lose)
		if len(s.puts) != 1 || !record.Equal(s.puts[0], s.m.View().Self.Record) || !s.m.View().Self.Published {
			t.Fatalf("after %+v: put %v", lose, s.puts)
		}
		s.take()
		s.run(time.Minute)
		s.wantOps()
		if len(s.puts) != 0 {
			t.Errorf("put again: %v", s.puts)
		}
	}
	// Lost again and again, as by another's cleaning: once a second.
	for range 100 {
		s.step(deleted("m"))
		s.run(100 * time.Millisecond)
	}
	if n := len(s.puts); n < 9 || n > 11 {
		t.Errorf("put %d times in 10 s", n)
	}
}

func TestRecord_PutAgainAfterTheStoreWasRestored(t *testing.T) {
	s := up(t)
	s.step(announce("10.5.0.0/16"))
	s.run(soon)
	was := s.m.View().Self.Record
	old := was
	old.Sequence--
	old.Prefixes = prefixes.Set{}
	s.run(time.Minute)
	s.take()
	s.step(put(good(old))) // late, that is all
	s.run(time.Second)
	s.step(put(good(was)))
	s.run(time.Minute)
	if len(s.puts) != 0 {
		t.Errorf("put %v", s.puts)
	}
	s.step(put(good(old))) // somebody put it back
	s.run(time.Minute)
	if len(s.puts) != 1 || !record.Equal(s.puts[0], was) {
		t.Errorf("put %v", s.puts)
	}
	s.step(put(good(was)))
	s.run(time.Minute)
	s.take()
	s.step(reset(good(old)))
	if len(s.puts) != 1 || !record.Equal(s.puts[0], was) {
		t.Errorf("put %v", s.puts)
	}
}

// Two processes publish as one node: each puts its record back, at most twice a minute.
func TestRecord_ContestedByADuplicate(t *testing.T) {
	s := up(t)
	foreign := rec("m")
	foreign.Instance = "77"
	s.run(time.Minute)
	s.putTimes = nil
	for range 600 { // the other one is quick
		s.step(put(good(foreign)))
		s.run(time.Second)
	}
	for i := range s.putTimes {
		n := 0
		for _, at := range s.putTimes[i:] {
			if at.Before(s.putTimes[i].Add(time.Minute)) {
				n++
			}
		}
		if n > 2 {
			t.Fatalf("put %d times in a minute: %v", n, s.putTimes)
		}
	}
	if n := len(s.putTimes); n < 15 {
		t.Errorf("put %d times in 10 minutes: it gave up", n)
	}
	s.wantCondition(view.DuplicateNode, "m", "")
	s.run(3 * time.Minute) // the other one is gone
	s.wantNoCondition(view.DuplicateNode, "m", "")
	if !s.m.View().Self.Published {
		t.Error("not published")
	}
}

// A record of this node's that its own trust does not believe is replaced, as slowly.
func TestRecord_ContestedByRubbish(t *testing.T) {
	s := up(t)
	s.run(time.Minute)
	s.putTimes = nil
	for range 600 {
		s.step(put(bad("m", identity.ErrRevoked)))
		s.run(time.Second)
	}
	if n := len(s.putTimes); n < 15 || n > 22 {
		t.Errorf("put %d times in 10 minutes", n)
	}
	s.wantCondition(view.RecordRefused, "m", "")
	s.step(put(good(s.m.View().Self.Record)))
	s.wantNoCondition(view.RecordRefused, "m", "")
}

// The event of another's record may arrive after this node's replaced it: then there is nothing to do.
func TestRecord_SeenAgainEndsTheContest(t *testing.T) {
	s := up(t)
	foreign := rec("m")
	foreign.Instance = "77"
	s.run(time.Minute)
	s.take()
	s.step(put(good(foreign)))
	s.step(put(good(s.m.View().Self.Record)))
	s.run(time.Minute)
	if len(s.puts) != 0 || !s.m.View().Self.Published {
		t.Errorf("put %v, published %v", s.puts, s.m.View().Self.Published)
	}
}

// Nothing can be published while there is no device, and the wait for it is not a busy one.
func TestRecord_NotWithoutADevice(t *testing.T) {
	s := newSim(t)
	s.dev.unread = errTest
	s.step(announce())
	s.step(reset(bad("m", errTest)))
	s.run(time.Hour)
	if len(s.puts) > 0 {
		t.Errorf("put %v", s.puts)
	}
	s.dev.unread = nil
	s.run(75 * time.Second)
	if len(s.puts) == 0 {
		t.Error("never put")
	}

	s.dev.fail = func(datapath.Op) error { return errTest }
	s.dev.vanish()
	s.run(time.Minute)
	s.take()
	s.step(deleted("m"))
	s.run(time.Hour)
	if len(s.puts) > 0 {
		t.Errorf("put %v without a device", s.puts)
	}
}

func TestRecord_ThePublishersFailureIsShown(t *testing.T) {
	s := newSim(t)
	s.unput = errTest
	s.start()
	s.wantCondition(view.PublishFailed, "m", "")
	if s.m.View().Self.Published {
		t.Error("published")
	}
	s.unput = nil
	s.answerPut()
	s.wantNoCondition(view.PublishFailed, "m", "")
	if !s.m.View().Self.Published {
		t.Error("not published")
	}
}

func TestRevoked_RemovedAtOnce(t *testing.T) {
	a := rec("a", "10.1.0.0/16", "0.0.0.0/0")
	s := up(t, a, rec("b", "10.1.0.0/16"))
	s.step(put(bad("a", fmt.Errorf("certificate 7: %w", identity.ErrRevoked))))
	s.run(soon)
	s.wantPeers("b 10.1.0.0/16")
	s.wantCondition(view.RecordRefused, "a", "")
	if n := len(s.m.View().Conditions); n != 1 {
		t.Errorf("conditions %v", s.m.View().Conditions)
	}
	s.step(deleted("a"))
	s.wantNoCondition(view.RecordRefused, "a", "")
	s.step(put(good(a))) // enrolled again
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16", "b")
}

// One record that is not believed is shown, and all others are as before.
func TestMalformed_OneRecordHurtsNobodyElse(t *testing.T) {
	noKey := rec("x", "10.2.0.0/16")
	noKey.Key = key.Public{}
	s := up(t, rec("a", "10.1.0.0/16"), rec("b", "10.2.0.0/16"))
	s.step(put(bad("a", errTest), good(rec("c", "10.3.0.0/16")), bad("never", errTest), good(noKey)))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16", "b 10.2.0.0/16", "c 10.3.0.0/16") // of a the last good one
	for _, id := range []string{"a", "never", "x"} {
		s.wantCondition(view.RecordRefused, id, "")
	}
	c, _ := s.condition(view.RecordRefused, "a", "")
	if !strings.Contains(c.Message, errTest.Error()) || !strings.Contains(c.Message, "last good one") || !c.Since.Equal(s.now.Add(-soon)) {
		t.Errorf("condition %v since %v", c, c.Since)
	}
	s.step(put(bad("a", errors.New("worse")))) // it is the same condition, in other words
	if d, _ := s.condition(view.RecordRefused, "a", ""); d.Since != c.Since || !strings.Contains(d.Message, "worse") {
		t.Errorf("condition %v since %v", d, d.Since)
	}
	s.step(reset(good(rec("a", "10.1.0.0/16")), good(rec("b", "10.2.0.0/16")), good(rec("c", "10.3.0.0/16"))))
	if cs := s.m.View().Conditions; len(cs) > 0 {
		t.Errorf("conditions %v", cs)
	}
}

func TestSources(t *testing.T) {
	table := prefixes.NewTable()
	say := func(source string, as ...prefixes.Announcement) core.Announced {
		_ = table.Announce(source, as...)
		snap, _ := table.Current()
		return core.Announced{Snapshot: snap}
	}
	p := netip.MustParsePrefix("10.5.0.0/16")
	s := newSim(t, func(c *core.Config) { c.Addresses = set("10.9.0.1/32") })
	s.start(rec("a", "10.1.0.0/16", "2001:db8::/32"))
	s.step(say("pods", prefixes.Announcement{Prefix: p, Source: netip.MustParseAddr("10.5.0.1")}))
	s.run(soon)
	s.wantOps("add addresses 10.5.0.1/32", "add local 10.5.0.0/16", "add routes 10.1.0.0/16 from 10.5.0.1")
	s.step(say("pods", prefixes.Announcement{Prefix: p, Source: netip.MustParseAddr("10.6.0.1")}))
	s.run(soon)
	s.wantOps("add routes 10.1.0.0/16 from 10.9.0.1", "remove addresses 10.5.0.1/32")
	s.wantCondition(view.SourceOutside, "m", "10.6.0.1")
	s.step(say("pods", prefixes.Announcement{Prefix: p}, prefixes.Announcement{}))
	s.run(soon)
	s.wantNoCondition(view.SourceOutside, "m", "")
	if n := len(s.m.View().Conditions); n != 1 {
		t.Errorf("conditions %v", s.m.View().Conditions)
	}
	s.step(say("pods"))
	s.wantNoCondition(view.AnnouncementRefused, "m", "")
}

// The address of an announced prefix is put where the host has it nowhere else, and goes when its prefix is
// not accepted any more.
func TestSourceThatTheHostHas(t *testing.T) {
	table := prefixes.NewTable()
	say := func(as ...prefixes.Announcement) core.Announced {
		_ = table.Announce("pods", as...)
		snap, _ := table.Current()
		return core.Announced{Snapshot: snap}
	}
	pods := prefixes.Announcement{Prefix: netip.MustParsePrefix("10.5.0.0/16"), Source: netip.MustParseAddr("10.5.0.1")}
	has := func(has string) prefixes.Set {
		if has == "" {
			return prefixes.Set{}
		}
		return set(has)
	}
	s := newSim(t, func(c *core.Config) { c.Addresses, c.Linger = set("10.9.0.1/32"), 3*time.Second })
	host := func(elsewhere string) {
		s.dev.host.Addrs = has(elsewhere)
		s.step(core.Touched{})
		s.run(2 * time.Second)
	}
	want := func(what, addrs string) {
		t.Helper()
		if got := s.dev.model.State().Addrs; got != prefixes.MustParse(strings.Fields(addrs)...) {
			t.Errorf("%s: addresses %v, want %v", what, got, addrs)
		}
	}
	s.start(rec("a", "10.1.0.0/16"))
	host("10.5.0.1/32")
	s.step(say(pods))
	s.run(soon)
	want("a bridge has it", "10.9.0.1")
	s.wantOps("add local 10.5.0.0/16", "add routes 10.1.0.0/16 from 10.5.0.1")
	host("")
	want("the bridge is gone", "10.9.0.1 10.5.0.1")
	host("10.5.0.1/32")
	want("the bridge is back", "10.9.0.1 10.5.0.1")
	s.dev.edit(func(st *datapath.State) { st.Addrs = set("10.9.0.1/32") })
	host("10.5.0.1/32")
	want("the bridge is back, and somebody took ours away", "10.9.0.1")
	host("")
	s.step(say())
	s.run(2 * time.Second)
	want("withdrawn, and still accepted", "10.9.0.1 10.5.0.1")
	s.run(3 * time.Second)
	want("withdrawn", "10.9.0.1")
}

// A burst is one write.
func TestWindow(t *testing.T) {
	s := up(t)
	applies := 0
	s.planned = func([]datapath.Op) { applies++ }
	for i := range 100 {
		s.step(put(good(rec("a", fmt.Sprintf("10.%d.0.0/16", i)))))
		s.run(90 * time.Microsecond)
	}
	s.run(soon)
	if applies != 1 {
		t.Errorf("%d applies", applies)
	}
	s.wantPeers("a 10.99.0.0/16")
}

// Another program that keeps undoing is repaired, and not raced.
func TestTouched(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16"))
	s.run(time.Minute)
	was := s.dev.reads
	for range 100 {
		s.dev.edit(func(st *datapath.State) { delete(st.Peers, publicKey("a")) })
		s.step(core.Touched{})
		s.run(100 * time.Millisecond)
	}
	s.run(2 * time.Second)
	s.wantPeers("a 10.1.0.0/16")
	if n := s.dev.reads - was; n < 9 || n > 13 {
		t.Errorf("read %d times in 12 s", n)
	}
}

// A prefix that everyone announces by mistake costs no more than the one that comes or goes.
func TestManyClaimsToOnePrefix(t *testing.T) {
	in := core.Records{Reset: true}
	for i := range 2000 {
		id := fmt.Sprintf("n%04d", i)
		in.Put = append(in.Put, good(withKey(rec(id, "172.17.0.0/16"), id)))
	}
	s := newSim(t)
	s.step(announce())
	s.step(in)
	s.run(soon)
	s.take()
	s.step(deleted("n1000"))
	if len(s.cleared) != 1 || len(s.raised) != 0 {
		t.Errorf("%d cleared, %d raised", len(s.cleared), len(s.raised))
	}
	s.step(deleted("n0000"))
	s.run(soon)
	if p, _ := s.m.View().Peer("n0001"); !p.Prefixes.Has(netip.MustParsePrefix("172.17.0.0/16")) {
		t.Error("nobody has it")
	}
	c, _ := s.condition(view.PrefixConflict, "n1999", "")
	if !strings.Contains(c.Message, "n0001") {
		t.Errorf("condition %v", c)
	}
}

// An address goes after the routes from it: a host would drop them with it.
func TestRule04_AnAddressWaitsForItsRoutes(t *testing.T) {
	d := found()
	old, p := netip.MustParseAddr("10.9.0.8"), netip.MustParsePrefix("10.1.0.0/16")
	d.edit(func(st *datapath.State) {
		st.Addrs = set("10.9.0.8/32")
		st.Routes[p] = old
	})
	s := simOn(t, d, func(c *core.Config) { c.Addresses = set("10.9.0.9/32") })
	broken := true
	d.fail = func(op datapath.Op) error {
		if _, ok := op.(datapath.AddRoutes); ok && broken {
			return errTest
		}
		return nil
	}
	s.step(announce())
	s.step(reset(good(rec("a", "10.1.0.0/16"))))
	s.run(time.Minute)
	if st := d.model.State(); st.Routes[p] != old || st.Addrs != set("10.9.0.8/32", "10.9.0.9/32") {
		t.Errorf("routes %v, addresses %v", st.Routes, st.Addrs)
	}
	broken = false
	s.run(75 * time.Second)
	if st := d.model.State(); st.Routes[p].String() != "10.9.0.9" || st.Addrs != set("10.9.0.9/32") {
		t.Errorf("routes %v, addresses %v", st.Routes, st.Addrs)
	}
}

// A driver that blames an op it was not given is taken to have done none.
func TestRule04_AnErrorAboutAnotherOp(t *testing.T) {
	s := up(t)
	s.dev.whole = &datapath.OpError{Op: datapath.RemovePeer{Key: publicKey("z")}, Err: errTest}
	s.step(put(good(rec("a", "10.1.0.0/16"))))
	s.run(time.Hour)
	if n := len(s.take()); n < 50 || n > 200 {
		t.Errorf("%d ops in an hour", n)
	}
	s.dev.whole = nil
	s.run(75 * time.Second)
	s.wantPeers("a 10.1.0.0/16")
	if cs := s.m.View().Conditions; len(cs) > 0 {
		t.Errorf("conditions %v", cs)
	}
}

// A prefix is in the View when packets to it get there.
func TestView_OnlyWhatTheDeviceHas(t *testing.T) {
	s := newSim(t)
	s.dev.fail = func(op datapath.Op) error {
		if _, ok := op.(datapath.AddRoutes); ok {
			return errTest
		}
		return nil
	}
	s.step(announce("10.5.0.0/16"))
	s.step(reset(good(rec("a", "10.1.0.0/16"))))
	p, ok := s.m.View().Peer("a")
	if !ok || !p.Prefixes.IsEmpty() {
		t.Errorf("before it was put: %v", p.Prefixes)
	}
	s.run(soon)
	if p, _ := s.m.View().Peer("a"); !p.Prefixes.IsEmpty() {
		t.Errorf("without a route: %v", p.Prefixes)
	}
	s.dev.fail = nil
	s.run(2 * time.Second)
	if p, _ := s.m.View().Peer("a"); p.Prefixes != set("10.1.0.0/16") {
		t.Errorf("with one: %v", p.Prefixes)
	}
	v := s.m.View()
	if v.Self.ListenPort != 40000 || v.Self.MTU != 1420 || v.Self.Node != "m" || v.Self.Key != publicKey("m") {
		t.Errorf("self %+v", v.Self)
	}
}

// What carries the packets, and why nothing better does, is what the newest reading says.
func TestView_Datapath(t *testing.T) {
	s := newSim(t)
	if self := s.m.View().Self; self.Datapath != "" || self.Instead != "" {
		t.Errorf("before the first reading: %q, %q", self.Datapath, self.Instead)
	}
	s.dev.host.Driver = "kernel"
	s.start(rec("a", "10.1.0.0/16"))
	was := s.m.View()
	if was.Self.Datapath != "kernel" || was.Self.Instead != "" {
		t.Errorf("at first: %q, %q", was.Self.Datapath, was.Self.Instead)
	}
	for _, change := range []func(){
		func() { s.dev.host.Driver = "tun" },
		func() { s.dev.host.Instead = "the kernel has no WireGuard" },
		func() { s.dev.host.Instead = "" },
		func() { s.dev.host.Driver = "" },
	} {
		change()
		s.run(s.cfg.Audit)
		v := s.m.View()
		if v.Self.Datapath != s.dev.host.Driver || v.Self.Instead != s.dev.host.Instead || v.Version != was.Version+1 {
			t.Errorf("version %d after %d: %q, %q, want %+v", v.Version, was.Version, v.Self.Datapath, v.Self.Instead, s.dev.host)
		}
		was = v
	}
	s.wantOps()
}

// problemsOf returns what a View says of the host, by subject.
func problemsOf(v view.View) map[string]view.Condition {
	cs := make(map[string]view.Condition)
	for c := range v.Find(view.HostProblem) {
		cs[c.Subject] = c
	}
	return cs
}

// read has the device read, once.
func (s *sim) read() {
	s.t.Helper()
	was := s.dev.tries
	s.step(core.Touched{})
	s.run(2 * time.Second)
	if s.dev.tries == was {
		s.t.Fatalf("the device was not read")
	}
}

func TestHostProblems(t *testing.T) {
	s := up(t)
	filter := datapath.Problem{Subject: "rp_filter of eth0", Message: "it is strict", Remedy: "set it to 2"}
	mtu := datapath.Problem{Subject: "mtu", Message: "1280 bytes are less than 1420"}
	s.dev.problems = []datapath.Problem{filter, mtu}
	s.read()
	first := s.m.View()
	is := problemsOf(first)
	if c := is[filter.Subject]; len(is) != 2 || c.Node != "m" || c.Message != filter.Message || c.Remedy != filter.Remedy || c.Since.Before(epoch) {
		t.Errorf("there are %v", is)
	}
	if len(s.raised) != 2 || len(s.cleared) != 0 {
		t.Errorf("raised %v, cleared %v", s.raised, s.cleared)
	}

	// The same once more, in another order.
	s.take()
	s.dev.problems = []datapath.Problem{mtu, filter}
	s.read()
	s.run(time.Minute)
	if v := s.m.View(); v.Version != first.Version || len(s.raised)+len(s.cleared) > 0 {
		t.Errorf("version %d after %d, raised %v, cleared %v", v.Version, first.Version, s.raised, s.cleared)
	}

	// Other words are no other problem.
	mtu.Message = "1300 bytes are less than 1420"
	s.dev.problems = []datapath.Problem{filter, mtu}
	s.read()
	v := s.m.View()
	if c := problemsOf(v)["mtu"]; c.Message != mtu.Message || !c.Since.Equal(is["mtu"].Since) || v.Version != first.Version+1 || len(s.raised)+len(s.cleared) > 0 {
		t.Errorf("version %d after %d: %v, raised %v, cleared %v", v.Version, first.Version, c, s.raised, s.cleared)
	}

	// A device that cannot be read says nothing of what is over.
	s.dev.unread = errTest
	s.dev.problems = nil
	s.run(time.Minute)
	s.wantCondition(view.DeviceUnreadable, "m", "")
	if is := problemsOf(s.m.View()); len(is) != 2 {
		t.Errorf("of a device that cannot be read there are %v", is)
	}
	s.dev.unread = nil
	s.dev.problems = []datapath.Problem{filter}
	s.take()
	s.run(2 * time.Minute)
	if is := problemsOf(s.m.View()); len(is) != 1 || len(s.cleared) != 2 {
		t.Errorf("there are %v, cleared %v", is, s.cleared)
	}

	// They are the host's, whatever becomes of the device.
	s.take()
	s.dev.vanish()
	s.run(time.Minute)
	if is := problemsOf(s.m.View()); len(is) != 1 || len(s.raised)+len(s.cleared) > 0 {
		t.Errorf("of another device there are %v, raised %v, cleared %v", is, s.raised, s.cleared)
	}
	s.dev.problems = nil
	s.read()
	if is := problemsOf(s.m.View()); len(is) != 0 || len(s.cleared) != 1 {
		t.Errorf("there are %v, cleared %v", is, s.cleared)
	}
}

func TestHostProblems_ManyAreCounted(t *testing.T) {
	s := up(t)
	for _, n := range []int{16, 17, 1000, 18, 3, 1000, 0} {
		s.dev.problems = nil
		for i := range n {
			s.dev.problems = append(s.dev.problems, datapath.Problem{Subject: fmt.Sprintf("thing %04d", n-i), Message: "is wrong"})
		}
		s.take()
		s.read()
		is := problemsOf(s.m.View())
		if want := min(n, 17); len(is) != want {
			t.Errorf("of %d problems there are %d conditions, want %d", n, len(is), want)
		}
		if c, counted := is[""]; counted != (n > 16) || counted && !strings.Contains(c.Message, fmt.Sprintf(" %d more ", n-16)) {
			t.Errorf("of %d problems the rest is %v", n, c)
		}
		if lines := len(s.raised) + len(s.cleared); lines > 17 {
			t.Errorf("%d problems are %d lines", n, lines)
		}
	}
}

// Two problems with one subject, and such without, are against the contract. They are shown all the same,
// and are no news at each reading.
func TestHostProblems_AgainstTheContract(t *testing.T) {
	s := up(t)
	s.dev.problems = []datapath.Problem{{Subject: "mtu", Message: "b"}, {Message: "no subject"}, {Subject: "mtu", Message: "a"}}
	s.read()
	was := s.m.View()
	if is := problemsOf(was); len(is) != 2 || is["mtu"].Message != "a" || is["host"].Message != "no subject" {
		t.Errorf("there are %v", is)
	}
	slices.Reverse(s.dev.problems)
	s.read()
	if v := s.m.View(); v.Version != was.Version {
		t.Errorf("version %d after %d", v.Version, was.Version)
	}
}

// The version of the View rises with what it shows, and with nothing else.
func TestView_Version(t *testing.T) {
	a := rec("a", "10.1.0.0/16")
	s := up(t, a)
	s.run(s.cfg.Audit)
	was := s.m.View().Version
	s.step(put(good(a)))
	s.step(core.Tick{})
	s.step(reset(good(a), good(s.m.View().Self.Record)))
	s.step(announce())
	s.run(s.cfg.Audit)
	if v := s.m.View().Version; v != was {
		t.Errorf("version %d after %d", v, was)
	}
	in := put()
	in.Revision = 9
	s.step(in)
	if v := s.m.View(); v.Version != was+1 || v.Revision != 9 {
		t.Errorf("version %d after %d, revision %d", v.Version, was, v.Revision)
	}
}

// A wall clock that was wrong and is set back brings records back that seemed to be over.
func TestRule19_AClockSetBack(t *testing.T) {
	o := good(rec("a", "10.1.0.0/16"))
	o.NotAfter = epoch.Add(5 * time.Minute)
	s := up(t)
	s.step(put(o))
	s.run(10 * time.Minute)
	s.wantPeers()
	s.lag = true
	s.step(core.Touched{})
	s.run(time.Second)
	s.now = epoch.Add(time.Minute)
	s.lag = false
	s.answer()
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16")
	s.wantNoCondition(view.RecordExpired, "a", "")
}

// What a wider or a narrower prefix of a peer that fails is to take over stays where it is as well.
func TestRule04_AnOverlappingMoveWaits(t *testing.T) {
	for _, test := range [][2]string{{"10.1.0.0/16", "10.0.0.0/8"}, {"10.0.0.0/8", "10.1.0.0/16"}} {
		s := up(t, rec("a", test[0]), rec("b"))
		s.dev.fail = func(op datapath.Op) error {
			if p, ok := op.(datapath.PutPeer); ok && p.Key == publicKey("b") {
				return errTest
			}
			return nil
		}
		s.step(put(good(rec("a")), good(rec("b", test[1]))))
		s.run(10 * time.Minute)
		s.wantPeers("a "+test[0], "b")
		s.dev.fail = nil
		s.run(75 * time.Second)
		s.wantPeers("a", "b "+test[1])
	}
}

// A session is adopted once: whoever gets the key before the device was written is another node.
func TestRule06_ASessionIsAdoptedOnce(t *testing.T) {
	s := simOn(t, found())
	s.step(announce())
	s.step(reset(good(rec("a", "10.1.0.0/16", "203.0.113.1:1"))))
	s.step(deleted("a"))
	s.step(put(good(withKey(rec("z", "10.1.0.0/16", "203.0.113.2:1"), "a"))))
	s.run(soon)
	if s.endpoint() != "203.0.113.2:1" {
		t.Errorf("z is sent to at %v", s.endpoint())
	}
}

// Who announces more than a record holds keeps nobody else from being published.
func TestAnnouncing_MoreThanARecordHolds(t *testing.T) {
	for _, c := range []struct {
		name string
		n    int
		wide func(i int) netip.Prefix
	}{
		{"by number", record.MaxPrefixes + 100, func(i int) netip.Prefix {
			return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
		}},
		{"by size", record.MaxPrefixes, func(i int) netip.Prefix {
			return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, byte(i >> 8), byte(i)}), 128)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSim(t, func(c *core.Config) { c.Addresses = set("fd99::1") })
			s.start()
			as := make([]string, c.n)
			for i := range as {
				as[i] = c.wide(i).String()
			}
			s.step(announce(as...))
			s.run(time.Second)
			r := s.m.View().Self.Record
			if data, err := record.Marshal(r); err != nil {
				t.Fatalf("the record cannot be published: %v", err)
			} else if len(data) > record.MaxSize || r.Prefixes.Len() < 10000 || r.Addresses != set("fd99::1") {
				t.Errorf("%d bytes, %d prefixes, addresses %v", len(data), r.Prefixes.Len(), r.Addresses)
			}
			s.wantCondition(view.AnnouncementRefused, s.cfg.Node, "")
			s.step(announce("10.1.0.0/16"))
			s.run(time.Minute)
			s.wantNoCondition(view.AnnouncementRefused, s.cfg.Node, "")
		})
	}
}
