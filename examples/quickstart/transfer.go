package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// The pace of what is sent. As fast as it goes would measure queues and this machine, not the mesh.
const (
	chunkSize    = 64 << 10
	chunkGap     = 5 * time.Millisecond // some 13 MB/s
	datagramSize = 1000
	datagramGap  = 2 * time.Millisecond // some 500 a second
	requestGap   = 25 * time.Millisecond
)

const port = "9000"

// transfer is what goes through the mesh while it changes: a TCP stream from one node to another, both
// of which stay; numbered datagrams and HTTP requests from the same node to an address that moves.
type transfer struct {
	from, to *node
	moving   netip.Addr

	sending, receiving         context.Context // the two halves of its life
	stopSending, stopReceiving context.CancelFunc
	senders, receivers         sync.WaitGroup

	sent      atomic.Int64 // bytes of the TCP stream
	received  comparer
	datagrams tally
	requests  answers

	mu  sync.Mutex
	err error
}

// newTransfer makes a transfer that has not begun.
func newTransfer(ctx context.Context, from, to *node, moving netip.Addr) *transfer {
	t := &transfer{from: from, to: to, moving: moving, received: comparer{want: generator()}}
	t.receiving, t.stopReceiving = context.WithCancel(ctx)
	t.sending, t.stopSending = context.WithCancel(t.receiving)
	return t
}

// start connects, and begins to send.
func (t *transfer) start() error {
	if err := t.startStream(); err != nil {
		return fmt.Errorf("TCP stream from %s to %s: %w", t.from.name, t.to.name, err)
	}
	if err := t.startDatagrams(); err != nil {
		return fmt.Errorf("datagrams from %s to %v: %w", t.from.name, t.moving, err)
	}
	t.senders.Go(t.sendRequests)
	return nil
}

// fail keeps the first error and ends the sending: what else fails would only follow from it.
func (t *transfer) fail(format string, a ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err == nil {
		t.err = fmt.Errorf(format, a...)
	}
	t.stopSending()
}

// failure returns what went wrong so far.
func (t *transfer) failure() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// every calls send at a pace until the sending ends, or send returns false.
func (t *transfer) every(gap time.Duration, send func() bool) {
	tick := time.NewTicker(gap)
	defer tick.Stop()
	for {
		select {
		case <-t.sending.Done():
			return
		case <-tick.C:
			if !send() {
				return
			}
		}
	}
}

func (t *transfer) startStream() error {
	l, err := t.to.device.Listen("tcp", ":"+port)
	if err != nil {
		return err
	}
	context.AfterFunc(t.receiving, func() { l.Close() })
	t.receivers.Go(func() {
		in, err := l.Accept()
		if err != nil {
			return // the dial below failed, and says why
		}
		defer in.Close()
		defer context.AfterFunc(t.receiving, func() { in.Close() })()
		if _, err := io.Copy(&t.received, in); err != nil && t.receiving.Err() == nil {
			t.fail("TCP stream at %s: %w", t.to.name, err)
		}
	})
	out, err := t.from.device.DialContext(t.sending, "tcp", net.JoinHostPort(t.to.addr.String(), port))
	if err != nil {
		return err
	}
	// A write that hangs ends with the receiving, not with the sending: a chunk is sent whole.
	context.AfterFunc(t.receiving, func() { out.Close() })
	t.senders.Go(func() {
		defer out.Close() // what was written still arrives
		data, chunk := generator(), make([]byte, chunkSize)
		t.every(chunkGap, func() bool {
			_, _ = data.Read(chunk) // never fails
			n, err := out.Write(chunk)
			t.sent.Add(int64(n))
			if err != nil {
				t.fail("TCP stream at %s: %w", t.from.name, err)
			}
			return err == nil
		})
	})
	return nil
}

func (t *transfer) startDatagrams() error {
	out, err := t.from.device.DialContext(t.sending, "udp", net.JoinHostPort(t.moving.String(), port))
	if err != nil {
		return err
	}
	t.senders.Go(func() {
		defer out.Close()
		t.every(datagramGap, func() bool {
			_, err := out.Write(t.datagrams.next())
			if err != nil {
				t.fail("datagrams at %s: %w", t.from.name, err)
			}
			return err == nil
		})
	})
	return nil
}

// receive counts the datagrams that arrive at n, until n is closed or the receiving ends.
func (t *transfer) receive(n *node) error {
	in, err := n.device.ListenPacket("udp", ":"+port)
	if err != nil {
		return fmt.Errorf("%s: listening for datagrams: %w", n.name, err)
	}
	context.AfterFunc(t.receiving, func() { in.Close() })
	t.receivers.Go(func() {
		buf := make([]byte, 2*datagramSize)
		for {
			size, _, err := in.ReadFrom(buf)
			if err != nil {
				return // closed; if that was too early, datagrams are missing
			}
			t.datagrams.arrived(n.name, buf[:size])
		}
	})
	return nil
}

// sendRequests asks the moving address who has it, on a new connection each time.
//
// A connection belongs to the node where it began. One that is open when the address moves is reset by
// the new node, as it would be by a restarted server, and the request is made again. One that is just
// being opened takes a second: the old node's answer is no longer accepted from it, and TCP tries again.
func (t *transfer) sendRequests() {
	t.every(requestGap, func() bool {
		var errs []error
		began := time.Now()
		t.requests.begin()
		for range 3 {
			who, err := t.from.fetch(t.receiving, t.moving)
			if err == nil {
				t.requests.add(who, len(errs), time.Since(began))
				return true
			}
			errs = append(errs, err)
		}
		t.fail("request to %v failed 3 times: %w", t.moving, errors.Join(errs...))
		return false
	})
}

// finish ends the sending, lets what is on its way arrive, and returns what was counted.
func (t *transfer) finish() (result, error) {
	t.stopSending()
	t.senders.Wait()
	late := time.Now().Add(2 * time.Second)
	for !t.complete() && time.Now().Before(late) && t.receiving.Err() == nil {
		time.Sleep(10 * time.Millisecond)
	}
	t.stopReceiving()
	t.receivers.Wait()
	return t.result(), t.failure()
}

func (t *transfer) complete() bool {
	return t.datagrams.missing() == 0 && t.received.count() == t.sent.Load()
}

// progress is for those who watch, and short: it has to fit beside what the step is called.
func (t *transfer) progress() string {
	return fmt.Sprintf("%s, %d UDP, %d HTTP", size(t.received.count()), t.datagrams.count(), t.requests.count())
}
