package prefixes_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/warren-mesh/warren/prefixes"
)

func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func TestCanonical(t *testing.T) {
	for _, tt := range []struct {
		in     netip.Prefix
		want   string
		masked bool
		err    string
	}{
		{in: pfx("10.0.0.0/8"), want: "10.0.0.0/8"},
		{in: pfx("10.1.2.3/8"), want: "10.0.0.0/8", masked: true},
		{in: pfx("10.1.2.3/32"), want: "10.1.2.3/32"},
		{in: pfx("fd00::/8"), want: "fd00::/8"},
		{in: pfx("fd78::1/64"), want: "fd78::/64", masked: true},
		{in: pfx("0.0.0.0/0"), want: "0.0.0.0/0"},
		{in: pfx("::/0"), want: "::/0"},
		{in: pfx("::/96"), want: "::/96"},
		{in: pfx("::ffff:10.0.0.0/104"), want: "10.0.0.0/8"},
		{in: pfx("::ffff:10.1.0.0/104"), want: "10.0.0.0/8", masked: true},
		{in: pfx("::ffff:10.1.2.3/128"), want: "10.1.2.3/32"},
		{in: pfx("::ffff:0:0/96"), want: "0.0.0.0/0"},
		{in: pfx("::ffff:10.0.0.0/95"), err: `prefix "::ffff:10.0.0.0/95": is IPv4-mapped and shorter than /96`},
		{in: pfx("::ffff:10.0.0.0/8"), err: `prefix "::ffff:10.0.0.0/8": is IPv4-mapped and shorter than /96`},
		{in: netip.Prefix{}, err: `prefix "invalid Prefix": is not a prefix`},
		{in: netip.PrefixFrom(netip.MustParseAddr("10.0.0.0"), 33), err: `prefix "10.0.0.0/?": has a length out of range`},
		{in: netip.PrefixFrom(netip.MustParseAddr("fd00::"), -1), err: `prefix "fd00::/?": has a length out of range`},
	} {
		c, masked, err := prefixes.Canonical(tt.in)
		if tt.err != "" {
			var e *prefixes.Error
			if !errors.As(err, &e) || err.Error() != tt.err || c.IsValid() || masked {
				t.Errorf("Canonical(%v) = %v, %v, %v; want error %s", tt.in, c, masked, err, tt.err)
			}
			continue
		}
		if err != nil || c != pfx(tt.want) || masked != tt.masked {
			t.Errorf("Canonical(%v) = %v, %v, %v; want %s, %v", tt.in, c, masked, err, tt.want, tt.masked)
		}
	}
}

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		in   []string
		want string
		errs []string
	}{
		{},
		{in: []string{"10.0.0.0/8"}, want: "10.0.0.0/8"},
		{in: []string{"10.0.0.1", "fd00::1", "::ffff:10.0.0.2"}, want: "10.0.0.1/32 10.0.0.2/32 fd00::1/128"},
		{in: []string{"fd00::/8", "10.0.0.0/9", "10.0.0.0/8", "9.0.0.0/8"}, want: "9.0.0.0/8 10.0.0.0/8 10.0.0.0/9 fd00::/8"},
		{in: []string{"10.0.0.0/9", "10.128.0.0/9"}, want: "10.0.0.0/9 10.128.0.0/9"}, // not merged
		{in: []string{"10.0.0.0/8", "10.1.0.0/8", "::ffff:10.0.0.0/104"}, want: "10.0.0.0/8"},
		{in: []string{"2001:DB8:0:0::/64"}, want: "2001:db8::/64"}, // RFC 5952
		{
			in: []string{"fe80::1%eth0/64", "10.0.0.0/8", "fe80::1%eth0", "fe80::/64%eth0"}, want: "10.0.0.0/8",
			errs: []string{
				`prefix "fe80::1%eth0/64": has a zone`,
				`prefix "fe80::1%eth0": has a zone`,
				`prefix "fe80::/64%eth0": has a zone`,
			},
		},
		{
			in: []string{"", "x", " 10.0.0.0/8", "10.0.0.0/33", "10.0.0.0/08", "10.0.0.0/", "10.0.0/8", "::/129", "::ffff:1.2.3.4/24", "1.1.1.1/2/3"},
			errs: []string{
				`prefix "": is neither a prefix nor an address`,
				`prefix "x": is neither a prefix nor an address`,
				`prefix " 10.0.0.0/8": is not a prefix: bad address`,
				`prefix "10.0.0.0/33": is not a prefix: bad length`,
				`prefix "10.0.0.0/08": is not a prefix: bad length`,
				`prefix "10.0.0.0/": is not a prefix: bad length`,
				`prefix "10.0.0/8": is not a prefix: bad address`,
				`prefix "::/129": is not a prefix: bad length`,
				`prefix "::ffff:1.2.3.4/24": is IPv4-mapped and shorter than /96`,
				`prefix "1.1.1.1/2/3": is not a prefix: bad address`,
			},
		},
		{
			in:   []string{strings.Repeat("1", 1000), "a\nb"}, // neither floods nor forges a log
			errs: []string{`prefix "` + strings.Repeat("1", 80) + `"...: is neither a prefix nor an address`, `prefix "a\nb": is neither a prefix nor an address`},
		},
	} {
		s, err := prefixes.Parse(tt.in...)
		if s.String() != tt.want {
			t.Errorf("Parse(%q) = %q, want %q", tt.in, s, tt.want)
		}
		var got []string
		if err != nil {
			for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
				if _, ok := e.(*prefixes.Error); !ok {
					t.Errorf("Parse(%q): %T in the error", tt.in, e)
				}
				got = append(got, e.Error())
			}
		}
		if !slices.Equal(got, tt.errs) {
			t.Errorf("Parse(%q): errors\n got %q\nwant %q", tt.in, got, tt.errs)
		}
	}
}

