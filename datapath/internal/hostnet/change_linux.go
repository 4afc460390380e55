package hostnet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
	"golang.org/x/sys/unix"
)

// failures gathers the errors of prefixes: the first of each.
type failures map[netip.Prefix]error

func (f failures) add(p netip.Prefix, err error) {
	if err != nil && f[p] == nil {
		f[p] = err
	}
}

func (f failures) join() error {
	var errs []error
	for _, p := range slices.SortedFunc(maps.Keys(f), prefixes.Compare) {
		errs = append(errs, &ItemError{p, f[p]})
	}
	return errors.Join(errs...)
}

// each makes changes for prefixes; each error is the prefix's.
func (h *Host) each(ctx context.Context, ps []netip.Prefix, cs []change, f failures) {
	for i, err := range h.apply(ctx, cs) {
		if err != nil {
			f.add(ps[i], fmt.Errorf("%s: %w", cs[i].what, err))
		}
	}
}

// AddAddrs gives this node addresses, all of them host prefixes. One that another link has is a
// *ForeignError if it can be used there, as State.Host.Addrs has it; else ours is put beside it. One of a family that is not available is ErrFamily. The error joins *ItemErrors (see
// Items); the rest is done.
func (h *Host) AddAddrs(ctx context.Context, s prefixes.Set) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := h.find(ctx)
	if err != nil {
		return err
	}
	if f.link.Index == 0 {
		return fmt.Errorf("%s: %w", h.o.Interface, ErrNoLink)
	}
	as, err := h.addrs(ctx)
	if err != nil {
		return err
	}
	at, fails := h.place(f), failures{}
	if at.loopback {
		if err := knowsProtocol(as); err != nil {
			return err
		}
	}
	by := make(map[netip.Addr][]ifaddr, len(as))
	for _, a := range as {
		by[a.local.Addr()] = append(by[a.local.Addr()], a)
	}
	var ps []netip.Prefix
	var cs []change
	for p := range s.All() {
		if !p.IsSingleIP() {
			fails.add(p, errors.New("not a host prefix: an address of a mesh is /32 or /128"))
			continue
		}
		if p == dummy {
			fails.add(p, errors.New("the IPv4 dummy address (RFC 7600) is no node's own"))
			continue
		}
		if err := f.lacks(at, p.Addr().Is4()); err != nil {
			fails.add(p, err)
			continue
		}
		there := false
		for _, a := range by[p.Addr()] {
			switch {
			case a.index == at.Index && a.local == p && (!at.loopback || int(a.proto) == h.o.Protocol):
				there = true
			case a.index == f.link.Index || a.index == f.lo.Index && int(a.proto) == h.o.Protocol && !h.shared(f):
				if a.index == at.Index && p.Addr().Is6() { // IPv6 has an address once, whatever its length
					ps, cs = append(ps, p), append(cs, change{fmt.Sprintf("remove address %v", a.local), a.request(unix.RTM_DELADDR, 0)})
				}
			case a.index != at.Index && !a.usable(f.byIndex[a.index]): // it is nobody's for now
			default:
				fails.add(p, &ForeignError{fmt.Sprintf("address %v", p.Addr()), fmt.Sprintf("%s has it as %v", f.byIndex[a.index].Name, a.local),
					"take it away there, or give this node another one"})
				there = true
			}
		}
		if !there {
			a := ifaddr{index: at.Index, local: p, proto: uint8(h.o.Protocol)}
			ps = append(ps, p)
			cs = append(cs, change{fmt.Sprintf("add address %v to %s", p.Addr(), at.Name), a.request(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL)})
		}
	}
	h.each(ctx, ps, cs, fails)
	for _, p := range ps {
		if fails[p] == nil {
			as = append(as, ifaddr{index: at.Index, local: p})
		}
	}
	h.release(ctx, f, as)
	return fails.join()
}

