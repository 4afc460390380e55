package prefixes_test

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/warren-mesh/warren/prefixes"
	"pgregory.net/rapid"
)

func ann(prefix, source string) prefixes.Announcement {
	a := prefixes.Announcement{Prefix: netip.MustParsePrefix(prefix)}
	if source != "" {
		a.Source = netip.MustParseAddr(source)
	}
	return a
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestTable(t *testing.T) {
	var table prefixes.Table
	empty, stale := table.Current()
	if len(empty.Announcements) != 0 || len(empty.Problems) != 0 || !empty.Set().IsEmpty() || len(empty.Sources()) != 0 || stale == nil || closed(stale) {
		t.Fatalf("zero Table: %+v, %v", empty, stale)
	}
	if _, again := table.Current(); again != stale {
		t.Error("another channel without a change")
	}

	step := func(changes bool, err string, source string, as ...prefixes.Announcement) prefixes.Snapshot {
		t.Helper()
		_, stale := table.Current()
		got := table.Announce(source, as...)
		if (got == nil) != (err == "") || got != nil && got.Error() != err {
			t.Errorf("Announce(%q, %v)\n got %v\nwant %v", source, as, got, err)
		}
		if closed(stale) != changes {
			t.Errorf("Announce(%q, %v): channel closed is %v", source, as, !changes)
		}
		s, next := table.Current()
		if closed(next) {
			t.Error("a closed channel from Current")
		}
		return s
	}
	is := func(s prefixes.Snapshot, as string, problems ...prefixes.Problem) {
		t.Helper()
		if got := fmt.Sprint(s.Announcements); got != as {
			t.Errorf("announcements\n got %s\nwant %s", got, as)
		}
		if !slices.Equal(s.Problems, problems) {
			t.Errorf("problems\n got %+v\nwant %+v", s.Problems, problems)
		}
	}

	s := step(true, "", "pods", ann("fd00::/64", ""), ann("10.1.0.0/24", "10.1.0.1"))
	is(s, "[{10.1.0.0/24 10.1.0.1} {fd00::/64 invalid IP}]")
	step(false, "", "pods", ann("10.1.0.0/24", "10.1.0.1"), ann("fd00::/64", ""))
	step(false, "", "pods", ann("::ffff:10.1.0.0/120", "::ffff:10.1.0.1"), ann("fd00::/64", ""), ann("fd00::/64", ""))
	step(false, "", "nobody")
	step(false, `prefixes: announcement from a source without a name`, "", ann("10.0.0.0/8", ""))
	first := s

	// Host bits: taken, and told of.
	s = step(true, "", "hosts", ann("10.9.0.1/24", ""))
	masked := prefixes.Problem{Source: "hosts", Value: "10.9.0.1/24", Reason: "has host bits: taken as 10.9.0.0/24"}
	is(s, "[{10.1.0.0/24 10.1.0.1} {10.9.0.0/24 invalid IP} {fd00::/64 invalid IP}]", masked)

	// Another source address for the same prefix: "extra" sorts before "pods".
	s = step(true, "", "extra", ann("10.1.0.0/24", ""))
	shadow := prefixes.Problem{Source: "pods", Value: "10.1.0.0/24", Reason: `source address 10.1.0.1: "extra" announces it with none`}
	is(s, "[{10.1.0.0/24 invalid IP} {10.9.0.0/24 invalid IP} {fd00::/64 invalid IP}]", masked, shadow)
	if got := fmt.Sprint(s.BySource("pods")); got != "[{10.1.0.0/24 10.1.0.1} {fd00::/64 invalid IP}]" {
		t.Errorf("BySource: %s", got)
	}
	if got := s.Sources(); !slices.Equal(got, []string{"extra", "hosts", "pods"}) {
		t.Errorf("Sources: %q", got)
	}
	if want := prefixes.MustParse("10.1.0.0/24", "10.9.0.0/24", "fd00::/64"); s.Set() != want {
		t.Errorf("Set: %v", s.Set())
	}
	s = step(true, "", "extra", ann("10.1.0.0/24", "10.1.0.1")) // agrees
	is(s, "[{10.1.0.0/24 10.1.0.1} {10.9.0.0/24 invalid IP} {fd00::/64 invalid IP}]", masked)
	s = step(true, "", "extra")
	is(s, "[{10.1.0.0/24 10.1.0.1} {10.9.0.0/24 invalid IP} {fd00::/64 invalid IP}]", masked)

	// Refused ones cost the good ones nothing, and stay visible.
	bad := []prefixes.Announcement{
		{Prefix: netip.PrefixFrom(netip.MustParseAddr("10.0.0.0"), 64)},
		ann("fe80::/64", "fe80::1%eth0"),
		ann("10.2.0.0/24", "fd00::1"),
		ann("10.3.0.0/24", "10.3.0.1"),
		ann("10.3.0.0/24", "10.3.0.2"),
		ann("10.3.0.9/24", "10.3.0.1"),
		ann("fd00:3::/64", "::ffff:10.0.0.1"),
	}
	refused := `prefix "10.0.0.0/?": has a length out of range
prefix "fe80::/64": source address fe80::1%eth0 has a zone
prefix "10.2.0.0/24": source address fd00::1 is of the other family
prefix "fd00:3::/64": source address ::ffff:10.0.0.1 is of the other family`
	s = step(true, refused, "hosts", bad...)
	is(s, "[{10.1.0.0/24 10.1.0.1} {10.3.0.0/24 10.3.0.1} {fd00::/64 invalid IP}]",
		prefixes.Problem{Source: "hosts", Value: "10.0.0.0/?", Reason: "has a length out of range", Refused: true},
		prefixes.Problem{Source: "hosts", Value: "10.2.0.0/24", Reason: "source address fd00::1 is of the other family", Refused: true},
		prefixes.Problem{Source: "hosts", Value: "10.3.0.0/24", Reason: "source address 10.3.0.2: announced before, with 10.3.0.1"},
		prefixes.Problem{Source: "hosts", Value: "10.3.0.9/24", Reason: "has host bits: taken as 10.3.0.0/24"},
		prefixes.Problem{Source: "hosts", Value: "fd00:3::/64", Reason: "source address ::ffff:10.0.0.1 is of the other family", Refused: true},
		prefixes.Problem{Source: "hosts", Value: "fe80::/64", Reason: "source address fe80::1%eth0 has a zone", Refused: true},
	)
	err := table.Announce("hosts", bad...)
	var e *prefixes.Error
	if !errors.As(err, &e) || e.Value != "10.0.0.0/?" {
		t.Errorf("%#v in %v", e, err)
	}
	s = step(true, `prefix "invalid Prefix": is not a prefix`, "hosts", prefixes.Announcement{})
	is(s, "[{10.1.0.0/24 10.1.0.1} {fd00::/64 invalid IP}]",
		prefixes.Problem{Source: "hosts", Value: "invalid Prefix", Reason: "is not a prefix", Refused: true})
	if !slices.Contains(s.Sources(), "hosts") {
		t.Errorf("a source with nothing but problems is not in %q", s.Sources())
	}
	s = step(true, "", "hosts")
	is(s, "[{10.1.0.0/24 10.1.0.1} {fd00::/64 invalid IP}]")

	// A snapshot is of its time.
	step(true, "", "pods")
	is(first, "[{10.1.0.0/24 10.1.0.1} {fd00::/64 invalid IP}]")
	if first.Set() != prefixes.MustParse("10.1.0.0/24", "fd00::/64") || first.BySource("pods") == nil {
		t.Error("an old snapshot changed")
	}
}

// Who wins does not depend on who came first, nor on how often one looks.
func TestFirstSourceByNameWins(t *testing.T) {
	sources := []string{"a", "b", "c", "d"}
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}, {1, 3, 0, 2}} {
		for range 20 {
			table := prefixes.NewTable()
			for _, i := range order {
				_ = table.Announce(sources[i], ann("10.0.0.0/8", fmt.Sprintf("10.0.0.%d", i)))
			}
			s, _ := table.Current()
			if len(s.Announcements) != 1 || s.Announcements[0] != ann("10.0.0.0/8", "10.0.0.0") || len(s.Problems) != 3 {
				t.Fatalf("order %v: %v, %+v", order, s.Announcements, s.Problems)
			}
			_ = table.Announce("a")
			if s, _ = table.Current(); s.Announcements[0] != ann("10.0.0.0/8", "10.0.0.1") || len(s.Problems) != 2 {
				t.Fatalf("order %v, a gone: %v, %+v", order, s.Announcements, s.Problems)
			}
		}
	}
}

