package part

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve serves r in a bubble of synctest until stop is called, which returns what Serve did.
func serve(t *testing.T, r *Runner) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Serve(ctx) }()
	synctest.Wait()
	return func() error {
		cancel()
		return <-ended
	}
}

func (r *Runner) is(t *testing.T, when string, want Phase) State {
	t.Helper()
	s, _ := r.State()
	if s.Phase != want {
		t.Errorf("%s: it is %s, want %s (%+v)", when, s.Phase, want, s)
	}
	return s
}

var errTest = errors.New("test")

// begins counts the attempts of what always fails after a while, and notes when each was begun.
type begins struct {
	mu  sync.Mutex
	all []time.Time
}

func (b *begins) at() []time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.all)
}

func (b *begins) part(name string, after time.Duration, err error) Part {
	return Part{Name: name, Run: func(ctx context.Context) error {
		b.mu.Lock()
		b.all = append(b.all, time.Now())
		b.mu.Unlock()
		select {
		case <-time.After(after):
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}}
}

// Two parts that share something and fail, each for want of the other, restart together, and no more often than the
// backoff allows.
func TestFailingGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a, b begins
		r := New("pair", Options{}, a.part("a", 0, errTest), b.part("b", 0, errTest))
		stop := serve(t, r)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		// 0.25 to 0.75 s, then twice that, then four times: at most at 0, 0.25, 0.75, 1.75.
		if n := len(a.at()); n < 2 || n > 4 || len(b.at()) != n {
			t.Errorf("in 3 s a was begun %d times, and b %d times", n, len(b.at()))
		}
		if s := r.is(t, "after 3 s", BackingOff); s.Restarts != len(a.at())-1 || !errors.Is(s.Err, errTest) || s.Next.Before(time.Now()) {
			t.Errorf("its state is %+v, after %d attempts", s, len(a.at()))
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if n := len(a.at()); n < 40 || n > 130 {
			t.Errorf("in an hour it was begun %d times, where a minute is the longest pause", n)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
		r.is(t, "at the end", Stopped)
	})
}

// What is healthy for a second, and then fails, for ever, is restarted less and less often. What is healthy for long is
// restarted soon.
func TestStable(t *testing.T) {
	for _, test := range []struct {
		healthy  time.Duration
		from, to int
	}{{time.Second, 50, 140}, {2 * time.Minute, 28, 30}} {
		synctest.Test(t, func(t *testing.T) {
			var b begins
			stop := serve(t, New("x", Options{}, b.part("x", test.healthy, errTest)))
			time.Sleep(time.Hour)
			synctest.Wait()
			if n := len(b.at()); n < test.from || n > test.to {
				t.Errorf("healthy for %v: begun %d times in an hour, want %d to %d", test.healthy, n, test.from, test.to)
			}
			var longest time.Duration
			for i := 1; i < len(b.at()); i++ {
				longest = max(longest, b.at()[i].Sub(b.at()[i-1])-test.healthy)
			}
			if short := longest < time.Second; short != (test.healthy > time.Minute) {
				t.Errorf("healthy for %v: the longest pause was %v", test.healthy, longest)
			}
			_ = stop()
		})
	}
}

// A part that does not end is named, nothing is begun while it runs, and once it ends all goes on.
func TestStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var others begins
		var runs atomic.Int32
		r := New("pair", Options{}, others.part("a", time.Second, errTest), Part{Name: "stuck", Run: func(context.Context) error {
			runs.Add(1)
			<-release
			return nil
		}})
		stop := serve(t, r)
		time.Sleep(time.Second)
		synctest.Wait()
		if s := r.is(t, "a has failed", Stopping); s.Busy != nil {
			t.Errorf("named at once: %v", s.Busy)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if s := r.is(t, "it does not end", Stopping); !slices.Equal(s.Busy, []string{"stuck"}) {
			t.Errorf("busy are %v", s.Busy)
		}
		time.Sleep(time.Hour)
		if n := len(others.at()); n != 1 || runs.Load() != 1 {
			t.Errorf("while it ran, %d and %d were begun", n, runs.Load())
		}
		close(release)
		time.Sleep(time.Second)
		synctest.Wait()
		if len(others.at()) != 2 {
			t.Errorf("it has ended, and a was begun %d times", len(others.at()))
		}
		_ = stop()
	})
}

