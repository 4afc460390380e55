package netstack_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
)

// dead is an endpoint at which nobody answers.
func dead(t testing.TB) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

// withDeadPeer gives a a peer that has 10.66.0.0/16 and does not answer.
func withDeadPeer(t testing.TB, a *node) key.Public {
	t.Helper()
	k := newKey(t).Public()
	p := netip.MustParsePrefix("10.66.0.0/16")
	a.want.Peers[k] = datapath.Peer{Endpoint: dead(t), Prefixes: set("10.66.0.0/16")}
	a.want.Routes[p] = netip.Addr{}
	a.sync()
	return k
}

func TestDialErrors(t *testing.T) {
	a := newNode(t, "a", netstack.Options{}, "10.0.0.1")
	k := withDeadPeer(t, a)
	a.want.Peers[k] = datapath.Peer{Endpoint: a.want.Peers[k].Endpoint, Prefixes: set("10.66.0.0/16", "fd66::/64")}
	a.want.Routes[netip.MustParsePrefix("fd66::/64")] = netip.Addr{}
	a.sync()
	for _, test := range []struct {
		network, address string
		is               []error
		says             []string
	}{
		{"tcp", "10.9.9.9:80", []error{netstack.ErrNoRoute, syscall.ENETUNREACH}, []string{"10.9.9.9"}},
		{"udp", "[fd09::9]:80", []error{netstack.ErrNoRoute, syscall.ENETUNREACH}, []string{"fd09::9"}},
		{"tcp", "[fd66::1]:80", []error{netstack.ErrNoSource}, []string{"fd66::1"}},
		{"tcp", "10.66.0.1:80", []error{netstack.ErrNoHandshake, context.DeadlineExceeded},
			[]string{"10.66.0.1", k.Short(), a.want.Peers[k].Endpoint.String()}},
		{"udp", "10.66.0.1:80", []error{netstack.ErrNoHandshake, context.DeadlineExceeded}, nil},
		{"tcp6", "10.66.0.1:80", nil, []string{"no suitable address"}},
		{"tcp", "host:80", nil, []string{"host", "Resolve"}},
		{"tcp", "10.66.0.1:http", nil, []string{"port"}},
		{"tcp", "10.66.0.1", nil, nil},
		{"sctp", "10.66.0.1:80", nil, []string{"sctp"}},
	} {
		t.Run(test.network+" "+test.address, func(t *testing.T) {
			start := time.Now()
			c, err := a.DialContext(within(t, time.Second), test.network, test.address)
			if err == nil {
				c.Close()
				t.Fatal("no error")
			}
			if op := new(net.OpError); !errors.As(err, &op) || op.Op != "dial" || op.Net != test.network {
				t.Errorf("%v: not the *net.OpError of a dial", err)
			}
			for _, want := range test.is {
				if !errors.Is(err, want) {
					t.Errorf("%v: is not %v", err, want)
				}
			}
			for _, want := range test.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v: does not say %q", err, want)
				}
			}
			timeout := errors.Is(err, context.DeadlineExceeded)
			if n := net.Error(nil); !errors.As(err, &n) || n.Timeout() != timeout {
				t.Errorf("%v: Timeout is not %v", err, timeout)
			}
			if waited := time.Since(start) > 900*time.Millisecond; waited != timeout {
				t.Errorf("%v: waited %v", err, time.Since(start))
			}
		})
	}
	if _, err := a.Ping(within(t, time.Second), netip.MustParseAddr("10.66.0.1")); !errors.Is(err, netstack.ErrNoHandshake) {
		t.Errorf("ping: %v", err)
	}
}

