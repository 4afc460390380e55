package mesh

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime/debug"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/internal/resolve"
	"github.com/warren-mesh/warren/mesh/internal/state"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/watch"
)

// Run implements Mesh.
func (m *node) Run(ctx context.Context) (err error) {
	m.mu.Lock()
	if m.running {
		defer m.mu.Unlock()
		if m.leaving {
			return ErrLeft
		}
		return ErrRunning
	}
	m.running, m.ended = true, nil
	m.leave, m.done = make(chan leaving), make(chan struct{})
	m.changed()
	m.mu.Unlock()
	defer func() { m.stopped(err) }()

	log := m.cfg.Logger.With("node", m.cfg.Node)
	r := &run{
		node: m, log: log, raw: make(map[string][]byte), results: make(chan core.Input), putting: make(chan struct{}, 1),
		batches: make(chan batch), relist: make(chan struct{}, 1), names: resolve.New(m.cfg.Lookup, log),
	}
	if err := r.open(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close(errors.Is(err, ErrLeft))) }()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var parts sync.WaitGroup
	var failed watch.Value[error] // the first part's that failed
	part := func(name string, f func(context.Context) error) {
		parts.Go(func() {
			err := fmt.Errorf("%s ended by runtime.Goexit", name)
			defer func() {
				if p := recover(); p != nil {
					err = &panicked{name, p, debug.Stack()}
				}
				if err != nil {
					failed.Update(func(first error) error { return cmp.Or(first, err) })
					cancel()
				}
			}()
			err = f(ctx)
		})
	}
	part("watching the registry", r.watch)
	part("publishing the record", r.publish)
	part("looking up host names", r.names.Run)
	if r.dir != nil {
		part("keeping the snapshot", r.keep)
	}
	part("the loop", r.loop)
	parts.Wait()
	err, _, _ = failed.Get()
	return err
}

type panicked struct {
	part  string
	value any
	stack []byte
}

func (p *panicked) Error() string {
	return fmt.Sprintf("%s panicked: %v\n%s", p.part, p.value, p.stack)
}

// run is one Run.
type run struct {
	*node
	log      *slog.Logger
	dir      *state.Dir // nil without a StateDir
	machine  *core.Machine
	raw      map[string][]byte // the registry's entries as they were last opened
	wanted   watch.Value[record.Record]
	results  chan core.Input // from the parts to the loop
	putting  chan struct{}   // holds one while the record is put, and while it is withdrawn
	revision uint64
	wake     time.Time
	batches  chan batch
	relist   chan struct{} // capacity 1: read the whole registry once more
	names    *resolve.Names
	found    <-chan struct{} // more is known of them
	moved    <-chan struct{} // this node's endpoints are others
	snapshot
}

