package core

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// device is what is known of the device, and what is to be done to it.
type device struct {
	have *datapath.Model // nil: to be read first
	// doubt: have is not what the device is. An op failed, and what it left behind is not known, or a
	// device was set, and what the driver chose for it is not.
	doubt     bool
	set       bool // the device was set without an error, which the reading is to confirm
	stats     map[key.Public]datapath.Stats
	host      datapath.Host
	adopted   bool                    // it was there at the start, with this node's key
	found     map[key.Public]struct{} // peers it then had that are nobody's yet
	reading   bool                    // asked for
	applying  bool
	readAt    time.Time // read the device then
	lastRead  time.Time
	readFail  int       // in a row
	pollTill  time.Time // while an endpoint is on trial
	settled   bool
	repairAt  time.Time // when what another program last changed of the device is put right; zero: none did lately
	undone    int       // how often one did so in a row
	took      bool      // one gave it another key
	disturbed bool      // something changed outside since the last reading
	hastened  time.Time // when what fails was last tried again because of that

	full    bool           // want and have may differ in anything
	dirty   datapath.Delta // else in this
	held    datapath.Delta // what waits for something in retry
	flushAt time.Time      // when that is planned
	retry   map[resource]attempt
}

const (
	// minRepair is the time between readings that a change from outside causes, and between repairs of such
	// changes. A first one is put right at once.
	minRepair = time.Second
	// mostUndone is how many such changes in a row are no contest yet.
	mostUndone = 3
	// minHasten is the time between two changes from outside that have what fails tried again at once.
	minHasten = 5 * time.Second
)

func newDelta() datapath.Delta {
	return datapath.Delta{Peers: make(map[key.Public]struct{}), Routes: make(map[netip.Prefix]struct{})}
}

// resource is what fails and is retried by itself.
type resource struct {
	kind   resourceKind
	prefix netip.Prefix // of an address, a route, or what is accepted here
	peer   key.Public
}

type resourceKind uint8

const (
	theDevice resourceKind = iota
	anAddress
	aLocal
	aRoute
	aPeer
)

func (r resource) String() string {
	switch r.kind {
	case anAddress:
		return "address " + r.prefix.Addr().String()
	case aLocal:
		return "local " + r.prefix.String()
	case aRoute:
		return "route " + r.prefix.String()
	case aPeer:
		return "peer " + r.peer.String()
	}
	return "device"
}

// resources names what an op is about.
func resources(op datapath.Op) []resource {
	each := func(kind resourceKind, s prefixes.Set) []resource {
		rs := make([]resource, 0, s.Len())
		for p := range s.All() {
			rs = append(rs, resource{kind: kind, prefix: p})
		}
		return rs
	}
	switch o := op.(type) {
	case datapath.AddAddrs:
		return each(anAddress, o.Addrs)
	case datapath.RemoveAddrs:
		return each(anAddress, o.Addrs)
	case datapath.AddLocal:
		return each(aLocal, o.Prefixes)
	case datapath.RemoveLocal:
		return each(aLocal, o.Prefixes)
	case datapath.RemoveRoutes:
		return each(aRoute, o.Prefixes)
	case datapath.AddRoutes:
		rs := make([]resource, len(o.Routes))
		for i, r := range o.Routes {
			rs[i] = resource{kind: aRoute, prefix: r.Prefix}
		}
		return rs
	case datapath.PutPeer:
		return []resource{{kind: aPeer, peer: o.Key}}
	case datapath.DropPrefixes:
		return []resource{{kind: aPeer, peer: o.Key}}
	case datapath.RemovePeer:
		return []resource{{kind: aPeer, peer: o.Key}}
	}
	return []resource{{kind: theDevice}}
}

// attempt is a resource that failed.
type attempt struct {
	failures  int
	next      time.Time // zero: with the next plan, since something else is wanted of it now
	permanent bool      // until something else is wanted of it
	about     string    // the node of its condition
}

func (a attempt) due(now time.Time) bool { return !a.permanent && !now.Before(a.next) }

// Backoff of a failing resource. There is no total limit.
const (
	backoffFirst = time.Second
	backoffMost  = time.Minute
)

