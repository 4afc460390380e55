package tun

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

// transfer is how many bytes go each way. The race detector makes cryptography some thirty times slower.
var transfer = map[bool]int{false: 4 << 20, true: 1 << 20}[raceEnabled]

// exchange has TCP go both ways between two nodes in namespaces, over both families.
func (p pair) exchange(what string) {
	p.a.T.Helper()
	nettest.Exchange(p.a.T, what+", inner IPv4", transfer, p.b.space, p.a.space, "10.0.0.2")
	nettest.Exchange(p.a.T, what+", inner IPv6", transfer, p.a.space, p.b.space, "fd00::1")
}

func TestTraffic(t *testing.T) {
	for _, o := range nettest.Outers {
		t.Run(o.Name, func(t *testing.T) {
			p := newPair(t)
			p.connect(o)
			p.exchange("tun to tun")
			if st := p.a.Have().Stats[p.b.Public()]; st.LastHandshake.IsZero() || st.Received < uint64(transfer) || st.Sent < uint64(transfer) {
				t.Errorf("stats are %+v", st)
			}
		})
	}
}

// mixed is a node in one namespace and an in-process one whose sockets are in another.
type mixed struct {
	a     *node
	b     *netstack.Net
	space *space // of b's sockets
}

func newMixed(t testing.TB, o nettest.Outer, mtu int, change ...func(*Options)) mixed {
	t.Helper()
	sa, sb := wired(t)
	a := newNode(t, sa, "a", addrsA, change...)
	b, err := netstack.New(netstack.Options{MTU: mtu, Bind: sb.Bind})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	o.Connect(a.Node, nettest.NewNode(t, "b", b, addrsB))
	b.Settle()
	return mixed{a, b, sb}
}

func (m mixed) exchange() {
	t := m.a.T
	t.Helper()
	nettest.Exchange(t, "tun to netstack, inner IPv4", transfer, m.b, m.a.space, "10.0.0.2")
	nettest.Exchange(t, "netstack to tun, inner IPv6", transfer, m.a.space, m.b, "fd00::1")
}

func TestTrafficWithNetstack(t *testing.T) {
	for _, o := range nettest.Outers {
		t.Run(o.Name, func(t *testing.T) {
			newMixed(t, o, 0).exchange()
		})
	}
}

// TestTrafficWithWireguardGo has Debian's wireguard-go, told by wg, as the peer.
func TestTrafficWithWireguardGo(t *testing.T) {
	need(t)
	for _, program := range []string{"wireguard-go", "wg", "ip"} {
		nettest.NeedProgram(t, program)
	}
	for _, o := range nettest.Outers {
		t.Run(o.Name, func(t *testing.T) {
			sa, sb := wired(t)
			a := newNode(t, sa, "a", addrsA)
			psk := o.Key(t)
			addrA, addrB := o.Addrs()
			f := nettest.NewForeign(t, sb.Space, "wireguard-go", addrsB)
			f.Peer(a.Public(), datapath.Peer{Endpoint: a.At(addrA), Preshared: psk, Prefixes: addrsA})
			a.Peer(f.Public(), datapath.Peer{
				Endpoint:  netip.AddrPortFrom(netip.MustParseAddr(addrB), f.Port),
				Preshared: psk, Prefixes: addrsB,
			})
			nettest.Exchange(t, "tun to wireguard-go, inner IPv4", transfer, sb, sa, "10.0.0.2")
			nettest.Exchange(t, "wireguard-go to tun, inner IPv6", transfer, sa, sb, "fd00::1")
		})
	}
}

// TestNarrowUnderlay has a tunnel whose packets do not fit the underlay, so that Linux refuses several of
// them sent as one.
func TestNarrowUnderlay(t *testing.T) {
	wide := func(o *Options) { o.MTU = 1420 }
	for _, o := range nettest.Outers {
		if o.Preshared {
			continue
		}
		t.Run(o.Name, func(t *testing.T) {
			p := newPair(t, wide)
			p.a.space.Narrow(1280)
			p.b.space.Narrow(1280)
			p.connect(o)
			p.exchange("tun to tun")
			m := newMixed(t, o, 1420, wide)
			m.a.space.Narrow(1280)
			m.space.Narrow(1280)
			m.exchange()
		})
	}
}

// TestWhole has TCP go over an underlay that does not carry the least MTU which IPv6 allows: hardly any of it is
// fragmented, as it would be if it were taken apart as the interface's MTU says.
func TestWhole(t *testing.T) {
	for _, test := range []struct {
		name string
		ipv6 bool
		want int
	}{{"both families", true, 1200}, {"IPv4", false, 1216}} {
		t.Run(test.name, func(t *testing.T) {
			sa, sb := wired(t)
			for _, s := range []*space{sa, sb} {
				if !test.ipv6 {
					for _, name := range s.Links() {
						s.Sysctl("net/ipv6/conf/"+name+"/disable_ipv6", "1")
					}
				}
				s.Narrow(1280)
			}
			p := pair{newNode(t, sa, "a", addrsA), newNode(t, sb, "b", addrsB)}
			p.connect(plain)
			if got := p.a.link.largest(); got != test.want || p.a.Have().Device.MTU != 1280 {
				t.Errorf("packets of up to %d bytes are not fragmented, want %d, with an MTU of %d", got, test.want, p.a.Have().Device.MTU)
			}
			p.exchange("narrow")
			// Ip: of snmp, by the names in its first line.
			text, err := sa.Run("cat", "/proc/thread-self/net/snmp")
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(text, "\n")
			names, values := strings.Fields(lines[0]), strings.Fields(lines[1])
			made, _ := strconv.Atoi(values[slices.Index(names, "FragCreates")])
			packets := 2 * transfer / 1200
			t.Logf("%d fragments, of some %d packets", made, packets)
			if made > packets/2 {
				t.Errorf("%d fragments, of some %d packets", made, packets)
			}
		})
	}
}

