package core

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// node is what is known of a node, this one included.
type node struct {
	id     string
	known  bool // rec is a record that is believed
	rec    record.Record
	opened identity.Opened
	key    key.Public

	onDevice key.Public // the key whose wanted peer is this node's; zero: none

	refused  bool         // some of what it claims
	accepted prefixes.Set // of what it claims, what policy allows
	claimed  prefixes.Set // what of it stands in Machine.claims
	routable bool         // it is a peer on the device
	won      prefixes.Set // what goes to it from here
	gain     []netip.Prefix
	loss     []netip.Prefix

	trial trial
}

// records takes in a batch of the registry.
func (m *Machine) records(now time.Time, in Records) {
	m.clear(view.RegistryDown, "", "")
	m.revision = in.Revision
	m.changed = true
	var seen map[string]bool
	if in.Reset {
		seen = make(map[string]bool, len(in.Put))
	}
	sawSelf := false
	for _, o := range in.Put {
		if in.Reset {
			seen[o.Node] = true
		}
		if o.Node == m.cfg.Node {
			sawSelf = true
			m.sawSelf(now, o, in.Reset)
			continue
		}
		m.put(now, o)
	}
	for _, id := range in.Deleted {
		if id == m.cfg.Node {
			m.lostSelf(now)
		} else {
			m.drop(now, id)
		}
	}
	if !in.Reset {
		return
	}
	for id := range m.nodes {
		if !seen[id] && id != m.cfg.Node {
			m.drop(now, id)
		}
	}
	for k := range m.conditions { // of nodes that never had a good record
		if k.kind == view.RecordRefused && !seen[k.node] {
			m.clear(k.kind, k.node, k.subject)
		}
	}
	if !sawSelf {
		m.lostSelf(now)
	}
	if !m.reset {
		m.reset, m.full = true, true
	}
}

// put takes in one record of another node. What is not believed leaves the last good one in force,
// unless it says that the node was revoked.
func (m *Machine) put(now time.Time, o Opened) {
	if o.Same {
		return
	}
	if errors.Is(o.Err, identity.ErrRevoked) {
		m.drop(now, o.Node)
		m.raise(now, view.RecordRefused, o.Node, "", "revoked: "+o.Err.Error(), "enrol the node again if it is to come back")
		return
	}
	if o.Err != nil {
		msg := "its record is not believed: " + o.Err.Error()
		if n := m.nodes[o.Node]; n != nil && n.known {
			msg += "; the last good one stays in force"
		}
		m.raise(now, view.RecordRefused, o.Node, "", msg, "mend or restart the node, or delete its record")
		return
	}
	m.clear(view.RecordRefused, o.Node, "")
	n := m.nodes[o.Node]
	if n == nil {
		n = &node{id: o.Node}
		m.nodes[o.Node] = n
	}
	if n.known && o.ValidAt(now) && record.Equal(n.rec, o.Record) && n.opened.NotBefore.Equal(o.NotBefore) && n.opened.NotAfter.Equal(o.NotAfter) {
		return
	}
	m.bound(n, o.Opened)
	if !o.ValidAt(now) {
		// Set aside rather than forgotten: the bound may be ahead.
		m.raise(now, view.RecordExpired, n.id, "", fmt.Sprintf("its record is valid from %v to %v", o.NotBefore, o.NotAfter), "renew the node's certificate")
		m.believe(now, n, nil)
		return
	}
	m.clear(view.RecordExpired, n.id, "")
	m.believe(now, n, &o.Record)
}

func (m *Machine) bound(n *node, o identity.Opened) {
	was, is := n.hasBound(), !o.NotBefore.IsZero() || !o.NotAfter.IsZero()
	n.opened = o
	if is && !was {
		m.bounded++
	} else if was && !is {
		m.bounded--
	}
}

func (n *node) hasBound() bool { return !n.opened.NotBefore.IsZero() || !n.opened.NotAfter.IsZero() }