// knowsProtocol reports why what is put on the loopback interface could not be told from what others
// put there.
func knowsProtocol(as []ifaddr) error {
	for _, a := range as {
		if a.proto != 0 {
			return nil // the kernel itself uses it
		}
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return err
	}
	release := unix.ByteSliceToString(u.Release[:])
	major, rest, _ := strings.Cut(release, ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, _ := strconv.Atoi(major)
	b, _ := strconv.Atoi(strings.TrimRightFunc(minor, func(r rune) bool { return r < '0' || r > '9' }))
	if a > 5 || a == 5 && b >= 18 {
		return nil
	}
	return fmt.Errorf("addresses on the loopback interface: %w: Linux %s cannot mark them as ours, 5.18 can; put them on the link", errors.ErrUnsupported, release)
}

// RemoveAddrs takes addresses away. Linux removes the routes from them too. Before the last IPv4 address of
// the link goes, the IPv4 dummy address takes its place for as long as there is no other, since every IPv4 route into
// the link would go with it. Addresses that are not there, or not ours, are left alone without an error.
func (h *Host) RemoveAddrs(ctx context.Context, s prefixes.Set) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := h.find(ctx)
	if err != nil {
		return err
	}
	as, err := h.addrs(ctx)
	if err != nil {
		return err
	}
	var going []ifaddr
	for _, a := range as {
		ours := f.link.Index != 0 && a.index == f.link.Index && !a.kernels() && !a.keeps() ||
			a.index == f.lo.Index && int(a.proto) == h.o.Protocol && !h.shared(f)
		if ours && s.Has(a.local.Masked()) {
			going = append(going, a)
		}
	}
	fails := failures{}
	for i, err := range h.takeAway(ctx, f, as, going) {
		fails.add(going[i].local.Masked(), err)
	}
	h.release(ctx, f, minus(as, going))
	return fails.join()
}

// takeAway removes some of the addresses that there are, and returns the error of each.
func (h *Host) takeAway(ctx context.Context, f found, as, going []ifaddr) []error {
	errs := make([]error, len(going))
	kept := h.keep(ctx, f, as, going)
	var cs []change
	var of []int
	for i, a := range going {
		if kept != nil && a.index == f.link.Index && a.local.Addr().Is4() {
			errs[i] = fmt.Errorf("keep the routes from going with address %v: %w", a.local, kept)
			continue
		}
		cs, of = append(cs, change{fmt.Sprintf("remove address %v", a.local), a.request(unix.RTM_DELADDR, 0)}), append(of, i)
	}
	for i, err := range h.apply(ctx, cs) {
		if err := gone(err); err != nil {
			errs[of[i]] = fmt.Errorf("%s: %w", cs[i].what, err)
		}
	}
	return errs
}

// keep puts the keeper on our link where its last IPv4 address is going and we have IPv4 routes there.
func (h *Host) keep(ctx context.Context, f found, as, going []ifaddr) error {
	left := minus(as, going)
	if f.link.Index == 0 || !hasIPv4(f.link, as) || hasIPv4(f.link, left) || keepers(f.link, as) != nil {
		return nil
	}
	ours, err := h.ourRoutes(ctx, f.link.Index)
	if err != nil {
		return err
	}
	for p := range ours {
		if p.Addr().Is4() {
			err := h.apply1(ctx, fmt.Sprintf("add address %v to %s", dummy, f.link.Name),
				keeper(f.link.Index, uint8(h.o.Protocol)).request(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL))
			if errors.Is(err, unix.EEXIST) {
				return nil
			}
			return err
		}
	}
	return nil
}

func minus(as, going []ifaddr) []ifaddr {
	return slices.DeleteFunc(slices.Clone(as), func(a ifaddr) bool { return slices.Contains(going, a) })
}

// hasIPv4 reports whether a link has an IPv4 address other than a keeper.
func hasIPv4(l link, as []ifaddr) bool {
	return slices.ContainsFunc(as, func(a ifaddr) bool { return a.index == l.Index && a.local.Addr().Is4() && !a.keeps() })
}

// keepers are those on a link.
func keepers(l link, as []ifaddr) (ks []ifaddr) {
	for _, a := range as {
		if l.Index != 0 && a.index == l.Index && a.keeps() {
			ks = append(ks, a)
		}
	}
	return ks
}

