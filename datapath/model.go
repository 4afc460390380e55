package datapath

import (
	"net/netip"

	"github.com/warren-mesh/warren/datapath/key"
)

// Model is a State to which ops can be applied in memory, with the owner of every prefix at hand. It is
// what a device is taken to be between two readings, and the whole of the reference device. The zero
// Model has no device.
type Model struct {
	state State
	self  key.Public // of state.Device.Key, which costs a scalar multiplication to ask
	owner map[netip.Prefix]key.Public
}

// NewModel returns a Model of s, whose maps it takes over.
func NewModel(s State) *Model {
	m := &Model{state: s}
	if s.Device.Exists() {
		m.self = s.Device.Key.Public()
	}
	n := 0
	for _, p := range s.Peers {
		n += p.Prefixes.Len()
	}
	m.owner = make(map[netip.Prefix]key.Public, n) // growing it would cost more than filling it
	m.init()
	for k, p := range s.Peers {
		for q := range p.Prefixes.All() {
			m.owner[q] = k
		}
	}
	return m
}

func (m *Model) init() {
	if m.state.Routes == nil {
		m.state.Routes = make(map[netip.Prefix]netip.Addr)
	}
	if m.state.Peers == nil {
		m.state.Peers = make(map[key.Public]Peer)
	}
	if m.owner == nil {
		m.owner = make(map[netip.Prefix]key.Public)
	}
}

// State returns what m holds. The maps are m's own: read them, and only until the next Do.
func (m *Model) State() State { return m.state }

// Public returns the device's public key; zero where there is no device.
func (m *Model) Public() key.Public { return m.self }

// Owner returns the peer that has exactly prefix p.
func (m *Model) Owner(p netip.Prefix) (key.Public, bool) {
	k, ok := m.owner[p]
	return k, ok
}

// Do applies one op as a device that obeys its contract would. It costs time in proportion to the op
// and to the peers that it takes prefixes from, not to the number of peers.
func (m *Model) Do(op Op) error {
	m.init()
	s := &m.state
	if set, ok := op.(SetDevice); ok {
		d := set.Device
		if d.Key.IsZero() {
			d.Key = s.Device.Key
		}
		if d.Key.IsZero() {
			return ErrNoDevice
		}
		if d.ListenPort == 0 {
			d.ListenPort = s.Device.ListenPort
		}
		if d.Mark == 0 {
			d.Mark = s.Device.Mark
		}
		if d.MTU == 0 {
			d.MTU = s.Device.MTU
		}
		if d.Key != s.Device.Key {
			m.self = d.Key.Public()
			m.remove(m.self)
		}
		s.Device = d
		return nil
	}
	if _, ok := op.(RemoveDevice); ok {
		*m = Model{state: State{Host: s.Host, Problems: s.Problems}}
		m.init()
		return nil
	}
	if !s.Device.Exists() {
		return ErrNoDevice
	}
	switch o := op.(type) {
	case AddAddrs:
		s.Addrs = s.Addrs.Union(o.Addrs)
	case RemoveAddrs:
		s.Addrs = s.Addrs.Minus(o.Addrs)
	case AddLocal:
		s.Local = s.Local.Union(o.Prefixes)
	case RemoveLocal:
		s.Local = s.Local.Minus(o.Prefixes)
	case AddRoutes:
		for _, r := range o.Routes {
			s.Routes[r.Prefix] = r.Source
		}
	case RemoveRoutes:
		for p := range o.Prefixes.All() {
			delete(s.Routes, p)
		}
	case PutPeer:
		return m.put(o)
	case DropPrefixes:
		p, ok := s.Peers[o.Key]
		if !ok {
			return nil
		}
		for q := range p.Prefixes.Intersect(o.Prefixes).All() {
			delete(m.owner, q)
		}
		p.Prefixes = p.Prefixes.Minus(o.Prefixes)
		s.Peers[o.Key] = p
	case RemovePeer:
		m.remove(o.Key)
	}
	return nil
}

func (m *Model) put(o PutPeer) error {
	s := &m.state
	if o.Key == m.self {
		return errOwnKey
	}
	if err := CheckKeepalive(o.Peer.Keepalive); err != nil {
		return err
	}
	stolen := make(map[key.Public][]netip.Prefix)
	for q := range o.Peer.Prefixes.All() {
		if k, ok := m.owner[q]; ok && k != o.Key {
			stolen[k] = append(stolen[k], q)
		}
		m.owner[q] = o.Key
	}
	for k, lost := range stolen {
		p := s.Peers[k]
		p.Prefixes = p.Prefixes.Without(lost...)
		s.Peers[k] = p
	}
	p := s.Peers[o.Key]
	if o.Peer.Endpoint.IsValid() {
		p.Endpoint = o.Peer.Endpoint
	}
	p.Preshared, p.Keepalive = o.Peer.Preshared, o.Peer.Keepalive
	p.Prefixes = p.Prefixes.Union(o.Peer.Prefixes)
	s.Peers[o.Key] = p
	return nil
}

func (m *Model) remove(k key.Public) {
	p, ok := m.state.Peers[k]
	if !ok {
		return
	}
	for q := range p.Prefixes.All() {
		delete(m.owner, q)
	}
	delete(m.state.Peers, k)
}
