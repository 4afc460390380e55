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
	began      time.Time // of the whole search
	proven     bool

	// Of the candidate now tried.
	sentAt time.Time // the device was first seen to have sent to it; zero: it has not, and silence means nothing (rule 24)
	sent   uint64    // the device's count before
	shook  time.Time // the last handshake before

	// Of a proven one.
	received uint64    // the device's count when it last grew
	heardAt  time.Time // when that was seen
	sentThen uint64
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
)

// wanted is the endpoint to ask of the device; the zero one leaves what it has.
func (t *trial) wanted() netip.AddrPort {
	if t.proven || len(t.candidates) == 0 {
		return netip.AddrPort{}
	}
	return t.candidates[t.index%len(t.candidates)]
}

// candidates takes in the endpoints of the record of n, which was old before.
func (m *Machine) candidates(now time.Time, n *node, old record.Record) {
	t := &n.trial
	was := t.wanted()
	var unusable []string
	t.candidates = nil
	m.countEndpoints(old.Endpoints, -1)
	m.countEndpoints(n.rec.Endpoints, 1)
	for _, e := range n.rec.Endpoints {
		ap := netip.AddrPortFrom(e.Addr, e.Port)
		switch {
		case !e.Addr.IsValid() || e.Addr.Zone() != "":
			unusable = append(unusable, e.String())
		case m.have != nil && (e.Addr.Is4() && !m.host.IPv4 || e.Addr.Is6() && !m.host.IPv6):
			unusable = append(unusable, e.String())
		case slices.ContainsFunc(m.rec.Endpoints, func(own record.Endpoint) bool { return own == e }):
			unusable = append(unusable, e.String())
		default:
			t.candidates = append(t.candidates, ap)
		}
	}
	if len(unusable) > 0 && len(t.candidates) == 0 {
		m.raise(now, view.EndpointUnusable, n.id, "", "none of its endpoints can be used from here: "+strings.Join(unusable, ", "),
			"publish an endpoint in an address family that this host has")
	} else {
		m.clear(view.EndpointUnusable, n.id, "")
	}
	m.touched[n] = struct{}{}
	switch {
	case t.proven:
		// A device created anew has lost its sessions. Where it is now is not where it was, unless the
		// record still says so.
		at := netip.AddrPort{}
		if m.have != nil {
			at = m.have.State().Peers[n.key].Endpoint
		}
		if n.rec.Generation != old.Generation && len(t.candidates) > 0 && !slices.Contains(t.candidates, at) {
			m.try(now, n, 0)
			m.search(now, n)
		}
	case t.began.IsZero():
		// A device that was adopted knows the peer already.
		if s := m.stats[n.key]; !s.LastHandshake.IsZero() && m.have != nil && m.have.State().Peers[n.key].Endpoint.IsValid() {
			t.proven, t.received, t.heardAt, t.sentThen = true, s.Received, now, s.Sent
			return
		}
		m.try(now, n, 0)
		m.search(now, n)
	default:
		if i := slices.Index(t.candidates, was); i >= 0 {
			t.index = i
		} else if len(t.candidates) > 0 {
			m.try(now, n, 0)
			m.search(now, n)
		}
	}
}

// search begins a search: the device is read often until it is over, or has gone on for long.
func (m *Machine) search(now time.Time, n *node) {
	n.trial.began = now
	m.unproven++
	m.pollTill = maxTime(m.pollTill, now.Add(pollFor))
	m.readSoon(now.Add(pollEvery))
}

// countEndpoints keeps count of the addresses that others may be reached at. A prefix with one of them
// inside is decided again.
func (m *Machine) countEndpoints(es []record.Endpoint, by int) {
	for _, e := range es {
		if !e.Addr.IsValid() {
			continue
		}
		p := prefixes.Host(e.Addr.WithZone(""))
		count, _ := m.endpointAt.Get(p)
		if count += by; count > 0 {
			m.endpointAt.Insert(p, count)
		} else {
			m.endpointAt.Delete(p)
		}
		if m.have != nil && m.host.Underlay == datapath.UnderlayShared {
			for q := range m.claims.Supernets(p) {
				m.stale[q] = struct{}{}
			}
		}
	}
}

