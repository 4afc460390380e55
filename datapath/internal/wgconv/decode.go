package wgconv

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Dump is a device that comes in several messages, in which a peer may begin in one and go on in the
// next. The zero Dump is ready for the first.
type Dump struct {
	device  datapath.Device
	peers   map[key.Public]*peer
	refused int
}

type peer struct {
	datapath.Peer
	stats    datapath.Stats
	prefixes []netip.Prefix
}

// Add takes up the attributes of one message.
func (d *Dump) Add(data []byte) error {
	for a, err := range attrs(data) {
		if err == nil {
			err = d.attr(a)
		}
		if err != nil {
			return fmt.Errorf("reading the device: %w", err)
		}
	}
	return nil
}

func (d *Dump) attr(a attr) (err error) {
	switch a.typ {
	case devicePrivateKey:
		if err := a.sized(key.Size); err != nil {
			return err
		}
		if !bytes.Equal(a.data, make([]byte, key.Size)) {
			d.device.Key, err = key.PrivateFromBytes(a.data)
		}
	case deviceListenPort:
		d.device.ListenPort, err = a.uint16()
	case deviceFwmark:
		d.device.Mark, err = a.uint32()
	case devicePeers:
		for p, err := range attrs(a.data) {
			if err == nil {
				err = d.peer(p.data)
			}
			if err != nil {
				return fmt.Errorf("peers: %w", err)
			}
		}
	}
	return err
}

var errNoKey = errors.New("a peer that does not begin with its public key")

func (d *Dump) peer(data []byte) error {
	var p *peer
	skip := false
	for a, err := range attrs(data) {
		if err != nil {
			return err
		}
		if p == nil && !skip {
			if a.typ != peerPublicKey {
				return errNoKey
			}
			if err := a.sized(key.Size); err != nil {
				return err
			}
			if p = d.at(a.data); p == nil {
				skip = true
			}
			continue
		}
		if skip {
			continue
		}
		if err := p.attr(a); err != nil {
			return err
		}
	}
	if p == nil && !skip {
		return errNoKey
	}
	return nil
}

// at returns the peer with a public key, which may have begun before. It is nil for a key that no
// private key has: whoever put that peer there, nobody can be it.
func (d *Dump) at(public []byte) *peer {
	k, err := key.PublicFromBytes(public)
	if err != nil {
		d.refused++
		return nil
	}
	if d.peers == nil {
		d.peers = make(map[key.Public]*peer)
	}
	p := d.peers[k]
	if p == nil {
		p = new(peer)
		d.peers[k] = p
	}
	return p
}

func (p *peer) attr(a attr) (err error) {
	switch a.typ {
	case peerPresharedKey:
		if err := a.sized(key.Size); err != nil {
			return err
		}
		p.Preshared = key.Preshared{}
		if !bytes.Equal(a.data, make([]byte, key.Size)) {
			p.Preshared, err = key.PresharedFromBytes(a.data)
		}
	case peerEndpoint:
		p.Endpoint, err = addrPort(a)
	case peerKeepalive:
		var n uint16
		n, err = a.uint16()
		p.Keepalive = time.Duration(n) * time.Second
	case peerHandshake:
		if err := a.sized(16); err != nil {
			return err
		}
		sec, nsec := int64(binary.NativeEndian.Uint64(a.data)), int64(binary.NativeEndian.Uint64(a.data[8:]))
		if sec != 0 || nsec != 0 {
			p.stats.LastHandshake = time.Unix(sec, nsec)
		}
	case peerReceived:
		p.stats.Received, err = a.uint64()
	case peerSent:
		p.stats.Sent, err = a.uint64()
	case peerAllowedIPs:
		for q, err := range attrs(a.data) {
			if err == nil {
				err = p.allowed(q.data)
			}
			if err != nil {
				return fmt.Errorf("allowed IP: %w", err)
			}
		}
	}
	return err
}

func addrPort(a attr) (netip.AddrPort, error) {
	switch {
	case len(a.data) == 16 && binary.NativeEndian.Uint16(a.data) == afInet:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(a.data[4:8])), binary.BigEndian.Uint16(a.data[2:])), nil
	case len(a.data) == 28 && binary.NativeEndian.Uint16(a.data) == afInet6:
		// The scope of a link-local address is left out: it is a number on this host only.
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(a.data[8:24])).Unmap(), binary.BigEndian.Uint16(a.data[2:])), nil
	}
	return netip.AddrPort{}, fmt.Errorf("endpoint: %w", errSize)
}

func (p *peer) allowed(data []byte) error {
	var addr netip.Addr
	bits := -1
	for a, err := range attrs(data) {
		if err != nil {
			return err
		}
		switch a.typ {
		case allowedAddr:
			addr, _ = netip.AddrFromSlice(a.data)
		case allowedBits:
			if err := a.sized(1); err != nil {
				return err
			}
			bits = int(a.data[0])
		}
	}
	if addr.Is4In6() {
		return nil // IPv6 to Linux, IPv4 to everybody else, and nothing that a mesh puts there
	}
	q, _, err := prefixes.Canonical(netip.PrefixFrom(addr, bits))
	if err != nil {
		return err
	}
	p.prefixes = append(p.prefixes, q)
	return nil
}

// State returns the device: Device without its MTU, Peers and Stats, both maps always made. It has no
// peers whose keys no private key has; Refused counts those.
func (d *Dump) State() datapath.State {
	s := datapath.State{
		Device: d.device,
		Peers:  make(map[key.Public]datapath.Peer, len(d.peers)), Stats: make(map[key.Public]datapath.Stats, len(d.peers)),
	}
	for k, p := range d.peers {
		p.Prefixes = prefixes.Must(p.prefixes...)
		s.Peers[k], s.Stats[k] = p.Peer, p.stats
	}
	return s
}

// Refused returns how many times a peer was passed over.
func (d *Dump) Refused() int { return d.refused }
