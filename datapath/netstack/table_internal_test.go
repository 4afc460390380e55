package netstack

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

// model is a table that searches all it has.
type model struct{ addrs, local, routes map[netip.Prefix]bool }

func longest(a netip.Addr, set map[netip.Prefix]bool) int {
	best := -1
	for p := range set {
		if p.Contains(a) && p.Bits() > best {
			best = p.Bits()
		}
	}
	return best
}

func (m model) send(a netip.Addr) verdict {
	if m.addrs[netip.PrefixFrom(a, a.BitLen())] {
		return inside
	}
	l, r := longest(a, m.local), longest(a, m.routes)
	switch {
	case l < 0 && r < 0:
		return unreachable
	case r >= l:
		return outside
	}
	return inside
}

func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := model{map[netip.Prefix]bool{}, map[netip.Prefix]bool{}, map[netip.Prefix]bool{}}
		tab := newTable()
		for range rapid.IntRange(1, 60).Draw(t, "changes") {
			x, y := byte(rapid.IntRange(0, 3).Draw(t, "x")), byte(rapid.IntRange(0, 3).Draw(t, "y"))
			bits := rapid.SampledFrom([]int{8, 16, 24, 32, 0}).Draw(t, "bits")
			a := netip.AddrFrom4([4]byte{10, x, y, y})
			if rapid.Bool().Draw(t, "v6") {
				a, bits = netip.AddrFrom16([16]byte{0: 0xfd, 2: x, 4: y, 15: y}), bits*4
			}
			p := netip.PrefixFrom(a, bits).Masked()
			on := rapid.Bool().Draw(t, "on")
			e := edit{*tab}
			which := rapid.IntRange(0, 2).Draw(t, "which")
			if which == 0 {
				p = netip.PrefixFrom(a, a.BitLen())
			}
			e.hop(p, func(h *hop) {
				switch which {
				case 0:
					h.addr, m.addrs[p] = on, on
				case 1:
					h.local, m.local[p] = on, on
				case 2:
					h.route, m.routes[p] = on, on
				}
			})
			for _, set := range []map[netip.Prefix]bool{m.addrs, m.local, m.routes} {
				if !set[p] {
					delete(set, p)
				}
			}
			tab = &e.table
			for x := range byte(4) {
				for y := range byte(4) {
					for _, a := range []netip.Addr{netip.AddrFrom4([4]byte{10, x, y, y}), netip.AddrFrom4([4]byte{10, x, y, 99}),
						netip.AddrFrom16([16]byte{0: 0xfd, 2: x, 4: y, 15: y}), netip.AddrFrom16([16]byte{0: 0xfd, 2: x, 4: y, 15: 99})} {
						if got, _ := tab.send(a); got != m.send(a) {
							t.Fatalf("%v: %v, want %v", a, got, m.send(a))
						}
						if got, want := tab.accepts(a), longest(a, m.addrs) >= 0 || longest(a, m.local) >= 0; got != want {
							t.Fatalf("accepts %v: %v", a, got)
						}
						if got, want := tab.isAddr(a), m.addrs[netip.PrefixFrom(a, a.BitLen())]; got != want {
							t.Fatalf("isAddr %v: %v", a, got)
						}
					}
				}
			}
		}
	})
}
