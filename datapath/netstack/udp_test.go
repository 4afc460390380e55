package netstack_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/link/loopback"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/warren-mesh/warren/datapath/netstack"
)

// udpHost is whose sockets are compared, and where they reach each other.
type udpHost struct {
	listen func(network, addr string) (net.PacketConn, error)
	dial   func(network, addr string) (net.Conn, error)
	at     []string // its addresses, of each family
	gvisor bool     // whose differences are not ours
}

// udpHosts are ours, over a tunnel and within one node, the kernel's, and gVisor's.
func udpHosts(t *testing.T) map[string]udpHost {
	a, b := pair(t)
	for _, n := range []*node{a, b} { // both know the way before anything is timed
		for _, to := range []string{"10.0.0.1:9", "10.0.0.2:9"} {
			if c, err := n.DialContext(within(t, timeout), "udp", to); err == nil {
				c.Close()
			}
		}
	}
	dial := func(n *node) func(network, addr string) (net.Conn, error) {
		return func(network, addr string) (net.Conn, error) {
			return n.DialContext(within(t, timeout), network, addr)
		}
	}
	hosts := map[string]udpHost{
		"tunnel": {listen: b.ListenPacket, dial: dial(a), at: []string{"10.0.0.2", "fd00::2"}},
		"self":   {listen: a.ListenPacket, dial: dial(a), at: []string{"10.0.0.1", "fd00::1"}},
		"kernel": {listen: net.ListenPacket, dial: net.Dial, at: []string{"127.0.0.1"}},
		"gVisor": gvisorHost(t),
	}
	if c, err := net.ListenPacket("udp6", "[::1]:0"); err == nil {
		c.Close()
		h := hosts["kernel"]
		h.at = append(h.at, "::1")
		hosts["kernel"] = h
	}
	return hosts
}

func gvisorHost(t *testing.T) udpHost {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	t.Cleanup(func() { s.Close(); s.Wait() })
	if err := s.CreateNIC(1, loopback.New()); err != nil {
		t.Fatal(err)
	}
	at := []string{"10.0.0.1", "fd00::1"}
	protocol := func(a netip.Addr) tcpip.NetworkProtocolNumber {
		if a.Is4() {
			return ipv4.ProtocolNumber
		}
		return ipv6.ProtocolNumber
	}
	for _, a := range at {
		addr := netip.MustParseAddr(a)
		if err := s.AddProtocolAddress(1, tcpip.ProtocolAddress{Protocol: protocol(addr), AddressWithPrefix: tcpip.AddrFromSlice(addr.AsSlice()).WithPrefix()}, stack.AddressProperties{}); err != nil {
			t.Fatal(err)
		}
	}
	s.SetRouteTable([]tcpip.Route{{Destination: ipv4Any, NIC: 1}, {Destination: ipv6Any, NIC: 1}})
	full := func(addr string) (*tcpip.FullAddress, tcpip.NetworkProtocolNumber) {
		ap := netip.MustParseAddrPort(addr)
		f := &tcpip.FullAddress{NIC: 1, Port: ap.Port()}
		if !ap.Addr().IsUnspecified() {
			f.Addr = tcpip.AddrFromSlice(ap.Addr().AsSlice())
		}
		return f, protocol(ap.Addr())
	}
	return udpHost{
		listen: func(_, addr string) (net.PacketConn, error) {
			f, p := full(addr)
			c, err := gonet.DialUDP(s, f, nil, p)
			if err != nil {
				return nil, err
			}
			return c, nil
		},
		dial: func(_, addr string) (net.Conn, error) {
			f, p := full(addr)
			c, err := gonet.DialUDP(s, nil, f, p)
			if err != nil {
				return nil, err
			}
			return c, nil
		},
		at: at, gvisor: true,
	}
}

var (
	ipv4Any = tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4([4]byte{})}.Subnet()
	ipv6Any = tcpip.AddressWithPrefix{Address: tcpip.AddrFrom16([16]byte{})}.Subnet()
)

func portOf(a net.Addr) uint16 { return a.(*net.UDPAddr).AddrPort().Port() }

func hostPort(host string, port uint16) string { return net.JoinHostPort(host, fmt.Sprint(port)) }

// What UDP sockets do, whoever's they are.
func TestUDPSockets(t *testing.T) {
	for name, h := range udpHosts(t) {
		for _, addr := range h.at {
			t.Run(name+"/"+addr, func(t *testing.T) { t.Parallel(); testSockets(t, h, addr) })
		}
	}
}

