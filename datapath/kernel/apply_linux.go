package kernel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/wgconv"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

const (
	// fresh is for how long what was read of the device is relied on, to tell a new peer from one that is there.
	fresh = 2 * time.Second
	// together is how many peers are put before the routes of the first of them: peers share a message, but a
	// packet that arrives before there is a route back is not answered.
	together = 64
)

// Apply implements datapath.Datapath.
//
// When it is done, it reads back what it wrote of WireGuard's: what the device has otherwise is an error of
// the op that was about it last.
func (k *Kernel) Apply(ctx context.Context, ops ...datapath.Op) error {
	k.op.Lock()
	defer k.op.Unlock()
	a := newApply(k, ops)
	err := hostnet.Split(datapath.Each(ctx, ops, a.do))
	a.greet()
	return errors.Join(err, a.verify(ctx))
}

// apply is one call of Apply.
type apply struct {
	k     *Kernel
	found bool // the device is there and loaded
	drops bool // prefixes are to be taken from peers

	puts   []datapath.PutPeer // all there are, in order
	after  [][]datapath.Route // by put: the routes that come between it and the next
	before []int              // by put: up to which put it may be carried out together with others
	next   int                // the put that is asked for next
	put    []error            // what became of those that were carried out
	routed map[datapath.Route]error

	touched map[key.Public]datapath.Op // the last op that worked, by peer
	device  *datapath.SetDevice        // the same for the device
	toGreet []greeting
}

type greeting struct {
	key     key.Public
	created bool // its keepalive is 0 so far
}

func newApply(k *Kernel, ops []datapath.Op) *apply {
	a := &apply{k: k, touched: make(map[key.Public]datapath.Op), routed: make(map[datapath.Route]error)}
	first := 0 // of those that may be carried out together
	end := func() {
		for i := first; i < len(a.puts); i++ {
			a.before = append(a.before, len(a.puts))
		}
		first = len(a.puts)
	}
	for _, op := range ops {
		switch o := op.(type) {
		case datapath.PutPeer:
			a.puts, a.after = append(a.puts, o), append(a.after, nil)
		case datapath.AddRoutes: // waits for its peer, but no peer waits for it
			if first < len(a.puts) {
				a.after[len(a.puts)-1] = append(a.after[len(a.puts)-1], o.Routes...)
			}
		case datapath.DropPrefixes:
			a.drops = true
			end()
		default:
			end()
		}
	}
	end()
	return a
}

func (a *apply) do(ctx context.Context, op datapath.Op) error {
	if a.k.closed {
		return errClosed
	}
	var put int
	if _, ok := op.(datapath.PutPeer); ok { // Each leaves out all that follow, or none
		put = a.next
		a.next++
	}
	switch o := op.(type) {
	case datapath.SetDevice:
		return a.setDevice(ctx, o)
	case datapath.RemoveDevice:
		return a.removeDevice(ctx)
	}
	if err := a.find(ctx); err != nil {
		return err
	}
	k := a.k
	switch o := op.(type) {
	case datapath.AddAddrs:
		return k.host.AddAddrs(ctx, o.Addrs)
	case datapath.RemoveAddrs:
		return k.host.RemoveAddrs(ctx, o.Addrs)
	case datapath.AddLocal:
		k.local = k.local.Union(o.Prefixes)
	case datapath.RemoveLocal:
		k.local = k.local.Minus(o.Prefixes)
	case datapath.AddRoutes:
		return a.addRoutes(ctx, o.Routes)
	case datapath.RemoveRoutes:
		return k.host.RemoveRoutes(ctx, o.Prefixes)
	case datapath.PutPeer:
		return a.putPeer(ctx, put)
	case datapath.DropPrefixes:
		return a.dropPrefixes(ctx, o)
	case datapath.RemovePeer:
		return a.did(o, o.Key, k.write(wgconv.Change{Key: o.Key, Remove: true})[0])
	default:
		return fmt.Errorf("op %T: %w", op, errors.ErrUnsupported)
	}
	return nil
}

