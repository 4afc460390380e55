package sockets

import (
	"bytes"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath/internal/nettest"
)

// within opens a Bind in a namespace.
func within(t *testing.T, s *nettest.Space, b conn.Bind) (e *ear) {
	t.Helper()
	s.Must(func() error { e = listen(t, b, 0); return nil })
	return e
}

// outDatagrams is how many datagrams over IPv4 a namespace sent.
func outDatagrams(t *testing.T, s *nettest.Space) (n int) {
	t.Helper()
	out, err := s.Run("cat", "/proc/thread-self/net/snmp")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out, "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, "Udp:") && i+1 < len(lines) {
			for j, name := range strings.Fields(line) {
				if name == "OutDatagrams" {
					n, _ = strconv.Atoi(strings.Fields(lines[i+1])[j])
					return n
				}
			}
		}
	}
	return 0
}

// Over an underlay that is too narrow for them, joined packets are refused; alone each arrives, in fragments. After a
// while the path is asked again, and carries them.
func TestNarrow(t *testing.T) {
	t.Parallel()
	s, far := nettest.NewSpace(t), nettest.NewSpace(t)
	s.IP("link add u0 mtu 1280 type veth peer name u1 mtu 1280 netns " + far.Path)
	s.IP("addr add 192.0.2.1/24 dev u0")
	s.IP("link set u0 up")
	far.IP("addr add 192.0.2.2/24 dev u1")
	far.IP("link set u1 up")
	a, b := within(t, s, New(Options{})), within(t, far, New(Options{}))
	to := a.to(b, "192.0.2.2").(*Endpoint)
	var packets [][]byte
	for i := range 30 {
		packets = append(packets, fill(1452, i))
	}
	arrive := func(when string) int {
		t.Helper()
		before := outDatagrams(t, s)
		if err := a.Send(packets, to); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		for i, want := range packets {
			if g := b.next(); !bytes.Equal(g.data, want) {
				t.Fatalf("%s: packet %d is another", when, i)
			}
		}
		return outDatagrams(t, s) - before
	}
	if n := arrive("too narrow"); n < len(packets) || to.path.joins() != 1451 {
		t.Errorf("refused: %d datagrams, and the next would be joined up to %d bytes", n, to.path.joins())
	}
	arrive("again")
	wide := packets
	packets = nil
	for i := range 30 {
		packets = append(packets, fill(1200, i))
	}
	if n := arrive("small enough"); n >= len(packets) {
		t.Errorf("what fits is not joined: %d datagrams", n)
	}
	packets = wide
	s.IP("link set u0 mtu 1500")
	far.IP("link set u1 mtu 1500")
	if to.path.joins() != 1451 {
		t.Error("joined at once")
	}
	to.path.until.Store(1) // long ago
	arrive("wide enough")
	if to.path.joins() != math.MaxInt || to.path.until.Load() != 0 {
		t.Error("not joined for good")
	}
}

