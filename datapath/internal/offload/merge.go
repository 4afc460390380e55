package offload

import (
	"bytes"
	"encoding/binary"
)

// Kinds are kinds of packets, by protocol and family.
type Kinds uint8

// The Kinds there are.
const (
	KindTCP4 Kinds = 1 << iota
	KindTCP6
	KindUDP4
	KindUDP6

	KindsTCP = KindTCP4 | KindTCP6
	KindsUDP = KindUDP4 | KindUDP6
)

// Merger finds out which packets can be one. It copies none, and changes none. The zero Merger is ready for use.
type Merger struct {
	packets [][]byte
	next    []int32 // the packet after each one in its Run; -1: none
	runs    []Run
	open    [tableLen]uint16 // by flow: the Run that may be added to, from 1 on
}

// tableLen is a power of two, and more than the packets that are looked at.
const tableLen = 512

// Run is one packet, or several that can be handed over as one.
type Run struct {
	First int // of the packets
	Count int
	Kind  Kinds // of what has ports; 0 for all else

	last   int
	info   info // of the first packet
	size   int  // payload of all
	closed bool // nothing may be added
}

// What a large packet may consist of, beside its size. Linux has taken UDP of more only since version 6.9
// (UDP_MAX_SEGMENTS).
const maxUDP = 64

// info is what is read of a packet.
type info struct {
	kind    Kinds
	ipLen   int
	headLen int
	size    int  // of the payload
	plain   bool // it may be part of a large packet
	flags   byte // of TCP
	seq     uint32
	hash    uint32
}

// Runs returns what packets can be handed over as: each packet is in one Run, and Runs are in the order of their first
// packets. Packets of one flow stay in order. Only the kinds that are given make large packets, of the first 511 packets.
// What is returned is valid until the next call; the Merger keeps the packets until Forget.
func (m *Merger) Runs(packets [][]byte, kinds Kinds) []Run {
	clear(m.open[:])
	m.packets, m.runs = packets, m.runs[:0]
	if cap(m.next) < len(packets) {
		m.next, m.runs = make([]int32, len(packets)), make([]Run, 0, len(packets))
	}
	m.next = m.next[:len(packets)]
	for i, p := range packets {
		m.next[i] = -1
		in := read(p)
		if in.kind == 0 || i >= tableLen-1 {
			m.runs = append(m.runs, Run{First: i, Count: 1, last: i, closed: true})
			continue
		}
		slot := m.slot(p, &in)
		if in.plain = in.plain && in.kind&kinds != 0; in.plain && *slot != 0 && m.add(&m.runs[*slot-1], i, &in) {
			continue
		}
		m.runs = append(m.runs, Run{First: i, Count: 1, Kind: in.kind, last: i, info: in, size: in.size, closed: !in.plain || in.flags&flagPSH != 0})
		*slot = uint16(len(m.runs))
	}
	return m.runs
}

// Forget lets go of the packets.
func (m *Merger) Forget() { m.packets = nil }

// Next returns the packet of a Run that comes after packet i.
func (m *Merger) Next(i int) int { return int(m.next[i]) }

// slot returns where the newest Run of the flow of p is, or is to be.
func (m *Merger) slot(p []byte, in *info) *uint16 {
	for h := in.hash; ; h++ {
		s := &m.open[h%tableLen]
		if *s == 0 {
			return s
		}
		r := &m.runs[*s-1]
		if r.info.hash == in.hash && sameFlow(m.packets[r.First], p, &r.info, in) {
			return s
		}
	}
}

// sameFlow reports whether two packets have the same addresses, ports and protocol.
func sameFlow(a, b []byte, ina, inb *info) bool {
	if ina.kind != inb.kind || binary.BigEndian.Uint32(a[ina.ipLen:]) != binary.BigEndian.Uint32(b[inb.ipLen:]) {
		return false
	}
	if a[0]>>4 == 6 {
		return bytes.Equal(a[8:ipv6Len], b[8:ipv6Len])
	}
	return binary.BigEndian.Uint64(a[12:]) == binary.BigEndian.Uint64(b[12:])
}

// add adds packet i to r, where it may be.
func (m *Merger) add(r *Run, i int, in *info) bool {
	a, b := m.packets[r.First], m.packets[i]
	first := &r.info
	switch {
	case r.closed || in.size > first.size || in.headLen != first.headLen || in.headLen+r.size+in.size > maxPacket:
		return false
	case a[0]>>4 == 6:
		if binary.BigEndian.Uint32(a) != binary.BigEndian.Uint32(b) || a[7] != b[7] { // class and label, hop limit
			return false
		}
	default:
		// Type of service, flags, time to live. The identification counts up when the packet is taken apart; it says
		// nothing of what cannot be fragmented (RFC 6864 section 4.1).
		if a[1] != b[1] || a[6] != b[6] || a[8] != b[8] {
			return false
		}
		if a[6]&0x40 == 0 && binary.BigEndian.Uint16(b[4:]) != binary.BigEndian.Uint16(a[4:])+uint16(r.Count) {
			return false
		}
	}
	if in.kind&KindsTCP != 0 {
		s, t := a[first.ipLen:first.headLen], b[in.ipLen:in.headLen]
		switch {
		case in.seq != first.seq+uint32(r.size),
			in.flags&flagCWR != 0, in.flags&^flagPSH != first.flags&^(flagPSH|flagCWR),
			!bytes.Equal(s[8:13], t[8:13]), !bytes.Equal(s[14:16], t[14:16]), !bytes.Equal(s[18:], t[18:]):
			return false
		}
	} else if r.Count == maxUDP {
		return false
	}
	if r.Count == 1 && !valid(a, first) || !valid(b, in) {
		r.closed = true
		return false
	}
	m.next[r.last] = int32(i)
	r.last = i
	r.Count++
	r.size += in.size
	r.closed = in.size < first.size || in.flags&flagPSH != 0
	return true
}

