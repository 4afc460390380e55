//go:build linux

package nft

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/prefixes"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("test.parallel", "8") // these tests wait for the kernel more than they compute
	goleak.VerifyTestMain(m)
}

// The main thread stays with the main goroutine: one that ended on it in another namespace would leave it
// there, and /proc/self would be about that.
func init() { runtime.LockOSThread() }

// need skips a test where the machine cannot run it, and fails it in continuous integration.
func need(t testing.TB, tools ...string) {
	t.Helper()
	lack := ""
	for _, tool := range tools {
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
	t  testing.TB
	ns *os.File
}

// newSpace makes a namespace whose loopback interface is up.
func newSpace(t testing.TB) *space {
	t.Helper()
	need(t, "ip")
	s := &space{t: t}
	errs := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with its namespace
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			s.ns, err = os.Open("/proc/thread-self/ns/net")
		}
		errs <- err
	}()
	must(t, <-errs)
	t.Cleanup(func() { s.ns.Close() })
	// The kernel is to make no link-local addresses, whose checks take time.
	if _, err := os.Stat("/proc/sys/net/ipv6"); err == nil {
		s.sysctl("ipv6/conf/default/addr_gen_mode", "1")
	}
	s.ip("link set lo up")
	return s
}

// path is that of the namespace for other processes.
func (s *space) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.ns.Fd()) }

// do runs f on a thread in the namespace.
func (s *space) do(f func() error) error {
	errs := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked
		err := unix.Setns(int(s.ns.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		errs <- err
	}()
	return <-errs
}

// run runs a command in the namespace.
func (s *space) run(in, name string, args ...string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(in)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := s.do(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		s.t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, &stderr)
	}
	return stdout.String()
}

// ip runs ip commands in the namespace.
func (s *space) ip(commands ...string) {
	s.t.Helper()
	s.run(strings.Join(commands, "\n"), "ip", "-batch", "-")
}

// nft has nft read rules.
func (s *space) nft(text string) {
	s.t.Helper()
	need(s.t, "nft")
	s.run(text, "nft", "-f", "-")
}

// list is what nft prints of the table.
func (s *space) list() string {
	s.t.Helper()
	need(s.t, "nft")
	return s.run("", "nft", "list", "table", "inet", "warren-mesh0")
}

// sysctl writes a value below /proc/sys/net.
func (s *space) sysctl(name, value string) {
	s.t.Helper()
	must(s.t, s.do(func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) }))
}

func (s *space) read(name string) (value string) {
	s.t.Helper()
	must(s.t, s.do(func() error {
		b, err := os.ReadFile("/proc/sys/net/" + name)
		value = strings.TrimSpace(string(b))
		return err
	}))
	return value
}

const owner = "warren:mesh0:87"

// open opens the table of mesh0.
func (s *space) open() *Table {
	s.t.Helper()
	t, err := Open(Options{Interface: "mesh0", Owner: owner, Do: s.do})
	must(s.t, err)
	s.t.Cleanup(func() { t.Close() })
	return t
}

// is checks what is in the table.
func (s *space) is(t *Table, want Rules, exact bool) {
	s.t.Helper()
	r, e, err := t.Read(s.t.Context())
	must(s.t, err)
	if !r.Equal(want) || e != exact {
		s.t.Fatalf("read %s, exact %t, want %s, %t", show(r), e, show(want), exact)
	}
}

func (s *space) set(t *Table, r Rules) {
	s.t.Helper()
	must(s.t, t.Set(s.t.Context(), r))
}

func show(r Rules) string {
	return fmt.Sprintf("{MTU %d, to %v, turned %q}", r.ClampMTU, r.SNAT, r.Turned)
}

func ap(s string) netip.Addr           { return netip.MustParseAddr(s) }
func set(s ...string) (_ prefixes.Set) { return prefixes.MustParse(s...) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
