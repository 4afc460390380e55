package roles

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles/part"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testMesh is a Mesh without a mesh.
type testMesh struct {
	table *prefixes.Table
	self  view.Self
}

func newTestMesh() *testMesh { return &testMesh{table: prefixes.NewTable()} }

func (m *testMesh) Current() (view.View, <-chan struct{}) { return view.View{Self: m.self}, nil }
func (m *testMesh) Prefixes() prefixes.Prefixes           { return m.table }

func (m *testMesh) announced() (all []string) {
	s, _ := m.table.Current()
	for _, a := range s.Announcements {
		all = append(all, a.Prefix.String())
	}
	return all
}

// testRole is a Role that notes in a log what becomes of it.
type testRole struct {
	name  string
	needs []string
	run   func(ctx context.Context, n Node) error // nil: until it is told to end
	log   *events
}

func (r *testRole) Name() string        { return r.name }
func (r *testRole) DependsOn() []string { return r.needs }
func (r *testRole) Run(ctx context.Context, n Node) error {
	r.log.add("+" + r.name)
	defer r.log.add("-" + r.name)
	if r.run != nil {
		return r.run(ctx, n)
	}
	<-ctx.Done()
	return ctx.Err()
}

// events is what happened, in order: of who wants a lock first, another may have it first.
type events struct {
	next atomic.Int64
	mu   sync.Mutex
	all  map[int64]string
}

func (e *events) add(s string) {
	n := e.next.Add(1)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.all == nil {
		e.all = make(map[int64]string)
	}
	e.all[n] = s
}

// take returns what happened since it was called last.
func (e *events) take() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []string
	for _, n := range slices.Sorted(maps.Keys(e.all)) {
		all = append(all, e.all[n])
	}
	e.all = nil
	return strings.Join(all, " ")
}

// settable is an Assigned for tests.
type settable struct{ conditioned }

func (s *settable) assign(names ...string) {
	s.v.Set(assignment{names: slices.Clone(names), known: true})
}

// start runs m in a bubble until stop is called, which returns what Run did.
func start(t *testing.T, cfg Config) (m *Manager, stop func() error) {
	t.Helper()
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m, rerun(t, m)
}

func rerun(t *testing.T, m *Manager) (stop func() error) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	synctest.Wait()
	return func() error {
		cancel()
		return <-ended
	}
}

// wait lets time go by until nothing more happens in it.
func wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (m *Manager) phase(t *testing.T, name string, want Phase) State {
	t.Helper()
	v, _ := m.Current()
	s, ok := v.Role(name)
	if !ok || s.Phase != want {
		t.Errorf("%s is %q, want %q: %+v", name, s.Phase, want, s)
	}
	return s
}

func conditions(m *Manager) (all []string) {
	v, _ := m.Current()
	for _, c := range v.Conditions {
		all = append(all, string(c.Kind)+" "+c.Subject)
	}
	return all
}

func has(m *Manager, k view.Kind, subject string) bool {
	return slices.Contains(conditions(m), string(k)+" "+subject)
}

