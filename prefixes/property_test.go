package prefixes_test

import (
	"cmp"
	"encoding/json"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/warren-mesh/warren/prefixes"
	"go4.org/netipx"
	"pgregory.net/rapid"
)

func TestNewAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ws := genWindows().Draw(t, "windows")
		ps := rapid.SliceOfN(genPrefix(ws, true), 0, 30).Draw(t, "ps")
		got, err := prefixes.New(ps...)
		equal(t, "New", got, makeSlow(ps...))

		refused := 0
		for _, p := range ps {
			want, ok := slowCanonical(p)
			c, _, cerr := prefixes.Canonical(p)
			if c != want || (cerr == nil) != ok {
				t.Fatalf("Canonical(%v) = %v, %v; want %v", p, c, cerr, want)
			}
			if got.Has(p) != ok {
				t.Fatalf("Has(%v) = %v", p, got.Has(p))
			}
			if !ok {
				refused++
			}
		}
		if n := countErrors(err); n != refused {
			t.Fatalf("%d errors for %d refused: %v", n, refused, err)
		}
	})
}

func countErrors(err error) int {
	if err == nil {
		return 0
	}
	return len(err.(interface{ Unwrap() []error }).Unwrap())
}

func TestAlgebraAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ws := genWindows().Draw(t, "windows")
		ps := genPrefixes(ws).Draw(t, "ps")
		qs := genPrefixes(ws).Draw(t, "qs")
		s, o := prefixes.Must(ps...), prefixes.Must(qs...)
		x, y := makeSlow(ps...), makeSlow(qs...)

		equal(t, "Union", s.Union(o), makeSlow(append(slices.Clone(ps), qs...)...))
		equal(t, "Minus", s.Minus(o), x.filter(func(p netip.Prefix) bool { return !y.has(p) }))
		equal(t, "Intersect", s.Intersect(o), x.filter(y.has))
		equal(t, "With", s.With(qs...), makeSlow(append(slices.Clone(ps), qs...)...))
		equal(t, "Without", s.Without(qs...), x.filter(func(p netip.Prefix) bool { return !y.has(p) }))

		one := genPrefix(ws, false).Draw(t, "one")
		c, _ := slowCanonical(one)
		equal(t, "With one", s.With(one), makeSlow(append(slices.Clone(ps), one)...))
		equal(t, "Without one", s.Without(one), x.filter(func(p netip.Prefix) bool { return p != c }))
		if s.Has(one) != x.has(c) {
			t.Fatalf("Has(%v) = %v in %v", one, s.Has(one), s)
		}

		added, removed := prefixes.Diff(s, o)
		if s.Minus(removed).Union(added) != o || added.Overlaps(removed) && !added.Intersect(removed).IsEmpty() {
			t.Fatalf("Diff(%v, %v) = %v, %v", s, o, added, removed)
		}

		// The operands are as they were.
		equal(t, "s", s, x)
		equal(t, "o", o, y)
		for i, p := range x {
			if s.At(i) != p {
				t.Fatalf("At(%d) = %v, want %v", i, s.At(i), p)
			}
		}
	})
}

// Sets of very different size take other ways through the merge than sets of
// the same.
func TestSkewedAgainstOracle(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	draw := func(n int) []netip.Prefix {
		ps := make([]netip.Prefix, n)
		for i := range ps {
			ps[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(r.IntN(4)), byte(r.IntN(256))}), 20+r.IntN(13))
		}
		return ps
	}
	for range 300 {
		ps, qs := draw(200), draw(1+r.IntN(4))
		if r.IntN(2) == 0 { // also sets with gaps, so that not everything overlaps
			ps = slices.DeleteFunc(ps, func(p netip.Prefix) bool { return p.Bits() < 28 })
		}
		s, o, x, y := prefixes.Must(ps...), prefixes.Must(qs...), makeSlow(ps...), makeSlow(qs...)
		all := makeSlow(append(slices.Clone(ps), qs...)...)
		equal(t, "s | o", s.Union(o), all)
		equal(t, "o | s", o.Union(s), all)
		equal(t, "s - o", s.Minus(o), x.filter(func(p netip.Prefix) bool { return !y.has(p) }))
		equal(t, "o - s", o.Minus(s), y.filter(func(p netip.Prefix) bool { return !x.has(p) }))
		equal(t, "s & o", s.Intersect(o), x.filter(y.has))
		if got, want := s.Overlaps(o), x.overlaps(y); got != want || o.Overlaps(s) != want {
			t.Fatalf("Overlaps(%v, %v): want %v", s, o, want)
		}
	}
}

func TestCoverageAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ws := genWindows().Draw(t, "windows")
		ps := genPrefixes(ws).Draw(t, "ps")
		qs := rapid.SliceOfN(genPrefix(ws, false), 0, 4).Draw(t, "qs")
		s, o := prefixes.Must(ps...), prefixes.Must(qs...)
		x, y := makeSlow(ps...), makeSlow(qs...)
		xi, yi := ipset(x), ipset(y)

		if got, want := s.Overlaps(o), x.overlaps(y); got != want || o.Overlaps(s) != want || xi.Overlaps(yi) != want {
			t.Fatalf("(%v).Overlaps(%v) = %v", s, o, got)
		}
		if got, want := s.Covers(o), ipsetCovers(xi, yi); got != want {
			t.Fatalf("(%v).Covers(%v) = %v", s, o, got)
		}
		if got, want := o.Covers(s), ipsetCovers(yi, xi); got != want {
			t.Fatalf("(%v).Covers(%v) = %v", o, s, got)
		}
		if !s.IPSet().Equal(xi) {
			t.Fatalf("(%v).IPSet() = %v", s, s.IPSet().Prefixes())
		}

		p := genPrefix(ws, false).Draw(t, "p")
		c, _ := slowCanonical(p)
		if got, want := s.OverlapsPrefix(p), x.overlaps(slow{c}); got != want {
			t.Fatalf("(%v).OverlapsPrefix(%v) = %v", s, p, got)
		}
		if got, want := s.CoversPrefix(p), xi.ContainsPrefix(c); got != want {
			t.Fatalf("(%v).CoversPrefix(%v) = %v", s, p, got)
		}

		a := genAddr(ws).Draw(t, "a")
		want, ok := x.lookup(a)
		if got, found := s.Lookup(a); got != want || found != ok || s.HasAddr(a) != ok {
			t.Fatalf("(%v).Lookup(%v) = %v, %v; want %v, %v", s, a, got, found, want, ok)
		}
	})
}

