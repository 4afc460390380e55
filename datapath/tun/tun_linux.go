package tun

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/wggo"
	"github.com/warren-mesh/warren/prefixes"
)

const kind = "tun"

// TUN is a WireGuard device of this process on a network interface. Its methods may be called from any goroutine.
type TUN struct {
	opts     Options
	log      *slog.Logger
	host     *hostnet.Host
	underlay *hostnet.Host // nil: host is where the sockets are
	wg       *wggo.WireGuard

	changed chan struct{} // of Notifier; capacity 1
	done    chan struct{} // closed by Close
	tasks   sync.WaitGroup
	closing sync.Once

	mu sync.Mutex // of wg

	op      sync.Mutex // held by whatever reads or changes the device; guards what follows
	closed  bool
	link    *link // of the device there is, or was last
	index   int   // of its interface
	socket  *socket
	held    io.Closer    // while there is a device
	local   prefixes.Set // the host has no place for it
	repairs *hostnet.Repairs
	mtu     hostnet.MTU
}

var (
	_ datapath.Datapath = (*TUN)(nil)
	_ datapath.Notifier = (*TUN)(nil)
)

var errClosed = fmt.Errorf("tun: %w", net.ErrClosed)

// New returns a TUN without a device, which comes into being with the first SetDevice. It changes nothing on the
// host, but opens sockets and starts goroutines, which Close ends.
//
// Where there is no /dev/net/tun it fails with errors.ErrUnsupported.
func New(o Options) (*TUN, error) {
	t, err := open(o)
	if err != nil {
		return nil, fmt.Errorf("tun: %w", err)
	}
	t.tasks.Go(t.watch)
	return t, nil
}

func open(o Options) (*TUN, error) {
	o, err := o.defaulted()
	if err != nil {
		return nil, err
	}
	here, err := namespaceOf("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	of := func(path, what string) (fileID, error) {
		if path == "" {
			return here, nil
		}
		id, err := namespaceOf(path)
		if err != nil {
			err = fmt.Errorf("%s: %w", what, err)
		}
		return id, err
	}
	device, err := of(o.Namespace, "namespace of the interface")
	if err != nil {
		return nil, err
	}
	under := device
	if o.UnderlayNamespace != "" {
		if under, err = of(o.UnderlayNamespace, "namespace of the UDP sockets"); err != nil {
			return nil, err
		}
	}
	// This thread may be in another namespace than those that are to work for it.
	if main, err := namespaceOf("/proc/self/ns/net"); o.Namespace == "" && (err != nil || main != here) {
		o.Namespace = "/proc/thread-self/ns/net"
	}
	if err := check(clonePath, o.Namespace+o.UnderlayNamespace != ""); err != nil {
		return nil, err
	}
	t := &TUN{
		opts: o, log: o.Logger, mtu: hostnet.MTU{Option: o.MTU},
		changed: make(chan struct{}, 1), done: make(chan struct{}),
	}
	if t.host, err = hostnet.Open(o.host()); err != nil {
		return nil, err
	}
	if under != device {
		mark, _ := t.host.Mark(0)
		other := hostnet.Options{Observe: true, Namespace: o.UnderlayNamespace, Mark: mark, Logger: o.Logger}
		if t.underlay, err = hostnet.Open(other); err != nil {
			return nil, errors.Join(fmt.Errorf("namespace of the UDP sockets: %w", err), t.host.Close())
		}
	}
	t.repairs = hostnet.NewRepairs(t.notify)
	t.wg = wggo.New(wggo.Options{Mu: &t.mu, Logger: t.log, Bind: o.Bind, Do: t.sockets().Do, Ended: t.notify})
	return t, nil
}

// sockets is the host where the UDP sockets are.
func (t *TUN) sockets() *hostnet.Host {
	if t.underlay != nil {
		return t.underlay
	}
	return t.host
}

// namespaceOf tells network namespaces apart.
func namespaceOf(path string) (fileID, error) {
	f, err := os.Open(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w; ip netns add makes one below /run/netns", err)
		}
		return fileID{}, err
	}
	defer f.Close()
	if typ, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE); err != nil || typ != unix.CLONE_NEWNET {
		return fileID{}, fmt.Errorf("%s is no network namespace; ip netns add makes one below /run/netns", path)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fileID{}, err
	}
	return fileID{st.Dev, st.Ino}, nil
}

// Close ends the device, with the interface, its addresses and the routes into it, as the end of the process
// would. Close twice is harmless.
func (t *TUN) Close() error {
	var err error
	t.closing.Do(func() {
		close(t.done)
		t.op.Lock()
		t.closed = true
		t.drop()
		t.op.Unlock()
		t.wg.Close()
		err = t.host.Close()
		if t.underlay != nil {
			err = errors.Join(err, t.underlay.Close())
		}
	})
	t.tasks.Wait()
	return err
}

