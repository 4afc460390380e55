package offload

import (
	"encoding/binary"
	"fmt"
)

// Header is a virtio_net_hdr (linux/virtio_net.h; Virtual I/O Device 1.3 section 5.1.6): what it takes to split the
// packet after it, and to complete its checksum. The zero Header says that there is nothing to do.
type Header struct {
	Flags     uint8 // NeedsChecksum
	Type      uint8 // None, or what the packet is made of
	Len       uint16
	Size      uint16 // payload bytes of each part but the last
	Start     uint16 // where the transport's header begins, if NeedsChecksum
	SumOffset uint16 // where in it the checksum is
}

// HeaderLen is the size of a Header before a packet.
const HeaderLen = 10

// NeedsChecksum is the flag of a packet whose checksum field holds only the sum of its pseudo-header.
const NeedsChecksum = 1

// Types of a Header.
const (
	None = 0
	TCP4 = 1
	TCP6 = 4
	UDP  = 5    // of either family
	ECN  = 0x80 // added to TCP4 or TCP6: only the first part has the CWR flag
)

// Decode reads a Header from the first HeaderLen bytes of b, which are in the machine's byte order.
func (h *Header) Decode(b []byte) {
	_ = b[HeaderLen-1]
	e := binary.NativeEndian
	*h = Header{b[0], b[1], e.Uint16(b[2:]), e.Uint16(b[4:]), e.Uint16(b[6:]), e.Uint16(b[8:])}
}

// Encode writes a Header to the first HeaderLen bytes of b.
func (h *Header) Encode(b []byte) {
	_ = b[HeaderLen-1]
	e := binary.NativeEndian
	b[0], b[1] = h.Flags, h.Type
	e.PutUint16(b[2:], h.Len)
	e.PutUint16(b[4:], h.Size)
	e.PutUint16(b[6:], h.Start)
	e.PutUint16(b[8:], h.SumOffset)
}

// Complete completes the checksum of a packet that is not to be split, where h says that it is needed.
func (h *Header) Complete(p []byte) error {
	if h.Flags&NeedsChecksum == 0 {
		return nil
	}
	start, at := int(h.Start), int(h.Start)+int(h.SumOffset)
	if start >= len(p) || at+2 > len(p) {
		return fmt.Errorf("a packet of %d bytes with its checksum at %d", len(p), at)
	}
	// The field takes part in the sum, with that of the pseudo-header in it.
	c := ^fold(sum(p[start:], 0))
	if c == 0 && h.SumOffset == udpSum {
		c = 0xffff
	}
	binary.BigEndian.PutUint16(p[at:], c)
	return nil
}

// Of the headers of IP, TCP and UDP (RFC 791, 8200, 9293, 768).
const (
	ipv4Len = 20
	ipv6Len = 40
	tcpLen  = 20
	udpLen  = 8

	protoTCP = 6
	protoUDP = 17

	tcpSum = 16
	udpSum = 6

	flagFIN = 0x01
	flagPSH = 0x08
	flagACK = 0x10
	flagECE = 0x40
	flagCWR = 0x80

	// maxHeads is the size of the largest headers: IPv6 with extension headers is not merged, but may come to be
	// split, and then has some 200 bytes of them at most.
	maxHeads = 512
	// maxPacket is that of the largest IP packet.
	maxPacket = 65535
)

// pseudo is the sum of the pseudo-header of an IP packet, for a transport of n bytes.
func pseudo(p []byte, proto byte, n int) uint64 {
	acc := uint64(proto)<<8 + uint64(byte(n>>8)) + uint64(byte(n))<<8 // as read the low byte first
	if p[0]>>4 == 6 {
		return sum(p[8:ipv6Len], acc)
	}
	return sum(p[12:ipv4Len], acc)
}
