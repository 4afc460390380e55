package mesh_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/meshtest"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

func TestReady(t *testing.T) {
	bubble(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		c.Start()
		for _, n := range c.Nodes {
			must(t, mesh.Ready(after(t, time.Minute), n.Mesh()))
		}
		n := c.Nodes[0]
		n.Stop()
		if current(n).Ready {
			t.Error("it is ready with no Run")
		}
		n.Registry.Cut()
		n.Start()
		err := mesh.Ready(after(t, time.Minute), n.Mesh())
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), string(view.RegistryDown)) {
			t.Errorf("error is %v, want that and why", err)
		}
		n.Registry.Heal()
		must(t, mesh.Ready(after(t, time.Minute), n.Mesh()))
		check(t, c)
	})
}

func TestWatchGivesASlowConsumerTheNewest(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		last := netip.MustParsePrefix("172.16.99.0/24")
		var changes sync.WaitGroup
		changes.Go(func() {
			for i := range 100 {
				must(t, c.Nodes[1].AnnouncePrefixes("x", netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(i), 0}), 24)))
				time.Sleep(100 * time.Millisecond)
			}
		})
		views := 0
		var version uint64
		for v := range mesh.Watch(after(t, time.Hour), c.Nodes[0].Mesh()) {
			views++
			if v.Version <= version {
				t.Errorf("version %d came after %d", v.Version, version)
			}
			version = v.Version
			if p, _ := v.Peer(c.Nodes[1].Config.Node); p.Prefixes.Has(last) {
				break
			}
			time.Sleep(3 * time.Second)
		}
		changes.Wait()
		if views > 6 {
			t.Errorf("%d Views in 10 s with 3 s for each", views)
		}
	})
}

func TestWatchEndsWithItsContext(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		for range mesh.Watch(after(t, time.Minute), c.Nodes[0].Mesh()) {
		}
	})
}

func TestOwnRecordIsPutAgain(t *testing.T) {
	id := func(n *meshtest.Node) string { return registry.NodeID(n.Config.Node) }
	for name, lose := range map[string]func(t *testing.T, c *meshtest.Cluster, n *meshtest.Node){
		"deleted": func(t *testing.T, c *meshtest.Cluster, n *meshtest.Node) { must(t, c.Store.Delete(t.Context(), id(n))) },
		"missing at a Reset": func(t *testing.T, c *meshtest.Cluster, n *meshtest.Node) {
			n.Registry.Cut()
			must(t, c.Store.Delete(t.Context(), id(n)))
			n.Registry.Heal()
		},
		"overwritten": func(t *testing.T, c *meshtest.Cluster, n *meshtest.Node) {
			must(t, c.Store.Put(t.Context(), registry.Entry{ID: id(n), Data: []byte("{}")}))
		},
		"store from a backup": func(t *testing.T, c *meshtest.Cluster, n *meshtest.Node) {
			old := c.Store.Snapshot()
			must(t, n.AnnouncePrefixes("new", netip.MustParsePrefix("172.16.1.0/24")))
			settle(t, c, time.Minute)
			c.Store.Restore(old)
		},
		"empty store": func(t *testing.T, c *meshtest.Cluster, n *meshtest.Node) { c.Store.Restore(regmem.Snapshot{}) },
	} {
		t.Run(name, func(t *testing.T) {
			started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
				lose(t, c, c.Nodes[1])
				time.Sleep(3 * time.Second)
				check(t, c)
				mustBeWell(t, c)
			})
		})
	}
}

func TestRule18_ForwardingGoesOnWithTheRegistryDown(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		for _, n := range c.Nodes {
			n.Registry.Cut()
		}
		must(t, c.Nodes[1].AnnouncePrefixes("meanwhile", netip.MustParsePrefix("172.16.1.0/24")))
		for range 60 {
			time.Sleep(time.Minute)
			if n := c.Send(); n != 6 {
				t.Fatalf("%d packets of 6 arrived", n)
			}
		}
		for i, n := range c.Nodes {
			want := []view.Kind{view.RegistryDown}
			if i == 1 {
				want = []view.Kind{view.PublishFailed, view.RegistryDown}
			}
			var kinds []view.Kind
			for _, c := range conditions(n) {
				kinds = append(kinds, c.Kind)
			}
			if !slices.Equal(kinds, want) {
				t.Errorf("%v has conditions %v, want %v", n, conditions(n), want)
			}
			n.Registry.Heal()
		}
		time.Sleep(31 * time.Second) // the longest pause between two tries to put
		check(t, c)
		mustBeWell(t, c)
	})
}

