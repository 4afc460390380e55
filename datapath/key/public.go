package key

import "bytes"

const publicKind = "public key"

// Public is an X25519 public key (RFC 7748, section 5): the name of a peer. The
// zero value is no key. It is comparable, and prints as base64 wherever package
// fmt can call its methods.
type Public struct {
	b [Size]byte
}

// ParsePublic reads a key as "wg pubkey" prints it: 44 characters of padded
// standard base64, with nothing around them. It refuses what [PublicFromBytes]
// does. The error says what is wrong and repeats nothing of s, which may be a
// private key in the wrong place.
func ParsePublic(s string) (Public, error) {
	b, err := decode(publicKind, s)
	if err != nil {
		return Public{}, err
	}
	return publicFrom(b)
}

// PublicFromBytes makes a key of 32 bytes, which are copied. It refuses
// encodings other than the shortest of a field element (the top bit set, or a
// number of 2^255-19 and above), because a key with two spellings would be two
// peers, and points of low order, with which every private key agrees the same
// secret. No private key has such a public key.
func PublicFromBytes(b []byte) (Public, error) {
	a, err := fromBytes(publicKind, b)
	if err != nil {
		return Public{}, err
	}
	return publicFrom(a)
}

func publicFrom(b [Size]byte) (Public, error) {
	switch {
	case b[Size-1]&0x80 != 0:
		return Public{}, refused(publicKind, "the top bit is set, which is another spelling of a key without it")
	case !belowPrime(b):
		return Public{}, refused(publicKind, "not below 2^255-19, which is another spelling of a smaller number")
	case lowOrder(b):
		return Public{}, refused(publicKind, "a point of low order")
	}
	return Public{b}, nil
}

// belowPrime reports whether the little-endian number in b, of which the top
// bit is clear, is less than 2^255-19.
func belowPrime(b [Size]byte) bool {
	if b[Size-1] != 0x7f {
		return true
	}
	for _, c := range b[1 : Size-1] {
		if c != 0xff {
			return true
		}
	}
	return b[0] < 0xed
}

// lowOrder reports whether b, the shortest encoding of a number, is one of the
// five u-coordinates whose order divides the cofactor of the curve (8) or of its
// twist (4). Comparing takes nanoseconds where trying a multiplication takes
// tens of microseconds, for each peer of each reading of a device.
func lowOrder(b [Size]byte) bool {
	switch string(b[:]) {
	case "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" + // 0, order 2
		"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		"\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00" + // 1, order 4
			"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		"\xec\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff" + // -1, order 4 on the twist
			"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
		"\xe0\xeb\x7a\x7c\x3b\x41\xb8\xae\x16\x56\xe3\xfa\xf1\x9f\xc4\x6a" + // order 8
			"\xda\x09\x8d\xeb\x9c\x32\xb1\xfd\x86\x62\x05\x16\x5f\x49\xb8\x00",
		"\x5f\x9c\x95\xbc\xa3\x50\x8c\x24\xb1\xd0\xb1\x55\x9c\x83\xef\x5b" + // order 8
			"\x04\x44\x5c\xc4\x58\x1c\x8e\x86\xd8\x22\x4e\xdd\xd0\x9f\x11\x57":
		return true
	}
	return false
}

// IsZero reports whether p is no key.
func (p Public) IsZero() bool { return p == Public{} }

// Bytes returns the 32 bytes of p, and zeros for the zero key.
func (p Public) Bytes() [Size]byte { return p.b }

// Compare orders keys by their bytes: -1 if p is before q, 0 if they are equal,
// 1 if p is after q. The zero key is before all others.
func (p Public) Compare(q Public) int { return bytes.Compare(p.b[:], q.b[:]) }

// String returns p in base64, as "wg pubkey" prints it, and "(none)" for the
// zero key, as wg does.
func (p Public) String() string {
	if p.IsZero() {
		return "(none)"
	}
	return encode(p.b)
}

// Short returns the first eight characters of String and an ellipsis, which is
// enough to tell peers apart in a log and not enough to find one by. The zero
// key is "(none)".
func (p Public) Short() string {
	if p.IsZero() {
		return "(none)"
	}
	return encode(p.b)[:8] + "…"
}

// MarshalText returns p in base64, and empty text for the zero key.
func (p Public) MarshalText() ([]byte, error) {
	if p.IsZero() {
		return []byte{}, nil
	}
	return []byte(p.String()), nil
}

// UnmarshalText accepts what [ParsePublic] does, and empty text as the zero key.
// p is left as it was if there is an error.
func (p *Public) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*p = Public{}
		return nil
	}
	q, err := ParsePublic(string(text))
	if err != nil {
		return err
	}
	*p = q
	return nil
}
