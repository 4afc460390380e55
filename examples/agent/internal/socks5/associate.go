package socks5

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"

	"github.com/warren-mesh/warren/examples/agent/internal/relay"
)

// maxReadErrors in a row end an association. One alone does not: on Windows it may be about a datagram
// that was sent.
const maxReadErrors = 64

// associate carries a client's datagrams until its connection ends. port is the one it announced to
// send from; 0: it did not, and the first it sends from is it.
func (r *run) associate(ctx context.Context, log *slog.Logger, c net.Conn, port uint16) {
	local, client := addrPortOf(c.LocalAddr()), addrPortOf(c.RemoteAddr())
	pc, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local.Addr(), 0)))
	if err != nil {
		log.Warn("UDP association failed", "error", err)
		r.answer(c, generalFailure, netip.AddrPort{})
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	release := relay.OnEnd(ctx, func() { pc.Close() })
	defer release()
	a := &association{pc: pc, client: netip.AddrPortFrom(client.Addr(), port), log: log}
	a.flows = relay.NewFlows(ctx, relay.FlowConfig[destination]{
		Dial:  func(ctx context.Context, d destination) (net.Conn, error) { return r.dial(ctx, "udp", d) },
		Reply: a.reply,
		Failed: func(d destination, err error) {
			log.Debug("datagrams are dropped", "to", d.String(), "error", err)
		},
		Max: r.MaxFlows, Idle: r.UDPIdle, Room: maxUDPHeader, Logger: r.Logger,
	})
	defer a.flows.Close()
	var reader sync.WaitGroup
	defer reader.Wait()
	defer cancel()
	if !r.answer(c, succeeded, addrPortOf(pc.LocalAddr())) {
		return
	}
	reader.Go(func() {
		defer c.Close() // without its datagrams, the connection is of no use
		defer relay.Recover(r.Logger)
		a.read()
	})
	_, _ = io.Copy(io.Discard, c)
	log.Debug("ended")
}

// association is one client's UDP.
type association struct {
	pc     *net.UDPConn
	client netip.AddrPort // its port may be set with the first datagram, before there is a flow that replies
	flows  *relay.Flows[destination]
	log    *slog.Logger
}

// read sends on what the client sends.
func (a *association) read() {
	buf := make([]byte, relay.MaxDatagram)
	for failed := 0; failed < maxReadErrors; {
		n, from, err := a.pc.ReadFromUDPAddrPort(buf)
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			failed++
			continue
		}
		failed = 0
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if from.Addr() != a.client.Addr() || a.client.Port() != 0 && from.Port() != a.client.Port() {
			continue
		}
		d, payload, err := parseUDP(buf[:n])
		if err != nil {
			a.log.Debug("datagram is dropped", "error", err)
			continue
		}
		if a.client.Port() == 0 {
			a.client = from
		}
		a.flows.Send(d, payload)
	}
}

// reply sends a datagram back, with the address it came from in front.
func (a *association) reply(_ destination, from net.Addr, b []byte) {
	source := addrPortOf(from)
	var header [maxUDPHeader]byte
	h := appendUDP(header[:0], destination{addr: source.Addr(), port: source.Port()})
	b = b[maxUDPHeader-len(h):]
	copy(b, h)
	_, _ = a.pc.WriteToUDPAddrPort(b, a.client) // fails if it is too long with the header
}
