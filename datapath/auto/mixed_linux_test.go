package auto

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/prefixes"
)

// foreign is a WireGuard that knows nothing of a mesh: Debian's wireguard-go, told by wg.
const foreign = "wireguard-go"

// kinds returns what a mesh can be mixed of here.
func kinds(t testing.TB) (all []string) {
	t.Helper()
	need(t, TUN)
	if works(t, Kernel) {
		all = append(all, Kernel)
	}
	all = append(all, TUN, Netstack)
	for _, program := range []string{"wireguard-go", "wg", "ip"} {
		nettest.NeedProgram(t, program)
	}
	return append(all, foreign)
}

// underlay is a router with a host on each of its networks:
//
//	          router
//	   .1 /     | .1    \ .1
//	198.18.1.0  2.0     3.0  /24, and 2001:db8:<n>::/64
//	   .2 |     | .2    | .2
//	     host  host    host
type underlay struct {
	t      testing.TB
	router *nettest.Space
	v4, v6 bool // what hosts have
	hosts  int
}

func newUnderlay(t testing.TB, v4, v6 bool) *underlay {
	t.Helper()
	u := &underlay{t: t, router: nettest.NewSpace(t), v4: v4, v6: v6}
	u.router.Sysctl("net/ipv4/ip_forward", "1")
	u.router.Sysctl("net/ipv6/conf/all/forwarding", "1")
	return u
}

// broken has the router drop all packets of a family, without a word.
func (u *underlay) broken(v6 bool) {
	u.t.Helper()
	if v6 {
		u.router.Sysctl("net/ipv6/conf/all/forwarding", "0")
	} else {
		u.router.Sysctl("net/ipv4/ip_forward", "0")
	}
}

// member is a node of a mesh, on a host of its own.
type member struct {
	t        testing.TB
	name     string
	kind     string
	n        int
	space    *nettest.Space
	v4, v6   bool            // what its host has on the underlay
	disabled bool            // its host has IPv6 disabled
	sockets  nettest.Sockets // of programs that use the mesh
	auto     *Auto           // nil: foreign
	mesh     mesh.Mesh
	foreign  *nettest.Foreign
	key      key.Private
}

func (m *member) at(v6 bool, host int) netip.Addr {
	if v6 {
		return netip.MustParseAddr(fmt.Sprintf("2001:db8:%d::%d", m.n, host))
	}
	return netip.AddrFrom4([4]byte{198, 18, byte(m.n), byte(host)})
}

// inner are its addresses in the mesh.
func (m *member) inner(v6 bool) netip.Addr {
	if v6 {
		return netip.MustParseAddr(fmt.Sprintf("fd01::%d", m.n))
	}
	return netip.AddrFrom4([4]byte{10, 1, 0, byte(m.n)})
}

func (m *member) addrs() prefixes.Set {
	return prefixes.Must(prefixes.Host(m.inner(false)), prefixes.Host(m.inner(true)))
}

// join puts a host with a device of some kind on the underlay. Without IPv6 its host has it disabled.
func (u *underlay) join(kind string, disableIPv6 bool) *member {
	u.t.Helper()
	u.hosts++
	m := &member{
		t: u.t, name: fmt.Sprintf("%s-%d", kind, u.hosts), kind: kind, n: u.hosts, space: nettest.NewSpace(u.t),
		v4: u.v4, v6: u.v6 && !disableIPv6, disabled: disableIPv6, key: nettest.NewKey(u.t),
	}
	if disableIPv6 {
		m.space.Sysctl("net/ipv6/conf/all/disable_ipv6", "1")
		m.space.Sysctl("net/ipv6/conf/default/disable_ipv6", "1")
	}
	m.space.Sysctl("net/ipv4/conf/default/promote_secondaries", "1")
	near := nettest.End{Space: m.space, Name: "eth0"}
	far := nettest.End{Space: u.router, Name: fmt.Sprintf("port%d", m.n)}
	var via []netip.Addr
	for _, v6 := range []bool{false, true} {
		if v6 && m.v6 || !v6 && m.v4 {
			bits := map[bool]int{false: 24, true: 64}[v6]
			near.Addrs = append(near.Addrs, fmt.Sprintf("%v/%d", m.at(v6, 2), bits))
			far.Addrs = append(far.Addrs, fmt.Sprintf("%v/%d", m.at(v6, 1), bits))
			via = append(via, m.at(v6, 1))
		}
	}
	nettest.Join(far, near)
	m.space.Gateway("eth0", via...)
	for _, a := range via {
		for host := 2; host < 5; host++ {
			nettest.Neighbour(far, near, m.at(a.Is6(), host))
		}
		nettest.Neighbour(near, far, a)
		nettest.Reach(m.space, u.router, a.String())
	}
	m.sockets = m.space
	if kind == foreign {
		m.foreign = nettest.NewForeign(u.t, m.space, "wireguard-go", m.addrs())
		m.key = m.foreign.Key
		return m
	}
	m.auto = open(u.t, m.space, kind)
	if n := m.auto.Netstack(); n != nil {
		m.sockets = n
		// Its sockets are in the namespace that they are opened in, and the mesh takes over the device.
		m.space.Must(func() error {
			return m.auto.Apply(u.t.Context(), datapath.SetDevice{Device: datapath.Device{Key: m.key}})
		})
	}
	return m
}

