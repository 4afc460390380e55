package netstack

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/waiter"
)

// socket is what connections and listeners have in common: an endpoint of the stack, and blocking
// calls on it that end with a deadline, with Close, and with the Net.
type socket struct {
	n       *Net
	ep      tcpip.Endpoint
	wq      *waiter.Queue
	network string
	local   net.Addr
	remote  net.Addr // nil: none

	once   sync.Once
	closed chan struct{}
	atEnd  func() // called once, by Close

	reads, writes side
}

// side is one direction of a socket.
type side struct {
	mu       sync.Mutex // one call at a time: each may take the one token in ready
	ready    chan struct{}
	entry    waiter.Entry
	deadline deadline
}

func (s *socket) init() {
	s.closed = make(chan struct{})
	for _, d := range []struct {
		*side
		mask waiter.EventMask
	}{{&s.reads, waiter.ReadableEvents | waiter.EventHUp | waiter.EventErr}, {&s.writes, waiter.WritableEvents | waiter.EventHUp | waiter.EventErr}} {
		d.ready = make(chan struct{}, 1)
		d.entry.Init(waiter.ChannelNotifier(d.ready), d.mask)
		s.wq.EventRegister(&d.entry)
		d.deadline.init()
	}
}

// block repeats try until it does not say "would block". d.mu is held.
func (s *socket) block(d *side, op string, try func() tcpip.Error) error {
	for {
		changed, expired := d.deadline.wait()
		switch {
		case s.isClosed():
			return s.opError(op, net.ErrClosed)
		case expired:
			return s.opError(op, os.ErrDeadlineExceeded)
		}
		err := try()
		switch err.(type) {
		case nil:
			return nil
		case *tcpip.ErrWouldBlock:
		case *tcpip.ErrClosedForReceive:
			if s.isClosed() {
				return s.opError(op, net.ErrClosed)
			}
			return io.EOF
		default:
			if s.isClosed() {
				return s.opError(op, net.ErrClosed)
			}
			return s.opError(op, sysError(op, err))
		}
		select {
		case <-d.ready:
		case <-changed:
		case <-s.closed:
		case <-s.n.done:
		}
	}
}

func (s *socket) isClosed() bool {
	select {
	case <-s.closed:
		return true
	case <-s.n.done:
		return true
	default:
		return false
	}
}

func (s *socket) opError(op string, err error) error {
	e := &net.OpError{Op: op, Net: s.network, Source: s.local, Addr: s.remote, Err: err}
	if s.remote == nil {
		e.Source, e.Addr = nil, s.local
	}
	return e
}

// Close ends the socket. A second call returns net.ErrClosed, as those of the net package do.
func (s *socket) Close() error {
	first := false
	s.once.Do(func() {
		first = true
		close(s.closed)
		s.ep.Close()
		if s.atEnd != nil {
			s.atEnd()
		}
	})
	if !first {
		return s.opError("close", net.ErrClosed)
	}
	return nil
}

func (s *socket) LocalAddr() net.Addr { return s.local }

func (s *socket) RemoteAddr() net.Addr { return s.remote }

func (s *socket) SetDeadline(t time.Time) error {
	return errors.Join(s.SetReadDeadline(t), s.SetWriteDeadline(t))
}

func (s *socket) SetReadDeadline(t time.Time) error { return s.setDeadline(&s.reads, t) }

func (s *socket) SetWriteDeadline(t time.Time) error { return s.setDeadline(&s.writes, t) }

func (s *socket) setDeadline(d *side, t time.Time) error {
	if s.isClosed() {
		return s.opError("set", net.ErrClosed)
	}
	d.deadline.set(t)
	return nil
}

// deadline is a time at which calls end, and that may be put off.
type deadline struct {
	mu      sync.Mutex
	timer   *time.Timer
	changed chan struct{} // closed, and made anew, when the time is set; closed when it has come
	expired bool
}

func (d *deadline) init() { d.changed = make(chan struct{}) }

// wait reports whether the time has come. changed is closed when that may be otherwise.
func (d *deadline) wait() (changed <-chan struct{}, expired bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed, d.expired
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if !d.expired {
		close(d.changed)
	}
	changed := make(chan struct{})
	d.changed, d.expired = changed, false
	if t.IsZero() {
		return
	}
	if wait := time.Until(t); wait > 0 {
		d.timer = time.AfterFunc(wait, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.changed == changed {
				d.expire()
			}
		})
		return
	}
	d.expire()
}

