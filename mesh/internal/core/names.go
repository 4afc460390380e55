package core

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/warren-mesh/warren/mesh/record"
)

// located returns the endpoints es with the addresses of names in their place.
func (m *Machine) located(es []record.Endpoint) []record.Endpoint {
	at := make([]record.Endpoint, 0, len(es))
	for _, e := range es {
		addrs := []netip.Addr{e.Addr}
		if e.Host != "" {
			addrs = m.names[e.Host].Addrs
		}
		for _, a := range addrs {
			if e := (record.Endpoint{Addr: a, Port: e.Port}); !slices.Contains(at, e) {
				at = append(at, e)
			}
		}
	}
	return at
}

// locate has n reached at these.
func (m *Machine) locate(n *node, at []record.Endpoint) {
	if !slices.Equal(n.at, at) {
		m.indexEndpoints(n, n.at, remove)
		n.at = at
		m.indexEndpoints(n, n.at, insert)
	}
}

// indexHosts has n found, or no longer found, by the names it may be reached at.
func (m *Machine) indexHosts(n *node, es []record.Endpoint, change func([]string, string) []string) {
	for _, e := range es {
		if e.Host == "" {
			continue
		}
		was := len(m.hosts[e.Host])
		if ids := change(m.hosts[e.Host], n.id); len(ids) > 0 {
			m.hosts[e.Host] = ids
		} else {
			delete(m.hosts, e.Host)
		}
		m.hostsStale = m.hostsStale || (was == 0) != (len(m.hosts[e.Host]) == 0)
	}
}

// nameHosts says which names are to be looked up.
func (m *Machine) nameHosts() {
	if m.hostsStale {
		m.hostsStale = false
		m.out.Names = slices.AppendSeq(make([]string, 0, len(m.hosts)), maps.Keys(m.hosts))
		slices.Sort(m.out.Names)
	}
}

// named takes in what is known of names. A peer whose session works keeps its endpoint.
func (m *Machine) named(names map[string]Name) {
	was := m.names
	m.names = names
	for host, ids := range m.hosts {
		old, new := was[host], names[host]
		if slices.Equal(old.Addrs, new.Addrs) && sameError(old.Err, new.Err) {
			continue
		}
		for _, id := range ids {
			n := m.nodes[id]
			m.recheck(n)
			m.locate(n, m.located(n.rec.Endpoints))
		}
	}
}

func sameError(a, b error) bool {
	return (a == nil) == (b == nil) && (a == nil || a.Error() == b.Error())
}

// unfound says why no address of host can be used, or nothing.
func (m *Machine) unfound(host string) string {
	switch known, ok := m.names[host]; {
	case len(known.Addrs) > 0:
		return ""
	case !ok || known.Err == nil:
		return "is being looked up"
	default:
		return fmt.Sprintf("is not found: %v", known.Err)
	}
}

// renew has the names of n, which does not answer, looked up again.
func (m *Machine) renew(n *node) {
	for _, e := range n.rec.Endpoints {
		if e.Host != "" && !slices.Contains(m.out.Renew, e.Host) {
			m.out.Renew = append(m.out.Renew, e.Host)
		}
	}
}

// setEndpoints has this node reached at these from now on.
func (m *Machine) setEndpoints(es []record.Endpoint) {
	if slices.Equal(m.endpoints, es) {
		return
	}
	m.endpoints, m.recordStale = es, true
	for _, n := range m.nodes { // their keepalive, and whether loopback is called, may be others
		if n.known && n != m.self {
			m.touch(n)
			m.recheck(n)
		}
	}
}
