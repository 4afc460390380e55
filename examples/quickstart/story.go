package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/prefixes"
)

// The prefix that moves, and an address in it.
var (
	movingPrefix = netip.MustParsePrefix("10.90.0.0/24")
	movingAddr   = netip.MustParseAddr("10.90.0.10")
)

// calm is how long the transfer runs undisturbed between changes.
const calm = 1200 * time.Millisecond

// cluster is all the nodes there are now.
type cluster struct {
	records *memory.Registry // where the nodes find each other; elsewhere, a store that they all reach
	nodes   []*node
}

// run is the whole story.
func run(ctx context.Context, s *screen) (err error) {
	start := time.Now()
	c := &cluster{records: memory.New()}
	defer func() { err = errors.Join(err, c.close()) }()

	s.printf("Three nodes in this process. Each has a WireGuard device and a network stack of its own.\n\n")
	if err := c.begin(ctx, s); err != nil {
		return c.explain(err)
	}
	s.table(c.nodes)

	s.printf("The mesh changes while data is on its way.\n\n")
	r, err := c.change(ctx, s)
	if err != nil {
		return c.explain(err)
	}
	s.table(c.nodes)
	r.print(s.out)
	if err := r.verify(); err != nil {
		return c.explain(err)
	}
	s.printf("\nNo byte was lost. That took %.1f s.\n", time.Since(start).Seconds())
	return s.out.err
}

// begin makes a mesh of three nodes.
func (c *cluster) begin(ctx context.Context, s *screen) error {
	for i, name := range []string{"amsterdam", "berlin", "cairo"} {
		if err := c.add(name, byte(i+1)); err != nil {
			return err
		}
	}
	err := s.step(ctx, "amsterdam, berlin and cairo join", func() error { return c.settled(ctx) })
	if err != nil {
		return err
	}
	err = s.step(ctx, "each fetches a page from every other", func() error { return c.fetchAll(ctx, c.nodes) })
	if err != nil {
		return err
	}
	return s.step(ctx, "each counts what it sent and received", func() error { return c.counted(ctx) })
}

// change changes the mesh under a transfer.
func (c *cluster) change(ctx context.Context, s *screen) (r result, err error) {
	amsterdam, berlin, cairo := c.nodes[0], c.nodes[1], c.nodes[2]
	t := newTransfer(ctx, amsterdam, cairo, movingAddr)
	defer t.finish() // also when a step fails
	step := func(what string, do func() error) {
		if err != nil {
			return
		}
		err = s.step(ctx, what, func() error {
			if err := do(); err != nil {
				return err
			}
			return errors.Join(pause(ctx, calm), t.failure())
		})
	}

	step(fmt.Sprintf("berlin announces %v; data flows to it and cairo", movingPrefix), func() error {
		if err := errors.Join(t.receive(berlin), c.announce(ctx, berlin)); err != nil {
			return err
		}
		if err := c.routed(ctx, berlin); err != nil {
			return err
		}
		return t.start()
	})
	s.show(t.progress)
	defer s.show(nil)
	step("delhi joins, fetches and serves pages", func() error {
		if err := c.add("delhi", 4); err != nil {
			return err
		}
		if err := c.settled(ctx); err != nil {
			return err
		}
		return c.fetchAll(ctx, c.nodes[3:])
	})
	step(fmt.Sprintf("%v moves to delhi", movingPrefix), func() error {
		return c.move(ctx, t, berlin, c.nodes[3])
	})
	step("berlin leaves, and its peers drop it", func() error { return c.leave(ctx, berlin) })
	if err == nil {
		err = s.step(ctx, "what is still on its way arrives", func() error {
			if r, err = t.finish(); err != nil {
				return err
			}
			return pause(ctx, audit+100*time.Millisecond) // the table is as of the last audit
		})
	}
	r.before, r.after = "berlin", "delhi"
	return r, err
}

// add makes and starts a node.
func (c *cluster) add(name string, number byte) error {
	n, err := newNode(name, netip.AddrFrom4([4]byte{10, 80, 0, number}), c.records.Handle())
	if err != nil {
		return err
	}
	c.nodes = append(c.nodes, n)
	return nil
}