// expire ends the calls. mu is held.
func (d *deadline) expire() {
	d.expired, d.timer = true, nil
	close(d.changed)
}

// tcpConn is a TCP connection.
type tcpConn struct{ socket }

func (n *Net) newTCPConn(ep tcpip.Endpoint, wq *waiter.Queue, network string) *tcpConn {
	c := &tcpConn{socket{n: n, ep: ep, wq: wq, network: network}}
	local, _ := ep.GetLocalAddress()
	remote, _ := ep.GetRemoteAddress()
	c.local, c.remote = net.TCPAddrFromAddrPort(addrPort(local)), net.TCPAddrFromAddrPort(addrPort(remote))
	c.init()
	// As the net package does: a connection whose other end is gone is found out in the end.
	tune(ep)
	o := ep.SocketOptions()
	o.SetKeepAlive(true)
	idle, interval := tcpip.KeepaliveIdleOption(15*time.Second), tcpip.KeepaliveIntervalOption(15*time.Second)
	_ = ep.SetSockOpt(&idle)
	_ = ep.SetSockOpt(&interval)
	_ = ep.SetSockOptInt(tcpip.KeepaliveCountOption, 9)
	return c
}

func (c *tcpConn) Read(b []byte) (n int, err error) {
	c.reads.mu.Lock()
	defer c.reads.mu.Unlock()
	w := tcpip.SliceWriter(b)
	err = c.block(&c.reads, "read", func() tcpip.Error {
		if len(b) == 0 {
			return nil
		}
		res, e := c.ep.Read(&w, tcpip.ReadOptions{})
		n = res.Count
		return e
	})
	if n > 0 {
		c.ep.ModerateRecvBuf(n)
	}
	return n, err
}

func (c *tcpConn) Write(b []byte) (n int, err error) {
	c.writes.mu.Lock()
	defer c.writes.mu.Unlock()
	var r bytes.Reader
	for first := true; first || n < len(b); first = false {
		err := c.block(&c.writes, "write", func() tcpip.Error {
			if len(b) == 0 {
				return nil
			}
			r.Reset(b[n:])
			done, e := c.ep.Write(&r, tcpip.WriteOptions{})
			n += int(done)
			if _, ok := e.(*tcpip.ErrWouldBlock); ok && done > 0 {
				return nil
			}
			return e
		})
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// CloseRead has Read return io.EOF from now on.
func (c *tcpConn) CloseRead() error { return c.shutdown(tcpip.ShutdownRead) }

// CloseWrite tells the other end that nothing more will come.
func (c *tcpConn) CloseWrite() error { return c.shutdown(tcpip.ShutdownWrite) }

func (c *tcpConn) shutdown(how tcpip.ShutdownFlags) error {
	if c.isClosed() {
		return c.opError("close", net.ErrClosed)
	}
	if err := c.ep.Shutdown(how); err != nil {
		return c.opError("close", sysError("shutdown", err))
	}
	return nil
}

// SetLinger is as that of net.TCPConn: with 0, Close drops what was not sent yet and resets the connection;
// below 0, the default, it is sent in the background. Above 0 is as below: Close waits for nothing.
func (c *tcpConn) SetLinger(sec int) error {
	if c.isClosed() {
		return c.opError("set", net.ErrClosed)
	}
	c.ep.SocketOptions().SetLinger(tcpip.LingerOption{Enabled: sec == 0})
	return nil
}

// tcpListener is a TCP listener.
type tcpListener struct{ socket }

func (l *tcpListener) Accept() (net.Conn, error) {
	l.reads.mu.Lock()
	defer l.reads.mu.Unlock()
	var ep tcpip.Endpoint
	var wq *waiter.Queue
	err := l.block(&l.reads, "accept", func() (e tcpip.Error) {
		ep, wq, e = l.ep.Accept(nil)
		return e
	})
	if err != nil {
		return nil, err
	}
	return l.n.newTCPConn(ep, wq, l.network), nil
}

func (l *tcpListener) Addr() net.Addr { return l.local }
