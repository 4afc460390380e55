package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/examples/agent/internal/namespace"
)

// wholeHost reaches the mesh by the host's own network stack, where the whole host is in the mesh. It is kept to the
// mesh, as whoever asks this process need not be allowed to reach the rest.
type wholeHost struct {
	device string
	in     *namespace.Namespace // of the device, where its sockets are to be too
	asks   inside
}

// DialContext implements reach. Packets to other nodes leave through the mesh's interface or not at all.
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
	var c net.Conn
	err = w.in.Do(func() (err error) {
		// An address that is no name is dialled by this goroutine, and so by this thread.
		c, err = d.DialContext(ctx, network, net.JoinHostPort(to.String(), port))
		return err
	})
	return c, err
}

// Listen implements reach.
func (w *wholeHost) Listen(network, address string) (net.Listener, error) {
	var l net.Listener
	err := w.in.Do(func() (err error) {
		l, err = net.Listen(network, address)
		return err
	})
	return l, mayListen(err)
}

// ListenPacket implements reach.
func (w *wholeHost) ListenPacket(network, address string) (net.PacketConn, error) {
	var c net.PacketConn
	err := w.in.Do(func() (err error) {
		c, err = net.ListenPacket(network, address)
		return err
	})
	return c, mayListen(err)
}

// mayListen adds to the error of listening what has to be allowed.
func mayListen(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; give the agent CAP_NET_BIND_SERVICE, lower net.ipv4.ip_unprivileged_port_start, or expose a port from 1024 on", err)
	}
	return err
}

// Ping implements reach.
func (w *wholeHost) Ping(ctx context.Context, to netip.Addr) (time.Duration, error) {
	own, err := w.asks.locate(ctx, to)
	if err != nil {
		return 0, err
	}
	device := w.device
	if own {
		device = ""
	}
	return echo(ctx, to, device, w.in)
}
