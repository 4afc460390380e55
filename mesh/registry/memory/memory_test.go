package memory_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/registry/registrytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func outage(heal func(*memory.Registry)) func(testing.TB, registry.Registry) (registry.Registry, func()) {
	return func(_ testing.TB, r registry.Registry) (registry.Registry, func()) {
		m := r.(*memory.Registry)
		m.Cut()
		return m.Handle(), func() { heal(m) }
	}
}

func harness() registrytest.Harness {
	return registrytest.Harness{
		New:    func(testing.TB) registry.Registry { return memory.New() },
		Outage: outage((*memory.Registry).Resume),
		Gap:    outage((*memory.Registry).Heal),
		Backup: func(_ testing.TB, r registry.Registry) func() {
			m := r.(*memory.Registry)
			snap := m.Snapshot()
			return func() { m.Restore(snap) }
		},
		Down: func(testing.TB) (registry.Registry, func()) {
			m := memory.New()
			m.Cut()
			return m, m.Heal
		},
	}
}

func TestRegistry(t *testing.T) { registrytest.Run(t, harness()) }

// Other ways to break down and to come back must do for the same suite.
func TestRegistryVariants(t *testing.T) {
	t.Run("compacted gap", func(t *testing.T) {
		h := harness()
		h.Outage = outage((*memory.Registry).Heal)
		h.Gap = outage(func(m *memory.Registry) { m.Compact(); m.Resume() })
		registrytest.Run(t, h)
	})
	t.Run("slow and faulty watch", func(t *testing.T) {
		h := harness()
		h.Updates, h.Entries, h.Joins = 500, 500, 20
		h.New = func(testing.TB) registry.Registry {
			m := memory.New()
			m.SetDelay(func(op, _ string) time.Duration {
				if op == memory.OpWatch {
					return time.Millisecond
				}
				return 0
			})
			var mu sync.Mutex
			n := 0
			m.SetFault(func(op, _ string) error {
				if op != memory.OpWatch {
					return nil
				}
				mu.Lock()
				defer mu.Unlock()
				if n++; n%5 == 0 {
					return errors.New("now and then")
				}
				return nil
			})
			return m
		}
		registrytest.Run(t, h)
	})
}

func entry(i int, data string) registry.Entry {
	return registry.Entry{ID: registry.NodeID("n" + strconv.Itoa(i)), Data: []byte(data)}
}

// event is what a watcher yielded, as text.
func event(b registry.Batch, err error) string {
	if err != nil {
		return "error"
	}
	s := fmt.Sprintf("rev=%d", b.Revision)
	if b.Reset {
		s += " reset"
	}
	for _, e := range b.Put {
		s += fmt.Sprintf(" %s=%s", e.ID[len("node/"):], e.Data)
	}
	for _, id := range b.Deleted {
		s += " -" + id[len("node/"):]
	}
	return s
}

// bubble runs f in a synctest bubble with a function that tells what a watcher of r yielded since it
// last was asked.
func bubble(t *testing.T, f func(t *testing.T, r *memory.Registry, seen func() []string)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := memory.New()
		f(t, r, watching(t, r))
	})
}

func watching(t *testing.T, r registry.Registry) (seen func() []string) {
	var mu sync.Mutex
	var events []string
	go func() {
		for b, err := range r.Watch(t.Context(), registry.KindNode) {
			mu.Lock()
			events = append(events, event(b, err))
			mu.Unlock()
		}
	}()
	return func() []string {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		was := events
		events = nil
		return was
	}
}

func want(t *testing.T, have []string, want ...string) {
	t.Helper()
	if !slices.Equal(have, want) {
		t.Fatalf("have %q, want %q", have, want)
	}
}

func put(t *testing.T, r registry.Registry, i int, data string) {
	t.Helper()
	if err := r.Put(t.Context(), entry(i, data)); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, r registry.Registry, i int) {
	t.Helper()
	if err := r.Delete(t.Context(), entry(i, "").ID); err != nil {
		t.Fatal(err)
	}
}

func TestCutAndHeal(t *testing.T) {
	bubble(t, func(t *testing.T, r *memory.Registry, seen func() []string) {
		admin := r.Handle()
		other := watching(t, admin)
		put(t, r, 1, "a")
		seen()
		other()

		r.Cut()
		r.Cut()
		if err := r.Put(t.Context(), entry(1, "b")); !errors.Is(err, memory.ErrCut) {
			t.Fatalf("put while cut off: %v", err)
		}
		if _, _, err := r.Swap(t.Context(), "node/n1", nil, nil); !errors.Is(err, memory.ErrCut) {
			t.Fatalf("swap while cut off: %v", err)
		}
		put(t, admin, 2, "c")
		want(t, other(), "rev=2 n2=c")
		remove(t, admin, 1)
		want(t, other(), "rev=3 -n1")
		want(t, seen(), "error")
		time.Sleep(time.Hour)
		want(t, seen())

		late := watching(t, r)
		want(t, late(), "error")

		r.Heal()
		r.Heal()
		want(t, seen(), "rev=3 reset n2=c")
		want(t, late(), "rev=3 reset n2=c")
		want(t, other())
	})
}

