package core

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/gaissmai/bart"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// Config is what a Machine is told once. The caller has checked it.
type Config struct {
	Node      string
	Key       key.Private
	Addresses prefixes.Set
	Endpoints []netip.AddrPort // port 0: the device's
	PortFirst uint16           // 0: any
	PortLast  uint16
	Mark      uint32
	MTU       int
	Keepalive time.Duration // 0: KeepaliveNAT for a node without endpoints; below 0: none
	Roles     []string
	Labels    map[string]string
	Accept    func(node string, p netip.Prefix) bool
	Instance  string
	Starts    Starts // as they were before this start

	Window time.Duration // how long changes are gathered before they are put to the device
	Audit  time.Duration // how often the device is read when nothing happens
	Linger time.Duration // how long a withdrawn prefix is still accepted after the record without it is out
}

// Starts counts what outlives a process.
type Starts struct {
	Epoch      uint64 // starts of the process
	Generation uint64 // devices created
}

// KeepaliveNAT keeps a NAT's mapping open: RFC 4787 asks for at least 2 minutes, many keep UDP for 30 s.
const KeepaliveNAT = 25 * time.Second

// Input is something that happened.
type Input interface{ input() }

type (
	// Records is a batch of the registry, opened. An ID is in it at most once.
	Records struct {
		Reset    bool
		Revision uint64
		Put      []Opened
		Deleted  []string // node IDs
	}
	// RegistryFailed says that watching failed; the next Records says that it is over.
	RegistryFailed struct{ Err error }
	// Announced is what this node can reach.
	Announced struct{ Snapshot prefixes.Snapshot }
	// Reading answers Output.Read.
	Reading struct {
		State datapath.State
		Err   error
	}
	// Applied answers Output.Ops.
	Applied struct {
		Ops []datapath.Op
		Err error
	}
	// Published answers Output.Publish, when it is done or has failed once more.
	Published struct {
		Record record.Record
		Err    error
	}
	// Touched says that someone else changed the device.
	Touched struct{}
	// Tick says that nothing happened but time.
	Tick struct{}
)

func (Records) input()        {}
func (RegistryFailed) input() {}
func (Announced) input()      {}
func (Reading) input()        {}
func (Applied) input()        {}
func (Published) input()      {}
func (Touched) input()        {}
func (Tick) input()           {}

// Opened is one entry of the registry, or why it is not believed.
type Opened struct {
	Node string
	identity.Opened
	Err  error
	Same bool // the very bytes of last time; the rest is then empty
}

// Output is what is to be done, in this order. The answers are Inputs of later Steps.
type Output struct {
	Starts  *Starts        // keep these, before anything else
	Read    bool           // read the device
	Ops     []datapath.Op  // apply these
	Publish *record.Record // put this to the registry, in place of any earlier one not yet put
	Settle  bool           // what the device was told is complete
	Wake    time.Time      // Step with a Tick then, if nothing comes before
	Changed bool           // the View is another

	// For the log.
	Raised, Cleared []view.Condition
	Joined, Left    []string // peers on the device, by node ID
}

// Machine is the state of one node. It is not safe for concurrent use.
type Machine struct {
	cfg  Config
	pub  key.Public
	self *node

	// What the registry says.
	reset      bool
	revision   uint64
	nodes      map[string]*node
	byKey      map[key.Public][]string   // who claims a key, by node ID: the first has it
	claims     bart.Table[[]string]      // who claims a prefix, by node ID: the first has it
	assigned   bart.Table[string]        // which peer has it here
	peerOf     map[key.Public]string     // whose peer that is on the device
	losers     map[netip.Prefix][]string // who has a condition about it
	inside     map[netip.Prefix]string   // whose prefix is withheld because it lies in a local network
	looping    map[netip.Prefix]string   // whose prefix is withheld because an endpoint lies inside
	endpointAt bart.Table[int]           // how many nodes may be reached at an address
	bounded    int                       // nodes whose record has a time bound

	// What this node is.
	snapshot  prefixes.Snapshot
	own       prefixes.Set               // announced
	lingering map[netip.Prefix]time.Time // withdrawn, until when accepted; zero: not published yet
	guard     prefixes.Set               // never routed into the mesh
	source    [2]netip.Addr              // for routes, IPv4 and IPv6
	port      uint16                     // asked for
	starts    Starts
	started   bool // starts are settled
	rec       record.Record
	published bool
	republish time.Time // put the record again then; zero: no need
	doubles   int       // foreign records seen in a row
	doubledAt time.Time
	had       record.Record // what the registry had of this node at the start
	adopted   bool          // the device was there at the start, with our key

	// What was touched and not yet brought up to date.
	unsettled map[*node]struct{}
	stale     map[netip.Prefix]struct{}
	touched   map[*node]struct{}

	// The device.
	want     datapath.State
	have     *datapath.Model // nil: to be read first
	stats    map[key.Public]datapath.Stats
	host     datapath.Host
	dirty    datapath.Delta
	full     bool // compare everything
	flushAt  time.Time
	retry    map[resource]attempt
	reading  bool // asked for
	applying bool
	readAt   time.Time // read the device then
	lastRead time.Time
	readFail int
	settled  bool
	existed  bool // there was a device at the last reading
	unproven int
	pollTill time.Time

	conditions map[condKey]view.Condition
	news       Output // of this Step, for the log
	ready      bool
	changed    bool
	version    uint64
}

