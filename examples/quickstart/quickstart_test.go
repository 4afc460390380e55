package main

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"quickstart": main})
}

// The scripts run the program as its users do.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"sleep": func(ts *testscript.TestScript, _ bool, args []string) {
				d, err := time.ParseDuration(args[0])
				ts.Check(err)
				time.Sleep(d)
			},
		},
	})
}

// Whenever it is interrupted, it ends soon and leaves nothing behind.
func TestInterruptedAtAnyTime(t *testing.T) {
	if testing.Short() {
		t.Skip("takes its time: leave out -short")
	}
	defer goleak.VerifyNone(t)
	cause := errors.New("enough")
	for _, after := range []time.Duration{0, 20 * time.Millisecond, 150 * time.Millisecond, time.Second, 2500 * time.Millisecond, 4 * time.Second} {
		ctx, cancel := context.WithTimeoutCause(t.Context(), after, cause)
		var out bytes.Buffer
		start := time.Now()
		err := run(ctx, newScreen(&out))
		cancel()
		if took := time.Since(start) - after; took > 10*time.Second {
			t.Errorf("interrupted after %v: it took another %v to end", after, took)
		}
		if err == nil || !strings.Contains(err.Error(), "The nodes say:") {
			t.Errorf("interrupted after %v: got error %v, want one with what the nodes say; output:\n%s", after, err, out.String())
		}
	}
}

func good() result {
	return result{
		from: "a", to: "c", moving: "10.90.0.10", before: "b", after: "d",
		sent: 1000, received: 1000,
		datagrams: 30, arrived: map[string]int{"b": 10, "d": 20},
		requests: 7, answered: map[string]int{"b": 3, "d": 4}, again: 1,
	}
}

func TestVerify(t *testing.T) {
	if err := good().verify(); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name  string
		spoil func(*result)
		want  string
	}{
		{"a byte lost", func(r *result) { r.received-- }, "of 1000 bytes sent by TCP, 999 were received"},
		{"a byte too many", func(r *result) { r.received++ }, "of 1000 bytes sent by TCP, 1001 were received"},
		{"a datagram lost", func(r *result) { r.arrived["d"]-- }, "of 30 datagrams, 1 were lost"},
		{"a datagram twice", func(r *result) { r.repeated++ }, "1 datagrams arrived twice"},
		{"a datagram damaged", func(r *result) { r.damaged++ }, "1 datagrams arrived that were not sent so"},
		{"a request failed", func(r *result) { r.requests++ }, "of 8 requests, 1 had no answer"},
		{"nothing sent", func(r *result) { r.sent, r.received = 0, 0 }, "nothing was sent by TCP"},
		{"not moved", func(r *result) { r.arrived = map[string]int{"b": 30} }, "d got none of the datagrams to 10.90.0.10"},
		{"moved too soon", func(r *result) { r.answered = map[string]int{"d": 7} }, "b got none of the requests to 10.90.0.10"},
		{"at the wrong node", func(r *result) { r.answered["c"], r.requests = 1, 8 }, "c got requests to 10.90.0.10, which it never had"},
	} {
		r := good()
		test.spoil(&r)
		if err := r.verify(); err == nil || err.Error() != test.want {
			t.Errorf("%s: got %v, want %s", test.name, err, test.want)
		}
	}
}

func TestPrint(t *testing.T) {
	r := good()
	r.received, r.arrived["d"], r.damaged, r.requests = 990, 15, 2, 9
	r.pause, r.slowest = 12*time.Millisecond, 1003*time.Millisecond
	var b bytes.Buffer
	r.print(&b)
	want := `  TCP   a to c: 1.0 kB sent, every byte compared, 10 lost; the longest pause was 12ms
  UDP   a to 10.90.0.10: 30 datagrams, 10 at b, 15 at d; 5 lost, 0 twice, 2 damaged
  HTTP  a to 10.90.0.10: 9 requests, 3 by b, 4 by d; 2 failed, 1 made again as the prefix moved, the slowest took 1.003s
`
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
}

func TestComparer(t *testing.T) {
	data := make([]byte, 1000)
	_, _ = generator().Read(data)
	for _, pieces := range []int{1, 7, 64, 1000} {
		c := comparer{want: generator()}
		for p := range slices.Chunk(data, pieces) {
			if _, err := c.Write(p); err != nil {
				t.Fatalf("in pieces of %d: %v", pieces, err)
			}
		}
		if c.count() != 1000 {
			t.Errorf("in pieces of %d: counted %d", pieces, c.count())
		}
	}
	for name, spoil := range map[string]func([]byte) []byte{
		"changed":  func(p []byte) []byte { p[777] ^= 1; return p },
		"left out": func(p []byte) []byte { return slices.Delete(p, 777, 778) },
		"repeated": func(p []byte) []byte { return slices.Insert(p, 777, p[700:777]...) },
	} {
		c := comparer{want: generator()}
		n, err := c.Write(spoil(slices.Clone(data)))
		if err == nil || n != 777 || !strings.HasPrefix(err.Error(), "byte 777 is") {
			t.Errorf("a byte %s: got %d, %v", name, n, err)
		}
	}
}

func TestTally(t *testing.T) {
	var c tally
	sent := make([][]byte, 10)
	for i := range sent {
		sent[i] = c.next()
	}
	for i, p := range sent[:8] {
		c.arrived([]string{"b", "d"}[i%2], p)
	}
	c.arrived("d", sent[0])       // again
	c.arrived("d", datagram(10))  // not sent yet
	c.arrived("d", sent[8][:999]) // cut
	c.arrived("d", nil)           // nothing
	sent[9][500] ^= 1             // changed
	c.arrived("d", sent[9])       //
	got := []any{c.missing(), c.count(), c.repeated, c.damaged}
	if want := []any{uint64(2), 8, 1, 4}; !slices.Equal(got, want) {
		t.Errorf("missing, count, repeated, damaged: got %v, want %v", got, want)
	}
}

func TestScreen(t *testing.T) {
	for _, width := range []int{0, 40} {
		var b bytes.Buffer
		s := &screen{out: &b, width: width}
		s.show(func() string { return "1234567890 and so on beyond the edge" })
		fail := errors.New("no")
		if err := s.step("waits", func() error { time.Sleep(150 * time.Millisecond); return nil }); err != nil {
			t.Error(err)
		}
		if err := s.step("fails", func() error { return fail }); err != fail {
			t.Errorf("got %v", err)
		}
		plain := "  ok     waits (0.2 s)\n  FAILED fails (0.0 s)\n"
		if width == 0 {
			if got := strings.Replace(b.String(), "(0.1 s)", "(0.2 s)", 1); got != plain {
				t.Errorf("got %q, want %q", got, plain)
			}
			continue
		}
		for line := range strings.SplitSeq(b.String(), "\r") {
			if text, _, _ := strings.Cut(line, "\n"); len(text) >= width {
				t.Errorf("%q does not fit into %d columns", text, width)
			}
		}
		if !strings.Contains(b.String(), "waits: 1234567890") {
			t.Errorf("no progress in %q", b.String())
		}
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_900: "999.9 kB", 12_345_678: "12.3 MB"} {
		if got := size(n); got != want {
			t.Errorf("%d: got %s, want %s", n, got, want)
		}
	}
}
