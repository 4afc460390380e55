package auto

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/datapath/tun"
	"github.com/warren-mesh/warren/prefixes"
)

// The datapaths there are, best first.
const (
	Kernel   = "kernel"
	TUN      = "tun"
	Netstack = "netstack"
)

// Sources says where the addresses of this node are put: kernel.Sources and tun.Sources.
type Sources uint8

const (
	SourceHint     = Sources(kernel.SourceHint)
	SourceDevice   = Sources(kernel.SourceDevice)
	SourceLoopback = Sources(kernel.SourceLoopback)
)

// Routing says how packets of this host come to the routes into the device: kernel.Routing and tun.Routing.
type Routing uint8

const (
	RoutingMain   = Routing(kernel.RoutingMain)
	RoutingPolicy = Routing(kernel.RoutingPolicy)
)

// Options are the settings of an Auto. The zero Options are good ones. Fields of the same name mean what they mean
// to the datapath that is chosen; what kernel and tun share has the same defaults with both.
type Options struct {
	// Try are the datapaths to try, in this order. Default: all, best first.
	Try []string

	// What an interface of the host is like. netstack has none, and passes over them.

	Interface string       // its name; kernel.DefaultInterface
	Table     int          // routing table of the routes
	Priority  int          // of the rules of RoutingPolicy
	Mark      uint32       // of encrypted packets with RoutingPolicy
	Mask      uint32       // the bits of Mark that count
	Metric    int          // of the routes
	Protocol  int          // marks what is this mesh's
	Cover     prefixes.Set // prefixes that are routed whole
	Sources   Sources      // where addresses are put
	Socket    string       // folder of the socket that shows a tun to other programs, which see the kernel's device anyway

	SocketGroup string // group whose members may use that socket
	NoOffload   bool   // a tun gives Linux its packets one by one

	// What only an interface of the host can do, so that netstack is not chosen.

	Namespace string       // path of the network namespace to work in
	Routing   Routing      // how packets come to the routes
	Guard     prefixes.Set // prefixes to which packets leave by way of the device only
	SNAT      prefixes.Set // networks into which packets get this host's address as source
	Forward   bool         // the host forwards packets

	// UnderlayNamespace is the path of the network namespace of the UDP sockets. Only tun can do that.
	UnderlayNamespace string

	// Bind makes the UDP sockets of a new device. The kernel makes its own, and is not chosen.
	Bind func() conn.Bind

	// MTU is that of a device for which none was asked, MinMTU to MaxMTU.
	MTU int

	// Resolve returns the addresses of a name that is dialled through netstack.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)

	// Logger is told what was chosen and why, and all that the datapath has to say. nil: nobody.
	Logger *slog.Logger
}

// Bounds of a device's MTU in bytes, which are the same for all.
const (
	MinMTU = netstack.MinMTU
	MaxMTU = netstack.MaxMTU
)

// try returns the names of what is to be tried.
func (o Options) try() ([]string, error) {
	all := []string{Kernel, TUN, Netstack}
	if len(o.Try) == 0 {
		return all, nil
	}
	for i, name := range o.Try {
		switch {
		case !slices.Contains(all, name):
			return nil, fmt.Errorf("Options.Try: %q is no datapath; there are %s", name, strings.Join(all, ", "))
		case slices.Contains(o.Try[:i], name):
			return nil, fmt.Errorf("Options.Try: %s is there twice", name)
		}
	}
	return o.Try, nil
}

// check reports what is wrong with o whichever datapath it is for: what one of them would refuse is not to be
// hidden by another.
func (o Options) check() error {
	if o.MTU != 0 {
		if err := hostnet.CheckMTU(o.MTU); err != nil {
			return err
		}
	}
	return nil
}

func (o Options) kernel() kernel.Options {
	return kernel.Options{
		Interface: o.Interface,
		Namespace: o.Namespace,
		Routing:   kernel.Routing(o.Routing),
		Table:     o.Table,
		Priority:  o.Priority,
		Mark:      o.Mark,
		Mask:      o.Mask,
		Guard:     o.Guard,
		Metric:    o.Metric,
		Protocol:  o.Protocol,
		Cover:     o.Cover,
		Sources:   kernel.Sources(o.Sources),
		MTU:       o.MTU,
		SNAT:      o.SNAT,
		Forward:   o.Forward,
		Logger:    o.Logger,
	}
}

func (o Options) tun() tun.Options {
	return tun.Options{
		Interface:         o.Interface,
		Namespace:         o.Namespace,
		UnderlayNamespace: o.UnderlayNamespace,
		Routing:           tun.Routing(o.Routing),
		Table:             o.Table,
		Priority:          o.Priority,
		Mark:              o.Mark,
		Mask:              o.Mask,
		Guard:             o.Guard,
		Metric:            o.Metric,
		Protocol:          o.Protocol,
		Cover:             o.Cover,
		Sources:           tun.Sources(o.Sources),
		MTU:               o.MTU,
		NoOffload:         o.NoOffload,
		Socket:            o.Socket,
		SocketGroup:       o.SocketGroup,
		Bind:              o.Bind,
		SNAT:              o.SNAT,
		Forward:           o.Forward,
		Logger:            o.Logger,
	}
}

func (o Options) netstack() netstack.Options {
	return netstack.Options{
		MTU:     o.MTU,
		Bind:    o.Bind,
		Resolve: o.Resolve,
		Logger:  o.Logger,
	}
}

// lack is an option that a datapath cannot do justice to.
type lack struct {
	option string
	asked  bool
	why    string
}

func (o Options) kernelLacks() []lack {
	return []lack{
		{"UnderlayNamespace", o.UnderlayNamespace != "", "its sockets are where its device is"},
		{"Bind", o.Bind != nil, "it makes its sockets itself"},
	}
}

func (o Options) netstackLacks() []lack {
	const alone = "nothing of the mesh goes by way of the host"
	return []lack{
		{"Namespace", o.Namespace != "", alone},
		{"UnderlayNamespace", o.UnderlayNamespace != "", "its sockets are where this program is"},
		{"Routing", o.Routing != RoutingMain, alone},
		{"Guard", !o.Guard.IsEmpty(), alone},
		{"SNAT", !o.SNAT.IsEmpty(), alone},
		{"Forward", o.Forward, alone},
	}
}

// unfit reports what is asked for and lacking.
func unfit(lacks []lack) error {
	var errs []error
	for _, l := range lacks {
		if l.asked {
			errs = append(errs, fmt.Errorf("%w: it cannot do what Options.%s asks: %s", errors.ErrUnsupported, l.option, l.why))
		}
	}
	return errors.Join(errs...)
}