// Cleanup removes what a mesh with these Options left on the host: its device, what SourceLoopback put on the
// loopback interface, and a socket that nobody listens on. While a TUN has the device it is refused.
func Cleanup(ctx context.Context, o Options) error {
	o, err := o.defaulted()
	if err == nil {
		err = cleanHost(ctx, o)
	}
	if err == nil && o.Socket != NoSocket {
		err = cleanSocket(o)
	}
	if err != nil {
		return fmt.Errorf("tun: %w", err)
	}
	return nil
}

func cleanHost(ctx context.Context, o Options) error {
	h, err := hostnet.Open(o.host())
	if err != nil {
		return err
	}
	defer h.Close()
	if inUse, _, err := stillHeld(ctx, h); err != nil {
		return err
	} else if inUse {
		return taken(o.Interface)
	}
	kept, err := h.Hold()
	if err != nil {
		return err
	}
	defer kept.Close()
	return h.Remove(ctx)
}

// cleanSocket removes the socket. One that somebody listens on is not left over, whoever that is.
func cleanSocket(o Options) error {
	path := o.socket()
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		return c.Close()
	}
	if errors.Is(err, unix.ECONNREFUSED) {
		return removeDead(path)
	}
	return nil
}

// socket is the path of the socket; "" is none.
func (o Options) socket() string {
	switch o.Socket {
	case NoSocket:
		return ""
	case "":
		return socketPath(DefaultSocket, o.Interface)
	}
	return socketPath(o.Socket, o.Interface)
}

// Changed implements datapath.Notifier. Changes of the host that Apply made may be reported too. Close
// does not close the channel.
func (t *TUN) Changed() <-chan struct{} { return t.changed }

func (t *TUN) notify() {
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// lookEvery is how often watch looks for what nobody reports.
const lookEvery = time.Second

// watch hands on what hostnet sees, and looks for what nobody reports.
func (t *TUN) watch() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var under <-chan struct{}
	if t.underlay != nil {
		under = t.underlay.Changed()
	}
	for {
		open := true
		select {
		case <-t.done:
			return
		case _, open = <-t.host.Changed():
			t.notify()
		case _, open = <-under:
			t.notify()
		case <-tick.C:
			t.look()
		}
		if !open {
			return
		}
	}
}

// look brings back a socket that somebody removed.
func (t *TUN) look() {
	t.op.Lock()
	defer t.op.Unlock()
	if t.closed || t.socket == nil || t.socket.there() {
		return
	}
	path := t.socket.path
	t.socket.close()
	t.socket = nil
	if err := t.listen(path); err != nil {
		t.log.Warn("the socket was removed by somebody else, and cannot be brought back", "path", path, "reason", err)
		return
	}
	t.log.Info("the socket was removed by somebody else, and is brought back", "path", path)
}

func (t *TUN) listen(path string) (err error) {
	t.socket, err = listen(path, t.opts.SocketGroup, t.wg, t.notify)
	return err
}

// exists reports whether wireguard-go runs.
func (t *TUN) exists() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.wg.Exists()
}

// drop ends the device, if there is one, and with it the interface. op is held.
func (t *TUN) drop() {
	t.socket.close()
	t.wg.Remove()
	t.letGo()
	t.socket, t.local, t.index = nil, prefixes.Set{}, 0
	mark, _ := t.host.Mark(0)
	t.sockets().Encrypted(mark)
}

// letGo lets others have a device of that name.
func (t *TUN) letGo() {
	if t.held != nil {
		t.held.Close()
		t.held = nil
	}
}

// Read implements datapath.Datapath. A link of the device's name that is somebody else's is no device;
// it is the SetDevice to come that says whose it is.
func (t *TUN) Read(ctx context.Context) (datapath.State, error) {
	t.op.Lock()
	defer t.op.Unlock()
	if t.closed {
		return datapath.State{}, errClosed
	}
	if err := ctx.Err(); err != nil {
		return datapath.State{}, err
	}
	s, err := t.read(ctx)
	if err != nil {
		return datapath.State{}, fmt.Errorf("tun: %w", err)
	}
	return s, nil
}

