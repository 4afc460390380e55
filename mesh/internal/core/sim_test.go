package core_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// tb is what testing.T and rapid.T have in common.
type tb interface {
	Helper()
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
	Logf(format string, args ...any)
}

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

// privateKey returns the key that a name stands for.
func privateKey(name string) key.Private {
	sum := sha256.Sum256([]byte("core test " + name))
	k, err := key.PrivateFromBytes(sum[:])
	if err != nil {
		panic(err)
	}
	return k
}

var publicKeys = map[string]key.Public{}

func publicKey(name string) key.Public {
	k, ok := publicKeys[name]
	if !ok {
		k = privateKey(name).Public()
		publicKeys[name] = k
	}
	return k
}

func set(ps ...string) prefixes.Set { return prefixes.MustParse(ps...) }

func endpoint(s string) record.Endpoint {
	e, err := record.ParseEndpoint(s)
	if err != nil {
		panic(err)
	}
	return e
}

// rec is the record of a node whose key is that of its name. Each of what is its endpoint, if it parses
// as one, or a prefix.
func rec(id string, what ...string) record.Record {
	r := record.Record{Version: record.Version, ID: id, Key: publicKey(id), Instance: "0a", Epoch: 1, Generation: 1, Sequence: 1}
	for _, s := range what {
		if e, err := record.ParseEndpoint(s); err == nil {
			r.Endpoints = append(r.Endpoints, e)
		} else {
			r.Prefixes = r.Prefixes.Union(set(s))
		}
	}
	return r
}

func withKey(r record.Record, name string) record.Record {
	r.Key = publicKey(name)
	return r
}

func good(r record.Record) core.Opened {
	return core.Opened{Node: r.ID, Opened: identity.Opened{Record: r}}
}

func bad(id string, err error) core.Opened { return core.Opened{Node: id, Err: err} }

func put(os ...core.Opened) core.Records   { return core.Records{Put: os} }
func reset(os ...core.Opened) core.Records { return core.Records{Reset: true, Put: os} }
func deleted(ids ...string) core.Records   { return core.Records{Deleted: ids} }

// announce is what a node that announces these prefixes tells the machine.
func announce(ps ...string) core.Announced {
	table := prefixes.NewTable()
	var as []prefixes.Announcement
	for p := range set(ps...).All() {
		as = append(as, prefixes.Announcement{Prefix: p})
	}
	if err := table.Announce("test", as...); err != nil {
		panic(err)
	}
	s, _ := table.Current()
	return core.Announced{Snapshot: s}
}

// fakeDevice is a device on a host, that fails when it is told to.
type fakeDevice struct {
	model    datapath.Model
	host     datapath.Host
	problems []datapath.Problem
	stats    map[key.Public]datapath.Stats
	fail     func(datapath.Op) error // nil: nothing
	whole    error                   // of Apply as a whole, which then does nothing
	unread   error                   // of Read
	taken    map[uint16]bool         // ports of others
	after    func(datapath.Op)       // called after each op that was tried
	tries    int                     // of reading, and
	reads    int                     // those that succeeded
	seen     datapath.Host           // at the last reading
}

func newDevice() *fakeDevice {
	return &fakeDevice{
		host:  datapath.Host{IPv4: true, IPv6: true, Underlay: datapath.UnderlaySeparate},
		stats: map[key.Public]datapath.Stats{}, taken: map[uint16]bool{},
	}
}

func (d *fakeDevice) read() (datapath.State, error) {
	d.tries++
	if d.unread != nil {
		return datapath.State{}, d.unread
	}
	d.reads++
	d.seen = d.host
	return d.state(), nil
}

func (d *fakeDevice) state() datapath.State {
	s := d.model.State().Clone()
	s.Host, s.Problems = d.host, slices.Clone(d.problems)
	s.Stats = make(map[key.Public]datapath.Stats)
	for k := range s.Peers {
		s.Stats[k] = d.stats[k]
	}
	return s
}

