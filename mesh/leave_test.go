package mesh_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/meshtest"
	"github.com/warren-mesh/warren/mesh/registry"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
)

func gone(t testing.TB, c *meshtest.Cluster, n *meshtest.Node) {
	t.Helper()
	if data := recordOf(c, n); data != nil {
		t.Errorf("%v left, and its record is there: %s", n, data)
	}
	if st, err := n.Device.Read(t.Context()); err != nil || st.Device.Exists() {
		t.Errorf("%v left, and its device is there: %v", n, err)
	}
	for _, o := range c.Nodes {
		if o.Running() {
			if _, ok := current(o).Peer(n.Config.Node); ok {
				t.Errorf("%v left, and is a peer of %v", n, o)
			}
		}
	}
}

func TestRule09_LeavingWithdrawsTheRecord(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[1]
		must(t, n.Leave(after(t, time.Minute))) // and Run has returned ErrLeft
		settle(t, c, time.Minute)
		time.Sleep(time.Hour)
		gone(t, c, n)
		if v := current(n); v.Ready || len(v.Peers) > 0 {
			t.Errorf("the View of who left is %+v", v)
		}
		must(t, n.Leave(after(t, time.Minute))) // twice is harmless
		n.Start()                               // and it may come back
		settle(t, c, time.Minute)
	})
}

func TestLeaveWithoutARun(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[1]
		n.Stop()
		must(t, n.Leave(after(t, time.Minute)))
		settle(t, c, time.Minute)
		gone(t, c, n)
	})
}

// A record that is about to be put, or is being put, when the node leaves must not come after.
func TestLeavePutsNothingAgain(t *testing.T) {
	for delay := time.Duration(0); delay <= 120*time.Millisecond; delay += 10 * time.Millisecond {
		for _, fault := range []error{nil, errBroken, regmem.Late(errBroken)} {
			t.Run(fmt.Sprint(delay, fault), func(t *testing.T) {
				started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
					n := c.Nodes[1]
					n.Registry.SetDelay(func(string, string) time.Duration { return 100 * time.Millisecond })
					n.Registry.FailNext(1, fault)
					must(t, n.AnnouncePrefixes("late", netip.MustParsePrefix("172.16.1.0/24")))
					time.Sleep(delay)
					must(t, n.Leave(after(t, time.Minute)))
					time.Sleep(10 * time.Minute)
					gone(t, c, n)
				})
			})
		}
	}
}

// lateRegistry takes what was put even when whoever put it has gone away meanwhile.
type lateRegistry struct{ registry.Registry }

func (r lateRegistry) Put(ctx context.Context, e registry.Entry) error {
	return r.Registry.Put(context.WithoutCancel(ctx), e)
}

// The same where the put waits for the withdrawal, and could be done the moment that is over.
func TestLeaveBeforeAPutThatWaits(t *testing.T) {
	o := meshtest.Options{Configure: func(_ *meshtest.Node, c *mesh.Config) { c.Registry = lateRegistry{c.Registry} }}
	started(t, o, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[1]
		n.Registry.FailNext(1, errBroken)
		must(t, n.AnnouncePrefixes("late", netip.MustParsePrefix("172.16.1.0/24")))
		time.Sleep(100 * time.Millisecond) // it failed, and is tried again within a second
		n.Registry.SetDelay(func(op, _ string) time.Duration {
			if op == regmem.OpDelete {
				return 5 * time.Second
			}
			return 0
		})
		must(t, n.Leave(after(t, time.Minute)))
		time.Sleep(time.Minute)
		gone(t, c, n)
	})
}

func TestLeaveWithTheRegistryDown(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[1]
		n.Registry.Cut()
		err := n.Leave(after(t, time.Minute))
		if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, regmem.ErrCut) {
			t.Fatalf("error is %v", err)
		}
		check(t, c) // it forwards
		n.Registry.Heal()
		must(t, n.AnnouncePrefixes("later", netip.MustParsePrefix("172.16.1.0/24")))
		settle(t, c, time.Minute) // and goes on
		must(t, n.Leave(after(t, time.Minute)))
		settle(t, c, time.Minute)
		gone(t, c, n)
	})
}

func TestLeaveWithTheDeviceFailing(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[1]
		n.Device.Fault(func(op datapath.Op) error {
			if _, ok := op.(datapath.RemoveDevice); ok {
				return errBroken
			}
			return nil
		})
		if err := n.Leave(after(t, time.Minute)); !errors.Is(err, errBroken) {
			t.Fatalf("error is %v", err)
		}
		settle(t, c, time.Minute) // it is a member as before, with its record put again
		n.Device.Fault(nil)
		must(t, n.Leave(after(t, time.Minute)))
		settle(t, c, time.Minute)
		gone(t, c, n)
	})
}

// A Leave that finds the Run on its way out does the work itself.
func TestLeaveWhileRunEnds(t *testing.T) {
	for range 20 {
		started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
			n := c.Nodes[1]
			n.Registry.SetDelay(func(string, string) time.Duration { return time.Second })
			left := make(chan error)
			m := n.Mesh()
			go func() { left <- m.Leave(after(t, time.Minute)) }()
			time.Sleep(100 * time.Millisecond)
			n.Stop()
			must(t, <-left)
			time.Sleep(time.Minute)
			gone(t, c, n)
		})
	}
}

func TestLeaveWithAClosedDatapath(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[1]
		must(t, n.Device.Close())
		if err := n.Mesh().Leave(t.Context()); !errors.Is(err, net.ErrClosed) {
			t.Errorf("error is %v", err)
		}
	})
}

func TestTwoRunsAtATime(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		if err := c.Nodes[0].Mesh().Run(t.Context()); !errors.Is(err, mesh.ErrRunning) {
			t.Errorf("error is %v", err)
		}
		check(t, c)
		c.Store.SetDelay(nil)
		n := c.Nodes[1]
		n.Registry.Cut()
		n.Stop()
		left := make(chan error)
		go func() { left <- n.Mesh().Leave(after(t, time.Minute)) }()
		time.Sleep(time.Second)
		if err := n.Mesh().Run(t.Context()); !errors.Is(err, mesh.ErrLeft) {
			t.Errorf("a Run while leaving returned %v", err)
		}
		if err := <-left; err == nil {
			t.Error("it left with the registry down")
		}
	})
}

// Deleting what is absent is no error, so leaving without ever having joined is none.
func TestLeaveWithoutHavingJoined(t *testing.T) {
	bubble(t, meshtest.Options{Nodes: 1}, func(t *testing.T, c *meshtest.Cluster) {
		m, err := mesh.New(c.Nodes[0].Config)
		must(t, err)
		must(t, m.Leave(t.Context()))
		if n := len(c.Store.Snapshot().Entries); n != 0 {
			t.Errorf("%d records", n)
		}
	})
}
