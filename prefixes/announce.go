package prefixes

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
)

// Announcement is one prefix this node can reach.
type Announcement struct {
	Prefix netip.Prefix
	// Source is the address of this node to use for traffic into the mesh; the
	// zero Addr means none. It is of the family of Prefix, without a zone. It
	// need not be inside Prefix. Where the host does not have it, the mesh
	// puts it there for as long as it is used.
	Source netip.Addr
}

// Prefixes is where the parts of a node announce what it can reach.
type Prefixes interface {
	// Announce replaces all that source announced before; with no
	// announcements it withdraws it all. It does not block, keeps no hold of
	// a, and the same once more changes nothing.
	//
	// What can be taken is taken. What cannot is returned, joined, each as an
	// *[Error], and stays in [Snapshot.Problems] until source announces again.
	// An empty source name is an error, and nothing is taken.
	Announce(source string, a ...Announcement) error

	// Current returns what is announced now, and a channel that is closed at
	// the next change. It is cheap.
	Current() (Snapshot, <-chan struct{})
}

// Snapshot is what was announced at one time. It is shared by all who asked:
// its slices are not to be written to.
type Snapshot struct {
	// Announcements is what all sources announce, in canonical order, one for
	// each prefix. Where two sources give a prefix different Source addresses,
	// the source whose name sorts first wins, whoever came first.
	Announcements []Announcement
	// Problems is sorted by Source, then Value, then Reason.
	Problems []Problem

	set     Set
	setOf   *Announcement // the first of those set was made of
	sources map[string]announced
}

// Problem is an announcement that was not taken as it was given.
type Problem struct {
	Source string // name of the source, as given to Announce
	Value  string // the prefix, as it was given
	Reason string
	// Refused is true where nothing was taken of it. It is false where it was
	// taken after a fix, such as host bits cut, and where the prefix is
	// announced with another Source address than this one.
	Refused bool
}

// Set returns the prefixes of s.Announcements.
func (s Snapshot) Set() Set {
	if len(s.Announcements) == 0 {
		return Set{}
	}
	if &s.Announcements[0] == s.setOf && len(s.Announcements) == s.set.Len() {
		return s.set
	}
	// Put together by other hands than a Table's.
	ps := make([]netip.Prefix, len(s.Announcements))
	for i, a := range s.Announcements {
		ps[i] = a.Prefix
	}
	set, _ := New(ps...)
	return set
}

// Sources returns, sorted, the names of those who announced something, even if
// all of it was refused.
func (s Snapshot) Sources() []string {
	return slices.Sorted(maps.Keys(s.sources))
}

// BySource returns what the named source announces, in canonical order,
// including where the Source address used is that of another. The slice is not
// to be written to.
func (s Snapshot) BySource(name string) []Announcement {
	return s.sources[name].taken
}

// announced is what one source announced.
type announced struct {
	taken    []Announcement // canonical, in order, one for each prefix
	problems []Problem
}

// Table implements [Prefixes] in memory. The zero value is an empty table. It
// is safe for concurrent use.
type Table struct {
	mu      sync.Mutex // held by writers
	sources map[string]announced
	current atomic.Pointer[generation]
}

// generation is immutable but for stale, which is closed when the next one is
// in place.
type generation struct {
	snapshot Snapshot
	stale    chan struct{}
}

var _ Prefixes = (*Table)(nil)

// NewTable returns an empty table.
func NewTable() *Table { return new(Table) }

var errNoName = errors.New("prefixes: announcement from a source without a name")

// Announce implements [Prefixes].
func (t *Table) Announce(source string, a ...Announcement) error {
	if source == "" {
		return errNoName
	}
	next, err := take(source, a)

	t.mu.Lock()
	defer t.mu.Unlock()
	have := t.sources[source]
	if slices.Equal(have.taken, next.taken) && slices.Equal(have.problems, next.problems) {
		return err
	}
	if t.sources == nil {
		t.sources = make(map[string]announced)
	}
	if len(a) == 0 {
		delete(t.sources, source)
	} else {
		t.sources[source] = next
	}
	old := t.current.Swap(&generation{merge(t.sources), make(chan struct{})})
	if old != nil {
		close(old.stale)
	}
	return err
}

