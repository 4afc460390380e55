package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

var errOwnKey = errors.New("the device's own key")

// Plan returns the ops that turn a device which is have into one that is want; none where it is that
// already. want must pass Check. The same arguments give the same ops.
//
// The order makes before it breaks: device, added addresses, peers with the prefixes they gain, each
// followed by the routes into it, other added routes, removed routes, dropped prefixes and peers, removed addresses. After every op, also when any
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
	p := planner{want: want, have: have, delta: d, gained: make(map[netip.Prefix]struct{})}
	for k := range d.Peers {
		p.keys = append(p.keys, k)
	}
	slices.SortFunc(p.keys, key.Public.Compare)
	p.routes()
	var last []Op
	if d.Device {
		last = p.device()
	}
	p.putPeers()
	p.addRoutes(slices.Collect(maps.Keys(p.toRoute)))
	if len(p.unroute) > 0 {
		p.do(RemoveRoutes{prefixes.Set{}.With(p.unroute...)})
	}
	p.takeAway()
	return append(p.ops, last...)
}

// planner is one plan in the making.
type planner struct {
	want, have State
	delta      Delta
	keys       []key.Public // of delta.Peers, sorted

	own     key.Public                // the device's new key, if it is to have one
	toRoute map[netip.Prefix]struct{} // to be added or changed
	unroute []netip.Prefix
	gained  map[netip.Prefix]struct{} // taken from their old peer by a PutPeer
	ops     []Op
}

func (p *planner) do(op Op) { p.ops = append(p.ops, op) }

// routes finds the routes that differ. Those of a peer whose key becomes the device's own are removed
// before anything else.
func (p *planner) routes() {
	var early prefixes.Set
	if p.want.Device.Key != p.have.Device.Key {
		p.own = p.want.Device.Key.Public()
		for r := range p.have.Peers[p.own].Prefixes.All() {
			if _, routed := p.have.Routes[r]; routed {
				early = early.With(r)
			}
		}
	}
	if !early.IsEmpty() {
		p.do(RemoveRoutes{early})
	}
	p.toRoute = make(map[netip.Prefix]struct{})
	differ := func(r netip.Prefix) {
		w, wanted := p.want.Routes[r]
		h, there := p.have.Routes[r]
		there = there && !early.Has(r)
		switch {
		case wanted && (!there || w != h):
			p.toRoute[r] = struct{}{}
		case there && !wanted:
			p.unroute = append(p.unroute, r)
		}
	}
	for r := range p.delta.Routes {
		differ(r)
	}
	for r := range early.All() {
		differ(r)
	}
}

// device plans the device, its addresses and local prefixes, and returns what is to come last.
func (p *planner) device() (last []Op) {
	if dev, differ := device(p.want.Device, p.have.Device); differ {
		p.do(SetDevice{dev})
	}
	add, remove := prefixes.Diff(p.have.Addrs, p.want.Addrs)
	addLocal, removeLocal := prefixes.Diff(p.have.Local, p.want.Local)
	if !add.IsEmpty() {
		p.do(AddAddrs{add})
	}
	if !addLocal.IsEmpty() {
		p.do(AddLocal{addLocal})
	}
	if !removeLocal.IsEmpty() {
		last = append(last, RemoveLocal{removeLocal})
	}
	if !remove.IsEmpty() {
		last = append(last, RemoveAddrs{remove})
	}
	return last
}

// putPeers plans new and changed peers, each followed by the routes into it: a peer that shook hands
// may send at once, and what it asks for must find its way back.
func (p *planner) putPeers() {
	for _, k := range p.keys {
		w, wanted := p.want.Peers[k]
		if !wanted {
			continue
		}
		h, there := p.have.Peers[k]
		add := w.Prefixes.Minus(h.Prefixes)
		if there && add.IsEmpty() && !differs(Peer{w.Endpoint, w.Preshared, w.Keepalive, h.Prefixes}, h) {
			continue
		}
		put := Peer{Preshared: w.Preshared, Keepalive: w.Keepalive, Prefixes: add}
		if w.Endpoint != h.Endpoint {
			put.Endpoint = w.Endpoint
		}
		p.do(PutPeer{k, put})
		var routes []netip.Prefix
		for r := range add.All() {
			p.gained[r] = struct{}{}
			if _, ok := p.toRoute[r]; ok {
				routes = append(routes, r)
			}
		}
		p.addRoutes(routes)
	}
}

func (p *planner) addRoutes(routes []netip.Prefix) {
	if len(routes) == 0 {
		return
	}
	slices.SortFunc(routes, prefixes.Compare)
	var add AddRoutes
	for _, r := range routes {
		add.Routes = append(add.Routes, Route{r, p.want.Routes[r]})
		delete(p.toRoute, r)
	}
	p.do(add)
}

// takeAway plans what goes: peers, and prefixes that nobody took over.
func (p *planner) takeAway() {
	for _, k := range p.keys {
		h, there := p.have.Peers[k]
		if !there {
			continue
		}
		w, wanted := p.want.Peers[k]
		if !wanted {
			if k != p.own { // SetDevice took it
				p.do(RemovePeer{k, h.Prefixes})
			}
			continue
		}
		var drop []netip.Prefix
		for r := range h.Prefixes.Minus(w.Prefixes).All() {
			if _, taken := p.gained[r]; !taken {
				drop = append(drop, r)
			}
		}
		if len(drop) > 0 {
			p.do(DropPrefixes{k, prefixes.Set{}.With(drop...)})
		}
	}
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
