package meshtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/mesh/registry"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/prefixes"
)

// errChaos is the error of everything that is made to fail.
var errChaos = errors.New("meshtest: made to fail")

// step is one thing that can happen to a node; can says whether it can happen to n now.
type step struct {
	weight int
	name   string
	can    func(n *Node) bool
	do     func(ctx context.Context, n *Node, r *rand.Rand) error
}

func always(*Node) bool        { return true }
func running(n *Node) bool     { return n.Running() }
func stopped(n *Node) bool     { return !n.Running() }
func ownStore(n *Node) bool    { return n.Registry != nil }
func ownDevice(n *Node) bool   { return n.Device != nil }
func bothRun(n *Node) bool     { return n.Running() && n.Device != nil }
func storeAndRun(n *Node) bool { return n.Running() && n.Registry != nil }

var steps = []step{
	{8, "announces", always, func(_ context.Context, n *Node, r *rand.Rand) error { return n.announceAny(r) }},
	{6, "starts", stopped, func(_ context.Context, n *Node, _ *rand.Rand) error { n.Start(); return nil }},
	{2, "stops", running, func(_ context.Context, n *Node, _ *rand.Rand) error { n.Stop(); return nil }},
	{2, "restarts", running, func(_ context.Context, n *Node, _ *rand.Rand) error { n.Restart(); return nil }},
	{2, "boots", running, func(_ context.Context, n *Node, _ *rand.Rand) error { n.Renew(); return nil }},
	{2, "leaves", running, func(ctx context.Context, n *Node, _ *rand.Rand) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if err := n.Leave(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		return nil
	}},

	{3, "loses the registry", ownStore, func(_ context.Context, n *Node, _ *rand.Rand) error { n.Registry.Cut(); return nil }},
	{4, "has the registry back after a gap", ownStore, func(_ context.Context, n *Node, _ *rand.Rand) error { n.Registry.Heal(); return nil }},
	{4, "has the registry back without a gap", ownStore, func(_ context.Context, n *Node, _ *rand.Rand) error { n.Registry.Resume(); return nil }},
	{2, "has the registry's history compacted", ownStore, func(_ context.Context, n *Node, _ *rand.Rand) error { n.Registry.Compact(); return nil }},
	{2, "cannot write to the registry", ownStore, func(_ context.Context, n *Node, r *rand.Rand) error {
		n.Registry.FailNext(1+r.IntN(3), errChaos)
		return nil
	}},
	{2, "loses answers of the registry", ownStore, func(_ context.Context, n *Node, r *rand.Rand) error {
		n.Registry.FailNext(1+r.IntN(3), regmem.Late(errChaos))
		return nil
	}},
	{2, "has a slow registry", ownStore, func(_ context.Context, n *Node, r *rand.Rand) error {
		d := time.Duration(r.IntN(3000)) * time.Millisecond
		n.Registry.SetDelay(func(string, string) time.Duration { return d })
		return nil
	}},
	{1, "has its record deleted", storeAndRun, func(ctx context.Context, n *Node, _ *rand.Rand) error {
		return n.cluster.Store.Delete(ctx, registry.NodeID(n.Config.Node))
	}},
	{1, "has its record overwritten with rubbish", storeAndRun, func(ctx context.Context, n *Node, _ *rand.Rand) error {
		return n.cluster.Store.Put(ctx, registry.Entry{ID: registry.NodeID(n.Config.Node), Data: []byte("{")})
	}},

	{2, "has a device that fails", ownDevice, func(_ context.Context, n *Node, r *rand.Rand) error {
		for range 1 + r.IntN(3) {
			n.Device.FailOp(1+r.IntN(5), errChaos)
		}
		return nil
	}},
	{1, "has a slow device", ownDevice, func(_ context.Context, n *Node, r *rand.Rand) error {
		n.Device.Slow(time.Duration(r.IntN(100)) * time.Millisecond)
		return nil
	}},
	{3, "has its device changed by someone else", bothRun, func(ctx context.Context, n *Node, r *rand.Rand) error { return n.drift(ctx, r) }},
}

