package namespace_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/examples/agent/internal/namespace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The main thread stays with the main goroutine: /proc/self is about it.
func init() { runtime.LockOSThread() }

// other makes a namespace, of which the loopback interface is up, and returns its path.
func other(t *testing.T) string {
	t.Helper()
	var f *os.File
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			f, err = os.Open("/proc/thread-self/ns/net")
		}
		if err == nil {
			var lo netlink.Link
			if lo, err = netlink.LinkByName("lo"); err == nil {
				err = netlink.LinkSetUp(lo)
			}
		}
		made <- err
	}()
	err := <-made
	switch {
	case errors.Is(err, fs.ErrPermission) && os.Getenv("CI") != "true":
		t.Skipf("needs root, to make a network namespace: %v", err)
	case err != nil:
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
}

func open(t *testing.T, path string) *namespace.Namespace {
	t.Helper()
	n, err := namespace.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// inode is that of a namespace.
func inode(path string) (uint64, error) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	return st.Ino, err
}

// of is the inode of the namespace that a socket is in.
func of(c syscall.Conn) (ino uint64, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	cerr := raw.Control(func(fd uintptr) {
		var ns int
		if ns, err = unix.IoctlRetInt(int(fd), unix.SIOCGSKNS); err == nil {
			ino, err = inode(fmt.Sprintf("/proc/self/fd/%d", ns))
			_ = unix.Close(ns)
		}
	})
	return ino, errors.Join(cerr, err)
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Sockets are in the namespace that they are made in, be they waited for, and made of many at a time; whoever
// makes them elsewhere meanwhile has them there, and no thread stays behind.
func TestSockets(t *testing.T) {
	path := other(t)
	in, own := must(inode(path)), must(inode("/proc/self/ns/net"))
	n := open(t, path)
	var l net.Listener
	if err := n.Do(func() (err error) { l, err = net.Listen("tcp", "127.0.0.1:0"); return err }); err != nil {
		t.Fatal(err)
	}
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	if _, err := net.Dial("tcp", l.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("from the process's namespace: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			for range 20 {
				var c net.Conn
				err := n.Do(func() (err error) {
					var d net.Dialer
					c, err = d.DialContext(ctx, "tcp", l.Addr().String())
					return err
				})
				if err != nil {
					t.Errorf("dial: %v", err)
					return
				}
				if got, err := of(c.(syscall.Conn)); got != in || err != nil {
					t.Errorf("a socket is in %d: %v, want %d", got, err, in)
				}
				_ = c.Close()
				u, err := net.ListenPacket("udp", "127.0.0.1:0")
				if err != nil {
					t.Errorf("listen: %v", err)
					return
				}
				if got, err := of(u.(syscall.Conn)); got != own || err != nil {
					t.Errorf("%d: a socket made elsewhere is in %d: %v, want %d", i, got, err, own)
				}
				_ = u.Close()
			}
		})
	}
	all.Wait()
	_ = l.Close()
	<-accepted
	// A dial that nobody answers ends with its context, and its thread is free again.
	short, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	err := n.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			a, _ := netlink.ParseAddr("192.0.2.1/24")
			err = netlink.AddrAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: lo.Attrs().Index}}, a)
		}
		if err != nil {
			return err
		}
		q, err := net.Listen("tcp", "192.0.2.1:0") // whose queue is full
		if err != nil {
			return err
		}
		defer q.Close()
		if err := listenBacklog(q, 0); err != nil {
			return err
		}
		var d net.Dialer
		var cs []net.Conn
		defer func() {
			for _, c := range cs {
				_ = c.Close()
			}
		}()
		for {
			c, err := d.DialContext(short, "tcp", q.Addr().String())
			if err != nil {
				return err
			}
			cs = append(cs, c)
		}
	})
	if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("unanswered: %v", err)
	}
	tasks := must(filepath.Glob("/proc/self/task/*/ns/net"))
	for _, task := range tasks {
		if got, err := inode(task); err == nil && got != own {
			t.Errorf("thread %s is in %d, want %d", task, got, own)
		}
	}
	t.Logf("%d threads", len(tasks))
}

func listenBacklog(l net.Listener, n int) error {
	raw, err := l.(syscall.Conn).SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), n) })
	return errors.Join(cerr, err)
}

// What f does is what Do does.
func TestDo(t *testing.T) {
	n := open(t, other(t))
	oops := errors.New("oops")
	if err := n.Do(func() error { return oops }); err != oops {
		t.Errorf("got %v", err)
	}
	func() {
		defer func() {
			if p := recover(); p != oops {
				t.Errorf("panicked with %v", p)
			}
		}()
		_ = n.Do(func() error { panic(oops) })
	}()
	if err := n.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("a goroutine that ended is no error")
	}
	if err := n.Do(func() error { return nil }); err != nil {
		t.Error(err)
	}
}

// The process's own namespace is entered without any privilege, by its path and without.
func TestOwn(t *testing.T) {
	for _, path := range []string{"", fmt.Sprintf("/proc/%d/ns/net", os.Getpid())} {
		n := open(t, path)
		thread := unix.Gettid()
		runtime.LockOSThread()
		err := n.Do(func() error {
			if unix.Gettid() != thread {
				return errors.New("it is on another thread")
			}
			return nil
		})
		runtime.UnlockOSThread()
		if err != nil {
			t.Errorf("%q: %v", path, err)
		}
	}
}

func TestOpenErrors(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/run/netns/wrn-is-not-there": `network namespace: open /run/netns/wrn-is-not-there: no such file or directory; "ip netns add wrn-is-not-there" makes it`,
		"/proc/self/ns/wrn-not":       `no such file or directory; "ip netns add" makes one below /run/netns`,
		"/proc/self/ns/uts":           `/proc/self/ns/uts is no network namespace; "ip netns add" makes one`,
		file:                          file + ` is no network namespace`,
	} {
		n, err := namespace.Open(path)
		if err == nil {
			_ = n.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", path, err, want)
		}
	}
}