func TestRule01_ARestartWithTheRegistryDownTakesNothingAway(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		n.Registry.Cut()
		writes := n.Device.Writes()
		n.Restart()
		for range 60 {
			time.Sleep(time.Minute)
			if n := c.Send(); n != 6 {
				t.Fatalf("%d packets of 6 arrived", n)
			}
		}
		if w := n.Device.Writes(); w != writes {
			t.Errorf("%d writes", w-writes)
		}
		must(t, c.Nodes[1].Leave(after(t, time.Minute)))
		n.Registry.Heal()
		time.Sleep(5 * time.Second)
		check(t, c)
	})
}

func TestRule02_WhoLeftWhileTheWatchWasDownIsRemoved(t *testing.T) {
	for name, back := range map[string]func(*regmem.Registry){"with a gap": (*regmem.Registry).Heal, "without": (*regmem.Registry).Resume} {
		t.Run(name, func(t *testing.T) {
			started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
				n, other := c.Nodes[0], c.Nodes[1]
				for range 2 {
					n.Registry.Cut()
					must(t, other.Leave(after(t, time.Minute)))
					time.Sleep(time.Minute)
					back(n.Registry)
					time.Sleep(time.Second)
					check(t, c)
					gone(t, c, other)
					other.Start() // and it comes back, to leave once more
					settle(t, c, time.Minute)
				}
			})
		})
	}
}

// A device that takes a second for an op gets the newest, and not all there was in between.
func TestSlowDevice(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		n.Device.Slow(time.Second)
		n.Device.TakeLog()
		for i := range 200 {
			must(t, c.Nodes[1].AnnouncePrefixes("x", netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(i), 0}), 24)))
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
		check(t, c)
		if ops := len(n.Device.TakeLog()); ops > 30 {
			t.Errorf("%d ops of a second each were begun in 30 s", ops)
		}
	})
}

func TestRule04_OneBadPeerBlocksNoOther(t *testing.T) {
	bubble(t, meshtest.Options{Nodes: 5}, func(t *testing.T, c *meshtest.Cluster) {
		n, bad := c.Nodes[0], c.Nodes[2]
		n.Device.Fault(func(op datapath.Op) error {
			if put, ok := op.(datapath.PutPeer); ok && put.Key == bad.Config.Key.Public() {
				return errBroken
			}
			return nil
		})
		c.Start()
		time.Sleep(5 * time.Minute)
		st, err := n.Device.Read(t.Context())
		must(t, err)
		for _, o := range c.Nodes[1:] {
			p, ok := st.Peers[o.Config.Key.Public()]
			if o == bad {
				if ok {
					t.Error("the bad peer is there")
				}
				continue
			}
			if !ok || !p.Prefixes.Has(o.Config.Announce[0]) || p.Endpoint.Port() == 0 {
				t.Errorf("peer %v is %v", o, p)
			}
			if _, ok := st.Routes[o.Config.Announce[0]]; !ok {
				t.Errorf("no route to %v", o)
			}
		}
		mustHave(t, n, view.OpFailed, bad.Config.Node)
		n.Device.Fault(nil)
		time.Sleep(76 * time.Second) // the longest pause between two tries
		check(t, c)
		mustBeWell(t, c)
	})
}

func TestFailingDeviceIsRetried(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		n.Device.Fault(func(datapath.Op) error { return errBroken })
		must(t, c.Nodes[1].AnnouncePrefixes("x", netip.MustParsePrefix("172.16.1.0/24")))
		time.Sleep(time.Hour)
		if len(conditions(n)) == 0 {
			t.Error("no condition")
		}
		if tries := len(n.Device.TakeLog()); tries > 300 {
			t.Errorf("%d ops were tried in an hour", tries)
		}
		n.Device.Fault(nil)
		time.Sleep(76 * time.Second)
		check(t, c)
		mustBeWell(t, c)
	})
}

