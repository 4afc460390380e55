package hostnet

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// mostChecked is how many of our routes, of what is guarded and of the peers' endpoints are looked up for problems, of each
// family.
const mostChecked = 16

// some are the first prefixes of each family, in order.
func some(ps iter.Seq[netip.Prefix]) (some []netip.Prefix) {
	var four, six int
	for _, p := range slices.SortedFunc(ps, prefixes.Compare) {
		n := &six
		if p.Addr().Is4() {
			n = &four
		}
		if *n++; *n <= mostChecked {
			some = append(some, p)
		}
	}
	return some
}

// problems asks the kernel where packets go. under is the link of the host's underlay.
func (h *Host) problems(ctx context.Context, f found, under link, rs []rule, ours map[netip.Prefix][]route, rpAll uint32) (ps problems) {
	if f.link.Index == 0 || !f.link.Up {
		return nil
	}
	h.markUse(f, rs, &ps)
	checked := some(maps.Keys(ours))
	for _, dst := range checked {
		h.shadowed(ctx, f, dst, rs, &ps)
	}
	for _, dst := range some(h.o.Guard.All()) {
		h.unguarded(ctx, f, dst, rs, &ps)
	}
	// The reverse path filter looks for the way back as this does: without the packet's mark.
	if max(rpAll, f.link.rpFilter) != 1 && (under.Index == 0 || max(rpAll, under.rpFilter) != 1) {
		return ps
	}
	for _, dst := range checked {
		if !dst.Addr().Is4() {
			break
		}
		if dst.Bits() <= 1 && under.Index != 0 && max(rpAll, under.rpFilter) == 1 && !h.o.Policy {
			ps.strict(under, fmt.Sprintf("%v is routed into %s: packets of peers may be dropped", dst, f.link.Name), "")
		}
		if max(rpAll, f.link.rpFilter) != 1 {
			continue
		}
		if r, ok := h.lookup(ctx, dst.Addr(), 0); !ok || r.oif != f.link.Index {
			ps.strict(f.link, fmt.Sprintf("packets to %v do not go there: those from it are dropped", dst), fmt.Sprintf(", or add a rule for table %d", h.o.Table))
			break
		}
	}
	return ps
}

func (ps *problems) strict(l link, why, or string) {
	ps.add("rp_filter of "+l.Name, fmt.Sprintf("the reverse path filter of %s is strict, and %s", l.Name, why),
		fmt.Sprintf("set net.ipv4.conf.%s.rp_filter to 2, and net.ipv4.conf.all.rp_filter to 0 or 2%s", l.Name, or))
}

// markUse reports rules of others that look at bits of our mark, or take all packets but those with a mark of their
// own: they may be about other packets than they are meant for, or ours about theirs.
func (h *Host) markUse(f found, rs []rule, ps *problems) {
	if !h.o.Policy {
		return
	}
	for _, r := range rs {
		if int(r.proto) == h.o.Protocol && !r.other || r.mask == 0 {
			continue
		}
		if r.mark == h.o.Mark && r.mask == h.o.Mask && r.not && !r.other {
			continue // another mesh, which is to share the mark: its packets stay out of our tunnel, and ours out of its
		}
		const remedy = "choose a mark and mask of bits that nobody else uses, and the same ones for all meshes of a host"
		switch {
		case r.mask&h.o.Mask != 0:
			ps.add("mark", fmt.Sprintf("%v, with protocol %s, is about bits of mark %#x/%#x, by which encrypted packets are told from others", r, protoName(r.proto), h.o.Mark, h.o.Mask), remedy)
		case r.not && h.o.Mark&r.mask != r.mark:
			ps.add("mark", fmt.Sprintf("%v, with protocol %s, is about all packets without that mark, and so about encrypted ones, which have %#x/%#x", r, protoName(r.proto), h.o.Mark, h.o.Mask), remedy)
		}
	}
}

