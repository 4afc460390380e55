// Package netstack is a WireGuard device that needs no privilege: wireguard-go with a network stack
// of its own (gVisor) in the same process. It is a datapath.Datapath, and the way to reach what the
// mesh reaches: DialContext, Listen, ListenPacket and Ping.
//
//	n, err := netstack.New(netstack.Options{})
//	// the mesh, or datapath.Sync, gives n a key, addresses, routes and peers
//	client := http.Client{Transport: &http.Transport{DialContext: n.DialContext}}
//
// # What goes where
//
// A packet this node sends goes by the longest prefix over Routes, Local and Addrs: a route leads to
// the peer that has the prefix, Local and Addrs lead back to this node. Where a route and Local have
// the same prefix the route wins, while packets that arrive for it are still accepted: so a prefix
// wanders from one node to another without a gap. One of Addrs is this node, whatever is routed.
// What nobody has is refused at once with "network is unreachable".
//
// Of what arrives, all of Addrs and Local is accepted, however large the prefixes: an address costs
// nothing before it is used. One with connections takes a little memory as long as it has any, but
// no packet is the slower for it. Each of Addrs, and each address listened on by itself, has IPv4 packets compared
// with it one after the other: thousands are better served by listening on all (":80"). Where nobody listens, TCP is answered with a reset and UDP with "port unreachable", from the address that
// was asked for. Echo requests are answered by Addrs and by the addresses of listeners; elsewhere in
// Local the answer is "host unreachable", since an answer would tell of a host that does not exist.
// What arrives for any other address is answered with "network unreachable", at a limited rate, and
// never forwarded. Multicast is dropped.
//
// # Host
//
// Routes live in this stack alone, so encrypted packets can never be caught by them
// (datapath.UnderlaySeparate), and a firewall mark is needed only where the host's own rules ask for
// one. The device ends with Close, or with its process.
package netstack
