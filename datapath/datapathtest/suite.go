package datapathtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Lack names something that a datapath does not have, so that the cases about it are skipped.
type Lack string

// What a harness may say its datapath lacks.
const (
	Marks        Lack = "firewall marks"
	Sources      Lack = "source addresses on routes"
	LocalGuard   Lack = "a set of local prefixes"
	PortConflict Lack = "a way to take its port"
	Outsider     Lack = "a way to change it from outside"
	MTUChange    Lack = "an MTU that can be set"
)

// Harness makes the devices that the suite tests.
type Harness struct {
	// New returns a datapath whose device does not exist yet. The suite closes it and, before that,
	// removes the device.
	New func(t testing.TB) datapath.Datapath

	// Occupy takes the given UDP port as another program would, until free is called; nil where the
	// datapath lacks PortConflict.
	Occupy func(t testing.TB, port uint16) (free func())

	// Outside does op to the device of d without going through d.Apply; nil where the datapath lacks
	// Outsider.
	Outside func(t testing.TB, d datapath.Datapath, op datapath.Op)

	// Lacks lists what the datapath does not have.
	Lacks []Lack

	// Checks is how many random States the property cases try. Default: 50.
	Checks int
}

func (h Harness) need(t testing.TB, what Lack) {
	if slices.Contains(h.Lacks, what) {
		t.Skipf("the datapath says it lacks %s", what)
	}
}

// Run has the datapaths that h makes go through every case of the contract in package datapath.
func Run(t *testing.T, h Harness) {
	if h.Checks == 0 {
		h.Checks = 50
	}
	for _, c := range []struct {
		name string
		f    func(*testing.T, Harness)
	}{
		{"NoDevice", testNoDevice},
		{"Create", testCreate},
		{"Scenarios", testScenarios},
		{"RandomStates", testRandomStates},
		{"Twice", testTwice},
		{"StealsPrefix", testSteals},
		{"DropOnePrefix", testDropOne},
		{"GivesNothingBack", testGivesNothingBack},
		{"LearnedEndpointStays", testLearnedEndpoint},
		{"Keepalive", testKeepalive},
		{"Preshared", testPreshared},
		{"Rekey", testRekey},
		{"OwnKey", testOwnKey},
		{"DeviceKey", testDeviceKey},
		{"PortTaken", testPortTaken},
		{"PortTakenAtCreation", testPortTakenAtCreation},
		{"MTU", testMTU},
		{"Mark", testMark},
		{"Routes", testRoutes},
		{"Local", testLocal},
		{"BadOpAlone", testBadOpAlone},
		{"ManyPeers", testManyPeers},
		{"ManyPrefixes", testManyPrefixes},
		{"RemoveAndCreate", testRemoveAndCreate},
		{"Outsider", testOutsider},
		{"ContextEnded", testContext},
		{"ReadWhileApplying", testConcurrent},
		{"Close", testClose},
	} {
		t.Run(c.name, func(t *testing.T) { c.f(t, h) })
	}
}

const caseTimeout = 2 * time.Minute

// device is one datapath under test.
type device struct {
	t   testing.TB
	ctx context.Context
	datapath.Datapath
}

func (h Harness) open(t testing.TB) *device {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), caseTimeout)
	d := &device{t, ctx, h.New(t)}
	t.Cleanup(func() {
		defer cancel()
		if err := d.Apply(ctx, datapath.RemoveDevice{}); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Errorf("removing the device at the end: %v", err)
		}
		if err := d.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return d
}

func (d *device) read() datapath.State {
	d.t.Helper()
	s, err := d.Read(d.ctx)
	if err != nil {
		d.t.Fatalf("Read: %v", err)
	}
	if s.Host.Driver == "" {
		d.t.Error("host does not say which driver it has")
	}
	told := make(map[string]bool, len(s.Problems))
	for _, p := range s.Problems {
		if p.Subject == "" || p.Message == "" || told[p.Subject] {
			d.t.Errorf("problem %+v: without subject or message, or another one has that subject", p)
		}
		told[p.Subject] = true
	}
	return s
}

func (d *device) apply(ops ...datapath.Op) {
	d.t.Helper()
	if err := d.Apply(d.ctx, ops...); err != nil {
		d.t.Fatalf("Apply: %v", err)
	}
}

