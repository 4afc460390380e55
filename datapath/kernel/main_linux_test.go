package kernel

import (
	"os"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// space is a network namespace that a Kernel can be in.
type space struct{ *nettest.Space }

// newSpace skips the test where this kernel has no WireGuard.
func newSpace(t testing.TB) *space {
	t.Helper()
	needWireGuard(t)
	return &space{nettest.NewSpace(t)}
}

// wired returns two namespaces that are joined by a wire.
func wired(t testing.TB) (a, b *space) {
	t.Helper()
	a, b = newSpace(t), newSpace(t)
	nettest.Wire(a.Space, b.Space)
	return a, b
}

// kernel returns a Kernel in s.
func (s *space) kernel(t testing.TB, change ...func(*Options)) *Kernel {
	t.Helper()
	o := Options{Namespace: s.Path, Logger: nettest.Logger()}
	for _, f := range change {
		f(&o)
	}
	k, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	return k
}

// wgctrl does to a device what another program would.
func (s *space) wgctrl(name string, c wgtypes.Config) error {
	return s.In(func() error {
		w, err := wgctrl.New()
		if err != nil {
			return err
		}
		defer w.Close()
		return w.ConfigureDevice(name, c)
	})
}

// device is what another program sees.
func (s *space) device(name string) (d *wgtypes.Device, err error) {
	err = s.In(func() error {
		w, err := wgctrl.New()
		if err != nil {
			return err
		}
		defer w.Close()
		d, err = w.Device(name)
		return err
	})
	return d, err
}

var wireguard = sync.OnceValue(func() error {
	k, err := New(Options{})
	if err != nil {
		return err
	}
	return k.Close()
})

// needWireGuard skips the test where there is no WireGuard, or no right to use it.
func needWireGuard(t testing.TB) {
	t.Helper()
	if err := wireguard(); err != nil {
		if os.Getenv("WARREN_VMRUN") != "" {
			t.Fatalf("in a VM made for it: %v", err)
		}
		t.Skipf("this runs in a VM (go test -exec, see datapath/internal/vmrun): %v", err)
	}
}

func harness() datapathtest.Harness {
	spaces := make(map[datapath.Datapath]*space)
	var last *space
	return datapathtest.Harness{
		New: func(t testing.TB) datapath.Datapath {
			s := newSpace(t)
			s.Out()
			last = s
			k := s.kernel(t)
			spaces[k] = s
			return k
		},
		Occupy: func(_ testing.TB, port uint16) func() { return last.Occupy(port) },
		Outside: func(t testing.TB, d datapath.Datapath, op datapath.Op) {
			o, ok := op.(datapath.RemovePeer)
			if !ok {
				t.Fatalf("op %T from outside", op)
			}
			err := spaces[d].wgctrl(DefaultInterface, wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: wgtypes.Key(o.Key.Bytes()), Remove: true}}})
			if err != nil {
				t.Fatal(err)
			}
		},
	}
}

func TestSuite(t *testing.T) {
	t.Parallel()
	needWireGuard(t)
	datapathtest.Run(t, harness())
}

// node is a Kernel with a State that says what it shall be.
type node struct {
	*Kernel
	*nettest.Node
	space *space
}

func set(s ...string) prefixes.Set { return prefixes.MustParse(s...) }

func newNode(t testing.TB, s *space, name string, addrs ...string) *node {
	t.Helper()
	k := s.kernel(t)
	return &node{k, nettest.NewNode(t, name, k, set(addrs...)), s}
}

// pair is two namespaces joined by a wire, with a node in each; the nodes know each other.
type pair struct{ a, b *node }

func newPair(t testing.TB) pair {
	t.Helper()
	sa, sb := wired(t)
	return pair{newNode(t, sa, "a", "10.0.0.1", "fd00::1"), newNode(t, sb, "b", "10.0.0.2", "fd00::2")}
}

// connect makes the two peers of each other.
func (p pair) connect(o nettest.Outer) {
	p.a.T.Helper()
	o.Connect(p.a.Node, p.b.Node)
}

// plain is an underlay of IPv4, without preshared keys.
var plain = nettest.Outers[0]

func failures(err error) (n int) {
	for range datapath.Failures(err) {
		n++
	}
	return n
}
