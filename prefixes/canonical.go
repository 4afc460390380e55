package prefixes

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/bits"
	"net/netip"
	"strconv"
	"strings"
)

// Error says why a value was refused as a prefix.
type Error struct {
	Value  string // as it was given
	Reason string // follows the value in a sentence: "has a zone"
}

// Error quotes the value, and cuts one far longer than any prefix: it may come
// from another node, and end up in a log.
func (e *Error) Error() string {
	const most = 80
	v, rest := e.Value, ""
	if len(v) > most {
		v, rest = v[:most], "..."
	}
	return "prefix " + strconv.Quote(v) + rest + ": " + e.Reason
}

// Canonical returns the canonical form of p: host bits cut, and IPv4-mapped
// IPv6 of /96 or longer turned into IPv4. masked reports whether host bits were
// cut; unmapping alone leaves it false.
//
// It refuses, with an *[Error], a prefix that is not valid, and an IPv4-mapped
// address with a prefix shorter than /96: that reaches beyond IPv4, so it is
// most likely an IPv4 length put on an IPv6 address, and ::ffff:10.0.0.0/8
// would otherwise come out as ::/8.
//
// A [netip.Prefix] cannot carry a zone ([netip.PrefixFrom] drops it), so a zone
// can be seen, and is refused, only where text is read: [Parse].
func Canonical(p netip.Prefix) (c netip.Prefix, masked bool, err error) {
	c, masked, reason := canonical(p)
	if reason != "" {
		return netip.Prefix{}, false, &Error{Value: text(p), Reason: reason}
	}
	return c, masked, nil
}

func canonical(p netip.Prefix) (c netip.Prefix, masked bool, reason string) {
	a := p.Addr()
	switch {
	case !a.IsValid():
		return c, false, "is not a prefix"
	case !p.IsValid():
		return c, false, "has a length out of range"
	case a.Is4In6():
		if p.Bits() < 96 {
			return c, false, "is IPv4-mapped and shorter than /96"
		}
		p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
	}
	c = p.Masked()
	return c, c != p, ""
}

// text names p in an error; netip calls every invalid prefix the same.
func text(p netip.Prefix) string {
	if p.Addr().IsValid() && !p.IsValid() {
		return p.Addr().String() + "/?"
	}
	return p.String()
}

// Host returns the prefix that holds a alone: /32 for IPv4, also where a is
// IPv4-mapped, and /128 for IPv6. It returns the zero Prefix for an address
// that is not valid or has a zone: fe80::1%eth0 and fe80::1%eth1 are two
// addresses, and a prefix could not tell them apart.
func Host(a netip.Addr) netip.Prefix {
	if !a.IsValid() || a.Zone() != "" {
		return netip.Prefix{}
	}
	a = a.Unmap()
	return netip.PrefixFrom(a, a.BitLen())
}

// Compare orders a and b as a [Set] does: IPv4 before IPv6, then by address,
// then shorter before longer. It compares canonical forms, so 10.0.0.1/8 and
// 10.0.0.0/8 compare as equal. A prefix that [Canonical] refuses comes before
// all others.
func Compare(a, b netip.Prefix) int {
	x, y := encodeAny(a), encodeAny(b)
	return bytes.Compare(x[:], y[:])
}

// parse reads one prefix, or a bare address as its host prefix. The prefix is
// valid but not yet canonical.
func parse(s string) (netip.Prefix, error) {
	refuse := func(reason string) (netip.Prefix, error) {
		return netip.Prefix{}, &Error{Value: s, Reason: reason}
	}
	if strings.Contains(s, "%") {
		return refuse("has a zone")
	}
	if !strings.Contains(s, "/") {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return refuse("is neither a prefix nor an address")
		}
		return Host(a), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		if _, err := netip.ParseAddr(s[:strings.LastIndexByte(s, '/')]); err != nil {
			return refuse("is not a prefix: bad address")
		}
		return refuse("is not a prefix: bad length")
	}
	if _, _, reason := canonical(p); reason != "" {
		return refuse(reason)
	}
	return p, nil
}

// elem is one canonical prefix, written so that the order of the bytes is the
// canonical order: family (4 or 6), address with IPv4 at the left of its 16
// bytes, length in bits.
type elem [size]byte

const (
	size  = 18
	iBits = size - 1
)

func encode(c netip.Prefix) (e elem) {
	if a := c.Addr(); a.Is4() {
		b := a.As4()
		e[0] = 4
		copy(e[1:], b[:])
	} else {
		b := a.As16()
		e[0] = 6
		copy(e[1:], b[:])
	}
	e[iBits] = byte(c.Bits())
	return e
}

// encodeAny is for questions: a prefix without a canonical form becomes the
// zero elem, which is in no set and in no family.
func encodeAny(p netip.Prefix) elem {
	c, _, reason := canonical(p)
	if reason != "" {
		return elem{}
	}
	return encode(c)
}

// The functions below take an element as a slice of a set's string.

func decode(e string) netip.Prefix {
	n := int(e[iBits])
	if e[0] == 4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte([]byte(e[1:5]))), n)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte([]byte(e[1:17]))), n)
}

// u128 is an address, IPv4 in its 32 high bits, so that one arithmetic serves
// both families.
type u128 struct{ hi, lo uint64 }

func (a u128) less(b u128) bool {
	return a.hi < b.hi || a.hi == b.hi && a.lo < b.lo
}

func (a u128) next() u128 {
	lo, carry := bits.Add64(a.lo, 1, 0)
	return u128{a.hi + carry, lo}
}

// hostBits has the bits set that a prefix of n bits leaves open.
func hostBits(n byte) u128 {
	if n < 64 {
		return u128{^uint64(0) >> n, ^uint64(0)}
	}
	return u128{0, ^uint64(0) >> (n - 64)}
}

// common is the number of leading bits in which a and b agree.
func common(a, b u128) int {
	if x := a.hi ^ b.hi; x != 0 {
		return bits.LeadingZeros64(x)
	}
	return 64 + bits.LeadingZeros64(a.lo^b.lo)
}

func first(e string) u128 {
	return u128{load(e[1:9]), load(e[9:17])}
}

func load(s string) uint64 {
	_ = s[7]
	return uint64(s[7]) | uint64(s[6])<<8 | uint64(s[5])<<16 | uint64(s[4])<<24 |
		uint64(s[3])<<32 | uint64(s[2])<<40 | uint64(s[1])<<48 | uint64(s[0])<<56
}

// last is the highest address of e. For IPv4 the unused low bits are ones, so
// that the address after it is the next IPv4 address.
func last(e string) u128 {
	f, h := first(e), hostBits(e[iBits])
	return u128{f.hi | h.hi, f.lo | h.lo}
}

// contains reports whether every address of f is in e.
func contains(e, f string) bool {
	return e[0] == f[0] && e[iBits] <= f[iBits] && common(first(e), first(f)) >= int(e[iBits])
}

// cut sets e to the first n bits of address a, in the family e has.
func (e *elem) cut(a u128, n int) {
	h := hostBits(byte(n))
	binary.BigEndian.PutUint64(e[1:9], a.hi&^h.hi)
	binary.BigEndian.PutUint64(e[9:17], a.lo&^h.lo)
	e[iBits] = byte(n)
}

func join(errs []error) error {
	if len(errs) == 0 {
		return nil
	}
	return errors.Join(errs...)
}
