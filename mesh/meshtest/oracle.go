package meshtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/prefixes"
)

// Check compares the device and the record of every running node with what they have to be, and sees
// that those who left have no device. It returns the first difference. Nodes that are stopped are not
// looked at; their records count.
func (c *Cluster) Check(ctx context.Context) error {
	entries, err := c.entries(ctx)
	if err != nil {
		return err
	}
	plain := identity.Plain()
	believed, refused := open(entries, plain)
	for i := range c.Nodes {
		n := c.Nodes[(i+c.hint)%len(c.Nodes)]
		records, err := believed, refused
		if t := n.Config.Trust; t != nil {
			records, err = open(entries, t)
		}
		if n.Running() && err != nil {
			return fmt.Errorf("%v: %w", n, err)
		}
		if err := n.check(ctx, records); err != nil {
			c.hint = n.Index
			return fmt.Errorf("%v: %w", n, err)
		}
	}
	return nil
}

// entries reads the registry through the first node's, or the store behind all.
func (c *Cluster) entries(ctx context.Context) ([]registry.Entry, error) {
	var reg registry.Registry = c.Nodes[0].Config.Registry
	if c.Store != nil {
		reg = c.Store
	}
	var last error
	for b, err := range reg.Watch(ctx, registry.KindNode) {
		if err == nil {
			return b.Put, nil
		}
		last = err
	}
	return nil, fmt.Errorf("reading the registry: %w", errors.Join(context.Cause(ctx), last))
}

func open(entries []registry.Entry, t identity.Trust) (map[string]record.Record, error) {
	records := make(map[string]record.Record)
	var errs []error
	for _, e := range entries {
		_, name, err := registry.ParseID(e.ID)
		if err != nil {
			continue
		}
		o, err := t.Open(e.ID, e.Data, time.Now())
		switch {
		case errors.Is(err, identity.ErrRevoked):
		case err != nil:
			errs = append(errs, err)
		case o.ValidAt(time.Now()):
			records[name] = o.Record
		}
	}
	return records, errors.Join(errs...)
}

func (n *Node) check(ctx context.Context, records map[string]record.Record) error {
	if !n.Running() {
		if !n.left {
			return nil
		}
		have, err := n.Config.Datapath.Read(ctx)
		if err == nil && have.Device.Exists() {
			err = errors.New("it left, and its device is still there")
		}
		return err
	}
	have, err := n.Config.Datapath.Read(ctx)
	if err != nil {
		return err
	}
	if !have.Device.Exists() {
		return errors.New("it has no device")
	}
	self := n.self(have.Host)
	want := self.want(records)
	return errors.Join(compare(want, have, n.cluster.name), n.checkEndpoints(have, records), n.checkRecord(self, have, records))
}

// self is what a node says of itself, and what its host is.
type self struct {
	id        string
	key       key.Private
	addresses []netip.Prefix
	own       []netip.Prefix // announced or addresses, as far as policy allows
	source4   netip.Addr
	source6   netip.Addr
	keepalive time.Duration
	accept    func(string, netip.Prefix) bool
	host      datapath.Host
}

func (n *Node) self(host datapath.Host) self {
	c := n.Config
	s := self{id: c.Node, key: n.private(), accept: c.Accept, host: host}
	if s.key.IsZero() {
		panic("meshtest: a node's Config has no Key")
	}
	if s.accept == nil {
		s.accept = mesh.AcceptNarrow
	}
	for _, a := range c.Addresses {
		s.addresses = append(s.addresses, prefixes.Host(a))
	}
	claimed := slices.Clone(s.addresses)
	snapshot, _ := n.Mesh().Prefixes().Current()
	for _, a := range snapshot.Announcements {
		claimed = append(claimed, a.Prefix)
	}
	for _, p := range claimed {
		if s.allows(s.id, p) && !slices.Contains(s.own, p) {
			s.own = append(s.own, p)
		}
	}
	var sources []netip.Addr
	for _, a := range snapshot.Announcements {
		if a.Source.IsValid() && slices.ContainsFunc(s.own, func(p netip.Prefix) bool { return p.Contains(a.Source) }) {
			sources = append(sources, a.Source)
		}
	}
	for p := range prefixes.Must(s.addresses...).All() {
		sources = append(sources, p.Addr())
	}
	for _, a := range slices.Backward(sources) {
		if a.Is4() {
			s.source4 = a
		} else {
			s.source6 = a
		}
	}
	switch {
	case c.Keepalive > 0:
		s.keepalive = c.Keepalive
	case c.Keepalive == 0 && len(c.Endpoints) == 0:
		s.keepalive = 25 * time.Second
	}
	return s
}