// A Table keeps no hold of what it was given.
func TestTableCopies(t *testing.T) {
	table := prefixes.NewTable()
	as := []prefixes.Announcement{ann("10.0.0.0/8", ""), ann("11.0.0.0/8", "")}
	if err := table.Announce("x", as...); err != nil {
		t.Fatal(err)
	}
	as[0] = ann("12.0.0.0/8", "")
	if s, _ := table.Current(); s.Set() != prefixes.MustParse("10.0.0.0/8", "11.0.0.0/8") {
		t.Errorf("changed from outside: %v", s.Set())
	}
}

// Set works on snapshots that come from elsewhere, or were cut down.
func TestSnapshotSet(t *testing.T) {
	table := prefixes.NewTable()
	_ = table.Announce("x", ann("10.0.0.0/8", ""), ann("11.0.0.0/8", ""))
	s, _ := table.Current()
	s.Announcements = s.Announcements[:1]
	if s.Set() != prefixes.MustParse("10.0.0.0/8") {
		t.Errorf("cut down: %v", s.Set())
	}
	s.Announcements = []prefixes.Announcement{ann("fd00::/8", ""), ann("10.0.0.0/8", "")}
	if s.Set() != prefixes.MustParse("10.0.0.0/8", "fd00::/8") {
		t.Errorf("replaced: %v", s.Set())
	}
	if s = (prefixes.Snapshot{Announcements: s.Announcements}); s.Set().Len() != 2 {
		t.Errorf("by hand: %v", s.Set())
	}
}

