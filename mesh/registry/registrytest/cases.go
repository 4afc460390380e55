package registrytest

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
)

const kind = "node"

func nodeID(i int) string { return registry.NodeID("n" + strconv.Itoa(i)) }

// within is the context of calls that must succeed.
func (h Harness) within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), h.Timeout)
	t.Cleanup(cancel)
	return ctx
}

func (h Harness) put(t testing.TB, r registry.Registry, id, data string) {
	t.Helper()
	if err := r.Put(h.within(t), registry.Entry{ID: id, Data: []byte(data)}); err != nil {
		t.Fatalf("put %s: %v", id, err)
	}
}

func (h Harness) delete(t testing.TB, r registry.Registry, id string) {
	t.Helper()
	if err := r.Delete(h.within(t), id); err != nil {
		t.Fatalf("delete %s: %v", id, err)
	}
}

// follow starts a watcher that ends with the case.
func (h Harness) follow(t testing.TB, r registry.Registry, kind string) *watcher {
	w := follow(r, kind, nil)
	t.Cleanup(func() { w.stop(t, h.Prompt) })
	return w
}

// fill puts n entries, some at a time, and returns them.
func (h Harness) fill(t testing.TB, r registry.Registry, n int) map[string]string {
	t.Helper()
	want := make(map[string]string, n)
	for i := range n {
		want[nodeID(i)] = "v" + strconv.Itoa(i)
	}
	const writers = 16
	var wg sync.WaitGroup
	errs := make(chan error, writers)
	for k := range writers {
		wg.Go(func() {
			for i := k; i < n; i += writers {
				if err := h.tryPut(r, nodeID(i), "v"+strconv.Itoa(i)); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Fatal(err)
	}
	return want
}

// tryPut is for goroutines, which must not fail the test themselves.
func (h Harness) tryPut(r registry.Registry, id, data string) error {
	ctx, cancel := context.WithTimeout(context.Background(), h.Timeout)
	defer cancel()
	if err := r.Put(ctx, registry.Entry{ID: id, Data: []byte(data)}); err != nil {
		return fmt.Errorf("put %s: %w", id, err)
	}
	return nil
}

// settle puts a last entry and waits until each watcher has it. Because changes come in order, it has
// all the others too, and must have exactly want, to which settle adds the entry.
func (h Harness) settle(t testing.TB, r registry.Registry, want map[string]string, ws ...*watcher) {
	t.Helper()
	last := registry.NodeID("zz-last")
	value := "settled-" + strconv.Itoa(int(settled.Add(1)))
	h.put(t, r, last, value)
	want[last] = value
	for _, w := range ws {
		v := w.await(t, h.Timeout, "the last entry", func(v view) bool {
			return string(v.Entries[last].Data) == value
		})
		if !same(v.Entries, want) {
			t.Fatalf("watcher of %q has everything up to the last entry, but it is not what the store has:\n%s", w.kind, difference(v.Entries, want))
		}
	}
}

var settled atomic.Uint64

func difference(have map[string]registry.Entry, want map[string]string) string {
	var s strings.Builder
	n := 0
	say := func(format string, args ...any) {
		if n++; n <= 10 {
			fmt.Fprintf(&s, format+"\n", args...)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(want)) {
		if e, ok := have[id]; !ok {
			say("  %s is missing", id)
		} else if string(e.Data) != want[id] {
			say("  %s is %.40q, want %.40q", id, e.Data, want[id])
		}
	}
	for _, id := range slices.Sorted(maps.Keys(have)) {
		if _, ok := want[id]; !ok {
			say("  %s is not wanted", id)
		}
	}
	if n > 10 {
		fmt.Fprintf(&s, "  and %d more\n", n-10)
	}
	return s.String()
}

func firstEverything(t *testing.T, h Harness) {
	r := h.New(t)
	empty := h.follow(t, r, kind).await(t, h.Timeout, "a first batch", func(v view) bool { return v.batches > 0 })
	if empty.resets != 1 || len(empty.Entries) != 0 {
		t.Fatalf("an empty registry yields %d resets with %q", empty.resets, empty.IDs())
	}
	want := map[string]string{nodeID(1): "one", nodeID(2): "", nodeID(3): "\x00\xff{}"}
	for id, data := range want {
		h.put(t, r, id, data)
	}
	h.put(t, r, "other/n1", "not a node")
	full := h.follow(t, r, kind).await(t, h.Timeout, "a first batch", func(v view) bool { return v.batches > 0 })
	if full.resets != 1 || !same(full.Entries, want) {
		t.Fatalf("the first batch is not everything there is:\n%s", difference(full.Entries, want))
	}
}

func changes(t *testing.T, h Harness) {
	r := h.New(t)
	w := h.follow(t, r, kind)
	w.awaitState(t, h.Timeout, nil)

	want := map[string]string{nodeID(1): "one"}
	h.put(t, r, nodeID(1), "one")
	w.awaitState(t, h.Timeout, want)

	want[nodeID(1)] = "replaced"
	h.put(t, r, nodeID(1), "replaced")
	w.awaitState(t, h.Timeout, want)

	h.put(t, r, nodeID(1), "replaced") // may be delivered or not
	big := strings.Repeat("\x00\xffwarren", registry.MaxData/8)
	want[nodeID(2)] = big
	h.put(t, r, nodeID(2), big)
	w.awaitState(t, h.Timeout, want)

	delete(want, nodeID(1))
	h.delete(t, r, nodeID(1))
	w.awaitState(t, h.Timeout, want)
	h.delete(t, r, nodeID(1)) // twice, and what never was
	h.delete(t, r, nodeID(99))

	// A node that comes back is new, and its next deletion is seen.
	for range 3 {
		want[nodeID(1)] = "back"
		h.put(t, r, nodeID(1), "back")
		w.awaitState(t, h.Timeout, want)
		delete(want, nodeID(1))
		h.delete(t, r, nodeID(1))
		w.awaitState(t, h.Timeout, want)
	}
	h.settle(t, r, want, w)
}

// kinds has kinds and names that are beginnings of one another.
func kinds(t *testing.T, h Harness) {
	r := h.New(t)
	all := []string{"node", "nodes", "node-a", "n", "trust"}
	ws := make(map[string]*watcher)
	for _, k := range all[:3] {
		ws[k] = h.follow(t, r, k)
	}
	want := make(map[string]map[string]string)
	for _, k := range all {
		want[k] = map[string]string{k + "/a": k, k + "/a.b": k + "1", k + "/a0": k + "2"}
		for id, data := range want[k] {
			h.put(t, r, id, data)
		}
	}
	for _, k := range all[3:] {
		ws[k] = h.follow(t, r, k)
	}
	for _, k := range all {
		ws[k].awaitState(t, h.Timeout, want[k])
	}
	h.delete(t, r, "node/a")
	delete(want["node"], "node/a")
	h.settle(t, r, want["node"], ws["node"])
	for _, k := range all {
		ws[k].awaitState(t, h.Timeout, want[k])
	}
}

func severalWatchers(t *testing.T, h Harness) {
	r := h.New(t)
	want := h.fill(t, r, 5)
	a, b := h.follow(t, r, kind), h.follow(t, r, kind)
	a.awaitState(t, h.Timeout, want)
	b.awaitState(t, h.Timeout, want)
	h.put(t, r, nodeID(1), "new")
	want[nodeID(1)] = "new"
	h.settle(t, r, want, a, b)
	a.stop(t, h.Prompt)
	h.delete(t, r, nodeID(2)) // one gone must not hurt the other
	delete(want, nodeID(2))
	h.settle(t, r, want, b)
}

// rerange takes one sequence twice, and by two at a time.
func rerange(t *testing.T, h Harness) {
	r := h.New(t)
	want := h.fill(t, r, 3)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	seq := r.Watch(ctx, kind)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var ws []*watcher
	for range 2 {
		w := &watcher{kind: kind, cancel: func() {}}
		ws = append(ws, w)
		wg.Go(func() { w.run(seq, nil) })
	}
	for _, w := range ws {
		w.awaitState(t, h.Timeout, want)
	}
	h.put(t, r, nodeID(7), "seven")
	want[nodeID(7)] = "seven"
	again := &watcher{kind: kind}
	wg.Go(func() { again.run(seq, nil) })
	h.settle(t, r, want, append(ws, again)...)
}

// joinWhileWriting looks for updates lost between the list a watcher starts with and the changes it
// then gets.
func joinWhileWriting(t *testing.T, h Harness) {
	r := h.New(t)
	const writers, keys = 4, 8
	stop := make(chan struct{})
	finals := make([]map[string]string, writers)
	errs := make([]error, writers)
	var wg sync.WaitGroup
	for k := range writers {
		finals[k] = make(map[string]string)
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				id := nodeID(k*keys + n%keys)
				if n%5 == 4 {
					ctx, cancel := context.WithTimeout(context.Background(), h.Timeout)
					err := r.Delete(ctx, id)
					cancel()
					if err != nil {
						errs[k] = err
						return
					}
					delete(finals[k], id)
					continue
				}
				data := strconv.Itoa(n)
				if errs[k] = h.tryPut(r, id, data); errs[k] != nil {
					return
				}
				finals[k][id] = data
				runtime.Gosched()
			}
		})
	}
	var once sync.Once
	halt := func() { once.Do(func() { close(stop); wg.Wait() }) }
	defer halt()
	ws := make([]*watcher, h.Joins)
	for i := range ws {
		ws[i] = h.follow(t, r, kind)
		ws[i].await(t, h.Timeout, "a first batch", func(v view) bool { return v.Known })
	}
	halt()
	want := make(map[string]string)
	for k := range writers {
		if errs[k] != nil {
			t.Fatal(errs[k])
		}
		maps.Copy(want, finals[k])
	}
	h.settle(t, r, want, ws...)
}

// slowConsumer has one entry change far more often than the consumer looks.
func slowConsumer(t *testing.T, h Harness) {
	r := h.New(t)
	const keys, writers = 100, 10
	pause := 50 * time.Millisecond
	w := follow(r, kind, func(registry.Batch) { time.Sleep(pause) })
	t.Cleanup(func() { w.stop(t, h.Prompt+pause) })
	w.await(t, h.Timeout, "a first batch", func(v view) bool { return v.Known })

	var wg sync.WaitGroup
	errs := make([]error, writers)
	for k := range writers {
		wg.Go(func() {
			for n := range h.Updates / writers {
				id := nodeID(k + writers*(n%(keys/writers)))
				if errs[k] = h.tryPut(r, id, strconv.Itoa(n)); errs[k] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	want := make(map[string]string)
	for k := range writers {
		for n := range h.Updates / writers {
			want[nodeID(k+writers*(n%(keys/writers)))] = strconv.Itoa(n)
		}
	}
	before := w.view().batches
	h.settle(t, r, want, w)
	// What piled up comes as one, whatever was under way already as a few more.
	const most = 10
	if after := w.view().batches - before; after > most {
		t.Errorf("%d updates over %d entries left %d batches to a consumer that was slow, at most %d are right: they were not merged",
			h.Updates, keys, after, most)
	}
}

func large(t *testing.T, h Harness) {
	r := h.New(t)
	before := h.follow(t, r, kind)
	want := h.fill(t, r, h.Entries)
	v := h.follow(t, r, kind).await(t, h.Timeout, "a first batch", func(v view) bool { return v.batches > 0 })
	if !same(v.Entries, want) {
		t.Fatalf("the first batch is not everything there is:\n%s", difference(v.Entries, want))
	}
	before.awaitState(t, h.Timeout, want)
}

func outage(t *testing.T, h Harness) {
	need(t, h.Outage != nil, "Outage", "a way to make the store unreachable")
	r := h.New(t)
	want := h.fill(t, r, 5)
	w := h.follow(t, r, kind)
	w.awaitState(t, h.Timeout, want)

	for round := range 3 {
		v := w.view()
		had := v.errs
		other, heal := h.Outage(t, r)
		w.await(t, h.Timeout, "an error that tells of the outage", func(v view) bool { return v.errs > had })

		// A call gives up with its context, if not before.
		ctx, cancel := context.WithTimeout(context.Background(), h.Prompt/4)
		err := r.Put(ctx, registry.Entry{ID: registry.NodeID("unreachable"), Data: []byte("x")})
		cancel()
		if err == nil {
			t.Fatal("put succeeded while the store could not be reached")
		}
		v = w.view()
		if !v.Known || len(v.Entries) < 5 {
			t.Fatalf("an outage alone took entries away; left are %q", v.IDs())
		}
		if other != nil {
			id := nodeID(round)
			h.put(t, other, id, "changed meanwhile")
			want[id] = "changed meanwhile"
		}
		heal()
		h.delete(t, r, registry.NodeID("unreachable")) // the failed put may have come through
		h.settle(t, r, want, w)
	}
}

// outageAtStart joins while the store cannot be reached.
func outageAtStart(t *testing.T, h Harness) {
	need(t, h.Outage != nil, "Outage", "a way to make the store unreachable")
	r := h.New(t)
	want := h.fill(t, r, 5)
	_, heal := h.Outage(t, r)
	w := h.follow(t, r, kind)
	v := w.await(t, h.Timeout, "an error that tells of the outage", func(v view) bool { return v.errs > 0 })
	if v.Known {
		t.Fatal("a batch came though the store could not be reached")
	}
	heal()
	w.awaitState(t, h.Timeout, want)
	h.settle(t, r, want, w)
}

// outageEnds has nothing change: that watching works again must be told all the same.
func outageEnds(t *testing.T, h Harness) {
	need(t, h.Outage != nil, "Outage", "a way to make the store unreachable")
	r := h.New(t)
	want := h.fill(t, r, 5)
	w := h.follow(t, r, kind)
	w.awaitState(t, h.Timeout, want)
	for range 2 {
		_, heal := h.Outage(t, r)
		w.await(t, h.Timeout, "an error that tells of the outage", func(v view) bool { return v.failing })
		heal()
		w.await(t, h.Timeout, "a batch that tells that it is over", func(v view) bool { return !v.failing })
		w.awaitState(t, h.Timeout, want)
	}
	h.settle(t, r, want, w)
}

func deletedWhileCutOff(t *testing.T, h Harness) {
	need(t, h.Outage != nil, "Outage", "a way to make the store unreachable")
	r := h.New(t)
	want := h.fill(t, r, 5)
	w := h.follow(t, r, kind)
	w.awaitState(t, h.Timeout, want)
	other, heal := h.Outage(t, r)
	if other == nil {
		heal()
		t.Skip("needs Harness.Outage to return a registry that works meanwhile")
	}
	h.delete(t, other, nodeID(1))
	delete(want, nodeID(1))
	// Gone and back, with other bytes: the newest counts.
	h.delete(t, other, nodeID(2))
	h.put(t, other, nodeID(2), "reborn")
	want[nodeID(2)] = "reborn"
	// There and gone: never seen.
	h.put(t, other, nodeID(50), "passing")
	h.delete(t, other, nodeID(50))
	heal()
	w.awaitState(t, h.Timeout, want)
	h.settle(t, r, want, w)
	h.delete(t, r, nodeID(2))
	delete(want, nodeID(2))
	h.settle(t, r, want, w)
}

func gap(t *testing.T, h Harness) {
	need(t, h.Gap != nil, "Gap", "a way to make the store forget its history while it is unreachable")
	r := h.New(t)
	want := h.fill(t, r, 5)
	w := h.follow(t, r, kind)
	w.awaitState(t, h.Timeout, want)
	for round := range 3 {
		v := w.view()
		resets := v.resets
		other, heal := h.Gap(t, r)
		for _, id := range []string{nodeID(round), nodeID(100 + round)} {
			h.put(t, other, id, "changed in the gap")
			want[id] = "changed in the gap"
		}
		h.delete(t, other, nodeID(round+1))
		delete(want, nodeID(round+1))
		heal()
		w.await(t, h.Timeout, "a Reset after the gap", func(v view) bool { return v.resets > resets })
		h.settle(t, r, want, w)
	}
}

func restore(t *testing.T, h Harness) {
	need(t, h.Backup != nil, "Backup", "a way to put the store back to what it was")
	r := h.New(t)
	want := h.fill(t, r, 5)
	put := h.Backup(t, r)
	h.delete(t, r, nodeID(1))
	h.put(t, r, nodeID(2), "newer than the backup")
	h.fill(t, r, 50)
	w := h.follow(t, r, kind)
	v := w.await(t, h.Timeout, "the newer state", func(v view) bool { return len(v.Entries) == 50 })
	put()
	w.await(t, h.Timeout, "a Reset after the restore", func(now view) bool { return now.resets > v.resets })
	w.awaitState(t, h.Timeout, want)
	h.settle(t, r, want, w)
}

func down(t *testing.T, h Harness) {
	need(t, h.Down != nil, "Down", "a registry whose store is not there yet")
	r, start := h.Down(t)
	w := h.follow(t, r, kind)
	v := w.await(t, h.Timeout, "an error that tells of it", func(v view) bool { return v.errs > 0 })
	if v.Known {
		t.Fatal("a batch came though there is no store yet")
	}
	start()
	w.awaitState(t, h.Timeout, nil)
	h.settle(t, r, make(map[string]string), w)
}

func endsWithContext(t *testing.T, h Harness) {
	r := h.New(t)
	h.fill(t, r, 5)

	// Before it begins.
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for b, err := range r.Watch(ctx, kind) {
		t.Fatalf("a context that had ended before yields %s, %v", describe(b), err)
	}

	// While it waits.
	w := follow(r, kind, nil)
	w.await(t, h.Timeout, "a first batch", func(v view) bool { return v.Known })
	w.stop(t, h.Prompt)

	// By its deadline, and with a cause.
	ctx, cancel = context.WithTimeoutCause(context.Background(), 50*time.Millisecond, errors.New("enough"))
	defer cancel()
	done := make(chan struct{})
	var errs []error
	go func() {
		defer close(done)
		for _, err := range r.Watch(ctx, kind) {
			if err != nil {
				errs = append(errs, err)
			}
		}
	}()
	ends(t, done, 50*time.Millisecond+h.Prompt, "a watcher past its deadline")
	if len(errs) > 0 {
		t.Errorf("the end of the context was yielded as an error: %v", errs)
	}

	// While the consumer is busy and changes pile up: it gets no further batch.
	ctx, cancel = context.WithCancel(context.Background())
	defer cancel()
	entered, leave, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	more := 0
	go func() {
		defer close(done)
		first := true
		for range r.Watch(ctx, kind) {
			if !first {
				more++
				continue
			}
			first = false
			close(entered)
			<-leave
		}
	}()
	ends(t, entered, h.Timeout, "waiting for a first batch")
	for i := range 20 {
		h.put(t, r, nodeID(i), "while busy")
	}
	cancel()
	h.put(t, r, nodeID(1), "after the end") // nobody waits for the consumer
	close(leave)
	ends(t, done, h.Prompt, "a watcher cancelled while its consumer was busy")
	if more > 0 {
		t.Errorf("%d batches came after the end of the context", more)
	}
}

func endsWithBreak(t *testing.T, h Harness) {
	r := h.New(t)
	h.fill(t, r, 5)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // there is always more to yield
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
				if h.tryPut(r, nodeID(n%5), strconv.Itoa(n)) != nil {
					return
				}
			}
		}
	})
	defer wg.Wait()
	defer close(stop)
	for most := 1; most <= 3; most++ {
		done := make(chan struct{})
		go func() {
			defer close(done)
			n := 0
			for range r.Watch(context.Background(), kind) {
				if n++; n == most {
					break
				}
			}
		}()
		ends(t, done, h.Timeout+h.Prompt, fmt.Sprintf("a loop that breaks at batch %d", most))
	}
	// iter.Pull stops from outside.
	next, stopPull := iter.Pull2(r.Watch(context.Background(), kind))
	if b, err, ok := next(); !ok || err != nil || !b.Reset {
		t.Errorf("pulled %s, %v, %t", describe(b), err, ok)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		stopPull()
	}()
	ends(t, done, h.Prompt, "a pulled sequence")
}

func endsDuringOutage(t *testing.T, h Harness) {
	need(t, h.Outage != nil, "Outage", "a way to make the store unreachable")
	r := h.New(t)
	early := follow(r, kind, nil)
	early.await(t, h.Timeout, "a first batch", func(v view) bool { return v.Known })
	_, heal := h.Outage(t, r)
	late := follow(r, kind, nil)
	for _, w := range []*watcher{early, late} {
		w.await(t, h.Timeout, "an error that tells of the outage", func(v view) bool { return v.errs > 0 })
	}
	early.stop(t, h.Prompt)
	late.stop(t, h.Prompt)
	// Breaking on the error itself.
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, err := range r.Watch(context.Background(), kind) {
			if err != nil {
				break
			}
		}
	}()
	ends(t, done, h.Timeout, "a loop that breaks at an error")
	heal()
}

