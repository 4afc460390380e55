package roles

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles/part"
)

// A chain a <- b <- c, where c does not name a: without a, none of them may run on.
func TestEdgeChainStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		var is settable
		role := func(name string, needs ...string) Role { return &testRole{name: name, needs: needs, log: &log} }
		is.assign("a", "b", "c")
		_, stop := start(t, Config{Assigned: &is, Roles: []Role{role("a"), role("b", "a"), role("c", "b")}})
		wait(time.Second)
		log.take()
		is.assign("b", "c")
		wait(time.Hour)
		if got := log.take(); got != "-c -b -a" {
			t.Errorf("a is not assigned any more, for an hour: %q, want %q", got, "-c -b -a")
		}
		_ = stop()
	})
}

// As above, where a fails for good.
func TestEdgeChainFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		a := &testRole{name: "a", log: &log, run: func(context.Context, Node) error { time.Sleep(time.Minute); return part.Fatal(errors.New("test")) }}
		role := func(name string, needs ...string) Role { return &testRole{name: name, needs: needs, log: &log} }
		m, stop := start(t, Config{Assigned: Static("a", "b", "c"), Roles: []Role{a, role("b", "a"), role("c", "b")}})
		wait(time.Hour)
		if got := log.take(); got != "+a +b +c -a -c -b" {
			t.Errorf("a has failed for good: %q", got)
		}
		m.phase(t, "b", Waiting)
		_ = stop()
	})
}

// Run may be run again, if all had ended: also those that were stuck.
func TestEdgeRunAgainAfterStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := &testRole{name: "a", log: new(events), run: func(context.Context, Node) error { <-release; return nil }}
		m, stop := start(t, Config{Assigned: Static("a"), Roles: []Role{r}})
		wait(time.Second)
		if err := stop(); err == nil {
			t.Error("nobody is named")
		}
		close(release)
		wait(time.Hour) // it has ended long ago
		if s := m.phase(t, "a", Stopped); s.Stuck {
			t.Error("it is said to be stuck")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := m.Run(ctx); err != nil {
			t.Error(err)
		}
	})
}

type nilError struct{ cause error }

func (e *nilError) Error() string { return e.cause.Error() }

// A nil pointer as an error, as a Run that returns a *myError has it, is an error of that role alone.
func TestEdgeNilPointerError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &testRole{name: "a", log: new(events), run: func(context.Context, Node) error { var e *nilError; return e }}
		m, err := New(Config{Assigned: Static("a", "good"), Roles: []Role{r, &testRole{name: "good", log: new(events)}}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err = part.Call(func() error { return m.Run(ctx) })
		if _, ok := errors.AsType[*part.PanicError](err); ok {
			t.Error("the Manager panics, and all roles with it, and its lock stays held")
			// Have the roles end, so that the bubble does: nothing else can.
			for _, s := range m.slots {
				_ = m.tree.Remove(s.token)
			}
			t.FailNow()
		}
	})
}

// pickPanics is a FromMesh whose pick is wrong once.
func TestEdgeAssignedPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int32
		a := FromMesh(newTestMesh(), func(view.Self) ([]string, bool) {
			if calls.Add(1) == 2 {
				panic("boo")
			}
			return []string{"good"}, true
		})
		var running atomic.Int32
		good := &testRole{name: "good", log: new(events), run: func(ctx context.Context, _ Node) error {
			running.Add(1)
			defer running.Add(-1)
			<-ctx.Done()
			return nil
		}}
		m, err := New(Config{Assigned: a, Roles: []Role{good}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err = part.Call(func() error { return m.Run(ctx) })
		if err != nil {
			t.Errorf("the Manager: %v", err)
		}
		wait(time.Hour)
		if running.Load() != 0 {
			t.Error("Run has ended long ago, and a role runs on")
			for _, s := range m.slots {
				_ = m.tree.Remove(s.token)
			}
		}
		if err := m.Run(ctx); errors.Is(err, ErrRunning) {
			t.Errorf("Run again: %v", err)
		}
	})
}

type runAssigned struct {
	settable
	run func(context.Context) error
}

