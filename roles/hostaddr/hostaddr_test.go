package hostaddr

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// table is a roles.Mesh without a mesh, which also takes endpoints.
type table struct {
	*prefixes.Table
	mu     sync.Mutex
	es     []record.Endpoint
	refuse error
}

func (*table) Current() (view.View, <-chan struct{}) { return view.View{}, nil }
func (t *table) Prefixes() prefixes.Prefixes         { return t.Table }

func (t *table) SetEndpoints(es ...record.Endpoint) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refuse != nil {
		return t.refuse
	}
	t.es = es
	return nil
}

// text is the endpoints, and what is announced.
func (t *table) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []string
	for _, e := range t.es {
		all = append(all, e.Addr.String())
	}
	s, _ := t.Table.Current()
	if len(s.Announcements) > 0 {
		all = append(all, "|")
	}
	for _, a := range s.Announcements {
		all = append(all, a.Prefix.String())
	}
	return strings.Join(all, " ")
}

// run runs a role until stop is called.
func run(t *testing.T, o Options) (tab *table, m *roles.Manager, stop func()) {
	t.Helper()
	tab = &table{Table: prefixes.NewTable()}
	o.Endpoints = tab.SetEndpoints
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	m, err = roles.New(roles.Config{Roles: []roles.Role{r}, Assigned: roles.Static(Name), Mesh: tab})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	return tab, m, func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if got := tab.text(); got != "" {
			t.Errorf("at the end: %s", got)
		}
	}
}

func conditions(m *roles.Manager) (kinds []string) {
	v, _ := m.Current()
	for _, c := range v.Conditions {
		kinds = append(kinds, string(c.Kind))
	}
	return kinds
}

func addrs(s ...string) (as []netip.Addr) {
	for _, s := range s {
		as = append(as, netip.MustParseAddr(s))
	}
	return as
}

// host is one whose addresses are what a test says.
type host struct {
	mu    sync.Mutex
	addrs []netip.Addr
	err   error
	reads int
	heard chan struct{}
}

func newHost(s ...string) *host { return &host{addrs: addrs(s...), heard: make(chan struct{}, 1)} }

func (h *host) options() Options {
	return Options{
		read: func() ([]netip.Addr, error) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.reads++
			return slices.Clone(h.addrs), h.err
		},
		events: func() (<-chan struct{}, func(), error) { return h.heard, func() {}, nil },
	}
}

func (h *host) set(err error, s ...string) {
	h.mu.Lock()
	h.addrs, h.err = addrs(s...), err
	h.mu.Unlock()
	select {
	case h.heard <- struct{}{}:
	default:
	}
}

func wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// A new address is told at once, and one that is gone, once it stays gone.
func TestDamped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost("192.0.2.1", "2001:db8::1")
		o := h.options()
		o.Announce = true
		tab, m, stop := run(t, o)
		is := func(when, want string, kinds ...string) {
			t.Helper()
			synctest.Wait()
			if got := tab.text(); got != want {
				t.Errorf("%s: %s, want %s", when, got, want)
			}
			if got := conditions(m); !slices.Equal(got, kinds) {
				t.Errorf("%s: conditions %q", when, got)
			}
		}
		const both = "192.0.2.1 2001:db8::1 | 192.0.2.1/32 2001:db8::1/128"
		wait(time.Second)
		is("at first", both)
		h.set(nil, "198.51.100.1", "192.0.2.1", "2001:db8::1")
		wait(settle)
		is("one is new", "198.51.100.1 192.0.2.1 2001:db8::1 | 192.0.2.1/32 198.51.100.1/32 2001:db8::1/128")
		wait(time.Second)
		h.set(nil, "192.0.2.1", "2001:db8::1")
		wait(4 * time.Second)
		is("it is gone for 4 s", "192.0.2.1 2001:db8::1 198.51.100.1 | 192.0.2.1/32 198.51.100.1/32 2001:db8::1/128")
		wait(2 * time.Second)
		is("it is gone", both)
		for range 10 { // up and down
			h.set(nil, "192.0.2.1")
			wait(2 * time.Second)
			is("down for a moment", both)
			h.set(nil, "192.0.2.1", "2001:db8::1")
			wait(2 * time.Second)
			is("up", both)
		}
		h.set(errors.New("too many open files"))
		wait(time.Hour)
		is("it cannot be read", both, string(Unreadable))
		h.set(nil)
		wait(2 * time.Minute)
		is("nothing is left", "", string(None))
		h.set(nil, "192.0.2.1")
		wait(between + settle)
		is("one is back", "192.0.2.1 | 192.0.2.1/32")
		tab.mu.Lock()
		tab.refuse = errors.New("not these")
		tab.mu.Unlock()
		h.set(nil, "192.0.2.7")
		wait(time.Second)
		is("refused", "192.0.2.1 | 192.0.2.1/32", string(Refused))
		tab.mu.Lock()
		tab.refuse = nil
		tab.mu.Unlock()
		wait(2 * time.Minute)
		is("taken", "192.0.2.7 | 192.0.2.7/32")
		stop()
	})
}

