// Package prefixes holds sets of IP prefixes, and the table in which the parts
// of a node say which prefixes they can reach.
//
// A prefix reaches a node's device, its routing table and its peers' records
// by different ways, and each of these has its own idea of host bits, of
// IPv4-mapped addresses and of order. WireGuard masks 10.78.0.1/24, the IPv4
// route interface of Linux refuses it, and the IPv6 one accepts its like. A
// [Set] settles all that once, at the door: what is inside is canonical, so two
// sets that say the same are equal under ==, print the same, and are no reason
// to touch a device.
//
// Canonical means: host bits cut (RFC 4632 section 3.1), IPv4-mapped IPv6
// (RFC 4291 section 2.5.5.2) turned into IPv4, no zone (a prefix has none; an
// address with one is refused where it is parsed), written as RFC 5952 says.
// The canonical order is IPv4 before IPv6, then by address, then shorter before
// longer, so a prefix stands right before those inside it. Nothing is merged:
// 10.0.0.0/9 and 10.128.0.0/9 stay two elements, since whoever announced them
// may withdraw one.
//
// The algebra ([Set.Union], [Set.Minus], [Set.Intersect], [Set.Has]) is by
// element. What is said of addresses ([Set.Overlaps], [Set.Covers],
// [Set.HasAddr], [Set.Lookup]) is by coverage.
//
// A [Table] collects announcements from named sources, and hands out their
// union with a channel that closes when the union is out of date.
//
// No prefix is refused for its meaning. Whether a default route is welcome is
// for the mesh to decide, from whoever sent it.
package prefixes
