//go:build linux

package hostnet

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
)

// model is a host that consists of lists, and says what each step must do to it. It knows two kinds of
// routes: ours, and somebody else's on eth0 or on our own link. It shares no code with Host.
type model struct {
	addrs   map[netip.Addr]bool
	theirs  map[netip.Addr]bool // addresses of eth0
	ours    map[netip.Prefix]netip.Addr
	foreign map[spot]bool         // whether it is into our link
	aside   map[netip.Prefix]bool // ours is beside its place: somebody put a route there while it was changed
}

// spot is a place in the main table that holds one route.
type spot struct {
	p      netip.Prefix
	metric int
}

func (s spot) String() string { return fmt.Sprintf("%v metric %d", s.p, s.metric) }

var (
	modelPrefixes = []netip.Prefix{pp("0.0.0.0/0"), pp("10.8.0.0/16"), pp("10.8.0.0/24"), pp("10.8.0.1/32"), pp("10.9.0.0/16"), pp("::/0"), pp("fd08::/48"), pp("fd08::/64"), pp("fd08::1/128")}
	modelAddrs    = []netip.Addr{ap("10.7.0.1"), ap("10.7.0.2"), ap("fd07::1"), ap("fd07::2")}
)

type modelRun struct {
	*testing.T
	s    *space
	h    *Host
	nl   *netlink.Handle
	r    *rand.Rand
	m    model
	eth  netlink.Link
	eth0 int
	log  []string
}

func pick[T any](r *rand.Rand, s []T) T { return s[r.IntN(len(s))] }

func (m *modelRun) did(format string, a ...any) { m.log = append(m.log, fmt.Sprintf(format, a...)) }

// sources are the addresses of a family that routes may name, and none.
func (m *modelRun) source(is4 bool) netip.Addr {
	var of []netip.Addr
	for _, a := range modelAddrs {
		if a.Is4() == is4 && (m.m.addrs[a] || m.m.theirs[a]) {
			of = append(of, a)
		}
	}
	return pick(m.r, append(of, netip.Addr{}))
}

func (m *modelRun) route(p netip.Prefix, link, metric, proto int) *netlink.Route {
	n, err := prefixes.IPNet(p)
	must(m, err)
	r := &netlink.Route{Dst: &n, LinkIndex: link, Priority: metric, Protocol: netlink.RouteProtocol(proto), Table: unix.RT_TABLE_MAIN}
	if p.Addr().Is4() {
		r.Scope = netlink.SCOPE_LINK
	}
	return r
}

func (m *modelRun) index() int {
	l, err := m.h.Link(m.Context())
	must(m, err)
	return l.Index
}