// endpoints are where a member says it is reached.
func (m *member) endpoints(port uint16, host int, v6First bool) (es []mesh.Endpoint) {
	for _, v6 := range []bool{v6First, !v6First} {
		if v6 && m.v6 || !v6 && m.v4 {
			es = append(es, record.EndpointFrom(netip.AddrPortFrom(m.at(v6, host), port)))
		}
	}
	return es
}

func (m *member) have() datapath.State {
	m.t.Helper()
	s, err := m.auto.Read(m.t.Context())
	if err != nil {
		m.t.Fatalf("%s: %v", m.name, err)
	}
	return s
}

// meet has members make a mesh, and waits until all have shaken hands with all. Endpoints of one family come first.
func meet(t testing.TB, v6First bool, all ...*member) {
	t.Helper()
	reg := memory.New()
	for _, m := range all {
		if m.foreign != nil { // somebody else says for it what nodes say of themselves
			data, err := identity.Plain().Seal(record.Record{
				Version: record.Version, ID: m.name, Key: m.key.Public(), Endpoints: m.endpoints(m.foreign.Port, 2, v6First), Addresses: m.addrs(),
			})
			if err == nil {
				err = reg.Put(t.Context(), registry.Entry{ID: registry.NodeID(m.name), Data: data})
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range all {
				if o != m {
					m.foreign.Peer(o.key.Public(), datapath.Peer{Prefixes: o.addrs()})
				}
			}
		}
	}
	for _, m := range all {
		if m.foreign != nil {
			continue
		}
		var err error
		m.mesh, err = mesh.New(mesh.Config{
			Node: m.name, Registry: reg.Handle(), Datapath: m.auto, Key: m.key,
			Addresses: []netip.Addr{m.inner(false), m.inner(true)}, Endpoints: m.endpoints(0, 2, v6First), Logger: nettest.Logger(),
		})
		if err != nil {
			t.Fatal(err)
		}
		nettest.Go(t, m.name, m.mesh.Run)
	}
	begun := time.Now()
	waiting := func() (who []string) {
		for _, m := range all {
			if m.foreign != nil {
				continue
			}
			s := m.have()
			for _, o := range all {
				if o != m && s.Stats[o.key.Public()].LastHandshake.IsZero() {
					who = append(who, m.name+" for "+o.name)
				}
			}
		}
		return who
	}
	for len(waiting()) > 0 {
		if time.Since(begun) > time.Minute {
			for _, m := range all {
				if m.mesh != nil {
					v, _ := m.mesh.Current()
					t.Logf("%s: %v", m.name, v.Conditions)
				}
			}
			t.Fatalf("no handshake within %v: %v", time.Since(begun), waiting())
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Logf("all %d have shaken hands with all after %v", len(all), time.Since(begun).Round(time.Millisecond))
}

// exchange has every pair exchange bytes over TCP, and large datagrams, over both families that both have.
func exchange(t testing.TB, size int, all ...*member) {
	t.Helper()
	for i, a := range all {
		for _, b := range all[i+1:] {
			for _, v6 := range []bool{false, true} {
				if v6 && (a.lacksIPv6() || b.lacksIPv6()) {
					continue
				}
				client, server := a, b
				if v6 {
					client, server = b, a
				}
				what := fmt.Sprintf("%s to %s", client.name, server.name)
				addr := server.inner(v6).String()
				nettest.Exchange(t, what, size, server.sockets, client.sockets, addr)
				nettest.Echo(t, what, server.sockets, client.sockets, addr, 1400, 9000, 60000)
			}
		}
	}
}

// lacksIPv6: an interface of a host that has IPv6 disabled has none of its addresses.
func (m *member) lacksIPv6() bool { return m.disabled && m.kind != Netstack }

// over checks that every node of some has every other of all at an address of one family.
func over(t testing.TB, v6 bool, some, all []*member) {
	t.Helper()
	for _, m := range some {
		if m.foreign != nil {
			continue
		}
		s := m.have()
		for _, o := range all {
			if at := s.Peers[o.key.Public()].Endpoint.Addr(); o != m && at != o.at(v6, 2) {
				t.Errorf("%s has %s at %v, want %v", m.name, o.name, at, o.at(v6, 2))
			}
		}
	}
}

// size is how many bytes go each way. A guest of vmrun is an emulated machine, and the race detector makes
// cryptography some thirty times slower.
func size() int {
	switch {
	case nettest.InVM():
		return 512 << 10
	case raceEnabled:
		return 1 << 20
	}
	return 4 << 20
}

// Whole meshes of all kinds there are, each a node of a mesh but for the foreign one, which is in the registry.
func TestMixed(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		v4, v6  bool
		v6First bool
		break4  bool // on the way
		break6  bool
		refuse6 bool // by each host's own routes
		wantV6  bool // what is used
	}{
		{name: "IPv4", v4: true},
		{name: "IPv6", v6: true, wantV6: true},
		{name: "IPv6Broken", v4: true, v6: true, v6First: true, break6: true},
		{name: "IPv4Broken", v4: true, v6: true, break4: true, wantV6: true},
		{name: "IPv6Unreachable", v4: true, v6: true, v6First: true, refuse6: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			u := newUnderlay(t, test.v4, test.v6)
			var all []*member
			kinds := kinds(t)
			if test.refuse6 && nettest.InVM() {
				kinds = append(kinds, Kernel) // two, of which neither learns the way from another one's search
			}
			for _, kind := range kinds {
				m := u.join(kind, false)
				if test.refuse6 {
					m.space.IP("route add unreachable 2001:db8::/32")
				}
				all = append(all, m)
			}
			if test.break4 {
				u.broken(false)
			}
			if test.break6 {
				u.broken(true)
			}
			meet(t, test.v6First, all...)
			exchange(t, size(), all...)
			over(t, test.wantV6, all, all)
		})
	}
}

// Hosts with IPv6 disabled among others, whose first endpoint is IPv6.
func TestMixedWithoutIPv6(t *testing.T) {
	t.Parallel()
	u := newUnderlay(t, true, true)
	var with, without []*member
	for _, kind := range kinds(t) {
		with = append(with, u.join(kind, false))
		if kind != foreign {
			without = append(without, u.join(kind, true))
		}
	}
	meet(t, true, slices.Concat(with, without)...)
	over(t, false, without, slices.Concat(with, without))
	over(t, false, with, without)
	for _, m := range without {
		if h := m.have().Host; h.IPv6 && m.kind != Netstack || !h.IPv4 {
			t.Errorf("%s: host is %+v", m.name, h)
		}
		for _, o := range with {
			exchange(t, size()/4, m, o)
		}
	}
}

// With a preshared key for each pair, told to the devices by hand, over IPv4 and IPv6 in turn.
func TestMixedPreshared(t *testing.T) {
	t.Parallel()
	u := newUnderlay(t, true, true)
	var all []*member
	nodes := make(map[*member]*nettest.Node)
	for _, kind := range kinds(t) {
		m := u.join(kind, false)
		if all = append(all, m); kind != foreign {
			n := nettest.NewNode(t, m.name, m.auto, m.addrs())
			nodes[m], m.key = n, n.Want.Device.Key
		}
	}
	peer := func(m, o *member, psk key.Preshared, v6 bool) {
		p := datapath.Peer{Preshared: psk, Prefixes: o.addrs()}
		if n := nodes[o]; n != nil {
			p.Endpoint = n.At(o.at(v6, 2).String())
		} else {
			p.Endpoint = netip.AddrPortFrom(o.at(v6, 2), o.foreign.Port)
		}
		if n := nodes[m]; n != nil {
			n.Peer(o.key.Public(), p)
		} else {
			m.foreign.Peer(o.key.Public(), p)
		}
	}
	for i, a := range all {
		for j, b := range all[i+1:] {
			psk := nettest.NewPreshared(t)
			peer(a, b, psk, j%2 == 0)
			peer(b, a, psk, j%2 == 0)
		}
	}
	for _, m := range all {
		if m.auto != nil {
			m.auto.Settle()
		}
	}
	exchange(t, size()/2, all...)
}

// The address of a host changes twice while it carries TCP connections and streams of datagrams, both ways, with a
// node of each other kind. The connections go on, and what they carry is whole.
func TestMixedRoaming(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, roamer := range kinds(t) {
			// An emulated machine carries one load at a time, and has the kernel to tell of.
			if roamer == foreign || nettest.InVM() && roamer != Kernel {
				continue
			}
			t.Run(fmt.Sprintf("%s/IPv%d", roamer, map[bool]int{false: 4, true: 6}[v6]), func(t *testing.T) {
				if !nettest.InVM() {
					t.Parallel()
				}
				testRoaming(t, roamer, v6)
			})
		}
	}
}

