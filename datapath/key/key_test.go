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

// RFC 7748, section 6.1: Alice and Bob.
func TestSharedOfRFC7748(t *testing.T) {
	const shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
	for _, c := range []struct{ private, public, remote string }{
		{
			"77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
			"8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
			"de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f",
		},
		{
			"5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
			"de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f",
			"8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
		},
	} {
		k, err := PrivateFromBytes(unhex(t, c.private))
		if err != nil {
			t.Fatal(err)
		}
		if got := k.Public().Bytes(); hex.EncodeToString(got[:]) != c.public {
			t.Errorf("public key: got %x, want %s", got, c.public)
		}
		remote, err := PublicFromBytes(unhex(t, c.remote))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := k.Shared(remote); err != nil || hex.EncodeToString(got[:]) != shared {
			t.Errorf("shared secret: got %x, %v, want %s", got, err, shared)
		}
	}
}

// What Wycheproof accepts with the remark that the key is of low order or not
// canonical is refused here when it becomes a Public; all else must agree. The file has a licence of its own and is
// not part of the repository: where it is not beside the checkout, this is skipped, also with CI=true.
func TestSharedOfWycheproof(t *testing.T) {
	name := filepath.Join("..", "..", "..", "shared", "wycheproof", "x25519_test.json")
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("needs Wycheproof's x25519_test.json at %s", name)
	}
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		TestGroups []struct {
			Tests []struct {
				ID                      int `json:"tcId"`
				Comment                 string
				Flags                   []string
				Public, Private, Shared string
			}
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	agreed, refused := 0, 0
	for _, g := range file.TestGroups {
		for _, c := range g.Tests {
			k, err := PrivateFromBytes(unhex(t, c.Private))
			if err != nil {
				t.Errorf("%d (%s): private key: %v", c.ID, c.Comment, err)
				continue
			}
			p, err := PublicFromBytes(unhex(t, c.Public))
			bad := slices.Contains(c.Flags, "LowOrderPublic") || slices.Contains(c.Flags, "NonCanonicalPublic") ||
				unhex(t, c.Public)[Size-1]&0x80 != 0
			if bad != (err != nil) {
				t.Errorf("%d (%s, %v): public key: %v", c.ID, c.Comment, c.Flags, err)
			}
			if err != nil {
				refused++
				continue
			}
			s, err := k.Shared(p)
			if err != nil || hex.EncodeToString(s[:]) != c.Shared {
				t.Errorf("%d (%s): got %x, %v, want %s", c.ID, c.Comment, s, err, c.Shared)
			}
			agreed++
		}
	}
	t.Logf("%d agreed, %d refused", agreed, refused)
	if agreed < 400 || refused < 20 {
		t.Errorf("%d agreed, %d refused: that is not the whole file", agreed, refused)
	}
}

// A device returns a key clamped. If what was set compared different, it would
// be written again at every look.
func TestPrivateIsClamped(t *testing.T) {
	k, err := PrivateFromBytes(bytes.Repeat([]byte{0xff}, Size))
	if err != nil {
		t.Fatal(err)
	}
	want := [Size]byte(bytes.Repeat([]byte{0xff}, Size))
	want[0], want[Size-1] = 0xf8, 0x7f
	if got := k.Bytes(); got != want {
		t.Errorf("got %x, want %x", got, want)
	}
	back, err := PrivateFromBytes(want[:])
	if err != nil || back != k {
		t.Errorf("the key a device returns is different from the one set (%v)", err)
	}
}

func TestPrivateProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := keyBytes().Draw(t, "bytes")
		k, err := PrivateFromBytes(b)
		if bytes.Equal(b, make([]byte, Size)) {
			if err == nil {
				t.Fatal("zeros accepted")
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		given, err := ecdh.X25519().NewPrivateKey(b)
		if err != nil {
			t.Fatal(err)
		}
		if got := k.Public().Bytes(); !bytes.Equal(got[:], given.PublicKey().Bytes()) {
			t.Fatal("clamping changed the public key")
		}
		got := k.Bytes()
		if got[0]&7 != 0 || got[31]&0xc0 != 0x40 {
			t.Fatalf("not clamped: first byte %#x, last byte %#x", got[0], got[31])
		}
		if !bytes.Equal(got[1:31], b[1:31]) || got[0]|7 != b[0]|7 || got[31]|0xc0 != b[31]|0xc0 {
			t.Fatal("clamping changed other bits")
		}

		// The bits that clamping overwrites make no difference, all others do.
		bit := rapid.IntRange(0, 8*Size-1).Draw(t, "bit")
		flipped := slices.Clone(b)
		flipped[bit/8] ^= 1 << (bit % 8)
		other, err := PrivateFromBytes(flipped)
		free := bit < 3 || bit >= 8*Size-2
		if err == nil && (other == k) != free {
			t.Fatalf("keys that differ in bit %d: equal is %v", bit, other == k)
		}

		parsed, err := ParsePrivate(k.Base64())
		if err != nil || parsed != k || parsed.Base64() != k.Base64() {
			t.Fatalf("key does not survive base64: %v", err)
		}
		if _, err := PublicFromBytes(given.PublicKey().Bytes()); err != nil {
			t.Fatalf("the public key of a private key is refused: %v", err)
		}

		peer, err := PrivateFromBytes(keyBytes().Filter(func(b []byte) bool { return slices.Max(b) > 0 }).Draw(t, "peer"))
		if err != nil {
			t.Fatal(err)
		}
		one, err1 := k.Shared(peer.Public())
		two, err2 := peer.Shared(k.Public())
		if err1 != nil || err2 != nil || one != two {
			t.Fatalf("the two sides do not agree: %v, %v", err1, err2)
		}
	})
}

func TestPrivateFromBytesCopies(t *testing.T) {
	b := bytes.Repeat([]byte{0x48}, Size)
	k, err := PrivateFromBytes(b)
	if err != nil {
		t.Fatal(err)
	}
	clear(b)
	out := k.Bytes()
	clear(out[:])
	if got, want := k.Bytes(), [Size]byte(bytes.Repeat([]byte{0x48}, Size)); got != want {
		t.Errorf("got %x, want %x", got, want)
	}
}

func TestZeroKeys(t *testing.T) {
	var k Private
	if !k.IsZero() || k != (Private{}) || k.Base64() != "" || k.Bytes() != [Size]byte{} || k.Public() != (Public{}) {
		t.Error("the zero Private is not no key")
	}
	if _, err := k.Shared(newKey().Public()); err == nil {
		t.Error("the zero Private agreed a secret")
	}
	if _, err := newKey().Shared(Public{}); err == nil {
		t.Error("a secret was agreed with the zero Public")
	}
	var p Public
	if !p.IsZero() || p.String() != "(none)" || p.Short() != "(none)" || p.Bytes() != [Size]byte{} {
		t.Error("the zero Public is not no key")
	}
	var psk Preshared
	if !psk.IsZero() || psk.Base64() != "" || psk.Bytes() != [Size]byte{} {
		t.Error("the zero Preshared is not no key")
	}
	if newKey().IsZero() || newKey().Public().IsZero() {
		t.Error("a new key is zero")
	}
	if one, two := newKey(), newKey(); one == two {
		t.Error("two new keys are equal")
	}
}

func TestPreshared(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := keyBytes().Draw(t, "bytes")
		k, err := PresharedFromBytes(b)
		if err != nil {
			t.Fatal(err)
		}
		// All 256 bits count, and zeros are no key.
		if got := k.Bytes(); !bytes.Equal(got[:], b) || k.IsZero() != (slices.Max(b) == 0) {
			t.Fatalf("got %x, zero is %v, want %x", got, k.IsZero(), b)
		}
		parsed, err := ParsePreshared(base64.StdEncoding.EncodeToString(b))
		if err != nil || parsed != k {
			t.Fatalf("key does not survive base64: %v", err)
		}
	})
	k, err := NewPreshared()
	if err != nil || k.IsZero() || len(k.Base64()) != textSize {
		t.Errorf("NewPreshared: zero is %v, error %v", k.IsZero(), err)
	}
	if other, _ := NewPreshared(); other == k {
		t.Error("two new keys are equal")
	}
}

