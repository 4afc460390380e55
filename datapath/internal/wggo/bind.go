package wggo

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
)

// bind is a conn.Bind that says which port it has, when a handshake may have come to an end, and
// that keeps two handshakes with one peer from undoing each other.
type bind struct {
	conn.Bind
	watch   *watch
	do      func(func() error) error                 // runs what opens sockets
	meant   func(msg []byte) bool                    // whether a handshake message is for this node's key
	crosses func(from netip.AddrPort) bool           // whether an arriving initiation is to be dropped
	answers func(from netip.AddrPort)                // that a response arrived
	yields  func(to netip.AddrPort, msg []byte) bool // whether one that is to be sent is dropped
	tried   func(to string, err error)               // that an initiation was sent, or could not be

	out atomic.Pointer[[2]conn.Bind] // by whether it is IPv6: what sends, where that is not Bind itself; nil while there are no sockets

	mu         sync.Mutex // guards what follows, and keeps resend from a Bind that is being copied
	port       uint16
	ipv4, ipv6 bool
}

// watch is told of packets that may complete a handshake, while somebody waits for one.
type watch struct {
	waiting atomic.Int32
	wake    chan struct{} // capacity 1
}

func (w *watch) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Open opens the sockets. conn.StdNetBind reports port 0 where one of the two families is missing,
// upon which the device would forget its port; then the port is chosen here.
func (b *bind) Open(port uint16) (fns []conn.ReceiveFunc, actual uint16, err error) {
	b.mu.Lock()
	b.port = 0
	b.mu.Unlock()
	err = b.do(func() (err error) {
		fns, actual, err = b.open(port)
		return err
	})
	return fns, actual, err
}

// at returns the port there is; 0 where there is none.
func (b *bind) at() uint16 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.port
}

