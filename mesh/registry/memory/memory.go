package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
)

// ErrCut is the error of every call through a handle that was cut off.
var ErrCut = errors.New("memory registry: cut off")

// The op a fault or a delay is asked for.
const (
	OpPut    = "put"
	OpDelete = "delete"
	OpSwap   = "swap"
	OpWatch  = "watch" // with the kind in place of the ID
)

// Registry is a handle on an in-process store. It implements [registry.Registry] and
// [registry.Swapper]. Handles on one store see the same entries, but each has faults of its own. All
// methods may be called at the same time from any goroutine. There is nothing to close.
type Registry struct {
	store *store

	// Guarded by store.mu.
	cut      bool
	failures int
	failure  error
	fault    func(op, id string) error
	delay    func(op, id string) time.Duration
}

var (
	_ registry.Registry = (*Registry)(nil)
	_ registry.Swapper  = (*Registry)(nil)
)

// store is what handles share.
type store struct {
	mu       sync.Mutex
	revision uint64
	kinds    map[string]map[string][]byte // kind, ID, data; data is never changed in place and never nil
	watchers map[*watcher]struct{}
}

// watcher is one running Watch. Guarded by store.mu, but for wake.
type watcher struct {
	handle *Registry
	kind   string
	wake   chan struct{} // capacity 1: there may be something to take
	err    error         // to be yielded before anything else
	failed bool          // an error was yielded, and no batch since
	reset  bool          // the next batch is a Reset; dirty is empty
	// dirty has the IDs that changed since the last batch, and whether the consumer knows of them. What
	// it does not know and is gone again is forgotten, so that dirty is bounded by what the consumer
	// has plus what the store has, however much comes and goes in between.
	dirty map[string]bool
}

func (w *watcher) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *watcher) startOver() {
	w.reset = true
	clear(w.dirty)
	w.signal()
}

// New returns a handle on a new, empty store.
func New() *Registry {
	return &Registry{store: &store{
		kinds:    make(map[string]map[string][]byte),
		watchers: make(map[*watcher]struct{}),
	}}
}

// Handle returns a further handle on the same store, with no faults. Give every node of a test its own
// to cut off one of them alone, and keep one to look at and change the store while others are cut off.
func (r *Registry) Handle() *Registry { return &Registry{store: r.store} }

// Put implements [registry.Registry].
func (r *Registry) Put(ctx context.Context, e registry.Entry) error {
	if err := registry.CheckEntry(e); err != nil {
		return err
	}
	return r.do(ctx, OpPut, e.ID, func(s *store) { s.put(e.ID, e.Data) })
}

// Delete implements [registry.Registry].
func (r *Registry) Delete(ctx context.Context, id string) error {
	if _, _, err := registry.ParseID(id); err != nil {
		return err
	}
	return r.do(ctx, OpDelete, id, func(s *store) { s.delete(id) })
}

// Swap implements [registry.Swapper].
func (r *Registry) Swap(ctx context.Context, id string, old, new []byte) (current []byte, ok bool, err error) {
	if err := registry.CheckEntry(registry.Entry{ID: id, Data: new}); err != nil {
		return nil, false, err
	}
	err = r.do(ctx, OpSwap, id, func(s *store) {
		have := s.get(id)
		ok = (old == nil) == (have == nil) && bytes.Equal(old, have)
		if !ok {
			current = bytes.Clone(have)
			return
		}
		current = bytes.Clone(new)
		if new == nil {
			s.delete(id)
		} else {
			s.put(id, new)
		}
	})
	if err != nil {
		return nil, false, err
	}
	return current, ok, nil
}

// do runs act on the store, unless a fault or the end of ctx comes first.
func (r *Registry) do(ctx context.Context, op, id string, act func(*store)) error {
	if err := r.wait(ctx, op, id); err != nil {
		return fmt.Errorf("%s %s: %w", op, id, err)
	}
	err := r.faulty(op, id)
	if _, late := errors.AsType[*lateError](err); err == nil || late {
		r.store.mu.Lock()
		if r.cut {
			err = ErrCut
		} else {
			act(r.store)
		}
		r.store.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", op, id, err)
	}
	return nil
}