func (d *fakeDevice) apply(ops []datapath.Op) error {
	if d.whole != nil {
		return d.whole
	}
	return datapath.Each(context.Background(), ops, func(_ context.Context, op datapath.Op) error {
		err := d.do(op)
		if d.after != nil {
			d.after(op)
		}
		return err
	})
}

func (d *fakeDevice) do(op datapath.Op) error {
	exists := d.model.State().Device.Exists()
	fails := func(err error) error {
		if _, ok := op.(datapath.SetDevice); ok && !exists {
			return fmt.Errorf("%w: %w", err, datapath.ErrNoDevice)
		}
		return err
	}
	if d.fail != nil {
		if err := d.fail(op); err != nil {
			return fails(err)
		}
	}
	switch o := op.(type) {
	case datapath.SetDevice:
		if d.taken[o.Device.ListenPort] {
			return fails(datapath.ErrPortInUse)
		}
		if !exists {
			d.stats = map[key.Public]datapath.Stats{}
			if o.Device.ListenPort == 0 {
				o.Device.ListenPort = 40000
			}
			if o.Device.MTU == 0 {
				o.Device.MTU = 1420
			}
		}
		op = o
	case datapath.RemovePeer:
		delete(d.stats, o.Key)
	}
	return d.model.Do(op)
}

// vanish is someone else removing the device.
func (d *fakeDevice) vanish() { d.model = datapath.Model{} }

// edit is someone else changing the device.
func (d *fakeDevice) edit(f func(*datapath.State)) {
	s := d.model.State().Clone()
	f(&s)
	d.model = *datapath.NewModel(s)
}

// hears has the named key's session established now; sends has packets go out to it that nobody answers.
func (d *fakeDevice) hears(k key.Public, at time.Time) {
	s := d.stats[k]
	s.LastHandshake, s.Received, s.Sent = at, s.Received+92, s.Sent+148
	d.stats[k] = s
}

func (d *fakeDevice) sends(k key.Public, bytes uint64) {
	s := d.stats[k]
	s.Sent += bytes
	d.stats[k] = s
}

// sim runs a machine against a device as the mesh does, with its own clock. It checks at every step what
// has to hold whatever happens.
type sim struct {
	t   tb
	cfg core.Config
	m   *core.Machine
	dev *fakeDevice
	now time.Time

	lag    bool         // leave reads and ops unanswered, as if the device were slow
	todo   *core.Output // what is still to be answered
	wake   time.Time
	reset  bool  // the machine has had a Reset
	bare   bool  // the registry has lost this node's record
	unput  error // of the registry
	cycles int   // of reading and applying at one instant

	// What happened, until it is taken.
	ops      []datapath.Op
	raised   []view.Condition
	cleared  []view.Condition
	joined   []string
	left     []string
	puts     []record.Record
	starts   []core.Starts
	settles  int
	relists  int
	renewed  []string
	log      []string
	names    map[key.Public]string
	planned  func(ops []datapath.Op) // called before ops are applied
	lastPut  *record.Record
	putTimes []time.Time
}

func config(node string) core.Config {
	return core.Config{
		Node: node, Key: privateKey(node), Instance: "ff", Endpoints: []record.Endpoint{record.EndpointFrom(netip.MustParseAddrPort("198.51.100.1:0"))},
		Window: 10 * time.Millisecond, Audit: 15 * time.Second, Linger: 3 * time.Second,
	}
}

// newSim returns a node called m with a device that does not exist yet.
func newSim(t tb, change ...func(*core.Config)) *sim {
	return simOn(t, newDevice(), change...)
}

func simOn(t tb, dev *fakeDevice, change ...func(*core.Config)) *sim {
	cfg := config("m")
	for _, f := range change {
		f(&cfg)
	}
	s := &sim{t: t, cfg: cfg, m: core.New(cfg), dev: dev, now: epoch, names: map[key.Public]string{}}
	for _, n := range []string{"a", "b", "c", "d", "m", "x", "y", "z"} {
		s.names[publicKey(n)] = n
	}
	return s
}

