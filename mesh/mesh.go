package mesh

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/internal/state"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/mesh/watch"
	"github.com/warren-mesh/warren/prefixes"
)

// Mesh is one node's membership. All methods may be called at the same time from any goroutine.
type Mesh interface {
	// Run keeps the device in line with the registry, and the node's record with the node, until ctx
	// ends; then it returns nil and leaves the device forwarding, so that a later Run, of this process or the
	// next, adopts it with its sessions. It owns every goroutine it starts, and none is left when it
	// returns. It may be run again, but not twice at a time (ErrRunning).
	//
	// Other errors: the state folder or key cannot be used; ErrLeft; a panic in a part of it.
	// A registry or device that fails is no error but a condition: it is retried for as long as it takes.
	Run(ctx context.Context) error

	// Leave withdraws the node's record and removes the device. A running Run does it and returns
	// ErrLeft, and so does a Run that is begun meanwhile. A later Run joins again. When ctx ends first, what was not done is in the error, and may be tried again.
	Leave(ctx context.Context) error

	// Current returns the newest View and a channel that closes when there is a newer one. The View is
	// made when it is asked for, at a cost in proportion to the mesh.
	Current() (View, <-chan struct{})

	// SetEndpoints replaces Config.Endpoints, now and for later Runs. The record follows at once, and no
	// session suffers. The error names what is wrong with which of them, and wraps ErrConfig; then nothing
	// is changed.
	SetEndpoints(es ...Endpoint) error

	// Prefixes is where parts of the program announce what this node can reach. It may be used before
	// and between Runs.
	Prefixes() prefixes.Prefixes
}

// The types of a View; see package view.
type (
	View      = view.View
	Peer      = view.Peer
	Condition = view.Condition
	Kind      = view.Kind
	Changes   = view.Changes
)

// Diff returns what changed from old to new.
func Diff(old, new View) Changes { return view.Diff(old, new) }

var (
	// ErrLeft is what Run returns when the node left the mesh, or is leaving it.
	ErrLeft = errors.New("left the mesh")
	// ErrStateInUse is in the error of a Run whose StateDir another Run has, of this process or another.
	ErrStateInUse = state.ErrLocked
	// ErrStateForeign is in the error of a Run whose StateDir is another node's, or was used by a newer program.
	ErrStateForeign = state.ErrForeign
	// ErrRunning is what a second Run at a time returns.
	ErrRunning = errors.New("already running")
)

// ConfigSource is the name under which New announces Config.Announce. Announcing anything else under
// that name replaces it.
const ConfigSource = "mesh.Config"

// New checks cfg and returns a Mesh that does nothing yet. It does no I/O. Its error names every field
// that is wrong and its value, never a key, and wraps ErrConfig.
func New(cfg Config) (Mesh, error) {
	cfg, err := cfg.check()
	if err != nil {
		return nil, err
	}
	m := &node{cfg: cfg, key: cfg.Key, table: prefixes.NewTable(), stale: make(chan struct{})}
	m.endpoints.Set(cfg.Endpoints)
	if len(cfg.Announce) > 0 {
		as := make([]prefixes.Announcement, len(cfg.Announce))
		for i, p := range cfg.Announce {
			as[i].Prefix = p
		}
		if err := m.table.Announce(ConfigSource, as...); err != nil {
			return nil, fmt.Errorf("%w: Config.Announce: %w", ErrConfig, err)
		}
	}
	return m, nil
}

// node implements Mesh.
type node struct {
	cfg       Config
	table     *prefixes.Table
	endpoints watch.Value[[]Endpoint]

	mu      sync.Mutex
	running bool
	leaving bool          // and it is no Run, but a Leave by itself
	leave   chan leaving  // to the running Run
	done    chan struct{} // closed when the running Run has returned
	key     key.Private   // of a node without a StateDir
	machine *core.Machine // the newest Run's, guarded by mu; nil before the first and after Leave
	ready   bool          // the running Run's machine was settled
	ended   error         // why the last Run did, if none runs
	view    view.View     // of the machine, if fresh
	fresh   bool
	stale   chan struct{}
}

// leaving asks the running Run to leave.
type leaving struct {
	ctx    context.Context
	answer chan<- error
}

func (m *node) Prefixes() prefixes.Prefixes { return m.table }

