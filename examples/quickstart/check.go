package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

// generator makes the bytes of the TCP stream, the same for who sends and who compares.
func generator() *rand.ChaCha8 { return rand.NewChaCha8([32]byte{}) }

// comparer compares what is written to it with what was sent, byte by byte.
type comparer struct {
	mu    sync.Mutex
	want  *rand.ChaCha8
	buf   []byte
	n     int64
	last  time.Time
	pause time.Duration // the longest between two arrivals
}

func (c *comparer) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if !c.last.IsZero() {
		c.pause = max(c.pause, now.Sub(c.last))
	}
	c.last = now
	c.buf = slices.Grow(c.buf[:0], len(p))[:len(p)]
	_, _ = c.want.Read(c.buf) // never fails
	for i := range p {
		if p[i] != c.buf[i] {
			return i, fmt.Errorf("byte %d is %#02x, and %#02x was sent", c.n+int64(i), p[i], c.buf[i])
		}
	}
	c.n += int64(len(p))
	return len(p), nil
}

func (c *comparer) count() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// datagram returns the datagram with a number: the number, and bytes that follow from it.
func datagram(number uint64) []byte {
	var seed [32]byte
	binary.BigEndian.PutUint64(seed[:], number)
	p := make([]byte, datagramSize)
	_, _ = rand.NewChaCha8(seed).Read(p) // never fails
	copy(p, seed[:8])
	return p
}

// tally counts numbered datagrams: those sent, and who received which.
type tally struct {
	mu       sync.Mutex
	sent     uint64            // with numbers below it
	received map[uint64]string // number -> the node it came to first
	repeated int
	damaged  int // that are none of those sent
}

// next returns the datagram to send next.
func (t *tally) next() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sent++
	return datagram(t.sent - 1)
}

func (t *tally) arrived(node string, p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(p) != datagramSize {
		t.damaged++
		return
	}
	number := binary.BigEndian.Uint64(p)
	_, again := t.received[number]
	switch {
	case number >= t.sent || !bytes.Equal(p, datagram(number)):
		t.damaged++
	case again:
		t.repeated++
	default:
		if t.received == nil {
			t.received = make(map[uint64]string)
		}
		t.received[number] = node
	}
}

func (t *tally) missing() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.sent - uint64(len(t.received))
}

func (t *tally) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.received)
}

// answers counts requests by the node that answered.
type answers struct {
	mu      sync.Mutex
	begun   int
	by      map[string]int
	again   int // attempts that were made again
	slowest time.Duration
}

func (a *answers) begin() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.begun++
}

func (a *answers) add(node string, again int, took time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.by == nil {
		a.by = make(map[string]int)
	}
	a.by[node]++
	a.again += again
	a.slowest = max(a.slowest, took)
}

func (a *answers) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return total(a.by)
}

func total(by map[string]int) (n int) {
	for _, c := range by {
		n += c
	}
	return n
}

// result is what a transfer counted.
type result struct {
	from, to, moving string
	before, after    string // who has moving at first and in the end

	sent, received int64 // bytes of the TCP stream
	pause          time.Duration
	datagrams      uint64         // sent
	arrived        map[string]int // datagrams by node
	repeated       int
	damaged        int
	requests       int            // begun
	answered       map[string]int // requests by node
	again          int
	slowest        time.Duration // request
}

func (t *transfer) result() result {
	r := result{from: t.from.name, to: t.to.name, moving: t.moving.String(), sent: t.sent.Load(), arrived: make(map[string]int)}
	t.received.mu.Lock()
	r.received, r.pause = t.received.n, t.received.pause
	t.received.mu.Unlock()
	t.datagrams.mu.Lock()
	r.datagrams, r.repeated, r.damaged = t.datagrams.sent, t.datagrams.repeated, t.datagrams.damaged
	for _, node := range t.datagrams.received {
		r.arrived[node]++
	}
	t.datagrams.mu.Unlock()
	t.requests.mu.Lock()
	r.requests, r.answered = t.requests.begun, maps.Clone(t.requests.by)
	r.again, r.slowest = t.requests.again, t.requests.slowest
	t.requests.mu.Unlock()
	return r
}

func (r result) lost() int64 { return int64(r.datagrams) - int64(total(r.arrived)) }

func (r result) failed() int { return r.requests - total(r.answered) }

// verify returns everything that is not as it must be.
func (r result) verify() error {
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if r.received != r.sent {
		bad("of %d bytes sent by TCP, %d were received", r.sent, r.received)
	}
	if n := r.lost(); n != 0 {
		bad("of %d datagrams, %d were lost", r.datagrams, n)
	}
	if r.repeated > 0 {
		bad("%d datagrams arrived twice", r.repeated)
	}
	if r.damaged > 0 {
		bad("%d datagrams arrived that were not sent so", r.damaged)
	}
	if n := r.failed(); n != 0 {
		bad("of %d requests, %d had no answer", r.requests, n)
	}
	if r.sent == 0 {
		bad("nothing was sent by TCP")
	}
	for what, by := range map[string]map[string]int{"datagrams": r.arrived, "requests": r.answered} {
		for _, node := range []string{r.before, r.after} {
			if by[node] == 0 {
				bad("%s got none of the %s to %s", node, what, r.moving)
			}
		}
		for node := range by {
			if node != r.before && node != r.after {
				bad("%s got %s to %s, which it never had", node, what, r.moving)
			}
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// print writes what was counted, good or bad.
func (r result) print(w io.Writer) {
	fmt.Fprintf(w, "  TCP   %s to %s: %s sent, every byte compared, %d lost; the longest pause was %v\n",
		r.from, r.to, size(r.sent), r.sent-r.received, r.pause.Round(time.Millisecond))
	fmt.Fprintf(w, "  UDP   %s to %s: %d datagrams, %s; %d lost, %d twice, %d damaged\n",
		r.from, r.moving, r.datagrams, r.split(r.arrived, "at"), r.lost(), r.repeated, r.damaged)
	fmt.Fprintf(w, "  HTTP  %s to %s: %d requests, %s; %d failed, %d made again as the prefix moved, the slowest took %v\n",
		r.from, r.moving, r.requests, r.split(r.answered, "by"), r.failed(), r.again, r.slowest.Round(time.Millisecond))
}

// split says how many each node got.
func (r result) split(by map[string]int, preposition string) string {
	var parts []string
	for _, node := range slices.Sorted(maps.Keys(by)) {
		parts = append(parts, fmt.Sprintf("%d %s %s", by[node], preposition, node))
	}
	return strings.Join(parts, ", ")
}

// size is a number of bytes for people.
func size(n int64) string {
	switch {
	case n < 1e3:
		return fmt.Sprintf("%d B", n)
	case n < 1e6:
		return fmt.Sprintf("%.1f kB", float64(n)/1e3)
	}
	return fmt.Sprintf("%.1f MB", float64(n)/1e6)
}
