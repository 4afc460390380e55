package tun

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
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

	op       sync.Mutex // held by whatever reads or changes the device; guards what follows
	closed   bool
	link     *link // of the device there is, or was last
	index    int   // of its interface
	socket   *socket
	local    prefixes.Set    // the host has no place for it
	mended   time.Time       // when the link was last brought back
	unmended bool            // it was too soon for that
	told     map[string]bool // problems that were logged
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
		opts: o, log: o.Logger, told: make(map[string]bool),
		changed: make(chan struct{}, 1), done: make(chan struct{}),
	}
	if t.host, err = hostnet.Open(o.host()); err != nil {
		return nil, err
	}
	if under != device {
		other := o.host()
		other.Namespace = o.UnderlayNamespace
		if t.underlay, err = hostnet.Open(other); err != nil {
			return nil, errors.Join(fmt.Errorf("namespace of the UDP sockets: %w", err), t.host.Close())
		}
	}
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
// loopback interface, and a socket that nobody listens on. The mesh must not run.
func Cleanup(ctx context.Context, o Options) error {
	o, err := o.defaulted()
	if err == nil {
		err = hostnet.Cleanup(ctx, o.host())
	}
	if err == nil && o.Socket != NoSocket {
		err = cleanSocket(o)
	}
	if err != nil {
		return fmt.Errorf("tun: %w", err)
	}
	return nil
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

// look brings back a socket that somebody removed, and tells when it is time to bring back the link.
func (t *TUN) look() {
	t.op.Lock()
	defer t.op.Unlock()
	if t.unmended && time.Since(t.mended) >= mendEvery {
		t.unmended = false
		t.notify()
	}
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
	t.socket, err = listen(path, t.wg, t.notify)
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
	t.socket, t.local, t.index = nil, prefixes.Set{}, 0
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
	if err := t.present(hs.Link); err != nil {
		h, err := t.around(ctx, hs)
		return datapath.State{Host: h}, err
	}
	if !hs.Ready {
		if hs, err = t.mend(ctx, hs); err != nil {
			return datapath.State{}, err
		}
	}
	s, err := t.wg.Read()
	if errors.Is(err, datapath.ErrNoDevice) {
		h, err := t.around(ctx, hs)
		return datapath.State{Host: h}, err
	}
	if err != nil {
		return datapath.State{}, err
	}
	t.link.setMTU(hs.Link.MTU)
	s.Device.MTU = hs.Link.MTU
	s.Addrs, s.Routes, s.Local = hs.Addrs, hs.Routes, t.local
	if s.Host, err = t.around(ctx, hs); err != nil {
		return datapath.State{}, err
	}
	s.Problems = append(s.Problems, t.link.problems()...)
	t.tell(hs.Problems)
	return s, nil
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
	h.Underlay = datapath.UnderlayShared
	if t.underlay != nil {
		under, err := t.underlay.Read(ctx)
		if err != nil {
			return datapath.Host{}, fmt.Errorf("namespace of the UDP sockets: %w", err)
		}
		connected := h.Connected
		h = under.Host
		h.Connected, h.Underlay = connected, datapath.UnderlaySeparate
	}
	if t.exists() {
		ipv4, ipv6 := t.wg.Families()
		h.IPv4, h.IPv6 = h.IPv4 && ipv4, h.IPv6 && ipv6
	}
	return h, nil
}

// tell logs what an operator has to see to, once.
func (t *TUN) tell(problems []error) {
	now := make(map[string]bool)
	for _, p := range problems {
		now[p.Error()] = true
		if !t.told[p.Error()] {
			t.log.Warn("packets may not arrive", "interface", t.opts.Interface, "reason", p)
		}
	}
	t.told = now
}

// mendEvery bounds how often the link is brought back, against somebody who keeps undoing that.
const mendEvery = time.Second

// mend has the link up, under its name, with what else belongs to it. op is held.
func (t *TUN) mend(ctx context.Context, hs hostnet.State) (hostnet.State, error) {
	if time.Since(t.mended) < mendEvery {
		t.unmended = true // look tells when it is time
		return hs, nil
	}
	t.mended, t.unmended = time.Now(), false
	t.log.Warn("the interface was changed by somebody else, and is brought back", "interface", t.opts.Interface, "name", hs.Link.Name, "up", hs.Link.Up)
	err := t.host.Up(ctx, 0)
	if err == nil {
		hs, err = t.host.Read(ctx)
	}
	if err != nil {
		return hs, fmt.Errorf("bringing interface %s back: %w", t.opts.Interface, err)
	}
	return hs, nil
}
