//go:build linux

package hostnet

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
)

// lookups are route lookups one after the other, for as long as something is done.
type lookups struct {
	n, failed, met int // met: IPv6 ones that found a route again at once
	first          error
	longest        time.Duration // for which they failed
}

// during looks up where packets to some addresses go while f runs, and fails those that do not go into h's link.
func (s *space) during(h *Host, to []netip.Addr, f func()) lookups {
	s.t.Helper()
	l, err := h.Link(s.ctx())
	must(s.t, err)
	look := s.open(Options{Interface: "looks"})
	defer look.Close()
	stop, done := make(chan struct{}), make(chan lookups)
	go func() {
		var ls lookups
		var since time.Time
		for i := 0; ; i++ {
			select {
			case <-stop:
				done <- ls
				return
			default:
			}
			dst := to[i%len(to)]
			r, ok := look.lookup(context.Background(), dst, 0)
			if !ok && dst.Is6() { // it may have met the very route that is being freed
				ls.met++
				r, ok = look.lookup(context.Background(), dst, 0)
			}
			ls.n++
			switch {
			case ok && r.oif == l.Index:
				since = time.Time{}
				continue
			case since.IsZero():
				since = time.Now()
			}
			ls.failed++
			ls.longest = max(ls.longest, time.Since(since))
			if ls.first == nil {
				ls.first = fmt.Errorf("%v goes to interface %d, %t", dst, r.oif, ok)
			}
		}
	}()
	time.Sleep(20 * time.Millisecond)
	f()
	time.Sleep(20 * time.Millisecond)
	close(stop)
	ls := <-done
	s.t.Logf("%d lookups, %d failed, for up to %v; %d met a route being freed", ls.n, ls.failed, ls.longest, ls.met)
	if ls.n < 10 {
		s.t.Error("too few lookups to tell")
	}
	if ls.failed > 0 {
		s.t.Error(ls.first)
	}
	return ls
}

// The last IPv4 address goes and comes, and no packet goes another way meanwhile, or for lack of a context.
func TestLastAddress(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink() // which packets would leave by
	h := s.up(Options{})
	addr := prefixes.MustParse("10.7.0.1/32")
	must(t, h.AddAddrs(s.ctx(), addr))
	var routes []datapath.Route
	for i := range 2000 {
		routes = append(routes, datapath.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 8 + byte(i>>8), byte(i), 0}), 24)})
	}
	must(t, h.AddRoutes(s.ctx(), routes))
	var to []netip.Addr
	for _, i := range []int{0, 1000, 1999} {
		to = append(to, routes[i].Prefix.Addr().Next())
	}
	had := s.show("route show dev wg0")
	same := func(what string) {
		t.Helper()
		if got := s.show("route show dev wg0"); got != had {
			t.Errorf("%s: %d routes, had %d", what, strings.Count(got, "\n"), strings.Count(had, "\n"))
		}
	}

	s.during(h, to, func() {
		for range 3 {
			must(t, h.RemoveAddrs(s.ctx(), addr))
			if st := s.read(h); !st.Addrs.IsEmpty() || !st.Ready || len(st.Routes) != len(routes) {
				t.Errorf("got addresses %v, %d routes, ready %t", st.Addrs, len(st.Routes), st.Ready)
			}
			if out := s.show("-4 -o addr show dev wg0"); strings.Count(out, "\n") != 1 || !strings.Contains(out, "inet 192.0.0.8/32 scope host") {
				t.Errorf("got %s", out)
			}
			// Neither twice, nor by its name, nor as left over does it go.
			must(t, h.RemoveAddrs(s.ctx(), addr.Union(prefixes.MustParse("192.0.0.8/32"))))
			must(t, h.Up(s.ctx(), 0))
			same("gone")
			must(t, h.AddAddrs(s.ctx(), addr))
			if out := s.show("-4 -o addr show dev wg0"); strings.Count(out, "\n") != 1 || !strings.Contains(out, "inet 10.7.0.1/32 scope global") {
				t.Errorf("got %s", out)
			}
			same("back")
		}
		// Cut off after each step.
		for n := range 4 {
			ctx, cancel := context.WithCancel(s.ctx())
			left := n
			h.Intercept(func(string) error {
				if left--; left < 0 {
					cancel()
				}
				return nil
			})
			err := h.RemoveAddrs(ctx, addr)
			h.Intercept(nil)
			if cancel(); err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("cut at %d: got %v", n, err)
			}
			same(fmt.Sprintf("cut at %d", n))
			must(t, h.Up(s.ctx(), 0))
			must(t, h.AddAddrs(s.ctx(), addr))
		}
		// The keeper is refused: the address stays.
		boom := errors.New("boom")
		h.Intercept(func(what string) error {
			if strings.HasPrefix(what, "add address 192.0.0.8") {
				return boom
			}
			return nil
		})
		err := h.RemoveAddrs(s.ctx(), addr)
		h.Intercept(nil)
		for p, err := range Items(err) {
			if p != addr.At(0) || !errors.Is(err, boom) {
				t.Errorf("%v: got %v", p, err)
			}
		}
		if st := s.read(h); err == nil || st.Addrs != addr {
			t.Errorf("got %v, and %v", err, st.Addrs)
		}
		same("refused")
	})
	// Asked for by that name it is nobody's.
	if err := h.AddAddrs(s.ctx(), prefixes.MustParse("192.0.0.8/32")); err == nil || !strings.Contains(err.Error(), "RFC 7600") {
		t.Errorf("got %v", err)
	}
	// Without routes there is nothing to keep.
	var all prefixes.Set
	for _, r := range routes {
		all = all.With(r.Prefix)
	}
	must(t, h.RemoveRoutes(s.ctx(), all))
	must(t, h.RemoveAddrs(s.ctx(), addr))
	if out := s.show("-4 -o addr show dev wg0"); out != "" {
		t.Errorf("got %s", out)
	}
}

