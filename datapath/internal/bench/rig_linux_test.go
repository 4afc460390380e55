package main

import (
	"os/exec"
	"strings"
	"testing"
)

// TestEnded has a program that ends by itself found out, with what it said, and one that does not ended by close.
func TestEnded(t *testing.T) {
	runs, err := launch("runs", exec.Command("sleep", "600"))
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{all: []*process{runs}}
	if err := r.ended(); err != nil {
		t.Errorf("got %v while it runs", err)
	}
	gone, err := launch("gone", exec.Command("sh", "-c", "echo no such thing; exit 3"))
	if err != nil {
		t.Fatal(err)
	}
	r.all = append(r.all, gone)
	<-gone.ended
	if err := r.ended(); err == nil || err.Error() != "gone ended: no such thing\nexit status 3" {
		t.Errorf("got %q", err)
	}
	r.close()
	<-runs.ended
}

func TestTail(t *testing.T) {
	var b tail
	for range 3 {
		b.Write([]byte(strings.Repeat("x", 1500)))
	}
	b.Write([]byte("end\n"))
	if got := b.String(); len(got) > 2000 || !strings.HasSuffix(got, "xend") {
		t.Errorf("%d bytes, %q", len(got), got[max(0, len(got)-10):])
	}
}
