package resolve

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
)

const (
	minTTL = 5 * time.Second
	maxTTL = time.Hour

	minBackoff = time.Second
	maxBackoff = time.Minute
	minRetry   = 10 * time.Second // between two lookups of a name whose addresses do not work

	timeout    = 10 * time.Second // of one lookup
	maxLookups = 8                // at a time
	maxRetries = 4                // of them, for names that failed the last time

	maxAddrs = 16 // of one name
)

// Lookup asks for the addresses of one host name and how long they may be used. It returns soon after
// ctx ends: a Lookup that does not holds one of the few places there are, and holds up the end of Run.
// Addresses come in any order and form; what cannot be an endpoint among them is passed over. With an
// error, addresses count for nothing. It is called from several goroutines at a time.
type Lookup func(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error)

// Answers are what is known of names, by the host as it was given to Set. A name whose first lookup has
// not ended is not there. Neither the map nor what is in it may be changed.
type Answers map[string]Answer

// Answer is what is known of one name.
type Answer struct {
	// Addrs are the addresses of the last lookup that succeeded, kept while lookups fail; none if no one
	// has. They are unmapped, without duplicates and sorted, IPv4 before IPv6, so that two answers with the
	// same addresses are equal; none is unspecified, multicast, the broadcast address or has a zone. Of more
	// than 16 there are 16, of each family at least 8 or all.
	Addrs []netip.Addr

	// Err says why the last lookup failed, and names the host; nil if it succeeded.
	Err error

	// Next is when the name is looked up again, as far as is known now; while it is looked up or waits for
	// one of the few places, that has passed. It has a monotonic reading.
	Next time.Time
}

// Errors of lookups, to be found with errors.Is in Answer.Err.
var (
	ErrNoName    = errors.New("there is no such name")
	ErrNoAddress = errors.New("the name has no address that can be used")
)

// Names looks host names up in the background and keeps what was found. All methods may be called at the
// same time from any goroutine, also while no Run is running. None but Run blocks.
type Names struct {
	lookup Lookup
	log    *slog.Logger
	wake   chan struct{} // Run has something to look at

	mu      sync.Mutex
	running bool
	names   map[string]*name
	most    int           // how many names the map has room for: maps do not shrink
	round   uint64        // of Set
	fresh   queue         // names whose last lookup succeeded, or that had none
	retries queue         // names whose last lookup failed
	busy    [2]int        // how many lookups run, and how many of them are retries
	answers Answers       // nil: to be made of names
	stale   chan struct{} // nil: nobody asked
}

// name is one wanted name. While it is looked up it is in no queue.
type name struct {
	host   string
	round  uint64                      // the Set that wanted it last
	due    time.Time                   // of the next lookup
	at     int                         // where it is in its queue; -1: in none
	asked  time.Time                   // when the last lookup began; zero: none did
	cancel context.CancelFunc          // of the lookup that runs; nil: none does
	wait   *backoff.ExponentialBackOff // nil: the last lookup succeeded, or there was none
	known  bool                        // a lookup ended
	answer Answer
}

