package core

import (
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/view"
)

// resource is what is retried by itself: the device with its addresses, one peer, or one route.
type resource struct {
	device bool
	peer   key.Public
	route  netip.Prefix
}

func (r resource) String() string {
	switch {
	case r.device:
		return "device"
	case r.route.IsValid():
		return "route " + r.route.String()
	}
	return "peer " + r.peer.String()
}

// attempt is a resource that failed.
type attempt struct {
	failures  int
	next      time.Time
	permanent bool // until what is wanted of it changes
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

// plan returns the ops for what is dirty or to be retried, and leaves out what is still to wait.
func (m *Machine) plan(now time.Time) []datapath.Op {
	have := m.have.State()
	if a, ok := m.retry[resource{device: true}]; ok && !a.due(now) && !have.Device.Exists() {
		m.full, m.flushAt = true, a.next // nothing can be put on what is not there
		return nil
	}
	d := m.dirty
	if m.full {
		d = datapath.Differences(m.want, have)
	}
	m.clearDirty()
	m.full = false
	m.flushAt = time.Time{}
	var tried []resource
	for r, a := range m.retry {
		switch {
		case a.due(now):
			tried = append(tried, r)
			switch {
			case r.device:
				d.Device = true
			case r.route.IsValid():
				d.Routes[r.route] = struct{}{}
			default:
				d.Peers[r.peer] = struct{}{}
			}
		case r.device:
			d.Device = false
		case r.route.IsValid():
			delete(d.Routes, r.route)
		default:
			delete(d.Peers, r.peer)
		}
	}
	m.close(&d, have)
	ops := datapath.PlanDelta(m.want, have, d)
	if len(tried) > 0 {
		at := make(map[resource]bool)
		for _, op := range ops {
			for _, r := range resources(op) {
				at[r] = true
			}
		}
		for _, r := range tried {
			if !at[r] { // it came right by itself, or is no longer wanted
				m.opWorked(r)
			}
		}
	}
	if m.reset {
		return ops
	}
	// Rule 1: before everything is known, nothing is taken away.
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

// close adds to d what its parts rely on: where a peer loses a prefix, the route into it and the peers
// that are to have it or a part of it; for a route, the peer it leads to.
func (m *Machine) close(d *datapath.Delta, have datapath.State) {
	todo := make([]key.Public, 0, len(d.Peers))
	for k := range d.Peers {
		todo = append(todo, k)
	}
	addOwner := func(p netip.Prefix) {
		id, ok := m.assigned.Get(p)
		if !ok {
			return
		}
		k := m.nodes[id].key
		if o, has := m.have.Owner(p); has && o == k {
			return
		}
		if _, in := d.Peers[k]; !in {
			d.Peers[k] = struct{}{}
			todo = append(todo, k)
		}
	}
	for r := range d.Routes {
		addOwner(r)
	}
	for len(todo) > 0 {
		k := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for p := range have.Peers[k].Prefixes.Minus(m.want.Peers[k].Prefixes).All() {
			if src, routed := have.Routes[p]; routed {
				if w, wanted := m.want.Routes[p]; !wanted || w != src {
					d.Routes[p] = struct{}{}
				}
			}
			for q := range m.assigned.Subnets(p) {
				addOwner(q)
			}
			for q := range m.assigned.Supernets(p) {
				addOwner(q)
			}
		}
	}
}

// applied takes in how the ops of the last plan went.
func (m *Machine) applied(now time.Time, in Applied) {
	m.applying = false
	m.changed = true
	failed := make(map[resource]error)
	other, gone := false, false
	for f := range datapath.Failures(in.Err) {
		rs := resources(f.Op)
		if f.Op == nil {
			other = true
			m.raise(now, view.OpFailed, "", "device", "applying changes: "+f.Err.Error(), "it is retried")
		}
		for _, r := range rs {
			if was, known := failed[r]; !known || errors.Is(was, datapath.ErrSkipped) {
				failed[r] = f
			}
		}
		gone = gone || errors.Is(f.Err, datapath.ErrNoDevice)
	}
	for _, op := range in.Ops {
		for _, r := range resources(op) {
			if err, bad := failed[r]; bad {
				if gone && !r.device {
					continue // it fails with the device, and comes with it
				}
				m.opFailed(now, r, err)
			} else {
				m.opWorked(r)
			}
		}
	}
	if in.Err == nil {
		m.clear(view.OpFailed, "", "device")
	}
	created := false
	for _, op := range in.Ops {
		if _, ok := op.(datapath.SetDevice); ok {
			created = true
		}
	}
	if in.Err != nil || created {
		// What a failed op left behind, and what the driver chose for a new device, has to be seen.
		m.reading = false
		m.readAt = now
		if other {
			m.full = true
			m.flushAt = now.Add(m.delay("apply", 1))
		}
		return
	}
	for _, op := range in.Ops {
		if err := m.have.Do(op); err != nil {
			m.readAt = now
			return
		}
	}
	for _, op := range in.Ops {
		if r, ok := op.(datapath.RemovePeer); ok {
			delete(m.stats, r.Key)
		}
	}
}

// resources names what an op is about.
func resources(op datapath.Op) []resource {
	switch o := op.(type) {
	case nil:
		return nil
	case datapath.PutPeer:
		return []resource{{peer: o.Key}}
	case datapath.DropPrefixes:
		return []resource{{peer: o.Key}}
	case datapath.RemovePeer:
		return []resource{{peer: o.Key}}
	case datapath.AddRoutes:
		rs := make([]resource, len(o.Routes))
		for i, r := range o.Routes {
			rs[i].route = r.Prefix
		}
		return rs
	case datapath.RemoveRoutes:
		rs := make([]resource, 0, o.Prefixes.Len())
		for p := range o.Prefixes.All() {
			rs = append(rs, resource{route: p})
		}
		return rs
	}
	return []resource{{device: true}}
}

func (m *Machine) opFailed(now time.Time, r resource, err error) {
	a := m.retry[r]
	a.failures++
	a.permanent = errors.Is(err, errors.ErrUnsupported)
	a.next = now.Add(m.delay(r.String(), a.failures))
	node := m.peerOf[r.peer]
	if r.device && errors.Is(err, datapath.ErrPortInUse) {
		msg, remedy := err.Error(), "free the port, or allow others: a range of listen ports, or any"
		if m.cfg.PortFirst != 0 && m.cfg.PortLast > m.cfg.PortFirst {
			next := m.port + 1
			if m.port >= m.cfg.PortLast {
				next = m.cfg.PortFirst // all were tried: now wait
			} else {
				a.next = now
			}
			m.port = next
			m.want.Device.ListenPort = next
		}
		m.raise(now, view.PortInUse, m.cfg.Node, "", msg, remedy)
		m.retry[r] = a
		return
	}
	m.retry[r] = a
	if errors.Is(err, datapath.ErrSkipped) {
		return // what it relied on has the condition
	}
	remedy := "it is retried"
	if a.permanent {
		remedy = "this datapath cannot do it"
	}
	m.raise(now, view.OpFailed, node, r.String(), err.Error(), remedy)
}

func (m *Machine) opWorked(r resource) {
	if r.device {
		m.clear(view.PortInUse, m.cfg.Node, "")
	}
	if _, ok := m.retry[r]; !ok {
		return
	}
	delete(m.retry, r)
	subject := r.String()
	for k := range m.conditions {
		if k.kind == view.OpFailed && k.subject == subject {
			m.clear(k.kind, k.node, k.subject)
		}
	}
}

// readingDone takes in what the device is.
func (m *Machine) readingDone(now time.Time, in Reading) {
	m.reading = false
	m.lastRead = now
	if in.Err != nil {
		m.readFail++
		m.readAt = now.Add(m.delay("read", m.readFail))
		m.raise(now, view.DeviceUnreadable, m.cfg.Node, "", "the device cannot be read: "+in.Err.Error(), "it is retried")
		return
	}
	m.readFail = 0
	m.clear(view.DeviceUnreadable, m.cfg.Node, "")
	first := m.have == nil
	if first {
		m.adopted = in.State.Device.Key == m.cfg.Key
	}
	exists := in.State.Device.Exists()
	if m.started && m.existed && !exists {
		// It was taken away, so the next one is another: its sessions are new.
		m.starts.Generation++
	}
	m.existed = exists
	hostWas := m.host
	m.host = in.State.Host
	before := m.have
	m.have = datapath.NewModel(in.State)
	m.readAt = now.Add(m.cfg.Audit)
	if m.want.Device.ListenPort != 0 && m.cfg.PortLast > m.cfg.PortFirst {
		// Within the range, the port the device has is as good as any.
		if p := in.State.Device.ListenPort; p >= m.cfg.PortFirst && p <= m.cfg.PortLast {
			m.port, m.want.Device.ListenPort = p, p
		}
	}
	if hostWas != m.host || first {
		if hostWas.Connected != m.host.Connected {
			m.localChanged(now)
		}
		if hostWas.Underlay != m.host.Underlay || first {
			for p := range m.claims.All() {
				m.stale[p] = struct{}{}
			}
		}
		for _, n := range m.nodes {
			if n.known && n != m.self {
				m.candidates(now, n, n.rec)
			}
		}
	}
	if before == nil || !before.State().Device.Exists() != !exists || !maps.Equal(m.stats, in.State.Stats) {
		m.changed = true
	}
	m.observe(now, in.State)
	m.full = true
	m.flushAt = now
}
