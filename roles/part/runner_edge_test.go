package part

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/thejerf/suture/v4"
)

type nilError struct{ cause error }

func (e *nilError) Error() string { return "nil" }
func (e *nilError) Unwrap() error { return e.cause }

// An error whose Unwrap panics, as that of a nil pointer, is a failure of the part that backs off as any other.
func TestEdgeErrorPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs atomic.Int32
		r := New("x", Options{}, Part{Name: "x", Run: func(context.Context) error {
			runs.Add(1)
			var e *nilError
			return e
		}})
		tree := suture.New("tree", suture.Spec{EventHook: func(suture.Event) {}, Timeout: time.Millisecond})
		tree.Add(r)
		ctx, cancel := context.WithCancel(t.Context())
		ended := tree.ServeBackground(ctx)
		time.Sleep(100 * time.Millisecond) // the first backoff is 250 ms
		synctest.Wait()
		s, _ := r.State()
		if n := runs.Load(); n > 1 || s.Phase != BackingOff {
			t.Errorf("in the first 100 ms it was begun %d times, and is %s, error %v", n, s.Phase, s.Err)
		}
		cancel()
		<-ended
		synctest.Wait()
	})
}

// A Probe that ignores its context keeps the part from being restarted: that is to be seen.
func TestEdgeDeafProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var probes atomic.Int32
		r := New("x", Options{}, Part{Name: "x", Run: func(context.Context) error {
			time.Sleep(time.Minute)
			return errTest
		}, Probe: func(context.Context) error {
			if probes.Add(1) > 1 {
				<-release
			}
			return nil
		}})
		stop := serve(t, r)
		time.Sleep(time.Hour)
		synctest.Wait()
		if s, _ := r.State(); s.Phase == Healthy || s.Err == nil && len(s.Busy) == 0 {
			t.Errorf("its Run failed an hour ago, and it is %s, error %v, busy %v", s.Phase, s.Err, s.Busy)
		}
		close(release)
		_ = stop()
	})
}

// As above, after a Restart.
func TestEdgeDeafProbeRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := New("x", Options{}, Part{Name: "x", Run: func(ctx context.Context) error {
			<-ctx.Done()
			return nil
		}, Probe: func(context.Context) error { <-release; return nil }})
		stop := serve(t, r)
		time.Sleep(time.Second)
		r.Restart()
		time.Sleep(time.Hour)
		synctest.Wait()
		if s, _ := r.State(); len(s.Busy) == 0 {
			t.Errorf("was to restart an hour ago, is %s, and nobody is named", s.Phase)
		}
		close(release)
		_ = stop()
	})
}

// A part that is done before it was ready does not keep the others from being healthy.
func TestEdgeDoneUnready(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b begins
		r := New("pair", Options{}, Part{Name: "a", Signals: true, Run: func(context.Context) error { return ErrDone }}, b.part("b", time.Hour, errTest))
		stop := serve(t, r)
		time.Sleep(time.Minute)
		synctest.Wait()
		r.is(t, "a is done, b runs", Healthy)
		_ = stop()
	})
}

// A part that is done is not asked any more whether it is healthy.
func TestEdgeDoneProbed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var done atomic.Bool
		var runs atomic.Int32
		r := New("pair", Options{}, Part{Name: "a", Run: func(context.Context) error {
			runs.Add(1)
			time.Sleep(time.Minute)
			done.Store(true)
			return ErrDone
		}, Probe: func(context.Context) error {
			if done.Load() {
				return errors.New("not running")
			}
			return nil
		}}, Part{Name: "b", Run: func(ctx context.Context) error { <-ctx.Done(); return nil }})
		stop := serve(t, r)
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if n := runs.Load(); n != 1 {
			t.Errorf("a said that it is done, and was run %d times", n)
		}
		_ = stop()
	})
}

// However an error behaves, no part is run while an earlier run of it has not returned.
func TestEdgeNoDoubleRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var running, most atomic.Int32
		r := New("pair", Options{}, Part{Name: "a", Run: func(context.Context) error {
			var e *nilError
			return e
		}}, Part{Name: "b", Run: func(ctx context.Context) error {
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			<-ctx.Done()
			time.Sleep(time.Second)
			return nil
		}})
		tree := suture.New("tree", suture.Spec{EventHook: func(suture.Event) {}, Timeout: time.Millisecond})
		tree.Add(r)
		ctx, cancel := context.WithCancel(t.Context())
		ended := tree.ServeBackground(ctx)
		time.Sleep(100 * time.Millisecond)
		cancel()
		<-ended
		time.Sleep(10 * time.Second)
		if n := most.Load(); n > 1 {
			t.Errorf("b ran %d times at a time", n)
		}
	})
}

// Restart while a restart is on its way is the same restart.
func TestEdgeRestartTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs atomic.Int32
		r := New("x", Options{}, Part{Name: "x", Run: func(ctx context.Context) error {
			runs.Add(1)
			<-ctx.Done()
			time.Sleep(4 * time.Second)
			return nil
		}})
		stop := serve(t, r)
		time.Sleep(time.Second)
		r.Restart()
		time.Sleep(time.Second)
		r.Restart() // what runs was already told to end
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := runs.Load(); n != 2 {
			t.Errorf("begun %d times, want 2: the one that began after both Restarts was restarted", n)
		}
		_ = stop()
	})
}
