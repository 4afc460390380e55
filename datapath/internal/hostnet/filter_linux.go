package hostnet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath/internal/nft"
	"github.com/warren-mesh/warren/prefixes"
)

// filter is what we know of our table of nftables, and of forwarding. Whoever deals with these holds it, and Host.mu
// only meanwhile: nftables may have others wait for long, for whom the restorer is not to wait.
type filter struct {
	sync.Mutex
	open   func(nft.Options) (*nft.Table, error) // nft.Open, for tests
	unable error                                 // why it could not open the table
	since  time.Time                             // when that was
	looked bool                                  // for what an earlier mesh left
	noted  []string                              // sysctls that were turned on: the table that says so may be removed
	before nft.Before                            // what was changed along with these
	failed undone

	owns  sync.Mutex // of the table, for Close
	table *nft.Table // opened when there is a use for it: a host that forwards nothing is not to load the module
	wait  sync.WaitGroup
}

// undone is what Up could not do.
type undone struct {
	of  string // what was to be done
	err error
	at  time.Time
}

// loopbackIndex is that of the loopback interface of every namespace, LOOPBACK_IFINDEX in net/flow.h.
const loopbackIndex = 1

// forgiven is how long it takes until what failed is tried again.
const forgiven = time.Minute

// tableOwner marks the table, whatever the protocol of the mesh.
func (h *Host) tableOwner() string { return aliasPrefix + h.o.Interface }

// openFilter opens the table. What the kernel cannot do, or does not let us, it is asked again once in a while:
// each time it may look for the module.
func (h *Host) openFilter() (*nft.Table, error) {
	f := &h.filter
	switch {
	case f.table != nil:
		return f.table, nil
	case f.unable != nil && time.Since(f.since) < forgiven:
		return nil, f.unable
	}
	t, err := f.open(nft.Options{Interface: h.o.Interface, Owner: h.tableOwner(), Do: h.Do, Logger: h.o.Logger})
	if f.unable, f.since = nil, time.Now(); errors.Is(err, errors.ErrUnsupported) || errors.Is(err, fs.ErrPermission) {
		f.unable = err
	}
	if err != nil {
		return nil, err
	}
	f.owns.Lock()
	defer f.owns.Unlock()
	if h.closed.Load() {
		t.Close()
		return nil, net.ErrClosed
	}
	f.table = t
	f.wait.Go(func() {
		for range t.Changed() {
			h.notify()
		}
	})
	return t, nil
}

// closeFilter closes the table, whatever it is used for.
func (h *Host) closeFilter() error {
	h.filter.owns.Lock()
	t := h.filter.table
	h.filter.owns.Unlock()
	if t == nil {
		return nil
	}
	err := t.Close()
	h.filter.wait.Wait()
	return err
}

// passing is what a host does with packets that are for others.
type passing struct {
	clamp int  // MTU to clamp by; 0: none
	deaf  bool // it forwards IPv4, but not what comes out of the link
}

// forwarding is what a host forwards. IPv4 goes by the interface that a packet comes in by, and net.ipv4.ip_forward
// is only what every interface was set to. IPv6 goes by net.ipv6.conf.all.forwarding, or by the interface where that has
// force_forwarding.
type forwarding struct {
	all   struct{ ipv4, ipv6 bool }
	from4 map[int]bool // by index; new interfaces have a negative one
}

func (f forwarding) family(is4 bool) bool { return is4 && f.all.ipv4 || !is4 && f.all.ipv6 }

// from reports whether packets are forwarded that come in by l.
func (f forwarding) from(l link, is4 bool) bool {
	if on, there := f.from4[l.Index]; is4 && there {
		return on
	}
	return f.family(is4) || !is4 && l.force
}

// some reports whether any packets are forwarded.
func (f forwarding) some(links map[int]link) bool {
	for _, l := range links {
		if !l.loopback && (f.from(l, true) || f.from(l, false)) {
			return true
		}
	}
	return false
}

// everywhere reports whether all packets of a family are forwarded.
func (f forwarding) everywhere(is4 bool) bool {
	if is4 {
		for i, on := range f.from4 {
			if i > loopbackIndex && !on {
				return false
			}
		}
	}
	return f.family(is4)
}

// pass is what is to be done with packets for others, where the link is l.
func (h *Host) pass(c netconf, f found, l link) (p passing) {
	if l.Index == 0 {
		return p
	}
	if c.some(f.byIndex) || h.o.Forward {
		p.clamp = l.MTU
	}
	p.deaf = c.all.ipv4 && !c.from(l, true)
	return p
}

