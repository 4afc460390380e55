package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
)

// patience is how long parts may take to end. What they keep is on disk by then or safe to lose, so that
// no end is a failure for being slow.
const patience = 5 * time.Second

func newRun() *cobra.Command {
	cmd := &cobra.Command{
		Use: "run", Short: "Run a node of the mesh", Args: args(cobra.NoArgs),
		Long: `Run makes this host a node of the mesh until it is stopped. It needs no privilege, with --datapath kernel or
tun nothing of root's but CAP_NET_ADMIN, and with another network namespace CAP_SYS_ADMIN as well.

Only --registry has to be said. The node is called as the host is, its address follows from its name and
the mesh's, and others reach it at the host's addresses. Its key, and what else it must not lose, is in
the state folder, which one process at a time has.

SIGTERM and Ctrl-C end it, the node keeps its place in the mesh, and is back with the next run; a second
one does not wait for anything. With the kernel datapath the kernel goes on forwarding meanwhile, until
"agent leave" or "agent cleanup"; with tun, packets for the mesh go by the host's other routes, unless they are
guarded. "agent leave" takes the node out of the mesh. While the registry is away the agent goes on with the
nodes it knows, at a start with those it knew last. At SIGHUP it reads its configuration again.

It uses half of the processors at most, if GOMAXPROCS in its environment does not say another number.

Each flag is a variable of the environment as well (WARREN_LOG_LEVEL), and a key of the YAML file that
--config names (log-level): see "agent help settings".`,
		Example: `  agent run --registry etcd://192.0.2.1:2379
  agent run --registry etcd://192.0.2.1:2379 --datapath auto        # the whole host, where it may
  agent run --registry memory --state /tmp/warren       # alone, to try it
  agent run --config agent.yaml --print-config`,
	}
	flags := config.Bind(cmd.Flags(), config.ToRun)
	choices(cmd)
	show := cmd.Flags().Bool("print-config", false, "show the configuration in force and run nothing, as \"agent config\" does")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := flags.Load(config.ThisHost())
		if err != nil {
			return err
		}
		if *show {
			return c.Print(cmd.OutOrStdout())
		}
		level := new(slog.LevelVar)
		level.Set(c.LogLevel)
		log := newLog(cmd.ErrOrStderr(), c.LogFormat, level)
		for _, line := range c.Misspelt() {
			log.Warn(line)
		}
		limitProcessors(log)
		a, err := newAgent(c, log, level)
		if err != nil {
			return err
		}
		a.reload = func() (config.Config, error) { return flags.Load(config.ThisHost()) }
		hup := make(chan os.Signal, 1)
		signal.Notify(hup, syscall.SIGHUP)
		defer signal.Stop(hup)
		a.hup = hup
		return runUntil(cmd.Context(), a, log)
	}
	return cmd
}

// runUntil runs a until ctx ends, and then not for long.
func runUntil(ctx context.Context, a *agent, log *slog.Logger) error {
	ended := make(chan error, 1)
	go func() {
		err := a.run(ctx)
		if cerr := a.close(); err == nil && cerr != nil {
			err = fmt.Errorf("stopping: %w", cerr)
		}
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(patience):
		log.Warn("stopped without waiting for what did not end", "after", patience)
		return nil
	}
}

// newLog returns the logger of a running agent.
func newLog(to io.Writer, format string, level slog.Leveler) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if strings.EqualFold(format, "json") {
		return slog.New(slog.NewJSONHandler(to, o))
	}
	return slog.New(slog.NewTextHandler(to, o))
}