func TestResolve(t *testing.T) {
	a := newNode(t, "a", netstack.Options{Resolve: func(_ context.Context, host string) ([]netip.Addr, error) {
		if host == "b.mesh" {
			return []netip.Addr{netip.MustParseAddr("10.99.0.1"), netip.MustParseAddr("10.0.0.2")}, nil
		}
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}}, "10.0.0.1")
	b := newNode(t, "b", netstack.Options{}, "10.0.0.2")
	connect(a, b)
	l, err := b.Listen("tcp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go echoTCP(l)
	c, err := a.DialContext(within(t, timeout), "tcp", "b.mesh:80") // its first address is nobody's
	if err != nil {
		t.Fatal(err)
	}
	ask(t, c, "hello")
	c.Close()
	if _, err := a.DialContext(within(t, timeout), "tcp", "c.mesh:80"); !errors.As(err, new(*net.DNSError)) {
		t.Errorf("dialling an unknown name: %v", err)
	}
}

// TestDialBeforeSettle dials before the node knows anything.
func TestDialBeforeSettle(t *testing.T) {
	n, err := netstack.New(netstack.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	b := newNode(t, "b", netstack.Options{}, "10.0.0.2")
	l, err := b.Listen("tcp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go echoTCP(l)

	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, err := n.DialContext(ctx, "tcp", "10.0.0.2:80"); !errors.Is(err, netstack.ErrNoRoute) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("dialling what nobody has yet: %v, want ErrNoRoute after the deadline", err)
	}
	dialled := make(chan error, 1)
	unknown := make(chan error, 1)
	go func() {
		c, err := n.DialContext(within(t, timeout), "tcp", "10.0.0.2:80")
		if err == nil {
			c.Close()
		}
		dialled <- err
	}()
	go func() {
		_, err := n.DialContext(within(t, timeout), "tcp", "10.99.0.2:80")
		unknown <- err
	}()
	a := &node{Net: n, t: t, name: "a", want: datapath.State{
		Device: datapath.Device{Key: newKey(t)}, Addrs: set("10.0.0.1"),
		Routes: make(map[netip.Prefix]netip.Addr), Peers: make(map[key.Public]datapath.Peer),
	}}
	a.sync()
	connect(a, b)
	if err := <-dialled; err != nil {
		t.Error(err)
	}
	select {
	case err := <-unknown:
		t.Errorf("dialling what nobody has, before Settle: %v", err)
	default:
	}
	n.Settle()
	if err := <-unknown; !errors.Is(err, netstack.ErrNoRoute) {
		t.Errorf("dialling what nobody has, after Settle: %v, want ErrNoRoute", err)
	}
}

// TestSettleEnds holds that a new device is no more known to be complete than the first was.
func TestSettleEnds(t *testing.T) {
	a := newNode(t, "a", netstack.Options{}, "10.0.0.1")
	if _, err := a.DialContext(within(t, timeout), "tcp", "10.99.0.2:80"); !errors.Is(err, netstack.ErrNoRoute) || errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("dialling what nobody has, after Settle: %v, want ErrNoRoute at once", err)
	}
	a.apply(datapath.RemoveDevice{})
	a.sync()
	if _, err := a.DialContext(within(t, 200*time.Millisecond), "tcp", "10.99.0.2:80"); !errors.Is(err, netstack.ErrNoRoute) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("dialling what nobody has, on a new device: %v, want ErrNoRoute after the deadline", err)
	}
	a.Settle()
	if _, err := a.DialContext(within(t, timeout), "tcp", "10.99.0.2:80"); !errors.Is(err, netstack.ErrNoRoute) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("dialling what nobody has, after another Settle: %v, want ErrNoRoute at once", err)
	}
}

// TestNoAnswer dials through a peer that was there once.
func TestNoAnswer(t *testing.T) {
	a, b := pair(t)
	if _, err := a.Ping(within(t, timeout), netip.MustParseAddr("10.0.0.2")); err != nil {
		t.Fatal(err)
	}
	k := b.public()
	b.Close()
	_, err := a.DialContext(within(t, 300*time.Millisecond), "tcp", "10.0.0.2:80")
	if n := net.Error(nil); !errors.Is(err, netstack.ErrNoAnswer) || !errors.Is(err, context.DeadlineExceeded) ||
		!errors.As(err, &n) || !n.Timeout() || !strings.Contains(err.Error(), k.Short()) {
		t.Errorf("dialling: %v, want ErrNoAnswer", err)
	}
	if _, err := a.Ping(within(t, 300*time.Millisecond), netip.MustParseAddr("10.0.0.2")); !errors.Is(err, netstack.ErrNoAnswer) {
		t.Errorf("ping: %v, want ErrNoAnswer", err)
	}
}