// delay is the wait after the n-th failure in a row, spread by up to a quarter either way so that what
// failed together is not retried together.
func (m *Machine) delay(what string, n int) time.Duration {
	d := min(backoffFirst<<min(n-1, 10), backoffMost)
	h := fnv.New32a()
	fmt.Fprintf(h, "%s %s %d", m.cfg.Node, what, n)
	return d*3/4 + time.Duration(h.Sum32()%1024)*(d/2)/1024
}

// busy: an answer is awaited.
func (m *Machine) busy() bool { return m.reading || m.applying }

// trusted: have is what the device is, as far as can be told.
func (m *Machine) trusted() bool { return m.have != nil && !m.doubt }

// ours: there is a device, and it is this node's.
func (m *Machine) ours() bool { return m.have != nil && m.have.State().Device.Key == m.cfg.Key }

func (m *Machine) readDue(now time.Time) bool {
	return m.have == nil && m.readFail == 0 || !m.readAt.IsZero() && !now.Before(m.readAt)
}

func (m *Machine) readSoon(at time.Time) {
	if m.readFail == 0 && (m.readAt.IsZero() || at.Before(m.readAt)) {
		m.readAt = at
	}
}

// pending: there is something to plan that need not wait for a retry.
func (m *Machine) pending() bool {
	return m.full || m.dirty.Device || len(m.dirty.Peers)+len(m.dirty.Routes) > 0
}

// stuck: there is no device, and it is not time to try to make one. Nothing can be put on what is not there.
func (m *Machine) stuck(now time.Time) bool {
	a, failed := m.retry[resource{kind: theDevice}]
	return failed && !a.due(now) && !m.have.State().Device.Exists()
}

func (m *Machine) planDue(now time.Time) bool {
	if !m.trusted() || m.stuck(now) || now.Before(m.repairAt) {
		return false
	}
	if m.pending() && !now.Before(m.flushAt) {
		return true
	}
	for _, a := range m.retry {
		if !a.next.IsZero() && a.due(now) {
			return true
		}
	}
	return false
}

// deviceWake names the times at which act has something to do.
func (m *Machine) deviceWake(now time.Time, at func(time.Time)) {
	if m.busy() {
		return
	}
	at(m.readAt)
	switch {
	case !m.trusted():
		return
	case now.Before(m.repairAt):
		at(m.repairAt)
		return
	case m.stuck(now):
		if a := m.retry[resource{kind: theDevice}]; !a.permanent {
			at(a.next)
		}
		return
	}
	if m.pending() {
		at(m.flushAt)
	}
	for _, a := range m.retry {
		if !a.permanent {
			at(a.next)
		}
	}
}

// plan returns the ops for what is dirty or to be retried. What is still to wait, and what relies on that,
// is left as it is.
func (m *Machine) plan(now time.Time) []datapath.Op {
	have := m.have.State()
	d := m.dirty
	if m.full {
		d = datapath.Differences(m.want, have)
	} else {
		add(&d, m.held)
	}
	m.dirty, m.held, m.full, m.flushAt = newDelta(), newDelta(), false, time.Time{}
	if len(m.retry) == 0 {
		return m.timely(datapath.PlanDelta(m.want, have, d))
	}

	var due []resource
	for r, a := range m.retry {
		if !m.differs(r, have) { // it came right by itself, or is no longer wanted
			m.worked(r)
			continue
		}
		if a.due(now) {
			due = append(due, r)
		}
		switch {
		case r.kind == aPeer && a.due(now):
			d.Peers[r.peer] = struct{}{}
		case r.kind == aPeer:
			delete(d.Peers, r.peer)
		case r.kind == aRoute && a.due(now):
			d.Routes[r.prefix] = struct{}{}
		case r.kind == aRoute:
			delete(d.Routes, r.prefix)
		case a.due(now):
			d.Device = true
		}
	}
	want := m.holdBack(now, &d, have)
	ops := m.timely(m.without(now, datapath.PlanDelta(want, have, d), have))

	at := make(map[resource]bool)
	for _, op := range ops {
		for _, r := range resources(op) {
			at[r] = true
		}
	}
	for _, r := range due {
		if !at[r] { // others' ops put it right, or it waits for others
			m.worked(r)
		}
	}
	return ops
}