func TestDriftIsRepaired(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n, o := c.Nodes[0], c.Nodes[1]
		k, ps := o.Config.Key.Public(), prefixes.Must(o.Config.Announce...)
		for _, op := range []datapath.Op{
			datapath.RemovePeer{Key: k},
			datapath.DropPrefixes{Key: k, Prefixes: ps},
			datapath.PutPeer{Key: meshtest.Key(0, 99).Public(), Peer: datapath.Peer{Prefixes: ps}},
			datapath.RemoveRoutes{Prefixes: ps},
			datapath.AddRoutes{Routes: []datapath.Route{{Prefix: netip.MustParsePrefix("172.16.0.0/12")}}},
			datapath.RemoveAddrs{Addrs: prefixes.MustParse("100.64.0.0/32")},
			datapath.SetDevice{Device: datapath.Device{Key: meshtest.Key(0, 99)}},
			datapath.RemoveDevice{},
		} {
			must(t, n.Device.Drift(op))
			time.Sleep(2 * time.Second)
			if err := c.Check(t.Context()); err != nil {
				t.Errorf("2 s after %v: %v", op, err)
			}
			time.Sleep(time.Minute)
		}
	})
}

// A program that undoes what is repaired is not raced.
func TestDriftIsNotRaced(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		n.Device.TakeLog()
		for range 600 {
			must(t, n.Device.Drift(datapath.RemovePeer{Key: c.Nodes[1].Config.Key.Public()}))
			time.Sleep(100 * time.Millisecond)
		}
		puts := 0
		for _, op := range n.Device.TakeLog() {
			if _, ok := op.(datapath.PutPeer); ok {
				puts++
			}
		}
		if puts > 61 || puts < 30 {
			t.Errorf("the peer was put %d times in a minute, want once a second", puts)
		}
		time.Sleep(3 * time.Second)
		check(t, c)
	})
}

// The parts of an embedder's own that a Run calls.
func TestRule20_APanicIsAnError(t *testing.T) {
	boom := func() { panic("boom") }
	later := func(n int, f func()) func() {
		return func() {
			if n--; n < 0 {
				f()
			}
		}
	}
	for name, set := range map[string]func(c *mesh.Config, f func()){
		"Read":  func(c *mesh.Config, f func()) { c.Datapath = hookedDatapath{Datapath: c.Datapath, read: later(1, f)} },
		"Apply": func(c *mesh.Config, f func()) { c.Datapath = hookedDatapath{Datapath: c.Datapath, apply: later(1, f)} },
		"Changed": func(c *mesh.Config, f func()) {
			c.Datapath = hookedDatapath{Datapath: c.Datapath, changed: func() <-chan struct{} { f(); return nil }}
		},
		"Put": func(c *mesh.Config, f func()) {
			c.Registry = hookedRegistry{Registry: c.Registry, put: func(string) { f() }}
		},
		"Watch":         func(c *mesh.Config, f func()) { c.Registry = hookedRegistry{Registry: c.Registry, watch: f} },
		"Seal":          func(c *mesh.Config, f func()) { c.Trust = &trust{seal: f} },
		"Open":          func(c *mesh.Config, f func()) { c.Trust = &trust{open: func(string) error { f(); return nil }} },
		"Trust.Changed": func(c *mesh.Config, f func()) { c.Trust = &trust{hook: f} },
		"Accept": func(c *mesh.Config, f func()) {
			c.Accept = func(node string, _ netip.Prefix) bool {
				if node != c.Node {
					f()
				}
				return true
			}
		},
	} {
		for how, f := range map[string]func(){"panic": boom, "Goexit": runtime.Goexit} {
			t.Run(name+"/"+how, func(t *testing.T) {
				bubble(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
					c.Nodes[1].Start()
					time.Sleep(time.Second)
					armed := true
					cfg := c.Nodes[0].Config
					set(&cfg, func() {
						if armed {
							f()
						}
					})
					m, err := mesh.New(cfg)
					must(t, err)
					err = m.Run(after(t, time.Minute))
					if err == nil || how == "panic" && !strings.Contains(err.Error(), "boom") {
						t.Errorf("Run returned %v", err)
					}
					armed = false
					// Nothing is left locked, and it runs again.
					if v, _ := m.Current(); v.Ready {
						t.Error("it is ready")
					}
					done := make(chan error)
					ctx, cancel := context.WithCancel(t.Context())
					go func() { done <- m.Run(ctx) }()
					must(t, mesh.Ready(after(t, time.Minute), m))
					must(t, m.Leave(after(t, time.Minute)))
					cancel()
					if err := <-done; !errors.Is(err, mesh.ErrLeft) {
						t.Error(err)
					}
				})
			})
		}
	}
}