func TestResume(t *testing.T) {
	bubble(t, func(t *testing.T, r *memory.Registry, seen func() []string) {
		admin := r.Handle()
		put(t, r, 1, "a")
		put(t, r, 2, "a")
		seen()
		r.Cut()
		late := watching(t, r)
		want(t, late(), "error")
		remove(t, admin, 1)
		put(t, admin, 2, "b")
		put(t, admin, 2, "c")
		put(t, admin, 3, "d") // comes and goes
		remove(t, admin, 3)
		remove(t, admin, 4) // never was
		want(t, seen(), "error")
		r.Resume()
		r.Resume()
		want(t, seen(), "rev=7 n2=c -n1")
		want(t, late(), "rev=7 reset n2=c")

		r.Cut()
		r.Resume()
		want(t, seen(), "error", "rev=7") // nothing was missed
	})
}

func TestCompact(t *testing.T) {
	bubble(t, func(t *testing.T, r *memory.Registry, seen func() []string) {
		put(t, r, 1, "a")
		seen()
		r.Handle().Compact()
		want(t, seen(), "rev=1 reset n1=a")
		r.Cut()
		remove(t, r.Handle(), 1)
		r.Compact()
		want(t, seen(), "error")
		r.Resume()
		want(t, seen(), "rev=2 reset")
	})
}

func TestRestore(t *testing.T) {
	bubble(t, func(t *testing.T, r *memory.Registry, seen func() []string) {
		want(t, seen(), "rev=0 reset")
		put(t, r, 1, "a")
		want(t, seen(), "rev=1 n1=a")
		if err := r.Put(t.Context(), registry.Entry{ID: "trust/ca"}); err != nil {
			t.Fatal(err)
		}
		snap := r.Snapshot()
		if ids := []string{snap.Entries[0].ID, snap.Entries[1].ID}; snap.Revision != 2 || !slices.Equal(ids, []string{"node/n1", "trust/ca"}) {
			t.Fatalf("snapshot %+v", snap)
		}
		put(t, r, 1, "b")
		want(t, seen(), "rev=3 n1=b")
		put(t, r, 2, "b")
		want(t, seen(), "rev=4 n2=b")
		r.Restore(snap)
		want(t, seen(), "rev=2 reset n1=a")
		put(t, r, 3, "c")
		want(t, seen(), "rev=3 n3=c")
		if current, ok, err := r.Swap(t.Context(), "trust/ca", []byte{}, []byte("x")); !ok || err != nil {
			t.Fatalf("an empty entry did not come back: %q %v", current, err)
		}
		defer func() {
			if recover() == nil {
				t.Error("a snapshot with an invalid ID was restored")
			}
		}()
		r.Restore(memory.Snapshot{Entries: []registry.Entry{{ID: "nonsense"}}})
	})
}

func TestFaults(t *testing.T) {
	bubble(t, func(t *testing.T, r *memory.Registry, seen func() []string) {
		boom := errors.New("boom")
		seen()
		r.FailNext(2, boom)
		for range 2 {
			if err := r.Put(t.Context(), entry(1, "lost")); !errors.Is(err, boom) {
				t.Fatalf("put: %v", err)
			}
		}
		put(t, r.Handle(), 1, "a") // another handle
		want(t, seen(), "rev=1 n1=a")
		put(t, r, 1, "b")
		want(t, seen(), "rev=2 n1=b")

		r.FailNext(1, memory.Late(boom))
		if err := r.Put(t.Context(), entry(1, "late")); !errors.Is(err, boom) {
			t.Fatalf("put: %v", err)
		}
		want(t, seen(), "rev=3 n1=late")

		var asked []string
		r.SetFault(func(op, id string) error {
			asked = append(asked, op+" "+id)
			if op == memory.OpDelete {
				return boom
			}
			return nil
		})
		put(t, r, 2, "x")
		seen()
		if err := r.Delete(t.Context(), "node/n2"); !errors.Is(err, boom) {
			t.Fatalf("delete: %v", err)
		}
		want(t, asked, "put node/n2", "watch node", "delete node/n2")

		r.SetFault(func(op, id string) error {
			if op == memory.OpWatch {
				return boom
			}
			return nil
		})
		put(t, r, 3, "y")
		want(t, seen(), "error")
		time.Sleep(10 * time.Millisecond)
		want(t, seen(), "error")
		r.SetFault(nil)
		time.Sleep(10 * time.Millisecond)
		want(t, seen(), "rev=5 n3=y")
	})
}