// What others depend on starts before them and stops after them, and a change touches nothing that it does not concern.
func TestOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		var is settable
		role := func(name string, needs ...string) Role { return &testRole{name: name, needs: needs, log: &log} }
		is.assign("c", "b", "a", "x")
		m, stop := start(t, Config{Assigned: &is, Roles: []Role{role("c", "b", "a"), role("b", "a"), role("x"), role("a"), role("y")}})
		wait(time.Second)
		if got := log.take(); got != "+a +b +c +x" && !inOrder(got, "+a", "+b", "+c") {
			t.Errorf("at first: %s", got)
		}
		m.phase(t, "c", Healthy)
		m.phase(t, "y", NotAssigned)
		is.assign("c", "b", "a", "y")
		wait(time.Second)
		if got := log.take(); got != "-x +y" && got != "+y -x" {
			t.Errorf("x is y: %s", got)
		}
		is.assign("c", "b", "y") // without a, neither of the others can be
		wait(time.Second)
		if got := log.take(); got != "-c -b -a" {
			t.Errorf("without a: %s", got)
		}
		if s := m.phase(t, "c", Waiting); len(s.Waiting) != 2 || !strings.Contains(s.Waiting[1], "role a, which is not assigned") {
			t.Errorf("c waits for %q", s.Waiting)
		}
		if !has(m, RoleWaiting, "b") {
			t.Errorf("conditions are %q", conditions(m))
		}
		is.assign("a", "b", "c", "y")
		wait(time.Second)
		if got := log.take(); got != "+a +b +c" {
			t.Errorf("with a: %s", got)
		}
		if v, _ := m.Current(); v.Generation != 4 || len(v.Conditions) != 0 || !v.Settled() {
			t.Errorf("the View is %+v", v)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
		if got := log.take(); !inOrder(got, "-c", "-b", "-a") || !strings.Contains(got, "-y") {
			t.Errorf("at the end: %s", got)
		}
		m.phase(t, "a", Stopped)
	})
}

func inOrder(s string, parts ...string) bool {
	for _, p := range parts {
		i := strings.Index(s, p)
		if i < 0 {
			return false
		}
		s = s[i+len(p):]
	}
	return true
}

// Who depends on a role waits until it is healthy, and goes on when it fails later.
func TestDependsOnHealth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		var ill atomic.Bool
		ill.Store(true)
		a := &probed{testRole{name: "a", log: &log}, &ill}
		b := &testRole{name: "b", needs: []string{"a"}, log: &log}
		m, stop := start(t, Config{Assigned: Static("a", "b"), Roles: []Role{b, a}})
		wait(time.Minute)
		m.phase(t, "a", Starting)
		if s := m.phase(t, "b", Waiting); len(s.Waiting) != 1 || s.Waiting[0] != "role a, which is not healthy" {
			t.Errorf("b waits for %q", s.Waiting)
		}
		ill.Store(false)
		wait(time.Minute)
		m.phase(t, "b", Healthy)
		ill.Store(true)
		wait(10 * time.Minute)
		m.phase(t, "b", Healthy)
		if got := log.take(); strings.Contains(got, "-b") || !strings.Contains(got, "-a +a") {
			t.Error(got)
		}
		_ = stop()
	})
}

type probed struct {
	testRole
	ill *atomic.Bool
}

func (p *probed) Probe(context.Context) error {
	if p.ill.Load() {
		return errors.New("ill")
	}
	return nil
}

// What flaps is taken up as it is after a while, and not at all where it is as it was.
func TestFlapping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		var is settable
		is.assign("a", "b")
		m, stop := start(t, Config{Assigned: &is, Roles: []Role{&testRole{name: "a", log: &log}, &testRole{name: "b", log: &log}}})
		wait(time.Second)
		log.take()
		for i := range 1000 {
			if i%2 == 0 {
				is.assign("b")
			} else {
				is.assign("a", "b")
			}
			wait(time.Millisecond)
		}
		wait(time.Second)
		got := strings.Fields(log.take())
		t.Logf("1,000 changes in a second: %s", got)
		if len(got) > 12 || slices.Contains(got, "-b") {
			t.Errorf("1,000 changes in a second: %s", got)
		}
		m.phase(t, "a", Healthy)
		for range 1000 { // within one window
			is.assign("b")
			is.assign("a", "b")
		}
		wait(time.Second)
		if got := log.take(); got != "" {
			t.Errorf("nothing has changed, and %s", got)
		}
		_ = stop()
	})
}

