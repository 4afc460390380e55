package namespace

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// here is the network namespace of the thread that opens it.
const here = "/proc/thread-self/ns/net"

// Namespace is a network namespace, which is held until Close. The nil Namespace is that of the process.
type Namespace struct {
	path string
	f    *os.File
	own  *os.File // the process's; nil: it is the same
}

// Open opens the namespace at path, and finds out whether it can be entered, which takes CAP_SYS_ADMIN where it is
// not the process's own. Where path is empty it returns nil.
func Open(path string) (*Namespace, error) {
	if path == "" {
		return nil, nil
	}
	f, err := os.Open(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w; %s", err, remedy(path))
		}
		return nil, fmt.Errorf("network namespace: %w", err)
	}
	n := &Namespace{path: path, f: f}
	if err := n.open(); err != nil {
		_ = n.Close()
		return nil, err
	}
	return n, nil
}

func remedy(path string) string {
	if name, ok := strings.CutPrefix(path, "/run/netns/"); ok && !strings.Contains(name, "/") {
		return fmt.Sprintf("\"ip netns add %s\" makes it", name)
	}
	return "\"ip netns add\" makes one below /run/netns"
}

func (n *Namespace) open() error {
	if typ, err := unix.IoctlRetInt(int(n.f.Fd()), unix.NS_GET_NSTYPE); err != nil || typ != unix.CLONE_NEWNET {
		return fmt.Errorf("%s is no network namespace; %s", n.path, remedy(n.path))
	}
	own, err := os.Open(here)
	if err != nil {
		return fmt.Errorf("network namespace of this process: %w", err)
	}
	a, errA := n.f.Stat()
	b, errB := own.Stat()
	if err := errors.Join(errA, errB); err != nil {
		_ = own.Close()
		return fmt.Errorf("network namespace %s: %w", n.path, err)
	}
	if os.SameFile(a, b) {
		return own.Close()
	}
	n.own = own
	return n.Do(func() error { return nil })
}

// Close lets go of the namespace. What is in it stays there.
func (n *Namespace) Close() error {
	if n == nil {
		return nil
	}
	err := n.f.Close()
	if n.own != nil {
		err = errors.Join(err, n.own.Close())
	}
	return err
}

// Do runs f in the namespace: where that is the process's, just so, else on a thread that enters it, and that does
// nothing else until f returns. What f leaves to other goroutines is done in the process's namespace.
func (n *Namespace) Do(f func() error) error {
	if n == nil || n.own == nil {
		return f()
	}
	var panicked any
	err := errors.New("the function ended its goroutine") // as runtime.Goexit does
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { panicked = recover() }()
		err = n.enter(f)
	}()
	<-done
	if panicked != nil {
		panic(panicked)
	}
	return err
}

// enter brings the calling thread into the namespace and back. One that cannot be brought back ends with its
// goroutine, so that nothing else ever runs there. Linux has threads begin in the namespace of the one that starts
// them; of one that is locked Go has none started.
func (n *Namespace) enter(f func() error) error {
	runtime.LockOSThread()
	if err := unix.Setns(int(n.f.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		if err == unix.EPERM {
			err = fmt.Errorf("%w: to enter it takes CAP_SYS_ADMIN: run this as root, or in that namespace (NetworkNamespacePath= of systemd, ip netns exec)", err)
		}
		return fmt.Errorf("network namespace %s: %w", n.path, err)
	}
	defer func() {
		if unix.Setns(int(n.own.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	}()
	return f()
}
