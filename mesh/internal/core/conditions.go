package core

import (
	"time"

	"github.com/warren-mesh/warren/mesh/view"
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
