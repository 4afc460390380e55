package netstack

import (
	"net/netip"
	"slices"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// bound is where a TCP listener listens.
type bound struct {
	addr   netip.Addr // or an unspecified one
	v4, v6 bool
}

func newBound(a netip.Addr, proto tcpip.NetworkProtocolNumber, only6 bool) *bound {
	is4 := proto == header.IPv4ProtocolNumber
	return &bound{a, is4 || a.IsUnspecified() && !only6, !is4}
}

// overlaps reports whether one connection could be for both.
func (b *bound) overlaps(o *bound) bool {
	return (b.v4 && o.v4 || b.v6 && o.v6) && (b.addr.IsUnspecified() || o.addr.IsUnspecified() || b.addr == o.addr)
}

// claim has no other listener be where b is until release is called. The stack itself keeps a port for every connection
// that it has had there, until minutes after, or, told otherwise (SO_REUSEADDR), for none that listens.
func (n *Net) claim(port uint16, b *bound) (release func(), err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if slices.ContainsFunc(n.bound[port], b.overlaps) {
		return nil, syscall.EADDRINUSE
	}
	if n.bound == nil {
		n.bound = make(map[uint16][]*bound)
	}
	n.bound[port] = append(n.bound[port], b)
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.bound[port] = slices.DeleteFunc(n.bound[port], func(o *bound) bool { return o == b })
		if len(n.bound[port]) == 0 {
			delete(n.bound, port)
		}
	}, nil
}
