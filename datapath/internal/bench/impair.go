package main

import (
	"math/rand/v2"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
)

// impaired is a Bind whose packets take longer, and some of which are lost, on their way out. Packets stay in
// order and leave in batches, as they would without it, so that it costs a copy and little else. Handshakes are not
// lost: a lost one is tried again after five seconds only, which is no property of how data is carried.
type impaired struct {
	conn.Bind
	delay time.Duration
	loss  float64

	mu    sync.Mutex
	rand  *rand.Rand
	queue []delayed // first due first
	free  [][]byte
	more  chan struct{} // capacity 1
	done  chan struct{} // closed by Close; nil while closed
	tasks sync.WaitGroup
}

type delayed struct {
	due time.Time
	b   []byte
	ep  conn.Endpoint
}

// maxDelayed bounds the queue, as that of a router; more than 16 MiB of segments fit.
const maxDelayed = 1 << 16

func newImpaired(b conn.Bind, delay time.Duration, loss float64, seed uint64) *impaired {
	return &impaired{Bind: b, delay: delay, loss: loss, rand: rand.New(rand.NewPCG(seed, 0)), more: make(chan struct{}, 1)}
}

func (i *impaired) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	fns, port, err := i.Bind.Open(port)
	if err != nil {
		return nil, 0, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	done := make(chan struct{})
	i.done = done
	i.tasks.Go(func() { i.run(done) })
	return fns, port, nil
}

func (i *impaired) Close() error {
	i.mu.Lock()
	if i.done != nil {
		close(i.done)
		i.done = nil
	}
	i.queue = nil
	i.mu.Unlock()
	err := i.Bind.Close()
	i.tasks.Wait()
	return err
}

func (i *impaired) Send(bufs [][]byte, ep conn.Endpoint) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	due := time.Now().Add(i.delay)
	for _, b := range bufs {
		data := len(b) > 0 && b[0] == 4 // message type of transport data
		if data && i.loss > 0 && i.rand.Float64() < i.loss || len(i.queue) >= maxDelayed {
			continue
		}
		var c []byte
		if n := len(i.free); n > 0 {
			c, i.free = i.free[n-1], i.free[:n-1]
		}
		i.queue = append(i.queue, delayed{due, append(c[:0], b...), ep})
	}
	select {
	case i.more <- struct{}{}:
	default:
	}
	return nil
}

// run sends what is due. What is due within the slack goes along: timers are no finer.
func (i *impaired) run(done chan struct{}) {
	const slack = 100 * time.Microsecond
	timer := time.NewTimer(0)
	defer timer.Stop()
	var batch [][]byte
	for {
		batch = batch[:0]
		var ep conn.Endpoint
		wait := time.Hour
		i.mu.Lock()
		now := time.Now()
		for n, d := range i.queue {
			if left := d.due.Sub(now); left > slack {
				if n == 0 {
					wait = left
				}
				break
			}
			if n > 0 && d.ep != ep || n == i.Bind.BatchSize() {
				break
			}
			ep = d.ep
			batch = append(batch, d.b)
		}
		i.queue = i.queue[len(batch):]
		i.mu.Unlock()
		if len(batch) > 0 {
			i.Bind.Send(batch, ep) // a packet that cannot be sent is lost
			i.mu.Lock()
			i.free = append(i.free, batch...)
			i.mu.Unlock()
			continue
		}
		timer.Reset(wait)
		select {
		case <-done:
			return
		case <-i.more:
			if wait < time.Hour { // the first stays the first
				select {
				case <-done:
					return
				case <-timer.C:
				}
			}
		case <-timer.C:
		}
	}
}

var _ conn.Bind = (*impaired)(nil)