func (m *node) Current() (View, <-chan struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.fresh {
		if m.machine != nil {
			m.view = m.machine.View()
			m.view.Ready = m.ready
		} else {
			m.view = view.View{Self: view.Self{Node: m.cfg.Node}}
		}
		m.view.Running, m.view.Err = m.running && !m.leaving, m.ended
		m.fresh = true
	}
	return m.view, m.stale
}

// changed ends the newest View. m.mu is held.
func (m *node) changed() {
	m.fresh = false
	close(m.stale)
	m.stale = make(chan struct{})
}

// Leave implements Mesh.
func (m *node) Leave(ctx context.Context) error {
	m.mu.Lock()
	if m.running {
		leave, done := m.leave, m.done
		m.mu.Unlock()
		answer := make(chan error, 1)
		select {
		case leave <- leaving{ctx, answer}:
		case <-done:
			return m.Leave(ctx) // it ended meanwhile
		case <-ctx.Done():
			return fmt.Errorf("leaving: %w", ctx.Err())
		}
		select {
		case err := <-answer:
			return err
		case <-done: // maybe in the middle of it
			select {
			case err := <-answer:
				return err
			default:
				return m.Leave(ctx)
			}
		}
	}
	m.running, m.leaving = true, true
	m.leave, m.done = make(chan leaving), make(chan struct{})
	m.mu.Unlock()
	defer func() { m.stopped(m.ended) }() // a Leave is no Run
	return m.withdraw(ctx)
}

func (m *node) stopped(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.running, m.leaving, m.ready, m.ended = false, false, false, err
	close(m.done)
	m.changed()
}

// forget ends the View of a node that left.
func (m *node) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.machine, m.ready = nil, false
	m.changed()
}

// withdraw deletes the record, so that peers stop sending, and then removes the device.
func (m *node) withdraw(ctx context.Context) error {
	if err := m.deleteRecord(ctx); err != nil {
		return err
	}
	return m.removeDevice(ctx)
}

func (m *node) deleteRecord(ctx context.Context) error {
	err := retry(ctx, func(ctx context.Context) error { return m.cfg.Registry.Delete(ctx, registry.NodeID(m.cfg.Node)) })
	if err != nil {
		return fmt.Errorf("leaving: the record is not withdrawn: %w", err)
	}
	return nil
}

func (m *node) removeDevice(ctx context.Context) error {
	err := retry(ctx, func(ctx context.Context) error { return m.cfg.Datapath.Apply(ctx, datapath.RemoveDevice{}) })
	if err != nil {
		return fmt.Errorf("leaving: the record is withdrawn, but the device is not removed: %w", err)
	}
	m.forget()
	return nil
}

// Ready waits until all that the registry had when it was first read is on the device. Where no Run is
// under way it waits for one, but not after one that ended with an error: unless another begins within a
// second, that error is returned. When ctx ends first, the error has its cause and what keeps the mesh
// from being ready.
func Ready(ctx context.Context, m Mesh) error {
	const grace = time.Second // for a Run that a goroutine is about to begin
	var over <-chan time.Time
	for {
		ready, stale, ended := isReady(m)
		switch {
		case ready:
			return nil
		case ended == nil:
			over = nil
		case over == nil:
			over = time.After(grace)
		}
		select {
		case <-stale:
		case <-over:
			return fmt.Errorf("the mesh is not ready: Run ended: %w", ended)
		case <-ctx.Done():
			v, _ := m.Current()
			err := fmt.Errorf("the mesh is not ready: %w", context.Cause(ctx))
			if !v.Running {
				err = fmt.Errorf("%w; no Run is under way", err)
			}
			for _, c := range v.Conditions {
				err = fmt.Errorf("%w; %v", err, c)
			}
			return err
		}
	}
}

// isReady spares a big mesh that comes up a View for each of its changes.
func isReady(m Mesh) (ready bool, stale <-chan struct{}, ended error) {
	if n, ok := m.(*node); ok {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.ready, n.stale, n.ended
	}
	v, stale := m.Current()
	return v.Ready, stale, v.Err
}

// Watch yields the View that is current, and then a newer one whenever there is one, until ctx ends or
// the consumer breaks. A slow consumer misses Views, never the newest.
func Watch(ctx context.Context, m Mesh) iter.Seq[View] {
	return func(yield func(View) bool) {
		for {
			v, stale := m.Current()
			if ctx.Err() != nil || !yield(v) {
				return
			}
			select {
			case <-stale:
			case <-ctx.Done():
				return
			}
		}
	}
}
