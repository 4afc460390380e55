package nearest_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/examples/agent/internal/nearest"
)

func TestTo(t *testing.T) {
	names := []string{"address", "announce", "endpoint", "mtu", "mesh", "socks5"}
	for s, want := range map[string]string{
		"anounce": "announce", "adress": "address", "addresses": "address", "endpiont": "endpoint",
		"mut": "mtu", "sock": "socks5", "mehs": "mesh", "": "", "x": "", "colour": "", "announcement-refused": "",
	} {
		if got := nearest.To(s, names...); got != want {
			t.Errorf("%q: got %q, want %q", s, got, want)
		}
	}
	if got := nearest.To("alpha"); got != "" {
		t.Errorf("of no names: got %q", got)
	}
}

// slow is the definition.
func slow(a, b string) int {
	if a == "" || b == "" {
		return len(a) + len(b)
	}
	m, n := len(a)-1, len(b)-1
	cost := 1
	if a[m] == b[n] {
		cost = 0
	}
	d := min(slow(a[:m], b[:n])+cost, slow(a[:m], b)+1, slow(a, b[:n])+1)
	if m > 0 && n > 0 && a[m] == b[n-1] && a[m-1] == b[n] {
		d = min(d, slow(a[:m-1], b[:n-1])+1)
	}
	return d
}

func TestDistance(t *testing.T) {
	word := rapid.StringMatching(`[abc]{0,6}`)
	rapid.Check(t, func(t *rapid.T) {
		a, b := word.Draw(t, "a"), word.Draw(t, "b")
		if got, want := nearest.Distance(a, b), slow(a, b); got != want || nearest.Distance(b, a) != got {
			t.Errorf("%q and %q: got %d, want %d", a, b, got, want)
		}
	})
}
