package kernel

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

const transfer = 256 << 10 // bytes

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
		_ = c.SetDeadline(time.Now().Add(40 * time.Second))
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
	t.Logf("%s: connected in %v, %d KiB each way in %v, hashes equal", what, connected.Round(time.Millisecond), transfer>>10, time.Since(begun).Round(time.Millisecond))
}

func newPreshared(t testing.TB) key.Preshared {
	t.Helper()
	k, err := key.NewPreshared()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestTraffic(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		psk  bool
		v6   bool
	}{{"IPv4", false, false}, {"IPv4Preshared", true, false}, {"IPv6", false, true}, {"IPv6Preshared", true, true}} {
		t.Run(test.name, func(t *testing.T) {
			p := newPair(t)
			var psk key.Preshared
			if test.psk {
				psk = newPreshared(t)
			}
			p.connect(psk, test.v6)
			exchange(t, "inner IPv4", p.b.space.listen, p.a.space.dial, "10.0.0.2")
			exchange(t, "inner IPv6", p.a.space.listen, p.b.space.dial, "fd00::1")
			if st := p.a.read().Stats[p.b.public()]; st.LastHandshake.IsZero() || st.Received < transfer || st.Sent < transfer {
				t.Errorf("stats are %+v", st)
			}
		})
	}
}