// expire applies the time bounds of records, and ends what lingers.
func (m *Machine) expire(now time.Time) {
	if m.bounded > 0 {
		for _, n := range m.nodes {
			if !n.hasBound() {
				continue
			}
			if n.opened.ValidAt(now) != n.known {
				m.put(now, Opened{Node: n.id, Opened: n.opened})
			}
		}
	}
	ended := false
	for p, at := range m.lingering {
		if !at.IsZero() && !now.Before(at) {
			delete(m.lingering, p)
			ended = true
		}
	}
	if ended {
		m.localChanged(now)
	}
	if m.doubles > 0 && now.Sub(m.doubledAt) > calm {
		m.doubles = 0
		m.clear(view.DuplicateNode, m.cfg.Node, "")
	}
}

func (m *Machine) nextBound() time.Time {
	var at time.Time
	if m.bounded == 0 {
		return at
	}
	for _, n := range m.nodes {
		t := n.opened.NotBefore
		if n.known {
			t = n.opened.NotAfter.Add(1) // both bounds are included
		}
		if n.hasBound() && !t.IsZero() && t.After(time.Unix(0, 1)) && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	return at
}

// drop forgets a node.
func (m *Machine) drop(now time.Time, id string) {
	n := m.nodes[id]
	for _, k := range []view.Kind{view.RecordRefused, view.RecordExpired, view.EndpointUnusable, view.NoHandshake} {
		m.clear(k, id, "")
	}
	if n == nil {
		return
	}
	if n.refused {
		m.clearAll(view.PrefixRefused, id, nil)
	}
	m.bound(n, identity.Opened{})
	m.believe(now, n, nil)
	delete(m.nodes, id)
	m.changed = true
}

// believe makes r the record of n in force; nil: it has none.
func (m *Machine) believe(now time.Time, n *node, r *record.Record) {
	m.changed = true
	m.unsettled[n] = struct{}{}
	m.touched[n] = struct{}{}
	if r == nil {
		if n.known {
			m.claimKey(n, key.Public{})
		}
		if n.known {
			m.countEndpoints(n.rec.Endpoints, -1)
		}
		n.known, n.accepted = false, prefixes.Set{}
		return
	}
	old := n.rec
	if !n.known {
		old = record.Record{}
	}
	n.rec = *r
	if n.key != r.Key || !n.known {
		m.claimKey(n, r.Key)
		n.trial = trial{}
	}
	n.known = true
	n.accepted = m.policy(now, n, r.Reachable())
	m.candidates(now, n, old)
}

// claimKey makes k the key that n claims; the zero key is none. All who claim the old or the new one
// are to be settled again.
func (m *Machine) claimKey(n *node, k key.Public) {
	touch := func(k key.Public) {
		for _, id := range m.byKey[k] {
			m.unsettled[m.nodes[id]] = struct{}{}
			m.touched[m.nodes[id]] = struct{}{}
		}
	}
	if !n.key.IsZero() {
		touch(n.key)
		if left := remove(m.byKey[n.key], n.id); len(left) > 0 {
			m.byKey[n.key] = left
		} else {
			delete(m.byKey, n.key)
		}
	}
	n.key = k
	if !k.IsZero() {
		m.byKey[k] = insert(m.byKey[k], n.id)
		touch(k)
	}
}

// Bounds of what is accepted without being asked for (rule 23), in bits of the prefix length.
const (
	widest4 = 8
	widest6 = 16
)

// Narrow reports whether p is at least /8 (IPv4) or /16 (IPv6).
func Narrow(p netip.Prefix) bool {
	if p.Addr().Is4() {
		return p.Bits() >= widest4
	}
	return p.Bits() >= widest6
}

var never = prefixes.MustParse(
	"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32", // RFC 6890
	"::/128", "::1/128", "fe80::/10", "ff00::/8") // RFC 4291

// Never reports whether p lies in a range whose addresses mean something else on every host, or are no
// unicast addresses: no policy can allow it.
func Never(p netip.Prefix) bool { return never.CoversPrefix(p) }

// policy returns what of claimed a node may have, and raises a condition for each prefix it may not.
func (m *Machine) policy(now time.Time, n *node, claimed prefixes.Set) prefixes.Set {
	var refused []netip.Prefix
	keep := map[string]bool{}
	for p := range claimed.All() {
		why := ""
		switch {
		case Never(p):
			why = "is loopback, link-local, multicast or unspecified"
		case m.cfg.Accept != nil:
			if !m.cfg.Accept(n.id, p) {
				why = "is not accepted by this node's policy"
			}
		case !Narrow(p):
			why = fmt.Sprintf("is wider than /%d (IPv4) or /%d (IPv6)", widest4, widest6)
		}
		if why == "" {
			continue
		}
		refused = append(refused, p)
		keep[p.String()] = true
		m.raise(now, view.PrefixRefused, n.id, p.String(), "prefix "+p.String()+" "+why, "allow it with Config.Accept, or stop announcing it")
	}
	if len(keep) > 0 || n.refused {
		m.clearAll(view.PrefixRefused, n.id, keep)
	}
	n.refused = len(keep) > 0
	return claimed.Without(refused...)
}

// settleClaims brings what n claims in the index in line with what it may claim.
func (m *Machine) settleClaims(now time.Time, n *node) {
	has := n.known && len(m.byKey[n.key]) > 0 && m.byKey[n.key][0] == n.id
	routable := has && n != m.self && n.key != m.pub
	if n.known {
		m.keyConflict(now, n, has)
	} else {
		m.clear(view.KeyConflict, n.id, "")
	}
	var target prefixes.Set
	if has || n == m.self {
		target = n.accepted
	}
	added, removed := prefixes.Diff(n.claimed, target)
	for p := range removed.All() {
		list, _ := m.claims.Get(p)
		if list = remove(list, n.id); len(list) > 0 {
			m.claims.Insert(p, list)
		} else {
			m.claims.Delete(p)
		}
		m.stale[p] = struct{}{}
	}
	for p := range added.All() {
		list, _ := m.claims.Get(p)
		m.claims.Insert(p, insert(list, n.id))
		m.stale[p] = struct{}{}
	}
	if routable != n.routable {
		n.routable = routable
		m.touched[n] = struct{}{}
		for p := range target.All() {
			m.stale[p] = struct{}{}
		}
	}
	n.claimed = target
}

func (m *Machine) keyConflict(now time.Time, n *node, has bool) {
	ids := m.byKey[n.key]
	if len(ids) < 2 {
		m.clear(view.KeyConflict, n.id, "")
		return
	}
	msg := fmt.Sprintf("its key %s is also claimed by %v; %s has it, the others are set aside", n.key.Short(), without(ids, n.id), ids[0])
	m.raise(now, view.KeyConflict, n.id, "", msg, "give every node a key of its own: remove the key file of the copied one")
}

func without(ids []string, id string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(s string) bool { return s == id })
}

