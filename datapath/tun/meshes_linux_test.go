package tun

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/view"
)

// member is a node of a mesh.
type member struct {
	*TUN
	mesh.Mesh
	stop func() // ends the mesh and then the device; twice is harmless
}

// join has a node be a member of the mesh of a registry, until it is stopped or the test ends.
func join(t testing.TB, d *TUN, reg registry.Registry, name, underlay string, addrs ...string) member {
	t.Helper()
	return joinOver(t, d, d, reg, name, underlay, addrs...)
}

// joinOver is join with something between the mesh and the device.
func joinOver(t testing.TB, d *TUN, over datapath.Datapath, reg registry.Registry, name, underlay string, addrs ...string) member {
	t.Helper()
	c := mesh.Config{Node: name, Registry: reg, Datapath: over, Key: nettest.NewKey(t), Endpoints: []mesh.Endpoint{mesh.MustEndpoint(underlay + ":0")}, Audit: 2 * time.Second}
	for _, a := range addrs {
		c.Addresses = append(c.Addresses, netip.MustParseAddr(a))
	}
	m, err := mesh.New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := d.Close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	})
	t.Cleanup(stop)
	if err := mesh.Ready(t.Context(), m); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return member{d, m, stop}
}

// view returns what m has come to.
func (m member) view() view.View {
	v, _ := m.Mesh.Current()
	return v
}

// across is a pair of namespaces whose nodes are of a mesh.
func across(t testing.TB, a, b *space) pair {
	return pair{&node{Node: &nettest.Node{T: t}, space: a}, &node{Node: &nettest.Node{T: t}, space: b}}
}

// knows waits until m has as many peers, each with routes for its addresses.
func (m member) knows(t testing.TB, peers int) {
	t.Helper()
	nettest.Within(t, 10*time.Second, "the nodes know each other", func() bool {
		s, err := m.TUN.Read(t.Context())
		return err == nil && len(s.Peers) == peers && len(s.Routes) >= peers
	})
}

// TestTwoMeshes has two meshes in one process and one namespace, each with a node elsewhere:
//
//	 namespace a             namespace b
//	+----------------+      +------------+
//	| mesh0 of red  -+------+- red       |
//	| mesh1 of blue -+---+  +------------+
//	+----------------+   |  +------------+
//	                     +--+- blue      |
//	                        +------------+
//	                         namespace c
//
// They share nothing, so that the end of one costs the other no packet.
func TestTwoMeshes(t *testing.T) {
	sa, sb := wired(t)
	sc := newSpace(t)
	nettest.Join(nettest.End{Space: sa.Space, Name: "c", Addrs: []string{"198.51.100.1/24"}}, nettest.End{Space: sc.Space, Name: "a", Addrs: []string{"198.51.100.2/24"}})
	nettest.Reach(sa.Space, sc.Space, "198.51.100.2")
	dir := folder(t)
	red, blue := memory.New(), memory.New()
	open := func(name string) *TUN {
		return sa.tun(t, func(o *Options) { o.Interface, o.Socket = name, dir })
	}
	start := func() member { return join(t, open("mesh0"), red, "a", nettest.Wire4A, "10.0.0.1") }
	m0 := start()
	m1 := join(t, open("mesh1"), blue, "a", "198.51.100.1", "10.1.0.1")
	far0 := join(t, sb.tun(t), red, "b", nettest.Wire4B, "10.0.0.2")
	far1 := join(t, sc.tun(t), blue, "c", "198.51.100.2", "10.1.0.2")
	for _, m := range []member{m0, m1, far0, far1} {
		m.knows(t, 1)
	}
	s0, err0 := m0.TUN.Read(t.Context())
	s1, err1 := m1.TUN.Read(t.Context())
	if err0 != nil || err1 != nil {
		t.Fatal(err0, err1)
	}
	if s0.Device.ListenPort == s1.Device.ListenPort || s0.Addrs != set("10.0.0.1") || s1.Addrs != set("10.1.0.1") {
		t.Errorf("one is\n%+v\nthe other\n%+v", s0, s1)
	}
	for _, name := range []string{"mesh0", "mesh1"} {
		if answer, err := say(socketPath(dir, name), "get=1\n"); err != nil || strings.Count(answer, "public_key=") != 1 {
			t.Errorf("the socket of %s: %v", name, err)
		}
	}
	across(t, sa, sb).works("over the one mesh")
	stream := nettest.NewStream(t, sa, sc, "10.1.0.2")
	stream.During("the other mesh ends, and is back", func() string {
		const times = 5
		for range times {
			m0.stop()
			if links := sa.Links(); slices.Contains(links, "mesh0") || !slices.Contains(links, "mesh1") {
				t.Errorf("links are %v", links)
			}
			if _, err := say(socketPath(dir, "mesh0"), "get=1\n"); err == nil {
				t.Error("the socket of what was stopped answers")
			}
			m0 = start()
			m0.knows(t, 1)
			across(t, sa, sb).works("over the one mesh again")
		}
		return fmt.Sprint(times, " times")
	})
	now, err := m1.TUN.Read(t.Context())
	if err != nil || !now.Equal(s1) {
		t.Errorf("the other mesh was\n%+v\nis\n%+v, %v", s1, now, err)
	}
}