var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"),
	netip.MustParsePrefix("::/128"), netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

// inside reports whether p is q or a part of it.
func inside(p, q netip.Prefix) bool { return p.Bits() >= q.Bits() && q.Contains(p.Addr()) }

func (s self) allows(node string, p netip.Prefix) bool {
	for _, q := range special {
		if inside(p, q) {
			return false
		}
	}
	if p.Bits() > 0 && p.Contains(netip.IPv6Loopback()) {
		return false
	}
	return s.accept(node, p)
}

// want returns what the device of s has to be once everyone published records.
func (s self) want(records map[string]record.Record) datapath.State {
	public := s.key.Public()
	w := datapath.State{
		Device: datapath.Device{Key: s.key},
		Addrs:  prefixes.Must(s.addresses...),
		Local:  prefixes.Must(s.own...),
		Routes: make(map[netip.Prefix]netip.Addr),
		Peers:  make(map[key.Public]datapath.Peer),
	}
	for _, a := range []netip.Addr{s.source4, s.source6} {
		if a.IsValid() && !s.host.Addrs.Has(prefixes.Host(a)) {
			w.Addrs = w.Addrs.With(prefixes.Host(a))
		}
	}
	ids := slices.Sorted(maps.Keys(records))

	// A key is that of the lowest ID which claims it, this node included.
	holder := map[key.Public]string{public: s.id}
	for _, id := range ids {
		k := records[id].Key
		if first, taken := holder[k]; id != s.id && (!taken || id < first) {
			holder[k] = id
		}
	}
	// A prefix is the lowest ID's of those who may have it and hold their key. What this node claims, it
	// claims whether it holds its key or not.
	owner := make(map[netip.Prefix]string)
	claim := func(id string, p netip.Prefix) {
		if first, taken := owner[p]; !taken || id < first {
			owner[p] = id
		}
	}
	for _, p := range s.own {
		claim(s.id, p)
	}
	for _, id := range ids {
		r := records[id]
		if id == s.id {
			continue
		}
		if holder[r.Key] != id {
			continue
		}
		for p := range r.Reachable().All() {
			if s.allows(id, p) {
				claim(id, p)
			}
		}
		if r.Key != public {
			w.Peers[r.Key] = datapath.Peer{Keepalive: s.keepalive}
		}
	}
	guard := s.host.Connected
	for _, p := range s.own {
		if p.Bits() >= 8 && p.Addr().Is4() || p.Bits() >= 16 && p.Addr().Is6() {
			guard = guard.With(p)
		}
	}
	won := make(map[key.Public][]netip.Prefix)
	for p, id := range owner {
		if id == s.id || records[id].Key == public || guard.CoversPrefix(p) || slices.Contains(s.own, p) {
			continue
		}
		if s.host.Underlay == datapath.UnderlayShared && slices.ContainsFunc(records[id].Endpoints, func(e record.Endpoint) bool {
			return p.Contains(e.Addr.WithZone(""))
		}) {
			continue // packets to its owner would follow it
		}
		k := records[id].Key
		won[k] = append(won[k], p)
		w.Routes[p] = s.source6
		if p.Addr().Is4() {
			w.Routes[p] = s.source4
		}
	}
	for k, ps := range won {
		p := w.Peers[k]
		p.Prefixes = prefixes.Must(ps...)
		w.Peers[k] = p
	}
	return w
}

// name returns whose key k is, for messages.
func (c *Cluster) name(k key.Public) string {
	for _, n := range c.Nodes {
		if n.public() == k {
			return n.Config.Node
		}
	}
	return "of no node"
}

// public returns the key that others know n by, which is slow to compute.
func (n *Node) public() key.Public {
	if k := n.private(); n.publicOf != k {
		n.publicOf, n.publicKey = k, k.Public()
	}
	return n.publicKey
}

func (n *Node) private() key.Private {
	if n.Config.Key.IsZero() {
		return n.kept
	}
	return n.Config.Key
}

