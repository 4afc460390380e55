// Package kernel is the datapath of Linux's own WireGuard, which encrypts and forwards without this
// process: a device goes on when the process that made it ends, and another one adopts it.
//
// It needs Linux 5.6 with its wireguard module and CAP_NET_ADMIN, and nothing else of root's. [New] says
// what is missing, and changes nothing; elsewhere than on Linux it returns errors.ErrUnsupported.
//
// # What is said to the device
//
// Messages of its own, not those of wgctrl: a peer is put, never replaced, and so are its prefixes;
// many peers share a message, and one peer with many prefixes has several. A prefix is taken away
// without touching the others of its peer: Linux 6.16 can do that; before, the prefix is put on a peer that
// nobody is (see [Kernel.RemovesPrefixes]). Which of the two is found out on a device made
// for that and removed again. What was said is read back, and what the device has otherwise is an error.
//
// A list that changed while Linux wrote it is read again: no decision rests on half of one.
//
// # Routing
//
// With RoutingMain, the routes are in the main table, and what has an endpoint of a peer inside is refused by the
// mesh. With RoutingPolicy they are in one of their own, and encrypted packets are marked and never looked up there: a
// default route may lead into the device. Options.Guard then says what must not leave by another way. Rules and
// guards that other programs remove are put back within milliseconds, at most four at once and two a second from then on.
//
// Where the host forwards, TCP connections into the device and out of it get segments that fit, by a table of
// nftables. Forwarding itself is turned on by Options.Forward alone.
//
// # Who else touches it
//
// Changed reports what others do to links, addresses, routes and rules as it happens. Linux tells nobody
// of changes of WireGuard's own, so the device is read every second for them, or less often where that
// would take more than a twentieth of the time.
package kernel