// The table against a model that keeps what was given, as it was given, and
// works everything out anew.
func TestTableAgainstModel(t *testing.T) {
	names := []string{"a", "b", "c"}
	addrs := []netip.Addr{{}, netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fe80::1%x")}
	// Mostly few prefixes, so that sources get in each other's way.
	genAnn := rapid.Custom(func(t *rapid.T) prefixes.Announcement {
		few := rapid.SampledFrom([]netip.Prefix{pfx("10.0.0.0/8"), pfx("10.0.0.1/8"), pfx("::ffff:10.0.0.0/104"), pfx("10.1.0.0/16"), pfx("fd00::/64")})
		return prefixes.Announcement{
			Prefix: rapid.OneOf(few, few, genPrefix([]window{windows[1], windows[4]}, true)).Draw(t, "prefix"),
			Source: rapid.SampledFrom(addrs).Draw(t, "source"),
		}
	})
	// good is what of as must be taken, the first of each prefix.
	good := func(as []prefixes.Announcement) (out []prefixes.Announcement, refused int) {
		for _, a := range as {
			c, ok := slowCanonical(a.Prefix)
			if !ok || a.Source.Zone() != "" || a.Source.IsValid() && a.Source.Is4() != c.Addr().Is4() {
				refused++
				continue
			}
			if !slices.ContainsFunc(out, func(b prefixes.Announcement) bool { return b.Prefix == c }) {
				out = append(out, prefixes.Announcement{Prefix: c, Source: a.Source})
			}
		}
		slices.SortFunc(out, func(a, b prefixes.Announcement) int { return slowCompare(a.Prefix, b.Prefix) })
		return out, refused
	}
	rapid.Check(t, func(t *rapid.T) {
		table := prefixes.NewTable()
		given := map[string][]prefixes.Announcement{}
		check := func(t *rapid.T) {
			s, _ := table.Current()
			var want []prefixes.Announcement
			var sources []string
			shadowed := map[string]bool{}
			for _, name := range names {
				if len(given[name]) > 0 {
					sources = append(sources, name)
				}
				as, _ := good(given[name])
				if !slices.Equal(s.BySource(name), as) {
					t.Fatalf("BySource(%s) = %v, want %v", name, s.BySource(name), as)
				}
				for _, a := range as {
					i := slices.IndexFunc(want, func(b prefixes.Announcement) bool { return b.Prefix == a.Prefix })
					if i < 0 {
						want = append(want, a)
					} else if want[i].Source != a.Source {
						shadowed[name+" "+a.Prefix.String()] = true
					}
				}
			}
			slices.SortFunc(want, func(a, b prefixes.Announcement) int { return slowCompare(a.Prefix, b.Prefix) })
			if !slices.Equal(s.Announcements, want) || !slices.Equal(s.Sources(), sources) {
				t.Fatalf("got %v of %v\nwant %v of %v", s.Announcements, s.Sources(), want, sources)
			}
			equal(t, "Set", s.Set(), makeSlow(slicesOf(want)...))
			if !slices.IsSortedFunc(s.Problems, func(a, b prefixes.Problem) int {
				return slices.Compare([]string{a.Source, a.Value, a.Reason}, []string{b.Source, b.Value, b.Reason})
			}) {
				t.Fatalf("problems not sorted: %v", s.Problems)
			}
			for _, p := range s.Problems {
				if strings.Contains(p.Reason, " announces it with ") {
					delete(shadowed, p.Source+" "+p.Value)
				}
			}
			if len(shadowed) > 0 {
				t.Fatalf("not told of: %v in %v", shadowed, s.Problems)
			}
			for _, name := range names {
				_, refused := good(given[name])
				told := slices.ContainsFunc(s.Problems, func(p prefixes.Problem) bool { return p.Source == name && p.Refused })
				if told != (refused > 0) {
					t.Fatalf("%s: %d refused, problems %v", name, refused, s.Problems)
				}
			}
		}
		announce := func(t *rapid.T, name string, as []prefixes.Announcement) {
			before, stale := table.Current()
			err := table.Announce(name, as...)
			_, refused := good(as)
			if countErrors(err) != refused {
				t.Fatalf("%d refused, error %v", refused, err)
			}
			given[name] = as
			after, _ := table.Current()
			if closed(stale) != !reflect.DeepEqual(before, after) {
				t.Fatalf("channel closed is %v: from %+v to %+v", closed(stale), before, after)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"announce": func(t *rapid.T) {
				announce(t, rapid.SampledFrom(names).Draw(t, "name"), rapid.SliceOfN(genAnn, 0, 6).Draw(t, "as"))
			},
			"withdraw": func(t *rapid.T) { announce(t, rapid.SampledFrom(names).Draw(t, "name"), nil) },
			"again": func(t *rapid.T) {
				name := rapid.SampledFrom(names).Draw(t, "name")
				_, stale := table.Current()
				announce(t, name, given[name])
				if closed(stale) {
					t.Fatal("the same again closed the channel")
				}
			},
			"": check,
		})
	})
}

func slicesOf(as []prefixes.Announcement) []netip.Prefix {
	var ps []netip.Prefix
	for _, a := range as {
		ps = append(ps, a.Prefix)
	}
	return ps
}

// Announcers at work at once, and watchers that must each end up at the last
// state by following the channel alone.
func TestTableConcurrently(t *testing.T) {
	const announcers, rounds = 6, 200
	table := prefixes.NewTable()
	at := func(i, k int) prefixes.Announcement {
		return ann(fmt.Sprintf("10.%d.%d.0/24", i, k), "")
	}
	var last []netip.Prefix
	for i := range announcers {
		last = append(last, at(i, rounds-1).Prefix, at(99, 0).Prefix)
	}
	want := prefixes.Must(last...)

	var wg sync.WaitGroup
	for i := range announcers {
		wg.Go(func() {
			for k := range rounds {
				if k%10 == 5 {
					_ = table.Announce(fmt.Sprint(i))
				}
				if err := table.Announce(fmt.Sprint(i), at(i, k), at(99, 0)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 3 {
		wg.Go(func() {
			for {
				s, stale := table.Current()
				if s.Set().Len() != len(s.Announcements) || len(s.Announcements) > announcers+1 {
					t.Errorf("torn snapshot: %v, %v", s.Set(), s.Announcements)
				}
				if s.Set() == want {
					return
				}
				<-stale
			}
		})
	}
	wg.Wait()
	if s, stale := table.Current(); s.Set() != want || closed(stale) {
		t.Errorf("ended with %v, want %v", s.Set(), want)
	}
}

func BenchmarkTable(b *testing.B) {
	for _, n := range []int{10, 1000, 10000} {
		table := prefixes.NewTable()
		var as []prefixes.Announcement
		for p := range spread(n, 0).All() {
			as = append(as, prefixes.Announcement{Prefix: p})
		}
		_ = table.Announce("many", as...)
		b.Run(fmt.Sprintf("Current/%d", n), func(b *testing.B) {
			for b.Loop() {
				table.Current()
			}
		})
		b.Run(fmt.Sprintf("Announce/same/%d", n), func(b *testing.B) {
			for b.Loop() {
				_ = table.Announce("many", as...)
			}
		})
		one := []prefixes.Announcement{ann("192.0.2.0/24", ""), ann("198.51.100.0/24", "")}
		b.Run(fmt.Sprintf("Announce/one/%d", n), func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				_ = table.Announce("one", one[i%2])
			}
		})
	}
}
