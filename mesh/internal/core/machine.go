package core

import (
	"cmp"
	"errors"
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
	Endpoints []record.Endpoint // port 0: the device's
	PortFirst uint16            // 0: any
	PortLast  uint16
	Mark      uint32
	MTU       int
	Keepalive time.Duration // 0: KeepaliveNAT for a node without endpoints; below 0: none
	Roles     []string
	Labels    map[string]string
	Accept    func(node string, p netip.Prefix) bool
	Instance  string
	Device    uint64        // where the count of devices begins that nothing is known of
	Starts    Starts        // as they were before this start
	Rejoin    time.Duration // how long the others may need to find the registry again

	Window time.Duration // how long changes are gathered before they are put to the device
	Audit  time.Duration // how often the device is read when nothing happens
	Linger time.Duration // how long a withdrawn prefix is still accepted after the record without it is out
}

// Starts counts what outlives a process.
type Starts struct {
	Epoch      uint64 // starts of the process
	Generation uint64 // devices created
	// Port is the one the device last had. Where any will do, the next device gets it again: others may
	// know no other way to this node until they hear from it. 0: none yet.
	Port uint16 `json:",omitempty"`
}

// KeepaliveNAT keeps a NAT's mapping open: RFC 4787 asks for at least 2 minutes, many keep UDP for 30 s.
const KeepaliveNAT = 25 * time.Second

// Input is something that happened.
type Input interface{ input() }

