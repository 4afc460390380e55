//go:build linux

package nft

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// network is a mesh in which a router stands for a server that is no member:
//
//	one 10.7.1.1 fd07:1::1 ──┐
//	                         ├─ mesh0 ─ router ─ eth0 ── server 192.0.2.1 2001:db8:1::1
//	two 10.7.2.1 fd07:2::1 ──┘                                  198.51.100.1 2001:db8:2::1
//
// The router is 10.7.0.254 and fd07::254 in the mesh, 192.0.2.254 and 2001:db8:1::254 outside. Its mesh0 is a
// bridge, through which the members reach each other by the router only. All interfaces have an MTU of 1500.
type network struct {
	one, two, router, server *space
	table                    *Table
}

const (
	port   = 4000
	port90 = 4001 // of a server that takes no segments larger than 900 bytes
)

func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{newSpace(t), newSpace(t), newSpace(t), newSpace(t), nil}
	n.router.ip("link add mesh0 type bridge", "link set mesh0 up",
		"link add one type veth peer name c0 netns "+n.one.path(), "link add two type veth peer name c0 netns "+n.two.path(),
		"link set one master mesh0", "link set two master mesh0", "link set one up", "link set two up",
		"link add eth0 type veth peer name eth0 netns "+n.server.path(), "link set eth0 up",
		"addr add 10.7.0.254/32 dev mesh0", "addr add fd07::254/128 dev mesh0 nodad",
		"route add 10.7.1.1 dev mesh0", "route add 10.7.2.1 dev mesh0", "route add fd07:1::1 dev mesh0", "route add fd07:2::1 dev mesh0",
		"addr add 192.0.2.254/24 dev eth0", "addr add 2001:db8:1::254/64 dev eth0 nodad",
		"route add 198.51.100.1 via 192.0.2.1", "route add 2001:db8:2::1 via 2001:db8:1::1")
	for i, s := range []*space{n.one, n.two} {
		s.ip("link set c0 up", fmt.Sprintf("addr add 10.7.%d.1/32 dev c0", i+1), fmt.Sprintf("addr add fd07:%d::1/128 dev c0 nodad", i+1),
			"route add 10.7.0.254 dev c0", "route add default via 10.7.0.254", "route add fd07::254 dev c0", "route add default via fd07::254")
	}
	n.server.ip("link set eth0 up", "addr add 192.0.2.1/24 dev eth0", "addr add 2001:db8:1::1/64 dev eth0 nodad",
		"addr add 198.51.100.1/32 dev lo", "addr add 2001:db8:2::1/128 dev lo nodad",
		"route add default via 192.0.2.254", "route add default via 2001:db8:1::254")
	// Linux looks for the neighbours of those it forwards for from link-local addresses only.
	n.router.ip("addr add fe80::1/64 dev mesh0 nodad", "addr add fe80::1/64 dev eth0 nodad")
	for _, s := range []*space{n.one, n.two} { // the router would have the members find each other without it
		for _, name := range []string{"ipv4/conf/all", "ipv4/conf/c0", "ipv6/conf/all", "ipv6/conf/c0"} {
			s.sysctl(name+"/accept_redirects", "0")
		}
	}
	must(t, func() error { _, err := TurnOn(n.router.do, names, nil); return err }())
	n.table = n.router.open()
	for _, s := range []*space{n.one, n.two, n.server} {
		s.sysctl("ipv4/tcp_timestamps", "0") // they would take room in segments
		s.serve(port, 0)
		s.serve(port90, 900)
	}
	for _, to := range []string{"192.0.2.1", "2001:db8:1::1", "10.7.2.1", "fd07:2::1"} { // until all links are up
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			c, _, err := n.one.dial(to, port, 0)
			if err == nil {
				c.Close()
				break
			}
			if time.Now().After(end) {
				t.Fatal(err)
			}
		}
	}
	return n
}

// serve answers connections with what they look like from here: the address of the other end, and the
// maximum segment size in the SYN that came. Then it echoes lines.
func (s *space) serve(port, mss int) {
	s.t.Helper()
	var l net.Listener
	must(s.t, s.do(func() (err error) {
		c := net.ListenConfig{Control: control(func(fd int) error {
			return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_SAVE_SYN, 1), maxseg(fd, mss))
		})}
		l, err = c.Listen(context.Background(), "tcp", fmt.Sprintf(":%d", port))
		return err
	}))
	var wg sync.WaitGroup
	s.t.Cleanup(func() { l.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(20 * time.Second))
				raw, err := c.(*net.TCPConn).SyscallConn()
				if err != nil {
					return
				}
				syn := 0
				_ = raw.Control(func(fd uintptr) { syn = synMSS(fd) })
				from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
				fmt.Fprintf(c, "%v %d\n", from, syn)
				_, _ = io.Copy(c, c)
			})
		}
	})
}

func control(f func(fd int) error) func(string, string, syscall.RawConn) error {
	return func(_, _ string, raw syscall.RawConn) error {
		var err error
		return errors.Join(raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
	}
}

func maxseg(fd, mss int) error {
	if mss == 0 {
		return nil
	}
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, mss)
}

