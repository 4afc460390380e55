package etcd_test

import (
	"flag"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
	"github.com/warren-mesh/warren/mesh/registry/registrytest"
)

// suite has each case of registrytest work on one cluster, below a prefix of its own and through a proxy
// of its own.
type suite struct {
	t       testing.TB
	cluster *etcdtest.Cluster
	cases   atomic.Int32
	proxies map[registry.Registry]*etcdtest.Proxy
	configs map[registry.Registry]etcd.Config
}

func (s *suite) open(t testing.TB) *etcd.Registry {
	p := s.cluster.Proxy(0)
	cfg := etcd.Config{Endpoints: []string{"http://" + p.Addr()}, Prefix: fmt.Sprintf("/case-%d", s.cases.Add(1)), Timeout: 2 * short}
	r := open(t, cfg)
	s.proxies[r], s.configs[r] = p, cfg
	return r
}

// direct returns a registry on the same store that no outage hits.
func (s *suite) direct(t testing.TB, r registry.Registry) registry.Registry {
	cfg := s.configs[r]
	cfg.Endpoints = s.cluster.Endpoints()
	return open(t, cfg)
}

func (s *suite) harness() registrytest.Harness {
	h := registrytest.Harness{
		New: func(t testing.TB) registry.Registry { return s.open(t) },
		Outage: func(t testing.TB, r registry.Registry) (registry.Registry, func()) {
			s.proxies[r].Cut()
			return s.direct(t, r), s.proxies[r].Heal
		},
		Gap: func(t testing.TB, r registry.Registry) (registry.Registry, func()) {
			s.proxies[r].Cut()
			return s.direct(t, r), func() {
				s.cluster.Compact()
				s.proxies[r].Heal()
			}
		},
		Backup: func(_ testing.TB, _ registry.Registry) func() {
			saved := s.cluster.Snapshot()
			return func() {
				s.cluster.Kill(0) // does not wait for the watches
				s.cluster.Restore(saved)
			}
		},
		Down: func(t testing.TB) (registry.Registry, func()) {
			s.cluster.Stop(0)
			return s.open(t), func() { s.cluster.Start(0) }
		},
		Timeout: patience,
		Prompt:  5 * time.Second,
	}
	if !testing.Short() {
		// Enough for a list of several pages, and for changes to pile up: more prove nothing more.
		h.Entries, h.Updates, h.Joins = 10_000, 3000, 50
	}
	return h
}

func TestRegistry(t *testing.T) {
	// Each check takes a while on a real server, of which there are two; the memory's run does them all.
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue {
		if err := flag.Set(f.Name, "50"); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = flag.Set(f.Name, f.DefValue) }()
	}
	alone(t, func(t *testing.T, o etcdtest.Options) {
		s := &suite{
			t: t, cluster: etcdtest.Start(t, o),
			proxies: make(map[registry.Registry]*etcdtest.Proxy), configs: make(map[registry.Registry]etcd.Config),
		}
		registrytest.Run(t, s.harness())
	})
}
