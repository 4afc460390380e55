package kernel

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/prefixes"
)

// machine is one with pods: a namespace on a network with others, a mesh in it, and a namespace for a pod
// behind a bridge of its own.
type machine struct {
	space, pod *space
	k          *Kernel
	mesh       mesh.Mesh
	n          int
}

func (h *machine) underlay() netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(h.n)}) }
func (h *machine) addr4() netip.Addr    { return netip.AddrFrom4([4]byte{10, 100, 0, byte(h.n)}) }
func (h *machine) addr6() netip.Addr    { return netip.MustParseAddr(fmt.Sprintf("fd64::%d", h.n)) }
func (h *machine) pods4() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(h.n)}), 24)
}
func (h *machine) pods6() netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("fdc8:%d::/64", h.n))
}

// The first address of a pod network is nobody's but the mesh's; the bridge has the next, the pod the one after.
func (h *machine) side4() netip.Addr   { return h.pods4().Addr() }
func (h *machine) side6() netip.Addr   { return h.pods6().Addr() }
func (h *machine) bridge4() netip.Addr { return h.side4().Next() }
func (h *machine) bridge6() netip.Addr { return h.side6().Next() }
func (h *machine) pod4() netip.Addr    { return h.bridge4().Next() }
func (h *machine) pod6() netip.Addr    { return h.bridge6().Next() }

// newHosts returns hosts on one network, whose meshes run and know each other.
func newHosts(t testing.TB, n int, sources Sources) []*machine {
	t.Helper()
	lan := newSpace(t)
	lan.Bridge("lan")
	reg := memory.New()
	hosts := make([]*machine, n)
	for i := range hosts {
		h := &machine{space: newSpace(t), pod: newSpace(t), n: i + 1}
		hosts[i] = h
		nettest.Join(nettest.End{Space: lan.Space, Name: fmt.Sprintf("port%d", h.n), Bridge: "lan"},
			nettest.End{Space: h.space.Space, Name: "eth0", Addrs: []string{h.underlay().String() + "/24"}})
		h.space.Sysctl("net/ipv4/ip_forward", "1")
		h.space.Sysctl("net/ipv6/conf/all/forwarding", "1")
		h.space.Bridge("cni0", h.bridge4().String()+"/24", h.bridge6().String()+"/64")
		nettest.Join(nettest.End{Space: h.space.Space, Name: "pod0", Bridge: "cni0"},
			nettest.End{Space: h.pod.Space, Name: "eth0", Addrs: []string{h.pod4().String() + "/24", h.pod6().String() + "/64"}})
		h.pod.Gateway("eth0", h.bridge4(), h.bridge6())
		h.k = h.space.kernel(t, func(o *Options) { o.Sources = sources })
		var err error
		h.mesh, err = mesh.New(mesh.Config{
			Node: fmt.Sprintf("host-%d", h.n), Registry: reg, Datapath: h.k,
			Addresses: []netip.Addr{h.addr4(), h.addr6()},
			Endpoints: []mesh.Endpoint{record.EndpointFrom(netip.AddrPortFrom(h.underlay(), 0))},
		})
		if err != nil {
			t.Fatal(err)
		}
		h.announce(true)
		nettest.Go(t, fmt.Sprintf("host %d", h.n), h.mesh.Run)
	}
	for _, h := range hosts {
		const each = 4 // two of the host itself, two of its pods
		t.Cleanup(func() {
			if v, _ := h.mesh.Current(); t.Failed() {
				s, err := h.k.Read(context.Background())
				t.Logf("host %d: conditions %v, routes %v, addresses %v, %v", h.n, v.Conditions, s.Routes, s.Addrs, err)
			}
		})
		nettest.Within(t, 30*time.Second, "all have routes to all", func() bool {
			s, err := h.k.Read(t.Context())
			return err == nil && len(s.Routes) == each*(n-1)
		})
	}
	return hosts
}

func (h *machine) announce(pods bool) {
	var a []prefixes.Announcement
	if pods {
		a = []prefixes.Announcement{{Prefix: h.pods4(), Source: h.side4()}, {Prefix: h.pods6(), Source: h.side6()}}
	}
	h.mesh.Prefixes().Announce("pods", a...)
}