// become brings the device to want by a plan and checks that it reads back as that.
func (d *device) become(want datapath.State) {
	d.t.Helper()
	have := d.read()
	d.apply(datapath.Plan(want, have)...)
	d.settled(want)
}

func (d *device) settled(want datapath.State) {
	d.t.Helper()
	if left := datapath.Plan(want, d.read()); len(left) > 0 {
		d.t.Fatalf("still to do: %v", left)
	}
}

func (d *device) peer(name string) datapath.Peer {
	d.t.Helper()
	p, ok := d.read().Peers[pub(name)]
	if !ok {
		d.t.Fatalf("peer %s is not on the device", name)
	}
	return p
}

func pub(name string) key.Public { return Key(name).Public() }

func set(s ...string) prefixes.Set { return prefixes.MustParse(s...) }

func create(name string) datapath.SetDevice {
	return datapath.SetDevice{Device: datapath.Device{Key: Key(name)}}
}

func put(name string, ps ...string) datapath.PutPeer {
	return datapath.PutPeer{Key: pub(name), Peer: datapath.Peer{Prefixes: set(ps...)}}
}

// far is an endpoint that never answers and that no packet reaches: the discard port on loopback.
var far = netip.MustParseAddrPort("127.0.0.1:9")

func testNoDevice(t *testing.T, h Harness) {
	d := h.open(t)
	if s := d.read(); s.Device.Exists() || len(s.Peers) > 0 || len(s.Routes) > 0 {
		t.Errorf("a new datapath reads as %+v, want no device", s)
	}
	d.apply(datapath.RemoveDevice{})
	err := d.Apply(d.ctx, put("b", "10.2.0.0/24"), datapath.AddLocal{Prefixes: set("10.1.0.0/24")})
	if !errors.Is(err, datapath.ErrNoDevice) {
		t.Errorf("a peer without a device: %v, want ErrNoDevice", err)
	}
	if n := len(slices.Collect(datapath.Failures(err))); n != 2 {
		t.Errorf("%d failures reported, want one for each of 2 ops: %v", n, err)
	}
	if err := d.Apply(d.ctx, datapath.SetDevice{Device: datapath.Device{MTU: 1400}}); !errors.Is(err, datapath.ErrNoDevice) {
		t.Errorf("a new device without a key: %v, want ErrNoDevice", err)
	}
}

func testCreate(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"))
	s := d.read()
	if s.Device.Key != Key("me") {
		t.Errorf("key is not the one set")
	}
	if s.Device.ListenPort == 0 {
		t.Error("listen port reads 0: it must be the real one")
	}
	if s.Device.MTU < 1280 {
		t.Errorf("MTU %d: the driver chose less than IPv6 needs", s.Device.MTU)
	}
	if !s.Host.IPv4 && !s.Host.IPv6 {
		t.Error("host has no family at all")
	}
	// 32 times 0xff is a key that reads back clamped.
	ff, err := key.PrivateFromBytes(slices.Repeat([]byte{0xff}, key.Size))
	if err != nil {
		t.Fatal(err)
	}
	d.become(datapath.State{Device: datapath.Device{Key: ff}})
}

func testScenarios(t *testing.T, h Harness) {
	for _, s := range Scenarios(t) {
		t.Run(s.Name, func(t *testing.T) {
			d := h.open(t)
			have, want := h.fit(s.Have), h.fit(s.Want)
			d.become(have)
			d.become(want)
			d.become(have)
		})
	}
}

// fit takes from a State what the datapath lacks. Ports are left to it: a fixed one may be taken here.
func (h Harness) fit(s datapath.State) datapath.State {
	s = s.Clone()
	s.Device.ListenPort = 0
	if slices.Contains(h.Lacks, Marks) {
		s.Device.Mark = 0
	}
	if slices.Contains(h.Lacks, MTUChange) {
		s.Device.MTU = 0
	}
	if slices.Contains(h.Lacks, LocalGuard) {
		s.Local = prefixes.Set{}
	}
	if slices.Contains(h.Lacks, Sources) {
		for p := range s.Routes {
			s.Routes[p] = netip.Addr{}
		}
	}
	return s
}

