package tun

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/internal/uapi"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(childOf); path != "" {
		child(path)
	}
	goleak.VerifyTestMain(m)
}

// The main thread stays with the main goroutine: one that ended on it in another namespace would leave it
// there, and /proc/self would be about that.
func init() { runtime.LockOSThread() }

// need skips a test where the machine cannot run it, and fails it in continuous integration.
func need(t testing.TB) {
	t.Helper()
	lack := ""
	if err := check(clonePath, true); err != nil {
		lack = err.Error()
	}
	switch {
	case lack == "":
	case os.Getenv("CI") == "true":
		t.Fatal(lack)
	default:
		t.Skip(lack)
	}
}

// needProgram is need for a program; its package is not on every machine that continuous integration has.
func needProgram(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("this takes %s, which is not installed", name)
	}
	return path
}

// space is a network namespace of a test. The machine's own is never touched.
type space struct {
	t    testing.TB
	file *os.File
	path string
	jobs chan func()
}

// newSpace returns a namespace with its loopback interface up.
func newSpace(t testing.TB) *space {
	t.Helper()
	need(t)
	s := &space{t: t, jobs: make(chan func())}
	ready := make(chan error)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			s.file, err = os.Open("/proc/thread-self/ns/net")
		}
		if err == nil {
			s.path = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.file.Fd())
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
		if s.file != nil {
			s.file.Close()
		}
	})
	if err != nil {
		t.Fatalf("a network namespace: %v", err)
	}
	return s
}

// in runs f on the namespace's thread. f must not end the test.
func (s *space) in(f func() error) error {
	errc := make(chan error, 1)
	s.jobs <- func() { errc <- f() }
	return <-errc
}

func (s *space) must(f func() error) {
	s.t.Helper()
	if err := s.in(f); err != nil {
		s.t.Fatal(err)
	}
}

// out gives the namespace a link with an address of both families: without one there is no way to send.
func (s *space) out() {
	s.t.Helper()
	s.must(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "out"
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far"}); err != nil {
			return err
		}
		far, err := netlink.LinkByName("far")
		if err == nil {
			err = netlink.LinkSetUp(far)
		}
		if err != nil {
			return err
		}
		l, err := netlink.LinkByName("out")
		if err != nil {
			return err
		}
		return errors.Join(address(l, "192.0.2.9/24"), address(l, "2001:db8::9/64"), netlink.LinkSetUp(l))
	})
}

func address(l netlink.Link, prefix string) error {
	a, err := netlink.ParseAddr(prefix)
	if err != nil {
		return err
	}
	a.Flags = unix.IFA_F_NODAD
	return netlink.AddrAdd(l, a)
}

// sysctl sets one of the namespace's.
func (s *space) sysctl(name, value string) {
	s.t.Helper()
	s.must(func() error { return os.WriteFile("/proc/sys/"+name, []byte(value), 0) })
}

