package etcd

import (
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"
)

func TestWindow(t *testing.T) {
	const s = time.Second
	for _, test := range []struct {
		kind error
		want []time.Duration
	}{
		{ErrUnreachable, []time.Duration{3 * s, 4 * s, 4 * s, 4 * s}},
		{ErrTimeout, []time.Duration{3 * s, 4 * s, 4 * s, 4 * s}},
		{ErrNoLeader, []time.Duration{3 * s, 4 * s, 4 * s, 4 * s}},
		{ErrServer, []time.Duration{3 * s, 6 * s, 12 * s, 24 * s, 30 * s, 30 * s}},
		{ErrUnauthorised, []time.Duration{3 * s, 6 * s, 12 * s, 24 * s, 48 * s, 60 * s, 60 * s}},
	} {
		for i, want := range test.want {
			if got := window(test.kind, i+1, DefaultTimeout); got != want {
				t.Errorf("%v, failure %d: %v, want %v", test.kind, i+1, got, want)
			}
		}
		if got, most := window(test.kind, 1_000_000, DefaultTimeout), test.want[len(test.want)-1]; got != most {
			t.Errorf("%v, failure 1,000,000: %v, want %v", test.kind, got, most)
		}
	}
}

func fixed(p *pacer, random float64) *pacer {
	p.timeout, p.random = DefaultTimeout, func() float64 { return random }
	return p
}

// Delays shrink again after a stable run, and not after a short one.
func TestDelaysBeginAnewAfterAStableRun(t *testing.T) {
	p := fixed(newPacer(), 1)
	for range 6 {
		p.delay(ErrServer, 0)
	}
	p.ran(59 * time.Second)
	if d := p.delay(ErrServer, 0); d != 30*time.Second {
		t.Errorf("after a short run: %v", d)
	}
	p.recovered() // to have been well for a moment changes nothing either
	if d := p.delay(ErrServer, 0); d != 30*time.Second {
		t.Errorf("after a recovery: %v", d)
	}
	p.ran(time.Minute)
	if d := p.delay(ErrServer, 0); d != 3*time.Second {
		t.Errorf("after a stable run: %v", d)
	}
}

// What an attempt took that nobody answered is not waited once more.
func TestDelayCountsFromTheAttempt(t *testing.T) {
	for _, test := range []struct {
		kind error
		took time.Duration
		want time.Duration
	}{
		{ErrTimeout, time.Second, 2 * time.Second},
		{ErrTimeout, 5 * time.Second, 0},
		{ErrUnreachable, 2 * time.Second, time.Second},
		{ErrUnauthorised, time.Second, 3 * time.Second},
	} {
		if d := fixed(newPacer(), 1).delay(test.kind, test.took); d != test.want {
			t.Errorf("%v after %v: %v, want %v", test.kind, test.took, d, test.want)
		}
	}
}

// A trouble that lasts a day is told a few dozen times, also where it changes its face each time.
func TestTroubleIsToldLessAndLess(t *testing.T) {
	for _, kinds := range [][]error{{ErrUnreachable}, {ErrUnreachable, ErrTimeout, ErrNoLeader}} {
		p := fixed(newPacer(), 0)
		now := time.Now()
		var told []time.Duration
		for at := time.Duration(0); at < 24*time.Hour; at += 2 * time.Second {
			if p.tell(kinds[int(at/time.Second/2)%len(kinds)], now.Add(at)) {
				told = append(told, at)
			}
		}
		if n := len(told); n < 24 || n > 35*len(kinds) || told[0] != 0 {
			t.Errorf("told %d times: %v", n, told)
		}
		if len(kinds) == 1 && (told[1] != 30*time.Second || told[2] != 90*time.Second) {
			t.Errorf("told at %v, want at once, after 30 s, and 60 s later", told[:3])
		}
		if !p.recovered() || !p.tell(kinds[0], now.Add(24*time.Hour)) {
			t.Error("after a recovery, a new trouble is not told")
		}
		if !p.recovered() || p.recovered() {
			t.Error("recovered does not report whether there was trouble")
		}
	}
}

// clients are nodes that all lose their server at once. arrive returns when each tries again, until the
// server, which is away for down and then flaps with that period, has them all back.
func herd(n int, down time.Duration) (arrivals []time.Duration, last time.Duration) {
	var at [][]time.Duration
	done := make(chan []time.Duration)
	began := time.Now()
	for i := range n {
		p := newPacer()
		p.timeout = DefaultTimeout
		r := rand.New(rand.NewPCG(uint64(i), 1))
		p.random = r.Float64
		go func() {
			var tried []time.Duration
			for {
				time.Sleep(p.delay(ErrUnreachable, 0))
				tried = append(tried, time.Since(began))
				if time.Since(began) >= down {
					done <- tried
					return
				}
			}
		}()
	}
	for range n {
		at = append(at, <-done)
	}
	for _, tried := range at {
		arrivals = append(arrivals, tried...)
		last = max(last, tried[len(tried)-1])
	}
	return arrivals, last
}

// busiest returns the most arrivals in any 100 ms, wherever they begin.
func busiest(arrivals []time.Duration) int {
	most := 0
	for _, a := range arrivals {
		n := 0
		for _, b := range arrivals {
			if b >= a && b < a+100*time.Millisecond {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

// Of 200 nodes that lose the server at once, at most a tenth comes back in any 100 ms, whether it is
// there again at once or a while later, and all are back soon.
func TestHerd(t *testing.T) {
	for _, down := range []time.Duration{0, 2 * time.Second, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			arrivals, last := herd(200, down)
			if n := busiest(arrivals); n > 20 {
				t.Errorf("down for %v: %d of 200 came within 100 ms", down, n)
			}
			if last > down+DefaultTimeout {
				t.Errorf("down for %v: the last one was back %v later", down, last-down)
			}
		})
	}
}

func TestKindOf(t *testing.T) {
	if k := kindOf(errors.New("x")); k != ErrServer {
		t.Error(k)
	}
}