// An answer goes out from the address that was asked. One that is gone from the host is forgotten.
func TestSource(t *testing.T) {
	t.Parallel()
	s := nettest.NewSpace(t)
	s.IP("addr add 192.0.2.1/32 dev lo")
	s.IP("addr add 2001:db8::1/128 dev lo nodad")
	a, b := within(t, s, New(Options{})), within(t, s, New(Options{}))
	for _, test := range []struct{ addr, host string }{{"192.0.2.1", "127.0.0.1"}, {"2001:db8::1", "::1"}} {
		// From wherever, to that address.
		if err := a.Send([][]byte{fill(50, 1)}, a.to(b, test.addr)); err != nil {
			t.Fatal(err)
		}
		g := b.next()
		if g.from.SrcIP().String() != test.addr || g.from.SrcToString() != test.addr {
			t.Errorf("%s: it came to %v", test.addr, g.from.SrcIP())
		}
		// The way back is by the host's own choice another one.
		back := newEndpoint(netip.MustParseAddrPort(a.at(test.host)), g.from.SrcIP(), 0)
		send := func(when, want string) {
			t.Helper()
			packets := [][]byte{fill(50, 2), fill(50, 3), fill(20, 4), fill(900, 5)}
			if err := b.Send(packets, back); err != nil {
				t.Fatalf("%s: %v", when, err)
			}
			for _, p := range packets {
				if g := a.next(); !bytes.Equal(g.data, p) || g.from.DstIP().String() != want {
					t.Errorf("%s: %d bytes came from %v, want %s", when, len(g.data), g.from.DstIP(), want)
				}
			}
		}
		send("source "+test.addr, test.addr)
		bits := map[bool]string{true: "/32", false: "/128"}[g.from.SrcIP().Is4()]
		s.IP("addr del " + test.addr + bits + " dev lo")
		send("source gone "+test.addr, test.host)
		if back.SrcIP().IsValid() {
			t.Error("the source that is gone is kept")
		}
		send("source forgotten", test.host)
	}
}

func TestMark(t *testing.T) {
	t.Parallel()
	s := nettest.NewSpace(t)
	b := New(Options{})
	within(t, s, b)
	s.Must(func() error { return b.SetMark(0x50) })
	for i := range b.load() {
		k := b.load()[i]
		if k == nil {
			t.Fatalf("no %s socket", networks[i])
		}
		_ = k.raw.Control(func(fd uintptr) {
			if mark, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK); mark != 0x50 || err != nil {
				t.Errorf("the %s socket has mark %#x, %v", networks[i], mark, err)
			}
		})
	}
	if r, w := b.Sizes(); r < DefaultBuffer || w < DefaultBuffer {
		t.Errorf("the buffers have %d and %d bytes", r, w)
	}
	if v4, v6 := b.Families(); !v4 || !v6 || b.Port() == 0 {
		t.Errorf("families %v, %v; port %d", v4, v6, b.Port())
	}
}

// More packets than fit one call are handed out by the next ones, though nothing more arrives.
func TestHandedOutInParts(t *testing.T) {
	t.Parallel()
	b := New(Options{})
	fns, port, err := b.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	to, err := b.ParseEndpoint(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String())
	if err != nil {
		t.Fatal(err)
	}
	var sent [][]byte
	for i := range 100 {
		sent = append(sent, fill(700, i))
	}
	if err := b.Send(sent, to); err != nil {
		t.Fatal(err)
	}
	packets, sizes, from := make([][]byte, 7), make([]int, 7), make([]conn.Endpoint, 7)
	for i := range packets {
		packets[i] = make([]byte, 700)
	}
	for len(sent) > 0 {
		n, err := fns[0](packets, sizes, from)
		if err != nil || n == 0 {
			t.Fatalf("%d packets, %v", n, err)
		}
		for i := range n {
			if !bytes.Equal(packets[i][:sizes[i]], sent[i]) || from[i].DstToString() != to.DstToString() {
				t.Fatalf("another packet, or from %v", from[i].DstToString())
			}
		}
		sent = sent[n:]
	}
}

func TestNoAllocations(t *testing.T) {
	b := New(Options{})
	fns, port, err := b.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	to, err := b.ParseEndpoint(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String())
	if err != nil {
		t.Fatal(err)
	}
	packets, sizes, from := make([][]byte, BatchSize), make([]int, BatchSize), make([]conn.Endpoint, BatchSize)
	var batch [][]byte
	for i := range packets {
		packets[i] = make([]byte, 1<<16)
		batch = append(batch, make([]byte, 1452))
	}
	if n := testing.AllocsPerRun(200, func() {
		if err := b.Send(batch, to); err != nil {
			t.Fatal(err)
		}
		for left := len(batch); left > 0; {
			n, err := fns[0](packets, sizes, from)
			if err != nil {
				t.Fatal(err)
			}
			left -= n
		}
	}); n >= 1 && !raceEnabled {
		t.Errorf("%v allocations for %d packets", n, len(batch))
	}
}

