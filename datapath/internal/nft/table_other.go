//go:build !linux

package nft

import (
	"context"
	"errors"
	"fmt"
)

var errHere = fmt.Errorf("nftables: %w", errors.ErrUnsupported)

// Table works on Linux only: Open fails elsewhere.
type Table struct{}

// Open returns an error that is errors.ErrUnsupported.
func Open(Options) (*Table, error) { return nil, errHere }

func (*Table) Read(context.Context) (Rules, bool, error) { return Rules{}, false, errHere }

func (*Table) Set(context.Context, Rules) error { return errHere }

func (*Table) Noted(context.Context) ([]string, error) { return nil, errHere }

func (*Table) Changed() <-chan struct{} { return nil }

func (*Table) Close() error { return nil }

// ReadForwarding returns an error that is errors.ErrUnsupported.
func ReadForwarding(func(func() error) error) (Forwarding, error) { return Forwarding{}, errHere }

// TurnOn returns an error that is errors.ErrUnsupported.
func TurnOn(func(func() error) error, []string, Before) ([]string, error) { return nil, errHere }

// TurnOff returns an error that is errors.ErrUnsupported.
func TurnOff(func(func() error) error, []string, Before) error { return errHere }

// ForwardFrom returns an error that is errors.ErrUnsupported.
func ForwardFrom(func(func() error) error, string) error { return errHere }

// Loaded reports that there are no tables.
func Loaded() bool { return false }
