package main

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

// The first dial has its time before the second begins, and whichever has a connection first is taken. That of the
// other is closed, and nothing of it is left.
func TestEitherWay(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	type way struct {
		takes time.Duration
		fails bool
	}
	const forever = time.Hour
	for _, test := range []struct {
		name          string
		first, second way
		want          string
		after         time.Duration
	}{
		{"first", way{takes: 100 * time.Millisecond}, way{}, "first", 100 * time.Millisecond},
		{"first, that has failed", way{fails: true}, way{takes: time.Second}, "second", time.Second},
		{"first, that is slow", way{takes: 700 * time.Millisecond}, way{takes: time.Second}, "first", 700 * time.Millisecond},
		{"first, that never comes", way{takes: forever}, way{takes: 100 * time.Millisecond}, "second", 600 * time.Millisecond},
		{"second fails, first is slow", way{takes: time.Second}, way{fails: true}, "first", time.Second},
		{"neither", way{takes: time.Millisecond, fails: true}, way{takes: time.Millisecond, fails: true}, "", 2 * time.Millisecond},
		{"neither ever", way{takes: forever}, way{takes: forever}, "", 5 * time.Second},
		{"both at once", way{takes: 600 * time.Millisecond}, way{takes: 100 * time.Millisecond}, "first second", 600 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			var open atomic.Int32
			dial := func(name string, w way) func(context.Context) (net.Conn, error) {
				return func(ctx context.Context) (net.Conn, error) {
					select {
					case <-time.After(w.takes):
					case <-ctx.Done():
						return nil, ctx.Err()
					}
					if w.fails {
						return nil, errors.New(name + " fails")
					}
					c, other := net.Pipe()
					_ = other.Close()
					open.Add(1)
					return &named{Conn: c, name: name, closed: func() { open.Add(-1) }}, nil
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			start := time.Now()
			c, err := eitherWay(ctx, headStart, func(c net.Conn) { _ = c.Close() }, dial("first", test.first), dial("second", test.second))
			took := time.Since(start)
			got := ""
			if err == nil {
				got = c.(*named).name
			}
			if (got == "") != (test.want == "") || !strings.Contains(test.want, got) || took != test.after {
				t.Errorf("%s: got %q and %v after %v, want %q after %v", test.name, got, err, took, test.want, test.after)
			}
			if c != nil {
				_ = c.Close()
			}
			if n := open.Load(); n != 0 {
				t.Errorf("%s: %d connections are open", test.name, n)
			}
		})
	}
}

type named struct {
	net.Conn
	name   string
	closed func()
}

func (n *named) Close() error { n.closed(); return n.Conn.Close() }
