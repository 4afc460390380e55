package core_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// What random meshes are made of: few values, so that they collide.
var (
	someNodes    = []string{"a", "b", "c", "x", "z"} // this node is m
	someKeys     = []string{"a", "b", "c", "x", "z", "m"}
	somePrefixes = []string{
		"10.0.0.0/8", "10.0.0.0/9", "10.128.0.0/9", "10.1.0.0/16", "10.1.1.0/24", "10.1.1.1/32", "10.1.2.0/24", "10.200.0.0/16",
		"192.168.0.0/16", "192.168.1.0/24", "0.0.0.0/0", "64.0.0.0/2", "127.1.0.0/16", "2001:db8::/32", "2001:db8:1::/48", "2000::/3", "fe80::/64", "::/16",
	}
	someAddresses = []string{"10.9.0.1/32", "10.1.1.1/32", "2001:db8:1::1/128"}
	someEndpoints = []string{"203.0.113.1:51820", "203.0.113.2:51820", "10.1.1.9:51820", "192.168.1.9:1", "[2001:db8:1::9]:51820", "[fe80::1%eth0]:1", "example.net:51820", "example.org:1", "127.0.0.1:1", "169.254.0.1:1"}
	someHosts     = []datapath.Host{
		{IPv4: true, IPv6: true, Underlay: datapath.UnderlaySeparate, Driver: "netstack", Instead: "the kernel has no WireGuard"},
		{IPv4: true, IPv6: true, Underlay: datapath.UnderlayShared, Driver: "kernel"},
		{IPv4: true, IPv6: true, Underlay: datapath.UnderlayShared, Driver: "tun", Instead: "the kernel has no WireGuard"},
		{IPv4: true, Underlay: datapath.UnderlayShared, Connected: prefixes.MustParse("10.0.0.0/9")},
		{IPv6: true, Underlay: datapath.UnderlaySeparate, Connected: prefixes.MustParse("10.1.1.0/24", "2001:db8::/32")},
		{IPv4: true, IPv6: true, Connected: prefixes.MustParse("10.0.0.0/9", "10.128.0.0/9")},
	}
	someAddrs    = []string{"203.0.113.1", "203.0.113.9", "10.1.1.9", "2001:db8:1::9", "127.0.0.1"} // of names
	someFailures = []string{"put peer", "drop prefixes", "remove peer", "add routes", "remove routes", "add local", "remove local", "add addresses", "set device"}
)

// someProblems draws problems of a host, in any order.
func someProblems(t *rapid.T) []datapath.Problem {
	most := rapid.SampledFrom([]int{0, 1, 3, 20}).Draw(t, "problems at most")
	subjects := make([]string, 20)
	for i := range subjects {
		subjects[i] = fmt.Sprintf("thing %d", i)
	}
	subjects = rapid.Permutation(subjects).Draw(t, "subjects")[:rapid.IntRange(0, most).Draw(t, "problems")]
	ps := make([]datapath.Problem, len(subjects))
	for i, s := range subjects {
		ps[i] = datapath.Problem{Subject: s, Message: rapid.SampledFrom([]string{"is wrong", "is very wrong"}).Draw(t, "message"), Remedy: rapid.SampledFrom([]string{"", "mend it"}).Draw(t, "remedy")}
	}
	return ps
}

func someOf[T any](t *rapid.T, from []T, atMost int, what string) []T {
	n := rapid.IntRange(0, atMost).Draw(t, "number of "+what)
	var all []T
	for range n {
		all = append(all, rapid.SampledFrom(from).Draw(t, what))
	}
	return all
}

// trouble is a mesh as one node lives through it: whatever can go wrong does, then all is well again.
type trouble struct {
	*sim
	t     *rapid.T
	w     world
	store map[string]core.Opened // the registry; an entry is as the node's trust opens it
	late  []string               // nodes that have changed since the machine was last told
	known bool                   // the machine has had a Reset and its watch goes on
	fails map[string]bool        // kinds of ops, with or without a name, that fail
	drift int                    // how often the device had been read when someone else changed it
}

