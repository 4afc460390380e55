package sockets

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// way is by which interface packets to an endpoint leave, from the source that it has. It is asked for now and then.
type way struct {
	due atomic.Int64 // when it is asked for next, in nanoseconds since start
	oif atomic.Int64 // the index of the interface; 0: it was not asked for
}

// waysEvery is how often it is found out where packets to an endpoint go.
const waysEvery = time.Second

// follow has an endpoint forget its source once packets from there leave by another interface: the source is that of a
// network which they do not come through any more. What its path carries may be another thing too. WireGuard of the
// kernel does that as well; wireguard-go does it, of all Binds, for conn.StdNetBind alone.
func (s *socket) follow(e *Endpoint) {
	if e.raw.srcLen == 0 || e.srcIf != 0 || e.dst.Addr().IsLinkLocalUnicast() || e.forgot.Load() {
		return
	}
	now := int64(time.Since(start))
	due := e.raw.way.due.Load()
	if now < due || !e.raw.way.due.CompareAndSwap(due, now+int64(waysEvery)) {
		return
	}
	oif := s.routes.oif(e.dst.Addr(), e.src, s.mark.Load())
	if oif == 0 { // there is no route, which sending says too
		return
	}
	if was := e.raw.way.oif.Swap(oif); was != 0 && was != oif {
		e.ClearSrc()
		e.path.forget() // it is another one
	}
}

// routes asks Linux for routes (rtnetlink(7)), in the namespace in which it was opened.
type routes struct {
	mu     sync.Mutex
	fd     int // a socket that does not wait; negative: there is none
	seq    uint32
	ask    [256]byte
	answer [4096]byte
}

func openRoutes() *routes {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		fd = -1 // then sources are kept
	}
	return &routes{fd: fd}
}

func (r *routes) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fd >= 0 {
		_ = unix.Close(r.fd)
		r.fd = -1
	}
}

// oif returns the index of the interface by which packets leave; 0: by none.
func (r *routes) oif(dst, src netip.Addr, mark uint32) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fd < 0 {
		return 0
	}
	r.seq++
	if _, err := unix.Write(r.fd, appendRouteRequest(r.ask[:0], r.seq, dst, src, mark)); err != nil {
		return 0
	}
	// Linux has answered by the time that it has taken the question. An answer of before is one that was not read.
	for {
		n, err := unix.Read(r.fd, r.answer[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return 0
		}
		if oif, ours := parseRoute(r.answer[:n], r.seq); ours {
			return oif
		}
	}
}

func appendRouteRequest(b []byte, seq uint32, dst, src netip.Addr, mark uint32) []byte {
	family := byte(unix.AF_INET)
	if dst.Is6() {
		family = unix.AF_INET6
	}
	b = append(b, make([]byte, unix.SizeofNlMsghdr+unix.SizeofRtMsg)...)
	m := b[unix.SizeofNlMsghdr:]
	m[0], m[1], m[2] = family, byte(dst.BitLen()), byte(src.BitLen())
	b = appendAddr(b, unix.RTA_DST, dst)
	b = appendAddr(b, unix.RTA_SRC, src)
	if mark != 0 {
		b = appendAttr(b, unix.RTA_MARK, 4)
		b = ne.AppendUint32(b, mark)
	}
	ne.PutUint32(b[0:], uint32(len(b)))
	ne.PutUint16(b[4:], unix.RTM_GETROUTE)
	ne.PutUint16(b[6:], unix.NLM_F_REQUEST)
	ne.PutUint32(b[8:], seq)
	return b
}

func appendAddr(b []byte, typ uint16, a netip.Addr) []byte {
	if a.Is4() {
		raw := a.As4()
		return append(appendAttr(b, typ, len(raw)), raw[:]...)
	}
	raw := a.As16()
	return append(appendAttr(b, typ, len(raw)), raw[:]...)
}

// appendAttr appends the header of an attribute. All that are used here are of a size that needs no padding.
func appendAttr(b []byte, typ uint16, size int) []byte {
	b = ne.AppendUint16(b, uint16(unix.SizeofRtAttr+size))
	return ne.AppendUint16(b, typ)
}

// parseRoute returns the interface of the route that b has; 0: it has none. ours: it answers question seq.
func parseRoute(b []byte, seq uint32) (oif int64, ours bool) {
	if len(b) < unix.SizeofNlMsghdr || ne.Uint32(b[8:]) != seq {
		return 0, false
	}
	if ne.Uint16(b[4:]) != unix.RTM_NEWROUTE || len(b) < unix.SizeofNlMsghdr+unix.SizeofRtMsg {
		return 0, true
	}
	for b = b[unix.SizeofNlMsghdr+unix.SizeofRtMsg:]; len(b) >= unix.SizeofRtAttr; {
		n := int(ne.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			break
		}
		if ne.Uint16(b[2:]) == unix.RTA_OIF && n == unix.SizeofRtAttr+4 {
			return int64(ne.Uint32(b[unix.SizeofRtAttr:])), true
		}
		b = b[min(len(b), (n+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1)):]
	}
	return 0, true
}
