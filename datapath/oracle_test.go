package datapath_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// naive is a device written to be obviously right: lists, searched from end to end. It shares no
// code with Model or Plan.
type naive struct {
	dev    datapath.Device
	addrs  []netip.Prefix
	local  []netip.Prefix
	routes []datapath.Route
	peers  []naivePeer
}

type naivePeer struct {
	key       key.Public
	endpoint  netip.AddrPort
	psk       key.Preshared
	keepalive time.Duration
	prefixes  []netip.Prefix
}

func naiveOf(s datapath.State) *naive {
	n := &naive{dev: s.Device, addrs: slices.Collect(s.Addrs.All()), local: slices.Collect(s.Local.All())}
	for _, p := range slices.SortedFunc(maps.Keys(s.Routes), prefixes.Compare) {
		n.routes = append(n.routes, datapath.Route{Prefix: p, Source: s.Routes[p]})
	}
	for _, k := range slices.SortedFunc(maps.Keys(s.Peers), key.Public.Compare) {
		p := s.Peers[k]
		n.peers = append(n.peers, naivePeer{k, p.Endpoint, p.Preshared, p.Keepalive, slices.Collect(p.Prefixes.All())})
	}
	return n
}

func (n *naive) state() datapath.State {
	s := datapath.State{
		Device: n.dev, Addrs: prefixes.Must(n.addrs...), Local: prefixes.Must(n.local...),
		Routes: map[netip.Prefix]netip.Addr{}, Peers: map[key.Public]datapath.Peer{},
	}
	for _, r := range n.routes {
		s.Routes[r.Prefix] = r.Source
	}
	for _, p := range n.peers {
		s.Peers[p.key] = datapath.Peer{Endpoint: p.endpoint, Preshared: p.psk, Keepalive: p.keepalive, Prefixes: prefixes.Must(p.prefixes...)}
	}
	return s
}

func (n *naive) clone() *naive { return naiveOf(n.state()) }

func without[T comparable](list []T, gone ...T) []T {
	return slices.DeleteFunc(slices.Clone(list), func(x T) bool { return slices.Contains(gone, x) })
}

func (n *naive) peer(k key.Public) *naivePeer {
	for i := range n.peers {
		if n.peers[i].key == k {
			return &n.peers[i]
		}
	}
	return nil
}

func (n *naive) owner(p netip.Prefix) (key.Public, bool) {
	for _, q := range n.peers {
		if slices.Contains(q.prefixes, p) {
			return q.key, true
		}
	}
	return key.Public{}, false
}

func (n *naive) do(op datapath.Op) error {
	if _, ok := op.(datapath.SetDevice); !ok && n.dev.Key.IsZero() {
		return datapath.ErrNoDevice
	}
	switch o := op.(type) {
	case datapath.SetDevice:
		if !o.Device.Key.IsZero() {
			n.dev.Key = o.Device.Key
			n.peers = slices.DeleteFunc(n.peers, func(p naivePeer) bool { return p.key == o.Device.Key.Public() })
		}
		if n.dev.Key.IsZero() {
			return datapath.ErrNoDevice
		}
		if o.Device.ListenPort != 0 {
			n.dev.ListenPort = o.Device.ListenPort
		}
		if o.Device.Mark != 0 {
			n.dev.Mark = o.Device.Mark
		}
		if o.Device.MTU != 0 {
			n.dev.MTU = o.Device.MTU
		}
	case datapath.RemoveDevice:
		*n = naive{}
	case datapath.AddAddrs:
		for p := range o.Addrs.All() {
			n.addrs = append(without(n.addrs, p), p)
		}
	case datapath.RemoveAddrs:
		n.addrs = without(n.addrs, slices.Collect(o.Addrs.All())...)
	case datapath.AddLocal:
		for p := range o.Prefixes.All() {
			n.local = append(without(n.local, p), p)
		}
	case datapath.RemoveLocal:
		n.local = without(n.local, slices.Collect(o.Prefixes.All())...)
	case datapath.AddRoutes:
		for _, r := range o.Routes {
			n.routes = slices.DeleteFunc(n.routes, func(x datapath.Route) bool { return x.Prefix == r.Prefix })
			n.routes = append(n.routes, r)
		}
	case datapath.RemoveRoutes:
		n.routes = slices.DeleteFunc(n.routes, func(x datapath.Route) bool { return o.Prefixes.Has(x.Prefix) })
	case datapath.PutPeer:
		if o.Key == n.dev.Key.Public() {
			return errors.New("own key")
		}
		gain := slices.Collect(o.Peer.Prefixes.All())
		for i := range n.peers {
			if n.peers[i].key != o.Key {
				n.peers[i].prefixes = without(n.peers[i].prefixes, gain...)
			}
		}
		if n.peer(o.Key) == nil {
			n.peers = append(n.peers, naivePeer{key: o.Key})
		}
		p := n.peer(o.Key)
		if o.Peer.Endpoint.IsValid() {
			p.endpoint = o.Peer.Endpoint
		}
		p.psk, p.keepalive = o.Peer.Preshared, o.Peer.Keepalive
		p.prefixes = append(without(p.prefixes, gain...), gain...)
	case datapath.DropPrefixes:
		if p := n.peer(o.Key); p != nil {
			p.prefixes = without(p.prefixes, slices.Collect(o.Prefixes.All())...)
		}
	case datapath.RemovePeer:
		n.peers = slices.DeleteFunc(n.peers, func(p naivePeer) bool { return p.key == o.Key })
	default:
		return fmt.Errorf("unknown op %T", op)
	}
	return nil
}

