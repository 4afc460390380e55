package roles

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/warren-mesh/warren/mesh/view"
)

// look makes a View of what there is, and of what Assigned says is wrong, and hands it out if it is another one.
func (m *Manager) look(now time.Time, of []view.Condition) {
	v := View{Running: m.running, Known: m.known, Generation: m.generation, Roles: []State{}, Services: []State{}} // [] in JSON
	v.Assigned = slices.AppendSeq([]string{}, maps.Keys(m.assigned))
	slices.Sort(v.Assigned)
	found := []view.Condition{}
	say := func(k view.Kind, subject, remedy, format string, a ...any) {
		found = append(found, view.Condition{Kind: k, Subject: subject, Message: fmt.Sprintf(format, a...), Remedy: remedy})
	}
	if m.running && !m.known {
		say(AssignmentUnknown, "", "", "it is not known yet which roles this node has: none is started")
	}
	if m.running && m.trouble != nil {
		say(AssignmentRefused, "", "", "what says which roles this node has fails, and is tried again: %v", m.trouble)
	}
	const most = 16
	unknown := 0
	for _, name := range v.Assigned {
		if slices.ContainsFunc(m.slots, func(s *slot) bool { return s.name == name && s.role != nil }) {
			continue
		}
		if unknown++; unknown > most {
			continue
		}
		v.Roles = append(v.Roles, State{Name: name, Assigned: true, Phase: Waiting, Waiting: []string{"a program that has this role"}, Generation: m.generation})
		say(RoleUnknown, name, "run a program that has this role, or do not assign it: the roles of this one are "+m.ours(), "role %s is assigned, and this program does not have it", name)
	}
	if unknown > most {
		say(RoleUnknown, "", "", "%d more roles are assigned that this program does not have", unknown-most)
	}
	for _, s := range m.slots {
		st := m.state(s)
		if s.role == nil {
			v.Services = append(v.Services, st)
		} else {
			v.Roles = append(v.Roles, st)
		}
		m.judge(s, st, say)
	}
	slices.SortFunc(v.Roles, func(a, b State) int { return cmp.Compare(a.Name, b.Name) })
	found = append(found, of...)
	found = append(found, m.reports.all()...)
	v.Conditions = m.date(found, now)
	if old, ok, _ := m.view.Get(); !ok || !reflect.DeepEqual(old, v) {
		m.view.Set(v)
	}
}

// ours are the roles of this program.
func (m *Manager) ours() string {
	var names []string
	for _, s := range m.slots {
		if s.role != nil {
			names = append(names, s.name)
		}
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

// state is what is known of a slot.
func (m *Manager) state(s *slot) State {
	r, _ := s.runner.State()
	st := State{Name: s.name, Assigned: m.wants(s), Phase: s.idle, Since: s.idleSince, Waiting: s.waiting, Generation: s.generation}
	if !s.running && !s.over {
		return st
	}
	st.Phase, st.Since, st.Restarts, st.Next, st.Stuck = Phase(r.Phase), r.Since, r.Restarts, r.Next, s.stuck || len(r.Busy) > 0
	if r.Err != nil {
		st.Error = r.Err.Error()
	}
	if s.running && s.stopping && st.Phase != Stopping {
		st.Phase, st.Since, st.Next = Stopping, s.deadline.Add(-m.cfg.Patience), time.Time{}
	}
	return st
}

// judge says what is wrong with a slot.
func (m *Manager) judge(s *slot, st State, say func(view.Kind, string, string, string, ...any)) {
	r, _ := s.runner.State()
	switch {
	case st.Stuck:
		say(RoleStuck, s.name, "restart this program; and mend the role, which is to return when its context ends", "%s was told to end, and does not", s.name)
	case st.Phase == BackingOff || st.Phase == Failed || st.Phase == Starting && r.Err != nil:
		if l, ok := errors.AsType[*lack](r.Err); ok {
			say(RoleUnprivileged, s.name, "", "%s cannot run: %v", s.name, l.error)
			return
		}
		next := "it is tried again"
		if st.Phase == Failed {
			next = "it is not tried again before it is restarted"
		}
		say(RoleFailing, s.name, "", "%s fails: %s; %s", s.name, st.Error, next)
	case st.Phase == Waiting && len(st.Waiting) > 0 && s.role != nil:
		for _, n := range s.missing {
			say(RoleWaiting, s.name, "run a program that has role "+n, "%s waits for role %s, which this program does not have", s.name, n)
		}
		for _, n := range s.needs {
			switch {
			case !m.wants(n):
				say(RoleWaiting, s.name, "assign role "+n.name+" too", "%s waits for role %s, which is not assigned", s.name, n.name)
			case n.failed():
				say(RoleWaiting, s.name, "restart role "+n.name+" when its reason is mended", "%s waits for role %s, which has failed", s.name, n.name)
			}
		}
	}
}

// date says since when each condition is true, and has them in order.
func (m *Manager) date(found []view.Condition, now time.Time) []view.Condition {
	was := m.since
	m.since = make(map[string]view.Condition)
	for i, c := range found {
		id := string(c.Kind) + "\x00" + c.Subject + "\x00" + c.Message
		if c.Kind == RoleFailing { // the reason may be another one each time
			id = string(c.Kind) + "\x00" + c.Subject
		}
		if old, ok := was[id]; ok {
			found[i].Since = old.Since
		} else if c.Since.IsZero() {
			found[i].Since = now
		}
		m.since[id] = found[i]
	}
	slices.SortFunc(found, func(a, b view.Condition) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Message, b.Message))
	})
	return found
}
