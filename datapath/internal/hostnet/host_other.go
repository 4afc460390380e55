//go:build !linux

package hostnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
)

var errHere = fmt.Errorf("host networking through netlink: %w", errors.ErrUnsupported)

// Host works on Linux only: Open fails elsewhere.
type Host struct{}

// Open returns an error that is errors.ErrUnsupported.
func Open(Options) (*Host, error) { return nil, errHere }

func (*Host) Close() error { return nil }

func (*Host) Link(context.Context) (Link, error) { return Link{}, errHere }

func (*Host) Adopt(context.Context, string, func(string) error) (Link, bool, error) {
	return Link{}, false, errHere
}

func (*Host) Up(context.Context, int) error { return errHere }

func (*Host) Remove(context.Context) error { return errHere }

func (*Host) Hold() (io.Closer, error) { return nil, errHere }

func (*Host) RemoveLink(context.Context) error { return errHere }

func (*Host) Read(context.Context) (State, error) { return State{}, errHere }

func (*Host) AddAddrs(context.Context, prefixes.Set) error { return errHere }

func (*Host) RemoveAddrs(context.Context, prefixes.Set) error { return errHere }

func (*Host) AddRoutes(context.Context, []datapath.Route) error { return errHere }

func (*Host) RemoveRoutes(context.Context, prefixes.Set) error { return errHere }

func (*Host) Changed() <-chan struct{} { return nil }

func (*Host) Do(func() error) error { return errHere }

func (*Host) Mark(uint32) (uint32, error) { return 0, errHere }

func (*Host) Apart(uint32) bool { return false }

func (*Host) Encrypted(uint32) bool { return false }

func (*Host) NoRoutes(context.Context, []netip.Addr) map[netip.Addr]bool { return nil }

func (*Host) Problems(context.Context, datapath.State) ([]datapath.Problem, error) {
	return nil, errHere
}
