// Package offload takes large IP packets apart into what fits an MTU, and makes large ones of those that follow each
// other: what network cards do as segmentation and receive offload, and what Linux leaves to whoever is at the other
// end of a TUN interface with IFF_VNET_HDR. It is pure: it reads and writes nothing.
//
// A [Splitter] does what Linux's GSO does (Documentation/networking/segmentation-offloads.rst), a [Merger] what its GRO
// does: what was merged and is split again is what it was, byte for byte. Both know TCP and UDP over IPv4 and IPv6,
// and describe a large packet by a [Header].
package offload