func (a *runAssigned) Run(ctx context.Context) error { return a.run(ctx) }

// An Assigned whose Run ignores its context, as one that reads a file of a dead NFS server, does not keep Run.
func TestEdgeAssignedIgnoresContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		a := &runAssigned{run: func(context.Context) error { <-release; return nil }}
		a.assign("a")
		m, err := New(Config{Assigned: a, Roles: []Role{&testRole{name: "a", log: new(events)}}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		wait(time.Second)
		cancel()
		select {
		case err := <-ended:
			t.Log(err)
		case <-time.After(time.Hour):
			v, _ := m.Current()
			t.Errorf("told to end an hour ago, and does not; conditions %q, running %v", conditions(m), v.Running)
		}
		close(release)
		synctest.Wait()
	})
}

// An Assigned whose Run fails is seen in the View.
func TestEdgeAssignedFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &runAssigned{run: func(context.Context) error { return errors.New("no access to the registry") }}
		a.assign("a")
		m, stop := start(t, Config{Assigned: a, Roles: []Role{&testRole{name: "a", log: new(events)}}})
		wait(time.Hour)
		if got := conditions(m); len(got) == 0 {
			t.Error("it has failed for an hour, and no condition says so")
		}
		_ = stop()
	})
}

// What a role announced is withdrawn when its Run has returned, also if what it started does not end.
func TestEdgeWithdrawnDespiteGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mesh := newTestMesh()
		release := make(chan struct{})
		r := &testRole{name: "a", log: new(events), run: func(ctx context.Context, n Node) error {
			_ = n.Announce(prefixes.Announcement{Prefix: netip.MustParsePrefix("10.1.0.0/16")})
			n.Go("deaf", func(context.Context) error { <-release; return nil })
			return errors.New("the server is gone")
		}}
		m, stop := start(t, Config{Assigned: Static("a"), Roles: []Role{r}, Mesh: mesh})
		wait(time.Hour)
		if got := mesh.announced(); len(got) != 0 {
			t.Errorf("Run failed an hour ago, and announced is %v", got)
		}
		v, _ := m.Current()
		if s, _ := v.Role("a"); s.Phase == Healthy || len(v.Conditions) == 0 {
			t.Errorf("Run failed an hour ago, and the role is %q, conditions %q", s.Phase, conditions(m))
		}
		close(release)
		_ = stop()
	})
}

// A goroutine of a role that fails, while its Run does not care, is seen.
func TestEdgeGoroutineFailsRunDeaf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := &testRole{name: "a", log: new(events), run: func(_ context.Context, n Node) error {
			n.Go("worker", func(context.Context) error { panic("boo") })
			<-release
			return nil
		}}
		m, stop := start(t, Config{Assigned: Static("a"), Roles: []Role{r}})
		wait(time.Hour)
		v, _ := m.Current()
		if s, _ := v.Role("a"); s.Phase == Healthy || len(v.Conditions) == 0 {
			t.Errorf("a goroutine of it panicked an hour ago, and the role is %q, conditions %q", s.Phase, conditions(m))
		}
		close(release)
		_ = stop()
	})
}

// A Restart that comes when the role has just failed for good is not lost.
func TestEdgeRestartNotLost(t *testing.T) {
	var runs atomic.Int32
	release := make(chan struct{})
	r := &testRole{name: "a", log: new(events), run: func(ctx context.Context, _ Node) error {
		if runs.Add(1) > 1 {
			<-ctx.Done()
			return nil
		}
		<-release
		return part.Fatal(errors.New("test"))
	}}
	m, err := New(Config{Assigned: Static("a"), Roles: []Role{r}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended, restarted := make(chan error, 1), make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	for runs.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond)
	m.mu.Lock() // Restart is first in the queue for it, the loop second
	go func() { restarted <- m.Restart("a") }()
	time.Sleep(20 * time.Millisecond)
	close(release)
	<-m.slots[0].ended
	time.Sleep(20 * time.Millisecond)
	m.mu.Unlock()
	if err := <-restarted; err != nil {
		t.Error(err)
	}
	for begun := time.Now(); runs.Load() < 2; time.Sleep(time.Millisecond) {
		if time.Since(begun) > 3*time.Second {
			v, _ := m.Current()
			t.Errorf("Restart returned nil, and the role is not restarted: %+v", v.Roles)
			break
		}
	}
	cancel()
	<-ended
}

// A service can be restarted, or not; but not because it is not assigned.
func TestEdgeRestartService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		service := part.Part{Name: "mesh", Run: (&testRole{name: "mesh", log: new(events)}).service}
		var is settable // unknown: the service waits for 2 s
		m, stop := start(t, Config{Assigned: &is, Services: []part.Part{service}})
		wait(time.Second)
		if err := m.Restart("mesh"); err != nil {
			t.Errorf("a service that waits to start: %v", err)
		}
		_ = stop()
	})
}

