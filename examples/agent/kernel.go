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

	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/examples/agent/internal/config"
)

// wholeHost is the kernel's datapath, with which the whole host is in the mesh: what reaches the mesh is the
// host's own network stack. It is kept to the mesh, as whoever asks this process need not be allowed to
// reach the rest.
type wholeHost struct {
	*kernel.Kernel
	device string
	asks   inside
}

func openKernel(c config.Config, asks inside, log *slog.Logger) (carrier, error) {
	k, err := kernel.New(kernelOptions(c, c.Interface, log))
	switch {
	case err == nil:
		return &wholeHost{k, c.Interface, asks}, nil
	case strings.Contains(err.Error(), capNetAdmin):
		return nil, fmt.Errorf("%w; %s, or have --datapath netstack, which needs no privilege", err, giveCapability)
	}
	return nil, fmt.Errorf("%w; or have --datapath netstack, which needs nothing of the host", err)
}

const (
	capNetAdmin    = "CAP_NET_ADMIN"
	giveCapability = "run it as root, by a systemd unit with AmbientCapabilities=" + capNetAdmin + ", or after setcap cap_net_admin=ep on its file"
)

func kernelOptions(c config.Config, device string, log *slog.Logger) kernel.Options {
	sources := map[string]kernel.Sources{"hint": kernel.SourceHint, "device": kernel.SourceDevice, "loopback": kernel.SourceLoopback}
	return kernel.Options{Interface: device, Table: c.Table, Metric: c.Metric, Sources: sources[c.Source], Logger: log}
}

// DialContext implements carrier. Packets to other nodes leave through the mesh's interface or not at all.
func (w *wholeHost) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	as, err := w.asks.lookup(ctx, host)
	if err != nil {
		return nil, err
	}
	var errs []error
	for i, a := range as {
		c, err := w.dial(ctx, network, a, port, len(as)-i)
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// dial connects to one of several addresses that are left, for its share of the time.
func (w *wholeHost) dial(ctx context.Context, network string, to netip.Addr, port string, left int) (net.Conn, error) {
	own, err := w.asks.locate(ctx, to)
	if err != nil {
		return nil, err
	}
	if end, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(end)/time.Duration(left))
		defer cancel()
	}
	var d net.Dialer
	if !own { // packets to the host itself go through lo
		d.Control = bindTo(w.device)
	}
	return d.DialContext(ctx, network, net.JoinHostPort(to.String(), port))
}

// Listen implements carrier.
func (w *wholeHost) Listen(network, address string) (net.Listener, error) {
	l, err := net.Listen(network, address)
	return l, mayListen(err)
}

// ListenPacket implements carrier.
func (w *wholeHost) ListenPacket(network, address string) (net.PacketConn, error) {
	c, err := net.ListenPacket(network, address)
	return c, mayListen(err)
}

// mayListen adds to the error of listening what has to be allowed.
func mayListen(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; give the agent CAP_NET_BIND_SERVICE, lower net.ipv4.ip_unprivileged_port_start, or expose a port from 1024 on", err)
	}
	return err
}

// Ping implements carrier.
func (w *wholeHost) Ping(ctx context.Context, to netip.Addr) (time.Duration, error) {
	own, err := w.asks.locate(ctx, to)
	if err != nil {
		return 0, err
	}
	device := w.device
	if own {
		device = ""
	}
	return echo(ctx, to, device)
}
