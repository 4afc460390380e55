package netstack_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/netstack"
)

// bulk is how much a test sends through one connection.
func bulk() int64 {
	if raceEnabled {
		return 16 << 20
	}
	return 64 << 20
}

// send writes bulk() bytes made from seed, and says so by closing its half.
func send(c net.Conn, seed byte) error {
	if _, err := io.CopyN(c, rand.NewChaCha8([32]byte{seed}), bulk()); err != nil {
		return err
	}
	return c.(interface{ CloseWrite() error }).CloseWrite()
}

// receive reads to the end, and compares with what send writes.
func receive(c net.Conn, seed byte) error {
	got, want := sha256.New(), sha256.New()
	n, err := io.Copy(got, c)
	if err != nil {
		return err
	}
	if n != bulk() {
		return fmt.Errorf("received %d bytes, want %d", n, bulk())
	}
	if _, err := io.CopyN(want, rand.NewChaCha8([32]byte{seed}), bulk()); err != nil {
		return err
	}
	if [32]byte(got.Sum(nil)) != [32]byte(want.Sum(nil)) {
		return errors.New("received other bytes than were sent")
	}
	return nil
}

// both sends and receives at the same time.
func both(c net.Conn, mine, theirs byte) error {
	sent := make(chan error, 1)
	go func() { sent <- send(c, mine) }()
	return errors.Join(receive(c, theirs), <-sent)
}

func TestTCPBothWays(t *testing.T) {
	for _, test := range []struct{ network, listen, dial string }{
		{"tcp4", ":80", "10.0.0.2:80"},
		{"tcp6", "[fd00::2]:80", "[fd00::2]:80"},
	} {
		t.Run(test.network, func(t *testing.T) {
			t.Parallel()
			a, b := pair(t)
			l, err := b.Listen(test.network, test.listen)
			if err != nil {
				t.Fatal(err)
			}
			result := make(chan error, 1)
			go func() {
				c, err := l.Accept()
				if err != nil {
					result <- err
					return
				}
				defer c.Close()
				result <- both(c, 1, 2)
			}()
			c, err := a.DialContext(within(t, timeout), test.network, test.dial)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if err := errors.Join(both(c, 2, 1), <-result); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// echoTCP serves one listener until it is closed.
func echoTCP(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			io.Copy(c, c)
		}()
	}
}

// echoUDP sends back what comes, and from where it came.
func echoUDP(c net.PacketConn) {
	b := make([]byte, 2048)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		c.WriteTo(append(b[:n:n], from.String()...), from)
	}
}

func ask(t *testing.T, c net.Conn, want string) {
	t.Helper()
	c.SetDeadline(time.Now().Add(timeout))
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 100)
	n, err := io.ReadAtLeast(c, got, len(want))
	if err != nil || string(got[:n]) != want {
		t.Fatalf("asked %v: got %q, %v; want %q", c.RemoteAddr(), got[:n], err, want)
	}
}