// open loads what outlives the process, and makes the machine.
func (r *run) open() error {
	k, starts, err := r.identity()
	if err != nil {
		return err
	}
	var nonce [12]byte
	if _, err := rand.Read(nonce[:]); err != nil {
		return err
	}
	c := r.cfg
	last := c.ListenPorts.Last
	if last == 0 {
		last = c.ListenPorts.First
	}
	accept := c.Accept
	r.machine = core.New(core.Config{
		Node: c.Node, Key: k, Addresses: c.addresses(), Endpoints: r.takeEndpoints(),
		PortFirst: c.ListenPorts.First, PortLast: last, Mark: c.Mark, MTU: c.MTU, Keepalive: c.Keepalive,
		Roles: c.Roles, Labels: c.Labels, Accept: accept, Instance: hex.EncodeToString(nonce[:8]),
		Starts: starts, Rejoin: rejoin(c.Registry), Device: uint64(binary.BigEndian.Uint32(nonce[8:])),
		Window: c.Window, Audit: c.Audit, Linger: c.Linger,
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.node.machine, r.ready = r.machine, false
	r.changed()
	return nil
}

// rejoin is how long others may need to find the registry again.
func rejoin(r registry.Registry) time.Duration {
	if r, ok := r.(registry.Rejoiner); ok {
		return r.Rejoin()
	}
	return 0
}

func (r *run) identity() (key.Private, core.Starts, error) {
	if r.cfg.StateDir != "" {
		dir, err := state.Open(r.cfg.StateDir, r.cfg.Node, r.log)
		if err != nil {
			return key.Private{}, core.Starts{}, err
		}
		r.dir = dir
		if dir.Created {
			r.log.Info("made a new key", "public", dir.Key.Public(), "folder", r.cfg.StateDir)
		}
		return dir.Key, dir.Starts, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.node.key.IsZero() {
		k, err := key.NewPrivate()
		if err != nil {
			return k, core.Starts{}, err
		}
		r.node.key = k
	}
	return r.node.key, core.Starts{}, nil
}

func (r *run) close(left bool) error {
	if r.dir == nil {
		return nil
	}
	r.lastSnapshot(left)
	return r.dir.Close()
}

// batch is what the watching part hands to the loop.
type batch struct {
	registry.Batch
	second bool // it is the first of a reading that was asked for by relist
	err    error
}

// watch passes on the registry's batches. While the loop is busy it does not take the next one, and the
// registry merges.
func (r *run) watch(ctx context.Context) error {
	delays := newBackoff()
	second := false
	for {
		watching, again := r.untilRelist(ctx)
		for b, err := range r.cfg.Registry.Watch(watching, registry.KindNode) {
			if err == nil {
				delays.Reset()
			}
			if !r.pass(ctx, batch{b, second && err == nil && b.Reset, err}) {
				break
			}
			second = second && (err != nil || !b.Reset)
		}
		switch relisted := again(); {
		case ctx.Err() != nil:
			return nil
		case relisted:
			second = true
			continue
		}
		// A registry that keeps to its contract does not get here while ctx lasts.
		if !r.pass(ctx, batch{err: errors.New("the registry ended its watch by itself")}) {
			return nil
		}
		select {
		case <-time.After(delays.NextBackOff()):
		case <-ctx.Done():
			return nil
		}
	}
}

// untilRelist returns a context that ends with the next relist. end ends it, waits until nothing of it is
// left, and reports whether it was that.
func (r *run) untilRelist(ctx context.Context) (watching context.Context, end func() (relisted bool)) {
	watching, cancel := context.WithCancel(ctx)
	relisted := make(chan bool, 1)
	go func() {
		defer cancel()
		select {
		case <-r.relist:
			relisted <- true
		case <-watching.Done():
			relisted <- false
		}
	}()
	return watching, func() bool {
		cancel()
		return <-relisted
	}
}

func (r *run) pass(ctx context.Context, b batch) bool {
	select {
	case r.batches <- b:
		return true
	case <-ctx.Done():
		return false
	}
}

// publish puts this node's newest record, for as long as it takes.
func (r *run) publish(ctx context.Context) error {
	for {
		rec, ok, stale := r.wanted.Get()
		if ok {
			r.put(ctx, rec, stale)
		}
		select {
		case <-stale:
		case <-ctx.Done():
			return nil
		}
	}
}

// put puts rec until it is taken, or stale.
func (r *run) put(ctx context.Context, rec record.Record, stale <-chan struct{}) {
	delays := newBackoff()
	for {
		select {
		case r.putting <- struct{}{}:
		case <-ctx.Done():
			return
		}
		data, err := r.cfg.Trust.Seal(rec)
		if err == nil {
			err = r.cfg.Registry.Put(ctx, registry.Entry{ID: registry.NodeID(rec.ID), Data: data})
		}
		<-r.putting
		if ctx.Err() != nil || !r.tell(ctx, core.Published{Record: rec, Err: err}) || err == nil {
			return
		}
		select {
		case <-time.After(delays.NextBackOff()):
		case <-stale:
			return
		case <-ctx.Done():
			return
		}
	}
}

func (r *run) tell(ctx context.Context, in core.Input) bool {
	select {
	case r.results <- in:
		return true
	case <-ctx.Done():
		return false
	}
}

// newBackoff has no total time limit: a registry may be away for days.
func newBackoff() *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = 500*time.Millisecond, 30*time.Second
	b.Reset()
	return b
}

// retry calls f until it succeeds, can never succeed, or ctx ends; then it returns f's last error and
// ctx's.
func retry(ctx context.Context, f func(context.Context) error) error {
	delays := newBackoff()
	for {
		err := f(ctx)
		if err == nil || errors.Is(err, net.ErrClosed) {
			return err
		}
		select {
		case <-time.After(delays.NextBackOff()):
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// loop feeds the machine and carries out what it says.
func (r *run) loop(ctx context.Context) error {
	var touched <-chan struct{}
	if n, ok := r.cfg.Datapath.(datapath.Notifier); ok {
		touched = n.Changed()
	}
	// A channel is taken before what it is about is read, so that no change falls in between.
	trust := r.cfg.Trust.Changed()
	_, r.found = r.names.Current()
	snapshot, announced := r.table.Current()
	r.do(ctx, core.Announced{Snapshot: snapshot})
	r.remember(ctx)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	leave := r.leave
	var leaving leaving      // asked for, if withdrawn is not nil
	var withdrawn chan error // its record is withdrawn, or is not
	defer func() {
		if withdrawn != nil {
			<-withdrawn
		}
	}()
	for {
		timer.Stop()
		if at := earlier(earlier(r.wake, r.keepAt), r.startsAt); !at.IsZero() {
			timer.Reset(time.Until(at))
		}
		select {
		case <-ctx.Done():
			return nil
		case l := <-leave:
			leave, leaving = nil, l // one at a time
			withdrawn = make(chan error, 1)
			go func() { withdrawn <- r.unpublish(ctx, l.ctx) }()
		case err := <-withdrawn:
			withdrawn = nil
			if err == nil {
				if err = r.removeDevice(leaving.ctx); err != nil {
					<-r.putting
				}
			}
			var p *panicked
			switch {
			case errors.As(err, &p):
				return err
			case err != nil && ctx.Err() != nil:
				return nil // Leave goes on by itself
			}
			leaving.answer <- err
			if err == nil {
				return ErrLeft
			}
			leave = r.leave
			r.do(ctx, core.Touched{})
		case b := <-r.batches:
			if b.err != nil {
				r.do(ctx, core.RegistryFailed{Err: b.err})
			} else {
				was := r.raw
				in := r.opened(b.Batch)
				in.Second = b.second
				r.do(ctx, in)
				if b.Reset {
					r.carryOver(was)
				}
				r.keepSoon()
			}
		case in := <-r.results:
			r.do(ctx, in)
		case <-announced:
			snapshot, announced = r.table.Current()
			r.do(ctx, core.Announced{Snapshot: snapshot})
		case _, ok := <-touched:
			if !ok {
				touched = nil // it reports no more
			}
			r.do(ctx, core.Touched{})
		case <-r.moved:
			r.do(ctx, core.Endpoints{List: r.takeEndpoints()})
		case <-r.found:
			r.do(ctx, r.named())
		case <-trust:
			trust = r.cfg.Trust.Changed()
			r.do(ctx, r.reopened())
			r.keepSoon()
		case <-timer.C:
			r.offerSnapshot()
			r.keepStartsAgain(ctx)
			r.do(ctx, core.Tick{})
		}
	}
}

// unpublish withdraws the node's record with nobody putting it beside it. Where it succeeds nobody puts
// it again until putting is given back. The loop goes on meanwhile: the registry may be away for long.
func (r *run) unpublish(running, asked context.Context) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicked{"withdrawing the record", p, debug.Stack()}
		}
	}()
	ctx, cancel := context.WithCancel(asked)
	defer cancel()
	defer context.AfterFunc(running, cancel)()
	select {
	case r.putting <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("leaving: the registry does not answer: %w", context.Cause(ctx))
	}
	if err = r.deleteRecord(ctx); err != nil {
		<-r.putting
	}
	return err
}

// do has the machine take in one input, and carries out what it says until it says nothing more.
func (r *run) do(ctx context.Context, in core.Input) {
	for inputs := []core.Input{in}; len(inputs) > 0 && ctx.Err() == nil; inputs = inputs[1:] {
		inputs = append(inputs, r.carryOut(ctx, r.step(inputs[0]))...)
	}
}

// carryOut returns the answers.
func (r *run) carryOut(ctx context.Context, out core.Output) (answers []core.Input) {
	r.report(out)
	if out.Starts != nil && r.dir != nil {
		answers = append(answers, r.keepStarts(*out.Starts))
	}
	if out.Publish != nil {
		r.wanted.Set(*out.Publish)
	}
	if out.Relist {
		select {
		case r.relist <- struct{}{}:
		default: // it is about to be
		}
	}
	if out.Names != nil {
		r.names.Set(out.Names)
	}
	for _, host := range out.Renew {
		r.names.Failed(host)
	}
	if s, ok := r.cfg.Datapath.(datapath.Settler); ok && out.Settle {
		s.Settle()
	}
	r.wake = out.Wake
	switch {
	case out.Read:
		st, err := r.cfg.Datapath.Read(ctx)
		answers = append(answers, core.Reading{State: st, Err: err, Closed: errors.Is(err, net.ErrClosed)})
	case len(out.Ops) > 0:
		err := r.cfg.Datapath.Apply(ctx, out.Ops...)
		answers = append(answers, core.Applied{Ops: out.Ops, Err: err})
	}
	return answers
}

// step has the machine take in one input. What the embedder's policy does in it, be it to panic, leaves
// the lock free.
func (r *run) step(in core.Input) core.Output {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.machine.Step(time.Now(), in)
	r.ready = r.ready || out.Settle
	if out.Changed {
		r.changed()
	}
	return out
}

func (r *run) report(out core.Output) {
	for _, c := range out.Raised {
		r.log.Warn(c.Message, "condition", c.Kind, "about", c.Node, "remedy", c.Remedy)
	}
	for _, c := range out.Cleared {
		r.log.Info("over: "+c.Message, "condition", c.Kind, "about", c.Node)
	}
	for _, p := range out.Rekeyed {
		r.log.Info("peer has another key", "peer", p)
	}
	for _, p := range out.Joined {
		r.log.Info("peer joined", "peer", p)
	}
	for _, p := range out.Left {
		r.log.Info("peer left", "peer", p)
	}
}

// opened opens the entries of a batch. What has the same bytes as before is not opened again, except this
// node's own, whose every appearance counts.
func (r *run) opened(b registry.Batch) core.Records {
	r.revision = b.Revision
	in := core.Records{Reset: b.Reset, Revision: b.Revision, Put: make([]core.Opened, 0, len(b.Put))}
	raw := r.raw
	if b.Reset {
		r.raw = make(map[string][]byte, len(b.Put))
	}
	now := time.Now()
	at := make(map[string]int, len(b.Put))
	for _, e := range b.Put {
		kind, name, err := registry.ParseID(e.ID)
		if err != nil || kind != registry.KindNode {
			continue // no node can have it
		}
		if first, twice := at[name]; twice { // against the contract: the last one counts
			in.Put[first] = r.openOne(name, e.Data, now)
			r.raw[name] = e.Data
			continue
		}
		at[name] = len(in.Put)
		was, seen := raw[name]
		r.raw[name] = e.Data
		if seen && name != r.cfg.Node && bytes.Equal(was, e.Data) {
			in.Put = append(in.Put, core.Opened{Node: name, Same: true})
			continue
		}
		in.Put = append(in.Put, r.openOne(name, e.Data, now))
	}
	for _, id := range b.Deleted {
		if kind, name, err := registry.ParseID(id); err == nil && kind == registry.KindNode {
			delete(r.raw, name)
			in.Deleted = append(in.Deleted, name)
		}
	}
	return in
}

// carryOver keeps the entries of nodes that a Reset lacks and the machine does not give up yet: they are
// opened again when trust changes.
func (r *run) carryOver(was map[string][]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, data := range was {
		if _, there := r.raw[name]; !there && r.machine.Knows(name) {
			r.raw[name] = data
		}
	}
}

func (r *run) openOne(name string, data []byte, now time.Time) core.Opened {
	o, err := r.cfg.Trust.Open(registry.NodeID(name), data, now)
	if err == nil && o.Record.ID != name {
		err = fmt.Errorf("the trust opened a record of node %q", o.Record.ID)
	}
	if err == nil && r.good != nil {
		r.good[name] = data
	}
	return core.Opened{Node: name, Opened: o, Err: err}
}

// reopened opens everything again, because what is trusted has changed.
func (r *run) reopened() core.Records {
	in := core.Records{Revision: r.revision}
	now := time.Now()
	for name, data := range r.raw {
		if name != r.cfg.Node {
			in.Put = append(in.Put, r.openOne(name, data, now))
		}
	}
	return in
}
