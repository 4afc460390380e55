package offload

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// Coalescer merges packets of one batch. The zero Coalescer is an empty batch.
//
// Merged are segments of one TCP connection that follow each other in sequence, and differ in nothing
// else that TCP or IP takes notice of: so the large packet says all that they said, and cutting it gives
// them back. Each of them has right checksums, since nobody can tell later. Packets of a connection stay
// in order.
type Coalescer struct {
	// Holes has connections of which nothing is merged. nil: there are none.
	Holes *Holes

	packets []Packet // room for more than there are is kept
	n       int
	open    [256]uint8 // by hash of the connection: the newest of those that may be added to, +1
}

// maxBatch is how many packets there may be for open to count them. More are not merged.
const maxBatch = 255

// Packet is one packet of a batch as it is after merging.
type Packet struct {
	// Pieces are the packet, after Header. They are slices of what was added.
	Pieces [][]byte
	// Size is the sum of their sizes.
	Size int
	// Verified says that this is one of TCP, and that its checksums are right.
	Verified bool

	hdr    [maxHeader]byte // the first packet's
	hdrLen int             // 0: nothing was looked at, all is in Pieces
	ipLen  int
	count  int    // segments
	mss    int    // payload of the first segment
	seq    uint32 // of the next
	id     uint16 // of the first segment, in IPv4
	step   uint16 // from one to the next
	sum    uint32 // of the payload
	ended  bool   // nothing may be added
	hash   uint8
	older  uint8 // the next in a chain of open
}

// Reset empties the batch and lets go of what was added to it.
func (c *Coalescer) Reset() {
	for i := range c.packets[:c.n] {
		p := &c.packets[i]
		clear(p.Pieces)
		p.Pieces = p.Pieces[:0]
	}
	c.n = 0
	clear(c.open[:])
}

// Packets returns what the batch has become. It is valid until the next Add or Reset.
func (c *Coalescer) Packets() []Packet { return c.packets[:c.n] }

// Add adds a packet. It is read until Reset.
func (c *Coalescer) Add(b []byte) {
	s, ok := parse(b)
	if !ok {
		p := c.next()
		p.Pieces, p.Size = append(p.Pieces, b), len(b)
		return
	}
	hash := s.hash()
	apart := c.Holes != nil && c.Holes[hash].Load() > 0
	at := &c.open[hash]
	for ; *at != 0; at = &c.packets[*at-1].older {
		p := &c.packets[*at-1]
		if !bytes.Equal(p.connection(), s.connection()) {
			continue
		}
		if !apart && p.add(&s) {
			if p.ended {
				*at = p.older
			}
			return
		}
		if c.Holes != nil && int32(s.seq()-p.seq) > 0 {
			apart = true
			c.Holes[hash].Store(quiet)
		}
		*at = p.older
		break
	}
	p := c.next()
	p.Verified = s.verified
	p.hdrLen, p.ipLen, p.hash = s.hdrLen, s.ipLen, hash
	copy(p.hdr[:], s.b[:s.hdrLen])
	p.count, p.mss, p.sum = 1, s.size(), s.sum
	p.Size = p.mss
	if p.mss > 0 {
		p.Pieces = append(p.Pieces, s.b[s.hdrLen:])
	}
	tcp := s.tcp()
	if apart || !s.verified || p.mss == 0 || tcp[atFlags] != flagACK || c.n > maxBatch {
		return
	}
	p.seq = s.seq() + uint32(p.mss)
	p.id = get16(s.b[atID:])
	p.older, c.open[hash] = c.open[hash], uint8(c.n)
}

// next returns another packet of the batch, with no Pieces.
func (c *Coalescer) next() *Packet {
	if c.n == len(c.packets) {
		c.packets = append(c.packets, Packet{})
	}
	p := &c.packets[c.n]
	c.n++
	p.Size, p.Verified, p.hdrLen, p.count, p.ended, p.older = 0, false, 0, 0, false, 0
	return p
}

