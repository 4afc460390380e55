package prefixes

import (
	"bytes"
	"iter"
	"net/netip"
	"slices"
	"strings"
)

// Set is an immutable set of canonical prefixes. The zero value is the empty
// set. Two sets with the same elements are equal under ==, whatever the order
// they were given in, and a Set can be the key of a map.
//
// A Set is safe for use by any number of goroutines. Methods that return a Set
// return their receiver or argument itself, without allocating, where that is
// the answer.
type Set struct {
	// enc is the elements one after the other, sorted, without duplicates. A
	// string, because == then compares contents and nobody can write to it.
	enc string
}

// New returns the set of ps. Host bits are cut without a word and duplicates
// melt into one; [Canonical] tells of the former.
//
// Prefixes that Canonical refuses are left out and named, each by an *[Error]
// in the joined error; the set of the others is returned with it, so that one
// bad prefix need not cost the rest.
func New(ps ...netip.Prefix) (Set, error) {
	var errs []error
	es := make([]elem, 0, len(ps))
	for _, p := range ps {
		c, _, err := Canonical(p)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		es = append(es, encode(c))
	}
	return fromElems(es), join(errs)
}

// Must is New for prefixes known to be good. It panics on an error.
func Must(ps ...netip.Prefix) Set {
	s, err := New(ps...)
	if err != nil {
		panic(err)
	}
	return s
}

// Parse returns the set of the given texts, each a prefix ("10.0.0.0/8") or an
// address ("10.0.0.1", the same as "10.0.0.1/32"). Errors are those of [New],
// and a text with a zone ("fe80::1%eth0/64") is refused.
func Parse(s ...string) (Set, error) {
	var errs []error
	es := make([]elem, 0, len(s))
	for _, t := range s {
		p, err := parse(t)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		es = append(es, encodeAny(p))
	}
	return fromElems(es), join(errs)
}

// MustParse is Parse for texts known to be good. It panics on an error.
func MustParse(s ...string) Set {
	set, err := Parse(s...)
	if err != nil {
		panic(err)
	}
	return set
}

// fromElems sorts es in place.
func fromElems(es []elem) Set {
	cmp := func(a, b elem) int { return bytes.Compare(a[:], b[:]) }
	if !slices.IsSortedFunc(es, cmp) {
		slices.SortFunc(es, cmp)
	}
	es = slices.Compact(es)
	var b strings.Builder
	b.Grow(len(es) * size)
	for i := range es {
		b.Write(es[i][:])
	}
	return Set{b.String()}
}

// Len returns the number of elements.
func (s Set) Len() int { return len(s.enc) / size }

// IsEmpty reports whether s has no elements.
func (s Set) IsEmpty() bool { return s.enc == "" }

// At returns element i in canonical order. It panics unless 0 <= i < Len().
func (s Set) At(i int) netip.Prefix { return decode(s.elem(i)) }

// All yields the elements in canonical order.
func (s Set) All() iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for i := range s.Len() {
			if !yield(s.At(i)) {
				return
			}
		}
	}
}

// Has reports whether the canonical form of p is an element of s. A prefix
// that [Canonical] refuses is in no set.
func (s Set) Has(p netip.Prefix) bool {
	e := encodeAny(p)
	i := s.search(0, s.Len(), string(e[:]))
	return i < s.Len() && s.elem(i) == string(e[:])
}

// Union returns the elements that are in s, in o, or in both.
func (s Set) Union(o Set) Set {
	both := s.shared(o)
	switch both {
	case o.Len():
		return s
	case s.Len():
		return o
	}
	var b strings.Builder
	b.Grow((s.Len() + o.Len() - both) * size)
	i, j := 0, 0
	for i < s.Len() && j < o.Len() {
		k := s.seek(i, o.elem(j))
		b.WriteString(s.slice(i, k))
		if i = k; i == s.Len() {
			break
		}
		k = o.seek(j, s.elem(i))
		b.WriteString(o.slice(j, k))
		if j = k; j < o.Len() && o.elem(j) == s.elem(i) {
			j++ // s writes it
		}
	}
	b.WriteString(s.slice(i, s.Len()))
	b.WriteString(o.slice(j, o.Len()))
	return Set{b.String()}
}

