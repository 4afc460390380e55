package expose

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/examples/agent/internal/relay"
)

// Listener listens on addresses of the mesh. *netstack.Net is one.
type Listener interface {
	Listen(network, address string) (net.Listener, error)
	ListenPacket(network, address string) (net.PacketConn, error)
}

// What the zero fields of Options stand for.
const (
	DefaultMaxClients  = 1024
	DefaultDialTimeout = 10 * time.Second
	DefaultTCPIdle     = 2*time.Hour + 4*time.Minute // RFC 5382, REQ-5
	DefaultUDPIdle     = 5 * time.Minute             // RFC 4787, REQ-5
)

// Options are the settings of Serve. The zero Options are good ones.
type Options struct {
	// Logger receives at Info that a rule is in force and what it waits for, and at Warn, limited in
	// rate, why a target cannot be reached. nil discards it.
	Logger *slog.Logger

	// Dial connects to the target. nil: a net.Dialer's DialContext.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	MaxClients  int           // connections at once, of which one more is closed; or UDP sources, of which one more takes the place of the one silent for longest
	DialTimeout time.Duration // for the target
	TCPIdle     time.Duration // without a byte in either direction, after which a connection is reset
	UDPIdle     time.Duration // without a datagram in either direction, after which a source is forgotten
}

func (o *Options) fill() error {
	switch {
	case o.MaxClients < 0:
		return fmt.Errorf("MaxClients is %d, less than 0", o.MaxClients)
	case o.DialTimeout < 0:
		return fmt.Errorf("DialTimeout is %v, less than 0", o.DialTimeout)
	case o.TCPIdle < 0:
		return fmt.Errorf("TCPIdle is %v, less than 0", o.TCPIdle)
	case o.UDPIdle < 0:
		return fmt.Errorf("UDPIdle is %v, less than 0", o.UDPIdle)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Dial == nil {
		o.Dial = new(net.Dialer).DialContext
	}
	if o.MaxClients == 0 {
		o.MaxClients = DefaultMaxClients
	}
	if o.DialTimeout == 0 {
		o.DialTimeout = DefaultDialTimeout
	}
	if o.TCPIdle == 0 {
		o.TCPIdle = DefaultTCPIdle
	}
	if o.UDPIdle == 0 {
		o.UDPIdle = DefaultUDPIdle
	}
	return nil
}

// Serve publishes what rule says on an address of the mesh until ctx ends, and then returns nil. The
// address need not be this node's yet, and may go and come back: Serve waits for it. It returns an
// error where waiting is no use: if rule, addr or an option is not valid, or l was closed
// (net.ErrClosed). Before it returns it closes all connections, and waits for its goroutines.
//
// A connection whose target cannot be reached is closed at once.
func Serve(ctx context.Context, l Listener, addr netip.Addr, rule Rule, o Options) error {
	err := o.fill()
	switch {
	case err != nil:
	case !addr.IsValid():
		err = errors.New("address is not valid")
	case rule.Port == 0:
		err = errors.New("port is 0")
	case rule.Network != "tcp" && rule.Network != "udp":
		err = fmt.Errorf("network %q is neither tcp nor udp", rule.Network)
	}
	if err == nil {
		address := netip.AddrPortFrom(addr, rule.Port).String()
		s := &service{
			Options: o, rule: rule, l: l, address: address,
			log: o.Logger.With("service", rule.String(), "address", address),
		}
		err = s.serve(ctx)
	}
	if err != nil {
		return fmt.Errorf("exposing %v: %w", rule, err)
	}
	return nil
}

// service is one Serve.
type service struct {
	Options
	rule    Rule
	l       Listener
	address string // in the mesh
	log     *slog.Logger
	down    relay.Throttle
}

// serve listens, again and again where need be.
func (s *service) serve(ctx context.Context) error {
	once := s.tcp
	if s.rule.Network == "udp" {
		once = s.udp
	}
	retry := relay.NewBackoff()
	said := ""
	for {
		listening, err := once(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case listening:
			// The listener came to an end: the address went, or the mesh did. Listening tells which.
			retry.Reset()
			said = ""
		case errors.Is(err, net.ErrClosed):
			return err
		}
		if err.Error() != said {
			said = err.Error()
			s.log.Warn("not exposed for now, is tried again", "error", err)
		}
		if !relay.Sleep(ctx, retry.NextBackOff()) {
			return nil
		}
	}
}

// tcp listens once. listening is whether that was possible; err is not nil unless ctx ended.
func (s *service) tcp(ctx context.Context) (listening bool, err error) {
	l, err := s.l.Listen("tcp", s.address)
	if err != nil {
		return false, err
	}
	s.log.Info("exposed")
	return true, relay.Serve(ctx, l, s.MaxClients, s.log, s.handle)
}

func (s *service) handle(ctx context.Context, c net.Conn) {
	log := s.log.With("client", c.RemoteAddr().String())
	target, err := s.dial(ctx)
	if err != nil {
		relay.Reset(c)
		s.unreachable(ctx, c.RemoteAddr(), err)
		return
	}
	received, sent, err := relay.Copy(ctx, c, target, s.TCPIdle)
	log.Debug("ended", "received", received, "sent", sent, "error", err)
}

func (s *service) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, s.DialTimeout)
	defer cancel()
	return s.Dial(ctx, s.rule.Network, s.rule.Target)
}

func (s *service) unreachable(ctx context.Context, client net.Addr, err error) {
	if ctx.Err() == nil {
		s.down.Log(s.log, slog.LevelWarn, "target cannot be reached", "client", client.String(), "error", err)
	}
}

// maxReadErrors in a row end a socket. One alone does not: it may be about a datagram that was sent.
const maxReadErrors = 64

// udp is tcp for datagrams: those of each source have a connection of their own to the target.
func (s *service) udp(ctx context.Context) (listening bool, err error) {
	pc, err := s.l.ListenPacket("udp", s.address)
	if err != nil {
		return false, err
	}
	s.log.Info("exposed")
	ctx, cancel := context.WithCancel(ctx)
	release := relay.OnEnd(ctx, func() { pc.Close() })
	defer release()
	defer cancel()
	flows := relay.NewFlows(ctx, relay.FlowConfig[netip.AddrPort]{
		Dial: func(ctx context.Context, _ netip.AddrPort) (net.Conn, error) { return s.dial(ctx) },
		Reply: func(client netip.AddrPort, _ net.Addr, b []byte) {
			_, _ = pc.WriteTo(b, net.UDPAddrFromAddrPort(client)) // lost, as on any network
		},
		Failed: func(client netip.AddrPort, err error) {
			s.unreachable(ctx, net.UDPAddrFromAddrPort(client), err)
		},
		Max: s.MaxClients, Idle: s.UDPIdle, Logger: s.log,
	})
	defer flows.Close()
	buf := make([]byte, relay.MaxDatagram)
	for failed := 0; ; {
		n, from, err := pc.ReadFrom(buf)
		if err != nil {
			if failed++; errors.Is(err, net.ErrClosed) || failed >= maxReadErrors {
				return true, err
			}
			continue
		}
		failed = 0
		if a, ok := from.(*net.UDPAddr); ok {
			client := a.AddrPort()
			flows.Send(netip.AddrPortFrom(client.Addr().Unmap(), client.Port()), buf[:n])
		}
	}
}
