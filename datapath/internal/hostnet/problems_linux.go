package hostnet

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// mostChecked is how many of our routes, and of the peers' endpoints, are looked up for problems.
const mostChecked = 16

// problems asks the kernel where packets go. under is the link of the host's underlay.
func (h *Host) problems(ctx context.Context, f found, under link, rs []rule, ours map[netip.Prefix][]route, rpAll uint32) (ps problems) {
	if f.link.Index == 0 || !f.link.Up {
		return nil
	}
	h.markUse(f, rs, &ps)
	checked := slices.SortedFunc(maps.Keys(ours), prefixes.Compare)
	checked = checked[:min(len(checked), mostChecked)]
	for _, dst := range checked {
		h.shadowed(ctx, f, dst, rs, &ps)
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

// markUse reports rules of others that look at bits of our mark: they may be about other packets than they are
// meant for, or ours about theirs.
func (h *Host) markUse(f found, rs []rule, ps *problems) {
	if !h.o.Policy {
		return
	}
	for _, r := range rs {
		if int(r.proto) == h.o.Protocol && !r.other || r.mask&h.o.Mask == 0 {
			continue
		}
		if r.mark == h.o.Mark && r.mask == h.o.Mask && r.not && !r.other {
			continue // another mesh, which is to share the mark: its packets stay out of our tunnel, and ours out of its
		}
		ps.add("mark", fmt.Sprintf("%v, with protocol %s, is about bits of mark %#x/%#x, by which encrypted packets are told from others", r, protoName(r.proto), h.o.Mark, h.o.Mask),
			"choose a mark and mask of bits that nobody else uses")
		return
	}
}

// shadowed reports that packets to a prefix which is routed into our link go elsewhere.
func (h *Host) shadowed(ctx context.Context, f found, dst netip.Prefix, rs []rule, ps *problems) {
	if !h.o.Policy && h.o.Table != MainTable {
		return // it is the administrator's to say which packets go there
	}
	var elsewhere route
	for _, to := range samples(dst) {
		r, err := h.match(ctx, to)
		if r.oif == f.link.Index && err == nil {
			return
		}
		if elsewhere = r; err != nil {
			elsewhere = route{}
		}
	}
	var before *rule
	for i, r := range rs {
		if r.fam == family(dst.Addr().Is4()) && int(r.proto) != h.o.Protocol && r.priority > 0 && r.priority < 32766 && (!h.o.Policy || r.priority <= uint32(h.o.Priority)+1) &&
			(elsewhere.table == 0 || r.table == elsewhere.table) {
			before = &rs[i]
			break
		}
	}
	what := "are refused"
	if elsewhere.oif != 0 {
		what = fmt.Sprintf("go to %s, by a route to %v in table %d with protocol %s", f.byIndex[elsewhere.oif].Name, elsewhere.dst, elsewhere.table, protoName(elsewhere.proto))
	}
	subject, remedy := "route to "+dst.String(), "remove that route, or stop announcing that prefix where it comes from"
	if before != nil {
		subject = "rule " + fmt.Sprint(before.priority)
		what += fmt.Sprintf("; %v with protocol %s comes first", *before, protoName(before.proto))
		remedy = "remove that rule, or give it a higher number"
		if h.o.Policy {
			remedy = fmt.Sprintf("remove that rule, or give it a number above %d, or the mesh a priority below it", h.o.Priority+1)
		}
	}
	ps.add(subject, fmt.Sprintf("packets to %v do not reach %s: they %s", dst, f.link.Name, what), remedy)
}

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
	some := false
	for _, l := range f.byIndex {
		some = some || strict(l) && !l.loopback && l.Index != f.link.Index
	}
	if !some {
		return nil
	}
	var endpoints []netip.Addr
	for _, p := range peers {
		if a := p.Endpoint.Addr(); a.Is4() {
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