// compare says how have differs from want, but for endpoints and what want leaves to the device.
func compare(want, have datapath.State, name func(key.Public) string) error {
	var diffs []string
	differ := func(format string, a ...any) { diffs = append(diffs, fmt.Sprintf(format, a...)) }
	if have.Device.Key != want.Device.Key {
		differ("the device has another key")
	}
	if have.Device.ListenPort == 0 {
		differ("the device has no port")
	}
	if have.Addrs != want.Addrs {
		differ("addresses are %v, want %v", have.Addrs, want.Addrs)
	}
	if have.Local != want.Local {
		differ("local prefixes are %v, want %v", have.Local, want.Local)
	}
	for k, w := range want.Peers {
		h, ok := have.Peers[k]
		h.Endpoint = netip.AddrPort{}
		switch {
		case !ok:
			differ("peer %s %v is missing", name(k), k)
		case h.Prefixes != w.Prefixes:
			differ("prefixes of peer %s %v are %v, want %v", name(k), k, h.Prefixes, w.Prefixes)
		case h != w:
			differ("peer %s %v has keepalive %v, want %v, or a preshared key", name(k), k, h.Keepalive, w.Keepalive)
		}
	}
	for k := range have.Peers {
		if _, ok := want.Peers[k]; !ok {
			differ("peer %s %v is too many", name(k), k)
		}
	}
	for p, w := range want.Routes {
		if h, ok := have.Routes[p]; !ok || h != w {
			differ("route %v from %v is missing, or from %v", p, w, h)
		}
	}
	for p := range have.Routes {
		if _, ok := want.Routes[p]; !ok {
			differ("route %v is too many", p)
		}
	}
	if len(diffs) == 0 {
		return nil
	}
	slices.Sort(diffs)
	return errors.New(strings.Join(diffs[:min(len(diffs), 5)], "; ") + fmt.Sprintf(" (%d differences)", len(diffs)))
}

// checkEndpoints sees that a peer whose record has an endpoint has one on the device, and that packets for
// those that run in memory go where their record says.
func (n *Node) checkEndpoints(have datapath.State, records map[string]record.Record) error {
	claims := make(map[key.Public]int)
	for _, r := range records {
		claims[r.Key]++
	}
	for _, o := range n.cluster.Nodes {
		p, ok := have.Peers[o.public()]
		r := records[o.Config.Node]
		if have.Host.Underlay == datapath.UnderlayShared { // those inside a prefix of another node are not used
			r.Endpoints = slices.DeleteFunc(slices.Clone(r.Endpoints), func(e record.Endpoint) bool {
				for p := range have.Routes {
					if p.Contains(e.Addr.WithZone("")) {
						return true
					}
				}
				return false
			})
		}
		if !ok || o == n || len(r.Endpoints) == 0 || r.Key != o.public() || claims[r.Key] > 1 {
			continue // two devices with one key answer both
		}
		if !p.Endpoint.IsValid() {
			return fmt.Errorf("peer %v has no endpoint", o)
		}
		if o.Running() && o.Device != nil && n.Device != nil && !slices.Contains(r.Endpoints, record.EndpointFrom(p.Endpoint)) {
			return fmt.Errorf("packets for %v go to %v, its record says %v", o, p.Endpoint, r.Endpoints)
		}
	}
	return nil
}

// checkRecord compares what is in the registry of n with what n is.
func (n *Node) checkRecord(s self, have datapath.State, records map[string]record.Record) error {
	r, ok := records[s.id]
	if !ok {
		return errors.New("its record is not in the registry")
	}
	own := prefixes.Must(s.own...)
	switch addrs := prefixes.Must(s.addresses...); {
	case r.Key != s.key.Public():
		return errors.New("its record has another key")
	case r.Addresses != addrs || r.Reachable() != own.Union(addrs):
		return fmt.Errorf("its record says %v and %v, want %v and %v", r.Addresses, r.Prefixes, addrs, own.Minus(addrs))
	case len(r.Endpoints) != len(n.Config.Endpoints):
		return fmt.Errorf("its record has endpoints %v, want %v", r.Endpoints, n.Config.Endpoints)
	}
	for i, e := range n.Config.Endpoints {
		if e.Port == 0 {
			e.Port = have.Device.ListenPort
		}
		if r.Endpoints[i] != e {
			return fmt.Errorf("its record has endpoint %v, want %v", r.Endpoints[i], e)
		}
	}
	return nil
}