// redundant are the keepers on our link where it has another IPv4 address.
func redundant(f found, as []ifaddr) []ifaddr {
	if !hasIPv4(f.link, as) {
		return nil
	}
	return keepers(f.link, as)
}

// release takes away what is redundant. What it leaves makes Ready false, and Up tries again.
func (h *Host) release(ctx context.Context, f found, as []ifaddr) {
	for _, k := range redundant(f, as) {
		err := h.apply1(ctx, fmt.Sprintf("remove address %v", k.local), k.request(unix.RTM_DELADDR, 0))
		if gone(err) != nil {
			h.o.Logger.Warn("an address that is not needed any more is left", "err", err)
		}
	}
}

// cover returns the widest of Options.Cover that has all of p; ok is false where p has its own route.
func (h *Host) cover(p netip.Prefix) (c netip.Prefix, ok bool) {
	for c := range h.o.Cover.All() {
		if c.Bits() <= p.Bits() && c.Contains(p.Addr()) {
			return c, true
		}
	}
	return p, false
}

// right reports whether rs, our routes for a prefix, are the one that Options have, and from src.
func (h *Host) right(rs []route, src netip.Addr) bool {
	return len(rs) == 1 && h.placed(rs[0]) && rs[0].src == src
}

// placed reports whether a route of ours has the table and metric of Options.
func (h *Host) placed(r route) bool {
	return r.table == uint32(h.o.Table) && r.metric == uint32(h.o.Metric) && r.tos == 0 && r.typ == unix.RTN_UNICAST
}

// source is the source address that a route has for one that was asked for.
func (h *Host) source(src netip.Addr) netip.Addr {
	if h.o.Sources == SourceDevice {
		return netip.Addr{}
	}
	return src
}

// behind is what one cover stands for: how many prefixes have each source address.
type behind map[netip.Addr]int

// keep is the source address of a cover: the one it has, if anything behind it has it, else the least that
// anything behind it has. That it has none says nothing: Linux takes it from an IPv6 route with the address.
func (b behind) keep(have []route) (src netip.Addr) {
	if len(have) > 0 && have[0].src.IsValid() && b[have[0].src] > 0 {
		return have[0].src
	}
	for a := range b {
		if a.IsValid() && (!src.IsValid() || a.Less(src)) {
			src = a
		}
	}
	return src
}

// ask notes that p is asked for.
func (h *Host) ask(p netip.Prefix, src netip.Addr) {
	h.unask(p)
	h.asked[p] = src
	if c, covered := h.cover(p); covered {
		if h.behind[c] == nil {
			h.behind[c] = make(behind)
		}
		h.behind[c][h.source(src)]++
	}
}

// unask notes that p is asked for no longer.
func (h *Host) unask(p netip.Prefix) {
	src, ok := h.asked[p]
	if !ok {
		return
	}
	delete(h.asked, p)
	if c, covered := h.cover(p); covered {
		b, src := h.behind[c], h.source(src)
		if b[src]--; b[src] == 0 {
			delete(b, src)
		}
		if len(b) == 0 {
			delete(h.behind, c)
		}
	}
}

// forget notes that nothing is asked for.
func (h *Host) forget() {
	h.asked, h.behind = make(map[netip.Prefix]netip.Addr), make(map[netip.Prefix]behind)
}

// readRoutes says what our routes are in terms of what AddRoutes is asked for.
func (h *Host) readRoutes(ours map[netip.Prefix][]route) map[netip.Prefix]netip.Addr {
	m := make(map[netip.Prefix]netip.Addr, len(ours))
	for p, rs := range ours {
		c, covered := h.cover(p)
		switch _, used := h.behind[c]; {
		case covered && p != c || !h.right(rs, h.source(rs[0].src)):
			m[p] = unspecified(family(p.Addr().Is4()))
		case !covered || !used:
			m[p] = rs[0].src
		}
	}
	for p, src := range h.asked {
		c, covered := h.cover(p)
		rs := ours[c]
		if _, wrong := m[p]; wrong && covered {
			continue
		}
		if covered && len(rs) == 1 && h.right(rs, h.behind[c].keep(rs)) || !covered && h.right(rs, h.source(src)) {
			m[p] = src
		}
	}
	return m
}

