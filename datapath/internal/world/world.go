// Package world has addresses by which a host finds out which of its ways leads to the rest of the world.
package world

import "net/netip"

// Addrs are addresses all over the Internet, no two in one prefix that is narrower than the broad ones: where they go,
// the world does. Nothing is sent there. Those for documentation (RFC 5737, RFC 3849) would not do: many a host drops them.
var Addrs = []netip.Addr{
	netip.AddrFrom4([4]byte{12, 0, 0, 1}), netip.AddrFrom4([4]byte{24, 0, 0, 1}), netip.AddrFrom4([4]byte{41, 0, 0, 1}), netip.AddrFrom4([4]byte{58, 0, 0, 1}),
	netip.AddrFrom4([4]byte{133, 0, 0, 1}), netip.AddrFrom4([4]byte{151, 0, 0, 1}), netip.AddrFrom4([4]byte{177, 0, 0, 1}), netip.AddrFrom4([4]byte{193, 0, 0, 1}),
	netip.AddrFrom16([16]byte{0x20, 0x01, 0x48, 0x60, 15: 1}), netip.AddrFrom16([16]byte{0x24, 0x00, 0xcb, 0x00, 15: 1}), netip.AddrFrom16([16]byte{0x26, 0x07, 0xf8, 0xb0, 15: 1}),
	netip.AddrFrom16([16]byte{0x28, 0x00, 0x03, 0xf0, 15: 1}), netip.AddrFrom16([16]byte{0x2a, 0x00, 0x14, 0x50, 15: 1}), netip.AddrFrom16([16]byte{0x2c, 0x0f, 0xfb, 0x50, 15: 1}),
}
