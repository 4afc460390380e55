package tun

import (
	"fmt"
	"log/slog"
	"os/user"
	"strconv"

	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/prefixes"
)

// DefaultInterface is the name of the device where Options has none.
const DefaultInterface = "warren0"

// Where Options.Socket puts the socket.
const (
	// DefaultSocket is the folder where wg(8) and wgctrl look for devices.
	DefaultSocket = "/var/run/wireguard"
	// NoSocket is no folder: the device has no socket.
	NoSocket = "-"
)

// Bounds of a device's MTU. The lower one is what IPv6 asks of any link (RFC 8200 section 5): Linux takes
// all IPv6 addresses from one with less. The upper one is what fits, with WireGuard's 32 bytes, into a
// UDP datagram over IPv4.
const (
	MinMTU = hostnet.MinMTU
	MaxMTU = hostnet.MaxMTU
)

// Sources says where the addresses of this node are put, and how packets of this host into the mesh come
// by them.
type Sources uint8

const (
	// SourceHint puts addresses on the device, and the source address of a route on the route.
	SourceHint Sources = Sources(hostnet.SourceHint)
	// SourceDevice puts addresses on the device and leaves the choice among them to the kernel: the first
	// one for IPv4, RFC 6724 for IPv6.
	SourceDevice Sources = Sources(hostnet.SourceDevice)
	// SourceLoopback puts addresses on the loopback interface, where they outlive the device, and the source
	// address of a route on the route. It needs Linux 5.18.
	SourceLoopback Sources = Sources(hostnet.SourceLoopback)
)

// Routing says how packets of this host come to the routes into the device.
type Routing uint8

const (
	// RoutingMain has encrypted packets looked up like all others, so that no peer's endpoint may be inside
	// of what is routed into the device. Where Options.Table is another one than the main table, packets are looked
	// up there only by rules of the administrator's.
	RoutingMain Routing = iota
	// RoutingPolicy has a table of its own, in which rules have all packets looked up but the encrypted
	// ones, which are marked: prefixes may contain the peers' endpoints, and a default route may lead into
	// the device. What the main table knows better than by a default route goes on going there.
	RoutingPolicy
)

