package etcd

import (
	"bytes"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
)

// item is what is known of a key.
type item struct {
	data []byte // not nil; never written to
	mod  int64  // the revision that put it
}

// change is one event of a watch.
type change struct {
	id      string
	data    []byte // the view keeps it
	mod     int64
	deleted bool
}

// view is what a watch knows of the store, and what of it its consumer has not been given yet. One
// goroutine changes it and one takes from it; neither waits for the other.
type view struct {
	wake chan struct{} // capacity 1: there may be something to take, or later

	mu       sync.Mutex
	revision uint64
	items    map[string]item
	reset    bool // the next batch is a Reset; dirty is empty
	// dirty has the IDs that changed since the last batch, and whether the consumer knows of them. What
	// it does not know and is gone again is forgotten, so that dirty is bounded by what the consumer has
	// plus what the store has.
	dirty map[string]bool
	err   error     // to be yielded
	due   time.Time // and when
	told  bool      // an error was yielded, and no batch since the trouble was over
	well  bool      // it is
}

func newView() *view {
	return &view{wake: make(chan struct{}, 1), dirty: make(map[string]bool)}
}

func (v *view) signal() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// replace makes items everything there is. The consumer gets a Reset.
func (v *view) replace(items map[string]item, revision int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.items, v.revision, v.reset = items, uint64(revision), true
	clear(v.dirty)
	v.signal()
}

// apply takes in changes, in order, up to a revision. What is as it was before, and the deletion of what
// is not known, are none.
func (v *view) apply(changes []change, revision int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.revision = max(v.revision, uint64(revision))
	for _, c := range changes {
		had, there := v.items[c.id]
		switch {
		case c.deleted && !there:
		case c.deleted:
			delete(v.items, c.id)
			if known, dirty := v.dirty[c.id]; dirty && !known {
				delete(v.dirty, c.id)
			} else if !v.reset {
				v.dirty[c.id] = true
			}
		default:
			if there && bytes.Equal(had.data, c.data) {
				v.items[c.id] = item{had.data, c.mod}
				continue
			}
			v.items[c.id] = item{c.data, c.mod}
			if _, dirty := v.dirty[c.id]; !dirty && !v.reset {
				v.dirty[c.id] = there
			}
		}
	}
	if len(v.dirty) > 0 {
		v.signal()
	}
}

// fail has err yielded at the given time, unless the trouble is over before. An error that waits already
// is replaced, and does not wait longer for it.
func (v *view) fail(err error, due time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.err != nil && v.due.Before(due) {
		due = v.due
	}
	v.err, v.due, v.well = err, due, false
	v.signal()
}

// recovered takes back an error whose time has not come. One that was yielded, or is about to be, is
// followed by a batch.
func (v *view) recovered(now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.err != nil && now.Before(v.due) {
		v.err = nil
	}
	v.well = true
	if v.told {
		v.signal()
	}
}

// take returns what is to be yielded next. If there is nothing, ok is false, and later is when to look
// again, or zero.
func (v *view) take(now time.Time) (b registry.Batch, later time.Time, ok bool, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.reset:
		v.reset = false
		b = registry.Batch{Revision: v.revision, Reset: true, Put: make([]registry.Entry, 0, len(v.items))}
		for id, i := range v.items {
			b.Put = append(b.Put, registry.Entry{ID: id, Data: i.data})
		}
	case len(v.dirty) > 0:
		b.Revision = v.revision
		for id := range v.dirty {
			if i, there := v.items[id]; there {
				b.Put = append(b.Put, registry.Entry{ID: id, Data: i.data})
			} else {
				b.Deleted = append(b.Deleted, id)
			}
		}
		clear(v.dirty)
	case v.err != nil && !now.Before(v.due): // after what was known before
		err, v.err, v.told = v.err, nil, true
		return registry.Batch{}, time.Time{}, true, err
	case v.told && v.well:
		b.Revision = v.revision
	default:
		if v.err != nil {
			later = v.due
		}
		return registry.Batch{}, later, false, nil
	}
	v.told = false
	slices.SortFunc(b.Put, func(a, b registry.Entry) int { return strings.Compare(a.ID, b.ID) })
	slices.Sort(b.Deleted)
	return b, time.Time{}, true, nil
}
