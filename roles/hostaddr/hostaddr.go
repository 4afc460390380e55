package hostaddr

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles"
)

// Name is that of the role.
const Name = "host-addresses"

// Published is the name under which other roles find the addresses ([]netip.Addr); see roles.Node.
const Published = "host-addresses"

// The conditions of the role.
const (
	Unreadable view.Kind = "host-addresses-unreadable" // the host's addresses cannot be read; the last known ones hold
	Refused    view.Kind = "host-addresses-refused"    // the mesh does not take them as endpoints
	None       view.Kind = "host-addresses-none"       // no address of the host is of use: nobody can call this node
)

// Options are which addresses are of use, and to whom they are told. The zero value is all of this host, told to nobody
// but other roles.
type Options struct {
	// Interfaces are the names of those whose addresses are of use, or patterns of them (path.Match). Empty: all.
	Interfaces []string
	// Within are prefixes outside of which no address is of use. Empty: all are.
	Within prefixes.Set
	// Skip says which addresses are of no use: those that the mesh itself gave the host, above all. nil: all are.
	Skip func(link string, a netip.Addr) bool
	// Endpoints is told the addresses, the best first: SetEndpoints of a mesh.Mesh. Port 0 stands for the device's.
	// nil: it is not.
	Endpoints func(...record.Endpoint) error
	// Announce has the addresses be announced as host prefixes.
	Announce bool
	// Max is how many addresses are told, at most. 0: 64, which is what a record takes.
	Max int
	// Damp is for how long an address that is gone is still told. 0: 5 s. Below 0: not at all.
	Damp time.Duration
	// Again is how often the host is looked at when nothing is heard of changes. 0: every minute where the system
	// tells of them, else every 10 s.
	Again time.Duration
	// Control is that of a net.Dialer whose packets take the way of the mesh's: where it marks them, the host may have
	// other routes for them. nil: there is nothing special about them.
	Control func(network, address string, c syscall.RawConn) error
	// In runs f where the addresses are, as in another network namespace. nil: here.
	In func(f func() error) error

	// read and events are the host's, but in tests.
	read   func() ([]netip.Addr, error)
	events func() (<-chan struct{}, func(), error)
}

// Role tells where the host can be reached. Make one by New.
type Role struct {
	o     Options
	known atomic.Bool
}

// New checks o and returns a Role.
func New(o Options) (*Role, error) {
	for _, p := range o.Interfaces {
		if _, err := path.Match(p, ""); err != nil || p == "" {
			return nil, fmt.Errorf("hostaddr: Interfaces: %q is no pattern of names", p)
		}
	}
	if o.Max < 0 || o.Max > record.MaxEndpoints {
		return nil, fmt.Errorf("hostaddr: Max: %d is outside 0 to %d", o.Max, record.MaxEndpoints)
	}
	o.Max = cmp.Or(o.Max, record.MaxEndpoints)
	o.Damp = cmp.Or(o.Damp, 5*time.Second)
	o.Again = cmp.Or(o.Again, again)
	if o.Again < time.Second {
		return nil, fmt.Errorf("hostaddr: Again: %v is below 1s", o.Again)
	}
	if o.In == nil {
		o.In = func(f func() error) error { return f() }
	}
	r := &Role{o: o}
	if o.read == nil {
		r.o.read = r.read
	}
	if o.events == nil {
		r.o.events = r.events
	}
	return r, nil
}

// Name implements roles.Role.
func (r *Role) Name() string { return Name }

// Probe implements roles.Prober: it is healthy once the addresses are known.
func (r *Role) Probe(context.Context) error {
	if !r.known.Load() {
		return errors.New("the host's addresses are not known yet")
	}
	return nil
}

// Changes are gathered for settle, since a link that comes up has its addresses and routes one after the other; and
// however many there are, the host is not looked at more often than that.
const (
	settle  = 50 * time.Millisecond
	between = 500 * time.Millisecond
)

