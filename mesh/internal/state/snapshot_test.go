package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/mesh/registry"
)

func TestSnapshot(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	if got, err := d.Snapshot(); got != nil || err != nil {
		t.Errorf("before the first: %v, %v", got, err)
	}
	rapid.Check(t, func(t *rapid.T) {
		var want []registry.Entry
		for i, data := range rapid.SliceOf(rapid.SliceOfN(rapid.Byte(), 0, 50)).Draw(t, "data") {
			want = append(want, registry.Entry{ID: fmt.Sprintf("node/n%03d", i), Data: data})
		}
		given := slices.Clone(want)
		slices.Reverse(given)
		if err := d.KeepSnapshot(given); err != nil {
			t.Fatal(err)
		}
		got, err := d.Snapshot()
		if err != nil || !slices.EqualFunc(got, want, registry.Entry.Equal) {
			t.Fatalf("got %v, %v, want %v", got, err, want)
		}
	})
	for range 2 {
		if err := d.DropSnapshot(); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := d.Snapshot(); got != nil || err != nil {
		t.Errorf("after it was dropped: %v, %v", got, err)
	}
}

// Whatever byte of it is another, or is missing, the file is named, and nothing of it is used.
func TestSnapshot_Corrupt(t *testing.T) {
	d := open(t, t.TempDir())
	if err := d.KeepSnapshot([]registry.Entry{{ID: "node/a", Data: []byte("sealed")}, {ID: "node/b"}}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(d.path, snapshotFile)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	check := func(data []byte) {
		t.Helper()
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := d.Snapshot(); err == nil || got != nil || !strings.Contains(err.Error(), path) {
			t.Fatalf("%q: %v, %v", data, got, err)
		}
	}
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 1
		check(bad)
		check(good[:i])
	}
	if err := d.KeepSnapshot(nil); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Snapshot(); err != nil || len(got) != 0 {
		t.Errorf("after it was replaced: %v, %v", got, err)
	}
}

func TestFormat(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	for content, want := range map[string][]string{
		"2\n":      {path, "format 2", "up to 1", "newer program"},
		"":         {formatFile, "corrupt"},
		"-1":       {formatFile, "corrupt"},
		"x\n":      {formatFile, "corrupt", `"x\n"`},
		"1.0":      {formatFile, "corrupt"},
		"\x00\x00": {formatFile, "corrupt"},
	} {
		if err := os.WriteFile(filepath.Join(path, formatFile), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		before := files(t, path)
		_, err := Open(path, "a", nil)
		if err == nil {
			t.Fatalf("format %q is taken", content)
		}
		if foreign := content == "2\n"; errors.Is(err, ErrForeign) != foreign {
			t.Errorf("format %q: %v", content, err)
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("format %q: %q does not say %q", content, err, w)
			}
		}
		if after := files(t, path); after != before {
			t.Errorf("format %q: the folder was changed:\n%s\nbefore\n%s", content, after, before)
		}
	}
	if err := os.WriteFile(filepath.Join(path, formatFile), []byte("1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	open(t, path)
}

// files is all there is in a folder, as text.
func files(t *testing.T, path string) string {
	var all strings.Builder
	entries, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(path, e.Name()))
		if err != nil && !errors.Is(err, os.ErrPermission) {
			t.Fatal(err)
		}
		fmt.Fprintf(&all, "%s %q\n", e.Name(), data)
	}
	return all.String()
}

// What a process that was killed left of a file it was writing goes at the next start; nothing else does.
func TestTidy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "odd [name]*?")
	d := open(t, path)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	want := files(t, path)
	for _, name := range []string{".snapshot-1234", ".starts-99", ".owner-1", ".format-x"} {
		if err := os.WriteFile(filepath.Join(path, name), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(path, ".of-somebody-else"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	open(t, path)
	if got := files(t, path); got != `.of-somebody-else ""`+"\n"+want {
		t.Errorf("left is\n%s\nwant\n%s", got, want)
	}
}
