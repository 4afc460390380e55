package datapath

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"strings"

	"github.com/gaissmai/bart"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Op is one step that changes a device. The types below are all there are. An op states what shall be
// true afterwards, so doing it twice is harmless.
type Op interface {
	// String describes the op for logs and scenarios; no secret is in it.
	String() string
	op()
}

type (
	// SetDevice creates the device or changes it: fields that are zero are left as they are, or chosen by
	// the driver for a new device. A new key ends every session and removes a peer that has that key. A port that is taken
	// is an error that is ErrPortInUse, and leaves the device on the port it had.
	SetDevice struct{ Device Device }

	// RemoveDevice ends the device with all it has.
	RemoveDevice struct{}

	// AddAddrs gives this node addresses, and RemoveAddrs takes them away.
	AddAddrs    struct{ Addrs prefixes.Set }
	RemoveAddrs struct{ Addrs prefixes.Set }

	// AddLocal has packets for these prefixes accepted here, and RemoveLocal no longer.
	AddLocal    struct{ Prefixes prefixes.Set }
	RemoveLocal struct{ Prefixes prefixes.Set }

	// AddRoutes sends packets for these prefixes into the device; it changes the source address of a
	// route that is there. The routes are in canonical order.
	AddRoutes    struct{ Routes []Route }
	RemoveRoutes struct{ Prefixes prefixes.Set }

	// PutPeer creates a peer or changes it. Peer.Prefixes are added to what the peer has, each taken from
	// any other peer in the same instant, as WireGuard does. A zero Endpoint leaves the one
	// the device has; Preshared and Keepalive are set as given.
	PutPeer struct {
		Key  key.Public
		Peer Peer
	}

	// DropPrefixes takes prefixes from a peer. The rest of the peer's are not touched for an instant.
	DropPrefixes struct {
		Key      key.Public
		Prefixes prefixes.Set
	}

	// RemovePeer ends a peer. Prefixes are those it had that are not to be lost if an earlier op failed:
	// its own and those that others were to take over from it.
	RemovePeer struct {
		Key      key.Public
		Prefixes prefixes.Set
	}
)

// Route is a prefix whose packets go into the device.
type Route struct {
	Prefix netip.Prefix
	Source netip.Addr // this node's address for packets without one; zero: the driver's choice
}

func (SetDevice) op()    {}
func (RemoveDevice) op() {}
func (AddAddrs) op()     {}
func (RemoveAddrs) op()  {}
func (AddLocal) op()     {}
func (RemoveLocal) op()  {}
func (AddRoutes) op()    {}
func (RemoveRoutes) op() {}
func (PutPeer) op()      {}
func (DropPrefixes) op() {}
func (RemovePeer) op()   {}

func (o SetDevice) String() string {
	var b strings.Builder
	b.WriteString("set device")
	if d := o.Device; d.Exists() {
		fmt.Fprintf(&b, " key=%v", d.Key.Public())
	}
	if o.Device.ListenPort != 0 {
		fmt.Fprintf(&b, " port=%d", o.Device.ListenPort)
	}
	if o.Device.Mark != 0 {
		fmt.Fprintf(&b, " mark=%d", o.Device.Mark)
	}
	if o.Device.MTU != 0 {
		fmt.Fprintf(&b, " mtu=%d", o.Device.MTU)
	}
	return b.String()
}
func (RemoveDevice) String() string   { return "remove device" }
func (o AddAddrs) String() string     { return "add addresses " + o.Addrs.String() }
func (o RemoveAddrs) String() string  { return "remove addresses " + o.Addrs.String() }
func (o AddLocal) String() string     { return "add local " + o.Prefixes.String() }
func (o RemoveLocal) String() string  { return "remove local " + o.Prefixes.String() }
func (o RemoveRoutes) String() string { return "remove routes " + o.Prefixes.String() }
func (o AddRoutes) String() string {
	var b strings.Builder
	b.WriteString("add routes")
	for _, r := range o.Routes {
		fmt.Fprintf(&b, " %v", r.Prefix)
		if r.Source.IsValid() {
			fmt.Fprintf(&b, " from %v", r.Source)
		}
	}
	return b.String()
}
func (o PutPeer) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "put peer %v", o.Key)
	if o.Peer.Endpoint.IsValid() {
		fmt.Fprintf(&b, " endpoint=%v", o.Peer.Endpoint)
	}
	if !o.Peer.Preshared.IsZero() {
		b.WriteString(" preshared")
	}
	if o.Peer.Keepalive != 0 {
		fmt.Fprintf(&b, " keepalive=%v", o.Peer.Keepalive)
	}
	if !o.Peer.Prefixes.IsEmpty() {
		b.WriteString(" + " + o.Peer.Prefixes.String())
	}
	return b.String()
}
func (o DropPrefixes) String() string {
	return fmt.Sprintf("drop prefixes of %v - %v", o.Key, o.Prefixes)
}
func (o RemovePeer) String() string { return fmt.Sprintf("remove peer %v", o.Key) }

var (
	// ErrSkipped is the error of an op that was not tried because one it relies on failed.
	ErrSkipped = errors.New("skipped")
	// ErrNoDevice is the error of an op that found no device, and of a SetDevice that left none.
	ErrNoDevice = errors.New("no device")
	// ErrPortInUse is the error of a SetDevice whose ListenPort another socket has.
	ErrPortInUse = errors.New("port in use")
)

