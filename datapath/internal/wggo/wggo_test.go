package wggo

import (
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath/internal/sockets"
	"github.com/warren-mesh/warren/datapath/key"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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
	n := New(Options{Mu: new(sync.Mutex), Logger: slog.New(slog.DiscardHandler)})
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

func TestProbe(t *testing.T) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	port := uint16(c.LocalAddr().(*net.UDPAddr).Port)
	if err := probe(port); !sockets.InUse(err) {
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

// choosy is a Bind that refuses what several packets are sent as, or one packet.
type choosy struct {
	conn.Bind
	together, alone error
	sent            []string
	calls           int
}

func (b *choosy) Send(bufs [][]byte, _ conn.Endpoint) error {
	b.calls++
	if len(bufs) > 1 && b.together != nil {
		return b.together
	}
	for _, p := range bufs {
		if string(p) == "bad" {
			return b.alone
		}
		b.sent = append(b.sent, string(p))
	}
	return nil
}

// TestLargeSend holds that packets which are refused together go out one by one.
func TestLargeSend(t *testing.T) {
	ep, err := conn.NewStdNetBind().ParseEndpoint("192.0.2.1:9")
	if err != nil {
		t.Fatal(err)
	}
	errno := func(e syscall.Errno) error { return os.NewSyscallError("sendmmsg", e) }
	three, bad := []string{"a", "b", "c"}, []string{"a", "bad", "c"}
	for name, test := range map[string]struct {
		together, alone error
		send, sent      []string
		calls           int
		err             error
	}{
		"taken":                {nil, nil, three, three, 1, nil},
		"too large":            {errno(syscall.EMSGSIZE), nil, three, three, 4, nil},
		"no such option":       {errno(syscall.EINVAL), nil, three, three, 4, nil},
		"no checksums":         {errno(syscall.EIO), nil, three, three, 4, nil},
		"another way, refused": {conn.ErrUDPGSODisabled{RetryErr: errno(syscall.EMSGSIZE)}, nil, three, three, 4, nil},
		"one is bad":           {errno(syscall.EMSGSIZE), errno(syscall.EMSGSIZE), bad, []string{"a", "c"}, 4, syscall.EMSGSIZE},
		"no way":               {errno(syscall.ENETUNREACH), nil, three, nil, 1, syscall.ENETUNREACH},
		"no such source":       {errno(syscall.EINVAL), errno(syscall.EINVAL), []string{"bad", "b"}, nil, 2, syscall.EINVAL},
		"alone":                {errno(syscall.EMSGSIZE), errno(syscall.EMSGSIZE), []string{"bad"}, nil, 1, syscall.EMSGSIZE},
	} {
		c := &choosy{together: test.together, alone: test.alone}
		b := &bind{Bind: c, in: newGate(), out: newGate()}
		var bufs [][]byte
		for _, p := range test.send {
			bufs = append(bufs, []byte(p))
		}
		err := b.Send(bufs, ep)
		if !errors.Is(err, test.err) || (err == nil) != (test.err == nil) || !slices.Equal(c.sent, test.sent) || c.calls != test.calls {
			t.Errorf("%s: sent %v in %d calls, error %v; want %v in %d calls, error %v", name, c.sent, c.calls, err, test.sent, test.calls, test.err)
		}
	}
	done := conn.ErrUDPGSODisabled{}
	if err := (&bind{Bind: &choosy{together: done}, in: newGate(), out: newGate()}).Send([][]byte{{1}, {2}}, ep); err != done {
		t.Errorf("packets that were sent in another way: %v", err)
	}
}
