package core

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// announced takes in what this node can reach.
func (m *Machine) announced(now time.Time, s prefixes.Snapshot) {
	m.snapshot = s
	keep := make(map[string]bool)
	for _, p := range s.Problems {
		subject := p.Source + " " + p.Value
		keep[subject] = true
		what := "announced with a change"
		if p.Refused {
			what = "not announced"
		}
		m.raise(now, view.AnnouncementRefused, m.cfg.Node, subject, fmt.Sprintf("source %q: %s: %s: %s", p.Source, p.Value, what, p.Reason), "mend the source")
	}
	m.clearAll(view.AnnouncementRefused, m.cfg.Node, keep)
	m.localChanged(now)
	m.sources(now)
}

// localChanged works out what is local from what is announced, lingers, and is connected.
func (m *Machine) localChanged(now time.Time) {
	m.changed = true
	own := m.policy(now, m.self, m.snapshot.Set().Union(m.cfg.Addresses))
	for p := range m.own.Minus(own).All() {
		if m.cfg.Linger > 0 {
			m.lingering[p] = time.Time{}
		}
	}
	local := own
	for p := range m.lingering {
		if own.Has(p) {
			delete(m.lingering, p)
		} else {
			local = local.With(p)
		}
	}
	if m.own != own {
		m.own = own
		m.self.accepted = own
		m.unsettled[m.self] = struct{}{}
	}
	if m.want.Local != local {
		m.want.Local = local
		m.touchDevice()
	}
	guard := own.Union(m.host.Connected)
	if guard == m.guard {
		return
	}
	added, removed := prefixes.Diff(m.guard, guard)
	m.guard = guard
	for p := range added.Union(removed).All() {
		for q := range m.claims.Subnets(p) {
			m.stale[q] = struct{}{}
		}
		for q := range m.claims.Supernets(p) { // two halves cover a whole
			m.stale[q] = struct{}{}
		}
	}
}

func (m *Machine) touchDevice() {
	m.dirty.Device = true
	m.again(resource{device: true})
	m.changed = true
}

