package hostnet

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// groups are the multicast groups whose messages say that the host changed. That a link loses its IPv6 side, or gets
// it back, is told by the route to the multicast addresses that goes and comes with it; the reverse path filter by
// NETCONF. Of IPv6 being disabled on a link without a carrier nothing is told, until it has one.
var groups = []uint32{
	unix.RTNLGRP_LINK,
	unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
	unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
	unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE,
	unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF,
}

// watcher listens to what the kernel tells everybody.
type watcher struct {
	c    *conn
	ours atomic.Int64 // index of our link, as last seen
	lost atomic.Int64 // overruns
	told atomic.Int64 // datagrams about anything, or what was lost of them
	done chan struct{}

	mu     sync.Mutex // held from taking a message until it is dealt with
	routes uint64     // how often somebody else did what may have changed our routes
}

func watch(h *Host) (*watcher, error) {
	c, err := dial(h.ns, &h.closed)
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
	for !h.closed.Load() {
		var err error
		rerr := w.c.raw.Read(func(fd uintptr) bool {
			err = w.next(h, fd)
			return err != unix.EAGAIN
		})
		if err = errors.Join(rerr, err); err != nil && !h.closed.Load() {
			h.o.Logger.Warn("changes of the host may be missed", "err", err)
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// next deals with the next datagram that is there already; EAGAIN says that there is none.
func (w *watcher) next(h *Host, fd uintptr) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	b, err := w.c.take(fd)
	if err == unix.EAGAIN {
		return err
	}
	w.told.Add(1)
	matters := err != nil // messages were lost (ENOBUFS), or may have been
	if err != nil {
		w.routes++
	}
	if err == unix.ENOBUFS {
		w.lost.Add(1)
		h.missed()
		err = nil
	}
	for m := range messages(b) {
		if m.pid != h.c.pid {
			matters = w.matters(h, m) || matters
		}
	}
	if matters && !h.closed.Load() {
		h.notify()
	}
	return err
}

// notify says on Changed that there is something to read; once that is closed, nothing.
func (h *Host) notify() {
	h.telling.Lock()
	defer h.telling.Unlock()
	if h.told {
		return
	}
	select {
	case h.changed <- struct{}{}:
	default:
	}
}

// most is how many datagrams catchUp deals with; a receive buffer of 1 MiB holds fewer.
const most = 1 << 14

// catchUp deals with all messages that the kernel has sent until now: those of every change that is done, since
// Linux sends them while it makes the change. It returns a number that is another one after somebody else did what may
// have changed our routes, or messages were lost; ok is false if there is no end to them.
func (w *watcher) catchUp(h *Host) (routes uint64, ok bool) {
	_ = w.c.raw.Control(func(fd uintptr) {
		for range most {
			if w.next(h, fd) == unix.EAGAIN {
				ok = true
				return
			}
		}
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.routes, ok
}

// matters reports whether m may be about what Read reports. A router's many routes are not.
func (w *watcher) matters(h *Host, m message) bool {
	switch m.typ {
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, ok := parseRoute(m.body)
		if !ok {
			return true
		}
		if int(r.proto) == h.o.Protocol {
			if r.typ == unix.RTN_UNREACHABLE && m.typ == unix.RTM_DELROUTE {
				h.missed()
			}
			w.routes++
			return true
		}
		_, links := connects(m.body)
		return broad(r.dst) || len(links) > 0 || r.oif != 0 && int64(r.oif) == w.ours.Load()
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if l, ok := parseLink(m.body); !ok || int64(l.Index) == w.ours.Load() {
			w.routes++ // it may have been down
		}
	case unix.RTM_DELRULE:
		if r, ok := parseRule(m.body); !ok || int(r.proto) == h.o.Protocol {
			h.missed()
		}
	case unix.RTM_DELADDR:
		w.routes++ // those from it go too
	}
	return true
}