// Whatever is set reads back such that there is nothing left to do.
func testRandomStates(t *testing.T, h Harness) {
	d := h.open(t)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		if n++; n > h.Checks {
			return
		}
		want := h.fit(DrawState(rt))
		ops := datapath.Plan(want, d.read())
		if err := d.Apply(d.ctx, ops...); err != nil {
			rt.Fatalf("Apply: %v", err)
		}
		got := d.read()
		if left := datapath.Plan(want, got); len(left) > 0 {
			rt.Fatalf("after %v\nstill to do: %v", ops, left)
		}
		for k := range got.Stats {
			if _, ok := got.Peers[k]; !ok {
				rt.Fatalf("stats of %v, which is no peer", k)
			}
		}
	})
}

// DrawState returns a random State that passes Check: a few peers with nested prefixes of both
// families, routes, addresses.
func DrawState(t *rapid.T) datapath.State {
	pool := set("10.0.0.0/8", "10.1.0.0/16", "10.1.0.0/17", "10.1.2.0/24", "10.1.2.3/32", "10.2.0.0/16", "fd00::/16", "fd00:1::/32", "fd00:1::1/128")
	names := []string{"a", "b", "c", "d"}
	s := datapath.State{
		Device: datapath.Device{Key: Key(rapid.SampledFrom(names).Draw(t, "self")), MTU: rapid.SampledFrom([]int{0, 1280, 1420}).Draw(t, "mtu")},
		Routes: map[netip.Prefix]netip.Addr{}, Peers: map[key.Public]datapath.Peer{},
	}
	s.Addrs = set("10.1.2.9", "fd00:9::1")
	if rapid.Bool().Draw(t, "local") {
		s.Local = set("10.9.0.0/16", "fd00:9::/64")
	}
	owner := map[netip.Prefix]string{}
	for p := range pool.All() {
		owner[p] = rapid.SampledFrom(append(names, "")).Draw(t, p.String())
	}
	for _, n := range names {
		if pub(n) == s.Device.Key.Public() || rapid.IntRange(0, 3).Draw(t, "absent "+n) == 0 {
			continue
		}
		p := datapath.Peer{
			Endpoint:  rapid.SampledFrom([]netip.AddrPort{{}, far, netip.MustParseAddrPort("[::1]:9")}).Draw(t, "endpoint"),
			Preshared: Preshared(rapid.SampledFrom([]string{"", "x", "y"}).Draw(t, "psk")),
			Keepalive: rapid.SampledFrom([]time.Duration{0, 25 * time.Second, datapath.MaxKeepalive}).Draw(t, "keepalive"),
		}
		for q, o := range owner {
			if o == n {
				p.Prefixes = p.Prefixes.With(q)
				if rapid.Bool().Draw(t, "routed") {
					var from netip.Addr
					if rapid.Bool().Draw(t, "sourced") {
						from = s.Addrs.At(0).Addr()
						if q.Addr().Is6() {
							from = s.Addrs.At(1).Addr()
						}
					}
					s.Routes[q] = from
				}
			}
		}
		s.Peers[pub(n)] = p
	}
	return s
}

// An op states what shall be true, so doing it twice is harmless.
func testTwice(t *testing.T, h Harness) {
	d := h.open(t)
	route := datapath.AddRoutes{Routes: []datapath.Route{{Prefix: netip.MustParsePrefix("10.2.0.0/24")}}}
	for _, op := range []datapath.Op{
		create("me"), datapath.AddAddrs{Addrs: set("10.1.0.1")}, put("b", "10.2.0.0/24", "10.3.0.0/24"), route,
		datapath.RemoveRoutes{Prefixes: set("10.2.0.0/24")}, datapath.DropPrefixes{Key: pub("b"), Prefixes: set("10.2.0.0/24")},
		datapath.RemovePeer{Key: pub("b")}, datapath.RemoveAddrs{Addrs: set("10.1.0.1")}, datapath.RemoveDevice{},
	} {
		d.apply(op)
		once := d.read()
		d.apply(op)
		if twice := d.read(); !twice.Equal(once) {
			t.Fatalf("%v the second time made\n%+v\nof\n%+v", op, twice, once)
		}
	}
}

func testSteals(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"), put("b", "10.2.0.0/24", "10.9.0.0/16"), put("c", "10.3.0.0/24"))
	d.apply(put("c", "10.9.0.0/16"))
	if got := d.peer("b").Prefixes; got != set("10.2.0.0/24") {
		t.Errorf("old owner has %v", got)
	}
	if got := d.peer("c").Prefixes; got != set("10.3.0.0/24", "10.9.0.0/16") {
		t.Errorf("new owner has %v", got)
	}
}

