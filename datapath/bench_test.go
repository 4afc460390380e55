package datapath_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// large returns a device with n peers of two prefixes each, all routed.
func large(n int) (datapath.State, []key.Public) {
	s := datapath.State{
		Device: datapath.Device{Key: datapathtest.Key("me"), ListenPort: 51820, MTU: 1420},
		Routes: make(map[netip.Prefix]netip.Addr, 2*n), Peers: make(map[key.Public]datapath.Peer, n),
	}
	keys := make([]key.Public, n)
	for i := range n {
		keys[i] = pub(fmt.Sprint("peer ", i))
		p4 := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
		p6 := netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, byte(i >> 8), byte(i)}), 64)
		s.Peers[keys[i]] = datapath.Peer{Prefixes: prefixes.Must(p4, p6)}
		s.Routes[p4], s.Routes[p6] = netip.Addr{}, netip.Addr{}
	}
	return s, keys
}

// BenchmarkPlan plans one changed peer among n: comparing everything, and comparing what changed.
func BenchmarkPlan(b *testing.B) {
	for _, n := range []int{10, 1_000, 10_000} {
		have, keys := large(n)
		want := have.Clone()
		changed := keys[n/2]
		p := want.Peers[changed]
		extra := netip.MustParsePrefix("192.0.2.0/24")
		p.Prefixes = p.Prefixes.With(extra)
		want.Peers[changed] = p
		want.Routes[extra] = netip.Addr{}
		d := datapath.Delta{Peers: map[key.Public]struct{}{changed: {}}, Routes: map[netip.Prefix]struct{}{extra: {}}}
		b.Run(fmt.Sprintf("full/peers=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if len(datapath.Plan(want, have)) != 2 {
					b.Fatal("not two ops")
				}
			}
		})
		b.Run(fmt.Sprintf("incremental/peers=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if len(datapath.PlanDelta(want, have, d)) != 2 {
					b.Fatal("not two ops")
				}
			}
		})
	}
}

// BenchmarkEachCancelled is an Apply of n peers whose context ends at once.
func BenchmarkEachCancelled(b *testing.B) {
	for _, n := range []int{100, 1_000, 10_000} {
		want, _ := large(n)
		ops := datapath.Plan(want, datapath.State{Device: want.Device})
		ctx, cancel := context.WithCancel(b.Context())
		cancel()
		b.Run(fmt.Sprintf("peers=%d", n), func(b *testing.B) {
			for b.Loop() {
				if datapath.Each(ctx, ops, func(context.Context, datapath.Op) error { return nil }) == nil {
					b.Fatal("no error")
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/peer")
		})
	}
}
