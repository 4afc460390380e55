package hostnet

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// here is the network namespace of the thread that opens it.
const here = "/proc/thread-self/ns/net"

// namespace is a network namespace that is held open, so that it is the same one whichever thread asks.
type namespace struct {
	f *os.File // nil: this kernel has no others
	id
}

// id tells namespaces apart.
type id struct{ dev, ino uint64 }

// openNamespace opens the namespace of that path. Without one it is that of the calling thread.
func openNamespace(path string) (*namespace, error) {
	of := path
	if of == "" {
		of = here
	}
	f, err := os.Open(of)
	switch {
	case path == "" && errors.Is(err, os.ErrNotExist) && unix.Access("/proc/thread-self/ns", unix.F_OK) == nil:
		return &namespace{}, nil // built without CONFIG_NET_NS
	case err != nil:
		return nil, fmt.Errorf("namespace: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, fmt.Errorf("namespace %s: %w", of, err)
	}
	return &namespace{f, id{uint64(st.Dev), st.Ino}}, nil
}

func (n *namespace) close() error {
	if n.f == nil {
		return nil
	}
	return n.f.Close()
}

// entered reports whether the calling thread is in n.
func (n *namespace) entered() (bool, error) {
	if n.f == nil {
		return true, nil
	}
	var st unix.Stat_t
	if err := unix.Stat(here, &st); err != nil {
		return false, fmt.Errorf("namespace of this thread: %s: %w", here, err)
	}
	return id{uint64(st.Dev), st.Ino} == n.id, nil
}

// do runs f on a thread in n: on the one that calls, if it is there.
func (n *namespace) do(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	switch in, err := n.entered(); {
	case err != nil:
		return err
	case in:
		return f()
	}
	ns, err := n.dup() // n may be closed meanwhile
	if err != nil {
		return fmt.Errorf("namespace: %w", err)
	}
	defer unix.Close(ns)
	var panicked any
	err = errors.New("namespace: the function ended its goroutine")
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { panicked = recover() }()
		err = enter(ns, f)
	}()
	<-done
	if panicked != nil {
		panic(panicked)
	}
	return err
}

// enter runs f in a namespace that the calling thread is brought to. One that cannot be brought back ends with
// its goroutine.
func enter(ns int, f func() error) error {
	runtime.LockOSThread()
	old, err := unix.Open(here, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("namespace of this thread: %w", err)
	}
	defer unix.Close(old)
	if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		if err == unix.EPERM {
			err = fmt.Errorf("%w: this thread is in another one, and to leave it takes CAP_SYS_ADMIN", err)
		}
		return fmt.Errorf("enter namespace: %w", err)
	}
	defer func() {
		if unix.Setns(old, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
	}()
	return f()
}

// dup opens n once more.
func (n *namespace) dup() (ns int, err error) {
	c, err := n.f.SyscallConn()
	if err != nil {
		return -1, err
	}
	if cerr := c.Control(func(fd uintptr) { ns, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); cerr != nil {
		return -1, cerr
	}
	return ns, err
}