// up is a node that is up, with the given records known: they are its first Reset.
func up(t tb, records ...record.Record) *sim {
	s := newSim(t)
	s.start(records...)
	return s
}

func (s *sim) start(records ...record.Record) {
	s.t.Helper()
	s.step(announce())
	in := core.Records{Reset: true}
	for _, r := range records {
		in.Put = append(in.Put, good(r))
	}
	s.step(in)
	s.run(50 * time.Millisecond)
	if !s.m.View().Ready {
		s.t.Fatalf("not ready: %v", s.m.View().Conditions)
	}
	s.take()
}

// take returns the ops since the last time, and forgets everything else.
func (s *sim) take() []datapath.Op {
	ops := s.ops
	s.ops, s.raised, s.cleared, s.joined, s.left, s.puts, s.starts, s.log = nil, nil, nil, nil, nil, nil, nil, nil
	return ops
}

func (s *sim) step(in core.Input) {
	s.t.Helper()
	if r, ok := in.(core.Records); ok && r.Reset {
		s.reset = true
		if self := s.m.View().Self; self.Published && !s.bare && !slices.ContainsFunc(r.Put, func(o core.Opened) bool { return o.Node == s.cfg.Node }) {
			r.Put = append(slices.Clip(r.Put), good(self.Record))
			in = r
		}
	}
	s.cycles = 0
	s.handle(s.m.Step(s.now, in))
}

// most is how often reading and applying may follow one input without any time passing.
const most = 12

func (s *sim) handle(out core.Output) {
	s.t.Helper()
	s.raised = append(s.raised, out.Raised...)
	s.cleared = append(s.cleared, out.Cleared...)
	s.joined = append(s.joined, out.Joined...)
	s.left = append(s.left, out.Left...)
	s.note(out)
	if out.Starts != nil {
		s.starts = append(s.starts, *out.Starts)
	}
	if out.Settle {
		s.settles++
	}
	if out.Relist {
		s.relists++
	}
	for _, host := range out.Renew {
		if !slices.Contains(s.renewed, host) {
			s.renewed = append(s.renewed, host)
		}
	}
	if out.Publish != nil {
		s.puts = append(s.puts, *out.Publish)
		s.putTimes = append(s.putTimes, s.now)
		s.lastPut = out.Publish
	}
	s.wake = out.Wake
	if out.Read && len(out.Ops) > 0 {
		s.t.Fatalf("a reading and ops at once")
	}
	if out.Read || len(out.Ops) > 0 {
		if s.todo != nil {
			s.t.Fatalf("asked for something before the last answer")
		}
		if s.planned != nil && len(out.Ops) > 0 {
			s.planned(out.Ops)
		}
		s.todo = &out
		if s.cycles++; s.cycles > most+int(s.cfg.PortLast-s.cfg.PortFirst) {
			s.t.Fatalf("the device is read and written in a circle, lastly %v", out.Ops)
		}
	} else if s.todo == nil && !out.Wake.IsZero() && !out.Wake.After(s.now) {
		s.t.Fatalf("wakes at once, %v after %v", out.Wake, s.now)
	}
	if !s.lag {
		s.answer()
	}
	if out.Publish != nil && !s.lag {
		s.answerPut()
	}
}

// answer does what the machine waits for.
func (s *sim) answer() {
	s.t.Helper()
	out := s.todo
	if out == nil {
		return
	}
	s.todo = nil
	if out.Read {
		st, err := s.dev.read()
		s.handle(s.m.Step(s.now, core.Reading{State: st, Err: err}))
		return
	}
	s.ops = append(s.ops, out.Ops...)
	err := s.dev.apply(out.Ops)
	s.handle(s.m.Step(s.now, core.Applied{Ops: out.Ops, Err: err}))
}

// answerPut has the registry take the newest record, or refuse it.
func (s *sim) answerPut() {
	s.t.Helper()
	if s.lastPut == nil {
		return
	}
	r := *s.lastPut
	if s.unput == nil {
		s.lastPut = nil
	}
	s.step(core.Published{Record: r, Err: s.unput})
}

