package tun

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
)

// TestForeignRoutes has routes of others in the way: each is named with its owner, none is touched, and the rest of
// what is wanted is there.
func TestForeignRoutes(t *testing.T) {
	t.Parallel()
	nettest.NeedProgram(t, "ip")
	s := newSpace(t)
	s.Sysctl("net/ipv6/conf/default/addr_gen_mode", "1") // no link-local addresses, which come by and by
	s.Out()
	for _, r := range []string{"10.79.0.0/16 dev lo metric 50", "fd79::/64 dev lo metric 50", "fd80::/64 dev lo metric 100"} {
		s.IP("route add " + r + " proto static")
	}
	before := shown(s)
	routes := set("10.79.0.0/16", "10.80.0.0/16", "fd79::/64", "fd80::/64", "fd81::/64")
	d := s.tun(t)
	n := &node{d, &nettest.Node{T: t, Name: "a", Path: d, Want: datapath.State{
		Device: datapath.Device{Key: nettest.NewKey(t)}, Addrs: addrsA, Routes: map[netip.Prefix]netip.Addr{},
		Peers: map[key.Public]datapath.Peer{nettest.NewKey(t).Public(): {Prefixes: routes}},
	}}, s}
	for p := range routes.All() {
		n.Want.Routes[p] = netip.Addr{}
	}
	for range 2 {
		err := datapath.Sync(t.Context(), n.TUN, n.Want)
		if f := (*hostnet.ForeignError)(nil); !errors.As(err, &f) {
			t.Fatalf("with routes of others in the way: %v", err)
		}
		for _, word := range []string{"10.79.0.0/16", "fd79::/64", "lo", "static", "metric 50"} {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%v: does not say %q", err, word)
			}
		}
		st := n.Have()
		for p := range n.Want.Routes {
			if _, ok := st.Routes[p]; ok == strings.Contains(p.String(), "79") {
				t.Errorf("route %v is there: %t", p, ok)
			}
		}
		now := shown(s)
		for _, line := range strings.Split(strings.TrimSpace(before), "\n") {
			if !strings.Contains(now, line) {
				t.Errorf("of others' this is gone: %s", line)
			}
		}
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if after := shown(s); after != before {
		t.Errorf("was\n%s\nis\n%s", before, after)
	}
}

