package auto

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"syscall"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/datapath/tun"
)

// Auto is the datapath that was chosen. Its methods may be called from any goroutine.
//
// It is always a Notifier and a Settler, so that whoever asks for these by type assertion need not know what was
// chosen. All of them notice what others do. Only netstack has a use for Settle, which does nothing to the others.
type Auto struct {
	chosen  datapath.Datapath
	name    string
	instead string // why no better one
	changed <-chan struct{}
	left    *leftover // nil: there was nothing, or it does not matter
}

var (
	_ datapath.Datapath = (*Auto)(nil)
	_ datapath.Notifier = (*Auto)(nil)
	_ datapath.Settler  = (*Auto)(nil)
)

// candidate is a datapath to be tried.
type candidate struct {
	name  string
	lacks []lack
	open  func() (datapath.Datapath, error)
}

// candidates are those of o that were asked for, in their order.
func candidates(o Options) ([]candidate, error) {
	names, err := o.try()
	if err != nil {
		return nil, err
	}
	var cs []candidate
	for _, name := range names {
		c := candidate{name: name}
		switch name {
		case Kernel:
			c.lacks, c.open = o.kernelLacks(), opener(kernel.New, o.kernel())
		case TUN:
			c.open = opener(tun.New, o.tun())
		case Netstack:
			c.lacks, c.open = o.netstackLacks(), opener(netstack.New, o.netstack())
		}
		cs = append(cs, c)
	}
	return cs, nil
}

// opener has a datapath that is nil never be one that is not.
func opener[D datapath.Datapath, O any](open func(O) (D, error), o O) func() (datapath.Datapath, error) {
	return func() (datapath.Datapath, error) {
		d, err := open(o)
		if err != nil {
			return nil, err
		}
		return d, nil
	}
}

