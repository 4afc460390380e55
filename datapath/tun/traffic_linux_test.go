package tun

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

// transfer is how many bytes go each way. The race detector makes cryptography some thirty times slower.
var transfer = map[bool]int{false: 4 << 20, true: 1 << 20}[raceEnabled]

// dialler and listener are what a node's sockets come from.
type (
	dialler  func(addr string) (net.Conn, error)
	listener func(addr string) (net.Listener, error)
)

func (s *space) dial(addr string) (c net.Conn, err error) {
	err = s.in(func() error {
		c, err = (&net.Dialer{Timeout: 20 * time.Second}).Dial("tcp", addr)
		return err
	})
	return c, err
}

func (s *space) listen(addr string) (l net.Listener, err error) {
	err = s.in(func() error {
		l, err = net.Listen("tcp", addr)
		return err
	})
	return l, err
}

// exchange has a TCP connection carry random bytes both ways at once, and compares hashes.
func exchange(t testing.TB, what string, listen listener, dial dialler, addr string) {
	t.Helper()
	l, err := listen(net.JoinHostPort(addr, "0"))
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer l.Close()
	type end struct {
		sent, got [32]byte
		err       error
	}
	both := func(c net.Conn) (e end) {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		out := make([]byte, transfer)
		rand.Read(out)
		e.sent = sha256.Sum256(out)
		werr := make(chan error, 1)
		go func() {
			_, err := c.Write(out)
			werr <- err
		}()
		in := make([]byte, transfer)
		_, e.err = io.ReadFull(c, in)
		e.got = sha256.Sum256(in)
		if err := <-werr; e.err == nil {
			e.err = err
		}
		if e.err == nil { // keep it open until the other side has it all
			_, _ = c.Write([]byte{1})
			_, e.err = io.ReadFull(c, in[:1])
		}
		return e
	}
	served := make(chan end, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			served <- end{err: err}
			return
		}
		served <- both(c)
	}()
	begun := time.Now()
	c, err := dial(l.Addr().String())
	if err != nil {
		l.Close()
		<-served
		t.Fatalf("%s: %v", what, err)
	}
	connected := time.Since(begun)
	here := both(c)
	there := <-served
	if here.err != nil || there.err != nil {
		t.Fatalf("%s: %v, %v", what, here.err, there.err)
	}
	if here.sent != there.got || there.sent != here.got {
		t.Errorf("%s: what arrived is not what was sent", what)
	}
	t.Logf("%s: connected in %v, %d MiB each way in %v, hashes equal", what, connected.Round(time.Millisecond), transfer>>20, time.Since(begun).Round(time.Millisecond))
}

func newPreshared(t testing.TB) key.Preshared {
	t.Helper()
	k, err := key.NewPreshared()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// stream sends datagrams from one node to another, evenly.
type stream struct {
	t    testing.TB
	sent atomic.Uint64
	got  map[uint64]bool // by number
	mu   sync.Mutex
	out  net.Conn
	in   net.PacketConn
	stop chan struct{}
	wg   sync.WaitGroup
}

const pace = 2 * time.Millisecond

func newStream(t testing.TB, from, to *space, addr string) *stream {
	t.Helper()
	s := &stream{t: t, got: make(map[uint64]bool), stop: make(chan struct{})}
	to.must(func() (err error) {
		s.in, err = net.ListenPacket("udp", net.JoinHostPort(addr, "0"))
		return err
	})
	_ = s.in.(*net.UDPConn).SetReadBuffer(4 << 20)
	from.must(func() (err error) {
		s.out, err = net.Dial("udp", s.in.LocalAddr().String())
		return err
	})
	s.wg.Go(func() {
		var b [128]byte
		for {
			n, _, err := s.in.ReadFrom(b[:])
			if err != nil {
				return
			}
			if n == len(b) {
				s.mu.Lock()
				s.got[binary.BigEndian.Uint64(b[:])] = true
				s.mu.Unlock()
			}
		}
	})
	s.wg.Go(func() {
		tick := time.NewTicker(pace)
		defer tick.Stop()
		var b [128]byte
		for {
			select {
			case <-s.stop:
				return
			case <-tick.C:
			}
			binary.BigEndian.PutUint64(b[:], s.sent.Load())
			if _, err := s.out.Write(b[:]); err != nil && !errors.Is(err, net.ErrClosed) {
				t.Errorf("sending: %v", err)
			}
			s.sent.Add(1)
		}
	})
	t.Cleanup(func() {
		close(s.stop)
		s.out.Close()
		s.in.Close()
		s.wg.Wait()
	})
	within(t, 20*time.Second, "the first datagram arrives", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.got) > 0
	})
	return s
}