func TestHost(t *testing.T) {
	for in, want := range map[netip.Addr]netip.Prefix{
		netip.MustParseAddr("10.0.0.1"):             pfx("10.0.0.1/32"),
		netip.MustParseAddr("::ffff:10.0.0.1"):      pfx("10.0.0.1/32"),
		netip.MustParseAddr("fd00::1"):              pfx("fd00::1/128"),
		netip.MustParseAddr("fe80::1%eth0"):         {},
		netip.MustParseAddr("::ffff:10.0.0.1%eth0"): {},
		{}:                                           {},
		netip.MustParseAddr("::"):                    pfx("::/128"),
		netip.MustParseAddr("0.0.0.0"):               pfx("0.0.0.0/32"),
		netip.MustParseAddr("255.255.255.255"):       pfx("255.255.255.255/32"),
		netip.MustParseAddr("::fffe:ffff:ffff"):      pfx("::fffe:ffff:ffff/128"),
		netip.MustParseAddr("64:ff9b::198.51.100.1"): pfx("64:ff9b::c633:6401/128"),
	} {
		if got := prefixes.Host(in); got != want {
			t.Errorf("Host(%v) = %v, want %v", in, got, want)
		}
	}
}

func TestZeroValue(t *testing.T) {
	var s prefixes.Set
	if s != prefixes.Must() || s != prefixes.MustParse() || !s.IsEmpty() || s.Len() != 0 || s.String() != "" {
		t.Errorf("zero Set is %q", s)
	}
	o := prefixes.MustParse("10.0.0.0/8")
	if s.Union(o) != o || o.Union(s) != o || o.Minus(s) != o || s.Minus(o) != s || o.Intersect(s) != s || o.Minus(o) != s {
		t.Error("algebra with the empty set")
	}
	if s.Overlaps(o) || o.Overlaps(s) || s.Overlaps(s) || s.Covers(o) || !o.Covers(s) || !s.Covers(s) {
		t.Error("coverage of the empty set")
	}
	if s.With() != s || s.Without() != s || s.Without(pfx("10.0.0.0/8")) != s || s.With(pfx("10.0.0.0/8")) != o {
		t.Error("With, Without on the empty set")
	}
	m := map[prefixes.Set]int{o: 1, s: 2}
	if m[prefixes.MustParse("10.9.9.9/8")] != 1 || m[prefixes.Set{}] != 2 {
		t.Error("as a map key")
	}
}