// shadowed reports that packets to a prefix which is routed into our link go elsewhere.
func (h *Host) shadowed(ctx context.Context, f found, dst netip.Prefix, rs []rule, ps *problems) {
	if !h.o.Policy && h.o.Table != MainTable {
		return // it is the administrator's to say which packets go there
	}
	var at goes
	for _, to := range samples(dst) {
		if at = h.goes(ctx, to); at.oif == f.link.Index && at.err == nil {
			return
		}
	}
	h.blame(ctx, f, at, rs, fmt.Sprintf("packets to %v do not reach %s", dst, f.link.Name), "route to "+dst.String(), ps)
}

// unguarded reports that packets to a prefix that is guarded leave by another way than our link, and not because the main
// table knows better.
func (h *Host) unguarded(ctx context.Context, f found, dst netip.Prefix, rs []rule, ps *problems) {
	for _, to := range samples(dst) {
		at := h.goes(ctx, to)
		if at.err != nil || at.oif == f.link.Index || at.typ != unix.RTN_UNICAST || at.table == MainTable && at.dst.Bits() > 0 {
			continue
		}
		h.blame(ctx, f, at, rs, fmt.Sprintf("packets to %v, which is guarded, leave this host", dst), "guard of "+dst.String(), ps)
		return
	}
}

// goes is where an unmarked packet to an address goes; err says that it is refused.
type goes struct {
	to netip.Addr
	route
	err error
}

func (h *Host) goes(ctx context.Context, to netip.Addr) goes {
	r, err := h.match(ctx, to)
	return goes{to, r, err}
}

// blame says by what packets go where they go: a rule that comes before ours, or a route.
func (h *Host) blame(ctx context.Context, f found, w goes, rs []rule, what, subject string, ps *problems) {
	fam := family(w.to.Is4())
	refused := route{}
	if w.err != nil {
		refused = h.refusal(ctx, fam, w.to)
		what += ": they are refused"
	} else {
		what += fmt.Sprintf(": they go to %s, by a route to %v in table %d with protocol %s", f.byIndex[w.oif].Name, w.dst, w.table, protoName(w.proto))
	}
	remedy := "remove that route, or stop announcing that prefix where it comes from"
	i := slices.IndexFunc(rs, func(r rule) bool {
		if r.fam != fam || int(r.proto) == h.o.Protocol && !r.other || r.priority == 0 || r.priority >= 32766 || h.o.Policy && r.priority > uint32(h.o.Priority)+1 {
			return false
		}
		if w.err != nil {
			return r.action != unix.FR_ACT_TO_TBL || refused.table != 0 && refused.table != MainTable && r.table == refused.table
		}
		return r.action == unix.FR_ACT_TO_TBL && r.table == w.table
	})
	switch {
	case i >= 0:
		subject = fmt.Sprintf("rule %d", rs[i].priority)
		what += fmt.Sprintf("; %v with protocol %s comes first", rs[i], protoName(rs[i].proto))
		remedy = "remove that rule, or give it a higher number"
		if h.o.Policy {
			remedy = fmt.Sprintf("remove that rule, or give it a number above %d, or the mesh a priority below it", h.o.Priority+1)
		}
	case refused.dst.IsValid():
		what += fmt.Sprintf(", by a route to %v in table %d with protocol %s", refused.dst, refused.table, protoName(refused.proto))
	}
	ps.add(subject, what, remedy)
}

// refusal returns the narrowest route that refuses packets to an address; the main table's if there is one.
func (h *Host) refusal(ctx context.Context, fam uint8, to netip.Addr) (best route) {
	for _, typ := range []uint8{unix.RTN_UNREACHABLE, unix.RTN_PROHIBIT, unix.RTN_BLACKHOLE} {
		rs, err := h.list(ctx, routesOf{fam: fam, typ: typ})
		if err != nil {
			return best
		}
		for _, r := range rs {
			in := r.dst.Contains(to) && (int(r.proto) != h.o.Protocol || r.metric != guardMetric) && r.metric != kernelsLast
			if in && (!best.dst.IsValid() || r.table == MainTable && best.table != MainTable || r.table == best.table && r.dst.Bits() > best.dst.Bits()) {
				best = r
			}
		}
	}
	return best
}

// kernelsLast is the metric of the route by which Linux says that IPv6 has no way.
const kernelsLast = 1<<32 - 1

