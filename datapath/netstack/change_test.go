package netstack_test

import (
	"context"
	"encoding/binary"
	"fmt"
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

// stream is 1,000 numbered datagrams a second, and who received them.
type stream struct {
	t     *testing.T
	stop  chan struct{}
	sent  chan int
	got   sync.Map // number -> true
	count atomic.Int64
}

// newStream sends a datagram a millisecond from a node to an address that others serve, one after the
// other. It returns once the first has come.
func newStream(t *testing.T, from *node, to string, at ...*node) *stream {
	t.Helper()
	return newStreamEvery(t, time.Millisecond, from, to, at...)
}

func newStreamEvery(t *testing.T, interval time.Duration, from *node, to string, at ...*node) *stream {
	t.Helper()
	s := &stream{t: t, stop: make(chan struct{}), sent: make(chan int, 1)}
	for _, n := range at {
		c, err := n.ListenPacket("udp", to)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		go func() {
			b := make([]byte, 64)
			for {
				if _, _, err := c.ReadFrom(b); err != nil {
					return
				}
				if _, again := s.got.LoadOrStore(binary.BigEndian.Uint64(b), true); !again {
					s.count.Add(1)
				}
			}
		}()
	}
	c, err := from.DialContext(within(t, timeout), "udp", to)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer c.Close()
		start := time.Now()
		tick := time.NewTicker(interval)
		defer tick.Stop()
		b := make([]byte, 64)
		n := 0
		for {
			for ; n <= int(time.Since(start)/interval); n++ {
				binary.BigEndian.PutUint64(b, uint64(n))
				if _, err := c.Write(b); err != nil {
					t.Errorf("sending datagram %d: %v", n, err)
				}
			}
			select {
			case <-s.stop:
				s.sent <- n
				return
			case <-tick.C:
			}
		}
	}()
	for end := time.Now().Add(timeout); s.count.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no datagram came")
		}
	}
	return s
}

// end stops the stream and fails the test unless all that was sent came.
func (s *stream) end() {
	s.t.Helper()
	close(s.stop)
	sent := <-s.sent
	for end := time.Now().Add(timeout); int(s.count.Load()) < sent && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if got := int(s.count.Load()); got != sent {
		s.t.Errorf("%d of %d datagrams lost", sent-got, sent)
	}
}

// duration is how long a test goes on making changes.
func duration() time.Duration {
	if testing.Short() || raceEnabled {
		return 2 * time.Second
	}
	return 10 * time.Second
}

// sameHandshake returns a check that a node needed no other handshake with a peer. It waits for the
// first to be the last one: two nodes that greet each other may need two.
func sameHandshake(t *testing.T, a, b *node) func() {
	before := a.read().Stats[b.public()]
	for since := time.Now(); time.Since(since) < 700*time.Millisecond; time.Sleep(10 * time.Millisecond) {
		if now := a.read().Stats[b.public()]; !now.LastHandshake.Equal(before.LastHandshake) {
			before, since = now, time.Now()
		}
	}
	return func() {
		t.Helper()
		after := a.read().Stats[b.public()]
		if !after.LastHandshake.Equal(before.LastHandshake) || after.Received < before.Received || after.Sent < before.Sent {
			t.Errorf("the session was touched: %+v before, %+v after", before, after)
		}
	}
}

func prefix(format string, a ...any) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf(format, a...))
}

// TestPrefixChanges adds and drops prefixes of the peer that a stream goes to, 500 times a second.
func TestPrefixChanges(t *testing.T) {
	a, b := pair(t)
	s := newStream(t, a, "10.0.0.2:7", b)
	same := sameHandshake(t, a, b)
	k := b.public()
	const rate = 500 // a second
	begin, total := time.Now(), int(duration().Seconds()*rate)
	for changes := range total {
		time.Sleep(time.Until(begin.Add(time.Duration(changes) * time.Second / rate))) // a late one is made up for
		p := prefix("10.%d.%d.0/24", 100+changes/2%50, changes/2%7)
		set := prefixes.Must(p)
		if changes%2 == 0 {
			a.apply(datapath.PutPeer{Key: k, Peer: datapath.Peer{Prefixes: set}},
				datapath.AddRoutes{Routes: []datapath.Route{{Prefix: p}}})
		} else {
			a.apply(datapath.RemoveRoutes{Prefixes: set}, datapath.DropPrefixes{Key: k, Prefixes: set})
		}
	}
	t.Logf("%d changes in %v", total, time.Since(begin))
	s.end()
	same()
}

// TestPeerChanges adds and removes other peers beside a stream.
func TestPeerChanges(t *testing.T) {
	a, b := pair(t)
	s := newStream(t, a, "10.0.0.2:7", b)
	same := sameHandshake(t, a, b)
	to := dead(t)
	var ks []key.Public
	for range 10 {
		ks = append(ks, newKey(t).Public())
	}
	for i, end := 0, time.Now().Add(duration()); time.Now().Before(end); i++ {
		k := ks[i%len(ks)]
		p := prefixes.Must(prefix("10.200.%d.0/24", i%len(ks)))
		if i/len(ks)%2 == 0 {
			a.apply(datapath.PutPeer{Key: k, Peer: datapath.Peer{Endpoint: to, Prefixes: p}})
		} else {
			a.apply(datapath.RemovePeer{Key: k, Prefixes: p})
		}
		time.Sleep(5 * time.Millisecond)
	}
	s.end()
	same()
}