// plan is what is to be done about packets for others, and what keeps it from being done.
type plan struct {
	table   *nft.Table
	is      nft.Rules
	exact   bool // the table is precisely what is says
	want    nft.Rules
	on, off []string // sysctls to turn on, and to turn off or forget
	deaf    bool
	unable  error // why the table cannot be read
	notice  error // why IPv6 forwarding is left off
}

// left is what there is to do; it is empty where all is done.
func (p plan) left() string {
	if p.exact && p.is.Equal(p.want) && len(p.on)+len(p.off) == 0 && !p.deaf {
		return ""
	}
	return fmt.Sprint(p.exact, p.is, p.want, p.on, p.off, p.deaf)
}

// planFilter looks at what there is. It does not have the module loaded for nothing.
func (h *Host) planFilter(ctx context.Context, p passing) plan {
	pl := plan{exact: true, deaf: p.deaf}
	f := &h.filter
	of := p.clamp != 0 || !h.o.SNAT.IsEmpty() || h.o.Forward || len(f.noted) > 0
	if !of && f.table == nil && (f.looked || !nft.Loaded()) {
		return pl
	}
	if pl.table, pl.unable = h.openFilter(); pl.unable == nil {
		pl.is, pl.exact, pl.unable = pl.table.Read(ctx)
	}
	if !f.looked {
		f.looked = !transient(pl.unable)
		if !of && (pl.unable != nil || pl.is.IsZero() && pl.exact) { // nothing was left
			if pl.table != nil {
				h.shutFilter()
			}
			return plan{exact: true, deaf: p.deaf}
		}
	}
	if pl.unable != nil {
		pl.exact = true // for all that is known
		return pl
	}
	f.noted = union(f.noted, only(pl.is.Turned, nft.Known))
	pl.want = nft.Rules{ClampMTU: p.clamp, SNAT: h.o.SNAT}
	if !h.o.Forward {
		pl.off = f.noted
		return pl
	}
	fw, err := nft.ReadForwarding(h.Do)
	if pl.on, pl.notice = wantOn(fw); err != nil {
		pl.notice = err
	}
	others, err := pl.table.Noted(ctx)
	if err != nil {
		return plan{table: pl.table, is: pl.is, want: pl.is, exact: true, deaf: pl.deaf, notice: pl.notice, unable: err}
	}
	// What is off, and stays so, somebody turned off: it is nothing of ours any more.
	f.noted = only(f.noted, func(s string) bool { return slices.Contains(pl.on, s) || !slices.Contains(fw.Off, s) })
	others = only(others, func(s string) bool { return nft.Known(s) && !slices.Contains(fw.Off, s) })
	pl.want.Turned = union(pl.on, slices.Concat(f.noted, others))
	return pl
}

// shutFilter closes the table, for which there is no use.
func (h *Host) shutFilter() {
	h.filter.owns.Lock()
	t := h.filter.table
	h.filter.table = nil
	h.filter.owns.Unlock()
	t.Close()
	h.filter.wait.Wait()
}

func only(list []string, keep func(string) bool) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return !keep(s) })
}

