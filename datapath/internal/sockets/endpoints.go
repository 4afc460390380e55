package sockets

import "net/netip"

// endpoints are those that packets came from, so that none is made for each packet. They belong to one goroutine.
type endpoints struct {
	last heard
	ep   *Endpoint
	all  map[heard]*Endpoint
}

// heard is from where packets came, and to which address.
type heard struct {
	from netip.AddrPort
	to   netip.Addr
	on   int
}

// maxEndpoints bounds what strangers can have remembered.
const maxEndpoints = 4096

func (es *endpoints) get(from netip.AddrPort, to netip.Addr, on int) *Endpoint {
	h := heard{from, to, on}
	if !to.IsLinkLocalUnicast() {
		h.on = 0
	}
	if h == es.last && es.ep != nil && !es.ep.forgot.Load() {
		return es.ep
	}
	e := es.all[h]
	if e == nil || e.forgot.Load() { // which is known again
		if es.all == nil || len(es.all) >= maxEndpoints {
			es.all = make(map[heard]*Endpoint)
		}
		fresh := newEndpoint(from, to, on)
		if e != nil {
			fresh.path.learn(&e.path)
		}
		e = fresh
		es.all[h] = e
	}
	es.last, es.ep = h, e
	return e
}