func newTrouble(t *rapid.T) *trouble {
	dev := newDevice()
	dev.host = rapid.SampledFrom(someHosts).Draw(t, "host")
	if rapid.Bool().Draw(t, "found a device") {
		dev.model = *datapath.NewModel(foundDevice(t))
	}
	tr := &trouble{t: t, store: map[string]core.Opened{}, fails: map[string]bool{}, drift: -1}
	tr.sim = simOn(t, dev, func(c *core.Config) {
		c.Addresses = prefixes.MustParse(someOf(t, []string{"10.9.0.9/32", "2001:db8:9::9/128"}, 2, "own address")...)
		if rapid.Bool().Draw(t, "behind a NAT") {
			c.Endpoints = nil
		}
		if rapid.IntRange(0, 3).Draw(t, "policy") == 0 {
			c.Accept = func(node string, p netip.Prefix) bool { return node != "x" && p.Bits() != 16 }
		}
		c.Window = rapid.SampledFrom([]time.Duration{0, 10 * time.Millisecond, time.Second}).Draw(t, "window")
		c.Linger = rapid.SampledFrom([]time.Duration{-1, 3 * time.Second}).Draw(t, "linger")
	})
	tr.w = world{
		node: "m", key: publicKey("m"), accept: tr.cfg.Accept, nodes: map[string]*entry{}, host: dev.host,
		addresses: slices.Collect(tr.cfg.Addresses.All()),
	}
	tr.moved()
	dev.fail = tr.opFails
	tr.sim.planned = tr.watchOps
	return tr
}

// moved has the oracle know where this node is reached.
func (tr *trouble) moved() {
	tr.w.nat, tr.w.keepalive = false, 0
	switch es := tr.cfg.Endpoints; {
	case len(es) == 0:
		tr.w.nat, tr.w.keepalive = true, 25*time.Second
	case es[0].Addr.IsLoopback():
		tr.w.nat = true
	}
}

// tellNames has the machine know what is known of all names.
func (tr *trouble) tellNames(s *sim) {
	names := make(map[string]core.Name)
	for host, addrs := range tr.w.names {
		names[host] = core.Name{Addrs: addrs}
	}
	s.step(core.Named{Names: names})
}

// foundDevice is what an earlier process, or another program, left.
func foundDevice(t *rapid.T) datapath.State {
	s := datapath.State{
		Device: datapath.Device{Key: privateKey(rapid.SampledFrom([]string{"m", "m", "stranger"}).Draw(t, "found key")), ListenPort: 40000, MTU: 1420},
		Routes: map[netip.Prefix]netip.Addr{}, Peers: map[key.Public]datapath.Peer{},
		Local: prefixes.MustParse(someOf(t, somePrefixes, 2, "found local")...),
		Addrs: prefixes.MustParse(someOf(t, someAddresses, 1, "found address")...),
	}
	taken := prefixes.Set{}
	for _, name := range []string{"a", "b", "z", "stray"} {
		if !rapid.Bool().Draw(t, "found "+name) {
			continue
		}
		has := prefixes.MustParse(someOf(t, somePrefixes, 3, "found prefix")...).Minus(taken)
		taken = taken.Union(has)
		s.Peers[publicKey(name)] = datapath.Peer{Prefixes: has}
		for p := range has.All() {
			s.Routes[p] = netip.Addr{}
		}
	}
	return s
}

func (tr *trouble) opFails(op datapath.Op) error {
	text := tr.named(op.String())
	for what := range tr.fails {
		if len(text) >= len(what) && text[:len(what)] == what {
			return errTest
		}
	}
	return nil
}