// transient reports whether err may be gone the next time.
func transient(err error) bool {
	for _, e := range []error{unix.EAGAIN, unix.EBUSY, unix.ENOBUFS, unix.EINTR, context.Canceled, context.DeadlineExceeded, os.ErrDeadlineExceeded, net.ErrClosed} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// filtered reports whether the table is as it is to be, and forwarding is on where that was asked for; or what
// keeps it from being so, which is no reason not to use the link. What Up failed to do it is to try again after a while,
// or when it is something else.
func (h *Host) filtered(ctx context.Context, p passing, ps *problems) (ready bool) {
	pl := h.planFilter(ctx, p)
	h.noticed(pl.notice, ps)
	h.tableProblem(p, pl.unable, ps)
	left := pl.left()
	switch failed := h.filter.failed; {
	case left == "":
		h.filter.failed = undone{}
	case failed.of != left || time.Since(failed.at) >= forgiven:
		return false
	default:
		h.tableProblem(p, failed.err, ps)
	}
	return true
}

// wantOn is what Options.Forward turns on: not IPv6 where that costs the host its way out.
func wantOn(f nft.Forwarding) (off []string, notice error) {
	off = f.Off
	if f.Notice != nil {
		off = slices.DeleteFunc(slices.Clone(off), func(s string) bool { return s == nft.ForwardIPv6 })
	}
	return off, f.Notice
}

// setFilter makes the table, and has the host forward where that was asked for. What it cannot do is remembered, and
// reported with readings, unless these find by themselves what keeps it from being done.
func (h *Host) setFilter(ctx context.Context, p passing) {
	pl := h.planFilter(ctx, p)
	h.filter.failed = undone{}
	if err := h.carryOut(ctx, pl); err != nil && !transient(err) {
		h.filter.failed = undone{h.planFilter(ctx, p).left(), err, time.Now()}
		h.o.Logger.Warn("not all can be done about packets for others", "interface", h.o.Interface, "err", err)
	}
}

func (h *Host) carryOut(ctx context.Context, pl plan) error {
	var errs []error
	if pl.deaf {
		errs = append(errs, nft.ForwardFrom(h.Do, h.o.Interface))
	}
	h.strangers(pl.is)
	switch {
	case pl.table == nil || pl.unable != nil:
	case len(pl.off) > 0:
		errs = append(errs, h.turnOff(ctx, pl.table, pl.off, pl.want))
	default:
		errs = append(errs, h.turnOn(ctx, pl))
	}
	return errors.Join(errs...)
}

// turnOn makes the table, and then turns on what it notes. What cannot be turned on is not noted any more: somebody
// else may turn it on, whose it is then.
func (h *Host) turnOn(ctx context.Context, pl plan) error {
	if err := pl.table.Set(ctx, pl.want); err != nil {
		return err
	}
	if len(pl.on) == 0 {
		h.filter.noted = pl.want.Turned
		return nil
	}
	if h.filter.before == nil {
		h.filter.before = make(nft.Before)
	}
	turned, err := nft.TurnOn(h.Do, pl.on, h.filter.before)
	if len(turned) > 0 {
		h.o.Logger.Info("turned on", "sysctls", turned)
	}
	if err != nil {
		was := union(h.filter.noted, turned)
		pl.want.Turned = only(pl.want.Turned, func(s string) bool { return slices.Contains(was, s) || !slices.Contains(pl.on, s) })
		err = errors.Join(err, pl.table.Set(ctx, pl.want))
	}
	h.filter.noted = pl.want.Turned
	return err
}

// strangers tells of notes that cannot be a mesh's.
func (h *Host) strangers(r nft.Rules) {
	if left := only(r.Turned, func(s string) bool { return !nft.Known(s) }); len(left) > 0 {
		h.o.Logger.Warn("the table says that sysctls were turned on which no mesh turns on; they are left as they are", "sysctls", left)
	}
}

// turnOff turns off what was noted, unless another mesh has noted it too, and has the table be r, without notes. A
// sysctl that is off already is only not noted any more. Of two meshes that end at the same time, the last one to be
// without a note turns off.
func (h *Host) turnOff(ctx context.Context, t *nft.Table, noted []string, r nft.Rules) error {
	others, err := t.Noted(ctx)
	if err != nil {
		return err
	}
	var off, kept []string
	for _, s := range noted {
		if slices.Contains(others, s) {
			kept = append(kept, s)
		} else {
			off = append(off, s)
		}
	}
	failed := h.turnOffNow(off)
	if failed != nil { // somebody may be able to do it later
		r.Turned = off
	}
	if err := t.Set(ctx, r); err != nil {
		return errors.Join(failed, err)
	}
	h.filter.noted = r.Turned
	if len(kept) == 0 || failed != nil {
		return failed
	}
	if others, err = t.Noted(ctx); err != nil {
		return err
	}
	return h.turnOffNow(only(kept, func(s string) bool { return !slices.Contains(others, s) }))
}

func (h *Host) turnOffNow(sysctls []string) error {
	if len(sysctls) == 0 {
		return nil
	}
	if err := nft.TurnOff(h.Do, sysctls, h.filter.before); err != nil {
		return err
	}
	h.o.Logger.Info("off again", "sysctls", sysctls)
	return nil
}

func union(a, b []string) []string {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(a, b))))
}