// run lets time pass, waking the machine when it asked for it.
func (s *sim) run(d time.Duration) {
	s.t.Helper()
	for end := s.now.Add(d); ; {
		if s.wake.IsZero() || s.wake.After(end) {
			s.now = end
			return
		}
		s.now = s.wake
		s.step(core.Tick{})
	}
}

// note writes what out says to the log, for scenarios.
func (s *sim) note(out core.Output) {
	say := func(format string, a ...any) { s.log = append(s.log, s.named(fmt.Sprintf(format, a...))) }
	for _, id := range out.Rekeyed {
		say("rekeyed %s", id)
	}
	for _, id := range out.Joined {
		say("joined %s", id)
	}
	for _, id := range out.Left {
		say("left %s", id)
	}
	for _, c := range out.Raised {
		say("raised %s", oneLine(c))
	}
	for _, c := range out.Cleared {
		say("cleared %s", strings.TrimSpace(string(c.Kind)+" "+c.Node+" "+c.Subject))
	}
	for _, op := range out.Ops {
		say("apply %v", op)
	}
	if r := out.Publish; r != nil {
		say("publish epoch=%d generation=%d sequence=%d endpoints=%v reach=%v", r.Epoch, r.Generation, r.Sequence, r.Endpoints, r.Reachable())
	}
}

func oneLine(c view.Condition) string { return strings.ReplaceAll(c.String(), "\n", "; ") }

// named puts names in place of keys.
func (s *sim) named(text string) string {
	for k, n := range s.names {
		text = strings.ReplaceAll(text, k.String(), n)
		text = strings.ReplaceAll(text, k.Short(), n)
	}
	return text
}

// What the tests ask.

func (s *sim) peer(name string) (datapath.Peer, bool) {
	p, ok := s.dev.model.State().Peers[publicKey(name)]
	return p, ok
}

// condition returns the one condition of a kind about a node and a subject, which may be empty for any.
func (s *sim) condition(kind view.Kind, node, subject string) (view.Condition, bool) {
	for c := range s.m.View().Find(kind) {
		if c.Node == node && (subject == "" || c.Subject == subject) {
			return c, true
		}
	}
	return view.Condition{}, false
}

func (s *sim) wantCondition(kind view.Kind, node, subject string) {
	s.t.Helper()
	if _, ok := s.condition(kind, node, subject); !ok {
		s.t.Errorf("no condition %s about %s %s; there are %v", kind, node, subject, s.m.View().Conditions)
	}
}

func (s *sim) wantNoCondition(kind view.Kind, node, subject string) {
	s.t.Helper()
	if c, ok := s.condition(kind, node, subject); ok {
		s.t.Errorf("there is the condition %v", c)
	}
}

// wantPeers checks who has what on the device: "a 10.1.0.0/16 10.2.0.0/16".
func (s *sim) wantPeers(want ...string) {
	s.t.Helper()
	if got := s.peers(); !slices.Equal(got, want) {
		s.t.Errorf("the device has peers %q, want %q", got, want)
	}
	routes := prefixes.Set{}.With(slices.Collect(maps.Keys(s.dev.model.State().Routes))...)
	var owned prefixes.Set
	for _, p := range s.dev.model.State().Peers {
		owned = owned.Union(p.Prefixes)
	}
	if routes != owned {
		s.t.Errorf("the device routes %v, and its peers have %v", routes, owned)
	}
}

func (s *sim) peers() []string {
	var got []string
	for k, p := range s.dev.model.State().Peers {
		line := s.named(k.String())
		for q := range p.Prefixes.All() {
			line += " " + q.String()
		}
		got = append(got, line)
	}
	slices.Sort(got)
	return got
}

// wantOps checks the ops since the last time, written as op strings with names for keys.
func (s *sim) wantOps(want ...string) {
	s.t.Helper()
	var got []string
	for _, op := range s.take() {
		got = append(got, s.named(op.String()))
	}
	if !slices.Equal(got, want) {
		s.t.Errorf("ops\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

var errTest = errors.New("broken for the test")
