// Package offload cuts large TCP packets into ones that fit a link, and merges those that came in one
// batch into large ones. It is what network cards and kernels do as TCP segmentation offload (TSO) and
// generic receive offload (GRO), so that whoever is on the far side of it has one packet to deal with
// instead of 48. It knows bytes only: no stack, no queue, no device.
package offload

import (
	"encoding/binary"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
)

// MaxPacket is the size of the largest IP packet.
const MaxPacket = 65535

const (
	ip4Len    = 20 // of a header without options
	ip6Len    = 40
	tcpLen    = 20
	maxHeader = 60 + 60 // IPv4 and TCP with all the options they can have

	protoTCP = 6

	flagFIN = 1 << 0
	flagSYN = 1 << 1
	flagRST = 1 << 2
	flagPSH = 1 << 3
	flagACK = 1 << 4
	flagURG = 1 << 5
	flagCWR = 1 << 7

	dontFragment = 1 << 14   // in the word of IPv4's flags and fragment offset
	fragmented   = 1<<14 - 1 // that word's bits of which fragments have some set
	atFragment   = 6         // where that word is
	atID         = 4         // where IPv4's identification is
	atIP4Sum     = 10        // where IPv4's checksum is
	atSeq        = 4         // of the TCP header: sequence number,
	atAck        = 8         // acknowledgement number,
	atOffset     = 12        // data offset,
	atFlags      = 13        // flags,
	atTCPSum     = 16        // and checksum
)

// add returns the sum of the 16-bit words of b and initial, folded. Like all sums here it is that of
// RFC 1071, not yet complemented.
func add(b []byte, initial uint32) uint32 {
	return uint32(checksum.Checksum(b, fold(initial)))
}

func fold(sum uint32) uint16 {
	sum = sum>>16 + sum&0xffff
	return uint16(sum>>16 + sum)
}

// pseudo returns the sum of TCP's pseudo-header but for the length, from an IP header.
func pseudo(ip []byte) uint32 {
	if ip[0]>>4 == 4 {
		return add(ip[12:20], protoTCP)
	}
	return add(ip[8:40], protoTCP)
}

func put16(b []byte, v uint16) { binary.BigEndian.PutUint16(b, v) }
func get16(b []byte) uint16    { return binary.BigEndian.Uint16(b) }
