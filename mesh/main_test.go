package mesh_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/internal/state"
	"github.com/warren-mesh/warren/mesh/meshtest"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/view"
)

// holdEnv makes this test binary another process that has a state folder: "NODE FOLDER".
const holdEnv = "WARREN_MESH_TEST_HOLD"

func TestMain(m *testing.M) {
	var node, folder string
	if n, _ := fmt.Sscan(os.Getenv(holdEnv), &node, &folder); n == 2 {
		_, err := state.Open(folder, node, nil)
		fmt.Println("held", err)
		fmt.Scanln() // until the parent closes the pipe
		return
	}
	goleak.VerifyTestMain(m)
}

// bubble runs f with a Cluster in a bubble, in which time passes as fast as nothing is left to do.
func bubble(t *testing.T, o meshtest.Options, f func(t *testing.T, c *meshtest.Cluster)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(t, meshtest.New(t, o)) })
}

// started is bubble with all nodes started and settled.
func started(t *testing.T, o meshtest.Options, f func(t *testing.T, c *meshtest.Cluster)) {
	t.Helper()
	bubble(t, o, func(t *testing.T, c *meshtest.Cluster) {
		c.Start()
		settle(t, c, time.Minute)
		time.Sleep(10 * time.Second) // handshakes are read
		f(t, c)
	})
}

func settle(t testing.TB, c *meshtest.Cluster, within time.Duration) {
	t.Helper()
	if err := c.Settled(after(t, within)); err != nil {
		t.Fatal(err)
	}
}

func check(t testing.TB, c *meshtest.Cluster) {
	t.Helper()
	if err := c.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// after returns a context that ends after d.
func after(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func current(n *meshtest.Node) mesh.View {
	v, _ := n.Mesh().Current()
	return v
}

func conditions(n *meshtest.Node) []mesh.Condition { return current(n).Conditions }

// has reports whether n has a condition of a kind about a node.
func has(n *meshtest.Node, kind view.Kind, node string) bool {
	for c := range current(n).Find(kind) {
		if c.Node == node {
			return true
		}
	}
	return false
}

func mustHave(t testing.TB, n *meshtest.Node, kind view.Kind, node string) {
	t.Helper()
	if !has(n, kind, node) {
		t.Errorf("%v has no condition %s about %q: %v", n, kind, node, conditions(n))
	}
}

func mustBeWell(t testing.TB, c *meshtest.Cluster) {
	t.Helper()
	for _, n := range c.Nodes {
		if n.Running() && len(conditions(n)) > 0 {
			t.Errorf("%v has conditions %v", n, conditions(n))
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// recordOf returns what the store has of n; nil: nothing.
func recordOf(c *meshtest.Cluster, n *meshtest.Node) []byte {
	for _, e := range c.Store.Snapshot().Entries {
		if e.ID == registry.NodeID(n.Config.Node) {
			return e.Data
		}
	}
	return nil
}

// hookedDatapath is a datapath with something put before its methods.
type hookedDatapath struct {
	datapath.Datapath
	read, apply func()
	changed     func() <-chan struct{}
}

func (d hookedDatapath) Read(ctx context.Context) (datapath.State, error) {
	if d.read != nil {
		d.read()
	}
	return d.Datapath.Read(ctx)
}

func (d hookedDatapath) Apply(ctx context.Context, ops ...datapath.Op) error {
	if d.apply != nil {
		d.apply()
	}
	return d.Datapath.Apply(ctx, ops...)
}

func (d hookedDatapath) Changed() <-chan struct{} {
	if d.changed != nil {
		return d.changed()
	}
	if n, ok := d.Datapath.(datapath.Notifier); ok {
		return n.Changed()
	}
	return nil
}

type hookedRegistry struct {
	registry.Registry
	put, del func(id string)
	watch    func()
	ends     bool // Watch ends by itself
}

func (r hookedRegistry) Watch(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
	return func(yield func(registry.Batch, error) bool) {
		if r.watch != nil {
			r.watch()
		}
		for b, err := range r.Registry.Watch(ctx, kind) {
			if !yield(b, err) || r.ends {
				return
			}
		}
	}
}

func (r hookedRegistry) Put(ctx context.Context, e registry.Entry) error {
	if r.put != nil {
		r.put(e.ID)
	}
	return r.Registry.Put(ctx, e)
}

func (r hookedRegistry) Delete(ctx context.Context, id string) error {
	if r.del != nil {
		r.del(id)
	}
	return r.Registry.Delete(ctx, id)
}

var errBroken = errors.New("broken")

// tally counts what happens at which time.
type tally struct {
	n  atomic.Int64
	mu sync.Mutex
	at []time.Time
}

func (c *tally) add() {
	c.n.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = append(c.at, time.Now())
}

func (c *tally) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = nil
}

// most returns how many there were at most in any span of d.
func (c *tally) most(d time.Duration) (most int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.at {
		j := i
		for j < len(c.at) && c.at[j].Sub(c.at[i]) < d {
			j++
		}
		most = max(most, j-i)
	}
	return most
}
