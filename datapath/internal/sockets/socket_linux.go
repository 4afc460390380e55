package sockets

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
)

const batchSize = BatchSize

// mmsghdr is one message of sendmmsg and recvmmsg (struct mmsghdr in sys/socket.h).
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

// socket is one of a Bind's.
type socket struct {
	c       *net.UDPConn
	raw     syscall.RawConn
	is6     bool
	joins   bool // Linux takes joined packets
	mark    atomic.Uint32
	routes  *routes
	senders sync.Pool
}

func openSocket(network string, port uint16, buffer int) (*socket, error) {
	s := &socket{is6: network == networks[ipv6]}
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if bad := raw.Control(func(fd uintptr) { err = s.options(int(fd), buffer) }); bad != nil {
			return bad
		}
		return err
	}}
	c, err := lc.ListenPacket(context.Background(), network, ":"+strconv.Itoa(int(port)))
	if err != nil {
		return nil, err
	}
	s.c = c.(*net.UDPConn)
	if s.raw, err = s.c.SyscallConn(); err != nil {
		s.c.Close()
		return nil, err
	}
	s.routes = openRoutes()
	s.senders.New = func() any { return newSender(s) }
	return s, nil
}

// options sets what the socket has to have before it is bound.
func (s *socket) options(fd, buffer int) error {
	for _, o := range [][2]int{{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF}} {
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, o[0], buffer) != nil { // which takes CAP_NET_ADMIN
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, o[1], buffer)
		}
	}
	level, info := unix.IPPROTO_IP, unix.IP_PKTINFO
	if s.is6 {
		level, info = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return os.NewSyscallError("setsockopt IPV6_V6ONLY", err)
		}
	}
	if err := unix.SetsockoptInt(fd, level, info, 1); err != nil {
		return os.NewSyscallError("setsockopt PKTINFO", err)
	}
	_, err := unix.GetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT)
	s.joins = err == nil                                          // since Linux 4.18
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1) // since Linux 5.0
	return nil
}

func (s *socket) close() error {
	if s == nil {
		return nil
	}
	s.routes.close()
	return s.c.Close()
}

func (s *socket) port() uint16 { return uint16(s.c.LocalAddr().(*net.UDPAddr).Port) }

func (s *socket) setMark(mark uint32) (err error) {
	if bad := s.raw.Control(func(fd uintptr) {
		err = os.NewSyscallError("setsockopt SO_MARK", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)))
	}); bad != nil {
		return bad
	}
	if err == nil {
		s.mark.Store(mark)
	}
	return err
}

func (s *socket) sizes() (receive, send int) {
	_ = s.raw.Control(func(fd uintptr) {
		receive, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF)
		send, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF)
	})
	return receive, send
}

// rawEndpoint is an Endpoint as Linux has it.
type rawEndpoint struct {
	name    [unix.SizeofSockaddrInet6]byte // a struct sockaddr_in or sockaddr_in6
	nameLen uint32
	src     [sourceSpace]byte // a control message; none where srcLen is 0
	srcLen  int
	way     way
}

var (
	sourceSpace4 = unix.CmsgSpace(unix.SizeofInet4Pktinfo)
	sourceSpace6 = unix.CmsgSpace(unix.SizeofInet6Pktinfo)
	sizeSpace    = unix.CmsgSpace(2)
)

const (
	sourceSpace  = 64 // bytes, more than the larger of the two
	controlSpace = 128
)

var ne = binary.NativeEndian

func (r *rawEndpoint) init(e *Endpoint) {
	if a := e.dst.Addr(); a.Is4() {
		ne.PutUint16(r.name[0:], unix.AF_INET)
		binary.BigEndian.PutUint16(r.name[2:], e.dst.Port())
		b := a.As4()
		copy(r.name[4:], b[:])
		r.nameLen = unix.SizeofSockaddrInet4
	} else {
		ne.PutUint16(r.name[0:], unix.AF_INET6)
		binary.BigEndian.PutUint16(r.name[2:], e.dst.Port())
		b := a.As16()
		copy(r.name[8:], b[:])
		ne.PutUint32(r.name[24:], uint32(zoneIndex(a.Zone())))
		r.nameLen = unix.SizeofSockaddrInet6
	}
	switch {
	case !e.src.IsValid() || e.src.Is4() != e.dst.Addr().Is4():
	case e.src.Is4():
		body := control(r.src[:], unix.IPPROTO_IP, unix.IP_PKTINFO, unix.SizeofInet4Pktinfo)
		b := e.src.As4()
		copy(body[4:], b[:]) // ipi_spec_dst
		r.srcLen = sourceSpace4
	default:
		body := control(r.src[:], unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, unix.SizeofInet6Pktinfo)
		b := e.src.As16()
		copy(body, b[:])
		ne.PutUint32(body[16:], uint32(e.srcIf))
		r.srcLen = sourceSpace6
	}
}