type (
	// Records is a batch of the registry, opened. An ID is in it at most once.
	Records struct {
		Reset bool
		// Second: it answers Output.Relist.
		Second   bool
		Revision uint64
		Put      []Opened
		Deleted  []string // node IDs
	}
	// RegistryFailed says that watching failed; the next Records says that it is over.
	RegistryFailed struct{ Err error }
	// Remembered is what the registry had when an earlier process last saw it, opened again.
	Remembered struct{ Put []Opened }
	// Endpoints are where this node is reached from now on.
	Endpoints struct{ List []record.Endpoint }
	// Named is what is known of the names in Output.Names, of all of them.
	Named struct{ Names map[string]Name }
	// Kept says that something was written to the state folder, or could not be.
	Kept struct {
		What string // "snapshot"
		Err  error
	}
	// Announced is what this node can reach.
	Announced struct{ Snapshot prefixes.Snapshot }
	// Reading answers Output.Read.
	Reading struct {
		State  datapath.State
		Err    error
		Closed bool // the datapath was closed, so no other reading will do better
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
func (Remembered) input()     {}
func (Endpoints) input()      {}
func (Named) input()          {}
func (Kept) input()           {}
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

// Name is what is known of a host name.
type Name struct {
	Addrs []netip.Addr // the best first; the last ones found, where it is not found any more
	Err   error        // why it was not found when last asked for
}

// Output is what is to be done, in this order. The answers are Inputs of later Steps. Until the answer to
// Read or Ops has come, neither is asked for again.
type Output struct {
	Starts  *Starts        // keep these, before anything else
	Read    bool           // read the device
	Ops     []datapath.Op  // apply these
	Publish *record.Record // put this to the registry, in place of any earlier one not yet put
	Settle  bool           // what the device was told is complete
	Relist  bool           // read the whole registry once more
	Names   []string       // the host names to look up, sorted, if they are others now; else nil
	Renew   []string       // of these, those whose addresses do not answer
	Wake    time.Time      // Step with a Tick then, if nothing comes before; zero: no need
	Changed bool           // the View is another

	// For the log, sorted.
	Raised, Cleared []view.Condition
	Joined, Left    []string // peers on the device, by node ID
	Rekeyed         []string // those that stayed, with another key
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
	contested  map[netip.Prefix][]string // prefixes with several claims, as they were last told of
	barred     map[netip.Prefix]bar      // prefixes that their winner does not get here
	endpointAt bart.Table[[]string]      // which nodes may be reached at an address
	hosts      map[string][]string       // which nodes may be reached at a host name, by node ID
	hostsStale bool                      // these are others than Output.Names last said
	names      map[string]Name           // what is known of these
	shrink     shrink
	bounds     bounds // nodes by when their record begins or ends

	// What this node is.
	endpoints []record.Endpoint
	snapshot  prefixes.Snapshot
	own       prefixes.Set               // announced
	lingering map[netip.Prefix]time.Time // withdrawn, until when accepted; zero: the record without it is not out yet
	guard     prefixes.Set               // what is inside is never routed into the mesh
	source    [2]netip.Addr              // for routes, IPv4 and IPv6
	publisher

	// What was touched and not yet brought up to date. Slices, because a map that was large once costs
	// as much to walk ever after.
	unsettled []*node
	touched   []*node
	stale     []netip.Prefix // may have duplicates
	rechecks  []*node
	relist    []listID

	want datapath.State
	device

	conditions map[string]map[conditionID]view.Condition // by node
	lists      map[listID]*list
	out        Output // of this Step
	ready      bool
	changed    bool
	version    uint64
}

// New returns a Machine that knows nothing yet.
func New(cfg Config) *Machine {
	pub := cfg.Key.Public()
	m := &Machine{
		cfg: cfg, pub: pub,
		self:  &node{id: cfg.Node, key: pub, known: true, slot: noSlot},
		nodes: make(map[string]*node), byKey: make(map[key.Public][]string), peerOf: make(map[key.Public]string),
		contested: make(map[netip.Prefix][]string), barred: make(map[netip.Prefix]bar), hosts: make(map[string][]string),
		endpoints:  cfg.Endpoints,
		lingering:  make(map[netip.Prefix]time.Time),
		publisher:  publisher{starts: cfg.Starts, recordStale: true},
		conditions: make(map[string]map[conditionID]view.Condition), lists: make(map[listID]*list),
		want: datapath.State{
			Device: datapath.Device{Key: cfg.Key, ListenPort: cfg.PortFirst, Mark: cfg.Mark, MTU: cfg.MTU},
			Addrs:  cfg.Addresses,
			Routes: make(map[netip.Prefix]netip.Addr),
			Peers:  make(map[key.Public]datapath.Peer),
		},
		device: device{dirty: newDelta(), held: newDelta(), retry: make(map[resource]attempt), full: true},
	}
	if cfg.PortFirst == 0 {
		m.want.Device.ListenPort = cfg.Starts.Port
	}
	m.nodes[cfg.Node] = m.self
	m.byKey[pub] = []string{cfg.Node}
	return m
}

// Step takes one input in at the time now and returns what is to be done. Times never go back: where a
// clock is stepped, the caller's monotonic reading is what counts. The same inputs at the same times give
// the same outputs.
func (m *Machine) Step(now time.Time, in Input) Output {
	m.changed, m.out = false, Output{}
	switch in := in.(type) {
	case Records:
		m.records(now, in)
	case RegistryFailed:
		m.raise(now, view.RegistryDown, "", "", "the registry cannot be watched: "+in.Err.Error(),
			"forwarding goes on; the watch is retried"+advice(in.Err))
	case Remembered:
		m.remembered(now, in)
	case Endpoints:
		m.setEndpoints(in.List)
	case Named:
		m.named(in.Names)
	case Kept:
		m.kept(now, in)
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
		m.disturbed = true
		m.readSoon(maxTime(now, m.lastRead.Add(minRepair)))
	}
	m.crossBounds(now)
	m.confirmShrink(now)
	m.calmDown(now)
	m.publish(now)
	m.endLinger(now)
	m.settle(now)
	m.act(now)
	m.nameHosts()
	m.out.Wake = m.wake(now)
	if m.changed {
		m.version++
	}
	m.out.Changed = m.changed
	view.Sort(m.out.Raised)
	view.Sort(m.out.Cleared)
	slices.Sort(m.out.Joined)
	slices.Sort(m.out.Left)
	if len(m.out.Joined) > 0 && len(m.out.Left) > 0 {
		m.out.Rekeyed = both(&m.out.Joined, &m.out.Left)
	}
	return m.out
}

// advice is what err itself says can be done, to be put behind a remedy.
func advice(err error) string {
	if r, ok := errors.AsType[interface {
		error
		Remedy() string
	}](err); ok {
		return "; " + r.Remedy()
	}
	return ""
}

// settle brings the indexes and the wanted State up to date for what was touched.
func (m *Machine) settle(now time.Time) {
	for _, n := range m.unsettled {
		n.unsettled = false
		m.settleClaims(now, n)
	}
	m.unsettled = emptied(m.unsettled)
	for _, p := range m.stale {
		m.assign(p)
	}
	m.stale = m.stale[:0]
	for _, id := range m.relist {
		m.nameListed(now, id)
	}
	clear(m.relist)
	m.relist = m.relist[:0]
	for _, n := range m.rechecks {
		n.recheck = false
		if n.known && n != m.self {
			m.candidates(now, n)
		}
	}
	m.rechecks = emptied(m.rechecks)
	// A key may pass from one node to another, so all leave before any joins.
	for _, n := range m.touched {
		m.leave(n)
	}
	for _, n := range m.touched {
		m.refresh(now, n)
		n.touched = false
	}
	m.touched = emptied(m.touched)
	if m.pending() && m.flushAt.IsZero() {
		m.flushAt = now.Add(m.cfg.Window)
	}
}

// emptied keeps the memory of list but not what it points to.
func emptied(list []*node) []*node {
	clear(list)
	return list[:0]
}

func (m *Machine) unsettle(n *node) {
	if !n.unsettled {
		n.unsettled = true
		m.unsettled = append(m.unsettled, n)
	}
}

func (m *Machine) touch(n *node) {
	if !n.touched {
		n.touched = true
		m.touched = append(m.touched, n)
	}
}

// act chooses what is to be done with the device now.
func (m *Machine) act(now time.Time) {
	if m.busy() {
		return
	}
	if m.readDue(now) {
		m.reading, m.out.Read = true, true
		return
	}
	if m.planDue(now) {
		m.out.Ops = m.plan(now)
		m.applying = len(m.out.Ops) > 0
		m.tell(now, m.out.Ops)
	}
	if !m.applying && m.trusted() && m.reset && !m.pending() && !m.settled && m.have.State().Device.Exists() {
		m.settled, m.ready, m.changed, m.out.Settle = true, true, true, true
		m.found = nil
	}
}

// wake returns when time alone will give something to do.
func (m *Machine) wake(now time.Time) time.Time {
	var at time.Time
	earliest := func(t time.Time) {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	m.deviceWake(now, earliest)
	m.publishWake(earliest)
	m.shrinkWake(earliest)
	for _, t := range m.lingering {
		earliest(t)
	}
	if len(m.bounds) > 0 {
		earliest(m.bounds[0].due)
	}
	return at
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
	longer := make([]string, 0, len(list)+1)
	longer = append(append(longer, list[:i]...), id)
	return append(longer, list[i:]...)
}

// remove takes id from a sorted list without changing the one given.
func remove(list []string, id string) []string {
	i, found := slices.BinarySearch(list, id)
	if !found {
		return list
	}
	return slices.Delete(slices.Clone(list), i, i+1)
}

// onlyIn calls do for each element of the sorted list a that is not in the sorted list b.
func onlyIn(a, b []string, do func(string)) {
	for _, s := range a {
		for len(b) > 0 && b[0] < s {
			b = b[1:]
		}
		if len(b) == 0 || b[0] != s {
			do(s)
		}
	}
}

// both takes what is in both sorted lists out of them, and returns it.
func both(a, b *[]string) (common []string) {
	for _, s := range *a {
		if _, found := slices.BinarySearch(*b, s); found {
			common = append(common, s)
		}
	}
	for _, s := range common {
		*a, *b = remove(*a, s), remove(*b, s)
	}
	return common
}

// View returns what the node sees now.
func (m *Machine) View() view.View {
	v := view.View{Ready: m.ready, Version: m.version, Revision: m.revision}
	v.Self = view.Self{
		Node: m.cfg.Node, Key: m.pub, Datapath: m.host.Driver, Instead: m.host.Instead, Record: m.rec, Published: m.published,
	}
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
	for _, of := range m.conditions {
		for _, c := range of {
			v.Conditions = append(v.Conditions, c)
		}
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
