package core

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// trial is the search for an endpoint at which a node answers. The candidates are its record's, in
// their order. A handshake proves whichever endpoint the device then has, and a proven endpoint is the
// device's to keep: it follows the peer when that roams.
type trial struct {
	candidates []netip.AddrPort
	index      int
	proven     bool

	tried int // candidates that did not answer, of this search

	// Of the candidate now tried.
	sentAt time.Time      // the device was first seen to have sent to it; zero: it has not, and silence means nothing (rule 24)
	sent   uint64         // the device's count before
	shook  time.Time      // the last handshake before
	before netip.AddrPort // where packets went until it was put
	putAt  time.Time      // when the device was told of it; zero: it was not

	noRoute bool // the host had no way there, as last seen

	// Of a proven one.
	received uint64    // the device's count when it last grew
	heardAt  time.Time // when that was seen
	sentThen uint64
	silentAt time.Time // more was sent since than goes unanswered by rights, as first seen then; zero: it was not
	silent   bool      // it went on for so long that another address will do as soon as there is one
}

const (
	// perCandidate is how long an answer may take: WireGuard repeats an initiation after 5 s
	// (REKEY_TIMEOUT) at the earliest, so a longer wait would ask the same endpoint twice.
	perCandidate = 5 * time.Second
	// silence is how long a proven endpoint may be sent to without any answer. WireGuard answers data
	// within 10 s (KEEPALIVE_TIMEOUT), and asks for a new handshake after 15 s without.
	silence = 21 * time.Second
	// initiation and emptyPacket are sizes of WireGuard's messages in bytes.
	initiation  = 148
	emptyPacket = 32

	noRouteRemedy = "see that this host's network is up, or publish an address of the node that this host has a route to"

	// maxLooping is how many endpoints of a node get a condition of their own.
	maxLooping = 7

	pollEvery = time.Second // while an endpoint is on trial
	pollFor   = time.Minute // then the audits are enough
)

// wanted is the endpoint to ask of the device; the zero one leaves what it has.
func (t *trial) wanted() netip.AddrPort {
	if t.proven {
		return netip.AddrPort{}
	}
	return t.current()
}

// current is the candidate that is on trial, or was last.
func (t *trial) current() netip.AddrPort {
	if len(t.candidates) == 0 {
		return netip.AddrPort{}
	}
	return t.candidates[t.index]
}

// recheck has the endpoints of n's record looked at again, once it is known who has which prefix.
func (m *Machine) recheck(n *node) {
	if !n.recheck {
		n.recheck, n.generation = true, n.rec.Generation
		m.rechecks = append(m.rechecks, n)
	}
}

// candidates takes in the endpoints of n's record, or what has changed about using them.
func (m *Machine) candidates(now time.Time, n *node) {
	t := &n.trial
	was := t.current()
	var unusable []string
	var looping []record.Endpoint
	t.candidates = nil
	for _, e := range n.rec.Endpoints {
		if e.Host != "" {
			if why := m.unfound(e.Host); why != "" {
				unusable = append(unusable, e.String()+" "+why)
			}
		}
	}
	for _, e := range n.at {
		why := m.unusable(e)
		if p, owner, loops := m.inPrefix(n, e); why == "" && loops {
			why = fmt.Sprintf("is inside prefix %s of %s", p, owner)
			if slices.Contains(looping, e) {
			} else if looping = append(looping, e); len(looping) <= maxLooping {
				m.raise(now, view.EndpointLoops, n.id, e.String(), fmt.Sprintf("endpoint %v of %s is inside prefix %s of %s, so packets to it would go into the mesh", e, n.id, p, owner),
					"publish an endpoint outside of the mesh, announce narrower prefixes, or use a datapath that marks its packets out of the tunnel")
			}
		}
		if why != "" {
			unusable = append(unusable, e.String()+" "+why)
		} else if ap := netip.AddrPortFrom(e.Addr, e.Port); !slices.Contains(t.candidates, ap) {
			t.candidates = append(t.candidates, ap)
		}
	}
	if len(unusable) > 0 && len(t.candidates) == 0 {
		m.raise(now, view.EndpointUnusable, n.id, "", "none of its endpoints can be used from here: "+strings.Join(unusable, ", "),
			"publish an address in a family that this host has, or a name that is found from here")
	} else {
		m.clear(view.EndpointUnusable, n.id, "")
	}
	m.looping(n, looping)
	m.touch(n)
	same := slices.Index(t.candidates, was)
	t.index = max(same, 0)
	switch {
	case n.onDevice.IsZero() || n.onDevice != n.key:
		// The trial begins when it is a peer.
	case t.proven:
		// A device created anew has lost its sessions. Where it is now is not where it was, unless the
		// record still says so. One to which packets would go into the mesh is left for any other.
		at := m.endpointOf(n)
		lost := t.silent || n.rec.Generation != n.generation || at.IsValid() && slices.Contains(looping, record.EndpointFrom(at))
		if lost && len(t.candidates) > 0 && !slices.Contains(t.candidates, at) {
			m.search(now, n, 0)
		}
	case same < 0:
		m.search(now, n, 0)
	}
}

