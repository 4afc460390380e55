package offload

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// A slow and obvious account of what Splitter and Merger do, which shares no code with them.

// oneSum is RFC 1071's checksum of b, by its letter.
func oneSum(bs ...[]byte) uint16 {
	var s uint32
	var all []byte
	for _, b := range bs {
		all = append(all, b...)
	}
	if len(all)%2 == 1 {
		all = append(all, 0)
	}
	for i := 0; i < len(all); i += 2 {
		s += uint32(all[i])<<8 | uint32(all[i+1])
		s = s&0xffff + s>>16
	}
	return ^uint16(s)
}

// packet is one in all its parts.
type packet struct {
	v6        bool
	first     [4]byte // of IPv6: version, class, label; of IPv4: type of service, flags, time to live
	id        uint16
	hops      byte
	src, dst  []byte
	extension []byte // headers of IPv6, or options of IPv4
	udp       bool
	ports     [4]byte
	seq, ack  uint32
	reserved  byte // bits beside the data offset
	flags     byte
	window    uint16
	urgent    uint16
	options   []byte
	data      []byte
	badSum    bool
	noSum     bool // of UDP
}

// bytes is the packet as it is on a wire.
func (p *packet) bytes() []byte {
	var t []byte
	proto := byte(6)
	at := 16
	if p.udp {
		proto, at = 17, 6
		t = append(t, p.ports[:]...)
		t = binary.BigEndian.AppendUint16(t, uint16(8+len(p.data)))
		t = append(t, 0, 0)
	} else {
		t = append(t, p.ports[:]...)
		t = binary.BigEndian.AppendUint32(t, p.seq)
		t = binary.BigEndian.AppendUint32(t, p.ack)
		t = append(t, byte(20+len(p.options))/4<<4|p.reserved, p.flags)
		t = binary.BigEndian.AppendUint16(t, p.window)
		t = append(t, 0, 0)
		t = binary.BigEndian.AppendUint16(t, p.urgent)
		t = append(t, p.options...)
	}
	t = append(t, p.data...)
	var length [4]byte
	binary.BigEndian.PutUint32(length[:], uint32(len(t)))
	c := oneSum(p.src, p.dst, length[:], []byte{0, 0, 0, proto}, t)
	if p.udp && c == 0 {
		c = 0xffff
	}
	if p.badSum {
		c ^= 0x0100
	}
	if p.udp && p.noSum {
		c = 0
	}
	binary.BigEndian.PutUint16(t[at:], c)
	var ip []byte
	if p.v6 {
		next := proto
		if len(p.extension) > 0 {
			next = 60 // destination options
			p.extension[0], p.extension[1] = proto, byte(len(p.extension)/8-1)
		}
		ip = append(ip, p.first[:]...)
		ip = binary.BigEndian.AppendUint16(ip, uint16(len(p.extension)+len(t)))
		ip = append(ip, next, p.hops)
		ip = append(append(append(ip, p.src...), p.dst...), p.extension...)
	} else {
		ip = append(ip, 0x40|byte(20+len(p.extension))/4, p.first[1])
		ip = binary.BigEndian.AppendUint16(ip, uint16(20+len(p.extension)+len(t)))
		ip = binary.BigEndian.AppendUint16(ip, p.id)
		ip = append(ip, p.first[2], p.first[3], p.hops, proto, 0, 0)
		ip = append(append(append(ip, p.src...), p.dst...), p.extension...)
		binary.BigEndian.PutUint16(ip[10:], oneSum(ip))
	}
	return append(ip, t...)
}

// parts is p in packets of at most size bytes of data.
func (p *packet) parts(size int, ecn bool) (all [][]byte) {
	for i, at := 0, 0; at < len(p.data); i, at = i+1, at+size {
		q := *p
		q.data = p.data[at:min(at+size, len(p.data))]
		q.seq += uint32(at)
		q.id += uint16(i)
		if at+size < len(p.data) {
			q.flags &^= 0x01 | 0x08
		}
		if ecn && i > 0 {
			q.flags &^= 0x80
		}
		all = append(all, q.bytes())
	}
	return all
}

// large is p as Linux hands it over, with what it says of it.
func (p *packet) large(size int, ecn bool) (Header, []byte) {
	b := p.bytes()
	ip := 20 + len(p.extension)
	if p.v6 {
		ip += 20
	}
	h := Header{Flags: 1, Size: uint16(size), Start: uint16(ip), SumOffset: 16, Type: 1}
	proto := byte(6)
	switch {
	case p.udp:
		h.Type, h.SumOffset, proto = 5, 6, 17
	case p.v6:
		h.Type = 4
	}
	if ecn {
		h.Type |= 0x80
	}
	var length [4]byte
	binary.BigEndian.PutUint32(length[:], uint32(len(b)-ip))
	binary.BigEndian.PutUint16(b[ip+int(h.SumOffset):], ^oneSum(p.src, p.dst, length[:], []byte{0, 0, 0, proto}))
	return h, b
}

// split is what Linux would make of a packet that it was handed with a Header, were it to be sent over a wire.
func split(h Header, b []byte) ([][]byte, error) {
	if h.Type == 0 {
		return [][]byte{b}, nil
	}
	p := packet{v6: b[0]>>4 == 6, udp: h.Type == 5}
	ip := int(h.Start)
	if p.v6 {
		copy(p.first[:], b)
		p.hops, p.src, p.dst, p.extension = b[7], b[8:24], b[24:40], b[40:ip]
		if int(binary.BigEndian.Uint16(b[4:]))+40 != len(b) {
			return nil, errors.New("length of IPv6")
		}
	} else {
		p.first = [4]byte{0, b[1], b[6], b[7]}
		p.id = binary.BigEndian.Uint16(b[4:])
		p.hops, p.src, p.dst, p.extension = b[8], b[12:16], b[16:20], b[20:ip]
		if int(binary.BigEndian.Uint16(b[2:])) != len(b) || oneSum(b[:ip]) != 0 {
			return nil, errors.New("length or checksum of IPv4")
		}
	}
	t := b[ip:]
	copy(p.ports[:], t)
	at, proto := 16, byte(6)
	if p.udp {
		at, proto, p.data = 6, 17, t[8:]
		if int(binary.BigEndian.Uint16(t[4:])) != len(t) {
			return nil, errors.New("length of UDP")
		}
	} else {
		n := int(t[12] >> 4 * 4)
		p.seq, p.ack = binary.BigEndian.Uint32(t[4:]), binary.BigEndian.Uint32(t[8:])
		p.reserved, p.flags = t[12]&0xf, t[13]
		p.window, p.urgent = binary.BigEndian.Uint16(t[14:]), binary.BigEndian.Uint16(t[18:])
		p.options, p.data = t[20:n], t[n:]
	}
	if h.Flags != 1 || int(h.SumOffset) != at || int(h.Len) != len(b)-len(p.data) {
		return nil, fmt.Errorf("%+v", h)
	}
	var length [4]byte
	binary.BigEndian.PutUint32(length[:], uint32(len(t)))
	if ^oneSum(p.src, p.dst, length[:], []byte{0, 0, 0, proto}) != binary.BigEndian.Uint16(t[at:]) {
		return nil, errors.New("sum of the pseudo-header")
	}
	return p.parts(int(h.Size), h.Type&0x80 != 0), nil
}