func testDropOne(t *testing.T, h Harness) {
	d := h.open(t)
	p := put("b", "10.2.0.0/16", "10.2.0.0/24", "10.2.0.1/32", "fd00::/64", "fd00::1/128")
	p.Peer.Keepalive, p.Peer.Preshared, p.Peer.Endpoint = 25*time.Second, Preshared("x"), far
	d.apply(create("me"), p, put("c", "10.2.1.0/24"))
	d.apply(datapath.DropPrefixes{Key: pub("b"), Prefixes: set("10.2.0.0/24", "fd00::/64", "10.7.0.0/16", "10.2.1.0/24")})
	want := p.Peer
	want.Prefixes = set("10.2.0.0/16", "10.2.0.1/32", "fd00::1/128")
	if got := d.peer("b"); got != want {
		t.Errorf("peer is %+v, want %+v", got, want)
	}
	if got := d.peer("c").Prefixes; got != set("10.2.1.0/24") {
		t.Errorf("dropping another peer's prefix changed it to %v", got)
	}
	d.apply(datapath.DropPrefixes{Key: pub("nobody"), Prefixes: set("10.2.0.0/16")})
	if got := d.read(); len(got.Peers) != 2 {
		t.Errorf("dropping from an unknown peer made it: %d peers", len(got.Peers))
	}
}

// What a removed peer had goes to nobody by itself.
func testGivesNothingBack(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"), put("b", "10.2.0.0/24"), put("c", "10.2.0.0/24"), datapath.RemovePeer{Key: pub("c")})
	if got := d.peer("b").Prefixes; !got.IsEmpty() {
		t.Errorf("old owner has %v again", got)
	}
}

func testLearnedEndpoint(t *testing.T, h Harness) {
	d := h.open(t)
	p := put("b", "10.2.0.0/24")
	p.Peer.Endpoint = far
	d.apply(create("me"), p)
	d.apply(put("b", "10.2.1.0/24"))
	if got := d.peer("b").Endpoint; got != far {
		t.Errorf("a put without endpoint made it %v", got)
	}
	v6 := netip.MustParseAddrPort("[2001:db8::1]:51820")
	p.Peer.Endpoint = v6
	d.apply(p)
	if got := d.peer("b").Endpoint; got != v6 {
		t.Errorf("endpoint is %v, want %v", got, v6)
	}
}

// What does not fit is refused before anything is written.
func testKeepalive(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"))
	for _, k := range []time.Duration{time.Second, 25 * time.Second, 65535 * time.Second, 10 * time.Second, 0} {
		p := put("b", "10.2.0.0/24")
		p.Peer.Keepalive = k
		d.apply(p)
		if got := d.peer("b").Keepalive; got != k {
			t.Errorf("keepalive is %v, want %v", got, k)
		}
	}
	before := d.read()
	for _, k := range []time.Duration{500 * time.Millisecond, 1500 * time.Millisecond, 65536 * time.Second, 70000 * time.Second, -time.Second} {
		for _, name := range []string{"b", "new"} {
			p := put(name, "10.3.0.0/24")
			p.Peer.Keepalive = k
			if err := d.Apply(d.ctx, p); err == nil {
				t.Errorf("keepalive %v was taken", k)
			}
		}
	}
	if got := d.read(); !got.Equal(before) {
		t.Errorf("refused puts changed the device to %+v", got)
	}
}

func testPreshared(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"))
	for _, name := range []string{"x", "y", "", "x"} {
		p := put("b", "10.2.0.0/24")
		p.Peer.Preshared = Preshared(name)
		d.apply(p)
		if got := d.peer("b").Preshared; got != Preshared(name) {
			t.Errorf("preshared key is not that of %q", name)
		}
	}
}

