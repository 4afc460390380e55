package netstack_test

import (
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/tuntest"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
)

// forger is a peer that sends whatever packets it likes.
type forger struct {
	tun    *tuntest.ChannelTUN
	public key.Public
}

// newForger makes a forger a peer of n that has the given prefixes.
func newForger(t testing.TB, n *node, prefixes ...string) *forger {
	t.Helper()
	k := newKey(t)
	f := &forger{tun: tuntest.NewChannelTUN(), public: k.Public()}
	d := device.NewDevice(f.tun.TUN(), conn.NewDefaultBind(), device.NewLogger(device.LogLevelSilent, ""))
	ended := make(chan struct{})
	t.Cleanup(func() { d.Close(); close(ended) })
	go func() { // it does not care for answers
		for {
			select {
			case <-f.tun.Inbound:
			case <-ended:
				return
			}
		}
	}()
	own, other := k.Bytes(), n.public().Bytes()
	if err := d.IpcSet(fmt.Sprintf("private_key=%s\npublic_key=%s\nendpoint=%v\nallowed_ip=0.0.0.0/0\nallowed_ip=::/0\n",
		hex.EncodeToString(own[:]), hex.EncodeToString(other[:]), n.endpoint())); err != nil {
		t.Fatal(err)
	}
	n.want.Peers[f.public] = datapath.Peer{Prefixes: set(prefixes...)}
	for p := range set(prefixes...).All() {
		n.want.Routes[p] = netip.Addr{}
	}
	n.sync()
	if err := d.Up(); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *forger) send(b []byte) { f.tun.Outbound <- b }

// ip returns an IP packet with a payload.
func ip(from, to netip.Addr, proto tcpip.TransportProtocolNumber, payload []byte) []byte {
	src, dst := tcpip.AddrFromSlice(from.AsSlice()), tcpip.AddrFromSlice(to.AsSlice())
	if from.Is6() {
		b := make([]byte, header.IPv6MinimumSize, header.IPv6MinimumSize+len(payload))
		header.IPv6(b).Encode(&header.IPv6Fields{
			PayloadLength: uint16(len(payload)), TransportProtocol: proto, HopLimit: 64, SrcAddr: src, DstAddr: dst,
		})
		return append(b, payload...)
	}
	b := make([]byte, header.IPv4MinimumSize, header.IPv4MinimumSize+len(payload))
	h := header.IPv4(b)
	h.Encode(&header.IPv4Fields{
		TotalLength: uint16(cap(b)), TTL: 64, Protocol: uint8(proto), SrcAddr: src, DstAddr: dst,
	})
	h.SetChecksum(^h.CalculateChecksum())
	return append(b, payload...)
}

func pseudoSum(proto tcpip.TransportProtocolNumber, from, to netip.Addr, size int) uint16 {
	return header.PseudoHeaderChecksum(proto, tcpip.AddrFromSlice(from.AsSlice()), tcpip.AddrFromSlice(to.AsSlice()), uint16(size))
}

func udpPacket(from, to netip.AddrPort, payload string) []byte {
	b := append(make([]byte, header.UDPMinimumSize), payload...)
	h := header.UDP(b)
	h.Encode(&header.UDPFields{SrcPort: from.Port(), DstPort: to.Port(), Length: uint16(len(b))})
	h.SetChecksum(^checksum.Checksum(b, pseudoSum(header.UDPProtocolNumber, from.Addr(), to.Addr(), len(b))))
	return ip(from.Addr(), to.Addr(), header.UDPProtocolNumber, b)
}

func tcpPacket(from, to netip.AddrPort, flags header.TCPFlags) []byte {
	b := make([]byte, header.TCPMinimumSize)
	h := header.TCP(b)
	h.Encode(&header.TCPFields{
		SrcPort: from.Port(), DstPort: to.Port(), SeqNum: 1, DataOffset: header.TCPMinimumSize, Flags: flags, WindowSize: 65535,
	})
	h.SetChecksum(^checksum.Checksum(b, pseudoSum(header.TCPProtocolNumber, from.Addr(), to.Addr(), len(b))))
	return ip(from.Addr(), to.Addr(), header.TCPProtocolNumber, b)
}