// find has the model be about the device there is.
func (a *apply) find(ctx context.Context) error {
	if a.found {
		return nil
	}
	k := a.k
	l, err := k.host.Link(ctx)
	if err != nil {
		return err // ErrNoLink is ErrNoDevice
	}
	if l.Kind != kind {
		return fmt.Errorf("%w: %s is a link of kind %q", datapath.ErrNoDevice, l.Name, l.Kind)
	}
	old := time.Since(k.seen) > fresh
	if a.drops && !old {
		direct, err := k.removes(ctx)
		if err != nil {
			return err
		}
		old = !direct // see dropPrefixes
	}
	if k.model == nil || k.index != l.Index || old {
		if _, err := k.load(ctx, l.Index); err != nil {
			return err
		}
	}
	if k.model.Public().IsZero() {
		return fmt.Errorf("%w: %s has no key yet", datapath.ErrNoDevice, l.Name)
	}
	a.found = true
	return nil
}

// write tells the device some changes, and returns what became of each.
func (k *Kernel) write(changes ...wgconv.Change) []error {
	errs := make([]error, len(changes))
	msgs := wgconv.Batch(k.index, k.budget, changes...)
	k.conn.changes += len(changes)
	if k.onWrite != nil {
		k.onWrite()
	}
	data := make([][]byte, len(msgs))
	for i, m := range msgs {
		data[i] = m.Data
	}
	first := 0 // of the changes in the message
	for i, err := range k.conn.set(data...) {
		last := min(first+msgs[i].Count, len(changes)-1) // it may go on in the next message
		if err != nil {
			for j := first; j <= last; j++ {
				errs[j] = err
			}
		}
		first += msgs[i].Count
	}
	for i, err := range errs {
		switch {
		case err == nil:
		case len(changes) > 1 && !errors.Is(err, unix.ENODEV):
			// Linux stops at the first peer that it refuses, and does not say which it was.
			errs[i] = k.write(changes[i])[0]
		default:
			errs[i] = wrap("peer "+changes[i].Key.Short(), err)
		}
	}
	return errs
}

// did notes that op, about a peer, was carried out unless err says otherwise.
func (a *apply) did(op datapath.Op, peer key.Public, err error) error {
	if err != nil {
		return err
	}
	if err := a.k.model.Do(op); err != nil {
		return err
	}
	a.touched[peer] = op
	return nil
}

// addRoutes adds the routes that were not added with their peers.
func (a *apply) addRoutes(ctx context.Context, routes []datapath.Route) error {
	var left []datapath.Route
	var errs []error
	for _, r := range routes {
		if err, ok := a.routed[r]; !ok {
			left = append(left, r)
		} else if err != nil {
			errs = append(errs, &hostnet.ItemError{Prefix: r.Prefix, Err: err})
		}
		delete(a.routed, r)
	}
	if len(left) > 0 {
		errs = append(errs, a.k.host.AddRoutes(ctx, left))
	}
	return errors.Join(errs...)
}

// addTogether adds the routes behind a group of puts at once, but for those to what was not put.
func (a *apply) addTogether(ctx context.Context, i int, errs []error) {
	var not prefixes.Set
	for j, err := range errs {
		if err != nil {
			not = not.Union(a.puts[i+j].Peer.Prefixes)
		}
	}
	var routes []datapath.Route
	for j := range errs {
		for _, r := range a.after[i+j] {
			if !not.Has(r.Prefix) {
				routes = append(routes, r)
			}
		}
	}
	if len(routes) == 0 || len(errs) == 1 {
		return
	}
	failed := make(map[netip.Prefix]error)
	for p, err := range hostnet.Items(a.k.host.AddRoutes(ctx, routes)) {
		if !p.IsValid() {
			return // all of them: it is said of each when it is asked for
		}
		failed[p] = err
	}
	for _, r := range routes {
		a.routed[r] = failed[r.Prefix]
	}
}