// The kernel and the in-process datapath as peers of each other.
func TestTrafficWithNetstack(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		psk  bool
		v6   bool
	}{{"IPv4", false, false}, {"IPv6Preshared", true, true}} {
		t.Run(test.name, func(t *testing.T) {
			sa, sb := newSpace(t), newSpace(t)
			wire(sa, sb, wire4a+"/24", wire4b+"/24", wire6a+"/64", wire6b+"/64")
			a := newNode(t, sa, "a", "10.0.0.1", "fd00::1")
			b, err := netstack.New(netstack.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			private := newKey(t)
			ctx, cancel := background(time.Minute)
			defer cancel()
			// Its sockets are in the namespace that they are opened in.
			sb.must(func() error { return b.Apply(ctx, datapath.SetDevice{Device: datapath.Device{Key: private}}) })
			addrA, addrB := wire4a, wire4b
			if test.v6 {
				addrA, addrB = wire6a, wire6b
			}
			var psk key.Preshared
			if test.psk {
				psk = newPreshared(t)
			}
			s, err := b.Read(ctx)
			if err != nil {
				t.Fatal(err)
			}
			a.peer(private.Public(), datapath.Peer{
				Endpoint:  netip.AddrPortFrom(netip.MustParseAddr(addrB), s.Device.ListenPort),
				Preshared: psk, Prefixes: set("10.0.0.2", "fd00::2"),
			})
			want := datapath.State{
				Device: datapath.Device{Key: private}, Addrs: set("10.0.0.2", "fd00::2"), Routes: map[netip.Prefix]netip.Addr{},
				Peers: map[key.Public]datapath.Peer{a.public(): {
					Endpoint:  netip.AddrPortFrom(netip.MustParseAddr(addrA), a.read().Device.ListenPort),
					Preshared: psk, Prefixes: a.want.Addrs,
				}},
			}
			for q := range a.want.Addrs.All() {
				want.Routes[q] = netip.Addr{}
			}
			if err := datapath.Sync(ctx, b, want); err != nil {
				t.Fatal(err)
			}
			b.Settle()
			listen := func(addr string) (net.Listener, error) { return b.Listen("tcp", addr) }
			dial := func(addr string) (net.Conn, error) { return b.DialContext(ctx, "tcp", addr) }
			exchange(t, "kernel to netstack, inner IPv4", listen, sa.dial, "10.0.0.2")
			exchange(t, "kernel to netstack, inner IPv6", listen, sa.dial, "fd00::2")
			exchange(t, "netstack to kernel, inner IPv4", sa.listen, dial, "10.0.0.1")
			exchange(t, "netstack to kernel, inner IPv6", sa.listen, dial, "fd00::1")
		})
	}
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

func TestNoLoss(t *testing.T) {
	direct := needDirect(t)
	ways := []bool{true}
	if direct {
		ways = []bool{false, true}
	}
	for _, fallback := range ways {
		t.Run(map[bool]string{false: "PerPrefix", true: "Fallback"}[fallback], func(t *testing.T) { testNoLoss(t, fallback) })
	}
}

// needDirect reports whether this kernel can take single prefixes from a peer.
func needDirect(t testing.TB) bool {
	t.Helper()
	direct, err := newSpace(t).kernel(t).RemovesPrefixes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return direct
}

func testNoLoss(t *testing.T, fallback bool) {
	p := newPair(t)
	a, b := p.a, p.b
	a.fallback, b.fallback = fallback, fallback
	p.connect(key.Preshared{}, false)
	s := newStream(t, a.space, b.space, "10.0.0.2")
	dead := netip.MustParseAddrPort("127.0.0.1:9")

	s.during("nothing", func() string { time.Sleep(time.Second); return "idle" })
	s.during("peers added and removed", func() string {
		n := 0
		for begun := time.Now(); time.Since(begun) < time.Second; n++ {
			k := newKey(t).Public()
			a.apply(datapath.PutPeer{Key: k, Peer: datapath.Peer{Endpoint: dead, Prefixes: set("10.7.0.0/16", "fd07::/64")}},
				datapath.AddRoutes{Routes: []datapath.Route{{Prefix: netip.MustParsePrefix("10.7.0.0/16")}}})
			a.apply(datapath.RemoveRoutes{Prefixes: set("10.7.0.0/16")}, datapath.RemovePeer{Key: k})
		}
		return fmt.Sprintf("%d peers came and went", n)
	})
	s.during("prefixes of the peer itself", func() string {
		// As a mesh does it: what has come meanwhile is written together.
		const rate, window, lasts = 500, 10 * time.Millisecond, 2 * time.Second
		n, applies := 0, 0
		tick := time.NewTicker(window)
		defer tick.Stop()
		begun := time.Now()
		for n < rate*int(lasts/time.Second) {
			<-tick.C
			due := min(int(time.Since(begun).Seconds()*rate), rate*int(lasts/time.Second))
			var more, fewer []netip.Prefix // each is put, and is dropped 16 changes later
			for ; n < due; n++ {
				p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 8, byte(n / 32), byte(n % 16 << 4)}), 28)
				if n%32 < 16 {
					more = append(more, p)
				} else {
					fewer = append(fewer, p)
				}
			}
			var ops []datapath.Op
			if len(more) > 0 {
				ops = append(ops, datapath.PutPeer{Key: b.public(), Peer: datapath.Peer{Prefixes: prefixes.Must(more...)}})
			}
			if len(fewer) > 0 {
				ops = append(ops, datapath.DropPrefixes{Key: b.public(), Prefixes: prefixes.Must(fewer...)})
			}
			if len(ops) > 0 {
				a.apply(ops...)
				applies++
			}
		}
		return fmt.Sprintf("%d changes in %d applies, %.0f a second", n, applies, float64(n)/time.Since(begun).Seconds())
	})
	// The wider prefix goes back and forth between two others, and what the stream uses to its own peer
	// and back: each time in one step.
	c, d := newKey(t).Public(), newKey(t).Public()
	a.apply(datapath.PutPeer{Key: c, Peer: datapath.Peer{Prefixes: set("10.0.0.0/8")}}, datapath.PutPeer{Key: d})
	s.during("prefixes moved", func() string {
		n := 0
		for begun := time.Now(); time.Since(begun) < time.Second; n++ {
			a.apply(datapath.PutPeer{Key: []key.Public{d, c}[n%2], Peer: datapath.Peer{Prefixes: set("10.0.0.0/8")}})
			a.apply(datapath.PutPeer{Key: b.public(), Peer: datapath.Peer{Prefixes: b.want.Addrs}})
		}
		return fmt.Sprintf("%d moves", n)
	})
	a.apply(datapath.RemovePeer{Key: c}, datapath.RemovePeer{Key: d})
	s.during("a third node's key changed", func() string {
		want := a.read()
		n := 0
		last := key.Public{}
		for begun := time.Now(); time.Since(begun) < time.Second; n++ {
			delete(want.Peers, last)
			last = newKey(t).Public()
			want.Peers[last] = datapath.Peer{Endpoint: dead, Preshared: newPreshared(t), Prefixes: set("10.9.0.0/24", "fd09::/64")}
			want.Routes[netip.MustParsePrefix("10.9.0.0/24")] = netip.Addr{}
			if err := datapath.Sync(t.Context(), a.Kernel, want); err != nil {
				t.Fatal(err)
			}
		}
		return fmt.Sprintf("%d keys", n)
	})
	s.during("the driver restarted", func() string {
		before := a.read()
		n := 0
		for ; n < 5; n++ {
			if err := a.Close(); err != nil {
				t.Error(err)
			}
			a.Kernel = a.space.kernel(t)
			a.fallback = fallback
			after := a.read()
			if ops := datapath.Plan(before, after); len(ops) > 0 {
				t.Errorf("a new driver has to do %v", ops)
			}
			if x, y := before.Stats[b.public()].LastHandshake, after.Stats[b.public()].LastHandshake; !x.Equal(y) {
				t.Errorf("the last handshake was at %v, and is at %v", x, y)
			}
			if err := datapath.Sync(t.Context(), a.Kernel, before); err != nil {
				t.Error(err)
			}
			if a.conn.written != 0 {
				t.Errorf("%d messages were written", a.conn.written)
			}
		}
		return fmt.Sprintf("%d times, nothing written, same handshake", n)
	})
}