// wait takes as long as the handle's delay says, and returns ctx's error when ctx ends before.
func (r *Registry) wait(ctx context.Context, op, id string) error {
	r.store.mu.Lock()
	f := r.delay
	r.store.mu.Unlock()
	if f != nil {
		if err := sleep(ctx, f(op, id)); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// faulty returns the error with which a call has to fail. The fault function runs unlocked, so that it
// may use the store.
func (r *Registry) faulty(op, id string) error {
	r.store.mu.Lock()
	cut, fault := r.cut, r.fault
	var err error
	if !cut && op != OpWatch && r.failures > 0 {
		r.failures--
		err = r.failure
	}
	r.store.mu.Unlock()
	switch {
	case cut:
		return ErrCut
	case err != nil:
		return err
	case fault != nil:
		return fault(op, id)
	}
	return nil
}

// retryDelay is how long a watcher waits after a fault before it asks again.
const retryDelay = 10 * time.Millisecond

// Watch implements [registry.Registry]. It starts no goroutine. Entries are sorted by ID within a
// batch, so that a test that is deterministic otherwise stays so.
func (r *Registry) Watch(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
	return func(yield func(registry.Batch, error) bool) {
		if err := registry.CheckKind(kind); err != nil {
			if ctx.Err() == nil {
				yield(registry.Batch{}, err)
			}
			return
		}
		w := r.join(kind)
		defer r.part(w)
		for {
			select {
			case <-w.wake:
			case <-ctx.Done():
				return
			}
			if r.wait(ctx, OpWatch, kind) != nil {
				return
			}
			if err := r.watchFault(w); err != nil {
				if !yield(registry.Batch{}, err) || sleep(ctx, retryDelay) != nil {
					return
				}
				w.signal()
				continue
			}
			for {
				b, err, ok := r.take(w)
				if !ok {
					break
				}
				if !yield(b, err) || ctx.Err() != nil {
					return
				}
			}
		}
	}
}

// watchFault asks the fault function. That the handle is cut off is told by take, which does so once.
func (r *Registry) watchFault(w *watcher) error {
	r.store.mu.Lock()
	cut, fault := r.cut, r.fault
	r.store.mu.Unlock()
	if cut || fault == nil {
		return nil
	}
	err := fault(OpWatch, w.kind)
	if err == nil {
		return nil
	}
	r.store.mu.Lock()
	w.failed = true
	r.store.mu.Unlock()
	return fmt.Errorf("%s %s: %w", OpWatch, w.kind, err)
}

func (r *Registry) join(kind string) *watcher {
	w := &watcher{handle: r, kind: kind, wake: make(chan struct{}, 1), dirty: make(map[string]bool)}
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	r.store.watchers[w] = struct{}{}
	w.startOver()
	if r.cut {
		w.err = fmt.Errorf("%s %s: %w", OpWatch, kind, ErrCut)
	}
	return w
}

func (r *Registry) part(w *watcher) {
	r.store.mu.Lock()
	defer r.store.mu.Unlock()
	delete(r.store.watchers, w)
}

// take returns what w has to yield next; ok is false if there is nothing.
func (r *Registry) take(w *watcher) (b registry.Batch, err error, ok bool) {
	s := r.store
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case w.err != nil:
		err, w.err, w.failed = w.err, nil, true
		return registry.Batch{}, err, true
	case r.cut:
		return registry.Batch{}, nil, false
	case w.reset:
		w.reset = false
		b = registry.Batch{Revision: s.revision, Reset: true}
		for id, data := range s.kinds[w.kind] {
			b.Put = append(b.Put, registry.Entry{ID: id, Data: data})
		}
	case len(w.dirty) > 0:
		b = registry.Batch{Revision: s.revision}
		for id := range w.dirty {
			if data := s.get(id); data != nil {
				b.Put = append(b.Put, registry.Entry{ID: id, Data: data})
			} else {
				b.Deleted = append(b.Deleted, id)
			}
		}
		clear(w.dirty)
	case w.failed:
		b = registry.Batch{Revision: s.revision}
	default:
		return registry.Batch{}, nil, false
	}
	w.failed = false
	slices.SortFunc(b.Put, func(a, b registry.Entry) int { return strings.Compare(a.ID, b.ID) })
	slices.Sort(b.Deleted)
	return b, nil, true
}

// kindOf is for IDs that were checked.
func kindOf(id string) string {
	kind, _, _ := strings.Cut(id, "/")
	return kind
}

func (s *store) get(id string) []byte { return s.kinds[kindOf(id)][id] }

func (s *store) put(id string, data []byte) {
	kind := kindOf(id)
	if s.kinds[kind] == nil {
		s.kinds[kind] = make(map[string][]byte)
	}
	had := s.kinds[kind][id] != nil
	s.kinds[kind][id] = append(make([]byte, 0, len(data)), data...)
	s.revision++
	for w := range s.watchers {
		if w.kind != kind || w.reset {
			continue
		}
		if _, dirty := w.dirty[id]; !dirty {
			w.dirty[id] = had
		}
		w.signal()
	}
}

func (s *store) delete(id string) {
	kind := kindOf(id)
	if s.kinds[kind][id] == nil {
		return
	}
	delete(s.kinds[kind], id)
	s.revision++
	for w := range s.watchers {
		if w.kind != kind || w.reset {
			continue
		}
		if known, dirty := w.dirty[id]; dirty && !known {
			delete(w.dirty, id)
			continue
		}
		w.dirty[id] = true
		w.signal()
	}
}
