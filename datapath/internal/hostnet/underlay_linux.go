package hostnet

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/world"
)

// connectors are the protocols of routes that connect the host with networks: those of the kernel, of router
// advertisements, of DHCP clients and of the administrator. A routing daemon's are another's networks, and many.
var connectors = []uint8{unix.RTPROT_KERNEL, unix.RTPROT_BOOT, unix.RTPROT_STATIC, unix.RTPROT_RA, unix.RTPROT_DHCP}

// broad reports whether a route to p is about more than a network: it may be in place of a default route.
func broad(p netip.Prefix) bool {
	if p.Addr().Is4() {
		return p.Bits() <= 8
	}
	return p.Bits() <= 16
}

// connects returns the links that a network is on, if b is a route that says so: one of the main table without a
// gateway. An address may be alone on its link (/32, /128), and its network there by a route only, as DHCP for IPv6 and
// router advertisements have it.
func connects(b []byte) (dst netip.Prefix, links []int) {
	r, ok := parseRoute(b)
	if !ok || r.table != MainTable || r.typ != unix.RTN_UNICAST || broad(r.dst) || !slices.Contains(connectors, r.proto) {
		return dst, nil
	}
	if a := r.dst.Addr(); a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() {
		return dst, nil
	}
	direct := func(b []byte, n int) bool {
		for typ := range attrs(b, n) {
			if typ == unix.RTA_GATEWAY || typ == unix.RTA_VIA || typ == unix.RTA_ENCAP {
				return false
			}
		}
		return true
	}
	if r.oif != 0 && direct(b, unix.SizeofRtMsg) {
		links = append(links, r.oif)
	}
	for typ, v := range attrs(b, unix.SizeofRtMsg) {
		for typ == unix.RTA_MULTIPATH && len(v) >= unix.SizeofRtNexthop {
			n := int(ne.Uint16(v))
			if n < unix.SizeofRtNexthop || n > len(v) {
				break
			}
			if direct(v[:n], unix.SizeofRtNexthop) {
				links = append(links, int(ne.Uint32(v[4:])))
			}
			v = v[min(align(n), len(v)):]
		}
	}
	return r.dst, links
}

// connected are the networks that the host is connected to by routes, beside those of its addresses. What leads into a
// tunnel is none.
func (h *Host) connected(ctx context.Context, f found) (ps []netip.Prefix, err error) {
	for _, fam := range f.families() {
		for _, proto := range connectors {
			err := h.eachRoute(ctx, routesOf{fam: fam, table: MainTable, proto: proto, typ: unix.RTN_UNICAST}, func(b []byte) {
				dst, links := connects(b)
				if slices.ContainsFunc(links, func(i int) bool { return f.byIndex[i].network(f.link.Index) }) {
					ps = append(ps, dst)
				}
			})
			if err != nil {
				return nil, err
			}
		}
	}
	return ps, nil
}

// network reports whether there can be a network on l: it is up, and no tunnel. ours is the index of our link.
func (l link) network(ours int) bool {
	return l.Up && !l.loopback && !l.pointToPoint && l.Index != ours && !l.mesh()
}

// way is by what encrypted packets to the world go.
type way struct {
	link  link
	is4   bool
	mtu   int // bytes
	takes int // how many of the addresses
}

// ways looks up where encrypted packets to the world go, those that take most of it first. What takes a single address
// is a route to some network.
func (h *Host) ways(ctx context.Context, f found) []way {
	var ws []way
	for _, to := range world.Addrs {
		r, ok := h.lookup(ctx, to, h.sendMark)
		l := f.byIndex[r.oif]
		if !ok || r.oif == f.link.Index || l.loopback {
			continue
		}
		mtu := l.MTU
		if r.mtu != 0 {
			mtu = min(mtu, int(r.mtu))
		}
		i := slices.IndexFunc(ws, func(w way) bool { return w.link.Index == l.Index && w.is4 == to.Is4() && w.mtu == mtu })
		if i < 0 {
			i, ws = len(ws), append(ws, way{link: l, is4: to.Is4(), mtu: mtu})
		}
		ws[i].takes++
	}
	ws = slices.DeleteFunc(ws, func(w way) bool { return w.takes < 2 })
	slices.SortStableFunc(ws, func(a, b way) int { return b.takes - a.takes })
	return ws
}

