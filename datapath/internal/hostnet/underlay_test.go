//go:build linux

package hostnet

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/world"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// A network that is on a link by a route is connected, as a router's advertisement or DHCP makes it for an address that
// is /128 or /32. What has a gateway, or leads into a tunnel, is not.
func TestConnectedByRoute(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.ip("link add eth0 type veth peer name far0", "link set far0 up", "link set eth0 up",
		"link add other0 type veth peer name other1", "link set other0 alias warren:other0:88", "link set other1 up", "link set other0 up",
		"tuntap add ppp0 mode tun", "link set ppp0 up",
		"addr add 2001:db8:1::2/128 dev eth0 nodad", "addr add 192.168.5.2/32 dev eth0")
	s.settle()
	h := s.up(Options{})
	addrs := prefixes.MustParse("2001:db8:1::2/128", "192.168.5.2/32")
	if got := s.read(h).Host.Connected; got != addrs {
		t.Errorf("got %v, want %v", got, addrs)
	}
	s.ip("route add 192.168.5.1 dev eth0 scope link proto dhcp metric 100",
		"route add default via 192.168.5.1 dev eth0 proto dhcp metric 100")
	networks := []struct{ prefix, how string }{
		{"2001:db8:1::/64", "dev eth0 proto ra metric 1024"},
		{"2001:db8:2::/64", "dev eth0 proto kernel metric 256"},
		{"192.168.5.0/24", "dev eth0 scope link proto dhcp metric 100"},
		{"192.168.6.0/24", "dev eth0 scope link proto static"},
		{"172.16.0.0/12", "dev eth0"},
		{"192.168.7.0/24", "nexthop dev eth0 nexthop dev far0"},
	}
	want := addrs.With(pp("192.168.5.1/32"))
	for _, n := range networks {
		want = want.With(pp(n.prefix))
		s.heard(h)
		s.ip("route add " + n.prefix + " " + n.how)
		s.told(h, n.prefix)
		if got := s.read(h).Host.Connected; got != want {
			t.Errorf("%s %s: connected are %v, want %v", n.prefix, n.how, got, want)
		}
	}
	s.ip("route add 192.168.8.0/24 via 192.168.5.1", "route add 2001:db8:8::/64 via 2001:db8:1::1", "route add 192.168.9.0/24 dev ppp0", "route add 192.168.10.0/24 dev other0",
		"route add 192.168.11.0/24 dev eth0 proto bird", "route add 192.168.12.0/24 dev lo", "route add blackhole 192.168.13.0/24", "route add 192.168.14.0/24 dev eth0 table 99",
		"route add 192.168.15.0/24 nexthop via 192.168.5.1 nexthop via 192.168.5.7", "route add 11.0.0.0/8 dev eth0", "route add 169.254.0.0/16 dev eth0", "route add multicast 224.1.0.0/16 dev eth0",
		"route add 192.168.16.0/24 via inet6 2001:db8:1::1 dev eth0", "route add 192.168.17.0/24 dev wg0", "route add 2001:db9::/16 dev eth0", "route add fe80::/64 dev eth0")
	if got := s.read(h).Host.Connected; got != want {
		t.Errorf("with others: connected are %v, want %v", got, want)
	}
	s.ip("link set eth0 down", "link set far0 down")
	if got := s.read(h).Host.Connected; !got.IsEmpty() {
		t.Errorf("down: connected are %v", got)
	}
}

// heard has all that was told until now be dealt with.
func (s *space) heard(h *Host) {
	s.t.Helper()
	s.drain(h)
	if _, ok := h.watch.catchUp(h); !ok {
		s.t.Fatal("there is no end to what is told")
	}
	select {
	case <-h.Changed():
	default:
	}
}

// told fails where nobody is told of a change.
func (s *space) told(h *Host, what string) {
	s.t.Helper()
	select {
	case <-h.Changed():
	case <-time.After(10 * time.Second):
		s.t.Errorf("%s: nobody was told", what)
	}
}

// The underlay is that of most of the world, whatever a few prefixes do: those for documentation, and others that routers drop.
func TestUnderlayDespiteBogons(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.ip("link add vpn0 mtu 1280 type veth peer name vpn1", "link set vpn1 up", "link set vpn0 up", "addr add 100.64.0.1/32 dev vpn0", "addr add fd64::1/128 dev vpn0 nodad")
	s.settle()
	h := s.up(Options{})
	before := s.read(h).Host
	s.ip("route add blackhole 192.0.2.0/24", "route add unreachable 12.0.0.0/8", "route add 24.0.0.0/8 dev vpn0")
	s.ip6("route add blackhole 2001:db8::/32 metric 5", "route add unreachable 2600::/12", "route add 2400::/12 dev vpn0")
	if after := s.read(h).Host; before.UnderlayMTU != 1500 || after.UnderlayMTU != 1500 || !after.IPv4 || !after.IPv6 {
		t.Errorf("the underlay carried %d bytes, and with some prefixes gone: %+v", before.UnderlayMTU, after)
	}
	s.ip("route del default", "route del 24.0.0.0/8", "addr del 203.0.113.2/24 dev eth0")
	if after := s.read(h).Host; after.UnderlayMTU != 1500 || !after.IPv6 {
		t.Errorf("with IPv6 alone: %+v", after)
	}
}

