package netstack

import (
	"net/netip"

	"github.com/gaissmai/bart"

	"github.com/warren-mesh/warren/datapath/key"
)

// table is what the packet path knows, as one immutable value: a packet is judged by one table, and a
// change never makes one wait.
type table struct {
	hops  *bart.Table[hop]        // Routes, Local and Addrs, by prefix
	own   *bart.Lite              // Local and Addrs: what is accepted when it arrives
	peers *bart.Table[key.Public] // who has a prefix
	src4  netip.Addr              // the first of Addrs, by family; zero: none
	src6  netip.Addr
}

// hop says what becomes of packets for a prefix. More than one of the flags may be set.
type hop struct {
	addr   bool       // one of Addrs
	local  bool       // one of Local
	route  bool       // one of Routes
	source netip.Addr // of the route; zero: the first of Addrs
}

func newTable() *table {
	return &table{hops: new(bart.Table[hop]), own: new(bart.Lite), peers: new(bart.Table[key.Public])}
}

// verdict is what becomes of a packet this node sends.
type verdict uint8

const (
	unreachable verdict = iota // no prefix has the address
	outside                    // into the device
	inside                     // to this node itself
)

// send judges a destination by the longest prefix. Where Local and Routes have the same one, the route
// wins: so it is while a prefix is on its way from one node to another. An address of this node is
// this node, whatever is routed.
func (t *table) send(dst netip.Addr) (verdict, hop) {
	h, ok := t.hops.Lookup(dst)
	switch {
	case !ok:
		return unreachable, hop{}
	case h.addr:
		return inside, h
	case h.route:
		return outside, h
	}
	return inside, h
}

// accepts reports whether packets for dst are accepted when they arrive.
func (t *table) accepts(dst netip.Addr) bool { return t.own.Contains(dst) }

// mine reports whether a is this node's own, so that no peer may send from it: a peer that has a wider
// prefix may, as far as WireGuard is concerned.
func (t *table) mine(a netip.Addr) bool {
	if !t.own.Contains(a) {
		return false
	}
	own, ok := t.own.LookupPrefixLPM(netip.PrefixFrom(a, a.BitLen()))
	peers, _, has := t.peers.LookupPrefixLPM(netip.PrefixFrom(a, a.BitLen()))
	return ok && (!has || own.Bits() > peers.Bits() || t.isAddr(a)) // the same prefix is moving
}

// isAddr reports whether a is one of Addrs.
func (t *table) isAddr(a netip.Addr) bool {
	h, ok := t.hops.Get(netip.PrefixFrom(a, a.BitLen()))
	return ok && h.addr
}

// source returns the address of this node for packets to dst that have none yet; zero: there is none.
func (t *table) source(dst netip.Addr) netip.Addr {
	v, h := t.send(dst)
	switch {
	case v == inside:
		return dst
	case v == outside && h.source.IsValid():
		return h.source
	case dst.Is4():
		return t.src4
	}
	return t.src6
}

// edit is a table that is being changed.
type edit struct{ table }

func (e *edit) hop(p netip.Prefix, change func(*hop)) {
	e.hops = e.hops.ModifyPersist(p, func(h hop, _ bool) (hop, bool) {
		change(&h)
		return h, !h.addr && !h.local && !h.route
	})
	if h, _ := e.hops.Get(p); h.addr || h.local {
		e.own = e.own.InsertPersist(p)
	} else {
		e.own = e.own.DeletePersist(p)
	}
}
