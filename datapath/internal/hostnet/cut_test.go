//go:build linux

package hostnet

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
)

// wanted is what a driver is asked for.
type wanted struct {
	addrs  prefixes.Set
	routes map[netip.Prefix]netip.Addr
	mtu    int
}

// reach does what a driver does: it makes the host what it should be, whatever it is.
func (w wanted) reach(ctx context.Context, h *Host) error {
	if _, _, err := h.Adopt(ctx, kind, nil); err != nil {
		return err
	}
	st, err := h.Read(ctx)
	if err != nil {
		return err
	}
	if !st.Ready || st.Link.MTU != w.mtu {
		if err := h.Up(ctx, w.mtu); err != nil {
			return err
		}
		if st, err = h.Read(ctx); err != nil {
			return err
		}
	}
	if add := w.addrs.Minus(st.Addrs); !add.IsEmpty() {
		if err := h.AddAddrs(ctx, add); err != nil {
			return err
		}
	}
	var add []datapath.Route
	for _, p := range slices.SortedFunc(maps.Keys(w.routes), prefixes.Compare) {
		if src, ok := st.Routes[p]; !ok || src != w.routes[p] {
			add = append(add, datapath.Route{Prefix: p, Source: w.routes[p]})
		}
	}
	if len(add) > 0 {
		if err := h.AddRoutes(ctx, add); err != nil {
			return err
		}
	}
	var remove prefixes.Set
	for p := range st.Routes {
		if _, ok := w.routes[p]; !ok {
			remove = remove.With(p)
		}
	}
	if err := h.RemoveRoutes(ctx, remove); err != nil {
		return err
	}
	return h.RemoveAddrs(ctx, st.Addrs.Minus(w.addrs))
}

var (
	one = wanted{prefixes.MustParse("10.7.0.1/32", "fd07::1/128"), map[netip.Prefix]netip.Addr{
		pp("10.8.0.0/16"): ap("10.7.0.1"), pp("10.8.1.0/24"): ap("10.7.0.1"), pp("10.9.0.0/16"): {},
		pp("fd08::/64"): ap("fd07::1"), pp("fd08:1::/64"): {},
	}, 1420}
	// two has other sources, another MTU, less and more.
	two = wanted{prefixes.MustParse("10.7.0.2/32", "fd07::2/128"), map[netip.Prefix]netip.Addr{
		pp("10.8.0.0/16"): ap("10.7.0.2"), pp("10.9.0.0/16"): ap("10.7.0.2"), pp("10.10.0.0/16"): {},
		pp("fd08::/64"): ap("fd07::2"), pp("fd08:2::/64"): ap("fd07::2"),
	}, 1400}
)

// bare has IPv4 routes, and no IPv4 address.
var bare = wanted{prefixes.MustParse("fd07::2/128"), map[netip.Prefix]netip.Addr{
	pp("10.8.0.0/16"): {}, pp("10.10.0.0/16"): {}, pp("fd08::/64"): ap("fd07::2"),
}, 1420}

type killed struct{}

// until runs f with h, which is killed before its n-th change; it reports whether it was.
func until(h *Host, n int, f func(*Host) error) (cut bool, err error) {
	h.before = func(string) error {
		if n--; n < 0 {
			panic(killed{})
		}
		return nil
	}
	defer func() {
		if p := recover(); p != nil {
			if p != (killed{}) {
				panic(p)
			}
			cut = true
			h.Close()
		}
	}()
	return false, f(h)
}

var layouts = map[string]Options{
	"default":  {},
	"device":   {Sources: SourceDevice},
	"loopback": {Sources: SourceLoopback},
	"table":    {Table: 7777, Policy: true, Mark: 51820},
	"cover":    {Cover: prefixes.MustParse("10.8.0.0/13", "fd08::/16")},
	"all": {Sources: SourceLoopback, Table: 7777, Policy: true, Mark: 51820, Cover: prefixes.MustParse("10.8.0.0/13", "fd08::/16"), Metric: 70, Priority: 100,
		Guard: prefixes.MustParse("10.0.0.0/8", "::/0")},
}

