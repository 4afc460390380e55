package mesh

import (
	"context"
	"errors"
	"time"

	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/watch"
)

const (
	keepFirst = time.Second // after the first change of a Run
	keepEvery = time.Minute // between two writings of the snapshot
)

// snapshot is what is kept on disk of the registry, so that a start with the registry down has peers. The
// loop has all of it but for keeping and written.
type snapshot struct {
	good    map[string][]byte // of each node the newest entry that was believed; nil without a StateDir
	keepAt  time.Time         // when to write it; zero: nothing has changed
	keptAt  time.Time
	offered int                  // how often it was handed over
	keeping watch.Value[offered] // what is to be written
	written int                  // the newest that is on disk; the writing part's, until it has ended

	starts   core.Starts // as they are to be on disk
	startsAt time.Time   // when that is tried again; zero: it is done
}

type offered struct {
	number  int
	entries []registry.Entry
}

// keepStarts writes the count of starts, which is tried again if that fails.
func (r *run) keepStarts(s core.Starts) core.Kept {
	err := r.dir.Keep(s)
	r.starts, r.startsAt = s, time.Time{}
	if err != nil {
		r.startsAt = time.Now().Add(keepEvery)
	}
	return core.Kept{What: "count of starts", Err: err}
}

func (r *run) keepStartsAgain(ctx context.Context) {
	if !r.startsAt.IsZero() && !time.Now().Before(r.startsAt) {
		r.do(ctx, r.keepStarts(r.starts))
	}
}

// remember has the machine know what the registry had when an earlier process last saw it.
func (r *run) remember(ctx context.Context) {
	if r.dir == nil {
		return
	}
	r.good = make(map[string][]byte)
	entries, err := r.dir.Snapshot()
	r.do(ctx, core.Kept{What: snapshotName, Err: err})
	in := core.Remembered{}
	now := time.Now()
	for _, e := range entries {
		if kind, name, err := registry.ParseID(e.ID); err == nil && kind == registry.KindNode && name != r.cfg.Node {
			r.raw[name] = e.Data
			in.Put = append(in.Put, r.openOne(name, e.Data, now))
		}
	}
	if len(in.Put) > 0 {
		r.log.Info("starting with the nodes that were known last", "nodes", len(in.Put))
		r.do(ctx, in)
	}
}

const snapshotName = "snapshot"

// keepSoon has the snapshot written when it is time.
func (r *run) keepSoon() {
	if r.good == nil || !r.keepAt.IsZero() {
		return
	}
	if r.keepAt = time.Now().Add(keepFirst); !r.keptAt.IsZero() {
		r.keepAt = later(r.keepAt, r.keptAt.Add(keepEvery))
	}
}

// offerSnapshot hands what is known to the writing part, if it is time.
func (r *run) offerSnapshot() {
	if r.keepAt.IsZero() || time.Now().Before(r.keepAt) {
		return
	}
	r.keepAt, r.keptAt = time.Time{}, time.Now()
	r.offered++
	r.keeping.Set(offered{r.offered, r.entries()})
}

// entries are those of the nodes that are known here, which a Reset that lacks too many leaves in force.
func (r *run) entries() []registry.Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	entries := make([]registry.Entry, 0, len(r.good))
	for name, data := range r.good {
		if r.machine.Knows(name) {
			entries = append(entries, registry.Entry{ID: registry.NodeID(name), Data: data})
		} else {
			delete(r.good, name)
		}
	}
	return entries
}

// keep writes what is handed to it, the newest, for as long as it takes.
func (r *run) keep(ctx context.Context) error {
	delays := newBackoff()
	for {
		newest, ok, stale := r.keeping.Get()
		var again <-chan time.Time
		if ok {
			err := r.dir.KeepSnapshot(newest.entries)
			if err != nil {
				again = time.After(delays.NextBackOff())
			} else {
				r.written = newest.number
				delays.Reset()
			}
			if !r.tell(ctx, core.Kept{What: snapshotName, Err: err}) {
				return nil
			}
		}
		select {
		case <-stale:
		case <-again:
		case <-ctx.Done():
			return nil
		}
	}
}

// lastSnapshot writes what has changed since, when all parts have ended. A node that left keeps nothing.
func (r *run) lastSnapshot(left bool) {
	var err error
	switch {
	case left:
		err = r.dir.DropSnapshot()
	case r.good != nil && (!r.keepAt.IsZero() || r.offered > r.written):
		err = r.dir.KeepSnapshot(r.entries())
	}
	if !r.startsAt.IsZero() {
		err = errors.Join(err, r.dir.Keep(r.starts))
	}
	if err != nil {
		r.log.Error("the state folder is not up to date", "err", err)
	}
}

// earlier ignores zero times.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}
