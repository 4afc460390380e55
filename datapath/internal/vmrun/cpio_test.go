package main

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// entry is a file in an archive, as readArchive finds it.
type entry struct {
	mode uint32
	data string
}

// readArchive reads an archive by the description of its format, knowing nothing of who wrote it. It
// wants every folder before what is in it, as the kernel does.
func readArchive(b []byte) (map[string]entry, error) {
	entries := map[string]entry{}
	inodes := map[uint64]bool{}
	for at := 0; ; {
		if len(b) < at+110 || string(b[at:at+6]) != "070701" {
			return nil, fmt.Errorf("no header at %d of %d", at, len(b))
		}
		var field [13]uint64
		for i := range field {
			var err error
			if field[i], err = strconv.ParseUint(string(b[at+6+8*i:at+14+8*i]), 16, 32); err != nil {
				return nil, err
			}
		}
		inode, mode, links, size, length := field[0], uint32(field[1]), field[4], int(field[6]), int(field[11])
		nameEnd := at + 110 + length
		dataStart := (nameEnd + 3) &^ 3
		next := (dataStart + size + 3) &^ 3
		if next > len(b) || length == 0 || b[nameEnd-1] != 0 {
			return nil, fmt.Errorf("the entry at %d is cut off", at)
		}
		name := string(b[at+110 : nameEnd-1])
		if name == "TRAILER!!!" {
			if next != len(b) {
				return nil, fmt.Errorf("%d bytes after the end", len(b)-next)
			}
			return entries, nil
		}
		if _, twice := entries[name]; twice || inodes[inode] || strings.HasPrefix(name, "/") || links == 0 {
			return nil, fmt.Errorf("%q: twice, or inode %d is, or absolute, or no link", name, inode)
		}
		if dir := path.Dir(name); dir != "." && entries[dir].mode&0o170000 != 0o040000 {
			return nil, fmt.Errorf("%q: its folder is not there", name)
		}
		inodes[inode] = true
		entries[name] = entry{mode, string(b[dataStart : dataStart+size])}
		at = next
	}
}

func TestArchive(t *testing.T) {
	var b bytes.Buffer
	a := newArchive(&b)
	a.dir("/tmp", 0o777|fs.ModeSticky)
	a.file("/usr/bin/x", 0o755, 5, strings.NewReader("12345"))
	a.dir("/usr/bin", 0o700) // there already
	a.symlink("/var/run", "/run")
	a.dir("/", 0o755)
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	got, err := readArchive(b.Bytes())
	want := map[string]entry{
		"tmp": {0o041777, ""}, "usr": {0o040755, ""}, "usr/bin": {0o040755, ""}, "usr/bin/x": {0o100755, "12345"},
		"var": {0o040755, ""}, "var/run": {0o120777, "/run"},
	}
	if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
}

func TestArchiveProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		names := rapid.SliceOfDistinct(rapid.StringMatching(`(/[a-c]{1,2}){0,3}/f[^/\x00]{0,9}`), rapid.ID[string]).Draw(t, "names")
		var b bytes.Buffer
		a := newArchive(&b)
		want := make(map[string]entry)
		for _, name := range names {
			data := string(rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "data"))
			perm := rapid.Uint32Range(0, 0o777).Draw(t, "permissions")
			if rapid.Bool().Draw(t, "link") {
				a.symlink(name, data)
				want[name[1:]] = entry{0o120777, data}
			} else {
				a.file(name, fs.FileMode(perm), int64(len(data)), strings.NewReader(data))
				want[name[1:]] = entry{0o100000 | perm, data}
			}
		}
		if err := a.close(); err != nil {
			t.Fatal(err)
		}
		got, err := readArchive(b.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		for name, e := range got {
			if e.mode != 0o040755 && want[name] != e {
				t.Fatalf("%q: %v, want %v", name, e, want[name])
			}
		}
		for name := range want {
			if _, ok := got[name]; !ok {
				t.Fatalf("%q is not in it", name)
			}
		}
	})
}

func TestArchiveFails(t *testing.T) {
	a := newArchive(io.Discard)
	a.file("short", 0o644, 10, strings.NewReader("12345"))
	a.file("next", 0o644, 0, strings.NewReader(""))
	if err := a.close(); err == nil || !strings.Contains(err.Error(), "short") {
		t.Errorf("a file that shrank: %v", err)
	}
	a = newArchive(io.Discard)
	a.file("huge", 0o644, 1<<32, strings.NewReader(""))
	if err := a.close(); err == nil || !strings.Contains(err.Error(), "huge") {
		t.Errorf("4 GiB: %v", err)
	}
}