func add(d *datapath.Delta, more datapath.Delta) {
	d.Device = d.Device || more.Device
	maps.Copy(d.Peers, more.Peers)
	maps.Copy(d.Routes, more.Routes)
}

// waits reports whether r failed and is not to be tried yet.
func (m *Machine) waits(now time.Time, r resource) bool {
	a, failed := m.retry[r]
	return failed && !a.due(now)
}

// differs reports whether the device is other than wanted in r.
func (m *Machine) differs(r resource, have datapath.State) bool {
	switch r.kind {
	case theDevice:
		want := datapath.State{Device: m.want.Device}
		return len(datapath.Plan(want, datapath.State{Device: have.Device})) > 0
	case anAddress:
		return m.want.Addrs.Has(r.prefix) != have.Addrs.Has(r.prefix)
	case aLocal:
		return m.want.Local.Has(r.prefix) != have.Local.Has(r.prefix)
	case aRoute:
		w, wanted := m.want.Routes[r.prefix]
		h, there := have.Routes[r.prefix]
		return wanted != there || w != h
	}
	w, wanted := m.want.Peers[r.peer]
	h, there := have.Peers[r.peer]
	if !w.Endpoint.IsValid() {
		w.Endpoint = h.Endpoint
	}
	return wanted != there || wanted && w != h
}

// holdBack makes d safe to be planned by itself though parts of it wait, and returns what to plan it
// with. A prefix whose new peer waits stays with its old one, as does a prefix whose route waits to be
// removed; a route waits for its peer. New peers that do not wait are added. What is held back is planned
// again with whatever is retried next.
func (m *Machine) holdBack(now time.Time, d *datapath.Delta, have datapath.State) datapath.State {
	todo := make([]key.Public, 0, len(d.Peers))
	for k := range d.Peers {
		todo = append(todo, k)
	}
	// heir has the wanted peer of prefix p take it in the same plan. It reports false where that peer waits.
	heir := func(p netip.Prefix, id string) bool {
		k := m.nodes[id].key
		if o, has := m.have.Owner(p); has && o == k {
			return true
		}
		if m.waits(now, resource{kind: aPeer, peer: k}) {
			return false
		}
		if _, in := d.Peers[k]; !in {
			d.Peers[k] = struct{}{}
			todo = append(todo, k)
		}
		return true
	}
	// heirs does so for all whose prefixes overlap p: addresses that p has may be theirs.
	heirs := func(p netip.Prefix) bool {
		ok := true
		for q, id := range m.assigned.Subnets(p) {
			ok = heir(q, id) && ok
		}
		for q, id := range m.assigned.Supernets(p) {
			ok = heir(q, id) && ok
		}
		return ok
	}
	hold := func(p netip.Prefix) {
		delete(d.Routes, p)
		m.held.Routes[p] = struct{}{}
	}
	for p := range d.Routes {
		if id, wanted := m.assigned.Get(p); wanted {
			if !heir(p, id) {
				hold(p)
			}
		} else if !heirs(p) {
			hold(p)
		}
	}
	kept := make(map[key.Public]prefixes.Set) // peers that keep more than is wanted of them
	for len(todo) > 0 {
		k := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		var keep []netip.Prefix
		for p := range have.Peers[k].Prefixes.Minus(m.want.Peers[k].Prefixes).All() {
			_, wanted := m.want.Routes[p]
			if !heirs(p) || !wanted && m.waits(now, resource{kind: aRoute, prefix: p}) {
				keep = append(keep, p)
				if !wanted {
					hold(p)
				}
			}
		}
		if len(keep) > 0 {
			kept[k] = prefixes.Must(keep...)
			m.held.Peers[k] = struct{}{}
		}
	}
	want := m.want
	if len(kept) > 0 {
		want.Peers = make(map[key.Public]datapath.Peer, len(d.Peers))
		for k := range d.Peers {
			if p, ok := m.want.Peers[k]; ok {
				want.Peers[k] = p
			}
		}
		for k, more := range kept {
			p, wanted := want.Peers[k]
			if !wanted { // all that it had but for what it is to be rid of
				p = have.Peers[k]
				p.Prefixes = prefixes.Set{}
			}
			p.Prefixes = p.Prefixes.Union(more)
			want.Peers[k] = p
		}
	}
	return want
}