// Rule 5: a changed key takes everything along.
func testRekey(t *testing.T, h Harness) {
	d := h.open(t)
	peer := datapath.Peer{Endpoint: far, Preshared: Preshared("x"), Keepalive: 25 * time.Second, Prefixes: set("10.2.0.0/24", "10.2.1.0/24", "fd00::/64")}
	state := func(name string) datapath.State {
		s := datapath.State{Device: datapath.Device{Key: Key("me")}, Peers: map[key.Public]datapath.Peer{pub(name): peer}, Routes: map[netip.Prefix]netip.Addr{}}
		for p := range peer.Prefixes.All() {
			s.Routes[p] = netip.Addr{}
		}
		return s
	}
	d.become(state("old"))
	d.become(state("new"))
	got := d.read()
	if len(got.Peers) != 1 || got.Peers[pub("new")] != peer {
		t.Errorf("peers are %+v", got.Peers)
	}
}

func testOwnKey(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"))
	err := d.Apply(d.ctx, put("me", "10.2.0.0/24"), put("b", "10.3.0.0/24"))
	if err == nil {
		t.Error("the device's own key was taken as a peer")
	}
	if got := d.read(); len(got.Peers) != 1 {
		t.Errorf("%d peers, want just the other one", len(got.Peers))
	}
}

func testDeviceKey(t *testing.T, h Harness) {
	d := h.open(t)
	p := put("b", "10.2.0.0/24")
	p.Peer.Endpoint, p.Peer.Keepalive = far, 25*time.Second
	d.apply(create("me"), p, put("next", "10.3.0.0/24"))
	port := d.read().Device.ListenPort
	d.apply(create("next"))
	s := d.read()
	if s.Device.Key != Key("next") || s.Device.ListenPort != port {
		t.Errorf("device is %+v, want the new key on port %d", s.Device, port)
	}
	if _, ok := s.Peers[pub("next")]; ok {
		t.Error("the device has itself as a peer")
	}
	if s.Peers[pub("b")] != p.Peer {
		t.Errorf("the other peer became %+v", s.Peers[pub("b")])
	}
}

func testPortTaken(t *testing.T, h Harness) {
	h.need(t, PortConflict)
	d := h.open(t)
	d.apply(create("me"))
	had := d.read().Device.ListenPort
	taken := freePort(t)
	free := h.Occupy(t, taken)
	move := datapath.SetDevice{Device: datapath.Device{ListenPort: taken}}
	err := d.Apply(d.ctx, move, put("b", "10.2.0.0/24"))
	if !errors.Is(err, datapath.ErrPortInUse) || errors.Is(err, datapath.ErrNoDevice) {
		t.Errorf("moving to a taken port: %v, want ErrPortInUse", err)
	}
	if got := d.read().Device.ListenPort; got != had {
		t.Errorf("port is %d after a move that failed, want %d as before", got, had)
	}
	if got := d.peer("b").Prefixes; got != set("10.2.0.0/24") {
		t.Errorf("the op after the failed one left %v", got)
	}
	free()
	d.apply(move)
	if got := d.read().Device.ListenPort; got != taken {
		t.Errorf("port is %d, want %d once it is free", got, taken)
	}
}

func testPortTakenAtCreation(t *testing.T, h Harness) {
	h.need(t, PortConflict)
	d := h.open(t)
	taken := freePort(t)
	free := h.Occupy(t, taken)
	dev := datapath.SetDevice{Device: datapath.Device{Key: Key("me"), ListenPort: taken}}
	err := d.Apply(d.ctx, dev, put("b", "10.2.0.0/24"))
	if !errors.Is(err, datapath.ErrPortInUse) || !errors.Is(err, datapath.ErrNoDevice) {
		t.Errorf("creating on a taken port: %v, want ErrPortInUse and ErrNoDevice", err)
	}
	if d.read().Device.Exists() {
		t.Error("half a device is left")
	}
	free()
	d.apply(dev, put("b", "10.2.0.0/24"))
}

