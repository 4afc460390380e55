package netstack

import (
	"os"
	"sync"
	"sync/atomic"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/tun"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// tunDevice is the end of a link that wireguard-go reads from and writes to. There is one for each
// device; the link outlives them.
type tunDevice struct {
	link   *link
	closed atomic.Bool

	mu     sync.Mutex // guards events against its closing
	events chan tun.Event

	// The packets taken from the queue and not yet read. Read is called by one goroutine.
	taken []*stack.PacketBuffer
	spare []*stack.PacketBuffer
}

func newTUN(l *link) *tunDevice {
	l.out.reopen()
	return &tunDevice{link: l, events: make(chan tun.Event, 4)}
}

// Read fills as many of bufs as there are packets.
func (d *tunDevice) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	if len(d.taken) == 0 {
		pkts, ok := d.link.out.take(d.spare)
		if !ok {
			return 0, os.ErrClosed
		}
		d.taken, d.spare = pkts, pkts
	}
	if d.closed.Load() {
		for _, p := range d.taken {
			p.DecRef()
		}
		d.taken = nil
		return 0, os.ErrClosed
	}
	n := 0
	for n < len(bufs) && len(d.taken) > 0 {
		pkt := d.taken[0]
		d.taken[0], d.taken = nil, d.taken[1:]
		size := offset
		for _, s := range pkt.AsSlices() {
			size += copy(bufs[n][size:], s)
		}
		pkt.DecRef()
		sizes[n] = size - offset
		n++
	}
	return n, nil
}

// Write delivers packets that WireGuard decrypted. Their source is one the peer may use.
func (d *tunDevice) Write(bufs [][]byte, offset int) (int, error) {
	for i, b := range bufs {
		if d.closed.Load() {
			return i, os.ErrClosed
		}
		d.link.receive(b[offset:])
	}
	return len(bufs), nil
}

func (d *tunDevice) MTU() (int, error)        { return int(d.link.MTU()), nil }
func (d *tunDevice) Name() (string, error)    { return "netstack", nil }
func (d *tunDevice) File() *os.File           { return nil }
func (d *tunDevice) Events() <-chan tun.Event { return d.events }
func (d *tunDevice) BatchSize() int           { return conn.IdealBatchSize }

// mtuChanged has wireguard-go ask for the MTU again, by which it pads packets.
func (d *tunDevice) mtuChanged() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed.Load() {
		return
	}
	select {
	case d.events <- tun.EventMTUUpdate:
	default: // it has yet to look at an earlier change, and will see this one then
	}
}

// Close ends Read and Write. wireguard-go calls it while its peers still write.
func (d *tunDevice) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed.Swap(true) {
		d.link.out.close()
		close(d.events)
	}
	return nil
}
