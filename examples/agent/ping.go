package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
)

func newPing() *cobra.Command {
	cmd := &cobra.Command{
		Use: "ping NODE|ADDRESS", Short: "See whether a node answers through the mesh", Args: args(cobra.ExactArgs(1)),
		Long: `Ping has a node answer through the mesh, again and again until Ctrl-C or -c, and tells how long it took.
Addresses of nodes answer; what a node announces beside them answers if it is exposed.

It ends with 0 if anything came back, with 1 if nothing did.`,
		Example: "  agent ping alpha\n  agent ping -c 3 10.80.0.1",
	}
	flags := config.Bind(cmd.Flags(), config.ToFind)
	count := cmd.Flags().IntP("count", "c", 0, "how often; 0 is until Ctrl-C")
	interval := cmd.Flags().DurationP("interval", "i", time.Second, "from one to the next")
	wait := cmd.Flags().DurationP("timeout", "W", 5*time.Second, "how long to wait for an answer; a first handshake may take some")
	cmd.ValidArgsFunction = completeNodes(flags)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if *count < 0 || *interval < 0 || *wait <= 0 {
			return &usageError{errors.New("count and interval must not be below zero, and timeout must be above")}
		}
		c, err := flags.Load(config.ThisHost())
		if err != nil {
			return err
		}
		p := pinger{to: args[0], count: *count, interval: *interval, wait: *wait, out: cmd.OutOrStdout()}
		p.ask = func(ctx context.Context) (control.Pong, error) { return clientOf(c).Ping(ctx, p.to, p.wait) }
		return notRunning(c, p.run(cmd.Context()))
	}
	return cmd
}

type pinger struct {
	to       string
	count    int
	interval time.Duration
	wait     time.Duration
	out      io.Writer
	ask      func(context.Context) (control.Pong, error)

	sent, came  int
	least, most time.Duration
	sum         time.Duration
}

// errNoAnswer says that nothing came back.
var errNoAnswer = errors.New("nothing came back")

func (p *pinger) run(ctx context.Context) error {
	next := time.Now()
	for n := 1; p.count == 0 || n <= p.count; n++ {
		select {
		case <-time.After(time.Until(next)):
		case <-ctx.Done():
			return p.summary()
		}
		next = time.Now().Add(p.interval)
		if err := p.once(ctx, n); err != nil {
			return err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return p.summary()
}

// once pings once. Its error is one for which going on is no use.
func (p *pinger) once(ctx context.Context, n int) error {
	within, cancel := context.WithTimeout(ctx, p.wait+2*time.Second) // the agent has the say
	defer cancel()
	pong, err := p.ask(within)
	var e *control.Error
	switch {
	case ctx.Err() != nil:
		return nil // neither answered nor lost
	case err == nil:
		p.sent++
		p.came++
		p.sum += pong.RTT
		p.most = max(p.most, pong.RTT)
		if p.came == 1 || pong.RTT < p.least {
			p.least = pong.RTT
		}
		_, err = fmt.Fprintf(p.out, "%s: seq=%d time=%s\n", name(p.to, pong), n, ms(pong.RTT))
		return err
	case errors.As(err, &e) && e.Code == control.NoAnswer, errors.Is(err, context.DeadlineExceeded):
		p.sent++
		_, err = fmt.Fprintf(p.out, "%s: seq=%d no answer: %v\n", p.to, n, err)
		return err
	}
	return err
}

func name(to string, p control.Pong) string {
	if to == p.Addr.String() {
		return to
	}
	return fmt.Sprintf("%s (%v)", to, p.Addr)
}

func (p *pinger) summary() error {
	if p.sent == 0 {
		return nil
	}
	lost := p.sent - p.came
	fmt.Fprintf(p.out, "\n%d sent, %d answered, %d lost (%.1f %%)\n", p.sent, p.came, lost, 100*float64(lost)/float64(p.sent))
	if p.came == 0 {
		return fmt.Errorf("%w from %s", errNoAnswer, p.to)
	}
	_, err := fmt.Fprintf(p.out, "rtt min %s, avg %s, max %s\n", ms(p.least), ms(p.sum/time.Duration(p.came)), ms(p.most))
	return err
}

func ms(d time.Duration) string { return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond)) }