// TestMTU has a new device take its MTU from the underlay.
func TestMTU(t *testing.T) {
	for _, test := range []struct{ underlay, option, want int }{
		{1500, 0, 1420}, {1280, 0, 1280}, {9000, 0, 8920}, {1492, 0, 1412}, {1500, 1300, 1300},
	} {
		s, _ := wired(t)
		s.Narrow(test.underlay)
		n := newNode(t, s, "a", addrsA, func(o *Options) { o.MTU = test.option })
		got := n.Have()
		if got.Device.MTU != test.want || got.Host.UnderlayMTU != test.underlay {
			t.Errorf("over %d bytes, with %d in Options, the MTU is %d, want %d; the underlay's is read as %d",
				test.underlay, test.option, got.Device.MTU, test.want, got.Host.UnderlayMTU)
		}
		if got.Host.Underlay != datapath.UnderlayShared || !got.Host.IPv4 || !got.Host.IPv6 {
			t.Errorf("host is %+v", got.Host)
		}
	}
}

// TestNoLoss sends a datagram every 2 ms while everything around its peer changes.
func TestNoLoss(t *testing.T) {
	p := newPair(t)
	a, b := p.a, p.b
	p.connect(plain)
	s := nettest.NewStream(t, a.space, b.space, "10.0.0.2")
	nobody := netip.MustParseAddrPort("127.0.0.1:9")
	const round = 2 * time.Second
	changes := func(f func(i int)) string {
		n := 0
		for begun := time.Now(); time.Since(begun) < round; n++ {
			f(n)
		}
		return fmt.Sprint(n, " changes")
	}
	peer := nettest.NewKey(t).Public()
	other := func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, byte(i), 0}), 24)
	}
	s.During("nothing", func() string { time.Sleep(time.Second); return "idle" })
	s.During("peers added and removed", func() string {
		return changes(func(i int) {
			q := prefixes.Must(other(i % 7))
			if i%2 == 0 {
				a.Do(datapath.PutPeer{Key: peer, Peer: datapath.Peer{Endpoint: nobody, Prefixes: q}},
					datapath.AddRoutes{Routes: []datapath.Route{{Prefix: q.At(0)}}})
			} else {
				q = prefixes.Must(other((i - 1) % 7))
				a.Do(datapath.RemoveRoutes{Prefixes: q}, datapath.RemovePeer{Key: peer, Prefixes: q})
			}
		})
	})
	s.During("prefixes put and dropped", func() string {
		return changes(func(i int) {
			q := prefixes.Must(other(i % 7))
			a.Do(datapath.PutPeer{Key: b.Public(), Peer: datapath.Peer{Prefixes: q}}, datapath.AddRoutes{Routes: []datapath.Route{{Prefix: q.At(0)}}},
				datapath.RemoveRoutes{Prefixes: q}, datapath.DropPrefixes{Key: b.Public(), Prefixes: q})
		})
	})
	s.During("prefixes moved between two peers", func() string {
		q := prefixes.Must(other(0))
		a.Do(datapath.PutPeer{Key: peer, Peer: datapath.Peer{Prefixes: q}}, datapath.AddRoutes{Routes: []datapath.Route{{Prefix: q.At(0)}}})
		return changes(func(i int) {
			a.Do(datapath.PutPeer{Key: []key.Public{b.Public(), peer}[i%2], Peer: datapath.Peer{Prefixes: q}})
		})
	})
	s.During("a wider prefix with and without a route", func() string {
		q := set("10.0.0.0/16")
		a.Do(datapath.PutPeer{Key: peer, Peer: datapath.Peer{Prefixes: q}})
		return changes(func(int) {
			a.Do(datapath.AddRoutes{Routes: []datapath.Route{{Prefix: q.At(0)}}}, datapath.RemoveRoutes{Prefixes: q})
		})
	})
	s.During("other addresses and sources", func() string {
		return changes(func(int) {
			a.Do(datapath.AddAddrs{Addrs: set("10.0.0.9", "fd00::9")}, datapath.AddRoutes{Routes: []datapath.Route{{Prefix: other(0), Source: netip.MustParseAddr("10.0.0.9")}}},
				datapath.AddRoutes{Routes: []datapath.Route{{Prefix: other(0)}}}, datapath.RemoveAddrs{Addrs: set("10.0.0.9", "fd00::9")})
		})
	})
	s.During("readings", func() string { return changes(func(int) { a.Have(); b.Have() }) })
}
