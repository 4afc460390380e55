// Package wggo is wireguard-go as the device of a datapath: all of it that does not depend on what is at
// the other end of its tun.Device.
//
// It creates and changes the device, tells it of peers in UAPI text, greets new peers, keeps two
// handshakes with one peer from undoing each other, and notices when the device ends by itself.
package wggo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/sockets"
	"github.com/warren-mesh/warren/datapath/internal/uapi"
	"github.com/warren-mesh/warren/datapath/key"
)

// Options are what a driver gives a WireGuard. Mu and Logger must be set.
type Options struct {
	// Mu is the driver's mutex, and guards what is remembered of the device and its peers too, so that
	// it changes in one step with what the driver keeps. It is held shortly.
	Mu *sync.Mutex

	// Logger receives what wireguard-go logs, at levels Debug and Error.
	Logger *slog.Logger

	// Bind makes the UDP sockets of a new device. nil: our own, whose port is probed before
	// the sockets there are given up.
	Bind func() conn.Bind

	// Do runs f where sockets are to be opened, such as in a network namespace. nil: simply calls it.
	Do func(f func() error) error

	// The driver is told what happened, with Mu held. Each may be nil.
	Removed func(key.Public) // the device has the peer no longer
	Shook   func()           // peers completed a handshake
	Ended   func()           // the device ended by itself, and all of its peers with it
}

// WireGuard is a device, or the place for one. Create, Change, Remove, PutPeer, DropPrefixes, RemovePeer,
// GreetNew and Close are called by one goroutine at a time; the other methods by any.
type WireGuard struct {
	o     Options
	watch watch
	done  chan struct{} // closed by Close
	tasks sync.WaitGroup

	toGreet []key.Public // put since the last GreetNew

	// Guarded by o.Mu.
	wg        *wireguard // nil: there is no device
	closed    bool
	peers     map[key.Public]*peer
	born      uint64 // counts peers that were created
	first     map[netip.AddrPort]*precedence
	heard     map[netip.AddrPort]time.Time // when an initiation came from there
	lively    map[netip.AddrPort]time.Time // when any handshake message did
	noRoute   map[netip.AddrPort]time.Time // when an initiation to there could last not be sent
	greets    map[key.Public]*greeting     // peers that are being greeted
	observing bool                         // the observe goroutine runs
}

// peer is what is remembered of a peer on the device.
type peer struct {
	endpoint netip.AddrPort // as it was put last; zero: never
	born     uint64
	shook    bool      // a handshake was completed, with the key the device has
	stale    time.Time // the last handshake with the key it had before
}

// New returns a WireGuard without a device.
func New(o Options) *WireGuard {
	if o.Do == nil {
		o.Do = func(f func() error) error { return f() }
	}
	n := &WireGuard{
		o: o, done: make(chan struct{}), peers: make(map[key.Public]*peer),
		greets: make(map[key.Public]*greeting), first: make(map[netip.AddrPort]*precedence),
		heard: make(map[netip.AddrPort]time.Time), lively: make(map[netip.AddrPort]time.Time), noRoute: make(map[netip.AddrPort]time.Time),
	}
	n.watch.wake = make(chan struct{}, 1)
	return n
}

// Close ends the device, and all that a WireGuard does.
func (n *WireGuard) Close() {
	n.o.Mu.Lock()
	if !n.closed {
		n.closed = true
		close(n.done)
	}
	n.o.Mu.Unlock()
	n.Remove()
	n.tasks.Wait()
}

