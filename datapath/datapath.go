package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Datapath is a WireGuard device and what the host needs to use it. It may also be a Notifier and a
// Settler, which is found out by type assertion: what wraps a Datapath has to forward both.
//
// Its methods may be called from any goroutine; calls of Apply and Read do not overlap in Warren, and an
// implementation serialises them if they do.
type Datapath interface {
	// Read reports what the device is now. A device that does not exist (yet, or no longer) is the
	// State whose Device is zero, not an error. The caller owns the State.
	Read(ctx context.Context) (State, error)

	// Apply carries out ops in order and goes on past one that fails, except that an op which relies on
	// a failed one is skipped (ErrSkipped). It returns nil or the joined *OpErrors, one for each op, or
	// part of an op, that was not carried out; Failures takes them apart. An op that is already true of
	// the device succeeds without effect. When ctx ends, the ops not yet begun fail with its error.
	//
	// A peer that is new on the device and has an endpoint is greeted: when the ops are done, so that
	// there is a route back, the driver starts a handshake instead of waiting for the first packet. Of two nodes that learn of each other it is the
	// later one whose greeting is understood; without it a first packet would wait for WireGuard's
	// retry after 5 s (REKEY_TIMEOUT, section 6.1 of the WireGuard paper).
	Apply(ctx context.Context, ops ...Op) error

	// Close releases handles. A device that can outlive its process goes on forwarding; use RemoveDevice
	// to end it. Close twice is harmless; the other methods then return an error that is net.ErrClosed.
	Close() error
}

// Notifier is a Datapath that notices when someone else touches its device.
type Notifier interface {
	// Changed returns a channel that receives (or is closed) after a change not made through Apply.
	// Several changes may be reported as one. The channel is the same at every call.
	Changed() <-chan struct{}
}

// Settler is a Datapath that wants to know whether it has been told everything.
type Settler interface {
	// Settle says that the State programmed last is complete: a destination which no peer has is not
	// merely unknown yet. A Settler treats destinations as undecided until it is called, and again
	// after RemoveDevice.
	Settle()
}

// State is a device as it is (Read) or as it should be (Plan). Maps and sets are canonical, so two
// States say the same exactly when their fields are equal.
type State struct {
	Device Device
	Addrs  prefixes.Set                // addresses of this node, as host prefixes
	Routes map[netip.Prefix]netip.Addr // what is sent into the device -> source address; the zero Addr is none
	Local  prefixes.Set                // what this node announces: accepted here when it arrives
	Peers  map[key.Public]Peer

	Stats    map[key.Public]Stats // observed only: Plan ignores it
	Host     Host                 // observed only: Plan ignores it
	Problems []Problem            // observed only: Plan ignores it
}

// Device is the WireGuard interface itself. The zero Device is none.
type Device struct {
	Key        key.Private
	ListenPort uint16 // UDP; 0 in a wanted Device: leave it, or let the driver choose one
	Mark       uint32 // firewall mark of the encrypted packets; 0 in a wanted Device: the driver chooses
	MTU        int    // bytes of the largest inner packet; 0 in a wanted Device: the driver chooses
}

// Exists reports whether there is a device.
func (d Device) Exists() bool { return !d.Key.IsZero() }

// Bounds of a peer's persistent keepalive interval. WireGuard counts it in whole seconds in 16 bits.
const (
	MinKeepalive = time.Second
	MaxKeepalive = 65535 * time.Second
)

// Peer is another node as the device sees it. Values compare with ==.
type Peer struct {
	Endpoint  netip.AddrPort // where its packets go; zero in a wanted Peer: leave what the device learned
	Preshared key.Preshared
	Keepalive time.Duration // 0 is off, else whole seconds from MinKeepalive to MaxKeepalive
	Prefixes  prefixes.Set  // allowed IPs: sent to this peer, and accepted from it
}

// Stats is what a device counted for one peer since the peer was created on it.
type Stats struct {
	LastHandshake time.Time // zero: never
	Received      uint64    // bytes, encrypted, handshakes included
	Sent          uint64    // bytes, encrypted, attempts at a handshake included

	// NoRoute: the host has no way to the peer's endpoint, as far as the driver knows. Of a device that does not
	// count in Sent what it could not send, it has to know.
	NoRoute bool
}

// Underlay says how encrypted packets that leave the device relate to the routes into it.
type Underlay uint8