// read reads the headers of a packet.
func read(p []byte) (in info) {
	if len(p) < ipv4Len {
		return info{}
	}
	var proto byte
	var hash uint64
	const mix = 0x9e3779b97f4a7c15
	switch p[0] >> 4 {
	case 4:
		in.ipLen = int(p[0]&0xf) * 4
		if in.ipLen < ipv4Len || int(binary.BigEndian.Uint16(p[2:])) != len(p) || binary.BigEndian.Uint16(p[6:])&0x3fff != 0 { // a fragment
			return info{}
		}
		in.plain = in.ipLen == ipv4Len
		proto = p[9]
		in.kind = KindTCP4
		hash = binary.LittleEndian.Uint64(p[12:]) * mix
	case 6:
		in.ipLen = ipv6Len
		if len(p) < ipv6Len || int(binary.BigEndian.Uint16(p[4:])) != len(p)-ipv6Len {
			return info{}
		}
		in.plain = true
		proto = p[6]
		in.kind = KindTCP6
		for at := 8; at < ipv6Len; at += 8 {
			hash = (hash ^ binary.LittleEndian.Uint64(p[at:])) * mix
			hash ^= hash >> 32
		}
	default:
		return info{}
	}
	switch {
	case proto == protoTCP && len(p) >= in.ipLen+tcpLen:
		t := p[in.ipLen:]
		in.headLen = in.ipLen + int(t[12]>>4)*4
		in.flags = t[13]
		in.seq = binary.BigEndian.Uint32(t[4:])
		in.plain = in.plain && in.headLen >= in.ipLen+tcpLen && in.headLen < len(p) && in.flags&^(flagPSH|flagECE|flagCWR) == flagACK
	case proto == protoUDP && len(p) >= in.ipLen+udpLen:
		u := p[in.ipLen:]
		in.kind <<= 2
		in.headLen = in.ipLen + udpLen
		in.plain = in.plain && in.headLen < len(p) && int(binary.BigEndian.Uint16(u[4:])) == len(u) && u[udpSum]|u[udpSum+1] != 0
	default:
		return info{}
	}
	in.size = len(p) - in.headLen
	hash = (hash ^ uint64(binary.LittleEndian.Uint32(p[in.ipLen:]))<<8 ^ uint64(in.kind)) * mix
	in.hash = uint32(hash >> 32)
	return in
}

// valid reports whether the checksums of a packet are right.
func valid(p []byte, in *info) bool {
	proto := byte(protoTCP)
	if in.kind&KindsUDP != 0 {
		proto = protoUDP
	}
	return fold(sum(p[in.ipLen:], pseudo(p, proto, len(p)-in.ipLen))) == 0xffff &&
		(p[0]>>4 == 6 || fold(sum(p[:in.ipLen], 0)) == 0xffff)
}

// MaxHeads is the room that Head needs.
const MaxHeads = HeaderLen + ipv6Len + 60

// Head writes what is to be before the payloads of the packets of r, of which there are several: a Header and the
// headers of the large packet. It returns how much that is, and where in each packet the payload begins.
func (m *Merger) Head(b []byte, r *Run) (n, payload int) {
	in, p, last := &r.info, m.packets[r.First], m.packets[r.last]
	h := Header{Flags: NeedsChecksum, Type: UDP, Len: uint16(in.headLen), Size: uint16(in.size), Start: uint16(in.ipLen), SumOffset: udpSum}
	head := b[HeaderLen : HeaderLen+in.headLen]
	copy(head, p)
	if p[0]>>4 == 6 {
		put(head[4:], uint16(in.headLen-ipv6Len+r.size))
	} else {
		put(head[2:], uint16(in.headLen+r.size))
		put(head[10:], 0)
		put(head[10:], ^fold(sum(head[:ipv4Len], 0)))
	}
	t := head[in.ipLen:]
	size := len(t) + r.size
	proto := byte(protoUDP)
	if in.kind&KindsTCP != 0 {
		proto, h.Type, h.SumOffset = protoTCP, TCP4, tcpSum
		if in.kind == KindTCP6 {
			h.Type = TCP6
		}
		if in.flags&flagCWR != 0 {
			h.Type |= ECN
		}
		t[13] |= last[in.ipLen+13] & flagPSH
	} else {
		put(t[4:], uint16(size))
	}
	put(t[h.SumOffset:], fold(pseudo(p, proto, size)))
	h.Encode(b)
	return HeaderLen + in.headLen, in.headLen
}
