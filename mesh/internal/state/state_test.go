package state

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/internal/core"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, path string) *Dir {
	t.Helper()
	d, err := Open(path, "a", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func TestKeepsWhatOutlivesAProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	d := open(t, path)
	if !d.Created || d.Key.IsZero() || d.Starts != (core.Starts{}) {
		t.Errorf("new: created %v, starts %v", d.Created, d.Starts)
	}
	want := core.Starts{Epoch: 3, Generation: 2}
	if err := d.Keep(want); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	again := open(t, path)
	if again.Created || again.Key != d.Key || again.Starts != want {
		t.Errorf("again: created %v, same key %v, starts %v", again.Created, again.Key == d.Key, again.Starts)
	}
	var names []string
	files, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", f.Name(), info.Mode())
		}
		names = append(names, f.Name())
	}
	for _, n := range []string{"key", "lock", "owner", "starts"} {
		if !slices.Contains(names, n) {
			t.Errorf("no file %s in %v", n, names)
		}
	}
}

func TestRule17_OneAtATime(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	if _, err := Open(path, "a", nil); !errors.Is(err, ErrLocked) {
		t.Errorf("error is %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	open(t, path)
}

// A folder that cannot be used is not left locked.
func TestRefusedIsUnlocked(t *testing.T) {
	path := t.TempDir()
	starts := filepath.Join(path, startsFile)
	if err := os.WriteFile(starts, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, "a", nil); err == nil {
		t.Fatal("corrupt starts are taken")
	}
	if err := os.Remove(starts); err != nil {
		t.Fatal(err)
	}
	open(t, path)
}

func TestStartsAreReadableJSON(t *testing.T) {
	path := t.TempDir()
	if err := open(t, path).Keep(core.Starts{Epoch: 1, Generation: 1}); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(path, startsFile))
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]int
	if err := json.Unmarshal(data, &m); err != nil || m["Epoch"] != 1 || m["Generation"] != 1 {
		t.Errorf("%s: %v", data, err)
	}
}

// What replaces a file leaves nothing else behind, not even where it fails.
func TestWriteLeavesNoTemporary(t *testing.T) {
	path := t.TempDir()
	if err := os.Mkdir(filepath.Join(path, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := write(filepath.Join(path, "x"), nil); err == nil {
		t.Fatal("a file took the place of a folder")
	}
	if err := write(filepath.Join(path, "y"), []byte("1")); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(path)
	if err != nil || len(files) != 2 {
		t.Errorf("%v, %v", files, err)
	}
}
