package etcd_test

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
)

// record is about as long as a node's record.
var record = strings.Repeat("r", 500)

func fillNodes(b *testing.B, r registry.Registry, n int) {
	b.Helper()
	var wg sync.WaitGroup
	const writers = 32
	for k := range writers {
		wg.Go(func() {
			for i := k; i < n; i += writers {
				if err := r.Put(context.Background(), registry.Entry{ID: fmt.Sprintf("node/n%d", i), Data: []byte(record)}); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkStart is a watch that begins on 10,000 records, until its first batch.
func BenchmarkStart(b *testing.B) {
	c := etcdtest.Start(b, etcdtest.Options{})
	r := open(b, etcd.Config{Endpoints: c.Endpoints(), Prefix: "/bench", Timeout: patience})
	fillNodes(b, r, 10_000)
	b.ReportAllocs()
	for b.Loop() {
		for batch, err := range r.Watch(b.Context(), registry.KindNode) {
			if err != nil || len(batch.Put) != 10_000 {
				b.Fatal(len(batch.Put), err)
			}
			break
		}
	}
}

// BenchmarkChange is one change that reaches all of 100 watchers, in a store of 1,000 records. Bytes and
// allocations are those of the client, for each watcher.
func BenchmarkChange(b *testing.B) {
	c := etcdtest.Start(b, etcdtest.Options{})
	r := open(b, etcd.Config{Endpoints: c.Endpoints(), Prefix: "/bench", Timeout: patience})
	fillNodes(b, r, 1000)
	const watchers = 100
	ctx, cancel := context.WithCancel(context.Background())
	var running, got sync.WaitGroup
	got.Add(watchers)
	for range watchers {
		running.Go(func() {
			for _, err := range r.Watch(ctx, registry.KindNode) {
				if err != nil {
					b.Error(err)
					return
				}
				got.Done()
			}
		})
	}
	got.Wait()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	n := 0
	for b.Loop() {
		n++
		got.Add(watchers)
		if err := r.Put(ctx, registry.Entry{ID: "node/n0", Data: []byte(record + strconv.Itoa(n))}); err != nil {
			b.Fatal(err)
		}
		got.Wait()
	}
	runtime.ReadMemStats(&after)
	b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc)/float64(n*watchers), "B/watcher")
	b.ReportMetric(float64(after.Mallocs-before.Mallocs)/float64(n*watchers), "allocs/watcher")
	cancel()
	running.Wait()
}
