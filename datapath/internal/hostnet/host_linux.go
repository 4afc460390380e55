package hostnet

import (
	"context"
	"errors"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
)

var errTodo = errors.New("not yet")

// Host is one link and what belongs to it, in one network namespace. Its methods may be called from any
// goroutine; those that change something wait for each other.
type Host struct{ changed chan struct{} }

// Open checks o and opens sockets. It changes nothing. It needs no link.
func Open(o Options) (*Host, error) { return nil, errTodo }

// Close closes the sockets, and the channel of Changed. Twice is harmless. Other methods then return an
// error that is net.ErrClosed.
func (h *Host) Close() error { return nil }

// Link returns our link: ErrNoLink where there is none, a *ForeignError where another has its name. A link of
// ours that was renamed is returned under the name it has.
func (h *Host) Link(ctx context.Context) (Link, error) { return Link{}, errTodo }

// Adopt returns our link of that kind, and reports whether it had to be created. A link that was renamed
// gets its name back; one of ours of another kind is removed first. A link of that name that is not ours is
// a *ForeignError, as is a table, other than the main one, in which somebody else has routes when the link has to be created.
//
// create makes the link under the name it is given, which is not Options.Interface, in the namespace (see
// Do); Adopt then marks and renames it. nil has Adopt itself create a link of that kind without
// attributes. When something fails no link is left. A link kept open by a process, as a TUN is, is to be
// closed by create's owner when Adopt fails. Until Up, a new link is down.
func (h *Host) Adopt(ctx context.Context, kind string, create func(name string) error) (Link, bool, error) {
	return Link{}, false, errTodo
}

// Up gives the link its MTU (bytes; 0 leaves it), has it up, with the rules of Options, and removes what is left
// of other Options. An MTU below MinMTU is ErrMTU where the link has IPv6, since Linux would silently take
// all IPv6 addresses and routes from it.
func (h *Host) Up(ctx context.Context, mtu int) error { return errTodo }

// Remove removes the link with all that is ours, as Cleanup does.
func (h *Host) Remove(ctx context.Context) error { return errTodo }

// Read reports what is there. Lists that Linux says were disturbed while it wrote them are read again.
// Without a link the rest is still reported; a foreign link of our name counts as none.
func (h *Host) Read(ctx context.Context) (State, error) { return State{}, errTodo }

// AddAddrs gives this node addresses, all of them host prefixes. One that another link has is a
// *ForeignError; one of a family that is not available is ErrFamily. The error joins *ItemErrors (see Items); the rest is done.
func (h *Host) AddAddrs(ctx context.Context, s prefixes.Set) error { return errTodo }

// RemoveAddrs takes addresses away. Linux removes the routes from them too. Those that are not there, or
// not ours, are left alone without an error.
func (h *Host) RemoveAddrs(ctx context.Context, s prefixes.Set) error { return errTodo }

// AddRoutes sends packets for these prefixes into the link, which must be up. A source address must be one of this host's.
// A route of somebody else for that prefix with our metric is a *ForeignError. The error joins *ItemErrors
// (see Items); the rest is done. Changing the source address of a route leaves no gap.
func (h *Host) AddRoutes(ctx context.Context, routes []datapath.Route) error { return errTodo }

// RemoveRoutes removes our routes for these prefixes, in whatever table and with whatever metric. Those
// that are not there are no error, and those of somebody else are left alone.
func (h *Host) RemoveRoutes(ctx context.Context, s prefixes.Set) error { return errTodo }

// Changed returns a channel that receives after somebody else changed a link, an address, a rule, or a route
// that is ours or a default. Several changes may be reported as one, ours as somebody else's, and an overrun as a
// change: the answer to all is to Read. The channel is the same at every call; Close closes it.
func (h *Host) Changed() <-chan struct{} { return h.changed }

// Do runs f on a thread in the namespace of h, to open a socket or to create a link there. A thread that cannot
// be brought back ends with f. f must not start goroutines that count on the namespace.
func (h *Host) Do(f func() error) error { return errTodo }