// looping notes which of n's endpoints are inside a prefix of another node.
func (m *Machine) looping(n *node, es []record.Endpoint) {
	es = es[:min(len(es), maxLooping)]
	for _, e := range n.looping {
		if !slices.Contains(es, e) {
			m.clear(view.EndpointLoops, n.id, e.String())
		}
	}
	n.looping = es
}

// inPrefix returns the prefix that packets to an endpoint of n would follow into the mesh, and who has
// it. Its own is none: a prefix with an endpoint of its owner inside goes nowhere.
func (m *Machine) inPrefix(n *node, e record.Endpoint) (p netip.Prefix, owner string, is bool) {
	if !m.shared() || !n.routable {
		return netip.Prefix{}, "", false
	}
	for p, owner := range m.assigned.Supernets(prefixes.Host(e.Addr.WithZone(""))) {
		if owner != n.id {
			return p, owner, true
		}
	}
	return netip.Prefix{}, "", false
}

// shared: encrypted packets follow the same routes as all others.
func (m *Machine) shared() bool { return m.have != nil && m.host.Underlay == datapath.UnderlayShared }

var thisNetwork = netip.MustParsePrefix("0.0.0.0/8") // RFC 1122: Linux takes 0.0.0.0 for the host itself
var reserved = netip.MustParsePrefix("240.0.0.0/4")  // RFC 1112 section 4

// onLoopback: this node publishes an endpoint on its own host, as nodes of a mesh on one host do, or none
// at all. Else a node elsewhere could have this one send to whatever listens here.
func (m *Machine) onLoopback() bool {
	return len(m.endpoints) == 0 || slices.ContainsFunc(m.endpoints, func(e record.Endpoint) bool {
		return e.Addr.IsLoopback() || e.Host == "localhost" // RFC 6761, section 6.3
	})
}

func (m *Machine) unusable(e record.Endpoint) string {
	switch {
	case e.Addr.Zone() != "":
		return "has a zone"
	case e.Addr.IsLinkLocalUnicast():
		return "is link-local"
	case thisNetwork.Contains(e.Addr), reserved.Contains(e.Addr), e.Addr == netip.IPv6Unspecified():
		return "is no address of a host"
	case e.Addr.IsLoopback() && !m.onLoopback():
		return "is loopback, where this node is not reached itself"
	case m.have != nil && e.Addr.Is4() && !m.host.IPv4:
		return "is IPv4, which this host has not"
	case m.have != nil && e.Addr.Is6() && !m.host.IPv6:
		return "is IPv6, which this host has not"
	case slices.Contains(m.rec.Endpoints, e):
		return "is this node's own"
	}
	return ""
}

// recheckCandidates looks at everyone's endpoints again, after what makes them usable has changed.
func (m *Machine) recheckCandidates() {
	for _, n := range m.nodes {
		if n.known && n != m.self {
			m.recheck(n)
		}
	}
}

// endpointOf returns where the device has n.
func (m *Machine) endpointOf(n *node) netip.AddrPort {
	if m.have == nil {
		return netip.AddrPort{}
	}
	return m.have.State().Peers[n.key].Endpoint
}

// indexEndpoints has n found, or no longer found, by the addresses it may be reached at. A prefix with one
// of them inside is decided again.
func (m *Machine) indexEndpoints(n *node, es []record.Endpoint, change func([]string, string) []string) {
	for _, e := range es {
		p := prefixes.Host(e.Addr.WithZone(""))
		ids, _ := m.endpointAt.Get(p)
		if ids = change(ids, n.id); len(ids) > 0 {
			m.endpointAt.Insert(p, ids)
		} else {
			m.endpointAt.Delete(p)
		}
		if m.shared() {
			for q := range m.claims.Supernets(p) {
				m.stale = append(m.stale, q)
			}
		}
	}
}

