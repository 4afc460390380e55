package whole

import (
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/view"
)

// pair is two nodes of a mesh at both ends of a wire.
type pair struct {
	sa, sb *nettest.Space
	a, b   *member
}

func newPair(t *testing.T, d driver, mtu int, o options) pair {
	t.Helper()
	p := pair{sa: nettest.NewSpace(t), sb: nettest.NewSpace(t)}
	nettest.Wire(p.sa, p.sb)
	p.sa.Narrow(mtu)
	p.sb.Narrow(mtu)
	reg := memory.New()
	p.a = join(t, reg, "a", d.datapath(t, p.sa, o), []string{nettest.Wire4A + ":0", "[" + nettest.Wire6A + "]:0"}, []string{"10.80.0.1", "fd80::1"}, nil)
	p.b = join(t, reg, "b", d.datapath(t, p.sb, o), []string{nettest.Wire4B + ":0", "[" + nettest.Wire6B + "]:0"}, []string{"10.80.0.2", "fd80::2"}, nil)
	p.a.knows(t, "b", 2)
	p.b.knows(t, "a", 2)
	return p
}

// has waits until both devices have an MTU, and a condition of it or none.
func (p pair) has(t *testing.T, mtu int, condition bool) {
	t.Helper()
	for _, m := range []*member{p.a, p.b} {
		m.view(t, fmt.Sprintf("the MTU is %d", mtu), func(v mesh.View) bool {
			said := false
			for c := range v.Find(view.HostProblem) {
				said = said || c.Subject == "mtu"
			}
			return v.Self.MTU == mtu && said == condition
		})
	}
}

// carries has the mesh carry much, and large datagrams.
func (p pair) carries(t *testing.T, what string) {
	t.Helper()
	for _, to := range []string{"10.80.0.2", "fd80::2"} {
		nettest.Exchange(t, what+", to "+to, size(), p.sb, p.sa, to)
		nettest.Echo(t, what+", to "+to, p.sb, p.sa, to, 1200, 1400, 9000, 60000)
	}
}

// TestMTULadder has an underlay of each size, and one that shrinks, and grows, while much is carried.
func TestMTULadder(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		p := newPair(t, d, 1500, options{})
		for _, step := range []struct {
			underlay, mtu int
			condition     bool
		}{{1500, 1420, false}, {1420, 1340, false}, {1380, 1300, false}, {1300, 1280, true}, {1280, 1280, true}, {1500, 1420, false}} {
			p.sa.Narrow(step.underlay)
			p.sb.Narrow(step.underlay)
			p.has(t, step.mtu, step.condition)
			p.carries(t, fmt.Sprintf("over %d bytes", step.underlay))
		}

		// While it shrinks, a connection goes on, whose packets were larger before.
		done := make(chan error, 1)
		go func() {
			said, err := nettest.TryExchange(8*size(), p.sb, p.sa, "10.80.0.2")
			t.Log("while the underlay shrinks: " + said)
			done <- err
		}()
		for _, mtu := range []int{1420, 1380, 1300, 1280} {
			time.Sleep(50 * time.Millisecond)
			p.sa.Narrow(mtu)
			p.sb.Narrow(mtu)
		}
		if err := <-done; err != nil {
			t.Errorf("while the underlay shrinks: %v", err)
		}
		p.has(t, 1280, true)
	})
}

// TestMTUAskedFor has an MTU for which the underlay is too small: it is kept, and said, and what is sent arrives.
func TestMTUAskedFor(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		p := newPair(t, d, 1280, options{MTU: 1420})
		p.has(t, 1420, true)
		p.carries(t, "1420 over 1280 bytes")
	})
}

// TestUnderlayGone has the link of the underlay vanish, and come back: the devices stay, and it all goes on.
func TestUnderlayGone(t *testing.T) {
	each(t, func(t *testing.T, d driver) {
		p := newPair(t, d, 1500, options{})
		key := func() datapath.Device {
			st, err := p.a.Path.Read(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return st.Device
		}
		before := key()
		p.sa.Must(func() error {
			ls, err := netlink.LinkList()
			for _, l := range ls {
				if l.Type() == "veth" {
					err = netlink.LinkDel(l)
				}
			}
			return err
		})
		p.a.view(t, "it is said that nobody is reached", func(v mesh.View) bool {
			return conditions(v, view.EndpointUnusable) != ""
		})
		nettest.Wire(p.sa, p.sb)
		p.a.view(t, "it is over", func(v mesh.View) bool { return conditions(v, view.EndpointUnusable) == "" })
		p.carries(t, "back")
		if after := key(); after.Key != before.Key || after.ListenPort != before.ListenPort {
			t.Error("the device is another one")
		}
	})
}
