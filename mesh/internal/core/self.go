package core

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// publisher is what there is about this node's record.
type publisher struct {
	starts    Starts
	started   bool          // starts are settled
	had       record.Record // what the registry had of this node at the start
	rec       record.Record // as published last; the zero Record: not yet
	published bool          // the registry has it
	putAt     time.Time     // when rec was last given out to be put
	republish time.Time     // put it again then; zero: no need
	doubles   int           // foreign records seen in a row
	doubledAt time.Time

	recordStale bool // what rec is made of may have changed
}

// announced takes in what this node can reach.
func (m *Machine) announced(now time.Time, s prefixes.Snapshot) {
	m.snapshot = s
	keep := map[string]bool{"": true} // localChanged's
	for _, p := range s.Problems {
		subject := p.Source + " " + p.Value
		keep[subject] = true
		what := "announced with a change"
		if p.Refused {
			what = "not announced"
		}
		m.raise(now, view.AnnouncementRefused, m.cfg.Node, subject, fmt.Sprintf("source %q: %s: %s: %s", p.Source, p.Value, what, p.Reason), "have that source announce the prefix as it is meant")
	}
	m.clearBut(view.AnnouncementRefused, m.cfg.Node, keep)
	m.localChanged(now)
	m.sources(now)
}

// localChanged works out what is local from what is announced, lingers, and is connected.
func (m *Machine) localChanged(now time.Time) {
	own := m.fit(now, m.policy(now, m.self, m.snapshot.Set().Union(m.cfg.Addresses)))
	if m.own != own {
		for p := range m.own.Minus(own).All() {
			if m.cfg.Linger > 0 {
				m.lingering[p] = time.Time{}
			}
		}
		for p := range own.Minus(m.own).All() {
			delete(m.lingering, p)
		}
		m.own = own
		m.self.accepted = own
		m.unsettle(m.self)
		m.recordStale, m.changed = true, true
	}
	m.localSet()
	// What is inside a default route or the like is everything: an exit node has peers all the same.
	var wide []netip.Prefix
	for p := range own.All() {
		if !Narrow(p) {
			wide = append(wide, p)
		}
	}
	guard := own.Without(wide...).Union(m.host.Connected)
	if guard == m.guard {
		return
	}
	added, removed := prefixes.Diff(m.guard, guard)
	m.guard = guard
	for p := range added.Union(removed).All() {
		for q := range m.claims.Subnets(p) {
			m.stale = append(m.stale, q)
		}
		for q := range m.claims.Supernets(p) { // two halves cover a whole
			m.stale = append(m.stale, q)
		}
	}
}

// fit leaves out what would make a record that nobody takes: one source that announces too much is not
// to keep what the others announce from being published. It keeps the first in canonical order, and
// this node's addresses.
func (m *Machine) fit(now time.Time, own prefixes.Set) prefixes.Set {
	const perPrefix = 4 // bytes of JSON around each: quotes, comma, and one to spare
	left, kept := record.MaxSize-m.sizeOfRest(), 0
	var surplus []netip.Prefix
	for p := range own.All() {
		size := len(p.String()) + perPrefix
		switch {
		case m.cfg.Addresses.Has(p):
		case kept < record.MaxPrefixes && size <= left:
			kept, left = kept+1, left-size
		default:
			surplus = append(surplus, p)
		}
	}
	if len(surplus) == 0 {
		m.clear(view.AnnouncementRefused, m.cfg.Node, "")
		return own
	}
	m.raise(now, view.AnnouncementRefused, m.cfg.Node, "", fmt.Sprintf("%d prefixes are announced, and %d of them, from %v on, find no room in the record: at most %d, and %d bytes in all",
		own.Len(), len(surplus), surplus[0], record.MaxPrefixes, record.MaxSize), "announce fewer, wider prefixes")
	return own.Without(surplus...)
}

// sizeOfRest is what this node's record may need for all but its prefixes, in bytes of JSON.
func (m *Machine) sizeOfRest() int {
	n := 48 << 10 // endpoints, addresses, key and counts at their longest
	for _, role := range m.cfg.Roles {
		n += len(role) + 4
	}
	for k, v := range m.cfg.Labels {
		n += len(k) + 2*len(v) + 8 // with every byte escaped
	}
	return n
}

// localSet wants what is announced and what lingers to be accepted here.
func (m *Machine) localSet() {
	local := m.own
	if len(m.lingering) > 0 {
		linger := make([]netip.Prefix, 0, len(m.lingering))
		for p := range m.lingering {
			linger = append(linger, p)
		}
		local = local.With(linger...)
	}
	if m.want.Local == local {
		return
	}
	added, removed := prefixes.Diff(m.want.Local, local)
	m.want.Local = local
	m.dirty.Device, m.changed = true, true
	for p := range added.Union(removed).All() {
		m.again(resource{kind: aLocal, prefix: p})
	}
}