func TestInvalidPrefix(t *testing.T) {
	bad := netip.Prefix{}
	for _, s := range []prefixes.Set{{}, prefixes.MustParse("0.0.0.0/0", "::/0")} {
		if s.Has(bad) || s.OverlapsPrefix(bad) || s.CoversPrefix(bad) || s.HasAddr(netip.Addr{}) {
			t.Errorf("%q has an invalid prefix", s)
		}
		for name, f := range map[string]func(){
			"With":       func() { s.With(bad) },
			"With two":   func() { s.With(pfx("10.0.0.0/8"), bad) },
			"Without":    func() { s.Without(bad) },
			"Must":       func() { prefixes.Must(bad) },
			"MustParse":  func() { prefixes.MustParse("x") },
			"At(-1)":     func() { s.At(-1) },
			"At(Len())":  func() { s.At(s.Len()) },
			"At(Len()+)": func() { s.At(s.Len() + 1) },
		} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%q: %s does not panic", s, name)
					}
				}()
				f()
			}()
		}
	}
}

func TestAllStops(t *testing.T) {
	n := 0
	for range prefixes.MustParse("10.0.0.0/8", "11.0.0.0/8").All() {
		n++
		break
	}
	if n != 1 {
		t.Errorf("%d elements after break", n)
	}
}

func TestJSON(t *testing.T) {
	if b, err := json.Marshal(struct{ P prefixes.Set }{}); err != nil || string(b) != `{"P":[]}` {
		t.Errorf("empty set: %s, %v", b, err)
	}
	for _, tt := range []struct{ in, want, err string }{
		{in: `null`},
		{in: `[]`},
		{in: ` [ "10.0.0.1/8" , "fd00::1" ] `, want: "10.0.0.0/8 fd00::1/128"},
		{in: `"10.0.0.0/8"`, err: `prefix "\"10.0.0.0/8\"": is not an array of strings`},
		{in: `{"a":1}`, err: `prefix "{\"a\":1}": is not an array of strings`},
		{in: `7`, err: `prefix "7": is not an array of strings`},
		{in: `[7, "10.0.0.0/8", null, ["11.0.0.0/8"], "x"]`, err: `prefix "7": is not a string
prefix "null": is not a string
prefix "[\"11.0.0.0/8\"]": is not a string
prefix "x": is neither a prefix nor an address`},
	} {
		before := prefixes.MustParse("203.0.113.0/24")
		s := before
		err := json.Unmarshal([]byte(tt.in), &s)
		if tt.err != "" {
			if err == nil || err.Error() != tt.err || s != before {
				t.Errorf("%s: %q, error\n got %v\nwant %s", tt.in, s, err, tt.err)
			}
			var e *prefixes.Error
			if !errors.As(err, &e) {
				t.Errorf("%s: no *Error in %T", tt.in, err)
			}
			continue
		}
		if err != nil || s.String() != tt.want {
			t.Errorf("%s: %q, %v; want %q", tt.in, s, err, tt.want)
		}
	}
	var s prefixes.Set
	if s.UnmarshalJSON([]byte(`[`)) == nil || s.UnmarshalJSON(nil) == nil {
		t.Error("broken JSON, called directly: no error")
	}
}

func TestUnmarshalText(t *testing.T) {
	s := prefixes.MustParse("203.0.113.0/24")
	if err := s.UnmarshalText([]byte("10.0.0.0/8 nonsense")); err == nil || s.String() != "203.0.113.0/24" {
		t.Errorf("with a bad one: %q, %v", s, err)
	}
	if err := s.UnmarshalText([]byte("  fd00::/8\n10.0.0.0/8\t")); err != nil || s.String() != "10.0.0.0/8 fd00::/8" {
		t.Errorf("with other white space: %q, %v", s, err)
	}
	if err := s.UnmarshalText(nil); err != nil || !s.IsEmpty() {
		t.Errorf("empty: %q, %v", s, err)
	}
}

