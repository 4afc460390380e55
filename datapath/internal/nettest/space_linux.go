package nettest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
)

// Need skips a test because of what the machine lacks, and fails it in continuous integration. A nil error is
// no lack.
func Need(t testing.TB, lack error) {
	t.Helper()
	switch {
	case lack == nil:
	case os.Getenv("CI") == "true":
		t.Fatal(lack)
	default:
		t.Skip(lack)
	}
}

// InVM reports whether this is a guest of vmrun, which has all that it was told to take along.
func InVM() bool { return os.Getenv("WARREN_VMRUN") != "" }

// NeedProgram returns the path of a program, or skips the test. Not every machine that continuous integration
// has can install its package; what vmrun should have taken along is a failure there.
func NeedProgram(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
	case InVM() && os.Getenv("CI") == "true":
		t.Fatalf("vmrun is to take %s along (-with %s)", name, name)
	case InVM():
		t.Skipf("vmrun is to take %s along (-with %s)", name, name)
	default:
		t.Skipf("this takes %s, which is not installed", name)
	}
	return path
}

// Space is a network namespace of a test.
type Space struct {
	T    testing.TB
	File *os.File
	Path string
	jobs chan func()
}

// NewSpace returns a namespace with its loopback interface up. Without the right to make one, see Need.
func NewSpace(t testing.TB) *Space {
	t.Helper()
	s := &Space{T: t, jobs: make(chan func())}
	ready := make(chan error)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			s.File, err = os.Open("/proc/thread-self/ns/net")
		}
		if err == nil {
			s.Path = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.File.Fd())
			var lo netlink.Link
			if lo, err = netlink.LinkByName("lo"); err == nil {
				err = netlink.LinkSetUp(lo)
			}
		}
		ready <- err
		for f := range s.jobs {
			f()
		}
	}()
	err := <-ready
	t.Cleanup(func() {
		close(s.jobs)
		<-ended
		if s.File != nil {
			s.File.Close()
		}
	})
	if errors.Is(err, fs.ErrPermission) {
		Need(t, fmt.Errorf("a network namespace: %w: it takes CAP_SYS_ADMIN", err))
	}
	if err != nil {
		t.Fatalf("a network namespace: %v", err)
	}
	return s
}

// In runs f on the namespace's thread. f must not end the test.
func (s *Space) In(f func() error) error {
	errc := make(chan error, 1)
	s.jobs <- func() { errc <- f() }
	return <-errc
}

// Must is In for what is to succeed.
func (s *Space) Must(f func() error) {
	s.T.Helper()
	if err := s.In(f); err != nil {
		s.T.Fatal(err)
	}
}

// Sysctl sets one of the namespace's, named as below /proc/sys.
func (s *Space) Sysctl(name, value string) {
	s.T.Helper()
	s.Must(func() error { return os.WriteFile("/proc/sys/"+name, []byte(value), 0) })
}

// Run runs a program in the namespace, and returns what it writes.
func (s *Space) Run(name string, args ...string) (string, error) { return s.Pipe("", name, args...) }

// Pipe is Run with something to read for the program.
func (s *Space) Pipe(input, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	if input != "" {
		cmd.Stdin = strings.NewReader(input)
	}
	var out, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := s.In(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, &stderr)
	}
	return out.String(), err
}

// IP runs an ip command that is to succeed.
func (s *Space) IP(command string) {
	s.T.Helper()
	if _, err := s.Run("ip", strings.Fields(command)...); err != nil {
		s.T.Fatal(err)
	}
}

// Start has a program run in the namespace until the test ends. What it says is shown where the test fails.
func (s *Space) Start(t testing.TB, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, args...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	s.Must(cmd.Start)
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		err := cmd.Wait()
		if t.Failed() {
			t.Logf("%s %s: %v: %s", name, strings.Join(args, " "), err, &said)
		}
	})
	return cmd
}

// Links returns the names of the namespace's links, sorted.
func (s *Space) Links() (names []string) {
	s.T.Helper()
	s.Must(func() error {
		ls, err := netlink.LinkList()
		for _, l := range ls {
			names = append(names, l.Attrs().Name)
		}
		return err
	})
	slices.Sort(names)
	return names
}

// Occupy has another program take a UDP port, until free is called.
func (s *Space) Occupy(port uint16) (free func()) {
	s.T.Helper()
	var c *net.UDPConn
	s.Must(func() (err error) {
		c, err = net.ListenUDP("udp", &net.UDPAddr{Port: int(port)})
		return err
	})
	return func() { c.Close() }
}

// Logger is for a datapath: nil, unless what it logs was asked for with go test -v and WARREN_LOG set.
func Logger() *slog.Logger {
	if !testing.Verbose() || os.Getenv("WARREN_LOG") == "" {
		return nil
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Bind makes UDP sockets in the namespace, for a device whose own is another.
func (s *Space) Bind() conn.Bind { return bind{conn.NewDefaultBind(), s} }

type bind struct {
	conn.Bind
	s *Space
}

func (b bind) Open(port uint16) (fns []conn.ReceiveFunc, actual uint16, err error) {
	err = b.s.In(func() (err error) {
		fns, actual, err = b.Bind.Open(port)
		return err
	})
	return fns, actual, err
}

// Go has something run until the test ends, and then wants no error of it.
func Go(t testing.TB, what string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("%s: %v", what, err)
		}
	})
}

// Within waits until f is true, and returns how long that took.
func Within(t testing.TB, d time.Duration, what string, f func() bool) time.Duration {
	t.Helper()
	begun := time.Now()
	for !f() {
		if time.Since(begun) > d {
			t.Fatalf("not within %v: %s", d, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(begun)
}