// What a socket waits for in vain, an endpoint that is full, does not hold up the end.
func TestCloseWhileSending(t *testing.T) {
	b := listen(t, New(Options{Buffer: 4096}), 0)
	to := b.to(b, "127.0.0.1")
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		p := make([][]byte, BatchSize)
		for i := range p {
			p[i] = make([]byte, 1400)
		}
		for {
			if err := b.Send(p, to); err != nil {
				return
			}
		}
	}()
	go func() {
		for range b.heard {
		}
	}()
	time.Sleep(20 * time.Millisecond)
	b.end()
	<-stop
	close(b.heard)
}

// A control message that Linux would never make is no more than useless.
func FuzzControl(f *testing.F) {
	var b [controlSpace]byte
	copy(control(b[:], unix.IPPROTO_IP, unix.IP_PKTINFO, unix.SizeofInet4Pktinfo)[4:], []byte{192, 0, 2, 1})
	ne.PutUint32(control(b[sourceSpace4:], unix.IPPROTO_UDP, unix.UDP_GRO, 4), 1452)
	src, _, size := parseControl(b[:sourceSpace4+unix.CmsgSpace(4)])
	if src != netip.MustParseAddr("192.0.2.1") || size != 1452 {
		f.Errorf("got %v, %d", src, size)
	}
	f.Add(b[:])
	f.Add(b[:sourceSpace4])
	f.Add(b[:sourceSpace4+3])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		c := append(make([]byte, 0, len(b)+8), b...)
		parseControl(c[:len(b):len(b)])
	})
}