// No narrow route takes two of the addresses that stand for the world, and each half has some.
func TestWorld(t *testing.T) {
	for i, a := range world.Addrs {
		if !a.IsGlobalUnicast() || a.IsPrivate() {
			t.Errorf("%v is of no use", a)
		}
		for _, b := range world.Addrs[:i] {
			bits := 9
			if a.Is6() {
				bits = 17
			}
			if p, err := a.Prefix(bits); err != nil || p.Contains(b) {
				t.Errorf("%v has %v in it", p, b)
			}
		}
	}
	for _, half := range []string{"0.0.0.0/1", "128.0.0.0/1", "2000::/3"} {
		n := 0
		for _, a := range world.Addrs {
			if pp(half).Contains(a) {
				n++
			}
		}
		if n < 4 {
			t.Errorf("%s has %d", half, n)
		}
	}
}

// Routes that a VPN makes in place of a default one change the underlay: they are noticed.
func TestHalfRoutes(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{})
	s.ip("link add vpn0 mtu 1300 type veth peer name vpn1", "link set vpn1 up", "link set vpn0 up", "addr add 172.31.0.1/24 dev vpn0", "addr add fd31::1/64 dev vpn0 nodad")
	s.settle()
	for _, c := range []struct {
		routes []string
		mtu    int
	}{
		{[]string{"0.0.0.0/1 via 172.31.0.2", "128.0.0.0/1 via 172.31.0.2"}, 1300}, // as OpenVPN has it
		{[]string{"128.0.0.0/2 via 172.31.0.2"}, 1300},
		{[]string{"2000::/3 via fd31::2"}, 1300},
		{[]string{"133.0.0.0/8 via 172.31.0.2"}, 1500}, // a network
	} {
		for _, r := range c.routes {
			s.heard(h)
			s.ip("route add " + r)
			s.told(h, r)
		}
		if got := s.read(h).Host.UnderlayMTU; got != c.mtu {
			t.Errorf("%v: the underlay carries %d, want %d", c.routes, got, c.mtu)
		}
		for _, r := range c.routes {
			s.heard(h)
			s.ip("route del " + r)
			s.told(h, "no "+r)
		}
		if got := s.read(h).Host.UnderlayMTU; got != 1500 {
			t.Errorf("without %v: the underlay carries %d", c.routes, got)
		}
	}
}