// Options are the settings of a TUN. The zero Options are good ones.
type Options struct {
	// Interface is the name of the device, of 1 to 15 bytes without a slash or white space. Default:
	// DefaultInterface. A link of that name which this process did not create is left alone.
	Interface string

	// Namespace is the path of the network namespace of the interface, such as /run/netns/name; entering
	// one needs CAP_SYS_ADMIN. Default: the namespace of the thread that calls New.
	Namespace string

	// UnderlayNamespace is the path of the network namespace of the UDP sockets. Default: that of the
	// interface. Another one counts as an underlay of its own, out of reach of the routes into the device. Where it
	// has no other way out than through the namespace of the interface, that is not so, and cannot be known here:
	// accept no prefix then with a peer's endpoint inside, or make a way out that the routes do not touch.
	UnderlayNamespace string

	// Routing says how packets come to the routes. Default: RoutingMain.
	Routing Routing

	// Table is the routing table of the routes. Default: the main table, 254, or 8787 with RoutingPolicy.
	// Another one than the main table must not hold routes of anybody else.
	Table int

	// Priority is that of the first of RoutingPolicy's three rules, 1 to 32763; the others have the next two numbers.
	// Default: 32500.
	Priority int

	// Mark is the firewall mark of encrypted packets, where none is asked for. Mask are the bits of it that count, with
	// RoutingPolicy. All meshes of a host do well to have the same, those of the main table too. Default: 0x50 with mask
	// 0xf0, or all bits of a Mark that is given.
	Mark, Mask uint32

	// Guard are prefixes to which packets of this host may leave by way of the device only, with
	// RoutingPolicy: they are unreachable while it, or a route, is missing, and after the end of this process too.
	// It fails closed, until RemoveDevice or Cleanup. Default: none, it fails open.
	Guard prefixes.Set

	// Metric is that of the routes, from 1 on. Default: 50.
	Metric int

	// Protocol marks what is this mesh's, 5 to 255. Default: 87. Two meshes in one namespace that use
	// SourceLoopback or RoutingPolicy need two.
	Protocol int

	// Cover are prefixes that are routed whole, as soon as one route inside them is wanted: many
	// prefixes then need one route. Default: none, each prefix has its own route.
	Cover prefixes.Set

	// Sources says where addresses are put. Default: SourceHint.
	Sources Sources

	// MTU is that of a device for which none was asked, MinMTU to MaxMTU. Default: what fits, with
	// WireGuard's 80 bytes over IPv6 (60 where the host has IPv4 only), into the packets of the underlay, as
	// that changes; MinMTU at least.
	MTU int

	// NoOffload has packets handed to Linux, and taken from it, one by one, on a host whose Linux is known to do
	// wrong with those that are handed over together; that costs throughput. Default: together, until Linux
	// refuses some, which costs none of them.
	NoOffload bool

	// Socket is the folder of the socket by which other programs see and change the device. It is called
	// <interface>.sock and is for its owner alone, and SocketGroup. Default: DefaultSocket, where a socket can
	// be made; a folder that is named must take one. NoSocket has none.
	Socket string

	// SocketGroup is the name or number of a group whose members may use the socket, too. They may do to the
	// device what its owner may, and read its private key. Default: nobody but the owner, and root.
	SocketGroup string

	// Bind makes the UDP sockets of a new device. Default: sockets of Warren's own. It is called once for each
	// device, and what it returns is given to no other; it is opened in UnderlayNamespace.
	Bind func() conn.Bind

	// SNAT are networks beside the mesh that this node announces. Packets that come out of the mesh and go
	// there get this host's address as source, so that these networks need no route back. Default: none.
	SNAT prefixes.Set

	// Forward has the host forward packets: net.ipv4.ip_forward and net.ipv6.conf.all.forwarding are turned on
	// where they are off, and off again by RemoveDevice and Cleanup, unless another mesh of the host needs them. What
	// Linux changes along with them, the forwarding of single interfaces and net.ipv4.conf.all.accept_redirects, is
	// put back by the process that turned them on; another one leaves no interface forwarding. Who turns them off by
	// hand, and on again for a purpose of his own, while no mesh runs, finds them turned off some day. Default: they
	// are left as they are, and a problem is reported where an announced network needs them.
	Forward bool

	// Logger is told what was found, created and removed, and what wireguard-go logs. nil: nobody.
	Logger *slog.Logger
}

// defaulted returns o with its defaults, or what is wrong with what hostnet does not check.
func (o Options) defaulted() (Options, error) {
	if o.Interface == "" {
		o.Interface = DefaultInterface
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.MTU != 0 {
		if err := hostnet.CheckMTU(o.MTU); err != nil {
			return o, err
		}
	}
	if o.Routing > RoutingPolicy {
		return o, fmt.Errorf("routing %d: unknown", o.Routing)
	}
	if _, err := groupID(o.SocketGroup); err != nil {
		return o, err
	}
	return o, hostnet.CheckInterface(o.Interface) // before it names a socket
}

// host are the settings of the side of the interface.
func (o Options) host() hostnet.Options {
	return hostnet.Options{
		Interface: o.Interface, Namespace: o.Namespace, Policy: o.Routing == RoutingPolicy, Table: o.Table, Priority: o.Priority,
		Mark: o.Mark, Mask: o.Mask, Guard: o.Guard, Metric: o.Metric, Protocol: o.Protocol,
		Cover: o.Cover, Sources: hostnet.Sources(o.Sources), SNAT: o.SNAT, Forward: o.Forward, Logger: o.Logger,
	}
}

// groupID returns the number of a group; -1 for "".
func groupID(group string) (int, error) {
	if group == "" {
		return -1, nil
	}
	text := group
	if g, err := user.LookupGroup(group); err == nil {
		text = g.Gid
	}
	id, err := strconv.ParseUint(text, 10, 31)
	if err != nil {
		return -1, fmt.Errorf("group %q of the socket: this host has none of that name; make it (groupadd), or give a number", group)
	}
	return int(id), nil
}