// Minus returns the elements of s that are not in o. An element of s inside one
// of o stays: the algebra is by element.
func (s Set) Minus(o Set) Set {
	both := s.shared(o)
	switch both {
	case 0:
		return s
	case s.Len():
		return Set{}
	}
	var b strings.Builder
	b.Grow((s.Len() - both) * size)
	i := 0
	for k := range s.matches(o) {
		b.WriteString(s.slice(i, k))
		i = k + 1
	}
	b.WriteString(s.slice(i, s.Len()))
	return Set{b.String()}
}

// Intersect returns the elements that are in both s and o.
func (s Set) Intersect(o Set) Set {
	both := s.shared(o)
	switch both {
	case s.Len():
		return s
	case o.Len():
		return o
	case 0:
		return Set{}
	}
	var b strings.Builder
	b.Grow(both * size)
	for k := range s.matches(o) {
		b.WriteString(s.elem(k))
	}
	return Set{b.String()}
}

// With returns s and the given prefixes, in canonical form. It panics on a
// prefix that [Canonical] refuses: leaving it out would be silent, so whatever
// comes from outside goes through [New] or [Parse].
func (s Set) With(p ...netip.Prefix) Set {
	if len(p) != 1 {
		return s.Union(Must(p...))
	}
	c, _, err := Canonical(p[0])
	if err != nil {
		panic(err)
	}
	e := encode(c)
	i := s.search(0, s.Len(), string(e[:]))
	if i < s.Len() && s.elem(i) == string(e[:]) {
		return s
	}
	return Set{s.slice(0, i) + string(e[:]) + s.slice(i, s.Len())}
}

// Without returns s less the given prefixes, in canonical form. Those that are
// not in s are no matter, but like [Set.With] it panics on a prefix that
// [Canonical] refuses.
func (s Set) Without(p ...netip.Prefix) Set {
	return s.Minus(Must(p...))
}

// Diff returns what turns old into new: the elements to add and those to remove.
func Diff(old, new Set) (added, removed Set) {
	return new.Minus(old), old.Minus(new)
}

func (s Set) elem(i int) string     { return s.enc[i*size : i*size+size] }
func (s Set) slice(i, j int) string { return s.enc[i*size : j*size] }

// search returns the first index in [lo, hi) whose element is not before key,
// or hi.
func (s Set) search(lo, hi int, key string) int {
	for lo < hi {
		m := int(uint(lo+hi) >> 1)
		if s.elem(m) < key {
			lo = m + 1
		} else {
			hi = m
		}
	}
	return lo
}

// seek is search from index i to the end, in steps that double: as cheap as
// walking where two sets interleave, and as searching where they do not.
func (s Set) seek(i int, key string) int {
	lo, step := i, 1
	for lo+step <= s.Len() && s.elem(lo+step-1) < key {
		lo += step
		step *= 2
	}
	return s.search(lo, min(lo+step-1, s.Len()), key)
}

// matches yields the indexes in s of the elements that are also in o.
func (s Set) matches(o Set) iter.Seq[int] {
	return func(yield func(int) bool) {
		for i, j := 0, 0; i < s.Len() && j < o.Len(); {
			if i = s.seek(i, o.elem(j)); i == s.Len() {
				return
			}
			if j = o.seek(j, s.elem(i)); j < o.Len() && o.elem(j) == s.elem(i) {
				if !yield(i) {
					return
				}
				i, j = i+1, j+1
			}
		}
	}
}

// shared is the number of elements in both. Counting before copying is what
// lets results be allocated once, in their size, or not at all.
func (s Set) shared(o Set) int {
	if s.enc == o.enc {
		return s.Len()
	}
	n := 0
	for range s.matches(o) {
		n++
	}
	return n
}
