package sockets

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.zx2c4.com/wireguard/conn"
)

// Options are what a Bind may be told. The zero Options will do.
type Options struct {
	// Buffer is what each socket asks for its two buffers, in bytes; 0: DefaultBuffer. What it got, see Sizes. Without
	// CAP_NET_ADMIN Linux grants no more than net.core.rmem_max and wmem_max.
	Buffer int

	// Via returns where packets to an endpoint go instead, all of them to each of the addresses; none: to the endpoint.
	// It is called for every Send, from several goroutines, and is not to block. nil: there is no such place. What comes
	// from there has its own source as the endpoint.
	Via func(to netip.AddrPort) []netip.AddrPort
}

// DefaultBuffer holds some milliseconds of what a fast link carries, in bytes.
const DefaultBuffer = 4 << 20

// BatchSize is how many packets go through one call of Send or of a receive function at most.
const BatchSize = conn.IdealBatchSize

// Bind is the sockets of a device: one for each address family that the host has, both with the same port. Send may be
// called by any goroutine, also while the others are; wireguard-go keeps Open, Close and SetMark apart from each other.
type Bind struct {
	o Options

	mu      sync.Mutex                 // guards opening and closing
	sockets atomic.Pointer[[2]*socket] // nil: they are closed. One is nil where the host has not its family
}

var _ conn.Bind = (*Bind)(nil)

// New returns a Bind without sockets.
func New(o Options) *Bind {
	if o.Buffer == 0 {
		o.Buffer = DefaultBuffer
	}
	return &Bind{o: o}
}

// The sockets of a Bind.
const (
	ipv4 = iota
	ipv6
)

var networks = [2]string{ipv4: "udp4", ipv6: "udp6"}

// most is how often a port is chosen that both families are to have.
const most = 100

// Open opens the sockets on a port; 0: one that is free in both families. A family that the host has not is left out.
func (b *Bind) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sockets.Load() != nil {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	for try := 1; ; try++ {
		opened, actual, err := b.open(port)
		if err != nil && port == 0 && try < most && InUse(err) {
			continue // by chance one family has it
		}
		if err != nil {
			return nil, 0, err
		}
		var fns []conn.ReceiveFunc
		for _, s := range opened {
			if s != nil {
				fns = append(fns, s.receiver())
			}
		}
		b.sockets.Store(&opened)
		return fns, actual, nil
	}
}

func (b *Bind) open(port uint16) (opened [2]*socket, actual uint16, err error) {
	var missing error
	for i, network := range networks {
		var s *socket
		s, err = openSocket(network, port, b.o.Buffer)
		switch {
		case err == nil:
			opened[i], port = s, s.port()
		case noFamily(err):
			missing = err
		default:
			for _, s := range opened {
				s.close()
			}
			return [2]*socket{}, 0, err
		}
	}
	if opened == [2]*socket{} {
		return opened, 0, missing
	}
	return opened, port, nil
}

// InUse reports whether err says that another socket has the port.
func InUse(err error) bool { return is(err, syscall.EADDRINUSE, 10048) }

// noFamily reports whether err says that the host has not that address family.
func noFamily(err error) bool { return is(err, syscall.EAFNOSUPPORT, 10047) }

// is reports whether err is one by the name that it has in POSIX, or by its number in Windows.
func is(err error, posix, windows syscall.Errno) bool {
	var errno syscall.Errno
	return errors.Is(err, posix) || runtime.GOOS == "windows" && errors.As(err, &errno) && errno == windows
}

// Close closes the sockets, upon which the receive functions return net.ErrClosed. They can be opened again.
func (b *Bind) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.sockets.Swap(nil)
	if all == nil {
		return nil
	}
	return errors.Join(all[ipv4].close(), all[ipv6].close())
}

// SetMark has what is sent from now on marked (SO_MARK). Elsewhere than on Linux there are no marks.
func (b *Bind) SetMark(mark uint32) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, s := range b.load() {
		if s != nil {
			if err := s.setMark(mark); err != nil {
				return fmt.Errorf("mark %#x on the %s socket: %w", mark, networks[i], err)
			}
		}
	}
	return nil
}

// load returns the sockets there are.
func (b *Bind) load() (all [2]*socket) {
	if p := b.sockets.Load(); p != nil {
		all = *p
	}
	return all
}

