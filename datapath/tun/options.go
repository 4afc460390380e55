package tun

import (
	"fmt"
	"log/slog"

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
	MaxMTU = 65535 - 20 - 8 - 32
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

// Options are the settings of a TUN. The zero Options are good ones.
type Options struct {
	// Interface is the name of the device, of 1 to 15 bytes without a slash or white space. Default:
	// DefaultInterface. A link of that name which this process did not create is left alone.
	Interface string

	// Namespace is the path of the network namespace of the interface, such as /run/netns/name; entering
	// one needs CAP_SYS_ADMIN. Default: the namespace of the thread that calls New.
	Namespace string

	// UnderlayNamespace is the path of the network namespace of the UDP sockets. Default: that of the
	// interface.
	UnderlayNamespace string

	// Table is the routing table of the routes. Default: the main table, 254. Packets are looked up in
	// another one only by rules of the administrator's.
	Table int

	// Metric is that of the routes, from 1 on. Default: 50.
	Metric int

	// Protocol marks what is this mesh's, 5 to 255. Default: 87. Two meshes in one namespace that use
	// SourceLoopback need two.
	Protocol int

	// Cover are prefixes that are routed whole, as soon as one route inside them is wanted: many
	// prefixes then need one route. Default: none, each prefix has its own route.
	Cover prefixes.Set

	// Sources says where addresses are put. Default: SourceHint.
	Sources Sources

	// MTU is that of a device for which none was asked, MinMTU to MaxMTU. Default: what fits, with
	// WireGuard's 80 bytes over IPv6, into the packets of the underlay.
	MTU int

	// NoOffload has packets handed to Linux, and taken from it, one by one, on a host whose Linux is known to do
	// wrong with those that are handed over together; that costs throughput. Default: together, until Linux
	// refuses some, which costs none of them.
	NoOffload bool

	// Socket is the folder of the socket by which other programs see and change the device. It is called
	// <interface>.sock and is for its owner alone. Default: DefaultSocket, where a socket can be made; a folder
	// that is named must take one. NoSocket has none.
	Socket string

	// Bind makes the UDP sockets of a new device. Default: conn.NewDefaultBind. It is called once for each
	// device, and what it returns is given to no other; it is opened in UnderlayNamespace.
	Bind func() conn.Bind

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
		if err := checkMTU(o.MTU); err != nil {
			return o, err
		}
	}
	return o, hostnet.CheckInterface(o.Interface) // before it names a socket
}

func checkMTU(mtu int) error {
	if mtu < MinMTU || mtu > MaxMTU {
		return fmt.Errorf("MTU %d: outside %d, which IPv6 needs, to %d", mtu, MinMTU, MaxMTU)
	}
	return nil
}

// host are the settings of the side of the interface.
func (o Options) host() hostnet.Options {
	return hostnet.Options{
		Interface: o.Interface, Namespace: o.Namespace, Table: o.Table, Metric: o.Metric, Protocol: o.Protocol,
		Cover: o.Cover, Sources: hostnet.Sources(o.Sources), Logger: o.Logger,
	}
}
