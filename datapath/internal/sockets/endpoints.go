package sockets

import "net/netip"

// endpoints are those that packets came from, so that none is made for each packet. They belong to one goroutine.
type endpoints struct {
	last heard
	ep   *Endpoint
	all  map[heard]*Endpoint
	old  map[heard]*Endpoint // the generation before; who is heard again goes over to all
}

// heard is from where packets came, and to which address.
type heard struct {
	from netip.AddrPort
	to   netip.Addr
	on   int
}

// maxEndpoints bounds what strangers can have remembered, in each of two generations: who is heard of meanwhile stays.
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
	aged := e == nil
	if aged {
		e = es.old[h]
	}
	if e == nil || e.forgot.Load() { // which is known again
		fresh := newEndpoint(from, to, on)
		if e != nil {
			fresh.path.learn(&e.path)
		}
		e, aged = fresh, true
	}
	if aged {
		if _, there := es.all[h]; !there && len(es.all) >= maxEndpoints {
			es.old, es.all = es.all, nil
		}
		if es.all == nil {
			es.all = make(map[heard]*Endpoint)
		}
		es.all[h] = e
	}
	es.last, es.ep = h, e
	return e
}
