package roles

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/thejerf/suture/v4"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/mesh/watch"
	"github.com/warren-mesh/warren/roles/part"
)

// Config is what a Manager is told. Assigned is needed; every other zero field is a default.
type Config struct {
	// Roles are what this program can do, of which the assigned ones run.
	Roles []Role
	// Assigned says which roles the node has. One with a Run(context.Context) error is run by the Manager, and one with
	// Conditions() []view.Condition has its conditions in the View.
	Assigned Assigned
	// Services run whatever the roles are: the mesh, for one (package roles/meshservice). They are started once the
	// assigned roles are, or after 2 s, and stopped before them: so the node's record neither lacks what the roles
	// announce when the program starts, nor loses it when the program stops, and peers go on sending. One that fails
	// for good ends the Manager.
	Services []part.Part
	// Mesh is where roles announce, and what they see of the mesh. nil: there is none.
	Mesh Mesh
	// StateDir is a folder in which each role may have one of its own. Empty: they have none.
	StateDir string
	// Patience is how long a role may take to end, from when it is told to, before it is named and no longer waited for.
	// 0: 10 s.
	Patience time.Duration
	// Window is how long assignments are gathered before another one is taken up. The first is taken up at once.
	// 0: 200 ms.
	Window time.Duration
	// Restart is how roles and services restart. Its Logger and Patience are the Manager's.
	Restart part.Options
	// Logger is told what an operator can act on. nil: nobody.
	Logger *slog.Logger
}

// settle is for how long services wait for roles to start.
const settle = 2 * time.Second

// ErrConfig is wrapped by the errors of New.
var ErrConfig = errors.New("bad configuration")

// ErrRunning is what a second Run at a time returns.
var ErrRunning = errors.New("already running")

// Manager runs the roles that a node has. Make one by New.
type Manager struct {
	cfg     Config
	slots   []*slot // dependencies come before those that depend on them; services are last
	view    watch.Value[View]
	wakes   chan struct{} // capacity 1
	values  values
	reports reports

	mu         sync.Mutex // guards what follows
	running    bool
	stopping   bool
	tree       *suture.Supervisor
	begun      time.Time
	assigned   map[string]bool
	known      bool
	generation uint64
	trouble    error     // of Assigned
	differs    time.Time // since when the assignment is another one; zero: it is not
	fatal      error     // of a service
	since      map[string]view.Condition
}

// slot is a role or a service.
type slot struct {
	name    string
	role    Role // nil: a service
	service part.Part
	needs   []*slot
	missing []string // roles that it needs and that the program does not have
	needed  []*slot  // by whom
	log     *slog.Logger
	runner  *part.Runner
	node    atomic.Pointer[node]

	// Of the Manager, under mu:
	running    bool // served by the tree
	stopping   bool
	over       bool // by itself: not to be started again
	token      suture.ServiceToken
	ended      chan struct{}
	deadline   time.Time // of what is stopping
	stuck      bool
	leaving    bool          // it is to be stopped, if not now
	drained    chan struct{} // closed once Drain has returned; nil: it was not called
	generation uint64
	waiting    []string
	idleSince  time.Time
	idle       Phase
}

