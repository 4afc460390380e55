// Package hostnet is the host's side of a datapath whose device is a network interface: the link and its
// owner, addresses, routes, rules, and what there is to see of the host around them.
//
// It speaks rtnetlink (rtnetlink(7)) on sockets opened once, in one network namespace, with strict
// checking. Reading changes nothing; what changes something states what shall be true afterwards, and may be
// repeated. It needs CAP_NET_ADMIN and, where a thread that calls is in another namespace, CAP_SYS_ADMIN.
//
// # Whose it is
//
//   - A link is ours if its alias says so: "warren:<interface>:<protocol>". Linux takes no alias for a link
//     that it is about to create, so a link is created under a name made from ours, and then gets alias
//     and name in one request: a link of our name without our alias is always somebody else's.
//   - A route is ours if it has our protocol number and leads into our link.
//   - An address on our link is ours, unless the kernel made it. One on the loopback interface is ours if
//     it has our number as address protocol (IFA_PROTO, Linux 5.18).
//   - A rule is ours if it has our protocol number and the form of ours: inverted, a mark and its mask, and nothing
//     else but a table that is not one of Linux's own, or the main one without its default routes; or one that does
//     nothing, and has the name of an interface and such a table. The latter says of which mesh the others are.
//   - An unreachable route is ours if it has our protocol number, and no such rule says that its table is another's.
//
// Everything else is left alone, and named where it is in the way. A route is created only where none of
// that prefix, metric and table exists (NLM_F_EXCL), never by replacing: the IPv6 side of Linux gives a
// replacement the place of a route of another interface. A deletion names prefix, table, metric, protocol
// and interface.
//
// # Policy routing
//
// With Options.Policy there are three rules a family, and routes in a table of our own:
//
//	32500  not fwmark 0x50/0xf0  lookup main suppress_prefixlength 0
//	32501  not fwmark 0x50/0xf0  lookup 8787
//	32502  iif warren0  nop
//
// Encrypted packets have the mark, and so no route of ours ever concerns them, be it a default route, or one to
// a prefix with all peers' endpoints inside. What the main table knows better than by a default route wins: a host
// does not lose the networks it is connected to. What Options.Guard names is unreachable in our table by the last of
// all metrics, so that it holds when the link is gone, or the process. Rules and guards that others remove make Ready
// false, and are put back at once. The third rule does nothing. It names whose the others are, so that another mesh, of
// the same protocol, takes them neither for its own nor for what is left when the link is gone.
//
// A mesh without Policy marks its encrypted packets too, so that they stay out of the table of one that has it.
//
// A lookup of an answer is made without the mark: where the reverse path filter of the underlay's link is strict,
// packets of peers that are reached by a default route are dropped if our table has a way to them. Problems
// says so.
//
// # What is around
//
// The host is connected to the networks of its addresses, and to those that the main table has on a link without a gateway
// by a route of the kernel, of router advertisements, of DHCP or of the administrator. Of others' routes, such as a
// routing daemon's, and of what leads into a tunnel, none counts. The underlay is where packets with the mark of the device
// go, to most of several addresses all over the Internet; peers may be reached by narrower ways, which Problems looks up.
//
// # What is remembered
//
// Routes are listed once, and again only after messages of the kernel that somebody else may have changed
// ours, or were lost: a change of one route costs the same among ten as among ten thousand. What is remembered
// is a hint. A route is taken to be there only when the kernel has just created or listed it, and Read lists
// everything.
//
// # What Linux does by itself
//
// With an address go the routes from it, and with the last IPv4 address of a link every IPv4 route into it. So
// before that of ours goes, the link gets the IPv4 dummy address 192.0.0.8/32 (RFC 7600) with scope host, which is
// chosen as nobody's source. It is none of the addresses that Read reports, and goes when there is another one.
// A link that goes down loses its IPv6 addresses and all routes; below an MTU of 1280 it loses IPv6. The
// routes of an IPv6 address itself come a moment after it. A lookup that meets an IPv6 route in the instant
// it is freed finds none.
//
// # Packets for others
//
// Where the host forwards, be it between some interfaces only, or Options.SNAT or Forward ask for it, there is a table
// of nftables, which package nft keeps: TCP connections that are forwarded get segments that fit the link. A host that
// forwards nothing has none, and is looked at once for what an earlier mesh left, without having it load the module.
//
// What keeps the table from being read is looked at again with every reading, and what Up could not do is left to Up
// again after a minute. Both are problems meanwhile, and not a reason to do without the link.
//
// Without Options.Forward no sysctl of the host is touched. On our own link the reverse path filter is set to loose where the host
// would have it strict: WireGuard has checked the source already, against the peer's allowed IPs. And our own link
// forwards IPv4 where net.ipv4.ip_forward is on.
package hostnet