// wireguard is a device that exists.
type wireguard struct {
	*device.Device
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

// Exists reports whether there is a device. Mu is held.
func (n *WireGuard) Exists() bool { return n.wg != nil }

// device returns the device that exists.
func (n *WireGuard) device() (*wireguard, error) {
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	if n.wg == nil {
		return nil, datapath.ErrNoDevice
	}
	return n.wg, nil
}

// Get returns the device in UAPI text, for others than the driver.
func (n *WireGuard) Get() (string, error) {
	w, err := n.device()
	if err != nil {
		return "", err
	}
	return w.IpcGet()
}

// Set tells the device what others than the driver say to it, in UAPI text. It may be called at any time.
func (n *WireGuard) Set(text string) error {
	w, err := n.device()
	if err != nil {
		return err
	}
	if k, ok := uapi.OwnKey(text); ok && w.LookupPeer(k.Bytes()) != nil { // see Change
		if err := w.set(uapi.RemovePeer(k)); err != nil {
			return err
		}
	}
	port := w.bind.at()
	if err = w.set(text); err != nil && w.bind.at() == 0 {
		_ = back(w, port) // err says why
	}
	return err
}

// Families returns in which families the device has sockets; without a device, in none.
func (n *WireGuard) Families() (ipv4, ipv6 bool) {
	w, err := n.device()
	if err != nil {
		return false, false
	}
	return w.bind.families()
}

// Read returns what the device itself knows: Device without the MTU, Peers and Stats. Without a device,
// or where it came to an end by itself, it returns ErrNoDevice.
func (n *WireGuard) Read() (datapath.State, error) {
	n.o.Mu.Lock()
	w, born := n.wg, n.born
	n.o.Mu.Unlock()
	if w == nil {
		return datapath.State{}, datapath.ErrNoDevice
	}
	s, err := w.state()
	if err != nil {
		return datapath.State{}, err
	}
	handshakes := make(map[key.Public]time.Time, len(s.Stats))
	for k, st := range s.Stats {
		if !st.LastHandshake.IsZero() {
			handshakes[k] = st.LastHandshake
		}
	}
	n.note(handshakes, born)
	n.noRoutes(s)
	return s, nil
}

// noRouteFor is how long an initiation that could not be sent says that there is no route. WireGuard tries again after
// 5 s (REKEY_TIMEOUT) while it has something to send.
const noRouteFor = 7 * time.Second

// attempted notes that an initiation was sent, or could not be. It is called by the device.
func (n *WireGuard) attempted(to string, err error) {
	at, bad := netip.ParseAddrPort(to)
	if bad != nil {
		return
	}
	at = uapi.Unmap(at)
	n.o.Mu.Lock()
	_, known := n.noRoute[at]
	switch {
	case err != nil:
		n.noRoute[at] = time.Now()
	case known:
		delete(n.noRoute, at)
	}
	n.o.Mu.Unlock()
	if err != nil && !known {
		n.o.Logger.Debug("a handshake initiation could not be sent", "endpoint", at, "reason", err)
	}
}

// noRoutes notes in s to which peers the host cannot send.
func (n *WireGuard) noRoutes(s datapath.State) {
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	for at, last := range n.noRoute {
		if time.Since(last) > noRouteFor {
			delete(n.noRoute, at)
		}
	}
	if len(n.noRoute) == 0 {
		return
	}
	for k, p := range s.Peers {
		if _, without := n.noRoute[p.Endpoint]; without {
			st := s.Stats[k]
			st.NoRoute = true
			s.Stats[k] = st
		}
	}
}

// none says that an error left no device.
func none(err error) error {
	if errors.Is(err, datapath.ErrNoDevice) {
		return err
	}
	return fmt.Errorf("%w: %w", datapath.ErrNoDevice, err)
}

// Create makes the device on a tun.Device, which it opens once it is known that d can be had; the MTU of d
// is no concern of it. It closes the tun.Device with the device, and where it fails.
//
// An error that is ErrNoDevice left none. Any other one is of the mark, which needs privilege: a device
// without it is better than none.
func (n *WireGuard) Create(d datapath.Device, open func() (tun.Device, error)) error {
	if n.o.Bind == nil && d.ListenPort != 0 {
		if err := n.probe(d.ListenPort); err != nil {
			return none(n.inUse(d.ListenPort, err))
		}
	}
	t, err := open()
	if err != nil {
		return none(err)
	}
	inner := func() conn.Bind { return sockets.New(sockets.Options{}) }
	if n.o.Bind != nil {
		inner = n.o.Bind
	}
	w := &wireguard{public: d.Key.Public(), ended: make(chan struct{})}
	w.mac1.Init(w.public.Bytes())
	w.bind = &bind{
		Bind: inner(), watch: &n.watch, do: n.o.Do,
		meant: w.mac1.CheckMAC1, crosses: n.crosses, answers: n.answers, yields: n.yields,
		tried: n.attempted, in: newGate(), out: newGate(),
	}
	w.Device = device.NewDevice(&gated{Device: t, in: w.bind.in, out: w.bind.out, idle: newIdleTimer()}, w.bind, n.logger())
	mark := d.Mark
	d.Mark = 0
	err = w.set(uapi.Device(d))
	if err == nil {
		err = w.Up()
	}
	if err == nil && !w.alive() {
		err = datapath.ErrNoDevice
	}
	if err != nil {
		w.Close()
		if sockets.InUse(err) {
			err = n.inUse(d.ListenPort, err)
		}
		return none(err)
	}
	if b, ours := w.bind.Bind.(*sockets.Bind); ours {
		receive, send := b.Sizes()
		n.o.Logger.Debug("the UDP sockets are open", "port", b.Port(), "receive buffer", receive, "send buffer", send)
	}
	n.o.Mu.Lock()
	n.wg = w
	n.o.Mu.Unlock()
	n.tasks.Go(func() { n.attend(w) })
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
func (n *WireGuard) attend(w *wireguard) {
	select {
	case <-w.ended:
		return
	case <-w.Wait():
	}
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	if n.wg != w {
		return
	}
	n.wg = nil
	n.forget()
	n.o.Logger.Error("the WireGuard device came to an end by itself")
	if n.o.Ended != nil {
		n.o.Ended()
	}
}

// Remove ends the device, if there is one. The driver is told of none of its peers.
func (n *WireGuard) Remove() {
	n.o.Mu.Lock()
	w := n.wg
	n.wg = nil
	if w != nil {
		close(w.ended)
	}
	n.o.Mu.Unlock()
	if w != nil {
		w.Close()
	}
	n.o.Mu.Lock()
	n.forget()
	n.o.Mu.Unlock()
}

// forget empties what is remembered: the device is gone. mu is held.
func (n *WireGuard) forget() {
	clear(n.peers)
	clear(n.greets)
	clear(n.first)
	clear(n.heard)
	clear(n.noRoute)
}

// probe reports why the default bind could not open a port, without disturbing the sockets there are.
func (n *WireGuard) probe(port uint16) error { return n.o.Do(func() error { return probe(port) }) }

// inUse is the error of a port that another socket has.
func (n *WireGuard) inUse(port uint16, err error) error {
	var who string
	_ = n.o.Do(func() error { who = portHolder(port); return nil })
	if who != "" {
		return fmt.Errorf("%w: UDP port %d: %s: %w", datapath.ErrPortInUse, port, who, err)
	}
	return fmt.Errorf("%w: UDP port %d: %w", datapath.ErrPortInUse, port, err)
}

// Change gives the device another port, mark and key, where d has them.
func (n *WireGuard) Change(d datapath.Device) error {
	w, err := n.device()
	if err != nil {
		return err
	}
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
	if d.Key.IsZero() || d.Key == have.Device.Key {
		return nil
	}
	// wireguard-go would remove this peer itself, but waits for it with a lock that it may need.
	public := d.Key.Public()
	if err := n.removePeer(w, public); err != nil {
		return err
	}
	if err := w.set(uapi.Device(datapath.Device{Key: d.Key})); err != nil {
		return fmt.Errorf("key: %w", err)
	}
	w.mac1.Init(public.Bytes())
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	w.public = public
	clear(n.first)
	for k, p := range n.peers {
		p.shook, p.stale = false, have.Stats[k].LastHandshake
		n.moveEndpoint(w, k, netip.AddrPort{}, p.endpoint)
	}
	return nil
}

// changePort moves the device to another port, or leaves it on the one it has.
func (n *WireGuard) changePort(w *wireguard, to, from uint16) error {
	if n.o.Bind == nil {
		if err := n.probe(to); err != nil {
			return n.inUse(to, err)
		}
	}
	err := w.set(uapi.Port(to))
	if err == nil {
		return nil
	}
	if sockets.InUse(err) {
		err = n.inUse(to, err)
	} else {
		err = fmt.Errorf("UDP port %d: %w", to, err)
	}
	if back := back(w, from); back != nil {
		err = fmt.Errorf("%w; %w", err, back)
	}
	return err
}

// back has the device on a port again. It gave up its sockets before it tried to have another one.
func back(w *wireguard, port uint16) error {
	err := w.set(uapi.Port(port))
	if err == nil {
		return nil
	}
	err = fmt.Errorf("and back to port %d: %w", port, err)
	if last := w.set(uapi.Port(0)); last != nil {
		err = fmt.Errorf("%w; and to any port: %w", err, last)
	}
	return err
}

// PutPeer creates a peer or changes it. One that is to be greeted is at the next GreetNew.
func (n *WireGuard) PutPeer(o datapath.PutPeer) error {
	w, err := n.device()
	if err != nil {
		return err
	}
	if o.Key == w.public {
		return fmt.Errorf("peer %v: the device's own key", o.Key.Short())
	}
	created := w.LookupPeer(o.Key.Bytes()) == nil
	text, err := uapi.PutPeer(o, created)
	if err != nil {
		return err
	}
	var before netip.AddrPort
	n.o.Mu.Lock()
	if q := n.peers[o.Key]; q != nil {
		before = q.endpoint
	}
	if o.Peer.Endpoint.IsValid() {
		n.moveEndpoint(w, o.Key, before, o.Peer.Endpoint)
	}
	n.o.Mu.Unlock()
	err = w.set(text)
	if err == nil && w.LookupPeer(o.Key.Bytes()) == nil {
		err = fmt.Errorf("peer %v: the device did not take it", o.Key.Short())
	}
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	if err != nil {
		n.moveEndpoint(w, o.Key, o.Peer.Endpoint, before)
		return err
	}
	if n.wg != w {
		return nil
	}
	q := n.peers[o.Key]
	if q == nil || created { // somebody else may have taken the one there was
		n.born++
		q = &peer{born: n.born}
		n.peers[o.Key] = q
	}
	if o.Peer.Endpoint.IsValid() {
		if created || !q.shook && q.endpoint != o.Peer.Endpoint {
			n.toGreet = append(n.toGreet, o.Key)
		}
		q.endpoint = o.Peer.Endpoint
	}
	return nil
}

// DropPrefixes takes prefixes from a peer.
func (n *WireGuard) DropPrefixes(o datapath.DropPrefixes) error {
	w, err := n.device()
	if err != nil || w.LookupPeer(o.Key.Bytes()) == nil {
		return err
	}
	return w.set(uapi.DropPrefixes(o))
}

// RemovePeer ends a peer.
func (n *WireGuard) RemovePeer(k key.Public) error {
	w, err := n.device()
	if err != nil {
		return err
	}
	return n.removePeer(w, k)
}

func (n *WireGuard) removePeer(w *wireguard, k key.Public) error {
	if w.LookupPeer(k.Bytes()) != nil {
		if err := w.set(uapi.RemovePeer(k)); err != nil {
			return err
		}
	}
	n.o.Mu.Lock()
	defer n.o.Mu.Unlock()
	p := n.peers[k]
	if n.wg != w || p == nil {
		return nil
	}
	n.moveEndpoint(w, k, p.endpoint, netip.AddrPort{})
	delete(n.peers, k)
	delete(n.greets, k)
	if n.o.Removed != nil {
		n.o.Removed(k)
	}
	return nil
}

// Status is what is remembered of a peer.
type Status struct {
	Endpoint netip.AddrPort // as it was put last; zero: never
	Shook    bool           // it completed a handshake, with the key that the device has
	Greeted  bool           // it is being greeted
}

// Status returns what is remembered of a peer; nothing of one that is not there. Mu is held.
func (n *WireGuard) Status(k key.Public) Status {
	p := n.peers[k]
	if p == nil {
		return Status{}
	}
	_, greeted := n.greets[k]
	return Status{p.endpoint, p.shook, greeted}
}

// logger hands wireguard-go's log on.
func (n *WireGuard) logger() *device.Logger {
	ctx, log := context.Background(), n.o.Logger
	return &device.Logger{
		Verbosef: func(format string, args ...any) {
			if log.Enabled(ctx, slog.LevelDebug) {
				log.Log(ctx, slog.LevelDebug, fmt.Sprintf(format, args...))
			}
		},
		Errorf: func(format string, args ...any) {
			log.Log(ctx, slog.LevelError, fmt.Sprintf(format, args...))
		},
	}
}