func (t *TUN) read(ctx context.Context) (datapath.State, error) {
	hs, err := t.host.Read(ctx)
	if err != nil {
		return datapath.State{}, err
	}
	gone := t.present(hs.Link) != nil // before what is around it, which is another then
	h, err := t.around(ctx, hs)
	if err != nil {
		return datapath.State{}, err
	}
	bare := datapath.State{Host: h, Problems: hs.Problems}
	if t.opts.Routing == RoutingPolicy { // as it will be
		bare.Host.Underlay = datapath.UnderlaySeparate
	}
	if gone {
		return bare, nil
	}
	s, err := t.wg.Read()
	if errors.Is(err, datapath.ErrNoDevice) {
		return bare, nil
	}
	if err != nil {
		return datapath.State{}, err
	}
	if t.sockets().Encrypted(s.Device.Mark) { // its packets may go other ways
		return t.read(ctx)
	}
	mtu := t.mtu.Right(h, hs.Link.MTU)
	if stray := h.Underlay == datapath.UnderlayShared && t.opts.Routing == RoutingPolicy && !t.host.Apart(s.Device.Mark); stray || !hs.Ready || mtu != hs.Link.MTU {
		if hs, err = t.mend(ctx, hs, mtu, s.Device.Mark); err != nil {
			return datapath.State{}, err
		}
		if s, err = t.wg.Read(); errors.Is(err, datapath.ErrNoDevice) {
			return bare, nil
		} else if err != nil {
			return datapath.State{}, err
		}
	}
	t.link.setMTU(hs.Link.MTU)
	t.link.whole.Store(int64(hostnet.Whole(h)))
	s.Device.MTU = hs.Link.MTU
	s.Addrs, s.Routes, s.Local, s.Host = hs.Addrs, hs.Routes, t.local, h
	if h.Underlay == datapath.UnderlayShared && t.host.Apart(s.Device.Mark) {
		s.Host.Underlay = datapath.UnderlaySeparate
	}
	ipv4, ipv6 := t.wg.Families()
	s.Host.IPv4, s.Host.IPv6 = h.IPv4 && ipv4, h.IPv6 && ipv6
	more, err := t.problems(ctx, s)
	s.Problems = slices.Concat(hs.Problems, more, t.link.problems())
	return s, err
}

// problems are what is wrong around a device that is s, where the interface is and where the sockets are.
func (t *TUN) problems(ctx context.Context, s datapath.State) ([]datapath.Problem, error) {
	if t.underlay == nil {
		return t.host.Problems(ctx, s)
	}
	under, err := t.underlay.Problems(ctx, datapath.State{Device: s.Device, Peers: s.Peers, Host: s.Host})
	if err != nil {
		return nil, fmt.Errorf("namespace of the UDP sockets: %w", err)
	}
	s.Peers, s.Host = nil, datapath.Host{}
	ps, err := t.host.Problems(ctx, s)
	return append(ps, under...), err
}

// present reports why there is no device, where our link, as the host has it, is l. What is left of one that
// somebody took the link from is ended. op is held.
func (t *TUN) present(l hostnet.Link) error {
	if t.exists() && l.Index == t.index {
		return nil
	}
	if t.index != 0 {
		t.log.Warn("the interface was removed by somebody else", "interface", t.opts.Interface)
		t.drop()
	}
	return datapath.ErrNoDevice
}

// around is what there is around the device.
func (t *TUN) around(ctx context.Context, hs hostnet.State) (datapath.Host, error) {
	h := hs.Host
	if t.underlay != nil {
		under, err := t.underlay.Read(ctx)
		if err != nil {
			return datapath.Host{}, fmt.Errorf("namespace of the UDP sockets: %w", err)
		}
		connected := h.Connected
		h = under.Host
		h.Connected, h.Underlay = connected, datapath.UnderlaySeparate
	}
	h.Driver = "tun"
	return h, nil
}

// mend has the link up, under its name, with its MTU, the device's mark and what else belongs to it. op is held.
func (t *TUN) mend(ctx context.Context, hs hostnet.State, mtu int, mark uint32) (hostnet.State, error) {
	if !t.repairs.Now() {
		return hs, nil // notify is called when it is time
	}
	t.log.Warn("the interface, or what is around it, was changed, and it is put right", "interface", t.opts.Interface, "name", hs.Link.Name, "up", hs.Link.Up, "mtu", hs.Link.MTU, "to", mtu)
	var err error
	if t.opts.Routing == RoutingPolicy && !t.host.Apart(mark) {
		if mark, err = t.host.Mark(0); err == nil {
			err = t.wg.Change(datapath.Device{Mark: mark})
		}
	}
	if err == nil {
		err = t.host.Up(ctx, mtu)
	}
	if err == nil {
		hs, err = t.host.Read(ctx)
	}
	if err != nil {
		return hs, fmt.Errorf("putting interface %s right: %w", t.opts.Interface, err)
	}
	return hs, nil
}
