package whole

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/datapath/tun"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// options are what the drivers have in common. The zero Interface is warren0.
type options struct {
	Interface       string
	Table, Protocol int
	Policy          bool
	Guard           prefixes.Set
	SNAT            prefixes.Set
	Forward         bool
	MTU             int
}

// driver makes datapaths of one kind.
type driver struct {
	name    string
	open    func(s *nettest.Space, o options) (datapath.Datapath, error)
	cleanup func(s *nettest.Space, o options) error
}

const iface = "warren0"

func tunOptions(s *nettest.Space, o options) tun.Options {
	t := tun.Options{Interface: cmp.Or(o.Interface, iface), Table: o.Table, Protocol: o.Protocol, Namespace: s.Path, Socket: tun.NoSocket, Guard: o.Guard, SNAT: o.SNAT, Forward: o.Forward, MTU: o.MTU, Logger: nettest.Logger()}
	if o.Policy {
		t.Routing = tun.RoutingPolicy
	}
	return t
}

func kernelOptions(s *nettest.Space, o options) kernel.Options {
	k := kernel.Options{Interface: cmp.Or(o.Interface, iface), Table: o.Table, Protocol: o.Protocol, Namespace: s.Path, Guard: o.Guard, SNAT: o.SNAT, Forward: o.Forward, MTU: o.MTU, Logger: nettest.Logger()}
	if o.Policy {
		k.Routing = kernel.RoutingPolicy
	}
	return k
}

var (
	aTUN = driver{
		"tun",
		func(s *nettest.Space, o options) (datapath.Datapath, error) { return tun.New(tunOptions(s, o)) },
		func(s *nettest.Space, o options) error { return tun.Cleanup(context.Background(), tunOptions(s, o)) },
	}
	aKernel = driver{
		"kernel",
		func(s *nettest.Space, o options) (datapath.Datapath, error) { return kernel.New(kernelOptions(s, o)) },
		func(s *nettest.Space, o options) error {
			return kernel.Cleanup(context.Background(), kernelOptions(s, o))
		},
	}
)

// each runs a test with each driver that works here. In a guest of vmrun, that is the kernel's: what is about a TUN
// needs none.
func each(t *testing.T, test func(t *testing.T, d driver)) {
	for _, d := range []driver{aTUN, aKernel} {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			switch k, err := kernel.New(kernel.Options{Interface: nettest.UniqueName(t), Namespace: nettest.NewSpace(t).Path}); {
			case err == nil:
				k.Close()
				if d.name == "tun" {
					t.Skip("tested where there is no WireGuard")
				}
			case d.name == "tun":
			case errors.Is(err, errors.ErrUnsupported) && !nettest.InVM():
				t.Skipf("tested under vmrun: %v", err)
			default:
				t.Fatal(err)
			}
			test(t, d)
		})
	}
}

// datapath makes one that ends with the test.
func (d driver) datapath(t *testing.T, s *nettest.Space, o options) datapath.Datapath {
	t.Helper()
	p, err := d.open(s, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// member is a node of a mesh.
type member struct {
	mesh.Mesh
	Path datapath.Datapath
}

// join has a node run in a mesh until the test ends.
func join(t *testing.T, reg registry.Registry, name string, d datapath.Datapath, endpoints, addrs, announce []string) *member {
	t.Helper()
	c := mesh.Config{Node: name, Registry: reg, Datapath: d, Key: nettest.NewKey(t), Logger: nettest.Logger(),
		Accept: func(string, netip.Prefix) bool { return true }}
	for _, e := range endpoints {
		c.Endpoints = append(c.Endpoints, mesh.MustEndpoint(e))
	}
	for _, a := range addrs {
		c.Addresses = append(c.Addresses, netip.MustParseAddr(a))
	}
	for _, p := range announce {
		c.Announce = append(c.Announce, netip.MustParsePrefix(p))
	}
	m, err := mesh.New(c)
	if err != nil {
		t.Fatal(err)
	}
	nettest.Go(t, name, func(ctx context.Context) error {
		if err := m.Run(ctx); !errors.Is(err, mesh.ErrLeft) {
			return err
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := mesh.Ready(ctx, m); err != nil {
		t.Fatal(err)
	}
	return &member{m, d}
}

// view waits until the mesh's view of a member is as it should be.
func (m *member) view(t *testing.T, what string, ok func(mesh.View) bool) mesh.View {
	t.Helper()
	var v mesh.View
	nettest.Within(t, 30*time.Second, what, func() bool {
		v, _ = m.Current()
		return ok(v)
	})
	return v
}

// knows waits until a member has so many prefixes of another one on its device.
func (m *member) knows(t *testing.T, peer string, n int) {
	t.Helper()
	m.view(t, "prefixes of "+peer, func(v mesh.View) bool {
		p, ok := v.Peer(peer)
		return ok && p.Prefixes.Len() == n
	})
}

// conditions are those of a kind, a line each.
func conditions(v mesh.View, k view.Kind) string {
	var lines []string
	for c := range v.Find(k) {
		lines = append(lines, c.String())
	}
	return strings.Join(lines, "\n")
}

// size is how much is exchanged: an emulated machine is slow.
func size() int {
	if nettest.InVM() {
		return 256 << 10
	}
	return 2 << 20
}

// routesOf are the routes to prefixes, without a source.
func routesOf(ps ...string) map[netip.Prefix]netip.Addr {
	m := make(map[netip.Prefix]netip.Addr)
	for p := range prefixes.MustParse(ps...).All() {
		m[p] = netip.Addr{}
	}
	return m
}

// state is what a namespace has that a mesh may have left there.
func state(t *testing.T, s *nettest.Space) string {
	t.Helper()
	var all []string
	for _, c := range []string{"-br link", "rule", "-6 rule", "route show table all", "-6 route show table all"} {
		out, err := s.Run("ip", strings.Fields(c)...)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, out)
	}
	return strings.Join(all, "\n")
}