// without returns ops less what waits of the device, its addresses, and what is accepted here.
func (m *Machine) without(now time.Time, ops []datapath.Op, have datapath.State) []datapath.Op {
	less := func(kind resourceKind, s prefixes.Set) prefixes.Set {
		var wait []netip.Prefix
		for p := range s.All() {
			if m.waits(now, resource{kind: kind, prefix: p}) {
				wait = append(wait, p)
			}
		}
		return s.Without(wait...)
	}
	var kept []datapath.Op
	for _, op := range ops {
		empty := false
		switch o := op.(type) {
		case datapath.SetDevice:
			empty = m.waits(now, resource{kind: theDevice})
		case datapath.AddAddrs:
			o.Addrs = less(anAddress, o.Addrs)
			op, empty = o, o.Addrs.IsEmpty()
		case datapath.RemoveAddrs:
			// A host drops the routes from an address with it.
			o.Addrs = less(anAddress, o.Addrs)
			for p := range o.Addrs.All() {
				for r, a := range m.retry {
					if r.kind == aRoute && !a.due(now) && have.Routes[r.prefix] == p.Addr() {
						o.Addrs = o.Addrs.Without(p)
						m.held.Device = true
					}
				}
			}
			op, empty = o, o.Addrs.IsEmpty()
		case datapath.AddLocal:
			o.Prefixes = less(aLocal, o.Prefixes)
			op, empty = o, o.Prefixes.IsEmpty()
		case datapath.RemoveLocal:
			o.Prefixes = less(aLocal, o.Prefixes)
			op, empty = o, o.Prefixes.IsEmpty()
		}
		if !empty {
			kept = append(kept, op)
		}
	}
	return kept
}

// timely returns ops less what is not to be done yet: before everything is known, nothing is taken away
// (rule 1).
func (m *Machine) timely(ops []datapath.Op) []datapath.Op {
	if m.reset {
		return m.sparing(ops)
	}
	kept := ops[:0]
	for _, op := range ops {
		switch op.(type) {
		case datapath.RemovePeer, datapath.DropPrefixes, datapath.RemoveRoutes, datapath.RemoveAddrs, datapath.RemoveLocal:
		default:
			kept = append(kept, op)
		}
	}
	return kept
}

// applied takes in how the ops of the last plan went.
func (m *Machine) applied(now time.Time, in Applied) {
	m.applying, m.changed = false, true
	set := false
	for _, op := range in.Ops {
		if _, ok := op.(datapath.SetDevice); ok {
			set = true
		}
	}
	if in.Err != nil {
		m.failures(now, in, set)
	} else {
		m.set = set
		if len(m.retry) > 0 {
			for _, op := range in.Ops {
				for _, r := range resources(op) {
					if r.kind != theDevice {
						m.worked(r)
					}
				}
			}
		}
	}
	if in.Err != nil || set {
		m.doubt, m.readAt = true, now
		return
	}
	for _, op := range in.Ops {
		if err := m.have.Do(op); err != nil {
			m.doubt, m.readAt = true, now
			return
		}
		switch o := op.(type) {
		case datapath.RemovePeer:
			delete(m.stats, o.Key)
		case datapath.AddAddrs, datapath.RemoveAddrs, datapath.AddLocal, datapath.RemoveLocal:
			m.recordStale = true
		}
	}
}

