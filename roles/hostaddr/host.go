package hostaddr

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
)

// Link is a network interface with its addresses.
type Link struct {
	Name  string
	Up    bool
	Addrs []netip.Addr
}

// Links returns the host's. Where any of them cannot be read, as the process has no descriptors left say,
// that is an error: what is not known is not the same as what is not there.
func Links() ([]Link, error) {
	is, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("the host's interfaces cannot be listed: %w", err)
	}
	var ls []Link
	for _, i := range is {
		l := Link{Name: i.Name, Up: i.Flags&net.FlagUp != 0}
		as, err := i.Addrs()
		if err != nil {
			return nil, fmt.Errorf("the addresses of the host's interface %s cannot be listed: %w", i.Name, err)
		}
		for _, a := range as {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				l.Addrs = append(l.Addrs, p.Addr().Unmap())
			}
		}
		ls = append(ls, l)
	}
	return ls, nil
}

// Choose returns the addresses others may try to reach the host at, the best first: those that are global
// or private, are on an interface that is up, and that skip does not want. first are those the host itself
// would send from, which are the likeliest to be reachable. Where there are none, it is the loopback
// addresses, which others on the same host can use. There are at most max.
//
// Temporary and deprecated IPv6 addresses cannot be told from others everywhere, and are among them: who
// tries one in vain goes on to the next.
func Choose(ls []Link, first []netip.Addr, skip func(netip.Addr) bool, max int) []netip.Addr {
	var as, loopback []netip.Addr
	for _, l := range ls {
		for _, a := range l.Addrs {
			switch {
			case !l.Up, a.Zone() != "", !a.IsValid(), skip != nil && skip(a):
			case a.IsLoopback():
				loopback = append(loopback, a)
			case a.IsGlobalUnicast() && !a.IsLinkLocalUnicast(): // which includes private ones
				as = append(as, a)
			}
		}
	}
	if len(as) == 0 {
		as = loopback
	}
	rank := func(a netip.Addr) int {
		switch i := slices.Index(first, a); {
		case i >= 0:
			return i
		case a.Is4():
			return len(first)
		}
		return len(first) + 1
	}
	slices.SortFunc(as, func(a, b netip.Addr) int {
		if d := rank(a) - rank(b); d != 0 {
			return d
		}
		return a.Compare(b) // the same order each time, whatever order the host has them in
	})
	as = slices.Compact(as)
	return as[:min(len(as), max)]
}

// world are addresses far from each other, of each family: what most of them are reached from, the world is. A host
// may have no way to one of them, or one of its own.
var world = [][]string{
	{"12.0.0.1:9", "58.0.0.1:9", "193.0.0.1:9"},
	{"[2001:4860::1]:9", "[2400:cb00::1]:9", "[2a00:1450::1]:9"},
}

// Sources returns the addresses the host would send from to the rest of the world, one of each family at most. No packet
// is sent for it: connecting UDP is a look into the routes. control is that of a net.Dialer, for packets to which other
// routes apply; nil is for all others.
func Sources(control func(network, address string, c syscall.RawConn) error) (as []netip.Addr, err error) {
	d := net.Dialer{Control: control}
	for _, family := range world {
		var from []netip.Addr
		for _, to := range family {
			c, err := d.Dial("udp", to)
			switch {
			case err == nil:
			case slices.ContainsFunc(scarce, func(e error) bool { return errors.Is(err, e) }):
				return nil, fmt.Errorf("the addresses that the host sends from cannot be found out: %w", err)
			default:
				continue // no route
			}
			if a, ok := c.LocalAddr().(*net.UDPAddr); ok {
				from = append(from, a.AddrPort().Addr().Unmap())
			}
			_ = c.Close()
		}
		if a, ok := commonest(from); ok {
			as = append(as, a)
		}
	}
	return as, nil
}

// commonest returns what is in as most often; of several, the first.
func commonest(as []netip.Addr) (best netip.Addr, ok bool) {
	n := make(map[netip.Addr]int)
	for _, a := range as {
		n[a]++
	}
	for _, a := range as {
		if n[a] > n[best] {
			best = a
		}
	}
	return best, best.IsValid()
}

// scarce is what a host may be short of, which says nothing of its routes.
var scarce = []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM}
