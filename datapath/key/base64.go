package key

import (
	"encoding/base64"
	"errors"
	"fmt"
)

// textSize is the length of a key in base64, in characters: 43 that carry bits
// and one of padding.
const textSize = 44

// decode reads the 44 characters of padded standard base64 (RFC 4648, section
// 4) that WireGuard's tools write. The kind of key starts the error, which
// repeats nothing of s.
//
// The alphabet is checked here because encoding/base64 skips line breaks.
func decode(kind, s string) (b [Size]byte, err error) {
	if len(s) != textSize {
		return b, fmt.Errorf("key: %s: %d characters long, want %d of base64", kind, len(s), textSize)
	}
	for i := range textSize - 1 {
		if !inAlphabet(s[i]) {
			return b, fmt.Errorf("key: %s: character %d is not of the base64 alphabet", kind, i+1)
		}
	}
	if s[textSize-1] != '=' {
		return b, fmt.Errorf("key: %s: does not end in the padding character", kind)
	}
	// Only the two bits that the last character has beyond 256 can be wrong now.
	if _, err := base64.StdEncoding.Strict().Decode(b[:], []byte(s)); err != nil {
		return [Size]byte{}, fmt.Errorf("key: %s: bits after the last byte are not zero", kind)
	}
	return b, nil
}

func inAlphabet(c byte) bool {
	return 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '+' || c == '/'
}

func encode(b [Size]byte) string { return base64.StdEncoding.EncodeToString(b[:]) }

// fromBytes copies b, which must be 32 bytes long.
func fromBytes(kind string, b []byte) (a [Size]byte, err error) {
	if len(b) != Size {
		return a, fmt.Errorf("key: %s: %d bytes long, want %d", kind, len(b), Size)
	}
	return [Size]byte(b), nil
}

func refused(kind, why string) error { return errors.New("key: " + kind + ": " + why) }