// failures sorts out which resources failed and which did not. set: the device was among them.
func (m *Machine) failures(now time.Time, in Applied, set bool) {
	sent := make(map[resource]error)
	for _, op := range in.Ops {
		for _, r := range resources(op) {
			sent[r] = nil
		}
	}
	var whole error // of all ops that have no failure of their own
	gone := false
	for f := range datapath.Failures(in.Err) {
		gone = gone || errors.Is(f.Err, datapath.ErrNoDevice)
		if f.Op == nil {
			whole = f.Err
			continue
		}
		for _, r := range resources(f.Op) {
			was, known := sent[r]
			if !known {
				whole = f
			} else if was == nil || errors.Is(was, datapath.ErrSkipped) {
				sent[r] = f
			}
		}
	}
	for r, err := range sent {
		if err == nil {
			err = whole
		}
		switch {
		case r.kind != theDevice && gone && set:
			// It fails with the device, and comes with it.
		case err != nil:
			m.failed(now, r, err)
		case r.kind == theDevice:
			m.set = true
		default:
			m.worked(r)
		}
	}
}

// again ends the wait of a resource of which something else is wanted now (rule 8).
func (m *Machine) again(r resource) {
	if a, ok := m.retry[r]; ok {
		m.retry[r] = attempt{about: a.about}
	}
}

// hasten has what fails tried at once: something around it changed, which may have been what it needs.
func (m *Machine) hasten(now time.Time, which func(resource) bool) {
	for r, a := range m.retry {
		if !a.permanent && a.next.After(now) && which(r) {
			a.next = now
			m.retry[r] = a
		}
	}
}

// failed notes that r failed: it is retried alone, unless it only relied on something that is.
func (m *Machine) failed(now time.Time, r resource, err error) {
	if errors.Is(err, datapath.ErrSkipped) {
		return // the next plan sees to it, and to what is to be held back
	}
	a := m.retry[r]
	if r.kind == theDevice && errors.Is(err, datapath.ErrPortInUse) {
		m.raise(now, view.PortInUse, m.cfg.Node, "", err.Error(), "free the port, or allow others: a range of listen ports, or any")
		if d := &m.want.Device; m.cfg.PortFirst != 0 && m.cfg.PortLast > m.cfg.PortFirst {
			if d.ListenPort < m.cfg.PortLast {
				d.ListenPort++
				a.next = now
				m.retry[r] = a
				return
			}
			d.ListenPort = m.cfg.PortFirst // all were tried: now wait
		} else if m.cfg.PortFirst == 0 && d.ListenPort != 0 {
			// The port of last time is another's now.
			m.clear(view.PortInUse, m.cfg.Node, "")
			d.ListenPort = 0
			a.next = now
			m.retry[r] = a
			return
		}
	} else {
		if about := m.about(r); a.about != about { // it has changed hands
			m.clear(view.OpFailed, a.about, r.String())
			a.about = about
		}
		a.permanent = errors.Is(err, errors.ErrUnsupported)
		remedy := "it is retried"
		if a.permanent {
			remedy = "this datapath cannot do it"
		}
		m.raise(now, view.OpFailed, a.about, r.String(), err.Error(), remedy)
	}
	a.failures++
	a.next = now.Add(m.delay(r.String(), a.failures))
	if m.isDirty(r) {
		a = attempt{about: a.about} // what failed is not what is wanted now
	}
	m.retry[r] = a
}

// about returns the node that r belongs to.
func (m *Machine) about(r resource) string {
	switch r.kind {
	case aPeer:
		return m.peerOf[r.peer]
	case aRoute:
		id, _ := m.assigned.Get(r.prefix)
		return id
	}
	return m.cfg.Node
}

func (m *Machine) isDirty(r resource) bool {
	var is bool
	switch r.kind {
	case aPeer:
		_, is = m.dirty.Peers[r.peer]
	case aRoute:
		_, is = m.dirty.Routes[r.prefix]
	case aLocal:
		is = m.dirty.Device
	}
	return is
}

// worked notes that r is as wanted.
func (m *Machine) worked(r resource) {
	a, ok := m.retry[r]
	if !ok {
		return
	}
	delete(m.retry, r)
	if len(m.retry) == 0 {
		m.retry = make(map[resource]attempt) // a map that was large once is slow to walk ever after
	}
	m.clear(view.OpFailed, a.about, r.String())
	switch r.kind {
	case theDevice:
		m.clear(view.PortInUse, m.cfg.Node, "")
	case anAddress: // routes may have waited for it
		m.hasten(m.lastRead, func(r resource) bool { return r.kind == aRoute })
	}
}

