package etcd

import (
	"testing"
	"time"
)

// Calls that wait at the same time wait once; the time between them is no silence.
func TestSilenceAdds(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(1000+int64(s), 0) }
	var s silence
	for _, call := range []struct{ began, ended, sum int }{
		{0, 2, 2},
		{10, 12, 4},
		{11, 13, 5},
		{11, 13, 5},
		{12, 13, 5},
		{5, 15, 7}, // from 13 on
		{20, 20, 7},
		{20, 21, 8},
	} {
		s.add(at(call.began), at(call.ended))
		if want := time.Duration(call.sum) * time.Second; s.sum != want {
			t.Errorf("with the call from %d to %d: %v, want %v", call.began, call.ended, s.sum, want)
		}
	}
}

// What waited before the last answer is forgotten, and what is retired already is not so once more.
func TestUnansweredInSum(t *testing.T) {
	r, err := New(Config{Endpoints: []string{"127.0.0.1:1", "127.0.0.1:2"}, Timeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c, err := r.acquire()
	if err != nil {
		t.Fatal(err)
	}
	defer r.release(c)
	now := time.Now()
	waits := func(d time.Duration, retired bool) {
		t.Helper()
		r.unanswered(c, now, now.Add(d))
		now = now.Add(time.Minute)
		if c.retired != retired {
			t.Errorf("retired is %t, want %t", c.retired, retired)
		}
	}
	waits(900*time.Millisecond, false)
	r.answered(c)
	waits(900*time.Millisecond, false)
	waits(100*time.Millisecond, true)
	next, err := r.acquire()
	if err != nil {
		t.Fatal(err)
	}
	defer r.release(next)
	waits(time.Second, true)
	if next == c || next.retired || r.first != 1 {
		t.Errorf("the next is %p after %p, retired %t; %d members were left", next, c, next.retired, r.first)
	}
}