// putPeer returns what became of the i-th PutPeer. It is carried out together with those that follow.
func (a *apply) putPeer(ctx context.Context, i int) error {
	if i < len(a.put) {
		return a.put[i]
	}
	group := a.puts[i:min(a.before[i], i+together)]
	errs := make([]error, len(group))
	a.put = append(a.put, errs...)
	errs = a.put[i:]
	k := a.k
	have := k.model.State().Peers
	created := make(map[key.Public]bool) // by this group
	var changes []wgconv.Change
	var of []int
	var greet []greeting
	for j, o := range group {
		if o.Key == k.model.Public() {
			errs[j] = fmt.Errorf("peer %v: the device's own key", o.Key.Short())
			continue
		}
		c, err := wgconv.Put(o)
		if err != nil {
			errs[j] = err
			continue
		}
		g := greeting{key: o.Key}
		p, there := have[o.Key]
		switch {
		case !o.Peer.Endpoint.IsValid() || created[o.Key]:
			g.key = key.Public{}
		case !there:
			// Linux greets a peer when its keepalive is turned on, which is to be the last of all.
			g.created, c.Keepalive, created[o.Key] = true, new(time.Duration), true
		case p.Endpoint == o.Peer.Endpoint || !k.stats[o.Key].LastHandshake.IsZero():
			g.key = key.Public{}
		}
		changes, of, greet = append(changes, c), append(of, j), append(greet, g)
	}
	if len(changes) == 0 {
		return errs[0]
	}
	for n, err := range k.write(changes...) {
		j := of[n]
		errs[j] = a.did(group[j], group[j].Key, err)
		if errs[j] == nil && !greet[n].key.IsZero() {
			a.toGreet = append(a.toGreet, greet[n])
		}
	}
	a.addTogether(ctx, i, errs)
	return errs[0]
}

// greet starts the first handshake with peers: Linux sends a keepalive, and before it a handshake, when
// the interval of one is turned on.
func (a *apply) greet() {
	if len(a.toGreet) == 0 || !a.found || a.k.closed {
		return
	}
	var now, later []greeting
	self := a.k.model.Public()
	for _, g := range a.toGreet {
		delete(a.k.waiting, g.key)
		if delete(a.k.later, g.key); self.Compare(g.key) < 0 {
			now = append(now, g)
		} else {
			later = append(later, g)
		}
	}
	a.k.greet(now...)
	if len(later) > 0 {
		a.k.greetLater(later)
	}
}

// greet greets the peers that are still there. op is held.
func (k *Kernel) greet(greetings ...greeting) {
	var changes []wgconv.Change
	set := func(k key.Public, d time.Duration) {
		changes = append(changes, wgconv.Change{Key: k, Update: true, Keepalive: &d})
	}
	for _, g := range greetings {
		p, ok := k.model.State().Peers[g.key]
		if !ok {
			continue // it is gone again
		}
		k.waiting[g.key] = waiting{time.Now(), k.waiting[g.key].greeted + 1}
		if !g.created && p.Keepalive != 0 {
			set(g.key, 0)
		}
		if p.Keepalive == 0 {
			set(g.key, datapath.MaxKeepalive)
		}
		set(g.key, p.Keepalive)
	}
	if len(changes) > 0 {
		k.write(changes...) // what did not work is seen when the device is read
	}
}

const (
	// second is how much later than the node with the lesser key the other one greets. If both greeted at the same
	// time, each would take up the other's handshake and forget its own, so that neither answer is of use; and
	// Linux, which allows one handshake in 5 s for a peer, would try again after that, on both sides at once.
	// Packets that wait for a handshake are sent after the next one: to make the peer anew would be faster,
	// and lose them.
	second = 500 * time.Millisecond
	// regreetAfter is when a peer that sent something, but with which there is no session, is greeted once more:
	// later than WireGuard would try again by itself, after 5 s and up to a third of one more.
	regreetAfter = 6 * time.Second
	// maxRegreets bounds how often: what the peer seemed to send may not have been from it.
	maxRegreets = 3
)