// synMSS is the maximum segment size in the SYN that an accepted connection began with.
func synMSS(fd uintptr) int {
	b := make([]byte, 256)
	n := uint32(len(b))
	if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.IPPROTO_TCP, unix.TCP_SAVED_SYN, uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0); errno != 0 {
		return -1
	}
	b = b[:n]
	if b[0]>>4 == 4 {
		b = b[4*(b[0]&15):]
	} else {
		b = b[40:]
	}
	for o := b[20 : 4*(b[12]>>4)]; len(o) > 1; {
		switch o[0] {
		case 0:
			return 0
		case 1:
			o = o[1:]
		case unix.TCPOPT_MAXSEG:
			return int(binary.BigEndian.Uint16(o[2:]))
		default:
			o = o[o[1]:]
		}
	}
	return 0
}

// seen is what both ends see of a connection.
type looks struct {
	from        string // its source, from the server
	syn, synAck int    // maximum segment sizes that arrived
}

// echo is a connection to serve.
type echo struct {
	net.Conn
	r *bufio.Reader
}

// dial connects to a server, which is offered segments of mss bytes; 0: as large as the interface has it.
func (s *space) dial(to string, port, mss int) (e *echo, l looks, err error) {
	var c net.Conn
	if err := s.do(func() (err error) {
		d := net.Dialer{Timeout: time.Second, Control: control(func(fd int) error { return maxseg(fd, mss) })}
		c, err = d.Dial("tcp", netip.AddrPortFrom(ap(to), uint16(port)).String())
		return err
	}); err != nil {
		return nil, l, err
	}
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	e = &echo{c, bufio.NewReader(c)}
	line, err := e.r.ReadString('\n')
	if err == nil {
		_, err = fmt.Sscan(line, &l.from, &l.syn)
	}
	if err != nil {
		c.Close()
		return nil, l, fmt.Errorf("%q: %w", line, err)
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return nil, l, err
	}
	return e, l, errors.Join(raw.Control(func(fd uintptr) { l.synAck, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG) }), err)
}

// say sends a text of n bytes, and waits until it comes back.
func (e *echo) say(n int) error {
	text := strings.Repeat("x", n-1) + "\n"
	go func() { _, _ = io.WriteString(e, text) }()
	got, err := e.r.ReadString('\n')
	if err == nil && got != text {
		err = fmt.Errorf("got %d bytes of %d", len(got), n)
	}
	return err
}

// sees checks what a connection looks like, and that it carries data both ways.
func (s *space) sees(to string, port, mss int, want looks) {
	s.t.Helper()
	c, got, err := s.dial(to, port, mss)
	if err != nil {
		s.t.Errorf("to %s: %v", to, err)
		return
	}
	defer c.Close()
	if got != want {
		s.t.Errorf("to %s: %+v, want %+v", to, got, want)
	}
	if err := c.say(20000); err != nil {
		s.t.Errorf("to %s: %v", to, err)
	}
}

// Connections through the router get segments that fit into the mesh, whoever begins them, and smaller ones where that
// is what an end wants.
func TestClamp(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	for _, r := range []struct {
		Rules
		v4, v6 int
	}{{Rules{}, 1460, 1440}, {Rules{ClampMTU: 1280}, 1240, 1220}, {Rules{ClampMTU: 1420}, 1380, 1360}, {Rules{ClampMTU: 9000}, 1460, 1440}, {Rules{Turned: names}, 1460, 1440}} {
		n.router.set(n.table, r.Rules)
		for _, way := range []struct {
			s        *space
			from, to string
			mss      int
		}{
			{n.one, "10.7.1.1", "192.0.2.1", r.v4}, {n.one, "fd07:1::1", "2001:db8:1::1", r.v6},
			{n.server, "192.0.2.1", "10.7.1.1", r.v4}, {n.server, "2001:db8:1::1", "fd07:1::1", r.v6},
			{n.one, "10.7.1.1", "10.7.2.1", r.v4}, {n.one, "fd07:1::1", "fd07:2::1", r.v6},
		} {
			way.s.sees(way.to, port, 0, looks{way.from, way.mss, way.mss})
			way.s.sees(way.to, port, 1000, looks{way.from, 1000, 1000})
			way.s.sees(way.to, port90, 0, looks{way.from, way.mss, 900})
		}
	}
	// The router's own connections are not forwarded.
	n.router.set(n.table, Rules{ClampMTU: 1280})
	n.router.sees("10.7.1.1", port, 0, looks{"10.7.0.254", 1460, 1460})
	if got := n.router.tracked(); got > 0 {
		t.Errorf("%d connections are tracked", got)
	}
}

// tracked is how many connections conntrack knows; -1: it is not there.
func (s *space) tracked() (n int) {
	s.t.Helper()
	must(s.t, s.do(func() error {
		b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if errors.Is(err, os.ErrNotExist) {
			n = -1
			return nil
		}
		if err == nil {
			_, err = fmt.Sscan(string(b), &n)
		}
		return err
	}))
	return n
}

