package etcd_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
)

// Watches that come and go leave nothing, here or at the server.
func TestWatchesLeaveNothing(t *testing.T) {
	alone(t, func(t *testing.T, o etcdtest.Options) {
		c := etcdtest.Start(t, o)
		r := open(t, etcd.Config{Endpoints: c.Endpoints(), Timeout: patience})
		put(t, r, "node/a", "1")
		cycle := func(i int) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			for _, err := range r.Watch(ctx, registry.KindNode) {
				if err != nil {
					t.Fatal(err)
				}
				if i%2 == 0 {
					break
				}
				cancel()
			}
		}
		const gauge = "etcd_debugging_mvcc_watcher_total"
		for i := range 4 {
			cycle(i)
		}
		settle := func(what string, base float64, now func() float64) {
			t.Helper()
			end := time.Now().Add(patience)
			for now() > base {
				if time.Now().After(end) {
					t.Fatalf("%s: %v, and %v before", what, now(), base)
				}
				time.Sleep(20 * time.Millisecond)
			}
		}
		settle("watchers at the server", 0, func() float64 { return c.Metric(0, gauge) })
		goroutines := runtime.NumGoroutine()
		cycles := 2000
		if testing.Short() {
			cycles = 200
		}
		for i := range cycles {
			cycle(i)
		}
		settle("goroutines", float64(goroutines+5), func() float64 { return float64(runtime.NumGoroutine()) })
		settle("watchers at the server", 0, func() float64 { return c.Metric(0, gauge) })
		f := follow(t, r, registry.KindNode)
		f.has("node/a", "1")
		settle("the gauge counts nothing", 0, func() float64 { return 1 - c.Metric(0, gauge) })
	})
}

// 200 nodes that lose the server at once are back soon, and spread: not a quarter of them comes in any 100 ms. (What
// the delays do by themselves is for TestHerd; here, a busy machine holds up some and then has them come together.)
func TestServerLosesAll(t *testing.T) {
	c := etcdtest.Start(t, etcdtest.Options{})
	p := c.Proxy(0)
	const n = 200
	const timeout = 20 * time.Second // so that what a busy machine holds up for a moment is no herd
	var fs []*follower
	var r *etcd.Registry
	for range n {
		r = open(t, etcd.Config{Endpoints: []string{p.Addr()}, Prefix: "/herd", Timeout: timeout})
		fs = append(fs, follow(t, r, registry.KindNode))
	}
	for _, f := range fs {
		f.await("a Reset", func(s seen) bool { return s.Known })
	}
	before := len(p.Conns())
	p.Drop()
	for end := time.Now().Add(patience); len(p.Conns()) < before+n; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d came back within %v", len(p.Conns())-before, n, patience)
		}
	}
	put(t, open(t, etcd.Config{Endpoints: c.Endpoints(), Prefix: "/herd"}), "node/a", "1")
	for _, f := range fs {
		if s := f.has("node/a", "1"); s.resets != 1 || len(s.errs) != 0 {
			t.Errorf("%d resets, errors %v, want 1 and none", s.resets, s.errs)
		}
	}
	arrivals := p.Conns()[before:]
	slices.SortFunc(arrivals, time.Time.Compare)
	busiest := 0
	for i, a := range arrivals {
		k := i
		for k < len(arrivals) && arrivals[k].Sub(a) < 100*time.Millisecond {
			k++
		}
		busiest = max(busiest, k-i)
	}
	t.Logf("%d connections, %d in the busiest 100 ms, the last after %v", len(arrivals), busiest, arrivals[len(arrivals)-1].Sub(arrivals[0]))
	if busiest > n/4 {
		t.Errorf("%d of %d came within 100 ms", busiest, n)
	}
}

// The largest entries there can be, more than fit in one message of gRPC's usual limit.
func TestLargeEntries(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		c := etcdtest.Start(t, o)
		r := open(t, etcd.Config{Endpoints: c.Endpoints(), Timeout: patience})
		before := follow(t, r, registry.KindNode)
		data := strings.Repeat("x", registry.MaxData)
		const n = 8
		for i := range n {
			put(t, r, fmt.Sprintf("node/n%d", i), data)
		}
		for _, f := range []*follower{before, follow(t, r, registry.KindNode)} {
			s := f.await("all entries", func(s seen) bool { return len(s.Entries) == n })
			for id, e := range s.Entries {
				if string(e.Data) != data {
					t.Errorf("%s has %d bytes that are not those put", id, len(e.Data))
				}
			}
		}
	})
}

// 5,000 updates over 100 keys reach a consumer that takes 200 ms a batch in few batches, soon, and
// without being kept meanwhile.
func TestBacklogIsBounded(t *testing.T) {
	c := etcdtest.Start(t, etcdtest.Options{})
	r := open(t, etcd.Config{Endpoints: c.Endpoints(), Prefix: "/backlog", Timeout: patience})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	put(t, r, "node/first", "")
	client := c.Client()
	const keys, updates = 100, 5000
	value := strings.Repeat("v", 2000) // 10 MB of history in all
	var mem runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&mem)
	heap := mem.HeapAlloc
	written := make(chan time.Time, 1)
	batches := 0
	for b, err := range r.Watch(ctx, registry.KindNode) {
		if err != nil {
			t.Fatal(err)
		}
		if b.Reset {
			go func() {
				for i := 0; i < updates; i += keys {
					var ops []clientv3.Op
					for k := range keys {
						ops = append(ops, clientv3.OpPut(fmt.Sprintf("/backlog/node/n%d", k), value+strconv.Itoa(i)))
					}
					if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
						t.Error(err)
						cancel()
						return
					}
				}
				written <- time.Now()
				if _, err := client.Put(ctx, "/backlog/node/last", ""); err != nil {
					t.Error(err)
				}
			}()
			continue
		}
		batches++
		if slices.ContainsFunc(b.Put, func(e registry.Entry) bool { return e.ID == "node/last" }) {
			break
		}
		time.Sleep(200 * time.Millisecond)
	}
	lag := time.Since(<-written)
	runtime.GC()
	runtime.ReadMemStats(&mem)
	t.Logf("%d updates came in %d batches, the last %v late; %d KiB more", updates, batches, lag, (int64(mem.HeapAlloc)-int64(heap))>>10)
	if lag > patience/4 || batches > updates/keys {
		t.Errorf("%d updates came in %d batches, the last %v late", updates, batches, lag)
	}
	if grown := int64(mem.HeapAlloc) - int64(heap); grown > 10<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
}
