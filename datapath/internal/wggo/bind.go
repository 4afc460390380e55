package wggo

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/warren-mesh/warren/datapath/internal/sockets"
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
	in, out *gate                                    // packets that are received and written, and those that are read and sent

	mu         sync.Mutex // guards what follows
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

// Open opens the sockets. Some Binds, as conn.StdNetBind, report port 0 where one of the two families is missing, upon
// which the device would forget its port; then the port is chosen here.
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
		} else if !sockets.InUse(err) || try == 9 {
			return nil, 0, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.port, b.ipv4, b.ipv6 = actual, false, false
	for i, fn := range fns {
		name := fn.PrettyName()
		b.ipv4 = b.ipv4 || strings.HasSuffix(name, "v4") || strings.HasSuffix(name, "IPv4")
		b.ipv6 = b.ipv6 || strings.HasSuffix(name, "v6") || strings.HasSuffix(name, "IPv6")
		fns[i] = b.receive(fn)
	}
	if f, ok := b.Bind.(interface{ Families() (ipv4, ipv6 bool) }); ok {
		b.ipv4, b.ipv6 = f.Families()
	} else if !b.ipv4 && !b.ipv6 { // a Bind that does not say
		b.ipv4, b.ipv6 = true, true
	}
	return fns, actual, nil
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
	idle, kept := newIdleTimer(), new(taken)
	return func(packets [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
		b.in.enter(kept.count(packets))
		b.in.wait(idle)
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
				if carries(packets[i][:sizes[i]]) {
					kept.gave(i, unsafe.SliceData(packets[i]))
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
	packets := 0
	for _, m := range bufs {
		if carries(m) {
			packets++
		}
	}
	if packets > 0 {
		b.out.leaving()
	}
	err := b.deliver(bufs, ep)
	if packets > 0 {
		b.out.left(packets)
	}
	if initiation && !errors.Is(err, net.ErrClosed) {
		b.tried(ep.DstToString(), err)
		return nil
	}
	return err
}

// deliver sends to ep. What others than our own sockets refuse is tried in another way.
func (b *bind) deliver(bufs [][]byte, ep conn.Endpoint) error {
	if _, ours := b.Bind.(*sockets.Bind); ours {
		return b.Bind.Send(bufs, ep)
	}
	return b.fromAnywhere(bufs, ep)
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
	err := b.Bind.Send(bufs, ep)
	if len(bufs) < 2 || !refused(err) {
		return err
	}
	var errs error
	for i, p := range bufs {
		err := b.Bind.Send([][]byte{p}, ep)
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
		_ = b.Bind.Send([][]byte{msg}, ep) // it was only one more try
	}
}

// families returns in which families there are sockets.
func (b *bind) families() (ipv4, ipv6 bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ipv4, b.ipv6
}

// probe reports why the default bind could not open port, without disturbing the sockets there are.
func probe(port uint16) error {
	for _, network := range []string{"udp4", "udp6"} {
		c, err := net.ListenUDP(network, &net.UDPAddr{Port: int(port)})
		if err == nil {
			c.Close()
		} else if sockets.InUse(err) {
			return fmt.Errorf("%s: %w", network, err)
		}
	}
	return nil
}
