//go:build linux

package hostnet

import (
	"errors"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// thread runs functions on one thread in a namespace of its own, which ends with the test.
type thread struct {
	*space
	calls chan func()
}

func newThread(t *testing.T) *thread {
	th := &thread{newSpace(t), make(chan func())}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends
		f, err := os.Open(th.path)
		if err == nil {
			err = unix.Setns(int(f.Fd()), unix.CLONE_NEWNET)
			f.Close()
		}
		if err != nil {
			t.Error(err)
		}
		for call := range th.calls {
			call()
		}
	}()
	t.Cleanup(func() { close(th.calls); <-done })
	return th
}

func (th *thread) on(f func()) {
	done := make(chan struct{})
	th.calls <- func() { defer close(done); f() }
	<-done
}

// drop takes capabilities from the calling thread.
func drop(t *testing.T, caps ...int) {
	t.Helper()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		t.Error(err)
	}
	for _, c := range caps {
		data[c/32].Effective &^= 1 << (c % 32)
	}
	if err := unix.Capset(&head, &data[0]); err != nil {
		t.Error(err)
	}
}

// inode is that of the calling thread's namespace.
func inode(t *testing.T) (n id) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(here, &st); err != nil {
		t.Error(err)
	}
	return id{uint64(st.Dev), st.Ino}
}

// Without a name the namespace is the one of the thread that opened, whoever calls later.
func TestOpenHere(t *testing.T) {
	th := newThread(t)
	var h *Host
	var err error
	var want id
	th.on(func() {
		want = inode(t)
		h, err = Open(Options{Interface: "wg0"})
	})
	must(t, err)
	defer h.Close()
	if inode(t) == want {
		t.Fatal("this thread is in it too: does this test anything?")
	}

	// From here, on a thread of somewhere else.
	before := inode(t)
	var got id
	must(t, h.Do(func() error { got = inode(t); return nil }))
	if got != want {
		t.Errorf("f ran in %v, want %v", got, want)
	}
	if inode(t) != before {
		t.Error("this thread is astray")
	}
	l, created, err := h.Adopt(t.Context(), "tun", func(name string) error {
		f, err := tun(h, name)
		if err == nil {
			t.Cleanup(func() { f.Close() })
		}
		return err
	})
	if err != nil || !created {
		t.Fatalf("got %+v, %t, %v", l, created, err)
	}
	must(t, one.on(t.Context(), h))
	if out := th.show("-br link"); !strings.Contains(out, "wg0") {
		t.Errorf("in the namespace there is: %s", out)
	}
	if _, err := net.InterfaceByName("wg0"); err == nil {
		t.Error("the link is in the namespace of the caller")
	}
	// What changes there is heard of, and sockets made there see it.
	must(t, h.Do(func() error {
		i, err := net.InterfaceByName("wg0")
		if err == nil && i.Index != l.Index {
			t.Errorf("index %d, want %d", i.Index, l.Index)
		}
		return err
	}))
	must(t, h.Remove(t.Context()))
}

// In the namespace itself it takes no privilege; from another one the lack of it is said.
func TestDoWithoutPrivilege(t *testing.T) {
	th := newThread(t)
	var h *Host
	var err error
	th.on(func() {
		drop(t, unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN)
		if h, err = Open(Options{Interface: "wg0"}); err != nil {
			return
		}
		me, ran := unix.Gettid(), 0
		if err = h.Do(func() error { ran = unix.Gettid(); return nil }); ran != me {
			t.Errorf("ran on thread %d, called on %d", ran, me)
		}
	})
	must(t, err)
	defer h.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends without its capabilities
		drop(t, unix.CAP_SYS_ADMIN)
		done <- enter(int(h.ns.f.Fd()), func() error { t.Error("ran"); return nil })
	}()
	if err := <-done; !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_SYS_ADMIN") || !strings.Contains(err.Error(), "namespace") {
		t.Errorf("got %v", err)
	}
	must(t, h.Close())
	if err := h.Do(func() error { return nil }); !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v", err)
	}
}