// sources chooses this node's addresses for traffic into the mesh: what the first announcement of each
// family says, else its own first mesh address. An address that no peer would accept from here is none.
func (m *Machine) sources(now time.Time) {
	var source [2]netip.Addr
	keep := make(map[string]bool)
	for _, a := range m.snapshot.Announcements {
		if !a.Source.IsValid() {
			continue
		}
		if !m.own.HasAddr(a.Source) {
			keep[a.Source.String()] = true
			m.raise(now, view.SourceOutside, m.cfg.Node, a.Source.String(), fmt.Sprintf("source address %v of prefix %v is in no prefix that this node announces, so peers would drop its packets", a.Source, a.Prefix),
				"announce a prefix that has the address")
			continue
		}
		if i := family(a.Source); !source[i].IsValid() {
			source[i] = a.Source
		}
	}
	m.clearAll(view.SourceOutside, m.cfg.Node, keep)
	for p := range m.cfg.Addresses.All() {
		if i := family(p.Addr()); !source[i].IsValid() {
			source[i] = p.Addr()
		}
	}
	if source == m.source {
		return
	}
	m.source = source
	for p := range m.assigned.All() {
		if s := m.sourceFor(p); m.want.Routes[p] != s {
			m.want.Routes[p] = s
			m.touchRoute(p)
		}
	}
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

func (m *Machine) sourceFor(p netip.Prefix) netip.Addr { return m.source[family(p.Addr())] }

// Delays before this node's record is put again when it was lost or replaced.
const (
	rePut    = time.Second
	contest  = 30 * time.Second // against another process that publishes as this node
	doublesN = 2                // foreign records seen before that is said
	calm     = 4 * contest      // without one, and it is over
)

// start settles what counts starts, from what is kept on disk and what the registry had.
func (m *Machine) start() {
	m.started = true
	m.starts.Epoch = max(m.starts.Epoch, m.had.Epoch) + 1
	m.starts.Generation = max(m.starts.Generation, m.had.Generation)
	if !m.adopted {
		m.starts.Generation++
	}
}

// sawSelf takes in what the registry has under this node's ID.
func (m *Machine) sawSelf(now time.Time, o Opened, reset bool) {
	if o.Err != nil {
		m.published = false
		m.rePut(now, rePut)
		return
	}
	r := o.Record
	switch {
	case !m.started:
		m.had = r
	case r.Instance != m.cfg.Instance:
		if !m.published {
			return // of an earlier start; ours is on its way
		}
		m.doubles, m.doubledAt = m.doubles+1, now
		m.published = false
		wait := rePut
		if m.doubles >= doublesN {
			wait = contest
			m.raise(now, view.DuplicateNode, m.cfg.Node, "", fmt.Sprintf("another process publishes records as this node, with key %s", r.Key.Short()),
				"give every node an ID and a state directory of its own")
		}
		m.rePut(now, wait)
	case r.Sequence < m.rec.Sequence && reset:
		m.published = false
		m.rePut(now, 0) // a store restored from a backup
	}
}

// lostSelf takes in that the registry has no record of this node.
func (m *Machine) lostSelf(now time.Time) {
	if m.rec.ID != "" {
		m.published = false
		m.rePut(now, 0)
	}
}

func (m *Machine) rePut(now time.Time, wait time.Duration) {
	if at := now.Add(wait); m.republish.IsZero() || at.After(m.republish) {
		m.republish = at
	}
}

// ownRecord publishes this node's record when it is another than before, or is to be put again.
func (m *Machine) ownRecord(now time.Time, out *Output) {
	if !m.started && m.reset && m.have != nil {
		m.start()
	}
	if !m.started || !m.have.State().Device.Exists() || m.have.State().Device.ListenPort == 0 {
		return
	}
	// What is announced is accepted already: whoever learns of a prefix may send into it at once.
	have := m.have.State()
	r := record.Record{
		Version: record.Version, ID: m.cfg.Node, Key: m.pub,
		Prefixes: m.own.Minus(m.cfg.Addresses).Intersect(have.Local), Addresses: m.cfg.Addresses.Intersect(have.Addrs),
		Roles: m.cfg.Roles, Labels: m.cfg.Labels, Instance: m.cfg.Instance,
		Epoch: m.starts.Epoch, Generation: m.starts.Generation, Sequence: m.rec.Sequence,
	}
	for _, e := range m.cfg.Endpoints {
		if e.Port() == 0 {
			e = netip.AddrPortFrom(e.Addr(), m.have.State().Device.ListenPort)
		}
		r.Endpoints = append(r.Endpoints, record.EndpointFrom(e))
	}
	again := !m.republish.IsZero() && !now.Before(m.republish)
	same := m.rec.ID != "" && record.Equal(r, m.rec)
	if same && !again {
		return
	}
	if !same {
		r.Sequence++
		if m.rec.Epoch != r.Epoch || m.rec.Generation != r.Generation {
			starts := m.starts
			out.Starts = &starts
		}
	}
	m.republish = time.Time{}
	m.rec, m.published, m.changed = r, false, true
	out.Publish = &r
}

// publishDone takes in that a record was put, or could not be.
func (m *Machine) publishDone(now time.Time, in Published) {
	if in.Err != nil {
		m.raise(now, view.PublishFailed, m.cfg.Node, "", "the registry does not take this node's record: "+in.Err.Error(), "it is retried")
		return
	}
	m.clear(view.PublishFailed, m.cfg.Node, "")
	if !record.Equal(in.Record, m.rec) {
		return // a newer one is on its way
	}
	m.published, m.changed = true, true
	reach := in.Record.Reachable()
	for p, at := range m.lingering {
		if at.IsZero() && !reach.Has(p) {
			m.lingering[p] = now.Add(m.cfg.Linger)
		}
	}
}
