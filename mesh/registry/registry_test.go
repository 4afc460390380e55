package registry_test

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/registry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var long = strings.Repeat("a", 253)

func TestParseID(t *testing.T) {
	for _, c := range []struct{ id, kind, name, reason string }{
		{id: "node/a", kind: "node", name: "a"},
		{id: "node/0", kind: "node", name: "0"},
		{id: "node/a.b-c.0", kind: "node", name: "a.b-c.0"},
		{id: "node/a--b", kind: "node", name: "a--b"},
		{id: "n/" + long, kind: "n", name: long},
		{id: "node-2/a", kind: "node-2", name: "a"},
		{id: strings.Repeat("k", 63) + "/a", kind: strings.Repeat("k", 63), name: "a"},

		{id: "", reason: "has no '/' between kind and name"},
		{id: "node", reason: "has no '/' between kind and name"},
		{id: "/a", reason: "the kind is empty"},
		{id: "2node/a", reason: "the kind does not begin with a lower-case letter"},
		{id: "-/a", reason: "the kind does not begin with a lower-case letter"},
		{id: "nodE/a", reason: "the kind has 'E', only a-z, 0-9 and '-' are allowed"},
		{id: "no.de/a", reason: "the kind has '.', only a-z, 0-9 and '-' are allowed"},
		{id: strings.Repeat("k", 64) + "/a", reason: "the kind has 64 bytes, at most 63 are allowed"},
		{id: "node/", reason: "the name is empty"},
		{id: "node/" + long + "a", reason: "the name has 254 bytes, at most 253 are allowed"},
		{id: "node/A", reason: "the name has 'A', only a-z, 0-9, '-' and '.' are allowed"},
		{id: "node/a/b", reason: "the name has '/', only a-z, 0-9, '-' and '.' are allowed"},
		{id: "node/a_b", reason: "the name has '_', only a-z, 0-9, '-' and '.' are allowed"},
		{id: "node/a\n", reason: `the name has '\n', only a-z, 0-9, '-' and '.' are allowed`},
		{id: "node/é", reason: "the name has 'Ã', only a-z, 0-9, '-' and '.' are allowed"},
		{id: "node/.", reason: "the name has an empty label"},
		{id: "node/..", reason: "the name has an empty label"},
		{id: "node/a..b", reason: "the name has an empty label"},
		{id: "node/.a", reason: "the name has an empty label"},
		{id: "node/a.", reason: "the name has an empty label"},
		{id: "node/-a", reason: "the name has a label that begins or ends with '-'"},
		{id: "node/a.b-", reason: "the name has a label that begins or ends with '-'"},
	} {
		kind, name, err := registry.ParseID(c.id)
		if kind != c.kind || name != c.name {
			t.Errorf("ParseID(%q) = %q, %q", c.id, kind, name)
		}
		if c.reason == "" {
			if err != nil {
				t.Errorf("ParseID(%q): %v", c.id, err)
			}
			if id := registry.ID(kind, name); id != c.id {
				t.Errorf("ID(%q, %q) = %q", kind, name, id)
			}
			continue
		}
		e, ok := errors.AsType[*registry.IDError](err)
		if !ok || e.ID != c.id || e.Reason != c.reason || !errors.Is(err, registry.ErrInvalidID) {
			t.Errorf("ParseID(%q): %v, want %q", c.id, err, c.reason)
		}
		if n := len(err.Error()); n > 300 {
			t.Errorf("ParseID of %d bytes: the error has %d", len(c.id), n)
		}
	}
	if id := registry.NodeID("a"); id != "node/a" {
		t.Errorf("NodeID: %q", id)
	}
}

func TestCheckEntry(t *testing.T) {
	if err := registry.CheckEntry(registry.Entry{ID: "node/a", Data: make([]byte, registry.MaxData)}); err != nil {
		t.Error(err)
	}
	err := registry.CheckEntry(registry.Entry{ID: "node/a", Data: make([]byte, registry.MaxData+1)})
	if want := "registry entry too large: node/a has 1048577 bytes, at most 1048576 are allowed"; !errors.Is(err, registry.ErrTooLarge) || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	if err := registry.CheckEntry(registry.Entry{ID: "a"}); !errors.Is(err, registry.ErrInvalidID) {
		t.Error(err)
	}
	if err := registry.CheckName("A"); !errors.Is(err, registry.ErrInvalidID) || err.Error() != `invalid registry ID "A": as a name has 'A', only a-z, 0-9, '-' and '.' are allowed` {
		t.Error(err)
	}
	if err := registry.CheckKind("A"); !errors.Is(err, registry.ErrInvalidID) {
		t.Error(err)
	}
	if err := errors.Join(registry.CheckName("a"), registry.CheckKind("a")); err != nil {
		t.Error(err)
	}
}

func TestState(t *testing.T) {
	var s registry.State
	s.Apply(registry.Batch{Revision: 1, Put: []registry.Entry{{ID: "node/a"}}})
	if s.Known || !slices.Equal(s.IDs(), []string{"node/a"}) {
		t.Fatalf("%+v", s)
	}
	s.Apply(registry.Batch{Revision: 9, Reset: true, Put: []registry.Entry{{ID: "node/b"}, {ID: "node/c"}}})
	s.Apply(registry.Batch{Revision: 10, Put: []registry.Entry{{ID: "node/a"}}, Deleted: []string{"node/c", "node/x"}})
	if !s.Known || s.Revision != 10 || !slices.Equal(s.IDs(), []string{"node/a", "node/b"}) {
		t.Fatalf("%+v", s)
	}
	s.Apply(registry.Batch{Revision: 2, Reset: true})
	if !s.Known || s.Revision != 2 || len(s.IDs()) != 0 {
		t.Fatalf("%+v", s)
	}
}

// The oracle is the grammar as one expression.
var valid = regexp.MustCompile(`\A[a-z][a-z0-9-]{0,62}/[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*\z`)

func FuzzParseID(f *testing.F) {
	for _, id := range []string{"node/a", "node/a.b", "node/..", "node/-", "/", "node/" + long, "node/\xff", "a/0-0.0"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		kind, name, err := registry.ParseID(id)
		if want := valid.MatchString(id) && len(name) <= registry.MaxName; (err == nil) != want && len(id) < 200 {
			t.Fatalf("ParseID(%q): %v", id, err)
		}
		if err == nil && registry.ID(kind, name) != id {
			t.Fatalf("ParseID(%q) = %q, %q", id, kind, name)
		}
		if err != nil && (!errors.Is(err, registry.ErrInvalidID) || len(err.Error()) > 400) {
			t.Fatalf("ParseID(%q): %v", id, err)
		}
	})
}