// assign decides who has prefix p here: of all who claim it the lowest node ID (rule 10), unless it
// would take from this node what is its own or connected to it (rule 13).
func (m *Machine) assign(now time.Time, p netip.Prefix) {
	ids, _ := m.claims.Get(p)
	to := ""
	if len(ids) > 0 {
		if w := m.nodes[ids[0]]; w != nil && w.routable {
			to = ids[0]
		}
	}
	subject := p.String()
	for _, id := range m.losers[p] {
		if len(ids) < 2 || !slices.Contains(ids[1:], id) {
			m.clear(view.PrefixConflict, id, subject)
		}
	}
	delete(m.losers, p)
	if len(ids) > 1 {
		m.losers[p] = ids[1:]
		for _, id := range ids[1:] {
			m.raise(now, view.PrefixConflict, id, subject, fmt.Sprintf("prefix %s is claimed by %v; the lowest node ID, %s, has it everywhere", p, ids, ids[0]),
				"let just one node announce it")
		}
	}
	if to != "" && m.guard.CoversPrefix(p) {
		if !slices.Contains(ids, m.cfg.Node) {
			m.raise(now, view.LocalWins, to, subject, fmt.Sprintf("prefix %s lies in a network of this node", p), "")
			if was := m.inside[p]; was != to {
				m.clear(view.LocalWins, was, subject)
			}
			m.inside[p] = to
		}
		to = ""
	} else if was, ok := m.inside[p]; ok {
		m.clear(view.LocalWins, was, subject)
		delete(m.inside, p)
	}

	if at, loops := m.loops(p); to != "" && loops {
		if was := m.looping[p]; was != to {
			m.clear(view.EndpointLoops, was, subject)
		}
		m.looping[p] = to
		m.raise(now, view.EndpointLoops, to, subject, fmt.Sprintf("prefix %s has the endpoint %v of a node inside, so the tunnel would go through itself", p, at),
			"use a datapath that marks its packets out of the tunnel, or announce narrower prefixes")
		to = ""
	} else if was, ok := m.looping[p]; ok {
		m.clear(view.EndpointLoops, was, subject)
		delete(m.looping, p)
	}

	from, _ := m.assigned.Get(p)
	if from == to {
		return
	}
	m.changed = true
	if n := m.nodes[from]; from != "" && n != nil {
		n.loss = append(n.loss, p)
		m.touched[n] = struct{}{}
	}
	m.touchRoute(p)
	if to == "" {
		m.assigned.Delete(p)
		delete(m.want.Routes, p)
		return
	}
	n := m.nodes[to]
	n.gain = append(n.gain, p)
	m.touched[n] = struct{}{}
	m.assigned.Insert(p, to)
	m.want.Routes[p] = m.sourceFor(p)
}