// Host bits left in an allowed prefix: masked once, here, so that WireGuard,
// routes and map keys see one value.
func TestHostBitsAreCutOnce(t *testing.T) {
	s := prefixes.MustParse("10.78.0.1/24", "fd78::1/64", "10.0.0.1/0")
	if want := "0.0.0.0/0 10.78.0.0/24 fd78::/64"; s.String() != want {
		t.Errorf("got %q, want %q", s, want)
	}
	again := prefixes.Must(slices.Collect(s.All())...)
	if added, removed := prefixes.Diff(s, again); !added.IsEmpty() || !removed.IsEmpty() || s != again {
		t.Errorf("second round: +%q -%q", added, removed)
	}
	if !s.Has(pfx("0.0.0.0/0")) || !s.Has(pfx("10.0.0.1/0")) {
		t.Error("/0 with host bits is not seen as a default route")
	}
}

// A nil or broken mask is an error, never 0.0.0.0/0.
func TestBadMaskIsRefused(t *testing.T) {
	ip := net.IPv4(10, 1, 2, 3)
	for _, tt := range []struct {
		in   net.IPNet
		want string // prefix, or error
	}{
		{net.IPNet{IP: ip}, `prefix "10.1.2.3/?": has no mask`},
		{net.IPNet{IP: ip.To4()}, `prefix "10.1.2.3/?": has no mask`},
		{net.IPNet{IP: ip, Mask: net.IPMask{}}, `prefix "10.1.2.3/?": has no mask`},
		{net.IPNet{IP: ip, Mask: net.IPv4Mask(255, 0, 255, 0)}, `prefix "10.1.2.3/ff00ff00": has a mask with holes`},
		{net.IPNet{IP: ip, Mask: net.IPMask{255, 255}}, `prefix "10.1.2.3/ffff": has a mask of another size than the address`},
		{net.IPNet{IP: ip.To4(), Mask: net.CIDRMask(64, 128)}, `prefix "10.1.2.3/ffffffffffffffff0000000000000000": has a mask of another size than the address`},
		{net.IPNet{IP: net.ParseIP("fd00::1"), Mask: net.CIDRMask(8, 32)}, `prefix "fd00::1/ff000000": has a mask of another size than the address`},
		{net.IPNet{IP: ip, Mask: net.CIDRMask(64, 128)}, `prefix "10.1.2.3/ffffffffffffffff0000000000000000": is IPv4-mapped and shorter than /96`},
		{net.IPNet{Mask: net.CIDRMask(8, 32)}, `prefix "<nil>/ff000000": has no address`},
		{net.IPNet{IP: ip, Mask: net.CIDRMask(8, 32)}, "10.0.0.0/8"},
		{net.IPNet{IP: ip.To4(), Mask: net.CIDRMask(8, 32)}, "10.0.0.0/8"},
		{net.IPNet{IP: ip, Mask: net.CIDRMask(104, 128)}, "10.0.0.0/8"},
		{net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, "0.0.0.0/0"},
		{net.IPNet{IP: net.ParseIP("fd00::1"), Mask: net.CIDRMask(8, 128)}, "fd00::/8"},
	} {
		p, err := prefixes.FromIPNet(tt.in)
		got := p.String()
		if err != nil {
			got = err.Error()
			if p.IsValid() {
				t.Errorf("FromIPNet(%v): %v with an error", tt.in, p)
			}
		}
		if got != tt.want {
			t.Errorf("FromIPNet(%v)\n got %s\nwant %s", tt.in, got, tt.want)
		}
	}
	if n, err := prefixes.IPNet(netip.Prefix{}); err == nil || n.IP != nil || n.Mask != nil {
		t.Errorf("IPNet of the zero Prefix: %v, %v", n, err)
	}
}