// TestDialFollows has the address move to another peer while a dial waits for a dead one.
func TestDialFollows(t *testing.T) {
	a, b := pair(t)
	b.want.Local = set("10.66.0.0/16")
	b.sync()
	k := withDeadPeer(t, a)
	l, err := b.Listen("tcp", "10.66.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go echoTCP(l)
	dialled := make(chan error, 1)
	go func() {
		c, err := a.DialContext(within(t, timeout), "tcp", "10.66.0.1:80")
		if err == nil {
			c.Close()
		}
		dialled <- err
	}()
	select {
	case err := <-dialled:
		t.Fatalf("dialling a dead peer: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	delete(a.want.Peers, k)
	a.peer(b)
	if err := <-dialled; err != nil {
		t.Fatal(err)
	}
}

func TestDeadlines(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen("tcp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := a.DialContext(within(t, timeout), "tcp", "10.0.0.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	isTimeout := func(what string, err error) {
		t.Helper()
		if n := net.Error(nil); !errors.As(err, &n) || !n.Timeout() {
			t.Errorf("%s: %v, want a timeout", what, err)
		}
	}
	c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	_, err = c.Read(make([]byte, 1))
	isTimeout("reading", err)
	_, err = c.Read(make([]byte, 1))
	isTimeout("reading again", err)
	c.SetDeadline(time.Now().Add(-time.Second))
	_, err = c.Write(make([]byte, 1))
	isTimeout("writing", err)

	// A deadline moved while Read waits, first later, then to now.
	c.SetDeadline(time.Now().Add(time.Hour))
	read := make(chan error, 1)
	go func() { _, err := c.Read(make([]byte, 1)); read <- err }()
	time.AfterFunc(20*time.Millisecond, func() { c.SetDeadline(time.Now().Add(2 * time.Hour)) })
	time.AfterFunc(40*time.Millisecond, func() { c.SetDeadline(time.Now()) })
	isTimeout("reading with a moved deadline", <-read)

	// None, and Close instead.
	c.SetDeadline(time.Time{})
	go func() { _, err := c.Read(make([]byte, 1)); read <- err }()
	time.AfterFunc(20*time.Millisecond, func() { c.Close() })
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Errorf("reading a closed connection: %v", err)
	}
	if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("writing to a closed connection: %v", err)
	}
	if err := c.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closing twice: %v", err)
	}
}

// TestDialMendsTheSession dials a peer that lost the session, and so answers nothing. WireGuard itself
// would begin another after 15 s.
func TestDialMendsTheSession(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen("tcp", "10.0.0.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go echoTCP(l)
	c, err := a.DialContext(within(t, timeout), "tcp", "10.0.0.2:80")
	if err != nil {
		t.Fatal(err)
	}
	ask(t, c, "hello")
	c.Close()
	b.apply(datapath.RemovePeer{Key: a.public(), Prefixes: a.want.Addrs})
	b.apply(datapath.PutPeer{Key: a.public(), Peer: datapath.Peer{Prefixes: a.want.Addrs}}) // it cannot call a
	if c, err = a.DialContext(within(t, 12*time.Second), "tcp", "10.0.0.2:80"); err != nil {
		t.Fatal(err)
	}
	ask(t, c, "hello")
	c.Close()
}

// TestLinger resets a connection: the other end must not take an abort for a regular end.
func TestLinger(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen("tcp", "10.0.0.2:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, test := range []struct {
		linger int
		want   error
	}{{0, syscall.ECONNRESET}, {-1, io.EOF}, {5, io.EOF}} {
		c, err := a.DialContext(within(t, timeout), "tcp", "10.0.0.2:80")
		if err != nil {
			t.Fatal(err)
		}
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		lingering := c.(interface{ SetLinger(sec int) error })
		if err := lingering.SetLinger(test.linger); err != nil {
			t.Fatal(err)
		}
		c.Close()
		s.SetReadDeadline(time.Now().Add(timeout))
		if _, err := s.Read(make([]byte, 10)); !errors.Is(err, test.want) {
			t.Errorf("linger %d: the other end reads %v, want %v", test.linger, err, test.want)
		}
		s.Close()
		if err := lingering.SetLinger(0); !errors.Is(err, net.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
}

// A port can be listened on again at once, though connections of before are not forgotten yet (TIME_WAIT), as package
// net has it; but not twice at a time.
func TestListenAgain(t *testing.T) {
	a, b := pair(t)
	for range 3 {
		l, err := a.Listen("tcp", "10.0.0.1:80")
		if err != nil {
			t.Fatal(err)
		}
		if l2, err := a.Listen("tcp", "10.0.0.1:80"); err == nil {
			l2.Close()
			t.Error("listened on twice")
		}
		if l2, err := a.Listen("tcp", ":80"); err == nil {
			l2.Close()
			t.Error("listened on twice, once on all addresses")
		}
		for _, also := range []string{"[fd00::1]:80", "[::]:80"} {
			l2, err := a.Listen("tcp6", also)
			if err != nil {
				t.Errorf("%s of the other family: %v", also, err)
				continue
			}
			l2.Close()
		}
		go func() {
			c, err := l.Accept()
			if err == nil {
				c.Close() // first, which has it wait
			}
		}()
		c, err := b.Dial("tcp", "10.0.0.1:80")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.ReadAll(c)
		c.Close()
		l.Close()
	}
}
