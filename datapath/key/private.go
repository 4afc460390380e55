package key

import (
	"crypto/ecdh"
	"crypto/rand"
	"fmt"
	"log/slog"
)

const privateKind = "private key"

// Private is the X25519 private key of a node (RFC 7748, section 5). The zero
// value is no key. It is comparable and never prints; see the package comment.
type Private struct {
	s secret
}

// NewPrivate makes a new key from the system's source of randomness. Since that
// source does not fail on supported systems, neither does NewPrivate; the error
// is there for callers that should not have to change when that does.
func NewPrivate() (Private, error) {
	var b [Size]byte
	if _, err := rand.Read(b[:]); err != nil {
		return Private{}, fmt.Errorf("key: new private key: %w", err)
	}
	return privateFrom(b)
}

// ParsePrivate reads a key as "wg genkey" prints it: 44 characters of padded
// standard base64, with nothing around them. A key of zeros, which WireGuard
// reads as "no key", is refused. The error says what is wrong and repeats
// nothing of s.
func ParsePrivate(s string) (Private, error) {
	b, err := decode(privateKind, s)
	if err != nil {
		return Private{}, err
	}
	return privateFrom(b)
}

// PrivateFromBytes makes a key of 32 bytes, which are copied. A key of zeros is
// refused.
func PrivateFromBytes(b []byte) (Private, error) {
	a, err := fromBytes(privateKind, b)
	if err != nil {
		return Private{}, err
	}
	return privateFrom(a)
}

// privateFrom clamps (RFC 7748, section 5, decodeScalar25519), so that == and
// what a device returns agree whatever the caller's bits were.
func privateFrom(b [Size]byte) (Private, error) {
	if b == [Size]byte{} {
		return Private{}, refused(privateKind, "all bits are zero")
	}
	b[0] &= 0xf8
	b[31] = b[31]&0x7f | 0x40
	return Private{newSecret(b)}, nil
}

// IsZero reports whether k is no key.
func (k Private) IsZero() bool { return k.s.isZero() }

// Public returns the public key that belongs to k, and the zero Public for the
// zero key. It computes a scalar multiplication each time; keep the result.
func (k Private) Public() Public {
	if k.IsZero() {
		return Public{}
	}
	return Public{[Size]byte(k.ecdh().PublicKey().Bytes())}
}

// Shared returns the X25519 function of k and p (RFC 7748, section 6.1). The
// result is not uniformly random: hash it before using it as a key. It fails if
// either key is zero or p is a point of low order, which no parsed Public is.
func (k Private) Shared(p Public) ([Size]byte, error) {
	if k.IsZero() {
		return [Size]byte{}, refused(privateKind, "none to agree a secret with")
	}
	remote, err := ecdh.X25519().NewPublicKey(p.b[:])
	if err != nil {
		return [Size]byte{}, fmt.Errorf("key: public key: %w", err)
	}
	s, err := k.ecdh().ECDH(remote)
	if err != nil {
		return [Size]byte{}, refused(publicKind, "a point of low order")
	}
	return [Size]byte(s), nil
}

// ecdh must not be called on the zero key.
func (k Private) ecdh() *ecdh.PrivateKey {
	b := k.s.bytes()
	e, err := ecdh.X25519().NewPrivateKey(b[:])
	if err != nil {
		panic("key: X25519 refused 32 bytes") // it checks the length only
	}
	return e
}

// Bytes returns the clamped key, as a copy that is the caller's, and zeros for
// the zero key. Bytes and Base64 are the only ways to the secret.
func (k Private) Bytes() [Size]byte { return k.s.bytes() }

// Base64 returns the clamped key as "wg genkey" prints it, without a newline,
// and "" for the zero key. Bytes and Base64 are the only ways to the secret.
func (k Private) Base64() string {
	if k.IsZero() {
		return ""
	}
	return encode(k.s.bytes())
}

// String returns "(private key)", or "(no private key)" for the zero key.
func (k Private) String() string { return k.s.text(privateKind) }

// GoString returns what String does.
func (k Private) GoString() string { return k.String() }

// Format writes what String returns, whatever the verb and flags.
func (k Private) Format(f fmt.State, _ rune) { fmt.Fprint(f, k.String()) }

// LogValue returns what String does.
func (k Private) LogValue() slog.Value { return slog.StringValue(k.String()) }

// MarshalText fails if k is set, and returns empty text if it is not.
func (k Private) MarshalText() ([]byte, error) { return k.s.marshal("") }

// MarshalJSON fails if k is set, and returns an empty string if it is not.
func (k Private) MarshalJSON() ([]byte, error) { return k.s.marshal(`""`) }
