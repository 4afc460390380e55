package offload

import (
	"encoding/binary"
	"math/bits"
)

// sum adds b to a checksum as RFC 1071 has it: 64 bits at a time, and the low byte first, which is set right by fold. Of
// what is summed in several pieces all but the last have an even number of bytes.
func sum(b []byte, acc uint64) uint64 {
	var c uint64
	for ; len(b) >= 64; b = b[64:] {
		p := (*[64]byte)(b)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(p[0:]), 0)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(p[8:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(p[16:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(p[24:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(p[32:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(p[40:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(p[48:]), c)
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(p[56:]), c)
		acc, c = bits.Add64(acc, 0, c)
		acc += c
	}
	for ; len(b) >= 8; b = b[8:] {
		acc, c = bits.Add64(acc, binary.LittleEndian.Uint64(b), 0)
		acc += c
	}
	return sumEnd(b, acc)
}

// sumEnd adds the last 7 bytes or less.
func sumEnd(b []byte, acc uint64) uint64 {
	var last uint64
	for i, x := range b {
		last |= uint64(x) << (8 * i)
	}
	acc, c := bits.Add64(acc, last, 0)
	return acc + c
}

// copySum copies src to dst, which is no shorter, and adds it to a checksum on the way.
func copySum(dst, src []byte, acc uint64) uint64 {
	var c uint64
	for len(src) >= 64 && len(dst) >= 64 {
		p, q := (*[64]byte)(src), (*[64]byte)(dst)
		a, b := binary.LittleEndian.Uint64(p[0:]), binary.LittleEndian.Uint64(p[8:])
		acc, c = bits.Add64(acc, a, 0)
		binary.LittleEndian.PutUint64(q[0:], a)
		acc, c = bits.Add64(acc, b, c)
		binary.LittleEndian.PutUint64(q[8:], b)
		a, b = binary.LittleEndian.Uint64(p[16:]), binary.LittleEndian.Uint64(p[24:])
		acc, c = bits.Add64(acc, a, c)
		binary.LittleEndian.PutUint64(q[16:], a)
		acc, c = bits.Add64(acc, b, c)
		binary.LittleEndian.PutUint64(q[24:], b)
		a, b = binary.LittleEndian.Uint64(p[32:]), binary.LittleEndian.Uint64(p[40:])
		acc, c = bits.Add64(acc, a, c)
		binary.LittleEndian.PutUint64(q[32:], a)
		acc, c = bits.Add64(acc, b, c)
		binary.LittleEndian.PutUint64(q[40:], b)
		a, b = binary.LittleEndian.Uint64(p[48:]), binary.LittleEndian.Uint64(p[56:])
		acc, c = bits.Add64(acc, a, c)
		binary.LittleEndian.PutUint64(q[48:], a)
		acc, c = bits.Add64(acc, b, c)
		binary.LittleEndian.PutUint64(q[56:], b)
		acc, c = bits.Add64(acc, 0, c)
		acc += c
		src, dst = src[64:], dst[64:]
	}
	copy(dst, src)
	return sum(src, acc)
}

// fold returns a sum in 16 bits, of which a checksum is the complement.
func fold(acc uint64) uint16 {
	acc = acc>>32 + acc&0xffffffff
	acc = acc>>32 + acc&0xffffffff
	acc = acc>>16 + acc&0xffff
	acc = acc>>16 + acc&0xffff
	return bits.ReverseBytes16(uint16(acc))
}