// TestListen listens on one address of a prefix of 65,536, on one of Addrs, and on all.
func TestListen(t *testing.T) {
	a, b := pair(t)
	b.want.Local = set("10.7.0.0/16", "fd07::/64")
	b.sync()
	a.peer(b)
	for i, test := range []struct{ network, listen, dial string }{
		{"tcp", "10.7.200.9:80", "10.7.200.9:80"},
		{"tcp", "[fd07::9]:80", "[fd07::9]:80"},
		{"tcp", "10.0.0.2:81", "10.0.0.2:81"},
		{"tcp", ":82", "10.7.1.1:82"},
		{"tcp", "0.0.0.0:83", "[fd07::abcd]:83"},
		{"tcp4", ":84", "10.7.255.255:84"},
		{"tcp6", ":84", "[fd07::]:84"},
		{"udp", "10.7.200.9:80", "10.7.200.9:80"},
		{"udp", "[fd07::9]:80", "[fd07::9]:80"},
		{"udp4", "0.0.0.0:84", "10.0.0.2:84"},
		{"udp6", "[::]:84", "[fd00::2]:84"},
		{"udp", ":0", "10.0.0.2"},
	} {
		name := fmt.Sprintf("%d %s %s", i, test.network, test.listen)
		if test.network[:3] == "tcp" {
			l, err := b.Listen(test.network, test.listen)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			defer l.Close()
			go echoTCP(l)
			c, err := a.DialContext(within(t, timeout), test.network, test.dial)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			defer c.Close()
			if c.RemoteAddr().String() != test.dial {
				t.Errorf("%s: connected to %v", name, c.RemoteAddr())
			}
			ask(t, c, "hello")
			continue
		}
		l, err := b.ListenPacket(test.network, test.listen)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		defer l.Close()
		go echoUDP(l)
		if _, _, err := net.SplitHostPort(test.dial); err != nil {
			test.dial = netip.AddrPortFrom(netip.MustParseAddr(test.dial), l.LocalAddr().(*net.UDPAddr).AddrPort().Port()).String()
		}
		c, err := a.DialContext(within(t, timeout), test.network, test.dial)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		defer c.Close()
		ask(t, c, "hello"+c.LocalAddr().String())
	}

	for _, address := range []string{"10.8.0.1:80", "[fd08::1]:80", "127.0.0.1:80"} {
		_, err := b.Listen("tcp", address)
		host, _, _ := net.SplitHostPort(address)
		if addr := new(net.AddrError); !errors.As(err, &addr) || addr.Addr != host {
			t.Errorf("listening on %s: %v, want an error that names the address", address, err)
		}
		if _, err := b.ListenPacket("udp", address); err == nil {
			t.Errorf("listening on %s: no error", address)
		}
	}
	if _, err := b.Listen("tcp", "10.7.200.9:80"); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("listening twice: %v, want EADDRINUSE", err)
	}
}

// TestUnserved asks addresses of a prefix behind which nobody listens.
func TestUnserved(t *testing.T) {
	a, b := pair(t)
	b.want.Local = set("10.7.0.0/16", "fd07::/64")
	b.sync()
	a.peer(b)
	for _, host := range []string{"10.0.0.2", "fd00::2", "10.7.3.4", "fd07::34"} {
		address := net.JoinHostPort(host, "99")
		if _, err := a.DialContext(within(t, timeout), "tcp", address); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("TCP to %s: %v, want ECONNREFUSED", address, err)
		}
		c, err := a.DialContext(within(t, timeout), "udp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(timeout))
		c.Write([]byte("?"))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("UDP to %s: %v, want ECONNREFUSED", address, err)
		}
	}
	for _, host := range []string{"10.0.0.2", "fd00::2"} {
		if rtt, err := a.Ping(within(t, timeout), netip.MustParseAddr(host)); err != nil || rtt <= 0 {
			t.Errorf("ping %s: %v, %v", host, rtt, err)
		}
	}
	for _, host := range []string{"10.7.3.4", "fd07::34"} {
		if _, err := a.Ping(within(t, timeout), netip.MustParseAddr(host)); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("ping %s, where nobody is: %v, want EHOSTUNREACH", host, err)
		}
		l, err := b.Listen("tcp", net.JoinHostPort(host, "80"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Ping(within(t, timeout), netip.MustParseAddr(host)); err != nil {
			t.Errorf("ping %s, where somebody listens: %v", host, err)
		}
		l.Close()
		if _, err := a.Ping(within(t, timeout), netip.MustParseAddr(host)); !errors.Is(err, syscall.EHOSTUNREACH) {
			t.Errorf("ping %s, where somebody listened: %v, want EHOSTUNREACH", host, err)
		}
	}
	// What a sends to b although b has it not.
	a.peer(b, "10.9.0.0/16", "fd09::/64")
	for _, host := range []string{"10.9.0.1", "fd09::1"} {
		if _, err := a.Ping(within(t, timeout), netip.MustParseAddr(host)); !errors.Is(err, syscall.ENETUNREACH) {
			t.Errorf("ping %s, which b has not: %v, want ENETUNREACH", host, err)
		}
		if _, err := a.DialContext(within(t, timeout), "tcp", net.JoinHostPort(host, "80")); !errors.Is(err, syscall.ENETUNREACH) {
			t.Errorf("TCP to %s, which b has not: %v, want ENETUNREACH", host, err)
		}
	}
}

