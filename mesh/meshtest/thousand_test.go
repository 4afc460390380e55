package meshtest_test

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/meshtest"
	"github.com/warren-mesh/warren/mesh/registry"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
)

// TestThousandNodes has 1,000 nodes join in random order, a tenth of them restart, on the device they left
// or on a new one, and another tenth leave, while the registry refuses, loses and delays calls and cuts
// watchers off. In the end every device is what the oracle says, and nothing of the rest is left.
func TestThousandNodes(t *testing.T) {
	size := 1000
	if testing.Short() || raceEnabled {
		size = 100
	}
	const most = 8 << 30 // bytes
	goroutines := runtime.NumGoroutine()
	defer debug.SetGCPercent(debug.SetGCPercent(50)) // half as much rubbish as usual on top of what is in use
	peak := sampleMemory()
	began := time.Now()
	synctest.Test(t, func(t *testing.T) { joinRestartLeave(t, size, 1) })
	took, bytes := time.Since(began), peak()
	t.Logf("%d nodes: %v, peak memory %.2f GiB", size, took.Round(time.Second/10), float64(bytes)/(1<<30))
	if bytes > most {
		t.Errorf("peak memory is %d bytes, at most %d are allowed", bytes, uint64(most))
	}
	if n := runtime.NumGoroutine(); n > goroutines+1 {
		t.Errorf("%d goroutines, %d before", n, goroutines)
	}
}

func joinRestartLeave(t *testing.T, size int, seed uint64) {
	c := meshtest.New(t, meshtest.Options{Nodes: size, Seed: seed, Configure: func(n *meshtest.Node, c *mesh.Config) {
		if n.Index%4 != 0 {
			c.Addresses = c.Addresses[:1] // no IPv6
		}
	}})
	r := rand.New(rand.NewPCG(seed, 1))
	for _, n := range c.Nodes {
		faulty(n.Registry, r.Uint64())
	}
	pause := func(most time.Duration) { time.Sleep(time.Duration(r.Int64N(int64(most)))) }

	// Some are cut off at any time, for up to 5 s.
	stop := make(chan struct{})
	var cutter sync.WaitGroup
	cutter.Go(func() {
		r := rand.New(rand.NewPCG(seed, 2))
		for {
			n := c.Nodes[r.IntN(size)]
			n.Registry.Cut()
			again := n.Registry.Heal
			if r.IntN(2) == 0 {
				again = n.Registry.Resume
			}
			time.AfterFunc(time.Duration(r.Int64N(int64(5*time.Second))), again)
			select {
			case <-time.After(time.Duration(r.Int64N(int64(40 * time.Second / time.Duration(size))))):
			case <-stop:
				return
			}
		}
	})

	order := r.Perm(size)
	for _, i := range order {
		c.Nodes[i].Start()
		pause(10 * time.Second / time.Duration(size)) // 5 s in all
	}
	time.Sleep(2 * time.Second)
	forgetLogs(c)

	tenth := size / 10
	restart, leave := order[:tenth], order[tenth:2*tenth]
	if r.IntN(2) == 0 {
		restart, leave = leave, restart
	}
	for i := range tenth {
		n := c.Nodes[restart[i]]
		if i%2 == 0 {
			n.Restart()
		} else {
			n.Renew()
		}
		if err := c.Nodes[leave[i]].Leave(t.Context()); err != nil {
			t.Fatal(err)
		}
		pause(10 * time.Second / time.Duration(tenth) / 2)
	}
	forgetLogs(c)

	close(stop)
	cutter.Wait()
	time.Sleep(5 * time.Second) // those who are cut off come back by themselves
	c.Mend()
	settle(t, c, 5*time.Minute)
	time.Sleep(20 * time.Second) // an audit
	if err := c.Check(t.Context()); err != nil {
		t.Fatalf("it was settled, and then: %v", err)
	}
	gone := make(map[string]bool)
	for _, i := range leave {
		gone[registry.NodeID(c.Nodes[i].Config.Node)] = true
	}
	for _, e := range c.Store.Snapshot().Entries {
		if gone[e.ID] {
			t.Errorf("%s left, and its record is still there", e.ID)
		}
	}
	if n := len(c.Store.Snapshot().Entries); n != size-tenth {
		t.Errorf("%d records, want %d", n, size-tenth)
	}
}

// forgetLogs has the devices forget what was done to them, which is much.
func forgetLogs(c *meshtest.Cluster) {
	for _, n := range c.Nodes {
		n.Device.TakeLog()
	}
}

var errFaulty = errors.New("the registry refuses")

// faulty has the registry refuse a twentieth of the calls, lose the answers of as many, and take up to
// 200 ms for each.
func faulty(r *regmem.Registry, seed uint64) {
	var mu sync.Mutex
	source := rand.New(rand.NewPCG(seed, 0))
	draw := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return source.IntN(n)
	}
	r.SetFault(func(op, _ string) error {
		if op == regmem.OpWatch {
			return nil
		}
		switch draw(20) {
		case 0:
			return errFaulty
		case 1:
			return regmem.Late(errFaulty)
		}
		return nil
	})
	r.SetDelay(func(string, string) time.Duration { return time.Duration(draw(200)) * time.Millisecond })
}

// sampleMemory returns a function that ends the sampling and returns the most memory that the runtime
// had from the system, less what it had given back.
func sampleMemory() (peak func() uint64) {
	samples := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	var most uint64
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			metrics.Read(samples)
			most = max(most, samples[0].Value.Uint64()-samples[1].Value.Uint64())
			select {
			case <-time.After(50 * time.Millisecond):
			case <-stop:
				return
			}
		}
	}()
	return func() uint64 { close(stop); <-done; return most }
}
