//go:build linux

package hostnet

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/prefixes"
)

// journey is a way through all Sources and back.
var journey = []Sources{SourceHint, SourceLoopback, SourceDevice, SourceLoopback, SourceHint, SourceDevice, SourceHint}

// A restart with other Sources moves the addresses, and no packet goes another way meanwhile.
func TestMove(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink() // which packets would leave by
	w := wanted{one.addrs, asMap(many(300)), 1420}
	h := s.open(Options{Sources: journey[0]})
	must(t, w.reach(s.ctx(), h))
	before := s.steady()
	var to []netip.Addr
	for i, r := range many(300) {
		if i%30 < 2 {
			to = append(to, r.Prefix.Addr().Next())
		}
	}
	s.during(h, to, func() {
		for _, sources := range journey[1:] {
			must(t, h.Close())
			h = s.open(Options{Sources: sources})
			must(t, w.reach(s.ctx(), h))
			st := s.read(h)
			if !st.Ready || st.Addrs != w.addrs {
				t.Errorf("%d: %+v", sources, st)
			}
			must(t, w.reach(s.ctx(), h)) // Linux takes an address from the IPv6 routes that have it
			if st := s.read(h); !maps.Equal(st.Routes, w.routes) {
				t.Errorf("%d: %d routes", sources, len(st.Routes))
			}
		}
	})
	become(t, "there and back again", before, s.dump)
	must(t, h.Close())
}

// An address that cannot come to its new place stays at the old one, unless somebody else has it.
func TestMoveRefused(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.ip("link add eth0 type veth peer name far0", "link set eth0 up", "link set far0 up")
	s.settle()
	h := s.open(Options{})
	must(t, one.reach(s.ctx(), h))
	must(t, h.Close())
	h = s.open(Options{Sources: SourceLoopback})
	boom := errors.New("boom")
	h.Intercept(func(what string) error {
		if strings.HasPrefix(what, "add address 10.7.0.1") {
			return boom
		}
		return nil
	})
	_, _, err := h.Adopt(s.ctx(), kind, nil)
	must(t, err)
	if err := h.Up(s.ctx(), 0); !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
	if st := s.read(h); st.Ready || len(st.Routes) != len(one.routes) || st.Addrs != prefixes.MustParse("fd07::1/128") {
		t.Errorf("got %+v", st)
	}
	if out := s.show("addr show dev wg0"); !strings.Contains(out, "10.7.0.1/32") || strings.Contains(out, "fd07::1/128") {
		t.Errorf("got %s", out)
	}
	h.Intercept(nil)
	s.ip("addr add 10.7.0.1/24 dev eth0")
	must(t, h.Up(s.ctx(), 0))
	if st := s.read(h); !st.Ready || st.Addrs != prefixes.MustParse("fd07::1/128") || st.Routes[pp("10.8.0.0/16")] != ap("10.7.0.1") {
		t.Errorf("got %+v", st)
	}
}

// Killed at any point of a move, it is finished by the next start, whatever Sources that has.
func TestCutMove(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	want := make(map[Sources]string)
	for _, sources := range journey[:3] {
		h := s.open(Options{Sources: sources})
		must(t, one.reach(s.ctx(), h))
		must(t, h.Close())
		time.Sleep(100 * time.Millisecond) // for the routes of addresses
		want[sources] = s.dump()
		must(t, Cleanup(s.ctx(), s.options(Options{})))
	}
	cuts := 0
	for _, from := range journey[:3] {
		for _, to := range journey[:3] {
			for n := 0; from != to; n++ {
				cut := false
				for _, then := range []Sources{to, from} {
					h := s.open(Options{Sources: from})
					must(t, one.reach(s.ctx(), h))
					must(t, h.Close())
					h = s.open(Options{Sources: to})
					var err error
					cut, err = until(h, n, func(h *Host) error { return one.reach(s.ctx(), h) })
					must(t, err)
					must(t, h.Close())
					h = s.open(Options{Sources: then})
					must(t, one.reach(s.ctx(), h))
					must(t, one.reach(s.ctx(), h))
					become(t, fmt.Sprintf("from %d to %d, cut at %d, then %d", from, to, n, then), want[then], func() string {
						now := s.dump()
						if then == SourceLoopback {
							now = keeperLines.ReplaceAllString(now, "")
						}
						return now
					})
					must(t, h.Remove(s.ctx()))
					must(t, h.Close())
				}
				if !cut {
					break
				}
				cuts++
			}
		}
	}
	if cuts < 30 {
		t.Errorf("%d cuts: too few", cuts)
	}
	t.Logf("%d cuts", cuts)
}