// control puts the header of a control message into b and returns where its body goes.
func control(b []byte, level, typ, size int) []byte {
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = int32(level), int32(typ)
	h.SetLen(unix.CmsgLen(size))
	return b[unix.CmsgLen(0):][:size]
}

// zoneIndex returns the index of the interface of a zone; 0: there is none.
func zoneIndex(zone string) int {
	if zone == "" {
		return 0
	}
	if i, err := strconv.Atoi(zone); err == nil {
		return i
	}
	i, err := net.InterfaceByName(zone)
	if err != nil {
		return 0
	}
	return i.Index
}

// sender is one call of send at a time.
type sender struct {
	msgs     [batchSize]mmsghdr
	iovs     [batchSize]unix.Iovec
	controls [batchSize][controlSpace]byte
	firsts   [batchSize + 1]int // where the packets of each message begin
	name     [unix.SizeofSockaddrInet6]byte

	do    func(fd uintptr) bool // once, so that it need not be allocated for each call
	from  int
	to    int
	taken int
	errno syscall.Errno
}

func newSender(*socket) *sender {
	s := new(sender)
	s.do = s.write
	return s
}

// write has Linux take messages; false: it has no room.
func (s *sender) write(fd uintptr) bool {
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&s.msgs[s.from])), uintptr(s.to-s.from), unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return false
		}
		s.taken, s.errno = int(n), errno
		return true
	}
}

// send sends packets to e, in batches.
func (s *socket) send(packets [][]byte, e *Endpoint) (err error) {
	s.follow(e)
	x := s.senders.Get().(*sender)
	x.name = e.raw.name
	for len(packets) > 0 && !errors.Is(err, net.ErrClosed) {
		n := min(len(packets), batchSize)
		err = errors.Join(err, s.batch(x, packets[:n], e, s.most(e)))
		packets = packets[n:]
	}
	clear(x.iovs[:]) // the packets are the caller's again
	s.senders.Put(x)
	return err
}

// most is up to which size packets to e may be joined.
func (s *socket) most(e *Endpoint) int {
	if !s.joins {
		return 0
	}
	return e.path.joins()
}

// batch sends packets that fit one sender, of which those of up to so many bytes may be joined. The error is the first.
func (s *socket) batch(x *sender, packets [][]byte, e *Endpoint, most int) (first error) {
	n := x.prepare(packets, e, most)
	joined, bare := 0, -1 // the largest size that was, and the message that lost its source
	for i := 0; i < n; {
		x.from, x.to, x.taken, x.errno = i, n, 0, 0
		err := s.raw.Write(x.do)
		runtime.KeepAlive(packets)
		if err != nil {
			return closed(err)
		}
		if x.errno == 0 {
			if bare == i {
				e.ClearSrc()
			}
			for ; x.taken > 0; x.taken-- {
				if x.firsts[i+1]-x.firsts[i] > 1 {
					joined = max(joined, len(packets[x.firsts[i]]))
				}
				i++
			}
			continue
		}
		part := packets[x.firsts[i]:x.firsts[i+1]]
		src := x.msgs[i].hdr.Control != nil && !x.forgot(i)
		switch {
		case src && sourceless(x.errno):
			// The address may be gone from the host. Without it the message may go.
			x.forget(i, len(part))
			bare = i
			continue
		case len(part) > 1 && refused(x.errno):
			if e.path.refused(len(part[0])); x.errno == unix.EIO {
				e.path.refused(1) // it is not about the size
			}
			err = s.alone(part, e)
			joined = 0 // the path is not what it was
		default:
			err = os.NewSyscallError("sendmmsg", x.errno)
		}
		if first == nil {
			first = err
		}
		i++
	}
	if joined > 0 {
		e.path.carried(joined)
	}
	return first
}

