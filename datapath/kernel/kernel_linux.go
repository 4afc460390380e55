package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/wgconv"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

const kind = "wireguard"

// Kernel is a WireGuard device of Linux. Its methods may be called from any goroutine.
type Kernel struct {
	opts Options
	log  *slog.Logger
	host *hostnet.Host
	held io.Closer // see hold

	changed chan struct{} // of Notifier; capacity 1
	done    chan struct{} // closed by Close
	tasks   sync.WaitGroup
	closing sync.Once

	op      sync.Mutex // held by whatever reads or changes the device; guards what follows
	conn    *conn
	closed  bool
	active  bool // the device was asked for by an Apply, so that it is kept as it should be
	repairs *hostnet.Repairs
	local   prefixes.Set    // the kernel has no place for it
	model   *datapath.Model // WireGuard's part of the device as it was read last and changed since; nil: not known
	stats   map[key.Public]datapath.Stats
	index   int           // of its interface
	seen    time.Time     // when it was read
	took    time.Duration // how long that took
	refused int           // how many peers have a key that nobody can have
	waiting map[key.Public]waiting
	later   map[key.Public]greeting // to be greeted in a moment
	nobody  nobody
	mtu     hostnet.MTU

	// For tests.
	budget   int  // of messages; 0: the default
	fallback bool // per-prefix removal is not to be used
	onWrite  func()
}

var (
	_ datapath.Datapath = (*Kernel)(nil)
	_ datapath.Notifier = (*Kernel)(nil)
)

var errClosed = fmt.Errorf("kernel: %w", net.ErrClosed)

// New returns a Kernel, whose device may exist: one that an earlier process left is adopted as it is. It
// changes nothing on the host, but opens sockets and starts goroutines, which Close ends. Until then
// another New for the same device in the same namespace, by whichever process, fails with ErrInUse.
//
// Without WireGuard in the kernel it fails with errors.ErrUnsupported.
func New(o Options) (*Kernel, error) {
	o, err := o.defaulted()
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	h, err := hostnet.Open(o.host())
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	c, err := dial(h.Do)
	if err == nil {
		err = c.admitted()
	}
	var held io.Closer
	if err == nil {
		held, err = h.Hold()
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("kernel: %w", errors.Join(err, h.Close()))
	}
	k := &Kernel{
		opts: o, log: o.Logger, host: h, held: held, conn: c, mtu: hostnet.MTU{Option: o.MTU}, waiting: make(map[key.Public]waiting), later: make(map[key.Public]greeting),
		changed: make(chan struct{}, 1), done: make(chan struct{}),
	}
	k.repairs = hostnet.NewRepairs(k.notify)
	k.tasks.Go(k.watch)
	return k, nil
}

// Close ends what the Kernel does in this process. The device goes on forwarding.
func (k *Kernel) Close() error {
	var err error
	k.closing.Do(func() {
		close(k.done)
		k.op.Lock()
		k.greetAll()
		k.dismiss()
		k.closed = true
		k.conn.close()
		k.op.Unlock()
		err = errors.Join(k.host.Close(), k.held.Close())
	})
	k.tasks.Wait()
	return err
}

// Cleanup removes what a mesh with these Options left on the host: its device, with its addresses, routes
// and rules, and nothing else. While a Kernel has the device it fails with ErrInUse.
func Cleanup(ctx context.Context, o Options) error {
	o, err := o.defaulted()
	if err == nil {
		err = cleanup(ctx, o)
	}
	if err != nil {
		return fmt.Errorf("kernel: %w", err)
	}
	return nil
}

// Read implements datapath.Datapath. A link of the device's name that is somebody else's is no device;
// it is the SetDevice to come that says whose it is.
func (k *Kernel) Read(ctx context.Context) (datapath.State, error) {
	k.op.Lock()
	defer k.op.Unlock()
	if k.closed {
		return datapath.State{}, errClosed
	}
	if err := ctx.Err(); err != nil {
		return datapath.State{}, err
	}
	s, err := k.read(ctx)
	if err != nil {
		return datapath.State{}, fmt.Errorf("kernel: %w", err)
	}
	return s, nil
}

func (k *Kernel) read(ctx context.Context) (datapath.State, error) {
	hs, err := k.host.Read(ctx)
	if err != nil {
		return datapath.State{}, err
	}
	if hs.Link.Index == 0 || hs.Link.Kind != kind {
		return k.none(hs), nil
	}
	before := k.stats
	s, err := k.load(ctx, hs.Link.Index)
	if errors.Is(err, datapath.ErrNoDevice) || err == nil && !s.Device.Exists() {
		return k.none(hs), nil
	}
	if err != nil {
		return datapath.State{}, err
	}
	if k.host.Encrypted(s.Device.Mark) { // its packets may go other ways
		return k.read(ctx)
	}
	stray := k.opts.Routing == RoutingPolicy && !k.host.Apart(s.Device.Mark)
	if mtu := k.mtu.Right(hs.Host, hs.Link.MTU); stray || !hs.Ready || mtu != hs.Link.MTU {
		if hs, err = k.mend(ctx, hs, mtu, stray); err != nil {
			return datapath.State{}, err
		}
		if s, err = k.load(ctx, hs.Link.Index); errors.Is(err, datapath.ErrNoDevice) {
			return k.none(hs), nil
		} else if err != nil {
			return datapath.State{}, err
		}
	}
	s.Peers, s.Stats = maps.Clone(s.Peers), maps.Clone(s.Stats) // they are kept here too
	k.noRoutes(ctx, s, before)
	s.Device.MTU = hs.Link.MTU
	s.Addrs, s.Routes, s.Local, s.Host = hs.Addrs, hs.Routes, k.local, k.around(hs, k.host.Apart(s.Device.Mark))
	s.Problems, err = k.problems(ctx, hs, s)
	return s, err
}

