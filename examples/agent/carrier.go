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

type resolver func(ctx context.Context, host string) ([]netip.Addr, error)

// carriers are how the datapaths of config.Datapaths are made.
var carriers = map[string]func(config.Config, resolver, *slog.Logger) (carrier, error){
	"netstack": func(_ config.Config, names resolver, log *slog.Logger) (carrier, error) {
		return netstack.New(netstack.Options{Resolve: names, Logger: log})
	},
}

func openCarrier(c config.Config, names resolver, log *slog.Logger) (carrier, error) {
	open, ok := carriers[c.Datapath]
	if !ok {
		return nil, fmt.Errorf("there is no datapath %q", c.Datapath)
	}
	d, err := open(c, names, log)
	if err != nil {
		return nil, fmt.Errorf("datapath %s: %w", c.Datapath, err)
	}
	return d, nil
}
