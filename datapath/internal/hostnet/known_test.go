//go:build linux

package hostnet

import (
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
)

// many are n routes, of both families in turn, from the addresses of one.
func many(n int) (routes []datapath.Route) {
	for i := range n {
		if i%2 == 0 {
			routes = append(routes, datapath.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(64 + i>>9), byte(i >> 1), 0}), 24), Source: ap("10.7.0.1")})
		} else {
			routes = append(routes, datapath.Route{Prefix: netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 9, 4: byte(i >> 9), 5: byte(i >> 1)}), 64), Source: ap("fd07::1")})
		}
	}
	return routes
}

// A change of one route lists nothing; but what somebody else did meanwhile is never missed.
func TestKnown(t *testing.T) {
	for name, o := range layouts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSpace(t)
			h, look := s.up(o), s.open(o)
			must(t, h.AddAddrs(s.ctx(), one.addrs.Union(two.addrs)))
			must(t, h.AddRoutes(s.ctx(), many(500)))
			table := "254"
			if h.o.Table != MainTable {
				table = fmt.Sprint(h.o.Table)
			}
			src := h.source(ap("10.7.0.1"))
			hint := ""
			if src.IsValid() {
				hint = " src 10.7.0.1"
			}
			p := pp("172.16.0.0/16")
			// routes are those for p, with their metrics and tables, as the kernel has them.
			routes := func() (got []string) {
				t.Helper()
				rs, err := look.list(s.ctx(), routesOf{fam: unix.AF_INET})
				must(t, err)
				for _, r := range rs {
					if r.dst == p {
						got = append(got, fmt.Sprintf("%d/%d/%d from %v", r.table, r.metric, r.proto, r.src))
					}
				}
				return got
			}
			is := func(what string, want ...string) {
				t.Helper()
				if got := routes(); fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("%s: got %v, want %v", what, got, want)
				}
			}
			ours := func(src netip.Addr) string { return fmt.Sprintf("%s/%d/87 from %v", table, h.o.Metric, h.source(src)) }
			add := func(src string) {
				t.Helper()
				must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: p, Source: ap(src)}}))
			}
			remove := func() { t.Helper(); must(t, h.RemoveRoutes(s.ctx(), prefixes.Must(p))) }
			listed := func(what string, want bool, f func()) {
				t.Helper()
				before := h.c.lists
				f()
				if got := h.c.lists - before; got > 0 != want {
					t.Errorf("%s: %d lists", what, got)
				}
			}

			for range 2 {
				listed("add", false, func() { add("10.7.0.1") })
				is("added", ours(ap("10.7.0.1")))
				listed("change", src == netip.Addr{}, func() { add("10.7.0.2") }) // without a source nothing is to be changed
				is("changed", ours(ap("10.7.0.2")))
				listed("remove", false, remove)
				is("removed")
			}
			listed("add again", false, func() { add("10.7.0.1") })
			listed("add what is there", true, func() { add("10.7.0.1") })

			listed("after somebody removed it", true, func() {
				s.ip(fmt.Sprintf("route del 172.16.0.0/16 dev wg0 metric %d table %s", h.o.Metric, table))
				add("10.7.0.1")
			})
			is("brought back", ours(ap("10.7.0.1")))
			listed("after somebody added one of our protocol", true, func() {
				s.ip("route add 172.16.0.0/16 dev wg0 proto 87 metric 99 table 99")
				remove()
			})
			is("both gone")
			listed("a router's routes", false, func() {
				s.ip("route add 172.17.0.0/16 dev lo proto bird", "route add 172.16.0.0/16 dev lo proto bird metric 7 table "+table)
				add("10.7.0.1")
			})
			is("beside it", table+"/7/12 from invalid IP", ours(ap("10.7.0.1")))
			listed("in the way", true, func() {
				remove()
				s.ip(fmt.Sprintf("route add 172.16.0.0/16 dev lo proto bird metric %d table %s", h.o.Metric, table))
				foreign(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: p, Source: ap("10.7.0.1")}}), "lo", "bird")
			})
			s.ip(fmt.Sprintf("route del 172.16.0.0/16 dev lo metric %d table %s", h.o.Metric, table), "route del 172.16.0.0/16 dev lo metric 7 table "+table)
			add("10.7.0.1")
			listed("after the address was gone for a moment", true, func() {
				must(t, look.RemoveAddrs(s.ctx(), prefixes.MustParse("10.7.0.1/32")))
				must(t, look.AddAddrs(s.ctx(), prefixes.MustParse("10.7.0.1/32")))
				add("10.7.0.1")
			})
			is("brought back", ours(ap("10.7.0.1")))
			listed("after the link was down", true, func() {
				s.ip("link set wg0 down", "link set wg0 up")
				add("10.7.0.2")
			})
			is("brought back", ours(ap("10.7.0.2")))
			remove()
			listed("after a lost message", true, func() {
				h.watch.mu.Lock()
				h.watch.routes++ // as an overrun does
				h.watch.mu.Unlock()
				add("10.7.0.1")
			})
			is("added", ours(ap("10.7.0.1")))

			// What is known may be wrong all the same, in any way: it is a hint.
			bogus := route{dst: p, table: uint32(h.o.Table), metric: uint32(h.o.Metric), typ: unix.RTN_UNICAST, proto: 87, oif: h.known.index}
			for what, lie := range map[string][]route{
				"nothing":    nil,
				"another":    {{dst: p, table: 99, metric: 3, typ: unix.RTN_UNICAST, proto: 87, oif: h.known.index}},
				"right":      {bogus},
				"two":        {bogus, bogus},
				"other from": {{dst: p, src: ap("10.7.0.9"), table: uint32(h.o.Table), metric: uint32(h.o.Metric), typ: unix.RTN_UNICAST, proto: 87, oif: h.known.index}},
			} {
				for _, there := range []bool{true, false} {
					must(t, h.RemoveRoutes(s.ctx(), prefixes.Must(p)))
					if there {
						s.ip(fmt.Sprintf("route add 172.16.0.0/16 dev wg0 scope link proto 87 metric %d table %s%s", h.o.Metric, table, hint))
					}
					s.read(h)
					if h.known.routes[p] = lie; lie == nil {
						delete(h.known.routes, p)
					}
					add("10.7.0.1")
					is(fmt.Sprintf("%s is known, there: %t", what, there), ours(ap("10.7.0.1")))
				}
			}
		})
	}
}

// BenchmarkOneRoute adds and removes one route where there are many, as it is and with a list of them each time.
func BenchmarkOneRoute(b *testing.B) {
	s := newSpace(b)
	h := s.up(Options{})
	must(b, h.AddAddrs(s.ctx(), one.addrs))
	there := 0
	for _, n := range []int{10, 1000, 10000} {
		must(b, h.AddRoutes(s.ctx(), many(n)[there:]))
		there = n
		took := map[bool]float64{}
		for _, list := range []bool{true, false} {
			b.Run(fmt.Sprintf("%d/list=%t", n, list), func(b *testing.B) {
				r := datapath.Route{Prefix: pp("172.16.0.0/16"), Source: ap("10.7.0.1")}
				for b.Loop() {
					for _, f := range []func() error{
						func() error { return h.AddRoutes(s.ctx(), []datapath.Route{r}) },
						func() error { return h.RemoveRoutes(s.ctx(), prefixes.Must(r.Prefix)) },
					} {
						if list {
							h.known = nil
						}
						must(b, f())
					}
				}
				took[list] = float64(b.Elapsed()) / float64(b.N)
				if !list {
					b.ReportMetric(took[true]/took[false], "times-faster")
				}
			})
		}
	}
}
