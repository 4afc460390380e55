package netstack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/uapi"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// wireguard is a device that exists.
type wireguard struct {
	*device.Device
	tun    *tunDevice
	bind   *bind
	public key.Public
	mac1   device.CookieChecker // by public
	ended  chan struct{}        // closed when it is ended on purpose
}

// alive reports whether the device is there. One that ended still says yes to everything it is told.
func (w *wireguard) alive() bool {
	select {
	case <-w.Wait():
		return false
	default:
		return true
	}
}

// set tells the device something.
func (w *wireguard) set(text string) error {
	err := w.IpcSet(text)
	if !w.alive() {
		return datapath.ErrNoDevice
	}
	return err
}

// state reads the device.
func (w *wireguard) state() (datapath.State, error) {
	text, err := w.IpcGet()
	if err != nil {
		return datapath.State{}, fmt.Errorf("reading the device: %w", err)
	}
	if !w.alive() {
		return datapath.State{}, datapath.ErrNoDevice
	}
	s, err := uapi.Parse(text)
	if err != nil {
		return datapath.State{}, fmt.Errorf("reading the device: %w", err)
	}
	return s, nil
}

// device returns the device that exists.
func (n *Net) device() (*wireguard, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.wg == nil {
		return nil, datapath.ErrNoDevice
	}
	return n.wg, nil
}

// Read implements datapath.Datapath. A device that came to an end by itself is none.
func (n *Net) Read(ctx context.Context) (datapath.State, error) {
	n.op.Lock()
	defer n.op.Unlock()
	if n.isClosed() {
		return datapath.State{}, errClosed
	}
	if err := ctx.Err(); err != nil {
		return datapath.State{}, err
	}
	wg, err := n.device()
	if err != nil {
		return datapath.State{Host: n.host(nil)}, nil
	}
	n.mu.Lock()
	born := n.born
	n.mu.Unlock()
	s, err := wg.state()
	if errors.Is(err, datapath.ErrNoDevice) {
		return datapath.State{Host: n.host(nil)}, nil
	}
	if err != nil {
		return datapath.State{}, err
	}
	s.Device.MTU = int(n.link.MTU())
	s.Host = n.host(wg)
	n.mu.Lock()
	defer n.mu.Unlock()
	s.Addrs, s.Local, s.Routes = n.addrs, n.local, maps.Clone(n.routes)
	some := false
	for k, st := range s.Stats {
		some = !st.LastHandshake.IsZero() && n.shook(k, st.LastHandshake, born) || some
	}
	if some {
		n.announce()
	}
	return s, nil
}

// host returns what is around a device; of one that does not exist yet, what it will find.
func (n *Net) host(wg *wireguard) datapath.Host {
	h := datapath.Host{Underlay: datapath.UnderlaySeparate, UnderlayMTU: underlayMTU()}
	switch {
	case wg != nil:
		h.IPv4, h.IPv6 = wg.bind.families()
	case n.opts.Bind != nil:
		h.IPv4, h.IPv6 = true, true
	default:
		h.IPv4, h.IPv6 = canBind("udp4"), canBind("udp6")
	}
	return h
}

func canBind(network string) bool {
	c, err := net.ListenUDP(network, nil)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// underlayMTU returns the MTU of the interface that leads to the rest of the world; 0 where none does.
func underlayMTU() int {
	for _, to := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} { // RFC 5737, RFC 3849
		c, err := net.Dial("udp", to) // sends nothing, but has the host choose a source address
		if err != nil {
			continue
		}
		from := c.LocalAddr().(*net.UDPAddr).IP
		c.Close()
		ifs, err := net.Interfaces()
		if err != nil {
			return 0
		}
		for _, i := range ifs {
			as, _ := i.Addrs()
			for _, a := range as {
				if p, ok := a.(*net.IPNet); ok && p.IP.Equal(from) {
					return i.MTU
				}
			}
		}
	}
	return 0
}

func (n *Net) setDevice(d datapath.Device) error {
	if d.MTU != 0 {
		if err := checkMTU(d.MTU); err != nil {
			return err
		}
	}
	n.mu.Lock()
	wg := n.wg
	n.mu.Unlock()
	if wg == nil {
		if d.Key.IsZero() {
			return datapath.ErrNoDevice
		}
		return n.newDevice(d)
	}
	return n.changeDevice(wg, d)
}

