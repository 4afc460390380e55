package hostnet

import (
	"fmt"

	"github.com/warren-mesh/warren/datapath"
)

// MaxMTU is what fits, with WireGuard's 32 bytes, into a UDP datagram over IPv4.
const MaxMTU = 65535 - 20 - 8 - 32

// usualMTU is that of a device about whose underlay nothing is known: an Ethernet's, less WireGuard's 80 bytes over IPv6.
const usualMTU = 1420

// CheckMTU reports why a device cannot have an MTU that is asked for.
func CheckMTU(mtu int) error {
	if mtu < MinMTU || mtu > MaxMTU {
		return fmt.Errorf("MTU %d: outside %d, which IPv6 needs, to %d", mtu, MinMTU, MaxMTU)
	}
	return nil
}

// MTU decides on the MTU of a device's link. The zero MTU follows the underlay.
type MTU struct {
	Option int // where none is asked for; 0: what fits

	asked   int
	follows bool // the link has what was chosen here
}

// Ask notes what a SetDevice has; of a new device, 0 says that none is asked for.
func (m *MTU) Ask(mtu int, isNew bool) {
	if mtu != 0 || isNew {
		m.asked, m.follows = mtu, mtu == 0
	}
}

// Right returns what the MTU of a link is to be that has one already, or 0 for a new one. The option counts wherever
// nothing was asked for in this process. Without it, what an earlier process chose, or so it seems, goes on following
// the underlay; what that may have been asked for is left as it is where it fits.
func (m *MTU) Right(h datapath.Host, have int) int {
	fits := fitting(h)
	if m.asked == 0 && fits == have {
		m.follows = true
	}
	switch {
	case m.asked != 0:
		return m.asked
	case m.Option != 0:
		return m.Option
	case fits != 0 && (m.follows || have < MinMTU || have > fits):
		return fits
	case have < MinMTU:
		return usualMTU
	}
	return min(have, MaxMTU)
}

// overhead is what WireGuard adds to a packet, in bytes: 32 of its own, 8 of UDP, 40 of IPv6 or 20 of IPv4.
func overhead(h datapath.Host) int {
	if h.IPv4 && !h.IPv6 {
		return 60
	}
	return 80
}

// fitting is the MTU with which encrypted packets fit the underlay, as far as IPv6 allows; 0: not known.
func fitting(h datapath.Host) int {
	if h.UnderlayMTU == 0 {
		return 0
	}
	return bounded(h.UnderlayMTU - overhead(h))
}

// Whole is the size of the largest packet that the underlay carries in one piece once it is encrypted, which may be less
// than any MTU of a device can be; 0: not known.
func Whole(h datapath.Host) int {
	if h.UnderlayMTU == 0 {
		return 0
	}
	return max(h.UnderlayMTU-overhead(h), 0)
}

// bounded is the MTU nearest to mtu that a device can have.
func bounded(mtu int) int { return min(max(mtu, MinMTU), MaxMTU) }

// mtuProblem reports that encrypted packets do not fit the underlay.
func mtuProblem(h datapath.Host, mtu int) (p datapath.Problem, ok bool) {
	return tooNarrow("the underlay", h.UnderlayMTU, overhead(h), mtu)
}

// tooNarrow reports that what is called so carries less than an MTU makes, where WireGuard adds that much; 0 is not known.
func tooNarrow(what string, carries, adds, mtu int) (p datapath.Problem, ok bool) {
	if carries == 0 || mtu == 0 || mtu+adds <= carries {
		return p, false
	}
	p = datapath.Problem{
		Subject: "mtu",
		Message: fmt.Sprintf("the MTU of %d makes encrypted packets of %d bytes, and %s carries %d: large ones travel in fragments, or get lost where those do", mtu, mtu+adds, what, carries),
		Remedy:  fmt.Sprintf("raise the MTU there to %d", mtu+adds),
	}
	if fits := bounded(carries - adds); mtu > fits {
		p.Remedy += fmt.Sprintf(", or ask for an MTU of %d", fits)
	} else {
		p.Message += fmt.Sprintf("; it is the least that IPv6 allows (%d)", MinMTU)
	}
	return p, true
}
