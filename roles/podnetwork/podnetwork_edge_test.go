package podnetwork

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles"
)

// Where nothing can be announced, the role is not healthy.
func TestEdgeNoMesh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := roles.New(roles.Config{Roles: []roles.Role{New(Value(netip.MustParsePrefix("10.244.1.0/24")))}, Assigned: roles.Static(Name)})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		v, _ := m.Current()
		if s, _ := v.Role(Name); s.Phase == roles.Healthy || len(v.Conditions) == 0 {
			t.Errorf("there is no mesh to announce to, and it is %s, conditions %v", s.Phase, v.Conditions)
		}
		cancel()
		<-ended
	})
}

// A network that cannot be announced at all is not a healthy one.
func TestEdgeBadPrefix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab, m, stop := run(t, Value(netip.Prefix{}))
		v, _ := m.Current()
		if s, _ := v.Role(Name); s.Phase == roles.Healthy && len(v.Conditions) == 0 {
			t.Errorf("announced is %q, and it is %s, without a condition", tab.text(), s.Phase)
		}
		stop()
	})
}

type endingSource struct{ Source }

func (endingSource) Run(context.Context) error { return nil }

// A source that ends early is a failure.
func TestEdgeSourceEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, m, stop := run(t, endingSource{Value(netip.MustParsePrefix("10.244.1.0/24"))})
		v, _ := m.Current()
		if s, _ := v.Role(Name); s.Phase == roles.Healthy && s.Restarts == 0 {
			t.Errorf("its source has ended, and it is %s", s.Phase)
		}
		stop()
	})
}

// Half a file over a longer one is no configuration.
func TestEdgeCNITrailing(t *testing.T) {
	for _, tail := range []string{"\"}]}}", " {", "\x00\x00"} {
		nets, err := parseCNI("x", []byte(`{"ipam":{"type":"host-local","subnet":"10.244.1.0/24"}}`+tail))
		if err == nil {
			t.Errorf("with %q after it: %v", tail, nets)
		}
	}
}

// A role that is assigned anew does not announce what its file said the last time that it had been.
func TestEdgeStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "nets")
		put := func(s string) {
			if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		put("10.244.1.0/24\n")
		r := New(File(path))
		tab := &counting{Table: prefixes.NewTable()}
		for range 2 {
			m, err := roles.New(roles.Config{Roles: []roles.Role{r}, Assigned: roles.Static(Name), Mesh: meshOf{table{prefixes.NewTable()}, tab}})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			tab.all = nil
			go func() { ended <- m.Run(ctx) }()
			time.Sleep(10 * time.Second)
			synctest.Wait()
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			put("10.244.2.0/24\n")
		}
		if tab.all[0] != "10.244.2.0/24" {
			t.Errorf("the file names 10.244.2.0/24 when the role starts, and it announces %v", tab.all)
		}
	})
}

type counting struct {
	*prefixes.Table
	all []string
}

func (c *counting) Announce(s string, a ...prefixes.Announcement) error {
	for _, a := range a {
		c.all = append(c.all, a.Prefix.String())
	}
	return c.Table.Announce(s, a...)
}

type meshOf struct {
	table
	p *counting
}

func (m meshOf) Prefixes() prefixes.Prefixes { return m.p }

type closedSource struct {
	Source
	calls atomic.Int64
}

func (c *closedSource) Current() (Reading, <-chan struct{}) {
	c.calls.Add(1)
	closed := make(chan struct{})
	close(closed)
	return Reading{Known: true}, closed
}

// A Source whose channel is always closed does not make the role, and the Manager, run hot.
func TestEdgeHotSource(t *testing.T) {
	s := &closedSource{Source: Value()}
	m, err := roles.New(roles.Config{Roles: []roles.Role{New(s)}, Assigned: roles.Static(Name), Mesh: table{prefixes.NewTable()}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := m.Run(ctx); err != nil {
		t.Error(err)
	}
	if n := s.calls.Load(); n > 200 {
		t.Errorf("looked %d times in 200 ms", n)
	}
}