// What comes out of the mesh to some prefixes has the router's address, and the answers come back.
func TestSNAT(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	no := func(from string, v4 bool) looks {
		if v4 {
			return looks{from, 1460, 1460}
		}
		return looks{from, 1440, 1440}
	}
	n.router.set(n.table, Rules{SNAT: set("192.0.2.0/24", "2001:db8:1::/61")})
	for range 2 {
		n.one.sees("192.0.2.1", port, 0, no("192.0.2.254", true))
		n.one.sees("2001:db8:1::1", port, 0, no("2001:db8:1::254", false))
		n.two.sees("192.0.2.1", port, 0, no("192.0.2.254", true))
		n.one.sees("198.51.100.1", port, 0, no("10.7.1.1", true))
		n.one.sees("2001:db8:2::1", port, 0, no("fd07:1::1", false))
		n.server.sees("10.7.1.1", port, 0, no("192.0.2.1", true))
		n.server.sees("fd07:1::1", port, 0, no("2001:db8:1::1", false))
		n.router.sees("192.0.2.1", port, 0, no("192.0.2.254", true))
		// Whoever has the same table again has the same.
		n.router.set(n.table, Rules{ClampMTU: 9000, SNAT: set("192.0.2.0/24", "2001:db8:1::/61")})
	}
	if got := n.router.tracked(); got == 0 {
		t.Error("does the test of what is tracked test anything?")
	}
	// Everything is to be translated, but not what goes back into the mesh, nor what goes to the loopback interface.
	n.router.set(n.table, Rules{SNAT: set("0.0.0.0/0", "::/0")})
	n.one.sees("198.51.100.1", port, 0, no("192.0.2.254", true))
	n.one.sees("2001:db8:2::1", port, 0, no("2001:db8:1::254", false))
	n.one.sees("10.7.2.1", port, 0, no("10.7.1.1", true))
	n.one.sees("fd07:2::1", port, 0, no("fd07:1::1", false))
	n.router.ip("route add 203.0.113.1 dev lo")
	if got := n.loops(t, "203.0.113.1"); got != ap("10.7.1.1") {
		t.Errorf("on the loopback interface: from %v", got)
	}
	// One address of a prefix, and one bit of it.
	n.router.set(n.table, Rules{SNAT: set("192.0.2.0/31", "2001:db8:1::1/128", "198.51.100.2/32", "2001:db8:2::2/127")})
	n.one.sees("192.0.2.1", port, 0, no("192.0.2.254", true))
	n.one.sees("2001:db8:1::1", port, 0, no("2001:db8:1::254", false))
	n.one.sees("198.51.100.1", port, 0, no("10.7.1.1", true))
	n.one.sees("2001:db8:2::1", port, 0, no("fd07:1::1", false))
}

// loops sends a packet that the router passes on to its loopback interface, and returns its source there.
func (n *network) loops(t *testing.T, to string) netip.Addr {
	t.Helper()
	var fd int
	must(t, n.router.do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_IP))); err == nil {
			err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_IP), Ifindex: loopbackIndex})
		}
		return err
	}))
	defer unix.Close(fd)
	must(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}))
	must(t, n.one.do(func() error {
		c, err := net.Dial("udp", to+":9")
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.(*net.UDPConn).SyscallConn()
		if err != nil {
			return err
		}
		// It is to go through the router once, and not on from there.
		if err := control(func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 2) })("", "", raw); err != nil {
			return err
		}
		_, err = c.Write([]byte("x"))
		return err
	}))
	b := make([]byte, 1500)
	for {
		m, _, err := unix.Recvfrom(fd, b, 0)
		must(t, err)
		if m >= 20 && netip.AddrFrom4([4]byte(b[16:20])) == ap(to) {
			return netip.AddrFrom4([4]byte(b[12:16]))
		}
	}
}

func htons(n uint16) uint16 { return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, n)) }

// A connection goes on while the table is set to something else, and where its prefix is no longer translated.
func TestEstablished(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	n.router.set(n.table, Rules{SNAT: set("192.0.2.0/24", "2001:db8:1::/64")})
	var cs []*echo
	for to, from := range map[string]string{"192.0.2.1": "192.0.2.254", "2001:db8:1::1": "2001:db8:1::254"} {
		c, l, err := n.one.dial(to, port, 0)
		must(t, err)
		defer c.Close()
		if l.from != from {
			t.Fatalf("from %s", l.from)
		}
		cs = append(cs, c)
	}
	for i := range 20 {
		for _, c := range cs {
			must(t, c.say(5000))
		}
		n.router.set(n.table, Rules{ClampMTU: 1280 + i, SNAT: set("192.0.2.0/24", "2001:db8:1::/64", fmt.Sprintf("10.%d.0.0/16", i))})
	}
	n.router.set(n.table, Rules{SNAT: set("203.0.113.0/24")})
	for _, c := range cs {
		must(t, c.say(5000))
	}
	n.one.sees("192.0.2.1", port, 0, looks{"10.7.1.1", 1460, 1460})
}
