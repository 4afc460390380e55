package memory

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
)

// Cut cuts this handle off from the store: every call fails with an error that wraps ErrCut, and every
// watcher yields one and then is silent. A watcher that joins while the handle is cut off does so too.
// Cutting off twice is as once. Other handles are not affected.
func (r *Registry) Cut() {
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	if r.cut {
		return
	}
	r.cut = true
	r.each(func(w *watcher) {
		w.err = fmt.Errorf("%s %s: %w", OpWatch, w.kind, ErrCut)
		w.signal()
	})
}

// Heal ends a Cut as a store does that cannot say what was missed: the next batch of every watcher of
// this handle is a Reset. Healing what is not cut off does nothing.
func (r *Registry) Heal() {
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	if !r.cut {
		return
	}
	r.cut = false
	r.each((*watcher).startOver)
}

// Resume ends a Cut as a store does that kept what was missed: every watcher of this handle gets the
// changes of the meantime, merged, without a Reset. One that had no Reset so far gets its first, and
// everyone gets one if Compact or Restore came in between. Resuming what is not cut off does nothing.
func (r *Registry) Resume() {
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	if !r.cut {
		return
	}
	r.cut = false
	r.each((*watcher).signal)
}

// each calls f for every watcher of this handle. The caller holds the lock.
func (r *Registry) each(f func(*watcher)) {
	for w := range r.store.watchers {
		if w.handle == r {
			f(w)
		}
	}
}

// Compact makes the store forget its history: the next batch of every watcher, through whatever handle,
// is a Reset. It is delivered at once, or when the watcher's handle is cut off, after that.
func (r *Registry) Compact() {
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	for w := range r.store.watchers {
		w.startOver()
	}
}

// FailNext makes the next n calls of Put, Delete and Swap through this handle fail with err, before
// they reach the store. It replaces an earlier FailNext; n of 0 ends it. Calls that fail because the
// handle is cut off do not count. An err made by Late lets them reach the store.
func (r *Registry) FailNext(n int, err error) {
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	r.failures, r.failure = n, err
}

// SetFault makes f decide which calls through this handle fail: those for which it returns an error. It
// is asked with the op and the ID, and for OpWatch with the kind, each time a watcher wants to look at
// the store; a watcher whose look fails yields the error and tries again 10 ms later. f may be called
// from several goroutines at once, and may use the store. Nil ends it.
func (r *Registry) SetFault(f func(op, id string) error) {
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	r.fault = f
}

// SetDelay makes every call through this handle take f's time before it reaches the store, and every
// batch come that much later. A call whose context ends meanwhile does not reach the store. f may be
// called from several goroutines at once. Nil ends it.
func (r *Registry) SetDelay(f func(op, id string) time.Duration) {
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	r.delay = f
}

// Late makes of err a fault that comes after the fact: the call takes effect and yet fails with err, as
// when a store's answer is lost. It is for FailNext and SetFault.
func Late(err error) error { return &lateError{err} }

type lateError struct{ err error }

func (e *lateError) Error() string { return e.err.Error() }
func (e *lateError) Unwrap() error { return e.err }

// Snapshot is a backup of a store.
type Snapshot struct {
	Revision uint64
	Entries  []registry.Entry // sorted by ID; the Data must not be written to
}

// Snapshot returns what the store has now, of all kinds, also through a handle that is cut off.
func (r *Registry) Snapshot() Snapshot {
	s := r.store
	s.mu.Lock()
	defer s.mu.Unlock()
	snap := Snapshot{Revision: s.revision}
	for _, entries := range s.kinds {
		for id, data := range entries {
			snap.Entries = append(snap.Entries, registry.Entry{ID: id, Data: data})
		}
	}
	slices.SortFunc(snap.Entries, func(a, b registry.Entry) int { return strings.Compare(a.ID, b.ID) })
	return snap
}

// Restore makes the store what it was at snap, as from a backup, also through a handle that is cut off:
// the revision goes back too, and the next batch of every watcher, through whatever handle, is a Reset.
// It panics if snap has an entry that Put would refuse.
func (r *Registry) Restore(snap Snapshot) {
	kinds := make(map[string]map[string][]byte)
	for _, e := range snap.Entries {
		if err := registry.CheckEntry(e); err != nil {
			panic(fmt.Sprintf("memory registry: restore: %v", err))
		}
		kind := kindOf(e.ID)
		if kinds[kind] == nil {
			kinds[kind] = make(map[string][]byte)
		}
		kinds[kind][e.ID] = append([]byte{}, e.Data...)
	}
	s := r.store
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kinds, s.revision = kinds, snap.Revision
	for w := range s.watchers {
		w.startOver()
	}
}