// What a role announced and published goes with it, however it ends.
func TestWithdrawn(t *testing.T) {
	var end atomic.Pointer[func() error]
	for name, how := range map[string]func() error{
		"an error": func() error { return errors.New("test") },
		"nil":      func() error { return nil },
		"a panic":  func() error { panic("boo") },
		"done":     func() error { return part.ErrDone },
		"fatal":    func() error { return part.Fatal(errors.New("test")) },
	} {
		synctest.Test(t, func(t *testing.T) {
			mesh := newTestMesh()
			var kept atomic.Value // the Node
			role := &testRole{name: "a", log: new(events), run: func(ctx context.Context, n Node) error {
				kept.Store(&n)
				if err := errors.Join(n.Announce(prefixes.Announcement{Prefix: netip.MustParsePrefix("10.1.0.0/16")}), n.Publish("x", 1)); err != nil {
					t.Error(err)
				}
				select {
				case <-time.After(10 * time.Second):
					return how()
				case <-ctx.Done():
					return ctx.Err()
				}
			}}
			m, stop := start(t, Config{Assigned: Static("a"), Roles: []Role{role}, Mesh: mesh, Restart: part.Options{Initial: time.Hour, Max: time.Hour}})
			wait(time.Second)
			v, changed := m.values.get("x")
			if got := mesh.announced(); len(got) != 1 || v != 1 {
				t.Fatalf("%s: announced are %v, published is %v", name, got, v)
			}
			wait(10 * time.Second)
			v, _ = m.values.get("x")
			if got := mesh.announced(); len(got) != 0 || v != nil {
				t.Errorf("%s: announced are %v, published is %v", name, got, v)
			}
			select {
			case <-changed:
			default:
				t.Errorf("%s: nobody is told", name)
			}
			n := *kept.Load().(*Node)
			if err := n.Announce(prefixes.Announcement{Prefix: netip.MustParsePrefix("10.1.0.0/16")}); err != ErrEnded {
				t.Errorf("%s: it has ended, and announces: %v", name, err)
			}
			if err := n.Publish("x", 2); err != ErrEnded {
				t.Errorf("%s: it has ended, and publishes: %v", name, err)
			}
			n.Go("late", func(context.Context) error { t.Error("a goroutine after the end"); return nil })
			_ = stop()
		})
	}
	_ = end.Load()
}

// A role that does not end is named and has no say any more; those that it needs are stopped nonetheless.
func TestStuckRole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		var is settable
		mesh := newTestMesh()
		release := make(chan struct{})
		b := &testRole{name: "b", needs: []string{"a"}, log: &log, run: func(ctx context.Context, n Node) error {
			_ = n.Announce(prefixes.Announcement{Prefix: netip.MustParsePrefix("10.1.0.0/16")})
			<-release
			return nil
		}}
		is.assign("a", "b")
		m, stop := start(t, Config{Assigned: &is, Roles: []Role{&testRole{name: "a", log: &log}, b}, Mesh: mesh})
		wait(time.Second)
		is.assign()
		wait(9 * time.Second)
		m.phase(t, "b", Stopping)
		if got := log.take(); got != "+a +b" || len(mesh.announced()) != 1 {
			t.Errorf("before its time is over: %s", got)
		}
		wait(2 * time.Second)
		if got := log.take(); got != "-a" || len(mesh.announced()) != 0 {
			t.Errorf("after it: %s, announced %v", got, mesh.announced())
		}
		if s := m.phase(t, "b", Stopping); !s.Stuck || !has(m, RoleStuck, "b") {
			t.Errorf("it is not named: %+v, %q", s, conditions(m))
		}
		is.assign("a", "b")
		wait(time.Minute)
		if got := log.take(); got != "+a" {
			t.Errorf("assigned again while the first one runs: %s", got)
		}
		if s := m.phase(t, "b", Stopping); len(s.Waiting) != 1 || !strings.Contains(s.Waiting[0], "last run") {
			t.Errorf("it waits for %q", s.Waiting)
		}
		release <- struct{}{}
		wait(time.Second)
		if got := log.take(); got != "-b +b" {
			t.Errorf("it has ended: %s", got)
		}
		m.phase(t, "b", Healthy)
		if err := stop(); err == nil || !strings.Contains(err.Error(), ": b") {
			t.Errorf("at the end: %v", err)
		}
		if err := m.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "b: has not ended") {
			t.Errorf("run again while b runs: %v", err)
		}
		close(release)
		synctest.Wait()
	})
}

