package registrytest

import (
	"testing"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
)

// Harness tells Run how to make a registry, and how to make its store break down. New is required. Any
// other hook is nil where there is no way to do it; what needs it is skipped.
type Harness struct {
	// New returns a registry that has nothing in it. What needs closing is left to t.Cleanup, and so is
	// it with the other hooks.
	New func(t testing.TB) registry.Registry

	// Outage makes the store unreachable for r, which New made, until heal is called. other is a
	// registry on the same store that works meanwhile, or nil if nothing does. Whether heal leaves
	// watchers with a gap is up to the store.
	Outage func(t testing.TB, r registry.Registry) (other registry.Registry, heal func())

	// Gap is as Outage, but the store forgets what happened until heal, so that no watcher can be told
	// the changes of the meantime one by one. other may not be nil.
	Gap func(t testing.TB, r registry.Registry) (other registry.Registry, heal func())

	// Backup saves what the store of r has; restore puts that back, revision and all, and returns when
	// the store works again.
	Backup func(t testing.TB, r registry.Registry) (restore func())

	// Down returns a registry whose store is not there yet, until start is called.
	Down func(t testing.TB) (r registry.Registry, start func())

	// Timeout is how long to wait for what must happen; 10 s if zero. Nothing waits that long unless the
	// test fails.
	Timeout time.Duration

	// Prompt is how soon what must be prompt has to happen; 2 s if zero.
	Prompt time.Duration

	// Entries is how many entries the large cases have, and Updates how many changes; 10,000 each if
	// zero. With -short, a tenth.
	Entries, Updates int

	// Joins is how many watchers join a store that is being written to; 100 if zero. With -short, a tenth.
	Joins int
}

func (h Harness) withDefaults() Harness {
	size := func(n *int, standard int) {
		if *n == 0 {
			*n = standard
			if testing.Short() {
				*n /= 10
			}
		}
	}
	size(&h.Entries, 10_000)
	size(&h.Updates, 10_000)
	size(&h.Joins, 100)
	if h.Timeout == 0 {
		h.Timeout = 10 * time.Second
	}
	if h.Prompt == 0 {
		h.Prompt = 2 * time.Second
	}
	return h
}

// Run checks that the registries h makes keep the contract of package registry, in one subtest a case.
// The subtests run one after the other: some count goroutines.
func Run(t *testing.T, h Harness) {
	if h.New == nil {
		t.Fatal("registrytest: Harness.New is nil")
	}
	h = h.withDefaults()
	for _, c := range []struct {
		name string
		run  func(*testing.T, Harness)
	}{
		{"FirstEverything", firstEverything},
		{"Changes", changes},
		{"Kinds", kinds},
		{"SeveralWatchers", severalWatchers},
		{"Rerange", rerange},
		{"JoinWhileWriting", joinWhileWriting},
		{"SlowConsumer", slowConsumer},
		{"Large", large},
		{"Outage", outage},
		{"OutageAtStart", outageAtStart},
		{"OutageEnds", outageEnds},
		{"DeletedWhileCutOff", deletedWhileCutOff},
		{"Gap", gap},
		{"Restore", restore},
		{"Down", down},
		{"EndsWithContext", endsWithContext},
		{"EndsWithBreak", endsWithBreak},
		{"EndsDuringOutage", endsDuringOutage},
		{"CancelledCalls", cancelledCalls},
		{"NoLeak", noLeak},
		{"Ownership", ownership},
		{"Refused", refused},
		{"Swap", swap},
		{"SwapCounter", swapCounter},
		{"SwapCreate", swapCreate},
		{"Model", model},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, h) })
	}
}

// need skips a case whose hook is missing.
func need(t *testing.T, have bool, hook, why string) {
	t.Helper()
	if !have {
		t.Skipf("needs Harness.%s: %s", hook, why)
	}
}

// swapper skips a case for a registry that cannot swap.
func swapper(t *testing.T, r registry.Registry) registry.Swapper {
	t.Helper()
	s, ok := r.(registry.Swapper)
	if !ok {
		t.Skip("needs a registry that implements registry.Swapper")
	}
	return s
}
