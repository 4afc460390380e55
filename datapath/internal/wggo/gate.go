package wggo

import (
	"sync"
	"time"
	"unsafe"

	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
)

// gate bounds how many packets are inside wireguard-go on their way in one direction. It takes in all that there are,
// each in a buffer of 64 KiB, as fast as it can, though encryption, or whoever takes them at the other end, is slower.
// Waiting outside they take a fraction of the memory, and what is inside stays in the processor's caches.
//
// Of some packets nothing comes out: they are nobody's, or replayed, or wait for a handshake, and wireguard-go does not
// say so. Hence where nothing came out for a moment, and nothing is about to, nothing is taken to be inside any more.
type gate struct {
	mu      sync.Mutex
	inside  int
	debt    int    // of what was taken not to be inside any more, and may come out nonetheless
	busy    int    // calls that take out what comes out, which may take their time
	came    uint64 // how often something came out
	waiting int
	wake    chan struct{} // capacity 1
}

const (
	// gateLimit is two of wireguard-go's batches: one is worked on while the next is taken in.
	gateLimit = 256
	// gateIdle is short enough for 256,000 packets a second of which nothing comes out.
	gateIdle = time.Millisecond
)

func newGate() *gate { return &gate{wake: make(chan struct{}, 1)} }

// enter notes that n packets went in.
func (g *gate) enter(n int) {
	g.mu.Lock()
	g.inside += n
	g.mu.Unlock()
}

// leaving notes that somebody begins to take out packets.
func (g *gate) leaving() {
	g.mu.Lock()
	g.busy++
	g.mu.Unlock()
}

// left notes that n packets were taken out.
func (g *gate) left(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.busy--
	g.came++
	paid := min(n, g.debt)
	g.debt -= paid
	g.inside -= n - paid
	g.signal()
}

// signal wakes one of those who wait. mu is held.
func (g *gate) signal() {
	if g.waiting == 0 {
		return
	}
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// wait returns once there is room. idle is the caller's own timer, which does not run.
func (g *gate) wait(idle *time.Timer) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside < gateLimit {
		return
	}
	g.waiting++
	for g.inside >= gateLimit {
		came := g.came
		g.mu.Unlock()
		idle.Reset(gateIdle)
		late := false
		select {
		case <-g.wake:
			idle.Stop()
		case <-idle.C:
			late = true
		}
		g.mu.Lock()
		if late && g.came == came && g.busy == 0 {
			g.debt, g.inside = g.inside, 0
		}
	}
	g.waiting--
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
	d.in.leaving()
	n, err := d.Device.Write(bufs, offset)
	d.in.left(len(bufs))
	return n, err
}

// carries reports whether a message has a packet of the device in it, and is not one of WireGuard's own.
func carries(msg []byte) bool {
	return len(msg) > device.MessageKeepaliveSize && msg[0] == transportData
}

// taken counts the messages that wireguard-go has kept of those that it was given by one receiver: instead of a buffer
// that it keeps, it brings another one the next time. So what is for no session, as anybody can send it, is none.
type taken struct{ buffers []*byte }

// gave notes what a message is in; nil: nothing that counts.
func (t *taken) gave(i int, buffer *byte) {
	for len(t.buffers) <= i {
		t.buffers = append(t.buffers, nil)
	}
	t.buffers[i] = buffer
}

// count returns how many were kept of those that were given since it was called last.
func (t *taken) count(buffers [][]byte) (n int) {
	for i, was := range t.buffers {
		if was != nil && (i >= len(buffers) || unsafe.SliceData(buffers[i]) != was) {
			n++
		}
		t.buffers[i] = nil
	}
	return n
}
