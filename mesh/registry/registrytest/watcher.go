package registrytest

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/watch"
)

// tb is what testing.TB and rapid.T have in common.
type tb interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// view is what a watcher has seen so far.
type view struct {
	registry.State
	batches, resets, errs int
	failing               bool     // the last that came was an error
	problems              []string // what broke the contract
	ended                 bool
}

// watcher ranges over a Watch, folds the batches and checks each.
type watcher struct {
	kind   string
	cancel context.CancelFunc
	done   chan struct{}

	mu    sync.Mutex
	seen  view
	moved watch.Value[struct{}] // set whenever seen changes
}

// follow starts a watcher. pace, if not nil, is called with each batch before the next is taken.
func follow(r registry.Registry, kind string, pace func(registry.Batch)) *watcher {
	ctx, cancel := context.WithCancel(context.Background())
	w := &watcher{kind: kind, cancel: cancel, done: make(chan struct{})}
	seq := r.Watch(ctx, kind)
	go func() {
		defer close(w.done)
		w.run(seq, pace)
	}()
	return w
}

func (w *watcher) run(seq iter.Seq2[registry.Batch, error], pace func(registry.Batch)) {
	for b, err := range seq {
		w.update(func(v *view) {
			if err == nil {
				v.take(b, w.kind)
				return
			}
			v.errs++
			v.failing = true
			if b.Revision != 0 || b.Reset || b.Put != nil || b.Deleted != nil {
				v.problem("a batch came with the error %v: %s", err, describe(b))
			}
		})
		if err == nil && pace != nil {
			pace(b)
		}
	}
	w.update(func(v *view) { v.ended = true })
}

func (w *watcher) update(f func(*view)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.seen)
	w.moved.Set(struct{}{})
}

// now returns what was seen so far, if ok accepts it.
func (w *watcher) now(ok func(view) bool) (view, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if ok != nil && !ok(w.seen) {
		return view{}, false
	}
	v := w.seen
	v.Entries = maps.Clone(v.Entries)
	return v, true
}

// view returns what was seen so far.
func (w *watcher) view() view {
	v, _ := w.now(nil)
	return v
}

func (v *view) problem(format string, args ...any) {
	if len(v.problems) < 10 {
		v.problems = append(slices.Clip(v.problems), fmt.Sprintf(format, args...))
	}
}

func (v *view) take(b registry.Batch, kind string) {
	switch {
	case !b.Reset && !v.Known:
		v.problem("the first batch is no Reset: %s", describe(b))
	case b.Reset && len(b.Deleted) > 0:
		v.problem("a Reset has Deleted: %s", describe(b))
	case !b.Reset && b.Revision < v.Revision:
		v.problem("the revision fell from %d to %d without a Reset", v.Revision, b.Revision)
	case !b.Reset && len(b.Put) == 0 && len(b.Deleted) == 0 && !v.failing:
		v.problem("a batch that is no Reset has nothing in it, at revision %d", b.Revision)
	}
	ids := make(map[string]bool, len(b.Put)+len(b.Deleted))
	check := func(id string) {
		if ids[id] {
			v.problem("%q is in a batch twice: %s", id, describe(b))
		}
		ids[id] = true
		if !strings.HasPrefix(id, kind+"/") {
			v.problem("%q came to a watcher of kind %q", id, kind)
		}
	}
	for _, e := range b.Put {
		check(e.ID)
	}
	for _, id := range b.Deleted {
		check(id)
	}
	v.batches++
	v.failing = false
	if b.Reset {
		v.resets++
	}
	v.Apply(b)
}

func describe(b registry.Batch) string {
	var s strings.Builder
	fmt.Fprintf(&s, "revision %d, reset %t, put [", b.Revision, b.Reset)
	for i, e := range b.Put {
		if i == 10 {
			fmt.Fprintf(&s, " and %d more", len(b.Put)-i)
			break
		}
		fmt.Fprintf(&s, " %s", e.ID)
	}
	fmt.Fprintf(&s, " ], %d deleted %.10q", len(b.Deleted), b.Deleted[:min(10, len(b.Deleted))])
	return s.String()
}

// await waits until cond holds, and fails if it does not in time, if the watcher ends first, or if it
// saw the contract broken. cond must keep nothing of what it is given.
func (w *watcher) await(t tb, timeout time.Duration, what string, cond func(view) bool) view {
	t.Helper()
	late := time.NewTimer(timeout)
	defer late.Stop()
	for {
		_, _, moved := w.moved.Get()
		done, ok := w.now(func(v view) bool { return len(v.problems) > 0 || v.ended || cond(v) })
		switch {
		case len(done.problems) > 0:
			t.Fatalf("watcher of %q saw the contract broken:\n  %s", w.kind, strings.Join(done.problems, "\n  "))
		case ok && cond(done):
			return done
		case ok:
			t.Fatalf("watcher of %q ended while waiting for %s", w.kind, what)
		}
		select {
		case <-moved:
		case <-late.C:
			v := w.view()
			t.Fatalf("watcher of %q: not within %v: %s; saw %d batches, %d resets, %d errors, and has %d entries",
				w.kind, timeout, what, v.batches, v.resets, v.errs, len(v.Entries))
		}
	}
}

// awaitState waits for a Reset and for exactly the entries wanted.
func (w *watcher) awaitState(t tb, timeout time.Duration, want map[string]string) view {
	t.Helper()
	return w.await(t, timeout, fmt.Sprintf("exactly %d entries as wanted", len(want)), func(v view) bool {
		return v.Known && same(v.Entries, want)
	})
}

// stop ends the watcher and waits for it.
func (w *watcher) stop(t tb, prompt time.Duration) {
	t.Helper()
	w.cancel()
	ends(t, w.done, prompt, "a watcher whose context was cancelled")
}

// ends fails unless done closes soon.
func ends(t tb, done <-chan struct{}, prompt time.Duration, what string) {
	t.Helper()
	late := time.NewTimer(prompt)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
		t.Fatalf("%s did not end within %v", what, prompt)
	}
}

func same(have map[string]registry.Entry, want map[string]string) bool {
	if len(have) != len(want) {
		return false
	}
	for id, data := range want {
		if e, ok := have[id]; !ok || !bytes.Equal(e.Data, []byte(data)) {
			return false
		}
	}
	return true
}
