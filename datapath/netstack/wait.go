package netstack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

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
		news, settled := n.news, n.settled
		t := n.link.table.Load()
		v, _ := t.send(dst)
		e := &WaitError{Addr: dst, Err: ErrNoRoute}
		shook, greeted := false, false
		if k, ok := t.peers.Lookup(dst); ok && v == outside {
			p := n.wg.Status(k)
			e.Peer, e.Endpoint, e.Err, shook, greeted = k, p.Endpoint, ErrNoHandshake, p.Shook, p.Greeted
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
			n.wg.Watch()
			defer n.wg.Unwatch()
		}
		if e.Endpoint.IsValid() && !greeted {
			n.wg.Initiate(e.Peer)
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
			e.Peer, e.Endpoint = k, n.wg.Status(k).Endpoint
		}
	}
	return e
}

// nudgeAfter is how long a dial waits for an answer before the session is taken for one that works in one
// direction only, as two handshakes that crossed on busy hosts leave it.
const nudgeAfter = 2 * time.Second

// nudge begins another handshake with the peer that dst is sent to, beside the session there is. WireGuard
// would do so after 15 s without an answer, and allows one in 5 s (REKEY_TIMEOUT).
func (n *Net) nudge(dst netip.Addr) {
	if k, ok := n.link.table.Load().peers.Lookup(dst); ok {
		n.wg.Initiate(k)
	}
}
