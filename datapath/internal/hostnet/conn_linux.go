package hostnet

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
	// answerTime is how long the kernel may take for one datagram. It answers while it is asked, but may
	// wait for the lock of a host that is changing thousands of interfaces.
	answerTime = 30 * time.Second
	// batch is how many requests go out before their acknowledgements are read: these have to fit in a
	// receive buffer of the usual size, 208 KiB, each taking up to 1 KiB there.
	batch = 100
	// interrupted is how often a list is read again when it changes while it is read.
	interrupted = 1000
)

// conn is a netlink socket. The package netlink opens it; datagrams are read here, since
// the flag that says that a list was disturbed may be on its last message only, which that package swallows.
type conn struct {
	nl     *netlink.Conn
	raw    syscall.RawConn
	pid    uint32
	seq    uint32
	buf    []byte
	closed *atomic.Bool
	late   error // of an answer that takes too long
	again  int   // lists read again, for tests
	lists  int   // read, for tests
}

func dial(ns *namespace, closed *atomic.Bool) (*conn, error) {
	var nl *netlink.Conn
	err := ns.do(func() (err error) {
		if nl, err = netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Strict: true}); err != nil {
			return fmt.Errorf("open netlink socket: %w", errors.Unwrap(err))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	raw, err := nl.SyscallConn()
	if err == nil {
		err = nl.SetOption(netlink.CapAcknowledge, true)
	}
	if err != nil {
		nl.Close()
		return nil, err
	}
	_ = nl.SetReadBuffer(1 << 20) // as much as may be had
	return &conn{nl: nl, raw: raw, pid: nl.PID(), buf: make([]byte, 1<<16), closed: closed}, nil
}

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
		return nil, fmt.Errorf("host network: %w", net.ErrClosed)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fmt.Errorf("netlink: no answer: %w", c.late)
	case err != nil:
		return nil, fmt.Errorf("netlink: %w", err)
	}
	return b, nil
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
		return 0, fmt.Errorf("host network: %w", net.ErrClosed)
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
		return 0, fmt.Errorf("netlink: send: %w", err)
	}
	return first, nil
}

// do sends requests that are acknowledged, many at a time, and returns the error of each. Where the
// socket fails, or ctx ends, those without an answer have that error; where answers overrun the socket, those
// that were lost have ENOBUFS, whatever became of them.
func (c *conn) do(ctx context.Context, rs []request) []error {
	errs := make([]error, len(rs))
	for at := 0; at < len(rs); at += batch {
		err := c.acknowledged(ctx, rs[at:min(at+batch, len(rs))], errs[at:])
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			for i := at + batch; i < len(rs); i++ {
				errs[i] = err
			}
			break
		}
	}
	return errs
}

// acknowledged does one batch; its error is that of the socket.
func (c *conn) acknowledged(ctx context.Context, rs []request, errs []error) error {
	open := make(map[uint32]int, len(rs))
	first, err := c.send(ctx, rs...)
	for i := range rs {
		open[first+uint32(i)] = i
	}
	for len(open) > 0 && err == nil {
		var b []byte
		b, err = c.receive()
		for m := range messages(b) {
			if i, ok := open[m.seq]; ok && m.typ == unix.NLMSG_ERROR {
				errs[i] = failure(m)
				delete(open, m.seq)
			}
		}
	}
	for _, i := range open {
		errs[i] = err
	}
	return err
}

// one asks for one object and gives it to each, again where the answer overran the socket.
func (c *conn) one(ctx context.Context, r request, each func(message)) error {
	err := c.once(ctx, r, each)
	for range 3 {
		if !errors.Is(err, unix.ENOBUFS) {
			break
		}
		c.again++
		err = c.once(ctx, r, each)
	}
	return err
}

func (c *conn) once(ctx context.Context, r request, each func(message)) error {
	seq, err := c.send(ctx, r)
	for err == nil {
		var b []byte
		b, err = c.receive()
		for m := range messages(b) {
			switch {
			case m.seq != seq:
			case m.typ == unix.NLMSG_ERROR:
				return failure(m)
			default:
				each(m)
				return nil
			}
		}
	}
	return err
}

// dump asks for a list, again where it was disturbed or overran the socket, and gives its messages to each,
// whose bodies it may keep.
func (c *conn) dump(ctx context.Context, r request, each func(message)) error {
	c.lists++
	for range interrupted {
		ms, clean, err := c.list(ctx, r)
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return err
		}
		if clean {
			for _, m := range ms {
				each(m)
			}
			return nil
		}
		c.again++
	}
	return fmt.Errorf("netlink: the list changed while it was read, %d times in a row: %w", interrupted, unix.EAGAIN)
}

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
		for typ, v := range attrs(m.body, skip) {
			if typ == unix.NLMSGERR_ATTR_MSG {
				err = fmt.Errorf("%w (%s)", err, text(v))
			}
		}
	}
	if n == int32(unix.EPERM) {
		err = fmt.Errorf("%w: it takes CAP_NET_ADMIN", err)
	}
	return err
}
