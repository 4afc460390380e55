package socks5

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-mesh/warren/examples/agent/internal/relay/relaytest"
)

// echoUDP returns the address of someone who sends back datagrams.
func echoUDP(t testing.TB, host string) string {
	t.Helper()
	c, err := net.ListenPacket("udp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Skipf("needs the address %s: %v", host, err)
	}
	relaytest.EchoUDP(t, c)
	return c.LocalAddr().String()
}

// silent returns whether nothing comes back for what c sends.
func silent(c net.Conn, what string) bool {
	for range 3 {
		_, _ = io.WriteString(c, what)
	}
	_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	for b := make([]byte, 1<<16); ; {
		n, err := c.Read(b)
		if isTimeout(err) {
			return true
		}
		if err == nil && strings.Contains(string(b[:n]), what) {
			return false
		}
	}
}

func TestAssociate(t *testing.T) {
	server, _ := start(t, &Server{Lookup: names})
	echo := echoUDP(t, "127.0.0.1")
	port := netip.MustParseAddrPort(echo).Port()
	c, relay := mustAsk(t, server, associate, "0.0.0.0:0")
	if want := netip.MustParseAddr("127.0.0.1"); relay.Addr() != want || relay.Port() == 0 {
		t.Fatalf("the relay is at %v", relay)
	}
	u := dialUDP(t, relay, echo)
	for _, to := range []string{echo, fmt.Sprintf("node-1:%d", port)} {
		u.to = target(t, to)
		// 65507 bytes fit into a datagram over IPv4, with the header.
		for _, size := range []int{0, 1, 1400, 9000, 65507 - maxUDPHeader} {
			if err := relaytest.AskUDP(u, relaytest.Bytes(1, size)); err != nil {
				t.Errorf("to %s: %v", to, err)
			}
			if u.source.String() != echo {
				t.Errorf("to %s: the source is %v, want %s", to, u.source, echo)
			}
		}
	}
	t.Run("IPv6", func(t *testing.T) {
		u.to = target(t, echoUDP(t, "::1"))
		if err := relaytest.AskUDP(u, []byte("hello")); err != nil {
			t.Error(err)
		}
		if u.source.Addr() != netip.IPv6Loopback() {
			t.Errorf("the source is %v", u.source)
		}
	})
	// What cannot be sent on, or is no datagram with a header, harms nothing.
	for _, b := range [][]byte{
		{}, {0}, {0, 0, 0, 9, 1, 2, 3, 4, 5, 6}, {0, 0, 0, 3, 0, 0, 0}, {0, 0, 0, 3, 255, 'a'},
		append(target(t, echo).append([]byte{0, 0, 1}), "fragment"...), // FRAG
		append(appendUDP(nil, target(t, "stranger:53")), "x"...),
		append(appendUDP(nil, target(t, "0.0.0.0:0")), "x"...),
		append(appendUDP(nil, target(t, "255.255.255.255:53")), "x"...),
	} {
		u.UDPConn.Write(b)
	}
	u.to = target(t, echo)
	if !silentRaw(u, append(target(t, echo).append([]byte{0, 0, 1}), "fragment"...), "fragment") {
		t.Error("a fragment is sent on")
	}
	if err := relaytest.AskUDP(u, []byte("still here")); err != nil {
		t.Error(err)
	}
	// Somebody else's datagrams are dropped: another port once one was seen, another address always.
	if !silent(dialUDP(t, relay, echo), "another port") {
		t.Error("another port is served")
	}
	if runtime.GOOS == "linux" { // all of 127.0.0.0/8 is there
		d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.IPv4(127, 0, 0, 2)}}
		other, err := d.Dial("udp", relay.String())
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		_, bound := mustAsk(t, server, associate, "0.0.0.0:0") // one that waits for its first datagram
		for _, at := range []netip.AddrPort{relay, bound} {
			other, err := d.Dial("udp", at.String())
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			if !silent(&udpConn{UDPConn: other.(*net.UDPConn), to: target(t, echo)}, "another address") {
				t.Error("another address is served")
			}
		}
		if err := relaytest.AskUDP(dialUDP(t, bound, echo), []byte("the first")); err != nil {
			t.Error(err)
		}
	}
	// The association ends with its connection.
	c.Close()
	if err := untilGone(relay); err != nil {
		t.Error(err)
	}
}

func silentRaw(u *udpConn, b []byte, what string) bool {
	for range 3 {
		u.UDPConn.Write(b)
	}
	return silent(rawConn{u}, what)
}