// Every known point with which X25519 gives zeros whatever the private key,
// in every encoding; cr.yp.to/ecdh.html lists them.
func lowOrderPoints(t *testing.T) map[string][]byte {
	number := func(decimal string) *big.Int {
		n, ok := new(big.Int).SetString(decimal, 10)
		if !ok {
			t.Fatalf("not a number: %s", decimal)
		}
		return n
	}
	prime := new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 255), big.NewInt(19))
	top := new(big.Int).Lsh(big.NewInt(1), 255)
	all := map[string][]byte{}
	for name, n := range map[string]*big.Int{
		"0":           big.NewInt(0),
		"1":           big.NewInt(1),
		"order 8":     number("325606250916557431795983626356110631294008115727848805560023387167927233504"),
		"order 8 too": number("39382357235489614581723060781553021112529911719440698176882885853963445705823"),
		"p-1":         new(big.Int).Sub(prime, big.NewInt(1)),
		"p":           prime,
		"p+1":         new(big.Int).Add(prime, big.NewInt(1)),
	} {
		for suffix, n := range map[string]*big.Int{"": n, " with the top bit": new(big.Int).Add(n, top)} {
			b := n.FillBytes(make([]byte, Size))
			slices.Reverse(b)
			all[name+suffix] = b
		}
	}
	return all
}

func TestLowOrderPointsAreRefused(t *testing.T) {
	scalar, err := ecdh.X25519().NewPrivateKey(bytes.Repeat([]byte{0x42}, Size))
	if err != nil {
		t.Fatal(err)
	}
	for name, b := range lowOrderPoints(t) {
		remote, err := ecdh.X25519().NewPublicKey(b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := scalar.ECDH(remote); err == nil {
			t.Errorf("%s is not of low order: the test is wrong", name)
		}
		if _, err := PublicFromBytes(b); err == nil {
			t.Errorf("PublicFromBytes accepts %s", name)
		}
		if _, err := ParsePublic(base64.StdEncoding.EncodeToString(b)); err == nil {
			t.Errorf("ParsePublic accepts %s", name)
		}
		if _, err := fixed().Shared(Public{[Size]byte(b)}); err == nil {
			t.Errorf("Shared accepts %s", name)
		}
	}
}

// checkPublic compares what PublicFromBytes says with arithmetic on big numbers
// and an X25519 that is not ours.
func checkPublic(t interface{ Fatalf(string, ...any) }, b []byte) {
	reversed := slices.Clone(b)
	slices.Reverse(reversed)
	prime := new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), 255), big.NewInt(19))
	canonical := new(big.Int).SetBytes(reversed).Cmp(prime) < 0
	scalar, err := ecdh.X25519().NewPrivateKey(bytes.Repeat([]byte{0x42}, Size))
	if err != nil {
		t.Fatalf("%v", err)
	}
	remote, err := ecdh.X25519().NewPublicKey(b)
	if err != nil {
		t.Fatalf("%v", err)
	}
	_, err = scalar.ECDH(remote)
	want := canonical && err == nil
	p, err := PublicFromBytes(b)
	if (err == nil) != want {
		t.Fatalf("%x: got error %v, want accepted to be %v", b, err, want)
	}
	if got := p.Bytes(); err == nil && !bytes.Equal(got[:], b) {
		t.Fatalf("%x became %x", b, got)
	}
	if err != nil && !p.IsZero() {
		t.Fatalf("%x: a key and an error", b)
	}
}

func TestPublicProperties(t *testing.T) {
	for _, b := range lowOrderPoints(t) {
		checkPublic(t, b)
	}
	rapid.Check(t, func(t *rapid.T) {
		b := keyBytes().Draw(t, "bytes")
		checkPublic(t, b)
		p, err := PublicFromBytes(b)
		if err != nil {
			return
		}
		text, err := json.Marshal(map[Public]Public{p: p})
		if err != nil {
			t.Fatal(err)
		}
		var back map[Public]Public
		if err := json.Unmarshal(text, &back); err != nil || back[p] != p || len(back) != 1 {
			t.Fatalf("%s became %v, %v", text, back, err)
		}
		if q, err := ParsePublic(p.String()); err != nil || q != p {
			t.Fatalf("%v became %v, %v", p, q, err)
		}
		if got, want := p.Short(), p.String()[:8]+"…"; got != want {
			t.Fatalf("Short is %q, want %q", got, want)
		}
		q, err := PublicFromBytes(keyBytes().Draw(t, "other"))
		if err != nil {
			return
		}
		c := p.Compare(q)
		if c != -q.Compare(p) || (c == 0) != (p == q) || p.Compare(Public{}) != 1 {
			t.Fatalf("Compare of %x and %x is %d", p.b, q.b, c)
		}
	})
}