// step does one thing, and checks what it says.
func (m *modelRun) step() {
	switch m.r.IntN(16) {
	case 0, 1, 2, 3: // routes
		var rs []datapath.Route
		for range 1 + m.r.IntN(4) {
			p := pick(m.r, modelPrefixes)
			if !slices.ContainsFunc(rs, func(r datapath.Route) bool { return r.Prefix == p }) {
				rs = append(rs, datapath.Route{Prefix: p, Source: m.source(p.Addr().Is4())})
			}
		}
		m.did("add routes %v", rs)
		got := map[netip.Prefix]error{}
		for p, err := range Items(m.h.AddRoutes(m.Context(), rs)) {
			got[p] = err
		}
		for _, r := range rs {
			src, have := m.m.ours[r.Prefix]
			_, taken := m.m.foreign[spot{r.Prefix, 50}]
			_, next := m.m.foreign[spot{r.Prefix, 51}]
			var f *ForeignError
			switch {
			case have && src == r.Source && !m.m.aside[r.Prefix]:
				if got[r.Prefix] != nil {
					m.Errorf("%v: got %v, and it is there", r, got[r.Prefix])
				}
			case have && !m.m.aside[r.Prefix] && next: // there is no way to change it
				if !errors.As(got[r.Prefix], &f) {
					m.Errorf("%v: got %v, and somebody has the next metric", r, got[r.Prefix])
				}
			case taken:
				if !errors.As(got[r.Prefix], &f) {
					m.Errorf("%v: got %v, and somebody has it", r, got[r.Prefix])
				}
				if have {
					m.m.aside[r.Prefix] = true
				}
			default:
				if got[r.Prefix] != nil {
					m.Errorf("%v: got %v", r, got[r.Prefix])
				}
				m.m.ours[r.Prefix] = r.Source
				delete(m.m.aside, r.Prefix)
			}
		}
	case 4, 5:
		var ps prefixes.Set
		for range 1 + m.r.IntN(3) {
			ps = ps.With(pick(m.r, modelPrefixes))
		}
		m.did("remove routes %v", ps)
		must(m, m.h.RemoveRoutes(m.Context(), ps))
		for p := range ps.All() {
			delete(m.m.ours, p)
			delete(m.m.aside, p)
		}
	case 6, 7: // addresses
		a := pick(m.r, modelAddrs)
		m.did("add %v", a)
		var f *ForeignError
		err := m.h.AddAddrs(m.Context(), prefixes.Must(prefixes.Host(a)))
		switch {
		case m.m.theirs[a] && !errors.As(err, &f):
			m.Errorf("%v: got %v, and eth0 has it", a, err)
		case !m.m.theirs[a] && err != nil:
			m.Errorf("%v: got %v", a, err)
		case !m.m.theirs[a]:
			m.m.addrs[a] = true
		}
	case 8:
		a := pick(m.r, modelAddrs)
		used := slices.Contains(slices.Collect(maps.Values(m.m.ours)), a) || len(m.m.aside) > 0
		if used && m.m.addrs[a] {
			return // Linux takes the routes with it, which a driver does first
		}
		m.did("remove %v", a)
		must(m, m.h.RemoveAddrs(m.Context(), prefixes.Must(prefixes.Host(a))))
		had := m.m.addrs[a]
		delete(m.m.addrs, a)
		if had && a.Is4() && !slices.ContainsFunc(slices.Collect(maps.Keys(m.m.addrs)), netip.Addr.Is4) {
			// With the last IPv4 address Linux removes every IPv4 route into the link, somebody else's too,
			// unless we have one there, which keeps them all.
			if !slices.ContainsFunc(slices.Collect(maps.Keys(m.m.ours)), func(p netip.Prefix) bool { return p.Addr().Is4() }) {
				maps.DeleteFunc(m.m.foreign, func(_ spot, ours bool) bool { return ours })
			}
		}
	case 9, 10: // somebody adds a route, where there is none or behind what there is
		at := spot{pick(m.r, modelPrefixes), pick(m.r, []int{50, 50, 51, 7})}
		link := m.eth0
		if m.r.IntN(4) == 0 && at.p.Addr().Is4() {
			link = m.index()
		}
		behind := m.r.IntN(2) == 0
		r := m.route(at.p, link, at.metric, unix.RTPROT_STATIC)
		m.did("somebody adds %v to interface %d, behind what there is: %t", at, link, behind)
		if _, taken := m.m.foreign[at]; taken {
			return
		}
		_, have := m.m.ours[at.p]
		if behind && link == m.eth0 {
			must(m, m.nl.RouteAppend(r))
			m.m.foreign[at] = false
			return
		}
		switch err := m.nl.RouteAdd(r); {
		case err == nil:
			m.m.foreign[at] = link != m.eth0
		case errors.Is(err, unix.EEXIST) && have:
		default:
			m.Errorf("%v: %v", at, err)
		}
	case 11: // and takes his away
		for at := range m.m.foreign {
			m.did("somebody removes his %v", at)
			r := m.route(at.p, 0, at.metric, unix.RTPROT_STATIC)
			must(m, m.nl.RouteDel(r))
			delete(m.m.foreign, at)
			break
		}
	case 12: // or ours
		for p := range m.m.ours {
			if m.m.aside[p] {
				continue
			}
			m.did("somebody removes our %v", p)
			must(m, m.nl.RouteDel(m.route(p, m.index(), 50, 87)))
			delete(m.m.ours, p)
			break
		}
	case 13: // an address of his
		a := pick(m.r, modelAddrs)
		if m.m.addrs[a] || slices.Contains(slices.Collect(maps.Values(m.m.ours)), a) || len(m.m.aside) > 0 {
			return
		}
		n, _ := prefixes.IPNet(prefixes.Host(a))
		if m.m.theirs[a] {
			m.did("somebody removes his %v", a)
			must(m, m.nl.AddrDel(m.eth, &netlink.Addr{IPNet: &n}))
			delete(m.m.theirs, a)
		} else {
			m.did("somebody takes %v", a)
			must(m, m.nl.AddrAdd(m.eth, &netlink.Addr{IPNet: &n, Flags: unix.IFA_F_NODAD | unix.IFA_F_NOPREFIXROUTE}))
			m.m.theirs[a] = true
		}
	case 14: // somebody deletes our link
		if m.r.IntN(4) > 0 {
			return
		}
		m.did("somebody deletes our link")
		maps.DeleteFunc(m.m.foreign, func(_ spot, ours bool) bool { return ours })
		m.s.ip("link del wg0")
		m.m.ours, m.m.addrs, m.m.aside = map[netip.Prefix]netip.Addr{}, map[netip.Addr]bool{}, map[netip.Prefix]bool{}
		if _, created, err := m.h.Adopt(m.Context(), kind, nil); err != nil || !created {
			m.Fatalf("created %t, %v", created, err)
		}
		must(m, m.h.Up(m.Context(), 1420))
	case 15: // the agent restarts
		m.did("restart")
		must(m, m.h.Close())
		m.h = m.s.open(Options{})
		if _, created, err := m.h.Adopt(m.Context(), kind, nil); err != nil || created {
			m.Fatalf("created %t, %v", created, err)
		}
	}
}

