package netstack

import (
	"os"
	"sync"
	"sync/atomic"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/tun"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/warren-mesh/warren/datapath/netstack/internal/offload"
)

// tunDevice is the end of a link that wireguard-go reads from and writes to. There is one for each
// device; the link outlives them.
type tunDevice struct {
	link   *link
	closed atomic.Bool

	mu     sync.Mutex // guards events against its closing
	events chan tun.Event

	// Read is called by one goroutine.
	taken []*stack.PacketBuffer // from the queue, and not yet read
	spare []*stack.PacketBuffer
	cut   offload.Segmenter   // has more of the packet that is being cut,
	whole *stack.PacketBuffer // which is this one
	views [][]byte            // for the pieces of a packet
}

func newTUN(l *link) *tunDevice {
	l.out.reopen()
	return &tunDevice{link: l, events: make(chan tun.Event, 4)}
}

// Read fills as many of bufs as there are packets.
func (d *tunDevice) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	for {
		if len(d.taken) == 0 && !d.cut.More() {
			pkts, ok := d.link.out.take(d.spare)
			if !ok {
				return 0, os.ErrClosed
			}
			d.taken, d.spare = pkts, pkts
		}
		if d.closed.Load() {
			d.drop()
			return 0, os.ErrClosed
		}
		n := 0
		for n < len(bufs) {
			if size := d.next(bufs[n][offset:]); size > 0 {
				sizes[n] = size
				n++
			} else if len(d.taken) == 0 {
				break
			}
		}
		if n > 0 {
			return n, nil
		}
	}
}

// next writes the next packet to b and returns its size. It returns 0 where there is none, and where one
// does not fit the MTU that there is now.
func (d *tunDevice) next(b []byte) int {
	mtu := int(d.link.MTU())
	if d.cut.More() {
		d.cut.Limit(mtu)
	} else {
		if len(d.taken) == 0 {
			return 0
		}
		pkt := d.taken[0]
		d.taken[0], d.taken = nil, d.taken[1:]
		d.pieces(pkt)
		if pkt.GSOOptions.Type == stack.GSONone || !d.cut.Start(d.views, int(pkt.GSOOptions.MSS), mtu) {
			size := 0
			if pkt.GSOOptions.Type == stack.GSONone && pkt.Size() <= mtu {
				for _, p := range d.views {
					size += copy(b[size:], p)
				}
			}
			d.release(pkt)
			return size
		}
		d.whole = pkt
	}
	size := d.cut.Next(b)
	if !d.cut.More() {
		d.release(d.whole)
	}
	return size
}

// pieces has d.views be what pkt is made of.
func (d *tunDevice) pieces(pkt *stack.PacketBuffer) {
	l, offset := pkt.AsViewList()
	d.views = d.views[:0]
	for v := l.Front(); v != nil; v = v.Next() {
		if b := v.AsSlice(); offset < len(b) {
			d.views, offset = append(d.views, b[offset:]), 0
		} else {
			offset -= len(b)
		}
	}
}

// release lets go of a packet that was read.
func (d *tunDevice) release(pkt *stack.PacketBuffer) {
	clear(d.views)
	d.whole = nil
	pkt.DecRef()
}

// drop lets go of all that was taken.
func (d *tunDevice) drop() {
	if d.whole != nil {
		d.release(d.whole)
		d.cut = offload.Segmenter{}
	}
	for _, p := range d.taken {
		p.DecRef()
	}
	d.taken = nil
}

// Write delivers packets that WireGuard decrypted. Their source is one the peer may use.
func (d *tunDevice) Write(bufs [][]byte, offset int) (int, error) {
	if d.closed.Load() {
		return 0, os.ErrClosed
	}
	d.link.receive(bufs, offset)
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
