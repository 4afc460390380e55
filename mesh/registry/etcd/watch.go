package etcd

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime/debug"
	"sync"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
)

// errReloaded is why an attempt ends that is no failure.
var errReloaded = errors.New("reloaded")

// Watch implements [registry.Registry]. What there is comes from linearizable reads, so that ranging over
// Watch anew is a linearizable read of its kind. See the package comment for when a Reset comes, and for
// when errors are yielded. Entries are sorted by ID within a batch.
func (r *Registry) Watch(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
	return func(yield func(registry.Batch, error) bool) {
		if ctx.Err() != nil {
			return
		}
		if err := registry.CheckKind(kind); err != nil {
			yield(registry.Batch{}, err)
			return
		}
		ctx, cancel := context.WithCancel(ctx)
		w := newWatcher(r, kind)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { w.follow(ctx) })
		deliver(ctx, w.view, yield)
	}
}

// deliver yields what there is to take, until ctx ends or yield returns false.
func deliver(ctx context.Context, v *view, yield func(registry.Batch, error) bool) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		b, later, ok, err := v.take(time.Now())
		if ok {
			if ctx.Err() != nil || !yield(b, err) || ctx.Err() != nil {
				return
			}
			continue
		}
		var due <-chan time.Time
		if !later.IsZero() {
			timer.Reset(time.Until(later))
			due = timer.C
		}
		select {
		case <-v.wake:
		case <-due:
		case <-ctx.Done():
			return
		}
	}
}

// watcher is one running Watch. All but view belongs to the goroutine that runs follow.
type watcher struct {
	r    *Registry
	kind string
	view *view
	pace *pacer
	page int64 // how many entries to list at a time
	keys int64 // how many keys to compare at a time
	at   position

	well  time.Time // when all was last known to be well; zero: never
	since time.Time // since when the stream of this attempt has been established; zero: it is not
}

func newWatcher(r *Registry, kind string) *watcher {
	return &watcher{r: r, kind: kind, view: newView(), pace: newPacer(), page: firstPage, keys: mostPage}
}

// follow keeps the view up to date until ctx ends.
func (w *watcher) follow(ctx context.Context) {
	for ctx.Err() == nil {
		w.r.mu.Lock()
		set, reloaded := w.r.set, w.r.reloaded
		w.r.mu.Unlock()
		w.pace.timeout = set.timeout

		began := time.Now()
		w.since = time.Time{}
		err := w.guarded(ctx, set, reloaded)
		now := time.Now()
		switch {
		case ctx.Err() != nil:
			return
		case w.r.isClosed():
			w.view.fail(fmt.Errorf("etcd: watch %s: %w", w.kind, ErrClosed), now)
			<-ctx.Done()
			return
		case errors.Is(err, errReloaded):
			continue
		}
		if ending(ctx, set, err) {
			<-ctx.Done()
			return
		}
		kind := kindOf(err)
		took := now.Sub(began)
		if !w.since.IsZero() {
			w.pace.ran(now.Sub(w.since))
			took = 0
			w.well = now
			if kind == ErrTimeout {
				w.well = now.Add(-set.timeout)
			}
		}
		w.tell(set, kind, err, now)
		select {
		case <-time.After(w.pace.delay(kind, took)):
		case <-reloaded:
		case <-w.r.closed:
		case <-ctx.Done():
		}
	}
}

// tell has the consumer know of a failure, if it is time to. What is found again within the timeout is
// no failure, unless etcd refuses who asks.
func (w *watcher) tell(set *settings, kind, err error, now time.Time) {
	if !w.pace.tell(kind, now) {
		return
	}
	due := now
	if !w.well.IsZero() && kind != ErrUnauthorised {
		due = w.well.Add(set.timeout)
	}
	err = set.at("watch "+w.kind, err)
	w.view.fail(err, due)
	set.log.Debug("watching is interrupted", "kind", w.kind, "error", err) // whoever watches is told
}

// established notes that all is well.
func (w *watcher) established(set *settings) {
	w.since = time.Now()
	w.view.recovered(w.since)
	w.works(set)
}

// works notes that the store answered. The next failure is a new one, which is told: the consumer may have
// been given a batch since the last, and take all for well.
func (w *watcher) works(set *settings) {
	w.well = time.Now()
	if w.pace.recovered() {
		set.log.Debug("watching goes on", "kind", w.kind, "at", set.urls())
	}
}

// guarded is attempt that ends when the registry is reloaded or closed, and whose panic is an error.
func (w *watcher) guarded(ctx context.Context, set *settings, reloaded <-chan struct{}) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		select {
		case <-reloaded:
			cancel(errReloaded)
		case <-w.r.closed:
			cancel(ErrClosed)
		case <-ctx.Done():
		}
	})
	defer func() {
		if p := recover(); p != nil {
			set.log.Error("watching panicked", "kind", w.kind, "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("%w: panic: %v", ErrServer, p)
		}
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()
	c, err := w.r.acquire()
	if err != nil {
		return err
	}
	defer w.r.release(c)
	if err := w.attempt(ctx, c); err != nil {
		return w.r.failed(c, err)
	}
	return nil
}

// attempt lists where it has to, and watches until that fails.
func (w *watcher) attempt(ctx context.Context, c *conn) error {
	if w.at.listed {
		if err := w.verify(ctx, c); err != nil {
			return err
		}
	}
	const most = 3 // compactions may come while listing, but not for ever
	for n := 0; n < most; n++ {
		if !w.at.listed {
			if err := w.list(ctx, c); err != nil {
				return err
			}
			w.works(c.set)
		}
		w.since = time.Time{}
		err := w.stream(ctx, c)
		if !w.since.IsZero() && time.Since(w.since) > c.set.timeout {
			n = 0
		}
		switch {
		case errors.Is(err, errGap):
			w.gap(c.set, err.Error())
		case errors.Is(err, errCompacted):
			if err := w.bridge(ctx, c); err != nil {
				return err
			}
		default:
			return err
		}
	}
	return fmt.Errorf("%w: the history ended %d times before it could be watched", ErrServer, most)
}