// removeFilter removes the table, and turns off what the mesh turned on. A kernel without nftables has no table.
func (h *Host) removeFilter(ctx context.Context) error {
	h.filter.failed = undone{}
	if h.filter.table == nil && len(h.filter.noted) == 0 && !nft.Loaded() {
		return nil
	}
	t, err := h.openFilter()
	if errors.Is(err, errors.ErrUnsupported) || errors.Is(err, fs.ErrPermission) {
		return h.forgetNoted(h.turnOffNow(h.filter.noted))
	}
	if err != nil {
		return err
	}
	r, exact, err := t.Read(ctx)
	if errors.As(err, new(*nft.ForeignError)) { // that table is not ours
		others, err := t.Noted(ctx)
		if err != nil {
			return err
		}
		return h.forgetNoted(h.turnOffNow(only(h.filter.noted, func(s string) bool { return !slices.Contains(others, s) })))
	}
	if err != nil {
		return err
	}
	h.strangers(r)
	if noted := union(h.filter.noted, only(r.Turned, nft.Known)); len(noted) > 0 {
		return h.turnOff(ctx, t, noted, nft.Rules{})
	}
	if r.IsZero() && exact {
		return nil
	}
	return t.Set(ctx, nft.Rules{})
}

func (h *Host) forgetNoted(err error) error {
	if err == nil {
		h.filter.noted = nil
	}
	return err
}

// tableProblem says what is not as it should be with packets for others.
func (h *Host) tableProblem(p passing, err error, ps *problems) {
	if err == nil {
		return
	}
	var lack []string
	if p.clamp != 0 {
		lack = append(lack, "the segments of forwarded TCP connections may not be made to fit the mesh, so that some stall")
	}
	if !h.o.SNAT.IsEmpty() {
		lack = append(lack, fmt.Sprintf("packets to %v may keep the source addresses of the mesh", h.o.SNAT))
	}
	if h.o.Forward || p.deaf {
		lack = append(lack, "this host may not forward all that it should")
	}
	remedy := "see to what it says"
	if errors.Is(err, errors.ErrUnsupported) {
		remedy = "load the module (modprobe nf_tables), or have a kernel with CONFIG_NF_TABLES_INET and CONFIG_NFT_NAT"
	}
	ps.add("nftables", fmt.Sprintf("%v: %s", err, strings.Join(lack, ", and ")), remedy)
}

// noticed says why the host does not forward, or may not.
func (h *Host) noticed(err error, ps *problems) {
	switch {
	case errors.As(err, new(*nft.AdvertisedError)):
		ps.add("IPv6 forwarding", fmt.Sprintf("this host is to forward, and forwards no IPv6, since %v", err), "set what it says, or give the host a static route")
	case err != nil:
		ps.add("forwarding", fmt.Sprintf("this host is to forward, and it is not known whether it does: %v", err), "see to what it says")
	}
}

// unpassed reports what of the local prefixes of a mesh the kernel would not pass on, for want of forwarding: those
// that are not this host's own addresses.
func (h *Host) unpassed(ctx context.Context, conf netconf, local prefixes.Set, ps *problems) {
	var f found
	checked := 0
	for p := range local.All() {
		is4 := p.Addr().Is4()
		if conf.everywhere(is4) || h.o.Forward && !conf.family(is4) { // Up says what it could not do
			continue
		}
		if checked++; checked > mostChecked {
			return
		}
		if checked == 1 {
			var err error
			if f, err = h.find(ctx); err != nil {
				return
			}
		}
		var behind link
		for _, a := range samples(p) {
			if r, err := h.match(ctx, a); err == nil && r.typ == unix.RTN_UNICAST && r.oif != f.link.Index {
				behind = f.byIndex[r.oif]
				break
			}
		}
		to, from := conf.from(f.link, is4), conf.from(behind, is4)
		if behind.Index == 0 || to && from {
			continue
		}
		name, fam := nft.ForwardIPv4, 4
		if !is4 {
			name, fam = nft.ForwardIPv6, 6
		}
		what, dropped := "", "packets that arrive for it are dropped"
		switch {
		case !is4 || !conf.all.ipv4 && !to && !from:
		case !to:
			what, name = " that comes from "+f.link.Name, nft.InterfaceSysctl(f.link.Name)
		default:
			what, name, dropped = " that comes from "+behind.Name, nft.InterfaceSysctl(behind.Name), "what it answers is dropped"
		}
		ps.add(fmt.Sprintf("IPv%d forwarding", fam), fmt.Sprintf("this node announces %v, which is behind it, and the host forwards no IPv%d%s: %s", p, fam, what, dropped),
			fmt.Sprintf("set %s to 1, or have the mesh do it", name))
	}
}
