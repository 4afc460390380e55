package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/examples/agent/internal/config"
)

// carrier carries the mesh's packets, and reaches the mesh for this process. Of a datapath on which the
// whole host is in the mesh, the latter is the host's own.
type carrier interface {
	datapath.Datapath
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

// carriers are how the datapaths of config.Datapaths are made.
var carriers = map[string]func(config.Config, inside, *slog.Logger) (carrier, error){
	"kernel": openKernel,
	"netstack": func(_ config.Config, asks inside, log *slog.Logger) (carrier, error) {
		return netstack.New(netstack.Options{Resolve: asks.lookup, Logger: log})
	},
}

func openCarrier(c config.Config, asks inside, log *slog.Logger) (carrier, error) {
	open, ok := carriers[c.Datapath]
	if !ok {
		return nil, fmt.Errorf("there is no datapath %q", c.Datapath)
	}
	d, err := open(c, asks, log)
	if err != nil {
		return nil, fmt.Errorf("datapath %s: %w", c.Datapath, err)
	}
	return d, nil
}