// freePort returns a UDP port that nothing had a moment ago.
func freePort(t testing.TB) uint16 {
	c, err := net.ListenUDP("udp", &net.UDPAddr{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Port()
}

func testMTU(t *testing.T, h Harness) {
	h.need(t, MTUChange)
	d := h.open(t)
	d.apply(create("me"), datapath.AddAddrs{Addrs: set("10.1.0.1", "fd00::1")})
	for _, mtu := range []int{1380, 1280, 1420} {
		d.apply(datapath.SetDevice{Device: datapath.Device{MTU: mtu}})
		s := d.read()
		if s.Device.MTU != mtu {
			t.Errorf("MTU is %d, want %d", s.Device.MTU, mtu)
		}
		if s.Addrs != set("10.1.0.1", "fd00::1") {
			t.Errorf("MTU %d left addresses %v", mtu, s.Addrs)
		}
	}
}

func testMark(t *testing.T, h Harness) {
	h.need(t, Marks)
	d := h.open(t)
	d.apply(create("me"))
	d.apply(datapath.SetDevice{Device: datapath.Device{Mark: 0x77}})
	if got := d.read().Device.Mark; got != 0x77 {
		t.Errorf("mark is %#x", got)
	}
}

func testRoutes(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"), datapath.AddAddrs{Addrs: set("10.1.0.1", "10.1.0.2", "fd00::1")}, put("b", "10.2.0.0/24", "fd00:2::/64"))
	p4, p6 := netip.MustParsePrefix("10.2.0.0/24"), netip.MustParsePrefix("fd00:2::/64")
	d.apply(datapath.AddRoutes{Routes: []datapath.Route{{Prefix: p4}, {Prefix: p6}}})
	if got := d.read().Routes; len(got) != 2 {
		t.Fatalf("routes are %v", got)
	}
	d.apply(datapath.RemoveRoutes{Prefixes: set("10.2.0.0/24", "10.77.0.0/16")})
	if _, ok := d.read().Routes[p4]; ok {
		t.Error("the removed route is still there")
	}
	h.need(t, Sources)
	for _, src := range []string{"10.1.0.1", "10.1.0.2"} {
		d.apply(datapath.AddRoutes{Routes: []datapath.Route{{Prefix: p4, Source: netip.MustParseAddr(src)}}})
		if got := d.read().Routes[p4]; got != netip.MustParseAddr(src) {
			t.Errorf("source address is %v, want %v", got, src)
		}
	}
}

func testLocal(t *testing.T, h Harness) {
	h.need(t, LocalGuard)
	d := h.open(t)
	d.apply(create("me"), datapath.AddLocal{Prefixes: set("10.1.0.0/24", "fd00:1::/64")}, datapath.AddLocal{Prefixes: set("10.1.0.0/16")})
	d.apply(datapath.RemoveLocal{Prefixes: set("10.1.0.0/24", "10.4.0.0/24")})
	if got := d.read().Local; got != set("10.1.0.0/16", "fd00:1::/64") {
		t.Errorf("local is %v", got)
	}
}

// Rule 4: an op that fails blocks no other.
func testBadOpAlone(t *testing.T, h Harness) {
	d := h.open(t)
	bad := put("bad", "10.4.0.0/24")
	bad.Peer.Keepalive = time.Millisecond
	p4 := netip.MustParsePrefix("10.2.0.0/24")
	err := d.Apply(d.ctx, create("me"), bad, put("b", "10.2.0.0/24"),
		datapath.AddRoutes{Routes: []datapath.Route{{Prefix: p4}, {Prefix: netip.MustParsePrefix("10.4.0.0/24")}}})
	fails := slices.Collect(datapath.Failures(err))
	if len(fails) != 2 || !errors.Is(fails[1], datapath.ErrSkipped) {
		t.Fatalf("failures: %v, want the bad peer's and its route's, which is skipped", err)
	}
	if r, ok := fails[1].Op.(datapath.AddRoutes); !ok || len(r.Routes) != 1 {
		t.Errorf("skipped %v, want the one route", fails[1].Op)
	}
	s := d.read()
	if _, ok := s.Routes[p4]; !ok || len(s.Routes) != 1 || len(s.Peers) != 1 {
		t.Errorf("device has peers %v and routes %v", s.Peers, s.Routes)
	}
}

// Many peers do not fit one message of any interface.
func testManyPeers(t *testing.T, h Harness) {
	d := h.open(t)
	want := datapath.State{Device: datapath.Device{Key: Key("me")}, Peers: map[key.Public]datapath.Peer{}, Routes: map[netip.Prefix]netip.Addr{}}
	const n = 1000
	keys := make([]key.Public, n)
	for i := range n {
		keys[i] = pub(fmt.Sprint("peer ", i))
		var p datapath.Peer
		for j := range 4 {
			p.Prefixes = p.Prefixes.With(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(j * 64)}), 26))
		}
		want.Peers[keys[i]] = p
	}
	d.become(want)
	want.Peers = maps.Clone(want.Peers)
	for i := 0; i < n; i += 2 {
		p := want.Peers[keys[i]]
		p.Keepalive = 25 * time.Second
		want.Peers[keys[i]] = p
	}
	d.become(want)
	for i := 0; i < n; i += 4 {
		delete(want.Peers, keys[i])
	}
	d.become(want)
}

