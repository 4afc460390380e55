// Package tun is the datapath of wireguard-go on a network interface of Linux: WireGuard runs in this process,
// while addresses, routes and sockets are the host's. It is for hosts whose kernel has no WireGuard, or
// may not load it.
//
// It needs /dev/net/tun and CAP_NET_ADMIN, and CAP_SYS_ADMIN where a namespace is named. [New] says what is
// missing, and changes nothing; elsewhere than on Linux it returns errors.ErrUnsupported.
//
// # How long the device lives
//
// The interface ends with its process, whichever way that ends, and with Close: Linux takes it away with
// the addresses on it, and with the routes into it. Nothing is left that leads to nobody; packets for the
// mesh go by the host's other routes until the device is back, but for what Options.Guard has. A process that is started again makes it anew,
// from what the mesh wants. What SourceLoopback put on the loopback interface stays, as it is meant to, and is
// taken over by the next process; RemoveDevice and [Cleanup] remove it.
//
// Peers see a restart as silence, and shake hands again at once.
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
// # Namespaces
//
// The interface may be in one network namespace and the UDP sockets in another. Encrypted packets then
// can never follow the routes into the interface (datapath.UnderlaySeparate), whatever those are: the host's
// underlay needs no address or route in the namespace of those that use the mesh.
//
// # Who else touches it
//
// The socket in Options.Socket speaks WireGuard's configuration protocol
// (https://www.wireguard.com/xplatform/), so that wg(8) and wgctrl show the device. What they change is told
// on Changed at once, as is what others do to the interface, its addresses, routes and rules. An interface that
// was renamed or taken down is brought back by the next Read; one that was deleted is no device any more, and
// the next SetDevice makes it anew.
package tun
