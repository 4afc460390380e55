package core

import (
	"fmt"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/view"
)

// shrink is a Reset without most of the nodes there were, or one of a store that went back: a store that was
// restored or emptied, or was pointed at something else, is likelier than that they all left. They are kept
// until a second reading has confirmed it (rule 18). What else changed is taken in at once.
type shrink struct {
	since time.Time // zero: there is none
	asked bool      // for the second reading
	back  bool      // the store went back, so that others are to publish again what it has lost
	// missing are those that the last complete reading lacked, and gone is how many these were then.
	missing map[string]struct{}
	gone    int
	// strays are the peers of the device that was found which were nobody's at the first Reset, if that
	// is most of them.
	strays map[key.Public]struct{}
}

const (
	// shrinkFrom is how many peers there must be for the guard, unless the store went back.
	shrinkFrom = 8
	// shrinkWait is the time until the second reading, unless the store went back and may take the others
	// longer to be found again.
	shrinkWait = 5 * time.Second
)

// wentBack reports whether a Reset is that of a store that has lost something: it is older than what was seen,
// or does not have this node's record as it once had it. m.revision is still that of before.
func (m *Machine) wentBack(in Records) bool {
	if m.reset && in.Revision < m.revision {
		return true
	}
	for _, o := range in.Put {
		if o.Node == m.cfg.Node {
			if o.Same || o.Err != nil || !m.published {
				return false
			}
			r := o.Record
			return r.Epoch < m.rec.Epoch || r.Instance == m.cfg.Instance && r.Sequence < m.rec.Sequence
		}
	}
	return m.published || !m.reset && m.cfg.Starts.Epoch > 0
}

// shrinks reports whether the nodes that a Reset lacks are to be kept for now. back: the store went back.
func (m *Machine) shrinks(now time.Time, in Records, seen map[string]bool, back bool) bool {
	known, missing := 0, make(map[string]struct{})
	for id := range m.nodes {
		if id != m.cfg.Node {
			known++
			if !seen[id] {
				missing[id] = struct{}{}
			}
		}
	}
	gone := len(missing)
	s := &m.shrink
	back = back && !in.Second || s.back
	switch {
	case gone == 0 && s.strays == nil, in.Second && !(back && gone < s.gone):
		// Complete again; or all of it was confirmed, nobody being on the way back any more.
		m.grown()
		return false
	case in.Second:
		s.asked, s.since = false, now
	case !back && !tooMany(known, gone):
		if s.strays == nil {
			m.grown()
		}
		return false
	}
	s.back, s.missing, s.gone = back, missing, gone
	why := "the registry now lacks %d of %d nodes"
	if back {
		why = "the registry went back, and lacks %d of %d nodes"
	}
	m.keepFor(now, fmt.Sprintf(why, gone, known))
	return true
}

func tooMany(known, gone int) bool { return known >= shrinkFrom && gone*2 > known }

// keepFor begins to wait for a second reading.
func (m *Machine) keepFor(now time.Time, why string) {
	m.raise(now, view.RegistryShrank, "", "", why+"; they are kept until it has been read once more",
		"see that the registry is the right one and was not emptied; what it lacks is given up once a second reading lacks it too")
	if m.shrink.since.IsZero() {
		m.shrink.since = now
	}
}

// told notes that the registry says something of a node that was missing.
func (m *Machine) told(node string) {
	s := &m.shrink
	if _, was := s.missing[node]; !was {
		return
	}
	if delete(s.missing, node); len(s.missing) == 0 && s.strays == nil {
		m.grown() // all are back, or were deleted one by one
	}
}

// grown ends the wait.
func (m *Machine) grown() {
	if m.shrink.since.IsZero() {
		return
	}
	if m.shrink.strays != nil {
		m.full = true // what was not to be removed yet may be now
	}
	m.shrink = shrink{}
	m.clear(view.RegistryShrank, "", "")
}

// secondAt is when the second reading is due.
func (m *Machine) secondAt() time.Time {
	if m.shrink.back { // those who publish again have to find it first
		return m.shrink.since.Add(max(shrinkWait, m.cfg.Rejoin))
	}
	return m.shrink.since.Add(shrinkWait)
}

// guardStrays keeps the peers of a device that was found, if most are unknown to the registry at the
// first complete reading of both.
func (m *Machine) guardStrays(now time.Time) {
	peers := m.have.State().Peers
	strays := make(map[key.Public]struct{})
	for k := range peers {
		if len(m.byKey[k]) == 0 {
			strays[k] = struct{}{}
		}
	}
	if m.adopted && tooMany(len(peers), len(strays)) {
		m.shrink.strays = strays
		m.keepFor(now, fmt.Sprintf("the registry knows nothing of %d of the device's %d peers", len(strays), len(peers)))
	}
}

// sparing returns ops less what would take something from strays.
func (m *Machine) sparing(ops []datapath.Op) []datapath.Op {
	stray := func(k key.Public) bool { _, is := m.shrink.strays[k]; return is }
	kept := ops[:0]
	for _, op := range ops {
		spared := false
		switch o := op.(type) {
		case datapath.RemovePeer:
			spared = stray(o.Key)
		case datapath.DropPrefixes:
			spared = stray(o.Key)
		case datapath.RemoveRoutes:
			for p := range o.Prefixes.All() {
				if k, owned := m.have.Owner(p); owned && stray(k) {
					o.Prefixes = o.Prefixes.Without(p)
				}
			}
			op, spared = o, o.Prefixes.IsEmpty()
		}
		if !spared {
			kept = append(kept, op)
		}
	}
	return kept
}

// confirmShrink asks for the second reading when it is time.
func (m *Machine) confirmShrink(now time.Time) {
	if s := &m.shrink; !s.since.IsZero() && !s.asked && !now.Before(m.secondAt()) {
		s.asked, m.out.Relist = true, true
	}
}

func (m *Machine) shrinkWake(at func(time.Time)) {
	if s := m.shrink; !s.since.IsZero() && !s.asked {
		at(m.secondAt())
	}
}
