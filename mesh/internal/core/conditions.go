package core

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// conditionID tells the conditions about one node apart.
type conditionID struct {
	kind    view.Kind
	subject string
}

// raise states a condition. It stays as old as it was first raised, whatever its words become.
func (m *Machine) raise(now time.Time, kind view.Kind, node, subject, message, remedy string) {
	id := conditionID{kind, subject}
	c, ok := m.conditions[node][id]
	if ok && c.Message == message && c.Remedy == remedy {
		return
	}
	if !ok {
		c = view.Condition{Kind: kind, Node: node, Subject: subject, Since: now}
	}
	c.Message, c.Remedy = message, remedy
	if !ok {
		m.out.Raised = append(m.out.Raised, c)
	}
	if m.conditions[node] == nil {
		m.conditions[node] = make(map[conditionID]view.Condition)
	}
	m.conditions[node][id] = c
	m.changed = true
}

func (m *Machine) clear(kind view.Kind, node, subject string) {
	of := m.conditions[node]
	id := conditionID{kind, subject}
	c, ok := of[id]
	if !ok {
		return
	}
	delete(of, id)
	if len(of) == 0 {
		delete(m.conditions, node)
	}
	m.out.Cleared = append(m.out.Cleared, c)
	m.changed = true
}

// clearBut ends the conditions of a kind about a node but for those whose subjects are kept.
func (m *Machine) clearBut(kind view.Kind, node string, keep map[string]bool) {
	for id := range m.conditions[node] {
		if id.kind == kind && !keep[id.subject] {
			m.clear(kind, node, id.subject)
		}
	}
}

// maxNamed is how many prefixes of a node get a condition of one kind each. The rest are counted in one
// more, which has no subject: a record of many thousand prefixes is not to be as many lines in a log.
const maxNamed = 8

func (m *Machine) raiseMore(now time.Time, kind view.Kind, node string, n int) {
	m.raise(now, kind, node, "", fmt.Sprintf("and %d more prefixes; View.Withheld has those of peers", n), "see the others of this kind about this node")
}

// listID tells lists apart.
type listID struct {
	kind view.Kind
	node string
}

// list is the prefixes of which a condition of one kind about one node is true. Their canonically first
// ones are named, whatever the order they came in.
type list struct {
	all    map[netip.Prefix]struct{}
	named  []netip.Prefix
	relist bool // in Machine.relist
}

// list states a condition of p, or that its words may be others.
func (m *Machine) list(kind view.Kind, node string, p netip.Prefix) {
	id := listID{kind, node}
	l := m.lists[id]
	if l == nil {
		l = &list{all: make(map[netip.Prefix]struct{})}
		m.lists[id] = l
	}
	l.all[p] = struct{}{}
	m.renameListed(id, l)
}

// unlist ends it.
func (m *Machine) unlist(kind view.Kind, node string, p netip.Prefix) {
	id := listID{kind, node}
	if l := m.lists[id]; l != nil {
		delete(l.all, p)
		m.renameListed(id, l)
	}
}

func (m *Machine) renameListed(id listID, l *list) {
	if !l.relist {
		l.relist = true
		m.relist = append(m.relist, id)
	}
}

// nameListed brings the conditions of a list up to date.
func (m *Machine) nameListed(now time.Time, id listID) {
	l := m.lists[id]
	l.relist = false
	var first []netip.Prefix
	for p := range l.all {
		if len(first) == maxNamed && prefixes.Compare(p, first[maxNamed-1]) > 0 {
			continue
		}
		i, _ := slices.BinarySearchFunc(first, p, prefixes.Compare)
		first = slices.Insert(first, i, p)
		first = first[:min(len(first), maxNamed)]
	}
	for _, p := range l.named {
		if !slices.Contains(first, p) {
			m.clear(id.kind, id.node, p.String())
		}
	}
	for _, p := range first {
		message, remedy := m.words(id.kind, id.node, p)
		m.raise(now, id.kind, id.node, p.String(), message, remedy)
	}
	if more := len(l.all) - len(first); more > 0 {
		m.raiseMore(now, id.kind, id.node, more)
	} else {
		m.clear(id.kind, id.node, "")
	}
	if l.named = first; len(first) == 0 {
		delete(m.lists, id)
	}
}
