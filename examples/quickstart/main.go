// Quickstart runs a mesh of three nodes in one process, without privilege, and changes it under a running
// transfer: a fourth node joins, a prefix moves from one node to another, and a node leaves. It checks
// every byte that was sent, prints what happened, and exits with 0 if none was lost.
//
//	go run ./examples/quickstart
//
// Read node.go first: it is all that a program needs to be a member of a mesh. story.go is what happens
// here, transfer.go sends, check.go compares and counts, and screen.go prints.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// limit is how long everything may take; it takes a tenth of that.
const limit = time.Minute

var errLimit = fmt.Errorf("not done within %v: is this machine very busy, or is UDP on 127.0.0.1 blocked?", limit)

// The exit codes.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130 // as a shell has it
)

const usage = `Usage: quickstart

Runs a WireGuard mesh of three nodes in this process. It needs no privilege, no server and no flag, and
takes less than 15 seconds. While numbered and compared data is on its way through the mesh, a fourth
node joins, a prefix moves from one node to another, and a node leaves.

Exits with 0 if no byte was lost, 1 if one was or something else failed, 2 if it was called with
arguments, and 130 if it was interrupted. That is the program's own exit status; "go run" prints one
that is not 0, as "exit status 130", and exits with 1 itself.

On a terminal it shows progress in place; with TERM=dumb, or where the output is no terminal, it prints
plain lines. It uses no colours.
`

func main() { os.Exit(command(os.Args[1:], os.Stdout, os.Stderr)) }

// command is main without the process.
func command(args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // said below, once
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		if _, err := fmt.Fprint(stdout, usage); err != nil {
			fmt.Fprintf(stderr, "quickstart: %v: %v\n", errOutput, err)
			return exitFailed
		}
		return exitOK
	case err != nil:
		fmt.Fprintf(stderr, "quickstart: %v\n\n%s", err, usage)
		return exitUsage
	case flags.NArg() > 0:
		fmt.Fprintf(stderr, "quickstart: takes no arguments, and got %q\n\n%s", flags.Args(), usage)
		return exitUsage
	}

	interrupt, restore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer restore()
	context.AfterFunc(interrupt, restore) // a second Ctrl-C does not wait for anything
	ctx, cancel := context.WithTimeoutCause(interrupt, limit, errLimit)
	defer cancel()

	err := run(ctx, newScreen(stdout))
	switch {
	case interrupt.Err() != nil:
		fmt.Fprintln(stderr, "quickstart: interrupted; all nodes were stopped")
		return exitInterrupted
	case err != nil:
		fmt.Fprintln(stderr, "quickstart:", err)
		return exitFailed
	}
	return exitOK
}