// waiting is a peer that was greeted and has no session yet.
type waiting struct {
	since   time.Time
	greeted int
}

// regreet greets those once more whose handshakes crossed this node's. op is held, and the device was read.
func (k *Kernel) regreet(now time.Time) {
	var again []greeting
	for peer, w := range k.waiting {
		st, ok := k.stats[peer]
		if !ok || !st.LastHandshake.IsZero() || w.greeted > maxRegreets {
			delete(k.waiting, peer)
			continue
		}
		if st.Received == 0 {
			continue // it is not there, or does not know this node yet
		}
		if now.Sub(w.since) > regreetAfter {
			again = append(again, greeting{key: peer})
		}
	}
	k.greet(again...)
}

// greetLater greets peers that are likely to greet this node before that. Meanwhile the keepalive of those
// that were created is off on the device, and compare passes over that. op is held.
func (k *Kernel) greetLater(greetings []greeting) {
	for _, g := range greetings {
		k.later[g.key] = g
	}
	time.AfterFunc(second, func() {
		k.op.Lock()
		defer k.op.Unlock()
		k.greetAll()
	})
}

// greetAll greets those whom greetLater put off. op is held.
func (k *Kernel) greetAll() {
	due := slices.Collect(maps.Values(k.later))
	clear(k.later)
	if !k.closed && k.model != nil {
		k.greet(due...)
	}
}

// dropPrefixes takes prefixes from a peer.
func (a *apply) dropPrefixes(ctx context.Context, o datapath.DropPrefixes) error {
	k := a.k
	direct, err := k.removes(ctx)
	if err != nil {
		return err
	}
	if direct {
		return a.did(o, o.Key, k.write(wgconv.Change{Key: o.Key, Without: true, Prefixes: o.Prefixes})[0])
	}
	// What another peer has must not be taken from it: find read the device for that.
	drop := k.model.State().Peers[o.Key].Prefixes.Intersect(o.Prefixes)
	if drop.IsEmpty() {
		return nil
	}
	return a.did(o, o.Key, k.discard(drop))
}

// nobody is the peer that takes over the prefixes which another peer is to lose, on a kernel without a better
// way. Nobody has its private key. To end a peer takes Linux tens of milliseconds, so it stays on the
// device, without prefixes, as long as it is used often; nobody sees it but other programs.
type nobody struct {
	key   key.Public // zero: none was made yet
	index int        // of the interface of the device that has it; 0: none has
	used  time.Time
}

// keepNobody is how long the peer is kept once it is not used.
const keepNobody = time.Second

// discard has nobody own some prefixes, on the device of k, and then not. op is held.
func (k *Kernel) discard(drop prefixes.Set) error {
	if k.nobody.key.IsZero() {
		private, err := key.NewPrivate()
		if err != nil {
			return err
		}
		k.nobody.key = private.Public()
	}
	k.nobody.index, k.nobody.used = k.index, time.Now()
	err := errors.Join(k.write(wgconv.Change{Key: k.nobody.key, Prefixes: drop}, wgconv.Change{Key: k.nobody.key, Empty: true})...)
	if err != nil {
		k.dismiss() // whatever was carried out of it, in whatever order
	}
	return err
}

// dismiss removes the peer that nobody is; what does not work is tried again later. op is held.
func (k *Kernel) dismiss() {
	if k.nobody.index == 0 || k.nobody.index != k.index || k.write(wgconv.Change{Key: k.nobody.key, Remove: true})[0] == nil {
		k.nobody.index = 0
	}
}

