package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/examples/agent/internal/nearest"
	"github.com/warren-mesh/warren/mesh/view"
)

// lookup returns the addresses of a host of the mesh, which is an address, the name of a node, or that and
// the name of the mesh: alpha.warren. A node's own name goes first, as it may have dots as well. No name
// service is asked: what is not in the mesh is not found.
func lookup(v view.View, own []netip.Addr, mesh, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return []netip.Addr{a.Unmap()}, nil
	}
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	short, _ := strings.CutSuffix(name, "."+mesh)
	for _, n := range []string{name, short} {
		if n == v.Self.Node {
			return slices.Clone(own), nil
		}
		if p, ok := v.Peer(n); ok {
			var as []netip.Addr
			for q := range p.Addresses.All() {
				as = append(as, q.Addr())
			}
			if len(as) == 0 {
				return nil, &control.Error{Code: control.Failed, Message: fmt.Sprintf("node %s has no address in the mesh", n)}
			}
			return as, nil
		}
	}
	return nil, noSuchNode(v, host)
}

func noSuchNode(v view.View, name string) error {
	names := []string{v.Self.Node}
	for _, p := range v.Peers {
		names = append(names, p.Node)
	}
	msg := fmt.Sprintf("no node is called %q", name)
	if near := nearest.To(name, names...); near != "" {
		msg += fmt.Sprintf(", did you mean %q?", near)
	}
	if !v.Ready {
		msg += "; the registry has not been read yet"
	}
	return &control.Error{Code: control.NoSuchNode, Message: msg}
}