// Killed before any change of the host and started again, a mesh makes the host what it should be; or
// Cleanup makes it what it was.
func TestCut(t *testing.T) {
	for name, o := range layouts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSpace(t)
			s.uplink()
			before := s.raw()
			clean := func() {
				t.Helper()
				must(t, Cleanup(s.ctx(), s.options(o)))
				become(t, "not as it was", before, s.raw)
			}
			h := s.open(o)
			must(t, two.reach(s.ctx(), h))
			fresh := s.read(h)
			time.Sleep(100 * time.Millisecond) // for the routes of addresses
			want := s.raw()
			must(t, h.Close())
			clean()

			story := func(h *Host) error {
				if err := one.reach(s.ctx(), h); err != nil {
					return err
				}
				for _, w := range []wanted{two, bare, one} {
					if err := w.reach(s.ctx(), h); err != nil {
						return err
					}
				}
				return h.Remove(s.ctx())
			}
			cuts := 0
			for n := 0; ; n++ {
				cut := false
				for _, again := range []bool{true, false} {
					var err error
					h := s.open(o)
					cut, err = until(h, n, story)
					must(t, err)
					must(t, h.Close())
					if again && cut {
						h := s.open(o)
						must(t, two.reach(s.ctx(), h))
						must(t, two.reach(s.ctx(), h)) // what stands for what is known after the first time
						st := s.read(h)
						st.Link.Index = fresh.Link.Index
						if d := cmp.Diff(fresh, st, equal...); d != "" {
							t.Fatalf("cut at %d, started again:\n%s", n, d)
						}
						become(t, fmt.Sprintf("cut at %d, started again", n), want, s.raw)
						must(t, h.Close())
					}
					clean()
				}
				if !cut {
					break
				}
				cuts++
			}
			if cuts < 20 {
				t.Errorf("%d changes: too few to be all", cuts)
			}
			t.Logf("cut at each of %d changes", cuts)
		})
	}
}

// keeperLines are those of a dump that are about a keeper.
var keeperLines = regexp.MustCompile(`(?m)^.*\b192\.0\.0\.8\b.*\n`)

// Another start with other Options leaves nothing of the former ones.
func TestOtherOptions(t *testing.T) {
	t.Parallel()
	all := slices.Sorted(maps.Keys(layouts))
	s := newSpace(t)
	s.uplink()
	before := s.dump()
	want := make(map[string]string)
	for _, name := range all {
		h := s.open(layouts[name])
		must(t, one.reach(s.ctx(), h))
		must(t, h.Close())
		time.Sleep(100 * time.Millisecond) // for the routes of addresses
		want[name] = s.dump()
		must(t, Cleanup(s.ctx(), s.options(Options{})))
		become(t, name+", cleaned without knowing", before, s.dump)
	}
	for _, from := range all {
		for _, to := range all {
			h := s.open(layouts[from])
			must(t, one.reach(s.ctx(), h))
			must(t, h.Close())
			h = s.open(layouts[to])
			must(t, one.reach(s.ctx(), h))
			must(t, one.reach(s.ctx(), h))
			become(t, "from "+from+" to "+to, want[to], func() string {
				now := s.dump()
				if layouts[to].Sources == SourceLoopback { // the link has had an address, and keeps its routes
					now = keeperLines.ReplaceAllString(now, "")
				}
				return now
			})
			if st := s.read(h); !st.Ready || st.Addrs != one.addrs || !maps.Equal(st.Routes, one.routes) {
				t.Errorf("from %s to %s: read %+v", from, to, st)
			}
			must(t, h.Remove(s.ctx()))
			must(t, h.Close())
		}
	}
	become(t, "in the end", before, s.dump)
}

// A restart writes nothing where nothing changed.
func TestRestart(t *testing.T) {
	for name, o := range layouts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSpace(t)
			h := s.open(o)
			must(t, one.reach(s.ctx(), h))
			for range 2 {
				writes := 0
				h.before = func(what string) error { writes++; return fmt.Errorf("unwanted: %s", what) }
				must(t, one.reach(s.ctx(), h))
				if writes != 0 {
					t.Errorf("%d changes", writes)
				}
				must(t, h.Close())
				h = s.open(o)
			}
		})
	}
}

var equal = []cmp.Option{
	cmp.Comparer(func(a, b prefixes.Set) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmpopts.EquateErrors(), cmpopts.EquateEmpty(),
}
