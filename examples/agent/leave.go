package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gofrs/flock"
	"github.com/spf13/cobra"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/examples/agent/internal/nearest"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry"
)

func newLeave() *cobra.Command {
	cmd := &cobra.Command{
		Use: "leave", Short: "Take this node out of the mesh", Args: args(cobra.NoArgs),
		Long: `Leave withdraws this node's record, so that the others send it nothing any more, and ends the running
agent. Where none is running it does so by itself, for which it has to be told the registry. It takes the
state folder for that, so that an agent which listens at another --socket is found out. A registry that is
not marked as the mesh's is left as it is. An interface of the host is removed, with what belongs to it; where
what is guarded is in the way of the registry, "agent cleanup" has to come first.

The key stays in the state folder: the next "agent run" joins again as the same node.`,
		Example: "  agent leave\n  agent leave --registry etcd://192.0.2.1:2379    # with no agent running",
	}
	flags := config.Bind(cmd.Flags(), config.ToRegister)
	most := timeout(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := flags.Load(config.ThisHost())
		if err != nil {
			return err
		}
		ctx, cancel := most(cmd)
		defer cancel()
		err = clientOf(c).Leave(ctx)
		switch {
		case errors.Is(err, control.ErrNotRunning):
			text, err := leave(ctx, c, err)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), text)
			return err
		case err != nil:
			return err
		}
		_, err = fmt.Fprintln(cmd.OutOrStdout(), "left the mesh; the agent ends")
		return err
	}
	return cmd
}

// leave withdraws the record of a node whose agent does not answer, and returns what there is to say.
func leave(ctx context.Context, c config.Config, notThere error) (string, error) {
	unlock, err := lockState(c.State)
	if errors.Is(err, mesh.ErrStateInUse) {
		err = fmt.Errorf("%w, which listens elsewhere; say where with --socket", err)
	}
	if err != nil {
		return "", err
	}
	defer unlock()
	switch {
	case c.Registry == "" || c.Registry == "memory":
		return "", fmt.Errorf("%w; to withdraw the node's record without an agent, name the registry with --registry", notRunning(c, notThere))
	case c.Node == "":
		return "", fmt.Errorf("%w, and the state folder %s is no node's: say which node is to leave with --node", notThere, c.State)
	}
	if err := checkState(c); err != nil {
		return "", err
	}
	there := false
	err = directly(ctx, c, func(g *guard) error {
		names, err := nodes(ctx, g)
		if there = slices.Contains(names, c.Node); err != nil || !there {
			return err
		}
		return retry(ctx, func(ctx context.Context) error { return g.Delete(ctx, registry.NodeID(c.Node)) })
	})
	if err != nil {
		return "", err
	}
	// With it the next start would go on with peers of a mesh that this node is no part of.
	if err := os.Remove(filepath.Join(c.State, "snapshot")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("state folder: %w", err)
	}
	text := fmt.Sprintf("%s has left mesh %s; no agent was running", c.Node, c.Mesh)
	if !there {
		text = fmt.Sprintf("%s had no record in mesh %s, and no agent was running", c.Node, c.Mesh)
	}
	lines, err := cleanHost(ctx, c, false)
	if err != nil {
		return "", fmt.Errorf("%s; but its interface is still there: %w", text, err)
	}
	return strings.Join(append([]string{text}, lines...), "\n"), nil
}

// lockState takes a state folder as a running mesh does: by the same file. A folder that none has used is
// not touched.
func lockState(dir string) (unlock func(), err error) {
	path := filepath.Join(dir, "lock")
	switch _, err := os.Stat(path); {
	case errors.Is(err, fs.ErrNotExist):
		return func() {}, nil
	case err != nil:
		return nil, fmt.Errorf("state folder: %w", err)
	}
	l := flock.New(path, flock.SetPermissions(0o600))
	ok, err := l.TryLock()
	if err != nil {
		return nil, fmt.Errorf("state folder %s: locking: %w", dir, err)
	}
	if !ok {
		who := ""
		if data, err := os.ReadFile(filepath.Join(dir, "owner")); err == nil {
			if node, pid, ok := strings.Cut(strings.TrimSpace(string(data)), " "); ok {
				who = fmt.Sprintf(" by node %s in process %s", node, pid)
			}
		}
		return nil, fmt.Errorf("state folder %s: %w%s", dir, mesh.ErrStateInUse, who)
	}
	return func() { _ = l.Close() }, nil
}