// check compares what Host reads, and what another library sees of somebody else's, with the model.
func (m *modelRun) check() {
	st, err := m.h.Read(m.Context())
	must(m, err)
	want := maps.Clone(m.m.ours)
	for p := range m.m.aside {
		if _, ok := want[p]; ok {
			want[p] = map[bool]netip.Addr{true: netip.IPv4Unspecified(), false: netip.IPv6Unspecified()}[p.Addr().Is4()]
		}
	}
	if !st.Ready || !maps.Equal(st.Routes, want) {
		m.Errorf("ready %t, routes:\n%s", st.Ready, cmp.Diff(want, st.Routes, equal...))
	}
	var addrs prefixes.Set
	for a := range m.m.addrs {
		addrs = addrs.With(prefixes.Host(a))
	}
	if st.Addrs != addrs {
		m.Errorf("addresses %v, want %v", st.Addrs, addrs)
	}
	got := map[spot]bool{}
	rs, err := m.nl.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Protocol: unix.RTPROT_STATIC, Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
	must(m, err)
	for _, r := range rs {
		p, err := prefixes.FromIPNet(*r.Dst)
		must(m, err)
		got[spot{p, r.Priority}] = r.LinkIndex != m.eth0
	}
	if !maps.Equal(got, m.m.foreign) {
		m.Errorf("somebody else's routes:\n%s", cmp.Diff(fmt.Sprint(m.m.foreign), fmt.Sprint(got)))
	}
}

// Whatever we and somebody else do in turn, ours is as asked for, and his is as he left it.
func TestModel(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.ip("link add eth0 type veth peer name far0", "link set eth0 up", "link set far0 up", "addr add 203.0.113.2/24 dev eth0") // with the last one its routes would go
	s.settle()
	before := s.raw()
	f, err := os.Open(s.path)
	must(t, err)
	defer f.Close()
	nl, err := netlink.NewHandleAt(netns.NsHandle(f.Fd()), unix.NETLINK_ROUTE)
	must(t, err)
	defer nl.Close()
	eth0, err := nl.LinkByName("eth0")
	must(t, err)
	steps := 0
	for seed := range uint64(25) {
		m := &modelRun{T: t, s: s, nl: nl, r: rand.New(rand.NewPCG(seed, 0)), eth: eth0, eth0: eth0.Attrs().Index, h: s.up(Options{})}
		m.m = model{map[netip.Addr]bool{}, map[netip.Addr]bool{}, map[netip.Prefix]netip.Addr{}, map[spot]bool{}, map[netip.Prefix]bool{}}
		for range 60 {
			m.step()
			if steps++; m.r.IntN(3) > 0 { // else there is no reading that would tell the Host what others did
				m.check()
			}
			if t.Failed() {
				t.Fatalf("seed %d:\n%s", seed, strings.Join(m.log, "\n"))
			}
		}
		if m.check(); t.Failed() {
			t.Fatalf("seed %d:\n%s", seed, strings.Join(m.log, "\n"))
		}
		must(t, m.h.Close())
		// Clean, only his is left.
		must(t, Cleanup(t.Context(), s.options(Options{})))
		for at := range m.m.foreign {
			_ = nl.RouteDel(m.route(at.p, m.eth0, at.metric, unix.RTPROT_STATIC)) // those into our link went with it
		}
		for a := range m.m.theirs {
			n, _ := prefixes.IPNet(prefixes.Host(a))
			must(t, nl.AddrDel(eth0, &netlink.Addr{IPNet: &n}))
		}
		become(t, fmt.Sprintf("seed %d: left", seed), before, s.raw)
	}
	t.Logf("%d steps", steps)
}
