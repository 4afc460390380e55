// Package ula gives a node an address of its own without anybody handing one out: a unique local IPv6
// address (RFC 4193) that follows from the mesh's name and the node's ID.
//
//	fd | 40 bits of SHA-256 over "warren/ula" 0 mesh | 16 bits 0 | 64 bits of SHA-256 over "warren/ula" 0 mesh 0 node
//
// The first two make the /48 of the mesh, which all its nodes share. RFC 4193 has the 40 bits be random,
// so that two sites that are joined do not clash; here they are as good as random for every name, and
// the same on every node. Neither names nor IDs have a zero byte, so that no two pairs are hashed alike.
//
// Two nodes of one mesh have the same address with a chance of n²/2⁶⁵ for n nodes, which a mesh shows as
// a prefix conflict.
package ula

import (
	"crypto/sha256"
	"net/netip"
)

const domain = "warren/ula\x00"

// Prefix returns the /48 of a mesh.
func Prefix(mesh string) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16(global(mesh)), 48)
}

// Addr returns the address of a node.
func Addr(mesh, node string) netip.Addr {
	a := global(mesh)
	h := sha256.Sum256([]byte(domain + mesh + "\x00" + node))
	copy(a[8:], h[:])
	return netip.AddrFrom16(a)
}

func global(mesh string) (a [16]byte) {
	h := sha256.Sum256([]byte(domain + mesh))
	a[0] = 0xfd // fc00::/7 with the bit that says "locally assigned", RFC 4193 section 3.1
	copy(a[1:6], h[:])
	return a
}
