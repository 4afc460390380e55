package core_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// world is what a node is told, from which the oracle says what should come of it. It is written to be
// obviously right: it starts from nothing each time, and looks at everything.
type world struct {
	node      string
	key       key.Public
	addresses []netip.Prefix
	keepalive time.Duration
	nat       bool // it publishes no endpoint, or one on loopback
	names     map[string][]netip.Addr
	accept    func(string, netip.Prefix) bool

	nodes     map[string]*entry
	announced []netip.Prefix
	host      datapath.Host
	problems  []datapath.Problem // of the host, no two with one subject
}

// entry is what the registry has of one node, and had.
type entry struct {
	good      *record.Record // the newest that was opened
	notBefore time.Time
	notAfter  time.Time
	before    *entry // the one that was in force when good came, before its time
	refused   bool   // the newest was not believed
}

// inForce returns the record of e that counts at a time.
func (e *entry) inForce(now time.Time) *record.Record {
	if e == nil || e.good == nil {
		return nil
	}
	if now.Before(e.notBefore) {
		return e.before.inForce(now)
	}
	if !e.notAfter.IsZero() && now.After(e.notAfter) {
		return nil
	}
	return e.good
}

// expected is what should be: who has what, and what is wrong.
type expected struct {
	peers      map[key.Public][]netip.Prefix
	routes     []netip.Prefix
	local      []netip.Prefix
	conditions map[string]bool   // of the kinds that follow from the registry and the host: kind, node, subject
	words      map[string]string // of those about the host
	withheld   map[string]view.Kind
	usable     map[string][]netip.AddrPort // endpoints that this host can send to, by node
}

