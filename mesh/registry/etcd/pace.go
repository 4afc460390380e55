package etcd

import (
	"math/rand/v2"
	"time"
)

// Times, in parts of Config.Timeout.
const (
	stableAfter  = 12 // a watch that ran for so long was no accident: delays begin anew
	repeatAfter  = 6  // when an error that lasts is yielded again at first
	mostRepeated = time.Hour
)

// pacer says after a failure when to try again, and whether to tell of it. It knows no clock. A pacer is
// for one goroutine.
type pacer struct {
	timeout time.Duration // Config.Timeout
	random  func() float64
	kinds   map[error]*trouble
}

// trouble is what was of one kind since the last stable run.
type trouble struct {
	failures int
	told     bool
	again    time.Time     // when to tell again
	pause    time.Duration // which comes after that
}

func newPacer() *pacer { return &pacer{random: rand.Float64, kinds: make(map[error]*trouble)} }

func (p *pacer) of(kind error) *trouble {
	t := p.kinds[kind]
	if t == nil {
		t = new(trouble)
		p.kinds[kind] = t
	}
	return t
}

// window returns the longest delay after the n-th failure of a kind in a row, counted from 1.
func window(kind error, n int, timeout time.Duration) time.Duration {
	first := timeout * 3 / 5
	most := timeout * 4 / 5 // so that all is well again within timeout of the network's recovery
	switch kind {
	case ErrUnauthorised:
		most = timeout * 12
	case ErrServer:
		most = timeout * 6
	}
	for range n - 1 {
		if first >= most {
			break
		}
		first *= 2
	}
	return min(first, most)
}

// delay returns how long to wait after a failure of an attempt that took so long. The delay is anywhere
// in the window, from nothing on, after the first failure too: all who lost the same server at once come
// back spread over it. Where the window does not grow, further delays are in its second half, so that
// who waits for a server asks less often. What an attempt took counts as waited, where nobody answered.
func (p *pacer) delay(kind error, took time.Duration) time.Duration {
	t := p.of(kind)
	t.failures++
	most, least := window(kind, t.failures, p.timeout), time.Duration(0)
	if t.failures > 1 && kind != ErrServer && kind != ErrUnauthorised {
		least = most / 2
	}
	d := least + time.Duration(p.random()*float64(most-least))
	if kind == ErrTimeout || kind == ErrUnreachable {
		d = max(0, d-took)
	}
	return d
}

// tell reports whether a failure of a kind is to be told: when it is new, and then with growing pauses.
func (p *pacer) tell(kind error, now time.Time) bool {
	t := p.of(kind)
	if t.told && now.Before(t.again) {
		return false
	}
	if !t.told {
		t.told, t.pause = true, repeatAfter*p.timeout
	}
	t.again = now.Add(t.pause)
	t.pause = min(2*t.pause, max(mostRepeated, t.pause))
	return true
}

// recovered has the next trouble told as new. It reports whether any was told before.
func (p *pacer) recovered() bool {
	was := false
	for _, t := range p.kinds {
		was = was || t.told
		t.told = false
	}
	return was
}

// ran begins the delays anew if a watch ran for long.
func (p *pacer) ran(d time.Duration) {
	if d >= stableAfter*p.timeout {
		for _, t := range p.kinds {
			t.failures = 0
		}
	}
}
