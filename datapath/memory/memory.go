package memory

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
)

// Options are the settings of a Device. The zero Options are a device on a network of its own.
type Options struct {
	// Network joins the device to others. nil: it is alone.
	Network *Network
	// Addrs are the underlay addresses at which the device listens. Default: 127.0.0.1.
	Addrs []netip.Addr
	// Host is what Read reports of the host. The zero Host stands for one with both families and an
	// underlay of its own, whose Driver is "memory".
	Host datapath.Host
}

// Device is a datapath.Datapath in memory. All methods are safe for concurrent use.
type Device struct {
	net      *Network // its mutex guards everything below
	addrs    []netip.Addr
	host     datapath.Host
	problems []datapath.Problem
	model    datapath.Model
	stats    map[key.Public]datapath.Stats
	changed  chan struct{}
	closed   bool
	settled  bool
	log      []datapath.Op
	writes   int
	fault    func(datapath.Op) error
	delay    time.Duration
}

var (
	_ datapath.Datapath = (*Device)(nil)
	_ datapath.Notifier = (*Device)(nil)
	_ datapath.Settler  = (*Device)(nil)
)

// New returns a device that does not exist yet: the first SetDevice makes it.
func New(o Options) *Device {
	if o.Network == nil {
		o.Network = NewNetwork()
	}
	if len(o.Addrs) == 0 {
		o.Addrs = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	}
	if o.Host == (datapath.Host{}) {
		o.Host = datapath.Host{IPv4: true, IPv6: true, Underlay: datapath.UnderlaySeparate, Driver: "memory"}
	}
	return &Device{
		net: o.Network, addrs: slices.Clone(o.Addrs), host: o.Host,
		stats: make(map[key.Public]datapath.Stats), changed: make(chan struct{}, 1),
	}
}

// Read implements datapath.Datapath.
func (d *Device) Read(ctx context.Context) (datapath.State, error) {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	if err := d.open(ctx); err != nil {
		return datapath.State{}, err
	}
	s := d.model.State().Clone()
	s.Host, s.Problems = d.host, slices.Clone(d.problems)
	s.Stats = make(map[key.Public]datapath.Stats, len(s.Peers))
	for k := range s.Peers {
		s.Stats[k] = d.stats[k]
	}
	return s, nil
}