// TestOwnTable has routes in a table of their own, a default route among them: the main table's is untouched.
func TestOwnTable(t *testing.T) {
	t.Parallel()
	nettest.NeedProgram(t, "ip")
	s := newSpace(t)
	s.Out()
	s.IP("route add default via 192.0.2.1 dev out")
	s.IP("-6 route add default via 2001:db8::1 dev out")
	table := func(args ...string) string {
		out, err := s.Run("ip", append(args, "route", "show", "table", "main")...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	main4, main6 := table(), table("-6")
	n := newNode(t, s, "a", addrsA, func(o *Options) { o.Table = 7777 })
	routes := set("0.0.0.0/0", "10.8.0.0/16", "10.9.0.0/16", "::/0", "fd08::/64", "fd09::/64")
	n.Peer(nettest.NewKey(t).Public(), datapath.Peer{Prefixes: routes})
	for range 2 {
		st := n.Have()
		if len(st.Routes) != routes.Len() {
			t.Errorf("routes are %v", st.Routes)
		}
		if ops := datapath.Plan(n.Want, st); len(ops) > 0 {
			t.Errorf("still to do: %v", ops)
		}
		n.Sync()
	}
	if now4, now6 := table(), table("-6"); now4 != main4 || !strings.Contains(now6, "default via 2001:db8::1") || strings.Contains(now6, "fd08::/64") {
		t.Errorf("the main table was\n%s%s\nis\n%s%s", main4, main6, now4, now6)
	}
	n.Want.Routes = nil
	n.Sync()
	if st := n.Have(); len(st.Routes) != 0 || table() != main4 {
		t.Errorf("without routes there are %v; main table\n%s", st.Routes, table())
	}
}

// TestRoutesGo holds that there is a route as long as somebody has its prefix, and none thereafter; and that a start
// removes what is left of an earlier one, and nothing else.
func TestRoutesGo(t *testing.T) {
	t.Parallel()
	nettest.NeedProgram(t, "ip")
	s := newSpace(t)
	s.Out()
	// Left by a process whose interface somebody made persistent.
	s.IP("tuntap add mode tun name left0")
	s.Must(func() error { return mark("left0", "warren:warren0:87") })
	s.IP("link set left0 up")
	s.IP("route add 10.90.0.0/16 dev left0 proto 87 metric 50")
	s.IP("route add 10.91.0.0/16 dev out proto 87 metric 50") // through another interface: somebody else's
	n := newNode(t, s, "a", addrsA)
	first, second := nettest.NewKey(t).Public(), nettest.NewKey(t).Public()
	n.Peer(first, datapath.Peer{Prefixes: set("10.8.1.0/24", "10.8.2.0/24", "fd08::/64")})
	n.Peer(second, datapath.Peer{Prefixes: set("10.9.0.0/16")})
	routes := func() string {
		out, err := s.Run("ip", "-o", "route", "show", "table", "all", "proto", "87")
		six, err6 := s.Run("ip", "-6", "-o", "route", "show", "proto", "87")
		if err := errors.Join(err, err6); err != nil {
			t.Fatal(err)
		}
		var to []string
		for line := range strings.Lines(out + six) {
			to = append(to, strings.Fields(line)[0])
		}
		slices.Sort(to)
		return strings.Join(slices.Compact(to), " ")
	}
	if got, want := routes(), "10.8.1.0/24 10.8.2.0/24 10.9.0.0/16 10.91.0.0/16 fd08::/64"; got != want {
		t.Errorf("routes are %s, want %s", got, want)
	}
	// One of its prefixes goes to the other, which has it still when the first is gone.
	n.Want.Peers[first] = datapath.Peer{Prefixes: set("10.8.1.0/24", "fd08::/64")}
	n.Want.Peers[second] = datapath.Peer{Prefixes: set("10.9.0.0/16", "10.8.2.0/24")}
	n.Sync()
	delete(n.Want.Peers, first)
	delete(n.Want.Routes, netip.MustParsePrefix("10.8.1.0/24"))
	delete(n.Want.Routes, netip.MustParsePrefix("fd08::/64"))
	n.Sync()
	if got, want := routes(), "10.8.2.0/24 10.9.0.0/16 10.91.0.0/16"; got != want {
		t.Errorf("with one peer, routes are %s, want %s", got, want)
	}
	n.Want.Peers, n.Want.Routes = nil, nil
	n.Sync()
	if got, want := routes(), "10.91.0.0/16"; got != want {
		t.Errorf("without peers, routes are %s, want %s", got, want)
	}
}

// TestMTUOfWhatIsThere has an interface of ours with another MTU, and MTUs that IPv6 does not live with.
func TestMTUOfWhatIsThere(t *testing.T) {
	t.Parallel()
	nettest.NeedProgram(t, "ip")
	s := newSpace(t)
	s.Out()
	s.IP("tuntap add mode tun name warren0")
	s.Must(func() error { return mark("warren0", "warren:warren0:87") })
	s.IP("link set warren0 mtu 1500 up")
	n := newNode(t, s, "a", addrsA)
	if got := n.Have().Device.MTU; got != 1420 {
		t.Errorf("over 1500 bytes, the MTU is %d, want 1420", got)
	}
	for _, mtu := range []int{1200, 1279, MaxMTU + 1, -1} {
		err := n.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{MTU: mtu}})
		if err == nil || errors.Is(err, datapath.ErrNoDevice) || !strings.Contains(err.Error(), strconv.Itoa(mtu)) {
			t.Errorf("MTU %d: %v", mtu, err)
		}
	}
	if st := n.Have(); st.Device.MTU != 1420 || st.Addrs != addrsA {
		t.Errorf("after MTUs were refused: MTU %d, addresses %v", st.Device.MTU, st.Addrs)
	}
}

