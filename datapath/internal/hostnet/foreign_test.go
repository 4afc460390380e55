//go:build linux

package hostnet

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
)

// foreign checks that err has a *ForeignError which names all of words.
func foreign(t *testing.T, err error, words ...string) {
	t.Helper()
	var f *ForeignError
	if !errors.As(err, &f) {
		t.Fatalf("got %v, want a *ForeignError", err)
	}
	for _, w := range words {
		if !strings.Contains(f.Error(), w) {
			t.Errorf("%q does not say %q", f, w)
		}
	}
}

func TestForeignLink(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.ip("link add wg0 type veth peer name x0", "link set wg0 alias payroll", "link set wg0 up", "link set x0 up")
	s.settle()
	before := s.dump()
	h := s.open(Options{})
	_, err := h.Link(s.ctx())
	foreign(t, err, "wg0", "veth", "payroll")
	_, _, err = h.Adopt(s.ctx(), kind, func(string) error { t.Error("created"); return nil })
	foreign(t, err, "wg0", "veth", "payroll", "rename")
	if st := s.read(h); st.Link != (Link{}) || st.Ready || st.Routes != nil {
		t.Errorf("got %+v", st)
	}
	for what, err := range map[string]error{"Up": h.Up(s.ctx(), 1420), "AddAddrs": h.AddAddrs(s.ctx(), one.addrs), "AddRoutes": h.AddRoutes(s.ctx(), nil)} {
		if !errors.Is(err, ErrNoLink) || !errors.Is(err, datapath.ErrNoDevice) {
			t.Errorf("%s: got %v", what, err)
		}
	}
	must(t, h.RemoveAddrs(s.ctx(), one.addrs))
	must(t, h.RemoveRoutes(s.ctx(), one.addrs))
	must(t, h.Remove(s.ctx()))
	become(t, "touched", before, s.dump)
}

// Routes of somebody else stay, whichever device they lead to, and ours beside them are made.
func TestForeignRoutes(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	s.ip("link add eth0 type veth peer name far0", "link set eth0 up", "link set far0 up",
		"route add 10.1.0.0/16 dev lo metric 50 proto static",
		"route add fd01::/64 dev lo metric 50 proto static",
		"route add 10.2.0.0/16 dev wg0 metric 50 proto boot", // an administrator's, through our link
		"route add fd02::/64 dev eth0 metric 50 proto 87",    // another mesh's number
		"route add blackhole 10.4.0.0/16 metric 50 proto bird",
		"route add fd03::/64 dev eth0 metric 100")
	s.settle()
	before := s.dump()
	var routes []datapath.Route
	for _, p := range []string{"10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "10.4.0.0/16", "fd01::/64", "fd02::/64", "fd03::/64"} {
		routes = append(routes, datapath.Route{Prefix: pp(p)})
	}
	for range 2 {
		got := map[netip.Prefix]error{}
		for p, err := range Items(h.AddRoutes(s.ctx(), routes)) {
			got[p] = err
		}
		if len(got) != 5 {
			t.Errorf("got %v", got)
		}
		foreign(t, got[pp("10.1.0.0/16")], "lo", "static", "metric 50")
		foreign(t, got[pp("10.2.0.0/16")], "wg0", "boot")
		foreign(t, got[pp("10.4.0.0/16")], "no interface", "bird")
		foreign(t, got[pp("fd01::/64")], "lo", "static")
		foreign(t, got[pp("fd02::/64")], "eth0", "87")
		if st := s.read(h); len(st.Routes) != 2 {
			t.Errorf("got %v", st.Routes)
		}
	}
	var all prefixes.Set
	for _, r := range routes {
		all = all.With(r.Prefix)
	}
	must(t, h.RemoveRoutes(s.ctx(), all))
	become(t, "touched", before, s.dump)
}

func TestForeignAddress(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{{}, {Sources: SourceLoopback}} {
		s := newSpace(t)
		h := s.up(o)
		s.ip("link add eth0 type veth peer name far0", "link set eth0 up", "link set far0 up", "addr add 10.7.0.1/24 dev eth0", "addr add fd07::1/64 dev eth0 nodad", "addr add 10.7.0.3/32 dev lo")
		s.settle()
		before := s.dump()
		got := map[netip.Prefix]error{}
		for p, err := range Items(h.AddAddrs(s.ctx(), prefixes.MustParse("10.7.0.1/32", "fd07::1/128", "10.7.0.2/32", "10.7.0.3/32", "10.8.0.0/24"))) {
			got[p] = err
		}
		foreign(t, got[pp("10.7.0.1/32")], "address 10.7.0.1", "eth0")
		foreign(t, got[pp("fd07::1/128")], "address fd07::1", "eth0")
		foreign(t, got[pp("10.7.0.3/32")], "address 10.7.0.3", "lo")
		if err := got[pp("10.8.0.0/24")]; err == nil || len(got) != 4 {
			t.Errorf("got %v", got)
		}
		// A hint may still name an address that another link has.
		must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.9.0.0/16"), Source: ap("10.7.0.3")}}))
		must(t, h.RemoveRoutes(s.ctx(), prefixes.MustParse("10.9.0.0/16")))
		if st := s.read(h); st.Addrs != prefixes.MustParse("10.7.0.2/32") {
			t.Errorf("got %v", st.Addrs)
		}
		must(t, h.RemoveAddrs(s.ctx(), prefixes.MustParse("10.7.0.1/32", "fd07::1/128", "10.7.0.2/32", "10.7.0.3/32")))
		become(t, "touched", before, s.dump)
	}
}