func (m *Machine) withheld(n *node, p netip.Prefix) view.Withheld {
	w := view.Withheld{Node: n.id, Prefix: p}
	ids, _ := m.claims.Get(p)
	switch {
	case !n.accepted.Has(p):
		w.Kind = view.PrefixRefused
	case !n.routable:
		w.Kind, w.Winner = view.KeyConflict, m.byKey[n.key][0]
	case len(ids) > 0 && ids[0] != n.id:
		w.Kind, w.Winner = view.PrefixConflict, ids[0]
	case m.looping[p] == n.id:
		w.Kind = view.EndpointLoops
	default:
		w.Kind, w.Winner = view.LocalWins, m.cfg.Node
	}
	return w
}

// refresh brings the wanted peer of n up to date.
func (m *Machine) refresh(n *node) {
	if len(n.gain)+len(n.loss) > 0 {
		n.won = n.won.Without(n.loss...).With(n.gain...)
		n.gain, n.loss = nil, nil
	}
	if old := n.onDevice; !old.IsZero() && (old != n.key || !n.routable) {
		if m.peerOf[old] == n.id {
			delete(m.peerOf, old)
			delete(m.want.Peers, old)
			m.touchPeer(old)
		}
		n.onDevice = key.Public{}
		m.news.Left = append(m.news.Left, n.id)
		m.endTrial(n)
	}
	if !n.routable {
		return
	}
	if n.onDevice.IsZero() {
		m.news.Joined = append(m.news.Joined, n.id)
	}
	n.onDevice = n.key
	m.peerOf[n.key] = n.id
	want := datapath.Peer{Endpoint: n.trial.wanted(), Keepalive: m.keepalive(), Prefixes: n.won}
	if old, ok := m.want.Peers[n.key]; !ok || old != want {
		m.want.Peers[n.key] = want
		m.touchPeer(n.key)
	}
}

func (m *Machine) touchPeer(k key.Public) {
	m.dirty.Peers[k] = struct{}{}
	m.again(resource{peer: k})
	m.changed = true
}

func (m *Machine) touchRoute(p netip.Prefix) {
	m.dirty.Routes[p] = struct{}{}
	m.again(resource{route: p})
}

// again ends the wait of a resource of which something else is wanted now (rule 8).
func (m *Machine) again(r resource) {
	if _, ok := m.retry[r]; ok {
		m.retry[r] = attempt{}
	}
}

func (m *Machine) keepalive() time.Duration {
	switch {
	case m.cfg.Keepalive > 0:
		return m.cfg.Keepalive
	case m.cfg.Keepalive == 0 && len(m.cfg.Endpoints) == 0:
		return KeepaliveNAT
	}
	return 0
}