// A registry that ends its watch against its contract is a condition, and is asked again.
func TestRegistryThatEndsItsWatch(t *testing.T) {
	bubble(t, meshtest.Options{Nodes: 2}, func(t *testing.T, c *meshtest.Cluster) {
		cfg := c.Nodes[0].Config
		cfg.Registry = hookedRegistry{Registry: cfg.Registry, ends: true} // after each first batch
		m, err := mesh.New(cfg)
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.Run(ctx) }()
		must(t, mesh.Ready(after(t, time.Minute), m))
		c.Nodes[1].Start()
		time.Sleep(time.Minute)
		v, _ := m.Current()
		if _, ok := v.Peer(c.Nodes[1].Config.Node); !ok {
			t.Error("what changed after the watch had ended was never seen")
		}
		cancel()
		must(t, <-done)
	})
}

// An entry of another kind is no node, and an ID that comes twice in a batch, against the contract, is
// what it is the last time.
func TestOddBatches(t *testing.T) {
	bubble(t, meshtest.Options{Nodes: 2}, func(t *testing.T, c *meshtest.Cluster) {
		c.Nodes[1].Start()
		time.Sleep(time.Second)
		good := c.Store.Snapshot().Entries
		var other []byte
		for _, e := range good {
			other = e.Data
		}
		id := registry.NodeID(c.Nodes[1].Config.Node)
		cfg := c.Nodes[0].Config
		cfg.Registry = scriptedRegistry{cfg.Registry, []registry.Batch{
			{Reset: true, Put: []registry.Entry{{ID: id, Data: []byte("{}")}, {ID: id, Data: other}, {ID: "trust/x", Data: other}}},
			{Deleted: []string{"trust/" + c.Nodes[1].Config.Node}},
		}}
		m, err := mesh.New(cfg)
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.Run(ctx) }()
		time.Sleep(10 * time.Second)
		v, _ := m.Current()
		if _, ok := v.Peer(c.Nodes[1].Config.Node); !ok || len(v.Peers) != 1 {
			t.Errorf("peers are %v, conditions %v", v.Peers, v.Conditions)
		}
		cancel()
		must(t, <-done)
	})
}

// scriptedRegistry yields given batches and then nothing more.
type scriptedRegistry struct {
	registry.Registry
	batches []registry.Batch
}

func (r scriptedRegistry) Watch(ctx context.Context, _ string) iter.Seq2[registry.Batch, error] {
	return func(yield func(registry.Batch, error) bool) {
		for _, b := range r.batches {
			if !yield(b, nil) {
				return
			}
		}
		<-ctx.Done()
	}
}

// While a Leave waits for the registry, the mesh goes on as before.
func TestLeaveHoldsNothingUp(t *testing.T) {
	bubble(t, meshtest.Options{Nodes: 2}, func(t *testing.T, c *meshtest.Cluster) {
		cfg := c.Nodes[0].Config
		cfg.Registry = noDelete{cfg.Registry}
		m, err := mesh.New(cfg)
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.Run(ctx) }()
		must(t, mesh.Ready(after(t, time.Minute), m))
		left := make(chan error, 1)
		go func() { left <- m.Leave(after(t, time.Minute)) }()
		time.Sleep(time.Second)
		c.Nodes[1].Start()
		time.Sleep(5 * time.Second)
		v, _ := m.Current()
		if _, ok := v.Peer(c.Nodes[1].Config.Node); !ok {
			t.Error("a node that joined during a Leave is not seen")
		}
		if err := <-left; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Leave: %v", err)
		}
		cancel()
		must(t, <-done)
	})
}

type noDelete struct{ registry.Registry }

func (noDelete) Delete(context.Context, string) error { return errors.New("not allowed") }

