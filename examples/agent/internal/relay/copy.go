package relay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	bufferSize = 64 << 10
	// grace is how long an answer may still take to come from an end to which nothing can be written
	// any more, and to be passed on.
	grace = time.Second
)

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// ErrIdle is the error of a Copy that ended because no byte moved. It is also os.ErrDeadlineExceeded.
var ErrIdle = fmt.Errorf("no byte moved: %w", os.ErrDeadlineExceeded)

// Copy copies from a to b and from b to a until both directions ended, and closes both connections. It
// replaces their deadlines.
//
// The end of what a sends is passed on with CloseWrite while b's answer goes on, and the other way
// round; a connection without CloseWrite is closed instead. One that fails is an end to both, and as
// the other must not take it for a regular one it is reset where it can be (SetLinger). ctx's end,
// and that no byte moved in either direction for as long as idle, are such failures too; idle 0 is no
// limit. The latter may take twice as long to be found where a connection takes bytes at less than one
// buffer (64 KiB) in that time.
//
// Copy returns how many bytes were written to b and to a, and the first error, which is the cause of
// ctx's end, ErrIdle or that of a connection.
func Copy(ctx context.Context, a, b net.Conn, idle time.Duration) (toB, toA int64, err error) {
	p := &pair{a: a, b: b, idle: idle, start: time.Now()}
	var deadline time.Time
	if idle > 0 {
		deadline = p.start.Add(idle)
	}
	_, _ = a.SetDeadline(deadline), b.SetDeadline(deadline) // fails if closed, which the first Read says too
	release := OnEnd(ctx, func() { p.abort(context.Cause(ctx)) })
	var back sync.WaitGroup
	back.Go(func() { toA = p.copy(a, b) })
	toB = p.copy(b, a)
	back.Wait()
	release()
	_, _ = a.Close(), b.Close()
	return toB, toA, p.err
}

// OnEnd has f called when ctx ends, unless release was called before. release waits for an f that was
// called; twice is harmless.
func OnEnd(ctx context.Context, f func()) (release func()) {
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { defer close(done); f() })
	return sync.OnceFunc(func() {
		if !stop() {
			<-done
		}
	})
}

// pair are two connections between which is copied.
type pair struct {
	a, b  net.Conn
	idle  time.Duration
	start time.Time
	moved atomic.Int64 // when a byte was last known to move, in nanoseconds since start
	stuck atomic.Int32 // writes under way, of which it shows at their end whether they move anything

	mu     sync.Mutex
	err    error // the first
	broken bool  // deadlines are not put off any more
}

func (p *pair) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err == nil {
		p.err = err
	}
}

// abort ends both connections, so that whatever uses them returns.
func (p *pair) abort(err error) {
	p.fail(err)
	Reset(p.a)
	Reset(p.b)
}

// Reset closes a connection so that its other end does not take it for a regular end, where the
// connection has SetLinger, else as Close does.
func Reset(c net.Conn) {
	if l, ok := c.(interface{ SetLinger(sec int) error }); ok {
		_ = l.SetLinger(0)
	}
	_ = c.Close()
}

// copy copies in one direction and returns how many bytes were written.
func (p *pair) copy(dst, src net.Conn) int64 {
	n, err := p.splice(dst, src)
	if errors.Is(err, errors.ErrUnsupported) {
		n, err = p.stream(dst, src)
	}
	switch w := (*writeError)(nil); {
	case err == nil:
		if c, ok := dst.(interface{ CloseWrite() error }); ok {
			_ = c.CloseWrite() // fails if dst is at its end, which the other direction finds out
		} else {
			_ = dst.Close()
		}
	case errors.As(err, &w) && !errors.Is(err, ErrIdle):
		// A server that answers and closes before it read everything is no reason to lose its answer.
		p.fail(w.error)
		p.mu.Lock()
		p.broken = true
		end := time.Now().Add(grace)
		_, _ = dst.SetReadDeadline(end), src.SetWriteDeadline(end)
		p.mu.Unlock()
	case w != nil:
		p.abort(w.error)
	default:
		p.abort(err)
	}
	return n
}

// writeError tells the error of dst from that of src.
type writeError struct{ error }

func (e *writeError) Unwrap() error { return e.error }

// splice has the kernel copy, where it can. It is no use with a time limit, as it does not tell
// whether anything moves; and it tells the failure of one end from that of the other only by guess.
func (p *pair) splice(dst, src net.Conn) (int64, error) {
	d, ok := dst.(*net.TCPConn)
	if s, ok2 := src.(*net.TCPConn); ok && ok2 && p.idle == 0 {
		n, err := d.ReadFrom(s)
		if errors.Is(err, syscall.EPIPE) {
			err = &writeError{err}
		}
		return n, err
	}
	return 0, errors.ErrUnsupported
}

func (p *pair) stream(dst, src net.Conn) (written int64, err error) {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	for {
		n, err := p.read(src, buf[:])
		if n > 0 {
			w, werr := p.write(dst, buf[:n])
			if written += int64(w); werr != nil {
				return written, &writeError{werr}
			}
		}
		switch {
		case err == io.EOF:
			return written, nil
		case err != nil:
			return written, err
		}
	}
}

func (p *pair) read(src net.Conn, b []byte) (int, error) {
	for {
		n, err := src.Read(b)
		if n > 0 {
			p.touch()
		}
		switch more, err := p.more(err, true, src.SetReadDeadline); {
		case n > 0 && more:
			return n, nil
		case !more:
			return n, err
		}
	}
}

func (p *pair) write(dst net.Conn, b []byte) (written int, err error) {
	p.stuck.Add(1)
	defer p.stuck.Add(-1)
	for {
		n, err := dst.Write(b[written:])
		if n > 0 {
			p.touch()
		}
		written += n
		more, err := p.more(err, false, dst.SetWriteDeadline)
		if !more || written == len(b) {
			return written, err
		}
	}
}

func (p *pair) touch() {
	if p.idle > 0 {
		p.moved.Store(int64(time.Since(p.start)))
	}
}

// more returns whether err is only that a deadline passed while the other direction was busy, which is
// then put off: deadlines are looked at when they pass, and not moved with each byte. A nil err is more.
func (p *pair) more(err error, reading bool, put func(time.Time) error) (bool, error) {
	if err == nil {
		return true, nil
	}
	if p.idle == 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		return false, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	end := p.start.Add(time.Duration(p.moved.Load()) + p.idle)
	if p.broken {
		return false, err
	}
	if now := time.Now(); !now.Before(end) {
		if !reading || p.stuck.Load() == 0 {
			return false, ErrIdle
		}
		end = now.Add(p.idle / 8) // the other direction's write is the judge
	}
	return true, put(end)
}
