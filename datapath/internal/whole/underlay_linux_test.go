package whole

import (
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/tun"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/prefixes"
)

// needTUN skips what only a TUN can do in a guest of vmrun, which has none.
func needTUN(t *testing.T) {
	t.Helper()
	if nettest.InVM() {
		t.Skip("tested where there is no WireGuard")
	}
}

// TestUnderlayBelowAMesh has the sockets in a namespace whose host is in a mesh itself, with a default route through
// it. What its device is called bears on nothing, and the mark decides which way packets go.
func TestUnderlayBelowAMesh(t *testing.T) {
	needTUN(t)
	newTUN := func(t *testing.T, o tun.Options) datapath.Datapath {
		o.Socket, o.Logger = tun.NoSocket, nettest.Logger()
		d, err := tun.New(o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		return d
	}
	x := newWorld(t)
	host := nettest.NewNode(t, "host", newTUN(t, tun.Options{Namespace: x.a.Path, Routing: tun.RoutingPolicy}), prefixes.MustParse("10.80.0.1", "fd80::1"))
	host.Peer(nettest.NewKey(t).Public(), datapath.Peer{Prefixes: prefixes.MustParse("0.0.0.0/0", "::/0")})
	host.Sync()
	for _, c := range []struct {
		name  string
		o     tun.Options
		mark  uint32
		under int
		mtu   int
	}{
		{"marked as all are, with the same interface name", tun.Options{}, 0, 1500, 1420},
		{"marked by policy", tun.Options{Interface: "pod0", Routing: tun.RoutingPolicy}, 0, 1500, 1420},
		{"marked by its options", tun.Options{Interface: "pod0", Routing: tun.RoutingPolicy, Mark: 0x77}, 0, 1420, 1340},
		{"marked as asked for", tun.Options{}, 0x150, 1500, 1420},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.o.Namespace, c.o.UnderlayNamespace = nettest.NewSpace(t).Path, x.a.Path
			pod := nettest.NewNode(t, "pod", newTUN(t, c.o), prefixes.MustParse("10.80.0.9"))
			pod.Want.Device.Mark = c.mark
			pod.Sync()
			is := func(what string, under, mtu int) {
				t.Helper()
				if st := pod.Have(); st.Host.UnderlayMTU != under || st.Device.MTU != mtu || len(st.Problems) > 0 {
					t.Errorf("%s: the underlay is said to carry %d, want %d; the MTU is %d, want %d; problems %v", what, st.Host.UnderlayMTU, under, st.Device.MTU, mtu, st.Problems)
				}
			}
			is("new", c.under, c.mtu)
			if c.mark == 0 && c.o.Routing == tun.RoutingMain {
				pod.Want.Device.Mark = 0x100
				pod.Sync()
				is("with another mark", 1420, 1340)
			}
		})
	}
}

// TestUnderlayOfPeersElsewhere has a peer that is reached, from the namespace of the sockets, by a narrow link.
func TestUnderlayOfPeersElsewhere(t *testing.T) {
	needTUN(t)
	x := newWorld(t)
	x.b.IP("link set eth1 mtu 1400")
	o := tunOptions(nettest.NewSpace(t), options{})
	o.UnderlayNamespace = x.b.Path
	d, err := tun.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	n := nettest.NewNode(t, "n", d, prefixes.MustParse("10.80.0.9"))
	n.Peer(nettest.NewKey(t).Public(), datapath.Peer{Endpoint: n.At("203.0.113.2"), Prefixes: prefixes.MustParse("10.80.0.1")})
	n.Sync()
	if st := n.Have(); len(st.Problems) != 1 || !strings.Contains(st.Problems[0].Message, "by eth1, carries 1400") {
		t.Errorf("MTU %d, problems %+v", st.Device.MTU, st.Problems)
	}
}

// TestProblemsWithoutDevice has the host's problems said where there is no device, as well.
func TestProblemsWithoutDevice(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		x := newWorld(t)
		n := nettest.NewNode(t, "a", d.datapath(t, x.a, options{Policy: true, Guard: prefixes.MustParse("203.0.113.0/24")}), prefixes.MustParse("10.80.0.1"))
		n.Sync()
		x.a.IP("link del " + iface) // by somebody else
		for range 5 {
			_, _ = x.a.Run("ip", "rule", "flush", "protocol", "87")
			nettest.Within(t, 10*time.Second, "the rules are back", func() bool {
				out, err := x.a.Run("ip", "rule")
				return err == nil && strings.Contains(out, "8787")
			})
		}
		st, err := n.Path.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if st.Device.Exists() || len(st.Problems) == 0 {
			t.Errorf("another program flushes the rules of the guard again and again, and a reading without a device says nothing: %+v", st)
		}
	})
}

// TestLocalNetworkByRoute has a host that has its address by DHCPv6 (/128), and its network by a router's advertisement:
// it keeps that network whatever a peer announces.
func TestLocalNetworkByRoute(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		x := newWorld(t)
		x.a.IP("-6 addr del 2001:db8:a::2/64 dev eth0")
		x.a.IP("-6 addr add 2001:db8:a::2/128 dev eth0 nodad")
		x.a.IP("-6 route add 2001:db8:a::/64 dev eth0 proto ra metric 1024")
		_, _ = x.a.Run("ip", "-6", "route", "add", "default", "via", "2001:db8:a::1")
		reg := memory.New()
		join(t, reg, "b", d.datapath(t, x.b, options{}), []string{"198.18.1.2:0"}, []string{"fd80::2"}, []string{"2001:db8:a::/64", "2001:db8:d::/64"})
		a := join(t, reg, "a", d.datapath(t, x.a, options{}), []string{"198.18.0.2:0"}, []string{"fd80::1"}, nil)
		goes := func(to, dev string) func() bool {
			return func() bool {
				out, err := x.a.Run("ip", "route", "get", to)
				return err == nil && strings.Contains(out, " dev "+dev+" ")
			}
		}
		a.view(t, "b is known", func(v mesh.View) bool { p, ok := v.Peer("b"); return ok && p.Prefixes.Len() > 0 })
		nettest.Within(t, 10*time.Second, "what b announces is routed", goes("2001:db8:d::7", iface))
		if !goes("2001:db8:a::7", "eth0")() {
			t.Error("the local network is lost to the mesh")
		}
		// It comes to be local while it is routed into the device.
		x.a.IP("-6 route add 2001:db8:d::/64 dev eth0 proto ra metric 1024")
		nettest.Within(t, 10*time.Second, "a network that became local", goes("2001:db8:d::7", "eth0"))
		x.a.IP("-6 route del 2001:db8:d::/64 dev eth0")
		nettest.Within(t, 10*time.Second, "a network that is local no more", goes("2001:db8:d::7", iface))
	})
}

// TestOptionRaised has an option for the MTU raised between two starts of a process.
func TestOptionRaised(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		x := newWorld(t)
		first := d.datapath(t, x.a, options{MTU: 1300})
		n := nettest.NewNode(t, "a", first, prefixes.MustParse("10.80.0.1"))
		n.Sync()
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct{ option, want int }{{1400, 1400}, {1350, 1350}} {
			next := d.datapath(t, x.a, options{MTU: c.option})
			n.Path = next
			if d.name == "kernel" { // the device is there already
				if st := n.Have(); st.Device.MTU != c.want {
					t.Errorf("adopted with an option of %d, the MTU is %d", c.option, st.Device.MTU)
				}
			}
			n.Sync()
			if st := n.Have(); st.Device.MTU != c.want {
				t.Errorf("with an option of %d, the MTU is %d", c.option, st.Device.MTU)
			}
			if err := next.Close(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
