package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

var errOwnKey = errors.New("the device's own key")

// Plan returns the ops that turn a device which is have into one that is want; none where it is that
// already. want must pass Check. The same arguments give the same ops.
//
// The order makes before it breaks: device, added addresses, peers with the prefixes they gain, added
// routes, removed routes, dropped prefixes and peers, removed addresses. After every op, also when any
// of them failed and Each left out what relied on it, a prefix that some peer has in both have and want
// is with its old or its new peer, and no route is left without a peer that had one. The one exception
// is a peer whose key becomes the device's own: the device removes it, so its routes go first.
//
// What want leaves to the device (a zero ListenPort, Mark, MTU or Endpoint) is no difference.
func Plan(want, have State) []Op { return plan(want, have, Differences(want, have)) }

// Delta names the parts in which a wanted State may differ from what there is.
type Delta struct {
	Device bool                    // Device, Addrs or Local
	Peers  map[key.Public]struct{} // peers to compare
	Routes map[netip.Prefix]struct{}
}

// PlanDelta is Plan for a change whose extent is known: it compares only what d names, so that its work
// does not grow with the device. d must name every peer that gains or loses a prefix.
func PlanDelta(want, have State, d Delta) []Op {
	return plan(want, have, d)
}

// Differences returns the Delta in which want and have differ. It costs time in proportion to both.
func Differences(want, have State) Delta {
	d := Delta{Device: true, Peers: make(map[key.Public]struct{}), Routes: make(map[netip.Prefix]struct{})}
	// Whatever is the same on both sides is left out at once, so that the rest costs what differs.
	for k, w := range want.Peers {
		if h, ok := have.Peers[k]; !ok || differs(w, h) {
			d.Peers[k] = struct{}{}
		}
	}
	for k := range have.Peers {
		if _, ok := want.Peers[k]; !ok {
			d.Peers[k] = struct{}{}
		}
	}
	for r, w := range want.Routes {
		if h, ok := have.Routes[r]; !ok || w != h {
			d.Routes[r] = struct{}{}
		}
	}
	for r := range have.Routes {
		if _, ok := want.Routes[r]; !ok {
			d.Routes[r] = struct{}{}
		}
	}
	return d
}

// differs reports whether a device with peer have must be written to have peer want.
func differs(want, have Peer) bool {
	if !want.Endpoint.IsValid() {
		want.Endpoint = have.Endpoint
	}
	return want != have
}

func plan(want, have State, d Delta) []Op {
	if !want.Device.Exists() {
		if !have.Device.Exists() {
			return nil
		}
		return []Op{RemoveDevice{}}
	}
	var ops []Op
	var after []Op // what breaks
	var early prefixes.Set
	var own key.Public
	if want.Device.Key != have.Device.Key {
		own = want.Device.Key.Public()
	}
	if p, ok := have.Peers[own]; ok {
		for r := range p.Prefixes.All() {
			if _, routed := have.Routes[r]; routed {
				early = early.With(r)
			}
		}
		if !early.IsEmpty() {
			ops = append(ops, RemoveRoutes{early})
		}
	}
	if d.Device {
		if dev, differ := device(want.Device, have.Device); differ {
			ops = append(ops, SetDevice{dev})
		}
		add, remove := prefixes.Diff(have.Addrs, want.Addrs)
		addLocal, removeLocal := prefixes.Diff(have.Local, want.Local)
		if !add.IsEmpty() {
			ops = append(ops, AddAddrs{add})
		}
		if !addLocal.IsEmpty() {
			ops = append(ops, AddLocal{addLocal})
		}
		if !removeLocal.IsEmpty() {
			after = append(after, RemoveLocal{removeLocal})
		}
		if !remove.IsEmpty() {
			after = append(after, RemoveAddrs{remove})
		}
	}

	keys := make([]key.Public, 0, len(d.Peers))
	for k := range d.Peers {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, key.Public.Compare)

	gained := make(map[netip.Prefix]struct{}) // taken from their old peer by the PutPeers
	for _, k := range keys {
		w, wanted := want.Peers[k]
		if !wanted {
			continue
		}
		h, there := have.Peers[k]
		add := w.Prefixes.Minus(h.Prefixes)
		if there && add.IsEmpty() && !differs(Peer{w.Endpoint, w.Preshared, w.Keepalive, h.Prefixes}, h) {
			continue
		}
		for p := range add.All() {
			gained[p] = struct{}{}
		}
		put := Peer{Preshared: w.Preshared, Keepalive: w.Keepalive, Prefixes: add}
		if w.Endpoint != h.Endpoint {
			put.Endpoint = w.Endpoint
		}
		ops = append(ops, PutPeer{k, put})
	}

	var routes []Route
	var unrouted []netip.Prefix
	for r := range early.All() {
		if w, wanted := want.Routes[r]; wanted {
			routes = append(routes, Route{r, w})
		}
	}
	for r := range d.Routes {
		if early.Has(r) {
			continue
		}
		w, wanted := want.Routes[r]
		h, there := have.Routes[r]
		switch {
		case wanted && (!there || w != h):
			routes = append(routes, Route{r, w})
		case there && !wanted:
			unrouted = append(unrouted, r)
		}
	}
	if len(routes) > 0 {
		ops = append(ops, AddRoutes{sortedRoutes(routes)})
	}
	if len(unrouted) > 0 {
		ops = append(ops, RemoveRoutes{prefixes.Set{}.With(unrouted...)})
	}

	for _, k := range keys {
		h, there := have.Peers[k]
		if !there {
			continue
		}
		w, wanted := want.Peers[k]
		if !wanted {
			if k != own { // SetDevice took it
				ops = append(ops, RemovePeer{k, h.Prefixes})
			}
			continue
		}
		lost := h.Prefixes.Minus(w.Prefixes)
		var drop []netip.Prefix
		for p := range lost.All() {
			if _, taken := gained[p]; !taken {
				drop = append(drop, p)
			}
		}
		if len(drop) > 0 {
			ops = append(ops, DropPrefixes{k, prefixes.Set{}.With(drop...)})
		}
	}
	return append(ops, after...)
}

// device returns the SetDevice that want calls for: only what differs, and the key of a new device.
func device(want, have Device) (set Device, differ bool) {
	if want.Key != have.Key {
		set.Key, differ = want.Key, true
	}
	if want.ListenPort != 0 && want.ListenPort != have.ListenPort {
		set.ListenPort, differ = want.ListenPort, true
	}
	if want.Mark != 0 && want.Mark != have.Mark {
		set.Mark, differ = want.Mark, true
	}
	if want.MTU != 0 && want.MTU != have.MTU {
		set.MTU, differ = want.MTU, true
	}
	return set, differ
}

// Sync makes the device what want says, for programs that decide for themselves and need no mesh: it
// reads, plans, applies, and reads again to see that it is so. Errors of single ops do not keep the
// rest from being applied; Failures takes them apart.
func Sync(ctx context.Context, dp Datapath, want State) error {
	if err := want.Check(); err != nil {
		return err
	}
	have, err := dp.Read(ctx)
	if err != nil {
		return fmt.Errorf("reading the device: %w", err)
	}
	ops := Plan(want, have)
	if len(ops) == 0 {
		return nil
	}
	if err := dp.Apply(ctx, ops...); err != nil {
		return err
	}
	have, err = dp.Read(ctx)
	if err != nil {
		return fmt.Errorf("reading the device back: %w", err)
	}
	if left := Plan(want, have); len(left) > 0 {
		return fmt.Errorf("device did not take %d of %d ops, the first: %v", len(left), len(ops), left[0])
	}
	return nil
}
