package offload

import (
	"encoding/binary"
	"fmt"
)

// packet is an IP packet with TCP as the tests see it: taken apart byte by byte, with nothing of what the
// package itself does.
type packet struct {
	version                 int
	tos, ttl                byte
	flow                    uint32 // IPv6's flow label
	id                      uint16
	frag                    uint16 // IPv4's word of flags and offset
	src, dst                string
	srcPort, dstPort        uint16
	seq, ack                uint32
	reserved, flags         byte // the low half of the byte of the data offset; flags
	window, urgent          uint16
	ipOptions, tcpOptions   string
	payload                 string
	ipSumRight, tcpSumRight bool
}

// sumOf is the Internet checksum of what is in parts, as RFC 1071 defines it.
func sumOf(parts ...[]byte) uint16 {
	var all []byte
	for _, p := range parts {
		all = append(all, p...)
	}
	if len(all)%2 == 1 {
		all = append(all, 0)
	}
	var sum uint64
	for i := 0; i < len(all); i += 2 {
		sum += uint64(all[i])<<8 | uint64(all[i+1])
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

func pseudoOf(src, dst string, size int) []byte {
	b := append([]byte(src), dst...)
	b = binary.BigEndian.AppendUint32(b, uint32(size))
	return append(b, 0, 0, 0, 6)
}

// read takes b apart. ok is false for what is not a whole TCP packet, without anything between IP and TCP.
func read(b []byte) (p packet, ok bool) {
	if len(b) == 0 {
		return p, false
	}
	var tcp []byte
	switch p.version = int(b[0] >> 4); p.version {
	case 4:
		if len(b) < 20 || b[0]&15 < 5 || len(b) < int(b[0]&15)*4 {
			return p, false
		}
		n, size := int(b[0]&15)*4, int(b[2])<<8|int(b[3])
		if size < n || size > len(b) || b[9] != 6 {
			return p, false
		}
		p.tos, p.ttl = b[1], b[8]
		p.id, p.frag = uint16(b[4])<<8|uint16(b[5]), uint16(b[6])<<8|uint16(b[7])
		p.src, p.dst, p.ipOptions = string(b[12:16]), string(b[16:20]), string(b[20:n])
		p.ipSumRight = sumOf(b[:n]) == 0xffff
		tcp = b[n:size]
		if p.frag&0x3fff != 0 {
			return p, false
		}
	case 6:
		if len(b) < 40 {
			return p, false
		}
		size := int(b[4])<<8 | int(b[5])
		if 40+size > len(b) || b[6] != 6 {
			return p, false
		}
		p.tos, p.ttl = b[0]<<4|b[1]>>4, b[7]
		p.flow = uint32(b[1]&15)<<16 | uint32(b[2])<<8 | uint32(b[3])
		p.src, p.dst, p.ipSumRight = string(b[8:24]), string(b[24:40]), true
		tcp = b[40 : 40+size]
	default:
		return p, false
	}
	if len(tcp) < 20 || tcp[12]>>4 < 5 || len(tcp) < int(tcp[12]>>4)*4 {
		return p, false
	}
	n := int(tcp[12]>>4) * 4
	p.srcPort, p.dstPort = uint16(tcp[0])<<8|uint16(tcp[1]), uint16(tcp[2])<<8|uint16(tcp[3])
	p.seq, p.ack = binary.BigEndian.Uint32(tcp[4:]), binary.BigEndian.Uint32(tcp[8:])
	p.reserved, p.flags = tcp[12]&15, tcp[13]
	p.window, p.urgent = uint16(tcp[14])<<8|uint16(tcp[15]), uint16(tcp[18])<<8|uint16(tcp[19])
	p.tcpOptions, p.payload = string(tcp[20:n]), string(tcp[n:])
	p.tcpSumRight = sumOf(pseudoOf(p.src, p.dst, len(tcp)), tcp) == 0xffff
	return p, true
}

func (p packet) headerSize() int {
	ip := 20 + len(p.ipOptions)
	if p.version == 6 {
		ip = 40
	}
	return ip + 20 + len(p.tcpOptions)
}

// write is the reverse of read. Checksums that are not right are off by one.
func (p packet) write() []byte {
	tcp := binary.BigEndian.AppendUint16(nil, p.srcPort)
	tcp = binary.BigEndian.AppendUint16(tcp, p.dstPort)
	tcp = binary.BigEndian.AppendUint32(tcp, p.seq)
	tcp = binary.BigEndian.AppendUint32(tcp, p.ack)
	tcp = append(tcp, byte((20+len(p.tcpOptions))/4<<4)|p.reserved, p.flags)
	tcp = binary.BigEndian.AppendUint16(tcp, p.window)
	tcp = append(tcp, 0, 0)
	tcp = binary.BigEndian.AppendUint16(tcp, p.urgent)
	tcp = append(append(tcp, p.tcpOptions...), p.payload...)
	sum := ^sumOf(pseudoOf(p.src, p.dst, len(tcp)), tcp)
	if !p.tcpSumRight {
		sum++
	}
	binary.BigEndian.PutUint16(tcp[16:], sum)
	if p.version == 6 {
		ip := binary.BigEndian.AppendUint32(nil, 6<<28|uint32(p.tos)<<20|p.flow)
		ip = binary.BigEndian.AppendUint16(ip, uint16(len(tcp)))
		ip = append(ip, 6, p.ttl)
		return append(append(append(ip, p.src...), p.dst...), tcp...)
	}
	n := 20 + len(p.ipOptions)
	ip := []byte{0x40 | byte(n/4), p.tos}
	ip = binary.BigEndian.AppendUint16(ip, uint16(n+len(tcp)))
	ip = binary.BigEndian.AppendUint16(ip, p.id)
	ip = binary.BigEndian.AppendUint16(ip, p.frag)
	ip = append(ip, p.ttl, 6, 0, 0)
	ip = append(append(append(ip, p.src...), p.dst...), p.ipOptions...)
	sum = ^sumOf(ip)
	if !p.ipSumRight {
		sum++
	}
	binary.BigEndian.PutUint16(ip[10:], sum)
	return append(ip, tcp...)
}

// slowCut is what Segmenter is to do.
func slowCut(p packet, mss, mtu int) (out []packet, ok bool) {
	mss = min(mss, mtu-p.headerSize())
	if p.headerSize() > mtu {
		return nil, false
	}
	if len(p.payload) > mss && (mss <= 0 || p.flags&(flagSYN|flagRST|flagURG) != 0) {
		return nil, false
	}
	p.ipSumRight, p.tcpSumRight = true, true
	for rest := p.payload; ; {
		s := p
		n := min(len(rest), mss)
		s.payload, rest = rest[:n], rest[n:]
		if len(out) > 0 {
			s.flags &^= flagCWR
		}
		if rest != "" {
			s.flags &^= flagPSH | flagFIN
		}
		out = append(out, s)
		if rest == "" {
			return out, true
		}
		p.seq += uint32(n)
		if p.version == 4 && p.frag&0x4000 == 0 {
			p.id++
		}
	}
}

// explain says why big is not what the packets of parts are when merged; nil if it is.
func explain(big packet, parts []packet) error {
	if len(parts) == 1 {
		if big != parts[0] {
			return fmt.Errorf("%+v was changed to %+v", parts[0], big)
		}
		return nil
	}
	mss, seq, payload := len(parts[0].payload), big.seq, ""
	constant, counted := true, true
	for i, p := range parts {
		last := i == len(parts)-1
		constant = constant && p.id == big.id && p.frag&0x4000 != 0
		counted = counted && p.id == big.id+uint16(i)
		same := p
		same.seq, same.payload, same.id, same.flags = big.seq, big.payload, big.id, big.flags
		switch {
		case p.ipOptions != "":
			return fmt.Errorf("one with IP options was merged: %+v", p)
		case !p.ipSumRight || !p.tcpSumRight:
			return fmt.Errorf("one with a wrong checksum was merged: %+v", p)
		case same != big:
			return fmt.Errorf("one was merged that differs: %+v in %+v", p, big)
		case p.seq != seq:
			return fmt.Errorf("one was merged that does not follow: %+v", p)
		case last && p.flags != big.flags || !last && p.flags != flagACK || p.flags&^flagPSH != flagACK:
			return fmt.Errorf("packet %d of %d merged has flags %#x, all have %#x", i+1, len(parts), p.flags, big.flags)
		case p.payload == "" || len(p.payload) > mss || len(p.payload) < mss && !last:
			return fmt.Errorf("packet %d of %d merged has %d bytes, the first %d", i+1, len(parts), len(p.payload), mss)
		}
		seq += uint32(len(p.payload))
		payload += p.payload
	}
	switch {
	case big.version == 4 && !constant && !counted:
		return fmt.Errorf("the identifications are not those of packets that were cut: %+v", parts)
	case payload != big.payload:
		return fmt.Errorf("another payload came of %d packets", len(parts))
	}
	return nil
}

// mayFollow reports whether p could have been merged with the packets of parts.
func mayFollow(parts []packet, p packet) bool {
	all := append(parts[:len(parts):len(parts)], p)
	big := parts[0]
	big.payload, big.flags = "", p.flags
	for _, q := range all {
		big.payload += q.payload
	}
	return parts[0].flags == flagACK && big.headerSize()+len(big.payload) <= MaxPacket && explain(big, all) == nil
}
