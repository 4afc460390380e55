package roles

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/mesh/watch"
	"github.com/warren-mesh/warren/roles/internal/textfile"
)

// runs runs an Assigned in a bubble until the test ends.
func runs(t *testing.T, a Assigned) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.(interface{ Run(context.Context) error }).Run(ctx) }()
	wait(10 * pace)
	return func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// says compares what an Assigned says; want "?" is that it does not know.
func says(t *testing.T, when string, a Assigned, want string, conditions ...view.Kind) {
	t.Helper()
	names, known, _ := a.Current()
	got := strings.Join(names, " ")
	if !known {
		got = "?"
	}
	if got != want {
		t.Errorf("%s: %q, want %q", when, got, want)
	}
	var kinds []view.Kind
	if c, ok := a.(interface{ Conditions() []view.Condition }); ok {
		for _, c := range c.Conditions() {
			kinds = append(kinds, c.Kind)
			if c.Message == "" || c.Subject == "" {
				t.Errorf("%s: %+v", when, c)
			}
		}
	}
	if !slices.Equal(kinds, conditions) {
		t.Errorf("%s: conditions %q, want %q", when, kinds, conditions)
	}
}

func TestFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "roles")
		put := func(text string) {
			t.Helper()
			if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(path+".new", path); err != nil {
				t.Fatal(err)
			}
			wait(FileEvery)
		}
		f := File(path)
		defer runs(t, f)()
		says(t, "no file", f, "?", AssignmentRefused)
		_, _, changed := f.Current()
		put("# roles\n\n worker # this one\ngateway\r\nworker\n")
		says(t, "two", f, "gateway worker")
		select {
		case <-changed:
		default:
			t.Error("nobody is told")
		}
		_, _, changed = f.Current()
		put("gateway\nworker\n")
		select {
		case <-changed:
			t.Error("told of nothing")
		default:
		}
		for name, nonsense := range map[string]string{
			"words": "gateway worker\n", "case": "Worker\n", "binary": "\x00\xff\n", "yaml": "roles: [a]\n",
			"long": strings.Repeat("a", 1000), "large": strings.Repeat("#", textfile.Max+1),
		} {
			put(nonsense)
			says(t, name, f, "gateway worker", AssignmentRefused)
		}
		put("")
		says(t, "empty", f, "")
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		wait(FileEvery)
		says(t, "gone", f, "", AssignmentRefused)
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		wait(FileEvery)
		says(t, "a folder", f, "", AssignmentRefused)
	})
}

func FuzzFile(f *testing.F) {
	for _, s := range []string{"a\nb\n", "# x\n", "a#b", "\x00", ""} {
		f.Add(s)
	}
	path := filepath.Join(f.TempDir(), "roles")
	f.Fuzz(func(t *testing.T, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		names, err := readNames(path)
		for _, n := range names {
			if !nameRE.MatchString(n) || !strings.Contains(text, n) {
				t.Errorf("%q is no name", n)
			}
		}
		if err != nil && len(err.Error()) > 1000 {
			t.Errorf("a long error: %d bytes", len(err.Error()))
		}
	})
}

// The last known roles outlive the program, and only those.
func TestCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "new", "roles.json")
		var is settable
		c := Cached(&is, path, nil)
		stop := runs(t, c)
		says(t, "first start", c, "?")
		is.assign("worker", "gateway")
		wait(10 * pace)
		says(t, "told", c, "gateway worker")
		is.v.Set(assignment{})
		wait(10 * pace)
		says(t, "not told any more", c, "gateway worker")
		stop()

		c = Cached(&settable{}, path, nil)
		stop = runs(t, c)
		says(t, "a start without being told", c, "gateway worker")
		stop()

		is.assign() // none, which is known
		c = Cached(&is, path, nil)
		stop = runs(t, c)
		says(t, "none", c, "")
		stop()
		c = Cached(&settable{}, path, nil)
		stop = runs(t, c)
		says(t, "none, not told", c, "")
		stop()

		for name, text := range map[string]string{
			"half": `{"version":1,"ro`, "empty": "", "version": `{"version":2,"roles":["a"]}`,
			"names": `{"version":1,"roles":["A b"]}`, "other": `{"version":1,"nodes":3}`, "list": `["a"]`,
		} {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			var is settable
			c := Cached(&is, path, nil)
			stop := runs(t, c)
			says(t, "corrupt: "+name, c, "?", AssignmentUnkept)
			is.assign("worker")
			wait(10 * pace)
			says(t, "corrupt, and told: "+name, c, "worker")
			stop()
			c = Cached(&settable{}, path, nil)
			stop = runs(t, c)
			says(t, "mended: "+name, c, "worker")
			stop()
		}
	})
}

// What cannot be kept is said, and has no effect but that.
func TestCachedUnwritable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		c := Cached(Static("a"), filepath.Join(dir, "file", "roles.json"), nil)
		defer runs(t, c)()
		says(t, "no folder", c, "a", AssignmentUnkept)
	})
}

func TestUnion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a, b settable
		path := filepath.Join(t.TempDir(), "none")
		u := Union(&a, &b, Cached(File(path), path+".cache", nil))
		defer runs(t, u)()
		says(t, "nothing is known", u, "?", AssignmentRefused)
		a.assign("x", "y")
		wait(10 * pace)
		says(t, "one is", u, "x y", AssignmentRefused)
		b.assign("y", "z")
		wait(10 * pace)
		says(t, "two are", u, "x y z", AssignmentRefused)
		a.assign()
		if err := os.WriteFile(path, []byte("f\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		wait(2 * time.Second)
		says(t, "all are", u, "f y z")
	})
}

func TestFromMesh(t *testing.T) {
	m := &watched{}
	byRecord, byLabel := FromMesh(m, nil), FromMesh(m, func(s view.Self) ([]string, bool) {
		names, ok := s.Record.Labels["roles"]
		return strings.Split(names, "."), ok
	})
	says(t, "no record", byRecord, "?")
	says(t, "no record", byLabel, "?")
	m.v.Set(view.View{Self: view.Self{Published: true, Record: record.Record{Roles: []string{"a"}, Labels: map[string]string{"roles": "b.c"}}}})
	says(t, "a record", byRecord, "a")
	says(t, "a record", byLabel, "b c")
}

type watched struct {
	testMesh
	v watch.Value[view.View]
}

func (w *watched) Current() (view.View, <-chan struct{}) {
	v, _, stale := w.v.Get()
	return v, stale
}

// A Manager without registry and network runs the roles that it had last, and says what it waits for.
func TestFromCacheAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "roles.json")
		if err := os.WriteFile(path, []byte(`{"version":1,"roles":["a","b"]}`), 0o600); err != nil {
			t.Fatal(err)
		}
		var log events
		a := &testRole{name: "a", log: &log}
		b := &testRole{name: "b", log: &log, run: func(context.Context, Node) error {
			return errors.New("dial tcp 192.0.2.1:2379: network is unreachable")
		}}
		m, stop := start(t, Config{Assigned: Cached(FromMesh(&watched{}, nil), path, nil), Roles: []Role{a, b}})
		wait(time.Minute)
		m.phase(t, "a", Healthy)
		if s := m.phase(t, "b", BackingOff); !strings.Contains(s.Error, "unreachable") || !has(m, RoleFailing, "b") {
			t.Errorf("b: %+v, %q", s, conditions(m))
		}
		_ = stop()
	})
}
