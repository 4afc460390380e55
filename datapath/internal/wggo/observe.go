package wggo

import (
	"time"

	"github.com/warren-mesh/warren/datapath/internal/uapi"
	"github.com/warren-mesh/warren/datapath/key"
)

// Watch has the device asked for handshakes for as long as anybody waits for one. There is one
// who asks for all, since an answer names all peers.
func (n *WireGuard) Watch() {
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	n.watch.waiting.Add(1)
	n.startObserving()
}

// Unwatch ends one Watch.
func (n *WireGuard) Unwatch() { n.watch.waiting.Add(-1) }

// startObserving has observe look at what there is to do. mu is held.
func (n *WireGuard) startObserving() {
	if !n.observing && !n.closed { // once closed, Close may be past waiting for tasks
		n.observing = true
		n.tasks.Go(n.observe)
	}
	n.watch.signal()
}

// observe greets peers, and asks the device for handshakes when packets came that may have completed
// one that somebody waits for, and now and then. It spends about a tenth of its time on that, but on a device with many
// peers, or a busy host, not less than one look in 50 ms: somebody waits.
func (n *WireGuard) observe() {
	tick := time.NewTimer(0)
	defer tick.Stop()
	for {
		select {
		case <-n.done:
			return
		case <-n.watch.wake:
		case <-tick.C:
		}
		n.o.Mu.Lock()
		now := time.Now()
		waiting := n.watch.waiting.Load() > 0
		due := false
		next := now.Add(time.Hour)
		if waiting {
			next = now.Add(100 * time.Millisecond)
		}
		for _, g := range n.greets {
			due = due || !g.next.After(now)
			if g.next.Before(next) {
				next = g.next
			}
		}
		n.observing = waiting || len(n.greets) > 0
		observing := n.observing
		n.o.Mu.Unlock()
		if !observing {
			return
		}
		pause := 2 * time.Millisecond
		if waiting || due {
			n.lookForHandshakes()
			pause = max(pause, min(9*time.Since(now), 50*time.Millisecond))
		}
		if due {
			n.greetDue(now)
			next = now // see when the next one is due
		}
		select {
		case <-n.done:
			return
		case <-time.After(pause):
		}
		tick.Reset(max(0, time.Until(next)))
	}
}

func (n *WireGuard) lookForHandshakes() {
	n.o.Mu.Lock()
	w, born := n.wg, n.born
	n.o.Mu.Unlock()
	if w == nil {
		return
	}
	text, err := w.IpcGet()
	if err != nil {
		return
	}
	n.note(uapi.Handshakes(text), born)
}

// note notes handshakes, according to a reading that was begun when born peers had been created.
func (n *WireGuard) note(found map[key.Public]time.Time, born uint64) {
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	some := false
	for k, at := range found {
		p := n.peers[k]
		if p == nil || p.shook || p.born > born || at.Equal(p.stale) {
			continue
		}
		p.shook, some = true, true
	}
	if some && n.o.Shook != nil {
		n.o.Shook()
	}
}
