package netstack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// family says which addresses a network is for.
type family struct{ v4, v6 bool }

// parseNetwork splits "tcp4" into what it means.
func parseNetwork(network string) (isTCP bool, f family, err error) {
	switch network {
	case "tcp", "udp":
		f = family{true, true}
	case "tcp4", "udp4":
		f.v4 = true
	case "tcp6", "udp6":
		f.v6 = true
	default:
		return false, family{}, net.UnknownNetworkError(network)
	}
	return network[:3] == "tcp", f, nil
}

func (f family) has(a netip.Addr) bool { return a.Is4() && f.v4 || a.Is6() && f.v6 }

// splitHostPort splits an address. host is "" where it was.
func splitHostPort(address string) (host string, port uint16, err error) {
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, err
	}
	p, err := strconv.ParseUint(service, 10, 16)
	if err != nil {
		return "", 0, &net.AddrError{Err: "port is not a number from 0 to 65535", Addr: address}
	}
	return host, uint16(p), nil
}

// DialContext connects to an address in the mesh, or of this node. The networks are "tcp", "tcp4",
// "tcp6", "udp", "udp4" and "udp6"; names are looked up with Options.Resolve, and their addresses
// tried in its order.
//
// An address that no peer has is an error that is ErrNoRoute: at once after Settle, when
// ctx ends before. Otherwise the dial waits until the peer that has the address, or that comes to
// have it meanwhile, completed its first handshake; without that a first packet could be lost, and
// the caller not learn why. Where ctx has no deadline it waits 10 s for that. The error is then
// ErrNoHandshake, and says with which peer; after the handshake, when ctx ends, it is ErrNoAnswer.
// Errors are *net.OpErrors.
//
// The source address is that of the route where it has one, else the first of Addrs of the family.
func (n *Net) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	isTCP, f, err := parseNetwork(network)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	targets, err := n.resolve(ctx, f, address)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	var errs []error
	for _, to := range targets {
		var c net.Conn
		var remote net.Addr
		if isTCP {
			remote = net.TCPAddrFromAddrPort(to)
			c, err = n.dialTCP(ctx, network, to)
		} else {
			remote = net.UDPAddrFromAddrPort(to)
			c, err = n.dialUDP(ctx, network, to)
		}
		if err == nil {
			return c, nil
		}
		err = &net.OpError{Op: "dial", Net: network, Addr: remote, Err: err}
		if len(targets) == 1 || errors.Is(err, net.ErrClosed) {
			return nil, err
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// Dial is DialContext without a context.
func (n *Net) Dial(network, address string) (net.Conn, error) {
	return n.DialContext(context.Background(), network, address)
}

func (n *Net) resolve(ctx context.Context, f family, address string) ([]netip.AddrPort, error) {
	host, port, err := splitHostPort(address)
	if err != nil {
		return nil, err
	}
	if host == "" {
		return nil, &net.AddrError{Err: "missing host", Addr: address}
	}
	addrs, err := n.lookup(ctx, host)
	if err != nil {
		return nil, err
	}
	var targets []netip.AddrPort
	for _, a := range addrs {
		if a = a.Unmap(); f.has(a) && a.Zone() == "" && !a.IsUnspecified() && !a.IsMulticast() {
			targets = append(targets, netip.AddrPortFrom(a, port))
		}
	}
	if len(targets) == 0 {
		return nil, &net.AddrError{Err: "no suitable address", Addr: host}
	}
	return targets, nil
}

func (n *Net) lookup(ctx context.Context, host string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a}, nil
	}
	if n.opts.Resolve == nil {
		return nil, &net.DNSError{Err: "not an address, and no Resolve was given to look names up", Name: host, IsNotFound: true}
	}
	addrs, err := n.opts.Resolve(ctx, host)
	if err != nil {
		return nil, fmt.Errorf("looking up %q: %w", host, err)
	}
	return addrs, nil
}

func (n *Net) dialTCP(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	if err := n.await(ctx, to.Addr()); err != nil {
		return nil, err
	}
	wq := new(waiter.Queue)
	ep, terr := n.stack.NewEndpoint(tcp.ProtocolNumber, protocolOf(to.Addr()), wq)
	if terr != nil {
		return nil, sysError("socket", terr)
	}
	entry, ready := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventHUp | waiter.EventErr)
	wq.EventRegister(&entry)
	defer wq.EventUnregister(&entry)
	terr = ep.Connect(fullAddr(to))
	if _, started := terr.(*tcpip.ErrConnectStarted); started {
		nudge := time.NewTicker(nudgeAfter)
		defer nudge.Stop()
	waiting:
		for {
			select {
			case <-ready:
				terr = ep.LastError()
				break waiting
			case <-nudge.C:
				n.nudge(to.Addr())
			case <-ctx.Done():
				ep.Abort()
				return nil, n.noAnswer(ctx, to.Addr())
			case <-n.done:
				ep.Abort()
				return nil, errClosed
			}
		}
	}
	if terr != nil {
		ep.Close()
		if n.isClosed() {
			return nil, errClosed
		}
		return nil, sysError("connect", terr)
	}
	if n.isClosed() { // Close may have looked for endpoints before there was this one
		ep.Abort()
		return nil, errClosed
	}
	return n.newTCPConn(ep, wq, network), nil
}

