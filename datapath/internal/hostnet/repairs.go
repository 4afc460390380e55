package hostnet

import (
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

const (
	// repairEvery bounds how often a host is put right, against somebody who keeps undoing that.
	repairEvery = 500 * time.Millisecond
	// repairsAtOnce are made without waiting: what another program takes away, it takes one by one.
	repairsAtOnce = 4
)

// Repairs says when a host may be put right.
type Repairs struct {
	limit   *rate.Limiter
	later   func()
	pending atomic.Bool // later is going to be called
}

// NewRepairs returns Repairs that call later, from a goroutine of its own, when it is time for one that was put off.
func NewRepairs(later func()) *Repairs {
	return &Repairs{limit: rate.NewLimiter(rate.Every(repairEvery), repairsAtOnce), later: later}
}

// Now reports whether a repair may be made now. Where not, it is to be asked for again when later is called.
func (r *Repairs) Now() bool {
	ask := r.limit.Reserve()
	wait := ask.Delay()
	if wait == 0 {
		return true
	}
	ask.Cancel()
	if !r.pending.Swap(true) {
		time.AfterFunc(wait, func() {
			r.pending.Store(false)
			r.later()
		})
	}
	return false
}