func TestUsable(t *testing.T) {
	for _, test := range []struct {
		flags uint32
		down  bool
		want  bool
	}{
		{unix.IFA_F_PERMANENT, false, true},
		{unix.IFA_F_PERMANENT, true, false},
		{unix.IFA_F_TENTATIVE, false, false},
		{unix.IFA_F_TENTATIVE | unix.IFA_F_OPTIMISTIC, false, true},
		{unix.IFA_F_TENTATIVE | unix.IFA_F_OPTIMISTIC, true, false},
		{unix.IFA_F_DADFAILED, false, false},
		{unix.IFA_F_TENTATIVE | unix.IFA_F_OPTIMISTIC | unix.IFA_F_DADFAILED, false, false},
		{unix.IFA_F_NOPREFIXROUTE | unix.IFA_F_DEPRECATED, false, true},
	} {
		// As Linux writes it: the first eight flags in the header, all of them as an attribute.
		r := newRequest(unix.RTM_NEWADDR, 0, []byte{unix.AF_INET6, 64, byte(test.flags), 0, 1, 0, 0, 0}).addr(unix.IFA_ADDRESS, ap("fd01::1"))
		for _, q := range []request{r, r.u32(unix.IFA_FLAGS, test.flags)} {
			a, ok := parseAddr(q[unix.NLMSG_HDRLEN:])
			if got := a.usable(link{Link: Link{Up: !test.down}}); !ok || got != test.want {
				t.Errorf("flags %#x, down %t: got %t", test.flags, test.down, got)
			}
		}
	}
	a, _ := parseAddr(newRequest(unix.RTM_NEWADDR, 0, []byte{unix.AF_INET6, 64, unix.IFA_F_TENTATIVE, 0, 1, 0, 0, 0}).
		addr(unix.IFA_ADDRESS, ap("fd01::1")).u32(unix.IFA_FLAGS, 0x10000)[unix.NLMSG_HDRLEN:])
	if a.flags != 0x10000 {
		t.Errorf("flags %#x", a.flags)
	}
}

// An address that another link has, but cannot use, is not the host's: it is given to ours beside it.
func TestUnusableAddress(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{{}, {Sources: SourceLoopback}} {
		s := newSpace(t)
		h := s.up(o)
		// cni0 has no carrier: its peer is down. dup0 finds at its peer that its address is taken.
		s.ip("link add cni0 type veth peer name pod0", "link set cni0 up", "addr add fd01::1/64 dev cni0", "addr add 10.1.1.1/24 dev cni0",
			"link add down0 type veth peer name down1", "addr add 10.1.2.1/24 dev down0", "addr add fd02::1/64 dev down0 nodad",
			"link add dup0 type veth peer name dup1", "link set dup0 up", "link set dup1 up")
		s.settle()
		s.ip("addr add fd03::1/64 dev dup1 nodad", "addr add fd03::1/64 dev dup0", "addr add fd05::1/64 dev dup0 nodad")
		become(t, "duplicates are not found", "1", func() string {
			return fmt.Sprint(strings.Count(s.show("-6 -o addr show dev dup0"), "dadfailed"))
		})
		s.ip("addr del fd03::1/64 dev dup1")
		if out := s.show("-6 addr show dev cni0"); !strings.Contains(out, "tentative") {
			t.Fatalf("does this test anything? %s", out)
		}
		there := prefixes.MustParse("10.1.1.1", "fd05::1")
		not := prefixes.MustParse("fd01::1", "10.1.2.1", "fd02::1", "fd03::1")
		st := s.read(h)
		if st.Host.Addrs != there {
			t.Errorf("can be used: %v, want %v", st.Host.Addrs, there)
		}
		if want := prefixes.MustParse("10.1.1.0/24", "fd01::/64", "fd03::/64", "fd05::/64"); st.Host.Connected != want {
			t.Errorf("connected: %v, want %v", st.Host.Connected, want)
		}
		got := map[netip.Prefix]error{}
		for p, err := range Items(h.AddAddrs(s.ctx(), there.Union(not))) {
			got[p] = err
		}
		for p := range there.All() {
			foreign(t, got[p], "address "+p.Addr().String())
			delete(got, p)
		}
		if len(got) != 0 {
			t.Errorf("got %v", got)
		}
		if st := s.read(h); st.Addrs != not || st.Host.Addrs != there {
			t.Errorf("got %v, others' %v", st.Addrs, st.Host.Addrs)
		}
		var routes []datapath.Route
		for _, a := range []string{"fd01::1", "fd02::1", "fd03::1"} {
			routes = append(routes, datapath.Route{Prefix: prefixes.Host(ap(strings.Replace(a, "fd", "fc", 1))), Source: ap(a)})
		}
		must(t, h.AddRoutes(s.ctx(), append(routes, datapath.Route{Prefix: pp("10.9.0.0/16"), Source: ap("10.1.2.1")})))
		must(t, h.AddAddrs(s.ctx(), not)) // it is there
		// Its carrier comes: both have it.
		s.ip("link set pod0 up")
		become(t, "still tentative", "true", func() string { return fmt.Sprint(s.read(h).Host.Addrs.Has(pp("fd01::1/128"))) })
		if st := s.read(h); st.Addrs != not {
			t.Errorf("got %v", st.Addrs)
		}
		must(t, h.RemoveAddrs(s.ctx(), not))
		if out := s.show("addr"); strings.Count(out, "fd01::1") != 1 || strings.Count(out, "10.1.2.1") != 1 {
			t.Errorf("theirs is gone: %s", out)
		}
		must(t, h.Remove(s.ctx()))
	}
}

