package key

import (
	"fmt"
	"strings"
	"testing"
)

// checkSilent fails if err is not one of the few texts that can be said of an
// input of that length, or if it has six characters in a row of an input that is
// not itself made of those texts.
func checkSilent(t *testing.T, kind, in string, err error) {
	t.Helper()
	start := "key: " + kind + " key: "
	known := []string{
		fmt.Sprintf("%s%d characters long, want 44 of base64", start, len(in)),
		start + "does not end in the padding character",
		start + "bits after the last byte are not zero",
		start + "all bits are zero",
		start + "a point of low order",
		start + "the top bit is set, which is another spelling of a key without it",
		start + "not below 2^255-19, which is another spelling of a smaller number",
	}
	for i := range 43 {
		known = append(known, fmt.Sprintf("%scharacter %d is not of the base64 alphabet", start, i+1))
	}
	text := err.Error()
	fixed := false
	for _, k := range known {
		fixed = fixed || k == text
	}
	if !fixed {
		t.Fatalf("unknown error %q", text)
	}
	vocabulary := strings.Join(known, "\n")
	for i := 0; i+6 <= len(in); i++ {
		if part := in[i : i+6]; strings.Contains(text, part) && !strings.Contains(vocabulary, part) {
			t.Fatalf("error %q repeats %q of the input", text, part)
		}
	}
}

func FuzzParsePrivate(f *testing.F) {
	f.Add(fixed().Base64())
	f.Add("")
	f.Fuzz(func(t *testing.T, in string) {
		k, err := ParsePrivate(in)
		psk, pskErr := ParsePreshared(in)
		if err != nil {
			checkSilent(t, "private", in, err)
			if !k.IsZero() {
				t.Fatal("a key and an error")
			}
		}
		if pskErr != nil {
			checkSilent(t, "preshared", in, pskErr)
			if err == nil {
				t.Fatalf("a private key, but no preshared key: %v", pskErr)
			}
		} else if !psk.IsZero() && (psk.Base64() != in || err != nil) {
			t.Fatalf("%q became another preshared key, or is no private key: %v", in, err)
		}
		if err == nil {
			if back, err := ParsePrivate(k.Base64()); err != nil || back != k {
				t.Fatalf("the text of the key is another key: %v", err)
			}
			// Only the clamped bits, in the first and the last two characters
			// that hold the first and last byte, may differ from the input.
			if out := k.Base64(); out[2:41] != in[2:41] {
				t.Fatalf("%q became another private key", in)
			}
		}
	})
}

func FuzzParsePublic(f *testing.F) {
	f.Add(fixed().Public().String())
	f.Add("")
	f.Fuzz(func(t *testing.T, in string) {
		p, err := ParsePublic(in)
		if err != nil {
			checkSilent(t, "public", in, err)
			if !p.IsZero() {
				t.Fatal("a key and an error")
			}
			return
		}
		if p.String() != in {
			t.Fatalf("%q became %q", in, p.String())
		}
		b := p.Bytes()
		checkPublic(t, b[:])
		if _, err := fixed().Shared(p); err != nil {
			t.Fatalf("%q is accepted, but there is no secret to agree: %v", in, err)
		}
	})
}