func newForget() *cobra.Command {
	cmd := &cobra.Command{
		Use: "forget NODE", Short: "Delete the record of a node that is gone for good", Args: args(cobra.ExactArgs(1)),
		Long: `Forget deletes the record of another node from the registry, with which it is no peer of anybody any more.
It is for nodes that are gone and did not leave. A node that is alive puts its record back; one with which
this node had a handshake a moment ago is therefore refused, unless with --force.

Where no agent is running it does so by itself, for which it has to be told the registry. It cannot tell
then whether the node is alive. A registry that is not marked as the mesh's is left as it is.`,
		Example: "  agent forget alpha",
	}
	flags := config.Bind(cmd.Flags(), config.ToRegister)
	most := timeout(cmd)
	force := cmd.Flags().Bool("force", false, "also one that seems to be alive, or of which nothing is known")
	cmd.ValidArgsFunction = completeNodes(flags)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		node := args[0]
		if err := registry.CheckName(node); err != nil {
			return &usageError{err}
		}
		c, err := flags.Load(config.ThisHost())
		if err != nil {
			return err
		}
		ctx, cancel := most(cmd)
		defer cancel()
		err = clientOf(c).Forget(ctx, node, *force)
		switch {
		case errors.Is(err, control.ErrNotRunning) && c.Registry != "" && c.Registry != "memory":
			err = directly(ctx, c, func(g *guard) error { return forget(ctx, g, c, node, *force) })
		case errors.Is(err, control.ErrNotRunning):
			return fmt.Errorf("%w; to do it without an agent, name the registry with --registry", notRunning(c, err))
		}
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "the record of %s is deleted\n", node)
		return err
	}
	return cmd
}

// timeout adds the flag for how long a command may take.
func timeout(cmd *cobra.Command) func(*cobra.Command) (context.Context, context.CancelFunc) {
	d := cmd.Flags().Duration("timeout", 30*time.Second, "how long it may take")
	return func(cmd *cobra.Command) (context.Context, context.CancelFunc) {
		return context.WithTimeoutCause(cmd.Context(), *d, fmt.Errorf("not done within %v (--timeout)", *d))
	}
}

// directly does something in the registry without an agent. It leaves alone what is not known to be the mesh's.
func directly(ctx context.Context, c config.Config, do func(*guard) error) error {
	s, err := openStore(c, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	g := &guard{store: s, mesh: c.Mesh, where: config.RedactURL(c.Registry)}
	err = do(g)
	if err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return errors.Join(err, s.Close())
}

// forget deletes a record, if there is one.
func forget(ctx context.Context, g *guard, c config.Config, node string, force bool) error {
	if node == c.Node {
		return fmt.Errorf("%s is this node; it leaves the mesh with \"agent leave\"", node)
	}
	names, err := nodes(ctx, g)
	if err != nil {
		return err
	}
	if !slices.Contains(names, node) && !force {
		err := fmt.Errorf("no node is called %q", node)
		if near := nearest.To(node, names...); near != "" {
			err = fmt.Errorf("%w, did you mean %q?", err, near)
		}
		return err
	}
	return retry(ctx, func(ctx context.Context) error { return g.Delete(ctx, registry.NodeID(node)) })
}

// nodes returns who has a record.
func nodes(ctx context.Context, g *guard) ([]string, error) {
	var last error
	for b, err := range g.Watch(ctx, registry.KindNode) {
		switch {
		case errors.Is(err, errOtherMesh), errors.Is(err, errNoMesh):
			return nil, err
		case err != nil:
			last = err
		case b.Reset:
			var names []string
			for _, e := range b.Put {
				if _, name, err := registry.ParseID(e.ID); err == nil {
					names = append(names, name)
				}
			}
			return names, nil
		}
	}
	if last == nil {
		last = context.Cause(ctx)
	}
	return nil, last
}
