//go:build linux

package hostnet

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// need skips a test where the machine cannot run it, and fails it in continuous integration.
func need(t testing.TB) {
	t.Helper()
	lack := ""
	for _, tool := range []string{"ip", "nsenter"} {
		if _, err := exec.LookPath(tool); err != nil {
			lack = tool
		}
	}
	if os.Geteuid() != 0 {
		lack = "root, for network namespaces"
	}
	switch {
	case lack == "":
	case os.Getenv("CI") == "true":
		t.Fatal("needs " + lack)
	default:
		t.Skip("needs " + lack)
	}
}

// space is a network namespace of the test's own.
type space struct {
	t    testing.TB
	path string
}

// newSpace makes a namespace whose loopback interface is up.
func newSpace(t testing.TB) *space {
	t.Helper()
	need(t)
	var ns *os.File
	errs := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			ns, err = os.Open("/proc/thread-self/ns/net")
		}
		errs <- err
	}()
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	s := &space{t, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd())}
	s.ip("link set lo up")
	return s
}

// run runs a command in the namespace.
func (s *space) run(in, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + s.path, name}, args...)...)
	cmd.Stdin = strings.NewReader(in)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, &stderr)
	}
	return string(out), err
}

// ip runs ip commands in the namespace.
func (s *space) ip(commands ...string) {
	s.t.Helper()
	if _, err := s.run(strings.Join(commands, "\n"), "ip", "-batch", "-"); err != nil {
		s.t.Fatal(err)
	}
}

// show returns what an ip command prints.
func (s *space) show(command string) string {
	s.t.Helper()
	out, err := s.run("", "ip", strings.Fields(command)...)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// sysctl writes a value below /proc/sys/net, in the namespace only.
func (s *space) sysctl(name, value string) {
	s.t.Helper()
	if _, err := s.run(value, "tee", "/proc/sys/net/"+name); err != nil {
		s.t.Fatal(err)
	}
}

// dump is all there is in the namespace but what counts, and the indices of links.
func (s *space) dump() string {
	s.t.Helper()
	var b strings.Builder
	for _, c := range []string{"-d -o link", "-d -o addr", "-d route show table all", "-d -6 route show table all", "-d rule", "-d -6 rule"} {
		fmt.Fprintf(&b, "== %s\n", c)
		for line := range strings.Lines(s.show(c)) {
			if _, rest, ok := strings.Cut(line, ": "); ok && line[0] >= '0' && line[0] <= '9' && !strings.Contains(c, "rule") {
				line = rest
			}
			b.WriteString(line)
		}
	}
	return b.String()
}

// open opens a Host in the namespace.
func (s *space) open(o Options) *Host {
	s.t.Helper()
	h, err := Open(s.options(o))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { h.Close() })
	return h
}

func (s *space) options(o Options) Options {
	if o.Interface == "" {
		o.Interface = "wg0"
	}
	o.Namespace = s.path
	if testing.Verbose() {
		o.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	return o
}

// up opens a Host and brings its link up.
func (s *space) up(o Options) *Host {
	s.t.Helper()
	h := s.open(o)
	if _, _, err := h.Adopt(s.ctx(), kind, nil); err != nil {
		s.t.Fatal(err)
	}
	if err := h.Up(s.ctx(), 1420); err != nil {
		s.t.Fatal(err)
	}
	return h
}

func (s *space) ctx() context.Context { return s.t.Context() }

func (s *space) read(h *Host) State {
	s.t.Helper()
	st, err := h.Read(s.ctx())
	if err != nil {
		s.t.Fatal(err)
	}
	return st
}

// kind is a link that every kernel has, in place of one of WireGuard. Bridges have no carrier without ports,
// which matters to nothing here.
const kind = "bridge"

func ap(s string) netip.Addr   { return netip.MustParseAddr(s) }
func pp(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
