//go:build linux

package hostnet

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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
	// The kernel is to make no link-local addresses, whose checks take time.
	s.sysctl("ipv6/conf/default/addr_gen_mode", "1")
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

// ip6 does so for what is not known to be IPv6 by its addresses.
func (s *space) ip6(commands ...string) {
	s.t.Helper()
	if _, err := s.run(strings.Join(commands, "\n"), "ip", "-6", "-batch", "-"); err != nil {
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

// uplink gives the namespace a way out: eth0, with addresses and default routes.
func (s *space) uplink() {
	s.t.Helper()
	s.ip("link add eth0 mtu 1500 type veth peer name far0", "link set far0 up", "link set eth0 up",
		"addr add 203.0.113.2/24 dev eth0", "addr add 2001:db8:1::2/64 dev eth0 nodad",
		"route add default via 203.0.113.1 proto static metric 100", "route add default via 2001:db8:1::1 proto static metric 1024",
		"addr add 198.51.100.7/32 dev lo", "route add 10.99.0.0/16 dev eth0 proto 87 metric 7")
	s.settle()
}

// settle waits until the kernel is done with what it puts off: the carriers of two links that are joined, and
// the routes of IPv6 addresses.
func (s *space) settle() {
	s.t.Helper()
	last, since := s.raw(), time.Now()
	up := fmt.Sprintf(" %d:%02x", unix.IFLA_OPERSTATE, 6) // IF_OPER_UP
	for end := since.Add(20 * time.Second); time.Since(since) < 300*time.Millisecond || strings.Count(last, up) < 2; {
		time.Sleep(20 * time.Millisecond)
		if now := s.raw(); now != last {
			last, since = now, time.Now()
		}
		if time.Now().After(end) {
			s.t.Fatal("the kernel does not come to rest")
		}
	}
}

var (
	random = regexp.MustCompile(`link/ether \S+|(hello|tcn|topology_change|gc)_timer +\S+|bridge_id \S+|designated_root \S+|valid_lft \S+ preferred_lft \S+`)
	index  = regexp.MustCompile(`(?m)^\d+: ([^f])`)
)

// dump is all there is in the namespace, but for counters, hardware addresses and indices of links.
func (s *space) dump() string {
	s.t.Helper()
	four, err := s.run("link\naddr\nroute show table all\n", "ip", "-d", "-o", "-batch", "-")
	must(s.t, err)
	rules, err := s.run("rule\n", "ip", "-d", "-batch", "-")
	must(s.t, err)
	six, err := s.run("rule\n", "ip", "-6", "-d", "-batch", "-")
	must(s.t, err)
	out := random.ReplaceAllString(index.ReplaceAllString(four, "$1"), "")
	lines := strings.Split(out, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n4: " + rules + "\n6: " + six
}

// steady is dump once the kernel is done with what it puts off, such as the routes of IPv6 addresses.
func (s *space) steady() string {
	s.t.Helper()
	last, since := s.dump(), time.Now()
	for end := since.Add(10 * time.Second); time.Since(since) < 100*time.Millisecond; time.Sleep(10 * time.Millisecond) {
		if now := s.dump(); now != last {
			last, since = now, time.Now()
		}
		if time.Now().After(end) {
			s.t.Fatal("the kernel does not come to rest")
		}
	}
	return last
}

// raw is the same as the kernel puts it, attribute by attribute, which takes a tenth of the time.
func (s *space) raw() string {
	s.t.Helper()
	ns, err := openNamespace(s.path)
	must(s.t, err)
	defer ns.close()
	var closed atomic.Bool
	c, err := dial(ns, &closed)
	must(s.t, err)
	defer c.nl.Close()
	var lines []string
	names := map[uint32]string{}
	list := func(typ uint16, fixed []byte, skip ...uint16) {
		q := newRequest(typ, 0, fixed)
		if typ == unix.RTM_GETLINK {
			q = q.u32(unix.IFLA_EXT_MASK, rtextFilterSkipStat)
		}
		must(s.t, c.dump(s.ctx(), q, func(m message) {
			head, n := slices.Clone(m.body[:len(fixed)]), len(fixed)
			var b strings.Builder
			switch typ {
			case unix.RTM_GETLINK:
				l, _ := parseLink(m.body)
				names[uint32(l.Index)] = l.Name
				if l.Kind == kind { // has timers in it
					lines = append(lines, fmt.Sprintf("%+v", l.Name+l.Alias), fmt.Sprint(l.MTU, l.Up, l.rpFilter))
					return
				}
			case unix.RTM_GETADDR:
				b.WriteString(names[ne.Uint32(head[4:])])
				head = head[:4]
			}
			fmt.Fprintf(&b, " %d %x", typ, head)
			for t, v := range attrs(m.body, n) {
				switch {
				case slices.Contains(skip, t):
				case typ == unix.RTM_GETROUTE && t == unix.RTA_OIF:
					fmt.Fprintf(&b, " oif %s", names[u32(v)])
				default:
					fmt.Fprintf(&b, " %d:%x", t, v)
				}
			}
			lines = append(lines, b.String())
		}))
	}
	list(unix.RTM_GETLINK, linkHeader(0, 0, 0), unix.IFLA_AF_SPEC, unix.IFLA_STATS, unix.IFLA_STATS64)
	for _, fam := range []byte{unix.AF_INET, unix.AF_INET6} {
		list(unix.RTM_GETADDR, []byte{fam, 0, 0, 0, 0, 0, 0, 0}, unix.IFA_CACHEINFO)
		list(unix.RTM_GETROUTE, []byte{fam, 11: 0}, unix.RTA_CACHEINFO)
		list(unix.RTM_GETRULE, []byte{fam, 11: 0})
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// become waits until got is want: the routes of an IPv6 address come and go a moment after it.
func become(t testing.TB, what, want string, got func() string) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		now := got()
		if now == want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s:\n%s", what, cmp.Diff(strings.Split(want, "\n"), strings.Split(now, "\n")))
		}
	}
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

// kind is a kind of link in place of WireGuard. Every kernel has bridges, but takes twice as long to remove
// one as another that may be loaded already; to load that would create links outside.
var kind = func() string {
	for _, k := range []string{"dummy", "ifb"} {
		if _, err := net.InterfaceByName(k + "0"); err == nil {
			return k
		}
	}
	return "bridge"
}()

func ap(s string) netip.Addr   { return netip.MustParseAddr(s) }
func pp(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