func (w *world) expect(now time.Time) expected {
	e := expected{peers: map[key.Public][]netip.Prefix{}, conditions: map[string]bool{}, words: map[string]string{}, withheld: map[string]view.Kind{}, usable: map[string][]netip.AddrPort{}}
	prefixesOf := map[string][]netip.Prefix{} // by kind and node; the first 8 are named
	wrong := func(kind view.Kind, node string, subject any) {
		if p, ok := subject.(netip.Prefix); ok {
			what := fmt.Sprint(kind, " ", node)
			prefixesOf[what] = append(prefixesOf[what], p)
			return
		}
		e.conditions[fmt.Sprint(kind, " ", node, " ", subject)] = true
	}

	about := map[string]datapath.Problem{}
	for _, p := range w.problems {
		about[p.Subject] = p
	}
	for i, subject := range slices.Sorted(maps.Keys(about)) {
		if i < 16 {
			wrong(view.HostProblem, w.node, subject)
			e.words[subject] = about[subject].Message + " (" + about[subject].Remedy + ")"
		} else {
			wrong(view.HostProblem, w.node, "")
		}
	}

	records := map[string]*record.Record{}
	for id, n := range w.nodes {
		if r := n.inForce(now); r != nil {
			records[id] = r
		} else if n.good != nil {
			wrong(view.RecordExpired, id, "")
		}
		if r := n.inForce(now); r != nil && r != n.good {
			wrong(view.RecordExpired, id, "")
		}
		if n.refused {
			wrong(view.RecordRefused, id, "")
		}
	}
	ids := slices.Sorted(maps.Keys(records))

	// A key is its lowest claimant's.
	claimants := map[key.Public][]string{w.key: {w.node}}
	for _, id := range ids {
		claimants[records[id].Key] = append(claimants[records[id].Key], id)
	}
	for _, c := range claimants {
		slices.Sort(c)
		if len(c) > 1 {
			for _, id := range c {
				wrong(view.KeyConflict, id, "")
			}
		}
	}

	// What of a node's claims policy leaves.
	allowed := func(id string, p netip.Prefix) bool {
		for _, s := range []string{"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32", "::/128", "::1/128", "fe80::/10", "ff00::/8"} {
			n := netip.MustParsePrefix(s)
			if n.Overlaps(p) && n.Bits() <= p.Bits() {
				return false
			}
		}
		if p.Bits() > 0 && p.Contains(netip.IPv6Loopback()) {
			return false
		}
		if w.accept != nil {
			return w.accept(id, p)
		}
		if p.Addr().Is4() {
			return p.Bits() >= 8
		}
		return p.Bits() >= 16
	}
	claims := map[netip.Prefix][]string{} // by those whose key is theirs
	reach := func(r *record.Record) []netip.Prefix {
		all := map[netip.Prefix]bool{}
		for p := range r.Prefixes.All() {
			all[p] = true
		}
		for p := range r.Addresses.All() {
			all[p] = true
		}
		return slices.Collect(maps.Keys(all))
	}
	for _, id := range ids {
		for _, p := range reach(records[id]) {
			if !allowed(id, p) {
				wrong(view.PrefixRefused, id, p)
			} else if claimants[records[id].Key][0] == id {
				claims[p] = append(claims[p], id)
			}
		}
	}
	for _, p := range append(slices.Clone(w.announced), w.addresses...) {
		if !allowed(w.node, p) {
			wrong(view.PrefixRefused, w.node, p)
		} else if !slices.Contains(claims[p], w.node) {
			claims[p] = append(claims[p], w.node)
			e.local = append(e.local, p)
		}
	}

	// What is local is never sent into the mesh.
	var b netipx.IPSetBuilder
	for _, p := range e.local {
		if p.Bits() >= 8 && p.Addr().Is4() || p.Bits() >= 16 && p.Addr().Is6() {
			b.AddPrefix(p)
		}
	}
	for p := range w.host.Connected.All() {
		b.AddPrefix(p)
	}
	guard, err := b.IPSet()
	if err != nil {
		panic(err)
	}

	for _, id := range ids {
		if k := records[id].Key; claimants[k][0] == id && k != w.key {
			e.peers[k] = nil
		}
	}
	won := map[string][]netip.Prefix{}
	for p, c := range claims {
		slices.Sort(c)
		for _, id := range c[1:] {
			wrong(view.PrefixConflict, id, p)
			e.withheld[fmt.Sprint(id, " ", p)] = view.PrefixConflict
		}
		winner := records[c[0]]
		if c[0] == w.node || winner.Key == w.key {
			continue
		}
		if guard.ContainsPrefix(p) || slices.Contains(e.local, p) {
			wrong(view.LocalWins, c[0], p)
			e.withheld[fmt.Sprint(c[0], " ", p)] = view.LocalWins
			continue
		}
		if w.loops(p, winner) {
			wrong(view.EndpointLoops, c[0], p)
			e.withheld[fmt.Sprint(c[0], " ", p)] = view.EndpointLoops
			continue
		}
		e.peers[winner.Key] = append(e.peers[winner.Key], p)
		e.routes = append(e.routes, p)
		won[c[0]] = append(won[c[0]], p)
	}
	for _, id := range ids {
		for _, p := range reach(records[id]) {
			what := fmt.Sprint(id, " ", p)
			switch {
			case !allowed(id, p):
				e.withheld[what] = view.PrefixRefused
			case claimants[records[id].Key][0] != id || records[id].Key == w.key:
				e.withheld[what] = view.KeyConflict
			}
		}
		routable := claimants[records[id].Key][0] == id && records[id].Key != w.key
		for _, ep := range w.places(records[id]) {
			if !w.reaches(ep) {
				continue
			}
			// One inside what goes to another node would be sent into the mesh.
			if slices.ContainsFunc(e.routes, func(p netip.Prefix) bool {
				return routable && w.host.Underlay == datapath.UnderlayShared && p.Contains(ep.Addr)
			}) {
				wrong(view.EndpointLoops, id, ep)
				continue
			}
			e.usable[id] = append(e.usable[id], netip.AddrPortFrom(ep.Addr, ep.Port))
		}
		if len(e.usable[id]) == 0 && len(records[id].Endpoints) > 0 {
			wrong(view.EndpointUnusable, id, "")
		}
	}
	for what, ps := range prefixesOf {
		slices.SortFunc(ps, prefixes.Compare)
		ps = slices.Compact(ps)
		for _, p := range ps[:min(len(ps), 8)] {
			e.conditions[fmt.Sprint(what, " ", p)] = true
		}
		if len(ps) > 8 {
			e.conditions[what+" "] = true
		}
	}
	return e
}

// loops reports whether packets to the owner of p would follow p.
func (w *world) loops(p netip.Prefix, owner *record.Record) bool {
	return w.host.Underlay == datapath.UnderlayShared && slices.ContainsFunc(w.places(owner), func(e record.Endpoint) bool {
		return p.Contains(e.Addr.WithZone(""))
	})
}

// places are the endpoints of r with the addresses of names in their place.
func (w *world) places(r *record.Record) (es []record.Endpoint) {
	for _, e := range r.Endpoints {
		if e.Host == "" {
			es = append(es, e)
		}
		for _, a := range w.names[e.Host] {
			es = append(es, record.Endpoint{Addr: a, Port: e.Port})
		}
	}
	return es
}

// reaches reports whether this host can send to e, if not into the mesh.
func (w *world) reaches(e record.Endpoint) bool {
	return e.Addr.Zone() == "" && (w.nat || !e.Addr.IsLoopback()) && !e.Addr.IsLinkLocalUnicast() && (e.Addr.Is4() && w.host.IPv4 || e.Addr.Is6() && w.host.IPv6)
}

// sortedText is for comparing lists of prefixes whatever their order.
func sortedText(ps []netip.Prefix) []string {
	all := make([]string, len(ps))
	for i, p := range ps {
		all[i] = p.String()
	}
	slices.Sort(all)
	return all
}

