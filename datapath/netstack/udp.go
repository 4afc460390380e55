package netstack

import (
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// UDPConn is a UDP socket in the mesh, connected (DialContext) or not (ListenPacket). It does what a net.UDPConn does,
// and takes and gives many datagrams a call. Its methods may be called from any goroutine.
//
// It is not one of the stack's, which it stands beside: a datagram costs a fraction of what it does there.
type UDPConn struct {
	n       *Net
	network string
	local   netip.AddrPort // the address may be a wildcard
	remote  netip.AddrPort // zero: not connected
	family  family

	localAddr, remoteAddr net.Addr // remoteAddr is nil where not connected

	once   sync.Once
	closed chan struct{}
	atEnd  func() // called once, by Close

	in            udpQueue
	reading       sync.Mutex // one Read at a time: each may take the one token in in.ready
	readDeadline  deadline
	writeDeadline deadline
}

var (
	_ net.Conn       = (*UDPConn)(nil)
	_ net.PacketConn = (*UDPConn)(nil)
)

// Datagram is one datagram of ReadBatch and WriteBatch.
type Datagram struct {
	Data []byte         // ReadBatch fills it and cuts it to what it read
	Addr netip.AddrPort // who sent it, or is to have it; where the socket is connected, WriteBatch does not look at it
}

// The most that a datagram may have, in bytes: what an IP packet holds, less headers.
const (
	maxUDP4 = 65535 - 20 - 8
	maxUDP6 = 65535 - 8
)

// openUDP opens a socket on from, whose port may be 0, or one that is connected to a remote address.
func (n *Net) openUDP(network string, f family, from, remote netip.AddrPort) (*UDPConn, error) {
	c := &UDPConn{n: n, network: network, local: from, remote: remote, family: f, closed: make(chan struct{})}
	if remote.IsValid() {
		if remote.Port() == 0 {
			return nil, os.NewSyscallError("connect", syscall.EINVAL)
		}
		src := n.link.table.Load().source(remote.Addr())
		if !src.IsValid() {
			return nil, os.NewSyscallError("connect", syscall.ENETUNREACH)
		}
		c.local = netip.AddrPortFrom(src, 0)
		c.remoteAddr = net.UDPAddrFromAddrPort(remote)
	}
	c.in.ready = make(chan struct{}, 1)
	c.readDeadline.init()
	c.writeDeadline.init()
	if err := n.link.udp.add(c); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	c.localAddr = net.UDPAddrFromAddrPort(c.local)
	return c, nil
}

// sockets are the UDP sockets of a link. That there are many at one port, each at an address, costs a datagram nothing.
type sockets struct {
	mu        sync.RWMutex
	four, six map[uint16]*holders // by port, of each family
}

// holders are who has a port in one family: one at all addresses, or others at one each. A connected socket is at one.
type holders struct {
	all *UDPConn
	at  map[netip.Addr]*UDPConn
}

// ports are those of the families that c is for.
func (s *sockets) ports(c *UDPConn) []map[uint16]*holders {
	if s.four == nil {
		s.four, s.six = make(map[uint16]*holders), make(map[uint16]*holders)
	}
	switch all := []map[uint16]*holders{s.four, s.six}; {
	case !c.family.v6:
		return all[:1]
	case !c.family.v4:
		return all[1:]
	default:
		return all
	}
}

// The ports that are chosen where none is asked for, as Linux has them.
const (
	firstEphemeral = 32768
	lastEphemeral  = 60999
)

// add opens a port, and chooses one where c has none.
func (s *sockets) add(c *UDPConn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	port := c.local.Port()
	if port == 0 {
		const all = lastEphemeral - firstEphemeral + 1
		for i, start := 0, rand.IntN(all); ; i++ {
			if i == all {
				return syscall.EADDRINUSE
			}
			if port = uint16(firstEphemeral + (start+i)%all); !s.taken(c, port) {
				break
			}
		}
		c.local = netip.AddrPortFrom(c.local.Addr(), port)
	} else if s.taken(c, port) {
		return syscall.EADDRINUSE
	}
	for _, ports := range s.ports(c) {
		h := ports[port]
		if h == nil {
			h = new(holders)
			ports[port] = h
		}
		if a := c.local.Addr(); a.IsUnspecified() {
			h.all = c
		} else {
			if h.at == nil {
				h.at = make(map[netip.Addr]*UDPConn, 1)
			}
			h.at[a] = c
		}
	}
	return nil
}

// taken reports whether another socket has a port at an address that is c's too. mu is held.
func (s *sockets) taken(c *UDPConn, port uint16) bool {
	a := c.local.Addr()
	return slices.ContainsFunc(s.ports(c), func(ports map[uint16]*holders) bool {
		h := ports[port]
		return h != nil && (h.all != nil || a.IsUnspecified() || h.at[a] != nil)
	})
}

// remove closes the port of a socket that was added.
func (s *sockets) remove(c *UDPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ports := range s.ports(c) {
		h := ports[c.local.Port()]
		if a := c.local.Addr(); a.IsUnspecified() {
			h.all = nil
		} else {
			delete(h.at, a)
		}
		if h.all == nil && len(h.at) == 0 {
			delete(ports, c.local.Port())
		}
	}
}

// find returns the socket for a datagram; nil: there is none. A connected one is for what its remote sent alone.
func (s *sockets) find(from, to netip.AddrPort) *UDPConn {
	s.mu.RLock()
	defer s.mu.RUnlock()
	ports := s.six
	if to.Addr().Is4() {
		ports = s.four
	}
	h := ports[to.Port()]
	switch {
	case h == nil:
		return nil
	case h.all != nil:
		return h.all
	}
	if c := h.at[to.Addr()]; c != nil && (!c.remote.IsValid() || c.remote == from) {
		return c
	}
	return nil
}

// take delivers b, a packet that came to this node, where it is a datagram for one of the sockets, or tells one that
// its datagrams are refused. What it does not take is the stack's, which answers for ports that nobody has, and puts
// fragments together (takeWhole).
func (s *sockets) take(b []byte) bool {
	if from, to, payload, ok := parseUDP(b); ok {
		c := s.find(from, to)
		if c == nil {
			return false
		}
		c.in.put(payload, from)
		return true
	}
	if from, to, ok := refusedUDP(b); ok {
		if c := s.find(to, from); c != nil && c.remote == to && c.local.Addr() == from.Addr() {
			c.in.refuse()
			return true
		}
	}
	return false
}

// Read reads a datagram of a connected socket, or of anybody. What does not fit b is lost.
func (c *UDPConn) Read(b []byte) (int, error) {
	n, _, err := c.read(b)
	return n, err
}

// ReadFrom reads a datagram, and says who sent it.
func (c *UDPConn) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, err := c.read(b)
	if err != nil {
		return n, nil, err
	}
	return n, net.UDPAddrFromAddrPort(from), nil
}