// Peers that are reached by another link than the default route's, which is narrower, or by a narrower route.
func TestUnderlayOfPeers(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.ip("link add lan0 mtu 1400 type veth peer name lan1", "link set lan1 up", "link set lan0 up", "addr add 172.31.0.1/24 dev lan0", "addr add fd31::1/64 dev lan0 nodad",
		"route add 172.20.0.0/16 via 203.0.113.1 mtu 1380", "route add 172.21.0.0/16 via 172.31.0.2 table 99", "rule add fwmark 7 lookup 99 priority 100")
	s.settle()
	h := s.up(Options{})
	s.ip("route add 172.22.0.0/16 dev wg0")
	for _, c := range []struct {
		mtu       int
		mark      uint32
		endpoints []string
		message   string // "" is no problem
		remedy    string
	}{
		{1420, 0, nil, "", ""},
		{1420, 0, []string{"203.0.113.9", "2001:db8:1::9", "8.8.8.8"}, "", ""},
		{1420, 0, []string{"172.31.0.2"}, "1480 bytes, and the way to the peer at 172.31.0.2, by lan0, carries 1400", "MTU of 1340"},
		{1340, 0, []string{"172.31.0.2"}, "", ""},
		{1340, 0, []string{"172.31.0.2", "fd31::2"}, "1420 bytes, and the way to the peer at fd31::2, by lan0, carries 1400", "MTU of 1320"},
		{1420, 0, []string{"172.31.0.2", "172.20.0.1"}, "172.20.0.1, by eth0, carries 1380", "MTU of 1320"},
		{1420, 0, []string{"::ffff:172.31.0.2"}, "172.31.0.2, by lan0", "MTU of 1340"},
		{1420, 0, []string{"172.21.0.1", "fe80::7"}, "", ""},
		{1420, 7, []string{"172.21.0.1"}, "172.21.0.1, by lan0", ""},
		{1420, 0, []string{"172.22.0.1"}, "", ""},                               // into the tunnel
		{1470, 0, []string{"172.31.0.2"}, "172.31.0.2, by lan0", "MTU of 1340"}, // nor does the underlay fit
		{1470, 0, []string{"203.0.113.9"}, "and the underlay carries 1500", "MTU of 1420"},
		{0, 0, []string{"172.31.0.2"}, "", ""},
	} {
		h.Encrypted(c.mark)
		peers := make(map[key.Public]datapath.Peer)
		for _, e := range c.endpoints {
			private, err := key.NewPrivate()
			must(t, err)
			peers[private.Public()] = datapath.Peer{Endpoint: netip.AddrPortFrom(ap(e), 51820)}
		}
		st := datapath.State{Host: s.read(h).Host, Device: datapath.Device{MTU: c.mtu}, Peers: peers}
		ps, err := h.Problems(s.ctx(), st)
		must(t, err)
		if len(ps) > 1 || len(ps) == 1 != (c.message != "") {
			t.Errorf("MTU %d, peers at %v, mark %d: got %+v", c.mtu, c.endpoints, c.mark, ps)
		} else if len(ps) == 1 && (!strings.Contains(ps[0].Message, c.message) || !strings.Contains(ps[0].Remedy, c.remedy)) {
			t.Errorf("MTU %d, peers at %v, mark %d: got %+v, want %q and %q", c.mtu, c.endpoints, c.mark, ps[0], c.message, c.remedy)
		}
	}
}

// Of many peers some of each family are looked at.
func TestEndpoints(t *testing.T) {
	s := datapath.State{Peers: make(map[key.Public]datapath.Peer)}
	for i := range 100 {
		for _, f := range []string{"10.0.0.%d", "fd00::%d", "::ffff:10.0.0.%d"} {
			private, err := key.NewPrivate()
			must(t, err)
			s.Peers[private.Public()] = datapath.Peer{Endpoint: netip.AddrPortFrom(ap(fmt.Sprintf(f, i+1)), 51820)}
		}
	}
	n := map[bool]int{}
	seen := map[netip.Addr]bool{}
	for _, a := range endpoints(s) {
		n[a.Is4()]++
		if seen[a] {
			t.Errorf("%v twice", a)
		}
		seen[a] = true
	}
	if n[true] != mostChecked || n[false] != mostChecked {
		t.Errorf("got %v", n)
	}
}

// A device's own mark decides which underlay it has, and with policy routing one that is not apart counts for none.
func TestUnderlayOfMark(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.ip("link add vpn0 mtu 1300 type veth peer name vpn1", "link set vpn1 up", "link set vpn0 up", "addr add 172.31.0.1/24 dev vpn0",
		"route add default via 172.31.0.2 table 99", "rule add fwmark 0x250 lookup 99 priority 100")
	s.settle()
	for _, c := range []struct {
		o    Options
		mark uint32
		want int
	}{
		{Options{}, 0x250, 1300}, {Options{}, 0, 1500}, {Options{Observe: true}, 0x250, 1300}, {Options{Observe: true, Mark: 0x250}, 0x250, 1300},
		{Options{Policy: true}, 0x250, 1300}, {Options{Policy: true}, 0x260, 1500}, {Options{Policy: true}, 0x50, 1500},
	} {
		h := s.open(c.o)
		if was := h.sendMark; h.Encrypted(c.mark) != (h.sendMark != was) || h.Encrypted(c.mark) {
			t.Errorf("%+v with mark %#x: a change is not told, or told twice", c.o, c.mark)
		}
		if got := s.read(h).Host.UnderlayMTU; got != c.want {
			t.Errorf("%+v with mark %#x: the underlay carries %d, want %d", c.o, c.mark, got, c.want)
		}
	}
}