const (
	// UnderlayShared: encrypted packets follow the routes into the device, so an endpoint inside a
	// peer's prefix would send the tunnel through itself.
	UnderlayShared Underlay = iota
	// UnderlaySeparate: they never can, because the device marks them out of the tunnel, or because its
	// routes live in a network stack of their own.
	UnderlaySeparate
)

// Host is what the driver observes around the device.
type Host struct {
	Connected   prefixes.Set // networks the host is directly connected to; the device's own are left out
	Addrs       prefixes.Set // addresses the host has elsewhere, as host prefixes; loopback and link-local ones are left out
	UnderlayMTU int          // bytes; 0: not known
	IPv4, IPv6  bool         // families in which encrypted packets can be sent
	Underlay    Underlay
	Driver      string // what carries the packets, such as "kernel", "tun" or "netstack"; empty: it does not say
	Instead     string // why no better one does, where one was looked for; else empty
}

// Problem is what keeps packets from arriving, or makes them slow, though the device is as it was asked for:
// something of the host that the driver must not change, or cannot. A driver reports it at every reading for as
// long as it lasts: one that is missing is over.
type Problem struct {
	Subject string // the thing, in a few words that stay the same: "mtu", "rp_filter of eth0"; no two of a State have the same
	Message string // what is wrong, naming values and never a key
	Remedy  string // what an operator can do
}

// Clone returns a State that shares no map with s.
func (s State) Clone() State {
	s.Routes, s.Peers, s.Stats = maps.Clone(s.Routes), maps.Clone(s.Peers), maps.Clone(s.Stats)
	s.Problems = slices.Clone(s.Problems)
	return s
}

// Equal reports whether s and o are the same but for what is merely observed (Stats, Host and Problems).
func (s State) Equal(o State) bool {
	return s.Device == o.Device && s.Addrs == o.Addrs && s.Local == o.Local &&
		maps.Equal(s.Routes, o.Routes) && maps.Equal(s.Peers, o.Peers)
}

// ErrState is wrapped by every error of Check.
var ErrState = errors.New("not a state a device can have")

// Check reports what makes s impossible as a wanted State, naming each value; nil where Plan may be
// asked for it. It costs time in proportion to the State.
func (s State) Check() error {
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, fmt.Errorf("%w: "+format, append([]any{ErrState}, a...)...))
	}
	if !s.Device.Exists() {
		if len(s.Peers)+len(s.Routes)+s.Addrs.Len()+s.Local.Len() > 0 {
			bad("peers, routes or addresses without a device key")
		}
		return errors.Join(errs...)
	}
	if s.Device.MTU < 0 || s.Device.MTU > 65535 {
		bad("MTU %d: outside 0 to 65535", s.Device.MTU)
	}
	for p := range s.Addrs.All() {
		if !p.IsSingleIP() {
			bad("address %v: not a host prefix", p)
		}
	}
	own := s.Device.Key.Public()
	owner := make(map[netip.Prefix]key.Public)
	for k, p := range s.Peers {
		switch {
		case k.IsZero():
			bad("a peer with no public key")
		case k == own:
			bad("peer %v: the device's own key", k)
		}
		if err := CheckKeepalive(p.Keepalive); err != nil {
			bad("peer %v: %v", k, err)
		}
		for q := range p.Prefixes.All() {
			if o, taken := owner[q]; taken {
				lo, hi := o, k
				if lo.Compare(hi) > 0 {
					lo, hi = hi, lo
				}
				bad("prefix %v: with two peers, %v and %v", q, lo, hi)
			}
			owner[q] = k
		}
	}
	for r, src := range s.Routes {
		c, _, err := prefixes.Canonical(r)
		switch {
		case err != nil:
			bad("route: %v", err)
		case c != r:
			bad("route %v: canonical is %v", r, c)
		case src.IsValid() && (src.Zone() != "" || src.Is4() != r.Addr().Is4()):
			bad("route %v: source address %v: another family, or with a zone", r, src)
		}
		if _, ok := owner[r]; !ok {
			bad("route %v: no peer has that prefix", r)
		}
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// CheckKeepalive reports why WireGuard cannot keep an interval: kernel and userspace round or wrap
// what does not fit instead of refusing it.
func CheckKeepalive(d time.Duration) error {
	switch {
	case d == 0:
		return nil
	case d < MinKeepalive || d > MaxKeepalive:
		return fmt.Errorf("keepalive %v: outside %v to %v", d, MinKeepalive, MaxKeepalive)
	case d%time.Second != 0:
		return fmt.Errorf("keepalive %v: not in whole seconds", d)
	}
	return nil
}
