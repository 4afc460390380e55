package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/auto"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/namespace"
	"github.com/warren-mesh/warren/prefixes"
)

// carrier carries the mesh's packets, and reaches the mesh for this process.
type carrier interface {
	datapath.Datapath
	reach
}

// reach reaches the mesh for this process. Of a datapath on which the whole host is in the mesh, it is the host's
// own network stack: wholeHost.
type reach interface {
	DialContext(ctx context.Context, network, address string) (net.Conn, error)
	Listen(network, address string) (net.Listener, error)
	ListenPacket(network, address string) (net.PacketConn, error)
	Ping(ctx context.Context, to netip.Addr) (time.Duration, error)
}

// inside is what a carrier asks of the mesh.
type inside interface {
	// lookup returns the addresses of a node, or the literal address that host is.
	lookup(ctx context.Context, host string) ([]netip.Addr, error)
	// locate returns whether an address is this node's own. That no node has it is an error.
	locate(ctx context.Context, a netip.Addr) (own bool, err error)
}

// joined is a datapath, and how the mesh is reached by it.
type joined struct {
	*auto.Auto
	reach
}

// openCarrier opens the datapath that c asks for, the interface of which is in a namespace, and returns which one
// it is.
func openCarrier(c config.Config, in *namespace.Namespace, asks inside, log *slog.Logger) (_ carrier, chosen string, err error) {
	if c.Datapath == auto.Netstack {
		n, err := netstack.New(netstack.Options{Resolve: asks.lookup, Logger: log})
		if err != nil {
			return nil, "", fmt.Errorf("datapath %s: %w", c.Datapath, err)
		}
		return n, c.Datapath, nil
	}
	o := options(c, deviceOf(c))
	o.Resolve, o.Logger = asks.lookup, log
	needs := needsInterface(c)
	switch {
	case c.Datapath != "auto":
		o.Try = []string{c.Datapath}
	case needs != "":
		o.Try = []string{auto.Kernel, auto.TUN}
	}
	d, err := auto.New(o)
	if err != nil {
		return nil, "", fmt.Errorf("datapath %s: %w", c.Datapath, explain(c.Datapath, needs, err))
	}
	if n := d.Netstack(); n != nil {
		return joined{d, n}, d.Chosen(), nil
	}
	return joined{d, &wholeHost{c.Interface, in, asks}}, d.Chosen(), nil
}

// options are those of the datapaths that have the interface d of the host.
func options(c config.Config, d device) auto.Options {
	sources := map[string]auto.Sources{"hint": auto.SourceHint, "device": auto.SourceDevice, "loopback": auto.SourceLoopback}
	o := auto.Options{
		Interface: d.Name, Namespace: d.Namespace, Protocol: d.Protocol, UnderlayNamespace: c.UnderlayNetNS,
		Table: c.Table, Priority: c.Priority, Mark: c.Mark, Mask: c.Mask, Guard: prefixes.Must(c.Guard...), Metric: c.Metric,
		Sources: sources[c.Source], SNAT: prefixes.Must(c.SNAT...), Forward: c.Forward == "on",
	}
	if c.Policy() {
		o.Routing = auto.RoutingPolicy
	}
	return o
}

// needsInterface names a setting that netstack cannot do justice to; "" is none.
func needsInterface(c config.Config) string {
	asked := ""
	for _, s := range []struct {
		name string
		is   bool
	}{
		{"netns", c.NetNS != ""}, {"underlay-netns", c.UnderlayNetNS != ""}, {"routing", c.Policy()},
		{"snat", len(c.SNAT) > 0}, {"forward", c.Forward == "on"},
	} {
		if s.is && asked == "" {
			asked = fmt.Sprintf("%s (%s)", s.name, c.Origin(s.name))
		}
	}
	return asked
}

const (
	capNetAdmin    = "CAP_NET_ADMIN"
	giveCapability = "run it as root, by a systemd unit with AmbientCapabilities=" + capNetAdmin + ", or after setcap cap_net_admin=ep on its file"
)

// explain adds to why no datapath works what else can be done.
func explain(asked, needs string, err error) error {
	if of, ok := errors.Unwrap(err).(interface{ Unwrap() []error }); ok && len(of.Unwrap()) == 1 {
		err = of.Unwrap()[0] // of the one that was asked for
	}
	text := err.Error()
	if strings.Contains(text, "needs "+capNetAdmin) {
		err = fmt.Errorf("%w; %s", err, giveCapability)
	}
	switch {
	case asked == "auto" && needs != "":
		return fmt.Errorf("%w; and netstack, which needs nothing of the host, cannot do what %s asks for", err, needs)
	case asked == "auto":
		return err
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w; or have --datapath netstack, which needs no privilege", err)
	}
	return fmt.Errorf("%w; or have --datapath auto, which takes the best that works, or --datapath netstack, which needs nothing of the host", err)
}
