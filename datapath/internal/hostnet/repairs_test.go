package hostnet

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Repairs that are asked for all the time are few, and none that is put off is forgotten.
func TestRepairs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		wake := make(chan struct{}, 1)
		var asked atomic.Int64
		r := NewRepairs(func() {
			asked.Add(1)
			select {
			case wake <- struct{}{}:
			default:
			}
		})
		for range repairsAtOnce {
			if !r.Now() {
				t.Fatal("the first ones have to wait")
			}
		}
		made := 0
		for time.Since(begun) < 10*time.Second {
			for r.Now() {
				made++
			}
			<-wake
		}
		if made < 19 || made > 21 {
			t.Errorf("%d repairs in 10 s", made)
		}
		if n := asked.Load(); n > 25 {
			t.Errorf("woken %d times", n)
		}
		// One a second never waits.
		time.Sleep(5 * time.Second)
		for range 60 {
			if !r.Now() {
				t.Fatal("one a second has to wait")
			}
			time.Sleep(time.Second)
		}
	})
}