// Two nodes learn of each other at the same instant, over a wire with a delay, and send at once: their
// handshakes cross. WireGuard tries again after 5 s; what was sent meanwhile is not lost.
func TestCrossingHandshakes(t *testing.T) {
	for _, sending := range []bool{false, true} {
		t.Run(map[bool]string{false: "Greeting", true: "Sending"}[sending], func(t *testing.T) { testCrossing(t, sending) })
	}
}

func testCrossing(t *testing.T, sending bool) {
	p := newPair(t)
	delay(t, p, 20*time.Millisecond)
	at := func(addr string, n *node) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr(addr), n.read().Device.ListenPort)
	}
	const datagrams = 10
	in := make(map[*node]net.PacketConn)
	for n, addr := range map[*node]string{p.a: "10.0.0.1:7", p.b: "10.0.0.2:7"} {
		n.space.must(func() (err error) {
			in[n], err = net.ListenPacket("udp", addr)
			return err
		})
		defer in[n].Close()
	}
	endA, endB := at(wire4a, p.a), at(wire4b, p.b)
	var wg sync.WaitGroup
	begun := time.Now()
	for _, x := range []struct {
		n  *node
		k  key.Public
		e  netip.AddrPort
		to string
	}{{p.a, p.b.public(), endB, "10.0.0.2"}, {p.b, p.a.public(), endA, "10.0.0.1"}} {
		wg.Go(func() {
			to := netip.MustParsePrefix(x.to + "/32")
			if err := x.n.Apply(context.Background(), datapath.PutPeer{Key: x.k, Peer: datapath.Peer{Endpoint: x.e, Prefixes: prefixes.Must(to)}},
				datapath.AddRoutes{Routes: []datapath.Route{{Prefix: to}}}); err != nil {
				t.Error(err)
			}
			for i := range datagrams {
				if !sending {
					break
				}
				if _, err := in[x.n].WriteTo([]byte{byte(i)}, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to.Addr(), 7))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	most := 20 * time.Second
	if sending {
		most = 80 * time.Second // a handshake in 5 s, and each may cross again
	}
	within(t, most, "both have shaken hands", func() bool {
		time.Sleep(50 * time.Millisecond)
		return !p.a.read().Stats[p.b.public()].LastHandshake.IsZero() && !p.b.read().Stats[p.a.public()].LastHandshake.IsZero()
	})
	t.Logf("on a wire of 20 ms each way, both had shaken hands after %v", time.Since(begun).Round(time.Millisecond))
	for _, n := range []*node{p.a, p.b} {
		if s := n.read(); len(s.Peers) != 1 {
			t.Errorf("%s has %d peers", n.name, len(s.Peers))
		}
		_ = in[n].SetReadDeadline(time.Now().Add(10 * time.Second))
		for i := range datagrams {
			if !sending {
				break
			}
			if _, _, err := in[n].ReadFrom(make([]byte, 9)); err != nil {
				t.Errorf("%s got %d datagrams of %d: %v", n.name, i, datagrams, err)
				break
			}
		}
	}
}