// settled is want as a device would read once it has it: what want left to it filled in from what it was.
func settled(want, have datapath.State) datapath.State {
	s := want.Clone()
	if !s.Device.Exists() {
		return datapath.State{Routes: map[netip.Prefix]netip.Addr{}, Peers: map[key.Public]datapath.Peer{}}
	}
	if s.Device.ListenPort == 0 {
		s.Device.ListenPort = have.Device.ListenPort
	}
	if s.Device.Mark == 0 {
		s.Device.Mark = have.Device.Mark
	}
	if s.Device.MTU == 0 {
		s.Device.MTU = have.Device.MTU
	}
	becomes := key.Public{}
	if have.Device.Key != s.Device.Key {
		becomes = s.Device.Key.Public()
	}
	for k, p := range s.Peers {
		if h, ok := have.Peers[k]; ok && !p.Endpoint.IsValid() && k != becomes {
			p.Endpoint = h.Endpoint
			s.Peers[k] = p
		}
	}
	return s
}

var (
	keyNames   = []string{"a", "b", "c", "d", "e", "f"}
	privs      = map[string]key.Private{}
	pubs       = map[string]key.Public{}
	prefixPool = prefixes.MustParse(
		"10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/17", "10.1.128.0/17", "10.1.2.0/24", "10.1.2.3/32", "10.2.0.0/16", "10.2.2.2/32",
		"fd00::/16", "fd00:1::/32", "fd00:1::1/128", "fd00:2::/32", "0.0.0.0/0", "::/0")
	hostPool = prefixes.MustParse("10.1.2.3", "10.1.2.4", "10.2.2.2", "fd00:1::1", "fd00:9::1")
)

func init() {
	for _, n := range keyNames {
		privs[n] = datapathtest.Key(n)
		pubs[n] = privs[n].Public()
	}
}

func subset(t *rapid.T, pool prefixes.Set, label string) prefixes.Set {
	bits := rapid.Uint16().Draw(t, label)
	var ps []netip.Prefix
	for i := range pool.Len() {
		if bits>>i&1 == 1 {
			ps = append(ps, pool.At(i))
		}
	}
	return prefixes.Must(ps...)
}