// Current implements [Prefixes].
func (t *Table) Current() (Snapshot, <-chan struct{}) {
	g := t.current.Load()
	if g == nil {
		t.current.CompareAndSwap(nil, &generation{stale: make(chan struct{})})
		g = t.current.Load()
	}
	return g.snapshot, g.stale
}

// take sorts out what one source announces.
func take(source string, as []Announcement) (announced, error) {
	var (
		out  announced
		errs []error
	)
	seen := make(map[netip.Prefix]netip.Addr, len(as))
	for _, a := range as {
		value := text(a.Prefix)
		note := func(reason string, refused bool) {
			out.problems = append(out.problems, Problem{source, value, reason, refused})
		}
		c, masked, reason := canonical(a.Prefix)
		if reason == "" && a.Source.IsValid() {
			switch {
			case a.Source.Zone() != "": // first, for Unmap would drop it
				reason = fmt.Sprintf("source address %v has a zone", a.Source)
			case a.Source.Unmap().Is4() != c.Addr().Is4():
				reason = fmt.Sprintf("source address %v is of the other family", a.Source)
			}
			a.Source = a.Source.Unmap()
		}
		if reason != "" {
			note(reason, true)
			errs = append(errs, &Error{Value: value, Reason: reason})
			continue
		}
		if masked {
			note("has host bits: taken as "+c.String(), false)
		}
		if first, dup := seen[c]; dup {
			if first != a.Source {
				note(fmt.Sprintf("source address %v: announced before, with %v", orNone(a.Source), orNone(first)), false)
			}
			continue
		}
		seen[c] = a.Source
		out.taken = append(out.taken, Announcement{c, a.Source})
	}
	slices.SortFunc(out.taken, func(a, b Announcement) int { return Compare(a.Prefix, b.Prefix) })
	out.problems = sortProblems(out.problems)
	return out, join(errs)
}

// merge makes the snapshot of all sources.
func merge(sources map[string]announced) Snapshot {
	type claim struct {
		elem   elem
		source string
		ann    Announcement
	}
	var (
		claims   []claim
		problems []Problem
	)
	for name, s := range sources {
		problems = append(problems, s.problems...)
		for _, a := range s.taken {
			claims = append(claims, claim{encode(a.Prefix), name, a})
		}
	}
	slices.SortFunc(claims, func(a, b claim) int {
		return cmp.Or(bytes.Compare(a.elem[:], b.elem[:]), cmp.Compare(a.source, b.source))
	})
	var (
		as     []Announcement
		es     []elem
		winner claim
	)
	for i, c := range claims {
		if i > 0 && c.elem == winner.elem {
			if c.ann.Source != winner.ann.Source {
				problems = append(problems, Problem{
					Source: c.source,
					Value:  c.ann.Prefix.String(),
					Reason: fmt.Sprintf("source address %v: %q announces it with %v",
						orNone(c.ann.Source), winner.source, orNone(winner.ann.Source)),
				})
			}
			continue
		}
		winner = c
		as = append(as, c.ann)
		es = append(es, c.elem)
	}
	snap := Snapshot{
		Announcements: slices.Clip(as),
		Problems:      sortProblems(problems),
		set:           fromElems(es),
		sources:       maps.Clone(sources),
	}
	if len(as) > 0 {
		snap.setOf = &snap.Announcements[0]
	}
	return snap
}

func sortProblems(ps []Problem) []Problem {
	slices.SortFunc(ps, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Source, b.Source), cmp.Compare(a.Value, b.Value), cmp.Compare(a.Reason, b.Reason))
	})
	return slices.Clip(slices.Compact(ps))
}

func orNone(a netip.Addr) string {
	if !a.IsValid() {
		return "none"
	}
	return a.String()
}