// TestPrefixMoves moves one prefix to and fro between two peers, beside a stream to another.
func TestPrefixMoves(t *testing.T) {
	a, b := pair(t)
	c := newNode(t, "c", netstack.Options{}, "10.0.0.3")
	connect(a, b, c)
	s := newStream(t, a, "10.0.0.2:7", b)
	same := sameHandshake(t, a, b)
	moving := set("10.50.0.0/16")
	a.apply(datapath.PutPeer{Key: b.public(), Peer: datapath.Peer{Prefixes: moving}},
		datapath.AddRoutes{Routes: []datapath.Route{{Prefix: moving.At(0)}}})
	for i, end := 0, time.Now().Add(duration()); time.Now().Before(end); i++ {
		to := []*node{c, b}[i%2]
		a.apply(datapath.PutPeer{Key: to.public(), Peer: datapath.Peer{Prefixes: moving}})
		state := a.read()
		for _, n := range []*node{b, c} {
			if has := state.Peers[n.public()].Prefixes.Has(moving.At(0)); has != (n == to) {
				t.Fatalf("after move %d: %s has it: %v", i, n.name, has)
			}
		}
		time.Sleep(2 * time.Millisecond)
	}
	s.end()
	same()
}

// TestServiceMoves moves the prefix a stream goes to from one node to another, new to the sender. Until the
// first handshake WireGuard keeps the newest 128 packets for a peer (QueueStagedSize), so the stream is one
// of which these are more than a second.
func TestServiceMoves(t *testing.T) {
	a, b := pair(t)
	b.want.Local = set("10.50.0.0/16")
	b.sync()
	a.peer(b)
	c := newNode(t, "c", netstack.Options{}, "10.0.0.3")
	c.peer(a)
	c.apply(datapath.AddLocal{Prefixes: b.want.Local})
	s := newStreamEvery(t, 10*time.Millisecond, a, "10.50.1.1:7", b, c)
	same := sameHandshake(t, a, b)
	time.Sleep(100 * time.Millisecond)
	for i := range 10 {
		to := []*node{c, b}[i%2]
		a.apply(datapath.PutPeer{Key: to.public(), Peer: datapath.Peer{Endpoint: to.endpoint(), Prefixes: b.want.Local}})
		time.Sleep(50 * time.Millisecond)
	}
	s.end()
	same()
}

// TestAddressChanges changes what else is this node's, and what else is routed, while a connection
// carries data.
func TestAddressChanges(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen("tcp", "10.0.0.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	result := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			err = both(c, 1, 2)
			c.Close()
		}
		result <- err
	}()
	c, err := a.DialContext(within(t, timeout), "tcp", "10.0.0.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	mine := make(chan error, 1)
	go func() { mine <- both(c, 2, 1) }()
	for i, left := 0, 2; left > 0; i++ {
		for _, n := range []*node{a, b} {
			own := prefixes.Must(prefix("10.0.9.%d/32", i%100))
			local := prefixes.Must(prefix("10.%d.0.0/16", 100+i%50))
			n.apply(datapath.AddAddrs{Addrs: own}, datapath.AddLocal{Prefixes: local},
				datapath.SetDevice{Device: datapath.Device{MTU: 1300 + i%100}})
			n.apply(datapath.RemoveLocal{Prefixes: local}, datapath.RemoveAddrs{Addrs: own})
		}
		select {
		case err := <-mine:
			left--
			if err != nil {
				t.Fatal(err)
			}
		case err := <-result:
			left--
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// TestAddressBack takes away an address that is listened on, and gives it back.
func TestAddressBack(t *testing.T) {
	a, b := pair(t)
	b.apply(datapath.AddAddrs{Addrs: set("10.0.0.22")})
	a.peer(b, "10.0.0.22/32")
	l, err := b.Listen("tcp", "10.0.0.22:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go echoTCP(l)
	for range 3 {
		c, err := a.DialContext(within(t, timeout), "tcp", "10.0.0.22:80")
		if err != nil {
			t.Fatal(err)
		}
		ask(t, c, "hello")
		c.Close()
		b.apply(datapath.RemoveAddrs{Addrs: set("10.0.0.22")})
		if _, err := a.DialContext(within(t, timeout), "tcp", "10.0.0.22:80"); err == nil {
			t.Fatal("the address is gone, and answers")
		}
		if _, err := b.Listen("tcp", "10.0.0.22:81"); err == nil {
			t.Fatal("listening on an address that is gone")
		}
		b.apply(datapath.AddAddrs{Addrs: set("10.0.0.22")})
	}
}

// TestRouteAndLocal has one prefix both routed and local.
func TestRouteAndLocal(t *testing.T) {
	a, b := pair(t)
	both := set("10.50.0.0/16")
	a.want.Local, b.want.Local = both, both
	b.sync()
	a.peer(b) // a sends all of it to b
	b.want.Peers[a.public()] = datapath.Peer{Endpoint: a.endpoint(), Prefixes: a.want.Addrs.Union(set("10.50.7.0/24"))}
	b.want.Routes[prefix("10.50.7.0/24")] = netip.Addr{} // b sends this part to a
	b.sync()
	for _, n := range []*node{a, b} {
		l, err := n.ListenPacket("udp", "10.50.7.7:7")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			buf := make([]byte, 100)
			for {
				_, from, err := l.ReadFrom(buf)
				if err != nil {
					return
				}
				l.WriteTo([]byte("this is "+n.name), from)
			}
		}()
	}
	for from, want := range map[*node]string{a: "this is b", b: "this is a"} {
		c, err := from.DialContext(within(t, timeout), "udp", "10.50.7.7:7")
		if err != nil {
			t.Fatal(err)
		}
		ask(t, c, want)
		c.Close()
	}
	a.apply(datapath.RemoveRoutes{Prefixes: both})
	c, err := a.DialContext(context.Background(), "udp", "10.50.7.7:7")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ask(t, c, "this is a")
}