func (n *Net) dialUDP(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	if err := n.await(ctx, to.Addr()); err != nil {
		return nil, err
	}
	c, err := n.openUDP(network, family{to.Addr().Is4(), to.Addr().Is6()}, netip.AddrPort{}, to)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// localAddr is addrPort with the wildcard of the right family.
func localAddr(f tcpip.FullAddress, proto tcpip.NetworkProtocolNumber) netip.AddrPort {
	if f.Addr.Len() == 0 && proto == header.IPv4ProtocolNumber {
		return netip.AddrPortFrom(netip.IPv4Unspecified(), f.Port)
	}
	return addrPort(f)
}

// Listen listens for TCP connections on an address that is in Addrs or Local, or on all of them: ":80"
// for both families, or "0.0.0.0:80" and "[::]:80", which with "tcp4" and "tcp6" are for one. Port 0
// has one chosen.
//
// The listener outlives the address. It gets no connections while the address is not this node's, and
// gets them again once it is.
func (n *Net) Listen(network, address string) (net.Listener, error) {
	isTCP, from, proto, only6, err := n.listenAddr(network, address)
	if err == nil && !isTCP {
		err = net.UnknownNetworkError(network)
	}
	if err != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Err: err}
	}
	l, err := n.listenTCP(network, from, proto, only6)
	if err != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Addr: net.TCPAddrFromAddrPort(from), Err: err}
	}
	return l, nil
}

// backlog is how many connections wait to be accepted, as on Linux.
const backlog = 4096

func (n *Net) listenTCP(network string, from netip.AddrPort, proto tcpip.NetworkProtocolNumber, only6 bool) (*tcpListener, error) {
	wq := new(waiter.Queue)
	ep, terr := n.stack.NewEndpoint(tcp.ProtocolNumber, proto, wq)
	if terr != nil {
		return nil, sysError("socket", terr)
	}
	ep.SocketOptions().SetV6Only(only6)
	ep.SocketOptions().SetReuseAddress(true) // as package net has it: connections that wait for their end keep no port
	if terr := ep.Bind(fullAddr(from)); terr != nil {
		ep.Close()
		return nil, sysError("bind", terr)
	}
	local, _ := ep.GetLocalAddress()
	release, err := n.claim(local.Port, newBound(from.Addr(), proto, only6))
	if err != nil {
		ep.Close()
		return nil, os.NewSyscallError("bind", err)
	}
	if terr := ep.Listen(backlog); terr != nil {
		ep.Close()
		release()
		return nil, sysError("listen", terr)
	}
	l := &tcpListener{socket{n: n, ep: ep, wq: wq, network: network}}
	l.local = net.TCPAddrFromAddrPort(localAddr(local, proto))
	l.init()
	unhold, ok := n.hold(from.Addr())
	if !ok {
		ep.Abort()
		release()
		return nil, errClosed
	}
	l.atEnd = func() {
		release()
		if unhold != nil {
			unhold()
		}
	}
	return l, nil
}

// ListenPacket is Listen for UDP. What is sent without a source address of its own, from a socket on
// the wildcard, has the one a dial to the same destination would have. The net.PacketConn is a *UDPConn,
// as is the net.Conn of a dial.
func (n *Net) ListenPacket(network, address string) (net.PacketConn, error) {
	isTCP, from, proto, only6, err := n.listenAddr(network, address)
	if err == nil && isTCP {
		err = net.UnknownNetworkError(network)
	}
	if err != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Err: err}
	}
	is4 := proto == header.IPv4ProtocolNumber
	c, err := n.openUDP(network, family{is4 || !only6, !is4}, from, netip.AddrPort{})
	if err == nil {
		var ok bool
		if c.atEnd, ok = n.hold(from.Addr()); !ok {
			c.Close()
			err = errClosed
		}
	}
	if err != nil {
		return nil, &net.OpError{Op: "listen", Net: network, Addr: net.UDPAddrFromAddrPort(from), Err: err}
	}
	return c, nil
}

// hold has the stack answer echo requests to the address of a listener, until release is called. It
// returns false if the Net is closed.
func (n *Net) hold(a netip.Addr) (release func(), ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.isClosed() {
		return nil, false
	}
	if a.IsUnspecified() {
		return nil, true
	}
	n.pin(a)
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.unpin(a)
	}, true
}

// listenAddr judges the arguments of a listening call.
func (n *Net) listenAddr(network, address string) (isTCP bool, from netip.AddrPort, proto tcpip.NetworkProtocolNumber, only6 bool, err error) {
	isTCP, f, err := parseNetwork(network)
	if err != nil {
		return
	}
	host, port, err := splitHostPort(address)
	if err != nil {
		return
	}
	var a netip.Addr
	switch host {
	case "":
		a = netip.IPv6Unspecified()
		if !f.v6 {
			a = netip.IPv4Unspecified()
		}
	default:
		if a, err = netip.ParseAddr(host); err != nil {
			err = &net.AddrError{Err: "not an address to listen on", Addr: host}
			return
		}
		a = a.Unmap()
	}
	switch {
	case n.isClosed():
		err = errClosed
		return
	case !a.IsUnspecified() && !n.link.table.Load().accepts(a):
		err = &notLocalError{net.AddrError{Err: ErrNotLocal.Error(), Addr: a.String()}}
		return
	case !f.has(a) && !(a.IsUnspecified() && f == family{true, true}):
		err = &net.AddrError{Err: "not an address for " + network, Addr: a.String()}
		return
	}
	if a.IsUnspecified() && f == (family{true, true}) {
		a = netip.IPv6Unspecified() // both families
	}
	return isTCP, netip.AddrPortFrom(a, port), protocolOf(a), a.Is6() && !(a.IsUnspecified() && f.v4), nil
}

// notLocalError names an address that is not this node's.
type notLocalError struct{ net.AddrError }

// Unwrap has errors.Is find ErrNotLocal and the errno the net package would give.
func (e *notLocalError) Unwrap() []error {
	return []error{&e.AddrError, ErrNotLocal, syscall.EADDRNOTAVAIL}
}
