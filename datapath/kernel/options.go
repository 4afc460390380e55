package kernel

import (
	"log/slog"

	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/prefixes"
)

// DefaultInterface is the name of the device where Options has none.
const DefaultInterface = "warren0"

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
	// SourceLoopback puts addresses on the loopback interface, where they outlive the device's going
	// down, and the source address of a route on the route. It needs Linux 5.18.
	SourceLoopback Sources = Sources(hostnet.SourceLoopback)
)

// Options are the settings of a Kernel. The zero Options are good ones.
type Options struct {
	// Interface is the name of the device, of 1 to 15 bytes without a slash or white space. Default:
	// DefaultInterface. A link of that name which a mesh did not create is left alone.
	Interface string

	// Namespace is the path of the network namespace to work in, such as /run/netns/name; entering one
	// needs CAP_SYS_ADMIN. Default: the namespace of the thread that calls New.
	Namespace string

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

	// Logger is told what was found, created and removed. nil: nobody.
	Logger *slog.Logger
}

func (o Options) defaulted() Options {
	if o.Interface == "" {
		o.Interface = DefaultInterface
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

func (o Options) host() hostnet.Options {
	return hostnet.Options{
		Interface: o.Interface, Namespace: o.Namespace, Table: o.Table, Metric: o.Metric, Protocol: o.Protocol,
		Cover: o.Cover, Sources: hostnet.Sources(o.Sources), Logger: o.Logger,
	}
}