func testManyPrefixes(t *testing.T, h Harness) {
	d := h.open(t)
	var ps []netip.Prefix
	for i := range 5000 {
		ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	want := datapath.State{Device: datapath.Device{Key: Key("me")}, Peers: map[key.Public]datapath.Peer{pub("b"): {Prefixes: prefixes.Must(ps...)}}}
	d.become(want)
	want.Peers = map[key.Public]datapath.Peer{pub("b"): {Prefixes: prefixes.Must(ps[:2500]...)}, pub("c"): {Prefixes: prefixes.Must(ps[4000:]...)}}
	d.become(want)
}

func testRemoveAndCreate(t *testing.T, h Harness) {
	d := h.open(t)
	for range 3 {
		d.apply(create("me"), datapath.AddAddrs{Addrs: set("10.1.0.1")}, put("b", "10.2.0.0/24"),
			datapath.AddRoutes{Routes: []datapath.Route{{Prefix: netip.MustParsePrefix("10.2.0.0/24")}}})
		d.apply(datapath.RemoveDevice{})
		if s := d.read(); !s.Equal(datapath.State{}) {
			t.Fatalf("after RemoveDevice there is %+v", s)
		}
	}
}

func testOutsider(t *testing.T, h Harness) {
	h.need(t, Outsider)
	d := h.open(t)
	d.apply(create("me"), put("b", "10.2.0.0/24"))
	n, notifies := d.Datapath.(datapath.Notifier)
	if notifies {
		select { // what Apply itself may have caused is no news
		case <-n.Changed():
		case <-time.After(100 * time.Millisecond):
		}
	}
	h.Outside(t, d.Datapath, datapath.RemovePeer{Key: pub("b")})
	if notifies {
		select {
		case <-n.Changed():
		case <-time.After(10 * time.Second):
			t.Error("a change from outside was not noticed within 10 s")
		}
	}
	if s := d.read(); len(s.Peers) != 0 {
		t.Errorf("Read still has the peer that was removed from outside")
	}
}

func testContext(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"))
	ctx, cancel := context.WithCancel(d.ctx)
	cancel()
	err := d.Apply(ctx, put("b", "10.2.0.0/24"), put("c", "10.3.0.0/24"))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Apply with an ended context: %v", err)
	}
	if n := len(slices.Collect(datapath.Failures(err))); n != 2 {
		t.Errorf("%d failures, want one for each op", n)
	}
	if s := d.read(); len(s.Peers) != 0 {
		t.Errorf("it was carried out all the same: %d peers", len(s.Peers))
	}
	if _, err := d.Read(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Read with an ended context: %v", err)
	}
}

func testConcurrent(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"), put("b", "10.2.0.0/24"))
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			s, err := d.Read(d.ctx)
			if err != nil {
				t.Errorf("Read: %v", err)
				return
			}
			if !s.Peers[pub("b")].Prefixes.Has(netip.MustParsePrefix("10.2.0.0/24")) {
				t.Error("a prefix that stays was away")
				return
			}
		}
	})
	for range 200 {
		d.apply(put("b", "10.3.0.0/24"), put("c", "10.3.0.0/24"), datapath.RemovePeer{Key: pub("c")})
	}
	close(stop)
	wg.Wait()
}

// Rule 21.
func testClose(t *testing.T, h Harness) {
	d := h.open(t)
	d.apply(create("me"))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 20 {
				_ = d.Apply(d.ctx, put("b", "10.2.0.0/24"), datapath.RemovePeer{Key: pub("b")})
			}
		})
	}
	d.apply(datapath.RemoveDevice{})
	for range 2 {
		if err := d.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	wg.Wait()
	if err := d.Apply(d.ctx, create("me")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Apply after Close: %v, want net.ErrClosed", err)
	}
	if _, err := d.Read(d.ctx); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Read after Close: %v, want net.ErrClosed", err)
	}
}
