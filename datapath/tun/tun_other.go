//go:build !linux

package tun

import (
	"context"
	"errors"
	"fmt"

	"github.com/warren-mesh/warren/datapath"
)

var errHere = fmt.Errorf("tun: only for Linux: %w", errors.ErrUnsupported)

// TUN works on Linux only: New fails elsewhere.
type TUN struct{}

var (
	_ datapath.Datapath = (*TUN)(nil)
	_ datapath.Notifier = (*TUN)(nil)
)

// New returns an error that is errors.ErrUnsupported.
func New(Options) (*TUN, error) { return nil, errHere }

// Cleanup returns an error that is errors.ErrUnsupported.
func Cleanup(context.Context, Options) error { return errHere }

// Read returns an error that is errors.ErrUnsupported.
func (*TUN) Read(context.Context) (datapath.State, error) { return datapath.State{}, errHere }

// Apply returns an error that is errors.ErrUnsupported.
func (*TUN) Apply(context.Context, ...datapath.Op) error { return errHere }

// Changed returns a channel that never receives.
func (*TUN) Changed() <-chan struct{} { return nil }

// Close does nothing.
func (*TUN) Close() error { return nil }
