package hostnet

import (
	"errors"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// groups are the multicast groups whose messages say that the host changed.
var groups = []uint32{
	unix.RTNLGRP_LINK,
	unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
	unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
	unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
}

// watcher listens to what the kernel tells everybody.
type watcher struct {
	c    *conn
	ours atomic.Int64 // index of our link, as last seen
	lost atomic.Int64 // overruns
	done chan struct{}
}

func watch(ns int, h *Host) (*watcher, error) {
	c, err := dial(ns, &h.closed)
	if err != nil {
		return nil, err
	}
	w := &watcher{c: c, done: make(chan struct{})}
	for _, g := range groups {
		if err := c.nl.JoinGroup(g); err != nil {
			c.nl.Close()
			return nil, err
		}
	}
	go w.run(h)
	return w, nil
}

func (w *watcher) close() error {
	err := w.c.nl.Close()
	<-w.done
	return err
}

func (w *watcher) run(h *Host) {
	defer close(w.done)
	defer close(h.changed)
	for {
		b, err := w.c.receive()
		matters := err != nil // messages were lost (ENOBUFS), or may have been
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, unix.ENOBUFS):
			w.lost.Add(1)
		case err != nil:
			h.o.Logger.Warn("changes of the host may be missed", "err", err)
			time.Sleep(100 * time.Millisecond)
		}
		for m := range messages(b) {
			matters = matters || m.pid != h.c.pid && w.matters(h, m)
		}
		if matters {
			select {
			case h.changed <- struct{}{}:
			default:
			}
		}
	}
}

// matters reports whether m may be about what Read reports. A router's many routes are not.
func (w *watcher) matters(h *Host, m message) bool {
	if m.typ != unix.RTM_NEWROUTE && m.typ != unix.RTM_DELROUTE {
		return true
	}
	r, ok := parseRoute(m.body)
	return !ok || r.dst.Bits() == 0 || int(r.proto) == h.o.Protocol || r.oif != 0 && int64(r.oif) == w.ours.Load()
}
