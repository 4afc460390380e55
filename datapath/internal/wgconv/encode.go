package wgconv

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Get returns the attributes that ask for the device of interface index.
func Get(index int) []byte { return append32(nil, deviceIfindex, uint32(index)) }

// Device returns the attributes that give the device of interface index what is not zero in d. The MTU
// is none of WireGuard's.
func Device(index int, d datapath.Device) []byte {
	b := Get(index)
	if d.ListenPort != 0 {
		b = append16(b, deviceListenPort, d.ListenPort)
	}
	if d.Mark != 0 {
		b = append32(b, deviceFwmark, d.Mark)
	}
	if !d.Key.IsZero() {
		k := d.Key.Bytes()
		b = appendAttr(b, devicePrivateKey, k[:]...)
	}
	return b
}

// Change is what is said of one peer.
type Change struct {
	Key     key.Public
	Update  bool // only if the peer exists; otherwise it is created
	Remove  bool // the peer ends; nothing below is written
	Without bool // Prefixes are taken from the peer, instead of given to it
	Empty   bool // the peer loses all its prefixes, before it is given Prefixes: only for one that nobody is

	Preshared *key.Preshared // nil: left as it is
	Endpoint  netip.AddrPort // zero: left as it is
	Keepalive *time.Duration // nil: left as it is; datapath.CheckKeepalive allows it
	Prefixes  prefixes.Set
}

// Put returns the Change that carries out o, and what a device would round or misread as an error.
func Put(o datapath.PutPeer) (Change, error) {
	if o.Key.IsZero() {
		return Change{}, errors.New("a peer with no public key")
	}
	if err := datapath.CheckKeepalive(o.Peer.Keepalive); err != nil {
		return Change{}, err
	}
	return Change{
		Key: o.Key, Preshared: &o.Peer.Preshared, Endpoint: o.Peer.Endpoint,
		Keepalive: &o.Peer.Keepalive, Prefixes: o.Peer.Prefixes,
	}, nil
}

// Budget is how many bytes the attributes of one message have at most, unless told otherwise. An
// attribute has no more than 65535, all peers are in one, and a socket's send buffer holds 200 KiB.
const Budget = 32 << 10

// minBudget leaves room for a device and a peer with everything and one prefix.
const minBudget = 512

// Message is the attributes of a message that sets a device.
type Message struct {
	Data  []byte
	Count int // how many of the Changes are complete with it
}

// Batch packs changes, in their order, into as few messages for the device of interface index as a
// budget of bytes for each allows; 0 is Budget. A device carries out a message from its beginning and
// stops at what it refuses.
//
// A peer whose prefixes do not fit one message goes on in the next, where it is only updated: should
// it have come to an end in between, it does not come back in parts.
func Batch(index int, budget int, changes ...Change) []Message {
	if budget == 0 {
		budget = Budget
	}
	w := writer{index: index, budget: min(max(budget, minBudget), 65535-attrHeader)}
	for _, c := range changes {
		w.change(c)
		w.count++
	}
	w.flush()
	return w.msgs
}

type writer struct {
	index, budget int
	msgs          []Message
	b             []byte // of the message that is being written; empty: none is
	peers         int    // where its peers begin
	count         int    // Changes that end in it
}

func (w *writer) flush() {
	if len(w.b) > 0 {
		end(w.b, w.peers)
		w.msgs = append(w.msgs, Message{w.b, w.count})
	}
	w.b, w.count = nil, 0
}

// room begins another message where n bytes more do not fit this one.
func (w *writer) room(n int) {
	if len(w.b) > 0 && len(w.b)+n > w.budget {
		w.flush()
	}
	if len(w.b) == 0 {
		w.b, w.peers = begin(append(make([]byte, 0, 4096), Get(w.index)...), devicePeers)
	}
}

func (w *writer) change(c Change) {
	head := appendPeer(nil, c)
	i := 0
	for {
		// Where a part of the prefixes would fit, the peer begins; else it would have a message
		// that says nothing of it.
		first := 0
		if i < c.Prefixes.Len() && !c.Remove {
			first = attrHeader + allowedSize(c.Prefixes.At(i), c.Without)
		}
		w.room(attrHeader + len(head) + first)
		var peer, list int
		w.b, peer = begin(w.b, 0) // a list, whose items have no types
		w.b = append(w.b, head...)
		if first > 0 {
			w.b, list = begin(w.b, peerAllowedIPs)
			for ; i < c.Prefixes.Len(); i++ {
				p := c.Prefixes.At(i)
				if len(w.b)+allowedSize(p, c.Without) > w.budget {
					break
				}
				w.b = appendAllowed(w.b, p, c.Without)
			}
			end(w.b, list)
		}
		end(w.b, peer)
		if c.Remove || i == c.Prefixes.Len() {
			return
		}
		w.flush()
		head = appendPeer(nil, Change{Key: c.Key, Update: true})
	}
}

// appendPeer appends all of a peer but its prefixes.
func appendPeer(b []byte, c Change) []byte {
	k := c.Key.Bytes()
	b = appendAttr(b, peerPublicKey, k[:]...)
	var flags uint32
	if c.Update || c.Without || c.Remove {
		flags |= peerFlagUpdate
	}
	if c.Remove {
		flags |= peerFlagRemove
	}
	if c.Empty {
		flags |= peerFlagReplaceAllowedIPs
	}
	if flags != 0 {
		b = append32(b, peerFlags, flags)
	}
	if c.Remove {
		return b
	}
	if c.Preshared != nil {
		psk := c.Preshared.Bytes() // zeros for none, which is how it is cleared
		b = appendAttr(b, peerPresharedKey, psk[:]...)
	}
	if c.Endpoint.IsValid() {
		b = appendAttr(b, peerEndpoint, sockaddr(c.Endpoint)...)
	}
	if c.Keepalive != nil {
		b = append16(b, peerKeepalive, uint16(*c.Keepalive/time.Second))
	}
	return b
}

// sockaddr returns a struct sockaddr_in or sockaddr_in6.
func sockaddr(a netip.AddrPort) []byte {
	addr := a.Addr().Unmap()
	if addr.Is4() {
		b := binary.NativeEndian.AppendUint16(nil, afInet)
		b = binary.BigEndian.AppendUint16(b, a.Port())
		b = append(b, addr.AsSlice()...)
		return append(b, make([]byte, 8)...)
	}
	b := binary.NativeEndian.AppendUint16(nil, afInet6)
	b = binary.BigEndian.AppendUint16(b, a.Port())
	b = append(b, 0, 0, 0, 0) // flow
	b = append(b, addr.AsSlice()...)
	return append(b, 0, 0, 0, 0) // scope
}

func allowedSize(p netip.Prefix, without bool) int {
	n := attrHeader + 2*(attrHeader+4) + attrHeader + p.Addr().BitLen()/8
	if without {
		n += attrHeader + 4
	}
	return n
}

func appendAllowed(b []byte, p netip.Prefix, without bool) []byte {
	family := uint16(afInet6)
	if p.Addr().Is4() {
		family = afInet
	}
	b, at := begin(b, 0)
	b = append16(b, allowedFamily, family)
	b = appendAttr(b, allowedAddr, p.Addr().AsSlice()...)
	b = appendAttr(b, allowedBits, byte(p.Bits()))
	if without {
		b = append32(b, allowedFlags, allowedFlagRemove)
	}
	end(b, at)
	return b
}
