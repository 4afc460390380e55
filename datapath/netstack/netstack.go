package netstack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"

	"golang.zx2c4.com/wireguard/conn"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/wggo"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Bounds of a device's MTU. The lower one is what IPv6 asks of any link (RFC 8200 section 5), the
// upper one what fits, with WireGuard's 32 bytes, into a UDP datagram over IPv4.
const (
	MinMTU     = 1280
	MaxMTU     = 65535 - 20 - 8 - 32
	DefaultMTU = 1420 // fits an underlay of 1500 bytes, IPv6 included
)

// Options are the settings of a Net. The zero Options are good ones.
type Options struct {
	// MTU is that of a device for which none was asked: DefaultMTU where it is 0.
	MTU int

	// Logger receives what wireguard-go logs, at levels Debug and Error. nil discards it.
	Logger *slog.Logger

	// Bind makes the UDP sockets of a new device. nil: sockets of Warren's own. It is called once for each
	// device, and what it returns is given to no other.
	Bind func() conn.Bind

	// Resolve returns the addresses of a name that is dialled, in the order in which they are to be
	// tried. nil: only addresses can be dialled, as no name service is asked behind the mesh's back.
	Resolve func(ctx context.Context, host string) ([]netip.Addr, error)
}

// Net is a WireGuard device together with a network stack of its own. It is all in this process: it
// needs no privilege, and nothing on the host sees its addresses or routes. Its methods may be called
// from any goroutine.
type Net struct {
	opts  Options
	log   *slog.Logger
	link  *link
	stack *stack.Stack
	wg    *wggo.WireGuard
	pings pings

	changed chan struct{} // of Notifier; capacity 1
	done    chan struct{} // closed by Close
	tasks   sync.WaitGroup

	op  sync.Mutex // held by whatever reads or changes the device
	tun *tunDevice // of the device there was last

	mu      sync.Mutex // guards what follows, and what wg remembers; held shortly
	addrs   prefixes.Set
	local   prefixes.Set
	routes  map[netip.Prefix]netip.Addr
	peers   map[key.Public]map[netip.Prefix]struct{} // prefixes by peer on the device
	settled bool
	news    chan struct{}       // closed, and made anew, when something that a dial waits for may have changed
	pinned  map[netip.Addr]int  // addresses the stack was given, and by how many
	bound   map[uint16][]*bound // TCP listeners, by port
}

var (
	_ datapath.Datapath = (*Net)(nil)
	_ datapath.Notifier = (*Net)(nil)
	_ datapath.Settler  = (*Net)(nil)
)

// New returns a Net without a device, which comes into being with the first SetDevice. It does no
// I/O, but it starts goroutines, which Close ends.
func New(o Options) (*Net, error) {
	if o.MTU == 0 {
		o.MTU = DefaultMTU
	}
	if err := checkMTU(o.MTU); err != nil {
		return nil, fmt.Errorf("netstack: %w", err)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	n := &Net{
		opts: o, log: o.Logger, link: newLink(o.MTU),
		changed: make(chan struct{}, 1), done: make(chan struct{}),
		routes: make(map[netip.Prefix]netip.Addr), peers: make(map[key.Public]map[netip.Prefix]struct{}),
		news: make(chan struct{}), pinned: make(map[netip.Addr]int),
	}
	n.wg = wggo.New(wggo.Options{
		Mu: &n.mu, Logger: n.log, Bind: o.Bind,
		Removed: n.removed, Shook: n.announce, Ended: n.ended,
	})
	s, err := newStack(n.link)
	if err != nil {
		return nil, fmt.Errorf("netstack: %w", err)
	}
	n.stack = s
	s.SetTransportProtocolHandler(udp.ProtocolNumber, n.link.udp.takeWhole)
	n.link.allow = s.AllowICMPMessage
	n.link.answer = n.isPinned
	n.link.pings = &n.pings
	n.link.in.reopen()
	n.tasks.Go(n.link.loopback)
	return n, nil
}

func checkMTU(mtu int) error {
	if mtu < MinMTU || mtu > MaxMTU {
		return fmt.Errorf("MTU %d: outside %d to %d", mtu, MinMTU, MaxMTU)
	}
	return nil
}

var errClosed = fmt.Errorf("netstack: %w", net.ErrClosed)

func (n *Net) isClosed() bool {
	select {
	case <-n.done:
		return true
	default:
		return false
	}
}

// Close ends the device, every listener and connection, and whatever waits for one: their methods
// return net.ErrClosed. No goroutine is left when it returns. Close twice is harmless.
func (n *Net) Close() error {
	n.mu.Lock()
	first := !n.isClosed()
	if first {
		close(n.done)
	}
	n.mu.Unlock()
	n.op.Lock()
	defer n.op.Unlock()
	if !first {
		return nil
	}
	n.removeDevice()
	n.wg.Close()
	n.link.in.close()
	n.stack.Close()
	n.stack.Wait()
	n.tasks.Wait()
	return nil
}

// Changed returns a channel that receives when the device came to an end by itself.
func (n *Net) Changed() <-chan struct{} { return n.changed }

// Settle has dials to addresses that no peer has fail at once from now on, until the device is removed
// (RemoveDevice). Before, they wait.
func (n *Net) Settle() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.settled = true
	n.announce()
}

// announce wakes those who wait for a route, a peer or a handshake. mu is held.
func (n *Net) announce() {
	close(n.news)
	n.news = make(chan struct{})
}

// Apply implements datapath.Datapath.
//
// Listeners on an address that is taken away stay open, without traffic, and have it again when the
// address is back: whoever listens need not know of a prefix that wanders. Connections to it end as
// if the network were down.
func (n *Net) Apply(ctx context.Context, ops ...datapath.Op) error {
	n.op.Lock()
	defer n.op.Unlock()
	defer n.wg.GreetNew()
	return datapath.Each(ctx, ops, func(_ context.Context, op datapath.Op) error {
		if n.isClosed() {
			return errClosed
		}
		return n.do(op)
	})
}