// errNotTaken is the failure of a device that says it was set and reads as if it was not.
var errNotTaken = errors.New("the device says that it was set, and is not as it was set")

// readingDone takes in what the device is.
func (m *Machine) readingDone(now time.Time, in Reading) {
	m.reading = false
	m.lastRead = now
	if in.Err != nil {
		m.readFail++
		m.readAt = now.Add(m.delay("read", m.readFail))
		remedy := "it is retried"
		if in.Closed {
			remedy = "end Run before the datapath is closed"
		}
		m.raise(now, view.DeviceUnreadable, m.cfg.Node, "", "the device cannot be read: "+in.Err.Error(), remedy)
		return
	}
	m.clear(view.DeviceUnreadable, m.cfg.Node, "")
	first, was, wasOurs := m.have == nil, m.host, m.ours()
	if first || m.have.State().Device.Exists() != in.State.Device.Exists() || !maps.Equal(m.stats, in.State.Stats) {
		m.changed = true
	}
	m.readFail = 0
	m.readAt = now.Add(m.cfg.Audit)
	m.host = in.State.Host
	if m.host.Driver != was.Driver || m.host.Instead != was.Instead {
		m.changed = true
	}
	m.hostProblems(now, in.State.Problems)
	var outside drift
	if m.trusted() {
		outside = m.driftOf(m.have.State(), in.State)
	}
	m.have = datapath.NewModel(in.State)
	if first {
		if m.cfg.PortFirst == 0 && in.State.Device.Exists() {
			m.want.Device.ListenPort = 0 // the one it has
		}
		m.adopted = m.ours()
		m.found = make(map[key.Public]struct{}, len(in.State.Peers))
		for k := range in.State.Peers {
			m.found[k] = struct{}{}
		}
		if m.reset {
			m.guardStrays(now)
		}
	}
	if wasOurs && !m.ours() {
		m.lostDevice()
	}
	m.contest(now, wasOurs, outside)
	m.judgeDevice(now)
	if m.disturbed && now.Sub(m.hastened) >= minHasten {
		m.hastened = now
		m.hasten(now, func(r resource) bool { return r.kind != theDevice })
	}
	m.disturbed = false
	m.addresses()
	if m.host != was || first {
		if m.host.Connected != was.Connected {
			m.localChanged(now)
		}
		if m.host.Underlay != was.Underlay || first {
			for p := range m.claims.All() {
				m.stale = append(m.stale, p)
			}
		}
		m.recheckCandidates()
	}
	m.observe(now, in.State)
	m.recordStale = true
	m.full, m.flushAt = true, now
}

// maxProblems is how many problems of the host get a condition each. The rest are counted in one more, which
// has no subject.
const maxProblems = 16

// hostProblems has the conditions of the host be what a reading has, in whatever order it has them. Of two
// with one subject, which no driver is to report, one counts.
func (m *Machine) hostProblems(now time.Time, read []datapath.Problem) {
	ps := slices.Clone(read)
	for i := range ps {
		ps[i].Subject = cmp.Or(ps[i].Subject, "host")
	}
	slices.SortFunc(ps, func(a, b datapath.Problem) int {
		return cmp.Or(cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Message, b.Message), cmp.Compare(a.Remedy, b.Remedy))
	})
	ps = slices.CompactFunc(ps, func(a, b datapath.Problem) bool { return a.Subject == b.Subject })
	named := ps[:min(len(ps), maxProblems)]
	keep := make(map[string]bool, len(named)+1)
	for _, p := range named {
		keep[p.Subject] = true
		m.raise(now, view.HostProblem, m.cfg.Node, p.Subject, p.Message, p.Remedy)
	}
	if more := len(ps) - len(named); more > 0 {
		keep[""] = true
		m.raise(now, view.HostProblem, m.cfg.Node, "", fmt.Sprintf("and %d more problems of this host", more), "see to the others of this kind first")
	}
	m.clearBut(view.HostProblem, m.cfg.Node, keep)
}

// drift is how a device became other than it was left: how many resources are, and one of them.
type drift struct {
	first resource
	n     int
}