// recheckInside looks again at the endpoints inside p, which passes to another.
func (m *Machine) recheckInside(p netip.Prefix) {
	if !m.shared() {
		return
	}
	for _, ids := range m.endpointAt.Subnets(p) {
		for _, id := range ids {
			m.recheck(m.nodes[id])
		}
	}
}

// loops returns an address at which n may be reached and which lies inside its own prefix p, if packets
// to it would then follow p into the mesh. The endpoints of others do nothing to p: whoever publishes one
// inside it is not reached there.
func (m *Machine) loops(n *node, p netip.Prefix) (netip.Addr, bool) {
	if !m.shared() {
		return netip.Addr{}, false
	}
	for _, e := range n.at {
		if p.Contains(e.Addr.WithZone("")) {
			return e.Addr, true
		}
	}
	return netip.Addr{}, false
}

// beginTrial begins the search for n, which becomes a peer on the device. A device that was found running
// may know it already, with its session, and wherever it has roamed to.
func (m *Machine) beginTrial(now time.Time, n *node) {
	n.trial = trial{candidates: n.trial.candidates}
	_, found := m.found[n.key]
	delete(m.found, n.key)
	if s := m.stats[n.key]; found && !s.LastHandshake.IsZero() && m.endpointOf(n).IsValid() {
		n.trial.proven = true
		n.trial.heard(now, s)
		return
	}
	m.search(now, n, 0)
}

// endTrial forgets what was learned of the device's peer for n, which is gone.
func (m *Machine) endTrial(n *node) {
	m.clear(view.NoHandshake, n.id, "")
	n.trial = trial{candidates: n.trial.candidates}
}

// try puts the i-th candidate of n on trial.
func (m *Machine) try(n *node, i int) {
	s := m.stats[n.key]
	t := &n.trial
	t.index, t.proven, t.sentAt, t.sent, t.shook, t.silentAt, t.silent = i, false, time.Time{}, s.Sent, s.LastHandshake, time.Time{}, false
	t.before, t.putAt, t.noRoute = m.endpointOf(n), time.Time{}, false
	m.touch(n)
}

// tell notes that the device is about to be told of candidates.
func (m *Machine) tell(now time.Time, ops []datapath.Op) {
	for _, op := range ops {
		if o, ok := op.(datapath.PutPeer); ok && o.Peer.Endpoint.IsValid() {
			if n := m.nodes[m.peerOf[o.Key]]; n != nil && n.trial.putAt.IsZero() {
				n.trial.putAt = now
			}
		}
	}
}

// late reports whether it was the endpoint before the candidate of t that answered, after it was given up and
// before the device was told so: the handshake proves that one. It is put back, and proven by that.
func (m *Machine) late(n *node, s datapath.Stats) bool {
	t := &n.trial
	i := slices.Index(t.candidates, t.before)
	if i < 0 || i == t.index || t.putAt.IsZero() || !s.LastHandshake.Before(t.putAt) {
		return false
	}
	t.index, t.before, t.putAt = i, netip.AddrPort{}, time.Time{}
	m.touch(n)
	return true
}

// search tries the candidates of n from the i-th on, and has the device read often for a while.
func (m *Machine) search(now time.Time, n *node, i int) {
	m.try(n, i)
	n.trial.tried = 0
	if len(n.trial.candidates) > 0 {
		m.pollTill = maxTime(m.pollTill, now.Add(pollFor))
		m.readSoon(now.Add(pollEvery))
	}
}

// heard notes that the proven endpoint answers.
func (t *trial) heard(now time.Time, s datapath.Stats) {
	t.shook, t.received, t.heardAt, t.sentThen, t.silentAt, t.silent = s.LastHandshake, s.Received, now, s.Sent, time.Time{}, false
}

// observe takes in what the device counted.
func (m *Machine) observe(now time.Time, st datapath.State) {
	m.stats = st.Stats
	open := false
	for _, n := range m.nodes {
		if n.opened.ValidAt(now) != n.known && n != m.self {
			m.judge(now, n) // the wall clock was set back, across a bound
		}
		if !n.routable || n.onDevice != n.key {
			continue
		}
		m.observeNode(now, n, st)
		open = open || !n.trial.proven && len(n.trial.candidates) > 0
	}
	if open && now.Before(m.pollTill) {
		m.readSoon(now.Add(pollEvery))
	}
}

