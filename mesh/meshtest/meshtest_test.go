package meshtest_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/meshtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func settle(t *testing.T, c *meshtest.Cluster, within time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	if err := c.Settled(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := meshtest.New(t, meshtest.Options{})
		c.Start()
		settle(t, c, time.Minute)
	})
}

// TestChaos is a small mesh under every fault there is.
func TestChaos(t *testing.T) {
	seeds, steps := 60, 150
	if testing.Short() || raceEnabled {
		seeds, steps = 10, 100
	}
	for seed := range uint64(seeds) {
		if !t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { chaos(t, seed, steps) })
		}) {
			return
		}
	}
}

func chaos(t *testing.T, seed uint64, steps int) {
	c := meshtest.New(t, meshtest.Options{Nodes: 2 + int(seed)%6, Seed: seed})
	c.Start()
	if err := c.Chaos(t.Context(), steps); err != nil {
		t.Fatal(err)
	}
	c.Mend()
	if seed%2 == 0 {
		c.Start() // else who left or stopped stays away
	}
	for range 90 {
		c.Send()
		time.Sleep(time.Second)
	}
	settle(t, c, 10*time.Minute)
	n := 0
	for _, node := range c.Nodes {
		if node.Running() {
			n++
		}
	}
	if arrived := c.Send(); arrived != n*(n-1) {
		t.Errorf("%d of %d packets arrived", arrived, n*(n-1))
	}
	time.Sleep(5 * time.Minute)
	if err := c.Check(t.Context()); err != nil {
		t.Fatalf("it was settled, and then: %v", err)
	}
}