// watchOps checks that the ops about to be applied take nothing from traffic that has a way before and
// is to have one afterwards.
func (tr *trouble) watchOps(ops []datapath.Op) {
	// When the ops are applied the world may be another; what counts is what it was when they were planned.
	w := tr.w
	w.host = tr.dev.seen
	want := w.expect(tr.now)
	before := tr.dev.state()
	if !tr.sim.reset {
		for _, op := range ops {
			switch op.(type) {
			case datapath.RemovePeer, datapath.DropPrefixes, datapath.RemoveRoutes, datapath.RemoveAddrs, datapath.RemoveLocal, datapath.RemoveDevice:
				tr.Fatalf("before the first Reset: %v", op)
			}
		}
	}
	tr.dev.after = nil
	if tr.drift == tr.dev.reads {
		return // it is not yet known that the device is another
	}
	owned := func(st datapath.State, p netip.Prefix) bool {
		for _, peer := range st.Peers {
			if peer.Prefixes.Has(p) {
				return true
			}
		}
		return false
	}
	// taken: some peer takes traffic to a.
	taken := func(st datapath.State, a netip.Addr) bool {
		for _, peer := range st.Peers {
			if peer.Prefixes.HasAddr(a) {
				return true
			}
		}
		return false
	}
	wantTaken := func(a netip.Addr) bool {
		return slices.ContainsFunc(want.routes, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	wanted := func(p netip.Prefix) bool { return slices.Contains(want.routes, p) }
	tr.dev.after = func(op datapath.Op) {
		now := tr.dev.model.State()
		if now.Device.Key != before.Device.Key {
			return
		}
		for r := range now.Routes {
			if _, there := before.Routes[r]; !owned(now, r) && (!there || owned(before, r)) {
				tr.Fatalf("after %v of %v: route %v leads to no peer", op, ops, r)
			}
		}
		for _, s := range somePrefixes {
			p := netip.MustParsePrefix(s)
			if owned(before, p) && wanted(p) && !owned(now, p) {
				tr.Fatalf("after %v of %v: nobody has %v", op, ops, p)
			}
			a := p.Addr()
			if taken(before, a) && wantTaken(a) && !taken(now, a) {
				tr.Fatalf("after %v of %v: nobody takes %v", op, ops, a)
			}
			_, routed := before.Routes[p]
			if _, is := now.Routes[p]; routed && wanted(p) && !is {
				tr.Fatalf("after %v of %v: route %v is gone", op, ops, p)
			}
		}
	}
}

func (tr *trouble) Fatalf(format string, a ...any) {
	tr.t.Fatalf("%s", tr.named(fmt.Sprintf(format, a...)))
}

// write changes an entry of the registry. The machine is told at the next deliver or rewatch.
func (tr *trouble) write(id string, o *core.Opened) {
	if o == nil {
		delete(tr.store, id)
	} else {
		tr.store[id] = *o
	}
	if !slices.Contains(tr.late, id) {
		tr.late = append(tr.late, id)
	}
}

// learn has the oracle take in what the machine is about to be told of one node.
func (tr *trouble) learn(id string) {
	if id == "m" {
		return
	}
	o, there := tr.store[id]
	if !there {
		delete(tr.w.nodes, id)
		return
	}
	old := tr.w.nodes[id]
	switch {
	case o.Err != nil && o.Err != errTest: // revoked
		tr.w.nodes[id] = &entry{refused: true}
	case o.Err != nil:
		if old == nil {
			old = &entry{}
			tr.w.nodes[id] = old
		}
		old.refused = true
	default:
		r := o.Record
		e := &entry{good: &r, notBefore: o.NotBefore, notAfter: o.NotAfter}
		if old.inForce(tr.now) != nil {
			e.before = old
			if tr.now.Before(old.notBefore) {
				e.before = old.before
			}
			e.before.refused = false
		}
		tr.w.nodes[id] = e
	}
}

// deliver tells the machine of some of what changed, in any order.
func (tr *trouble) deliver() {
	if !tr.known {
		return
	}
	n := rapid.IntRange(0, len(tr.late)).Draw(tr.t, "delivered")
	some := rapid.Permutation(tr.late).Draw(tr.t, "order")[:n]
	tr.late = slices.DeleteFunc(tr.late, func(id string) bool { return slices.Contains(some, id) })
	var in core.Records
	for _, id := range some {
		tr.learn(id)
		if o, there := tr.store[id]; there {
			in.Put = append(in.Put, o)
		} else {
			in.Deleted = append(in.Deleted, id)
		}
	}
	tr.step(in)
}

// rewatch begins the watch anew: everything is told. Now and then the store has lost this node's record.
func (tr *trouble) rewatch() {
	tr.bare = rapid.IntRange(0, 3).Draw(tr.t, "own record lost") == 0
	tr.reread(false)
	tr.bare = false
}

func (tr *trouble) reread(second bool) {
	in := core.Records{Reset: true, Second: second}
	for _, id := range rapid.Permutation(slices.Sorted(maps.Keys(tr.store))).Draw(tr.t, "order") {
		in.Put = append(in.Put, tr.store[id])
	}
	for _, id := range someNodes {
		tr.learn(id)
	}
	tr.late, tr.known = nil, true
	tr.step(in)
}

// newRecord draws a record.
func (tr *trouble) newRecord(id string) core.Opened {
	t := tr.t
	r := record.Record{
		Version: record.Version, ID: id, Key: publicKey(rapid.SampledFrom(append([]string{id, id, id}, someKeys...)).Draw(t, "key")),
		Prefixes:  prefixes.MustParse(someOf(t, somePrefixes, 4, "prefix")...),
		Addresses: prefixes.MustParse(someOf(t, someAddresses, 1, "address")...),
		Instance:  "0a", Generation: rapid.Uint64Range(1, 2).Draw(t, "generation"), Sequence: rapid.Uint64Range(1, 3).Draw(t, "sequence"),
	}
	for _, e := range someOf(t, someEndpoints, 3, "endpoint") {
		r.Endpoints = append(r.Endpoints, endpoint(e))
	}
	o := core.Opened{Node: id, Opened: identity.Opened{Record: r}}
	if rapid.IntRange(0, 4).Draw(t, "bounded") == 0 {
		o.NotBefore = tr.now.Add(time.Duration(rapid.IntRange(-20, 10).Draw(t, "begins")) * time.Second)
		o.NotAfter = o.NotBefore.Add(time.Duration(rapid.IntRange(0, 30).Draw(t, "lasts")) * time.Second)
	}
	return o
}

func (tr *trouble) actions() map[string]func(*rapid.T) {
	node := func() string { return rapid.SampledFrom(someNodes).Draw(tr.t, "node") }
	peer := func() (key.Public, bool) {
		keys := slices.SortedFunc(maps.Keys(tr.dev.model.State().Peers), key.Public.Compare)
		if len(keys) == 0 {
			return key.Public{}, false
		}
		return rapid.SampledFrom(keys).Draw(tr.t, "peer"), true
	}
	return map[string]func(*rapid.T){
		"put": func(*rapid.T) {
			id := node()
			o := tr.newRecord(id)
			tr.write(id, &o)
		},
		"put2": func(*rapid.T) { // twice as often
			id := node()
			o := tr.newRecord(id)
			tr.write(id, &o)
		},
		"bad": func(*rapid.T) {
			id := node()
			o := bad(id, errTest)
			tr.write(id, &o)
		},
		"revoke": func(*rapid.T) {
			id := node()
			o := bad(id, identity.ErrRevoked)
			tr.write(id, &o)
		},
		"delete":   func(*rapid.T) { tr.write(node(), nil) },
		"deliver":  func(*rapid.T) { tr.deliver() },
		"deliver2": func(*rapid.T) { tr.deliver() },
		"rewatch":  func(*rapid.T) { tr.rewatch() },
		"watch fails": func(*rapid.T) {
			tr.known = false
			tr.step(core.RegistryFailed{Err: errTest})
		},
		"announce": func(*rapid.T) { tr.announces(someOf(tr.t, somePrefixes, 3, "announced")...) },
		"wait": func(*rapid.T) {
			tr.run(rapid.SampledFrom([]time.Duration{time.Millisecond, 10 * time.Millisecond, time.Second, 7 * time.Second, 30 * time.Second, 2 * time.Minute}).Draw(tr.t, "wait"))
		},
		"fail": func(*rapid.T) {
			what := rapid.SampledFrom(someFailures).Draw(tr.t, "what fails")
			if len(what) > 4 && what[len(what)-4:] == "peer" && rapid.Bool().Draw(tr.t, "of one node") {
				what += " " + node()
			}
			tr.fails[what] = true
		},
		"mend": func(*rapid.T) { clear(tr.fails) },
		"unreadable": func(*rapid.T) {
			tr.dev.unread = nil
			if rapid.Bool().Draw(tr.t, "unreadable") {
				tr.dev.unread = errTest
			}
		},
		"host": func(*rapid.T) {
			tr.dev.host = rapid.SampledFrom(someHosts).Draw(tr.t, "host")
			tr.w.host = tr.dev.host
			tr.finish()
			tr.lag, tr.dev.unread = false, nil
			tr.run(2 * time.Minute) // until it is seen
		},
		"problems": func(*rapid.T) {
			ps := someProblems(tr.t)
			tr.dev.problems, tr.w.problems = ps, ps
			if rapid.Bool().Draw(tr.t, "noticed") {
				tr.step(core.Touched{})
			}
		},
		"drift": func(*rapid.T) {
			tr.finish()
			p := netip.MustParsePrefix(rapid.SampledFrom(somePrefixes).Draw(tr.t, "drifting"))
			tr.drift = tr.dev.reads
			k, any := peer()
			what := rapid.IntRange(0, 4).Draw(tr.t, "drift")
			tr.dev.edit(func(s *datapath.State) {
				if !s.Device.Exists() {
					return
				}
				switch what {
				case 0:
					delete(s.Peers, k)
				case 1:
					delete(s.Routes, p)
				case 2:
					if any {
						for o, peer := range s.Peers {
							peer.Prefixes = peer.Prefixes.Without(p)
							s.Peers[o] = peer
						}
						peer := s.Peers[k]
						peer.Prefixes = peer.Prefixes.With(p)
						s.Peers[k] = peer
					}
				case 3:
					s.Local = prefixes.Set{}
				case 4:
					s.Peers[publicKey("stray")] = datapath.Peer{}
				}
			})
			tr.step(core.Touched{})
		},
		"vanish": func(*rapid.T) {
			tr.finish()
			tr.drift = tr.dev.reads
			tr.dev.vanish()
			if rapid.Bool().Draw(tr.t, "noticed") {
				tr.step(core.Touched{})
			}
		},
		"sends": func(*rapid.T) {
			if k, ok := peer(); ok {
				tr.dev.sends(k, 500)
			}
		},
		"hears": func(*rapid.T) {
			if k, ok := peer(); ok {
				tr.dev.hears(k, tr.now)
			}
		},
		"slow": func(*rapid.T) {
			tr.lag = !tr.lag
			if !tr.lag {
				tr.finish()
				tr.answerPut()
			}
		},
		"answer": func(*rapid.T) { tr.answer() },
		"move": func(*rapid.T) {
			es := rapid.SampledFrom([]string{"", "198.51.100.1:0", "127.0.0.1:0"}).Draw(tr.t, "own endpoint")
			if tr.cfg.Endpoints = nil; es != "" {
				tr.cfg.Endpoints = []record.Endpoint{record.EndpointFrom(netip.MustParseAddrPort(es))}
			}
			tr.moved()
			tr.step(core.Endpoints{List: tr.cfg.Endpoints})
		},
		"names": func(*rapid.T) {
			var addrs []netip.Addr
			for _, a := range someOf(tr.t, someAddrs, 2, "address of a name") {
				if a := netip.MustParseAddr(a); !slices.Contains(addrs, a) {
					addrs = append(addrs, a)
				}
			}
			names := maps.Clone(tr.w.names)
			if names == nil {
				names = make(map[string][]netip.Addr)
			}
			names[rapid.SampledFrom([]string{"example.net", "example.org"}).Draw(tr.t, "name")] = addrs
			tr.w.names = names
			tr.tellNames(tr.sim)
		},
		"own": func(*rapid.T) {
			if !tr.known {
				return
			}
			foreign := rec("m")
			foreign.Instance, foreign.Epoch = "77", 9
			switch rapid.IntRange(0, 3).Draw(tr.t, "own record") {
			case 0:
				tr.step(deleted("m"))
			case 1:
				tr.step(put(good(foreign)))
			case 2:
				tr.step(put(bad("m", errTest)))
			case 3:
				tr.unput = errTest
			}
		},
		"": func(*rapid.T) {},
	}
}

func (tr *trouble) announces(ps ...string) {
	tr.w.announced = slices.Collect(set(ps...).All())
	tr.step(announce(ps...))
}

// finish gives all the answers that are due: nobody else touches the device between a plan and its ops.
func (tr *trouble) finish() {
	for tr.todo != nil {
		tr.answer()
	}
}

// calm ends all that is wrong, and gives the machine the time it may take to notice.
func (tr *trouble) calm() {
	clear(tr.fails)
	tr.dev.unread, tr.unput, tr.lag = nil, nil, false
	tr.finish()
	tr.answerPut()
	tr.rewatch()
	for range 5 {
		was := tr.relists
		tr.run(time.Minute)
		if tr.relists > was {
			tr.reread(true)
		}
	}
	if tr.m.View().Ready {
		tr.run(time.Minute)
	}
}

// check compares the device and the view with the oracle's.
func (tr *trouble) check() {
	wrong := tr.w.compare(tr.now, tr.dev.state(), tr.m.View())
	if len(wrong) > 0 {
		text := "\n"
		for _, s := range wrong {
			text += "\t" + s + "\n"
		}
		tr.Fatalf("when all is well again:%s", text)
	}
	tr.checkEndpoints()
	v := tr.m.View()
	if !v.Ready || !v.Self.Published || tr.settles != 1 {
		tr.Fatalf("ready %v, published %v, settled %d times", v.Ready, v.Self.Published, tr.settles)
	}
	if got, want := v.Self.Record.Reachable(), tr.expectLocal(); got != want {
		tr.Fatalf("announces %v, want %v", got, want)
	}
}

func (tr *trouble) expectLocal() prefixes.Set {
	return prefixes.Must(tr.w.expect(tr.now).local...)
}

// checkEndpoints: each peer has one of its record's endpoints, or what the device learned.
func (tr *trouble) checkEndpoints() {
	all := tr.w.expect(tr.now).usable
	for id, e := range tr.w.nodes {
		r := e.inForce(tr.now)
		if r == nil {
			continue
		}
		p, there := tr.dev.model.State().Peers[r.Key]
		v, ok := tr.m.View().Peer(id)
		if !there || !ok || v.SetAside || !tr.dev.stats[r.Key].LastHandshake.IsZero() {
			continue
		}
		if usable := all[id]; len(usable) > 0 && !slices.Contains(usable, p.Endpoint) {
			tr.Fatalf("peer %s is sent to at %v, and has %v", id, p.Endpoint, usable)
		}
	}
}

// again: the same records once more cause no write, whatever their order.
func (tr *trouble) again() {
	tr.take()
	in := core.Records{Reset: rapid.Bool().Draw(tr.t, "as a reset")}
	for id, o := range tr.store {
		if tr.w.nodes[id].inForce(tr.now) != nil || o.Err != nil {
			in.Put = append(in.Put, o)
		}
	}
	if in.Reset {
		for id, o := range tr.store {
			if !slices.ContainsFunc(in.Put, func(p core.Opened) bool { return p.Node == id }) {
				in.Put = append(in.Put, o)
			}
		}
		in.Put = append(in.Put, good(tr.m.View().Self.Record))
	}
	tr.step(in)
	tr.run(tr.cfg.Window + time.Millisecond)
	if ops := tr.take(); len(ops) > 0 {
		tr.Fatalf("the same records again cause %v", ops)
	}
}

// fresh: a machine that is told only how things are now wants the same. It adopts the device as it is.
func (tr *trouble) fresh() {
	f := simOn(tr.t, tr.dev, func(c *core.Config) { *c = tr.cfg })
	tr.dev.after = nil
	f.now = tr.now
	var as []string
	for _, p := range tr.w.announced {
		as = append(as, p.String())
	}
	f.step(announce(as...))
	tr.tellNames(f)
	in := core.Records{Reset: true}
	for id, e := range tr.w.nodes {
		if r := e.inForce(tr.now); r != nil {
			in.Put = append(in.Put, core.Opened{Node: id, Opened: identity.Opened{Record: *r}})
		}
	}
	f.step(in)
	f.run(2 * time.Second)
	for _, op := range f.take() {
		// Which of its endpoints a silent peer is tried at is a matter of time.
		if p, ok := op.(datapath.PutPeer); !ok || !p.Peer.Prefixes.IsEmpty() {
			tr.Fatalf("a machine told everything at once still has to %v", op)
		}
	}
}

func checkMachine(t *rapid.T) {
	tr := newTrouble(t)
	actions := tr.actions()
	if rapid.Bool().Draw(t, "registry first") {
		tr.rewatch()
	}
	tr.announces(someOf(t, somePrefixes, 2, "announced")...)
	names := slices.Sorted(maps.Keys(actions))
	for range rapid.IntRange(0, 40).Draw(t, "actions") {
		actions[rapid.SampledFrom(names).Draw(t, "action")](t)
	}
	tr.calm()
	tr.check()
	tr.again()
	tr.fresh()
}

func TestMachine(t *testing.T) { rapid.Check(t, checkMachine) }

func FuzzMachine(f *testing.F) { f.Fuzz(rapid.MakeFuzz(checkMachine)) }

// Whatever the readings are: a View is another exactly when it says something else, and what is raised and
// cleared is what came and went.
func TestHostProblems_AreNewsOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := up(t)
		var last []datapath.Problem
		for range rapid.IntRange(1, 8).Draw(t, "readings") {
			if rapid.IntRange(0, 2).Draw(t, "again") > 0 {
				last = someProblems(t)
			} else {
				last = rapid.Permutation(last).Draw(t, "order")
			}
			s.dev.problems = last
			was := s.m.View()
			s.take()
			s.read()
			is := s.m.View()
			differs := !slices.Equal(was.Conditions, is.Conditions)
			if risen := is.Version > was.Version; risen != differs {
				t.Fatalf("version %d after %d: conditions\n%v\nafter\n%v", is.Version, was.Version, is.Conditions, was.Conditions)
			}
			c := view.Diff(was, is)
			if !slices.Equal(c.Raised, s.raised) || !slices.Equal(c.Cleared, s.cleared) {
				t.Fatalf("raised %v, cleared %v, and the View %v, %v", s.raised, s.cleared, c.Raised, c.Cleared)
			}
			if w := (&world{node: "m", problems: last}); len(problemsOf(is)) != len(w.expect(s.now).conditions) {
				t.Fatalf("of %v there is %v", last, is.Conditions)
			}
		}
	})
}