// tun returns a TUN in s, whose socket is in a folder of its own.
func (s *space) tun(t testing.TB, change ...func(*Options)) *TUN {
	t.Helper()
	o := Options{Namespace: s.path, Socket: folder(t)}
	if testing.Verbose() && os.Getenv("WARREN_LOG") != "" {
		o.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	for _, f := range change {
		f(&o)
	}
	d, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// folder is one with a short name, which a socket needs.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tun")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// run runs a command in the namespace.
func (s *space) run(name string, args ...string) (string, error) {
	ctx, cancel := background(20 * time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	var out, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := s.in(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, &stderr)
	}
	return out.String(), err
}

func (s *space) ip(command string) {
	s.t.Helper()
	if _, err := s.run("ip", strings.Fields(command)...); err != nil {
		s.t.Fatal(err)
	}
}

// links returns the names of the namespace's links.
func (s *space) links() (names []string) {
	s.t.Helper()
	s.must(func() error {
		ls, err := netlink.LinkList()
		for _, l := range ls {
			names = append(names, l.Attrs().Name)
		}
		return err
	})
	return names
}

// wire joins two namespaces by a veth pair, with an address of both families at either end.
func wire(a, b *space, a4, b4, a6, b6 string) {
	a.t.Helper()
	var x [4]byte
	rand.Read(x[:])
	na, nb := fmt.Sprintf("v%xa", x), fmt.Sprintf("v%xb", x)
	a.must(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = na
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: nb, PeerNamespace: netlink.NsFd(b.file.Fd())})
	})
	for _, end := range []struct {
		s      *space
		name   string
		v4, v6 string
	}{{a, na, a4, a6}, {b, nb, b4, b6}} {
		end.s.must(func() error {
			l, err := netlink.LinkByName(end.name)
			if err != nil {
				return err
			}
			for _, p := range []string{end.v4, end.v6} {
				if err := address(l, p); err != nil {
					return err
				}
			}
			return netlink.LinkSetUp(l)
		})
	}
	// The first IPv6 datagrams over a new wire are lost until the neighbours know each other.
	var in net.PacketConn
	var out net.Conn
	b.must(func() (err error) { in, err = net.ListenPacket("udp", ":0"); return err })
	defer in.Close()
	_, port, _ := net.SplitHostPort(in.LocalAddr().String())
	for _, to := range []string{b4, b6} {
		host, _, _ := strings.Cut(to, "/")
		a.must(func() (err error) { out, err = net.Dial("udp", net.JoinHostPort(host, port)); return err })
		within(a.t, 20*time.Second, "a datagram arrives on the wire", func() bool {
			_, _ = out.Write([]byte{1})
			_ = in.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
			_, _, err := in.ReadFrom(make([]byte, 1))
			return err == nil
		})
		out.Close()
	}
}

// uniqueName is a name for an interface that nothing on this machine has, not even a socket.
func uniqueName(t testing.TB) string {
	t.Helper()
	var b [4]byte
	rand.Read(b[:])
	return fmt.Sprintf("wt%x", b)
}

// foreground has a program run in the namespace until the test ends.
func foreground(t testing.TB, s *space, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(name, args...)
	s.must(cmd.Start)
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
	})
	return cmd
}

// say says something to the socket of a device, as wg(8) would, and returns the answer.
func say(path, text string) (string, error) {
	c, err := net.Dial("unix", path)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := io.WriteString(c, text+"\n"); err != nil {
		return "", err
	}
	var b strings.Builder
	for r := bufio.NewReader(c); ; {
		line, err := r.ReadString('\n')
		if err != nil {
			return b.String(), err
		}
		if line == "\n" {
			return b.String(), nil
		}
		b.WriteString(line)
	}
}

// outside sets something of the device from outside.
func outside(t testing.TB, d *TUN, text string) {
	t.Helper()
	if answer, err := say(d.opts.socket(), "set=1\n"+text); err != nil || answer != "errno=0\n" {
		t.Fatalf("setting something from outside: %q, %v", answer, err)
	}
}

func harness() datapathtest.Harness {
	var last *space
	return datapathtest.Harness{
		New: func(t testing.TB) datapath.Datapath {
			s := newSpace(t)
			s.out()
			last = s
			return s.tun(t)
		},
		Occupy: func(t testing.TB, port uint16) func() {
			var c *net.UDPConn
			last.must(func() (err error) {
				c, err = net.ListenUDP("udp", &net.UDPAddr{Port: int(port)})
				return err
			})
			return func() { c.Close() }
		},
		Outside: func(t testing.TB, d datapath.Datapath, op datapath.Op) {
			o, ok := op.(datapath.RemovePeer)
			if !ok {
				t.Fatalf("op %T from outside", op)
			}
			outside(t, d.(*TUN), uapi.RemovePeer(o.Key))
		},
	}
}

func TestSuite(t *testing.T) {
	t.Parallel()
	need(t)
	datapathtest.Run(t, harness())
}