// seen returns the address that a connection from one namespace to an address of another comes from, as
// the other sees it.
func seen(from, to *space, addr netip.Addr) (netip.Addr, error) {
	l, err := to.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		return netip.Addr{}, err
	}
	defer l.Close()
	came := make(chan netip.Addr, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			came <- netip.Addr{}
			return
		}
		came <- netip.MustParseAddrPort(c.RemoteAddr().String()).Addr()
		_, _ = io.Copy(c, c)
		c.Close()
	}()
	c, err := from.Dial("tcp", l.Addr().String())
	if err != nil {
		l.Close()
		<-came
		return netip.Addr{}, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Write([]byte{1}); err != nil {
		return netip.Addr{}, err
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return netip.Addr{}, err
	}
	return <-came, nil
}

// What pod networking needs: the pods of every host are reached from the others, hosts with the pod-side
// address and pods with their own; so are the hosts' own addresses; and the address of a pod network goes
// with it.
func TestPods(t *testing.T) {
	for _, sources := range []Sources{SourceHint, SourceLoopback} {
		t.Run(map[Sources]string{SourceHint: "Hint", SourceLoopback: "Loopback"}[sources], func(t *testing.T) {
			t.Parallel()
			testPods(t, sources)
		})
	}
}

func testPods(t *testing.T, sources Sources) {
	hosts := newHosts(t, 3, sources)
	n := 0
	for _, from := range hosts {
		for _, to := range hosts {
			if from == to {
				continue
			}
			for _, c := range []struct {
				what     string
				from, to *space
				at       netip.Addr
				want     []netip.Addr
			}{
				{"host to pod, IPv4", from.space, to.pod, to.pod4(), []netip.Addr{from.side4(), from.addr4()}},
				{"host to pod, IPv6", from.space, to.pod, to.pod6(), []netip.Addr{from.side6(), from.addr6()}},
				{"pod to pod, IPv4", from.pod, to.pod, to.pod4(), []netip.Addr{from.pod4()}},
				{"pod to pod, IPv6", from.pod, to.pod, to.pod6(), []netip.Addr{from.pod6()}},
				{"host to host, IPv4", from.space, to.space, to.addr4(), []netip.Addr{from.addr4(), from.side4()}},
				{"host to host, IPv6", from.space, to.space, to.addr6(), []netip.Addr{from.addr6(), from.side6()}},
				{"pod to host, IPv4", from.pod, to.space, to.addr4(), []netip.Addr{from.pod4()}},
			} {
				got, err := seen(c.from, c.to, c.at)
				if err != nil {
					t.Fatalf("%s, %d to %d: %v", c.what, from.n, to.n, err)
				}
				ok := false
				for _, w := range c.want {
					ok = ok || got == w
				}
				if !ok {
					t.Errorf("%s, %d to %d: it came from %v, want one of %v", c.what, from.n, to.n, got, c.want)
				}
				if n++; from.n == 1 && to.n == 2 {
					t.Logf("%s: %v came from %v", c.what, c.at, got)
				}
			}
		}
	}
	t.Logf("%d connections", n)

	// Host 1 loses its pods: the address is gone, others have no route, and the rest goes on.
	gone := hosts[0]
	has := func(s *space, a netip.Addr) (has bool) {
		s.Must(func() error {
			as, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
			for _, x := range as {
				has = has || x.IP.Equal(a.AsSlice())
			}
			return err
		})
		return has
	}
	for _, a := range []netip.Addr{gone.side4(), gone.side6()} {
		if !has(gone.space, a) {
			t.Errorf("%v is not there", a)
		}
	}
	gone.announce(false)
	nettest.Within(t, 10*time.Second, "the addresses of the pod networks are gone", func() bool {
		return !has(gone.space, gone.side4()) && !has(gone.space, gone.side6())
	})
	for _, h := range hosts[1:] {
		nettest.Within(t, 10*time.Second, "the others have no route", func() bool {
			s, err := h.k.Read(t.Context())
			_, four := s.Routes[gone.pods4()]
			_, six := s.Routes[gone.pods6()]
			return err == nil && !four && !six
		})
		if got, err := seen(h.space, gone.space, gone.addr4()); err != nil {
			t.Errorf("the host itself: %v, %v", got, err)
		}
	}
	gone.announce(true)
	nettest.Within(t, 10*time.Second, "the pods are back", func() bool {
		got, err := seen(gone.space, hosts[1].pod, hosts[1].pod4())
		return err == nil && (got == gone.side4() || got == gone.addr4())
	})
}