// Run implements roles.Role.
func (r *Role) Run(ctx context.Context, n roles.Node) error {
	defer func() {
		r.known.Store(false)
		if r.o.Endpoints != nil {
			_ = r.o.Endpoints()
		}
	}()
	heard, stop, err := r.o.events()
	if err != nil {
		n.Logger().Warn("the system does not tell of changes of the host's addresses; they are looked at now and then", "err", err)
	} else {
		defer stop()
	}
	var told told
	timer := time.NewTimer(0)
	defer timer.Stop()
	var looked time.Time
	soon := false // the timer is set for what was heard
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-heard:
			if !ok {
				return errors.New("the system tells no more of changes of the host's addresses") // begun anew, it may
			}
			if !soon {
				soon = true
				timer.Reset(max(settle, between-time.Since(looked)))
			}
			continue
		case <-timer.C:
		}
		now := time.Now()
		looked, soon = now, false
		found, err := r.o.read()
		next := r.o.Again
		if err == nil {
			addrs, due := told.step(now, found, r.o.Damp, r.o.Max)
			if !due.IsZero() {
				next = min(next, due.Sub(now))
			}
			err = r.tell(n, addrs)
		} else {
			err = &refusal{Unreadable, fmt.Errorf("%w; those that were known last are told on", err)}
		}
		n.Report(r.wrong(err, told.addrs)...)
		timer.Reset(next)
	}
}

// refusal is why addresses are not known, or not taken.
type refusal struct {
	kind view.Kind
	error
}

func (r *Role) wrong(err error, addrs []netip.Addr) (c []view.Condition) {
	if f, ok := errors.AsType[*refusal](err); ok {
		c = append(c, view.Condition{Kind: f.kind, Message: f.Error()})
	}
	if r.known.Load() && len(addrs) == 0 {
		c = append(c, view.Condition{
			Kind: None, Message: "no address of this host is of use to others, so that they cannot call this node",
			Remedy: "bring up a network interface with an address, or have a look at which interfaces and prefixes are allowed",
		})
	}
	return c
}

// tell tells everybody of the addresses.
func (r *Role) tell(n roles.Node, addrs []netip.Addr) error {
	was, _ := n.Published(Published)
	if as, ok := was.([]netip.Addr); ok && slices.Equal(as, addrs) && r.known.Load() {
		return nil
	}
	if r.o.Endpoints != nil {
		es := make([]record.Endpoint, len(addrs))
		for i, a := range addrs {
			es[i].Addr = a
		}
		if err := r.o.Endpoints(es...); err != nil {
			return &refusal{Refused, err}
		}
	}
	if r.o.Announce {
		as := make([]prefixes.Announcement, len(addrs))
		for i, a := range addrs {
			as[i].Prefix = prefixes.Host(a)
		}
		if err := n.Announce(as...); err != nil {
			return &refusal{Refused, err}
		}
	}
	if err := n.Publish(Published, slices.Clone(addrs)); err != nil {
		return &refusal{Refused, err}
	}
	n.Logger().Info("the host's addresses", "addresses", addrs)
	r.known.Store(true)
	return nil
}

// told is what others were told, and since when some of it is gone.
type told struct {
	addrs []netip.Addr
	gone  map[netip.Addr]time.Time
}

// step returns what others are to be told: what was found, in that order, and then what was told before and is gone for
// less than damp; at most most. due is when there is something to do though nothing is found; zero: never.
func (t *told) step(now time.Time, found []netip.Addr, damp time.Duration, most int) (addrs []netip.Addr, due time.Time) {
	gone := make(map[netip.Addr]time.Time)
	addrs = slices.Clone(found)
	for _, a := range t.addrs {
		if slices.Contains(found, a) {
			continue
		}
		since, ok := t.gone[a]
		if !ok {
			since = now
		}
		end := since.Add(damp)
		if !now.Before(end) {
			continue
		}
		gone[a] = since
		addrs = append(addrs, a)
		if due.IsZero() || end.Before(due) {
			due = end
		}
	}
	t.addrs, t.gone = addrs[:min(len(addrs), most)], gone
	return t.addrs, due
}

// read returns the addresses that are of use, the best first.
func (r *Role) read() (addrs []netip.Addr, err error) {
	err = r.o.In(func() error {
		ls, err := Links()
		if err != nil {
			return err
		}
		sources, err := Sources(r.o.Control)
		if err != nil {
			return err
		}
		addrs = Choose(r.allowed(ls), sources, nil, r.o.Max)
		return nil
	})
	return addrs, err
}

// allowed returns the links and addresses of them that are of use.
func (r *Role) allowed(ls []Link) (use []Link) {
	for _, l := range ls {
		if len(r.o.Interfaces) > 0 && !slices.ContainsFunc(r.o.Interfaces, func(p string) bool { ok, _ := path.Match(p, l.Name); return ok }) {
			continue
		}
		l.Addrs = slices.DeleteFunc(slices.Clone(l.Addrs), func(a netip.Addr) bool {
			return !r.o.Within.IsEmpty() && !r.o.Within.HasAddr(a) || r.o.Skip != nil && r.o.Skip(l.Name, a)
		})
		use = append(use, l)
	}
	return use
}