// TestReversePath has a host that is strict about where packets come from, and routes that only marked packets take.
func TestReversePath(t *testing.T) {
	t.Parallel()
	nettest.NeedProgram(t, "ip")
	sa, sb := wired(t)
	sa.Sysctl("net/ipv4/conf/all/rp_filter", "1")
	sa.IP("route add default via " + nettest.Wire4B)
	sa.IP("rule add fwmark 7 lookup 100")
	p := pair{newNode(t, sa, "a", addrsA, func(o *Options) { o.Table = 100 }), newNode(t, sb, "b", addrsB)}
	p.connect(plain)
	in, err := sb.Listen("tcp", "10.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	go func() {
		for {
			c, err := in.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	dial := func(wait time.Duration) error {
		d := net.Dialer{Timeout: wait, Control: func(_, _ string, c syscall.RawConn) error {
			var err error
			return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, 7) }), err)
		}, LocalAddr: &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1)}}
		return sa.In(func() error {
			c, err := d.Dial("tcp", in.Addr().String())
			if err == nil {
				c.Close()
			}
			return err
		})
	}
	filtered := func() int {
		out, err := sa.Run("cat", "/proc/net/netstat")
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(out, "\n")
		i := slices.Index(strings.Fields(lines[0]), "IPReversePathFilter")
		n, err := strconv.Atoi(strings.Fields(lines[1])[i])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if err := dial(20 * time.Second); err != nil || filtered() > 0 {
		t.Errorf("on a strict host: %v; %d packets were filtered", err, filtered())
	}
	// Somebody makes the interface strict, too: what comes out of the tunnel is dropped, until that is brought back.
	nettest.Quiet(p.a.TUN)
	sa.Sysctl("net/ipv4/conf/warren0/rp_filter", "1")
	nettest.Notified(t, p.a.TUN, "a strict interface")
	if err := dial(time.Second); err == nil || filtered() == 0 {
		t.Errorf("with a strict interface: %v; %d packets were filtered", err, filtered())
	}
	nettest.Within(t, 5*time.Second, "it is brought back", func() bool { p.a.Have(); return dial(time.Second) == nil })
}

// TestNoTUN has a host without /dev/net/tun: New says what to do.
func TestNoTUN(t *testing.T) {
	need(t)
	errc := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread has a file system of its own
		errc <- func() error {
			if err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")); err != nil {
				return err
			}
			if err := unix.Mount("none", "/dev/net", "tmpfs", 0, ""); err != nil {
				return err
			}
			d, err := New(Options{})
			if err == nil {
				d.Close()
				return errors.New("it works")
			}
			if !errors.Is(err, errors.ErrUnsupported) || !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("another error: %w", err)
			}
			for _, word := range []string{"/dev/net/tun", "modprobe tun", "--device /dev/net/tun"} {
				if !strings.Contains(err.Error(), word) {
					return fmt.Errorf("%w: does not say %q", err, word)
				}
			}
			return nil
		}()
	}()
	if err := <-errc; err != nil {
		t.Error(err)
	}
}

// TestInterfaceNames holds that a name is counted in bytes, and one that is too long is refused before anything is done.
func TestInterfaceNames(t *testing.T) {
	s := newSpace(t)
	for _, name := range []string{"fifteen-bytes-0", "🕸🕸🕸"} {
		n := newNode(t, s, "a", addrsA, func(o *Options) { o.Interface = name })
		if !slices.Contains(s.Links(), name) {
			t.Errorf("links are %v, want %s", s.Links(), name)
		}
		n.Close()
	}
	before := settled(s)
	for _, name := range []string{"sixteen-bytes-00", strings.Repeat("🕸", 5), "wg/0", "a b", ".", "..", "wg%d", "a:b"} {
		for what, err := range map[string]error{
			"New":     func() error { d, err := New(Options{Interface: name, Namespace: s.Path}); d.closeIfAny(); return err }(),
			"Cleanup": Cleanup(t.Context(), Options{Interface: name, Namespace: s.Path}),
		} {
			if !errors.Is(err, hostnet.ErrName) || !strings.Contains(err.Error(), strconv.Quote(name)) && !strings.Contains(err.Error(), name) {
				t.Errorf("%s of interface %q: %v", what, name, err)
			}
		}
	}
	if after := counted(s); after != before {
		t.Errorf("names that were refused left %+v, before %+v", after, before)
	}
}