// during runs f and reports how many of the datagrams that were sent meanwhile were lost.
func (s *stream) during(what string, f func() string) {
	s.t.Helper()
	from := s.sent.Load()
	begun := time.Now()
	said := f()
	took := time.Since(begun)
	upto := s.sent.Load()
	time.Sleep(500 * time.Millisecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	lost := 0
	for i := from; i < upto; i++ {
		if !s.got[i] {
			lost++
		}
	}
	s.t.Logf("%s: %s in %v; %d datagrams, %d lost", what, said, took.Round(time.Millisecond), upto-from, lost)
	if lost > 0 {
		s.t.Errorf("%s: %d of %d datagrams were lost", what, lost, upto-from)
	}
}

// exchange has TCP go both ways between two nodes in namespaces, over both families.
func (p pair) exchange(what string) {
	p.a.t.Helper()
	exchange(p.a.t, what+", inner IPv4", p.b.space.listen, p.a.space.dial, "10.0.0.2")
	exchange(p.a.t, what+", inner IPv6", p.a.space.listen, p.b.space.dial, "fd00::1")
}

// outer is what a tunnel runs over.
var outer = []struct {
	name    string
	psk, v6 bool
}{{"IPv4", false, false}, {"IPv4Preshared", true, false}, {"IPv6", false, true}, {"IPv6Preshared", true, true}}

func TestTraffic(t *testing.T) {
	for _, test := range outer {
		t.Run(test.name, func(t *testing.T) {
			p := newPair(t)
			var psk key.Preshared
			if test.psk {
				psk = newPreshared(t)
			}
			p.connect(psk, test.v6)
			p.exchange("tun to tun")
			if st := p.a.read().Stats[p.b.public()]; st.LastHandshake.IsZero() || st.Received < uint64(transfer) || st.Sent < uint64(transfer) {
				t.Errorf("stats are %+v", st)
			}
		})
	}
}

// away is a Bind whose sockets are in a namespace.
type away struct {
	conn.Bind
	s *space
}

func (b away) Open(port uint16) (fns []conn.ReceiveFunc, actual uint16, err error) {
	err = b.s.in(func() (err error) {
		fns, actual, err = b.Bind.Open(port)
		return err
	})
	return fns, actual, err
}

// mixed is a node in one namespace and an in-process one whose sockets are in another.
type mixed struct {
	a     *node
	b     *netstack.Net
	space *space // of b's sockets
}

func newMixed(t testing.TB, psk key.Preshared, v6 bool, mtu int, change ...func(*Options)) mixed {
	t.Helper()
	sa, sb := newSpace(t), newSpace(t)
	wire(sa, sb, wire4a+"/24", wire4b+"/24", wire6a+"/64", wire6b+"/64")
	a := newNode(t, sa, "a", addrsA, change...)
	b, err := netstack.New(netstack.Options{MTU: mtu, Bind: func() conn.Bind { return away{conn.NewDefaultBind(), sb} }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	private := newKey(t)
	ctx, cancel := background(time.Minute)
	t.Cleanup(cancel)
	addrA, addrB := wire4a, wire4b
	if v6 {
		addrA, addrB = wire6a, wire6b
	}
	want := datapath.State{
		Device: datapath.Device{Key: private}, Addrs: addrsB, Routes: map[netip.Prefix]netip.Addr{},
		Peers: map[key.Public]datapath.Peer{a.public(): {
			Endpoint:  netip.AddrPortFrom(netip.MustParseAddr(addrA), a.read().Device.ListenPort),
			Preshared: psk, Prefixes: addrsA,
		}},
	}
	for q := range addrsA.All() {
		want.Routes[q] = netip.Addr{}
	}
	if err := datapath.Sync(ctx, b, want); err != nil {
		t.Fatal(err)
	}
	b.Settle()
	s, err := b.Read(ctx)
	if err != nil {
		t.Fatal(err)
	}
	a.peer(private.Public(), datapath.Peer{
		Endpoint:  netip.AddrPortFrom(netip.MustParseAddr(addrB), s.Device.ListenPort),
		Preshared: psk, Prefixes: addrsB,
	})
	return mixed{a, b, sb}
}

func (m mixed) exchange() {
	t := m.a.t
	t.Helper()
	listen := func(addr string) (net.Listener, error) { return m.b.Listen("tcp", addr) }
	dial := func(addr string) (net.Conn, error) { return m.b.DialContext(t.Context(), "tcp", addr) }
	exchange(t, "tun to netstack, inner IPv4", listen, m.a.space.dial, "10.0.0.2")
	exchange(t, "netstack to tun, inner IPv6", m.a.space.listen, dial, "fd00::1")
}

func TestTrafficWithNetstack(t *testing.T) {
	for _, test := range outer {
		t.Run(test.name, func(t *testing.T) {
			var psk key.Preshared
			if test.psk {
				psk = newPreshared(t)
			}
			newMixed(t, psk, test.v6, 0).exchange()
		})
	}
}

// TestTrafficWithWireguardGo has Debian's wireguard-go, told by wg, as the peer.
func TestTrafficWithWireguardGo(t *testing.T) {
	need(t)
	wgo, wg := needProgram(t, "wireguard-go"), needProgram(t, "wg")
	needProgram(t, "ip")
	for _, test := range outer {
		t.Run(test.name, func(t *testing.T) {
			sa, sb := newSpace(t), newSpace(t)
			wire(sa, sb, wire4a+"/24", wire4b+"/24", wire6a+"/64", wire6b+"/64")
			a := newNode(t, sa, "a", addrsA)
			name := uniqueName(t)
			foreground(t, sb, wgo, "-f", name)
			within(t, 20*time.Second, "wireguard-go answers wg", func() bool {
				_, err := sb.run(wg, "show", name)
				return err == nil
			})
			addrA, addrB := wire4a, wire4b
			if test.v6 {
				addrA, addrB = wire6a, wire6b
			}
			private, mine := newKey(t), a.public()
			pk, ak := private.Bytes(), mine.Bytes()
			dir := folder(t)
			file := func(name string, b []byte) string {
				path := dir + "/" + name
				if err := os.WriteFile(path, []byte(base64.StdEncoding.EncodeToString(b)), 0o600); err != nil {
					t.Fatal(err)
				}
				return path
			}
			args := []string{"set", name, "private-key", file("key", pk[:]), "listen-port", "51999", "peer", base64.StdEncoding.EncodeToString(ak[:])}
			var psk key.Preshared
			if test.psk {
				psk = newPreshared(t)
				b := psk.Bytes()
				args = append(args, "preshared-key", file("psk", b[:]))
			}
			args = append(args, "endpoint", netip.AddrPortFrom(netip.MustParseAddr(addrA), a.read().Device.ListenPort).String(), "allowed-ips", "10.0.0.1/32,fd00::1/128")
			if _, err := sb.run(wg, args...); err != nil {
				t.Fatal(err)
			}
			sb.ip("link set " + name + " up mtu 1420")
			sb.ip("addr add 10.0.0.2/24 dev " + name)
			sb.ip("addr add fd00::2/64 nodad dev " + name)
			a.peer(private.Public(), datapath.Peer{
				Endpoint:  netip.AddrPortFrom(netip.MustParseAddr(addrB), 51999),
				Preshared: psk, Prefixes: addrsB,
			})
			exchange(t, "tun to wireguard-go, inner IPv4", sb.listen, sa.dial, "10.0.0.2")
			exchange(t, "wireguard-go to tun, inner IPv6", sa.listen, sb.dial, "fd00::1")
		})
	}
}

// narrow gives the wires of a namespace an MTU.
func (s *space) narrow(mtu int) {
	s.t.Helper()
	s.must(func() error {
		ls, err := netlink.LinkList()
		for _, l := range ls {
			if l.Type() == "veth" {
				err = errors.Join(err, netlink.LinkSetMTU(l, mtu))
			}
		}
		return err
	})
}

// TestNarrowUnderlay has a tunnel whose packets do not fit the underlay, so that Linux refuses several of
// them sent as one.
func TestNarrowUnderlay(t *testing.T) {
	wide := func(o *Options) { o.MTU = 1420 }
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) {
			p := newPair(t, wide)
			p.a.space.narrow(1280)
			p.b.space.narrow(1280)
			p.connect(key.Preshared{}, v6)
			p.exchange("tun to tun")
			m := newMixed(t, key.Preshared{}, v6, 1420, wide)
			m.a.space.narrow(1280)
			m.space.narrow(1280)
			m.exchange()
		})
	}
}