// endLinger ends what was accepted long enough. The time begins when no other node can still learn from
// the registry that the prefix is here.
func (m *Machine) endLinger(now time.Time) {
	ended := false
	for p, at := range m.lingering {
		switch {
		case at.IsZero():
			if m.published && !m.recordStale && !m.rec.Reachable().Has(p) {
				m.lingering[p] = now.Add(m.cfg.Linger)
			}
		case !now.Before(at):
			delete(m.lingering, p)
			ended = true
		}
	}
	if ended {
		m.localSet()
		m.addresses()
	}
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
		if subject := a.Source.String(); !m.own.HasAddr(a.Source) {
			if !keep[subject] {
				keep[subject] = true
				m.raise(now, view.SourceOutside, m.cfg.Node, subject, fmt.Sprintf("source address %v of prefix %v is in no prefix that this node announces, so peers would drop its packets", a.Source, a.Prefix),
					"announce a prefix that has the address")
			}
			continue
		}
		if i := family(a.Source); !source[i].IsValid() {
			source[i] = a.Source
		}
	}
	m.clearBut(view.SourceOutside, m.cfg.Node, keep)
	for p := range m.cfg.Addresses.All() {
		if i := family(p.Addr()); !source[i].IsValid() && m.own.Has(p) {
			source[i] = p.Addr()
		}
	}
	was := m.source
	m.source = source
	m.addresses()
	if source == was {
		return
	}
	for p := range m.assigned.All() {
		if s := m.sourceFor(p); m.want.Routes[p] != s {
			m.want.Routes[p] = s
			m.touchRoute(p)
		}
	}
}