// loops returns an address at which some node may be reached and which lies inside p, if packets to it
// would then follow p into the mesh.
func (m *Machine) loops(p netip.Prefix) (netip.Addr, bool) {
	if m.have == nil || m.host.Underlay != datapath.UnderlayShared {
		return netip.Addr{}, false
	}
	for q := range m.endpointAt.Subnets(p) {
		return q.Addr(), true
	}
	return netip.Addr{}, false
}

// try puts the i-th candidate of n on trial.
func (m *Machine) try(now time.Time, n *node, i int) {
	s := m.stats[n.key]
	t := &n.trial
	t.index, t.proven, t.sentAt, t.sent, t.shook = i, false, time.Time{}, s.Sent, s.LastHandshake
	m.touched[n] = struct{}{}
}

// endTrial forgets what was learned of the device's peer for n, which is gone.
func (m *Machine) endTrial(n *node) {
	m.clear(view.NoHandshake, n.id, "")
	t := n.trial
	n.trial = trial{candidates: t.candidates, began: t.began}
}

// observe takes in what the device counted.
func (m *Machine) observe(now time.Time, st datapath.State) {
	m.stats = st.Stats
	m.unproven = 0
	for _, n := range m.nodes {
		if !n.routable {
			continue
		}
		m.observeNode(now, n, st)
		if !n.trial.proven && len(n.trial.candidates) > 0 {
			m.unproven++
		}
	}
	if m.unproven > 0 && now.Before(m.pollTill) {
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
			m.try(now, n, t.index)
			m.search(now, n)
		}
		t.sent, t.shook, t.sentAt = 0, time.Time{}, time.Time{}
		return
	}
	if s.Sent < t.sent || s.LastHandshake.Before(t.shook) { // a peer created anew counts from zero
		t.sent, t.shook = 0, time.Time{}
		t.received, t.sentThen, t.heardAt = 0, 0, now
	}
	if !t.proven {
		if s.LastHandshake.After(t.shook) {
			t.proven, t.shook = true, s.LastHandshake
			t.received, t.heardAt, t.sentThen = s.Received, now, s.Sent
			m.touched[n] = struct{}{}
			m.clear(view.NoHandshake, n.id, "")
			m.changed = true
			return
		}
		m.silentTrial(now, n, s)
		return
	}
	if s.LastHandshake.After(t.shook) || s.Received != t.received {
		if s.LastHandshake.After(t.shook) {
			m.changed = true
		}
		m.clear(view.NoHandshake, n.id, "")
		t.shook, t.received, t.heardAt, t.sentThen = s.LastHandshake, s.Received, now, s.Sent
		return
	}
	quiet := now.Sub(t.heardAt)
	idle := uint64(2 * initiation)
	if k := m.keepalive(); k > 0 {
		idle += emptyPacket * (uint64(quiet/k) + 1)
	}
	if quiet < silence || s.Sent-t.sentThen < idle {
		return
	}
	at := p.Endpoint
	m.raise(now, view.NoHandshake, n.id, "", fmt.Sprintf("%d bytes were sent to %v and nothing came back for %v", s.Sent-t.sentThen, at, quiet.Round(time.Second)),
		"see that the node runs and that its UDP port can be reached")
	if i := slices.IndexFunc(t.candidates, func(c netip.AddrPort) bool { return c != at }); i >= 0 {
		next := slices.Index(t.candidates, at) + 1
		if next > 0 {
			i = next % len(t.candidates)
		}
		m.try(now, n, i)
		m.search(now, n)
		return
	}
	t.heardAt, t.sentThen = now, s.Sent
}

// silentTrial judges a candidate that has not answered so far.
func (m *Machine) silentTrial(now time.Time, n *node, s datapath.Stats) {
	t := &n.trial
	if len(t.candidates) == 0 || s.Sent <= t.sent {
		return
	}
	if t.sentAt.IsZero() {
		t.sentAt = now
		m.readSoon(now.Add(perCandidate))
		return
	}
	if now.Sub(t.sentAt) < perCandidate {
		m.readSoon(t.sentAt.Add(perCandidate))
		return
	}
	m.raise(now, view.NoHandshake, n.id, "", fmt.Sprintf("no handshake so far, tried %v", t.candidates),
		"see that the node runs, that it has this node's record, and that its UDP port can be reached")
	if len(t.candidates) > 1 {
		m.try(now, n, (t.index+1)%len(t.candidates))
		return
	}
	t.sentAt, t.sent = time.Time{}, s.Sent
}
