package netstack_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node is a Net with a State that says what it shall be.
type node struct {
	*netstack.Net
	t    testing.TB
	name string
	want datapath.State
}

func set(s ...string) prefixes.Set { return prefixes.MustParse(s...) }

func newKey(t testing.TB) key.Private {
	t.Helper()
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// newNode returns a node with a device that has the given addresses and is settled.
func newNode(t testing.TB, name string, o netstack.Options, addrs ...string) *node {
	t.Helper()
	n, err := netstack.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	d := &node{Net: n, t: t, name: name, want: datapath.State{
		Device: datapath.Device{Key: newKey(t)}, Addrs: set(addrs...),
		Routes: make(map[netip.Prefix]netip.Addr), Peers: make(map[key.Public]datapath.Peer),
	}}
	d.sync()
	n.Settle()
	return d
}

// sync makes the device what d.want says.
func (d *node) sync() {
	d.t.Helper()
	if err := datapath.Sync(context.Background(), d.Net, d.want); err != nil {
		d.t.Fatalf("%s: %v", d.name, err)
	}
}

func (d *node) apply(ops ...datapath.Op) {
	d.t.Helper()
	if err := d.Apply(context.Background(), ops...); err != nil {
		d.t.Fatalf("%s: %v", d.name, err)
	}
}

func (d *node) read() datapath.State {
	d.t.Helper()
	s, err := d.Read(context.Background())
	if err != nil {
		d.t.Fatalf("%s: %v", d.name, err)
	}
	return s
}

func (d *node) public() key.Public { return d.want.Device.Key.Public() }

func (d *node) endpoint() netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), d.read().Device.ListenPort)
}

// peers makes o a peer of d that has all of o's Addrs and Local, and more.
func (d *node) peer(o *node, more ...string) {
	d.t.Helper()
	ps := o.want.Addrs.Union(o.want.Local).Union(set(more...))
	d.want.Peers[o.public()] = datapath.Peer{Endpoint: o.endpoint(), Prefixes: ps}
	for p := range ps.All() {
		d.want.Routes[p] = netip.Addr{}
	}
	d.sync()
}

// connect makes nodes peers of each other.
func connect(nodes ...*node) {
	for _, a := range nodes {
		a.t.Helper()
		for _, b := range nodes {
			if a != b {
				a.peer(b)
			}
		}
	}
}

// pair returns two nodes that know each other.
func pair(t testing.TB) (a, b *node) {
	t.Helper()
	a = newNode(t, "a", netstack.Options{}, "10.0.0.1", "fd00::1")
	b = newNode(t, "b", netstack.Options{}, "10.0.0.2", "fd00::2")
	connect(a, b)
	return a, b
}

const timeout = 30 * time.Second

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}
