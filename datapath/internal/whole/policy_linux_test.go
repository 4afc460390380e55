package whole

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// world is two hosts that reach each other by way of a router, and a third one that only b is connected to:
//
//	a 198.18.0.2 ── .1 router .1 ── 198.18.1.2 b 203.0.113.1 ── 203.0.113.2 w
//	  2001:db8:a::2                2001:db8:b::2   2001:db8:c::1   2001:db8:c::2
type world struct{ a, b, w, router *nettest.Space }

func newWorld(t *testing.T) world {
	t.Helper()
	nettest.NeedProgram(t, "ip")
	x := world{nettest.NewSpace(t), nettest.NewSpace(t), nettest.NewSpace(t), nettest.NewSpace(t)}
	nettest.Join(nettest.End{Space: x.a, Name: "eth0", Addrs: []string{"198.18.0.2/24", "2001:db8:a::2/64"}}, nettest.End{Space: x.router, Name: "ra", Addrs: []string{"198.18.0.1/24", "2001:db8:a::1/64"}})
	nettest.Join(nettest.End{Space: x.b, Name: "eth0", Addrs: []string{"198.18.1.2/24", "2001:db8:b::2/64"}}, nettest.End{Space: x.router, Name: "rb", Addrs: []string{"198.18.1.1/24", "2001:db8:b::1/64"}})
	nettest.Join(nettest.End{Space: x.b, Name: "eth1", Addrs: []string{"203.0.113.1/24", "2001:db8:c::1/64"}}, nettest.End{Space: x.w, Name: "eth0", Addrs: []string{"203.0.113.2/24", "2001:db8:c::2/64"}})
	x.router.Sysctl("net/ipv4/ip_forward", "1")
	x.router.Sysctl("net/ipv6/conf/all/forwarding", "1")
	for _, s := range []struct {
		s    *nettest.Space
		four string
		six  string
	}{{x.a, "198.18.0.1", "2001:db8:a::1"}, {x.b, "198.18.1.1", "2001:db8:b::1"}} {
		s.s.IP("route add default via " + s.four)
		s.s.IP("route add default via " + s.six)
	}
	nettest.Reach(x.a, x.b, "198.18.1.2")
	nettest.Reach(x.a, x.b, "2001:db8:b::2")
	nettest.Reach(x.b, x.w, "203.0.113.2")
	nettest.Reach(x.b, x.w, "2001:db8:c::2")
	return x
}

// wide is what b announces beside its addresses: default routes, prefixes with the endpoints of both inside, and
// another one.
var wide = []string{"0.0.0.0/0", "::/0", "198.18.0.0/15", "2001:db8::/32", "10.90.0.0/16"}

// counts are how many packets a namespace sent over its wires, and bytes the device of a mesh to its peers.
func counts(t *testing.T, s *nettest.Space, m *member) (packets, bytes uint64) {
	t.Helper()
	s.Must(func() error {
		ls, err := netlink.LinkList()
		for _, l := range ls {
			if l.Type() == "veth" {
				packets += l.Attrs().Statistics.TxPackets
			}
		}
		return err
	})
	st, err := m.Path.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range st.Stats {
		bytes += p.Sent
	}
	return packets, bytes
}

// idle checks that nothing goes round and round.
func idle(t *testing.T, s *nettest.Space, m *member) {
	t.Helper()
	p, b := counts(t, s, m)
	time.Sleep(time.Second)
	q, c := counts(t, s, m)
	t.Logf("idle for a second: %d packets on the wires, %d bytes to peers", q-p, c-b)
	if q-p > 10 || c-b > 1000 {
		t.Errorf("while idle, %d packets were sent over the wires and %d bytes to peers in a second", q-p, c-b)
	}
}

