package sockets

import (
	"sync/atomic"
	"time"
)

// path is what is known of the way to an endpoint: whether it carries what is joined.
type path struct {
	until atomic.Int64 // packets are sent one by one until then, in nanoseconds of the clock below; 0: they are not
	tries atomic.Int32 // how often in a row joined packets were refused
}

// For how long packets go one by one: longer each time that they are refused again. A path changes with routes and with
// the MTU of links.
const (
	minAlone = 10 * time.Second
	maxAlone = 10 * time.Minute
)

var start = time.Now()

// joins reports whether packets may be joined.
func (p *path) joins() bool {
	until := p.until.Load()
	return until == 0 || int64(time.Since(start)) >= until
}

// refused notes that joined packets were refused.
func (p *path) refused() {
	n := p.tries.Add(1)
	p.until.Store(int64(time.Since(start) + min(minAlone<<min(n-1, 10), maxAlone)))
}

// carried notes that joined packets were taken.
func (p *path) carried() {
	if p.until.Load() != 0 {
		p.until.Store(0)
		p.tries.Store(0)
	}
}