// A role that is lost while it starts, while it backs off, and off and on again.
func TestLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		var is settable
		var ill atomic.Bool
		ill.Store(true)
		a := &probed{testRole{name: "a", log: &log}, &ill}
		b := &testRole{name: "b", log: &log, run: func(context.Context, Node) error { return errors.New("test") }}
		is.assign("a", "b")
		m, stop := start(t, Config{Assigned: &is, Roles: []Role{a, b}, Restart: part.Options{Initial: time.Hour, Max: time.Hour}})
		wait(time.Second)
		m.phase(t, "a", Starting)
		if s := m.phase(t, "b", BackingOff); s.Error != "test" || s.Next.IsZero() || !has(m, RoleFailing, "b") {
			t.Errorf("b: %+v, %q", s, conditions(m))
		}
		log.take()
		is.assign()
		wait(time.Second)
		if got := log.take(); got != "-a" || len(conditions(m)) != 0 {
			t.Errorf("both are lost: %s, %q", got, conditions(m))
		}
		m.phase(t, "a", NotAssigned)
		m.phase(t, "b", NotAssigned)
		ill.Store(false)
		for range 3 {
			is.assign("a", "b")
			wait(time.Second)
			m.phase(t, "a", Healthy)
			is.assign("b")
			wait(time.Second)
			m.phase(t, "a", NotAssigned)
		}
		if got := log.take(); strings.Count(got, "+a") != 3 || strings.Count(got, "-a") != 3 || strings.Count(got, "+b") != 1 {
			t.Error(got)
		}
		_ = stop()
	})
}

// While it is not known which roles there are, nothing is started, and what runs is not stopped.
func TestUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		var is settable
		service := part.Part{Name: "mesh", Run: (&testRole{name: "mesh", log: &log}).service}
		m, stop := start(t, Config{Assigned: &is, Roles: []Role{&testRole{name: "a", log: &log}}, Services: []part.Part{service}})
		wait(time.Minute)
		if got := log.take(); got != "+mesh" || !has(m, AssignmentUnknown, "") {
			t.Errorf("nothing is known: %s, %q", got, conditions(m))
		}
		is.assign("a", "strange")
		wait(time.Second)
		if got := log.take(); got != "+a" || !has(m, RoleUnknown, "strange") || has(m, AssignmentUnknown, "") {
			t.Errorf("known: %s, %q", got, conditions(m))
		}
		m.phase(t, "strange", Waiting)
		is.v.Set(assignment{})
		wait(time.Minute)
		if got := log.take(); got != "" {
			t.Errorf("not known any more: %s", got)
		}
		m.phase(t, "a", Healthy)
		_ = stop()
		if got := log.take(); got != "-mesh -a" {
			t.Errorf("at the end: %s", got)
		}
	})
}

func (r *testRole) service(ctx context.Context) error { return r.Run(ctx, nil) }