type drainedBy struct {
	testRole
	drain func(context.Context) error
}

func (d *drainedBy) Drain(ctx context.Context) error { return d.drain(ctx) }

// A role whose Run returns because it was drained has stopped: it is not begun anew while it is to be stopped.
func TestEdgeDrainEndsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var is settable
		var runs atomic.Int32
		drained := make(chan struct{})
		var out bytes.Buffer
		r := &drainedBy{testRole{name: "a", log: new(events), run: func(ctx context.Context, _ Node) error {
			runs.Add(1)
			select {
			case <-ctx.Done():
			case <-drained: // closed for all runs
			}
			return nil
		}}, func(ctx context.Context) error {
			close(drained)                      // no new ones
			time.Sleep(3000 * time.Millisecond) // those that there are
			return nil
		}}
		is.assign("a")
		_, stop := start(t, Config{Assigned: &is, Roles: []Role{r}, Logger: slog.New(slog.NewTextHandler(&out, nil))})
		wait(time.Minute)
		is.assign()
		wait(time.Minute)
		_ = stop()
		if n := runs.Load(); n != 1 || strings.Contains(out.String(), "is tried again") {
			t.Errorf("while it was stopped, Run was called %d times more:\n%s", n-1, out.String())
		}
	})
}

// Drain is called while Run runs, and not while it backs off.
func TestEdgeDrainWithoutRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var is settable
		r := &drainedBy{testRole{name: "a", log: new(events), run: func(context.Context, Node) error { return errors.New("test") }}, func(context.Context) error {
			t.Error("Drain is called, and Run does not run")
			return nil
		}}
		is.assign("a")
		m, stop := start(t, Config{Assigned: &is, Roles: []Role{r}, Restart: part.Options{Initial: time.Hour, Max: time.Hour}})
		wait(time.Second)
		m.phase(t, "a", BackingOff)
		is.assign()
		wait(time.Minute)
		_ = stop()
	})
}