// A host that is never at rest is looked at twice a second, and no more.
func TestStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost("192.0.2.1")
		tab, _, stop := run(t, h.options())
		wait(time.Second)
		for i := range 10000 {
			h.set(nil, fmt.Sprintf("192.0.2.%d", i%2+1))
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if h.reads > 24 || h.reads < 15 {
			t.Errorf("it was read %d times in 10 s", h.reads)
		}
		if got := tab.text(); !strings.Contains(got, "192.0.2.1") || !strings.Contains(got, "192.0.2.2") {
			t.Errorf("what flaps is not told all the time: %s", got)
		}
		stop()
	})
}

// Who is not told any more of changes begins anew.
func TestDeaf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost("192.0.2.1")
		o := h.options()
		begun := 0
		o.events = func() (<-chan struct{}, func(), error) {
			begun++
			if begun == 1 {
				c := make(chan struct{})
				time.AfterFunc(time.Minute, func() { close(c) })
				return c, func() {}, nil
			}
			return nil, nil, errors.New("no descriptors")
		}
		tab, m, stop := run(t, o)
		wait(2 * time.Minute)
		if v, _ := m.Current(); begun != 2 || v.Roles[0].Phase != roles.Healthy || tab.text() != "192.0.2.1" {
			t.Errorf("begun %d times, %+v", begun, v.Roles)
		}
		h.set(nil, "192.0.2.2")
		wait(time.Minute)
		if got := tab.text(); got != "192.0.2.2" {
			t.Errorf("not looked at: %s", got)
		}
		stop()
	})
}

// What is told holds all that was found, as far as there is room, and nothing that is gone for longer than damp.
func TestStep(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var is told
		now := time.Unix(1e9, 0)
		last := make(map[netip.Addr]time.Time) // seen
		damp := time.Duration(rapid.IntRange(0, 10).Draw(t, "damp")) * time.Second
		most := rapid.IntRange(1, 6).Draw(t, "most")
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(1, 6000).Draw(t, "ms")) * time.Millisecond)
			var found []netip.Addr
			for _, i := range rapid.SliceOfNDistinct(rapid.ByteRange(1, 6), 0, most, rapid.ID[byte]).Draw(t, "found") {
				found = append(found, netip.AddrFrom4([4]byte{192, 0, 2, i}))
			}
			before := slices.Clone(is.addrs)
			got, due := is.step(now, found, damp, most)
			if len(got) > most || !slices.Equal(got[:len(found)], found) {
				t.Fatalf("found %v, told %v", found, got)
			}
			for _, a := range got[len(found):] {
				if !slices.Contains(before, a) || now.Sub(last[a]) < 0 || due.IsZero() || due.Before(now) {
					t.Fatalf("told %v of before, due %v", a, due)
				}
			}
			for _, a := range found {
				last[a] = now
			}
		}
	})
}

func TestAllowed(t *testing.T) {
	ls := []Link{{"eth0", true, addrs("192.0.2.1", "10.0.0.1")}, {"eth1", true, addrs("192.0.2.2")}, {"wg0", true, addrs("10.0.0.2")}}
	for _, test := range []struct {
		o    Options
		want string
	}{
		{Options{}, "192.0.2.1 10.0.0.1 192.0.2.2 10.0.0.2"},
		{Options{Interfaces: []string{"eth*"}}, "192.0.2.1 10.0.0.1 192.0.2.2"},
		{Options{Interfaces: []string{"eth1", "wg0"}}, "192.0.2.2 10.0.0.2"},
		{Options{Within: prefixes.MustParse("192.0.2.0/24")}, "192.0.2.1 192.0.2.2"},
		{Options{Skip: func(link string, a netip.Addr) bool { return link == "wg0" || a.String() == "10.0.0.1" }}, "192.0.2.1 192.0.2.2"},
	} {
		r, err := New(test.o)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range r.allowed(ls) {
			for _, a := range l.Addrs {
				got = append(got, a.String())
			}
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%+v: %s, want %s", test.o, got, test.want)
		}
	}
	if len(ls[0].Addrs) != 2 {
		t.Error("the links are changed")
	}
}

func TestNewRefuses(t *testing.T) {
	for want, o := range map[string]Options{
		`Interfaces: "[" is no pattern`: {Interfaces: []string{"["}},
		`Interfaces: "" is no pattern`:  {Interfaces: []string{""}},
		"Max: 65 is outside":            {Max: 65},
		"Again: 1ms is below":           {Again: time.Millisecond},
	} {
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}