// New returns a Machine that knows nothing yet.
func New(cfg Config) *Machine {
	m := &Machine{
		cfg: cfg, pub: cfg.Key.Public(), starts: cfg.Starts,
		nodes: make(map[string]*node), byKey: make(map[key.Public][]string), peerOf: make(map[key.Public]string),
		losers: make(map[netip.Prefix][]string), inside: make(map[netip.Prefix]string), looping: make(map[netip.Prefix]string), lingering: make(map[netip.Prefix]time.Time),
		unsettled: make(map[*node]struct{}), stale: make(map[netip.Prefix]struct{}), touched: make(map[*node]struct{}),
		retry: make(map[resource]attempt), conditions: make(map[condKey]view.Condition),
		port: cfg.PortFirst,
	}
	m.want = datapath.State{
		Device: datapath.Device{Key: cfg.Key, ListenPort: m.port, Mark: cfg.Mark, MTU: cfg.MTU},
		Addrs:  cfg.Addresses,
		Routes: make(map[netip.Prefix]netip.Addr),
		Peers:  make(map[key.Public]datapath.Peer),
	}
	m.clearDirty()
	m.full = true
	m.self = &node{id: cfg.Node, key: m.pub, known: true}
	m.nodes[cfg.Node] = m.self
	m.byKey[m.pub] = []string{cfg.Node}
	return m
}

func (m *Machine) clearDirty() {
	m.dirty = datapath.Delta{Peers: make(map[key.Public]struct{}), Routes: make(map[netip.Prefix]struct{})}
}

// Step takes one input in at the time now and returns what is to be done. Times never go back: where a
// clock is stepped, the caller's monotonic reading is what counts.
func (m *Machine) Step(now time.Time, in Input) Output {
	m.changed, m.news = false, Output{}
	switch in := in.(type) {
	case Records:
		m.records(now, in)
	case RegistryFailed:
		m.raise(now, view.RegistryDown, "", "", "the registry cannot be watched: "+in.Err.Error(),
			"forwarding goes on; the watch is retried")
	case Announced:
		m.announced(now, in.Snapshot)
	case Reading:
		m.readingDone(now, in)
	case Applied:
		m.applied(now, in)
	case Published:
		m.publishDone(now, in)
	case Touched:
		// Another program that keeps undoing what is done here is not to be raced.
		m.readSoon(maxTime(now, m.lastRead.Add(minRepair)))
	}
	m.expire(now)
	m.settle(now)
	out := m.decide(now)
	if m.changed {
		m.version++
	}
	out.Changed = m.changed
	out.Raised, out.Cleared, out.Joined, out.Left = m.news.Raised, m.news.Cleared, m.news.Joined, m.news.Left
	return out
}

const (
	minRepair = time.Second // between readings that a change from outside causes
	pollEvery = time.Second // while an endpoint is on trial
	pollFor   = time.Minute // then the audits are enough
)

// decide returns what is to be done now, and when to look again.
func (m *Machine) decide(now time.Time) Output {
	var out Output
	m.ownRecord(now, &out)
	if m.reading || m.applying {
		return out
	}
	if m.have == nil || !m.readAt.IsZero() && !now.Before(m.readAt) {
		if m.readFail == 0 || !now.Before(m.readAt) {
			m.reading, out.Read = true, true
			return out
		}
	}
	if m.have != nil && m.due(now) {
		out.Ops = m.plan(now)
		m.applying = len(out.Ops) > 0
		if m.applying {
			return out
		}
	}
	if m.have != nil && m.reset && !m.full && !m.pending() && !m.settled && m.have.State().Device.Exists() {
		m.settled, m.ready, m.changed, out.Settle = true, true, true, true
	}
	out.Wake = m.wake()
	return out
}

func (m *Machine) pending() bool {
	return m.full || m.dirty.Device || len(m.dirty.Peers)+len(m.dirty.Routes) > 0
}

func (m *Machine) due(now time.Time) bool {
	if m.pending() && !now.Before(m.flushAt) {
		return true
	}
	for _, a := range m.retry {
		if a.due(now) {
			return true
		}
	}
	return false
}

