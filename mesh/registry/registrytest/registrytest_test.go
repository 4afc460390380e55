package registrytest_test

import (
	"context"
	"errors"
	"iter"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/registry/registrytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// mutant is a registry with one planted bug. What is nil is as it should be.
type mutant struct {
	*memory.Registry
	putFunc   func(context.Context, registry.Entry) error
	swapFunc  func(ctx context.Context, id string, old, new []byte) ([]byte, bool, error)
	watchFunc func(context.Context, string) iter.Seq2[registry.Batch, error]
}

func (m *mutant) Put(ctx context.Context, e registry.Entry) error {
	if m.putFunc != nil {
		return m.putFunc(ctx, e)
	}
	return m.Registry.Put(ctx, e)
}

func (m *mutant) Swap(ctx context.Context, id string, old, new []byte) ([]byte, bool, error) {
	if m.swapFunc != nil {
		return m.swapFunc(ctx, id, old, new)
	}
	return m.Registry.Swap(ctx, id, old, new)
}

func (m *mutant) Watch(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
	if m.watchFunc != nil {
		return m.watchFunc(ctx, kind)
	}
	return m.Registry.Watch(ctx, kind)
}

// edit makes a bug of changing what a watcher gets. n counts batches from 0. It returns false to
// swallow the batch.
func edit(f func(n int, b *registry.Batch) bool) func(*mutant) {
	return func(m *mutant) {
		m.watchFunc = func(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
			return func(yield func(registry.Batch, error) bool) {
				n := 0
				for b, err := range m.Registry.Watch(ctx, kind) {
					if err == nil {
						n++
						if !f(n-1, &b) {
							continue
						}
					}
					if !yield(b, err) {
						return
					}
				}
			}
		}
	}
}

// get reads without a watch: the swap fails, for no one stores these bytes.
func (m *mutant) get(ctx context.Context, id string) []byte {
	current, _, _ := m.Registry.Swap(ctx, id, []byte("\x00nobody stores this"), nil)
	return current
}

// mutants names for each bug the case that must find it, among others maybe.
var mutants = map[string]struct {
	finder string
	plant  func(*mutant)
}{
	"no-first-reset": {"FirstEverything", edit(func(n int, b *registry.Batch) bool {
		b.Reset = b.Reset && n > 0
		return true
	})},
	"first-is-empty": {"FirstEverything", edit(func(n int, b *registry.Batch) bool {
		if n == 0 {
			b.Put = nil
		}
		return true
	})},
	"deletions-are-lost": {"Changes", edit(func(_ int, b *registry.Batch) bool {
		b.Deleted = nil
		return b.Reset || len(b.Put) > 0
	})},
	"id-twice": {"Changes", edit(func(_ int, b *registry.Batch) bool {
		b.Put = append(b.Put, b.Put...)
		return true
	})},
	"put-and-deleted": {"Changes", edit(func(_ int, b *registry.Batch) bool {
		if !b.Reset {
			for _, e := range b.Put {
				b.Deleted = append(b.Deleted, e.ID)
			}
		}
		return true
	})},
	"change-lost-after-join": {"JoinWhileWriting", edit(func(n int, _ *registry.Batch) bool { return n != 1 })},
	"revision-falls": {"Changes", edit(func(n int, b *registry.Batch) bool {
		b.Revision = uint64(1000 - n)
		return true
	})},
	"other-kinds-come-too": {"Kinds", func(m *mutant) {
		m.watchFunc = func(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
			return func(yield func(registry.Batch, error) bool) {
				for b, err := range m.Registry.Watch(ctx, kind) {
					if kind == "node" && b.Reset {
						b.Put = append(b.Put, registry.Entry{ID: "nodes/a"})
					}
					if !yield(b, err) {
						return
					}
				}
			}
		}
	}},
	"no-reset-after-gap": {"Gap", edit(func(n int, b *registry.Batch) bool {
		b.Reset = b.Reset && n == 0
		return b.Reset || len(b.Put) > 0 || len(b.Deleted) > 0
	})},
	"error-ends-watch": {"Outage", func(m *mutant) {
		m.watchFunc = func(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
			return func(yield func(registry.Batch, error) bool) {
				for b, err := range m.Registry.Watch(ctx, kind) {
					if !yield(b, err) || err != nil {
						return
					}
				}
			}
		}
	}},
	"errors-are-hidden": {"Outage", func(m *mutant) {
		m.watchFunc = func(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
			return func(yield func(registry.Batch, error) bool) {
				for b, err := range m.Registry.Watch(ctx, kind) {
					if err == nil && !yield(b, nil) {
						return
					}
				}
			}
		}
	}},
	"recovery-is-silent": {"OutageEnds", edit(func(_ int, b *registry.Batch) bool {
		return b.Reset || len(b.Put) > 0 || len(b.Deleted) > 0
	})},
	"queue-of-changes": {"SlowConsumer", func(m *mutant) {
		m.watchFunc = func(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
			return func(yield func(registry.Batch, error) bool) {
				ctx, cancel := context.WithCancel(ctx)
				queue := make(chan registry.Batch, 100_000)
				var wg sync.WaitGroup
				defer wg.Wait()
				defer cancel()
				wg.Go(func() {
					defer close(queue)
					for b := range m.Registry.Watch(ctx, kind) {
						if b.Reset {
							queue <- b
							continue
						}
						for _, e := range b.Put {
							queue <- registry.Batch{Revision: b.Revision, Put: []registry.Entry{e}}
						}
					}
				})
				for b := range queue {
					if ctx.Err() != nil || !yield(b, nil) {
						return
					}
				}
			}
		}
	}},
	"goroutine-stays": {"NoLeak", func(m *mutant) {
		m.watchFunc = func(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
			return func(yield func(registry.Batch, error) bool) {
				go func() { select {} }()
				m.Registry.Watch(ctx, kind)(yield)
			}
		}
	}},
	"context-ignored-while-waiting": {"EndsWithContext", func(m *mutant) {
		m.watchFunc = func(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
			return func(yield func(registry.Batch, error) bool) {
				if ctx.Err() != nil {
					return
				}
				m.Registry.Watch(context.WithoutCancel(ctx), kind)(func(b registry.Batch, err error) bool {
					return yield(b, err) && ctx.Err() == nil
				})
			}
		}
	}},
	"context-error-yielded": {"EndsWithContext", func(m *mutant) {
		m.watchFunc = func(ctx context.Context, kind string) iter.Seq2[registry.Batch, error] {
			return func(yield func(registry.Batch, error) bool) {
				for b, err := range m.Registry.Watch(ctx, kind) {
					if !yield(b, err) {
						return
					}
				}
				yield(registry.Batch{}, ctx.Err())
			}
		}
	}},
	"context-ignored-by-put": {"CancelledCalls", func(m *mutant) {
		m.putFunc = func(ctx context.Context, e registry.Entry) error {
			return m.Registry.Put(context.WithoutCancel(ctx), e)
		}
	}},
	"data-kept": {"Ownership", func(m *mutant) {
		var mu sync.Mutex
		kept := make(map[string][]byte)
		m.putFunc = func(ctx context.Context, e registry.Entry) error {
			mu.Lock()
			defer mu.Unlock()
			kept[e.ID] = e.Data
			return m.Registry.Put(ctx, e)
		}
		edit(func(_ int, b *registry.Batch) bool {
			mu.Lock()
			defer mu.Unlock()
			for i, e := range b.Put {
				if data, ok := kept[e.ID]; ok {
					b.Put[i].Data = data
				}
			}
			return true
		})(m)
	}},
	"batches-shared": {"Ownership", func(m *mutant) {
		var mu sync.Mutex
		var last registry.Batch
		edit(func(_ int, b *registry.Batch) bool {
			mu.Lock()
			defer mu.Unlock()
			if b.Revision == last.Revision && b.Reset == last.Reset {
				*b = last
			}
			last = *b
			return true
		})(m)
	}},
	"any-id-accepted": {"Refused", func(m *mutant) {
		m.putFunc = func(ctx context.Context, e registry.Entry) error {
			if err := m.Registry.Put(ctx, e); !errors.Is(err, registry.ErrInvalidID) {
				return err
			}
			return nil
		}
	}},
	"swap-in-two-steps": {"SwapCreate", func(m *mutant) {
		m.swapFunc = func(ctx context.Context, id string, old, new []byte) ([]byte, bool, error) {
			if err := registry.CheckEntry(registry.Entry{ID: id, Data: new}); err != nil {
				return nil, false, err
			}
			if err := ctx.Err(); err != nil {
				return nil, false, err
			}
			have := m.get(ctx, id)
			if (have == nil) != (old == nil) || string(have) != string(old) {
				return have, false, nil
			}
			time.Sleep(time.Millisecond)
			if new == nil {
				return nil, true, m.Delete(ctx, id)
			}
			return append([]byte{}, new...), true, m.Put(ctx, registry.Entry{ID: id, Data: new})
		}
	}},
	"empty-is-absent": {"Swap", func(m *mutant) {
		m.swapFunc = func(ctx context.Context, id string, old, new []byte) ([]byte, bool, error) {
			if len(old) == 0 {
				old = nil
			}
			return m.Registry.Swap(ctx, id, old, new)
		}
	}},
	"none": {"", func(*mutant) {}},
}

func cut(heal func(*memory.Registry)) func(testing.TB, registry.Registry) (registry.Registry, func()) {
	return func(_ testing.TB, r registry.Registry) (registry.Registry, func()) {
		m := r.(*mutant).Registry
		m.Cut()
		return m.Handle(), func() { heal(m) }
	}
}

const mutantEnv = "REGISTRYTEST_MUTANT"

// TestMutant is the suite over one mutant, and is run by TestMutants only, in a process of its own.
func TestMutant(t *testing.T) {
	bug, ok := mutants[os.Getenv(mutantEnv)]
	if !ok {
		t.Skipf("needs %s in the environment", mutantEnv)
	}
	registrytest.Run(t, registrytest.Harness{
		New: func(testing.TB) registry.Registry {
			m := &mutant{Registry: memory.New()}
			bug.plant(m)
			return m
		},
		Outage:  cut((*memory.Registry).Resume),
		Gap:     cut((*memory.Registry).Heal),
		Timeout: 2 * time.Second,
		Prompt:  500 * time.Millisecond,
		Entries: 200,
		Updates: 10_000,
		Joins:   50,
	})
}

// TestMutants is the suite's own test: each planted bug must be found, by the case that is there for
// it, and what has none must pass.
func TestMutants(t *testing.T) {
	if testing.Short() {
		t.Skip("needs more time than -short leaves")
	}
	for name, bug := range mutants {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := "^TestMutant$"
			if bug.finder != "" {
				run += "/^" + bug.finder + "$"
			}
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run="+run, "-test.v", "-test.timeout=60s", "-rapid.nofailfile")
			cmd.Env = append(os.Environ(), mutantEnv+"="+name)
			out, err := cmd.CombinedOutput()
			if bug.finder == "" {
				if err != nil {
					t.Fatalf("the suite fails though there is no bug: %v\n%s", err, out)
				}
				return
			}
			if !strings.Contains(string(out), "--- FAIL: TestMutant/"+bug.finder) {
				t.Fatalf("%s does not find the bug: %v\n%s", bug.finder, err, out)
			}
		})
	}
}

// A harness with nothing but New is enough; what needs more is skipped.
func TestBareHarness(t *testing.T) {
	registrytest.Run(t, registrytest.Harness{
		New: func(testing.TB) registry.Registry {
			return struct{ registry.Registry }{memory.New()} // no Swapper
		},
		Entries: 100, Updates: 1000, Joins: 10,
	})
}