// rawConn reads as udpConn does and writes nothing.
type rawConn struct{ *udpConn }

func (rawConn) Write(b []byte) (int, error) { return len(b), nil }

// untilGone waits until nobody has a UDP port.
func untilGone(at netip.AddrPort) error {
	for end := time.Now().Add(relaytest.Timeout); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		if err == nil {
			return c.Close()
		}
		if time.Now().After(end) {
			return fmt.Errorf("the relay stays: %w", err)
		}
	}
}

func TestAnnouncedPort(t *testing.T) {
	server, _ := start(t, &Server{})
	echo := echoUDP(t, "127.0.0.1")
	mine, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	local := mine.LocalAddr().(*net.UDPAddr)
	_, relay := mustAsk(t, server, associate, fmt.Sprintf("0.0.0.0:%d", local.Port))
	if !silent(dialUDP(t, relay, echo), "another port") {
		t.Error("another port than the announced one is served")
	}
	mine.Close()
	c, err := net.DialUDP("udp", local, net.UDPAddrFromAddrPort(relay))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := relaytest.AskUDP(&udpConn{UDPConn: c, to: target(t, echo)}, []byte("hello")); err != nil {
		t.Error(err)
	}
}

// On a wildcard listener the relay is at the address the client connected to.
func TestWildcard(t *testing.T) {
	for _, test := range []struct{ listen, dial string }{{":0", "127.0.0.1"}, {":0", "::1"}, {"0.0.0.0:0", "127.0.0.1"}} {
		t.Run(test.listen+" "+test.dial, func(t *testing.T) {
			echo := echoUDP(t, test.dial)
			l := relaytest.Listen(t, test.listen)
			s := &Server{Dialer: hostDialer{}}
			relaytest.Serve(t, func(ctx context.Context) error { return s.Serve(ctx, l) })
			server := netip.AddrPortFrom(netip.MustParseAddr(test.dial), uint16(l.Addr().(*net.TCPAddr).Port))
			_, relay := mustAsk(t, server.String(), associate, "0.0.0.0:0")
			if relay.Addr() != server.Addr() {
				t.Fatalf("the relay is at %v", relay)
			}
			if err := relaytest.AskUDP(dialUDP(t, relay, echo), []byte("hello")); err != nil {
				t.Error(err)
			}
		})
	}
}

// countingDialer counts what is open.
type countingDialer struct {
	hostDialer
	dials, open atomic.Int32
}

type countedConn struct {
	net.Conn
	d *countingDialer
}

func (c countedConn) Close() error {
	err := c.Conn.Close()
	if err == nil {
		c.d.open.Add(-1)
	}
	return err
}

func (d *countingDialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := d.hostDialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	d.dials.Add(1)
	d.open.Add(1)
	return countedConn{c, d}, nil
}

// TestFlowLimits counts the connections of an association that makes use of too many.
func TestFlowLimits(t *testing.T) {
	d := &countingDialer{}
	server, _ := start(t, &Server{Dialer: d, MaxFlows: 3, MaxAssociations: 1, UDPIdle: 300 * time.Millisecond})
	c, relay := mustAsk(t, server, associate, "0.0.0.0:0")
	u := dialUDP(t, relay, "127.0.0.1:1")
	var echoes [6]string
	for i := range echoes {
		echoes[i] = echoUDP(t, "127.0.0.1")
		u.to = target(t, echoes[i])
		if err := relaytest.AskUDP(u, []byte("hello")); err != nil {
			t.Error(err)
		}
	}
	wait := func(atMost int32) {
		t.Helper()
		for end := time.Now().Add(relaytest.Timeout); d.open.Load() > atMost; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d flows are open, want %d", d.open.Load(), atMost)
			}
		}
	}
	wait(3)
	wait(0) // they are idle
	if err := relaytest.AskUDP(u, []byte("again")); err != nil {
		t.Error(err)
	}
	if _, _, err := ask(t, server, associate, "0.0.0.0:0"); !errors.Is(err, replyError(generalFailure)) {
		t.Errorf("a second association: %v", err)
	}
	c.Close()
	wait(0)
	for end := time.Now().Add(relaytest.Timeout); ; {
		if _, _, err := ask(t, server, associate, "0.0.0.0:0"); err == nil {
			break
		} else if time.Now().After(end) {
			t.Fatalf("an association after the end of the one before: %v", err)
		}
	}
}