// AddRoutes sends packets for these prefixes into the link, which must be up. A source address must be one
// of this host's. A route of somebody else for that prefix with our metric is a *ForeignError. The error
// joins *ItemErrors (see Items); the rest is done. Changing the source address of a route leaves no gap.
func (h *Host) AddRoutes(ctx context.Context, routes []datapath.Route) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, ours, listed, err := h.forRoutes(ctx)
	if err != nil {
		return err
	}
	if !f.link.Up {
		return fmt.Errorf("link %s is down: %w", f.link.Name, unix.ENETDOWN)
	}
	fails := failures{}
	want := make(map[netip.Prefix]netip.Addr, len(routes))
	asked := make(map[netip.Prefix][]netip.Prefix) // what each route that this takes is for
	before := make(map[netip.Prefix]netip.Addr)
	for _, r := range routes {
		p, _, err := prefixes.Canonical(r.Prefix)
		if err != nil {
			fails.add(r.Prefix, err)
			continue
		}
		src := r.Source.Unmap()
		switch is4 := p.Addr().Is4(); {
		case src.IsValid() && (src.Is4() != is4 || src.Zone() != ""):
			fails.add(p, fmt.Errorf("source address %v: of another family, or with a zone", src))
			continue
		case f.lacks(f.link, is4) != nil:
			fails.add(p, f.lacks(f.link, is4))
			continue
		}
		c, covered := h.cover(p)
		if covered || h.o.Sources == SourceDevice {
			if old, ok := h.asked[p]; ok {
				before[p] = old
			}
			h.ask(p, src)
		}
		want[c] = h.source(src)
		asked[c] = append(asked[c], p)
	}
	bad := h.ensure(ctx, f, ours, listed, want)
	var extra []route // routes of their own that what is covered now had from other Options
	for c, ps := range asked {
		for _, p := range ps {
			if err := bad[c]; err != nil {
				fails.add(p, err)
				h.unask(p)
				if old, ok := before[p]; ok {
					h.ask(p, old)
				}
			} else if p != c {
				extra = append(extra, ours[p]...)
			}
		}
	}
	h.delete(ctx, extra, fails)
	if err := h.tidyMoved(ctx); err != nil {
		h.o.Logger.Warn("rules of former options are left", "err", err)
	}
	return fails.join()
}

// forRoutes returns our link and our routes, and whether these were listed for it.
func (h *Host) forRoutes(ctx context.Context) (f found, ours map[netip.Prefix][]route, listed bool, err error) {
	if f, err = h.findLink(ctx); err != nil {
		return f, nil, false, err
	}
	if f.link.Index == 0 {
		return f, nil, false, fmt.Errorf("%s: %w", h.o.Interface, ErrNoLink)
	}
	ours, listed, err = h.knownRoutes(ctx, f.link.Index)
	return f, ours, listed, err
}

// ensure has the link's routes for some prefixes be the ones that Options and their sources say, or what is
// behind them. Where what is known of our routes does not do, because one is said to be there already, or is in
// the way, they are listed.
func (h *Host) ensure(ctx context.Context, f found, ours map[netip.Prefix][]route, listed bool, want map[netip.Prefix]netip.Addr) failures {
	look := func() (err error) {
		ours, err = h.ourRoutes(ctx, f.link.Index)
		listed = true
		return err
	}
	all := func(err error) failures {
		fails := failures{}
		for p := range want {
			fails.add(p, err)
		}
		return fails
	}
	if !listed {
		for p, src := range want {
			src = h.sourceOf(p, src, ours)
			if slices.ContainsFunc(ours[p], func(r route) bool { return h.placed(r) && r.src == src }) {
				if err := look(); err != nil {
					return all(err)
				}
				break
			}
		}
	}
	fails, taken := h.write(ctx, f, ours, want)
	if len(taken) > 0 && !listed {
		again := make(map[netip.Prefix]netip.Addr, len(taken))
		for _, r := range taken {
			again[r.dst] = want[r.dst]
			delete(fails, r.dst)
		}
		want = again
		if err := look(); err != nil {
			maps.Copy(fails, all(err))
			return fails
		}
		var more failures
		more, taken = h.write(ctx, f, ours, want)
		maps.Copy(fails, more)
	}
	h.whose(ctx, f, taken, fails)
	return fails
}

