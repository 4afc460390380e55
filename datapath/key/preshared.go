package key

import (
	"crypto/rand"
	"fmt"
	"log/slog"
)

const presharedKind = "preshared key"

// Preshared is the symmetric key that two peers mix into their handshakes
// (https://www.wireguard.com/protocol/). The zero value is no key. It is
// comparable and never prints; see the package comment.
type Preshared struct {
	s secret
}

// NewPreshared makes a new key from the system's source of randomness. As
// [NewPrivate], it does not fail on supported systems.
func NewPreshared() (Preshared, error) {
	var b [Size]byte
	if _, err := rand.Read(b[:]); err != nil {
		return Preshared{}, fmt.Errorf("key: new preshared key: %w", err)
	}
	return presharedFrom(b), nil
}

// ParsePreshared reads a key as "wg genpsk" prints it: 44 characters of padded
// standard base64, with nothing around them. A key of zeros is the zero
// Preshared, as it is to a WireGuard device. The error says what is wrong and
// repeats nothing of s.
func ParsePreshared(s string) (Preshared, error) {
	b, err := decode(presharedKind, s)
	if err != nil {
		return Preshared{}, err
	}
	return presharedFrom(b), nil
}

// PresharedFromBytes makes a key of 32 bytes, which are copied. A key of zeros
// is the zero Preshared.
func PresharedFromBytes(b []byte) (Preshared, error) {
	a, err := fromBytes(presharedKind, b)
	if err != nil {
		return Preshared{}, err
	}
	return presharedFrom(a), nil
}

func presharedFrom(b [Size]byte) Preshared {
	if b == [Size]byte{} {
		return Preshared{}
	}
	return Preshared{newSecret(b)}
}

// IsZero reports whether k is no key.
func (k Preshared) IsZero() bool { return k.s.isZero() }

// Bytes returns the key, as a copy that is the caller's, and zeros for the zero
// key. Bytes and Base64 are the only ways to the secret.
func (k Preshared) Bytes() [Size]byte { return k.s.bytes() }

// Base64 returns the key as "wg genpsk" prints it, without a newline, and ""
// for the zero key. Bytes and Base64 are the only ways to the secret.
func (k Preshared) Base64() string {
	if k.IsZero() {
		return ""
	}
	return encode(k.s.bytes())
}

// String returns "(preshared key)", or "(no preshared key)" for the zero key.
func (k Preshared) String() string { return k.s.text(presharedKind) }

// GoString returns what String does.
func (k Preshared) GoString() string { return k.String() }

// Format writes what String returns, whatever the verb and flags.
func (k Preshared) Format(f fmt.State, _ rune) { fmt.Fprint(f, k.String()) }

// LogValue returns what String does.
func (k Preshared) LogValue() slog.Value { return slog.StringValue(k.String()) }

// MarshalText fails if k is set, and returns empty text if it is not.
func (k Preshared) MarshalText() ([]byte, error) { return k.s.marshal("") }

// MarshalJSON fails if k is set, and returns an empty string if it is not.
func (k Preshared) MarshalJSON() ([]byte, error) { return k.s.marshal(`""`) }