func (m *Machine) wake() time.Time {
	var at time.Time
	earliest := func(t time.Time) {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	if m.pending() {
		earliest(m.flushAt)
	}
	for _, a := range m.retry {
		if !a.permanent {
			earliest(a.next)
		}
	}
	for _, t := range m.lingering {
		earliest(t)
	}
	earliest(m.readAt)
	earliest(m.republish)
	earliest(m.nextBound())
	if m.doubles > 0 {
		earliest(m.doubledAt.Add(calm + 1))
	}
	return at
}

// soon has the device written once the window that opens now is over.
func (m *Machine) soon(now time.Time) {
	if m.flushAt.IsZero() {
		m.flushAt = now.Add(m.cfg.Window)
	}
}

func (m *Machine) readSoon(at time.Time) {
	if m.readAt.IsZero() || at.Before(m.readAt) {
		m.readAt = at
	}
}

// settle brings the indexes and the wanted State up to date for what was touched.
func (m *Machine) settle(now time.Time) {
	for len(m.unsettled) > 0 {
		for n := range m.unsettled {
			delete(m.unsettled, n)
			m.settleClaims(now, n)
		}
	}
	for p := range m.stale {
		m.assign(now, p)
	}
	clear(m.stale)
	for n := range m.touched {
		m.refresh(n)
	}
	clear(m.touched)
	if m.pending() {
		m.soon(now)
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// insert adds id to a sorted list without changing the one given.
func insert(list []string, id string) []string {
	i, found := slices.BinarySearch(list, id)
	if found {
		return list
	}
	return slices.Insert(slices.Clone(list), i, id)
}

// remove takes id from a sorted list without changing the one given.
func remove(list []string, id string) []string {
	i, found := slices.BinarySearch(list, id)
	if !found {
		return list
	}
	return slices.Delete(slices.Clone(list), i, i+1)
}

type condKey struct {
	kind          view.Kind
	node, subject string
}

// raise states a condition. It stays as old as it was first raised, whatever its words become.
func (m *Machine) raise(now time.Time, kind view.Kind, node, subject, message, remedy string) {
	k := condKey{kind, node, subject}
	c, ok := m.conditions[k]
	if ok && c.Message == message && c.Remedy == remedy {
		return
	}
	if !ok {
		c = view.Condition{Kind: kind, Node: node, Subject: subject, Since: now}
	}
	c.Message, c.Remedy = message, remedy
	if !ok {
		m.news.Raised = append(m.news.Raised, c)
	}
	m.conditions[k] = c
	m.changed = true
}

func (m *Machine) clear(kind view.Kind, node, subject string) {
	k := condKey{kind, node, subject}
	if c, ok := m.conditions[k]; ok {
		delete(m.conditions, k)
		m.news.Cleared = append(m.news.Cleared, c)
		m.changed = true
	}
}

// clearAll ends the conditions of a kind about a node but for those whose subjects are kept.
func (m *Machine) clearAll(kind view.Kind, node string, keep map[string]bool) {
	for k := range m.conditions {
		if k.kind == kind && k.node == node && !keep[k.subject] {
			m.clear(k.kind, k.node, k.subject)
		}
	}
}

// View returns what the node sees now.
func (m *Machine) View() view.View {
	v := view.View{Ready: m.ready, Version: m.version, Revision: m.revision}
	v.Self = view.Self{Node: m.cfg.Node, Key: m.pub, Record: m.rec, Published: m.published}
	if m.have != nil {
		v.Self.Local = m.have.State().Local
		v.Self.ListenPort, v.Self.MTU = m.have.State().Device.ListenPort, m.have.State().Device.MTU
	}
	for _, n := range m.nodes {
		if n == m.self || !n.known {
			continue
		}
		p := view.Peer{
			Node: n.id, Key: n.key, Addresses: n.rec.Addresses, Prefixes: m.sentTo(n), Roles: n.rec.Roles, Labels: n.rec.Labels,
			Candidates: n.rec.Endpoints, SetAside: !n.routable,
		}
		if n.routable {
			s := m.stats[n.key]
			p.LastHandshake, p.Received, p.Sent = s.LastHandshake, s.Received, s.Sent
			if m.have != nil {
				p.Endpoint = m.have.State().Peers[n.key].Endpoint
			}
		}
		v.Peers = append(v.Peers, p)
		for q := range n.rec.Reachable().Minus(n.won).All() {
			v.Withheld = append(v.Withheld, m.withheld(n, q))
		}
	}
	slices.SortFunc(v.Peers, func(a, b view.Peer) int { return cmp.Compare(a.Node, b.Node) })
	slices.SortFunc(v.Withheld, func(a, b view.Withheld) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), prefixes.Compare(a.Prefix, b.Prefix))
	})
	for _, c := range m.conditions {
		v.Conditions = append(v.Conditions, c)
	}
	view.Sort(v.Conditions)
	return v
}

// sentTo returns what of n's prefixes the device sends to it: who waits for a View that has a prefix may
// use it at once.
func (m *Machine) sentTo(n *node) prefixes.Set {
	if m.have == nil || !n.routable {
		return prefixes.Set{}
	}
	have := m.have.State()
	sent := n.won.Intersect(have.Peers[n.key].Prefixes)
	var unrouted []netip.Prefix
	for p := range sent.All() {
		if _, ok := have.Routes[p]; !ok {
			unrouted = append(unrouted, p)
		}
	}
	return sent.Without(unrouted...)
}
