package sockets

import (
	"bytes"
	"container/heap"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
)

// Impairment is what a path does to packets. It is for tests and measurements.
type Impairment struct {
	Delay  time.Duration // of each packet
	Jitter time.Duration // added to it, from 0 to this: packets overtake each other
	Loss   float64       // the probability that a packet is lost, from 0 to 1
	Rate   float64       // bytes a second; 0: as fast as the path is
	Queue  int           // bytes that may wait for Rate, before packets are lost; 0: 1 MiB
	Seed   uint64        // of what is by chance: with the same one the same packets are lost
}

// Impair returns a Bind that sends by b as over a path that has an impairment. What it takes over is copied.
func Impair(b conn.Bind, i Impairment) conn.Bind {
	if i.Queue == 0 {
		i.Queue = 1 << 20
	}
	return &impaired{Bind: b, is: i, chance: rand.New(rand.NewPCG(i.Seed, 0)), wake: make(chan struct{}, 1)}
}

type impaired struct {
	conn.Bind
	is   Impairment
	wake chan struct{} // capacity 1: there is something that is due earlier

	mu     sync.Mutex
	chance *rand.Rand
	free   time.Time // when Rate has let everything through
	late   delayed
	order  uint64
	done   chan struct{} // closed by Close; nil: there are no sockets
	ended  chan struct{}
}

// parcel is a packet on its way.
type parcel struct {
	due   time.Time
	order uint64
	to    conn.Endpoint
	data  []byte
}

type delayed []parcel

func (d delayed) Len() int { return len(d) }
func (d delayed) Less(i, j int) bool {
	if d[i].due.Equal(d[j].due) {
		return d[i].order < d[j].order
	}
	return d[i].due.Before(d[j].due)
}
func (d delayed) Swap(i, j int) { d[i], d[j] = d[j], d[i] }
func (d *delayed) Push(x any)   { *d = append(*d, x.(parcel)) }
func (d *delayed) Pop() any {
	last := len(*d) - 1
	p := (*d)[last]
	(*d)[last] = parcel{}
	*d = (*d)[:last]
	return p
}

func (b *impaired) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	fns, actual, err := b.Bind.Open(port)
	if err != nil {
		return nil, 0, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done, b.ended = make(chan struct{}), make(chan struct{})
	go b.run(b.done, b.ended)
	return fns, actual, nil
}

func (b *impaired) Close() error {
	b.mu.Lock()
	done, ended := b.done, b.ended
	b.done, b.late = nil, nil
	b.mu.Unlock()
	if done != nil {
		close(done)
	}
	err := b.Bind.Close() // which ends a Send that waits for room
	if done != nil {
		<-ended
	}
	return err
}

func (b *impaired) Send(packets [][]byte, to conn.Endpoint) error {
	now := time.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.done == nil {
		return net.ErrClosed
	}
	for _, p := range packets {
		if b.chance.Float64() < b.is.Loss {
			continue
		}
		due := now
		if b.is.Rate > 0 {
			due = later(due, b.free)
			if due.Sub(now).Seconds()*b.is.Rate > float64(b.is.Queue) {
				continue
			}
			due = due.Add(time.Duration(float64(len(p)) / b.is.Rate * float64(time.Second)))
			b.free = due
		}
		due = due.Add(b.is.Delay)
		if b.is.Jitter > 0 {
			due = due.Add(time.Duration(b.chance.Int64N(int64(b.is.Jitter))))
		}
		b.order++
		heap.Push(&b.late, parcel{due, b.order, to, bytes.Clone(p)})
	}
	select {
	case b.wake <- struct{}{}:
	default:
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// run sends what is due.
func (b *impaired) run(done, ended chan struct{}) {
	defer close(ended)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var batch [][]byte
	for {
		var to conn.Endpoint
		wait := time.Hour
		batch = batch[:0]
		now := time.Now()
		b.mu.Lock()
		for len(b.late) > 0 && len(batch) < b.BatchSize() {
			p := b.late[0]
			if wait = p.due.Sub(now); wait > 0 {
				break
			}
			wait = 0
			if to != nil && to != p.to {
				break
			}
			heap.Pop(&b.late)
			to, batch = p.to, append(batch, p.data)
		}
		b.mu.Unlock()
		if len(batch) > 0 {
			_ = b.Bind.Send(batch, to) // the path loses what cannot be sent
			clear(batch)
			if wait <= 0 {
				continue
			}
		}
		timer.Reset(wait)
		select {
		case <-done:
			return
		case <-b.wake:
		case <-timer.C:
		}
	}
}