// Services start once the roles have, so that they find what those announce, and end before them.
func TestServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mesh := newTestMesh()
		a := &testRole{name: "a", log: new(events), run: func(ctx context.Context, n Node) error {
			_ = n.Announce(prefixes.Announcement{Prefix: netip.MustParsePrefix("10.1.0.0/16")})
			<-ctx.Done()
			return nil
		}}
		b := &testRole{name: "b", needs: []string{"a"}, log: new(events), run: a.run}
		var seen []int
		service := part.Part{Name: "mesh", Run: func(ctx context.Context) error {
			seen = append(seen, len(mesh.announced()))
			<-ctx.Done()
			seen = append(seen, len(mesh.announced()))
			return nil
		}}
		m, stop := start(t, Config{Assigned: Static("a", "b"), Roles: []Role{a, b}, Services: []part.Part{service}, Mesh: mesh})
		begun := time.Now()
		wait(10 * time.Millisecond)
		m.phase(t, "mesh", Healthy)
		wait(time.Second)
		if err := stop(); err != nil {
			t.Error(err)
		}
		if !slices.Equal(seen, []int{1, 1}) || len(mesh.announced()) != 0 {
			t.Errorf("at its start and end were announced %v; afterwards %v", seen, mesh.announced())
		}
		t.Log(time.Since(begun))
	})
	// A role that does not come up does not keep the mesh from it.
	synctest.Test(t, func(t *testing.T) {
		ill := new(atomic.Bool)
		ill.Store(true)
		a := &probed{testRole{name: "a", log: new(events)}, ill}
		service := part.Part{Name: "mesh", Run: (&testRole{name: "mesh", log: new(events)}).service}
		m, stop := start(t, Config{Assigned: Static("a"), Roles: []Role{a}, Services: []part.Part{service}})
		wait(time.Second)
		if s := m.phase(t, "mesh", Waiting); !slices.Equal(s.Waiting, []string{"the roles to start"}) {
			t.Errorf("it waits for %q", s.Waiting)
		}
		wait(1100 * time.Millisecond)
		m.phase(t, "mesh", Healthy)
		_ = stop()
	})
	// One that fails for good ends all.
	synctest.Test(t, func(t *testing.T) {
		var log events
		gone := errors.New("left")
		service := part.Part{Name: "mesh", Run: func(context.Context) error { time.Sleep(time.Minute); return part.Fatal(gone) }}
		m, err := New(Config{Assigned: Static("a"), Roles: []Role{&testRole{name: "a", log: &log}}, Services: []part.Part{service}})
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Run(t.Context()); !errors.Is(err, gone) || !strings.HasPrefix(err.Error(), "mesh: ") {
			t.Error(err)
		}
		if got := log.take(); got != "+a -a" {
			t.Error(got)
		}
	})
}

// Roles that fail in any way do not touch others.
func TestOthersGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		bad := func(name string, run func(context.Context, Node) error) Role {
			return &testRole{name: name, log: new(events), run: run}
		}
		roles := []Role{
			&testRole{name: "good", log: &log},
			bad("error", func(context.Context, Node) error { return errors.New("test") }),
			bad("panic", func(context.Context, Node) error { panic("boo") }),
			bad("goroutine", func(ctx context.Context, n Node) error {
				n.Go("worker", func(context.Context) error { panic("boo") })
				<-ctx.Done()
				return ctx.Err()
			}),
			bad("fatal", func(context.Context, Node) error { return part.Fatal(errors.New("never")) }),
			bad("done", func(context.Context, Node) error { return part.ErrDone }),
			&unprivileged{testRole{name: "lacking", log: new(events)}},
			&testRole{name: "after-done", needs: []string{"done"}, log: new(events)},
			&testRole{name: "after-fatal", needs: []string{"fatal"}, log: new(events)},
			&testRole{name: "after-none", needs: []string{"none"}, log: new(events)},
		}
		var names []string
		for _, r := range roles {
			names = append(names, r.Name())
		}
		m, stop := start(t, Config{Assigned: Static(names...), Roles: roles})
		wait(10 * time.Hour)
		if got := log.take(); got != "+good" {
			t.Errorf("the good one: %s", got)
		}
		m.phase(t, "good", Healthy)
		if s := m.phase(t, "goroutine", BackingOff); s.Error != "worker: panic: boo" {
			t.Errorf("a panic in a goroutine: %+v", s)
		}
		m.phase(t, "fatal", Failed)
		m.phase(t, "done", Done)
		m.phase(t, "after-done", Healthy)
		m.phase(t, "after-fatal", Waiting)
		m.phase(t, "after-none", Waiting)
		want := []string{"role-failing error", "role-failing fatal", "role-failing goroutine", "role-failing panic",
			"role-unprivileged lacking", "role-waiting after-fatal", "role-waiting after-none"}
		if got := conditions(m); !slices.Equal(got, want) {
			t.Errorf("conditions are %q", got)
		}
		if err := m.Restart("fatal"); err != nil {
			t.Error(err)
		}
		if err := m.Restart("none"); err == nil || !strings.Contains(err.Error(), "good") {
			t.Errorf("a role that is not there: %v", err)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
		if err := m.Restart("good"); err == nil {
			t.Error("restarted while nothing runs")
		}
	})
}

