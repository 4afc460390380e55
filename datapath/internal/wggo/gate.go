package wggo

import (
	"sync/atomic"
	"time"

	"golang.zx2c4.com/wireguard/tun"
)

// gate bounds how many packets are inside wireguard-go on their way in one direction. It takes in all that there are,
// each in a buffer of 64 KiB, as fast as it can, though encryption, or whoever takes them at the other end, is slower.
// Waiting outside they take a fraction of the memory, and what is inside stays in the processor's caches.
//
// Of some packets nothing comes out: they are not valid, or nobody's, or wait for a handshake, and wireguard-go does
// not say so. Hence where nothing at all came out for a moment, nothing is taken to be inside any more: what strangers
// send costs others no more than that moment for each time that the gate was filled.
type gate struct {
	inside  atomic.Int64
	came    atomic.Uint64 // how often something came out
	waiting atomic.Int32
	wake    chan struct{} // capacity 1
}

const (
	// gateLimit is two of wireguard-go's batches: one is worked on while the next is taken in.
	gateLimit = 256
	// gateIdle is short enough for 256,000 packets a second of which nothing comes out.
	gateIdle = time.Millisecond
)

func newGate() *gate { return &gate{wake: make(chan struct{}, 1)} }

// enter notes that n packets go in.
func (g *gate) enter(n int) { g.inside.Add(int64(n)) }

// leave notes that n packets came out. Some go in unnoticed: those of wireguard-go itself.
func (g *gate) leave(n int) {
	g.inside.Add(-int64(n))
	g.came.Add(1)
	g.signal()
}

func (g *gate) signal() {
	if g.waiting.Load() == 0 {
		return
	}
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// wait returns once there is room. idle is the caller's own timer, which does not run.
func (g *gate) wait(idle *time.Timer) {
	n := g.inside.Load()
	if n < 0 {
		g.inside.CompareAndSwap(n, 0)
	}
	if n < gateLimit {
		return
	}
	g.waiting.Add(1)
	for n = g.inside.Load(); n >= gateLimit; n = g.inside.Load() {
		came := g.came.Load()
		idle.Reset(gateIdle)
		select {
		case <-g.wake:
			idle.Stop()
		case <-idle.C:
			if g.came.Load() == came {
				g.inside.CompareAndSwap(n, 0)
			}
		}
	}
	g.waiting.Add(-1)
	g.signal() // another one that waits
}

func newIdleTimer() *time.Timer {
	t := time.NewTimer(gateIdle)
	t.Stop()
	return t
}

// gated is a tun.Device with gates: out for what is read from it and sent, in for what is received and written to it.
type gated struct {
	tun.Device
	out, in *gate
	idle    *time.Timer // of Read, which one goroutine calls
}

func (d *gated) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	d.out.wait(d.idle)
	n, err := d.Device.Read(bufs, sizes, offset)
	d.out.enter(n)
	return n, err
}

func (d *gated) Write(bufs [][]byte, offset int) (int, error) {
	n, err := d.Device.Write(bufs, offset)
	d.in.leave(len(bufs))
	return n, err
}