// For -race: what waits for Drain reads when the slot has ended, which the next start writes.
func TestEdgeDrainRace(t *testing.T) {
	var is settable
	end := make(chan struct{})
	var runs atomic.Int32
	r := &drainedBy{testRole{name: "a", log: new(events), run: func(ctx context.Context, _ Node) error {
		if runs.Add(1) > 1 {
			<-ctx.Done()
			return nil
		}
		<-end
		return part.ErrDone
	}}, func(ctx context.Context) error { time.Sleep(100 * time.Millisecond); return nil }}
	is.assign("a")
	m, err := New(Config{Assigned: &is, Roles: []Role{r}, Window: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	time.Sleep(20 * time.Millisecond)
	is.assign()
	time.Sleep(20 * time.Millisecond) // it drains
	close(end)
	is.assign("a")
	time.Sleep(50 * time.Millisecond)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

type closedAssigned struct{ calls atomic.Int64 }

func (c *closedAssigned) Current() ([]string, bool, <-chan struct{}) {
	c.calls.Add(1)
	closed := make(chan struct{})
	close(closed)
	return []string{"a"}, true, closed
}

// An Assigned whose channel is always closed does not make the Manager run hot.
func TestEdgeHotAssigned(t *testing.T) {
	a := new(closedAssigned)
	m, err := New(Config{Assigned: a, Roles: []Role{&testRole{name: "a", log: new(events)}}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := m.Run(ctx); err != nil {
		t.Error(err)
	}
	if n := a.calls.Load(); n > 200 {
		t.Errorf("looked %d times in 200 ms", n)
	}
}

// A role that says how it is whenever the View changes does not make the Manager run hot.
func TestEdgeHotView(t *testing.T) {
	var m *Manager
	var looks atomic.Int64
	r := &testRole{name: "a", log: new(events), run: func(ctx context.Context, n Node) error {
		for ctx.Err() == nil {
			_, stale := m.Current()
			looks.Add(1)
			n.Report() // nothing is wrong, as before
			select {
			case <-stale:
			case <-ctx.Done():
			}
		}
		return nil
	}}
	m, err := New(Config{Assigned: Static("a"), Roles: []Role{r}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := m.Run(ctx); err != nil {
		t.Error(err)
	}
	if n := looks.Load(); n > 200 {
		t.Errorf("nothing changed, and the View did %d times in 200 ms", n)
	}
}

// A role that is stuck in Announce is named, as any other that is stuck.
func TestEdgeStuckInAnnounce(t *testing.T) {
	b := blockedTable{newTestMesh(), make(chan struct{})}
	r := &testRole{name: "a", log: new(events), run: func(ctx context.Context, n Node) error {
		return n.Announce(prefixes.Announcement{Prefix: netip.MustParsePrefix("10.1.0.0/16")})
	}}
	m, err := New(Config{Assigned: Static("a"), Roles: []Role{r}, Mesh: b, Patience: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	time.Sleep(50 * time.Millisecond)
	cancel()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("it is not named")
		}
		close(b.blocked)
		return
	case <-time.After(2 * time.Second):
		t.Error("Run does not return though Patience is 50 ms: the Manager waits in stick for the node's lock, and holds its own")
	}
	close(b.blocked)
	<-ended
}

type blockedTable struct {
	*testMesh
	blocked chan struct{}
}

func (b blockedTable) Prefixes() prefixes.Prefixes { return blockedPrefixes{b.table, b.blocked} }

type blockedPrefixes struct {
	*prefixes.Table
	blocked chan struct{}
}

func (b blockedPrefixes) Announce(s string, a ...prefixes.Announcement) error {
	<-b.blocked
	return b.Table.Announce(s, a...)
}

// A second Run begins with what is assigned then.
func TestEdgeSecondRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log events
		var is settable
		is.assign("a")
		m, stop := start(t, Config{Assigned: &is, Roles: []Role{&testRole{name: "a", log: &log}, &testRole{name: "b", log: &log}}})
		wait(time.Second)
		_ = stop()
		log.take()
		is.assign("b")
		stop = rerun(t, m)
		wait(time.Second)
		if got := log.take(); got != "+b" {
			t.Errorf("only b is assigned when Run begins: %s", got)
		}
		_ = stop()
	})
}

// The generation of a role that failed, or waits, is not that of an assignment that did not concern it.
func TestEdgeGeneration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var is settable
		a := &testRole{name: "a", log: new(events), run: func(context.Context, Node) error { return part.Fatal(errors.New("test")) }}
		is.assign("a")
		m, stop := start(t, Config{Assigned: &is, Roles: []Role{a, &testRole{name: "b", log: new(events)}}})
		wait(time.Second)
		is.assign("a", "b")
		wait(time.Second)
		if s := m.phase(t, "a", Failed); s.Generation != 1 {
			t.Errorf("a was started by generation 1, and is said to be of %d", s.Generation)
		}
		_ = stop()
	})
}

// No goroutine of suture outlives Run on a busy machine.
func TestEdgeSutureLeak(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	m, err := New(Config{Assigned: Static("a", "b", "c"), Roles: []Role{&testRole{name: "a", log: new(events)}, &testRole{name: "b", log: new(events)}, &testRole{name: "c", log: new(events)}}})
	if err != nil {
		t.Fatal(err)
	}
	var over atomic.Bool
	defer over.Store(true)
	for range 3 {
		go func() {
			for !over.Load() {
			}
		}()
	}
	for range 10 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := m.Run(ctx); err != nil {
			t.Error(err)
		}
		cancel()
	}
	over.Store(true)
	time.Sleep(200 * time.Millisecond)
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	if n := strings.Count(string(buf), "removeService"); n > 0 {
		t.Errorf("%d goroutines of removeService are left", n)
	}
}

