package prefixes_test

import (
	"math/big"
	"net/netip"
	"slices"
	"testing"

	"github.com/warren-mesh/warren/prefixes"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The oracle: sets as plain slices, one loop for each question, addresses as
// big integers. It shares nothing with the code under test, not even netip's
// ideas of masking, containment and order.

type slow []netip.Prefix // canonical, sorted, no duplicates

func number(a netip.Addr) *big.Int { return new(big.Int).SetBytes(a.AsSlice()) }

// slowCanonical works on the bits, one at a time.
func slowCanonical(p netip.Prefix) (netip.Prefix, bool) {
	if !p.IsValid() {
		return netip.Prefix{}, false
	}
	b, n := p.Addr().AsSlice(), p.Bits()
	mapped := len(b) == 16
	for i, x := range b[:min(12, len(b))] {
		if i < 10 && x != 0 || i >= 10 && x != 0xff {
			mapped = false
		}
	}
	if len(b) == 4 {
		mapped = false
	}
	if mapped {
		if n < 96 {
			return netip.Prefix{}, false
		}
		b, n = b[12:], n-96
	}
	for i := n; i < len(b)*8; i++ {
		b[i/8] &^= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.PrefixFrom(a, n), true
}

func slowCompare(a, b netip.Prefix) int {
	if c := a.Addr().BitLen() - b.Addr().BitLen(); c != 0 {
		return c
	}
	if c := number(a.Addr()).Cmp(number(b.Addr())); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}

func makeSlow(ps ...netip.Prefix) slow {
	var s slow
	for _, p := range ps {
		if c, ok := slowCanonical(p); ok && !s.has(c) {
			s = append(s, c)
		}
	}
	slices.SortFunc(s, slowCompare)
	return s
}

func (s slow) has(p netip.Prefix) bool {
	for _, q := range s {
		if p == q {
			return true
		}
	}
	return false
}

func (s slow) filter(keep func(netip.Prefix) bool) slow {
	var out slow
	for _, p := range s {
		if keep(p) {
			out = append(out, p)
		}
	}
	return out
}

func slowRange(p netip.Prefix) (first, last *big.Int) {
	first = number(p.Addr())
	n := new(big.Int).Lsh(big.NewInt(1), uint(p.Addr().BitLen()-p.Bits()))
	last = new(big.Int).Add(first, n)
	return first, last.Sub(last, big.NewInt(1))
}

func slowInside(p netip.Prefix, a netip.Addr) bool {
	first, last := slowRange(p)
	n := number(a)
	return p.Addr().BitLen() == a.BitLen() && first.Cmp(n) <= 0 && n.Cmp(last) <= 0
}

func slowOverlap(p, q netip.Prefix) bool {
	pf, pl := slowRange(p)
	qf, ql := slowRange(q)
	return p.Addr().BitLen() == q.Addr().BitLen() && pf.Cmp(ql) <= 0 && qf.Cmp(pl) <= 0
}

func (s slow) overlaps(o slow) bool {
	for _, p := range s {
		for _, q := range o {
			if slowOverlap(p, q) {
				return true
			}
		}
	}
	return false
}

func (s slow) lookup(a netip.Addr) (best netip.Prefix, ok bool) {
	if a.Zone() != "" {
		return best, false
	}
	if a.Is4In6() {
		a = netip.AddrFrom4([4]byte(a.AsSlice()[12:]))
	}
	for _, p := range s {
		if slowInside(p, a) && (!ok || p.Bits() > best.Bits()) {
			best, ok = p, true
		}
	}
	return best, ok
}

// The generator: addresses differ in a window of a few bits only, and lengths
// end inside it, so prefixes nest, touch and repeat all the time. The windows
// stand at both ends of each family and across the middle of IPv6, where code
// that works on two 64-bit halves goes wrong.

const width = 5

type window struct {
	v4   bool
	at   int // first bit
	base netip.Addr
}

var windows = []window{
	{true, 0, netip.MustParseAddr("0.0.0.0")},
	{true, 13, netip.MustParseAddr("10.0.0.0")},
	{true, 32 - width, netip.MustParseAddr("255.255.255.224")},
	{false, 0, netip.MustParseAddr("::")},
	{false, 62, netip.MustParseAddr("2001:db8::")},
	{false, 128 - width, netip.MustParseAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffe0")},
}

func (w window) addr(bits int, low byte) netip.Addr {
	b := w.base.AsSlice()
	for i := range width {
		if bits>>(width-1-i)&1 == 1 {
			b[(w.at+i)/8] |= 0x80 >> ((w.at + i) % 8)
		} else {
			b[(w.at+i)/8] &^= 0x80 >> ((w.at + i) % 8)
		}
	}
	if w.at+width+8 <= len(b)*8 {
		b[len(b)-1] = low
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

func genWindows() *rapid.Generator[[]window] {
	return rapid.SliceOfN(rapid.SampledFrom(windows), 1, 2)
}

func genAddr(ws []window) *rapid.Generator[netip.Addr] {
	return rapid.Custom(func(t *rapid.T) netip.Addr {
		a := rapid.SampledFrom(ws).Draw(t, "window").
			addr(rapid.IntRange(0, 1<<width-1).Draw(t, "bits"), rapid.SampledFrom([]byte{0, 0, 0, 1, 255}).Draw(t, "low"))
		if a.Is4() && rapid.IntRange(0, 5).Draw(t, "map") == 0 {
			a = netip.AddrFrom16(a.As16())
		}
		return a
	})
}

// genPrefix leaves host bits in, maps IPv4 now and then, and with bad also
// gives prefixes that are refused.
func genPrefix(ws []window, bad bool) *rapid.Generator[netip.Prefix] {
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		w := rapid.SampledFrom(ws).Draw(t, "window")
		a := genAddr([]window{w}).Draw(t, "addr")
		n := w.at + rapid.IntRange(0, width).Draw(t, "length")
		if rapid.IntRange(0, 7).Draw(t, "long") == 0 {
			n = w.base.BitLen()
		}
		if w.v4 && a.Is4In6() {
			n += 96
		}
		if bad {
			switch rapid.IntRange(0, 9).Draw(t, "bad") {
			case 0:
				return netip.Prefix{}
			case 1:
				return netip.PrefixFrom(a, 129)
			case 2:
				return netip.PrefixFrom(netip.AddrFrom16(netip.MustParseAddr("10.1.2.3").As16()), 95)
			}
		}
		return netip.PrefixFrom(a, n)
	})
}

func genPrefixes(ws []window) *rapid.Generator[[]netip.Prefix] {
	return rapid.SliceOfN(genPrefix(ws, false), 0, 40)
}

func equal(t interface {
	Helper()
	Fatalf(string, ...any)
}, what string, got prefixes.Set, want slow) {
	t.Helper()
	if g := slices.Collect(got.All()); !slices.Equal(g, want) {
		t.Fatalf("%s:\n got %v\nwant %v", what, g, want)
	}
	// The invariant behind ==: the same elements, whichever way they came.
	if again := prefixes.Must(want...); got != again {
		t.Fatalf("%s: %v is not == to a new set of its elements", what, got)
	}
	if got.Len() != len(want) || got.IsEmpty() != (len(want) == 0) {
		t.Fatalf("%s: Len %d, IsEmpty %v for %v", what, got.Len(), got.IsEmpty(), want)
	}
}

// The oracle itself is held against netip, where netip has an opinion.
func TestOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ws := genWindows().Draw(t, "windows")
		p, ok := slowCanonical(genPrefix(ws, false).Draw(t, "p"))
		q, ok2 := slowCanonical(genPrefix(ws, false).Draw(t, "q"))
		a := genAddr(ws).Draw(t, "a")
		if !ok || !ok2 || p != p.Masked() {
			t.Fatalf("not canonical: %v %v", p, q)
		}
		if got, want := slowOverlap(p, q), p.Overlaps(q); got != want {
			t.Fatalf("slowOverlap(%v, %v) = %v", p, q, got)
		}
		if got, want := slowInside(p, a), p.Contains(a); got != want {
			t.Fatalf("slowInside(%v, %v) = %v", p, a, got)
		}
	})
}