// One that a killed process left beside an address goes with whatever is done next.
func TestKeeperLeft(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	must(t, h.AddAddrs(s.ctx(), prefixes.MustParse("10.7.0.1/32", "10.7.0.2/32")))
	for what, f := range map[string]func() error{
		"AddAddrs":             func() error { return h.AddAddrs(s.ctx(), prefixes.MustParse("10.7.0.2/32", "fd07::1/128")) },
		"RemoveAddrs":          func() error { return h.RemoveAddrs(s.ctx(), prefixes.MustParse("10.7.0.2/32")) },
		"RemoveAddrs, nothing": func() error { return h.RemoveAddrs(s.ctx(), prefixes.MustParse("10.7.0.9/32")) },
		"Up":                   func() error { return h.Up(s.ctx(), 0) },
	} {
		s.ip("addr add 192.0.0.8/32 scope host dev wg0")
		if st := s.read(h); st.Ready || st.Addrs.Has(pp("192.0.0.8/32")) {
			t.Errorf("%s: before: %+v", what, st)
		}
		must(t, f())
		if out := s.show("addr show dev wg0"); strings.Contains(out, "192.0.0.8") || !s.read(h).Ready {
			t.Errorf("%s: left: %s", what, out)
		}
	}
}

// What keeps the routes of a link is nobody's source, and nothing that another mesh sees.
func TestKeeperIsNoSource(t *testing.T) {
	t.Parallel()
	for _, with := range []string{"nothing", "a way out", "another address"} {
		s := newSpace(t)
		if with == "a way out" {
			s.uplink()
			s.ip("addr del 198.51.100.7/32 dev lo")
		}
		if with == "another address" {
			s.ip("link add eth0 type veth peer name far0", "link set eth0 up", "link set far0 up", "addr add 203.0.113.2/24 dev eth0")
		}
		h := s.up(Options{})
		p := []datapath.Route{{Prefix: pp("10.8.0.0/16")}}
		must(t, h.AddRoutes(s.ctx(), p))
		get := func() string { return strings.Join(strings.Fields(s.show("route get 10.8.0.1")), " ") }
		want := get() // as it is for a link that never had an address
		must(t, h.AddAddrs(s.ctx(), prefixes.MustParse("10.7.0.1/32")))
		if got := get(); !strings.Contains(got, "src 10.7.0.1") {
			t.Errorf("%s: got %s", with, got)
		}
		must(t, h.RemoveAddrs(s.ctx(), prefixes.MustParse("10.7.0.1/32")))
		if !strings.Contains(s.show("addr show dev wg0"), "192.0.0.8") {
			t.Errorf("%s: no keeper", with)
		}
		got := get()
		t.Logf("%s: %s", with, got)
		if got != want || strings.Contains(got, "192.0.0.8") || with != "nothing" && !strings.Contains(got, "src 203.0.113.2") {
			t.Errorf("%s: got %s, want %s", with, got, want)
		}
		st := s.read(s.open(Options{Interface: "wg1", Protocol: 88}))
		if dummy := pp("192.0.0.8/32"); st.Host.Addrs.Has(dummy) || st.Host.Connected.Has(dummy) {
			t.Errorf("%s: another mesh sees %+v", with, st.Host)
		}
		must(t, h.Remove(s.ctx()))
		if out := s.show("addr"); strings.Contains(out, "192.0.0.8") {
			t.Errorf("%s: left %s", with, out)
		}
	}
}