func (t *TUN) closeIfAny() {
	if t != nil {
		t.Close()
	}
}

// TestUnderlayComesBack takes parts of the underlay away and gives them back. What does not need them goes on, and
// what does goes on with them, without anybody's help.
func TestUnderlayComesBack(t *testing.T) {
	nettest.NeedProgram(t, "ip")
	p := newPair(t)
	p.connect(plain)
	sa, sb := p.a.space, p.b.space
	// Another node in b's namespace, over IPv6.
	c := newNode(t, sb, "c", set("10.0.0.3", "fd00::3"), func(o *Options) { o.Interface = "other0" })
	p.a.Peer(c.Public(), datapath.Peer{Endpoint: c.At(nettest.Wire6B), Prefixes: c.Want.Addrs})
	// Its answers are to go into its own interface, although b has a route to a, too.
	c.Want.Peers[p.a.Public()] = datapath.Peer{Endpoint: p.a.At(nettest.Wire6A), Prefixes: addrsA}
	c.Sync()
	sb.IP("rule add from 10.0.0.3 lookup 333")
	sb.IP("route add 10.0.0.1 dev other0 table 333")
	p.works("at first")
	stream := nettest.NewStream(t, sa, sb, "10.0.0.3")

	veth := slices.DeleteFunc(sa.Links(), func(l string) bool { return !strings.HasPrefix(l, "v") })[0]
	stream.During("IPv4 taken from the underlay, which the others do not need", func() string {
		sa.IP("addr del " + nettest.Wire4A + "/24 dev " + veth)
		if err := tryDial(sa, "10.0.0.2:9", 300*time.Millisecond); errors.Is(err, unix.ECONNREFUSED) {
			t.Error("b is reached without IPv4")
		}
		sa.IP("addr add " + nettest.Wire4A + "/24 dev " + veth)
		p.works("IPv4 is back")
		return "gone and back"
	})

	port := p.a.Have().Device.ListenPort
	for what, back := range map[string]func(){
		"taken down": func() {
			sa.IP("link set " + veth + " up")
			sa.IP("addr add " + nettest.Wire6A + "/64 nodad dev " + veth)
		},
		"deleted": func() { nettest.Wire(sa.Space, sb.Space) },
	} {
		veth = slices.DeleteFunc(sa.Links(), func(l string) bool { return !strings.HasPrefix(l, "v") })[0]
		if what == "deleted" {
			sa.IP("link del " + veth)
		} else {
			sa.IP("link set " + veth + " down")
		}
		if err := tryDial(sa, "10.0.0.2:9", 300*time.Millisecond); errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: b is reached without an underlay", what)
		}
		if st := p.a.Have(); !st.Device.Exists() || len(st.Peers) != 2 {
			t.Errorf("%s: the device is %+v", what, st)
		}
		back()
		p.works(what + ", and back")
		nettest.Within(t, 20*time.Second, what+", and back: IPv6 works", func() bool {
			lost, _ := stream.Loses("IPv6, "+what+" and back", func() string { time.Sleep(20 * time.Millisecond); return "idle" })
			return lost == 0
		})
		if now := p.a.Have().Device.ListenPort; now != port {
			t.Errorf("%s: the port was %d, is %d", what, port, now)
		}
	}
}

// tryDial says why a port where nobody listens does not answer: ECONNREFUSED is an answer.
func tryDial(s *space, addr string, wait time.Duration) error {
	return s.In(func() error {
		c, err := (&net.Dialer{Timeout: wait}).Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err
	})
}
