package part

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/warren-mesh/warren/mesh/watch"
)

// Phase is where a Runner is.
type Phase string

// The phases of a Runner.
const (
	Stopped    Phase = "stopped" // not begun, or ended because that was asked for
	Starting   Phase = "starting"
	Healthy    Phase = "healthy"
	BackingOff Phase = "backing off"
	Stopping   Phase = "stopping"
	Done       Phase = "done"   // by itself, and for good
	Failed     Phase = "failed" // for good: see Fatal
)

// State is what is known of a Runner. It is shared by all who asked: Busy is not to be written to.
type State struct {
	Phase Phase
	Since time.Time // of the phase; zero before the first Serve
	// Restarts is how many attempts were begun after the first, of this Serve.
	Restarts int
	// Err is the last failure of this Serve, whatever came since.
	Err error
	// Next is when the next attempt begins, while backing off.
	Next time.Time
	// Busy are parts that were told to end a while ago and have not.
	Busy []string
}

// Options are how a Runner restarts. The zero value is for parts that are there for as long as the program is.
type Options struct {
	// Initial is how long it is until the first restart, give or take a half; each further one takes twice as long, up
	// to Max. 0: 500 ms, and 1 min. Less than 50 ms is 50 ms.
	Initial, Max time.Duration
	// Stable is how long an attempt is to be healthy for the next restart to be a first one again. 0: 1 min.
	Stable time.Duration
	// Probe is how often a part that is healthy is asked whether it still is, and how long it may take to say so. One
	// that says no, or nothing, three times in a row, has failed. 0: 10 s.
	Probe time.Duration
	// Patience is how long parts may take to end before they are named in State.Busy. 0: 5 s.
	Patience time.Duration
	// Logger is told of failures, once each. nil: nobody.
	Logger *slog.Logger
}

const (
	minPause  = 50 * time.Millisecond // between two attempts, whatever asks for them
	maxProbes = 3
)

// Runner runs parts, together and again. Make one by New; it may be served again once Serve has returned.
type Runner struct {
	name    string
	parts   []Part
	o       Options
	restart chan struct{} // capacity 1
	state   watch.Value[State]

	mu      sync.Mutex
	serving bool
	last    bool          // parts that end are not begun again
	lasts   chan struct{} // capacity 1: last was set
}

// New returns a Runner of parts which begin and end together. It panics without a part, and with one that does not run.
func New(name string, o Options, parts ...Part) *Runner {
	if len(parts) == 0 {
		panic("part: no part")
	}
	for _, p := range parts {
		if p.Run == nil {
			panic("part: " + p.Name + " has no Run")
		}
	}
	def := func(d *time.Duration, to time.Duration) {
		if *d <= 0 {
			*d = to
		}
	}
	def(&o.Initial, 500*time.Millisecond)
	o.Initial = max(o.Initial, minPause)
	def(&o.Max, time.Minute)
	o.Max = max(o.Max, o.Initial)
	def(&o.Stable, time.Minute)
	def(&o.Probe, 10*time.Second)
	def(&o.Patience, 5*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	r := &Runner{name: name, parts: slices.Clone(parts), o: o, restart: make(chan struct{}, 1), lasts: make(chan struct{}, 1)}
	r.state.Set(State{Phase: Stopped})
	return r
}

// String returns the name, which is what suture calls it.
func (r *Runner) String() string { return r.name }

// State returns where the Runner is, and a channel that closes when that is out of date.
func (r *Runner) State() (State, <-chan struct{}) {
	s, _, stale := r.state.Get()
	return s, stale
}

// Restart has the parts end and begin anew, which is no failure; while they back off, they begin at once. It does
// not wait for any of that, and does nothing while Serve does not run.
func (r *Runner) Restart() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.serving {
		select {
		case r.restart <- struct{}{}:
		default:
		}
	}
}

// Last has the parts not be begun again once they end, which is no failure then: Serve returns nil. false takes it back.
// It holds until Serve returns.
func (r *Runner) Last(last bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.last = last && r.serving; r.last {
		select {
		case r.lasts <- struct{}{}:
		default:
		}
	}
}

func (r *Runner) isLast() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}

// errServing is what a second Serve at a time returns.
var errServing = errors.New("part: already served")