// How a part ends decides what becomes of it.
func TestEnds(t *testing.T) {
	for _, test := range []struct {
		name string
		run  func(context.Context) error
		want Phase
		err  string
	}{
		{"nil", func(context.Context) error { return nil }, BackingOff, ErrEnded.Error()},
		{"an error", func(context.Context) error { return errTest }, BackingOff, "test"},
		{"done", func(context.Context) error { return ErrDone }, Done, ""},
		{"done, wrapped", func(context.Context) error { return fmt.Errorf("so: %w", ErrDone) }, Done, ""},
		{"fatal", func(context.Context) error { return fmt.Errorf("so: %w", Fatal(errTest)) }, Failed, "so: test"},
		{"context.Canceled of its own", func(context.Context) error { return context.Canceled }, BackingOff, "context canceled"},
		{"a panic", func(context.Context) error { panic("boo") }, BackingOff, "panic: boo"},
		{"a panic with an error", func(context.Context) error { panic(errTest) }, BackingOff, "panic: test"},
		{"a panic with nil", func(context.Context) error { panic(nil) }, BackingOff, "panic: panic called with nil"},
		{"Goexit", func(context.Context) error { runtime.Goexit(); return nil }, BackingOff, "Goexit"},
		{"a panic of a goroutine", func(ctx context.Context) error {
			g := NewGroup(ctx)
			g.Go("one", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
			g.Go("two", func(context.Context) error { panic("boo") })
			return g.Wait()
		}, BackingOff, "two: panic: boo"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := New("x", Options{}, Part{Name: "x", Run: test.run})
				stop := serve(t, r)
				s := r.is(t, test.name, test.want)
				if test.err == "" != (s.Err == nil) || s.Err != nil && !strings.Contains(s.Err.Error(), test.err) {
					t.Errorf("the error is %v, want %q", s.Err, test.err)
				}
				if p, ok := errors.AsType[*PanicError](s.Err); ok && !strings.Contains(string(p.Stack), "part_test.go") {
					t.Errorf("the stack is not where it panicked:\n%s", p.Stack)
				}
				if err := stop(); IsFatal(err) != (test.want == Failed) || !IsFatal(err) && err != nil {
					t.Errorf("Serve returned %v", err)
				}
			})
		})
	}
}

// Once it was told to end, whatever a part returns is no failure: not what gRPC makes of the end of a context either.
func TestStopIsNoFailure(t *testing.T) {
	for _, end := range []func(context.Context) error{
		func(ctx context.Context) error { return ctx.Err() },
		func(context.Context) error { return errors.New("rpc error: code = Canceled desc = context canceled") },
		func(context.Context) error { return Fatal(errTest) },
		func(context.Context) error { panic("late") },
	} {
		synctest.Test(t, func(t *testing.T) {
			r := New("x", Options{}, Part{Name: "x", Run: func(ctx context.Context) error {
				<-ctx.Done()
				return end(ctx)
			}})
			stop := serve(t, r)
			r.is(t, "it runs", Healthy)
			r.Restart()
			time.Sleep(time.Second)
			synctest.Wait()
			if s := r.is(t, "restarted", Healthy); s.Restarts != 1 || s.Err != nil {
				t.Errorf("restarted: %+v", s)
			}
			if err := stop(); err != nil {
				t.Errorf("Serve returned %v", err)
			}
			if s := r.is(t, "it ended", Stopped); s.Err != nil {
				t.Errorf("a failure: %v", s.Err)
			}
		})
	}
}

// It is stopped at once while it backs off, and begun at once where that is asked for; but never more often than that.
func TestBackingOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b begins
		r := New("x", Options{Initial: time.Hour, Max: time.Hour}, b.part("x", 0, errTest))
		stop := serve(t, r)
		r.is(t, "it failed", BackingOff)
		time.Sleep(time.Minute)
		r.Restart()
		synctest.Wait()
		if len(b.at()) != 2 || b.at()[1].Sub(b.at()[0]) != time.Minute {
			t.Errorf("begun at %v", b.at())
		}
		for begun := time.Now(); time.Since(begun) < time.Second; time.Sleep(time.Millisecond) {
			r.Restart()
		}
		synctest.Wait()
		if n := len(b.at()) - 2; n < 10 || n > 21 {
			t.Errorf("asked for all the time, it restarted %d times in a second", n)
		}
		begun := time.Now()
		if err := stop(); err != nil || time.Since(begun) != 0 {
			t.Errorf("it took %v to stop: %v", time.Since(begun), err)
		}
		r.Restart() // while nothing runs
		stop = serve(t, r)
		if n := len(b.at()); n > 24 {
			t.Errorf("begun %d times", n)
		}
		s, _ := r.State()
		if s.Restarts != 0 {
			t.Errorf("an earlier restart is counted: %+v", s)
		}
		_ = stop()
	})
}

func TestProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ill atomic.Bool
		ill.Store(true)
		var b begins
		p := b.part("x", 1000*time.Hour, nil)
		p.Probe = func(ctx context.Context) error {
			if ill.Load() {
				return errTest
			}
			return nil
		}
		r := New("x", Options{}, p)
		stop := serve(t, r)
		time.Sleep(time.Minute)
		r.is(t, "ill from the start", Starting)
		ill.Store(false)
		time.Sleep(10 * time.Second)
		r.is(t, "well", Healthy)
		ill.Store(true)
		time.Sleep(15 * time.Second)
		ill.Store(false)
		time.Sleep(time.Hour)
		if r.is(t, "ill for a moment", Healthy); len(b.at()) != 1 {
			t.Errorf("begun %d times", len(b.at()))
		}
		ill.Store(true)
		time.Sleep(35 * time.Second)
		if s, _ := r.State(); len(b.at()) < 2 || !errors.Is(s.Err, errTest) || !strings.Contains(s.Err.Error(), "probe") {
			t.Errorf("ill for long: begun %d times, %+v", len(b.at()), s)
		}
		_ = stop()
	})
}

