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
// nothing before it is used. One with connections takes a little memory while it has any, but the cost
// of a packet does not grow with their number. It does, over IPv4, with the number of Addrs and of
// addresses listened on one by one, with each of which a packet is compared: in place of thousands of
// listeners have one for all addresses (":80").
//
// Where nobody listens, TCP is answered with a reset and UDP with "port unreachable", from the address
// that was asked for. Echo requests are answered by Addrs and by the addresses of listeners; elsewhere
// in Local the answer is "host unreachable", since an answer would tell of a host that does not exist.
// What arrives for any other address is answered with "network unreachable", at a limited rate, and
// never forwarded. What a peer sends from an address of this node is dropped, unless the peer has the
// same prefix, which is then moving; so is word that a packet was too big, as the one path there is has
// a known MTU; and multicast.
//
// # Host
//
// Routes live in this stack alone, so encrypted packets can never be caught by them
// (datapath.UnderlaySeparate), and a firewall mark is needed only where the host's own rules ask for
// one. The device ends with Close, or with its process.
package netstack