func TestTwoProcessesAsOneNode(t *testing.T) {
	var puts [2]tally
	o := meshtest.Options{Nodes: 3, Configure: func(n *meshtest.Node, c *mesh.Config) {
		if n.Index < 2 {
			c.Node = "twin"
			c.Registry = hookedRegistry{Registry: c.Registry, put: func(string) { puts[n.Index].add() }}
		}
	}}
	bubble(t, o, func(t *testing.T, c *meshtest.Cluster) {
		c.Start()
		time.Sleep(time.Minute)
		for i := range puts {
			puts[i].reset()
		}
		for range 10 {
			time.Sleep(time.Minute)
			mustHave(t, c.Nodes[0], view.DuplicateNode, "twin")
			mustHave(t, c.Nodes[1], view.DuplicateNode, "twin")
		}
		for i := range puts {
			if n := puts[i].most(time.Minute); n > 2 {
				t.Errorf("process %d put its record %d times in a minute", i, n)
			}
		}
		c.Nodes[1].Stop()
		time.Sleep(5 * time.Minute)
		mustBeWell(t, c)
	})
}

func TestRule11_TwoNodesWithOneKey(t *testing.T) {
	o := meshtest.Options{Nodes: 4, Configure: func(n *meshtest.Node, c *mesh.Config) {
		if n.Index == 2 {
			c.Key = meshtest.Key(0, 1)
		}
	}}
	bubble(t, o, func(t *testing.T, c *meshtest.Cluster) {
		c.Start()
		time.Sleep(time.Minute)
		check(t, c)
		for _, n := range c.Nodes {
			mustHave(t, n, view.KeyConflict, c.Nodes[2].Config.Node)
		}
		// Mended, all is well.
		c.Nodes[2].Stop()
		c.Nodes[2].Config.Key = meshtest.Key(0, 2)
		c.Nodes[2].Start()
		for range 60 { // who still sends to the wrong one of the two finds out
			time.Sleep(time.Second)
			c.Send()
		}
		check(t, c)
		mustBeWell(t, c)
	})
}

func TestRule05_AChangedKeyRemovesTheOldPeerAtOnce(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n, old := c.Nodes[1], c.Nodes[1].Config.Key.Public()
		for _, o := range c.Nodes {
			o.Device.TakeLog()
		}
		n.Stop()
		n.Config.Key = meshtest.Key(0, 99)
		n.Start()
		settle(t, c, time.Minute)
		var log []datapath.Op
		for _, op := range c.Nodes[0].Device.TakeLog() {
			switch o := op.(type) {
			case datapath.PutPeer, datapath.RemovePeer:
				log = append(log, o)
			}
		}
		if len(log) < 2 || log[0].(datapath.PutPeer).Key != n.Config.Key.Public() || log[1].(datapath.RemovePeer).Key != old {
			t.Errorf("ops were %v", log)
		}
	})
}

func epochAndGeneration(t testing.TB, c *meshtest.Cluster, n *meshtest.Node) [2]uint64 {
	t.Helper()
	r, err := record.Parse(recordOf(c, n))
	must(t, err)
	return [2]uint64{r.Epoch, r.Generation}
}

func TestRule06_ARestartAdoptsTheDevice(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		writes, stats, was := n.Device.Writes(), n.Device.Stats(), epochAndGeneration(t, c, n)
		n.Device.TakeLog()
		n.Restart()
		settle(t, c, time.Minute)
		time.Sleep(time.Minute)
		if w := n.Device.Writes(); w != writes {
			t.Errorf("%d writes: %v", w-writes, n.Device.TakeLog())
		}
		for k, s := range n.Device.Stats() {
			if !s.LastHandshake.Equal(stats[k].LastHandshake) || s.LastHandshake.IsZero() {
				t.Errorf("the last handshake is of %v, was of %v", s.LastHandshake, stats[k].LastHandshake)
			}
		}
		if is := epochAndGeneration(t, c, n); is != [2]uint64{was[0] + 1, was[1]} {
			t.Errorf("epoch and generation are %v, were %v", is, was)
		}
		n.Renew()
		settle(t, c, time.Minute)
		if is := epochAndGeneration(t, c, n); is != [2]uint64{was[0] + 2, was[1] + 1} {
			t.Errorf("with a new device, epoch and generation are %v, were %v", is, was)
		}
	})
}