// verify reads the device and says which ops left it otherwise than they should.
func (a *apply) verify(ctx context.Context) error {
	k := a.k
	if k.closed || k.model == nil || len(a.touched) == 0 && a.device == nil {
		return nil
	}
	want := k.model.State()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), replyTimeout)
	defer cancel()
	got, same, err := k.compare(ctx, k.index)
	if same {
		return nil
	}
	var errs []error
	fail := func(op datapath.Op, err error) { errs = append(errs, &datapath.OpError{Op: op, Err: err}) }
	if err != nil {
		err = fmt.Errorf("reading back what was written: %w", err)
		if a.device != nil {
			fail(*a.device, err)
		}
		for _, op := range a.touched {
			fail(op, err)
		}
		return errors.Join(errs...)
	}
	if a.device != nil && a.device.Device.Key != got.Device.Key && !a.device.Device.Key.IsZero() {
		fail(*a.device, errors.New("the device has another key"))
	}
	others := len(got.Peers) != len(want.Peers)
	for peer, op := range a.touched {
		p, there := got.Peers[peer]
		q, wanted := want.Peers[peer]
		switch {
		case there && !wanted:
			fail(op, fmt.Errorf("peer %v is still on the device", peer.Short()))
		case !there && wanted:
			fail(op, fmt.Errorf("peer %v is not on the device", peer.Short()))
		case p.Prefixes != q.Prefixes:
			fail(op, fmt.Errorf("peer %v has the prefixes %v, and should have %v", peer.Short(), brief(p.Prefixes), brief(q.Prefixes)))
		case p.Preshared != q.Preshared:
			fail(op, fmt.Errorf("peer %v has another preshared key", peer.Short()))
		case p.Keepalive != q.Keepalive:
			fail(op, fmt.Errorf("peer %v has the keepalive %v, and should have %v", peer.Short(), p.Keepalive, q.Keepalive))
		}
	}
	if len(errs) == 0 || others {
		k.notify() // somebody else changed what this Apply was not about
	}
	return errors.Join(errs...)
}

// brief is a set that may be long, for an error.
func brief(s prefixes.Set) string {
	const most = 8
	if s.Len() <= most {
		return s.String()
	}
	var first []netip.Prefix
	for p := range s.All() {
		if first = append(first, p); len(first) == most {
			break
		}
	}
	return fmt.Sprintf("%v and %d more", prefixes.Must(first...), s.Len()-most)
}

func (a *apply) setDevice(ctx context.Context, o datapath.SetDevice) error {
	k, d := a.k, o.Device
	if d.MTU != 0 {
		if err := hostnet.CheckMTU(d.MTU); err != nil {
			return a.unless(ctx, err)
		}
	}
	if d.Mark != 0 {
		if _, err := k.host.Mark(d.Mark); err != nil {
			return a.unless(ctx, err)
		}
	}
	err := a.find(ctx)
	if err != nil && !errors.Is(err, datapath.ErrNoDevice) {
		return none(err)
	}
	if err != nil && d.Key.IsZero() {
		return err
	}
	if err != nil || !k.active {
		return a.newDevice(ctx, o)
	}
	return a.changeDevice(ctx, o)
}

// none says that an error left no device.
func none(err error) error {
	if errors.Is(err, datapath.ErrNoDevice) {
		return err
	}
	return fmt.Errorf("%w: %w", datapath.ErrNoDevice, err)
}

// unless is err, and ErrNoDevice unless there is one.
func (a *apply) unless(ctx context.Context, err error) error {
	if a.find(ctx) != nil {
		return none(err)
	}
	return err
}