// drawState returns a State. wanted: one that passes Check; otherwise one that a device could be found in.
func drawState(t *rapid.T, wanted bool) datapath.State {
	s := datapath.State{Routes: map[netip.Prefix]netip.Addr{}, Peers: map[key.Public]datapath.Peer{}}
	if rapid.IntRange(0, 15).Draw(t, "no device") == 0 {
		return s
	}
	low := 0
	if !wanted {
		low = 1
	}
	self := keyNames[rapid.IntRange(0, 1).Draw(t, "self")]
	s.Device = datapath.Device{
		Key:        privs[self],
		ListenPort: uint16(rapid.IntRange(low, 2).Draw(t, "port")),
		Mark:       uint32(rapid.IntRange(0, 2).Draw(t, "mark")),
		MTU:        rapid.SampledFrom([]int{0, 1420, 1380}[low:]).Draw(t, "mtu"),
	}
	s.Addrs = subset(t, hostPool, "addrs")
	s.Local = subset(t, prefixPool, "local")
	owned := map[netip.Prefix]string{}
	for p := range prefixPool.All() {
		owned[p] = rapid.SampledFrom(append([]string{""}, keyNames...)).Draw(t, "owner of "+p.String())
	}
	for _, n := range keyNames {
		if n == self || rapid.IntRange(0, 2).Draw(t, "peer "+n) == 0 {
			continue
		}
		var p datapath.Peer
		var ps []netip.Prefix
		for q, o := range owned {
			if o == n {
				ps = append(ps, q)
			}
		}
		p.Prefixes = prefixes.Must(ps...)
		if e := rapid.IntRange(0, 2).Draw(t, "endpoint"); e > 0 {
			p.Endpoint = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(e)}), 51820)
		}
		p.Preshared = datapathtest.Preshared(rapid.SampledFrom([]string{"", "x"}).Draw(t, "psk"))
		p.Keepalive = rapid.SampledFrom([]time.Duration{0, 25 * time.Second}).Draw(t, "keepalive")
		s.Peers[pubs[n]] = p
		for _, q := range ps {
			if rapid.IntRange(0, 3).Draw(t, "routed") > 0 {
				s.Routes[q] = drawSource(t, q)
			}
		}
	}
	if !wanted { // somebody may have left routes that lead to no peer
		for p := range subset(t, prefixPool, "stale routes").All() {
			if rapid.Bool().Draw(t, "stale") {
				s.Routes[p] = drawSource(t, p)
			}
		}
	}
	return s
}

func drawSource(t *rapid.T, p netip.Prefix) netip.Addr {
	if !rapid.Bool().Draw(t, "sourced") {
		return netip.Addr{}
	}
	if p.Addr().Is4() {
		return netip.MustParseAddr("10.1.2.3")
	}
	return netip.MustParseAddr("fd00:1::1")
}

// safe checks what must hold between the ops of a plan from have to want.
func safe(t *rapid.T, want, have datapath.State, before, now *naive, op datapath.Op) {
	if _, gone := op.(datapath.RemoveDevice); gone {
		return
	}
	becomes := key.Public{}
	if want.Device.Exists() {
		becomes = want.Device.Key.Public()
	}
	first, last := naiveOf(have), naiveOf(want)
	for p := range prefixPool.All() {
		o1, ok1 := first.owner(p)
		o2, ok2 := last.owner(p)
		if ok1 && ok2 && o1 != becomes {
			if o, ok := now.owner(p); !ok || o != o1 && o != o2 {
				t.Fatalf("after %v: prefix %v is with %v (%v), neither the old peer %v nor the new one %v", op, p, o, ok, o1, o2)
			}
		}
	}
	for _, r := range now.routes {
		if _, ok := now.owner(r.Prefix); ok {
			continue
		}
		_, had := before.owner(r.Prefix)
		i := slices.IndexFunc(before.routes, func(x datapath.Route) bool { return x.Prefix == r.Prefix })
		if had || i < 0 {
			t.Fatalf("after %v: route %v leads to no peer", op, r.Prefix)
		}
	}
}

func checkPlan(t *rapid.T) {
	want, have := drawState(t, true), drawState(t, false)
	if err := want.Check(); err != nil {
		t.Fatalf("drew a bad state: %v", err)
	}
	ops := datapath.Plan(want, have)
	if again := datapath.Plan(want.Clone(), have.Clone()); !reflect.DeepEqual(ops, again) {
		t.Fatalf("two plans for one thing:\n%v\n%v", ops, again)
	}

	dev := naiveOf(have)
	for _, op := range ops {
		before := dev.clone()
		if err := dev.do(op); err != nil {
			t.Fatalf("%v: %v", op, err)
		}
		if reflect.DeepEqual(before.state(), dev.state()) {
			t.Fatalf("%v: has no effect", op)
		}
		safe(t, want, have, before, dev, op)
	}
	if got := dev.state(); !got.Equal(settled(want, have)) {
		t.Fatalf("ended as\n%+v\nwant\n%+v\nops %v", got, settled(want, have), ops)
	}
	if left := datapath.Plan(want, dev.state()); len(left) > 0 {
		t.Fatalf("no fixed point: %v", left)
	}

	// Any op may fail, any number of them, and what relies on it is left out.
	failing := rapid.SliceOfN(rapid.Bool(), len(ops)+1, len(ops)+1).Draw(t, "failing")
	dev = naiveOf(have)
	n := 0
	err := datapath.Each(context.Background(), ops, func(_ context.Context, op datapath.Op) error {
		n++
		if failing[n-1] {
			if _, ok := op.(datapath.SetDevice); ok && dev.dev.Key.IsZero() {
				return fmt.Errorf("told to fail: %w", datapath.ErrNoDevice)
			}
			return errors.New("told to fail")
		}
		before := dev.clone()
		if err := dev.do(op); err != nil {
			return err
		}
		safe(t, want, have, before, dev, op)
		return nil
	})
	if err == nil && !dev.state().Equal(settled(want, have)) {
		t.Fatal("no error, but not what was wanted")
	}
	middle := dev.state()
	for _, op := range datapath.Plan(want, middle) {
		before := dev.clone()
		if err := dev.do(op); err != nil {
			t.Fatalf("second try: %v: %v", op, err)
		}
		safe(t, want, middle, before, dev, op)
	}
	if !dev.state().Equal(settled(want, middle)) {
		t.Fatal("second try did not converge")
	}
}