// TestMeshWithoutIPv6 has IPv6 disabled on the host of one node: IPv4 works, what is IPv6 is said, and it comes with
// IPv6.
func TestMeshWithoutIPv6(t *testing.T) {
	t.Parallel()
	sa, sb := wired(t)
	for _, of := range []string{"all", "default"} {
		sa.Sysctl("net/ipv6/conf/"+of+"/disable_ipv6", "1")
	}
	reg := memory.New()
	a := join(t, sa.tun(t), reg, "a", nettest.Wire4A, "10.0.0.1", "fd00::1")
	join(t, sb.tun(t), reg, "b", nettest.Wire4B, "10.0.0.2", "fd00::2").knows(t, 1)
	p := across(t, sa, sb)
	nettest.Within(t, 10*time.Second, "IPv4 has its route", func() bool {
		s, err := a.TUN.Read(t.Context())
		_, ok := s.Routes[netip.MustParsePrefix("10.0.0.2/32")]
		return err == nil && ok
	})
	p.works("without IPv6")
	failed := func() (said []string) {
		for c := range a.view().Find(view.OpFailed) {
			if strings.Contains(c.Message, "IPv6") {
				said = append(said, c.Subject)
			}
		}
		return said
	}
	nettest.Within(t, 10*time.Second, "both the address and the route are said to be lacking", func() bool {
		s := failed()
		return slices.ContainsFunc(s, func(s string) bool { return strings.Contains(s, "fd00::1") }) &&
			slices.ContainsFunc(s, func(s string) bool { return strings.Contains(s, "fd00::2") })
	})
	t.Logf("without IPv6: %v", failed())
	for _, of := range []string{"all", "default", "warren0"} {
		sa.Sysctl("net/ipv6/conf/"+of+"/disable_ipv6", "0")
	}
	took := nettest.Within(t, 10*time.Second, "IPv6 is there, and nothing is lacking", func() bool {
		s, err := a.TUN.Read(t.Context())
		return err == nil && s.Addrs == addrsA && len(s.Routes) == 2 && len(failed()) == 0
	})
	t.Logf("with IPv6: all is there after %v", took.Round(time.Millisecond))
	c, err := sa.Dial("tcp", "[fd00::2]:9")
	if err == nil {
		c.Close()
	} else if !strings.Contains(err.Error(), "refused") {
		t.Errorf("over IPv6: %v", err)
	}
}

// counting counts the repairs of routes that reach a device.
type counting struct {
	*TUN
	mu      sync.Mutex
	repairs int
}

func (c *counting) Apply(ctx context.Context, ops ...datapath.Op) error {
	for _, op := range ops {
		if _, ok := op.(datapath.AddRoutes); ok {
			c.mu.Lock()
			c.repairs++
			c.mu.Unlock()
		}
	}
	return c.TUN.Apply(ctx, ops...)
}

func (c *counting) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.repairs
}

// TestRouteDeletedAgain has another program delete a route, once and over and over: it is back within a second or so,
// is not raced for, and is there in the end.
func TestRouteDeletedAgain(t *testing.T) {
	t.Parallel()
	nettest.NeedProgram(t, "ip")
	s := newSpace(t)
	s.Out()
	reg := memory.New()
	d := &counting{TUN: s.tun(t)}
	m := joinOver(t, d.TUN, d, reg, "a", "192.0.2.9", "10.0.0.1")
	far := newSpace(t)
	far.Out()
	join(t, far.tun(t), reg, "b", "192.0.2.10", "10.0.0.2")
	m.knows(t, 1)
	there := func() bool {
		out, err := s.Run("ip", "route", "show", "10.0.0.2")
		return err == nil && strings.Contains(out, "proto 87")
	}
	remove := func() bool {
		_, err := s.Run("ip", "route", "del", "10.0.0.2", "dev", "warren0")
		return err == nil
	}
	if !remove() {
		t.Fatal("there was no route")
	}
	t.Logf("deleted once: back after %v", nettest.Within(t, 5*time.Second, "a route that was deleted once is back", there).Round(time.Millisecond))
	before, deleted, begun := d.count(), 0, time.Now()
	for time.Since(begun) < 4*time.Second {
		if remove() {
			deleted++
		}
		time.Sleep(20 * time.Millisecond)
	}
	repairs := d.count() - before
	t.Logf("deleted %d times in %v, repaired %d times", deleted, time.Since(begun).Round(time.Millisecond), repairs)
	if deleted < 2 || repairs > int(time.Since(begun)/time.Second)+2 {
		t.Errorf("deleted %d times in %v, repaired %d times", deleted, time.Since(begun).Round(time.Millisecond), repairs)
	}
	nettest.Within(t, 5*time.Second, "the route is there in the end", there)
}