// Zones: refused in prefixes, false in look-ups, for any address and any set.
func TestZones(t *testing.T) {
	if s, err := prefixes.Parse("fe80::1%eth0/64"); err == nil || !s.IsEmpty() {
		t.Errorf("Parse: %q, %v", s, err)
	}
	all := prefixes.MustParse("::/0", "0.0.0.0/0", "fe80::1/128")
	for _, a := range []string{"fe80::1%eth0", "::ffff:10.0.0.1%eth0"} {
		if p, ok := all.Lookup(netip.MustParseAddr(a)); ok || p.IsValid() || all.HasAddr(netip.MustParseAddr(a)) {
			t.Errorf("Lookup(%s) = %v, %v", a, p, ok)
		}
	}

	cases := 1_000_000
	if testing.Short() {
		cases /= 20
	}
	r := rand.New(rand.NewPCG(4, 4))
	addr := func() netip.Addr {
		var b [16]byte
		b[0], b[1], b[7], b[15] = 0xfe, 0x80, byte(r.IntN(4)), byte(r.IntN(16))
		return netip.AddrFrom16(b)
	}
	for done := 0; done < cases; done += 1000 {
		ps := make([]netip.Prefix, 8)
		for i := range ps {
			ps[i] = netip.PrefixFrom(addr(), 60+r.IntN(69)).Masked()
		}
		s := prefixes.Must(ps...)
		for range 1000 {
			a := addr()
			if r.IntN(2) == 0 {
				a = a.WithZone("x")
			}
			want := false
			for _, p := range ps {
				want = want || p.Contains(a) // false for a zone, says netip
			}
			if got := s.HasAddr(a); got != want {
				t.Fatalf("(%v).HasAddr(%v) = %v", s, a, got)
			}
		}
	}
}

// To net.IPNet and back, for every length of a thousand addresses of each
// family.
func TestIPNetKeepsTheMask(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	addrs := 1000
	if testing.Short() {
		addrs = 50
	}
	for range addrs {
		var b [16]byte
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		b[0] |= 0x20 // not IPv4-mapped
		for _, a := range []netip.Addr{netip.AddrFrom4([4]byte(b[:4])), netip.AddrFrom16(b)} {
			for n := range a.BitLen() + 1 {
				p := netip.PrefixFrom(a, n)
				f, err := prefixes.IPNet(p)
				if err != nil || f.Mask == nil || len(f.Mask)*8 != a.BitLen() || len(f.IP)*8 != a.BitLen() {
					t.Fatalf("IPNet(%v) = %#v, %v", p, f, err)
				}
				if back, err := prefixes.FromIPNet(f); err != nil || back != p.Masked() {
					t.Fatalf("%v came back as %v, %v", p, back, err)
				}
			}
		}
	}
}

// One bad or overlapping prefix costs none of the others.
// Who wins an overlap is not for a set to say: it keeps both.
func TestOneBadPrefixCostsNoOther(t *testing.T) {
	s, err := prefixes.Parse("10.1.0.0/16", "fe80::%eth0/64", "10.9.0.1/32", "10.1.2.0/24")
	if want := "10.1.0.0/16 10.1.2.0/24 10.9.0.1/32"; s.String() != want || err == nil {
		t.Errorf("got %q, %v; want %q", s, err, want)
	}
	a := prefixes.MustParse("10.1.0.0/16", "10.9.0.1/32")
	b := prefixes.MustParse("10.1.2.0/24", "10.9.0.2/32")
	if a.Union(b) != b.Union(a) || a.Union(b).Len() != 4 || !a.Overlaps(b) {
		t.Errorf("union %q, %q", a.Union(b), b.Union(a))
	}
	if b.Minus(a) != b {
		t.Errorf("%q: lost an element to another that merely overlaps", b.Minus(a))
	}
}

// The order of the input leaves no trace.
func TestShuffledInputIsTheSameSet(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 8))
	ps := make([]netip.Prefix, 0, 500)
	for i := range 250 {
		ps = append(ps,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(r.IntN(4)), byte(i), byte(r.IntN(256))}), 8+r.IntN(25)),
			netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, byte(r.IntN(4)), byte(i), 15: byte(r.IntN(256))}), 8+r.IntN(121)))
	}
	want := prefixes.Must(ps...)
	if !slices.IsSortedFunc(slices.Collect(want.All()), slowCompare) {
		t.Fatalf("not sorted: %v", want)
	}
	for range 100 {
		r.Shuffle(len(ps), func(i, j int) { ps[i], ps[j] = ps[j], ps[i] })
		got := prefixes.Must(ps...)
		if got != want || got.String() != want.String() {
			t.Fatalf("got %v\nwant %v", got, want)
		}
		var one prefixes.Set
		for _, p := range ps[:50] {
			one = one.With(p)
		}
		if one != prefixes.Must(ps[:50]...) {
			t.Fatal("built one by one, a set differs")
		}
	}
}

