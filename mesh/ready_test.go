package mesh_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	devmem "github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/mesh"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
)

// A Run that cannot begin is what Ready tells of, however long it could wait.
func TestReadyTellsWhyRunEnded(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	node := func() mesh.Mesh {
		m, err := mesh.New(mesh.Config{Node: "a", Registry: regmem.New(), Datapath: devmem.New(devmem.Options{}), StateDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	first, second := node(), node()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- first.Run(ctx) }()
	if err := mesh.Ready(ctx, first); err != nil {
		t.Fatal(err)
	}
	if v, _ := first.Current(); !v.Running || v.Err != nil {
		t.Errorf("a View of the running mesh says %v, %v", v.Running, v.Err)
	}
	go func() { _ = second.Run(ctx) }()
	if err := mesh.Ready(context.Background(), second); !errors.Is(err, mesh.ErrStateInUse) || !strings.Contains(err.Error(), "node a") {
		t.Errorf("Ready of a mesh whose folder is in use: %v, want ErrStateInUse that names the holder", err)
	}
	if v, _ := second.Current(); v.Running || !errors.Is(v.Err, mesh.ErrStateInUse) {
		t.Errorf("its View says %v, %v", v.Running, v.Err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if v, _ := first.Current(); v.Running || v.Err != nil {
		t.Errorf("a View of the ended mesh says %v, %v", v.Running, v.Err)
	}
}

func TestReadyWithoutRun(t *testing.T) {
	m, err := mesh.New(mesh.Config{Node: "a", Registry: regmem.New(), Datapath: devmem.New(devmem.Options{})})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := mesh.Ready(ctx, m); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "no Run") {
		t.Errorf("%v", err)
	}
}
