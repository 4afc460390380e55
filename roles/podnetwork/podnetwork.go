// Package podnetwork is the role of a node that has pods: it announces their networks to the mesh, each with its first
// address as the source of what the node itself sends there, so that the pods of others answer to it.
//
// Which networks these are is said by a [Source]: a [Value], a [File], or what the host-local plugin of CNI is
// configured with ([CNI]).
package podnetwork

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles"
	"github.com/warren-mesh/warren/roles/part"
)

// Name is that of the role.
const Name = "pod-network"

// The conditions of the role.
const (
	Unreadable   view.Kind = "pod-network-unreadable"    // the source cannot be read; what it said last holds
	NotAnnounced view.Kind = "pod-network-not-announced" // the mesh does not take a network, or there is none
)

// Network is a network of pods.
type Network struct {
	Prefix netip.Prefix
	// Gateway is the node's own address in it; the zero Addr: the first of Prefix.
	Gateway netip.Addr
}

// Source says which networks the pods of this node have.
type Source interface {
	// Current returns what is known, and a channel that closes when that is out of date; nil: never.
	Current() (Reading, <-chan struct{})
	// Run keeps it up to date until ctx ends.
	Run(ctx context.Context) error
}

// Reading is what a Source knows. It is shared by all who asked for it, and not to be written to.
type Reading struct {
	Networks []Network
	Known    bool  // else Networks are not known yet, which is not the same as none
	Err      error // why they cannot be read now; Networks are those that were known last
}

// Value is the same networks for ever, each with its first address.
func Value(ps ...netip.Prefix) Source {
	v := make(value, len(ps))
	for i, p := range ps {
		v[i] = Network{Prefix: p}
	}
	return v
}

type value []Network

func (v value) Current() (Reading, <-chan struct{}) { return Reading{Networks: v, Known: true}, nil }

func (v value) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Role announces pod networks. Make one by New.
type Role struct {
	source Source
	known  atomic.Bool // and announced
}

// New returns a Role that announces what s says.
func New(s Source) *Role { return &Role{source: s} }

// Name implements roles.Role.
func (r *Role) Name() string { return Name }

// Run implements roles.Role.
func (r *Role) Run(ctx context.Context, n roles.Node) error {
	n.Go("reading the networks", func(ctx context.Context) error {
		if err := r.source.Run(ctx); err != nil || ctx.Err() != nil {
			return err
		}
		return part.ErrEnded
	})
	defer r.known.Store(false)
	var was []prefixes.Announcement
	var refused error
	for first := true; ; {
		is, changed := r.source.Current()
		var wrong []view.Condition
		if is.Err != nil {
			wrong = append(wrong, view.Condition{Kind: Unreadable, Message: is.Err.Error(), Remedy: "the networks that were known last are announced until it can be read"})
		}
		if now := Announcements(is.Networks...); is.Known && (first || !slices.Equal(now, was)) {
			refused = n.Announce(now...)
			if errors.Is(refused, roles.ErrEnded) {
				return refused
			}
			n.Logger().Info("announces the pods' networks", "networks", now)
			was, first = now, false
			// Of several, others may be taken.
			r.known.Store(refused == nil || len(now) > 1)
		}
		if refused != nil {
			wrong = append(wrong, view.Condition{Kind: NotAnnounced, Message: refused.Error()})
		}
		n.Report(wrong...)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			time.Sleep(pace)
		}
	}
}

// pace is how long there is between two looks at least, whatever a Source says.
const pace = 10 * time.Millisecond

// Probe implements roles.Prober: it is healthy once it has announced.
func (r *Role) Probe(context.Context) error {
	if !r.known.Load() {
		return errors.New("the networks are not known yet")
	}
	return nil
}

// Announcements are networks as they are announced, in order, each once.
func Announcements(nets ...Network) []prefixes.Announcement {
	var as []prefixes.Announcement
	for _, n := range nets {
		p, _, err := prefixes.Canonical(n.Prefix)
		if err != nil {
			p = n.Prefix // the mesh says what is wrong with it
		}
		a := prefixes.Announcement{Prefix: p, Source: n.Gateway}
		if !a.Source.IsValid() && p.IsValid() {
			a.Source = First(p)
		}
		as = append(as, a)
	}
	slices.SortStableFunc(as, func(a, b prefixes.Announcement) int { return prefixes.Compare(a.Prefix, b.Prefix) })
	return slices.CompactFunc(as, func(a, b prefixes.Announcement) bool { return a.Prefix == b.Prefix })
}

// First returns the first address of p that a host can have: the one after the network's own (RFC 950, RFC 4291
// section 2.6.1), but where there are no more than two addresses (RFC 3021, RFC 6164), the very first.
func First(p netip.Prefix) netip.Addr {
	a := p.Masked().Addr()
	if p.Bits() >= a.BitLen()-1 {
		return a
	}
	return a.Next()
}

// check says what is wrong with a network.
func check(n Network) error {
	switch p, masked, err := prefixes.Canonical(n.Prefix); {
	case err != nil:
		return err
	case masked:
		return fmt.Errorf("%v: has host bits; the network is %v", n.Prefix, p)
	case n.Gateway.IsValid() && !p.Contains(n.Gateway.Unmap()):
		return fmt.Errorf("gateway %v: is not in %v", n.Gateway, p)
	}
	return nil
}