// do carries out one op. n.op is held.
func (n *Net) do(op datapath.Op) error {
	if set, ok := op.(datapath.SetDevice); ok {
		return n.setDevice(set.Device)
	}
	if _, ok := op.(datapath.RemoveDevice); ok {
		n.removeDevice()
		return nil
	}
	if !n.exists() {
		return datapath.ErrNoDevice
	}
	switch o := op.(type) {
	case datapath.AddAddrs:
		return n.addAddrs(o.Addrs)
	case datapath.RemoveAddrs:
		n.removeAddrs(o.Addrs)
	case datapath.AddLocal:
		n.setLocal(o.Prefixes, true)
	case datapath.RemoveLocal:
		n.setLocal(o.Prefixes, false)
	case datapath.AddRoutes:
		return n.addRoutes(o.Routes)
	case datapath.RemoveRoutes:
		n.removeRoutes(o.Prefixes)
	case datapath.PutPeer:
		return n.putPeer(o)
	case datapath.DropPrefixes:
		return n.dropPrefixes(o)
	case datapath.RemovePeer:
		return n.wg.RemovePeer(o.Key)
	default:
		return fmt.Errorf("op %T: %w", op, errors.ErrUnsupported)
	}
	return nil
}

// edit changes the table and what else mu guards, in one step as seen by packets and dials. Where the
// device came to an end meanwhile, nothing is left to change. n.op is held.
func (n *Net) edit(change func(*edit)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.editHeld(change)
}

// editHeld is edit for those who hold mu.
func (n *Net) editHeld(change func(*edit)) {
	if !n.wg.Exists() {
		return
	}
	e := edit{*n.link.table.Load()}
	change(&e)
	n.link.table.Store(&e.table)
	n.announce()
}

func (n *Net) addAddrs(set prefixes.Set) error {
	for p := range set.All() {
		if !p.IsSingleIP() {
			return fmt.Errorf("address %v: not a host prefix", p)
		}
	}
	n.edit(func(e *edit) {
		for p := range set.Minus(n.addrs).All() {
			e.hop(p, func(h *hop) { h.addr = true })
			n.pin(p.Addr())
		}
		n.addrs = n.addrs.Union(set)
		e.sources(n.addrs)
	})
	return nil
}

func (n *Net) removeAddrs(set prefixes.Set) {
	n.edit(func(e *edit) {
		for p := range set.Intersect(n.addrs).All() {
			e.hop(p, func(h *hop) { h.addr = false })
			n.unpin(p.Addr())
		}
		n.addrs = n.addrs.Minus(set)
		e.sources(n.addrs)
	})
}

// sources notes the first address of each family.
func (e *edit) sources(addrs prefixes.Set) {
	e.src4, e.src6 = netip.Addr{}, netip.Addr{}
	for p := range addrs.All() {
		if p.Addr().Is4() && !e.src4.IsValid() {
			e.src4 = p.Addr()
		}
		if p.Addr().Is6() {
			e.src6 = p.Addr()
			return // IPv4 comes before IPv6
		}
	}
}

func (n *Net) setLocal(changed prefixes.Set, on bool) {
	n.edit(func(e *edit) {
		for p := range changed.All() {
			e.hop(p, func(h *hop) { h.local = on })
		}
		if on {
			n.local = n.local.Union(changed)
		} else {
			n.local = n.local.Minus(changed)
		}
	})
}

func (n *Net) addRoutes(routes []datapath.Route) error {
	for _, r := range routes {
		if r.Source.IsValid() && (r.Source.Is4() != r.Prefix.Addr().Is4() || r.Source.Zone() != "") {
			return fmt.Errorf("route %v: source address %v: another family, or with a zone", r.Prefix, r.Source)
		}
	}
	n.edit(func(e *edit) {
		for _, r := range routes {
			e.hop(r.Prefix, func(h *hop) { h.route, h.source = true, r.Source })
			n.routes[r.Prefix] = r.Source
		}
	})
	return nil
}

func (n *Net) removeRoutes(set prefixes.Set) {
	n.edit(func(e *edit) {
		for p := range set.All() {
			e.hop(p, func(h *hop) { h.route, h.source = false, netip.Addr{} })
			delete(n.routes, p)
		}
	})
}

// forget empties all but the listeners: the device is gone. mu is held.
func (n *Net) forget() {
	for p := range n.addrs.All() {
		n.unpin(p.Addr())
	}
	n.addrs, n.local = prefixes.Set{}, prefixes.Set{}
	n.routes, n.peers = make(map[netip.Prefix]netip.Addr), make(map[key.Public]map[netip.Prefix]struct{})
	n.link.table.Store(newTable())
	n.announce()
}

// pin has the stack answer for a as for an address of its own, until unpin was called as often. mu
// is held.
func (n *Net) pin(a netip.Addr) {
	if n.pinned[a]++; n.pinned[a] == 1 {
		_ = n.stack.AddProtocolAddress(nicID, tcpip.ProtocolAddress{
			Protocol: protocolOf(a), AddressWithPrefix: tcpipAddr(a).WithPrefix(),
		}, stack.AddressProperties{PEB: stack.NeverPrimaryEndpoint})
	}
}

func (n *Net) unpin(a netip.Addr) {
	if n.pinned[a]--; n.pinned[a] <= 0 {
		delete(n.pinned, a)
		_ = n.stack.RemoveAddress(nicID, tcpipAddr(a))
	}
}

func (n *Net) isPinned(a netip.Addr) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pinned[a] > 0
}
