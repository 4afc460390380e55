package netstack

import (
	"runtime"
	"testing"
	"time"
)

// A small flight is handed over in parts where others may be let run meanwhile: not on one processor, and not for a
// while after that took long.
func TestYields(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	if newLink(DefaultMTU).yields() {
		t.Error("with one processor")
	}
	runtime.GOMAXPROCS(2)
	l := newLink(DefaultMTU)
	if !l.yields() {
		t.Error("not with two")
	}
	l.yield()
	l.rests.Store(int64(time.Since(l.begun) + time.Hour))
	if l.yields() {
		t.Error("though it took long")
	}
	l.rests.Store(int64(time.Since(l.begun)))
	if !l.yields() {
		t.Error("not again")
	}
}