// sourceOf is the source address that a route is to have: for a cover, it depends on what is behind it.
func (h *Host) sourceOf(p netip.Prefix, src netip.Addr, ours map[netip.Prefix][]route) netip.Addr {
	if b, ok := h.behind[p]; ok {
		return b.keep(ours[p])
	}
	return src
}

// write makes those of the wanted routes that are not among ours, and removes what is there in their
// stead. A source address is changed by way of a second route with the next metric: replacing is not to be had
// without risking somebody else's route. Where somebody has that place, the route keeps its source address.
// Those whose place is taken are returned; they have failed too.
func (h *Host) write(ctx context.Context, f found, ours map[netip.Prefix][]route, want map[netip.Prefix]netip.Addr) (fails failures, taken []route) {
	fails = failures{}
	type step struct {
		p   netip.Prefix
		r   route
		add bool
	}
	var first, second, third, last []step
	for p, src := range want {
		src = h.sourceOf(p, src, ours)
		if h.right(ours[p], src) {
			continue
		}
		r := route{dst: p, src: src, table: uint32(h.o.Table), metric: uint32(h.o.Metric), oif: f.link.Index, proto: uint8(h.o.Protocol)}
		exact, wrong, bridged := false, false, false
		for _, o := range ours[p] {
			switch {
			case h.placed(o) && o.src == src:
				exact = true
			case o.table == r.table && o.metric == r.metric:
				wrong = true
				second = append(second, step{p, o, false})
			default:
				bridged = bridged || o.table == r.table
				last = append(last, step{p, o, false})
			}
		}
		switch {
		case exact:
		case wrong:
			if !bridged {
				t := r
				t.metric++
				first, last = append(first, step{p, t, true}), append(last, step{p, t, false})
			}
			third = append(third, step{p, r, true})
		default:
			first = append(first, step{p, r, true})
		}
	}
	for _, steps := range [][]step{first, second, third, last} {
		steps = slices.DeleteFunc(steps, func(s step) bool { return fails[s.p] != nil })
		cs := make([]change, len(steps))
		for i, s := range steps {
			if s.add {
				cs[i] = change{fmt.Sprintf("add route %v to %s", s.p, f.link.Name), s.r.request(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL)}
			} else {
				cs[i] = change{fmt.Sprintf("remove route %v from %s", s.p, f.link.Name), s.r.request(unix.RTM_DELROUTE, 0)}
			}
		}
		for i, err := range h.apply(ctx, cs) {
			s := steps[i]
			h.note(s.r, s.add, err)
			switch {
			case err == nil || !s.add && gone(err) == nil:
			case errors.Is(err, unix.EEXIST):
				taken = append(taken, s.r)
				fails.add(s.p, err)
			case errors.Is(err, unix.EINVAL) && s.add && s.r.src.IsValid():
				fails.add(s.p, fmt.Errorf("%s: %w: is source address %v one of this host's?", cs[i].what, err, s.r.src))
			default:
				fails.add(s.p, fmt.Errorf("%s: %w", cs[i].what, err))
			}
		}
	}
	return fails, taken
}

// note keeps what is known of our routes up with a change of one.
func (h *Host) note(r route, add bool, err error) {
	if h.known == nil || add && errors.Is(err, unix.EEXIST) {
		return
	}
	before := h.known.routes[r.dst]
	var rs []route // others may have the slice
	for _, o := range before {
		if o.table != r.table || o.metric != r.metric || o.tos != r.tos {
			rs = append(rs, o)
		}
	}
	switch {
	case err == nil && add:
		r.typ = unix.RTN_UNICAST
		h.known.routes[r.dst] = append(rs, r)
	case err == nil && len(rs) == 0 && len(before) == 1:
		delete(h.known.routes, r.dst)
	case err == nil && len(rs) == len(before)-1:
		h.known.routes[r.dst] = rs
	default:
		h.known = nil // it was not as known, or there were two of which one is gone
	}
}

