package netstack

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

const (
	udpNumber      = 17
	fragmentNumber = 44 // of an IPv6 fragment header
	hopLimit       = 64
)

// packetID tells the fragments of one packet from those of others (RFC 791, RFC 8200 section 4.5).
var packetID atomic.Uint32

// parseUDP takes a whole datagram apart whose checksums are right. What is not one, or one that only the stack
// understands, is not ok.
func parseUDP(b []byte) (from, to netip.AddrPort, payload []byte, ok bool) {
	var src, dst netip.Addr
	var u []byte
	switch {
	case len(b) >= header.IPv4MinimumSize && b[0]>>4 == 4 && b[9] == udpNumber:
		size, n := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
		const moreOrOffset = 0x3fff
		if size < header.IPv4MinimumSize || n < size || n > len(b) || binary.BigEndian.Uint16(b[6:])&moreOrOffset != 0 || checksum.Checksum(b[:size], 0) != 0xffff {
			return from, to, nil, false
		}
		src, dst, u = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20])), b[size:n]
	case len(b) >= header.IPv6MinimumSize && b[0]>>4 == 6 && b[6] == udpNumber:
		n := header.IPv6MinimumSize + int(binary.BigEndian.Uint16(b[4:]))
		if n > len(b) {
			return from, to, nil, false
		}
		src, dst, u = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40])), b[header.IPv6MinimumSize:n]
	default:
		return from, to, nil, false
	}
	if !single(src) {
		return from, to, nil, false
	}
	return parseDatagram(src, dst, u)
}

// parseDatagram takes apart what follows the IP header.
func parseDatagram(src, dst netip.Addr, u []byte) (from, to netip.AddrPort, payload []byte, ok bool) {
	if len(u) < header.UDPMinimumSize {
		return from, to, nil, false
	}
	n := int(binary.BigEndian.Uint16(u[4:]))
	if n < header.UDPMinimumSize || n > len(u) {
		return from, to, nil, false
	}
	u = u[:n]
	// Over IPv4, a checksum of 0 is none (RFC 768). IPv6 has no other, and forbids that (RFC 8200 section 8.1).
	if none := u[6] == 0 && u[7] == 0; none && src.Is6() || !none && checksum.Checksum(u, pseudoUDP(src, dst, n)) != 0xffff {
		return from, to, nil, false
	}
	from = netip.AddrPortFrom(src, binary.BigEndian.Uint16(u[0:]))
	to = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(u[2:]))
	return from, to, u[header.UDPMinimumSize:], true
}

// pseudoUDP is the sum of the pseudo-header of a datagram of the given size, its own header included.
func pseudoUDP(src, dst netip.Addr, size int) uint16 {
	var b [36]byte
	binary.BigEndian.PutUint16(b[32:], uint16(size))
	b[35] = udpNumber
	if src.Is4() {
		s, d := src.As4(), dst.As4()
		copy(b[24:], s[:])
		copy(b[28:], d[:])
		return checksum.Checksum(b[24:], 0)
	}
	s, d := src.As16(), dst.As16()
	copy(b[0:], s[:])
	copy(b[16:], d[:])
	return checksum.Checksum(b[:], 0)
}

// refusedUDP reports whether b says that nobody has the port which a datagram of this node was for, and from and to
// where that was. Only who has the address says so.
func refusedUDP(b []byte) (from, to netip.AddrPort, ok bool) {
	proto, p, whole := transport(b)
	if !whole || len(p) < 8 {
		return from, to, false
	}
	switch {
	case b[0]>>4 == 4 && proto == uint8(header.ICMPv4ProtocolNumber) && p[0] == uint8(header.ICMPv4DstUnreachable) && p[1] == uint8(header.ICMPv4PortUnreachable):
	case b[0]>>4 == 6 && proto == uint8(header.ICMPv6ProtocolNumber) && p[0] == uint8(header.ICMPv6DstUnreachable) && p[1] == uint8(header.ICMPv6PortUnreachable):
	default:
		return from, to, false
	}
	quote := p[8:]
	proto, u, whole := transport(quote)
	// The datagram may have gone in fragments, of which the first has its ports.
	if whole && quote[0]>>4 == 6 && proto == fragmentNumber && len(u) >= header.IPv6FragmentHeaderSize && binary.BigEndian.Uint16(u[2:])&^7 == 0 {
		proto, u = u[0], u[header.IPv6FragmentHeaderSize:]
	}
	if !whole || proto != udpNumber || len(u) < 4 || quote[0]>>4 != b[0]>>4 {
		return from, to, false
	}
	src, _ := source(quote)
	dst, _ := destination(quote)
	if who, _ := source(b); who != dst {
		return from, to, false
	}
	return netip.AddrPortFrom(src, binary.BigEndian.Uint16(u[0:])), netip.AddrPortFrom(dst, binary.BigEndian.Uint16(u[2:])), true
}

