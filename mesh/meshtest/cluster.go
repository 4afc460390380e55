package meshtest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	devmem "github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/prefixes"
)

// MaxNodes is how many nodes a Cluster can have: it gives each a /24.
const MaxNodes = 1 << 15

// Options say what a Cluster is made of. The zero Options are three nodes in memory.
type Options struct {
	// Nodes is how many there are, at most MaxNodes. 0: 3.
	Nodes int
	// Seed determines all that is random.
	Seed uint64
	// Datapath makes the device of a node, and another each time the node is Renewed; the Cluster closes
	// them. nil: devices in memory, on one network.
	Datapath func(n *Node) (datapath.Datapath, error)
	// Registry is what a node is given. nil: a handle of its own on one store in memory.
	Registry func(n *Node) registry.Registry
	// Configure has the last word on a node's Config. It is called once for each node. Where it sets a
	// StateDir, the node's Key is put there. nil: nobody has.
	Configure func(n *Node, c *mesh.Config)
}

// Cluster is a mesh under test. Its own methods, and those of its Nodes that start and stop them, are
// for one goroutine at a time.
type Cluster struct {
	Nodes []*Node
	// Network joins the devices, where those are in memory.
	Network *devmem.Network
	// Store is a handle on the nodes' store that no fault of theirs touches, where that is in memory.
	Store *regmem.Registry

	tb   testing.TB
	opts Options
	rand *rand.Rand
	hint int // the node that failed the last Check
}

// Node is one node of a Cluster: a program that can be started, stopped, and started again on the
// device that it left.
type Node struct {
	Index  int
	Config mesh.Config
	// Device is the node's, where it is in memory.
	Device *devmem.Device
	// Registry is the node's handle, where the store is in memory: to make it fail.
	Registry *regmem.Registry

	cluster   *Cluster
	announced map[string][]prefixes.Announcement
	left      bool
	kept      key.Private // its key, where Config has none
	publicOf  key.Private // whose public key publicKey is
	publicKey key.Public

	mu     sync.Mutex
	mesh   mesh.Mesh // the newest; nil: never started
	cancel context.CancelFunc
	done   chan struct{} // closed when the Run has returned; nil: not running
	err    error         // of the Run that has
}

// New makes a Cluster whose nodes are not started yet. Whatever runs at the end of the test is stopped
// then; a Run that fails, fails the test.
//
// The node with index i is called "n" and i in five digits, has mesh addresses 100.64.x.y and fd77::i,
// announces 10.x.y.0/24, and is at 198.18.x.y of the underlay, where x.y are i in two bytes.
func New(tb testing.TB, o Options) *Cluster {
	tb.Helper()
	if o.Nodes == 0 {
		o.Nodes = 3
	}
	if o.Nodes < 0 || o.Nodes > MaxNodes {
		tb.Fatalf("meshtest: %d nodes are outside 1 to %d", o.Nodes, MaxNodes)
	}
	c := &Cluster{tb: tb, opts: o, rand: rand.New(rand.NewPCG(o.Seed, 0))}
	if o.Datapath == nil {
		c.Network = devmem.NewNetwork()
	}
	if o.Registry == nil {
		c.Store = regmem.New()
	}
	for i := range o.Nodes {
		n := &Node{Index: i, cluster: c, announced: make(map[string][]prefixes.Announcement)}
		n.Config = mesh.Config{
			Node: fmt.Sprintf("n%05d", i), Key: Key(o.Seed, i),
			Addresses: []netip.Addr{
				netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)}),
				netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x77, 14: byte(i >> 8), 15: byte(i)}),
			},
			Announce: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)},
		}
		if c.Network != nil {
			n.Config.Endpoints = []mesh.Endpoint{{Addr: n.underlay()}}
		}
		if o.Registry == nil {
			n.Registry = c.Store.Handle()
			n.Config.Registry = n.Registry
		} else {
			n.Config.Registry = o.Registry(n)
		}
		if err := n.newDevice(); err != nil {
			tb.Fatal(err)
		}
		if o.Configure != nil {
			o.Configure(n, &n.Config)
		}
		if dir := n.Config.StateDir; dir != "" && !n.Config.Key.IsZero() {
			n.kept, n.Config.Key = n.Config.Key, key.Private{}
			if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, "key"), []byte(n.kept.Base64()+"\n"), 0o600)); err != nil {
				tb.Fatal(err)
			}
		}
		c.Nodes = append(c.Nodes, n)
	}
	tb.Cleanup(func() {
		c.Stop()
		for _, n := range c.Nodes {
			if err := n.Config.Datapath.Close(); err != nil {
				tb.Errorf("meshtest: %v: closing the device: %v", n, err)
			}
		}
	})
	return c
}

// Key returns the key of the i-th node of every Cluster with that seed.
func Key(seed uint64, i int) key.Private {
	sum := sha256.Sum256(fmt.Appendf(nil, "meshtest %d %d", seed, i))
	k, err := key.PrivateFromBytes(sum[:])
	if err != nil {
		panic(err)
	}
	return k
}

// Start starts all nodes that do not run.
func (c *Cluster) Start() {
	c.tb.Helper()
	for _, n := range c.Nodes {
		n.Start()
	}
}