// nameRE is that of a role: a DNS label (RFC 1123) that begins with a letter.
var nameRE = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$`)

// New checks cfg and returns a Manager that does nothing yet. Its error names what is wrong, and wraps ErrConfig.
func New(cfg Config) (*Manager, error) {
	m := &Manager{cfg: cfg, wakes: make(chan struct{}, 1), assigned: make(map[string]bool), since: make(map[string]view.Condition)}
	c := &m.cfg
	if c.Patience <= 0 {
		c.Patience = 10 * time.Second
	}
	if c.Window <= 0 {
		c.Window = 200 * time.Millisecond
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	c.Restart.Patience = c.Patience
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if c.Assigned == nil {
		bad("Assigned is missing; see Static")
	}
	if c.StateDir != "" && !filepath.IsAbs(c.StateDir) {
		bad("StateDir %q: is not absolute", c.StateDir)
	}
	byName := make(map[string]*slot)
	add := func(s *slot) {
		if byName[s.name] != nil {
			bad("%s: there are two of that name", s.name)
			return
		}
		byName[s.name] = s
		s.log = c.Logger.With("role", s.name)
		s.idle, s.idleSince = Stopped, time.Now()
		o := c.Restart
		o.Logger = s.log
		p := s.service
		if s.role != nil {
			p = part.Part{Name: s.name, Signals: true, Run: func(ctx context.Context) error { return m.run(ctx, s) }}
			if r, ok := s.role.(Prober); ok {
				p.Probe = r.Probe
			}
		}
		s.runner = part.New(s.name, o, p)
		m.slots = append(m.slots, s)
	}
	for i, r := range c.Roles {
		switch {
		case r == nil:
			bad("Roles: number %d is nil", i)
		case !nameRE.MatchString(r.Name()):
			bad("role %q: a name is of lower-case letters, digits and \"-\", at most 63, and begins with a letter", r.Name())
		default:
			add(&slot{name: r.Name(), role: r})
		}
	}
	for _, s := range m.slots {
		d, ok := s.role.(Depender)
		if !ok {
			continue
		}
		for _, name := range d.DependsOn() {
			if to := byName[name]; to == nil {
				s.missing = append(s.missing, name)
			} else if !slices.Contains(s.needs, to) {
				s.needs = append(s.needs, to)
				to.needed = append(to.needed, s)
			}
		}
	}
	sorted, cycle := sortSlots(m.slots)
	if cycle != nil {
		bad("roles depend on each other in a circle: %s", strings.Join(cycle, " -> "))
	}
	m.slots = sorted
	for i, p := range c.Services {
		if p.Run == nil || p.Name == "" {
			bad("Services: number %d has no name or no Run", i)
			continue
		}
		add(&slot{name: p.Name, service: p})
	}
	if len(errs) > 0 {
		return nil, fmt.Errorf("%w: %w", ErrConfig, errors.Join(errs...))
	}
	m.look(time.Now(), nil)
	return m, nil
}

// sortSlots puts those that others depend on before them, and else keeps the order. cycle: that is not possible.
func sortSlots(all []*slot) (sorted []*slot, cycle []string) {
	const visiting, visited = 1, 2
	state := make(map[*slot]int)
	var path []*slot
	var visit func(*slot)
	visit = func(s *slot) {
		switch {
		case cycle != nil || state[s] == visited:
			return
		case state[s] == visiting:
			for _, p := range path[slices.Index(path, s):] {
				cycle = append(cycle, p.name)
			}
			cycle = append(cycle, s.name)
			return
		}
		state[s] = visiting
		path = append(path, s)
		for _, n := range s.needs {
			visit(n)
		}
		path = path[:len(path)-1]
		state[s] = visited
		sorted = append(sorted, s)
	}
	for _, s := range all {
		visit(s)
	}
	return sorted, cycle
}

// Current returns the newest View, and a channel that closes when there is a newer one.
func (m *Manager) Current() (View, <-chan struct{}) {
	v, _, stale := m.view.Get()
	return v, stale
}

// wake has the loop look again.
func (m *Manager) wake() {
	select {
	case m.wakes <- struct{}{}:
	default:
	}
}

// Restart has a role or a service end and begin anew, also one that is done or has failed for good. It does not wait.
func (m *Manager) Restart(name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	i := slices.IndexFunc(m.slots, func(s *slot) bool { return s.name == name })
	switch {
	case i < 0:
		return fmt.Errorf("role %q: there is none; there are %s", name, strings.Join(slices.Collect(m.names()), ", "))
	case !m.running:
		return errors.New("no role runs")
	}
	s := m.slots[i]
	if s.running && s.hasEnded() {
		m.over(s)
	}
	switch {
	case s.running && !s.stopping:
		s.runner.Restart()
	case s.over:
		s.over = false
		m.wake()
	case !m.wants(s):
		return fmt.Errorf("role %s: is not assigned", name)
	}
	return nil
}

func (m *Manager) names() func(func(string) bool) {
	return func(yield func(string) bool) {
		for _, s := range m.slots {
			if !yield(s.name) {
				return
			}
		}
	}
}

// Run runs the assigned roles until ctx ends, and returns nil once all have ended, or an error that names those that
// have not after Config.Patience. Its other errors are those of services that failed for good. It may be run again, if
// all had ended.
func (m *Manager) Run(ctx context.Context) error {
	m.mu.Lock()
	if m.running {
		m.mu.Unlock()
		return ErrRunning
	}
	for _, s := range m.slots {
		if s.running && s.hasEnded() {
			m.over(s)
		}
		if s.running {
			m.mu.Unlock()
			return fmt.Errorf("%s: has not ended since the last Run", s.name)
		}
		s.over = false
	}
	m.running, m.stopping, m.fatal, m.begun = true, false, nil, time.Now()
	m.known, m.assigned, m.differs, m.trouble = false, make(map[string]bool), time.Time{}, nil
	m.tree = suture.New("roles", suture.Spec{
		EventHook: func(e suture.Event) { m.cfg.Logger.Debug("supervision", "event", e.String()) },
		Timeout:   m.cfg.Patience,
	})
	m.mu.Unlock()
	treeCtx, end := context.WithCancel(context.Background())
	treeEnds := m.tree.ServeBackground(treeCtx)
	beside := m.runAssigned(treeCtx)
	err := m.loop(ctx)
	end()
	<-treeEnds
	late := time.NewTimer(m.cfg.Patience)
	defer late.Stop()
	select {
	case <-beside:
	case <-late.C:
		err = errors.Join(err, fmt.Errorf("told to end, and still running after %v: what says which roles the node has", m.cfg.Patience))
	}
	m.mu.Lock()
	m.running = false
	m.look(time.Now(), nil)
	m.mu.Unlock()
	return err
}

// runAssigned runs what says which roles the node has, if that has to run, until ctx ends. The channel closes when it has
// ended.
func (m *Manager) runAssigned(ctx context.Context) <-chan struct{} {
	ended := make(chan struct{})
	r, ok := m.cfg.Assigned.(interface{ Run(context.Context) error })
	if !ok {
		close(ended)
		return ended
	}
	o := m.cfg.Restart
	o.Logger = m.cfg.Logger
	runner := part.New("the assignment", o, part.Part{Name: "the assignment", Run: r.Run})
	go func() {
		defer close(ended)
		_ = runner.Serve(ctx)
	}()
	go func() {
		for {
			s, stale := runner.State()
			m.mu.Lock()
			if m.trouble = nil; s.Phase == part.BackingOff || s.Phase == part.Failed {
				m.trouble = s.Err
			}
			m.mu.Unlock()
			m.wake()
			select {
			case <-stale:
			case <-ended:
				return
			}
		}
	}()
	return ended
}

// asked is what Assigned says.
type asked struct {
	names      []string
	known      bool
	changed    <-chan struct{}
	conditions []view.Condition
}

// ask asks Assigned, which is not ours.
func (m *Manager) ask() (a asked) {
	err := part.Call(func() error {
		a.names, a.known, a.changed = m.cfg.Assigned.Current()
		if c, ok := m.cfg.Assigned.(interface{ Conditions() []view.Condition }); ok {
			a.conditions = c.Conditions()
		}
		return nil
	})
	if err != nil {
		m.cfg.Logger.Error("what says which roles the node has cannot be asked", "err", err)
		return asked{conditions: []view.Condition{{Kind: AssignmentRefused, Message: fmt.Sprintf("what says which roles the node has cannot be asked: %v", err)}}}
	}
	return a
}

// pace is how long there is between two looks at least, whatever asks for them.
const pace = 2 * time.Millisecond

// loop decides, again and again, until ctx has ended and all else, too.
func (m *Manager) loop(ctx context.Context) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	done := ctx.Done()
	for {
		is := m.ask()
		m.mu.Lock()
		if ctx.Err() != nil {
			m.stopping = true
		}
		now := time.Now()
		next := m.step(now, is.names, is.known)
		m.look(now, is.conditions)
		var left, stuck []string
		for _, s := range m.slots {
			if s.running && !s.stuck {
				left = append(left, s.name)
			} else if s.running {
				stuck = append(stuck, s.name)
			}
		}
		over, fatal := m.stopping && len(left) == 0, m.fatal
		m.mu.Unlock()
		if over {
			if len(stuck) > 0 {
				fatal = errors.Join(fatal, fmt.Errorf("told to end, and still running after %v: %s", m.cfg.Patience, strings.Join(stuck, ", ")))
			}
			return fatal
		}
		if next.IsZero() || next.After(now.Add(time.Minute)) {
			next = now.Add(time.Minute) // whoever does not say that something changed, or could not be asked
		}
		timer.Reset(next.Sub(now))
		select {
		case <-is.changed:
		case <-m.wakes:
		case <-timer.C:
		case <-done:
			done = nil
		}
		time.Sleep(pace)
	}
}

// step starts and stops what is to be, and returns when to look again at the latest; zero: when something happens.
func (m *Manager) step(now time.Time, names []string, known bool) (next time.Time) {
	earlier := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	m.takeUp(now, names, known, earlier)
	for _, s := range m.slots {
		switch {
		case !s.running:
		case s.hasEnded():
			m.over(s)
		case s.stopping && !s.stuck && !now.Before(s.deadline):
			m.stick(s)
		case s.stopping && !s.stuck:
			earlier(s.deadline)
		}
	}
	for _, s := range m.slots { // those that others need first
		if leaving := !m.keeps(s); s.leaving != leaving {
			s.leaving = leaving
			s.runner.Last(leaving)
		}
	}
	for _, s := range slices.Backward(m.slots) {
		if s.running && !s.stopping && s.leaving && !slices.ContainsFunc(s.needed, inTheWay) && !m.servicesFirst(s) {
			m.stop(s, now)
			earlier(s.deadline)
		}
	}
	for _, s := range m.slots {
		if !m.wants(s) || m.stopping {
			s.over, s.waiting = false, nil
			if m.stopping {
				m.rest(s, Stopped, now)
			} else {
				m.rest(s, NotAssigned, now)
			}
			continue
		}
		s.waiting = m.waits(s, now, earlier)
		if !s.running && !s.over && len(s.waiting) == 0 {
			m.start(s)
		} else {
			m.rest(s, Waiting, now)
		}
	}
	return next
}

// takeUp takes up another assignment, once it has been another one for a while.
func (m *Manager) takeUp(now time.Time, names []string, known bool, earlier func(time.Time)) {
	if !known {
		return
	}
	to := make(map[string]bool)
	for _, n := range names {
		to[n] = true
	}
	if m.known && maps.Equal(to, m.assigned) {
		m.differs = time.Time{}
		return
	}
	if m.known && m.differs.IsZero() {
		m.differs = now
	}
	if due := m.differs.Add(m.cfg.Window); m.known && now.Before(due) {
		earlier(due)
		return
	}
	was := m.assigned
	m.assigned, m.known, m.differs = to, true, time.Time{}
	m.generation++
	for _, s := range m.slots {
		if s.role != nil && to[s.name] != was[s.name] {
			s.generation = m.generation
		}
	}
	m.cfg.Logger.Info("the node's roles", "roles", slices.Sorted(maps.Keys(to)), "generation", m.generation)
}

// wants reports whether a role is assigned. Services always are.
func (m *Manager) wants(s *slot) bool { return s.role == nil || m.assigned[s.name] }

// keeps reports whether what runs is to go on: it is assigned, and all that it needs goes on, too, or is done. That is
// known of those already.
func (m *Manager) keeps(s *slot) bool {
	return !m.stopping && m.wants(s) && !slices.ContainsFunc(s.needs, func(n *slot) bool { return n.leaving || n.failed() })
}

// hasEnded reports whether what was started has ended, and what was to be drained before, too.
func (s *slot) hasEnded() bool {
	for _, c := range []chan struct{}{s.ended, s.drained} {
		if c == nil {
			continue
		}
		select {
		case <-c:
		default:
			return false
		}
	}
	return true
}

// phase is what the runner does, or did last.
func (s *slot) phase() part.Phase {
	state, _ := s.runner.State()
	return state.Phase
}

// failed reports whether s has ended by itself, and not because it is done, which those who need it can rely on.
func (s *slot) failed() bool { return s.over && s.phase() != part.Done }

// inTheWay reports whether what s needs cannot be stopped yet. What is stuck holds up nobody.
func inTheWay(s *slot) bool { return s.running && !s.stuck }

// servicesFirst reports whether s is to be stopped after services that still run.
func (m *Manager) servicesFirst(s *slot) bool {
	return m.stopping && s.role != nil && slices.ContainsFunc(m.slots, func(o *slot) bool { return o.role == nil && inTheWay(o) })
}

// waits is what keeps an assigned role from being started.
func (m *Manager) waits(s *slot, now time.Time, earlier func(time.Time)) (what []string) {
	for _, name := range s.missing {
		what = append(what, "role "+name+", which this program does not have")
	}
	for _, n := range s.needs {
		switch {
		case !m.wants(n):
			what = append(what, "role "+n.name+", which is not assigned")
		case n.failed():
			what = append(what, "role "+n.name+", which has failed")
		case !n.over && (!n.running || n.stopping || n.phase() != part.Healthy):
			what = append(what, "role "+n.name+", which is not healthy")
		}
	}
	if s.running {
		if s.stopping && len(what) == 0 {
			what = append(what, "its last run, which has not ended")
		}
		return what
	}
	if s.role == nil && !m.rolesStarted() {
		if due := m.begun.Add(settle); now.Before(due) {
			earlier(due)
			what = append(what, "the roles to start")
		}
	}
	return what
}

// rolesStarted reports whether no assigned role is still about to start.
func (m *Manager) rolesStarted() bool {
	if !m.known {
		return false
	}
	for _, s := range m.slots {
		if s.role == nil || !m.wants(s) || s.over {
			continue
		}
		state, _ := s.runner.State()
		begins := state.Phase == part.Starting || state.Phase == part.Stopped
		if s.running && begins && state.Err == nil || !s.running && len(s.missing) == 0 && len(s.waiting) == 0 {
			return false
		}
	}
	return true
}

// rest notes why a slot does not run.
func (m *Manager) rest(s *slot, p Phase, now time.Time) {
	if !s.running && s.idle != p {
		s.idle, s.idleSince = p, now
	}
}

// service is a slot as the tree sees it.
type service struct {
	s    *slot
	done func()
}

func (v *service) String() string { return v.s.name }

// Serve runs the slot until it is stopped, or over by itself.
func (v *service) Serve(ctx context.Context) error {
	defer v.done()
	_ = v.s.runner.Serve(ctx)
	return suture.ErrDoNotRestart
}

// start starts a slot. It must not run.
func (m *Manager) start(s *slot) {
	s.running, s.stopping, s.stuck, s.idle, s.drained = true, false, false, "", nil
	ended := make(chan struct{})
	s.ended = ended
	s.token = m.tree.Add(&service{s, func() {
		close(ended)
		m.wake()
	}})
	go func() { // until it has ended, what it does is of interest to others
		for {
			_, stale := s.runner.State()
			m.wake() // for what was before
			select {
			case <-stale:
			case <-ended:
				m.after(s)
				return
			}
		}
	}()
}

// after notes that a slot has ended that was given up, when no loop does.
func (m *Manager) after(s *slot) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.running && s.running && s.hasEnded() {
		m.over(s)
		m.rest(s, Stopped, time.Now())
		m.look(time.Now(), nil)
	}
}

// stop has a slot end, in its own time.
func (m *Manager) stop(s *slot, now time.Time) {
	s.stopping, s.deadline, s.generation = true, now.Add(m.cfg.Patience), m.generation
	tree, token, ended := m.tree, s.token, s.ended
	d, drains := s.role.(Drainer)
	if p := s.phase(); !drains || p != part.Healthy && p != part.Starting { // then its Run does not run
		_ = tree.Remove(token)
		return
	}
	drained := make(chan struct{})
	s.drained = drained
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), m.cfg.Patience/2)
		defer cancel()
		go func() {
			defer m.after(s)
			defer m.wake()
			defer close(drained)
			if err := part.Call(func() error { return d.Drain(ctx) }); err != nil {
				s.log.Warn("does not drain", "err", err)
			}
		}()
		select {
		case <-drained:
		case <-ctx.Done():
			s.log.Warn("does not drain in time", "after", m.cfg.Patience/2)
		case <-ended:
			cancel()
		}
		_ = tree.Remove(token)
	}()
}

// stick gives up on a slot that does not end.
func (m *Manager) stick(s *slot) {
	s.stuck = true
	s.log.Error("was told to end, and does not", "after", m.cfg.Patience)
	if n := s.node.Load(); n != nil {
		go n.end() // which waits for what it announces just now
	}
}

// over notes that a slot has ended.
func (m *Manager) over(s *slot) {
	asked := s.stopping || s.leaving
	s.running, s.stopping, s.stuck, s.drained = false, false, false, nil
	s.idle = ""
	state, _ := s.runner.State()
	if s.role == nil && state.Phase == part.Failed {
		m.fatal = errors.Join(m.fatal, fmt.Errorf("%s: %w", s.name, state.Err))
		m.stopping = true
	}
	s.over = !asked && (state.Phase == part.Done || state.Phase == part.Failed)
}