// ReadFromUDPAddrPort is ReadFrom without its allocations.
func (c *UDPConn) ReadFromUDPAddrPort(b []byte) (int, netip.AddrPort, error) { return c.read(b) }

func (c *UDPConn) read(b []byte) (n int, from netip.AddrPort, err error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	err = c.await(func() (ok bool, err error) {
		n, from, ok, err = c.in.take(b)
		return ok, err
	})
	return n, from, err
}

// ReadBatch reads as many datagrams as there are, one at least, into the Data of ds, which it cuts to size. It returns
// how many.
func (c *UDPConn) ReadBatch(ds []Datagram) (n int, err error) {
	if len(ds) == 0 {
		return 0, nil
	}
	c.reading.Lock()
	defer c.reading.Unlock()
	err = c.await(func() (bool, error) {
		var err error
		n, err = c.in.takeMany(ds)
		return n > 0, err
	})
	return n, err
}

// await repeats try until it says that it is done. reading is held.
func (c *UDPConn) await(try func() (done bool, err error)) error {
	for {
		changed, expired := c.readDeadline.wait()
		switch {
		case c.isClosed():
			return c.opError("read", net.ErrClosed)
		case expired:
			return c.opError("read", os.ErrDeadlineExceeded)
		}
		done, err := try()
		if err != nil {
			return c.opError("read", os.NewSyscallError("read", err))
		}
		if done {
			return nil
		}
		select {
		case <-c.in.ready:
		case <-changed:
		case <-c.closed:
		case <-c.n.done:
		}
	}
}

// Write sends a datagram to the address that the socket is connected to.
func (c *UDPConn) Write(b []byte) (int, error) {
	if c.remoteAddr == nil {
		return 0, c.opError("write", errors.New("no destination: the socket is not connected"))
	}
	return c.write(b, c.remote)
}

// WriteTo sends a datagram to an address, a *net.UDPAddr.
func (c *UDPConn) WriteTo(b []byte, to net.Addr) (int, error) {
	a, ok := to.(*net.UDPAddr)
	if !ok || a == nil {
		return 0, c.opError("write", &net.AddrError{Err: "not a UDP address", Addr: addrString(to)})
	}
	return c.WriteToUDPAddrPort(b, a.AddrPort())
}

