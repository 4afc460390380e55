package tun

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry/memory"
)

// TestMesh has two nodes of a mesh, whose devices others change. The mesh repairs them by itself.
func TestMesh(t *testing.T) {
	needProgram(t, "ip")
	sa, sb := newSpace(t), newSpace(t)
	wire(sa, sb, wire4a+"/24", wire4b+"/24", wire6a+"/64", wire6b+"/64")
	reg := memory.New()
	start := func(s *space, node, underlay string, addrs ...string) *TUN {
		d := s.tun(t)
		c := mesh.Config{Node: node, Registry: reg, Datapath: d, Key: newKey(t), Endpoints: []mesh.Endpoint{mesh.MustEndpoint(underlay + ":0")}}
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
		t.Cleanup(func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
		if err := mesh.Ready(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		return d
	}
	p := pair{a: &node{t: t, space: sa}, b: &node{t: t, space: sb}}
	p.a.TUN = start(sa, "a", wire4a, "10.0.0.1", "fd00::1")
	p.b.TUN = start(sb, "b", wire4b, "10.0.0.2", "fd00::2")
	repaired := func(what string) time.Duration {
		return within(t, 10*time.Second, what, func() bool {
			s := p.a.read()
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
		{"addresses removed", func() { sa.ip("addr flush dev warren0") }},
		{"taken down", func() { sa.ip("link set warren0 down") }},
		{"deleted", func() { sa.ip("link del warren0") }},
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
