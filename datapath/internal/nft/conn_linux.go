package nft

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// answerTime is how long the kernel may take for one datagram. It answers while it is asked, but may wait for
	// others who change its rules.
	answerTime = 30 * time.Second
	// patience is how long something is read, or decided, again when the rules of the host change meanwhile.
	patience = 2 * time.Second
)

// conn is a netlink socket. The package netlink opens it; datagrams are read here, so that an answer
// that comes late is told from the one that is waited for, and a list that was disturbed from another.
type conn struct {
	nl     *netlink.Conn
	raw    syscall.RawConn
	pid    uint32
	seq    uint32
	buf    []byte
	closed *atomic.Bool
	late   error // of an answer that takes too long
}

func dial(do func(func() error) error, closed *atomic.Bool) (*conn, error) {
	var nl *netlink.Conn
	err := do(func() (err error) {
		nl, err = netlink.Dial(unix.NETLINK_NETFILTER, nil)
		return err
	})
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		err = fmt.Errorf("%w: %w: the kernel has no nfnetlink (CONFIG_NETFILTER_NETLINK)", errors.ErrUnsupported, unix.EPROTONOSUPPORT)
	}
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	raw, err := nl.SyscallConn()
	for _, o := range []netlink.ConnOption{netlink.CapAcknowledge, netlink.ExtendedAcknowledge} {
		if err == nil {
			err = nl.SetOption(o, true)
		}
	}
	if err != nil {
		nl.Close()
		return nil, err
	}
	_ = nl.SetReadBuffer(1 << 20) // as much as may be had
	return &conn{nl: nl, raw: raw, pid: nl.PID(), buf: make([]byte, 1<<16), closed: closed}, nil
}

var errClosed = fmt.Errorf("socket: %w", net.ErrClosed)

// receive waits for a datagram of the kernel, and returns it. It is valid until the next call. After ENOBUFS
// nothing is left of what was sent until then: Linux reports an overrun once, until the socket is empty.
func (c *conn) receive() ([]byte, error) {
	var b []byte
	var err error
	if rerr := c.raw.Read(func(fd uintptr) bool {
		b, err = c.take(fd)
		for left := err; err == unix.ENOBUFS && left != unix.EAGAIN; {
			if _, left = c.take(fd); left != nil && left != unix.EAGAIN && left != unix.ENOBUFS {
				err = left
			}
		}
		return err != unix.EAGAIN
	}); rerr != nil {
		err = rerr
	}
	switch {
	case err != nil && c.closed.Load():
		return nil, errClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fmt.Errorf("no answer: %w", c.late)
	}
	return b, err
}

// take returns a datagram of the kernel that is there already; EAGAIN says that there is none.
func (c *conn) take(fd uintptr) ([]byte, error) {
	for {
		n, from, err := unix.Recvfrom(int(fd), c.buf, unix.MSG_TRUNC|unix.MSG_DONTWAIT)
		switch sa, _ := from.(*unix.SockaddrNetlink); {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case sa == nil || sa.Pid != 0: // not from the kernel
		case n > len(c.buf):
			return nil, fmt.Errorf("datagram of %d bytes: %w", n, unix.EMSGSIZE)
		default:
			return c.buf[:n], nil
		}
	}
}

