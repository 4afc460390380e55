package socks5

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/examples/agent/internal/relay/relaytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hostDialer is a Dialer that stands in for the mesh: it has the host's loopback addresses, and fails
// for whatever is in errs.
type hostDialer struct {
	errs map[string]error // by host
}

func (d hostDialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if err := d.errs[host]; err != nil {
		return nil, err
	}
	if host == "198.51.100.1" { // where nobody answers
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return new(net.Dialer).DialContext(ctx, network, address)
}

// start starts a server on a loopback address of the host.
func start(t testing.TB, s *Server) (address string, stop func()) {
	t.Helper()
	if s.Dialer == nil {
		s.Dialer = hostDialer{}
	}
	l := relaytest.Listen(t, "127.0.0.1:0")
	return l.Addr().String(), relaytest.Serve(t, func(ctx context.Context) error { return s.Serve(ctx, l) })
}

// open connects to a server and says nothing.
func open(t testing.TB, server string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(relaytest.Timeout))
	return c.(*net.TCPConn)
}

// target is a destination, of an address or a name with a port.
func target(t testing.TB, s string) destination {
	t.Helper()
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		t.Fatal(err)
	}
	var d destination
	if _, err := fmt.Sscan(port, &d.port); err != nil {
		t.Fatal(err)
	}
	if d.addr, err = netip.ParseAddr(host); err != nil {
		d.name = host
	}
	return d
}

// replyError is a reply other than succeeded.
type replyError code

func (e replyError) Error() string { return fmt.Sprintf("reply %d", uint8(e)) }

// ask makes a request on a new connection and returns the address in the reply. data is sent together
// with the request.
func ask(t testing.TB, server string, cmd command, to string, data ...byte) (*net.TCPConn, netip.AddrPort, error) {
	t.Helper()
	c := open(t, server)
	b := target(t, to).append([]byte{version, 1, methodNone, version, byte(cmd), 0})
	if _, err := c.Write(append(b, data...)); err != nil {
		return nil, netip.AddrPort{}, err
	}
	bound, err := readReply(c)
	return c, bound, err
}

func readReply(c net.Conn) (netip.AddrPort, error) {
	var b [2 + 4 + 1 + 255 + 2]byte
	if _, err := io.ReadFull(c, b[:2]); err != nil {
		return netip.AddrPort{}, err
	}
	if b[0] != version || b[1] != methodNone {
		return netip.AddrPort{}, fmt.Errorf("method is %x", b[:2])
	}
	if _, err := io.ReadFull(c, b[:5]); err != nil {
		return netip.AddrPort{}, err
	}
	if _, err := io.ReadFull(c, b[5:5+addressSize(b[3], b[4])]); err != nil {
		return netip.AddrPort{}, err
	}
	if b[0] != version || b[2] != 0 {
		return netip.AddrPort{}, fmt.Errorf("reply is %x", b[:5])
	}
	if b[1] != byte(succeeded) {
		return netip.AddrPort{}, replyError(b[1])
	}
	d := parseDestination(b[3 : 5+addressSize(b[3], b[4])])
	return netip.AddrPortFrom(d.addr, d.port), nil
}

// mustAsk is ask that succeeds.
func mustAsk(t testing.TB, server string, cmd command, to string) (*net.TCPConn, netip.AddrPort) {
	t.Helper()
	c, bound, err := ask(t, server, cmd, to)
	if err != nil {
		t.Fatalf("%v to %s: %v", cmd, to, err)
	}
	return c, bound
}

// echoed sends and wants the same back.
func echoed(c net.Conn, s string) error {
	if _, err := io.WriteString(c, s); err != nil {
		return err
	}
	b := make([]byte, len(s))
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if string(b) != s {
		return fmt.Errorf("%q came back, not %q", b, s)
	}
	return nil
}

// udpConn is a client's end of one destination of an association, as a connection.
type udpConn struct {
	*net.UDPConn
	to     destination
	mu     sync.Mutex
	source netip.AddrPort // of the last datagram
}

func (c *udpConn) Write(b []byte) (int, error) {
	_, err := c.UDPConn.Write(append(appendUDP(nil, c.to), b...))
	return len(b), err
}

func (c *udpConn) Read(b []byte) (int, error) {
	buf := make([]byte, 1<<16)
	n, err := c.UDPConn.Read(buf)
	if err != nil {
		return 0, err
	}
	d, payload, err := parseUDP(buf[:n])
	if err != nil {
		return 0, err
	}
	if binary.BigEndian.Uint16(buf) != 0 || d.name != "" {
		return 0, errors.New("a header no client expects")
	}
	c.mu.Lock()
	c.source = netip.AddrPortFrom(d.addr, d.port)
	c.mu.Unlock()
	return copy(b, payload), nil
}

func dialUDP(t testing.TB, relay netip.AddrPort, to string) *udpConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(relay))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &udpConn{UDPConn: c, to: target(t, to)}
}
