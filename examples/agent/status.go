package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
)

func newStatus() *cobra.Command {
	cmd := &cobra.Command{
		Use: "status", Short: "Show this node, its peers, and what is wrong", Args: args(cobra.NoArgs),
		Long: `Status shows this node and its peers as the running agent sees them, and what is wrong: each condition
with what to do about it. It names the datapath that carries the packets and, where a better one was looked
for, why that one does not.

A peer is "up" while there is a session with it, "idle" when there was one (WireGuard makes the next when
there is something to send), "new" before the first, and "set-aside" when it is no peer, for which there is
a condition. Counters are as of the device's last reading.

With -o json it is the whole of it, for programs; with --watch as well, one line for each change.`,
		Example: "  agent status\n  agent status --watch\n  agent status -o json | jq -r '.peers[].node'",
	}
	flags := config.Bind(cmd.Flags(), config.ToFind)
	format := cmd.Flags().StringP("output", "o", "table", "table, wide or json")
	watch := cmd.Flags().BoolP("watch", "w", false, "go on, and show each change")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "wide", "json"}, cobra.ShellCompDirectiveNoFileComp)) // the flag is there
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		write, ok := map[string]func(io.Writer, control.Status) error{
			"table": func(w io.Writer, s control.Status) error { return table(w, s, time.Now(), false) },
			"wide":  func(w io.Writer, s control.Status) error { return table(w, s, time.Now(), true) },
			"json":  func(w io.Writer, s control.Status) error { return json.NewEncoder(w).Encode(s) },
		}[*format]
		if !ok {
			return &usageError{fmt.Errorf("the output %q is none of table, wide, json", *format)}
		}
		c, err := flags.Load(config.ThisHost())
		if err != nil {
			return err
		}
		if *watch {
			return notRunning(c, watchStatus(cmd.Context(), clientOf(c), cmd.OutOrStdout(), *format, write))
		}
		ctx, cancel := context.WithTimeoutCause(cmd.Context(), 10*time.Second, errors.New("not within 10s"))
		defer cancel()
		s, err := clientOf(c).Status(ctx)
		if err != nil {
			return notRunning(c, err)
		}
		if *format != "json" {
			return write(cmd.OutOrStdout(), s)
		}
		e := json.NewEncoder(cmd.OutOrStdout())
		e.SetIndent("", "  ")
		return e.Encode(s)
	}
	return cmd
}

// watchStatus writes each Status until ctx ends, which is no error.
func watchStatus(ctx context.Context, c control.Client, out io.Writer, format string, write func(io.Writer, control.Status) error) error {
	f, ok := out.(*os.File)
	screen := ok && format != "json" && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
	first := true
	for s, err := range c.Watch(ctx) {
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		var b strings.Builder
		switch {
		case screen:
			b.WriteString("\x1b[H\x1b[2J") // to the top, and clear
		case !first && format != "json":
			b.WriteString("\n")
		}
		first = false
		if err := write(&b, s); err != nil {
			return err
		}
		if _, err := io.WriteString(out, b.String()); err != nil {
			return err
		}
	}
	return nil
}

// table writes s for people.
func table(w io.Writer, s control.Status, now time.Time, wide bool) error {
	var b strings.Builder
	self, published := s.Self, "published"
	switch {
	case self.Record == nil:
		published = "not published yet"
	case !self.Published:
		published = "not published in its newest form yet"
	}
	ready := ""
	switch {
	case s.Ready:
	case self.Listen == 0 && s.Agent.Interface != "": // without a device
		ready = ", waiting for the registry and the device"
	default:
		ready = ", waiting for the registry"
	}
	fmt.Fprintf(&b, "node       %s of mesh %s, %s%s\n", self.Node, s.Agent.Mesh, published, ready)
	fmt.Fprintf(&b, "addresses  %s\n", orDash(join(self.Addresses)))
	if other := self.Local.String(); wide || self.Local.Len() > len(self.Addresses) {
		fmt.Fprintf(&b, "announces  %s\n", orDash(other))
	}
	fmt.Fprintf(&b, "endpoints  %s\n", orDash(strings.Join(self.Endpoints, " ")))
	fmt.Fprintf(&b, "registry   %s\n", s.Agent.Registry)
	datapath := cmp.Or(self.Datapath, s.Agent.Datapath)
	if s.Agent.Interface != "" {
		datapath += ", interface " + s.Agent.Interface
	}
	if s.Agent.Namespace != "" {
		datapath += " in namespace " + s.Agent.Namespace
	}
	if s.Agent.UnderlayNamespace != "" {
		datapath += ", UDP sockets in namespace " + s.Agent.UnderlayNamespace
	}
	fmt.Fprintf(&b, "datapath   %s\n", datapath)
	if self.Instead != "" {
		fmt.Fprintf(&b, "           no better one: %s\n", strings.ReplaceAll(self.Instead, "\n", "; "))
	}
	if s.Agent.Routing == "policy" {
		fmt.Fprintf(&b, "routing    policy, by table %d; encrypted packets have the mark %s\n", s.Agent.Table, s.Agent.Mark)
	}
	if len(s.Agent.Guard) > 0 {
		fmt.Fprintf(&b, "guards     %s\n", join(s.Agent.Guard))
	}
	if s.Agent.Socks5 != "" {
		fmt.Fprintf(&b, "socks5     %s\n", s.Agent.Socks5)
	}
	for _, e := range s.Agent.Expose {
		fmt.Fprintf(&b, "exposes    %s\n", e)
	}
	if wide {
		fmt.Fprintf(&b, "key        %s\n", self.Key)
		fmt.Fprintf(&b, "device     UDP port %d, MTU %d\n", self.Listen, self.MTU)
		fmt.Fprintf(&b, "agent      process %d since %s, %s\n", s.Agent.PID, ago(now, s.Agent.Started), s.Agent.Build)
	}
	b.WriteString("\n")

	if len(s.Peers) == 0 {
		b.WriteString("no peers\n")
	} else {
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		fmt.Fprint(t, "PEER\tSTATE\tREACHES\tENDPOINT\tHANDSHAKE\tRECEIVED\tSENT")
		if wide {
			fmt.Fprint(t, "\tKEY\tROLES\tLABELS")
		}
		fmt.Fprintln(t)
		for _, p := range s.Peers {
			handshake := "never"
			if p.LastHandshake != nil {
				handshake = ago(now, *p.LastHandshake) + " ago"
			}
			prefixes := p.Prefixes.String()
			if prefixes == "" {
				prefixes = join(p.Addresses)
			}
			if n := p.Prefixes.Len(); n > 3 && !wide {
				prefixes = fmt.Sprintf("%v and %d more", p.Prefixes.At(0), n-1)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s", p.Node, p.State, orDash(prefixes), orDash(p.Endpoint), handshake, size(p.Received), size(p.Sent))
			if wide {
				var labels []string
				for k, v := range p.Labels {
					labels = append(labels, k+"="+v)
				}
				fmt.Fprintf(t, "\t%v\t%s\t%s", p.Key, orDash(strings.Join(p.Roles, ",")), orDash(sorted(labels)))
			}
			fmt.Fprintln(t)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}

	if len(s.Conditions) > 0 {
		b.WriteString("\nwrong now:\n")
	}
	for _, c := range s.Conditions {
		line := string(c.Kind)
		for _, s := range []string{c.Node, c.Subject} {
			if s != "" {
				line += " " + s
			}
		}
		fmt.Fprintf(&b, "  %s, for %s\n      %s\n", line, ago(now, c.Since), c.Message)
		if c.Remedy != "" {
			fmt.Fprintf(&b, "      -> %s\n", c.Remedy)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
