package etcd_test

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
)

// follower ranges over a Watch and folds what it gets.
type follower struct {
	t      testing.TB
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu   sync.Mutex
	seen seen
	move chan struct{} // closed when seen changes
}

type seen struct {
	registry.State
	batches, resets, deleted int
	errs                     []error
	at                       []time.Time // of each of errs
}

func follow(t testing.TB, r registry.Registry, kind string) *follower {
	ctx, cancel := context.WithCancel(context.Background())
	f := &follower{t: t, cancel: cancel, move: make(chan struct{})}
	f.wg.Go(func() {
		for b, err := range r.Watch(ctx, kind) {
			f.mu.Lock()
			if err != nil {
				f.seen.errs, f.seen.at = append(f.seen.errs, err), append(f.seen.at, time.Now())
			} else {
				f.seen.Apply(b)
				f.seen.batches++
				f.seen.deleted += len(b.Deleted)
				if b.Reset {
					f.seen.resets++
				}
			}
			close(f.move)
			f.move = make(chan struct{})
			f.mu.Unlock()
		}
	})
	t.Cleanup(f.stop)
	return f
}

func (f *follower) stop() {
	f.cancel()
	f.wg.Wait()
}

func (f *follower) now() (seen, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.seen
	s.Entries = maps.Clone(s.Entries)
	return s, f.move
}

// await waits until ok holds.
func (f *follower) await(what string, ok func(seen) bool) seen {
	f.t.Helper()
	late := time.NewTimer(patience)
	defer late.Stop()
	for {
		s, moved := f.now()
		if ok(s) {
			return s
		}
		select {
		case <-moved:
		case <-late.C:
			f.t.Fatalf("not within %v: %s; %d resets, %d entries, errors %v", patience, what, s.resets, len(s.Entries), s.errs)
		}
	}
}

// has waits until an entry has these bytes.
func (f *follower) has(id, data string) seen {
	f.t.Helper()
	return f.await(fmt.Sprintf("%s is %q", id, data), func(s seen) bool {
		e, ok := s.Entries[id]
		return ok && string(e.Data) == data
	})
}

// hasNot waits until an entry is gone.
func (f *follower) hasNot(id string) seen {
	f.t.Helper()
	return f.await(id+" is gone", func(s seen) bool {
		_, ok := s.Entries[id]
		return s.Known && !ok
	})
}

func put(t testing.TB, r registry.Registry, id, data string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		err := r.Put(ctx, registry.Entry{ID: id, Data: []byte(data)})
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func remove(t testing.TB, r registry.Registry, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.Delete(ctx, id); err != nil {
		t.Fatal(err)
	}
}
