package kernel

import (
	"fmt"
	"log/slog"

	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/prefixes"
)

// DefaultInterface is the name of the device where Options has none.
const DefaultInterface = "warren0"

// ErrInUse is wrapped by the errors of New and Cleanup where another mesh has the device.
var ErrInUse = hostnet.ErrInUse

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
	// SourceLoopback puts addresses on the loopback interface, where they outlive the device's going
	// down, and the source address of a route on the route. It needs Linux 5.18.
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

// Options are the settings of a Kernel. The zero Options are good ones.
type Options struct {
	// Interface is the name of the device, of 1 to 15 bytes without a slash or white space. Default:
	// DefaultInterface. A link of that name which a mesh did not create is left alone.
	Interface string

	// Namespace is the path of the network namespace to work in, such as /run/netns/name; entering one
	// needs CAP_SYS_ADMIN. Default: the namespace of the thread that calls New.
	Namespace string

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

	// MTU is that of a device for which none was asked, MinMTU to MaxMTU; one that is adopted gets it too. Default:
	// what fits, with WireGuard's 80 bytes over IPv6 (60 where the host has IPv4 only), into the packets of the
	// underlay, as that changes; MinMTU at least.
	MTU int

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

	// Logger is told what was found, created and removed. nil: nobody.
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
	return o, nil
}

func (o Options) host() hostnet.Options {
	return hostnet.Options{
		Interface: o.Interface, Namespace: o.Namespace, Policy: o.Routing == RoutingPolicy, Table: o.Table, Priority: o.Priority,
		Mark: o.Mark, Mask: o.Mask, Guard: o.Guard, Metric: o.Metric, Protocol: o.Protocol,
		Cover: o.Cover, Sources: hostnet.Sources(o.Sources), SNAT: o.SNAT, Forward: o.Forward, Logger: o.Logger,
	}
}