// An answer goes out from the address that was asked as long as the way there is what it was. Once packets leave by
// another interface the host chooses anew, though it still has the address.
func TestSourceOfAnotherWay(t *testing.T) {
	t.Parallel()
	s, far := nettest.NewSpace(t), nettest.NewSpace(t)
	for _, n := range []*nettest.Space{s, far} {
		n.Sysctl("net/ipv6/conf/default/accept_dad", "0") // neighbours are asked from link-local addresses, at once
	}
	for i, at := range [][2]string{{"192.0.2.", "2001:db8:1::"}, {"198.51.100.", "2001:db8:2::"}} {
		u, v := "u"+strconv.Itoa(i), "v"+strconv.Itoa(i)
		s.IP("link add " + u + " type veth peer name " + v + " netns " + far.Path)
		s.IP("addr add " + at[0] + "1/24 dev " + u)
		s.IP("addr add " + at[1] + "1/64 dev " + u + " nodad")
		s.IP("link set " + u + " up")
		far.IP("addr add " + at[0] + "2/24 dev " + v)
		far.IP("addr add " + at[1] + "2/64 dev " + v + " nodad")
		far.IP("link set " + v + " up")
	}
	far.IP("addr add 203.0.113.1/32 dev lo")
	far.IP("addr add 2001:db8:3::1/128 dev lo nodad")
	for _, n := range []*nettest.Space{s, far} {
		for _, name := range append([]string{"all"}, n.Links()...) {
			n.Sysctl("net/ipv4/conf/"+name+"/rp_filter", "0")
		}
	}
	a, b := within(t, s, New(Options{})), within(t, far, New(Options{}))
	for _, test := range []struct{ name, far, first, second, via1, via2 string }{
		{"IPv4", "203.0.113.1", "192.0.2.1", "198.51.100.1", "192.0.2.2", "198.51.100.2"},
		{"IPv6", "2001:db8:3::1", "2001:db8:1::1", "2001:db8:2::1", "2001:db8:1::2", "2001:db8:2::2"},
	} {
		heard := func(at string) *Endpoint {
			t.Helper()
			if err := b.Send([][]byte{fill(50, 1)}, newEndpoint(netip.MustParseAddrPort(a.at(at)), netip.MustParseAddr(test.far), 0)); err != nil {
				t.Fatal(err)
			}
			return a.next().from.(*Endpoint)
		}
		sends := func(when string, to *Endpoint, want string) {
			t.Helper()
			to.raw.way.due.Store(0) // a second went by
			if err := a.Send([][]byte{fill(50, 2), fill(50, 3)}, to); err != nil {
				t.Fatalf("%s: %s: %v", test.name, when, err)
			}
			for range 2 {
				if g := b.next(); g.from.DstIP().String() != want {
					t.Errorf("%s: %s: it came from %v, want %s", test.name, when, g.from.DstIP(), want)
				}
			}
		}
		// The addresses are asked of which the host would not choose one by itself, and the ways in and out differ.
		s.IP("route add " + test.far + " via " + test.via1 + " metric 10")
		e := heard(test.second)
		sends("as asked", e, test.second)
		sends("as asked, again", e, test.second)
		s.IP("route add " + test.far + " via " + test.via2 + " metric 5")
		e.path.refused(50)
		sends("another route", e, test.second)
		if e.SrcIP().IsValid() || e.path.joins() != math.MaxInt {
			t.Errorf("%s: another route: the source is %v, and packets are joined up to %d bytes", test.name, e.SrcIP(), e.path.joins())
		}
		e = heard(test.second)
		if e.SrcIP().String() != test.second {
			t.Errorf("%s: the source that is heard of again is %v", test.name, e.SrcIP())
		}
		sends("heard again", e, test.second)
		s.IP("route del " + test.far + " via " + test.via2 + " metric 5")
		sends("the first route", e, test.first)
		e = heard(test.first)
		sends("as asked first", e, test.first)
		s.IP("route add " + test.far + " via " + test.via2 + " metric 20")
		sends("a worse route", e, test.first)
	}
	s.IP("route del 203.0.113.1/32 via 198.51.100.2 metric 20")
	s.IP("route add 203.0.113.1/32 via 198.51.100.2 metric 20")
	e := newEndpoint(netip.MustParseAddrPort(b.at("203.0.113.1")), netip.MustParseAddr("192.0.2.1"), 0)
	a.mustSend(e)
	b.next()
	s.IP("link set u0 down") // which keeps its address
	e.raw.way.due.Store(0)
	a.mustSend(e)
	if g := b.next(); g.from.DstIP().String() != "198.51.100.1" {
		t.Errorf("an interface is down, and it came from %v", g.from.DstIP())
	}
}

func (e *ear) mustSend(to conn.Endpoint) {
	e.t.Helper()
	if err := e.Send([][]byte{fill(50, 4)}, to); err != nil {
		e.t.Fatal(err)
	}
}

// An answer of Linux is for the question that was asked, and a strange one is none.
func FuzzRoute(f *testing.F) {
	for _, addrs := range [][2]string{{"127.0.0.1", "127.0.0.2"}, {"::1", "::1"}} {
		f.Add(appendRouteRequest(nil, 7, netip.MustParseAddr(addrs[0]), netip.MustParseAddr(addrs[1]), 5), uint32(7))
	}
	f.Add([]byte{}, uint32(0))
	r := openRoutes()
	defer r.close()
	if oif := r.oif(netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2"), 0); oif != 1 {
		f.Errorf("packets to loopback leave by interface %d", oif)
	}
	f.Fuzz(func(t *testing.T, b []byte, seq uint32) {
		if oif, ours := parseRoute(b, seq); oif != 0 && !ours {
			t.Error("an interface of another question")
		}
	})
}

func TestNoAllocationsForRoutes(t *testing.T) {
	r := openRoutes()
	defer r.close()
	dst, src := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")
	if n := testing.AllocsPerRun(100, func() { r.oif(dst, src, 5) }); n >= 1 && !raceEnabled {
		t.Errorf("%v allocations", n)
	}
}
