package registrytest_test

import (
	"testing"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/registry/registrytest"
)

func ExampleRun() {
	// In the tests of a registry this is func TestRegistry.
	_ = func(t *testing.T) {
		registrytest.Run(t, registrytest.Harness{
			New: func(t testing.TB) registry.Registry { return memory.New() },
			Outage: func(t testing.TB, r registry.Registry) (registry.Registry, func()) {
				m := r.(*memory.Registry)
				m.Cut()
				return m.Handle(), m.Heal
			},
		})
	}
	// Output:
}