func testSockets(t *testing.T, h udpHost, addr string) {
	open := func(network, address string) net.PacketConn {
		t.Helper()
		c, err := h.listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	connect := func(address string) net.Conn {
		t.Helper()
		c, err := h.dial("udp", address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	long := time.Now().Add(timeout)
	server := open("udp", hostPort(addr, 0))
	port := portOf(server.LocalAddr())
	client := connect(hostPort(addr, port))
	_, _ = server.SetDeadline(long), client.SetDeadline(long)
	if got := server.LocalAddr().String(); port == 0 || got != hostPort(addr, port) {
		t.Errorf("listens on %v", got)
	}
	if got := client.RemoteAddr().String(); got != hostPort(addr, port) {
		t.Errorf("connected to %v", got)
	}

	// Of all sizes, there and back. An empty one is one too.
	buf := make([]byte, 1<<16)
	for _, size := range []int{0, 1, 7, 64, 1352, 1372, 1373, 1392, 1393, 1400, 2800, 9000, 65000, 65507} {
		p := make([]byte, size)
		for i := range p {
			p[i] = byte(i * size)
		}
		if n, err := client.Write(p); n != size || err != nil {
			t.Fatalf("%d bytes: wrote %d, %v", size, n, err)
		}
		n, from, err := server.ReadFrom(buf)
		if err != nil || !bytes.Equal(buf[:n], p) || from.String() != client.LocalAddr().String() {
			t.Fatalf("%d bytes: got %d from %v, want them from %v: %v", size, n, from, client.LocalAddr(), err)
		}
		if n, err := server.WriteTo(p, from); n != size || err != nil {
			t.Fatalf("%d bytes: answered %d, %v", size, n, err)
		}
		if n, err := client.Read(buf); err != nil || !bytes.Equal(buf[:n], p) {
			t.Fatalf("%d bytes: got %d back, %v", size, n, err)
		}
	}
	// What does not fit is lost, and the next is whole.
	for range 2 {
		if _, err := client.Write([]byte("0123456789")); err != nil {
			t.Fatal(err)
		}
	}
	if n, _, err := server.ReadFrom(buf[:4]); n != 4 || err != nil || string(buf[:4]) != "0123" {
		t.Errorf("of 10 bytes 4 are %q, %v", buf[:n], err)
	}
	if n, _, err := server.ReadFrom(buf); n != 10 || err != nil {
		t.Errorf("the next has %d bytes, %v", n, err)
	}
	if !h.gvisor { // which cuts it off
		if _, err := client.Write(make([]byte, 65536)); !errors.Is(err, syscall.EMSGSIZE) {
			t.Errorf("too large: %v", err)
		}
	}

	// A connected socket hears its peer only, and one at an address before one at all.
	other := connect(hostPort(addr, port))
	if _, err := server.WriteTo([]byte("to other"), other.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	stranger := open("udp", hostPort(addr, 0))
	if _, err := stranger.WriteTo([]byte("from a stranger"), other.LocalAddr()); err != nil {
		t.Error(err)
	}
	if _, err := server.WriteTo([]byte("last"), other.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	_ = other.SetDeadline(long)
	for _, want := range []string{"to other", "last"} {
		if n, err := other.Read(buf); string(buf[:n]) != want || err != nil {
			t.Errorf("the connected socket got %q, want %q: %v", buf[:n], want, err)
		}
	}

	// Errors.
	if !h.gvisor { // which allows it
		if _, err := client.(net.PacketConn).WriteTo([]byte("x"), server.LocalAddr()); err == nil {
			t.Error("WriteTo on a connected socket")
		}
	}
	if _, err := server.(net.Conn).Write([]byte("x")); err == nil {
		t.Error("Write on a socket that is not connected")
	}
	if _, err := server.WriteTo([]byte("x"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(addr), 0))); err == nil {
		t.Error("sent to port 0")
	}
	if c, err := h.listen("udp", hostPort(addr, port)); err == nil {
		c.Close()
		t.Error("a port was opened twice")
	} else if !errors.Is(err, syscall.EADDRINUSE) && !h.gvisor {
		t.Errorf("a port that is taken: %v", err)
	}

	// Deadlines.
	_ = server.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	for range 2 {
		_, _, err := server.ReadFrom(buf)
		if e, ok := errors.AsType[net.Error](err); !ok || !e.Timeout() || !errors.Is(err, os.ErrDeadlineExceeded) && !h.gvisor {
			t.Errorf("after its deadline: %v", err)
		}
	}
	_ = server.SetReadDeadline(time.Time{})
	waiting := make(chan error)
	go func() {
		_, _, err := server.ReadFrom(make([]byte, 1))
		waiting <- err
	}()
	time.Sleep(10 * time.Millisecond)
	_ = server.SetReadDeadline(time.Now().Add(-time.Second))
	if err := <-waiting; err == nil {
		t.Error("a deadline that is past does not end a read")
	}
	_ = server.SetReadDeadline(long)
	_ = client.SetWriteDeadline(time.Now().Add(-time.Second))
	if _, err := client.Write([]byte("x")); err == nil && !h.gvisor {
		t.Error("written after the deadline")
	}
	_ = client.SetWriteDeadline(long)

	// Nobody there: the next call says so, and the one after that is as ever.
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	if _, err := client.Write([]byte("to nobody")); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Read(buf); !errors.Is(err, syscall.ECONNREFUSED) && !(h.gvisor && err != nil) {
		t.Errorf("refused: %v", err)
	}
	server = open("udp", hostPort(addr, port))
	if _, err := client.Write([]byte("again")); err != nil {
		t.Fatal(err)
	}
	_ = server.SetReadDeadline(long)
	if n, _, err := server.ReadFrom(buf); string(buf[:n]) != "again" || err != nil {
		t.Errorf("after a refusal: %q, %v", buf[:n], err)
	}

	// The end.
	go func() {
		_, _, err := server.ReadFrom(make([]byte, 1))
		waiting <- err
	}()
	time.Sleep(10 * time.Millisecond)
	_ = server.Close()
	if err := <-waiting; err == nil || !errors.Is(err, net.ErrClosed) && !h.gvisor {
		t.Errorf("a read that was waiting: %v", err)
	}
	if _, _, err := server.ReadFrom(buf); err == nil || !errors.Is(err, net.ErrClosed) && !h.gvisor {
		t.Errorf("reading what is closed: %v", err)
	}
	if _, err := server.WriteTo(buf[:1], client.LocalAddr()); err == nil || !errors.Is(err, net.ErrClosed) && !h.gvisor {
		t.Errorf("writing what is closed: %v", err)
	}
	if err := server.Close(); !errors.Is(err, net.ErrClosed) && !h.gvisor {
		t.Errorf("closing twice: %v", err)
	}
}

// A socket at all addresses answers from the one that was asked, speaks to the families that it is for, and leaves what
// is for an address to the socket there.
func TestUDPWildcard(t *testing.T) {
	for name, h := range udpHosts(t) {
		if h.gvisor {
			continue // gonet does not say where it listens on all
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all, err := h.listen("udp", ":0")
			if err != nil {
				t.Fatal(err)
			}
			defer all.Close()
			port := portOf(all.LocalAddr())
			_ = all.SetDeadline(time.Now().Add(timeout))
			buf := make([]byte, 100)
			for _, addr := range h.at {
				c, err := h.dial("udp", hostPort(addr, port))
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(timeout))
				if _, err := c.Write([]byte(addr)); err != nil {
					t.Fatal(err)
				}
				n, from, err := all.ReadFrom(buf)
				if err != nil || string(buf[:n]) != addr || from.String() != c.LocalAddr().String() {
					t.Fatalf("%s: %q from %v, %v", addr, buf[:n], from, err)
				}
				if _, err := all.WriteTo([]byte("answer"), from); err != nil {
					t.Fatal(err)
				}
				if n, err := c.Read(buf); string(buf[:n]) != "answer" || err != nil { // it would not hear another address
					t.Errorf("%s: %q, %v", addr, buf[:n], err)
				}
			}
			if c, err := h.listen("udp", hostPort(h.at[0], port)); err == nil {
				c.Close()
				t.Error("the port of a socket at all addresses was opened at one")
			}
			four, err := h.listen("udp4", "0.0.0.0:0")
			if err != nil {
				t.Fatal(err)
			}
			defer four.Close()
			if _, err := four.WriteTo([]byte("x"), &net.UDPAddr{IP: net.ParseIP(h.at[len(h.at)-1]), Port: 9}); err == nil && len(h.at) > 1 {
				t.Error("an IPv4 socket sent over IPv6")
			}
			if len(h.at) > 1 {
				six, err := h.listen("udp6", hostPort("::", portOf(four.LocalAddr())))
				if err != nil {
					t.Errorf("the same port in the other family: %v", err)
				} else {
					six.Close()
				}
			}
		})
	}
}

// Many datagrams a call arrive whole and in their order; and what there was no room for is lost, nothing else.
func TestUDPBatches(t *testing.T) {
	t.Parallel()
	a, b := pair(t)
	l, err := b.ListenPacket("udp", "10.0.0.2:9")
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.DialContext(within(t, timeout), "udp", "10.0.0.2:9")
	if err != nil {
		t.Fatal(err)
	}
	from, to := c.(*netstack.UDPConn), l.(*netstack.UDPConn)
	if n, err := from.WriteBatch(nil); n != 0 || err != nil {
		t.Errorf("nothing was sent: %d, %v", n, err)
	}
	if n, err := to.ReadBatch(nil); n != 0 || err != nil {
		t.Errorf("nothing was read: %d, %v", n, err)
	}
	const rounds, batch = 50, 40
	var sending sync.WaitGroup
	defer sending.Wait()
	next := make(chan struct{}, 1)
	sending.Go(func() {
		for round := range rounds {
			ds := make([]netstack.Datagram, batch)
			for i := range ds {
				ds[i].Data = binary.BigEndian.AppendUint32(make([]byte, (i*37)%1300), uint32(round*batch+i))
			}
			if n, err := from.WriteBatch(ds); n != batch || err != nil {
				t.Errorf("%d of %d were sent, %v", n, batch, err)
			}
			<-next
		}
	})
	_ = to.SetReadDeadline(time.Now().Add(timeout))
	ds := make([]netstack.Datagram, 7)
	got := 0
	for got < rounds*batch {
		for i := range ds {
			ds[i].Data = make([]byte, 2000)
		}
		n, err := to.ReadBatch(ds)
		if err != nil || n == 0 {
			t.Errorf("after %d: %d, %v", got, n, err)
			close(next)
			return
		}
		for _, d := range ds[:n] {
			if i := got % batch; len(d.Data) != (i*37)%1300+4 || binary.BigEndian.Uint32(d.Data[len(d.Data)-4:]) != uint32(got) || d.Addr.String() != c.LocalAddr().String() {
				t.Fatalf("datagram %d has %d bytes, from %v", got, len(d.Data), d.Addr)
			}
			if got++; got%batch == 0 {
				next <- struct{}{}
			}
		}
	}
	if n, err := to.WriteBatch([]netstack.Datagram{{Data: []byte("back"), Addr: c.LocalAddr().(*net.UDPAddr).AddrPort()}, {Data: []byte("x")}}); n != 1 || err == nil {
		t.Errorf("the second of two goes nowhere: %d, %v", n, err)
	}
}

// A socket may be closed, and others opened, while datagrams arrive.
func TestUDPComingAndGoing(t *testing.T) {
	t.Parallel()
	a, b := pair(t)
	c, err := a.DialContext(within(t, timeout), "udp", "10.0.0.2:9")
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = c.Write(make([]byte, 700))
			}
		}
	})
	for range 300 {
		l, err := b.ListenPacket("udp", "10.0.0.2:9")
		if err != nil {
			t.Error(err)
			break
		}
		all.Go(func() {
			buf := make([]byte, 1000)
			for {
				if n, _, err := l.ReadFrom(buf); err != nil {
					return
				} else if n != 700 {
					t.Errorf("%d bytes", n)
				}
			}
		})
		time.Sleep(time.Millisecond)
		l.Close()
	}
	close(stop)
	all.Wait()
}

