package netstack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/warren-mesh/warren/datapath/internal/uapi"
	"github.com/warren-mesh/warren/datapath/key"
)

var (
	// ErrNoRoute is the error of a dial to an address that is routed to no peer. It comes at once
	// after Settle, and when the dial's time is up before it.
	ErrNoRoute = errors.New("no peer has this address")
	// ErrNoHandshake is the error of a dial to an address whose peer has not completed a handshake
	// when the dial's time is up.
	ErrNoHandshake = errors.New("no handshake was completed")
	// ErrNoAnswer is the error of a dial to an address whose peer has completed a handshake, but from
	// which nothing came until the dial's time was up.
	ErrNoAnswer = errors.New("no answer")
	// ErrNotLocal is the error of listening on an address that is not this node's, or not yet: what is
	// announced is in Local a moment later.
	ErrNotLocal = errors.New("neither in Addrs nor in Local of this node")
	// ErrNoSource is the error of a dial for which this node has no address to dial from.
	ErrNoSource = errors.New("this node has no address")
)

// dialTimeout is how long a dial waits for a handshake where its context has no deadline.
const dialTimeout = 10 * time.Second

// WaitError says why an address could not be reached.
type WaitError struct {
	Addr     netip.Addr
	Peer     key.Public     // who has the address; zero: nobody
	Endpoint netip.AddrPort // of the peer; zero: not known
	Err      error          // ErrNoRoute, ErrNoHandshake, ErrNoAnswer or ErrNoSource
	Cause    error          // what ended the waiting: the context's error; nil: there was nothing to wait for
}

func (e *WaitError) Error() string {
	s := fmt.Sprintf("%v: %v", e.Addr, e.Err)
	switch {
	case e.Err == ErrNoSource:
		s += " of its family to send from"
	case !e.Peer.IsZero() && e.Endpoint.IsValid():
		s += fmt.Sprintf(" (peer %v at %v)", e.Peer.Short(), e.Endpoint)
	case !e.Peer.IsZero():
		s += fmt.Sprintf(" (peer %v, whose endpoint was not given)", e.Peer.Short())
	}
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Unwrap has errors.Is find Err, Cause, and the errno the net package would give.
func (e *WaitError) Unwrap() []error {
	errs := []error{e.Err}
	if e.Cause != nil {
		errs = append(errs, e.Cause)
	}
	switch e.Err {
	case ErrNoRoute:
		errs = append(errs, syscall.ENETUNREACH)
	case ErrNoSource:
		errs = append(errs, syscall.EADDRNOTAVAIL)
	}
	return errs
}

// Timeout makes WaitError a net.Error.
func (e *WaitError) Timeout() bool { return errors.Is(e.Cause, context.DeadlineExceeded) }

// Temporary makes WaitError a net.Error.
func (e *WaitError) Temporary() bool { return e.Timeout() }

// await returns when packets to dst have somewhere to go: to this node, or to a peer that has
// completed a handshake. It follows dst from peer to peer.
func (n *Net) await(ctx context.Context, dst netip.Addr) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, dialTimeout)
		defer cancel()
	}
	watching := false
	for {
		n.mu.Lock()
		news, settled, w := n.news, n.settled, n.wg
		t := n.link.table.Load()
		v, _ := t.send(dst)
		e := &WaitError{Addr: dst, Err: ErrNoRoute}
		shook, greeted := false, false
		if k, ok := t.peers.Lookup(dst); ok && v == outside {
			p := n.peers[k]
			e.Peer, e.Endpoint, e.Err, shook = k, p.endpoint, ErrNoHandshake, p.shook
			_, greeted = n.greets[k]
		}
		n.mu.Unlock()
		switch {
		case n.isClosed():
			return errClosed
		case v == inside:
			return nil
		case e.Err == ErrNoRoute && settled:
			return e
		case v == outside && !t.source(dst).IsValid():
			e.Err, e.Peer, e.Endpoint = ErrNoSource, key.Public{}, netip.AddrPort{}
			if settled {
				return e
			}
		case shook:
			return nil
		case e.Err == ErrNoHandshake && !watching:
			watching = true
			n.startWatch()
			defer n.stopWatch()
		}
		if e.Endpoint.IsValid() && w != nil && !greeted {
			initiate(w, e.Peer, false)
		}
		again := time.NewTimer(time.Second)
		select {
		case <-news:
		case <-again.C:
		case <-n.done:
			again.Stop()
			return errClosed
		case <-ctx.Done():
			again.Stop()
			e.Cause = ctx.Err()
			return e
		}
		again.Stop()
	}
}

// noAnswer is the error of a dial that waited in vain.
func (n *Net) noAnswer(ctx context.Context, dst netip.Addr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := &WaitError{Addr: dst, Err: ErrNoAnswer, Cause: ctx.Err()}
	t := n.link.table.Load()
	if v, _ := t.send(dst); v == outside {
		if k, ok := t.peers.Lookup(dst); ok {
			e.Peer, e.Endpoint = k, n.peers[k].endpoint
		}
	}
	return e
}

// startWatch has the device asked for handshakes for as long as anybody waits for one. There is one
// who asks for all, since an answer names all peers.
func (n *Net) startWatch() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watch.waiting.Add(1)
	n.startObserving()
}

func (n *Net) stopWatch() { n.watch.waiting.Add(-1) }

// startObserving has observe look at what there is to do. mu is held.
func (n *Net) startObserving() {
	if !n.observing && !n.isClosed() { // once closed, Close may be past waiting for tasks
		n.observing = true
		n.tasks.Go(n.observe)
	}
	n.watch.signal()
}

// observe greets peers, and asks the device for handshakes when packets came that may have completed
// one that somebody waits for, and now and then. It spends about a tenth of its time on that, but on a device with many
// peers, or a busy host, not less than one look in 50 ms: somebody waits.
func (n *Net) observe() {
	tick := time.NewTimer(0)
	defer tick.Stop()
	for {
		select {
		case <-n.done:
			return
		case <-n.watch.wake:
		case <-tick.C:
		}
		n.mu.Lock()
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
		n.mu.Unlock()
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

func (n *Net) lookForHandshakes() {
	n.mu.Lock()
	w, born := n.wg, n.born
	n.mu.Unlock()
	if w == nil {
		return
	}
	text, err := w.IpcGet()
	if err != nil {
		return
	}
	found := uapi.Handshakes(text)
	n.mu.Lock()
	defer n.mu.Unlock()
	some := false
	for k, at := range found {
		some = n.shook(k, at, born) || some
	}
	if some {
		n.announce()
	}
}

// shook notes that peer k completed a handshake, according to a reading that was begun when born
// peers had been created. It returns whether that is new. mu is held.
func (n *Net) shook(k key.Public, at time.Time, born uint64) bool {
	p := n.peers[k]
	if p == nil || p.shook || p.born > born || at.Equal(p.stale) {
		return false
	}
	p.shook = true
	return true
}