func (m *Machine) observeNode(now time.Time, n *node, st datapath.State) {
	t := &n.trial
	p, there := st.Peers[n.key]
	s := st.Stats[n.key]
	if !there {
		// The peer was lost, or is still to be put: whatever comes is new.
		if t.proven {
			m.search(now, n, t.index)
		}
		t.sent, t.shook, t.sentAt = 0, time.Time{}, time.Time{}
		return
	}
	if s.Sent < t.sent || s.LastHandshake.Before(t.shook) { // a peer created anew counts from zero
		t.sent, t.shook, t.sentAt = 0, time.Time{}, time.Time{}
		t.received, t.sentThen, t.heardAt, t.silentAt = 0, 0, now, time.Time{}
	}
	switch {
	case !t.proven && s.LastHandshake.After(t.shook) && m.late(n, s):
		m.readSoon(now.Add(pollEvery))
	case s.LastHandshake.After(t.shook) || t.proven && s.Received != t.received:
		if !t.proven || s.LastHandshake.After(t.shook) {
			m.changed = true
		}
		if !t.proven {
			t.proven = true
			m.touch(n)
		}
		t.heard(now, s)
		m.clear(view.NoHandshake, n.id, "")
	case t.proven:
		m.silentProven(now, n, p, s)
	default:
		m.silentTrial(now, n, p, s)
	}
	t.noRoute = s.NoRoute
}

// silentProven judges a proven endpoint from which nothing came since the last reading.
func (m *Machine) silentProven(now time.Time, n *node, p datapath.Peer, s datapath.Stats) {
	t := &n.trial
	quiet := now.Sub(t.heardAt)
	idle := uint64(2 * initiation)
	if k := m.keepalive(); k > 0 {
		idle += emptyPacket * (uint64(quiet/k) + 1)
	}
	if t.noRoute && !s.NoRoute {
		t.silentAt = time.Time{}
		m.clear(view.NoHandshake, n.id, "")
	}
	if !s.NoRoute && s.Sent-t.sentThen < idle {
		return
	}
	if t.silentAt.IsZero() {
		t.silentAt = now
	}
	if now.Sub(t.silentAt) < silence {
		m.readSoon(t.silentAt.Add(silence))
		return
	}
	if s.NoRoute {
		m.raise(now, view.NoHandshake, n.id, "", fmt.Sprintf("this host has no route to %v, and nothing came from there for %v", p.Endpoint, quiet.Round(time.Second)), noRouteRemedy)
	} else {
		m.raise(now, view.NoHandshake, n.id, "", fmt.Sprintf("%d bytes were sent to %v and nothing came back for %v", s.Sent-t.sentThen, p.Endpoint, quiet.Round(time.Second)),
			"see that the node runs and that its UDP port can be reached")
	}
	m.renew(n)
	t.silent = true
	next := slices.Index(t.candidates, p.Endpoint) + 1 // the first, where it has roamed to elsewhere
	if next < len(t.candidates) || next > 1 {
		m.search(now, n, next%len(t.candidates))
		return
	}
	t.heardAt, t.sentThen, t.silentAt = now, s.Sent, time.Time{}
}

// silentTrial judges a candidate that has not answered so far.
func (m *Machine) silentTrial(now time.Time, n *node, p datapath.Peer, s datapath.Stats) {
	t := &n.trial
	switch {
	case len(t.candidates) == 0:
		return
	case s.NoRoute && p.Endpoint == t.current():
		// Nothing can be sent there, and not every device counts that it tried.
	case s.Sent <= t.sent:
		return
	case t.sentAt.IsZero():
		t.sentAt = now
		m.readSoon(now.Add(perCandidate))
		return
	case now.Sub(t.sentAt) < perCandidate:
		m.readSoon(t.sentAt.Add(perCandidate))
		return
	}
	m.renew(n)
	if t.tried++; t.tried >= len(t.candidates) {
		message, remedy := fmt.Sprintf("no handshake so far, tried %v", t.candidates), "see that the node runs, that it has this node's record, and that its UDP port can be reached"
		if s.NoRoute {
			message += fmt.Sprintf("; this host has no route to %v", p.Endpoint)
			remedy = noRouteRemedy
		}
		m.raise(now, view.NoHandshake, n.id, "", message, remedy)
	}
	if len(t.candidates) > 1 {
		m.try(n, (t.index+1)%len(t.candidates))
		return
	}
	t.sentAt, t.sent = time.Time{}, s.Sent
}