// Covers is right for every set of the 15 prefixes of a 3-bit space, against
// every prefix: 32,768 sets, nothing left to chance.
func TestCoverageExhaustive(t *testing.T) {
	for _, base := range []netip.Prefix{
		netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("255.255.255.248/29"),
		netip.MustParsePrefix("fd00::/63"), netip.MustParsePrefix("ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff8/125"),
	} {
		var all []netip.Prefix
		var cells []uint8 // which of the 8 smallest prefixes each is made of
		for n := range 4 {
			for i := range 1 << n {
				b := base.Addr().AsSlice()
				for k := range n {
					if i>>(n-1-k)&1 == 1 {
						bit := base.Bits() + k
						b[bit/8] |= 0x80 >> (bit % 8)
					}
				}
				a, _ := netip.AddrFromSlice(b)
				all = append(all, netip.PrefixFrom(a, base.Bits()+n))
				w := 8 >> n
				cells = append(cells, uint8((1<<w-1)<<(i*w)))
			}
		}
		ps := make([]netip.Prefix, 0, len(all))
		for mask := range 1 << len(all) {
			if testing.Short() && mask%17 != 0 {
				continue
			}
			ps = ps[:0]
			var have uint8
			for i, p := range all {
				if mask>>i&1 == 1 {
					ps = append(ps, p)
					have |= cells[i]
				}
			}
			s := prefixes.Must(ps...)
			for i, p := range all {
				if got, want := s.CoversPrefix(p), have&cells[i] == cells[i]; got != want {
					t.Fatalf("(%v).CoversPrefix(%v) = %v", s, p, got)
				}
				if got, want := s.OverlapsPrefix(p), have&cells[i] != 0; got != want {
					t.Fatalf("(%v).OverlapsPrefix(%v) = %v", s, p, got)
				}
			}
		}
	}
}

func ipset(s slow) *netipx.IPSet {
	var b netipx.IPSetBuilder
	for _, p := range s {
		b.AddPrefix(p)
	}
	set, err := b.IPSet()
	if err != nil {
		panic(err)
	}
	return set
}

func ipsetCovers(s, o *netipx.IPSet) bool {
	for _, r := range o.Ranges() {
		if !s.ContainsRange(r) {
			return false
		}
	}
	return true
}

func TestCompareAgainstOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := genPrefix(windows, true).Draw(t, "p")
		q := genPrefix(windows, true).Draw(t, "q")
		c, ok := slowCanonical(p)
		d, ok2 := slowCanonical(q)
		want := 0
		switch {
		case ok && ok2:
			want = slowCompare(c, d)
		case ok:
			want = 1
		case ok2:
			want = -1
		}
		if got := prefixes.Compare(p, q); got != cmp.Compare(want, 0) {
			t.Fatalf("Compare(%v, %v) = %d, want the sign of %d", p, q, got, want)
		}
	})
}

func TestRoundTrips(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ps := rapid.SliceOfN(genPrefix(windows, false), 0, 30).Draw(t, "ps")
		s := prefixes.Must(ps...)

		text, err := s.MarshalText()
		if err != nil || string(text) != s.String() {
			t.Fatalf("MarshalText: %q, %v", text, err)
		}
		back := prefixes.MustParse("203.0.113.0/24") // is replaced, not added to
		if err := back.UnmarshalText(text); err != nil || back != s {
			t.Fatalf("text %q: %v, %v", text, back, err)
		}
		if again, err := prefixes.Parse(strings.Fields(s.String())...); err != nil || again != s {
			t.Fatalf("Parse(%q): %v, %v", text, again, err)
		}

		data, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		back = prefixes.MustParse("203.0.113.0/24")
		if err := json.Unmarshal(data, &back); err != nil || back != s {
			t.Fatalf("JSON %s: %v, %v", data, back, err)
		}
		var plain []netip.Prefix // what another program, without this package, reads
		if err := json.Unmarshal(data, &plain); err != nil || !slices.Equal(plain, slices.Collect(s.All())) || plain == nil {
			t.Fatalf("JSON %s as prefixes: %v, %v", data, plain, err)
		}
	})
}

func TestIPNetRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := genPrefix(windows, true).Draw(t, "p")
		want, ok := slowCanonical(p)
		n, err := prefixes.IPNet(p)
		if (err == nil) != ok {
			t.Fatalf("IPNet(%v): %v", p, err)
		}
		if !ok {
			return
		}
		if got, err := prefixes.FromIPNet(n); err != nil || got != want {
			t.Fatalf("%v -> %v -> %v, %v", p, n, got, err)
		}
	})
}