func TestDelay(t *testing.T) {
	bubble(t, func(t *testing.T, r *memory.Registry, seen func() []string) {
		seen()
		r.SetDelay(func(op, _ string) time.Duration {
			if op == memory.OpWatch {
				return time.Minute
			}
			return time.Second
		})
		start := time.Now()
		put(t, r, 1, "a")
		if took := time.Since(start); took != time.Second {
			t.Fatalf("put took %v", took)
		}
		want(t, seen())
		put(t, r, 2, "b")
		time.Sleep(time.Minute)
		want(t, seen(), "rev=2 n1=a n2=b")

		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := r.Put(ctx, entry(3, "never")); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("put: %v", err)
		}
		if n := len(r.Snapshot().Entries); n != 2 {
			t.Fatalf("%d entries, want 2: a call that gave up reached the store", n)
		}
		go func() { time.Sleep(500 * time.Millisecond); r.Cut() }()
		if err := r.Put(t.Context(), entry(3, "never")); !errors.Is(err, memory.ErrCut) {
			t.Fatalf("put cut off under way: %v", err)
		}
	})
}

// A consumer that never looks must not make the store remember what came and went.
func TestMergeIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := memory.New()
		put(t, r, 0, "stays")
		put(t, r, 1, "goes")
		block, busy := make(chan struct{}), make(chan struct{})
		var batches []registry.Batch
		done := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			defer close(done)
			for b := range r.Watch(ctx, registry.KindNode) {
				batches = append(batches, b)
				if len(batches) == 1 {
					close(busy)
					<-block
				}
			}
		}()
		<-busy
		remove(t, r, 1)
		for i := range 10_000 {
			put(t, r, 2+i, "passing")
			remove(t, r, 2+i)
			put(t, r, 0, strconv.Itoa(i))
		}
		close(block)
		synctest.Wait()
		cancel()
		<-done
		if len(batches) != 2 {
			t.Fatalf("%d batches, want 2", len(batches))
		}
		if have := event(batches[1], nil); have != "rev=30003 n0=9999 -n1" {
			t.Fatalf("merged into %.200q", have)
		}
	})
}

// The whole of a long outage costs no time in a bubble.
func TestOutageOfADay(t *testing.T) {
	bubble(t, func(t *testing.T, r *memory.Registry, seen func() []string) {
		truth := make(map[string]string)
		admin := r.Handle()
		want(t, seen(), "rev=0 reset")
		for hour := range 24 {
			r.Cut()
			for i := range 10 {
				put(t, admin, i, strconv.Itoa(hour))
				truth[entry(i, "").ID] = strconv.Itoa(hour)
			}
			time.Sleep(time.Hour)
			r.Heal()
			time.Sleep(time.Second)
		}
		var state registry.State
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for b, err := range r.Watch(ctx, registry.KindNode) {
			if err != nil {
				t.Fatal(err)
			}
			state.Apply(b)
			cancel()
		}
		have := make(map[string]string)
		for id, e := range state.Entries {
			have[id] = string(e.Data)
		}
		if !maps.Equal(have, truth) {
			t.Fatalf("have %v, want %v", have, truth)
		}
		if n := len(seen()); n != 2*24 {
			t.Fatalf("%d deliveries, want an error and a Reset an hour", n)
		}
	})
}

// Everything at once, for the race detector; nothing may hang, panic or be left running.
func TestConcurrent(t *testing.T) {
	r := memory.New()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	busy := func(f func(i int)) {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				f(i)
			}
		})
	}
	for range 4 {
		busy(func(i int) { _ = r.Put(ctx, entry(i%20, strconv.Itoa(i))) })
		busy(func(i int) { _ = r.Delete(ctx, entry(i%20, "").ID) })
		busy(func(i int) {
			n := 0
			for range r.Watch(ctx, registry.KindNode) {
				if n++; n > i%7 {
					break
				}
			}
		})
	}
	snap := r.Snapshot()
	busy(func(i int) {
		r.Cut()
		r.Compact()
		r.FailNext(1, errors.New("boom"))
		if i%2 == 0 {
			r.Heal()
		} else {
			r.Resume()
		}
		if i%100 == 0 {
			r.Restore(snap)
		}
		time.Sleep(time.Millisecond)
	})
	time.Sleep(300 * time.Millisecond)
	cancel()
	wg.Wait()
}