// TestPolicy has everything that a does not know better go through b, its packets to b included were they not
// marked.
func TestPolicy(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		x := newWorld(t)
		reg := memory.New()
		b := join(t, reg, "b", d.datapath(t, x.b, options{Forward: true, SNAT: prefixes.MustParse("203.0.113.0/24", "2001:db8:c::/64")}),
			[]string{"198.18.1.2:0", "[2001:db8:b::2]:0"}, []string{"10.80.0.2", "fd80::2"}, wide)
		guard := prefixes.MustParse("0.0.0.0/0", "::/0")
		o := options{Policy: true, Guard: guard}
		path := d.datapath(t, x.a, o)
		a := join(t, reg, "a", path, []string{"198.18.0.2:0"}, []string{"10.80.0.1", "fd80::1"}, nil)
		a.knows(t, "b", 7)
		b.knows(t, "a", 2)
		if got := conditions(a.view(t, "", func(mesh.View) bool { return true }), view.EndpointLoops); got != "" {
			t.Error(got)
		}
		for _, to := range []string{"10.80.0.2", "fd80::2"} {
			nettest.Exchange(t, "to b at "+to, size(), x.b, x.a, to)
		}
		for _, to := range []string{"203.0.113.2", "2001:db8:c::2"} {
			nettest.Exchange(t, "through b to "+to, size(), x.w, x.a, to)
		}
		nettest.Exchange(t, "back", size(), x.a, x.b, "10.80.0.1")
		for _, local := range []string{"198.18.0.1", "2001:db8:a::1"} {
			nettest.Reach(x.a, x.router, local) // not by way of b, which would not send it back
		}
		for to, dev := range map[string]string{"198.18.1.2": iface, "9.9.9.9": iface, "198.18.0.1": "eth0", "2001:db8:b::2": iface, "2001:db8:a::7": "eth0"} {
			if out, err := x.a.Run("ip", "route", "get", to); err != nil || !strings.Contains(out, " dev "+dev+" ") {
				t.Errorf("to %s: %s, %v", to, out, err)
			}
		}
		idle(t, x.a, a)
		if v := a.view(t, "no problem", func(v mesh.View) bool { return conditions(v, view.HostProblem) == "" }); v.Self.Datapath != d.name {
			t.Errorf("the datapath is %q", v.Self.Datapath)
		}

		// The mark taken away: the packets would go into the tunnel themselves.
		if d.name == "kernel" {
			if _, err := x.a.Run("wg", "set", iface, "fwmark", "0"); err != nil {
				t.Fatal(err)
			}
			nettest.Within(t, 10*time.Second, "the mark is back", func() bool {
				out, err := x.a.Run("wg", "show", iface, "fwmark")
				return err == nil && strings.TrimSpace(out) == "0x50"
			})
			nettest.Exchange(t, "marked again", size(), x.b, x.a, "10.80.0.2")
			idle(t, x.a, a)
		}
	})
}

// TestMainRefuses has the same mesh without policy routing: what would loop is refused, with the reason and the way
// out, and all else works.
func TestMainRefuses(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		x := newWorld(t)
		reg := memory.New()
		b := join(t, reg, "b", d.datapath(t, x.b, options{}), []string{"198.18.1.2:0"}, []string{"10.80.0.2", "fd80::2"}, wide)
		a := join(t, reg, "a", d.datapath(t, x.a, options{}), []string{"198.18.0.2:0"}, []string{"10.80.0.1", "fd80::1"}, nil)
		b.knows(t, "a", 2)
		v := a.view(t, "what loops is refused", func(v mesh.View) bool { return strings.Count(conditions(v, view.EndpointLoops), "\n") >= 1 })
		said := conditions(v, view.EndpointLoops)
		for _, want := range []string{"0.0.0.0/0", "198.18.0.0/15", "198.18.1.2", "marks its packets"} {
			if !strings.Contains(said, want) {
				t.Errorf("nothing of %q in %s", want, said)
			}
		}
		nettest.Exchange(t, "to b", size(), x.b, x.a, "10.80.0.2")
		if out, err := x.a.Run("ip", "route", "get", "10.90.1.1"); err != nil || !strings.Contains(out, " dev "+iface+" ") {
			t.Errorf("the prefix that is none of these: %s, %v", out, err)
		}
		if out, err := x.a.Run("ip", "route", "get", "198.18.1.2"); err != nil || !strings.Contains(out, " dev eth0 ") {
			t.Errorf("to b's endpoint: %s, %v", out, err)
		}
		idle(t, x.a, a)
	})
}

// TestRulesFlushed has another program remove our rules every second, under a stream of datagrams that have no other way.
func TestRulesFlushed(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		x := newWorld(t)
		reg := memory.New()
		b := join(t, reg, "b", d.datapath(t, x.b, options{}), []string{"198.18.1.2:0"}, []string{"10.80.0.2"}, nil)
		a := join(t, reg, "a", d.datapath(t, x.a, options{Policy: true}), []string{"198.18.0.2:0"}, []string{"10.80.0.1"}, nil)
		a.knows(t, "b", 1)
		b.knows(t, "a", 1)
		ours := func() (rs []netlink.Rule) {
			x.a.Must(func() error {
				all, err := netlink.RuleList(unix.AF_INET)
				for _, r := range all {
					if r.Protocol == 87 {
						rs = append(rs, r)
					}
				}
				return err
			})
			return rs
		}
		if len(ours()) != 3 {
			t.Fatalf("the rules are %v", ours())
		}
		s := nettest.NewStream(t, x.a, x.b, "10.80.0.2")
		s.During("before", func() string { time.Sleep(200 * time.Millisecond); return "idle" })
		var windows []time.Duration
		var away time.Duration
		lost, _ := s.Loses("flushed", func() string {
			for range 4 {
				begun := time.Now()
				for _, r := range ours() {
					x.a.Must(func() error { return netlink.RuleDel(&r) })
				}
				took := nettest.Within(t, 10*time.Second, "the rules are back", func() bool { return len(ours()) == 3 })
				windows = append(windows, took.Round(time.Millisecond))
				away += time.Since(begun)
				if took > 2500*time.Millisecond {
					t.Errorf("the rules were gone for %v", took)
				}
				time.Sleep(time.Until(begun.Add(time.Second)))
			}
			return fmt.Sprintf("4 times, gone for %v", windows)
		})
		// A datagram each 2 ms, and one on the way at either end of a window.
		if most := uint64(away/(2*time.Millisecond)) + 8; lost > most {
			t.Errorf("%d datagrams were lost, and the rules were gone for %v", lost, away)
		}
		s.During("after", func() string { time.Sleep(300 * time.Millisecond); return "idle" })
	})
}

