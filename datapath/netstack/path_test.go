package netstack_test

import (
	"math/rand/v2"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
)

// path is a way to a peer that is longer than loopback is.
type path struct {
	delay time.Duration // of each packet
	loss  float64       // the share of packets that are lost
}

// over returns a Bind whose packets take a path.
func over(p path, b conn.Bind) conn.Bind { return &pathBind{Bind: b, path: p} }

type pathBind struct {
	conn.Bind
	path
	queue chan flight
	ended sync.WaitGroup

	mu   sync.Mutex // guards what follows, and closing queue
	open bool
	rnd  *rand.Rand
}

// flight is what one call of Send sent.
type flight struct {
	due  time.Time
	to   conn.Endpoint
	bufs [][]byte
	all  *[]byte // what bufs are in
}

var flights = sync.Pool{New: func() any { return new([]byte) }}

func (b *pathBind) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	fs, port, err := b.Bind.Open(port)
	if err == nil {
		b.mu.Lock()
		b.open, b.queue = true, make(chan flight, 1<<16)
		b.rnd = rand.New(rand.NewPCG(1, 2))
		b.mu.Unlock()
		b.ended.Go(b.carry)
	}
	return fs, port, err
}

func (b *pathBind) carry() {
	for f := range b.queue {
		time.Sleep(time.Until(f.due))
		_ = b.Bind.Send(f.bufs, f.to)
		flights.Put(f.all)
	}
}

func (b *pathBind) Send(bufs [][]byte, to conn.Endpoint) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.open {
		return nil
	}
	f := flight{due: time.Now().Add(b.delay), to: to, all: flights.Get().(*[]byte)}
	*f.all = (*f.all)[:0]
	var sizes []int
	for _, p := range bufs {
		if b.loss == 0 || b.rnd.Float64() >= b.loss {
			*f.all = append(*f.all, p...)
			sizes = append(sizes, len(p))
		}
	}
	rest := *f.all
	for _, n := range sizes {
		f.bufs, rest = append(f.bufs, rest[:n:n]), rest[n:]
	}
	select {
	case b.queue <- f:
	default: // as on any path with too much on it
	}
	return nil
}

func (b *pathBind) Close() error {
	b.mu.Lock()
	if b.open {
		b.open = false
		close(b.queue)
	}
	b.mu.Unlock()
	err := b.Bind.Close()
	b.ended.Wait()
	return err
}
