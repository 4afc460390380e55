package core

import (
	"container/heap"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// node is what is known of a node, this one included.
type node struct {
	id     string
	known  bool             // rec is in force
	rec    record.Record    // of another node, the one in force
	key    key.Public       // the one it claims; zero: none
	opened identity.Opened  // the one in force, or one whose time has not come or is over
	next   *identity.Opened // a newer one whose time has not come, while opened is in force
	due    time.Time        // when a bound of opened or next is crossed; zero: never
	slot   int              // in Machine.bounds

	accepted prefixes.Set   // of what it claims, what policy allows
	refused  bool           // that is not all
	claimed  prefixes.Set   // what of it stands in Machine.claims
	routable bool           // it is to be a peer on the device
	won      prefixes.Set   // what goes to it from here
	gain     []netip.Prefix // still to be added to won
	loss     []netip.Prefix // still to be taken from it
	onDevice key.Public     // the key whose wanted peer is this node's; zero: none
	trial    trial

	at         []record.Endpoint // the endpoints of rec, with the addresses of names in their place
	looping    []record.Endpoint // of these, those inside a prefix of another node
	generation uint64            // of the device that the endpoints were last looked at for, while recheck

	unsettled, touched, recheck bool // in the list of that name
}

// records takes in a batch of the registry.
func (m *Machine) records(now time.Time, in Records) {
	m.clear(view.RegistryDown, "", "")
	back := in.Reset && m.wentBack(in)
	if m.revision != in.Revision {
		m.revision, m.changed = in.Revision, true
	}
	var seen map[string]bool
	if in.Reset {
		seen = make(map[string]bool, len(in.Put))
	}
	for _, o := range in.Put {
		if in.Reset {
			seen[o.Node] = true
		}
		if o.Node == m.cfg.Node {
			m.sawSelf(now, o, in.Reset)
		} else {
			m.put(now, o)
		}
	}
	for _, id := range in.Deleted {
		if id == m.cfg.Node {
			m.lostSelf(now)
		} else {
			m.drop(now, id)
		}
	}
	if !in.Reset {
		for _, o := range in.Put {
			m.told(o.Node)
		}
		for _, id := range in.Deleted {
			m.told(id)
		}
		return
	}
	if !m.shrinks(now, in, seen, back) {
		for id := range m.nodes {
			if !seen[id] && id != m.cfg.Node {
				m.drop(now, id)
			}
		}
	}
	for id := range m.conditions { // of nodes that never had a good record, too
		if !seen[id] {
			m.clear(view.RecordRefused, id, "")
		}
	}
	if !seen[m.cfg.Node] {
		m.lostSelf(now)
	}
	if !m.reset {
		m.reset, m.full = true, true // what was not to be removed yet may be now
		if m.have != nil {
			m.guardStrays(now)
		}
	}
}

// remembered takes in what was kept on disk. It is no Reset: nothing is removed for it, and what the
// registry has said meanwhile is newer.
func (m *Machine) remembered(now time.Time, in Remembered) {
	for _, o := range in.Put {
		if n := m.nodes[o.Node]; o.Node != m.cfg.Node && (n == nil || !n.known) && !m.reset {
			m.put(now, o)
		}
	}
}

// kept takes in whether something found its place on disk.
func (m *Machine) kept(now time.Time, in Kept) {
	if in.Err == nil {
		m.clear(view.StateUnkept, m.cfg.Node, in.What)
		return
	}
	m.raise(now, view.StateUnkept, m.cfg.Node, in.What, fmt.Sprintf("the %s on disk: %v", in.What, in.Err),
		"see that the state folder is sound, writable, and has room; nothing is lost unless the node starts anew before")
}

// Knows reports whether another node is in the mesh as it is known here, be it that its time has not come.
func (m *Machine) Knows(node string) bool {
	_, ok := m.nodes[node]
	return ok && node != m.cfg.Node
}

// put takes in one record of another node. What is not believed leaves the last good one in force,
// unless it says that the node was revoked.
func (m *Machine) put(now time.Time, o Opened) {
	if o.Same {
		return
	}
	if o.Err == nil && o.Record.Key.IsZero() {
		o.Err = errNoKey
	}
	if errors.Is(o.Err, identity.ErrRevoked) {
		m.drop(now, o.Node)
		m.raise(now, view.RecordRefused, o.Node, "", "revoked: "+o.Err.Error(), "enrol the node again if it is to come back")
		return
	}
	n := m.nodes[o.Node]
	if o.Err != nil {
		msg := "its record is not believed: " + o.Err.Error()
		if n != nil && n.known {
			msg += "; the last good one stays in force"
		}
		m.raise(now, view.RecordRefused, o.Node, "", msg, "mend or restart the node, or delete its record")
		return
	}
	m.clear(view.RecordRefused, o.Node, "")
	if n == nil {
		n = &node{id: o.Node, slot: noSlot}
		m.nodes[o.Node] = n
	}
	n.next = nil
	if n.known && now.Before(o.NotBefore) {
		// The clocks of two nodes differ, and a certificate is renewed a moment too early for this one:
		// that is no reason to be without the node.
		n.next = &o.Opened
	} else {
		n.opened = o.Opened
	}
	m.judge(now, n)
}

var errNoKey = errors.New("it has no key")

// judge puts in force what of a node's records is good now.
func (m *Machine) judge(now time.Time, n *node) {
	if n.next != nil && (!now.Before(n.next.NotBefore) || !n.opened.ValidAt(now)) {
		n.opened, n.next = *n.next, nil
	}
	m.bound(n, now)
	switch {
	case !n.opened.ValidAt(now):
		// Set aside rather than forgotten: the bound may be ahead.
		m.raise(now, view.RecordExpired, n.id, "", "its record is valid "+span(n.opened), "renew the node's certificate, or set the clocks right")
		m.believe(now, n, nil)
		return
	case n.next != nil:
		m.raise(now, view.RecordExpired, n.id, "", "its newest record is valid "+span(*n.next)+"; the last good one stays in force until then", "set the clocks right")
	default:
		m.clear(view.RecordExpired, n.id, "")
	}
	if !n.known || !record.Equal(n.rec, n.opened.Record) {
		m.believe(now, n, &n.opened.Record)
	}
}

func span(o identity.Opened) string {
	s := ""
	if !o.NotBefore.IsZero() {
		s = "from " + o.NotBefore.UTC().Format(time.RFC3339Nano)
	}
	if !o.NotAfter.IsZero() {
		if s != "" {
			s += " "
		}
		s += "until " + o.NotAfter.UTC().Format(time.RFC3339Nano)
	}
	return s
}

// bounds is a heap of nodes whose record has a bound ahead, the next one first.
type bounds []*node

const noSlot = -1

func (b bounds) Len() int           { return len(b) }
func (b bounds) Less(i, j int) bool { return b[i].due.Before(b[j].due) }
func (b bounds) Swap(i, j int) {
	b[i], b[j] = b[j], b[i]
	b[i].slot, b[j].slot = i, j
}
func (b *bounds) Push(n any) {
	n.(*node).slot = len(*b)
	*b = append(*b, n.(*node))
}
func (b *bounds) Pop() any {
	last := len(*b) - 1
	n := (*b)[last]
	n.slot = noSlot
	(*b)[last] = nil
	*b = (*b)[:last]
	return n
}

// bound notes when n is to be judged next.
func (m *Machine) bound(n *node, now time.Time) {
	var at time.Time
	if n.opened.ValidAt(now) {
		if !n.opened.NotAfter.IsZero() {
			at = n.opened.NotAfter.Add(1) // both bounds are included
		}
		if n.next != nil && (at.IsZero() || n.next.NotBefore.Before(at)) {
			at = n.next.NotBefore
		}
	} else if now.Before(n.opened.NotBefore) {
		at = n.opened.NotBefore
	}
	n.due = at
	switch {
	case at.IsZero() && n.slot != noSlot:
		heap.Remove(&m.bounds, n.slot)
	case at.IsZero():
	case n.slot == noSlot:
		heap.Push(&m.bounds, n)
	default:
		heap.Fix(&m.bounds, n.slot)
	}
}

func (m *Machine) crossBounds(now time.Time) {
	for len(m.bounds) > 0 && !now.Before(m.bounds[0].due) {
		m.judge(now, m.bounds[0])
	}
}

// drop forgets a node.
func (m *Machine) drop(now time.Time, id string) {
	m.clear(view.RecordRefused, id, "")
	n := m.nodes[id]
	if n == nil {
		return
	}
	m.clear(view.RecordExpired, id, "")
	n.opened, n.next = identity.Opened{}, nil
	m.bound(n, now)
	m.believe(now, n, nil)
	delete(m.nodes, id)
	m.changed = true
}

// believe makes r the record of n in force; nil: it has none.
func (m *Machine) believe(now time.Time, n *node, r *record.Record) {
	if r == nil && !n.known {
		return
	}
	m.changed = true
	m.unsettle(n)
	m.touch(n)
	old := n.rec // the zero Record where there was none
	m.recheck(n) // notes the generation of the old record
	m.indexHosts(n, old.Endpoints, remove)
	if r == nil {
		m.locate(n, nil)
		m.claimKey(n, key.Public{})
		n.known, n.rec, n.accepted = false, record.Record{}, prefixes.Set{}
		m.clear(view.EndpointUnusable, n.id, "")
		m.looping(n, nil)
		if n.refused {
			n.refused = false
			m.clearBut(view.PrefixRefused, n.id, nil)
		}
		return
	}
	n.known, n.rec = true, *r
	m.indexHosts(n, r.Endpoints, insert)
	m.locate(n, m.located(r.Endpoints))
	m.claimKey(n, r.Key)
	n.accepted = m.policy(now, n, r.Reachable())
}