// Encrypted says which mark the device's packets have, so that the underlay is what they find. It reports whether they
// had another one: what Read said of the underlay may then be wrong. With Options.Policy one that is not apart counts
// for none, since it is put right.
func (h *Host) Encrypted(mark uint32) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.o.Policy && !h.Apart(mark) {
		mark = h.o.Mark
	}
	changed, h.sendMark = mark != h.sendMark, mark
	return changed
}

// unfitting reports that encrypted packets do not fit what is to carry them: the underlay, or the way to a peer.
func (h *Host) unfitting(ctx context.Context, s datapath.State, ps *problems) error {
	if s.Device.MTU == 0 {
		return nil
	}
	worst, bad := mtuProblem(s.Host, s.Device.MTU)
	room := s.Host.UnderlayMTU - overhead(s.Host)
	if s.Host.UnderlayMTU == 0 {
		room = MaxMTU
	}
	ours, err := h.findLink(ctx)
	if err != nil {
		return err
	}
	links := make(map[int]link)
	for _, to := range endpoints(s) {
		r, ok := h.lookup(ctx, to, h.sendMark)
		if !ok || r.oif == ours.link.Index {
			continue
		}
		l, seen := links[r.oif]
		if !seen {
			l = h.linkAt(ctx, r.oif)
			links[r.oif] = l
		}
		mtu := l.MTU
		if r.mtu != 0 {
			mtu = min(mtu, int(r.mtu))
		}
		adds := overhead(datapath.Host{IPv4: to.Is4(), IPv6: to.Is6()})
		if mtu == 0 || mtu-adds >= room {
			continue
		}
		if p, small := tooNarrow(fmt.Sprintf("the way to the peer at %v, by %s,", to, l.Name), mtu, adds, s.Device.MTU); small {
			worst, bad, room = p, true, mtu-adds
		}
	}
	if bad {
		*ps = append(*ps, worst)
	}
	return nil
}

// endpoints are some peers' addresses of each family.
func endpoints(s datapath.State) (some []netip.Addr) {
	all := make(map[netip.Addr]struct{})
	for _, p := range s.Peers {
		if a := p.Endpoint.Addr().Unmap(); a.IsValid() && !a.IsLinkLocalUnicast() {
			all[a] = struct{}{}
		}
	}
	n := map[bool]int{}
	for _, a := range slices.SortedFunc(maps.Keys(all), netip.Addr.Compare) {
		if n[a.Is4()]++; n[a.Is4()] <= mostChecked {
			some = append(some, a)
		}
	}
	return some
}

// linkAt returns the link of that index; the zero one if there is none.
func (h *Host) linkAt(ctx context.Context, index int) (l link) {
	r := newRequest(unix.RTM_GETLINK, 0, linkHeader(index, 0, 0)).u32(unix.IFLA_EXT_MASK, rtextFilterSkipStat)
	_ = h.c.one(ctx, r, func(m message) {
		if m.typ == unix.RTM_NEWLINK {
			l, _ = parseLink(m.body)
		}
	})
	return l
}

// reach is which addresses the host was found to have a way to, for encrypted packets, since it last changed.
type reach struct {
	told int64 // see watcher
	mark uint32
	ways map[netip.Addr]bool
}

// mostAsked is how many addresses NoRoutes asks the kernel about: some milliseconds.
const mostAsked = 512

// NoRoutes returns those of the addresses that the host has no way to, for encrypted packets. Where there are many, it
// takes several calls until all are asked about; from then on only a change of the host costs anything.
func (h *Host) NoRoutes(ctx context.Context, to []netip.Addr) map[netip.Addr]bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watch.catchUp(h)
	if told := h.watch.told.Load(); h.reach.ways == nil || told != h.reach.told || h.sendMark != h.reach.mark || len(h.reach.ways) > 2*(len(to)+mostAsked) {
		h.reach = reach{told: told, mark: h.sendMark, ways: make(map[netip.Addr]bool)}
	}
	var without map[netip.Addr]bool
	left := mostAsked
	for _, a := range to {
		way, known := h.reach.ways[a]
		if !known {
			if left--; left < 0 {
				continue
			}
			var r route
			if r, way = h.lookup(ctx, a.WithZone(""), h.sendMark); ctx.Err() != nil {
				return without
			}
			if r.typ == unix.RTN_LOCAL {
				way = true
			} else if r.oif != 0 && int64(r.oif) == h.watch.ours.Load() {
				way = false // WireGuard refuses to send through itself
			}
			h.reach.ways[a] = way
		}
		if !way {
			if without == nil {
				without = make(map[netip.Addr]bool)
			}
			without[a] = true
		}
	}
	return without
}