// New returns the first datapath of Options.Try that works here and can do what Options ask for; its device may exist,
// as its own New says. It changes nothing on the host, but opens sockets and starts goroutines, which Close ends.
//
// What is wrong with Options is an error, whichever datapath would mind. Where none works, the error says of each
// why, and is what each of theirs is.
func New(o Options) (*Auto, error) {
	cs, err := candidates(o)
	if err == nil {
		err = o.check()
	}
	if err != nil {
		return nil, fmt.Errorf("auto: %w", err)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	a, err := choose(cs, o.Logger)
	if err != nil {
		return nil, fmt.Errorf("auto: %w", err)
	}
	if a.name == Netstack {
		a.left = findLeft(o)
	}
	return a, nil
}

// choose opens the first of cs that works here.
func choose(cs []candidate, log *slog.Logger) (*Auto, error) {
	var not reasons
	for _, c := range cs {
		err := unfit(c.lacks)
		var d datapath.Datapath
		if err == nil {
			d, err = c.open()
		}
		switch {
		case err == nil:
			a := &Auto{chosen: d, name: c.name, instead: not.String()}
			if n, ok := d.(datapath.Notifier); ok {
				a.changed = n.Changed()
			}
			log.Info("datapath chosen", "datapath", a.name, "instead", a.instead)
			return a, nil
		case !notHere(err):
			return nil, err
		}
		not = append(not, reason{c.name, err})
	}
	return nil, not
}

// notHere reports whether an error is about this host, or what this process may do on it, and about nothing that
// was asked for.
func notHere(err error) bool {
	for _, not := range []error{
		errors.ErrUnsupported, fs.ErrPermission,
		syscall.EAFNOSUPPORT, syscall.EPROTONOSUPPORT, syscall.ESOCKTNOSUPPORT, // a sandbox without netlink
	} {
		if errors.Is(err, not) {
			return true
		}
	}
	return false
}

// reason is why a datapath was not chosen.
type reason struct {
	name string
	err  error
}

// reasons is the error of New where nothing was chosen, and otherwise what Host.Instead says.
type reasons []reason

func (rs reasons) Error() string { return "no datapath works here: " + rs.String() }

// Unwrap has errors.Is find what any of them is.
func (rs reasons) Unwrap() (errs []error) {
	for _, r := range rs {
		errs = append(errs, r.err)
	}
	return errs
}

// String is for an operator: on one line, and without what errors are to programs.
func (rs reasons) String() string {
	var all []string
	for _, r := range rs {
		s := strings.TrimPrefix(r.err.Error(), r.name+": ")
		for _, class := range []string{errors.ErrUnsupported.Error(), "operation not permitted"} {
			s = strings.ReplaceAll(s, ": "+class, "")
			s = strings.ReplaceAll(s, class+": ", "")
		}
		all = append(all, r.name+": "+strings.ReplaceAll(s, "\n", ", "))
	}
	return strings.Join(all, "; ")
}

// Chosen returns the name of the datapath that was chosen: Kernel, TUN or Netstack.
func (a *Auto) Chosen() string { return a.name }

// Netstack returns the network stack that was chosen, through which the program dials and listens; nil where the
// whole host is in the mesh.
func (a *Auto) Netstack() *netstack.Net {
	n, _ := a.chosen.(*netstack.Net)
	return n
}

// Apply implements datapath.Datapath.
func (a *Auto) Apply(ctx context.Context, ops ...datapath.Op) error {
	return a.chosen.Apply(ctx, ops...)
}

// Read implements datapath.Datapath. Host.Driver is Chosen, and Host.Instead says why no better one is.
func (a *Auto) Read(ctx context.Context) (datapath.State, error) {
	s, err := a.chosen.Read(ctx)
	if err != nil {
		return s, err
	}
	if s.Host.Driver == "" {
		s.Host.Driver = a.name
	}
	s.Host.Instead = a.instead
	if p, there := a.left.problem(ctx); there {
		s.Problems = append(s.Problems, p)
	}
	return s, nil
}

// Close implements datapath.Datapath. Whether the device goes on is a matter of the datapath that was chosen.
func (a *Auto) Close() error { return errors.Join(a.chosen.Close(), a.left.close()) }

// Changed implements datapath.Notifier.
func (a *Auto) Changed() <-chan struct{} { return a.changed }

// Settle implements datapath.Settler. It does nothing where the datapath that was chosen is none.
func (a *Auto) Settle() {
	if s, ok := a.chosen.(datapath.Settler); ok {
		s.Settle()
	}
}

// Cleanup removes what a mesh with these Options left on the host, whichever datapath it had, and nothing else. The
// mesh must not run. Where there cannot be anything it does nothing.
func Cleanup(ctx context.Context, o Options) error {
	// While the kernel's device is in use, what tun would remove is that one.
	err := kernel.Cleanup(ctx, o.kernel())
	if err == nil || errors.Is(err, errors.ErrUnsupported) {
		err = tun.Cleanup(ctx, o.tun())
	}
	if errors.Is(err, errors.ErrUnsupported) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("auto: %w", err)
	}
	return nil
}

// leftover is an interface of a mesh with the same Options, beside a datapath that has none.
type leftover struct{ host *hostnet.Host }

// findLeft looks for one. What cannot be found out is no reason to do without a datapath.
func findLeft(o Options) *leftover {
	if o.Interface == "" {
		o.Interface = kernel.DefaultInterface
	}
	h, err := hostnet.Open(hostnet.Options{Interface: o.Interface, Protocol: o.Protocol})
	if err != nil {
		return nil
	}
	l := &leftover{h}
	if _, there := l.problem(context.Background()); !there {
		h.Close()
		return nil
	}
	return l
}

// problem says that it is there.
func (l *leftover) problem(ctx context.Context) (p datapath.Problem, there bool) {
	if l == nil {
		return p, false
	}
	link, err := l.host.Link(ctx)
	if err != nil {
		return p, false
	}
	return datapath.Problem{
		Subject: "interface " + link.Name,
		Message: fmt.Sprintf("a mesh with the same settings left, or has, an interface %s (%s), while this one does without: packets of the host go there, and peers may hear from two with one key", link.Name, link.Kind),
		Remedy:  fmt.Sprintf("end that mesh, if it runs; else remove what it left, with CAP_NET_ADMIN: ip link delete %s", link.Name),
	}, true
}

func (l *leftover) close() error {
	if l == nil {
		return nil
	}
	return l.host.Close()
}