type slowLacks struct {
	testRole
	lacks func() error
}

func (r *slowLacks) Lacks() error { return r.lacks() }

// A role that is not assigned any more when Lacks returns is not run.
func TestEdgeRunAfterLacks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mesh := newTestMesh()
		var is settable
		release := make(chan struct{})
		r := &slowLacks{testRole{name: "a", log: new(events), run: func(ctx context.Context, n Node) error {
			err := n.Announce(prefixes.Announcement{Prefix: netip.MustParsePrefix("10.1.0.0/16")})
			t.Errorf("Run is called, with a context that says %v, and announces with %v", ctx.Err(), err)
			return nil
		}}, func() error { <-release; return nil }}
		is.assign("a")
		m, stop := start(t, Config{Assigned: &is, Roles: []Role{r}, Mesh: mesh})
		wait(time.Second)
		is.assign()
		wait(time.Minute)
		if !has(m, RoleStuck, "a") {
			t.Errorf("conditions are %q", conditions(m))
		}
		close(release)
		wait(time.Second)
		_ = stop()
	})
}

// A Drain that ignores its context is not called a second time while the first has not returned, and Run does not
// return nil as if all had ended.
func TestEdgeDeafDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var is settable
		release := make(chan struct{})
		var draining atomic.Int32
		r := &drainedBy{testRole{name: "a", log: new(events)}, func(context.Context) error {
			if n := draining.Add(1); n > 1 {
				t.Errorf("%d Drains at a time", n)
			}
			defer draining.Add(-1)
			<-release
			return nil
		}}
		is.assign("a")
		_, stop := start(t, Config{Assigned: &is, Roles: []Role{r}})
		wait(time.Second)
		is.assign()
		wait(time.Minute)
		is.assign("a")
		wait(time.Minute)
		if err := stop(); err == nil {
			t.Error("Run returned nil, while Drain runs on")
		}
		close(release)
		synctest.Wait()
	})
}

// A role whose error panics when it is looked into backs off, and is seen, as any other.
func TestEdgeErrorPanicsInManager(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs atomic.Int32
		r := &testRole{name: "a", log: new(events), run: func(context.Context, Node) error {
			runs.Add(1)
			var e *nilUnwrap
			return e
		}}
		m, stop := start(t, Config{Assigned: Static("a"), Roles: []Role{r}})
		wait(time.Hour)
		if n := runs.Load(); n > 130 || !has(m, RoleFailing, "a") {
			v, _ := m.Current()
			t.Errorf("in an hour it was run %d times, conditions %q, %+v", n, conditions(m), v.Roles)
		}
		_ = stop()
	})
}

type nilUnwrap struct{ cause error }

func (e *nilUnwrap) Error() string { return "nil" }
func (e *nilUnwrap) Unwrap() error { return e.cause }

// A role that fails while it waits for its dependents to stop, and is not assigned any more, is not begun anew.
func TestEdgeFailsWhileDependentsStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var is settable
		var runs atomic.Int32
		fail := make(chan struct{})
		a := &testRole{name: "a", log: new(events), run: func(ctx context.Context, _ Node) error {
			runs.Add(1)
			select {
			case <-ctx.Done():
				return nil
			case <-fail:
				return errors.New("test")
			}
		}}
		b := &testRole{name: "b", needs: []string{"a"}, log: new(events), run: func(ctx context.Context, _ Node) error {
			<-ctx.Done()
			time.Sleep(8 * time.Second)
			return nil
		}}
		is.assign("a", "b")
		_, stop := start(t, Config{Assigned: &is, Roles: []Role{a, b}})
		wait(time.Minute)
		is.assign()
		wait(time.Second)
		close(fail)
		wait(time.Minute)
		if n := runs.Load(); n != 1 {
			t.Errorf("a is not assigned any more, and was begun anew %d times", n-1)
		}
		_ = stop()
	})
}