// Chaos does count random things to random nodes, with random pauses of up to two seconds in between. What it does is
// a function of Options.Seed, and logged. Faults stay until Mend, or until chance ends them.
func (c *Cluster) Chaos(ctx context.Context, count int) error {
	c.tb.Helper()
	total := 0
	for _, s := range steps {
		total += s.weight
	}
	for i := 0; i < count && ctx.Err() == nil; {
		n := c.Nodes[c.rand.IntN(len(c.Nodes))]
		at := c.rand.IntN(total)
		for _, s := range steps {
			if at -= s.weight; at >= 0 {
				continue
			}
			if !s.can(n) {
				break
			}
			i++
			c.tb.Logf("meshtest: seed %d, step %d: %v %s", c.opts.Seed, i, n, s.name)
			if err := s.do(ctx, n, c.rand); err != nil {
				return fmt.Errorf("seed %d, step %d: %v %s: %w", c.opts.Seed, i, n, s.name, err)
			}
			if c.rand.IntN(2) == 0 {
				select {
				case <-time.After(time.Duration(c.rand.IntN(2000)) * time.Millisecond):
				case <-ctx.Done():
				}
			}
			break
		}
	}
	return ctx.Err()
}

// Mend ends all faults of registry and devices that Chaos may have begun.
func (c *Cluster) Mend() {
	for _, n := range c.Nodes {
		if n.Registry != nil {
			n.Registry.Heal()
			n.Registry.FailNext(0, nil)
			n.Registry.SetFault(nil)
			n.Registry.SetDelay(nil)
		}
		if n.Device != nil {
			n.Device.Fault(nil)
			n.Device.Slow(0)
		}
	}
}

// announceAny announces some of a few prefixes that all nodes contend for: equal ones, parts of one
// another, parts of what is another node's own, and some that policy refuses.
func (n *Node) announceAny(r *rand.Rand) error {
	var as []prefixes.Announcement
	for range r.IntN(4) {
		var p netip.Prefix
		switch k := byte(r.IntN(4)); r.IntN(7) {
		case 0:
			p = netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, k, 0}), 24)
		case 1:
			p = netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, k, 128 * (k & 1)}), 25)
		case 2:
			p = netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, 0, 0}), 16+int(k))
		case 3:
			p = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(r.IntN(len(n.cluster.Nodes))), 64 * k}), 26)
		case 4:
			p = netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x88, 7: k}), 64)
		case 5:
			p = n.cluster.Nodes[r.IntN(len(n.cluster.Nodes))].Config.Announce[0]
		case 6:
			p = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0"), netip.MustParsePrefix("169.254.1.0/24"), netip.MustParsePrefix("172.0.0.0/7")}[k]
		}
		a := prefixes.Announcement{Prefix: p}
		if r.IntN(4) == 0 && p.Addr().Is4() && len(n.Config.Addresses) > 0 {
			a.Source = n.Config.Addresses[0]
		}
		as = append(as, a)
	}
	return ignoreRefused(n.Announce(fmt.Sprintf("chaos-%d", r.IntN(2)), as...))
}

// ignoreRefused is for announcements that are to be refused: they are conditions, not errors of a step.
func ignoreRefused(error) error { return nil }

// drift does one random thing to n's device that no one asked for.
func (n *Node) drift(ctx context.Context, r *rand.Rand) error {
	st, err := n.Device.Read(ctx)
	if err != nil || !st.Device.Exists() {
		return err
	}
	o := n.cluster.Nodes[r.IntN(len(n.cluster.Nodes))]
	of := prefixes.Must(o.Config.Announce...)
	stranger := Key(n.cluster.opts.Seed, -1).Public()
	op := []datapath.Op{
		datapath.RemovePeer{Key: o.public()},
		datapath.PutPeer{Key: stranger, Peer: datapath.Peer{Prefixes: of}}, // takes them from o
		datapath.DropPrefixes{Key: o.public(), Prefixes: of},
		datapath.RemoveRoutes{Prefixes: of},
		datapath.AddRoutes{Routes: []datapath.Route{{Prefix: netip.MustParsePrefix("172.31.0.0/24")}}},
		datapath.RemoveAddrs{Addrs: st.Addrs},
		datapath.RemoveLocal{Prefixes: st.Local},
		datapath.RemoveDevice{},
	}[r.IntN(8)]
	return n.Device.Drift(op)
}