// Nobody has port 0, which the kernel finds out only where it is sent to without being connected.
func TestUDPDialPort0(t *testing.T) {
	a, _ := pair(t)
	if c, err := a.DialContext(within(t, timeout), "udp", "10.0.0.2:0"); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("%v, %v", c, err)
	}
}

// What a socket has no room for is lost, and counted.
func TestUDPLost(t *testing.T) {
	a, _ := pair(t)
	l, err := a.ListenPacket("udp", "10.0.0.1:9")
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.DialContext(within(t, timeout), "udp", "10.0.0.1:9")
	if err != nil {
		t.Fatal(err)
	}
	sent := 0
	for end := time.Now().Add(timeout); l.(*netstack.UDPConn).Lost() == 0; sent++ {
		if _, err := c.Write(make([]byte, 1300)); err != nil || time.Now().After(end) {
			t.Fatalf("nothing was lost of %d: %v", sent, err)
		}
	}
	ds, got := make([]netstack.Datagram, 5000), 0
	for i := range ds {
		ds[i].Data = make([]byte, 1300)
	}
	l.SetReadDeadline(time.Now().Add(timeout))
	if got, err = l.(*netstack.UDPConn).ReadBatch(ds); err != nil {
		t.Fatal(err)
	}
	if got < 3000 || got > 3100 { // 4 MiB
		t.Errorf("%d of %d were there", got, sent)
	}
}

// Whoever sent a datagram in fragments is told too that nobody has the port.
func TestUDPFragmentsRefused(t *testing.T) {
	a, _ := pair(t)
	for _, at := range []string{"10.0.0.2:9", "[fd00::2]:9", "10.0.0.1:9", "[fd00::1]:9"} {
		c, err := a.DialContext(within(t, timeout), "udp", at)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(make([]byte, 3000)); err != nil {
			t.Fatal(err)
		}
		c.SetReadDeadline(time.Now().Add(timeout))
		if _, err = c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s: %v", at, err)
		}
		c.Close()
	}
}