// compare says how a device, and a view of it, differ from what should be.
func (w *world) compare(now time.Time, st datapath.State, v view.View) (wrong []string) {
	e := w.expect(now)
	say := func(format string, a ...any) { wrong = append(wrong, fmt.Sprintf(format, a...)) }
	has := func(what string, got, want []netip.Prefix) {
		if g, w := sortedText(got), sortedText(want); !slices.Equal(g, w) {
			say("%s: has %v, want %v", what, g, w)
		}
	}

	// The device.
	if st.Device.Key.Public() != w.key {
		say("the device has another key")
	}
	has("addresses", slices.Collect(st.Addrs.All()), w.addresses)
	has("local", slices.Collect(st.Local.All()), e.local)
	has("routes", slices.Collect(maps.Keys(st.Routes)), e.routes)
	for k, p := range st.Peers {
		want, ok := e.peers[k]
		if !ok {
			say("peer %v is not to be there", k)
			continue
		}
		has("peer "+k.String(), slices.Collect(p.Prefixes.All()), want)
		if p.Keepalive != w.keepalive {
			say("peer %v has keepalive %v", k, p.Keepalive)
		}
	}
	for k := range e.peers {
		if _, ok := st.Peers[k]; !ok {
			say("peer %v is missing", k)
		}
	}

	// The view.
	if v.Self.Datapath != w.host.Driver || v.Self.Instead != w.host.Instead {
		say("view: datapath %q, instead %q", v.Self.Datapath, v.Self.Instead)
	}
	known := map[string]*record.Record{}
	for id, n := range w.nodes {
		if r := n.inForce(now); r != nil {
			known[id] = r
		}
	}
	if len(v.Peers) != len(known) {
		say("view: %d peers, want %d", len(v.Peers), len(known))
	}
	for _, p := range v.Peers {
		r := known[p.Node]
		if r == nil {
			say("view: peer %s is not known", p.Node)
			continue
		}
		want, peer := e.peers[r.Key]
		if p.SetAside {
			want = nil
		}
		if other := p.Key != r.Key; other || p.SetAside && peer && w.holder(known, r.Key) == p.Node || !p.SetAside && !peer {
			say("view: peer %s has key %v, set aside %v", p.Node, p.Key, p.SetAside)
		}
		has("view: peer "+p.Node, slices.Collect(p.Prefixes.All()), want)
	}
	withheld := map[string]view.Kind{}
	for _, h := range v.Withheld {
		withheld[fmt.Sprint(h.Node, " ", h.Prefix)] = h.Kind
		if h.Kind == view.KeyConflict && h.Winner == h.Node || h.Kind == view.PrefixConflict && h.Winner >= h.Node {
			say("view: %v is withheld from %s for %s", h.Prefix, h.Node, h.Winner)
		}
		subject := h.Prefix.String()
		if h.Kind == view.KeyConflict {
			subject = ""
		}
		if !slices.ContainsFunc(v.Conditions, func(c view.Condition) bool {
			return c.Kind == h.Kind && c.Node == h.Node && (c.Subject == subject || c.Subject == "")
		}) {
			say("view: %v is withheld from %s as %s, and no condition says so", h.Prefix, h.Node, h.Kind)
		}
	}
	for what := range e.withheld { // what this node wins from others is no peer's
		if node, _, _ := cutSpace(what); node == w.node {
			delete(e.withheld, what)
		}
	}
	if !maps.Equal(withheld, e.withheld) {
		say("view: withheld %v, want %v", withheld, e.withheld)
	}
	judged := map[view.Kind]bool{
		view.RecordExpired: true, view.RecordRefused: true, view.KeyConflict: true, view.PrefixRefused: true,
		view.PrefixConflict: true, view.LocalWins: true, view.EndpointLoops: true, view.EndpointUnusable: true,
		view.HostProblem: true,
		// None of these is to be left when all is well again.
		view.OpFailed: true, view.PortInUse: true, view.DeviceUnreadable: true, view.RegistryDown: true, view.PublishFailed: true,
	}
	for _, c := range v.Conditions {
		what := fmt.Sprint(c.Kind, " ", c.Node, " ", c.Subject)
		if judged[c.Kind] && !e.conditions[what] {
			say("view: there is the condition %v", c)
		}
		if said := c.Message + " (" + c.Remedy + ")"; c.Kind == view.HostProblem && c.Subject != "" && said != e.words[c.Subject] {
			say("view: of %s it says %q, want %q", c.Subject, said, e.words[c.Subject])
		}
		delete(e.conditions, what)
	}
	for what := range e.conditions {
		say("view: there is no condition %s", what)
	}
	slices.Sort(wrong)
	return wrong
}

// holder returns who has a key.
func (w *world) holder(known map[string]*record.Record, k key.Public) string {
	first := ""
	if k == w.key {
		first = w.node
	}
	for id, r := range known {
		if r.Key == k && (first == "" || id < first) {
			first = id
		}
	}
	return first
}

func cutSpace(s string) (string, string, bool) {
	for i := range s {
		if s[i] == ' ' {
			return s[:i], s[i+1:], true
		}
	}
	return s, "", false
}