// New returns Names that wants no name yet. A nil lookup is System(nil), a nil log discards.
func New(lookup Lookup, log *slog.Logger) *Names {
	if lookup == nil {
		lookup = System(nil)
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Names{lookup: lookup, log: log, wake: make(chan struct{}, 1), names: make(map[string]*name)}
}

// Set says which names are wanted now. What is known of others is forgotten, and a lookup of one that
// runs is cancelled. Names are compared byte by byte; one given twice is wanted once, and an empty one
// not at all. The slice is not kept. When nothing changes, Set allocates nothing.
func (n *Names) Set(hosts []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.round++
	distinct, added := 0, false
	for _, host := range hosts {
		if host == "" {
			continue
		}
		nm := n.names[host]
		if nm == nil {
			nm = &name{host: strings.Clone(host), due: time.Now(), at: -1} // not a part of a whole record
			n.names[nm.host] = nm
			heap.Push(&n.fresh, nm)
			added = true
		}
		if nm.round != n.round {
			nm.round = n.round
			distinct++
		}
	}
	if distinct < len(n.names) {
		for _, nm := range n.names {
			if nm.round != n.round {
				n.forget(nm)
			}
		}
		n.shrink()
	}
	n.most = max(n.most, len(n.names))
	if added {
		n.poke()
	}
}

func (n *Names) forget(nm *name) {
	delete(n.names, nm.host)
	if nm.cancel != nil {
		nm.cancel()
	} else {
		heap.Remove(n.queueOf(nm), nm.at)
	}
	if nm.known {
		n.changed()
	}
}

// shrink gives back what many names of before took.
func (n *Names) shrink() {
	if len(n.names) > n.most/4 {
		return
	}
	n.most = len(n.names)
	names := make(map[string]*name, len(n.names))
	for host, nm := range n.names {
		names[host] = nm
	}
	n.names = names
	n.fresh, n.retries = slices.Clone(n.fresh), slices.Clone(n.retries)
}

// Failed says that no address found for host works, so that it is looked up again soon: at once, or
// minRetry after the last lookup began. It does nothing while a lookup runs, while lookups fail, which
// are repeated anyway and must not be repeated faster, or for a name that is not wanted.
func (n *Names) Failed(host string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	nm := n.names[host]
	if nm == nil || nm.cancel != nil || nm.wait != nil || !nm.known {
		return
	}
	due := time.Now()
	if earliest := nm.asked.Add(minRetry); due.Before(earliest) {
		due = earliest
	}
	if due.Before(nm.due) {
		nm.due, nm.answer.Next = due, due
		n.answers = nil
		heap.Fix(&n.fresh, nm.at)
		n.poke()
	}
}

// Current returns the newest answers and a channel that closes when there are newer ones: when a name
// has other addresses than before, fails when it did not, fails for another reason, works again, or when
// one with an answer is forgotten. A lookup that finds the same again closes nothing, though Next of what
// Current returns moves on.
func (n *Names) Current() (Answers, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.answers == nil {
		n.answers = make(Answers, len(n.names))
		for host, nm := range n.names {
			if nm.known {
				n.answers[host] = nm.answer
			}
		}
	}
	if n.stale == nil {
		n.stale = make(chan struct{})
	}
	return n.answers, n.stale
}

// changed tells the readers.
func (n *Names) changed() {
	n.answers = nil
	if n.stale != nil {
		close(n.stale)
		n.stale = nil
	}
}

func (n *Names) poke() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// Run looks the names up until ctx ends, and returns nil once no goroutine is left. What was found
// stays, and another Run goes on from it. While one runs, a second returns an error.
func (n *Names) Run(ctx context.Context) error {
	if !n.begin() {
		return errors.New("resolve: is running already")
	}
	defer n.end()
	var lookups sync.WaitGroup
	defer lookups.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		if next, ok := n.start(ctx, &lookups); ok {
			timer.Reset(time.Until(next))
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
		case <-n.wake:
		case <-timer.C:
		}
	}
	return nil
}

func (n *Names) begin() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	was := n.running
	n.running = true
	return !was
}

func (n *Names) end() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.running = false
}

// start begins the lookups that are due and have a place. It returns when the next one is due that has
// a place, if any.
func (n *Names) start(ctx context.Context, lookups *sync.WaitGroup) (next time.Time, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for now := time.Now(); ; {
		q := n.first()
		if q == nil {
			return time.Time{}, false
		}
		if due := (*q)[0].due; due.After(now) {
			return due, true
		}
		nm := heap.Pop(q).(*name)
		nm.asked = now
		retry := nm.wait != nil
		n.busy[0]++
		if retry {
			n.busy[1]++
		}
		var one context.Context
		one, nm.cancel = context.WithTimeout(ctx, timeout)
		lookups.Go(func() {
			addrs, ttl, err := n.ask(one, nm.host)
			n.done(ctx, nm, retry, addrs, ttl, err)
		})
	}
}

// first returns the queue whose first name is to be looked up next, or nil.
func (n *Names) first() *queue {
	if n.busy[0] >= maxLookups {
		return nil
	}
	var first *queue
	if len(n.fresh) > 0 {
		first = &n.fresh
	}
	if len(n.retries) > 0 && n.busy[1] < maxRetries && (first == nil || n.retries[0].due.Before(n.fresh[0].due)) {
		first = &n.retries
	}
	return first
}