// Default routes are taken, for they are the mesh's to judge, but cannot hide:
// 128.0.0.0/0 is 0.0.0.0/0, and 0.0.0.0/0 is no other prefix.
func TestDefaultRouteCannotHide(t *testing.T) {
	def := pfx("0.0.0.0/0")
	s := prefixes.MustParse("128.0.0.0/0", "::ffff:192.0.2.1/96", "172.16.0.1/32")
	if want := "0.0.0.0/0 172.16.0.1/32"; s.String() != want {
		t.Errorf("got %q, want %q", s, want)
	}
	s = s.Without(pfx("1.2.3.4/0"))
	if s.String() != "172.16.0.1/32" || s.Has(def) {
		t.Errorf("without the default route: %q", s)
	}
	halves := prefixes.MustParse("0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1")
	if halves.Has(def) || !halves.CoversPrefix(def) || !halves.CoversPrefix(pfx("::/0")) {
		t.Errorf("%q: not seen to cover the default routes", halves)
	}
}

func TestCovers(t *testing.T) {
	for _, tt := range []struct {
		s, o string
		want bool
	}{
		{"10.0.0.0/8", "10.1.0.0/16 10.2.0.0/16", true},
		{"10.0.0.0/8 10.1.0.0/16", "10.0.0.0/16 10.2.0.0/16", true},
		{"10.0.0.0/9 10.128.0.0/9", "10.0.0.0/8", true},
		{"10.0.0.0/9 10.128.0.0/10 10.192.0.0/10", "10.0.0.0/8 10.0.0.0/10", true},
		{"10.0.0.0/9 10.128.0.0/10", "10.0.0.0/8", false},
		{"10.128.0.0/9", "10.0.0.0/8", false},
		{"10.0.0.0/9 10.0.0.0/10 10.128.0.0/9", "10.0.0.0/8", true},
		{"10.0.0.0/8", "10.0.0.0/8 fd00::/8", false},
		{"::/0", "10.0.0.0/8", false},
		{"0.0.0.0/0", "::/8", false},
		{"255.255.255.254/32 255.255.255.255/32", "255.255.255.254/31", true},
		{"255.255.255.255/32 ::/128", "255.255.255.255/32", true},
		{"fd00::/65 fd00:0:0:0:8000::/65 fd00:0:0:1::/64", "fd00::/63", true},
		{"ffff::/17 ffff:8000::/17", "ffff::/16", true},
	} {
		s, o := prefixes.MustParse(strings.Fields(tt.s)...), prefixes.MustParse(strings.Fields(tt.o)...)
		if got := s.Covers(o); got != tt.want {
			t.Errorf("(%v).Covers(%v) = %v", s, o, got)
		}
		if o.Len() == 1 && s.CoversPrefix(o.At(0)) != tt.want {
			t.Errorf("(%v).CoversPrefix(%v) = %v", s, o, !tt.want)
		}
	}
}

func TestLookup(t *testing.T) {
	s := prefixes.MustParse("0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.1.0/24", "10.1.1.1", "10.1.255.0/24", "fd00::/8", "fd00::/64")
	for a, want := range map[string]string{
		"10.1.1.1":        "10.1.1.1/32",
		"10.1.1.2":        "10.1.1.0/24",
		"10.1.2.0":        "10.1.0.0/16",
		"10.2.0.0":        "10.0.0.0/8",
		"11.0.0.0":        "0.0.0.0/0",
		"::ffff:10.2.0.0": "10.0.0.0/8",
		"fd00::1":         "fd00::/64",
		"fd00:0:0:1::":    "fd00::/8",
		"fe00::":          "invalid Prefix",
		"::":              "invalid Prefix",
		"fd00::1%x":       "invalid Prefix",
	} {
		got, ok := s.Lookup(netip.MustParseAddr(a))
		if got.String() != want || ok != got.IsValid() {
			t.Errorf("Lookup(%s) = %v, %v; want %s", a, got, ok, want)
		}
	}
}

