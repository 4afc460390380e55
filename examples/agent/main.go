package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/mesh"
)

// The exit codes.
const (
	exitOK         = 0
	exitFailed     = 1
	exitUsage      = 2
	exitNotRunning = 3
	exitState      = 4
	exitOtherMesh  = 5
)

const exitCodes = `0  done; of run: it was stopped, or the node left the mesh
1  failed: the reason is on standard error
2  wrong flags, arguments or configuration
3  no agent is running for the state folder
4  the state folder is in use by another process, or is another node's or mesh's
5  the registry holds the data of another mesh

With systemd, RestartPreventExitStatus=2 4 5 keeps it from trying again what cannot work.`

func main() { os.Exit(command(os.Args[1:], os.Stdout, os.Stderr)) }

// command is main without the process.
func command(args []string, stdout, stderr io.Writer) int {
	ctx, restore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer restore()
	context.AfterFunc(ctx, restore) // a second signal does not wait for anything
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	for line := range strings.SplitSeq(strings.TrimSpace(err.Error()), "\n") {
		fmt.Fprintf(stderr, "agent: %s\n", line)
	}
	if _, ok := errors.AsType[*usageError](err); ok {
		fmt.Fprintf(stderr, "See %s --help.\n", cmd.CommandPath())
	}
	return exitCode(err)
}

func exitCode(err error) int {
	if _, ok := errors.AsType[*usageError](err); ok {
		return exitUsage
	}
	switch {
	case errors.Is(err, config.ErrConfig), errors.Is(err, mesh.ErrConfig):
		return exitUsage
	case errors.Is(err, control.ErrNotRunning):
		return exitNotRunning
	case errors.Is(err, mesh.ErrStateInUse), errors.Is(err, mesh.ErrStateForeign), errors.Is(err, errState), errors.Is(err, control.ErrInUse):
		return exitState
	case errors.Is(err, errOtherMesh):
		return exitOtherMesh
	}
	return exitFailed
}

// usageError says that a command was called in a way it does not know.
type usageError struct{ error }

func (e *usageError) Unwrap() error { return e.error }
