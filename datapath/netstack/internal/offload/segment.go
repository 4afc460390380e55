package offload

import "encoding/binary"

// Segmenter cuts one TCP packet after the other into segments. Checksums of the packet need not be
// right: those of the segments are made anew, and what all segments have in common is summed up once.
// The zero Segmenter has nothing to cut.
type Segmenter struct {
	hdr     [maxHeader]byte // of all segments, with zeros where they differ
	ipLen   int
	hdrLen  int
	mss     int
	payload [][]byte // what is not cut yet, in as many pieces as it came
	left    int      // bytes in payload
	more    bool     // there is a segment to come
	first   bool     // and it is the first

	seq    uint32
	flags  byte
	id     uint16
	step   uint16 // from one segment's IPv4 identification to that of the next
	ipSum  uint32 // of the IPv4 header
	tcpSum uint32 // of the pseudo-header and the TCP header
}

// Start begins with the packet that the pieces make up, in segments of at most mss bytes of payload and
// mtu bytes in all. The first piece holds its headers. The pieces are used until More says that there is
// no more. Start returns false, and has nothing to cut, where the packet is not one of TCP that may be
// cut so: fragments, packets whose length is not what its header says, and what is said by a flag of the
// first byte or the last (SYN, RST, URG), unless it fits as it is.
func (s *Segmenter) Start(pieces [][]byte, mss, mtu int) bool {
	s.more, s.payload, s.left = false, nil, 0
	if len(pieces) == 0 || len(pieces[0]) < ip4Len {
		return false
	}
	h, size := pieces[0], 0
	for _, p := range pieces {
		size += len(p)
	}
	switch h[0] >> 4 {
	case 4:
		s.ipLen = int(h[0]&15) * 4
		if s.ipLen < ip4Len || h[9] != protoTCP || int(get16(h[2:])) != size || get16(h[atFragment:])&fragmented != 0 {
			return false
		}
	case 6:
		s.ipLen = ip6Len
		if len(h) < ip6Len || h[6] != protoTCP || int(get16(h[4:])) != size-ip6Len {
			return false
		}
	default:
		return false
	}
	if len(h) < s.ipLen+tcpLen {
		return false
	}
	s.hdrLen = s.ipLen + int(h[s.ipLen+atOffset]>>4)*4
	if s.hdrLen < s.ipLen+tcpLen || s.hdrLen > len(h) {
		return false
	}
	s.left, s.mss = size-s.hdrLen, min(mss, mtu-s.hdrLen)
	copy(s.hdr[:], h[:s.hdrLen])
	tcp := s.hdr[s.ipLen:s.hdrLen]
	s.seq, s.flags = binary.BigEndian.Uint32(tcp[atSeq:]), tcp[atFlags]
	if s.left > s.mss && (s.mss <= 0 || s.flags&(flagSYN|flagRST|flagURG) != 0) || s.hdrLen > mtu {
		s.left = 0
		return false
	}

	clear(tcp[atSeq:atAck])
	tcp[atFlags] = 0
	put16(tcp[atTCPSum:], 0)
	s.tcpSum = add(tcp, pseudo(h))
	if h[0]>>4 == 4 {
		s.id, s.step = get16(h[atID:]), 1
		if get16(h[atFragment:])&dontFragment != 0 {
			s.step = 0 // then it says nothing (RFC 6864 section 4.1)
		}
		put16(s.hdr[2:], 0)
		put16(s.hdr[atID:], 0)
		put16(s.hdr[atIP4Sum:], 0)
		s.ipSum = add(s.hdr[:s.ipLen], 0)
	}
	pieces[0] = h[s.hdrLen:]
	s.payload, s.more, s.first = pieces, true, true
	return true
}

// More reports whether there is another segment.
func (s *Segmenter) More() bool { return s.more }

// Limit has the segments to come be of at most mtu bytes, which is more than their headers.
func (s *Segmenter) Limit(mtu int) { s.mss = min(s.mss, mtu-s.hdrLen) }

// Next writes the next segment to b, which has room for it, and returns its size.
func (s *Segmenter) Next(b []byte) int {
	n := min(s.left, s.mss)
	size := s.hdrLen + n
	copy(b, s.hdr[:s.hdrLen])
	for to := b[s.hdrLen:size]; len(to) > 0; {
		k := copy(to, s.payload[0])
		to = to[k:]
		if s.payload[0] = s.payload[0][k:]; len(s.payload[0]) == 0 {
			s.payload = s.payload[1:]
		}
	}
	s.left -= n
	s.more = s.left > 0

	// That the window was reduced is said once, that something ends at the end (RFC 3168 section 6.1.2).
	flags := s.flags
	if !s.first {
		flags &^= flagCWR
	}
	if s.more {
		flags &^= flagFIN | flagPSH
	}
	s.first = false
	tcp := b[s.ipLen:size]
	binary.BigEndian.PutUint32(tcp[atSeq:], s.seq)
	tcp[atFlags] = flags
	sum := s.tcpSum + uint32(len(tcp)) + s.seq>>16 + s.seq&0xffff + uint32(flags)
	put16(tcp[atTCPSum:], ^fold(add(b[s.hdrLen:size], sum)))
	s.seq += uint32(n)

	if b[0]>>4 == 6 {
		put16(b[4:], uint16(size-ip6Len))
		return size
	}
	put16(b[2:], uint16(size))
	put16(b[atID:], s.id)
	put16(b[atIP4Sum:], ^fold(s.ipSum+uint32(size)+uint32(s.id)))
	s.id += s.step
	return size
}
