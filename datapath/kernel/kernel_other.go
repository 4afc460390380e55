//go:build !linux

package kernel

import (
	"context"
	"errors"
	"fmt"

	"github.com/warren-mesh/warren/datapath"
)

var errHere = fmt.Errorf("kernel WireGuard: only Linux has it: %w", errors.ErrUnsupported)

// Kernel works on Linux only: New fails elsewhere.
type Kernel struct{}

var (
	_ datapath.Datapath = (*Kernel)(nil)
	_ datapath.Notifier = (*Kernel)(nil)
)

// New returns an error that is errors.ErrUnsupported.
func New(Options) (*Kernel, error) { return nil, errHere }

// Cleanup returns an error that is errors.ErrUnsupported.
func Cleanup(context.Context, Options) error { return errHere }

// Read returns an error that is errors.ErrUnsupported.
func (*Kernel) Read(context.Context) (datapath.State, error) { return datapath.State{}, errHere }

// Apply returns an error that is errors.ErrUnsupported.
func (*Kernel) Apply(context.Context, ...datapath.Op) error { return errHere }

// Changed returns a channel that never receives.
func (*Kernel) Changed() <-chan struct{} { return nil }

// Close does nothing.
func (*Kernel) Close() error { return nil }

// RemovesPrefixes returns an error that is errors.ErrUnsupported.
func (*Kernel) RemovesPrefixes(context.Context) (bool, error) { return false, errHere }