type unprivileged struct{ testRole }

func (*unprivileged) Lacks() error { return errors.New("CAP_NET_ADMIN: run as root") }

func TestDrain(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{3 * time.Second: 3 * time.Second, time.Hour: 5 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			var log events
			r := &drained{testRole{name: "a", log: &log}, took}
			_, stop := start(t, Config{Assigned: Static("a"), Roles: []Role{r}})
			wait(time.Second)
			begun := time.Now()
			if err := stop(); err != nil {
				t.Error(err)
			}
			if got := log.take(); got != "+a drains -a" || time.Since(begun).Round(100*time.Millisecond) != want {
				t.Errorf("%s after %v, want %v", got, time.Since(begun), want)
			}
		})
	}
}

type drained struct {
	testRole
	takes time.Duration
}

func (d *drained) Drain(ctx context.Context) error {
	d.log.add("drains")
	select {
	case <-time.After(d.takes):
	case <-ctx.Done():
	}
	return ctx.Err()
}

func TestNewRefuses(t *testing.T) {
	role := func(name string, needs ...string) Role { return &testRole{name: name, needs: needs} }
	for want, cfg := range map[string]Config{
		"Assigned is missing":               {},
		"a: there are two of that name":     {Roles: []Role{role("a"), role("a")}},
		"b -> c -> b":                       {Roles: []Role{role("a", "b"), role("b", "c"), role("c", "b")}},
		"a -> a":                            {Roles: []Role{role("a", "a")}},
		`role "A"`:                          {Roles: []Role{role("A")}},
		`role ""`:                           {Roles: []Role{role("")}},
		"number 1 is nil":                   {Roles: []Role{role("a"), nil}},
		"number 0 has no name":              {Services: []part.Part{{Name: "x"}}},
		"x: there are two of that name":     {Roles: []Role{role("x")}, Services: []part.Part{{Name: "x", Run: func(context.Context) error { return nil }}}},
		`StateDir "state": is not absolute`: {StateDir: "state"},
	} {
		if cfg.Assigned == nil && want != "Assigned is missing" {
			cfg.Assigned = Static()
		}
		if _, err := New(cfg); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
}

// Starting, stopping and cancelling at any time leaves nothing behind, and no two runs of a role are ever at a time.
func TestRandomRounds(t *testing.T) {
	var is settable
	var running [6]atomic.Int32
	var roles []Role
	for i := range running {
		name := fmt.Sprintf("r%d", i)
		r := &testRole{name: name, log: new(events), run: func(ctx context.Context, n Node) error {
			if running[i].Add(1) != 1 {
				t.Errorf("%s runs twice", name)
			}
			defer running[i].Add(-1)
			_ = n.Announce(prefixes.Announcement{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i)}), 16)})
			n.Go("beside", func(ctx context.Context) error { <-ctx.Done(); return nil })
			select {
			case <-ctx.Done():
			case <-time.After(time.Duration(rand.IntN(2000)) * time.Microsecond):
				switch rand.IntN(3) {
				case 0:
					panic("boo")
				case 1:
					return errors.New("test")
				}
				<-ctx.Done()
			}
			return nil
		}}
		if i > 0 {
			r.needs = []string{fmt.Sprintf("r%d", rand.IntN(i))}
		}
		roles = append(roles, r)
	}
	mesh := newTestMesh()
	m, err := New(Config{Assigned: &is, Roles: roles, Mesh: mesh, Window: time.Microsecond})
	if err != nil {
		t.Fatal(err)
	}
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	for range rounds {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(3000))*time.Microsecond)
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		for range rand.IntN(5) {
			var names []string
			for i := range running {
				if rand.IntN(3) > 0 {
					names = append(names, fmt.Sprintf("r%d", i))
				}
			}
			is.assign(names...)
			_ = m.Restart(fmt.Sprintf("r%d", rand.IntN(6)))
			time.Sleep(time.Duration(rand.IntN(500)) * time.Microsecond)
		}
		if rand.IntN(2) == 0 {
			cancel()
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		cancel()
		for i := range running {
			if n := running[i].Load(); n != 0 {
				t.Fatalf("r%d runs on", i)
			}
		}
		if got := mesh.announced(); len(got) != 0 {
			t.Fatalf("announced are %v", got)
		}
	}
}

