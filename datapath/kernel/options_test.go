package kernel

import (
	"errors"
	"strings"
	"testing"
)

// Where there is no device to be had, New says what is missing.
func TestNewSaysWhatIsMissing(t *testing.T) {
	k, err := New(Options{})
	if err == nil {
		k.Close()
		t.Skip("there is WireGuard here")
	}
	if !errors.Is(err, errors.ErrUnsupported) && !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Errorf("New: %v", err)
	}
	t.Log(err)
}
