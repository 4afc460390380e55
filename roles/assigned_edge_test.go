package roles

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/roles/part"
)

// A member of a Union whose Run fails does not keep the others from being known.
func TestEdgeUnionMemberFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "roles")
		bad := &runAssigned{run: func(context.Context) error { return errors.New("test") }}
		var log events
		_, stop := start(t, Config{Assigned: Union(File(path), bad), Roles: []Role{&testRole{name: "a", log: &log}, &testRole{name: "b", log: &log}}})
		wait(30 * time.Minute) // it backs off as long as it ever does
		wait(time.Second)
		if err := os.WriteFile(path, []byte("a\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		wait(10 * FileEvery)
		if got := log.take(); got != "+a" {
			t.Errorf("the file has named a for ten periods: %q", got)
		}
		_ = stop()
	})
}

// A member of a Union that does not know any more is not one that has none: what it said last holds.
func TestEdgeUnionMemberForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mesh settable
		mesh.assign("b")
		var log events
		_, stop := start(t, Config{Assigned: Union(Static("a"), &mesh), Roles: []Role{&testRole{name: "a", log: &log}, &testRole{name: "b", log: &log}}})
		wait(time.Second)
		log.take()
		mesh.v.Set(assignment{}) // unknown
		wait(time.Minute)
		if got := log.take(); got != "" {
			t.Errorf("one member does not know any more: %q", got)
		}
		_ = stop()
	})
}

// What was known last outlives a start at which only a part of a Union is known.
func TestEdgeCachedUnion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "roles.json")
		if err := os.WriteFile(path, []byte(`{"version":1,"roles":["a","b"]}`), 0o600); err != nil {
			t.Fatal(err)
		}
		var mesh settable // not known at this start
		var log events
		_, stop := start(t, Config{Assigned: Cached(Union(Static("a"), &mesh), path, nil), Roles: []Role{&testRole{name: "a", log: &log}, &testRole{name: "b", log: &log}}})
		wait(time.Minute)
		if got := log.take(); got != "+a +b" && got != "+b +a" {
			t.Errorf("started while the mesh is not known, with a and b in the cache: %q", got)
		}
		_ = stop()
		data, _ := os.ReadFile(path)
		t.Logf("the cache is %s", data)
	})
}

// What could not be kept is kept later, when it can be.
func TestEdgeCachedKeepsLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "state")
		path := filepath.Join(dir, "roles.json")
		var is settable
		is.assign("a")
		c := Cached(&is, path, nil)
		stop := runs(t, c)
		wait(time.Second)
		if err := errors.Join(os.Rename(dir, dir+".away"), os.WriteFile(dir, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		is.assign("b")
		wait(time.Second)
		says(t, "no folder", c, "b", AssignmentUnkept)
		if err := errors.Join(os.Remove(dir), os.Rename(dir+".away", dir)); err != nil {
			t.Fatal(err)
		}
		is.assign("b")
		wait(time.Hour)
		if data, _ := os.ReadFile(path); string(data) != `{"version":1,"roles":["b"]}`+"\n" {
			t.Errorf("the folder can be written to for an hour, and kept is %s", data)
		}
		says(t, "at the end", c, "b")
		stop()
	})
}

// Corrupt files are no assignment, and no empty one.
func TestEdgeCachedCorrupt(t *testing.T) {
	for _, text := range []string{`{"version":1,"roles":["a"]}les":["worker"]}`, `{"version":1}`} {
		synctest.Test(t, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "roles.json")
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			c := Cached(new(settable), path, nil)
			stop := runs(t, c)
			wait(time.Second)
			says(t, text, c, "?", AssignmentUnkept)
			stop()
		})
	}
}

// A member of a Union that has said all does not end the others.
func TestEdgeUnionMemberDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "roles")
		once := &runAssigned{run: func(context.Context) error { return part.ErrDone }}
		once.assign("a")
		var log events
		_, stop := start(t, Config{Assigned: Union(File(path), once), Roles: []Role{&testRole{name: "a", log: &log}, &testRole{name: "b", log: &log}}})
		wait(time.Second)
		log.take()
		if err := os.WriteFile(path, []byte("b\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		wait(time.Hour)
		if got := log.take(); got != "+b" {
			t.Errorf("the file has named b for an hour: %q", got)
		}
		_ = stop()
	})
}

// However many names an assignment has that nobody knows, what is said of them is bounded.
func TestEdgeManyUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		names := []string{"a"}
		for i := range 10000 {
			names = append(names, fmt.Sprintf("n%d", i))
		}
		m, stop := start(t, Config{Assigned: Static(names...), Roles: []Role{&testRole{name: "a", log: new(events)}}})
		wait(time.Second)
		if v, _ := m.Current(); len(v.Conditions) > 100 {
			t.Errorf("%d conditions", len(v.Conditions))
		}
		_ = stop()
	})
}
