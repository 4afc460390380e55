package core_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/prefixes"
)

// nthRecord is the record of one node of a large mesh. Keys need not be points of the curve here.
func nthRecord(i int) record.Record {
	var b [key.Size]byte
	b[0], b[1], b[2], b[31] = byte(i), byte(i>>8), byte(i>>16), 1
	k, err := key.PublicFromBytes(b[:])
	if err != nil {
		panic(err)
	}
	ip := netip.AddrFrom4([4]byte{203, byte(i >> 16), byte(i >> 8), byte(i)})
	return record.Record{
		Version: record.Version, ID: fmt.Sprintf("node-%06d", i), Key: k, Instance: "0a", Epoch: 1, Generation: 1, Sequence: 1,
		Endpoints: []record.Endpoint{{Addr: ip, Port: 51820}},
		Addresses: prefixes.Must(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32)),
		Prefixes:  nthPrefixes(i, 0),
	}
}

func nthPrefixes(i, version int) prefixes.Set {
	return prefixes.Must(netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(i >> 8), byte(i), 0}), 24),
		netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(i >> 8), byte(i), byte(version)}), 32))
}

var sizes = []int{10, 1_000, 10_000}

// large is a node that is up in a mesh of n others. bounded: with records that end some day.
func large(tb testing.TB, n int, bounded bool) (*sim, core.Records) {
	s := newSim(tb)
	in := core.Records{Reset: true}
	for i := range n {
		o := identity.Opened{Record: nthRecord(i)}
		if bounded {
			o.NotAfter = epoch.Add(24*time.Hour + time.Duration(i)*time.Second)
		}
		in.Put = append(in.Put, core.Opened{Node: o.Record.ID, Opened: o})
	}
	s.names = nil
	s.step(announce("10.250.0.0/16"))
	s.step(in)
	s.run(50 * time.Millisecond)
	if got := len(s.dev.model.State().Peers); got != n {
		tb.Fatalf("%d peers, want %d", got, n)
	}
	s.take()
	return s, in
}

// changeOne has the k-th node announce another prefix instead of one, and the device follow: three Steps.
func changeOne(s *sim, in core.Records, k, version int) int {
	o := in.Put[k]
	o.Record.Prefixes = nthPrefixes(k, version)
	o.Record.Sequence++
	s.m.Step(s.now, put(o))
	s.now = s.now.Add(s.cfg.Window)
	out := s.m.Step(s.now, core.Tick{})
	s.m.Step(s.now, core.Applied{Ops: out.Ops})
	return len(out.Ops)
}

// BenchmarkChange is one changed record until its ops were applied. It does not grow with the mesh.
func BenchmarkChange(b *testing.B) {
	for _, bounded := range []bool{false, true} {
		for _, n := range sizes {
			b.Run(fmt.Sprintf("bounded=%v/nodes=%d", bounded, n), func(b *testing.B) {
				s, in := large(b, n, bounded)
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					// The same moment each time, so that no reading of the whole device falls in between.
					s.now = epoch.Add(50 * time.Millisecond)
					i++
					if changeOne(s, in, n/2, i%250+1) == 0 {
						b.Fatal("no ops")
					}
				}
			})
		}
	}
}

// BenchmarkReset is a first Reset until its ops were planned, on a new device.
func BenchmarkReset(b *testing.B) {
	_, in := large(b, 10_000, false)
	b.ReportAllocs()
	for b.Loop() {
		s := newSim(b)
		s.step(announce("10.250.0.0/16"))
		s.m.Step(s.now, in)
		s.now = s.now.Add(s.cfg.Window)
		if out := s.m.Step(s.now, core.Tick{}); len(out.Ops) < 20_000 {
			b.Fatalf("%d ops", len(out.Ops))
		}
	}
}

// BenchmarkSameReset is a Reset that says nothing new, as after every lost connection.
func BenchmarkSameReset(b *testing.B) {
	s, in := large(b, 10_000, false)
	b.ReportAllocs()
	for b.Loop() {
		if out := s.m.Step(s.now, in); len(out.Ops) > 0 {
			b.Fatal(out.Ops)
		}
	}
}

// BenchmarkAudit is a reading of a large device on which nothing changed.
func BenchmarkAudit(b *testing.B) {
	s, _ := large(b, 10_000, false)
	st := s.dev.state()
	b.ReportAllocs()
	for b.Loop() {
		s.now = s.now.Add(s.cfg.Audit)
		if out := s.m.Step(s.now, core.Tick{}); !out.Read {
			b.Fatal("not read")
		}
		if out := s.m.Step(s.now, core.Reading{State: st.Clone()}); len(out.Ops) > 0 {
			b.Fatal(out.Ops)
		}
	}
}

// BenchmarkView is a View of a large mesh.
func BenchmarkView(b *testing.B) {
	s, _ := large(b, 10_000, false)
	b.ReportAllocs()
	for b.Loop() {
		if v := s.m.View(); len(v.Peers) != 10_000 {
			b.Fatal(len(v.Peers))
		}
	}
}

// TestChangeDoesNotGrow holds what BenchmarkChange measures, by the allocations, which are steady.
func TestChangeDoesNotGrow(t *testing.T) {
	count := func(n int) float64 {
		s, in := large(t, n, true)
		i := 0
		return testing.AllocsPerRun(50, func() {
			s.now = epoch.Add(50 * time.Millisecond)
			i++
			changeOne(s, in, n/2, i%250+1)
		})
	}
	few, many := count(10), count(5000)
	t.Logf("%.0f allocations at 10 nodes, %.0f at 5,000", few, many)
	if many > few*1.5+5 {
		t.Errorf("one changed record costs %.0f allocations at 10 nodes, and %.0f at 5,000", few, many)
	}
}