func (n *Net) newDevice(d datapath.Device) error {
	none := func(err error) error { return fmt.Errorf("%w: %w", datapath.ErrNoDevice, err) }
	if n.opts.Bind == nil && d.ListenPort != 0 {
		if err := probe(d.ListenPort); err != nil {
			return none(inUse(d.ListenPort, err))
		}
	}
	if d.MTU == 0 {
		d.MTU = n.opts.MTU
	}
	n.link.SetMTU(uint32(d.MTU))
	inner := conn.NewDefaultBind
	if n.opts.Bind != nil {
		inner = n.opts.Bind
	}
	w := &wireguard{tun: newTUN(n.link), public: d.Key.Public(), ended: make(chan struct{})}
	w.mac1.Init(w.public.Bytes())
	w.bind = &bind{Bind: inner(), watch: &n.watch, meant: w.mac1.CheckMAC1, crosses: n.crosses, answers: n.answers, yields: n.yields}
	w.Device = device.NewDevice(w.tun, w.bind, n.logger())
	mark := d.Mark
	d.Mark = 0
	err := w.set(uapi.Device(d))
	if err == nil {
		err = w.Up()
	}
	if err == nil && !w.alive() {
		err = datapath.ErrNoDevice
	}
	if err != nil {
		w.Close()
		if portInUse(err) {
			err = inUse(d.ListenPort, err)
		}
		return none(err)
	}
	n.mu.Lock()
	n.wg = w
	n.announce()
	n.mu.Unlock()
	n.tasks.Go(func() { n.attend(w) })
	// A device without the mark, which needs privilege, is better than none.
	return setMark(w, mark, 0)
}

// setMark marks the encrypted packets of a device whose mark is another one; 0 leaves that.
func setMark(w *wireguard, mark, have uint32) error {
	if mark == 0 || mark == have {
		return nil
	}
	if err := w.set(uapi.Mark(mark)); err != nil {
		// The device would report the mark although no socket has it.
		return errors.Join(fmt.Errorf("mark %d: %w", mark, err), w.set(uapi.Mark(have)))
	}
	return nil
}

