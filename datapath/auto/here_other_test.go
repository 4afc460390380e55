//go:build !linux

package auto

import (
	"strings"
	"testing"
)

// Elsewhere than on Linux there is netstack, and the reason is given.
func TestElsewhere(t *testing.T) {
	a, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	s, err := a.Read(t.Context())
	if err != nil || a.Chosen() != Netstack || a.Netstack() == nil {
		t.Fatalf("chosen: %s, %v", a.Chosen(), err)
	}
	for _, word := range []string{"kernel: ", "tun: ", "Linux"} {
		if !strings.Contains(s.Host.Instead, word) {
			t.Errorf("%q does not say %q", s.Host.Instead, word)
		}
	}
	if err := Cleanup(t.Context(), Options{}); err != nil {
		t.Error(err)
	}
}