// add adds a segment of the same connection where that may be.
func (p *Packet) add(s *segment) bool {
	n := s.size()
	tcp, mine := s.tcp(), p.hdr[p.ipLen:p.hdrLen]
	switch {
	case !s.verified || s.hdrLen != p.hdrLen,
		n == 0 || n > p.mss || p.hdrLen+p.Size+n > MaxPacket,
		s.seq() != p.seq,
		tcp[atFlags]&^flagPSH != flagACK,
		!bytes.Equal(tcp[atAck:atFlags], mine[atAck:atFlags]),           // acknowledgement, data offset
		!bytes.Equal(tcp[atFlags+1:atTCPSum], mine[atFlags+1:atTCPSum]), // window
		!bytes.Equal(tcp[atTCPSum+2:], mine[atTCPSum+2:]):               // urgent pointer, options
		return false
	}
	if s.b[0]>>4 == 4 {
		// Type of service, the word of fragments, time to live.
		if s.b[1] != p.hdr[1] || get16(s.b[atFragment:]) != get16(p.hdr[atFragment:]) || s.b[8] != p.hdr[8] {
			return false
		}
		step := get16(s.b[atID:]) - p.id
		if p.count == 1 {
			// Some count packets that cannot be fragmented, some do not; the others have to be counted.
			if step != 1 && (step != 0 || get16(s.b[atFragment:])&dontFragment == 0) {
				return false
			}
			p.step = step
		} else if step != p.step*uint16(p.count) {
			return false
		}
	} else if !bytes.Equal(s.b[:4], p.hdr[:4]) || s.b[7] != p.hdr[7] { // traffic class and flow label, hop limit
		return false
	}
	if p.Size&1 != 0 {
		s.sum = uint32(bits.ReverseBytes16(fold(s.sum)))
	}
	p.sum = uint32(fold(p.sum + s.sum))
	p.Pieces = append(p.Pieces, s.b[s.hdrLen:])
	p.Size += n
	p.count++
	p.seq += uint32(n)
	if tcp[atFlags]&flagPSH != 0 {
		mine[atFlags] |= flagPSH
		p.ended = true
	}
	p.ended = p.ended || n < p.mss
	return true
}

// connection returns the addresses and ports, as they are in one piece.
func (p *Packet) connection() []byte {
	if p.ipLen == ip4Len {
		return p.hdr[12:24]
	}
	return p.hdr[8:44]
}

// Header returns the headers of IP and TCP that come before Pieces, with right checksums if those that
// were merged had them; of a packet that is not one of TCP, nothing. It is the Packet's.
func (p *Packet) Header() []byte {
	h := p.hdr[:p.hdrLen]
	if p.count < 2 {
		return h
	}
	if p.ipLen == ip4Len {
		put16(h[2:], uint16(p.hdrLen+p.Size))
		put16(h[atIP4Sum:], 0)
		put16(h[atIP4Sum:], ^fold(add(h[:ip4Len], 0)))
	} else {
		put16(h[4:], uint16(p.hdrLen+p.Size-ip6Len))
	}
	tcp := h[p.ipLen:]
	put16(tcp[atTCPSum:], 0)
	put16(tcp[atTCPSum:], ^fold(add(tcp, pseudo(h)+p.sum+uint32(len(tcp)+p.Size))))
	return h
}

// segment is a TCP packet that is no fragment and has no IP options.
type segment struct {
	b             []byte
	ipLen, hdrLen int
	sum           uint32 // of the payload
	verified      bool   // the checksums are right
}

func (s *segment) size() int   { return len(s.b) - s.hdrLen }
func (s *segment) tcp() []byte { return s.b[s.ipLen:s.hdrLen] }
func (s *segment) seq() uint32 { return binary.BigEndian.Uint32(s.tcp()[atSeq:]) }

func (s *segment) connection() []byte {
	if s.ipLen == ip4Len {
		return s.b[12:24]
	}
	return s.b[8:44]
}

func (s *segment) hash() uint8 {
	c := s.connection()
	return flow(c[:len(c)-4], c[len(c)-4:])
}

func parse(b []byte) (s segment, ok bool) {
	if len(b) < ip4Len+tcpLen {
		return s, false
	}
	size := 0
	switch b[0] {
	case 0x45:
		size, s.ipLen = int(get16(b[2:])), ip4Len
		if b[9] != protoTCP || get16(b[atFragment:])&fragmented != 0 {
			return s, false
		}
	default:
		if b[0]>>4 != 6 || b[6] != protoTCP {
			return s, false
		}
		size, s.ipLen = int(get16(b[4:]))+ip6Len, ip6Len
	}
	if size > len(b) || size < s.ipLen+tcpLen {
		return s, false
	}
	b = b[:size] // what is behind it is padding
	s.b, s.hdrLen = b, s.ipLen+int(b[s.ipLen+atOffset]>>4)*4
	if s.hdrLen < s.ipLen+tcpLen || s.hdrLen > size {
		return s, false
	}
	s.sum = add(b[s.hdrLen:], 0)
	total := add(b[s.ipLen:s.hdrLen], pseudo(b)+uint32(size-s.ipLen)+s.sum)
	s.verified = fold(total) == 0xffff && (s.ipLen == ip6Len || fold(add(b[:ip4Len], 0)) == 0xffff)
	return s, true
}