// settled waits until every node has every other as a peer, and sends to it.
func (c *cluster) settled(ctx context.Context) error {
	for _, n := range c.nodes {
		err := n.until(ctx, fmt.Sprintf("it had %d peers", len(c.nodes)-1), func(v mesh.View) bool {
			waiting := slices.ContainsFunc(v.Peers, func(p mesh.Peer) bool { return p.Prefixes.IsEmpty() })
			return len(v.Peers) == len(c.nodes)-1 && !waiting
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// counted waits until every node has read a handshake with every peer, and some bytes, off its device.
func (c *cluster) counted(ctx context.Context) error {
	for _, n := range c.nodes {
		err := n.until(ctx, "it had a handshake with every peer", func(v mesh.View) bool {
			return !slices.ContainsFunc(v.Peers, func(p mesh.Peer) bool { return p.LastHandshake.IsZero() || p.Received == 0 })
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// fetchAll has each of some nodes fetch from all others, and all others fetch from it.
func (c *cluster) fetchAll(ctx context.Context, some []*node) error {
	for _, a := range some {
		for _, b := range c.nodes {
			if a == b {
				continue
			}
			if err := errors.Join(expect(ctx, a, b), expect(ctx, b, a)); err != nil {
				return err
			}
		}
	}
	return nil
}

// expect has one node fetch from another.
func expect(ctx context.Context, from, to *node) error {
	who, err := from.fetch(ctx, to.addr)
	if err == nil && who != to.name {
		err = fmt.Errorf("%s asked %s at %v, and %q answered", from.name, to.name, to.addr, who)
	}
	return err
}

// announce has a node announce the moving prefix, and waits until the registry has it.
func (c *cluster) announce(ctx context.Context, n *node) error {
	if err := n.mesh.Prefixes().Announce("quickstart", prefixes.Announcement{Prefix: movingPrefix}); err != nil {
		return err
	}
	return n.until(ctx, fmt.Sprintf("its record with %v was published", movingPrefix), func(v mesh.View) bool {
		return v.Self.Published && v.Self.Record.Prefixes.Has(movingPrefix)
	})
}

// move makes before it breaks: the new node announces the prefix before the old one withdraws it. While
// both do, the one whose ID sorts first has it, on every node, and the other has a condition that says
// so. What the old one is still sent, it accepts for a while (Config.Linger).
func (c *cluster) move(ctx context.Context, t *transfer, from, to *node) error {
	if err := errors.Join(t.receive(to), c.announce(ctx, to)); err != nil {
		return err
	}
	if err := from.mesh.Prefixes().Announce("quickstart"); err != nil { // nothing any more
		return err
	}
	return c.routed(ctx, to)
}

// routed waits until all others send what is for the moving prefix to one node.
func (c *cluster) routed(ctx context.Context, to *node) error {
	for _, n := range c.nodes {
		if n == to {
			continue
		}
		err := n.until(ctx, fmt.Sprintf("%v went to %s", movingPrefix, to.name), func(v mesh.View) bool {
			p, ok := v.Peer(to.name)
			return ok && p.Prefixes.Has(movingPrefix)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// leave takes a node out of the mesh, and waits until no other has it as a peer.
func (c *cluster) leave(ctx context.Context, n *node) error {
	if err := n.leave(ctx); err != nil {
		return err
	}
	c.nodes = slices.DeleteFunc(c.nodes, func(o *node) bool { return o == n })
	return errors.Join(n.close(), c.settled(ctx))
}

func (c *cluster) close() error {
	var errs []error
	for _, n := range c.nodes {
		errs = append(errs, n.close())
	}
	return errors.Join(errs...)
}

// explain adds to an error what each node says is wrong. An output that cannot be written is not theirs.
func (c *cluster) explain(err error) error {
	if errors.Is(err, errOutput) {
		return err
	}
	var b strings.Builder
	for _, n := range c.nodes {
		view, _ := n.mesh.Current()
		fmt.Fprintf(&b, "\n  %s: %d peers, %d conditions", n.name, len(view.Peers), len(view.Conditions))
		for _, condition := range view.Conditions {
			fmt.Fprintf(&b, "\n    %v", condition)
		}
	}
	return fmt.Errorf("%w\nThe nodes say:%s", err, b.String())
}

// pause lets the transfer run on.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
