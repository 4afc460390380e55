// Package tunio reads and writes the packets of a Linux TUN interface for wireguard-go, many by one call: it is the part
// of a tun.Device that is about packets.
//
// Linux hands over TCP and UDP as it has them, in packets of up to 64 KiB, which are taken apart into wireguard-go's
// buffers, and takes back what arrived together as one, from where it lies in these buffers.
// It needs no memory for a packet.
package tunio