func addrString(a net.Addr) string {
	if a == nil {
		return "<nil>"
	}
	return a.String()
}

// WriteToUDPAddrPort is WriteTo for those who have no net.Addr.
func (c *UDPConn) WriteToUDPAddrPort(b []byte, to netip.AddrPort) (int, error) {
	if c.remoteAddr != nil {
		return 0, c.opError("write", net.ErrWriteToConnected)
	}
	return c.write(b, netip.AddrPortFrom(to.Addr().Unmap(), to.Port()))
}

// WriteBatch sends datagrams, in their order, and returns how many it did. The one after those is what the error is
// about.
func (c *UDPConn) WriteBatch(ds []Datagram) (int, error) {
	for i, d := range ds {
		to := c.remote
		if c.remoteAddr == nil {
			to = netip.AddrPortFrom(d.Addr.Addr().Unmap(), d.Addr.Port())
		}
		if _, err := c.write(d.Data, to); err != nil {
			return i, err
		}
	}
	return len(ds), nil
}

func (c *UDPConn) write(b []byte, to netip.AddrPort) (int, error) {
	if c.isClosed() {
		return 0, c.opError("write", net.ErrClosed)
	}
	if _, expired := c.writeDeadline.wait(); expired {
		return 0, c.opError("write", os.ErrDeadlineExceeded)
	}
	dst := to.Addr()
	if !to.IsValid() || dst.IsUnspecified() || dst.Zone() != "" {
		return 0, c.opError("write", &net.AddrError{Err: "not a destination", Addr: to.String()})
	}
	most := maxUDP6
	if dst.Is4() {
		most = maxUDP4
	}
	link := c.n.link
	t := link.table.Load()
	v, _ := t.send(dst)
	var errno error
	switch {
	case v == unreachable:
		return 0, c.opError("write", &WaitError{Addr: dst, Err: ErrNoRoute})
	case len(b) > most:
		errno = syscall.EMSGSIZE
	case to.Port() == 0:
		errno = syscall.EINVAL
	case dst == broadcast:
		errno = syscall.EACCES
	case !c.family.has(dst):
		errno = syscall.ENETUNREACH
	case c.remoteAddr != nil:
		errno = c.in.refused()
	}
	src := c.local.Addr()
	if errno == nil && src.IsUnspecified() {
		if src = t.source(dst); !src.IsValid() {
			errno = syscall.ENETUNREACH
		}
	}
	if errno == nil && src.Is4() != dst.Is4() {
		errno = syscall.ENETUNREACH
	}
	if errno != nil {
		return 0, c.opError("write", os.NewSyscallError("write", errno))
	}
	link.sendUDP(v, netip.AddrPortFrom(src, c.local.Port()), to, b)
	return len(b), nil
}