func cancelledCalls(t *testing.T, h Harness) {
	r := h.New(t)
	h.put(t, r, nodeID(1), "stays")
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	expired, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Hour))
	defer cancel()
	for _, ctx := range []context.Context{cancelled, expired} {
		calls := map[string]func() error{
			"put":    func() error { return r.Put(ctx, registry.Entry{ID: nodeID(2), Data: []byte("x")}) },
			"delete": func() error { return r.Delete(ctx, nodeID(1)) },
		}
		if s, ok := r.(registry.Swapper); ok {
			calls["swap"] = func() error {
				_, _, err := s.Swap(ctx, nodeID(3), nil, []byte("x"))
				return err
			}
		}
		for name, call := range calls {
			if err := call(); !errors.Is(err, ctx.Err()) {
				t.Errorf("%s with a context that had ended returns %v, want one that wraps %v", name, err, ctx.Err())
			}
		}
	}
	h.follow(t, r, kind).awaitState(t, h.Timeout, map[string]string{nodeID(1): "stays"})
}

// noLeak counts goroutines over many watchers that end in each of the possible ways.
func noLeak(t *testing.T, h Harness) {
	r := h.New(t)
	h.fill(t, r, 3)
	cycle := func(i int) {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		for range r.Watch(ctx, kind) {
			if i%2 == 0 {
				break
			}
			cancel()
		}
	}
	for i := range 4 {
		cycle(i) // what is opened once and kept is no leak
	}
	const slack = 5
	before := runtime.NumGoroutine()
	for i := range h.Joins {
		cycle(i)
	}
	deadline := time.Now().Add(h.Timeout)
	for runtime.NumGoroutine() > before+slack {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines before %d watchers came and went, %d after", before, h.Joins, runtime.NumGoroutine())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func ownership(t *testing.T, h Harness) {
	r := h.New(t)
	data := []byte("original")
	if err := r.Put(h.within(t), registry.Entry{ID: nodeID(1), Data: data}); err != nil {
		t.Fatal(err)
	}
	copy(data, "SCRIBBLE")
	want := map[string]string{nodeID(1): "original"}
	if s, ok := r.(registry.Swapper); ok {
		created := []byte("original")
		current, ok, err := s.Swap(h.within(t), nodeID(2), nil, created)
		if err != nil || !ok {
			t.Fatalf("swap: %q, %t, %v", current, ok, err)
		}
		copy(created, "SCRIBBLE")
		copy(current, "SCRIBBLE")
		current, _, err = s.Swap(h.within(t), nodeID(2), []byte("wrong"), nil)
		if err != nil || string(current) != "original" {
			t.Fatalf("swap returns %q, %v, want what was put", current, err)
		}
		copy(current, "SCRIBBLE")
		want[nodeID(2)] = "original"
	}
	// What a receiver does to its batch is its own affair, unless it is done to the Data.
	rude := func(b registry.Batch) {
		clear(b.Put)
		clear(b.Deleted)
		_ = append(b.Put[:0], registry.Entry{ID: "node/x"})
	}
	bad := follow(r, kind, rude)
	t.Cleanup(func() { bad.stop(t, h.Prompt) })
	bad.await(t, h.Timeout, "a first batch", func(v view) bool { return v.Known })
	good := h.follow(t, r, kind)
	good.awaitState(t, h.Timeout, want)
	h.put(t, r, nodeID(3), "three")
	want[nodeID(3)] = "three"
	h.delete(t, r, nodeID(1))
	delete(want, nodeID(1))
	h.settle(t, r, want, good, bad)
	h.follow(t, r, kind).awaitState(t, h.Timeout, want)
}

func refused(t *testing.T, h Harness) {
	r := h.New(t)
	s, _ := r.(registry.Swapper)
	for _, id := range []string{
		"", "/", "node", "node/", "/name", "Node/a", "node/A", "node/a/b", "node/..", "node/.", "node/a..b", "node/-a",
		"node/a-", "node/a b", "node/a\x00", "node/\xff", "../node/a", "1node/a", "node/" + strings.Repeat("a", 254),
		"node/é", " node/a", "node/a\n",
	} {
		calls := map[string]func() error{
			"put":    func() error { return r.Put(h.within(t), registry.Entry{ID: id, Data: []byte("x")}) },
			"delete": func() error { return r.Delete(h.within(t), id) },
		}
		if s != nil {
			calls["swap"] = func() error {
				_, _, err := s.Swap(h.within(t), id, nil, []byte("x"))
				return err
			}
		}
		for name, call := range calls {
			err := call()
			quoted := strconv.Quote(id)
			if !errors.Is(err, registry.ErrInvalidID) || !strings.Contains(err.Error(), quoted[:min(40, len(quoted)-1)]) {
				t.Errorf("%s of %.40q returns %v, want registry.ErrInvalidID that names it", name, id, err)
			}
		}
	}
	for _, bad := range []string{"", "Node", "node/", "no de", "-node", "1", "nöde"} {
		done := make(chan struct{})
		var errs []error
		go func() {
			defer close(done)
			for _, err := range r.Watch(context.Background(), bad) {
				errs = append(errs, err)
			}
		}()
		ends(t, done, h.Prompt, fmt.Sprintf("a watcher of the invalid kind %q", bad))
		if len(errs) != 1 || !errors.Is(errs[0], registry.ErrInvalidID) {
			t.Errorf("watching kind %q yields %v, want registry.ErrInvalidID once", bad, errs)
		}
	}
	tooLarge := make([]byte, registry.MaxData+1)
	if err := r.Put(h.within(t), registry.Entry{ID: nodeID(1), Data: tooLarge}); !errors.Is(err, registry.ErrTooLarge) || !strings.Contains(err.Error(), nodeID(1)) {
		t.Errorf("put of %d bytes returns %v, want registry.ErrTooLarge that names the ID", len(tooLarge), err)
	}
	if s != nil {
		if _, _, err := s.Swap(h.within(t), nodeID(1), nil, tooLarge); !errors.Is(err, registry.ErrTooLarge) {
			t.Errorf("swap to %d bytes returns %v, want registry.ErrTooLarge", len(tooLarge), err)
		}
	}
	// The longest of both is accepted.
	want := map[string]string{registry.NodeID(strings.Repeat("a", 253)): strings.Repeat("x", registry.MaxData), "node/0": "", "node/a.b-c.0": "y"}
	for id, data := range want {
		h.put(t, r, id, data)
	}
	h.follow(t, r, kind).awaitState(t, h.Timeout, want)
}

func swap(t *testing.T, h Harness) {
	r := h.New(t)
	s := swapper(t, r)
	w := h.follow(t, r, kind)
	id := nodeID(1)
	for i, step := range []struct {
		old, new, current []byte
		ok                bool
	}{
		{old: []byte("a"), new: []byte("b"), current: nil, ok: false}, // absent
		{old: []byte{}, new: []byte("b"), current: nil, ok: false},    // empty is not absent
		{old: nil, new: nil, current: nil, ok: true},                  // absent stays absent
		{old: nil, new: []byte("a"), current: []byte("a"), ok: true},  // create
		{old: nil, new: []byte("b"), current: []byte("a"), ok: false}, // never replace
		{old: []byte("b"), new: []byte("c"), current: []byte("a"), ok: false},
		{old: []byte("b"), new: nil, current: []byte("a"), ok: false},
		{old: []byte("a"), new: []byte("b"), current: []byte("b"), ok: true}, // replace
		{old: []byte("b"), new: []byte("b"), current: []byte("b"), ok: true}, // by the same
		{old: []byte("b"), new: []byte{}, current: []byte{}, ok: true},       // by nothing
		{old: nil, new: []byte("c"), current: []byte{}, ok: false},           // which is there
		{old: []byte{}, new: []byte("d\x00"), current: []byte("d\x00"), ok: true},
		{old: []byte("d"), new: []byte("e"), current: []byte("d\x00"), ok: false},
		{old: []byte("d\x00"), new: nil, current: nil, ok: true}, // delete
		{old: []byte("d\x00"), new: nil, current: nil, ok: false},
		{old: nil, new: []byte("again"), current: []byte("again"), ok: true},
	} {
		current, ok, err := s.Swap(h.within(t), id, step.old, step.new)
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
		if ok != step.ok || string(current) != string(step.current) || (current == nil) != (step.current == nil) {
			t.Fatalf("step %d: swap of %#v by %#v returns %#v, %t, want %#v, %t", i, step.old, step.new, current, ok, step.current, step.ok)
		}
	}
	h.settle(t, r, map[string]string{id: "again"}, w)
}

// swapCounter has several count in one entry: no count may be lost, and none counted twice.
func swapCounter(t *testing.T, h Harness) {
	r := h.New(t)
	s := swapper(t, r)
	w := h.follow(t, r, kind)
	const counters, each = 8, 25
	ctx := h.within(t)
	errs := make([]error, counters)
	var wg sync.WaitGroup
	for k := range counters {
		wg.Go(func() {
			var have []byte
			for done := 0; done < each; {
				n, _ := strconv.Atoi(string(have))
				current, ok, err := s.Swap(ctx, nodeID(1), have, []byte(strconv.Itoa(n+1)))
				if err != nil {
					errs[k] = err
					return
				}
				have = current
				if ok {
					done++
				}
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	h.settle(t, r, map[string]string{nodeID(1): strconv.Itoa(counters * each)}, w)
}

// swapCreate has several create one entry: one wins, and the others are told who.
func swapCreate(t *testing.T, h Harness) {
	r := h.New(t)
	s := swapper(t, r)
	for round := range 10 {
		const n = 8
		var won atomic.Int32
		winners, seen, errs := make([]bool, n), make([]string, n), make([]error, n)
		var wg sync.WaitGroup
		ctx := h.within(t)
		for k := range n {
			wg.Go(func() {
				current, ok, err := s.Swap(ctx, nodeID(round), nil, []byte("by"+strconv.Itoa(k)))
				winners[k], seen[k], errs[k] = ok, string(current), err
				if ok {
					won.Add(1)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
		if won.Load() != 1 {
			t.Fatalf("round %d: %d of %d created one entry", round, won.Load(), n)
		}
		winner := "by" + strconv.Itoa(slices.Index(winners, true))
		for k := range n {
			if seen[k] != winner {
				t.Fatalf("round %d: %d was told that %q is there, but %q is", round, k, seen[k], winner)
			}
		}
	}
}