// newDevice creates the device, or adopts one that is there.
func (a *apply) newDevice(ctx context.Context, o datapath.SetDevice) error {
	k, d := a.k, o.Device
	l, created, err := k.host.Adopt(ctx, kind, nil)
	if err != nil {
		if errors.Is(err, unix.EOPNOTSUPP) {
			err = fmt.Errorf("%w: %w", errNoModule, err)
		}
		return none(wrap("link "+k.opts.Interface, err))
	}
	fail := func(err error) error {
		if !created {
			return a.unless(ctx, err)
		}
		if back := k.host.RemoveLink(context.WithoutCancel(ctx)); back != nil {
			err = fmt.Errorf("%w; and removing what was created: %w", err, back)
		}
		k.model, a.found = nil, false
		return none(err)
	}
	k.index = l.Index
	have, err := k.load(ctx, l.Index)
	if err != nil {
		return fail(err)
	}
	if policy := k.opts.Routing == RoutingPolicy; o.Device.Mark == 0 && (policy && !k.host.Apart(have.Device.Mark) || !policy && have.Device.Mark == 0) {
		if o.Device.Mark, err = k.host.Mark(0); err != nil {
			return fail(err)
		}
	}
	if err := a.configure(o, have.Device); err != nil {
		return fail(err)
	}
	k.mtu.Ask(d.MTU, true)
	k.host.Encrypted(k.model.State().Device.Mark)
	hs, err := k.host.Read(ctx)
	if err != nil {
		return fail(err)
	}
	there := hs.Link.MTU
	if created {
		there = 0
	}
	mtu := k.mtu.Right(hs.Host, there)
	// Only now are there sockets, and maybe none for that port.
	if err := k.host.Up(ctx, mtu); err != nil {
		return fail(wrap(fmt.Sprintf("bringing %s up", l.Name), err))
	}
	k.active, a.found, a.device = true, true, &o
	what := "adopted"
	if created {
		what = "created"
	}
	if _, err := k.load(ctx, l.Index); err != nil {
		return fail(err)
	}
	have = k.model.State()
	k.log.Info("WireGuard device "+what, "interface", l.Name, "key", have.Device.Key.Public().Short(), "port", have.Device.ListenPort, "peers", len(have.Peers))
	return nil
}

// configure tells a device its port, mark and key, where it has others. The port comes first: it is
// what may fail, and then nothing else was changed.
func (a *apply) configure(o datapath.SetDevice, have datapath.Device) error {
	k, d := a.k, o.Device
	set := func(what string, d datapath.Device) error {
		return wrap(what, k.conn.set(wgconv.Device(k.index, d))[0])
	}
	if d.ListenPort != 0 && d.ListenPort != have.ListenPort {
		if err := set(fmt.Sprintf("UDP port %d", d.ListenPort), datapath.Device{ListenPort: d.ListenPort}); err != nil {
			return err
		}
	}
	if d.Mark != 0 && d.Mark != have.Mark {
		if err := set(fmt.Sprintf("mark %#x", d.Mark), datapath.Device{Mark: d.Mark}); err != nil {
			return err
		}
	}
	if !d.Key.IsZero() && d.Key != have.Key {
		if err := set("key", datapath.Device{Key: d.Key}); err != nil {
			return err
		}
	}
	d.MTU = 0
	return k.model.Do(datapath.SetDevice{Device: d})
}

func (a *apply) changeDevice(ctx context.Context, o datapath.SetDevice) error {
	k := a.k
	if err := a.configure(o, k.model.State().Device); err != nil {
		return err
	}
	a.device = &o
	k.mtu.Ask(o.Device.MTU, false)
	if o.Device.MTU != 0 {
		l, err := k.host.Link(ctx)
		if err == nil && l.MTU != o.Device.MTU {
			err = k.host.Up(ctx, o.Device.MTU)
		}
		if err != nil {
			return fmt.Errorf("MTU %d: %w", o.Device.MTU, err)
		}
	}
	return nil
}

func (a *apply) removeDevice(ctx context.Context) error {
	k := a.k
	err := k.host.Remove(ctx)
	if errors.Is(err, datapath.ErrNoDevice) {
		err = nil
	}
	if err != nil {
		return wrap("removing "+k.opts.Interface, err)
	}
	k.active, k.model, k.local, k.nobody.index = false, nil, prefixes.Set{}, 0
	clear(k.waiting)
	clear(k.later)
	a.found, a.device, a.toGreet = false, nil, nil
	clear(a.touched)
	return nil
}