func TestForeignTable(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.ip("link add eth0 type veth peer name far0", "link set eth0 up", "link set far0 up", "route add fd01::/64 dev eth0 table 7777 proto bird")
	s.settle()
	before := s.dump()
	h := s.open(Options{Table: 7777, Policy: true})
	_, _, err := h.Adopt(s.ctx(), kind, nil)
	foreign(t, err, "routing table 7777", "fd01::/64", "eth0", "bird")
	become(t, "something half-made", before, s.dump)
	s.ip6("route flush table 7777")
	_, _, err = h.Adopt(s.ctx(), kind, nil)
	must(t, err)
}

// Two meshes in one namespace leave each other alone.
func TestTwoMeshes(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	a, b := s.up(Options{Sources: SourceLoopback}), s.open(Options{Interface: "wg1", Sources: SourceLoopback})
	must(t, one.reach(s.ctx(), a))
	_, _, err := b.Adopt(s.ctx(), kind, nil)
	foreign(t, err, "protocol 87", "warren:wg0:87")
	within(t, "routes to the addresses", func() bool { return strings.Contains(s.show("-6 route show table local"), "fd07::1") })
	before := s.dump()
	b = s.open(Options{Interface: "wg1", Sources: SourceLoopback, Protocol: 88})
	other := wanted{prefixes.MustParse("10.7.1.1/32"), map[netip.Prefix]netip.Addr{pp("10.8.2.0/24"): ap("10.7.1.1")}, 1420}
	must(t, other.reach(s.ctx(), b))
	if st := s.read(a); !st.Ready || st.Addrs != one.addrs || len(st.Routes) != len(one.routes) {
		t.Errorf("got %+v", st)
	}
	must(t, a.RemoveAddrs(s.ctx(), other.addrs))
	if st := s.read(b); !st.Ready || st.Addrs != other.addrs || len(st.Routes) != 1 {
		t.Errorf("got %+v", st)
	}
	must(t, Cleanup(s.ctx(), s.options(Options{Interface: "wg1", Protocol: 88})))
	become(t, "touched", before, s.dump)
	// A third that shares the number but puts nothing beside its link may come and go.
	c := s.up(Options{Interface: "wg2"})
	must(t, wanted{routes: map[netip.Prefix]netip.Addr{pp("10.8.3.0/24"): {}}, mtu: 1420}.reach(s.ctx(), c))
	must(t, c.Remove(s.ctx()))
	become(t, "touched", before, s.dump)
}

// Without CAP_NET_ADMIN reading works, and each change says what it takes.
func TestNoCapability(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	must(t, one.on(s.ctx(), h))
	before := s.steady()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends without its capabilities
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&head, &data[0]); err != nil {
			t.Error(err)
			return
		}
		data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		if err := unix.Capset(&head, &data[0]); err != nil {
			t.Error(err)
			return
		}
		if st, err := h.Read(s.ctx()); err != nil || st.Addrs != one.addrs {
			t.Errorf("got %+v, %v", st, err)
		}
		other := s.open(Options{Interface: "wg1"})
		_, _, err := other.Adopt(s.ctx(), kind, nil)
		for what, err := range map[string]error{
			"Adopt": err, "Up": h.Up(s.ctx(), 1400), "Remove": h.Remove(s.ctx()), "AddAddrs": h.AddAddrs(s.ctx(), prefixes.MustParse("10.0.0.1/32")),
			"AddRoutes":   h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.1.0.0/16")}}),
			"change":      h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.9.0.0/16"), Source: ap("10.7.0.1")}}),
			"RemoveAddrs": h.RemoveAddrs(s.ctx(), one.addrs), "RemoveRoutes": h.RemoveRoutes(s.ctx(), prefixes.MustParse("10.9.0.0/16")),
		} {
			if !errors.Is(err, os.ErrPermission) || !errors.Is(err, syscall.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
				t.Errorf("%s: got %v", what, err)
			}
		}
	}()
	<-done
	become(t, "touched", before, s.dump)
}