// TestSelf talks to a node's own addresses; it needs no peer.
func TestSelf(t *testing.T) {
	a := newNode(t, "a", netstack.Options{}, "10.0.0.1", "fd00::1")
	a.want.Local = set("10.7.0.0/16")
	a.sync()
	l, err := a.Listen("tcp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go echoTCP(l)
	for _, to := range []string{"10.0.0.1:80", "[fd00::1]:80", "10.7.9.9:80"} {
		c, err := a.DialContext(within(t, timeout), "tcp", to)
		if err != nil {
			t.Fatal(err)
		}
		ask(t, c, "hello")
		c.Close()
	}
	if _, err := a.DialContext(within(t, timeout), "tcp", "10.7.9.9:81"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dialling where nobody listens: %v, want ECONNREFUSED", err)
	}
	if _, err := a.Ping(within(t, timeout), netip.MustParseAddr("fd00::1")); err != nil {
		t.Error(err)
	}
	if _, err := a.Ping(within(t, timeout), netip.MustParseAddr("10.7.9.9")); !errors.Is(err, syscall.EHOSTUNREACH) {
		t.Errorf("ping of an address where nobody is: %v, want EHOSTUNREACH", err)
	}
}

// TestSource has two addresses, and a route that wants the second.
func TestSource(t *testing.T) {
	a := newNode(t, "a", netstack.Options{}, "10.0.0.1", "10.0.0.11", "fd00::1")
	b := newNode(t, "b", netstack.Options{}, "10.0.0.2")
	b.want.Local = set("10.7.0.0/16")
	b.sync()
	connect(a, b)
	a.want.Routes[netip.MustParsePrefix("10.7.0.0/16")] = netip.MustParseAddr("10.0.0.11")
	a.sync()
	for to, from := range map[string]string{"10.0.0.2": "10.0.0.1", "10.7.0.1": "10.0.0.11"} {
		l, err := b.ListenPacket("udp", to+":53")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go echoUDP(l)
		c, err := a.DialContext(within(t, timeout), "udp", to+":53")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if got := c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().String(); got != from {
			t.Errorf("to %s: from %s, want %s", to, got, from)
		}
		ask(t, c, "hello"+c.LocalAddr().String())
	}
	// A socket on the wildcard sends from where a dial would.
	w, err := a.ListenPacket("udp", ":5353")
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.WriteTo([]byte("hello"), &net.UDPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 53}); err != nil {
		t.Fatal(err)
	}
	w.SetReadDeadline(time.Now().Add(timeout))
	buf := make([]byte, 100)
	n, from, err := w.ReadFrom(buf)
	if err != nil || string(buf[:n]) != "hello10.0.0.1:5353" || from.String() != "10.0.0.2:53" {
		t.Errorf("got %q from %v, %v", buf[:n], from, err)
	}
	if _, err := w.WriteTo([]byte("?"), &net.UDPAddr{IP: net.IPv4(10, 99, 0, 2), Port: 53}); !errors.Is(err, netstack.ErrNoRoute) || !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("writing to nobody: %v, want ErrNoRoute", err)
	}
}

// TestBigPackets sends datagrams that have to be fragmented, after the MTU was changed.
func TestBigPackets(t *testing.T) {
	a, b := pair(t)
	l, err := b.ListenPacket("udp", ":53")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := l.ReadFrom(buf)
			if err != nil {
				return
			}
			l.WriteTo(buf[:n], from)
		}
	}()
	for _, mtu := range []int{1420, 1280, 9000, 65475} {
		for _, n := range []*node{a, b} {
			n.apply(datapath.SetDevice{Device: datapath.Device{MTU: mtu}})
			if got := n.read().Device.MTU; got != mtu {
				t.Fatalf("MTU %d, want %d", got, mtu)
			}
		}
		for _, to := range []string{"10.0.0.2:53", "[fd00::2]:53"} {
			c, err := a.DialContext(within(t, timeout), "udp", to)
			if err != nil {
				t.Fatal(err)
			}
			for _, size := range []int{0, 1, mtu - 48, mtu, 20000} {
				out := make([]byte, size)
				rand.NewChaCha8([32]byte{1}).Read(out)
				if _, err := c.Write(out); err != nil {
					t.Fatal(err)
				}
				c.SetReadDeadline(time.Now().Add(timeout))
				in := make([]byte, 65536)
				n, err := c.Read(in)
				if err != nil || string(in[:n]) != string(out) {
					t.Fatalf("MTU %d, to %s, %d bytes: got %d bytes, %v", mtu, to, size, n, err)
				}
			}
			c.Close()
		}
	}
}