// ask calls the lookup function and makes its answer canonical. Whatever that function does, there is a
// result.
func (n *Names) ask(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error) {
	err = guard(func() (err error) {
		addrs, ttl, err = n.lookup(ctx, host)
		return err
	})
	if err == nil {
		if addrs = canonical(addrs); len(addrs) > 0 {
			return addrs, ttl, nil
		}
		err = ErrNoAddress
	}
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil {
		err = fmt.Errorf("no answer within %v: %w", timeout, context.DeadlineExceeded)
	}
	return nil, 0, fmt.Errorf("looking up %s: %w", host, err)
}

// guard turns a panic into an error.
func guard(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return f()
}

// done keeps the result of a lookup, and logs where a name fails or works that did not.
func (n *Names) done(ctx context.Context, nm *name, retry bool, addrs []netip.Addr, ttl time.Duration, err error) {
	was, now := n.keep(ctx, nm, retry, addrs, ttl, err)
	switch { // without the lock: a log may be slow
	case now.Err != nil && was.Err == nil:
		n.log.Warn("host name does not resolve, what was found before is kept", "host", nm.host, "err", now.Err, "kept", now.Addrs)
	case now.Err == nil && was.Err != nil:
		n.log.Info("host name resolves again", "host", nm.host, "addrs", now.Addrs)
	}
}

// keep returns the answer before and the answer now.
func (n *Names) keep(ctx context.Context, nm *name, retry bool, addrs []netip.Addr, ttl time.Duration, err error) (was, now Answer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.busy[0]--
	if retry {
		n.busy[1]--
	}
	n.poke()
	nm.cancel()
	nm.cancel = nil
	was = nm.answer
	if n.names[nm.host] != nm {
		return was, was // forgotten, and maybe wanted anew
	}
	if err != nil && ctx.Err() != nil {
		heap.Push(n.queueOf(nm), nm) // Run ended, the name did not fail
		return was, was
	}
	if err == nil {
		nm.wait = nil
		ttl = min(max(ttl, minTTL), maxTTL)
		nm.due = time.Now().Add(ttl + rand.N(ttl/10+1))
	} else {
		if nm.wait == nil {
			nm.wait = newBackoff()
		}
		nm.due = time.Now().Add(min(max(nm.wait.NextBackOff(), minBackoff), maxBackoff))
		addrs = was.Addrs
	}
	heap.Push(n.queueOf(nm), nm)
	now = Answer{Addrs: addrs, Err: err, Next: nm.due}
	if !nm.known || !slices.Equal(addrs, was.Addrs) || text(err) != text(was.Err) {
		n.changed()
	}
	n.answers = nil // Next moved on, which is nothing to wake anybody for
	nm.answer, nm.known = now, true
	return was, now
}

// text is what of an error readers can tell apart.
func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// newBackoff returns full jitter below a ceiling that doubles: twice the interval.
func newBackoff() *backoff.ExponentialBackOff {
	b := &backoff.ExponentialBackOff{InitialInterval: minBackoff, RandomizationFactor: 1, Multiplier: 2, MaxInterval: maxBackoff / 2}
	b.Reset()
	return b
}

// canonical returns what Answer.Addrs promises of addrs, in a slice of its own.
func canonical(addrs []netip.Addr) []netip.Addr {
	out := make([]netip.Addr, 0, min(len(addrs), maxAddrs))
	for _, a := range addrs {
		if a = a.Unmap(); usable(a) {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	out = slices.Compact(out)
	if len(out) <= maxAddrs {
		return slices.Clip(out)
	}
	four, _ := slices.BinarySearchFunc(out, netip.IPv6Unspecified(), netip.Addr.Compare)
	six := len(out) - four
	keep := min(four, max(maxAddrs/2, maxAddrs-six)) // of IPv4
	return slices.Concat(out[:keep], out[four:four+maxAddrs-keep])
}

func usable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && a.Zone() == "" &&
		a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

func (n *Names) queueOf(nm *name) *queue {
	if nm.wait != nil {
		return &n.retries
	}
	return &n.fresh
}

// queue is a heap of names, the one that is due first in front.
type queue []*name

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }
func (q queue) Swap(i, j int)      { q[i], q[j] = q[j], q[i]; q[i].at, q[j].at = i, j }
func (q *queue) Push(x any)        { nm := x.(*name); nm.at = len(*q); *q = append(*q, nm) }
func (q *queue) Pop() any {
	last := len(*q) - 1
	nm := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	nm.at = -1
	return nm
}
