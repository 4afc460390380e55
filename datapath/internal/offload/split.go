package offload

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Splitter takes one large packet apart. The zero Splitter has nothing left.
type Splitter struct {
	// Most is the largest part there shall be of TCP that cannot be fragmented by routers; 0: what the packet says. A sender
	// of TCP has to do with whatever segments there are, but not with what it numbered itself.
	Most int

	first int    // the size of the first part, which is to come; 0: it is not
	rest  []byte // payload of the other parts to come

	head    [maxHeads]byte // headers as the parts have them, but for what differs
	ipLen   int
	headLen int
	size    int
	proto   byte
	seq     uint32
	id      uint16
	closing byte // flags that only the last part has
	opening byte // flags that only the first part has
	sumAt   int
	sums    uint64 // of the pseudo-header without its length, and of the transport's header without what differs
	ipSums  uint64 // of the IPv4 header without what differs
}

var errSplit = errors.New("a large packet that is none")

// Start begins with another packet, of n bytes, of which at least the headers are at the beginning of p. It returns the
// size of the first part. Len of h is not relied upon: where Linux forwards a packet, it may be anything. After an error
// there is nothing left.
func (s *Splitter) Start(h *Header, p []byte, n int) (first int, err error) {
	s.Drop()
	if len(p) < ipv4Len || h.Size == 0 {
		return 0, errSplit
	}
	v6 := p[0]>>4 == 6
	switch typ := h.Type &^ ECN; {
	case typ == TCP4 && p[0]>>4 == 4, typ == TCP6 && v6:
		s.proto, s.sumAt = protoTCP, tcpSum
	case typ == UDP && (p[0]>>4 == 4 || v6):
		s.proto, s.sumAt = protoUDP, udpSum
	default:
		return 0, fmt.Errorf("%w: of type %d and IP version %d", errSplit, h.Type, p[0]>>4)
	}
	if s.ipLen = int(p[0]&0xf) * 4; v6 {
		if s.ipLen = ipv6Len; h.Flags&NeedsChecksum != 0 {
			s.ipLen = int(h.Start) // after the extension headers
		}
	}
	transport := udpLen
	if s.proto == protoTCP {
		transport = tcpLen
	}
	if s.ipLen < ipv4Len || v6 && s.ipLen < ipv6Len || s.ipLen+transport > len(p) {
		return 0, fmt.Errorf("%w: of %d bytes, and IP headers of %d", errSplit, n, s.ipLen)
	}
	if s.proto == protoTCP {
		if transport = int(p[s.ipLen+12]>>4) * 4; transport < tcpLen {
			return 0, errSplit
		}
	}
	if s.headLen = s.ipLen + transport; s.headLen >= n || s.headLen > min(len(p), maxHeads) {
		return 0, fmt.Errorf("%w: of %d bytes, and headers of %d", errSplit, n, s.headLen)
	}
	s.size = int(h.Size)
	if s.Most > s.headLen && s.proto == protoTCP && (v6 || p[6]&0x40 != 0) {
		s.size = min(s.size, s.Most-s.headLen)
	}
	s.first = min(n, s.headLen+s.size)

	head := s.head[:copy(s.head[:], p[:s.headLen])]
	t := head[s.ipLen:]
	put(t[s.sumAt:], 0)
	s.opening, s.closing = 0, 0
	if s.proto == protoTCP {
		s.seq = binary.BigEndian.Uint32(t[4:])
		binary.BigEndian.PutUint32(t[4:], 0)
		s.closing = t[13] & (flagFIN | flagPSH)
		if h.Type&ECN != 0 {
			s.opening = t[13] & flagCWR
		}
		t[13] &^= s.closing | s.opening
	} else {
		put(t[4:], 0)
	}
	s.sums = sum(t, pseudo(p, s.proto, 0))
	s.sums = s.sums>>32 + s.sums&0xffffffff // which leaves room for what is added
	if v6 {
		return s.first, nil
	}
	s.id = binary.BigEndian.Uint16(head[4:])
	put(head[2:], 0)
	put(head[4:], 0)
	put(head[10:], 0)
	s.ipSums = sum(head[:s.ipLen], 0)
	s.ipSums = s.ipSums>>32 + s.ipSums&0xffffffff
	return s.first, nil
}

// Rest gives s what is behind the first part of the packet that it started with, which it keeps until nothing is left.
func (s *Splitter) Rest(b []byte) { s.rest = b }

// Drop forgets what is left.
func (s *Splitter) Drop() { s.first, s.rest = 0, nil }

// Len is the size of the next part; 0 if there is none.
func (s *Splitter) Len() int {
	switch {
	case s.first != 0:
		return s.first
	case len(s.rest) == 0:
		return 0
	}
	return s.headLen + min(s.size, len(s.rest))
}

// Next writes the next part to b, and returns Len. The payload of the first part is there already, in its place.
func (s *Splitter) Next(b []byte) int {
	b = b[:s.Len()]
	n := len(b) - s.headLen
	copy(b, s.head[:s.headLen])
	if b[0]>>4 == 6 {
		put(b[4:], uint16(len(b)-ipv6Len))
	} else {
		put(b[2:], uint16(len(b)))
		put(b[4:], s.id)
		put(b[10:], ^fold(s.ipSums+uint64(swap(uint16(len(b))))+uint64(swap(s.id))))
		s.id++
	}
	t := b[s.ipLen:]
	acc := s.sums
	add := uint64(swap(uint16(len(t))))
	if s.proto == protoTCP {
		binary.BigEndian.PutUint32(t[4:], s.seq)
		add += uint64(swap(uint16(s.seq>>16))) + uint64(swap(uint16(s.seq)))
		s.seq += uint32(n)
		flags := s.opening
		if s.opening = 0; s.first != 0 && len(s.rest) == 0 || s.first == 0 && len(s.rest) == n {
			flags |= s.closing
		}
		t[13] |= flags
		add += uint64(flags) << 8
	} else {
		put(t[4:], uint16(len(t)))
		add += uint64(swap(uint16(len(t))))
	}
	acc += add
	if s.first != 0 {
		s.first = 0
		acc = sum(b[s.headLen:], acc)
	} else {
		acc = copySum(b[s.headLen:], s.rest[:n], acc)
		s.rest = s.rest[n:]
	}
	c := ^fold(acc)
	if c == 0 && s.proto == protoUDP {
		c = 0xffff // 0 would be no checksum
	}
	put(t[s.sumAt:], c)
	return len(b)
}

func put(b []byte, v uint16) { binary.BigEndian.PutUint16(b, v) }

// swap returns what sum reads where v is.
func swap(v uint16) uint16 { return v<<8 | v>>8 }
