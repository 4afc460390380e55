package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"text/tabwriter"
	"time"

	"golang.org/x/term"

	"github.com/warren-mesh/warren/mesh"
)

// screen prints one line for each step. On a terminal the line of the running step is kept up to date.
// It has no colours, so NO_COLOR has nothing to turn off.
type screen struct {
	out   *output
	width int // columns of the terminal; 0: no terminal, or one that cannot go back to the start of a line

	mu       sync.Mutex
	progress func() string // nil: nothing to say
}

func newScreen(out io.Writer) *screen {
	s := &screen{out: &output{to: out}}
	if f, ok := out.(*os.File); ok && os.Getenv("TERM") != "dumb" && term.IsTerminal(int(f.Fd())) {
		s.width = 80 // of a terminal that does not say
		if width, _, err := term.GetSize(int(f.Fd())); err == nil && width > 0 {
			s.width = width
		}
	}
	return s
}

// errOutput is wrapped by what step and run return where the output could not be written.
var errOutput = errors.New("writing the output")

// output keeps the first error of a write, and writes nothing more after it.
type output struct {
	to  io.Writer
	err error
}

func (o *output) Write(p []byte) (int, error) {
	if o.err != nil {
		return 0, o.err
	}
	n, err := o.to.Write(p)
	if err != nil {
		o.err = fmt.Errorf("%w: %w", errOutput, err)
	}
	return n, o.err
}

func (s *screen) printf(format string, a ...any) { fmt.Fprintf(s.out, format, a...) }

// show has f say how it goes, while a step runs.
func (s *screen) show(f func() string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress = f
}

// step does what it says, and prints a line about it. What ends because ctx was cancelled did not fail.
func (s *screen) step(ctx context.Context, what string, do func() error) error {
	start := time.Now()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		s.animate(what, stop)
	}()
	err := do()
	close(stop)
	<-stopped
	mark := "ok"
	switch {
	case err != nil && errors.Is(ctx.Err(), context.Canceled):
		mark = "stopped"
	case err != nil:
		mark = "FAILED"
	}
	s.printf("  %-7s %s (%.1f s)\n", mark, what, time.Since(start).Seconds())
	return cmp.Or(err, s.out.err)
}

// animate writes the running step's line again and again, and clears it in the end.
func (s *screen) animate(what string, stop <-chan struct{}) {
	if s.width < 20 {
		return
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for i := 0; ; i++ {
		line := fmt.Sprintf("  %c       %s", `|/-\`[i%4], what)
		s.mu.Lock()
		if s.progress != nil {
			line += ": " + s.progress()
		}
		s.mu.Unlock()
		s.printf("\r%-*.*s", s.width-1, s.width-1, line) // padded, and cut to fit
		select {
		case <-tick.C:
		case <-stop:
			s.printf("\r%*s\r", s.width-1, "")
			return
		}
	}
}

// table shows how each node sees each of its peers.
func (s *screen) table(nodes []*node) {
	t := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "\n  NODE\tPEER\tMESH ADDRESS\tENDPOINT\tLAST HANDSHAKE\tRECEIVED\tSENT\n")
	for _, n := range nodes {
		view, _ := n.mesh.Current()
		for _, p := range view.Peers {
			fmt.Fprintf(t, "  %s\t%s\t%s\t%v\t%s\t%s\t%s\n",
				n.name, p.Node, addresses(p), p.Endpoint, ago(p.LastHandshake), size(int64(p.Received)), size(int64(p.Sent)))
		}
	}
	t.Flush()
	s.printf("\n")
}

func addresses(p mesh.Peer) string {
	for host := range p.Addresses.All() {
		return host.Addr().String() // these nodes have one each
	}
	return "none"
}

func ago(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return fmt.Sprintf("%.1f s ago", time.Since(t).Seconds())
}