// Serve runs the parts until ctx ends, and returns nil then, once all have returned. Otherwise it returns nil when they
// are all done, and an error for which IsFatal is true.
func (r *Runner) Serve(ctx context.Context) error {
	r.mu.Lock()
	if r.serving {
		r.mu.Unlock()
		return errServing
	}
	r.serving, r.last = true, false
	for _, c := range []chan struct{}{r.restart, r.lasts} {
		select {
		case <-c: // meant for an earlier one
		default:
		}
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		r.serving = false
		r.mu.Unlock()
	}()
	r.state.Set(State{Phase: Stopped, Since: time.Now()})
	pauses := backoff.ExponentialBackOff{InitialInterval: r.o.Initial, Multiplier: 2, RandomizationFactor: 0.5, MaxInterval: r.o.Max}
	pauses.Reset()
	for first := true; ctx.Err() == nil && !r.isLast(); first = false {
		select {
		case <-r.restart: // it begins anew anyhow
		default:
		}
		r.state.Update(func(s State) State {
			if !first {
				s.Restarts++
			}
			s.Phase, s.Since, s.Next, s.Busy = Starting, time.Now(), time.Time{}, nil
			return s
		})
		begun := time.Now()
		a := &attempt{r: r}
		err := a.run(ctx)
		if !a.healthy.IsZero() && a.ended.Sub(a.healthy) >= r.o.Stable {
			pauses.Reset()
		}
		pause := max(0, minPause-time.Since(begun))
		switch {
		case ctx.Err() != nil || r.isLast() && err != nil:
			continue
		case errors.Is(err, errRestart):
			r.o.Logger.Info("restarts, as it was asked to", "part", r.name)
		case err == nil:
			r.to(Done, nil)
			return nil
		case IsFatal(err):
			r.failed(err, "fails, and is not tried again")
			r.to(Failed, err)
			return err
		default:
			r.failed(err, "fails, and is tried again")
			pause = max(pause, pauses.NextBackOff())
		}
		if pause > 0 {
			r.pause(ctx, pause, err)
		}
	}
	r.to(Stopped, nil)
	return nil
}

func (r *Runner) failed(err error, text string) {
	args := []any{"part", r.name, "err", err}
	if p, ok := errors.AsType[*PanicError](err); ok {
		args = append(args, "stack", string(p.Stack))
	}
	r.o.Logger.Warn(text, args...)
}

// to changes the phase; err is the failure that led to it, if one did.
func (r *Runner) to(p Phase, err error) {
	r.state.Update(func(s State) State {
		if s.Phase != p {
			s.Phase, s.Since = p, time.Now()
		}
		if err != nil {
			s.Err = err
		}
		s.Next, s.Busy = time.Time{}, nil
		return s
	})
}

// pause waits, less long where a restart is asked for.
func (r *Runner) pause(ctx context.Context, d time.Duration, err error) {
	if !errors.Is(err, errRestart) {
		r.to(BackingOff, err)
		r.state.Update(func(s State) State { s.Next = s.Since.Add(d); return s })
	}
	t := time.NewTimer(d)
	defer t.Stop()
	begun := time.Now()
	select {
	case <-ctx.Done():
	case <-r.lasts:
	case <-t.C:
	case <-r.restart:
		t.Reset(max(0, minPause-time.Since(begun)))
		select {
		case <-ctx.Done():
		case <-t.C:
		}
	}
}

// errRestart is why an attempt ended that was to be restarted.
var errRestart = errors.New("restarted")

// attempt is the parts running once.
type attempt struct {
	r       *Runner
	healthy time.Time // zero: it never was
	ended   time.Time // when the first part ended, or was told to
}

type ended struct {
	part int
	err  error
}