func testRoaming(t *testing.T, roamer string, v6 bool) {
	u := newUnderlay(t, !v6, v6)
	r := u.join(roamer, false)
	all := []*member{r}
	for _, kind := range kinds(t) {
		all = append(all, u.join(kind, false))
	}
	meet(t, v6, all...)
	type stream struct {
		*nettest.Stream
		what string
		from uint64
	}
	flowEvery, streamEvery := 5*time.Millisecond, 2*time.Millisecond
	if nettest.InVM() {
		flowEvery, streamEvery = 100*time.Millisecond, 20*time.Millisecond
	}
	flows := make(map[string]*nettest.Flow)
	var streams []*stream
	for _, o := range all[1:] {
		flows[r.name+" and "+o.name] = nettest.NewFlow(t, o.sockets, r.sockets, o.inner(false).String(), flowEvery)
		streams = append(streams,
			&stream{nettest.NewStreamEvery(t, r.sockets, o.sockets, o.inner(true).String(), streamEvery), r.name + " to " + o.name, 0},
			&stream{nettest.NewStreamEvery(t, o.sockets, r.sockets, r.inner(false).String(), streamEvery), o.name + " to " + r.name, 0})
	}
	count := func(what string, most int) {
		t.Helper()
		upto := make([]uint64, len(streams))
		for i, s := range streams {
			upto[i] = s.Sent()
		}
		time.Sleep(nettest.Late)
		for i, s := range streams {
			lost, sent := s.Lost(s.from, upto[i]), upto[i]-s.from
			t.Logf("%s: %s: of %d datagrams %d were lost", what, s.what, sent, lost)
			if lost > sent*uint64(most)/100 {
				t.Errorf("%s: %s: of %d datagrams %d were lost", what, s.what, sent, lost)
			}
			s.from = upto[i]
		}
	}
	for _, s := range streams {
		s.from = s.Sent()
	}
	begun := time.Now()
	for _, host := range []int{3, 4} {
		r.move(v6, host)
		for _, o := range all[1:] {
			if o.auto != nil {
				nettest.Within(t, 30*time.Second, fmt.Sprintf("%s has %s at its new address", o.name, r.name), func() bool {
					return o.have().Peers[r.key.Public()].Endpoint.Addr() == r.at(v6, host)
				})
			}
		}
	}
	took := time.Since(begun)
	time.Sleep(nettest.Late)
	count(fmt.Sprintf("moved twice in %v", took.Round(time.Millisecond)), 100)
	count("afterwards", 50) // an emulated machine may be busy
	for what, f := range flows {
		said, err := f.End()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		t.Logf("%s: %s", what, said)
	}
}

// move has the host be at another address of its network, and the node say so as soon as it is.
func (m *member) move(v6 bool, host int) {
	m.t.Helper()
	bits := map[bool]int{false: 24, true: 64}[v6]
	m.space.IP(fmt.Sprintf("addr add %v/%d dev eth0%s", m.at(v6, host), bits, map[bool]string{true: " nodad"}[v6]))
	m.space.IP(fmt.Sprintf("addr del %v/%d dev eth0", m.at(v6, host-1), bits))
	if err := m.mesh.SetEndpoints(m.endpoints(0, host, v6)...); err != nil {
		m.t.Fatal(err)
	}
}