func (c *UDPConn) isClosed() bool {
	select {
	case <-c.closed:
		return true
	case <-c.n.done:
		return true
	default:
		return false
	}
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

func (c *UDPConn) opError(op string, err error) error {
	e := &net.OpError{Op: op, Net: c.network, Source: c.localAddr, Addr: c.remoteAddr, Err: err}
	if c.remoteAddr == nil {
		e.Source, e.Addr = nil, c.localAddr
	}
	return e
}

// Lost returns how many datagrams arrived that the socket had no room for: it holds 4 MiB, of which each takes 96 bytes
// beside its data.
func (c *UDPConn) Lost() uint64 {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	return c.in.lost
}

// Close ends the socket. A second call returns net.ErrClosed, as those of the net package do.
func (c *UDPConn) Close() error {
	first := false
	c.once.Do(func() {
		first = true
		close(c.closed)
		c.n.link.udp.remove(c)
		c.in.close()
		if c.atEnd != nil {
			c.atEnd()
		}
	})
	if !first {
		return c.opError("close", net.ErrClosed)
	}
	return nil
}

// LocalAddr is a *net.UDPAddr.
func (c *UDPConn) LocalAddr() net.Addr { return c.localAddr }

// RemoteAddr is a *net.UDPAddr, or nil where the socket is not connected.
func (c *UDPConn) RemoteAddr() net.Addr { return c.remoteAddr }

// SetDeadline is SetReadDeadline and SetWriteDeadline.
func (c *UDPConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline ends reading at t, which fails from then on with an error that is os.ErrDeadlineExceeded.
func (c *UDPConn) SetReadDeadline(t time.Time) error { return c.setDeadline(&c.readDeadline, t) }

// SetWriteDeadline ends writing at t, as SetReadDeadline does reading. A write that waits for room in the device's queue
// is not ended.
func (c *UDPConn) SetWriteDeadline(t time.Time) error { return c.setDeadline(&c.writeDeadline, t) }

func (c *UDPConn) setDeadline(d *deadline, t time.Time) error {
	if c.isClosed() {
		return c.opError("set", net.ErrClosed)
	}
	d.set(t)
	return nil
}

// udpQueue are the datagrams that a socket received. What does not fit is lost, as on any host. While there is none,
// it has no memory.
type udpQueue struct {
	ready chan struct{} // capacity 1: there is something to take

	mu     sync.Mutex
	list   []datagram
	head   int // the first in list that was not taken
	size   int // bytes of all, with what they cost beside
	lost   uint64
	filled *slab // what comes next goes into
	err    error
	closed bool
}

// datagram is what was received.
type datagram struct {
	data []byte
	in   *slab // nil: data is by itself
	from netip.AddrPort
}

// slab has the data of datagrams one after another.
type slab struct {
	buf  [slabSize]byte
	used int
	left int // datagrams in it that were not taken
}

const (
	slabSize = 32 << 10
	// queueBytes bounds a queue, each datagram with datagramCost on top.
	queueBytes   = 4 << 20
	datagramCost = 96
	// keptList is how long a list stays when it is empty.
	keptList = 1024
)

var slabs = sync.Pool{New: func() any { return new(slab) }}

// put appends a datagram, which is the caller's again when it returns.
func (q *udpQueue) put(data []byte, from netip.AddrPort) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return
	}
	if q.size+len(data)+datagramCost > queueBytes {
		q.lost++
		return
	}
	d := datagram{from: from}
	if len(data) > slabSize {
		d.data = slices.Clone(data)
	} else {
		s := q.filled
		if s == nil || s.used+len(data) > slabSize {
			s = slabs.Get().(*slab)
			s.used, s.left = 0, 0
			q.filled = s // that before is given back with the last datagram in it, or is garbage where there is none
		}
		d.data, d.in = s.buf[s.used:s.used+len(data)], s
		copy(d.data, data)
		s.used += len(data)
		s.left++
	}
	if len(q.list) == cap(q.list) && q.head > len(q.list)/2 {
		n := copy(q.list, q.list[q.head:])
		clear(q.list[n:])
		q.list, q.head = q.list[:n], 0
	}
	q.list = append(q.list, d)
	q.size += len(data) + datagramCost
	if len(q.list)-q.head == 1 {
		q.wake()
	}
}

func (q *udpQueue) wake() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// take copies the first datagram to b. ok is false where there is none.
func (q *udpQueue) take(b []byte) (n int, from netip.AddrPort, ok bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err = q.err; err != nil {
		q.err = nil
		return 0, netip.AddrPort{}, false, err
	}
	if q.head == len(q.list) {
		return 0, netip.AddrPort{}, false, nil
	}
	n, from = q.next(b)
	return n, from, true, nil
}

func (q *udpQueue) takeMany(ds []Datagram) (n int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if err = q.err; err != nil {
		q.err = nil
		return 0, err
	}
	for n < len(ds) && q.head < len(q.list) {
		size, from := q.next(ds[n].Data)
		ds[n].Data, ds[n].Addr = ds[n].Data[:size], from
		n++
	}
	return n, nil
}

// next takes the first datagram. mu is held.
func (q *udpQueue) next(b []byte) (n int, from netip.AddrPort) {
	d := &q.list[q.head]
	n, from = copy(b, d.data), d.from
	q.size -= len(d.data) + datagramCost
	if s := d.in; s != nil {
		if s.left--; s.left == 0 && s != q.filled {
			slabs.Put(s)
		}
	}
	*d = datagram{}
	if q.head++; q.head == len(q.list) {
		q.empty()
	}
	return n, from
}

// empty gives memory back. mu is held.
func (q *udpQueue) empty() {
	if q.list, q.head = q.list[:0], 0; cap(q.list) > keptList {
		q.list = nil
	}
	if q.filled != nil {
		slabs.Put(q.filled)
		q.filled = nil
	}
}

// refuse has the next call fail: nobody has the port at the remote.
func (q *udpQueue) refuse() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.err = syscall.ECONNREFUSED
	q.wake()
}

// refused returns what refuse said, once.
func (q *udpQueue) refused() (err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	err, q.err = q.err, nil
	return err
}

// close drops everything.
func (q *udpQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	for q.head < len(q.list) {
		q.next(nil)
	}
	q.list = nil
}