func TestDir(t *testing.T) {
	dir := t.TempDir()
	found := make(chan string, 1)
	r := &testRole{name: "a", log: new(events), run: func(ctx context.Context, n Node) error {
		d, err := n.Dir()
		if err != nil {
			t.Error(err)
		}
		found <- d
		<-ctx.Done()
		return nil
	}}
	m, err := New(Config{Assigned: Static("a"), Roles: []Role{r}, StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	d := <-found
	if i, err := os.Stat(d); err != nil || i.Mode().Perm() != 0o700 || d != filepath.Join(dir, "a") {
		t.Errorf("%s: %v, %v", d, i, err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// What a Run says is not withdrawn by the end of an earlier one, however late that is.
func TestLateEnd(t *testing.T) {
	mesh := newTestMesh()
	m, err := New(Config{Assigned: Static(), Mesh: mesh})
	if err != nil {
		t.Fatal(err)
	}
	said := func(n *node, want int) {
		t.Helper()
		v, _ := n.Published("x")
		if got := mesh.announced(); len(got) != want || v != nil != (want == 1) {
			t.Errorf("announced are %v, published is %v", got, v)
		}
	}
	say := func() *node {
		n := &node{m: m, role: "a"}
		if err := errors.Join(n.Announce(prefixes.Announcement{Prefix: netip.MustParsePrefix("10.1.0.0/16")}), n.Publish("x", 1)); err != nil {
			t.Fatal(err)
		}
		said(n, 1)
		return n
	}
	first := say()
	first.end()
	said(first, 0)
	second := say()
	first.end()
	said(second, 1)
	second.end()
	said(second, 0)
}

// The View is JSON for those who are told of it: in lower case, and with nothing null.
func TestViewJSON(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := New(Config{Assigned: Static()})
		if err != nil {
			t.Fatal(err)
		}
		v, _ := m.Current()
		const none = `{"running":false,"known":false,"generation":0,"assigned":[],"roles":[],"services":[],"conditions":[]}`
		if b, err := json.Marshal(v); err != nil || string(b) != none {
			t.Errorf("%s, %v", b, err)
		}
		fails := &testRole{name: "a", log: new(events), run: func(context.Context, Node) error { return errors.New("test") }}
		m, stop := start(t, Config{Assigned: Static("a"), Roles: []Role{fails}, Restart: part.Options{Initial: time.Hour, Max: time.Hour}})
		wait(time.Second)
		v, _ = m.Current()
		b, err := json.Marshal(v)
		for _, part := range []string{
			`"assigned":["a"]`, `"roles":[{"name":"a","assigned":true,"phase":"backing off","since":"2000-`, `"restarts":0,"error":"test","next":"2000-`,
			`"conditions":[{"kind":"role-failing","subject":"a","since":"2000-`, `"message":"a fails: test; it is tried again"}]`,
		} {
			if !strings.Contains(string(b), part) {
				t.Errorf("no %s in %s, %v", part, b, err)
			}
		}
		var back View
		if err := json.Unmarshal(b, &back); err != nil || back.Roles[0].Error != "test" || len(back.Conditions) != 1 {
			t.Errorf("read again it is %+v, %v", back, err)
		}
		_ = stop()
	})
}
