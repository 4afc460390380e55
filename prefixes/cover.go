package prefixes

import (
	"net/netip"

	"go4.org/netipx"
)

// skew is how much smaller one set must be than the other for searching each of
// its elements to beat walking both.
const skew = 16

// Overlaps reports whether some address is in an element of s and in one of o.
func (s Set) Overlaps(o Set) bool {
	if s.Len() < o.Len() {
		s, o = o, s
	}
	if o.Len()*skew < s.Len() {
		for j := range o.Len() {
			if s.overlaps(o.elem(j)) {
				return true
			}
		}
		return false
	}
	for i, j := 0, 0; i < s.Len() && j < o.Len(); {
		e, f := s.elem(i), o.elem(j)
		switch {
		case contains(e, f), contains(f, e):
			return true
		case e < f: // and wholly so: prefixes nest or are apart
			i++
		default:
			j++
		}
	}
	return false
}

// OverlapsPrefix reports whether some address of p is in s. It is false for a
// prefix that [Canonical] refuses.
func (s Set) OverlapsPrefix(p netip.Prefix) bool {
	e := encodeAny(p)
	return s.overlaps(string(e[:]))
}

func (s Set) overlaps(f string) bool {
	if i := s.search(0, s.Len(), f); i < s.Len() && contains(f, s.elem(i)) {
		return true
	}
	return s.longest(f) >= 0
}

// Covers reports whether every address in o is in s, be it by one element or by
// several: 10.0.0.0/9 and 10.128.0.0/9 cover 10.0.0.0/8. The empty set is
// covered by every set.
func (s Set) Covers(o Set) bool {
	if s.enc == o.enc {
		return true
	}
	outer := "" // the element of o that was looked at last; those inside it are covered too
	i := 0
	for j := range o.Len() {
		f := o.elem(j)
		if outer != "" && contains(outer, f) {
			continue
		}
		outer = f
		for i < s.Len() && before(s.elem(i), f) {
			i++
		}
		var ok bool
		if i, ok = s.sweep(i, f); !ok {
			return false
		}
	}
	return true
}

// CoversPrefix reports whether every address of p is in s. It is false for a
// prefix that [Canonical] refuses.
func (s Set) CoversPrefix(p netip.Prefix) bool {
	e := encodeAny(p)
	f := string(e[:])
	if e[0] == 0 {
		return false
	}
	if s.longest(f) >= 0 {
		return true
	}
	_, ok := s.sweep(s.search(0, s.Len(), f), f)
	return ok
}

// before reports whether all of e comes before all of f.
func before(e, f string) bool {
	return e[0] < f[0] || e[0] == f[0] && last(e).less(first(f))
}

// sweep reports whether elements from index i on cover f. No element before i
// may reach into f. It returns the index from which to go on for an element
// that lies after f.
func (s Set) sweep(i int, f string) (int, bool) {
	want, end := first(f), last(f) // want: the first address not yet covered
	for ; i < s.Len(); i++ {
		e := s.elem(i)
		if e[0] != f[0] || want.less(first(e)) {
			return i, false
		}
		l := last(e)
		if !l.less(end) {
			return i, true // not past it: it may reach into the next one too
		}
		if !l.less(want) {
			want = l.next()
		}
	}
	return i, false
}

// HasAddr reports whether a is in s. An IPv4-mapped address is looked up as
// IPv4. An address with a zone is in no set: which link it is on is no part of
// a prefix, so any other answer would be a guess.
func (s Set) HasAddr(a netip.Addr) bool {
	_, ok := s.Lookup(a)
	return ok
}

// Lookup returns the longest element of s that contains a. Mapped addresses and
// zones are treated as by [Set.HasAddr].
func (s Set) Lookup(a netip.Addr) (netip.Prefix, bool) {
	h := Host(a)
	if !h.IsValid() {
		return netip.Prefix{}, false
	}
	e := encode(h)
	i := s.longest(string(e[:]))
	if i < 0 {
		return netip.Prefix{}, false
	}
	return s.At(i), true
}

// longest returns the index of the longest element that contains f, or -1.
//
// The last element not after f is the answer if it contains f. If not, they
// agree in some c leading bits only, and as whatever contains f and stands
// further to the front contains that element too, it has at most c bits: search
// again, for the first c bits of f. So there are at most as many searches as
// there are lengths that differ on the way up, mostly one or two.
func (s Set) longest(f string) int {
	a := first(f)
	key := elem([]byte(f))
	for hi := s.Len(); ; {
		i := s.search(0, hi, string(key[:]))
		if i == hi || s.elem(i) != string(key[:]) {
			i--
		}
		if i < 0 || s.elem(i)[0] != f[0] {
			return -1
		}
		e := s.elem(i)
		c := common(first(e), a)
		if int(e[iBits]) <= c {
			return i
		}
		key.cut(a, c)
		hi = i
	}
}

// IPSet returns the addresses that s covers.
func (s Set) IPSet() *netipx.IPSet {
	var b netipx.IPSetBuilder
	for p := range s.All() {
		b.AddPrefix(p)
	}
	set, err := b.IPSet()
	if err != nil {
		panic("prefixes: element refused by netipx: " + err.Error())
	}
	return set
}
