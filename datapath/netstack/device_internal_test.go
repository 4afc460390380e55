package netstack

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// TestDeviceDies ends a device behind the Net's back, which then still says yes to everything.
func TestDeviceDies(t *testing.T) {
	n, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	ctx := context.Background()
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	want := datapath.State{Device: datapath.Device{Key: k}, Addrs: prefixes.MustParse("10.0.0.1")}
	for range 3 {
		if err := datapath.Sync(ctx, n, want); err != nil {
			t.Fatal(err)
		}
		n.Settle()
		l, err := n.Listen("tcp", "10.0.0.1:80")
		if err != nil {
			t.Fatal(err)
		}
		n.mu.Lock()
		w := n.wg
		n.mu.Unlock()
		busy := make(chan struct{})
		go func() { // reads and writes what the end of the device clears
			defer close(busy)
			for !errors.Is(n.Apply(ctx, datapath.AddLocal{Prefixes: prefixes.MustParse("10.9.0.0/24")}), datapath.ErrNoDevice) {
			}
		}()
		w.Close()
		if err := w.set("fwmark=1\n"); !errors.Is(err, datapath.ErrNoDevice) {
			t.Errorf("telling a dead device something: %v, want ErrNoDevice", err)
		}
		if err := n.Apply(ctx, datapath.PutPeer{Key: newPublic(t)}); !errors.Is(err, datapath.ErrNoDevice) {
			t.Errorf("PutPeer on a dead device: %v, want ErrNoDevice", err)
		}
		select {
		case <-n.Changed():
		case <-time.After(10 * time.Second):
			t.Fatal("Changed did not fire")
		}
		<-busy
		if _, h := n.link.table.Load().send(netip.MustParseAddr("10.9.0.1")); h.local || !n.local.IsEmpty() {
			t.Errorf("without a device, %v is still local", n.local)
		}
		if s, err := n.Read(ctx); err != nil || s.Device.Exists() || !s.Addrs.IsEmpty() {
			t.Errorf("read %+v, %v, want no device", s, err)
		}
		l.Close()
	}
}

func newPublic(t *testing.T) key.Public {
	t.Helper()
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	return k.Public()
}

// TestCrossing holds that of two initiations that cross one lives, and is sent again.
func TestCrossing(t *testing.T) {
	n, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	w := &wireguard{}
	far := newPublic(t)
	peerAt := netip.MustParseAddrPort("192.0.2.1:9")
	n.observing = true // nobody is to act on what is planned
	n.peers[far] = &peer{endpoint: peerAt}
	n.moveEndpoint(w, far, netip.AddrPort{}, peerAt) // the zero key is before all others
	mapped := netip.MustParseAddrPort("[::ffff:192.0.2.1]:9")

	if n.yields(peerAt, []byte("ours")) {
		t.Error("the first initiation is not sent")
	}
	if !n.crosses(mapped) {
		t.Error("an initiation that crosses ours is let in")
	}
	if g := n.greets[far]; g == nil || g.step != stepResend || string(n.first[peerAt].msg) != "ours" {
		t.Errorf("ours is not sent again: %+v", g)
	}
	if n.crosses(mapped) {
		t.Error("a second one is dropped too")
	}
	if !n.yields(peerAt, []byte("more")) {
		t.Error("ours is sent although theirs is being answered")
	}
	if g := n.greets[far]; g == nil || g.step != stepAnew {
		t.Errorf("ours is not tried again: %+v", g)
	}
	if n.yields(peerAt, []byte("more")) {
		t.Error("ours is held back twice")
	}
	n.first[peerAt].sent = time.Now().Add(-crossing - time.Second)
	if n.crosses(peerAt) {
		t.Error("an initiation is dropped for one of long ago")
	}
	if other := netip.MustParseAddrPort("192.0.2.2:9"); n.yields(other, nil) || n.crosses(other) {
		t.Error("an initiation to or from an unknown endpoint is dropped")
	}
	for i := range 3 * maxHeard {
		n.crosses(netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}), 9))
	}
	if len(n.heard) > maxHeard {
		t.Errorf("%d strangers are remembered", len(n.heard))
	}

	// A peer with a lesser key has precedence over this node.
	w.public = far
	near := key.Public{}
	n.peers[near] = &peer{endpoint: peerAt}
	n.moveEndpoint(w, far, peerAt, netip.AddrPort{})
	n.moveEndpoint(w, near, netip.AddrPort{}, peerAt)
	if n.yields(peerAt, nil) || n.crosses(peerAt) {
		t.Error("an initiation of a peer with precedence is dropped")
	}
	n.observing = false
}

// TestPortReuse has more short connections to one address than there are ports.
func TestPortReuse(t *testing.T) {
	n, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := datapath.Sync(ctx, n, datapath.State{Device: datapath.Device{Key: k}, Addrs: prefixes.MustParse("10.0.0.1")}); err != nil {
		t.Fatal(err)
	}
	const ports = 16
	if err := n.stack.SetPortRange(50000, 50000+ports-1); err != nil {
		t.Fatal(err)
	}
	l, err := n.Listen("tcp", "10.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for i := range 3 * ports {
		c, err := n.DialContext(ctx, "tcp", "10.0.0.1:80")
		for err != nil && ctx.Err() == nil { // all were in use within the last second
			time.Sleep(50 * time.Millisecond)
			c, err = n.DialContext(ctx, "tcp", "10.0.0.1:80")
		}
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		far, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		far.Close()
	}
}

func TestProbe(t *testing.T) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	port := uint16(c.LocalAddr().(*net.UDPAddr).Port)
	if err := probe(port); !portInUse(err) {
		t.Errorf("a port that one address has: %v", err)
	}
	free, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	if err := probe(free); err != nil {
		t.Errorf("a free port: %v", err)
	}
}
