package meshservice_test

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	devmem "github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/roles"
	"github.com/warren-mesh/warren/roles/meshservice"
	"github.com/warren-mesh/warren/roles/part"
	"github.com/warren-mesh/warren/roles/podnetwork"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newMesh(t *testing.T, reg *memory.Registry, network *devmem.Network, name, addr string, more func(*mesh.Config)) mesh.Mesh {
	t.Helper()
	at := netip.MustParseAddr(addr)
	c := mesh.Config{
		Node: name, Registry: reg, Datapath: devmem.New(devmem.Options{Network: network, Addrs: []netip.Addr{at}}),
		Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 80, 0, at.As4()[3]})}, Endpoints: []mesh.Endpoint{{Addr: at}},
	}
	if more != nil {
		more(&c)
	}
	m, err := mesh.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// A node that is started again announces what its roles announce from its first record on, and loses it by no stop: a
// peer sees no gap.
func TestNoGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg, network := memory.New(), devmem.NewNetwork()
		prefix := netip.MustParsePrefix("10.244.1.0/24")
		peer := newMesh(t, reg, network, "peer", "192.0.2.2", nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		go func() { ended <- peer.Run(ctx) }()
		var seen atomic.Bool
		go func() {
			for v := range mesh.Watch(ctx, peer) {
				p, _ := v.Peer("node")
				if has := p.Prefixes.Has(prefix); seen.Load() && !has {
					t.Errorf("the peer has no way to the pods: %+v", v)
				} else {
					seen.Store(has)
				}
			}
			ended <- nil
		}()
		dir := t.TempDir()
		for range 3 {
			m := newMesh(t, reg, network, "node", "192.0.2.1", func(c *mesh.Config) { c.StateDir = dir })
			manager, err := roles.New(roles.Config{
				Roles: []roles.Role{podnetwork.New(podnetwork.Value(prefix))}, Assigned: roles.Static(podnetwork.Name),
				Services: []part.Part{meshservice.New(m)}, Mesh: m,
			})
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			over := make(chan error, 1)
			go func() { over <- manager.Run(ctx) }()
			time.Sleep(30 * time.Second)
			if v, _ := manager.Current(); !v.Settled() || len(v.Conditions) > 0 {
				t.Errorf("%+v", v)
			}
			if !seen.Load() {
				t.Error("the peer has no way to the pods")
			}
			stop()
			if err := <-over; err != nil {
				t.Error(err)
			}
			time.Sleep(10 * time.Second)
		}
		cancel()
		if err := errors.Join(<-ended, <-ended); err != nil {
			t.Error(err)
		}
	})
}

// Leaving the mesh ends the program; a state folder that another has does, too.
func TestFinal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reg, network, dir := memory.New(), devmem.NewNetwork(), t.TempDir()
		run := func(name string) (mesh.Mesh, chan error) {
			m := newMesh(t, reg, network, "node", "192.0.2.1", func(c *mesh.Config) { c.StateDir = dir })
			manager, err := roles.New(roles.Config{Assigned: roles.Static(), Services: []part.Part{meshservice.New(m)}, Mesh: m})
			if err != nil {
				t.Fatal(err)
			}
			over := make(chan error, 1)
			go func() { over <- manager.Run(t.Context()) }()
			time.Sleep(10 * time.Second)
			return m, over
		}
		m, over := run("first")
		_, second := run("second")
		if err := <-second; !errors.Is(err, mesh.ErrStateInUse) || !strings.HasPrefix(err.Error(), "mesh: ") {
			t.Errorf("a folder in use: %v", err)
		}
		if err := m.Leave(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-over; !errors.Is(err, mesh.ErrLeft) {
			t.Errorf("it left: %v", err)
		}
	})
}