// addresses wants the device to have this node's mesh addresses, and those for traffic into the mesh that
// the host has nowhere else; one that the device has stays, since routes may go with it. One that is given
// up stays for as long as its prefix is accepted.
func (m *Machine) addresses() {
	addrs := m.cfg.Addresses
	add := func(a netip.Addr) {
		if p := prefixes.Host(a); !m.host.Addrs.Has(p) || m.have != nil && m.have.State().Addrs.Has(p) {
			addrs = addrs.With(p)
		}
	}
	for _, a := range m.source {
		if a.IsValid() {
			add(a)
		}
	}
	if len(m.lingering) > 0 {
		for p := range m.want.Addrs.Minus(addrs).All() {
			for q := range m.lingering {
				if q.Contains(p.Addr()) {
					add(p.Addr())
					break
				}
			}
		}
	}
	if m.want.Addrs == addrs {
		return
	}
	added, removed := prefixes.Diff(m.want.Addrs, addrs)
	m.want.Addrs = addrs
	m.dirty.Device, m.changed = true, true
	for p := range added.Union(removed).All() {
		m.again(resource{kind: anAddress, prefix: p})
	}
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

func (m *Machine) sourceFor(p netip.Prefix) netip.Addr { return m.source[family(p.Addr())] }

const (
	rePut    = time.Second      // between two puts of the same record
	lagging  = 5 * time.Second  // for the newest to be seen
	contest  = 30 * time.Second // the same, against another process that publishes as this node
	doublesN = 2                // foreign records seen before that is said
	calm     = 4 * contest      // without one, and it is over
)

// sawSelf takes in what the registry has under this node's ID.
func (m *Machine) sawSelf(now time.Time, o Opened, reset bool) {
	if o.Same {
		return
	}
	if o.Err != nil {
		m.raise(now, view.RecordRefused, m.cfg.Node, "", "the registry's record of this node is not believed: "+o.Err.Error(), "it is published again; see who writes it, and that this node is trusted")
		m.overwritten(now)
		return
	}
	m.clear(view.RecordRefused, m.cfg.Node, "")
	r := o.Record
	switch {
	case !m.started:
		m.had = r
	case r.Instance != m.cfg.Instance || r.Sequence > m.rec.Sequence || r.Sequence == m.rec.Sequence && !record.Equal(r, m.rec):
		if m.overwritten(now) && m.doubles >= doublesN {
			m.raise(now, view.DuplicateNode, m.cfg.Node, "", fmt.Sprintf("another process publishes records as this node, with key %s", r.Key.Short()),
				"give every node an ID and a state directory of its own")
		}
	case r.Sequence == m.rec.Sequence:
		m.republish = time.Time{} // it is there after all
		m.gotPublished()
	case reset:
		m.published = false
		m.rePut(now, 0) // a store restored from a backup
	default:
		m.rePut(now, lagging) // ours of before, with the newest close behind; else somebody put it back
	}
}

// overwritten puts the record again after another took its place, ever more slowly. It reports false
// where that was to be expected: an earlier start's record, which this one's is on its way to replace.
func (m *Machine) overwritten(now time.Time) bool {
	if !m.published {
		return false
	}
	m.published, m.changed = false, true
	m.doubles, m.doubledAt = m.doubles+1, now
	wait := rePut
	if m.doubles >= doublesN {
		wait = contest
	}
	m.rePut(now, wait)
	return true
}

// calmDown ends a contest that nobody carries on.
func (m *Machine) calmDown(now time.Time) {
	if m.doubles > 0 && now.Sub(m.doubledAt) > calm {
		m.doubles = 0
		m.clear(view.DuplicateNode, m.cfg.Node, "")
	}
}

// lostSelf takes in that the registry has no record of this node.
func (m *Machine) lostSelf(now time.Time) {
	m.clear(view.RecordRefused, m.cfg.Node, "")
	if m.rec.ID != "" {
		m.published, m.changed = false, true
		m.rePut(now, 0)
	}
}

// rePut has the record put again after a wait, and not sooner than is already meant.
func (m *Machine) rePut(now time.Time, wait time.Duration) {
	at := maxTime(now.Add(wait), m.putAt.Add(rePut))
	m.republish = maxTime(m.republish, at)
}

// start settles what counts starts, from what is kept on disk and what the registry had.
func (m *Machine) start() {
	m.started = true
	m.starts.Epoch = next(max(m.starts.Epoch, m.had.Epoch))
	m.starts.Generation = max(m.starts.Generation, m.had.Generation)
	if m.starts.Generation == 0 {
		// Nothing tells how many there were. That it is another one than before is what matters.
		m.starts.Generation = m.cfg.Device
	}
	if !m.adopted {
		m.starts.Generation = next(m.starts.Generation)
	}
}

// next counts on, and stays at the highest number rather than begin again: a record in the registry may
// have any.
func next(n uint64) uint64 { return n + min(1, math.MaxUint64-n) }

// publishable: there is a device that the record can tell of.
func (m *Machine) publishable() bool {
	return m.started && m.ours() && m.have.State().Device.ListenPort != 0
}

// publish gives out this node's record when it is another than before, or is to be put again.
func (m *Machine) publish(now time.Time) {
	if !m.started && m.reset && m.have != nil {
		m.start()
	}
	again := !m.republish.IsZero() && !now.Before(m.republish)
	if !m.publishable() || !m.recordStale && !again {
		return
	}
	m.recordStale = false
	// What is announced is accepted already: whoever learns of a prefix may send into it at once.
	have := m.have.State()
	r := record.Record{
		Version: record.Version, ID: m.cfg.Node, Key: m.pub,
		Prefixes: m.own.Minus(m.cfg.Addresses).Intersect(have.Local), Addresses: m.cfg.Addresses.Intersect(m.own).Intersect(have.Addrs),
		Roles: m.cfg.Roles, Labels: m.cfg.Labels, Instance: m.cfg.Instance,
		Epoch: m.starts.Epoch, Generation: m.starts.Generation, Sequence: m.rec.Sequence,
	}
	for _, e := range m.endpoints {
		if e.Port == 0 {
			e.Port = have.Device.ListenPort
		}
		if !slices.Contains(r.Endpoints, e) {
			r.Endpoints = append(r.Endpoints, e)
		}
	}
	same := m.rec.ID != "" && record.Equal(r, m.rec)
	if same && !again {
		return
	}
	was := m.rec
	if !same {
		r.Sequence = next(r.Sequence)
		if was.Epoch != r.Epoch || was.Generation != r.Generation || m.starts.Port != have.Device.ListenPort {
			m.starts.Port = have.Device.ListenPort
			starts := m.starts
			m.out.Starts = &starts
		}
	}
	m.rec, m.published, m.changed = r, false, true
	m.putAt, m.republish = now, time.Time{}
	m.out.Publish = &r
	if !slices.Equal(was.Endpoints, r.Endpoints) {
		m.recheckCandidates() // one that is this node's own is nobody else's
	}
}

// publishWake names the times at which publish has something to do.
func (m *Machine) publishWake(at func(time.Time)) {
	if m.publishable() {
		at(m.republish)
	}
	if m.doubles > 0 {
		at(m.doubledAt.Add(calm + 1))
	}
}

// publishDone takes in that a record was put, or could not be.
func (m *Machine) publishDone(now time.Time, in Published) {
	if in.Err != nil {
		m.raise(now, view.PublishFailed, m.cfg.Node, "", "the registry does not take this node's record: "+in.Err.Error(), "it is retried"+advice(in.Err))
		return
	}
	m.clear(view.PublishFailed, m.cfg.Node, "")
	if record.Equal(in.Record, m.rec) { // else a newer one is on its way
		m.gotPublished()
	}
}

func (m *Machine) gotPublished() {
	if !m.published {
		m.published, m.changed = true, true
	}
}