// A host that is only looked at has no link of its own, whatever there is, and changes nothing.
func TestObserve(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	mesh := s.up(Options{Policy: true, Sources: SourceLoopback})
	must(t, mesh.AddAddrs(s.ctx(), one.addrs))
	must(t, mesh.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("0.0.0.0/0")}, {Prefix: pp("::/0")}}))
	s.settle()
	for _, name := range []string{"", "wg0"} {
		h, err := Open(Options{Observe: true, Interface: name, Namespace: s.path})
		must(t, err)
		defer h.Close()
		h.Encrypted(0)
		if st := s.read(h); st.Link.Index != 0 || st.Host.UnderlayMTU != 1420 || st.Addrs.Len()+len(st.Routes)+len(st.Problems) != 0 {
			t.Errorf("without a mark: %+v", st)
		}
		h.Encrypted(DefaultMark)
		if st := s.read(h); st.Host.UnderlayMTU != 1500 || !st.Host.IPv4 || !st.Host.IPv6 || !st.Host.Connected.Has(pp("203.0.113.0/24")) {
			t.Errorf("with the mark: %+v", st)
		}
		before := s.dump()
		if _, err := h.Link(s.ctx()); !errors.Is(err, ErrNoLink) {
			t.Errorf("link: %v", err)
		}
		if err := h.Up(s.ctx(), 0); !errors.Is(err, ErrNoLink) {
			t.Errorf("up: %v", err)
		}
		if err := h.AddAddrs(s.ctx(), one.addrs); err == nil {
			t.Error("addresses were added")
		}
		if err := h.Remove(s.ctx()); err == nil {
			t.Error("something was removed")
		}
		if after := s.dump(); after != before {
			t.Errorf("before:\n%s\nafter:\n%s", before, after)
		}
	}
}

// BenchmarkRead reads what there is where there are many routes of ours, and of others.
func BenchmarkRead(b *testing.B) {
	for _, n := range [][2]int{{0, 0}, {10000, 0}, {10000, 10000}} {
		b.Run(fmt.Sprintf("ours=%d/others=%d", n[0], n[1]), func(b *testing.B) {
			s := newSpace(b)
			s.uplink()
			h := s.up(Options{})
			must(b, h.AddAddrs(s.ctx(), one.addrs))
			must(b, h.AddRoutes(s.ctx(), many(n[0])))
			var others []string
			for i := range n[1] / 2 {
				others = append(others, fmt.Sprintf("route add 11.%d.%d.0/24 via 203.0.113.1 proto bird", i>>8, i&255), fmt.Sprintf("route add 2001:db9:%x::/48 via 2001:db8:1::1 proto bird", i))
			}
			s.ip(others...)
			for b.Loop() {
				s.read(h)
			}
		})
	}
}

// Which addresses packets cannot be sent to, as the routes for them are, without them, and with them again.
func TestNoRoutes(t *testing.T) {
	t.Parallel()
	for _, policy := range []bool{false, true} {
		t.Run(fmt.Sprintf("policy %v", policy), func(t *testing.T) {
			t.Parallel()
			s := newSpace(t)
			s.uplink()
			s.ip("route del default via 2001:db8:1::1", "route add unreachable 203.0.113.64/26", "route add blackhole 203.0.113.128/26", "route add prohibit 203.0.113.192/26")
			s.settle()
			o := Options{Policy: policy}
			h := s.up(o)
			must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("203.0.113.32/32")}}))
			s.heard(h)
			want := func(when string, addrs ...string) {
				t.Helper()
				var to []netip.Addr
				for _, a := range []string{"203.0.113.1", "203.0.113.32", "203.0.113.65", "203.0.113.129", "203.0.113.193", "127.0.0.1", "2001:db8:7::1"} {
					to = append(to, ap(a))
				}
				for range 2 {
					got := h.NoRoutes(s.ctx(), to)
					for _, a := range to {
						if want := slices.Contains(addrs, a.String()); got[a] != want {
							t.Errorf("%s: no route to %v is %v, want %v", when, a, got[a], want)
						}
					}
				}
			}
			refused := []string{"203.0.113.65", "203.0.113.129", "203.0.113.193"}
			if !policy {
				refused = append(refused, "203.0.113.32") // it would go into the tunnel
			}
			want("first", append(refused, "2001:db8:7::1")...)
			s.ip("route del 203.0.113.0/24 dev eth0", "route del default via 203.0.113.1")
			want("without a route", append(refused, "2001:db8:7::1", "203.0.113.1", "203.0.113.32")...)
			s.ip("route add 203.0.113.0/24 dev eth0 proto bird", "route add 2001:db8:7::/64 dev eth0 proto bird")
			want("with one", refused...)
			if t.Failed() {
				t.Log(s.dump())
			}
		})
	}
}

// However many there are, all are asked about in the end.
func TestNoRoutesOfMany(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	s.heard(h)
	var to []netip.Addr
	for i := range 3 * mostAsked {
		to = append(to, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}))
	}
	for i := 1; i <= 4; i++ {
		if n, want := len(h.NoRoutes(s.ctx(), to)), min(i, 3)*mostAsked; n != want {
			t.Errorf("call %d: %d without a route, want %d", i, n, want)
		}
	}
}