// TestMTU has a new device take its MTU from the underlay.
func TestMTU(t *testing.T) {
	for _, test := range []struct{ underlay, option, want int }{
		{1500, 0, 1420}, {1280, 0, 1280}, {9000, 0, 8920}, {1492, 0, 1412}, {1500, 1300, 1300},
	} {
		s, other := newSpace(t), newSpace(t)
		wire(s, other, wire4a+"/24", wire4b+"/24", wire6a+"/64", wire6b+"/64")
		s.narrow(test.underlay)
		n := newNode(t, s, "a", addrsA, func(o *Options) { o.MTU = test.option })
		got := n.read()
		if got.Device.MTU != test.want || got.Host.UnderlayMTU != test.underlay {
			t.Errorf("over %d bytes, with %d in Options, the MTU is %d, want %d; the underlay's is read as %d",
				test.underlay, test.option, got.Device.MTU, test.want, got.Host.UnderlayMTU)
		}
		if got.Host.Underlay != datapath.UnderlayShared || !got.Host.IPv4 || !got.Host.IPv6 {
			t.Errorf("host is %+v", got.Host)
		}
	}
}

// TestNoLoss sends a datagram every 2 ms while everything around its peer changes.
func TestNoLoss(t *testing.T) {
	p := newPair(t)
	a, b := p.a, p.b
	p.connect(key.Preshared{}, false)
	s := newStream(t, a.space, b.space, "10.0.0.2")
	nobody := netip.MustParseAddrPort("127.0.0.1:9")
	const round = 2 * time.Second
	changes := func(f func(i int)) string {
		n := 0
		for begun := time.Now(); time.Since(begun) < round; n++ {
			f(n)
		}
		return fmt.Sprint(n, " changes")
	}
	peer := newKey(t).Public()
	other := func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(i), 0}), 24)
	}
	s.during("nothing", func() string { time.Sleep(time.Second); return "idle" })
	s.during("peers added and removed", func() string {
		return changes(func(i int) {
			q := prefixes.Must(other(i % 7))
			if i%2 == 0 {
				a.apply(datapath.PutPeer{Key: peer, Peer: datapath.Peer{Endpoint: nobody, Prefixes: q}},
					datapath.AddRoutes{Routes: []datapath.Route{{Prefix: q.At(0)}}})
			} else {
				q = prefixes.Must(other((i - 1) % 7))
				a.apply(datapath.RemoveRoutes{Prefixes: q}, datapath.RemovePeer{Key: peer, Prefixes: q})
			}
		})
	})
	s.during("prefixes put and dropped", func() string {
		return changes(func(i int) {
			q := prefixes.Must(other(i % 7))
			a.apply(datapath.PutPeer{Key: b.public(), Peer: datapath.Peer{Prefixes: q}}, datapath.AddRoutes{Routes: []datapath.Route{{Prefix: q.At(0)}}},
				datapath.RemoveRoutes{Prefixes: q}, datapath.DropPrefixes{Key: b.public(), Prefixes: q})
		})
	})
	s.during("prefixes moved between two peers", func() string {
		q := prefixes.Must(other(0))
		a.apply(datapath.PutPeer{Key: peer, Peer: datapath.Peer{Prefixes: q}}, datapath.AddRoutes{Routes: []datapath.Route{{Prefix: q.At(0)}}})
		return changes(func(i int) {
			a.apply(datapath.PutPeer{Key: []key.Public{b.public(), peer}[i%2], Peer: datapath.Peer{Prefixes: q}})
		})
	})
	s.during("a wider prefix with and without a route", func() string {
		q := set("10.0.0.0/16")
		a.apply(datapath.PutPeer{Key: peer, Peer: datapath.Peer{Prefixes: q}})
		return changes(func(int) {
			a.apply(datapath.AddRoutes{Routes: []datapath.Route{{Prefix: q.At(0)}}}, datapath.RemoveRoutes{Prefixes: q})
		})
	})
	s.during("other addresses and sources", func() string {
		return changes(func(int) {
			a.apply(datapath.AddAddrs{Addrs: set("10.0.0.9", "fd00::9")}, datapath.AddRoutes{Routes: []datapath.Route{{Prefix: other(0), Source: netip.MustParseAddr("10.0.0.9")}}},
				datapath.AddRoutes{Routes: []datapath.Route{{Prefix: other(0)}}}, datapath.RemoveAddrs{Addrs: set("10.0.0.9", "fd00::9")})
		})
	})
	s.during("readings", func() string { return changes(func(int) { a.read(); b.read() }) })
}