// attend waits for the end of a device and cleans up where nobody meant to end it.
func (n *Net) attend(w *wireguard) {
	select {
	case <-w.ended:
		return
	case <-w.Wait():
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.wg != w {
		return
	}
	n.wg = nil
	n.forget()
	n.log.Error("the WireGuard device came to an end by itself")
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// removeDevice ends the device, if there is one, and with it what Settle said of it. n.op is held.
func (n *Net) removeDevice() {
	n.mu.Lock()
	w := n.wg
	n.wg = nil
	if w != nil {
		close(w.ended)
	}
	n.mu.Unlock()
	if w != nil {
		w.Close()
	}
	n.mu.Lock()
	n.settled = false
	n.forget()
	n.mu.Unlock()
}

// inUse is the error of a port that another socket has.
func inUse(port uint16, err error) error {
	if who := portHolder(port); who != "" {
		return fmt.Errorf("%w: UDP port %d: %s: %w", datapath.ErrPortInUse, port, who, err)
	}
	return fmt.Errorf("%w: UDP port %d: %w", datapath.ErrPortInUse, port, err)
}

func (n *Net) changeDevice(w *wireguard, d datapath.Device) error {
	have, err := w.state()
	if err != nil {
		return err
	}
	// The port first: it is what may fail, and then nothing else was changed.
	if d.ListenPort != 0 && d.ListenPort != have.Device.ListenPort {
		if err := n.changePort(w, d.ListenPort, have.Device.ListenPort); err != nil {
			return err
		}
	}
	if err := setMark(w, d.Mark, have.Device.Mark); err != nil {
		return err
	}
	if !d.Key.IsZero() && d.Key != have.Device.Key {
		// wireguard-go would remove this peer itself, but waits for it with a lock that it may need.
		public := d.Key.Public()
		if err := n.removePeer(w, public); err != nil {
			return err
		}
		if err := w.set(uapi.Device(datapath.Device{Key: d.Key})); err != nil {
			return fmt.Errorf("key: %w", err)
		}
		w.mac1.Init(public.Bytes())
		n.mu.Lock()
		w.public = public
		clear(n.first)
		for k, p := range n.peers {
			p.shook, p.stale = false, have.Stats[k].LastHandshake
			n.moveEndpoint(w, k, netip.AddrPort{}, p.endpoint)
		}
		n.mu.Unlock()
	}
	if d.MTU != 0 && d.MTU != int(n.link.MTU()) {
		n.link.SetMTU(uint32(d.MTU))
		w.tun.mtuChanged()
	}
	return nil
}

// changePort moves the device to another port, or leaves it on the one it has.
func (n *Net) changePort(w *wireguard, to, from uint16) error {
	if n.opts.Bind == nil {
		if err := probe(to); err != nil {
			return inUse(to, err)
		}
	}
	err := w.set(uapi.Port(to))
	if err == nil {
		return nil
	}
	if portInUse(err) {
		err = inUse(to, err)
	} else {
		err = fmt.Errorf("UDP port %d: %w", to, err)
	}
	// The device gave up its socket before it tried.
	if back := w.set(uapi.Port(from)); back != nil {
		err = fmt.Errorf("%w; and back to port %d: %w", err, from, back)
		if last := w.set(uapi.Port(0)); last != nil {
			err = fmt.Errorf("%w; and to any port: %w", err, last)
		}
	}
	return err
}

func (n *Net) putPeer(w *wireguard, o datapath.PutPeer) error {
	if o.Key == w.public {
		return fmt.Errorf("peer %v: the device's own key", o.Key.Short())
	}
	created := w.LookupPeer(o.Key.Bytes()) == nil
	text, err := uapi.PutPeer(o, created)
	if err != nil {
		return err
	}
	var before netip.AddrPort
	n.mu.Lock()
	if q := n.peers[o.Key]; q != nil {
		before = q.endpoint
	}
	if o.Peer.Endpoint.IsValid() {
		n.moveEndpoint(w, o.Key, before, o.Peer.Endpoint)
	}
	n.mu.Unlock()
	err = w.set(text)
	if err == nil && w.LookupPeer(o.Key.Bytes()) == nil {
		err = fmt.Errorf("peer %v: the device did not take it", o.Key.Short())
	}
	if err != nil {
		n.mu.Lock()
		n.moveEndpoint(w, o.Key, o.Peer.Endpoint, before)
		n.mu.Unlock()
		return err
	}
	greet := false
	n.edit(func(e *edit) {
		q := n.peers[o.Key]
		if q == nil {
			n.born++
			q = &peer{prefixes: make(map[netip.Prefix]struct{}), born: n.born}
			n.peers[o.Key] = q
		}
		for r := range o.Peer.Prefixes.All() {
			if old, ok := e.peers.Get(r); ok && old != o.Key {
				delete(n.peers[old].prefixes, r)
			}
			e.peers = e.peers.InsertPersist(r, o.Key)
			q.prefixes[r] = struct{}{}
		}
		if o.Peer.Endpoint.IsValid() {
			greet = created || !q.shook && q.endpoint != o.Peer.Endpoint
			q.endpoint = o.Peer.Endpoint
		}
	})
	if greet {
		n.toGreet = append(n.toGreet, o.Key)
	}
	return nil
}

// greetNew greets the peers that were put. It is done when the rest of an Apply is, so that what
// follows a handshake at once finds its route back. n.op is held.
func (n *Net) greetNew() {
	n.mu.Lock()
	w := n.wg
	n.mu.Unlock()
	for _, k := range n.toGreet {
		if w != nil {
			n.greet(w, k)
		}
	}
	n.toGreet = nil
}

func (n *Net) dropPrefixes(w *wireguard, o datapath.DropPrefixes) error {
	if w.LookupPeer(o.Key.Bytes()) == nil {
		return nil
	}
	if err := w.set(uapi.DropPrefixes(o)); err != nil {
		return err
	}
	n.edit(func(e *edit) { n.disown(e, o.Key, o.Prefixes) })
	return nil
}

func (n *Net) removePeer(w *wireguard, k key.Public) error {
	if w.LookupPeer(k.Bytes()) == nil {
		return nil
	}
	if err := w.set(uapi.RemovePeer(k)); err != nil {
		return err
	}
	n.edit(func(e *edit) {
		if p := n.peers[k]; p != nil {
			for r := range p.prefixes {
				e.peers = e.peers.DeletePersist(r)
			}
			n.moveEndpoint(w, k, p.endpoint, netip.AddrPort{})
			delete(n.peers, k)
			delete(n.greets, k)
		}
	})
	return nil
}

// disown takes prefixes from a peer in the table.
func (n *Net) disown(e *edit, k key.Public, set prefixes.Set) {
	p := n.peers[k]
	if p == nil {
		return
	}
	for r := range set.All() {
		if _, ok := p.prefixes[r]; ok {
			delete(p.prefixes, r)
			e.peers = e.peers.DeletePersist(r)
		}
	}
}

// logger hands wireguard-go's log on.
func (n *Net) logger() *device.Logger {
	ctx := context.Background()
	return &device.Logger{
		Verbosef: func(format string, args ...any) {
			if n.log.Enabled(ctx, slog.LevelDebug) {
				n.log.Log(ctx, slog.LevelDebug, fmt.Sprintf(format, args...))
			}
		},
		Errorf: func(format string, args ...any) {
			n.log.Log(ctx, slog.LevelError, fmt.Sprintf(format, args...))
		},
	}
}
