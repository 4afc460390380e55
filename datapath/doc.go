// Package datapath says what a WireGuard device is to Warren, and how it gets from what it is to what
// it should be.
//
// A [State] holds everything: device, addresses, routes, peers with their allowed IPs. [Plan] compares
// two of them and returns the ops that lead from one to the other, a function of its arguments alone. A
// [Datapath] reads its State and applies ops. Whoever wants a State therefore does the same at the
// first start, after a restart, after a change, and after someone else changed the device:
//
//	have, err := dp.Read(ctx)
//	err = dp.Apply(ctx, datapath.Plan(want, have)...)
//
// which is what [Sync] does.
//
// # No packet lost
//
// WireGuard gives a prefix to the peer it was put on last, in one step. So Plan moves a prefix by
// putting it on its new peer, and takes away only what no peer wants: there is no instant without an
// owner, whatever fails. All the peers, or all of a peer's prefixes, are never replaced as a whole:
// measured at 1,300 packets a second on wireguard-go, replacing peers lost 8.3 % of packets, replacing
// allowed IPs 1.0 %, and changing single prefixes none.
//
// # Implementations
//
// Package memory is the reference, netstack needs no privilege, tun and kernel have the whole host in the
// mesh. Package datapathtest has the suite that each of them passes.
package datapath