// TestGuard ends the process's device, and what is guarded does not leave by another way, until it is cleaned up.
func TestGuard(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		x := newWorld(t)
		o := options{Policy: true, Guard: prefixes.MustParse("203.0.113.0/24", "2001:db8:c::/64")}
		before := state(t, x.a)
		way := func(to string) string {
			out, err := x.a.Run("ip", "route", "get", to)
			if err != nil {
				return "unreachable"
			}
			_, dev, _ := strings.Cut(out, " dev ")
			dev, _, _ = strings.Cut(dev, " ")
			return dev
		}
		path := d.datapath(t, x.a, o)
		n := nettest.NewNode(t, "a", path, prefixes.MustParse("10.80.0.1"))
		for _, to := range []string{"203.0.113.2", "2001:db8:c::2"} {
			if got := way(to); got != "unreachable" {
				t.Errorf("without a route, to %s by %s", to, got)
			}
		}
		n.Want.Peers[nettest.NewKey(t).Public()] = datapath.Peer{Prefixes: o.Guard}
		n.Want.Routes = routesOf("203.0.113.0/24", "2001:db8:c::/64")
		n.Sync()
		for _, to := range []string{"203.0.113.2", "2001:db8:c::2"} {
			if got := way(to); got != iface {
				t.Errorf("with a route, to %s by %s", to, got)
			}
		}
		if err := path.Close(); err != nil {
			t.Fatal(err)
		}
		want := "unreachable"
		if d.name == "kernel" {
			want = iface // which goes on
		}
		for _, to := range []string{"203.0.113.2", "2001:db8:c::2"} {
			if got := way(to); got != want {
				t.Errorf("after the end, to %s by %s, want %s", to, got, want)
			}
		}
		if err := d.cleanup(x.a, o); err != nil {
			t.Fatal(err)
		}
		if after := state(t, x.a); after != before {
			t.Errorf("had\n%s\nhas\n%s", before, after)
		}
	})
}

// TestTwoMeshes has two meshes by policy on one host, that share nothing but the mark: each other's packets stay out of
// both tunnels, and the end of one costs the other nothing.
func TestTwoMeshes(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		x := newWorld(t)
		open := func(s *nettest.Space, name string, reg registry.Registry, o options) *member {
			o.Policy = true
			addr, at := fmt.Sprintf("10.%d.0.1", o.Protocol), "198.18.0.2:0"
			var announce []string
			if s == x.b {
				addr, at, announce = fmt.Sprintf("10.%d.0.2", o.Protocol), "198.18.1.2:0", []string{"198.18.0.0/15"}
			}
			return join(t, reg, name, d.datapath(t, s, o), []string{at}, []string{addr}, announce)
		}
		first, second := memory.New(), memory.New()
		oneOptions, twoOptions := options{Interface: "one", Protocol: 88, Table: 9001}, options{Interface: "two", Protocol: 89, Table: 9002}
		open(x.b, "b", first, oneOptions)
		open(x.b, "b", second, twoOptions)
		one, two := open(x.a, "a", first, oneOptions), open(x.a, "a", second, twoOptions)
		one.knows(t, "b", 2)
		two.knows(t, "b", 2)
		nettest.Exchange(t, "the first", size(), x.b, x.a, "10.88.0.2")
		nettest.Exchange(t, "the second", size(), x.b, x.a, "10.89.0.2")
		idle(t, x.a, one)
		s := nettest.NewStream(t, x.a, x.b, "10.89.0.2")
		s.During("the first leaves", func() string {
			if err := one.Leave(t.Context()); err != nil {
				t.Error(err)
			}
			return "left"
		})
		nettest.Exchange(t, "the second, alone", size(), x.b, x.a, "10.89.0.2")
		if out, _ := x.a.Run("ip", "rule"); strings.Contains(out, "lookup 9001") || strings.Count(out, "lookup 9002") != 2 {
			t.Errorf("the rules are %s", out)
		}
	})
}

// The operator does what the condition says, and it is over: the whole way through a mesh.
func TestForeignTable(t *testing.T) {
	needTUN(t)
	nettest.NeedProgram(t, "nft")
	x := newWorld(t)
	x.a.Sysctl("net/ipv4/ip_forward", "1")
	if _, err := x.a.Run("nft", "add", "table", "inet", "warren-"+iface); err != nil {
		t.Fatal(err)
	}
	a := join(t, memory.New(), "a", aTUN.datapath(t, x.a, options{}), []string{"198.18.0.2:0"}, []string{"10.80.0.1"}, nil)
	a.view(t, "it is said", func(v mesh.View) bool { return strings.Contains(conditions(v, view.HostProblem), "nft delete table") })
	if _, err := x.a.Run("nft", "delete", "table", "inet", "warren-"+iface); err != nil {
		t.Fatal(err)
	}
	a.view(t, "it is over", func(v mesh.View) bool { return conditions(v, view.HostProblem) == "" })
}