func TestRunAgainAdopts(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		n.Stop()
		writes := n.Device.Writes()
		must(t, n.Mesh().Run(after(t, time.Minute)))
		if w := n.Device.Writes(); w != writes {
			t.Errorf("%d writes", w-writes)
		}
	})
}

func TestRule03_AnIdenticalRecordIsNoWrite(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		writes := func() (w int) {
			for _, n := range c.Nodes {
				w += n.Device.Writes()
			}
			return w
		}
		was := writes()
		for _, e := range c.Store.Snapshot().Entries {
			must(t, c.Store.Put(t.Context(), e))
			r, err := record.Parse(e.Data)
			must(t, err)
			data, err := record.Marshal(r)
			must(t, err)
			must(t, c.Store.Put(t.Context(), registry.Entry{ID: e.ID, Data: append(data, '\n', ' ')})) // other bytes, same record
		}
		c.Store.Compact() // all of it once more
		time.Sleep(time.Minute)
		if w := writes(); w != was {
			t.Errorf("%d writes", w-was)
		}
	})
}

func TestBurstIsFewWrites(t *testing.T) {
	var applies tally
	o := meshtest.Options{Nodes: 2, Configure: func(n *meshtest.Node, c *mesh.Config) {
		if n.Index == 0 {
			c.Datapath = hookedDatapath{Datapath: c.Datapath, apply: applies.add}
		}
	}}
	started(t, o, func(t *testing.T, c *meshtest.Cluster) {
		before := applies.n.Load()
		for i := range 500 {
			r := record.Record{
				Version: record.Version, ID: fmt.Sprintf("x%d", i%50), Key: meshtest.Key(7, i%50).Public(),
				Prefixes: prefixes.Must(netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(i), 0}), 24)),
			}
			data, err := record.Marshal(r)
			must(t, err)
			must(t, c.Store.Put(t.Context(), registry.Entry{ID: registry.NodeID(r.ID), Data: data}))
			time.Sleep(100 * time.Microsecond)
		}
		time.Sleep(time.Second)
		check(t, c)
		if n := applies.n.Load() - before; n > 8 { // windows of 10 ms in 50 ms
			t.Errorf("%d Applies for 500 changes in 50 ms", n)
		}
	})
}

// trust is Plain with hooks.
type trust struct {
	seal, hook func()
	open       func(id string) error
	mu         sync.Mutex
	changed    chan struct{}
}

func (p *trust) Seal(r record.Record) ([]byte, error) {
	if p.seal != nil {
		p.seal()
	}
	return identity.Plain().Seal(r)
}

func (p *trust) Open(id string, data []byte, now time.Time) (identity.Opened, error) {
	if p.open != nil {
		if err := p.open(id); err != nil {
			return identity.Opened{}, err
		}
	}
	return identity.Plain().Open(id, data, now)
}