// Families returns in which families there are sockets.
func (b *Bind) Families() (is4, is6 bool) {
	all := b.load()
	return all[ipv4] != nil, all[ipv6] != nil
}

// Port is the port that the sockets have; 0: there are none.
func (b *Bind) Port() uint16 {
	for _, s := range b.load() {
		if s != nil {
			return s.port()
		}
	}
	return 0
}

// Sizes returns what the buffers of a socket hold, in bytes, the lesser of the two sockets; 0: not known. Linux counts
// its own book-keeping in: half of it is for packets.
func (b *Bind) Sizes() (receive, send int) {
	for _, s := range b.load() {
		if s != nil {
			r, w := s.sizes()
			if receive == 0 || r < receive {
				receive = r
			}
			if send == 0 || w < send {
				send = w
			}
		}
	}
	return receive, send
}

// BatchSize is how many packets a call takes.
func (b *Bind) BatchSize() int { return batchSize }

// ParseEndpoint returns the endpoint that s names, such as 192.0.2.1:51820 or [2001:db8::1]:51820.
func (b *Bind) ParseEndpoint(s string) (conn.Endpoint, error) {
	to, err := netip.ParseAddrPort(s)
	if err != nil {
		return nil, err
	}
	return newEndpoint(netip.AddrPortFrom(to.Addr().Unmap(), to.Port()), netip.Addr{}, 0), nil
}

// Send sends packets to an endpoint, in their order. One that cannot be sent keeps no other from being sent; the error
// is that of the first.
func (b *Bind) Send(packets [][]byte, to conn.Endpoint) error {
	e, ok := to.(*Endpoint)
	if !ok {
		return conn.ErrWrongEndpointType
	}
	if b.o.Via != nil {
		if via := b.o.Via(e.dst); len(via) > 0 {
			var errs []error
			for _, to := range via {
				errs = append(errs, b.send(packets, newEndpoint(to, netip.Addr{}, 0)))
			}
			return errors.Join(errs...)
		}
	}
	return b.send(packets, e)
}

func (b *Bind) send(packets [][]byte, to *Endpoint) error {
	i := ipv4
	if to.dst.Addr().Is6() {
		i = ipv6
	}
	all := b.sockets.Load()
	if all == nil {
		return net.ErrClosed
	}
	s := all[i]
	if s == nil {
		return fmt.Errorf("%v: %w", to.dst, syscall.EAFNOSUPPORT)
	}
	return s.send(packets, to)
}

// Endpoint is where packets go, and the address they go out from. An Endpoint never changes but in being forgetful: of
// a source that is gone, or of what its path carries.
type Endpoint struct {
	dst   netip.AddrPort
	src   netip.Addr // zero: the host chooses
	srcIf int        // the interface of src where that is link-local; else 0

	forgot atomic.Bool // src is not to be used any more
	path   path
	raw    rawEndpoint
}

func newEndpoint(dst netip.AddrPort, src netip.Addr, srcIf int) *Endpoint {
	if !src.IsLinkLocalUnicast() {
		srcIf = 0
	}
	e := &Endpoint{dst: dst, src: src, srcIf: srcIf}
	e.raw.init(e)
	return e
}

// ClearSrc has the host choose from where packets go out.
func (e *Endpoint) ClearSrc() { e.forgot.Store(true) }

// SrcIP is the address that packets go out from; the zero one where the host chooses.
func (e *Endpoint) SrcIP() netip.Addr {
	if e.forgot.Load() {
		return netip.Addr{}
	}
	return e.src
}

// SrcToString is SrcIP as text; empty where the host chooses.
func (e *Endpoint) SrcToString() string {
	if src := e.SrcIP(); src.IsValid() {
		return src.String()
	}
	return ""
}

// DstIP is the address that packets go to.
func (e *Endpoint) DstIP() netip.Addr { return e.dst.Addr() }

// AddrPort is where packets go.
func (e *Endpoint) AddrPort() netip.AddrPort { return e.dst }

// DstToString is where packets go, as text.
func (e *Endpoint) DstToString() string { return e.dst.String() }

// DstToBytes is where packets go, as WireGuard's cookies have it.
func (e *Endpoint) DstToBytes() []byte {
	b, _ := e.dst.MarshalBinary()
	return b
}
