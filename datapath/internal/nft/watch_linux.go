package nft

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// watcher listens to what the kernel tells of everybody's rules.
type watcher struct {
	c     *conn
	done  chan struct{}
	heard atomic.Uint32 // generation that was told last, for tests
}

func watch(t *Table) (*watcher, error) {
	c, err := dial(t.o.Do, &t.closed)
	if err != nil {
		return nil, err
	}
	if err := c.nl.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		c.nl.Close()
		return nil, fmt.Errorf("listen to changes: %w", err)
	}
	w := &watcher{c: c, done: make(chan struct{})}
	go w.run(t)
	return w, nil
}

func (w *watcher) close() error {
	err := w.c.nl.Close()
	<-w.done
	return err
}

func (w *watcher) run(t *Table) {
	defer close(w.done)
	defer close(t.changed)
	for !t.closed.Load() {
		b, err := w.c.receive()
		matters := err != nil // messages were lost (ENOBUFS), or may have been
		generation := w.heard.Load()
		for m := range messages(b) {
			matters = matters || t.about(m)
			if m.typ == newGen {
				generation = m.generation()
			}
		}
		if matters && !t.closed.Load() {
			select {
			case t.changed <- struct{}{}:
			default:
			}
		}
		w.heard.Store(generation)
		if err != nil && !errors.Is(err, unix.ENOBUFS) && !t.closed.Load() {
			t.o.Logger.Warn("changes of the table may be missed", "table", t.name, "err", err)
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// about reports whether m says that somebody else changed our table, or something in it. The message of a
// new generation names no table.
func (t *Table) about(m message) bool {
	return m.typ>>8 == unix.NFNL_SUBSYS_NFTABLES && m.typ != newGen && m.pid != t.c.pid &&
		m.object().text(ofTable) == t.name
}