// send sends requests as one datagram, and returns the number of the first.
func (c *conn) send(ctx context.Context, rs ...request) (uint32, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	if c.closed.Load() {
		return 0, errClosed
	}
	end := time.Now().Add(answerTime)
	c.late = os.ErrDeadlineExceeded
	if d, ok := ctx.Deadline(); ok && d.Before(end) {
		end, c.late = d, context.DeadlineExceeded
	}
	if err := c.nl.SetDeadline(end); err != nil && !c.closed.Load() {
		return 0, err
	}
	first := c.seq + 1
	var all []byte
	for _, r := range rs {
		c.seq++
		r.seal(c.seq)
		all = append(all, r...)
	}
	var err error
	if rerr := c.raw.Write(func(fd uintptr) bool {
		err = unix.Sendto(int(fd), all, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if err == unix.EMSGSIZE && c.nl.SetWriteBuffer(2*len(all)) == nil { // Linux takes no datagram larger than its buffer
			err = unix.Sendto(int(fd), all, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		}
		return err != unix.EAGAIN && err != unix.EINTR
	}); rerr != nil {
		err = rerr
	}
	switch {
	case err != nil && c.closed.Load():
		err = net.ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = c.late
	}
	if err != nil {
		return 0, fmt.Errorf("send %d bytes: %w", len(all), err)
	}
	return first, nil
}

// get asks for one object; ENOENT says that there is none.
func (c *conn) get(ctx context.Context, r request) (message, error) {
	seq, err := c.send(ctx, r)
	for err == nil {
		var b []byte
		b, err = c.receive()
		for m := range messages(b) {
			switch {
			case m.seq != seq:
			case m.typ == unix.NLMSG_ERROR:
				return message{}, failure(m)
			default:
				m.body = append([]byte(nil), m.body...)
				return m, nil
			}
		}
	}
	return message{}, err
}

// list asks for several; clean is false where it was disturbed.
func (c *conn) list(ctx context.Context, r request) (ms []message, clean bool, err error) {
	ne.PutUint16(r[6:], ne.Uint16(r[6:])|unix.NLM_F_DUMP)
	seq, err := c.send(ctx, r)
	if err != nil {
		return nil, false, err
	}
	clean = true
	for {
		b, err := c.receive()
		if err != nil {
			return nil, false, err
		}
		for m := range messages(append([]byte(nil), b...)) {
			if m.seq != seq {
				continue
			}
			clean = clean && m.flags&unix.NLM_F_DUMP_INTR == 0
			switch m.typ {
			case unix.NLMSG_DONE:
				if len(m.body) >= 4 {
					if errno := -int32(ne.Uint32(m.body)); errno > 0 {
						return nil, false, syscall.Errno(errno)
					}
				}
				return ms, clean, nil
			case unix.NLMSG_ERROR:
				err := failure(m)
				if errors.Is(err, unix.EBUSY) {
					// A list that was given up is still being written. Reading on ends it.
					return nil, false, nil
				}
				return nil, false, err
			}
			ms = append(ms, m)
		}
	}
}

// generation returns the number of the host's rules, which is another one after each change of theirs.
func (c *conn) generation(ctx context.Context) (uint32, error) {
	m, err := c.get(ctx, newRequest(unix.NFT_MSG_GETGEN, 0))
	switch {
	case errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP):
		return 0, fmt.Errorf("%w: %w: the kernel has no nf_tables (CONFIG_NF_TABLES)", errors.ErrUnsupported, err)
	case err != nil:
		return 0, err
	case m.typ != newGen:
		return 0, fmt.Errorf("generation: answer of type %#x: %w", m.typ, unix.EPROTO)
	}
	return m.generation(), nil
}

// batch does all of rs or none, in that generation only: in another one, the error is ERESTART. which is
// the one that failed; -1: all of them did.
func (c *conn) batch(ctx context.Context, generation uint32, rs []request) (which int, err error) {
	all := []request{rawRequest(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES).u32(unix.NFNL_BATCH_GENID, generation)}
	all = append(all, rs...)
	all = append(all, rawRequest(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES))
	// Failures are reported in any case, before the one acknowledgement, which is of the last.
	last := rs[len(rs)-1]
	ne.PutUint16(last[6:], ne.Uint16(last[6:])|unix.NLM_F_ACK)
	first, err := c.send(ctx, all...)
	if err != nil {
		return -1, err
	}
	which = -1
	for {
		b, rerr := c.receive()
		if rerr != nil {
			return -1, errors.Join(err, rerr)
		}
		for m := range messages(b) {
			i := int(int32(m.seq - first - 1))
			switch {
			case m.typ != unix.NLMSG_ERROR || i < -1 || i >= len(rs):
			case i == -1: // not begun, or not committed
				return -1, failure(m)
			default:
				if f := failure(m); f != nil && err == nil {
					which, err = i, f
				}
				if i == len(rs)-1 {
					return which, err
				}
			}
		}
	}
}

// failure is what an acknowledgement says: nil, or the errno with the kernel's explanation.
func failure(m message) error {
	if len(m.body) < 4 {
		return unix.EPROTO
	}
	n := -int32(ne.Uint32(m.body))
	if n == 0 {
		return nil
	}
	err := error(syscall.Errno(n))
	if m.flags&unix.NLM_F_ACK_TLVS != 0 {
		skip := 4 + unix.NLMSG_HDRLEN
		if m.flags&unix.NLM_F_CAPPED == 0 && len(m.body) >= 8 {
			skip = 4 + int(ne.Uint32(m.body[4:]))
		}
		if s := parse(m.body[min(skip, len(m.body)):]).text(unix.NLMSGERR_ATTR_MSG); s != "" {
			err = fmt.Errorf("%w (%s)", err, s)
		}
	}
	if n == int32(unix.EPERM) {
		err = fmt.Errorf("%w: it takes CAP_NET_ADMIN", err)
	}
	return err
}
