package main

import (
	"log/slog"
	"runtime"
	"testing"
)

func TestProcessors(t *testing.T) {
	for have, want := range map[int]int{1: 1, 2: 1, 3: 1, 4: 2, 64: 32} {
		if got := processors(have); got != want {
			t.Errorf("%d of %d processors, want %d", got, have, want)
		}
	}
	before := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(before)
	t.Setenv("GOMAXPROCS", "3")
	if limitProcessors(slog.New(slog.DiscardHandler)); runtime.GOMAXPROCS(0) != before {
		t.Error("GOMAXPROCS is not heeded")
	}
	t.Setenv("GOMAXPROCS", "")
	if limitProcessors(slog.New(slog.DiscardHandler)); runtime.GOMAXPROCS(0) != max(1, before/2) {
		t.Errorf("%d of %d processors", runtime.GOMAXPROCS(0), before)
	}
}