// Apply implements datapath.Datapath.
func (d *Device) Apply(ctx context.Context, ops ...datapath.Op) error {
	return datapath.Each(ctx, ops, func(ctx context.Context, op datapath.Op) error {
		d.net.mu.Lock()
		delay := d.delay
		d.net.mu.Unlock()
		if delay > 0 {
			select {
			case <-time.After(delay):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		d.net.mu.Lock()
		defer d.net.mu.Unlock()
		if err := d.open(ctx); err != nil {
			return err
		}
		d.log = append(d.log, op)
		if d.fault != nil {
			if err := d.fault(op); err != nil {
				return err
			}
		}
		return d.do(op)
	})
}

func (d *Device) open(ctx context.Context) error {
	if d.closed {
		return fmt.Errorf("memory device: %w", net.ErrClosed)
	}
	return ctx.Err()
}

func (d *Device) do(op datapath.Op) error {
	before := d.model.State()
	switch o := op.(type) {
	case datapath.SetDevice:
		if !before.Device.Exists() && o.Device.Key.IsZero() {
			return datapath.ErrNoDevice
		}
		port, err := d.net.bind(d, before.Device, o.Device.ListenPort)
		if err != nil {
			if !before.Device.Exists() {
				err = fmt.Errorf("%w: %w", err, datapath.ErrNoDevice)
			}
			return err
		}
		o.Device.ListenPort = port
		if o.Device.MTU == 0 && !before.Device.Exists() {
			o.Device.MTU = 1420
		}
		if !o.Device.Key.IsZero() && o.Device.Key != before.Device.Key {
			d.stats = make(map[key.Public]datapath.Stats) // sessions end with the key
		}
		op = o
	case datapath.RemoveDevice:
		d.net.unbind(d)
		d.stats = make(map[key.Public]datapath.Stats)
	case datapath.RemovePeer:
		delete(d.stats, o.Key)
	}
	put, isPut := op.(datapath.PutPeer)
	old, existed := before.Peers[put.Key]
	if err := d.model.Do(op); err != nil {
		return err
	}
	d.writes++
	if isPut && put.Peer.Endpoint.IsValid() && (!existed || d.stats[put.Key].LastHandshake.IsZero() && put.Peer.Endpoint != old.Endpoint) {
		d.net.initiate(d, put.Key)
	}
	return nil
}

// Close implements datapath.Datapath. The device lets go of its port.
func (d *Device) Close() error {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	if !d.closed {
		d.closed = true
		d.net.unbind(d)
	}
	return nil
}

// Changed implements datapath.Notifier.
func (d *Device) Changed() <-chan struct{} { return d.changed }

// Settle implements datapath.Settler.
func (d *Device) Settle() {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	d.settled = true
}

// Settled reports whether Settle was called.
func (d *Device) Settled() bool {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	return d.settled
}

// Fault has every op that comes to be tried from now on asked of f first; its error is the op's. nil
// ends that. f must not call the device.
func (d *Device) Fault(f func(datapath.Op) error) {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	d.fault = f
}

// FailOp makes the n-th op from now on fail with err, once; n counts from 1.
func (d *Device) FailOp(n int, err error) {
	d.Fault(func(datapath.Op) error {
		if n--; n == 0 {
			return err
		}
		return nil
	})
}

// Slow makes every op from now on take delay before it begins.
func (d *Device) Slow(delay time.Duration) {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	d.delay = delay
}

// Drift changes the device as someone else would: without Apply. Changed reports it.
func (d *Device) Drift(ops ...datapath.Op) error {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	for _, op := range ops {
		if err := d.do(op); err != nil {
			return fmt.Errorf("%v: %w", op, err)
		}
		d.writes--
	}
	d.notify()
	return nil
}

// SetHost changes what Read reports of the host. Changed reports it.
func (d *Device) SetHost(h datapath.Host) {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	d.host = h
	d.notify()
}

// SetProblems replaces what Read reports to be wrong around the device; none ends it. Changed reports it.
func (d *Device) SetProblems(ps ...datapath.Problem) {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	d.problems = slices.Clone(ps)
	d.notify()
}

func (d *Device) notify() {
	select {
	case d.changed <- struct{}{}:
	default:
	}
}

// Writes returns how many ops took effect through Apply since the device was made.
func (d *Device) Writes() int {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	return d.writes
}

// TakeLog returns the ops tried since the last call, and forgets them.
func (d *Device) TakeLog() []datapath.Op {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	log := d.log
	d.log = nil
	return log
}

// Send is a packet for addr: it goes to the peer with the longest prefix that has it, and reports which
// and whether it arrived. Without a session it starts a handshake, and arrives if that is answered.
func (d *Device) Send(addr netip.Addr) (to key.Public, arrived bool) {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	best := -1
	for k, p := range d.model.State().Peers {
		if q, ok := p.Prefixes.Lookup(addr); ok && q.Bits() > best {
			best, to = q.Bits(), k
		}
	}
	if best < 0 {
		return to, false
	}
	return to, d.net.send(d, to)
}

// Network is what devices in one process reach each other through. Its zero value is not usable.
type Network struct {
	mu    sync.Mutex
	bound map[netip.AddrPort]*Device
	next  uint16
	drop  func(from, to netip.AddrPort) bool
}

// NewNetwork returns a network with no devices.
func NewNetwork() *Network {
	return &Network{bound: make(map[netip.AddrPort]*Device), next: 49152}
}

// Drop has every packet asked of f, with the endpoints it is sent from and to; those for which f
// reports true are lost. nil loses none. f must not call a device.
func (n *Network) Drop(f func(from, to netip.AddrPort) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.drop = f
}

// bind gives d its port at all its addresses: port, or with 0 the one it has, or one of n's choice.
func (n *Network) bind(d *Device, have datapath.Device, port uint16) (uint16, error) {
	if port == 0 {
		port = have.ListenPort
	}
	if port == 0 {
		for n.taken(d, n.next) {
			n.next = max(n.next+1, 49152)
		}
		port = n.next
		n.next = max(n.next+1, 49152)
	}
	if n.taken(d, port) {
		return 0, fmt.Errorf("listen port %d: %w", port, datapath.ErrPortInUse)
	}
	n.unbind(d)
	for _, a := range d.addrs {
		n.bound[netip.AddrPortFrom(a, port)] = d
	}
	return port, nil
}

func (n *Network) taken(d *Device, port uint16) bool {
	return slices.ContainsFunc(d.addrs, func(a netip.Addr) bool {
		o, ok := n.bound[netip.AddrPortFrom(a, port)]
		return ok && o != d
	})
}

func (n *Network) unbind(d *Device) {
	for _, a := range d.addrs {
		ap := netip.AddrPortFrom(a, d.model.State().Device.ListenPort)
		if n.bound[ap] == d {
			delete(n.bound, ap)
		}
	}
}

// Occupy takes a port at an address as a foreign program would, until free is called.
func (n *Network) Occupy(at netip.AddrPort) (free func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	foreign := &Device{net: n}
	n.bound[at] = foreign
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.bound[at] == foreign {
			delete(n.bound, at)
		}
	}
}

const (
	initiationSize = 148 // bytes; sizes of WireGuard's messages
	responseSize   = 92
	dataSize       = 96
)

// initiate sends a handshake initiation from d to its peer k, and reports whether it was answered.
func (n *Network) initiate(d *Device, k key.Public) bool {
	s := d.model.State()
	p := s.Peers[k]
	if !p.Endpoint.IsValid() {
		return false
	}
	d.count(k, 0, initiationSize)
	from, ok := d.source(p.Endpoint)
	if !ok || n.drop != nil && n.drop(from, p.Endpoint) {
		return false
	}
	o := n.bound[p.Endpoint]
	if o == nil || !o.model.State().Device.Exists() || o.model.Public() != k {
		return false
	}
	me := d.model.Public()
	q, ok := o.model.State().Peers[me]
	if !ok || q.Preshared != p.Preshared {
		return false
	}
	o.count(me, initiationSize, responseSize)
	q.Endpoint = from // it roams before it knows whether its answer arrives
	o.model.State().Peers[me] = q
	if n.drop != nil && n.drop(p.Endpoint, from) {
		return false
	}
	d.count(k, responseSize, 0)
	now := time.Now()
	d.shook(k, now)
	o.shook(me, now)
	return true
}

func (n *Network) send(d *Device, k key.Public) bool {
	if d.stats[k].LastHandshake.IsZero() && !n.initiate(d, k) {
		return false
	}
	s := d.model.State()
	p := s.Peers[k]
	me := d.model.Public()
	from, ok := d.source(p.Endpoint)
	d.count(k, 0, dataSize)
	o := n.bound[p.Endpoint]
	if !ok || o == nil || n.drop != nil && n.drop(from, p.Endpoint) || o.stats[me].LastHandshake.IsZero() {
		return false
	}
	if o.model.Public() != k {
		return false
	}
	o.count(me, dataSize, 0)
	q := o.model.State().Peers[me]
	q.Endpoint = from
	o.model.State().Peers[me] = q
	return true
}

// source returns where a packet of d to endpoint to comes from.
func (d *Device) source(to netip.AddrPort) (netip.AddrPort, bool) {
	for _, a := range d.addrs {
		if a.Is4() == to.Addr().Is4() {
			return netip.AddrPortFrom(a, d.model.State().Device.ListenPort), true
		}
	}
	return netip.AddrPort{}, false
}

func (d *Device) count(k key.Public, received, sent uint64) {
	s := d.stats[k]
	s.Received += received
	s.Sent += sent
	d.stats[k] = s
}

func (d *Device) shook(k key.Public, now time.Time) {
	s := d.stats[k]
	s.LastHandshake = now
	d.stats[k] = s
}

// Stats returns what the device counted for each peer.
func (d *Device) Stats() map[key.Public]datapath.Stats {
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	return maps.Clone(d.stats)
}