func TestPublicUnmarshal(t *testing.T) {
	p := newKey().Public()
	q := p
	if err := q.UnmarshalText([]byte("nonsense")); err == nil || q != p {
		t.Errorf("an error (%v) changed the key", err)
	}
	if err := q.UnmarshalText(nil); err != nil || !q.IsZero() {
		t.Errorf("empty text: %v, %v", q, err)
	}
	text, err := json.Marshal(Public{})
	if err != nil || string(text) != `""` {
		t.Errorf("zero key: %s, %v", text, err)
	}
	for _, bad := range []string{`1`, `[1]`, `{}`, `true`, `"x"`} {
		if err := json.Unmarshal([]byte(bad), &q); err == nil {
			t.Errorf("json %s became %v", bad, q)
		}
	}
}

func TestParse(t *testing.T) {
	good := fixed().Base64()
	parsers := map[string]func(string) error{
		"private":   func(s string) error { _, err := ParsePrivate(s); return err },
		"preshared": func(s string) error { _, err := ParsePreshared(s); return err },
		"public":    func(s string) error { _, err := ParsePublic(s); return err },
	}
	replace := func(i int, c string) string { return good[:i] + c + good[i+1:] }
	for _, c := range []struct{ name, in, want string }{
		{"empty", "", "0 characters long, want 44 of base64"},
		{"short", good[:43], "43 characters long, want 44 of base64"},
		{"newline at the end", good + "\n", "45 characters long, want 44 of base64"},
		{"hexadecimal", strings.Repeat("5a", Size), "64 characters long, want 44 of base64"},
		{"space before", " " + good[:43], "character 1 is not of the base64 alphabet"},
		{"newline within", replace(10, "\n"), "character 11 is not of the base64 alphabet"},
		{"carriage return within", replace(42, "\r"), "character 43 is not of the base64 alphabet"},
		{"URL alphabet", replace(20, "_"), "character 21 is not of the base64 alphabet"},
		{"zero byte", replace(0, "\x00"), "character 1 is not of the base64 alphabet"},
		{"not ASCII", replace(5, "é")[:44], "character 6 is not of the base64 alphabet"},
		{"padding of two", good[:42] + "==", "character 43 is not of the base64 alphabet"},
		{"no padding", good[:43] + "A", "does not end in the padding character"},
		{"padding bits", good[:42] + "B=", "bits after the last byte are not zero"},
		{"padding bits, the other", good[:42] + "C=", "bits after the last byte are not zero"},
	} {
		for kind, parse := range parsers {
			err := parse(c.in)
			if want := "key: " + kind + " key: " + c.want; err == nil || err.Error() != want {
				t.Errorf("%s, %s: got error %v, want %q", kind, c.name, err, want)
			}
		}
	}
	for kind, parse := range parsers {
		if err := parse(fixed().Public().String()); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
	zeros := strings.Repeat("A", 43) + "="
	if _, err := ParsePrivate(zeros); err == nil {
		t.Error("a private key of zeros is accepted")
	}
	if _, err := ParsePublic(zeros); err == nil {
		t.Error("a public key of zeros is accepted")
	}
	if k, err := ParsePreshared(zeros); err != nil || !k.IsZero() {
		t.Errorf("a preshared key of zeros: %v", err)
	}
	for _, n := range []int{0, 31, 33, 44} {
		if _, err := PrivateFromBytes(make([]byte, n)); err == nil {
			t.Errorf("PrivateFromBytes accepts %d bytes", n)
		}
		if _, err := PresharedFromBytes(make([]byte, n)); err == nil {
			t.Errorf("PresharedFromBytes accepts %d bytes", n)
		}
		if _, err := PublicFromBytes(make([]byte, n)); err == nil {
			t.Errorf("PublicFromBytes accepts %d bytes", n)
		}
	}
}
