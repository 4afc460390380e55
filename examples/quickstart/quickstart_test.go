package main

import (
	"bytes"
	"context"
	"errors"
	"regexp"
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
	for _, after := range []time.Duration{0, 20 * time.Millisecond, 150 * time.Millisecond, time.Second, 2500 * time.Millisecond, 4 * time.Second} {
		ctx, cancel := context.WithCancelCause(t.Context())
		timer := time.AfterFunc(after, func() { cancel(errors.New("enough")) })
		var out bytes.Buffer
		start := time.Now()
		err := run(ctx, newScreen(&out))
		timer.Stop()
		cancel(nil)
		if took := time.Since(start) - after; took > 10*time.Second {
			t.Errorf("interrupted after %v: it took another %v to end", after, took)
		}
		if err == nil || !strings.Contains(err.Error(), "The nodes say:") {
			t.Errorf("interrupted after %v: got error %v, want one with what the nodes say; output:\n%s", after, err, out.String())
		}
		if n := strings.Count(out.String(), "\n  stopped "); n != 1 || strings.Contains(out.String(), "FAILED") {
			t.Errorf("interrupted after %v: %d steps were stopped, want one, and none that failed; output:\n%s", after, n, out.String())
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
		s := &screen{out: &output{to: &b}, width: width}
		stopped, stop := context.WithCancel(t.Context())
		stop()
		late, cancel := context.WithTimeout(t.Context(), 0)
		defer cancel()
		s.show(func() string { return "1234567890 and so on beyond the edge" })
		fail := errors.New("no")
		if err := s.step(t.Context(), "waits", func() error { time.Sleep(150 * time.Millisecond); return nil }); err != nil {
			t.Error(err)
		}
		for _, ctx := range []context.Context{t.Context(), late, stopped} {
			if err := s.step(ctx, "fails", func() error { return fail }); err != fail {
				t.Errorf("got %v", err)
			}
		}
		if err := s.step(stopped, "is done", func() error { return nil }); err != nil {
			t.Error(err)
		}
		plain := "  ok      waits (0.2 s)\n  FAILED  fails (0.0 s)\n  FAILED  fails (0.0 s)\n" +
			"  stopped fails (0.0 s)\n  ok      is done (0.0 s)\n"
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

// The line of a running step has room for its progress in the 80 columns of a terminal.
func TestProgressFits(t *testing.T) {
	if testing.Short() {
		t.Skip("takes its time: leave out -short")
	}
	var b bytes.Buffer
	if err := run(t.Context(), &screen{out: &output{to: &b}, width: 80}); err != nil {
		t.Fatalf("%v\noutput:\n%s", err, b.String())
	}
	whole := regexp.MustCompile(`^  [|/\\-] {7}.*: ([0-9.]+ k?M?B, [0-9]+ UDP, [0-9]+ HTTP) *$`)
	seen, longest := make(map[string]bool), len("123.4 MB, 30000 UDP, 2400 HTTP") // of a minute, which is the limit
	for line := range strings.SplitSeq(b.String(), "\r") {
		what, progress, ok := strings.Cut(line, ": ")
		if !ok || strings.Contains(line, "\n") {
			continue
		}
		if !whole.MatchString(line) || len(what)+len(": ")+longest > 79 {
			t.Errorf("%q: %q is cut, or would be", what, progress)
		}
		seen[what[len("  |       "):]] = true
	}
	if len(seen) < 3 {
		t.Errorf("progress was shown of %d steps: %v", len(seen), seen)
	}
}

// full is a device with no space left after some bytes.
type full struct{ left int }

var errFull = errors.New("no space left")

func (f *full) Write(p []byte) (int, error) {
	n := min(len(p), f.left)
	f.left -= n
	if n < len(p) {
		return n, errFull
	}
	return n, nil
}

// An output that cannot be written ends the story, and fails it.
func TestOutputFull(t *testing.T) {
	for _, c := range []struct {
		args []string
		room int
	}{{nil, 0}, {nil, 150}, {[]string{"-h"}, 0}, {[]string{"-h"}, 100}} {
		var stderr bytes.Buffer
		start := time.Now()
		code := command(c.args, &full{c.room}, &stderr)
		if want := "quickstart: writing the output: no space left\n"; code != exitFailed || stderr.String() != want {
			t.Errorf("%q with room for %d bytes: exit code %d and %q, want %d and %q", c.args, c.room, code, stderr.String(), exitFailed, want)
		}
		if took := time.Since(start); took > 5*time.Second {
			t.Errorf("%q with room for %d bytes: it went on for %v", c.args, c.room, took)
		}
	}
	o := &output{to: &full{1}}
	for range 2 {
		if _, err := o.Write([]byte("ab")); !errors.Is(err, errOutput) || !errors.Is(err, errFull) {
			t.Errorf("got %v", err)
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