// A probe that hangs or panics is one that says no; it holds up nothing.
func TestBadProbe(t *testing.T) {
	for name, probe := range map[string]func(context.Context) error{
		"hangs":  func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"panics": func(context.Context) error { panic("boo") },
	} {
		synctest.Test(t, func(t *testing.T) {
			var b begins
			p := b.part("x", 1000*time.Hour, nil)
			p.Probe = probe
			r := New("x", Options{}, p)
			stop := serve(t, r)
			time.Sleep(time.Minute)
			if s, _ := r.State(); s.Phase == Healthy {
				t.Errorf("%s: it is healthy", name)
			}
			if err := stop(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}

// A group is as healthy as each of its parts, and done when all are.
func TestGroupDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b begins
		r := New("pair", Options{}, b.part("a", time.Second, ErrDone), b.part("b", time.Minute, ErrDone))
		stop := serve(t, r)
		time.Sleep(2 * time.Second)
		r.is(t, "a is done", Healthy)
		time.Sleep(time.Minute)
		if r.is(t, "both are", Done); len(b.at()) != 2 {
			t.Errorf("%d were begun", len(b.at()))
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

func TestServedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b begins
		r := New("x", Options{}, b.part("x", time.Hour, nil))
		stop := serve(t, r)
		if err := r.Serve(t.Context()); err == nil {
			t.Error("served twice at a time")
		}
		_ = stop()
		stop = serve(t, r)
		if r.is(t, "served again", Healthy); len(b.at()) != 2 {
			t.Errorf("begun %d times", len(b.at()))
		}
		_ = stop()
	})
}

// Whatever parts do, none begins while one of an earlier attempt runs, and none runs once Serve has returned.
func TestAnyParts(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		kinds := rapid.SliceOfN(rapid.IntRange(0, 6), 1, 4).Draw(rt, "parts")
		delays := rapid.SliceOfN(rapid.IntRange(0, 3000), 8, 8).Draw(rt, "ms")
		restarts := rapid.SliceOfN(rapid.IntRange(0, 5000), 0, 5).Draw(rt, "restart after ms")
		life := rapid.IntRange(0, 30000).Draw(rt, "stop after ms")
		synctest.Test(t, func(t *testing.T) {
			var running, attempt atomic.Int32
			var parts []Part
			for i, k := range kinds {
				ms := func(n int) time.Duration { return time.Duration(delays[(i+n)%len(delays)]) * time.Millisecond }
				parts = append(parts, Part{Name: fmt.Sprint(i), Run: func(ctx context.Context) error {
					if i == 0 {
						attempt.Add(1)
					}
					if n := running.Add(1); int(n) > len(kinds) {
						t.Errorf("%d parts run, of %d", n, len(kinds))
					}
					defer running.Add(-1)
					select {
					case <-time.After(ms(0)):
					case <-ctx.Done():
						time.Sleep(ms(1)) // it takes its time
						return ctx.Err()
					}
					switch k {
					case 0:
						return nil
					case 1:
						return errTest
					case 2:
						panic("boo")
					case 3:
						return ErrDone
					case 4:
						<-ctx.Done()
						return errTest
					case 5:
						runtime.Goexit()
					}
					<-ctx.Done()
					return nil
				}})
			}
			r := New("any", Options{}, parts...)
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(life)*time.Millisecond)
			defer cancel()
			go func() {
				for _, ms := range restarts {
					time.Sleep(time.Duration(ms) * time.Millisecond)
					r.Restart()
				}
			}()
			if err := r.Serve(ctx); err != nil {
				t.Errorf("Serve: %v", err)
			}
			if n := running.Load(); n != 0 {
				t.Errorf("%d parts run on", n)
			}
			if s, _ := r.State(); s.Phase != Stopped && s.Phase != Done || int(attempt.Load()) > s.Restarts+1 {
				t.Errorf("after %d attempts: %+v", attempt.Load(), s)
			}
			time.Sleep(30 * time.Second) // for those who restart
		})
	})
}

func TestGroup(t *testing.T) {
	g := NewGroup(t.Context())
	g.Go("waits", func(ctx context.Context) error { <-ctx.Done(); return errors.New("because of another") })
	g.Go("fails", func(context.Context) error { return errTest })
	if err := g.Wait(); !errors.Is(err, errTest) || err.Error() != "fails: test" {
		t.Error(err)
	}
	g = NewGroup(t.Context())
	g.Go("waits", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
	g.Cancel()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// A part that signals is healthy once it did.
func TestReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New("pair", Options{}, Part{Name: "a", Signals: true, Run: func(ctx context.Context) error {
			time.Sleep(time.Minute)
			Ready(ctx)
			Ready(ctx)
			<-ctx.Done()
			return nil
		}}, Part{Name: "b", Run: func(ctx context.Context) error { Ready(ctx); <-ctx.Done(); return nil }})
		stop := serve(t, r)
		r.is(t, "before", Starting)
		time.Sleep(time.Minute)
		synctest.Wait()
		r.is(t, "after", Healthy)
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	Ready(t.Context())
}
