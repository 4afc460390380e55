package kernel

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

const transfer = 256 << 10 // bytes

func TestTraffic(t *testing.T) {
	t.Parallel()
	for _, o := range nettest.Outers {
		t.Run(o.Name, func(t *testing.T) {
			p := newPair(t)
			p.connect(o)
			nettest.Exchange(t, "inner IPv4", transfer, p.b.space, p.a.space, "10.0.0.2")
			nettest.Exchange(t, "inner IPv6", transfer, p.a.space, p.b.space, "fd00::1")
			if st := p.a.Have().Stats[p.b.Public()]; st.LastHandshake.IsZero() || st.Received < transfer || st.Sent < transfer {
				t.Errorf("stats are %+v", st)
			}
		})
	}
}

// The kernel and the in-process datapath as peers of each other.
func TestTrafficWithNetstack(t *testing.T) {
	t.Parallel()
	for _, o := range nettest.Outers {
		if o.Preshared != o.V6 {
			continue
		}
		t.Run(o.Name, func(t *testing.T) {
			sa, sb := wired(t)
			a := newNode(t, sa, "a", "10.0.0.1", "fd00::1")
			b, err := netstack.New(netstack.Options{Bind: sb.Bind})
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			o.Connect(a.Node, nettest.NewNode(t, "b", b, set("10.0.0.2", "fd00::2")))
			b.Settle()
			nettest.Exchange(t, "kernel to netstack, inner IPv4", transfer, b, sa, "10.0.0.2")
			nettest.Exchange(t, "kernel to netstack, inner IPv6", transfer, b, sa, "fd00::2")
			nettest.Exchange(t, "netstack to kernel, inner IPv4", transfer, sa, b, "10.0.0.1")
			nettest.Exchange(t, "netstack to kernel, inner IPv6", transfer, sa, b, "fd00::1")
		})
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
	p.connect(plain)
	s := nettest.NewStream(t, a.space, b.space, "10.0.0.2")
	dead := netip.MustParseAddrPort("127.0.0.1:9")

	s.During("nothing", func() string { time.Sleep(time.Second); return "idle" })
	s.During("peers added and removed", func() string {
		n := 0
		for begun := time.Now(); time.Since(begun) < time.Second; n++ {
			k := nettest.NewKey(t).Public()
			a.Do(datapath.PutPeer{Key: k, Peer: datapath.Peer{Endpoint: dead, Prefixes: set("10.7.0.0/16", "fd07::/64")}},
				datapath.AddRoutes{Routes: []datapath.Route{{Prefix: netip.MustParsePrefix("10.7.0.0/16")}}})
			a.Do(datapath.RemoveRoutes{Prefixes: set("10.7.0.0/16")}, datapath.RemovePeer{Key: k})
		}
		return fmt.Sprintf("%d peers came and went", n)
	})
	s.During("prefixes of the peer itself", func() string {
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
				ops = append(ops, datapath.PutPeer{Key: b.Public(), Peer: datapath.Peer{Prefixes: prefixes.Must(more...)}})
			}
			if len(fewer) > 0 {
				ops = append(ops, datapath.DropPrefixes{Key: b.Public(), Prefixes: prefixes.Must(fewer...)})
			}
			if len(ops) > 0 {
				a.Do(ops...)
				applies++
			}
		}
		return fmt.Sprintf("%d changes in %d applies, %.0f a second", n, applies, float64(n)/time.Since(begun).Seconds())
	})
	// The wider prefix goes back and forth between two others, and what the stream uses to its own peer
	// and back: each time in one step.
	c, d := nettest.NewKey(t).Public(), nettest.NewKey(t).Public()
	a.Do(datapath.PutPeer{Key: c, Peer: datapath.Peer{Prefixes: set("10.0.0.0/8")}}, datapath.PutPeer{Key: d})
	s.During("prefixes moved", func() string {
		n := 0
		for begun := time.Now(); time.Since(begun) < time.Second; n++ {
			a.Do(datapath.PutPeer{Key: []key.Public{d, c}[n%2], Peer: datapath.Peer{Prefixes: set("10.0.0.0/8")}})
			a.Do(datapath.PutPeer{Key: b.Public(), Peer: datapath.Peer{Prefixes: b.Want.Addrs}})
		}
		return fmt.Sprintf("%d moves", n)
	})
	a.Do(datapath.RemovePeer{Key: c}, datapath.RemovePeer{Key: d})
	s.During("a third node's key changed", func() string {
		want := a.Have()
		n := 0
		last := key.Public{}
		for begun := time.Now(); time.Since(begun) < time.Second; n++ {
			delete(want.Peers, last)
			last = nettest.NewKey(t).Public()
			want.Peers[last] = datapath.Peer{Endpoint: dead, Preshared: nettest.NewPreshared(t), Prefixes: set("10.9.0.0/24", "fd09::/64")}
			want.Routes[netip.MustParsePrefix("10.9.0.0/24")] = netip.Addr{}
			if err := datapath.Sync(t.Context(), a.Kernel, want); err != nil {
				t.Fatal(err)
			}
		}
		return fmt.Sprintf("%d keys", n)
	})
	s.During("the driver restarted", func() string {
		before := a.Have()
		n := 0
		for ; n < 5; n++ {
			if err := a.Close(); err != nil {
				t.Error(err)
			}
			a.Kernel = a.space.kernel(t)
			a.Path = a.Kernel
			a.fallback = fallback
			after := a.Have()
			if ops := datapath.Plan(before, after); len(ops) > 0 {
				t.Errorf("a new driver has to do %v", ops)
			}
			if x, y := before.Stats[b.Public()].LastHandshake, after.Stats[b.Public()].LastHandshake; !x.Equal(y) {
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
	p.a.space.Delay(20 * time.Millisecond)
	p.b.space.Delay(20 * time.Millisecond)
	at := func(addr string, n *node) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr(addr), n.Have().Device.ListenPort)
	}
	const datagrams = 10
	in := make(map[*node]net.PacketConn)
	for n, addr := range map[*node]string{p.a: "10.0.0.1:7", p.b: "10.0.0.2:7"} {
		n.space.Must(func() (err error) {
			in[n], err = net.ListenPacket("udp", addr)
			return err
		})
		defer in[n].Close()
	}
	endA, endB := at(nettest.Wire4A, p.a), at(nettest.Wire4B, p.b)
	var wg sync.WaitGroup
	begun := time.Now()
	for _, x := range []struct {
		n  *node
		k  key.Public
		e  netip.AddrPort
		to string
	}{{p.a, p.b.Public(), endB, "10.0.0.2"}, {p.b, p.a.Public(), endA, "10.0.0.1"}} {
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
	nettest.Within(t, most, "both have shaken hands", func() bool {
		time.Sleep(50 * time.Millisecond)
		return !p.a.Have().Stats[p.b.Public()].LastHandshake.IsZero() && !p.b.Have().Stats[p.a.Public()].LastHandshake.IsZero()
	})
	t.Logf("on a wire of 20 ms each way, both had shaken hands after %v", time.Since(begun).Round(time.Millisecond))
	for _, n := range []*node{p.a, p.b} {
		if s := n.Have(); len(s.Peers) != 1 {
			t.Errorf("%s has %d peers", n.Name, len(s.Peers))
		}
		_ = in[n].SetReadDeadline(time.Now().Add(10 * time.Second))
		for i := range datagrams {
			if !sending {
				break
			}
			if _, _, err := in[n].ReadFrom(make([]byte, 9)); err != nil {
				t.Errorf("%s got %d datagrams of %d: %v", n.Name, i, datagrams, err)
				break
			}
		}
	}
}