// noRoutes notes in s which peers the host cannot send to, of those that nothing came from since the last reading:
// WireGuard does not count what it found no route for.
func (k *Kernel) noRoutes(ctx context.Context, s datapath.State, before map[key.Public]datapath.Stats) {
	var to []netip.Addr
	for peer, p := range s.Peers {
		if was, known := before[peer]; p.Endpoint.IsValid() && (!known || s.Stats[peer].Received == was.Received) {
			to = append(to, p.Endpoint.Addr().Unmap())
		}
	}
	without := k.host.NoRoutes(ctx, to)
	for peer, p := range s.Peers {
		if st := s.Stats[peer]; without[p.Endpoint.Addr().Unmap()] {
			st.NoRoute = true
			s.Stats[peer] = st
		}
	}
}

// none is the State without a device.
func (k *Kernel) none(hs hostnet.State) datapath.State {
	k.model, k.local = nil, prefixes.Set{}
	mark, _ := k.host.Mark(0)
	k.host.Encrypted(mark)
	return datapath.State{Host: k.around(hs, k.opts.Routing == RoutingPolicy), Problems: hs.Problems}
}

// around is what there is around a device whose packets stay out of the tunnel, or do not.
func (k *Kernel) around(hs hostnet.State, apart bool) datapath.Host {
	h := hs.Host
	h.Underlay, h.Driver = datapath.UnderlayShared, "kernel"
	if apart {
		h.Underlay = datapath.UnderlaySeparate
	}
	return h
}

// problems are what is wrong around the device.
func (k *Kernel) problems(ctx context.Context, hs hostnet.State, s datapath.State) ([]datapath.Problem, error) {
	ps := hs.Problems
	if k.refused > 0 {
		ps = append(ps, datapath.Problem{
			Subject: "peers", Message: fmt.Sprintf("somebody put %d peers on %s whose public keys nobody can have, and which take their prefixes", k.refused, hs.Link.Name),
			Remedy: "see \"wg show\", and remove them",
		})
	}
	more, err := k.host.Problems(ctx, s)
	return append(ps, more...), err
}

// mend has the link up, under its name, with its MTU and what else belongs to it, and the device its mark, where it
// has a wrong one. op is held.
func (k *Kernel) mend(ctx context.Context, hs hostnet.State, mtu int, marked bool) (hostnet.State, error) {
	if !k.repairs.Now() {
		return hs, nil // notify is called when it is time
	}
	k.log.Warn("the device, or what is around it, was changed, and it is put right", "interface", k.opts.Interface, "name", hs.Link.Name, "up", hs.Link.Up, "mtu", hs.Link.MTU, "to", mtu)
	var err error
	if marked {
		err = k.remark()
	}
	if err == nil {
		_, _, err = k.host.Adopt(ctx, kind, nil)
	}
	if err == nil {
		err = k.host.Up(ctx, mtu)
	}
	if err == nil {
		hs, err = k.host.Read(ctx)
	}
	if err != nil {
		return hs, fmt.Errorf("putting the device right: %w", wrap("link "+k.opts.Interface, err))
	}
	return hs, nil
}

// remark gives the device the mark that keeps its packets out of the tunnel.
func (k *Kernel) remark() error {
	mark, err := k.host.Mark(0)
	if err == nil {
		err = wrap(fmt.Sprintf("mark %#x", mark), k.conn.set(wgconv.Device(k.index, datapath.Device{Mark: mark}))[0])
	}
	return err
}

// load reads WireGuard's part of the device, and has the model be that. op is held.
func (k *Kernel) load(ctx context.Context, index int) (datapath.State, error) {
	s, _, err := k.compare(ctx, index)
	return s, err
}

// compare is load, and reports whether the device is what the model said. Where peers are is no matter:
// they roam.
func (k *Kernel) compare(ctx context.Context, index int) (s datapath.State, same bool, err error) {
	begun := time.Now()
	d, err := k.conn.dump(ctx, index)
	if err != nil {
		if errors.Is(err, datapath.ErrNoDevice) {
			k.model = nil
		}
		return datapath.State{}, false, err
	}
	s, k.refused = d.State(), d.Refused()
	if n := k.nobody.key; !n.IsZero() && s.Peers[n].Prefixes.IsEmpty() {
		delete(s.Peers, n)
		delete(s.Stats, n)
	}
	for peer, g := range k.later {
		if p, there := s.Peers[peer]; there && g.created && p.Keepalive == 0 && k.model != nil {
			p.Keepalive = k.model.State().Peers[peer].Keepalive
			s.Peers[peer] = p
		}
	}
	exact := false
	if k.model != nil && k.index == index {
		same, exact = alike(s, k.model.State())
	}
	if !exact {
		k.model = datapath.NewModel(s)
	}
	k.stats, k.index, k.seen, k.took = s.Stats, index, time.Now(), time.Since(begun)
	return s, same, nil
}

// alike reports whether a device is as a model has it but for endpoints, and whether for those too.
func alike(s, model datapath.State) (same, exact bool) {
	d := model.Device
	d.MTU = 0 // which is the link's
	if s.Device != d || len(s.Peers) != len(model.Peers) {
		return false, false
	}
	exact = true
	for k, p := range s.Peers {
		q, ok := model.Peers[k]
		if p == q && ok {
			continue
		}
		exact = false
		q.Endpoint = p.Endpoint
		if !ok || p != q {
			return false, false
		}
	}
	return true, exact
}
