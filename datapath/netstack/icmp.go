package netstack

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// reason is why a packet is answered with "destination unreachable".
type reason uint8

const (
	netUnreachable  reason = iota // nobody has the address
	hostUnreachable               // the prefix is here, but nothing is at the address
)

// The most of an ICMP error, so that it needs no fragmenting anywhere: RFC 1812 section 4.3.2.3 and
// RFC 4443 section 2.4 (c).
const (
	maxError4 = 576
	maxError6 = 1280
)

// source returns where a packet comes from.
func source(b []byte) (netip.Addr, bool) {
	switch {
	case len(b) >= header.IPv4MinimumSize && b[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(b[12:16])), true
	case len(b) >= header.IPv6MinimumSize && b[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(b[8:24])), true
	}
	return netip.Addr{}, false
}

// transport returns the protocol of an IP packet and what follows its header; ok is false for
// fragments but the first. Extension headers of IPv6 are not looked behind: the protocol is then that
// of the extension.
func transport(b []byte) (proto uint8, payload []byte, ok bool) {
	switch {
	case len(b) >= header.IPv4MinimumSize && b[0]>>4 == 4:
		h := header.IPv4(b)
		n := int(h.HeaderLength())
		if n < header.IPv4MinimumSize || n > len(b) || h.FragmentOffset() != 0 {
			return 0, nil, false
		}
		return h.Protocol(), b[n:], true
	case len(b) >= header.IPv6MinimumSize && b[0]>>4 == 6:
		return header.IPv6(b).NextHeader(), b[header.IPv6MinimumSize:], true
	}
	return 0, nil, false
}

// isEcho reports whether b is an echo request.
func isEcho(b []byte) bool {
	proto, p, ok := transport(b)
	if !ok || len(p) == 0 {
		return false
	}
	return proto == uint8(header.ICMPv4ProtocolNumber) && b[0]>>4 == 4 && p[0] == uint8(header.ICMPv4Echo) ||
		proto == uint8(header.ICMPv6ProtocolNumber) && b[0]>>4 == 6 && p[0] == uint8(header.ICMPv6EchoRequest)
}

// icmpError returns the packet that tells the sender of b why it was not delivered, from the given
// address of this node; nil where b must not be answered: ICMP errors, fragments but the first, and
// packets from or to what is not one host (RFC 1122 section 3.2.2, RFC 4443 section 2.4 (e)).
func icmpError(b []byte, why reason, from netip.Addr) []byte {
	to, ok := source(b)
	dst, ok2 := destination(b)
	proto, payload, ok3 := transport(b)
	if !ok || !ok2 || !ok3 || !single(to) || !single(dst) || !from.IsValid() || from.Is4() != to.Is4() {
		return nil
	}
	if to.Is4() {
		if proto == uint8(header.ICMPv4ProtocolNumber) && !(len(payload) > 0 && asksICMPv4(header.ICMPv4Type(payload[0]))) {
			return nil
		}
		return icmpError4(b, why, from, to)
	}
	switch proto {
	case uint8(header.ICMPv6ProtocolNumber):
		// Error messages have the high bit clear (RFC 4443 section 2.1).
		if len(payload) == 0 || payload[0] < 128 {
			return nil
		}
	case 0, 43, 44, 50, 51, 60, 135, 139, 140:
		// Behind an extension header there may be an ICMP error, and it is not worth a parser to know.
		return nil
	}
	return icmpError6(b, why, from, to)
}

func single(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

func asksICMPv4(t header.ICMPv4Type) bool {
	switch t {
	case header.ICMPv4Echo, header.ICMPv4EchoReply, header.ICMPv4Timestamp, header.ICMPv4TimestampReply,
		header.ICMPv4InfoRequest, header.ICMPv4InfoReply:
		return true
	}
	return false
}

func icmpError4(b []byte, why reason, from, to netip.Addr) []byte {
	quote := b[:min(len(b), maxError4-header.IPv4MinimumSize-header.ICMPv4MinimumSize)]
	e := make([]byte, header.IPv4MinimumSize+header.ICMPv4MinimumSize+len(quote))
	ip := header.IPv4(e)
	ip.Encode(&header.IPv4Fields{
		TotalLength: uint16(len(e)), TTL: 64, Protocol: uint8(header.ICMPv4ProtocolNumber),
		SrcAddr: tcpipAddr(from), DstAddr: tcpipAddr(to),
	})
	ip.SetChecksum(^ip.CalculateChecksum())
	h := header.ICMPv4(e[header.IPv4MinimumSize:])
	h.SetType(header.ICMPv4DstUnreachable)
	h.SetCode(header.ICMPv4NetUnreachable)
	if why == hostUnreachable {
		h.SetCode(header.ICMPv4HostUnreachable)
	}
	copy(h[header.ICMPv4MinimumSize:], quote)
	h.SetChecksum(^checksum.Checksum(h, 0))
	return e
}

func icmpError6(b []byte, why reason, from, to netip.Addr) []byte {
	quote := b[:min(len(b), maxError6-header.IPv6MinimumSize-header.ICMPv6DstUnreachableMinimumSize)]
	e := make([]byte, header.IPv6MinimumSize+header.ICMPv6DstUnreachableMinimumSize+len(quote))
	h := header.ICMPv6(e[header.IPv6MinimumSize:])
	header.IPv6(e).Encode(&header.IPv6Fields{
		PayloadLength: uint16(len(h)), TransportProtocol: header.ICMPv6ProtocolNumber, HopLimit: 64,
		SrcAddr: tcpipAddr(from), DstAddr: tcpipAddr(to),
	})
	h.SetType(header.ICMPv6DstUnreachable)
	h.SetCode(header.ICMPv6NetworkUnreachable)
	if why == hostUnreachable {
		h.SetCode(header.ICMPv6AddressUnreachable)
	}
	copy(h[header.ICMPv6DstUnreachableMinimumSize:], quote)
	h.SetChecksum(^checksum.Checksum(h, pseudo6(from, to, len(h))))
	return e
}

// pseudo6 is the sum of the pseudo-header of an ICMPv6 message of the given size (RFC 8200 section 8.1).
func pseudo6(from, to netip.Addr, size int) uint16 {
	var length [4]byte
	binary.BigEndian.PutUint32(length[:], uint32(size))
	sum := checksum.Checksum(from.AsSlice(), 0)
	sum = checksum.Checksum(to.AsSlice(), sum)
	sum = checksum.Checksum(length[:], sum)
	return checksum.Checksum([]byte{0, 0, 0, uint8(header.ICMPv6ProtocolNumber)}, sum)
}