// alone sends packets one by one, by a sender of its own.
func (s *socket) alone(packets [][]byte, e *Endpoint) error {
	x := s.senders.Get().(*sender)
	x.name = e.raw.name
	err := s.batch(x, packets, e, 0)
	clear(x.iovs[:])
	s.senders.Put(x)
	return err
}

// prepare makes messages of packets, joins those of up to so many bytes, and returns how many messages it made.
func (x *sender) prepare(packets [][]byte, e *Endpoint, most int) (n int) {
	src := e.raw.src[:e.raw.srcLen]
	if e.forgot.Load() {
		src = nil
	}
	for i := 0; i < len(packets); n++ {
		parts := 1
		if len(packets[i]) <= most {
			parts = segment(packets[i:])
		}
		for j, p := range packets[i : i+parts] {
			v := &x.iovs[i+j]
			v.Base = unsafe.SliceData(p)
			v.SetLen(len(p))
		}
		h := &x.msgs[n].hdr
		h.Name, h.Namelen = &x.name[0], e.raw.nameLen
		h.Iov = &x.iovs[i]
		h.SetIovlen(parts)
		b := x.controls[n][:0]
		b = append(b, src...)
		if parts > 1 {
			at := len(b)
			b = b[:at+sizeSpace]
			ne.PutUint16(control(b[at:], unix.IPPROTO_UDP, unix.UDP_SEGMENT, 2), uint16(len(packets[i])))
		}
		if h.Control = nil; len(b) > 0 {
			h.Control = &x.controls[n][0]
		}
		h.SetControllen(len(b))
		x.firsts[n] = i
		i += parts
		x.firsts[n+1] = i
	}
	return n
}

// forgot reports whether message i has no source.
func (x *sender) forgot(i int) bool {
	h := (*unix.Cmsghdr)(unsafe.Pointer(&x.controls[i][0]))
	return h.Level == unix.IPPROTO_UDP
}

// forget takes the source from message i of so many parts.
func (x *sender) forget(i, parts int) {
	h := &x.msgs[i].hdr
	if parts == 1 {
		h.Control = nil
		h.SetControllen(0)
		return
	}
	size := x.iovs[x.firsts[i]].Len
	ne.PutUint16(control(x.controls[i][:], unix.IPPROTO_UDP, unix.UDP_SEGMENT, 2), uint16(size))
	h.SetControllen(sizeSpace)
}

// sourceless reports errors that a source makes which the host has no more, or no way from.
func sourceless(errno syscall.Errno) bool {
	switch errno {
	case unix.EINVAL, unix.EADDRNOTAVAIL, unix.ENETUNREACH, unix.EHOSTUNREACH, unix.ENODEV:
		return true
	}
	return false
}

// tooLarge reports errors that are about a message's size alone.
func tooLarge(errno syscall.Errno) bool { return errno == unix.EMSGSIZE || errno == unix.EIO }

// refused reports errors by which Linux may refuse joined packets: they do not fit the underlay (EINVAL, EMSGSIZE), or
// it cannot compute their checksums (EIO). Each would be sent, in fragments, alone.
func refused(errno syscall.Errno) bool { return tooLarge(errno) || errno == unix.EINVAL }

// closed is err, or net.ErrClosed itself, by which wireguard-go knows that it need not say anything.
func closed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return net.ErrClosed
	}
	return err
}

const (
	// slots is how many messages are received at once, and slotSize what each may have: Linux joins packets to as much
	// as an IP packet holds. What is not written to is not there.
	slots    = 32
	slotSize = 1 << 16
)

// receiver is one socket's, for the one goroutine that receives from it.
type receiver struct {
	s        *socket
	arena    []byte
	msgs     [slots]mmsghdr
	iovs     [slots]unix.Iovec
	names    [slots][unix.SizeofSockaddrInet6]byte
	controls [slots][controlSpace]byte
	do       func(fd uintptr) bool
	n        int
	errno    syscall.Errno

	// What was received and not handed out.
	next int // message
	at   int // in it

	size  int       // of the segments of message next
	from  *Endpoint // of message next
	known endpoints
}

