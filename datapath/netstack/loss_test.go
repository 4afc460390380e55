package netstack_test

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/netstack"
)

// overflowing is a Bind whose packets go through a queue that is emptied at a steady rate, and loses what does not
// fit: the socket of a peer that reads more slowly than this node writes.
type overflowing struct {
	conn.Bind
	q *queue
}

type queue struct {
	mu         sync.Mutex
	bytes      float64
	at         time.Time
	sent, lost int
}

const (
	queueSize = 212992     // bytes, the default of net.core.rmem_default
	queueRate = 40_000_000 // bytes a second
)

func (q *queue) takes(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now()
	q.bytes = max(0, q.bytes-now.Sub(q.at).Seconds()*queueRate)
	q.at = now
	q.sent++
	if q.bytes+float64(n) > queueSize {
		q.lost++
		return false
	}
	q.bytes += float64(n)
	return true
}

func (b overflowing) Send(bufs [][]byte, to conn.Endpoint) error {
	var left [][]byte
	for _, p := range bufs {
		if b.q.takes(len(p)) {
			left = append(left, p)
		}
	}
	if len(left) == 0 {
		return nil
	}
	return b.Bind.Send(left, to)
}

// A transfer that loses many packets in a row goes on, instead of sending one packet each time that it waited for an
// answer in vain.
func TestLossInBursts(t *testing.T) {
	t.Parallel()
	q := new(queue)
	a := newNode(t, "a", netstack.Options{Bind: func() conn.Bind { return overflowing{conn.NewDefaultBind(), q} }}, "10.0.0.1", "fd00::1")
	b := newNode(t, "b", netstack.Options{}, "10.0.0.2", "fd00::2")
	connect(a, b)
	l, err := b.Listen("tcp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const size = 12 << 20
	result := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			result <- err
			return
		}
		defer c.Close()
		n, err := io.Copy(io.Discard, c)
		if n != size {
			err = errors.Join(err, fmt.Errorf("%d bytes arrived of %d", n, size))
		}
		result <- err
	}()
	c, err := a.DialContext(within(t, timeout), "tcp", "10.0.0.2:80")
	if err != nil {
		l.Close()
		<-result
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(25 * time.Second)) // it takes some 3 s
	begun := time.Now()
	_, err = io.CopyN(c, rand.NewChaCha8([32]byte{}), size)
	c.Close()
	if err := errors.Join(err, <-result); err != nil {
		t.Fatal(err)
	}
	q.mu.Lock() // the end of the connection may still be on its way
	defer q.mu.Unlock()
	t.Logf("%d MiB in %v, of %d packets %d were lost", size>>20, time.Since(begun).Round(time.Millisecond), q.sent, q.lost)
}

// unreachable is a Bind of a host that has no way to anybody, for as long as it is down.
type unreachable struct {
	conn.Bind
	down *atomic.Bool
}

func (b unreachable) Send(bufs [][]byte, ep conn.Endpoint) error {
	if b.down.Load() {
		return os.NewSyscallError("sendto", syscall.ENETUNREACH)
	}
	return b.Bind.Send(bufs, ep)
}

// What cannot be sent counts as an attempt at a handshake, and there is no route: whoever has other endpoints to try is
// not left waiting.
func TestAttemptsAreCounted(t *testing.T) {
	t.Parallel()
	var down atomic.Bool
	down.Store(true)
	n := newNode(t, "n", netstack.Options{Bind: func() conn.Bind { return unreachable{conn.NewDefaultBind(), &down} }}, "10.0.0.1")
	other := newKey(t).Public()
	n.apply(datapath.PutPeer{Key: other, Peer: datapath.Peer{Endpoint: netip.MustParseAddrPort("127.0.0.1:9"), Prefixes: set("10.0.0.2")}})
	const initiation = 148
	for end := time.Now().Add(timeout); ; time.Sleep(time.Millisecond) {
		if st := n.read().Stats[other]; st.Sent >= initiation && st.LastHandshake.IsZero() && st.NoRoute {
			break
		} else if time.Now().After(end) {
			t.Fatalf("of a peer that was greeted in vain: %+v", st)
		}
	}
	down.Store(false)
	for end := time.Now().Add(timeout); n.read().Stats[other].NoRoute; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("there still is no route")
		}
	}
}
