package hostaddr_test

import (
	"errors"
	"syscall"
	"testing"

	"github.com/warren-mesh/warren/roles/hostaddr"
)

// A process without descriptors does not take its host for one without addresses.
func TestNoDescriptors(t *testing.T) {
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	ls, err := hostaddr.Links()
	as, err2 := hostaddr.Sources(nil)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, syscall.EMFILE) || !errors.Is(err2, syscall.EMFILE) || len(ls) > 0 || len(as) > 0 {
		t.Errorf("got %v with %v, and %v with %v", ls, err, as, err2)
	}
}