// node is a TUN with a State that says what it shall be.
type node struct {
	*TUN
	t     testing.TB
	space *space
	name  string
	want  datapath.State
}

func set(s ...string) prefixes.Set { return prefixes.MustParse(s...) }

func newKey(t testing.TB) key.Private {
	t.Helper()
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func newNode(t testing.TB, s *space, name string, addrs prefixes.Set, change ...func(*Options)) *node {
	t.Helper()
	n := &node{TUN: s.tun(t, change...), t: t, space: s, name: name, want: datapath.State{
		Device: datapath.Device{Key: newKey(t)}, Addrs: addrs,
		Routes: make(map[netip.Prefix]netip.Addr), Peers: make(map[key.Public]datapath.Peer),
	}}
	n.sync()
	return n
}

func (n *node) public() key.Public { return n.want.Device.Key.Public() }

func (n *node) sync() {
	n.t.Helper()
	if err := datapath.Sync(n.t.Context(), n.TUN, n.want); err != nil {
		n.t.Fatalf("%s: %v", n.name, err)
	}
}

func (n *node) apply(ops ...datapath.Op) {
	n.t.Helper()
	if err := n.Apply(n.t.Context(), ops...); err != nil {
		n.t.Fatalf("%s: %v", n.name, err)
	}
}

func (n *node) read() datapath.State {
	n.t.Helper()
	s, err := n.Read(n.t.Context())
	if err != nil {
		n.t.Fatalf("%s: %v", n.name, err)
	}
	return s
}

// peer makes the node with a public key a peer of n.
func (n *node) peer(k key.Public, p datapath.Peer) {
	n.t.Helper()
	n.want.Peers[k] = p
	for q := range p.Prefixes.All() {
		n.want.Routes[q] = netip.Addr{}
	}
	n.sync()
}

// pair is two namespaces joined by a wire, with a node in each; the nodes know each other.
type pair struct{ a, b *node }

const (
	wire4a, wire4b = "192.0.2.1", "192.0.2.2"
	wire6a, wire6b = "2001:db8::1", "2001:db8::2"
)

func newPair(t testing.TB, change ...func(*Options)) pair {
	t.Helper()
	sa, sb := newSpace(t), newSpace(t)
	wire(sa, sb, wire4a+"/24", wire4b+"/24", wire6a+"/64", wire6b+"/64")
	return pair{newNode(t, sa, "a", addrsA, change...), newNode(t, sb, "b", addrsB, change...)}
}

// connect makes the two peers of each other, over an underlay of one family.
func (p pair) connect(psk key.Preshared, v6 bool) {
	p.a.t.Helper()
	addrA, addrB := wire4a, wire4b
	if v6 {
		addrA, addrB = wire6a, wire6b
	}
	at := func(addr string, n *node) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr(addr), n.read().Device.ListenPort)
	}
	endA, endB := at(addrA, p.a), at(addrB, p.b)
	p.a.peer(p.b.public(), datapath.Peer{Endpoint: endB, Preshared: psk, Prefixes: p.b.want.Addrs})
	p.b.peer(p.a.public(), datapath.Peer{Endpoint: endA, Preshared: psk, Prefixes: p.a.want.Addrs})
}

var addrsA, addrsB = set("10.0.0.1", "fd00::1"), set("10.0.0.2", "fd00::2")

func within(t testing.TB, d time.Duration, what string, f func() bool) time.Duration {
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

// notified waits for Changed.
func notified(t testing.TB, k *TUN, what string) {
	t.Helper()
	select {
	case <-k.Changed():
	case <-time.After(10 * time.Second):
		t.Errorf("%s: not noticed within 10 s", what)
	}
}

// quiet takes what Changed has to say until it says no more.
func quiet(k *TUN) {
	for {
		select {
		case <-k.Changed():
		case <-time.After(300 * time.Millisecond):
			return
		}
	}
}

func background(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}