// TestOwnSource holds that a peer with a prefix around this node's addresses cannot send from them,
// except from a prefix that it has as well: that one is moving.
func TestOwnSource(t *testing.T) {
	a := newNode(t, "a", netstack.Options{}, "10.1.1.1", "fd01::1")
	a.want.Local = set("10.9.0.0/24", "fd09::/64")
	f := newForger(t, a, "10.0.0.0/8", "fd00::/8")
	for _, test := range []struct{ addr, local, other string }{
		{"10.1.1.1", "10.9.0.5", "10.2.2.2"},
		{"fd01::1", "fd09::5", "fd02::2"},
	} {
		to := netip.AddrPortFrom(netip.MustParseAddr(test.addr), 9000)
		c, err := a.ListenPacket("udp", to.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		// arrives sends one packet from each address, and wants the last alone to arrive.
		arrives := func(from ...string) {
			t.Helper()
			for _, s := range from {
				f.send(udpPacket(netip.AddrPortFrom(netip.MustParseAddr(s), 9), to, s))
			}
			want := from[len(from)-1]
			c.SetReadDeadline(time.Now().Add(timeout))
			b := make([]byte, 100)
			n, src, err := c.ReadFrom(b)
			if err != nil || string(b[:n]) != want {
				t.Errorf("received %q from %v, %v; want a packet from %s", b[:n], src, err, want)
			}
		}
		arrives(test.addr, test.local, test.other)

		p := set("10.9.0.0/24", "fd09::/64", test.addr)
		a.apply(datapath.PutPeer{Key: f.public, Peer: datapath.Peer{Prefixes: p}})
		arrives(test.addr, test.local)
		a.apply(datapath.DropPrefixes{Key: f.public, Prefixes: p})
		arrives(test.addr, test.local, test.other)
	}
}

// relay is a way to a node on which others can put packets too: its front is what a peer takes for
// the node's endpoint, and where the node's packets come from.
type relay struct{ front, back *net.UDPConn }

func newRelay(t testing.TB, peer, node netip.AddrPort) *relay {
	t.Helper()
	var cs [2]*net.UDPConn
	for i := range cs {
		c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		cs[i] = c
	}
	r := &relay{cs[0], cs[1]}
	forward := func(in, out *net.UDPConn, to netip.AddrPort) {
		b := make([]byte, 4096)
		for {
			n, err := in.Read(b)
			if err != nil {
				return
			}
			out.WriteToUDPAddrPort(b[:n], to)
		}
	}
	go forward(r.front, r.back, node)
	go forward(r.back, r.front, peer)
	return r
}

// TestForgedHandshakes holds that a node completes a handshake while someone sends what looks like
// handshakes of the peer, from the peer's address.
func TestForgedHandshakes(t *testing.T) {
	message := func(kind byte, size int) []byte { return append([]byte{kind}, make([]byte, size-1)...) }
	for name, test := range map[string]struct {
		msg  []byte
		mac1 bool // as of one who knows the node's public key
	}{
		"4 bytes of initiation": {message(1, 4), false},
		"4 bytes of response":   {message(2, 4), false},
		"initiation":            {message(1, device.MessageInitiationSize), false},
		"response":              {message(2, device.MessageResponseSize), false},
		"initiation with MAC1":  {message(1, device.MessageInitiationSize), true},
		"response with MAC1":    {message(2, device.MessageResponseSize), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newNode(t, "a", netstack.Options{}, "10.0.0.1")
			b := newNode(t, "b", netstack.Options{}, "10.0.0.2")
			if a.public().Compare(b.public()) > 0 {
				a, b = b, a // the one with the lesser key is who gives way
			}
			if test.mac1 {
				var g device.CookieGenerator
				g.Init(a.public().Bytes())
				g.AddMacs(test.msg)
			}
			r := newRelay(t, a.endpoint(), b.endpoint())
			at, to := r.front.LocalAddr().(*net.UDPAddr).AddrPort(), a.endpoint()
			forge, forged := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(forged)
				tick := time.NewTicker(10 * time.Millisecond)
				defer tick.Stop()
				for {
					select {
					case <-forge:
						return
					case <-tick.C:
						r.front.WriteToUDPAddrPort(test.msg, to)
					}
				}
			}()
			defer func() { close(forge); <-forged }()
			time.Sleep(50 * time.Millisecond)

			// b does not know where a is, so that all depends on a.
			b.want.Peers[a.public()] = datapath.Peer{Prefixes: a.want.Addrs}
			b.sync()
			a.want.Peers[b.public()] = datapath.Peer{Endpoint: at, Prefixes: b.want.Addrs}
			for p := range b.want.Addrs.All() {
				a.want.Routes[p] = netip.Addr{}
			}
			a.sync()
			for p := range b.want.Addrs.All() {
				c, err := a.DialContext(within(t, 10*time.Second), "udp", netip.AddrPortFrom(p.Addr(), 9).String())
				if err != nil {
					t.Fatal(err)
				}
				c.Close()
			}
		})
	}
}