// Stop stops all nodes that run, at the same time.
func (c *Cluster) Stop() {
	c.tb.Helper()
	for _, n := range c.Nodes {
		if n.Running() {
			n.cancel()
		}
	}
	for _, n := range c.Nodes {
		n.Stop()
	}
}

// Settled waits until Check finds nothing wrong. It returns what Check found last if ctx ends first.
func (c *Cluster) Settled(ctx context.Context) error {
	var last error
	for {
		err := c.Check(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("the mesh is not settled: %w: %w", context.Cause(ctx), last)
		}
	}
}

// Send sends a packet from every running node to the first mesh address of every other, as far as their
// devices are in memory, and returns how many arrived. A node is not known to be silent unless it is
// sent to, so it takes traffic to find one that moved unseen.
func (c *Cluster) Send() (arrived int) {
	for _, from := range c.Nodes {
		for _, to := range c.Nodes {
			if from == to || !from.Running() || !to.Running() || from.Device == nil || to.Device == nil || len(to.Config.Addresses) == 0 {
				continue
			}
			if k, ok := from.Device.Send(to.Config.Addresses[0]); ok && k == to.public() {
				arrived++
			}
		}
	}
	return arrived
}

func (n *Node) String() string { return n.Config.Node }

func (n *Node) underlay() netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18 | byte(n.Index>>16), byte(n.Index >> 8), byte(n.Index)})
}

func (n *Node) newDevice() error {
	if make := n.cluster.opts.Datapath; make != nil {
		d, err := make(n)
		n.Config.Datapath = d
		return err
	}
	n.Device = devmem.New(devmem.Options{Network: n.cluster.Network, Addrs: []netip.Addr{n.underlay()}})
	n.Config.Datapath = n.Device
	return nil
}

// Mesh returns the newest process's Mesh, nil if the node was never started.
func (n *Node) Mesh() mesh.Mesh {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mesh
}

// Running reports whether the node was started, and neither stopped nor left since.
func (n *Node) Running() bool { return n.done != nil }

// Left reports whether the last thing the node did was to leave.
func (n *Node) Left() bool { return n.left }

// Start starts the node as a new process does: with a new Mesh over the device that there is. What was
// announced is announced again before. Starting a node that runs does nothing.
func (n *Node) Start() {
	tb := n.cluster.tb
	tb.Helper()
	if n.Running() {
		return
	}
	m, err := mesh.New(n.Config)
	if err != nil {
		tb.Fatalf("meshtest: %v: %v", n, err)
	}
	for source, as := range n.announced {
		if err := m.Prefixes().Announce(source, as...); err != nil {
			tb.Logf("meshtest: %v: announcing: %v", n, err)
		}
	}
	_, begun := m.Current()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	n.mu.Lock()
	n.mesh = m
	n.mu.Unlock()
	n.cancel, n.done, n.left = cancel, done, false
	go func() {
		defer close(done)
		n.err = m.Run(ctx)
		if n.err != nil && !errors.Is(n.err, mesh.ErrLeft) {
			tb.Errorf("meshtest: %v: Run: %v", n, n.err)
		}
	}()
	select { // a Leave that came first would leave without it
	case <-begun:
	case <-done:
	}
}

// Stop ends the node's process. Its device goes on forwarding. Stopping a node that does not run does
// nothing.
func (n *Node) Stop() {
	if n.Running() {
		n.cancel()
		<-n.done
		n.done = nil
	}
}

// Restart stops and starts the node.
func (n *Node) Restart() {
	n.cluster.tb.Helper()
	n.Stop()
	n.Start()
}

// Renew restarts the node on a device created anew, as a host does that boots.
func (n *Node) Renew() {
	tb := n.cluster.tb
	tb.Helper()
	n.Stop()
	if err := errors.Join(n.Config.Datapath.Close(), n.newDevice()); err != nil {
		tb.Fatalf("meshtest: %v: a new device: %v", n, err)
	}
	n.Start()
}

// Leave has the node leave the mesh. Where that fails, the node runs as it did before.
func (n *Node) Leave(ctx context.Context) error {
	m := n.Mesh()
	if m == nil {
		return errors.New("never started")
	}
	if err := m.Leave(ctx); err != nil {
		return err
	}
	if n.Running() {
		<-n.done
		n.done = nil
		if !errors.Is(n.err, mesh.ErrLeft) {
			return fmt.Errorf("instead of ErrLeft, Run returned %v", n.err)
		}
	}
	n.left = true
	return nil
}

// Announce replaces what source announces, in this process and in those to come.
func (n *Node) Announce(source string, as ...prefixes.Announcement) error {
	n.announced[source] = as
	if m := n.Mesh(); m != nil {
		return m.Prefixes().Announce(source, as...)
	}
	return nil
}

// AnnouncePrefixes is Announce for prefixes without source addresses.
func (n *Node) AnnouncePrefixes(source string, ps ...netip.Prefix) error {
	as := make([]prefixes.Announcement, len(ps))
	for i, p := range ps {
		as[i].Prefix = p
	}
	return n.Announce(source, as...)
}