func TestPlan(t *testing.T) { rapid.Check(t, checkPlan) }

func FuzzPlan(f *testing.F) { f.Fuzz(rapid.MakeFuzz(checkPlan)) }

// Incremental equals full: naming what differs gives the ops that comparing everything gives.
func TestPlanDelta(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		have, want := drawState(t, false), drawState(t, true)
		d := datapath.Delta{Device: true, Peers: map[key.Public]struct{}{}, Routes: map[netip.Prefix]struct{}{}}
		for _, n := range keyNames {
			w, h := want.Peers[pubs[n]], have.Peers[pubs[n]]
			if w != h || rapid.Bool().Draw(t, "named too") {
				d.Peers[pubs[n]] = struct{}{}
			}
			if _, ok := want.Peers[pubs[n]]; !ok {
				d.Peers[pubs[n]] = struct{}{}
			}
			if _, ok := have.Peers[pubs[n]]; !ok {
				d.Peers[pubs[n]] = struct{}{}
			}
		}
		for p := range prefixPool.All() {
			w, wok := want.Routes[p]
			h, hok := have.Routes[p]
			if w != h || wok != hok || rapid.Bool().Draw(t, "named too") {
				d.Routes[p] = struct{}{}
			}
		}
		full, part := datapath.Plan(want, have), datapath.PlanDelta(want, have, d)
		if !reflect.DeepEqual(full, part) {
			t.Fatalf("full:\n%v\nincremental:\n%v", full, part)
		}
	})
}

// What is around a device outlives it.
func TestModel_RemovedDevice(t *testing.T) {
	s := state(t, "device key=me port=51820\npeer b 10.2.0.0/24")
	s.Host, s.Problems = datapath.Host{IPv4: true, Driver: "memory"}, []datapath.Problem{{Subject: "mtu", Message: "too small"}}
	m := datapath.NewModel(s)
	if err := m.Do(datapath.RemoveDevice{}); err != nil {
		t.Fatal(err)
	}
	if got := m.State(); !got.Equal(datapath.State{}) || got.Host != s.Host || !slices.Equal(got.Problems, s.Problems) {
		t.Errorf("left is %+v", got)
	}
}

// The model that the mesh keeps of a device does what the naive device does.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := drawState(t, false)
		dev, m := naiveOf(start), datapath.NewModel(start.Clone())
		for range rapid.IntRange(1, 4).Draw(t, "rounds") {
			for _, op := range datapath.Plan(drawState(t, true), dev.state()) {
				if rapid.IntRange(0, 4).Draw(t, "leave out") == 0 {
					continue
				}
				e1, e2 := dev.do(op), m.Do(op)
				if (e1 == nil) != (e2 == nil) {
					t.Fatalf("%v: naive %v, model %v", op, e1, e2)
				}
				if !m.State().Equal(dev.state()) {
					t.Fatalf("after %v: model\n%+v\nnaive\n%+v", op, m.State(), dev.state())
				}
				for p := range prefixPool.All() {
					k1, ok1 := dev.owner(p)
					k2, ok2 := m.Owner(p)
					if k1 != k2 || ok1 != ok2 {
						t.Fatalf("after %v: owner of %v: model %v, naive %v", op, p, k2, k1)
					}
				}
			}
		}
	})
}
