package hostaddr

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// space is a network namespace, and the thread that is in it.
type space struct {
	t    *testing.T
	jobs chan func()
}

func newSpace(t *testing.T) *space {
	t.Helper()
	s := &space{t, make(chan func())}
	ready, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		ready <- unix.Unshare(unix.CLONE_NEWNET)
		for f := range s.jobs {
			f()
		}
	}()
	err := <-ready
	t.Cleanup(func() { close(s.jobs); <-ended })
	if _, lack := exec.LookPath("ip"); err != nil || lack != nil {
		if os.Getenv("CI") == "true" || err != nil && !errors.Is(err, fs.ErrPermission) {
			t.Fatal(err, lack)
		}
		t.Skip("needs a network namespace (CAP_SYS_ADMIN) and ip (iproute2):", err, lack)
	}
	return s
}

func (s *space) do(f func() error) error {
	done := make(chan error, 1)
	s.jobs <- func() { done <- f() }
	return <-done
}

func (s *space) ip(command string) {
	s.t.Helper()
	if err := s.do(func() error {
		out, err := exec.Command("ip", strings.Fields(command)...).CombinedOutput()
		if err != nil {
			return errors.New("ip " + command + ": " + string(out))
		}
		return nil
	}); err != nil {
		s.t.Fatal(err)
	}
}

// A role that is started before there is a network finds it when it comes, and follows it: addresses, default routes,
// links that go and come.
func TestNetwork(t *testing.T) {
	s := newSpace(t)
	tab, m, stop := run(t, Options{In: s.do, Damp: 200 * time.Millisecond, Again: time.Hour})
	defer stop()
	is := func(when, want string) {
		t.Helper()
		begun := time.Now()
		for tab.text() != want {
			if time.Since(begun) > 10*time.Second {
				t.Fatalf("%s: %q, want %q", when, tab.text(), want)
			}
			time.Sleep(time.Millisecond)
		}
		t.Logf("%s: %s, after %v", when, want, time.Since(begun).Round(time.Millisecond))
	}
	for end := time.Now().Add(10 * time.Second); len(conditions(m)) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("without a network: no condition")
		}
	}
	if got := conditions(m); len(got) != 1 || got[0] != string(None) {
		t.Errorf("without a network: %q", got)
	}
	s.ip("link set lo up")
	is("loopback alone, for those on the same host", "127.0.0.1 ::1")
	s.ip("link add eth0 type veth peer name eth1")
	s.ip("link set eth1 up")
	s.ip("link set eth0 up")
	s.ip("addr add 192.0.2.1/24 dev eth0")
	is("an address", "192.0.2.1")
	s.ip("addr add 2001:db8::1/64 dev eth0 nodad")
	s.ip("addr add 192.0.2.3/24 dev eth0")
	is("more", "192.0.2.1 192.0.2.3 2001:db8::1")
	s.ip("route add default via 192.0.2.254 src 192.0.2.3")
	is("that of the default route is the first", "192.0.2.3 192.0.2.1 2001:db8::1")
	s.ip("addr del 192.0.2.3/24 dev eth0")
	is("gone", "192.0.2.1 2001:db8::1")
	s.ip("link set eth0 down")
	is("the link is down", "127.0.0.1 ::1")
	s.ip("link set eth0 up")
	is("and up", "192.0.2.1")
	s.ip("link del eth0")
	is("the link is gone", "127.0.0.1 ::1")
	if got := conditions(m); len(got) != 0 {
		t.Errorf("conditions are %q", got)
	}
}