// driftOf compares two readings. Where peers are is no drift: they roam. Nor is the MTU where it is the driver's
// to choose.
func (m *Machine) driftOf(was, is datapath.State) (d drift) {
	if m.cfg.MTU == 0 {
		was.Device.MTU = is.Device.MTU
	}
	note := func(r resource, same bool) {
		if !same {
			if d.n == 0 {
				d.first = r
			}
			d.n++
		}
	}
	note(resource{kind: theDevice}, was.Device == is.Device)
	if !was.Device.Exists() || !is.Device.Exists() {
		return d
	}
	for _, sets := range []struct {
		kind    resourceKind
		was, is prefixes.Set
	}{{anAddress, was.Addrs, is.Addrs}, {aLocal, was.Local, is.Local}} {
		if sets.was != sets.is {
			for p := range sets.was.Minus(sets.is).Union(sets.is.Minus(sets.was)).All() {
				note(resource{kind: sets.kind, prefix: p}, false)
			}
		}
	}
	for p, src := range was.Routes {
		now, there := is.Routes[p]
		note(resource{kind: aRoute, prefix: p}, there && now == src)
	}
	for p := range is.Routes {
		_, known := was.Routes[p]
		note(resource{kind: aRoute, prefix: p}, known)
	}
	for k, p := range was.Peers {
		q, there := is.Peers[k]
		q.Endpoint = p.Endpoint
		note(resource{kind: aPeer, peer: k}, there && p == q)
	}
	for k := range is.Peers {
		_, known := was.Peers[k]
		note(resource{kind: aPeer, peer: k}, known)
	}
	return d
}

// contest takes in what another program did to the device. Two who undo each other's work are not to be
// busy with nothing else, so each change is put right a while after the last one was.
func (m *Machine) contest(now time.Time, wasOurs bool, d drift) {
	is := m.have.State().Device
	if d.n == 0 {
		if m.ours() && !m.repairAt.IsZero() && now.Sub(m.repairAt) >= 2*m.cfg.Audit {
			m.repairAt, m.undone, m.took = time.Time{}, 0, false
			m.clear(view.DeviceContested, m.cfg.Node, "")
		}
		return
	}
	m.repairAt = maxTime(now, m.repairAt.Add(minRepair))
	m.undone++
	const remedy = "give every program and every mesh a device of its own"
	switch {
	case wasOurs && is.Exists() && !m.ours():
		m.took = true
		m.raise(now, view.DeviceContested, m.cfg.Node, "", fmt.Sprintf("another program gave the device the key %s, which is not this node's", is.Key.Public().Short()), remedy)
	case m.undone > mostUndone && !m.took:
		m.raise(now, view.DeviceContested, m.cfg.Node, "", fmt.Sprintf("another program keeps changing the device: last %v, and %d more", d.first, d.n-1), remedy)
	}
}

// lostDevice takes in that the device was taken away or is another: its sessions are gone, and whatever
// failed on it may work on the next one.
func (m *Machine) lostDevice() {
	if m.started {
		m.starts.Generation = next(m.starts.Generation)
	}
	m.adopted = false
	for r := range m.retry {
		if r.kind != theDevice {
			m.again(r)
		}
	}
}

// judgeDevice finds out whether the last SetDevice did what it said, and takes the port that the device
// has where that is as good as the one asked for.
func (m *Machine) judgeDevice(now time.Time) {
	is := m.have.State().Device
	if p := is.ListenPort; m.cfg.PortLast > m.cfg.PortFirst && p >= m.cfg.PortFirst && p <= m.cfg.PortLast && m.cfg.PortFirst != 0 {
		m.want.Device.ListenPort = p
	}
	if m.cfg.PortFirst == 0 && m.want.Device.ListenPort == 0 && m.ours() {
		m.want.Device.ListenPort = is.ListenPort // peers know it by now
	}
	if the := (resource{kind: theDevice}); !m.differs(the, m.have.State()) {
		m.worked(the)
	} else if m.set {
		m.failed(now, the, errNotTaken)
	}
	m.doubt, m.set = false, false
}
