package relay

import (
	"container/list"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// MaxDatagram is the longest payload of a UDP datagram: over IPv6, without jumbograms. Over IPv4 it
	// is 65507 bytes.
	MaxDatagram = 65535 - 8

	// A flow's datagrams that wait, for the dial or for the network, are dropped above either.
	maxQueue      = 64
	maxQueueBytes = 64 << 10

	// maxReadErrors in a row end a flow. One alone does not: it may only be that nobody listens yet.
	maxReadErrors = 64
)

// FlowConfig says what Flows do.
type FlowConfig[K comparable] struct {
	// Dial connects a flow. It may block, which holds up no other flow, but must return when ctx ends.
	Dial func(ctx context.Context, k K) (net.Conn, error)

	// Reply is given each datagram that comes back: b[Room:]. It must not keep b, and may be called for
	// several flows at once.
	Reply func(k K, from net.Addr, b []byte)

	// Failed is told why Dial failed; the flow is then gone and the next datagram makes a new one. nil:
	// nobody is told.
	Failed func(k K, err error)

	Max    int           // flows at once, at least 1; a new one above takes the place of the one unused for longest
	Idle   time.Duration // without a datagram either way, after which a flow ends
	Room   int           // bytes kept free in front of what Reply is given
	Logger *slog.Logger
}

// Flows are connections that carry datagrams, one for each K: each is dialled when the first datagram
// comes, and ends when there were none for a while. A flow takes about 64 KiB of memory, and as much
// again while its datagrams wait.
type Flows[K comparable] struct {
	c      FlowConfig[K]
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	buffers sync.Pool // of *[]byte, to read into

	mu    sync.Mutex
	flows map[K]*flow[K]
	order list.List // of *flow[K]; the one used last in front
	live  int       // flows whose goroutines have not ended yet, those removed included
}

type flow[K comparable] struct {
	k      K
	ctx    context.Context
	cancel context.CancelFunc
	queue  chan []byte
	bytes  atomic.Int64 // in queue
	place  *list.Element
	used   time.Time // guarded by Flows.mu
}

// NewFlows returns Flows that end with ctx. Close waits for them.
func NewFlows[K comparable](ctx context.Context, c FlowConfig[K]) *Flows[K] {
	f := &Flows[K]{c: c, flows: make(map[K]*flow[K])}
	f.buffers.New = func() any { b := make([]byte, c.Room+MaxDatagram); return &b }
	f.ctx, f.cancel = context.WithCancel(ctx)
	return f
}

// Close ends all flows and waits for their goroutines. Close twice is harmless.
func (f *Flows[K]) Close() {
	f.mu.Lock()
	f.cancel()
	f.mu.Unlock()
	f.tasks.Wait()
}

// Len returns how many flows there are.
func (f *Flows[K]) Len() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.flows)
}

// Send sends a datagram, of which it keeps a copy. It does not block; as on any network, a datagram
// may be lost. After Close all are.
func (f *Flows[K]) Send(k K, b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() != nil {
		return
	}
	x := f.flows[k]
	if x == nil {
		if f.live >= 2*f.c.Max+16 { // whoever makes flows faster than they end has to wait
			return
		}
		f.live++
		if f.order.Len() >= f.c.Max {
			f.remove(f.order.Back().Value.(*flow[K]))
		}
		x = &flow[K]{k: k, queue: make(chan []byte, maxQueue)}
		x.ctx, x.cancel = context.WithCancel(f.ctx)
		x.place = f.order.PushFront(x)
		f.flows[k] = x
		f.tasks.Go(func() { f.run(x) })
	}
	x.used = time.Now()
	f.order.MoveToFront(x.place)
	if queued := x.bytes.Load(); queued > 0 && queued+int64(len(b)) > maxQueueBytes {
		return
	}
	select {
	case x.queue <- append([]byte(nil), b...):
		x.bytes.Add(int64(len(b)))
	default:
	}
}

// remove ends a flow, if that was not done already. mu is held.
func (f *Flows[K]) remove(x *flow[K]) {
	x.cancel()
	if f.flows[x.k] == x {
		delete(f.flows, x.k)
		f.order.Remove(x.place)
	}
}

// run is a flow's life.
func (f *Flows[K]) run(x *flow[K]) {
	defer func() {
		f.mu.Lock()
		f.remove(x)
		f.live--
		f.mu.Unlock()
	}()
	defer Recover(f.c.Logger)
	c, err := f.c.Dial(x.ctx, x.k)
	if err != nil {
		if f.c.Failed != nil && x.ctx.Err() == nil {
			f.c.Failed(x.k, err)
		}
		return
	}
	release := OnEnd(x.ctx, func() { c.Close() })
	defer release()
	var reader sync.WaitGroup
	defer reader.Wait()
	defer x.cancel()
	reader.Go(func() {
		defer x.cancel()
		defer Recover(f.c.Logger)
		f.read(x, c)
	})
	for {
		select {
		case b := <-x.queue:
			x.bytes.Add(-int64(len(b)))
			if _, err := c.Write(b); errors.Is(err, net.ErrClosed) {
				return
			} // any other error is a datagram lost: too long, or refused by who got the one before
		case <-x.ctx.Done():
			return
		}
	}
}

func (f *Flows[K]) read(x *flow[K], c net.Conn) {
	pooled := f.buffers.Get().(*[]byte)
	defer f.buffers.Put(pooled)
	buf := *pooled
	failed := 0
	f.mu.Lock()
	x.used = time.Now() // the dial is not idleness
	f.mu.Unlock()
	_ = c.SetReadDeadline(time.Now().Add(f.c.Idle))
	for {
		n, err := c.Read(buf[f.c.Room:])
		switch {
		case err == nil:
			failed = 0
			f.touch(x)
			f.c.Reply(x.k, c.RemoteAddr(), buf[:f.c.Room+n])
		case errors.Is(err, os.ErrDeadlineExceeded):
			left := f.expire(x)
			if left <= 0 {
				return
			}
			_ = c.SetReadDeadline(time.Now().Add(left))
		case errors.Is(err, net.ErrClosed):
			return
		default:
			if failed++; failed >= maxReadErrors {
				return
			}
		}
	}
}

func (f *Flows[K]) touch(x *flow[K]) {
	f.mu.Lock()
	defer f.mu.Unlock()
	x.used = time.Now()
	if f.flows[x.k] == x {
		f.order.MoveToFront(x.place)
	}
}

// expire removes a flow that was not used for long enough, and else returns how long that takes. Send
// cannot use it in between.
func (f *Flows[K]) expire(x *flow[K]) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	left := time.Until(x.used.Add(f.c.Idle))
	if left <= 0 {
		f.remove(x)
	}
	return left
}
