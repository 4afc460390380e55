package prefixes

import (
	"net"
	"net/netip"
)

// IPNet returns the canonical form of p for the interfaces that still want a
// [net.IPNet]: IP and Mask are 4 bytes each for IPv4, 16 for IPv6. A mask of
// another size than the address, or none, is read as 0.0.0.0/0 by some of them,
// so a prefix that [Canonical] refuses is an error, never an empty IPNet.
func IPNet(p netip.Prefix) (net.IPNet, error) {
	c, _, err := Canonical(p)
	if err != nil {
		return net.IPNet{}, err
	}
	return net.IPNet{
		IP:   c.Addr().AsSlice(),
		Mask: net.CIDRMask(c.Bits(), c.Addr().BitLen()),
	}, nil
}

// FromIPNet returns n in canonical form. It refuses, with an *[Error], an
// address that is not 4 or 16 bytes, a mask that is missing, has holes, or is
// not of the size of the address, and what [Canonical] refuses. An IPv4 address
// in 16 bytes may have a mask of 4 bytes or of 16, as package net allows.
func FromIPNet(n net.IPNet) (netip.Prefix, error) {
	refuse := func(reason string) (netip.Prefix, error) {
		mask := n.Mask.String()
		if len(n.Mask) == 0 {
			mask = "?"
		}
		return netip.Prefix{}, &Error{Value: n.IP.String() + "/" + mask, Reason: reason}
	}
	a, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return refuse("has no address")
	}
	ones, size := n.Mask.Size()
	switch {
	case len(n.Mask) == 0:
		return refuse("has no mask")
	case size == 0:
		return refuse("has a mask with holes")
	case size == 32 && a.Is4In6():
		a = a.Unmap()
	case size != a.BitLen():
		return refuse("has a mask of another size than the address")
	}
	p := netip.PrefixFrom(a, ones)
	c, _, reason := canonical(p)
	if reason != "" {
		return refuse(reason)
	}
	return c, nil
}
