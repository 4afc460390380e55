package nettest

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// spoilt changes a byte of all that is sent.
type spoilt struct{ *Space }

func (s spoilt) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := s.Space.DialContext(ctx, network, addr)
	return spoiltConn{c}, err
}

type spoiltConn struct{ net.Conn }

func (c spoiltConn) Write(b []byte) (int, error) {
	other := append([]byte(nil), b...)
	other[len(other)/2]++
	return c.Conn.Write(other)
}

func TestExchange(t *testing.T) {
	a, b := NewSpace(t), NewSpace(t)
	Wire(a, b)
	for _, addr := range []string{Wire4B, Wire6B} {
		Exchange(t, addr, 1<<20, b, a, addr)
		Echo(t, addr, b, a, addr, 1, 1400, 9000, 40000)
	}
	f := NewFlow(t, b, a, Wire6B, time.Millisecond)
	time.Sleep(20 * time.Millisecond)
	if said, err := f.End(); err != nil {
		t.Error(err)
	} else {
		t.Log(said)
	}
	f = NewFlow(t, b, spoilt{a}, Wire4B, time.Millisecond)
	time.Sleep(20 * time.Millisecond)
	if said, err := f.End(); err == nil {
		t.Errorf("with a byte changed on the way: %s", said)
	}
	if _, err := TryExchange(1<<10, b, spoilt{a}, Wire4B); !errors.Is(err, errHashes) {
		t.Errorf("with a byte changed on the way: %v", err)
	}
}

func TestStream(t *testing.T) {
	a, b := NewSpace(t), NewSpace(t)
	Wire(a, b)
	s := NewStream(t, a, b, Wire4B)
	s.During("nothing", func() string { time.Sleep(50 * time.Millisecond); return "idle" })
	lost, sent := s.Loses("the wire cut", func() string {
		b.each(netlink.LinkSetDown)
		time.Sleep(100 * time.Millisecond)
		b.each(netlink.LinkSetUp)
		return "cut for a moment"
	})
	if lost == 0 || lost > sent {
		t.Errorf("%d of %d datagrams were lost", lost, sent)
	}
}