// OpError says that an op, or the part of it that Op holds, was not carried out.
type OpError struct {
	Op  Op
	Err error
}

func (e *OpError) Error() string { return fmt.Sprintf("%v: %v", e.Op, e.Err) }
func (e *OpError) Unwrap() error { return e.Err }

// Failures yields every *OpError in err, in order. What else err holds is yielded with a nil Op.
func Failures(err error) iter.Seq[*OpError] {
	return func(yield func(*OpError) bool) { failures(err, yield) }
}

func failures(err error, yield func(*OpError) bool) bool {
	switch e := err.(type) {
	case nil:
		return true
	case *OpError:
		return yield(e)
	case interface{ Unwrap() []error }:
		for _, sub := range e.Unwrap() {
			if !failures(sub, yield) {
				return false
			}
		}
		return true
	}
	return yield(&OpError{Err: err})
}

// Each is the loop that an Apply is made of: it calls do for each op in order, goes on past an error,
// leaves out the ops, or the parts of them, that rely on one that failed, and returns the joined
// *OpErrors. An op relies on a failed one
//
//   - always, if that failed with ErrNoDevice;
//   - when it installs a route for a prefix that was to be put on a peer;
//   - when it takes away a prefix, a route, or a peer with a prefix, that overlaps one that was to be
//     put on a peer, or whose route was to be added or removed;
//   - when it takes away addresses while a route may still be from one of them, since a host drops such
//     a route together with its address;
//   - when it gives the device another key, which may take away a peer, before that peer's routes are gone.
func Each(ctx context.Context, ops []Op, do func(context.Context, Op) error) error {
	var errs []error
	var f failed
	for _, op := range ops {
		run, skip := f.split(op)
		if skip != nil {
			errs = append(errs, &OpError{skip, fmt.Errorf("%w: %w", ErrSkipped, f.why)})
			f.note(skip, f.why)
		}
		if run == nil {
			continue
		}
		err := ctx.Err()
		if err == nil {
			err = do(ctx, run)
		}
		if err != nil {
			errs = append(errs, &OpError{run, err})
			f.note(run, err)
		}
	}
	return errors.Join(errs...)
}

// failed is what earlier ops of one Apply did not achieve.
type failed struct {
	device bool
	put    bart.Lite // was to be with a peer, and may not be
	routed bart.Lite // may still be routed, or from another address
	why    error
}

func (f *failed) note(op Op, err error) {
	if f.why == nil {
		f.why = err
	}
	f.device = f.device || errors.Is(err, ErrNoDevice)
	switch o := op.(type) {
	case PutPeer:
		for p := range o.Peer.Prefixes.All() {
			f.put.Insert(p)
		}
	case RemoveRoutes:
		for p := range o.Prefixes.All() {
			f.routed.Insert(p)
		}
	case AddRoutes:
		for _, r := range o.Routes {
			f.routed.Insert(canonical(r.Prefix))
		}
	}
}

// split divides op into what can be tried and what relies on a failure; nil is nothing.
func (f *failed) split(op Op) (run, skip Op) {
	if f.why == nil {
		return op, nil
	}
	if f.device {
		return nil, op
	}
	switch o := op.(type) {
	case SetDevice:
		if !o.Device.Key.IsZero() && f.routed.Size() > 0 {
			return nil, op
		}
	case AddRoutes:
		var ok, not []Route
		for _, r := range o.Routes {
			if f.put.Get(canonical(r.Prefix)) {
				not = append(not, r)
			} else {
				ok = append(ok, r)
			}
		}
		if len(not) > 0 {
			skip = AddRoutes{not}
		}
		if len(ok) > 0 {
			run = AddRoutes{ok}
		}
		return run, skip
	case RemoveRoutes:
		ok, not := f.divide(o.Prefixes)
		return some(ok, RemoveRoutes{ok}), some(not, RemoveRoutes{not})
	case DropPrefixes:
		ok, not := f.divide(o.Prefixes)
		return some(ok, DropPrefixes{o.Key, ok}), some(not, DropPrefixes{o.Key, not})
	case RemovePeer:
		for p := range o.Prefixes.All() {
			if f.overlaps(p) {
				return nil, op
			}
		}
	case RemoveLocal:
		ok, not := f.divide(o.Prefixes)
		return some(ok, RemoveLocal{ok}), some(not, RemoveLocal{not})
	case RemoveAddrs:
		if f.routed.Size() > 0 {
			return nil, op
		}
	}
	return op, nil
}

// divide splits set into the prefixes that can go and those that must stay because an overlapping one
// was not put, was not routed, or may still be.
func (f *failed) divide(set prefixes.Set) (ok, not prefixes.Set) {
	var stay []netip.Prefix
	for p := range set.All() {
		if f.overlaps(p) {
			stay = append(stay, p)
		}
	}
	not = prefixes.Set{}.With(stay...)
	return set.Minus(not), not
}

func (f *failed) overlaps(p netip.Prefix) bool {
	return f.put.OverlapsPrefix(p) || f.routed.OverlapsPrefix(p)
}

// canonical returns p as a Set has it; what is no prefix as it is.
func canonical(p netip.Prefix) netip.Prefix {
	if c, _, err := prefixes.Canonical(p); err == nil {
		return c
	}
	return p
}

func some(s prefixes.Set, op Op) Op {
	if s.IsEmpty() {
		return nil
	}
	return op
}
