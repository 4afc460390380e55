package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/mesh"
)

func newCleanup() *cobra.Command {
	cmd := &cobra.Command{
		Use: "cleanup", Short: "Remove what an agent that is gone left on this host", Args: args(cobra.NoArgs),
		Long: `Cleanup removes what an agent left on this host that was stopped, killed or uninstalled: interfaces with their
addresses, routes and peers, the rules, guards and nftables tables that go with them, and the control socket. What
the agent turned on to have the host forward packets is turned off. It says what it did. To do it again is no
error, and where a state folder never was there is none now.

The interfaces are the one that --interface, --netns and --protocol, the environment or the file name, and those
that the state folder has a note of; without either, it is warren0. One of that name that no agent made is left
alone, and so is everything else on the host. It needs CAP_NET_ADMIN if there is anything, and CAP_SYS_ADMIN for
what is in another network namespace, and is refused while an agent has the state folder or the interface.

The key and what else is in the state folder stay, and the node keeps its place in the mesh: "agent leave"
gives that up.`,
		Example: "  agent cleanup\n  agent cleanup --state /var/lib/warren --interface warren0",
	}
	flags := config.Bind(cmd.Flags(), config.ToClean)
	choices(cmd)
	most := timeout(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := flags.Load(config.ThisHost())
		if err != nil {
			return err
		}
		ctx, cancel := most(cmd)
		defer cancel()
		lines, err := cleanup(ctx, c)
		for _, l := range lines {
			if _, err := fmt.Fprintln(cmd.OutOrStdout(), l); err != nil {
				return err
			}
		}
		if err == nil && len(lines) == 0 {
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "there is nothing to remove")
		}
		return err
	}
	return cmd
}

// cleanup removes what an agent left on the host, and returns a line for each thing that was in question.
func cleanup(ctx context.Context, c config.Config) ([]string, error) {
	const stop = "; stop that agent, or have the node leave the mesh with \"agent leave\""
	asked, cancel := context.WithTimeoutCause(ctx, 5*time.Second, errors.New("not within 5s"))
	defer cancel()
	switch s, err := clientOf(c).Status(asked); {
	case err == nil:
		return nil, fmt.Errorf("control socket %s: %w, for node %s in process %d%s", socketOf(c), control.ErrInUse, s.Self.Node, s.Agent.PID, stop)
	case !errors.Is(err, control.ErrNotRunning):
		return nil, err
	}
	unlock, err := lockState(c.State)
	if errors.Is(err, mesh.ErrStateInUse) {
		err = fmt.Errorf("%w%s", err, stop)
	}
	if err != nil {
		return nil, err
	}
	defer unlock()
	lines, err := cleanHost(ctx, c, true)
	removed, serr := control.Remove(ctx, socketOf(c))
	if removed {
		lines = append(lines, "removed the control socket "+socketOf(c))
	}
	return lines, errors.Join(err, serr)
}

// cleanHost removes the devices that are noted in the state folder, and the configured one where that is asked for or
// nothing is noted. The state folder is this process's, or nobody's.
func cleanHost(ctx context.Context, c config.Config, configured bool) (lines []string, err error) {
	s, err := readState(c.State)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	devices := slices.Clone(s.Interfaces)
	named := c.Given("interface") || c.Given("netns") || c.Given("protocol")
	if d := deviceOf(c); configured && (named || len(devices) == 0) && !slices.ContainsFunc(devices, d.same) {
		devices = append(devices, d)
	}
	var errs []error
	var kept []device
	for _, d := range devices {
		err := d.elsewhere()
		switch {
		case err == nil:
			var said []string
			said, err = d.clean(ctx)
			lines = append(lines, said...)
		case !configured: // who leaves the mesh has not asked for that
			lines, kept, err = append(lines, fmt.Sprintf("%v: %v", d, err)), append(kept, d), nil
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%v: %w", d, err))
		}
	}
	if err := errors.Join(errs...); err != nil || len(s.Interfaces) == 0 {
		return lines, err
	}
	s.Interfaces = kept
	return lines, writeState(c.State, s)
}