func (b *bind) open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	fns, actual, err := b.Bind.Open(port)
	if err != nil {
		return nil, 0, err
	}
	if actual == 0 {
		actual = port
	}
	for try := 0; actual == 0; try++ {
		b.Bind.Close()
		free, err := freePort()
		if err != nil {
			return nil, 0, err
		}
		if fns, _, err = b.Bind.Open(free); err == nil {
			actual = free
		} else if !portInUse(err) || try == 9 {
			return nil, 0, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.out.Store(apart(b.Bind))
	b.port, b.ipv4, b.ipv6 = actual, false, false
	for i, fn := range fns {
		name := fn.PrettyName()
		b.ipv4 = b.ipv4 || strings.HasSuffix(name, "v4") || strings.HasSuffix(name, "IPv4")
		b.ipv6 = b.ipv6 || strings.HasSuffix(name, "v6") || strings.HasSuffix(name, "IPv6")
		fns[i] = b.receive(fn)
	}
	if !b.ipv4 && !b.ipv6 { // a Bind that does not say
		b.ipv4, b.ipv6 = true, true
	}
	return fns, actual, nil
}

// Close closes the sockets.
func (b *bind) Close() error {
	b.out.Store(nil)
	return b.Bind.Close()
}

// apart returns copies of b, which was just opened, that send by the same sockets, one for IPv4 and one for IPv6; nil
// where none is needed.
//
// conn.StdNetBind uses the memory of an address that it sent to again (udpAddrPool). For IPv4 it leaves that 4 bytes
// long, and then copies no more than 4 of an IPv6 address into it: the others are of an address it sent to before, or
// zero, and that is where the packet goes (https://github.com/WireGuard/wireguard-go/pull/135). Each copy has a memory of
// its own, since b itself, which may be opened again, never sends and so has none.
func apart(b conn.Bind) *[2]conn.Bind {
	std, ok := b.(*conn.StdNetBind)
	if !ok {
		return nil
	}
	var out [2]conn.Bind
	for i := range out {
		c := reflect.New(reflect.TypeFor[conn.StdNetBind]())
		c.Elem().Set(reflect.ValueOf(std).Elem())
		out[i] = c.Interface().(conn.Bind)
	}
	return &out
}

// sendTo sends to ep.
func (b *bind) sendTo(bufs [][]byte, ep conn.Endpoint) error {
	if _, std := b.Bind.(*conn.StdNetBind); !std {
		return b.Bind.Send(bufs, ep)
	}
	out := b.out.Load()
	switch {
	case out == nil:
		return net.ErrClosed
	case ep.DstIP().Is6():
		return out[1].Send(bufs, ep)
	}
	return out[0].Send(bufs, ep)
}

// freePort returns a UDP port that was free a moment ago in the family there is.
func freePort() (uint16, error) {
	var errs []error
	for _, network := range []string{"udp4", "udp6"} {
		c, err := net.ListenUDP(network, nil)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		defer c.Close()
		return uint16(c.LocalAddr().(*net.UDPAddr).Port), nil
	}
	return 0, errors.Join(errs...)
}

// Types of WireGuard messages: the first byte, with three of zero after it.
const (
	handshakeInitiation = 1
	handshakeResponse   = 2
	transportData       = 4
)

func (b *bind) receive(fn conn.ReceiveFunc) conn.ReceiveFunc {
	return func(packets [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
		n, err := fn(packets, sizes, eps)
		waiting := b.watch.waiting.Load() > 0
		for i := range n {
			if sizes[i] < 4 {
				continue
			}
			switch binary.LittleEndian.Uint32(packets[i]) {
			case handshakeInitiation:
				if sizes[i] != device.MessageInitiationSize || !b.meant(packets[i][:sizes[i]]) {
					continue
				}
				if from, err := netip.ParseAddrPort(eps[i].DstToString()); err == nil && b.crosses(from) {
					sizes[i] = 0
				}
			case handshakeResponse, transportData:
				if packets[i][0] == handshakeResponse && sizes[i] == device.MessageResponseSize && b.meant(packets[i][:sizes[i]]) {
					if from, err := netip.ParseAddrPort(eps[i].DstToString()); err == nil {
						b.answers(from)
					}
				}
				if waiting {
					waiting = false
					b.watch.signal()
				}
			}
		}
		return n, err
	}
}

// Send sends to ep.
//
// Several packets may go to Linux as one large one, that it is to cut (UDP_SEGMENT, udp(7)); it refuses that
// where the pieces do not fit the underlay, while alone each would be sent, in fragments. So they are sent
// one by one. Those that were sent before are then sent twice, and the second is dropped where it arrives.
//
// An initiation that cannot be sent, as the host has no way to its endpoint, counts as an attempt nonetheless
// (datapath.Stats), which wireguard-go has it be only where no error is returned: whoever waits for the answer has to
// learn that none comes.
func (b *bind) Send(bufs [][]byte, ep conn.Endpoint) error {
	initiation := len(bufs) == 1 && len(bufs[0]) == device.MessageInitiationSize && binary.LittleEndian.Uint32(bufs[0]) == handshakeInitiation
	if initiation {
		if to, err := netip.ParseAddrPort(ep.DstToString()); err == nil && b.yields(to, bufs[0]) {
			return nil
		}
	}
	err := b.fromAnywhere(bufs, ep)
	if initiation && !errors.Is(err, net.ErrClosed) {
		b.tried(ep.DstToString(), err)
		return nil
	}
	return err
}

// fromAnywhere sends to ep. An endpoint remembers the local address it was last heard at; where that is gone from
// the host, sending from it fails, and the packet goes out from whichever address the host takes.
func (b *bind) fromAnywhere(bufs [][]byte, ep conn.Endpoint) error {
	err := b.send(bufs, ep)
	if err == nil || errors.As(err, new(conn.ErrUDPGSODisabled)) || errors.Is(err, net.ErrClosed) || !ep.SrcIP().IsValid() {
		return err
	}
	fresh, parseErr := b.Bind.ParseEndpoint(ep.DstToString())
	if parseErr != nil {
		return err
	}
	return b.send(bufs, fresh)
}

// send sends packets together or, where that is refused, one by one. A packet that is refused by itself
// keeps no other from being sent.
func (b *bind) send(bufs [][]byte, ep conn.Endpoint) error {
	err := b.sendTo(bufs, ep)
	if len(bufs) < 2 || !refused(err) {
		return err
	}
	var errs error
	for i, p := range bufs {
		err := b.sendTo([][]byte{p}, ep)
		if i == 0 && errors.Is(err, syscall.EINVAL) {
			return err // it is not for its size: the local address is gone
		}
		if errs == nil {
			errs = err
		}
	}
	return errs
}

// refused reports whether err may be about several packets that are sent as one. Which of the errors it
// is depends on the version of Linux and on the interface.
func refused(err error) bool {
	var off conn.ErrUDPGSODisabled
	if errors.As(err, &off) {
		err = off.RetryErr // nil: they were sent in another way
	}
	return errors.Is(err, syscall.EMSGSIZE) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EIO)
}

// resend sends an initiation once more. It is not called by the device, which sends nothing while it opens sockets.
func (b *bind) resend(msg []byte, to netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ep, err := b.Bind.ParseEndpoint(to.String()); err == nil {
		_ = b.sendTo([][]byte{msg}, ep) // it was only one more try
	}
}

// families returns in which families there are sockets.
func (b *bind) families() (ipv4, ipv6 bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ipv4, b.ipv6
}

// portInUse reports whether err says that another socket has the port.
func portInUse(err error) bool {
	const wsaEADDRINUSE = syscall.Errno(10048)
	var errno syscall.Errno
	return errors.Is(err, syscall.EADDRINUSE) || errors.As(err, &errno) && errno == wsaEADDRINUSE
}

// probe reports why the default bind could not open port, without disturbing the sockets there are.
func probe(port uint16) error {
	for _, network := range []string{"udp4", "udp6"} {
		c, err := net.ListenUDP(network, &net.UDPAddr{Port: int(port)})
		if err == nil {
			c.Close()
		} else if portInUse(err) {
			return fmt.Errorf("%s: %w", network, err)
		}
	}
	return nil
}