// run returns once all parts have returned: nil if all are done, or ctx ended; errRestart; or what failed first.
func (a *attempt) run(ctx context.Context) error {
	parts := a.r.parts
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ends := make(chan ended, len(parts)+1)
	ready, endings := make(chan struct{}, len(parts)), make(chan ended, len(parts))
	done := make([]atomic.Bool, len(parts))
	for i, p := range parts {
		says := signals{sync.OnceFunc(func() { ready <- struct{}{} }), nil}
		var once sync.Once
		says.ending = func(err error) { once.Do(func() { endings <- ended{i, sound(err)} }) }
		ctx := context.WithValue(ctx, signalsKey{}, says)
		go guard(func() error {
			if !p.Signals {
				says.ready()
			}
			return p.Run(ctx)
		}, func(err error) {
			done[i].Store(true)
			says.ready() // or nobody would wait for what the others do
			ends <- ended{i, err}
		})
	}
	left, unready := len(parts), len(parts)
	probes := make(chan error, 2) // at most nil, once it is healthy, and why it is not any more
	const probing = -1            // as the part that ends
	probe := func() {
		if !slices.ContainsFunc(parts, func(p Part) bool { return p.Probe != nil }) {
			probes <- nil
			return
		}
		left++
		go guard(func() error { return a.probe(ctx, done, probes) }, func(err error) {
			if err != nil {
				probes <- err
			}
			ends <- ended{probing, nil}
		})
	}
	var result error
	fail := func(i int, err error) {
		result = fmt.Errorf("%s: %w", parts[i].Name, err)
		if len(parts) == 1 && parts[i].Name == a.r.name {
			result = err
		}
	}
	running := make([]bool, len(parts))
	for i := range running {
		running[i] = true
	}
	asking := false
	for stopping := false; left > 0; {
		var late <-chan time.Time
		var stopped <-chan struct{}
		restart := a.r.restart
		if stopping {
			restart = nil // it is on its way
			if s, _ := a.r.State(); len(s.Busy) != left {
				t := time.NewTimer(a.r.o.Patience)
				defer t.Stop()
				late = t.C
			}
		} else {
			stopped = ctx.Done()
		}
		stop := func() {
			stopping, a.ended = true, time.Now()
			cancel(result)
			a.r.to(Stopping, nil)
		}
		select {
		case e := <-ends:
			left--
			if e.part == probing {
				asking = false
				continue
			}
			running[e.part] = false
			if !stopping {
				a.ended = time.Now()
			}
			switch {
			case stopping || ctx.Err() != nil:
			case errors.Is(e.err, ErrDone):
				if slices.Contains(running, true) {
					continue
				}
			case e.err == nil:
				fail(e.part, ErrEnded)
			default:
				fail(e.part, e.err)
			}
			if !stopping && left > 0 {
				stop()
			}
		case e := <-endings:
			if !stopping && running[e.part] && ctx.Err() == nil {
				fail(e.part, e.err)
				stop()
			}
		case <-ready:
			if unready--; unready == 0 && !stopping && slices.Contains(running, true) {
				probe()
				asking = slices.ContainsFunc(parts, func(p Part) bool { return p.Probe != nil })
			}
		case err := <-probes:
			switch {
			case stopping:
			case err == nil:
				if a.healthy.IsZero() {
					a.healthy = time.Now()
				}
				a.r.to(Healthy, nil)
			default:
				result = err
				stop()
			}
		case <-restart:
			result = errRestart
			stop()
		case <-stopped:
			stop()
		case <-late:
			var busy []string
			for i, is := range running {
				if is {
					busy = append(busy, parts[i].Name)
				}
			}
			if asking {
				busy = append(busy, "the probe of "+a.r.name)
			}
			a.r.o.Logger.Error("was told to end, and does not", "part", a.r.name, "running", busy, "after", a.r.o.Patience)
			a.r.state.Update(func(s State) State { s.Busy = busy; return s })
		}
	}
	return result
}

// probe asks all parts until they are healthy, sends nil, and then asks now and then. Its error is that of a part that
// is not any more.
func (a *attempt) probe(ctx context.Context, done []atomic.Bool, healthy chan<- error) error {
	every := a.r.o.Probe
	wait := min(every, 100*time.Millisecond)
	bad, was := 0, false
	for {
		err := a.ask(ctx, done)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			if bad = 0; !was {
				was = true
				healthy <- nil
			}
			wait = every
		case was:
			if bad++; bad == maxProbes {
				return fmt.Errorf("probe: %w", err)
			}
			wait = every
		default:
			wait = min(2*wait, every, time.Second) // somebody may wait for it
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil
		}
	}
}

// ask probes each part once that is not done.
func (a *attempt) ask(ctx context.Context, done []atomic.Bool) error {
	ctx, cancel := context.WithTimeout(ctx, a.r.o.Probe)
	defer cancel()
	for i, p := range a.r.parts {
		if p.Probe == nil || done[i].Load() {
			continue
		}
		if err := p.Probe(ctx); err != nil {
			if p.Name == a.r.name {
				return err
			}
			return fmt.Errorf("%s: %w", p.Name, err)
		}
	}
	return nil
}