func (p *trust) Changed() <-chan struct{} {
	if p.hook != nil {
		p.hook()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

func (p *trust) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

func TestTrustThatChanges(t *testing.T) {
	var refuse error
	tr := &trust{open: func(id string) error {
		if id == "node/n00001" {
			return refuse
		}
		return nil
	}}
	o := meshtest.Options{Configure: func(n *meshtest.Node, c *mesh.Config) {
		if n.Index == 0 {
			c.Trust = tr
		}
	}}
	started(t, o, func(t *testing.T, c *meshtest.Cluster) {
		n, other := c.Nodes[0], c.Nodes[1]
		peers := func() int {
			st, err := n.Device.Read(t.Context())
			must(t, err)
			return len(st.Peers)
		}
		tr.change(func() { refuse = errBroken })
		time.Sleep(time.Second)
		mustHave(t, n, view.RecordRefused, other.Config.Node)
		if peers() != 2 {
			t.Error("a record that is not believed took its node out")
		}
		tr.change(func() { refuse = fmt.Errorf("gone: %w", identity.ErrRevoked) })
		time.Sleep(time.Second)
		mustHave(t, n, view.RecordRefused, other.Config.Node)
		if peers() != 1 {
			t.Error("a revoked node is a peer")
		}
		check(t, c)
		tr.change(func() { refuse = nil })
		time.Sleep(time.Second)
		check(t, c)
		mustBeWell(t, c)
	})
}

// What is published is the port that the device has, whatever was asked for.
func TestListenPort(t *testing.T) {
	at := func(p uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr("198.18.0.0"), p) }
	for _, test := range []struct {
		ports mesh.Ports
		taken []uint16
		want  uint16 // 0: none until the first of taken is free
	}{
		{mesh.Ports{First: 5000}, nil, 5000},
		{mesh.Ports{First: 5000}, []uint16{5000}, 0},
		{mesh.Ports{First: 5000, Last: 5002}, []uint16{5000, 5001}, 5002},
		{mesh.Ports{First: 5000, Last: 5002}, []uint16{5000, 5001, 5002}, 0},
		{mesh.Ports{}, []uint16{49152, 49153}, 49154},
	} {
		t.Run(fmt.Sprint(test.ports, test.taken), func(t *testing.T) {
			o := meshtest.Options{Configure: func(n *meshtest.Node, c *mesh.Config) {
				if n.Index == 0 {
					c.ListenPorts = test.ports
				}
			}}
			bubble(t, o, func(t *testing.T, c *meshtest.Cluster) {
				var free []func()
				for _, p := range test.taken {
					free = append(free, c.Network.Occupy(at(p)))
				}
				n := c.Nodes[0]
				n.Start()
				time.Sleep(time.Minute)
				want := test.want
				if want == 0 {
					mustHave(t, n, view.PortInUse, n.Config.Node)
					if recordOf(c, n) != nil {
						t.Error("it published a record without a port")
					}
					free[0]()
					want = test.taken[0]
				}
				c.Start()
				settle(t, c, 10*time.Minute)
				mustBeWell(t, c)
				if p := current(n).Self.ListenPort; p != want {
					t.Errorf("the port is %d, want %d", p, want)
				}
				r, err := record.Parse(recordOf(c, n))
				must(t, err)
				if len(r.Endpoints) != 1 || r.Endpoints[0].Port != want {
					t.Errorf("published is %v, want port %d", r.Endpoints, want)
				}
			})
		})
	}
}

func TestSourceAddressOutsideTheOwnPrefixes(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		must(t, n.Announce("x", prefixes.Announcement{Prefix: netip.MustParsePrefix("172.16.1.0/24"), Source: netip.MustParseAddr("172.16.2.1")}))
		settle(t, c, time.Minute)
		mustHave(t, n, view.SourceOutside, n.Config.Node)
		must(t, n.Announce("x", prefixes.Announcement{Prefix: netip.MustParsePrefix("172.16.1.0/24"), Source: netip.MustParseAddr("172.16.1.1")}))
		time.Sleep(5 * time.Second)
		check(t, c) // the routes are from there
		mustBeWell(t, c)
	})
}

func TestRule23_ADefaultRouteIsRefused(t *testing.T) {
	def := netip.MustParsePrefix("0.0.0.0/0")
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[1]
		must(t, n.AnnouncePrefixes("x", def, netip.MustParsePrefix("172.16.0.0/12")))
		settle(t, c, time.Minute)
		mustHave(t, n, view.PrefixRefused, n.Config.Node)
		// A node that does not ask itself is refused by the others.
		r, err := record.Parse(recordOf(c, n))
		must(t, err)
		n.Stop()
		r.Prefixes = r.Prefixes.With(def)
		data, err := record.Marshal(r)
		must(t, err)
		must(t, c.Store.Put(t.Context(), registry.Entry{ID: registry.NodeID(r.ID), Data: data}))
		time.Sleep(time.Second)
		check(t, c)
		mustHave(t, c.Nodes[0], view.PrefixRefused, n.Config.Node)
	})
	allow := meshtest.Options{Configure: func(n *meshtest.Node, c *mesh.Config) {
		c.Accept = func(node string, p netip.Prefix) bool { return node == "n00001" || mesh.AcceptNarrow(node, p) }
		if n.Index == 1 {
			c.Announce = append(c.Announce, def)
		}
	}}
	started(t, allow, func(t *testing.T, c *meshtest.Cluster) {
		if to, ok := c.Nodes[0].Device.Send(netip.MustParseAddr("8.8.8.8")); !ok || to != c.Nodes[1].Config.Key.Public() {
			t.Error("the default route does not lead to who may have it")
		}
	})
}
