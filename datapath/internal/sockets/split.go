package sockets

// segment is how many of a run of packets go as one, joined to segments of the first one's size: each is as large, but
// for the last, which may be smaller. At least one does.
func segment(packets [][]byte) (n int) {
	size := len(packets[0])
	if size == 0 {
		return 1
	}
	total := size
	for n = 1; n < len(packets) && n < maxSegments; n++ {
		next := len(packets[n])
		if next == 0 || next > size || total+next > maxJoined {
			return n
		}
		if total += next; next < size {
			return n + 1
		}
	}
	return n
}

const (
	// maxSegments is how many packets Linux takes as one (UDP_MAX_SEGMENTS; since 6.6 it is 128).
	maxSegments = 64
	// maxJoined is the size of what Linux takes as one, in bytes: with the headers of UDP, IPv6 and Ethernet it has to
	// stay below 64 KiB, else Linux takes it apart itself, and then refuses what are too many parts.
	maxJoined = 65535 - 8 - 40 - 14 - 8
)
