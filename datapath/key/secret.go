package key

import (
	"crypto/rand"
	"errors"
	"sync"
	"unique"
)

// Size is the length of every key, in bytes.
const Size = 32

// errMarshal is what marshalling a key that is set returns. It has no detail:
// the type that was marshalled is named by the encoder.
var errMarshal = errors.New("key: a secret key is never marshalled; Base64 gives its text on purpose")

// mask is a random value, fixed for the life of the process, that the bytes of
// every secret are combined with before they are interned.
//
// Package fmt stops at the pointer inside a unique.Handle. Printers that walk
// values with reflection and follow pointers do not, and the failure messages of
// test libraries are made with those; what they find is the masked bytes. It
// guards against printing only, not against anything that reads memory.
var mask = sync.OnceValue(func() (m [Size]byte) {
	rand.Read(m[:])
	return m
})

// secret is 32 bytes that compare with == and do not print. The zero secret is
// none, and is different from 32 zero bytes.
type secret struct {
	h unique.Handle[string]
}

func newSecret(b [Size]byte) secret {
	m := mask()
	for i := range b {
		b[i] ^= m[i]
	}
	return secret{unique.Make(string(b[:]))}
}

func (s secret) isZero() bool { return s == secret{} }

// bytes returns zeros for the zero secret.
func (s secret) bytes() (b [Size]byte) {
	if s.isZero() {
		return b
	}
	m := mask()
	masked := s.h.Value()
	for i := range b {
		b[i] = masked[i] ^ m[i]
	}
	return b
}

// text is what stands in for the secret in output.
func (s secret) text(kind string) string {
	if s.isZero() {
		return "(no " + kind + ")"
	}
	return "(" + kind + ")"
}

func (s secret) marshal(empty string) ([]byte, error) {
	if s.isZero() {
		return []byte(empty), nil
	}
	return nil, errMarshal
}