func (s *socket) receiver() conn.ReceiveFunc {
	r := &receiver{s: s, arena: make([]byte, slots*slotSize)}
	r.do = r.read
	for i := range r.msgs {
		r.iovs[i].Base = &r.arena[i*slotSize]
		r.iovs[i].SetLen(slotSize)
		h := &r.msgs[i].hdr
		h.Name, h.Iov, h.Control = &r.names[i][0], &r.iovs[i], &r.controls[i][0]
		h.SetIovlen(1)
	}
	if s.is6 {
		return r.receiveIPv6
	}
	return r.receiveIPv4
}

// wireguard-go's log calls a receive function by its name.
func (r *receiver) receiveIPv4(packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
	return r.receive(packets, sizes, from)
}

func (r *receiver) receiveIPv6(packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
	return r.receive(packets, sizes, from)
}

// read takes the messages there are; false: there is none.
func (r *receiver) read(fd uintptr) bool {
	for i := range r.msgs {
		h := &r.msgs[i].hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(controlSpace)
	}
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&r.msgs[0])), slots, unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			return false
		}
		r.n, r.errno = int(n), errno
		return true
	}
}

// receive hands out packets in the order in which they came.
func (r *receiver) receive(packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
	if r.next == r.n {
		r.n, r.next, r.at, r.errno = 0, 0, 0, 0
		if err := r.s.raw.Read(r.do); err != nil {
			return 0, closed(err)
		}
		if r.errno != 0 {
			r.n = 0
			return 0, os.NewSyscallError("recvmmsg", r.errno)
		}
	}
	n := 0
	for n < len(packets) && r.next < r.n {
		m := &r.msgs[r.next]
		if r.at == 0 {
			r.look(m)
		}
		whole := r.arena[r.next*slotSize:][:m.n]
		size := min(r.size, len(whole)-r.at)
		sizes[n] = copy(packets[n], whole[r.at:r.at+size])
		from[n] = r.from
		n++
		if r.at += size; r.at >= len(whole) {
			r.next++
			r.at = 0
		}
	}
	return n, nil
}

// look finds out about message m whose packets those are and of what size.
func (r *receiver) look(m *mmsghdr) {
	src, srcIf, size := parseControl(r.controls[r.next][:min(controlSpace, int(m.hdr.Controllen))])
	if r.size = size; size <= 0 {
		r.size = int(m.n)
	}
	r.from = r.known.get(sockaddr(&r.names[r.next]), src, srcIf)
}

// sockaddr is the address in a struct sockaddr_in or sockaddr_in6.
func sockaddr(b *[unix.SizeofSockaddrInet6]byte) netip.AddrPort {
	port := binary.BigEndian.Uint16(b[2:])
	if ne.Uint16(b[0:]) == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), port)
	}
	a := netip.AddrFrom16([16]byte(b[8:24])).Unmap()
	if zone := ne.Uint32(b[24:]); zone != 0 && a.IsLinkLocalUnicast() {
		a = a.WithZone(strconv.Itoa(int(zone)))
	}
	return netip.AddrPortFrom(a, port)
}

// parseControl returns what control messages say of where a message arrived, and the size of the packets that it was
// joined from; 0: it was not.
func parseControl(b []byte) (src netip.Addr, srcIf, size int) {
	for len(b) >= unix.SizeofCmsghdr {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
		n := int(h.Len)
		if n < unix.CmsgLen(0) || n > len(b) {
			return src, srcIf, size
		}
		body := b[unix.CmsgLen(0):n]
		switch {
		case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(body) >= 4:
			size = int(int32(ne.Uint32(body)))
		case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(body) >= 2:
			size = int(ne.Uint16(body))
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(body) >= unix.SizeofInet4Pktinfo:
			src, srcIf = netip.AddrFrom4([4]byte(body[4:8])), int(ne.Uint32(body))
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(body) >= unix.SizeofInet6Pktinfo:
			src, srcIf = netip.AddrFrom16([16]byte(body[:16])), int(ne.Uint32(body[16:]))
		}
		b = b[min(len(b), unix.CmsgSpace(n-unix.CmsgLen(0))):]
	}
	return src, srcIf, size
}
