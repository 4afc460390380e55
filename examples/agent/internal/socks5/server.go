package socks5

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/examples/agent/internal/relay"
)

// Dialer connects to where clients want to. *netstack.Net is one. The networks are "tcp" and "udp", the
// addresses literal.
type Dialer interface {
	DialContext(ctx context.Context, network, address string) (net.Conn, error)
}

// What the zero fields of a Server stand for.
const (
	DefaultMaxClients       = 1024
	DefaultMaxAssociations  = 64
	DefaultMaxFlows         = 128
	DefaultHandshakeTimeout = 10 * time.Second
	DefaultDialTimeout      = 20 * time.Second
	DefaultTCPIdle          = 2*time.Hour + 4*time.Minute // RFC 5382, REQ-5
	DefaultUDPIdle          = 5 * time.Minute             // RFC 4787, REQ-5
)

// Server is a SOCKS5 server. Its fields must not be changed while it serves.
type Server struct {
	// Dialer makes the connections. An error of it that is fs.ErrPermission is told to the client as
	// "not allowed by ruleset".
	Dialer Dialer

	// Lookup returns the addresses of a name, in the order in which they are to be tried; as UDP has no
	// answer to wait for, there the first counts that can be reached at all. It is not asked for literal
	// addresses. nil: names are refused.
	Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

	// Auth returns whether a user may use the server. It may be called from several goroutines at once.
	// nil: everyone may, without a name.
	Auth func(user, password string) bool

	// Logger receives at Debug what clients ask for, at Info what is no SOCKS5, the latter limited in
	// rate. nil discards it.
	Logger *slog.Logger

	// Limits of each call of Serve; the zero ones are the defaults above.
	MaxClients       int           // connections at once; one more is closed
	MaxAssociations  int           // of them, UDP associations; one more is answered "general failure"
	MaxFlows         int           // destinations of one association; one more takes the place of the one unused for longest
	HandshakeTimeout time.Duration // until a client has said what it wants
	DialTimeout      time.Duration // for a lookup and the dial
	TCPIdle          time.Duration // without a byte in either direction, after which a connection is reset
	UDPIdle          time.Duration // without a datagram in either direction, after which a flow is forgotten
}

// Serve serves the clients of l, which may be on a wildcard address. It returns nil when ctx ends, else
// an error if a field is not valid or l was closed by someone else. Before it returns it closes l and
// all connections, and waits for its goroutines.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	r, err := s.run()
	if err != nil {
		_ = l.Close()
		return fmt.Errorf("socks5: %w", err)
	}
	if err := relay.Serve(ctx, l, r.MaxClients, r.Logger, r.handle); err != nil {
		return fmt.Errorf("socks5: %w", err)
	}
	return nil
}

// run is one Serve: a Server with its defaults filled in.
type run struct {
	Server
	associations chan struct{} // as many as there are
	nonsense     relay.Throttle
	full         relay.Throttle
}

func (s *Server) run() (*run, error) {
	r := &run{Server: *s}
	if r.Dialer == nil {
		return nil, errors.New("Dialer is nil")
	}
	for _, f := range []struct {
		name string
		v    *int
		zero int
	}{
		{"MaxClients", &r.MaxClients, DefaultMaxClients},
		{"MaxAssociations", &r.MaxAssociations, DefaultMaxAssociations},
		{"MaxFlows", &r.MaxFlows, DefaultMaxFlows},
	} {
		if *f.v < 0 {
			return nil, fmt.Errorf("%s is %d, less than 0", f.name, *f.v)
		}
		if *f.v == 0 {
			*f.v = f.zero
		}
	}
	for _, f := range []struct {
		name string
		v    *time.Duration
		zero time.Duration
	}{
		{"HandshakeTimeout", &r.HandshakeTimeout, DefaultHandshakeTimeout},
		{"DialTimeout", &r.DialTimeout, DefaultDialTimeout},
		{"TCPIdle", &r.TCPIdle, DefaultTCPIdle},
		{"UDPIdle", &r.UDPIdle, DefaultUDPIdle},
	} {
		if *f.v < 0 {
			return nil, fmt.Errorf("%s is %v, less than 0", f.name, *f.v)
		}
		if *f.v == 0 {
			*f.v = f.zero
		}
	}
	if r.Logger == nil {
		r.Logger = slog.New(slog.DiscardHandler)
	}
	r.associations = make(chan struct{}, r.MaxAssociations)
	return r, nil
}