// What is asked for every packet's worth of bookkeeping allocates nothing, and
// what is returned unchanged is not copied.
func TestAllocations(t *testing.T) {
	s := spread(1000, 0)
	o := spread(1000, 7)
	sub := s.Without(s.At(3), s.At(500))
	p, a := s.At(700), s.At(700).Addr()
	out := netip.MustParsePrefix("192.0.2.0/24")
	var yes bool
	more := sub.With(out) // shares some with s, and each has its own
	for _, tt := range []struct {
		name string
		want float64
		f    func()
	}{
		{"Has", 0, func() { yes = s.Has(p) }},
		{"Lookup", 0, func() { _, yes = s.Lookup(a) }},
		{"HasAddr", 0, func() { yes = s.HasAddr(a) }},
		{"Overlaps", 0, func() { yes = s.Overlaps(o) }},
		{"Covers", 0, func() { yes = s.Covers(sub) }},
		{"OverlapsPrefix", 0, func() { yes = s.OverlapsPrefix(out) }},
		{"CoversPrefix", 0, func() { yes = s.CoversPrefix(p) }},
		{"All", 0, func() {
			for range s.All() {
			}
		}},
		{"Compare", 0, func() { yes = prefixes.Compare(p, out) < 0 }},
		{"Union with a part", 0, func() { sink = s.Union(sub) }},
		{"Union into the whole", 0, func() { sink = sub.Union(s) }},
		{"Minus nothing", 0, func() { sink = s.Minus(o) }},
		{"Minus all", 0, func() { sink = sub.Minus(s) }},
		{"Intersect with the whole", 0, func() { sink = sub.Intersect(s) }},
		{"With what is there", 0, func() { sink = s.With(p) }},
		{"Union", 1, func() { sink = s.Union(o) }},
		{"Minus", 1, func() { sink = s.Minus(sub) }},
		{"Intersect", 1, func() { sink = more.Intersect(s) }},
		{"With", 1, func() { sink = s.With(out) }},
		{"New", 2, func() { sink, _ = prefixes.New(p, out) }},
	} {
		if got := testing.AllocsPerRun(10, tt.f); got > tt.want {
			t.Errorf("%s: %v allocations, want %v", tt.name, got, tt.want)
		}
	}
	_ = yes
}

var sink prefixes.Set

// spread is n prefixes of both families with gaps between them, of lengths
// that vary; other shifts give other prefixes in the same space.
func spread(n, shift int) prefixes.Set {
	ps := make([]netip.Prefix, n)
	for i := range ps {
		k := i*16 + shift
		if i%2 == 0 {
			ps[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(k >> 16), byte(k >> 8), byte(k)}), 32-i/2%2)
		} else {
			ps[i] = netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 5: byte(k >> 16), 6: byte(k >> 8), 7: byte(k)}), 64)
		}
	}
	return prefixes.Must(ps...)
}

func Benchmark(b *testing.B) {
	for _, n := range []int{10, 1000, 10000} {
		s, o := spread(n, 0), spread(n, 8)
		some := s.Without(slices.Collect(s.All())[n/2])
		p, miss := s.At(n*2/3), netip.MustParsePrefix("192.0.2.0/24")
		a := s.At(n * 2 / 3).Addr()
		ps := slices.Collect(s.All())
		rand.New(rand.NewPCG(1, 1)).Shuffle(len(ps), func(i, j int) { ps[i], ps[j] = ps[j], ps[i] })
		var yes bool
		for _, bb := range []struct {
			name string
			f    func()
		}{
			{"New/shuffled", func() { sink, _ = prefixes.New(ps...) }},
			{"Union/interleaved", func() { sink = s.Union(o) }},
			{"Union/subset", func() { sink = s.Union(some) }},
			{"Minus/one-left", func() { sink = s.Minus(some) }},
			{"Minus/nothing", func() { sink = s.Minus(o) }},
			{"With/one", func() { sink = s.With(miss) }},
			{"Has", func() { yes = s.Has(p) }},
			{"Lookup/hit", func() { _, yes = s.Lookup(a) }},
			{"Lookup/miss", func() { _, yes = s.Lookup(miss.Addr()) }},
			{"Overlaps/apart", func() { yes = s.Overlaps(o) }},
			{"Covers", func() { yes = s.Covers(some) }},
		} {
			b.Run(fmt.Sprintf("%s/%d", bb.name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					bb.f()
				}
			})
		}
		_ = yes
	}
}
