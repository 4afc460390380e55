package tun

import (
	"net/netip"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry/memory"
)

// TestMesh has two nodes of a mesh, whose devices others change. The mesh repairs them by itself.
func TestMesh(t *testing.T) {
	nettest.NeedProgram(t, "ip")
	sa, sb := wired(t)
	reg := memory.New()
	start := func(s *space, name, underlay string, addrs ...string) *node {
		d := s.tun(t)
		c := mesh.Config{Node: name, Registry: reg, Datapath: d, Key: nettest.NewKey(t), Endpoints: []mesh.Endpoint{mesh.MustEndpoint(underlay + ":0")}}
		for _, a := range addrs {
			c.Addresses = append(c.Addresses, netip.MustParseAddr(a))
		}
		m, err := mesh.New(c)
		if err != nil {
			t.Fatal(err)
		}
		nettest.Go(t, name, m.Run)
		if err := mesh.Ready(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		return &node{d, &nettest.Node{T: t, Name: name, Path: d}, s}
	}
	p := pair{start(sa, "a", nettest.Wire4A, "10.0.0.1", "fd00::1"), start(sb, "b", nettest.Wire4B, "10.0.0.2", "fd00::2")}
	repaired := func(what string) time.Duration {
		return nettest.Within(t, 10*time.Second, what, func() bool {
			s := p.a.Have()
			return s.Device.Exists() && s.Addrs == addrsA && len(s.Peers) == 1 && len(s.Routes) == 2
		})
	}
	repaired("the nodes know each other")
	p.works("at first")
	for _, test := range []struct {
		what string
		do   func()
	}{
		{"all peers removed", func() { outside(t, p.a.TUN, "replace_peers=true\n") }},
		{"addresses removed", func() { sa.IP("addr flush dev warren0") }},
		{"taken down", func() { sa.IP("link set warren0 down") }},
		{"deleted", func() { sa.IP("link del warren0") }},
	} {
		test.do()
		took := repaired(test.what)
		p.works(test.what)
		t.Logf("%s: repaired after %v", test.what, took.Round(time.Millisecond))
		if took > 3*time.Second {
			t.Errorf("%s: repaired after %v", test.what, took)
		}
	}
}