// handle serves one client.
func (r *run) handle(ctx context.Context, c net.Conn) {
	log := r.Logger.With("client", c.RemoteAddr().String())
	release := relay.OnEnd(ctx, func() { c.Close() }) // makes whatever reads or writes below return
	defer release()
	_ = c.SetDeadline(time.Now().Add(r.HandshakeTimeout))
	req, err := handshake(c, r.Auth)
	if err != nil {
		if ctx.Err() == nil && !errors.Is(err, errGone) {
			r.nonsense.Log(log, slog.LevelInfo, "not served", "error", err)
		}
		finish(c)
		return
	}
	_ = c.SetDeadline(time.Time{})
	log = log.With("command", req.command.String(), "destination", req.to.String())
	switch req.command {
	case connect:
		if to := r.connect(ctx, log, c, req.to); to != nil {
			release() // Copy looks at ctx itself, and tells the client that this is no regular end
			sent, received, err := relay.Copy(ctx, c, to, r.TCPIdle)
			log.Debug("ended", "sent", sent, "received", received, "error", err)
		}
	case associate:
		select {
		case r.associations <- struct{}{}:
			r.associate(ctx, log, c, req.to.port)
			<-r.associations
		default:
			r.full.Log(log, slog.LevelWarn, "not served, there are too many UDP associations", "limit", r.MaxAssociations)
			r.answer(c, generalFailure, netip.AddrPort{})
		}
	}
}

// connect connects to a destination and tells the client. It returns nil if it failed at either.
func (r *run) connect(ctx context.Context, log *slog.Logger, c net.Conn, d destination) net.Conn {
	to, err := r.dial(ctx, "tcp", d)
	if err != nil {
		log.Debug("connecting failed", "error", err)
		r.answer(c, codeOf(err), netip.AddrPort{})
		return nil
	}
	if !r.answer(c, succeeded, addrPortOf(to.LocalAddr())) {
		relay.Reset(to)
		return nil
	}
	return to
}

// dial connects to the first address of a destination that answers.
func (r *run) dial(ctx context.Context, network string, d destination) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, r.DialTimeout)
	defer cancel()
	addrs, err := r.resolve(ctx, d)
	if err != nil {
		return nil, err
	}
	end := time.Now().Add(r.DialTimeout)
	var errs []error
	for i, a := range addrs {
		// An address at which nobody answers leaves the others their share of the time.
		ctx, cancel := context.WithTimeout(ctx, time.Until(end)/time.Duration(len(addrs)-i))
		c, err := r.Dialer.DialContext(ctx, network, netip.AddrPortFrom(a.Unmap(), d.port).String())
		cancel()
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

func (r *run) resolve(ctx context.Context, d destination) ([]netip.Addr, error) {
	if d.addr.IsValid() {
		return []netip.Addr{d.addr}, nil
	}
	if a, err := netip.ParseAddr(d.name); err == nil && a.Zone() == "" {
		return []netip.Addr{a}, nil
	}
	if r.Lookup == nil {
		return nil, &lookupError{d.name, errNoNames}
	}
	addrs, err := r.Lookup(ctx, d.name)
	if err == nil && len(addrs) == 0 {
		err = errNoAddress
	}
	if err != nil {
		return nil, &lookupError{d.name, err}
	}
	return addrs, nil
}

// answer answers a request, and returns whether that was possible. After a failure it ends the
// connection.
func (r *run) answer(c net.Conn, code code, bound netip.AddrPort) bool {
	_ = c.SetDeadline(time.Now().Add(r.HandshakeTimeout))
	_, err := c.Write(appendReply(nil, code, bound))
	if code != succeeded {
		finish(c)
	}
	_ = c.SetDeadline(time.Time{})
	return err == nil
}

// finish ends a connection whose last words the client shall get: what it sent and nobody read would
// have the kernel throw them away.
func finish(c net.Conn) {
	if w, ok := c.(interface{ CloseWrite() error }); ok && w.CloseWrite() == nil {
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		_, _ = io.CopyN(io.Discard, c, 64<<10)
	}
	_ = c.Close()
}

func addrPortOf(a net.Addr) netip.AddrPort {
	var ap netip.AddrPort
	switch a := a.(type) {
	case *net.TCPAddr:
		ap = a.AddrPort()
	case *net.UDPAddr:
		ap = a.AddrPort()
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
