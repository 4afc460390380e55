package mesh_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	devmem "github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/meshtest"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
)

// TestRule21_StartsAndEndsAtAnyPoint runs, cancels, leaves and closes in every order there may be, in real
// time, so that goroutines meet as they do outside of a bubble. goleak sees that none is left.
func TestRule21_StartsAndEndsAtAnyPoint(t *testing.T) {
	rounds := 500
	if testing.Short() {
		rounds = 50
	}
	reg := regmem.New()
	for i := range 3 { // others, whose records there are
		r := record.Record{Version: record.Version, ID: fmt.Sprint("other", i), Key: meshtest.Key(1, i).Public()}
		data, err := record.Marshal(r)
		must(t, err)
		must(t, reg.Put(t.Context(), registry.Entry{ID: registry.NodeID(r.ID), Data: data}))
	}
	r := rand.New(rand.NewPCG(1, 1))
	for i := range rounds {
		if !endsWell(t, reg, i, r) {
			t.Fatalf("round %d", i)
		}
	}
}

func endsWell(t *testing.T, reg *regmem.Registry, round int, r *rand.Rand) bool {
	pause := func() time.Duration {
		if r.IntN(3) == 0 {
			return 0
		}
		return time.Duration(r.Int64N(int64(15 * time.Millisecond)))
	}
	d := devmem.New(devmem.Options{})
	m, err := mesh.New(mesh.Config{
		Node: "me", Registry: reg.Handle(), Datapath: d, Key: meshtest.Key(2, round%3), Window: time.Millisecond,
		Addresses: []netip.Addr{netip.MustParseAddr("100.64.0.1")},
	})
	must(t, err)
	var parts sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	run := func() {
		parts.Go(func() {
			if err := m.Run(ctx); err != nil && !errors.Is(err, mesh.ErrRunning) && !errors.Is(err, mesh.ErrLeft) {
				t.Errorf("Run: %v", err)
			}
		})
	}
	leave := func() {
		parts.Go(func() {
			ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
			defer stop()
			if err := m.Leave(ctx); err != nil && round%10 != 0 {
				t.Errorf("Leave: %v", err)
			}
		})
	}
	run()
	for range r.IntN(6) {
		time.Sleep(pause())
		switch r.IntN(6) {
		case 0:
			run()
		case 1:
			leave()
		case 2:
			cancel()
		case 3:
			m.Prefixes().Announce("x")
		case 4:
			m.Current()
		case 5:
			parts.Go(func() {
				ctx, stop := context.WithTimeout(t.Context(), 5*time.Millisecond)
				defer stop()
				mesh.Ready(ctx, m)
			})
		}
	}
	if round%10 == 0 {
		for range 2 {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	time.Sleep(pause())
	cancel()
	done := make(chan struct{})
	go func() { parts.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Error("it hangs")
		return false
	}
	if round%10 == 0 {
		return !t.Failed()
	}
	// Whatever came before, another Run adopts what there is, and a Leave takes it away.
	again, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	result := make(chan error, 1)
	go func() { result <- m.Run(again) }()
	if err := mesh.Ready(again, m); err != nil {
		t.Error(err)
	}
	if err := m.Leave(again); err != nil {
		t.Error(err)
	}
	if err := <-result; !errors.Is(err, mesh.ErrLeft) {
		t.Errorf("Run returned %v", err)
	}
	if st, err := d.Read(t.Context()); err != nil || st.Device.Exists() {
		t.Errorf("the device is there: %v", err)
	}
	return !t.Failed()
}
