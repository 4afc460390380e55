// Package sockets is the UDP sockets of wireguard-go: a conn.Bind.
//
// On Linux many packets go through one system call, and many packets to one peer through the kernel as one large one
// (UDP_SEGMENT and UDP_GRO, udp(7)). Where a path does not carry such packets, those to that peer go one by one for a
// while, and then joined again. Packets are answered from the address they came to. Nothing is allocated for a packet.
//
// Elsewhere it is plain sockets, one packet a call.
package sockets
