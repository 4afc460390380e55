package state

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-mesh/warren/mesh/registry"
)

// fullEnv makes this test binary a process in a mount namespace of its own, where the folder it names may
// be mounted over.
const fullEnv = "WARREN_STATE_TEST_FULL"

// A disk that is full keeps the old snapshot and the count of starts whole, and leaves no litter.
func TestDiskFull(t *testing.T) {
	folder := os.Getenv(fullEnv)
	if folder == "" {
		if os.Getuid() != 0 {
			if os.Getenv("CI") == "true" {
				t.Fatal("needs root, to mount a small file system in a namespace of its own")
			}
			t.Skip("needs root, to mount a small file system in a namespace of its own")
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDiskFull$", "-test.v")
		cmd.Env = append(os.Environ(), fullEnv+"="+t.TempDir())
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Unshareflags: syscall.CLONE_NEWNS}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestDiskFull") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	if err := syscall.Mount("tmpfs", folder, "tmpfs", 0, "size=128k"); err != nil {
		t.Fatal(err)
	}
	d := open(t, filepath.Join(folder, "state"))
	small := []registry.Entry{{ID: "node/a", Data: []byte("sealed")}}
	if err := d.KeepSnapshot(small); err != nil {
		t.Fatal(err)
	}
	before := files(t, d.path)
	large := []registry.Entry{{ID: "node/a", Data: make([]byte, 200<<10)}}
	for range 3 {
		err := d.KeepSnapshot(large)
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), d.path) {
			t.Fatalf("with the disk full: %v", err)
		}
		if after := files(t, d.path); after != before {
			t.Fatalf("the folder was changed:\n%.2000s", after)
		}
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "filler"), make([]byte, 200<<10), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	was := d.Key
	d = open(t, d.path) // the node starts all the same
	if d.Key != was {
		t.Error("it has another key")
	}
	got, err := d.Snapshot()
	if err != nil || len(got) != 1 || !got[0].Equal(small[0]) {
		t.Errorf("the old snapshot is %v, %v", got, err)
	}
}
