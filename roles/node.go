package roles

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles/part"
)

// ErrEnded is what a Node says whose role has ended.
var ErrEnded = errors.New("the role has ended")

// node is one Run's Node.
type node struct {
	m     *Manager
	role  string
	log   *slog.Logger
	group *part.Group

	mu    sync.Mutex // held while something is announced or published, so that nothing comes after the end
	ended bool
	said  []view.Condition
}

// run runs a role once, and withdraws all that it said as soon as it is about to end: when Run has returned, or one of the
// goroutines beside it has failed, whatever else takes its time.
func (m *Manager) run(ctx context.Context, s *slot) error {
	if p, ok := s.role.(Privileged); ok {
		if err := p.Lacks(); err != nil {
			return &lack{err}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	n := &node{m: m, role: s.name, log: s.log, group: part.NewGroup(ctx)}
	s.node.Store(n)
	defer n.end()
	within := n.group.Context()
	beside := context.AfterFunc(within, func() {
		if ctx.Err() == nil { // one of the goroutines failed
			part.Ending(ctx, context.Cause(within))
			n.end()
		}
	})
	err := part.Call(func() error {
		part.Ready(ctx)
		return s.role.Run(within, n)
	})
	beside()
	switch {
	case within.Err() != nil: // why Run returned
		part.Ending(ctx, context.Cause(within))
	case err != nil:
		part.Ending(ctx, err)
	default:
		part.Ending(ctx, part.ErrEnded)
	}
	n.end()
	n.group.Cancel() // what is beside it
	if failed := n.group.Wait(); failed != nil {
		return failed // which is why Run returned
	}
	return err
}

// lack is what a role says that lacks a privilege.
type lack struct{ error }

func (l *lack) Unwrap() error { return l.error }

// end withdraws what the role said, and has it say no more, whether it returned or not. Only the first call does, and
// none returns before that is done: what the next Run of the role says is not for an earlier one to withdraw.
func (n *node) end() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.ended {
		n.ended = true
		n.m.withdraw(n.role)
	}
}

// withdraw withdraws what a role announced and published.
func (m *Manager) withdraw(role string) {
	if m.cfg.Mesh != nil {
		_ = m.cfg.Mesh.Prefixes().Announce(source(role)) // nothing can be wrong with nothing
	}
	m.values.withdraw(role)
	m.reports.set(role, nil)
	m.wake()
}

// source is the name under which a role announces.
func source(role string) string { return "role " + role }

func (n *node) Announce(a ...prefixes.Announcement) error {
	if n.m.cfg.Mesh == nil {
		return errors.New("there is no mesh to announce to")
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ended {
		return ErrEnded
	}
	return n.m.cfg.Mesh.Prefixes().Announce(source(n.role), a...)
}

func (n *node) Mesh() (view.View, <-chan struct{}) {
	if n.m.cfg.Mesh == nil {
		return view.View{}, nil
	}
	return n.m.cfg.Mesh.Current()
}

func (n *node) Logger() *slog.Logger { return n.log }

func (n *node) Dir() (string, error) {
	if n.m.cfg.StateDir == "" {
		return "", errors.New("there is no folder for state")
	}
	dir := filepath.Join(n.m.cfg.StateDir, n.role)
	return dir, os.MkdirAll(dir, 0o700)
}

func (n *node) Publish(name string, value any) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ended {
		return ErrEnded
	}
	return n.m.values.publish(n.role, name, value)
}

func (n *node) Published(name string) (any, <-chan struct{}) { return n.m.values.get(name) }

func (n *node) Report(c ...view.Condition) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ended {
		return
	}
	c = slices.Clone(c)
	for i := range c {
		c[i].Subject = cmp.Or(c[i].Subject, n.role)
	}
	if slices.Equal(c, n.said) {
		return
	}
	n.said = c
	n.m.reports.set(n.role, c)
	n.m.wake()
}

func (n *node) Go(name string, f func(context.Context) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.ended {
		n.group.Go(cmp.Or(name, "a goroutine"), f)
	}
}

// reports are what roles say is wrong.
type reports struct {
	mu sync.Mutex
	by map[string][]view.Condition
}

func (r *reports) set(role string, c []view.Condition) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(c) == 0 {
		delete(r.by, role)
		return
	}
	if r.by == nil {
		r.by = make(map[string][]view.Condition)
	}
	r.by[role] = c
}

func (r *reports) all() (all []view.Condition) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.by {
		all = append(all, c...)
	}
	return all
}

// values are what roles publish.
type values struct {
	mu  sync.Mutex
	all map[string]*value
}

type value struct {
	role    string // whose it is; empty: nobody's
	v       any
	changed chan struct{}
}

// at returns the value of a name. mu is held.
func (vs *values) at(name string) *value {
	v := vs.all[name]
	if v == nil {
		if vs.all == nil {
			vs.all = make(map[string]*value)
		}
		v = &value{changed: make(chan struct{})}
		vs.all[name] = v
	}
	return v
}

func (v *value) set(role string, to any) {
	v.role, v.v = role, to
	close(v.changed)
	v.changed = make(chan struct{})
}

func (vs *values) get(name string) (any, <-chan struct{}) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	v := vs.at(name)
	return v.v, v.changed
}

func (vs *values) publish(role, name string, to any) error {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	v := vs.at(name)
	switch {
	case v.role != "" && v.role != role:
		return fmt.Errorf("%q is published by role %s", name, v.role)
	case to != nil:
		v.set(role, to)
	case v.role != "":
		v.set("", nil)
	}
	return nil
}

// withdraw withdraws what a role has published.
func (vs *values) withdraw(role string) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for _, v := range vs.all {
		if v.role == role {
			v.set("", nil)
		}
	}
}
