package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
	"github.com/warren-mesh/warren/mesh/view"
)

// A disk that is full is a condition that names file and reason, and costs nothing but the snapshot. It is
// over when there is room.
func TestDiskFull(t *testing.T) {
	etcd := etcdtest.Start(t, etcdtest.Options{})
	// bert's record makes a snapshot of several pages of a tmpfs.
	bert := newProc(t, "bert", etcd.URL())
	for _, k := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t"} {
		bert.args = append(bert.args, "--label", k+"="+strings.Repeat(k, 1000))
	}
	bert.start().until("published", published)

	anna := newProc(t, "anna", etcd.URL())
	disk := filepath.Dir(anna.state)
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=256k,mode=755,uid="+nobodyText+",gid="+nobodyText); err != nil {
		t.Skipf("needs to mount a tmpfs, as root: %v", err)
	}
	t.Cleanup(func() {
		anna.signal(syscall.SIGKILL)
		if err := syscall.Unmount(disk, 0); err != nil {
			t.Error(err)
		}
	})
	anna.start().until("in the mesh", func(s control.Status) bool { return published(s) && knows("bert")(s) })
	key := anna.status().Self.Key
	if code := anna.stop(); code != exitOK {
		t.Errorf("it ended with %d", code)
	}
	if err := os.Remove(filepath.Join(anna.state, "snapshot")); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	filler := filepath.Join(disk, "filler")
	fill(t, filler)

	anna.start().until("aware that the disk is full", has(view.StateUnkept))
	s := anna.status()
	if c := s.Conditions; !strings.Contains(c[0].Message, "no space left on device") || c[0].Remedy == "" || s.Self.Key != key {
		t.Errorf("got %+v, and the key is %s where it was %s", c, s.Self.Key, key)
	}
	reachAll(t, anna, bert)
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	anna.until("well again", func(s control.Status) bool { return !has(view.StateUnkept)(s) })
	if info, err := os.Stat(filepath.Join(anna.state, "snapshot")); err != nil || info.Size() < 10_000 {
		t.Errorf("the snapshot is not there: %v", err)
	}
}

// fill fills a disk but for two pages.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := make([]byte, os.Getpagesize())
	n := int64(0)
	for err == nil {
		_, err = f.Write(page)
		n++
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if err := f.Truncate(max(0, n-3) * int64(len(page))); err != nil {
		t.Fatal(err)
	}
}
