package core

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// claimKey makes k the key that n claims; the zero key is none. Those whose standing that changes are to
// be settled again: the first of all who claim the old or the new key, and the others where that changed.
func (m *Machine) claimKey(n *node, k key.Public) {
	if n.key == k {
		return
	}
	change := func(k key.Public, f func([]string, string) []string) {
		if k.IsZero() {
			return
		}
		was := m.byKey[k]
		is := f(was, n.id)
		if len(is) > 0 {
			m.byKey[k] = is
		} else {
			delete(m.byKey, k)
		}
		for _, ids := range [][]string{was, is} {
			if len(was) > 0 && len(is) > 0 && was[0] == is[0] {
				ids = ids[:1]
			}
			for _, id := range ids {
				m.unsettle(m.nodes[id])
				m.touch(m.nodes[id])
			}
		}
	}
	change(n.key, remove)
	n.key = k
	change(k, insert)
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

var loopback6 = netip.IPv6Loopback()

// Never reports whether p lies in a range whose addresses mean something else on every host, or are no
// unicast addresses, or reaches from there into others: no policy can allow it. A default route may be
// allowed, for all that it has everything inside.
func Never(p netip.Prefix) bool {
	return never.CoversPrefix(p) || p.Bits() > 0 && p.Contains(loopback6)
}

// policy returns what of claimed a node may have, and raises a condition for each prefix it may not.
func (m *Machine) policy(now time.Time, n *node, claimed prefixes.Set) prefixes.Set {
	var refused []netip.Prefix
	keep := map[string]bool{}
	for p := range claimed.All() {
		why := ""
		switch {
		case Never(p):
			why = "is loopback, link-local, multicast or unspecified, or has ::1 inside"
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
		if len(refused) <= maxNamed { // in their order
			keep[p.String()] = true
			m.raise(now, view.PrefixRefused, n.id, p.String(), "prefix "+p.String()+" "+why, "allow it where this node is configured (Config.Accept; --accept-wide of the agent), or stop announcing it")
		}
	}
	if len(refused) > maxNamed {
		keep[""] = true
		m.raiseMore(now, view.PrefixRefused, n.id, len(refused)-maxNamed)
	}
	if len(keep) > 0 || n.refused {
		m.clearBut(view.PrefixRefused, n.id, keep)
	}
	n.refused = len(keep) > 0
	return claimed.Without(refused...)
}

// settleClaims brings what n claims in the index in line with what it may claim.
func (m *Machine) settleClaims(now time.Time, n *node) {
	var ids []string
	if n.known {
		ids = m.byKey[n.key]
	}
	m.keyConflict(now, n, ids)
	has := len(ids) > 0 && ids[0] == n.id
	// This node's own prefixes are its own whoever has its key elsewhere, and its own key is no peer's.
	var target prefixes.Set
	if has || n == m.self {
		target = n.accepted
	}
	routable := has && n.key != m.pub

	added, removed := prefixes.Diff(n.claimed, target)
	for p := range removed.All() {
		list, _ := m.claims.Get(p)
		if list = remove(list, n.id); len(list) > 0 {
			m.claims.Insert(p, list)
		} else {
			m.claims.Delete(p)
		}
		m.stale = append(m.stale, p)
	}
	for p := range added.All() {
		list, _ := m.claims.Get(p)
		m.claims.Insert(p, insert(list, n.id))
		m.stale = append(m.stale, p)
	}
	if routable != n.routable {
		n.routable = routable
		m.touch(n)
		m.recheck(n)
		for p := range target.All() {
			m.stale = append(m.stale, p)
		}
	}
	n.claimed = target
}

// keyConflict tells n what became of its key, which ids claim. Messages name one other: a cloned image
// may run a thousand times.
func (m *Machine) keyConflict(now time.Time, n *node, ids []string) {
	if len(ids) < 2 {
		m.clear(view.KeyConflict, n.id, "")
		return
	}
	msg := fmt.Sprintf("its key %s is also claimed by %s, which has it; this node is set aside", n.key.Short(), ids[0])
	if ids[0] == n.id {
		more := ""
		if len(ids) > 2 {
			more = fmt.Sprintf(" and %d more", len(ids)-2)
		}
		msg = fmt.Sprintf("its key %s is also claimed by %s%s; this node has it, and what else claims it is set aside", n.key.Short(), ids[1], more)
	}
	m.raise(now, view.KeyConflict, n.id, "", msg, "give every node a key of its own: remove the key file of the copied one")
}

// bar is why the winner of a prefix does not get it here.
type bar struct {
	node string
	kind view.Kind
}

// assign decides who has prefix p here: of all who claim it the lowest node ID (rule 10), unless it
// would take from this node what is its own or connected to it (rule 13), or would loop (rule 14).
func (m *Machine) assign(p netip.Prefix) {
	ids, _ := m.claims.Get(p)
	m.prefixConflict(p, ids)
	to := ""
	if len(ids) > 0 && m.nodes[ids[0]].routable {
		to = ids[0]
	}
	if m.barredFrom(p, to) {
		to = ""
	}

	from, _ := m.assigned.Get(p)
	if from == to {
		return
	}
	m.changed = true
	m.recheckInside(p)
	if n := m.nodes[from]; n != nil {
		n.loss = append(n.loss, p)
		m.touch(n)
	}
	m.touchRoute(p)
	if to == "" {
		m.assigned.Delete(p)
		delete(m.want.Routes, p)
		return
	}
	n := m.nodes[to]
	n.gain = append(n.gain, p)
	m.touch(n)
	m.assigned.Insert(p, to)
	m.want.Routes[p] = m.sourceFor(p)
}

// prefixConflict tells the losers of p that they are, and those who no longer are. While the winner is
// the same it is silent to all others: a prefix that thousands announce by mistake is to cost no more
// than the one that comes or goes.
func (m *Machine) prefixConflict(p netip.Prefix, ids []string) {
	told := m.contested[p]
	if len(told) == 0 && len(ids) < 2 {
		return
	}
	var lost, losers []string
	if len(told) > 0 {
		lost = told[1:]
	}
	if len(ids) > 1 {
		losers = ids[1:]
		m.contested[p] = ids
	} else {
		delete(m.contested, p)
	}
	onlyIn(lost, losers, func(id string) { m.unlist(view.PrefixConflict, id, p) })
	if len(losers) == 0 {
		return
	}
	if len(told) > 0 && told[0] != ids[0] {
		lost = nil // whom they lost to is another
	}
	onlyIn(losers, lost, func(id string) { m.list(view.PrefixConflict, id, p) })
}

// barredFrom reports whether the node called to, which won p, must not have it here.
func (m *Machine) barredFrom(p netip.Prefix, to string) bool {
	var is bar
	switch {
	case to == "":
	case m.guard.CoversPrefix(p) || m.own.Has(p):
		is = bar{to, view.LocalWins}
	default:
		if _, loops := m.loops(m.nodes[to], p); loops {
			is = bar{to, view.EndpointLoops}
		}
	}
	if was := m.barred[p]; was != is {
		if was.kind != "" {
			m.unlist(was.kind, was.node, p)
		}
		if is.kind != "" {
			m.barred[p] = is
		} else {
			delete(m.barred, p)
		}
	}
	if is.kind != "" {
		m.list(is.kind, to, p)
	}
	return is.kind != ""
}

// words says why node does not get p, in a list of the given kind.
func (m *Machine) words(kind view.Kind, node string, p netip.Prefix) (message, remedy string) {
	switch kind {
	case view.PrefixConflict:
		who := "which has it everywhere"
		if node == m.cfg.Node {
			who = "to which all other nodes send it"
		}
		ids, _ := m.claims.Get(p)
		return fmt.Sprintf("prefix %s is also claimed by %s, the lowest node ID, %s", p, ids[0], who), "let just one node announce it"
	case view.LocalWins:
		where, remedy := "lies in a network that this host is connected to", "renumber one of the two, or have that node stop announcing it"
		if m.own.Has(p) {
			where, remedy = "is announced by this node itself, which keeps it for its own traffic", "let just one node announce it"
		} else if m.own.CoversPrefix(p) {
			where = "lies inside what this node itself announces"
		}
		return fmt.Sprintf("prefix %s %s", p, where), remedy
	}
	at, _ := m.loops(m.nodes[node], p)
	return fmt.Sprintf("prefix %s of %s has its own endpoint %v inside, so the tunnel would go through itself", p, node, at),
		"use a datapath that marks its packets out of the tunnel, or announce narrower prefixes"
}

// withheld says why p, which n claims, does not go to it from here.
func (m *Machine) withheld(n *node, p netip.Prefix) view.Withheld {
	w := view.Withheld{Node: n.id, Prefix: p}
	ids, _ := m.claims.Get(p)
	switch {
	case !n.accepted.Has(p):
		w.Kind = view.PrefixRefused
	case !n.routable:
		w.Kind, w.Winner = view.KeyConflict, m.byKey[n.key][0]
		if w.Winner == n.id { // but the key is this node's, too
			w.Winner = m.cfg.Node
		}
	case len(ids) > 0 && ids[0] != n.id:
		w.Kind, w.Winner = view.PrefixConflict, ids[0]
	default:
		if w.Kind = m.barred[p].kind; w.Kind == view.LocalWins {
			w.Winner = m.cfg.Node
		}
	}
	return w
}

// leave takes n's wanted peer away where it is no peer any more, or has another key.
func (m *Machine) leave(n *node) {
	old := n.onDevice
	if old.IsZero() || old == n.key && n.routable {
		return
	}
	n.onDevice = key.Public{}
	delete(m.peerOf, old)
	delete(m.want.Peers, old)
	m.touchPeer(old)
	m.out.Left = append(m.out.Left, n.id)
	m.endTrial(n)
}

// refresh brings the wanted peer of n up to date.
func (m *Machine) refresh(now time.Time, n *node) {
	if len(n.gain)+len(n.loss) > 0 {
		n.won = n.won.Without(n.loss...).With(n.gain...)
		n.gain, n.loss = nil, nil
	}
	if !n.routable {
		return
	}
	if n.onDevice.IsZero() {
		n.onDevice = n.key
		m.peerOf[n.key] = n.id
		m.out.Joined = append(m.out.Joined, n.id)
		m.beginTrial(now, n)
	}
	want := datapath.Peer{Endpoint: n.trial.wanted(), Keepalive: m.keepalive(), Prefixes: n.won}
	if old, ok := m.want.Peers[n.key]; !ok || old != want {
		m.want.Peers[n.key] = want
		m.touchPeer(n.key)
	}
}

func (m *Machine) touchPeer(k key.Public) {
	m.dirty.Peers[k] = struct{}{}
	m.again(resource{kind: aPeer, peer: k})
	m.changed = true
}

func (m *Machine) touchRoute(p netip.Prefix) {
	m.dirty.Routes[p] = struct{}{}
	m.again(resource{kind: aRoute, prefix: p})
}

func (m *Machine) keepalive() time.Duration {
	switch {
	case m.cfg.Keepalive > 0:
		return m.cfg.Keepalive
	case m.cfg.Keepalive == 0 && len(m.endpoints) == 0:
		return KeepaliveNAT
	}
	return 0
}