// TestForgedTooBig holds that a peer cannot make the packets of a connection with another one small.
func TestForgedTooBig(t *testing.T) {
	a, b := pair(t)
	f := newForger(t, a, "10.66.0.0/16")
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
	defer c.Close()
	ask(t, c, "hello")

	local, remote := c.LocalAddr().(*net.TCPAddr).AddrPort(), c.RemoteAddr().(*net.TCPAddr).AddrPort()
	e := append(make([]byte, header.ICMPv4MinimumSize), tcpPacket(local, remote, header.TCPFlagAck)...)
	h := header.ICMPv4(e)
	h.SetType(header.ICMPv4DstUnreachable)
	h.SetCode(header.ICMPv4FragmentationNeeded)
	h.SetMTU(68)
	h.SetChecksum(^checksum.Checksum(e, 0))
	evil := netip.MustParseAddr("10.66.0.1")
	for range 20 {
		f.send(ip(evil, local.Addr(), header.ICMPv4ProtocolNumber, e))
	}
	// What is behind them in the same tunnel is answered when they were dealt with.
	u, err := a.ListenPacket("udp", "10.0.0.1:9000")
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	u.SetReadDeadline(time.Now().Add(timeout))
	f.send(udpPacket(netip.AddrPortFrom(evil, 9), netip.MustParseAddrPort("10.0.0.1:9000"), "x"))
	if _, _, err := u.ReadFrom(make([]byte, 9)); err != nil {
		t.Fatal(err)
	}

	const size = 2 << 20
	before := a.read().Stats[b.public()].Sent
	wrote := make(chan error, 1)
	go func() {
		_, err := io.CopyN(c, zeros{}, size)
		wrote <- err
	}()
	c.SetDeadline(time.Now().Add(timeout))
	_, err = io.CopyN(io.Discard, c, size)
	if err2 := <-wrote; err != nil || err2 != nil {
		t.Fatal(err, err2)
	}
	if sent := a.read().Stats[b.public()].Sent - before; sent > 2*size {
		t.Errorf("%d bytes were sent as %d: in small packets", size, sent)
	}
}

// TestManyHalfOpen begins connections from and to as many addresses, which must not keep a node from
// speaking with others.
func TestManyHalfOpen(t *testing.T) {
	a := newNode(t, "a", netstack.Options{}, "10.0.0.1")
	a.want.Local = set("10.9.0.0/16")
	f := newForger(t, a, "11.0.0.0/8")
	l, err := a.Listen("tcp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go echoTCP(l)
	for i := range 20000 {
		x, y := byte(i>>8), byte(i)
		f.send(tcpPacket(netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, 0, x, y}), uint16(1000+i)),
			netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, x, y}), 80), header.TCPFlagSyn))
	}
	b := newNode(t, "b", netstack.Options{}, "10.0.0.2")
	connect(a, b)
	c, err := b.DialContext(within(t, 10*time.Second), "tcp", "10.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ask(t, c, "hello")
}
