package sockets

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// path is what is known of the way to an endpoint: up to which size it carries packets that are joined. The zero value
// carries all.
type path struct {
	until atomic.Int64 // limit holds until then, in nanoseconds of the clock below; 0: there is none
	limit atomic.Int64 // larger packets are sent one by one, in bytes

	mu    sync.Mutex
	tries int // how often in a row a limit was found again
}

// For how long large packets go one by one: longer each time that they are refused again. A path changes with routes
// and with the MTU of links.
const (
	minAlone = 10 * time.Second
	maxAlone = 10 * time.Minute
)

var start = time.Now()

// joins returns up to which size packets may be joined.
func (p *path) joins() int {
	if until := p.until.Load(); until == 0 || int64(time.Since(start)) >= until {
		return math.MaxInt
	}
	return int(p.limit.Load())
}

// refused notes that joined packets of a size were refused. Smaller ones may be carried: what does not fit one packet of
// the underlay is refused, while it is sent in fragments alone.
func (p *path) refused(size int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch most := p.joins(); {
	case most == math.MaxInt:
		p.until.Store(int64(time.Since(start) + min(minAlone<<min(p.tries, 10), maxAlone)))
		p.tries++
	case size > most:
		return // it was joined before that was known
	}
	p.limit.Store(int64(size - 1))
}

// carried notes that joined packets of a size were taken.
func (p *path) carried(size int) {
	if p.until.Load() != 0 && size > int(p.limit.Load()) {
		p.forget()
	}
}

// forget has the path be an unknown one.
func (p *path) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.until.Store(0)
	p.tries = 0
}

// learn has p know what is known of the same way already. Nobody else has p yet.
func (p *path) learn(of *path) {
	of.mu.Lock()
	defer of.mu.Unlock()
	p.until.Store(of.until.Load())
	p.limit.Store(of.limit.Load())
	p.tries = of.tries
}