// takeWhole delivers a datagram that the stack put together from fragments, or found behind other headers.
func (s *sockets) takeWhole(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	u := slices.Concat(pkt.TransportHeader().Slice(), pkt.Data().AsRange().ToSlice())
	from, to, payload, ok := parseDatagram(netipAddr(id.RemoteAddress), netipAddr(id.LocalAddress), u)
	if !ok {
		return true // damaged: nobody is told
	}
	c := s.find(from, to)
	if c == nil {
		return false
	}
	c.in.put(payload, from)
	return true
}

// sendUDP sends a datagram out, or to this node itself, in fragments where it does not fit the MTU.
func (l *link) sendUDP(v verdict, from, to netip.AddrPort, payload []byte) {
	mtu := int(l.MTU())
	ip := header.IPv6MinimumSize
	if to.Addr().Is4() {
		ip = header.IPv4MinimumSize
	}
	size := header.UDPMinimumSize + len(payload)
	if ip+size <= mtu {
		view := buffer.NewViewSize(ip + size)
		b := view.AsSlice()
		putUDP(b[ip:], from, to, payload)
		putIP(b, from.Addr(), to.Addr(), udpNumber, 0)
		l.pass(v, view)
		return
	}
	u := make([]byte, size)
	putUDP(u, from, to, payload)
	id := packetID.Add(1)
	extra := 0
	if to.Addr().Is6() {
		extra = header.IPv6FragmentHeaderSize
	}
	most := (mtu - ip - extra) &^ 7 // offsets count in 8 bytes
	for at := 0; at < size; at += most {
		n := min(most, size-at)
		more := at+n < size
		view := buffer.NewViewSize(ip + extra + n)
		b := view.AsSlice()
		copy(b[ip+extra:], u[at:at+n])
		if extra > 0 {
			f := b[ip:]
			f[0], f[1] = udpNumber, 0
			field := uint16(at)
			if more {
				field |= 1
			}
			binary.BigEndian.PutUint16(f[2:], field)
			binary.BigEndian.PutUint32(f[4:], id)
			putIP(b, from.Addr(), to.Addr(), fragmentNumber, 0)
		} else {
			field := uint16(at / 8)
			if more {
				field |= 0x2000
			}
			binary.BigEndian.PutUint16(b[4:], uint16(id))
			putIP(b, from.Addr(), to.Addr(), udpNumber, field)
		}
		l.pass(v, view)
	}
}

// pass hands a packet on.
func (l *link) pass(v verdict, view *buffer.View) {
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(view)})
	if v == inside {
		l.in.put(pkt, false)
		return
	}
	l.out.put(pkt, true)
}

// putUDP writes a datagram with its checksum to b, which is as large.
func putUDP(b []byte, from, to netip.AddrPort, payload []byte) {
	binary.BigEndian.PutUint16(b[0:], from.Port())
	binary.BigEndian.PutUint16(b[2:], to.Port())
	binary.BigEndian.PutUint16(b[4:], uint16(len(b))) // over IPv6 at most 65535 too: there are no jumbograms here
	b[6], b[7] = 0, 0
	copy(b[header.UDPMinimumSize:], payload)
	sum := ^checksum.Checksum(b, pseudoUDP(from.Addr(), to.Addr(), len(b)))
	if sum == 0 {
		sum = 0xffff // 0 would be none
	}
	binary.BigEndian.PutUint16(b[6:], sum)
}

// putIP writes the header of b, a whole packet, but for the identification of an IPv4 one, which is there.
func putIP(b []byte, from, to netip.Addr, proto uint8, fragment uint16) {
	if to.Is4() {
		b[0], b[1] = 0x45, 0
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		if fragment == 0 {
			binary.BigEndian.PutUint16(b[4:], uint16(packetID.Add(1)))
		}
		binary.BigEndian.PutUint16(b[6:], fragment)
		b[8], b[9], b[10], b[11] = hopLimit, proto, 0, 0
		s, d := from.As4(), to.As4()
		copy(b[12:], s[:])
		copy(b[16:], d[:])
		binary.BigEndian.PutUint16(b[10:], ^checksum.Checksum(b[:header.IPv4MinimumSize], 0))
		return
	}
	binary.BigEndian.PutUint32(b[0:], 6<<28)
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)-header.IPv6MinimumSize))
	b[6], b[7] = proto, hopLimit
	s, d := from.As16(), to.As16()
	copy(b[8:], s[:])
	copy(b[24:], d[:])
}