// samples are addresses of a prefix: if packets to none of them go into our link, it is of no use. What the host
// knows better may take any one of them.
func samples(p netip.Prefix) []netip.Addr {
	if p.IsSingleIP() {
		return []netip.Addr{p.Addr()}
	}
	var as []netip.Addr
	for _, fill := range []byte{0x5a, 0xa5, 0x33} {
		b := p.Addr().AsSlice()
		for bit := p.Bits(); bit < len(b)*8; bit++ {
			if fill>>(7-bit%8)&1 == 1 {
				b[bit/8] |= 1 << (7 - bit%8)
			}
		}
		a, _ := netip.AddrFromSlice(b)
		as = append(as, a)
	}
	return as
}

// match asks the kernel by which route an unmarked packet to dst goes.
func (h *Host) match(ctx context.Context, dst netip.Addr) (r route, err error) {
	fam := family(dst.Is4())
	q := newRequest(unix.RTM_GETROUTE, 0, []byte{fam, uint8(dst.BitLen()), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	flags := uint32(unix.RTM_F_FIB_MATCH)
	if dst.Is4() {
		flags |= unix.RTM_F_LOOKUP_TABLE // IPv6 always says which table it was
	}
	ne.PutUint32(q[unix.NLMSG_HDRLEN+8:], flags)
	q = q.addr(unix.RTA_DST, dst)
	err = h.c.one(ctx, q, func(m message) {
		if m.typ == unix.RTM_NEWROUTE && len(m.body) >= unix.SizeofRtMsg && m.body[0] == fam {
			ne.PutUint32(m.body[8:], 0)
			r, _ = parseRoute(m.body)
		}
	})
	return r, err
}

// Problems reports what is wrong around a device that is s, beside what Read says of the host alone.
func (h *Host) Problems(ctx context.Context, s datapath.State) ([]datapath.Problem, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ps problems
	if err := h.unfitting(ctx, s, &ps); err != nil {
		return nil, err
	}
	conf, err := h.netconf(ctx)
	if err != nil {
		return nil, err
	}
	h.unpassed(ctx, conf, s.Local, &ps)
	if h.o.Policy {
		err = h.unheard(ctx, conf, s.Peers, &ps)
	}
	return ps, err
}

// unheard reports peers whose packets do not arrive: where the host's reverse path filter asks for a way back
// without the mark, and that leads into our link.
func (h *Host) unheard(ctx context.Context, conf netconf, peers map[key.Public]datapath.Peer, ps *problems) error {
	if len(peers) == 0 {
		return nil
	}
	f, err := h.find(ctx)
	if err != nil {
		return err
	}
	strict := func(l link) bool { return max(conf.rpFilter, l.rpFilter) == 1 }
	anywhere := false
	for _, l := range f.byIndex {
		anywhere = anywhere || strict(l) && !l.loopback && l.Index != f.link.Index
	}
	if !anywhere {
		return nil
	}
	ours, _, err := h.knownRoutes(ctx, f.link.Index)
	if err != nil {
		return err
	}
	var endpoints []netip.Addr // of those that it may be about
	for _, p := range peers {
		if a := p.Endpoint.Addr(); a.Is4() && routed(ours, a) {
			endpoints = append(endpoints, a)
		}
	}
	slices.SortFunc(endpoints, netip.Addr.Compare)
	for _, to := range endpoints[:min(len(endpoints), mostChecked)] {
		r, ok := h.lookup(ctx, to, h.o.Mark)
		if under := f.byIndex[r.oif]; ok && strict(under) {
			if back, ok := h.lookup(ctx, to, 0); ok && back.oif == f.link.Index {
				ps.strict(under, fmt.Sprintf("without its mark a packet to the peer at %v would go into %s: what arrives from it is dropped", to, f.link.Name), "")
			}
		}
	}
	return nil
}

// routed reports whether a route of ours has an address inside.
func routed(ours map[netip.Prefix][]route, a netip.Addr) bool {
	for bits := a.BitLen(); bits >= 0; bits-- {
		if p, err := a.Prefix(bits); err == nil && len(ours[p]) > 0 {
			return true
		}
	}
	return false
}