// whose says of routes whose place is taken by whom.
func (h *Host) whose(ctx context.Context, f found, taken []route, fails failures) {
	type place struct {
		dst    netip.Prefix
		metric uint32
	}
	by := make(map[place]route)
	if len(taken) > 0 && f.byIndex == nil {
		all, err := h.find(ctx)
		if err != nil {
			h.o.Logger.Warn("links that are in the way have unknown names", "err", err)
		}
		f.byIndex = all.byIndex
	}
	for _, is4 := range []bool{true, false} {
		if !slices.ContainsFunc(taken, func(r route) bool { return r.dst.Addr().Is4() == is4 }) {
			continue
		}
		rs, err := h.list(ctx, routesOf{fam: family(is4), table: uint32(h.o.Table)})
		if err != nil {
			h.o.Logger.Warn("routes that are in the way have unknown owners", "err", err)
		}
		for _, r := range rs {
			if r.oif != f.link.Index || int(r.proto) != h.o.Protocol {
				by[place{r.dst, r.metric}] = r
			}
		}
	}
	for _, r := range taken {
		owner := "somebody else's"
		if o, ok := by[place{r.dst, r.metric}]; ok {
			owner = h.owner(f, o)
		}
		fails[r.dst] = &ForeignError{fmt.Sprintf("route %v", r.dst), owner, "remove it, or choose another metric or table"}
	}
}

// delete removes routes of ours.
func (h *Host) delete(ctx context.Context, rs []route, fails failures) {
	cs := make([]change, len(rs))
	for i, r := range rs {
		cs[i] = change{fmt.Sprintf("remove route %v", r.dst), r.request(unix.RTM_DELROUTE, 0)}
	}
	for i, err := range h.apply(ctx, cs) {
		h.note(rs[i], false, err)
		if err := gone(err); err != nil {
			fails.add(rs[i].dst, fmt.Errorf("%s: %w", cs[i].what, err))
		}
	}
}

// RemoveRoutes removes our routes for these prefixes, in whatever table and with whatever metric. Those
// that are not there are no error, and those of somebody else are left alone. A cover stays as long as it
// covers something that was asked for.
func (h *Host) RemoveRoutes(ctx context.Context, s prefixes.Set) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, ours, listed, err := h.forRoutes(ctx)
	if errors.Is(err, ErrNoLink) {
		h.forget()
		return nil // routes go with their link
	}
	if err != nil {
		return err
	}
	fails := failures{}
	before := make(map[netip.Prefix]netip.Addr)
	touched := make(map[netip.Prefix][]netip.Prefix) // covers
	var rs []route
	for p := range s.All() {
		if src, ok := h.asked[p]; ok {
			before[p] = src
			h.unask(p)
		}
		c, covered := h.cover(p)
		if covered {
			touched[c] = append(touched[c], p)
		}
		if !covered || p != c {
			rs = append(rs, ours[p]...)
		}
	}
	again := make(map[netip.Prefix]netip.Addr)
	for c := range touched {
		if _, ok := h.behind[c]; ok {
			again[c] = netip.Addr{}
		} else {
			rs = append(rs, ours[c]...)
		}
	}
	for c, err := range h.ensure(ctx, f, ours, listed, again) {
		for _, p := range touched[c] {
			fails.add(p, err)
		}
	}
	gone := failures{}
	h.delete(ctx, rs, gone)
	for dst, err := range gone {
		ps := touched[dst]
		if len(ps) == 0 {
			ps = []netip.Prefix{dst}
		}
		for _, p := range ps {
			fails.add(p, err)
			if src, ok := before[p]; ok {
				h.ask(p, src)
			}
		}
	}
	return fails.join()
}
