//go:build linux

package hostnet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
)

func TestAdopt(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	before := s.dump()
	h := s.open(Options{})
	if _, err := h.Link(s.ctx()); !errors.Is(err, ErrNoLink) {
		t.Fatalf("got %v", err)
	}

	boom := errors.New("boom")
	_, _, err := h.Adopt(s.ctx(), kind, func(string) error { return boom })
	if !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
	_, _, err = h.Adopt(s.ctx(), kind, func(name string) error {
		s.ip("link add " + name + " type " + kind)
		return boom
	})
	if !errors.Is(err, boom) {
		t.Errorf("got %v", err)
	}
	if _, _, err = h.Adopt(s.ctx(), kind, func(string) error { return nil }); !errors.Is(err, ErrNoLink) {
		t.Errorf("got %v", err)
	}
	if _, _, err = h.Adopt(s.ctx(), "nonesuch", nil); err == nil || !strings.Contains(err.Error(), "nonesuch") {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(s.ctx())
	_, _, err = h.Adopt(ctx, kind, func(name string) error {
		s.ip("link add " + name + " type " + kind)
		cancel()
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	become(t, "something half-made", before, s.dump)

	l, created, err := h.Adopt(s.ctx(), kind, nil)
	if err != nil || !created || l.Up || l.Name != "wg0" || l.Kind != kind || l.Alias != "warren:wg0:87" {
		t.Fatalf("got %+v, %t, %v", l, created, err)
	}
	if again, created, err := h.Adopt(s.ctx(), kind, nil); err != nil || created || again != l {
		t.Errorf("got %+v, %t, %v", again, created, err)
	}

	// Renamed by hand, it is found and gets its name back, with all that is on it.
	must(t, h.Up(s.ctx(), 1420))
	must(t, h.AddAddrs(s.ctx(), one.addrs))
	s.ip("link set wg0 down", "link set wg0 name tmp", "link set tmp up")
	if st := s.read(h); st.Ready || st.Link.Name != "tmp" {
		t.Errorf("got %+v", st)
	}
	if again, created, err := h.Adopt(s.ctx(), kind, nil); err != nil || created || again.Index != l.Index || again.Name != "wg0" {
		t.Errorf("got %+v, %t, %v", again, created, err)
	}
	// Another one has taken its name.
	s.ip("link set wg0 down", "link set wg0 name tmp", "link add wg0 type "+kind)
	_, _, err = h.Adopt(s.ctx(), kind, nil)
	foreign(t, err, "wg0", kind)
	s.ip("link del wg0")

	// Of another kind it is ours too, and makes room.
	h2 := s.open(Options{})
	l2, created, err := h2.Adopt(s.ctx(), "tun", func(name string) error {
		f, err := tun(h2, name)
		if err == nil {
			t.Cleanup(func() { f.Close() })
		}
		return err
	})
	if err != nil || !created || l2.Kind != "tun" || l2.Name != "wg0" {
		t.Errorf("got %+v, %t, %v", l2, created, err)
	}
	must(t, one.on(s.ctx(), h2))
	must(t, h2.Remove(s.ctx()))
	become(t, "left", before, s.dump)
}

// on is reach for a link that is there.
func (w wanted) on(ctx context.Context, h *Host) error {
	var routes []datapath.Route
	for p, src := range w.routes {
		routes = append(routes, datapath.Route{Prefix: p, Source: src})
	}
	return errors.Join(h.Up(ctx, w.mtu), h.AddAddrs(ctx, w.addrs), h.AddRoutes(ctx, routes))
}

// tun makes a TUN in the namespace of h, which lasts until it is closed.
func tun(h *Host, name string) (f *os.File, err error) {
	err = h.Do(func() error {
		if f, err = os.OpenFile("/dev/net/tun", os.O_RDWR, 0); err != nil {
			return err
		}
		var req struct {
			name  [16]byte
			flags uint16
			_     [22]byte
		}
		copy(req.name[:], name)
		req.flags = unix.IFF_TUN | unix.IFF_NO_PI
		if _, _, e := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.TUNSETIFF, uintptr(unsafe.Pointer(&req))); e != 0 {
			f.Close()
			return e
		}
		return nil
	})
	return f, err
}

// What Linux takes for a name and what CheckInterface does is the same, but for what is refused on purpose.
func TestNames(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.open(Options{})
	l, _, err := h.Adopt(s.ctx(), kind, nil)
	must(t, err)
	rename := func(name string) error {
		return h.apply1(s.ctx(), "rename", newRequest(unix.RTM_NEWLINK, 0, linkHeader(l.Index, 0, 0)).text(unix.IFLA_IFNAME, name))
	}
	for r := rune(1); r < 0x600; r++ {
		name := "w" + string(r)
		if err := CheckInterface(name); err == nil {
			if err := rename(name); err != nil {
				t.Errorf("%q: %v", name, err)
			}
		}
	}
	for _, name := range []string{"voilà", "wgР0", "w\u00a0"} {
		if err := rename(name); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%q: got %v: why is it refused?", name, err)
		}
	}
}

func TestMTU(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	must(t, h.AddAddrs(s.ctx(), one.addrs))
	for _, mtu := range []int{1200, 1279, -1, 67, 70000} {
		if err := h.Up(s.ctx(), mtu); !errors.Is(err, ErrMTU) {
			t.Errorf("%d: got %v", mtu, err)
		}
	}
	if st := s.read(h); st.Link.MTU != 1420 || st.Addrs != one.addrs {
		t.Errorf("got %+v", st)
	}
	must(t, h.Up(s.ctx(), 1280))
	s.ip("link set wg0 mtu 1200") // somebody else
	st := s.read(h)
	if !errors.Is(st.NoIPv6, ErrFamily) || st.NoIPv4 != nil || !strings.Contains(st.NoIPv6.Error(), "1200") {
		t.Errorf("got %+v", st)
	}
	for p, err := range Items(h.AddAddrs(s.ctx(), one.addrs)) {
		if !errors.Is(err, ErrFamily) || p.Addr().Is4() {
			t.Errorf("%v: got %v", p, err)
		}
	}
	must(t, h.Up(s.ctx(), 1420))
	must(t, h.AddAddrs(s.ctx(), one.addrs))
	if st := s.read(h); st.NoIPv6 != nil || st.Addrs != one.addrs {
		t.Errorf("got %+v", st)
	}
}

// IPv6 disabled: IPv4 goes on, each IPv6 item says why, and it comes back.
func TestNoIPv6(t *testing.T) {
	for name, o := range layouts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSpace(t)
			s.sysctl("ipv6/conf/all/disable_ipv6", "1")
			s.sysctl("ipv6/conf/default/disable_ipv6", "1")
			h := s.up(o)
			st := s.read(h)
			if !errors.Is(st.NoIPv6, ErrFamily) || !strings.Contains(st.NoIPv6.Error(), "disable_ipv6") || !st.Ready || st.NoIPv4 != nil {
				t.Fatalf("got %+v", st)
			}
			var routes []datapath.Route
			for p, src := range one.routes {
				routes = append(routes, datapath.Route{Prefix: p, Source: src})
			}
			failed := 0
			for _, err := range []error{h.AddAddrs(s.ctx(), one.addrs), h.AddRoutes(s.ctx(), routes)} {
				for p, err := range Items(err) {
					failed++
					if p.Addr().Is4() || !errors.Is(err, ErrFamily) {
						t.Errorf("%v: got %v", p, err)
					}
				}
			}
			if failed != 3 {
				t.Errorf("%d failures, want 3", failed)
			}
			if st = s.read(h); st.Addrs.Len() != 1 || len(st.Routes) != 3 {
				t.Errorf("got %+v", st)
			}
			must(t, h.Up(s.ctx(), 1200)) // nothing to lose
			must(t, h.Up(s.ctx(), 1420))
			s.sysctl("ipv6/conf/all/disable_ipv6", "0")
			must(t, one.reach(s.ctx(), h))
			if st = s.read(h); st.NoIPv6 != nil || st.Addrs != one.addrs || len(st.Routes) != 5 {
				t.Errorf("got %+v", st)
			}
		})
	}
}

// IPv6 disabled under a running mesh, on the host or on the link alone, and enabled again: IPv4 goes on, what
// is lacking is said of each item, and it all comes back as it was.
func TestIPv6GoesAndComes(t *testing.T) {
	for name, o := range layouts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSpace(t)
			h := s.up(o)
			must(t, one.on(s.ctx(), h))
			time.Sleep(50 * time.Millisecond) // for the routes of addresses
			before := s.raw()
			var routes []datapath.Route
			for p, src := range one.routes {
				routes = append(routes, datapath.Route{Prefix: p, Source: src})
			}
			for _, of := range []string{"all", "wg0"} {
				for len(h.Changed()) > 0 {
					<-h.Changed()
				}
				s.sysctl("ipv6/conf/"+of+"/disable_ipv6", "1")
				select {
				case <-h.Changed():
				case <-time.After(5 * time.Second):
					t.Errorf("%s: not seen", of)
				}
				st := s.read(h)
				if !st.Ready && !o.Guard.IsEmpty() { // Linux took them away with the loopback interface's IPv6
					must(t, h.Up(s.ctx(), 0))
					st = s.read(h)
				}
				if !errors.Is(st.NoIPv6, ErrFamily) || !strings.Contains(st.NoIPv6.Error(), "net.ipv6.conf.wg0.disable_ipv6; set it to 0") || !st.Ready || st.NoIPv4 != nil {
					t.Fatalf("%s: got %+v", of, st)
				}
				got := map[netip.Prefix]bool{}
				for _, err := range []error{h.Up(s.ctx(), 1420), h.AddAddrs(s.ctx(), one.addrs), h.AddRoutes(s.ctx(), routes)} {
					for p, err := range Items(err) {
						if got[p] = true; !errors.Is(err, ErrFamily) || !strings.Contains(err.Error(), "disable_ipv6; set it to 0") || !p.Addr().Is6() {
							t.Errorf("%s: %v: got %v", of, p, err)
						}
					}
				}
				want := 3
				if of == "wg0" && o.Sources == SourceLoopback {
					want = 2 // the address is on another interface, which has IPv6
				}
				if len(got) != want {
					t.Errorf("%s: got %v", of, got)
				}
				if st = s.read(h); st.Addrs.Len() != 1+3-want || len(st.Routes) != 3 {
					t.Errorf("%s: got %+v", of, st)
				}
				s.sysctl("ipv6/conf/"+of+"/disable_ipv6", "0")
				must(t, one.reach(s.ctx(), h))
				if st = s.read(h); st.NoIPv6 != nil || st.Addrs != one.addrs || !maps.Equal(st.Routes, one.routes) {
					t.Errorf("%s: got %+v", of, st)
				}
				become(t, of+": not as it was", before, s.raw)
			}
		})
	}
}

func TestReversePath(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv4/conf/all/rp_filter", "1")
	h := s.up(Options{Table: 7777, Mark: 51820})
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.8.0.0/16")}}))
	if st := s.read(h); !st.Ready || len(st.Problems) != 0 {
		t.Errorf("ours is loose: got %+v", st)
	}
	for _, want := range []struct{ of, value string }{{"all", "1"}, {"eth0", "0"}, {"wg0", "2"}} {
		got, err := s.run("", "cat", "/proc/sys/net/ipv4/conf/"+want.of+"/rp_filter")
		if err != nil || strings.TrimSpace(got) != want.value {
			t.Errorf("rp_filter of %s is %q, %v", want.of, got, err)
		}
	}
	s.sysctl("ipv4/conf/wg0/rp_filter", "1")
	st := s.read(h)
	if st.Ready || len(st.Problems) != 1 || !strings.Contains(st.Problems[0].Message, "10.8.0.0/16") {
		t.Errorf("made strict: got %+v", st)
	}
	s.ip("rule add not fwmark 51820 lookup 7777 priority 100") // the administrator's, and packets do come back there
	if st := s.read(h); len(st.Problems) != 0 {
		t.Errorf("with a rule: got %+v", st.Problems)
	}
	must(t, h.Up(s.ctx(), 0))
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("0.0.0.0/0")}}))
	if st := s.read(h); !st.Ready || len(st.Problems) != 1 || !strings.Contains(st.Problems[0].Message, "eth0") {
		t.Errorf("the underlay's: got %+v", st)
	}
}

func TestAround(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{Table: 7777, Policy: true, Mark: 51820})
	if st := s.read(h); st.Host != (datapath.Host{}) {
		t.Errorf("alone: got %+v", st.Host)
	}
	s.uplink()
	s.ip("link set eth0 mtu 1400", "link add big0 mtu 9000 type veth peer name big1", "link set big0 up", "addr add 172.16.0.1 peer 172.16.0.2/32 dev big0",
		"addr add 10.55.0.1/24 dev far0", "link add down0 type veth peer name down1", "addr add 10.66.0.1/24 dev down0")
	must(t, h.AddAddrs(s.ctx(), one.addrs))
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("0.0.0.0/0")}, {Prefix: pp("::/0")}}))
	st := s.read(h)
	want := datapath.Host{UnderlayMTU: 1400, IPv4: true, IPv6: true,
		Connected: prefixes.MustParse("203.0.113.0/24", "2001:db8:1::/64", "198.51.100.7/32", "172.16.0.1/32", "172.16.0.2/32", "10.55.0.0/24"),
		Addrs:     prefixes.MustParse("203.0.113.2", "2001:db8:1::2", "198.51.100.7", "172.16.0.1", "10.55.0.1")}
	if st.Host != want {
		t.Errorf("got %+v", st.Host)
	}
	if len(st.Routes) != 2 { // and none of the main table's default routes
		t.Errorf("got %v", st.Routes)
	}
	s.ip("route change default via 203.0.113.1 dev eth0 proto static metric 100 mtu 1300")
	if st := s.read(h); st.Host.UnderlayMTU != 1300 {
		t.Errorf("got %+v", st.Host)
	}
}

// Where several ways exist, a change of source address never lets a packet go another way.
func TestNoGap(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h, look := s.up(Options{}), s.open(Options{})
	must(t, h.AddAddrs(s.ctx(), one.addrs.Union(two.addrs)))
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.8.0.0/16"), Source: ap("10.7.0.1")}, {Prefix: pp("fd08::/64"), Source: ap("fd07::1")}}))
	link, err := h.Link(s.ctx())
	must(t, err)
	done := make(chan struct{})
	var looks, met int
	go func() {
		defer close(done)
		for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); looks++ {
			for _, to := range []string{"10.8.0.1", "fd08::1"} {
				r, ok := look.lookup(s.ctx(), ap(to), 0)
				if !ok && ap(to).Is6() {
					// IPv6 answers so when it meets the very route that is being freed, which takes long where whoever
					// frees it is kept from running.
					met++
					for begun := time.Now(); !ok && time.Since(begun) < 100*time.Millisecond; {
						r, ok = look.lookup(s.ctx(), ap(to), 0)
					}
				}
				if !ok || r.oif != link.Index {
					t.Errorf("%s goes to interface %d, %t", to, r.oif, ok)
					return
				}
			}
		}
	}()
	changes := 0
	for running := true; running; changes++ {
		w := []wanted{one, two}[changes%2]
		must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.8.0.0/16"), Source: w.routes[pp("10.8.0.0/16")]}, {Prefix: pp("fd08::/64"), Source: w.routes[pp("fd08::/64")]}}))
		select {
		case <-done:
			running = false
		default:
		}
	}
	t.Logf("%d changes, %d lookups of each family, %d met a route being freed", changes, looks, met)
	if met > changes {
		t.Errorf("that is a gap")
	}
}

// A source address that the host does not have is refused, and the route keeps the one it has.
func TestBadSource(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	must(t, one.on(s.ctx(), h))
	before := s.steady()
	for _, r := range []datapath.Route{
		{Prefix: pp("10.8.0.0/16"), Source: ap("203.0.113.9")}, {Prefix: pp("fd08::/64"), Source: ap("2001:db8::9")}, {Prefix: pp("10.50.0.0/16"), Source: ap("203.0.113.9")},
		{Prefix: pp("10.8.0.0/16"), Source: ap("fd07::1")}, {Prefix: pp("fd08::/64"), Source: ap("10.7.0.1")}, {Prefix: pp("fd08::/64"), Source: ap("fd07::1%lo")},
	} {
		n := 0
		for p, err := range Items(h.AddRoutes(s.ctx(), []datapath.Route{r})) {
			if n++; p != r.Prefix || !strings.Contains(err.Error(), r.Source.String()) {
				t.Errorf("%v: got %v", p, err)
			}
		}
		if n != 1 {
			t.Errorf("%v: %d errors", r, n)
		}
	}
	become(t, "changed", before, s.dump)
	// Host bits are cut, and the family of a mapped address is IPv4.
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.8.7.6/16"), Source: ap("::ffff:10.7.0.1")}, {Prefix: pp("fd08::7/64"), Source: ap("fd07::1")}}))
	become(t, "changed", before, s.dump)
	// Down, it says so.
	s.ip("link set wg0 down")
	if err := h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.1.0.0/16")}}); !errors.Is(err, unix.ENETDOWN) {
		t.Errorf("got %v", err)
	}
}

// What somebody else put on our link is seen, and can be removed.
func TestDrift(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	must(t, one.on(s.ctx(), h))
	s.ip("addr add 10.66.0.1/24 dev wg0", "addr add fd66::1/64 dev wg0 nodad", "addr del fd07::1/128 dev wg0", "addr add fd07::1/64 dev wg0 nodad",
		"route del 10.9.0.0/16", "route add 10.77.0.0/16 dev wg0 proto 87 metric 99", "route append 10.8.0.0/16 dev wg0 proto 87 metric 50",
		"route add 10.9.0.0/16 dev wg0 proto 87 metric 50 table 99")
	st := s.read(h)
	if want := prefixes.MustParse("10.7.0.1/32", "10.66.0.0/24", "fd66::/64", "fd07::/64"); st.Addrs != want {
		t.Errorf("got %v", st.Addrs)
	}
	for p, want := range map[string]string{"10.9.0.0/16": "0.0.0.0", "10.77.0.0/16": "0.0.0.0", "10.8.0.0/16": "0.0.0.0", "10.8.1.0/24": "10.7.0.1"} {
		if got := st.Routes[pp(p)]; got != ap(want) {
			t.Errorf("%s from %v, want %s", p, got, want)
		}
	}
	must(t, one.reach(s.ctx(), h))
	must(t, one.reach(s.ctx(), h)) // routes from an address that had another length
	if st := s.read(h); st.Addrs != one.addrs || len(st.Routes) != len(one.routes) || st.Routes[pp("fd08::/64")] != ap("fd07::1") {
		t.Errorf("got %+v", st)
	}
	if out := s.show("route show table all proto 87"); strings.Count(out, "\n") != 5 {
		t.Errorf("got %s", out)
	}
}

func TestCover(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	o := layouts["cover"]
	h := s.up(o)
	must(t, one.on(s.ctx(), h))
	if out := s.show("route show proto 87"); strings.TrimSpace(out) != "10.8.0.0/13 dev wg0 scope link src 10.7.0.1 metric 50" {
		t.Errorf("got %s", out)
	}
	// Linux takes an address from the IPv6 routes that have it; it is put back.
	s.ip("addr del fd07::1/128 dev wg0")
	must(t, one.reach(s.ctx(), h))
	if out := s.show("-6 route show proto 87"); !strings.HasPrefix(out, "fd08::/16 dev wg0 src fd07::1 metric 50") || strings.Count(out, "\n") != 1 {
		t.Errorf("got %s", out)
	}
	must(t, h.RemoveRoutes(s.ctx(), prefixes.MustParse("10.8.0.0/16", "10.8.0.0/13", "10.8.1.0/24")))
	st := s.read(h)
	if _, ok := st.Routes[pp("10.9.0.0/16")]; !ok || len(st.Routes) != 3 {
		t.Errorf("got %v", st.Routes)
	}
	if out := s.show("route show proto 87"); strings.TrimSpace(out) != "10.8.0.0/13 dev wg0 scope link metric 50" {
		t.Errorf("got %s", out) // what is left has no source
	}
	// A fresh start knows the cover only, which stands for itself until something is asked for.
	h = s.open(o)
	if st := s.read(h); len(st.Routes) != 2 || !st.Routes[pp("fd08::/16")].IsValid() {
		t.Errorf("got %v", st.Routes)
	}
	must(t, h.RemoveRoutes(s.ctx(), prefixes.MustParse("10.8.0.0/13", "fd08::/16")))
	if out := s.show("route show table all proto 87"); out != "" {
		t.Errorf("left: %s", out)
	}
}

func TestChanged(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{})
	quiet := func() {
		for end := time.After(100 * time.Millisecond); ; {
			select {
			case <-h.Changed():
			case <-end:
				return
			}
		}
	}
	must(t, one.on(s.ctx(), h))
	for _, c := range []string{
		"addr add 10.66.0.1/24 dev wg0", "addr del 10.7.0.1/32 dev wg0", "route del 10.9.0.0/16 dev wg0", "route del fd08:1::/64 dev wg0",
		"link set wg0 mtu 1300", "link set wg0 down", "rule add lookup 99 priority 5", "-6 rule add lookup 99 priority 5",
		"route del default", "addr add 10.5.0.1/24 dev eth0", "link del wg0",
	} {
		quiet()
		if six, ok := strings.CutPrefix(c, "-6 "); ok {
			s.ip6(six)
		} else {
			s.ip(c)
		}
		select {
		case <-h.Changed():
		case <-time.After(5 * time.Second):
			t.Errorf("%s: not seen", c)
		}
	}
	quiet()
	s.ip("route add 10.44.0.0/16 dev eth0 proto bird", "route add 2001:db8:44::/48 dev eth0 proto bird")
	select {
	case <-h.Changed():
		t.Error("a router's routes are nobody's business")
	case <-time.After(50 * time.Millisecond):
	}
	must(t, h.Close())
	for range h.Changed() { // ends
	}
}

// What a sysctl takes from the link, or gives it, is heard of at once, though no address comes or goes with it.
func TestChangedBySysctl(t *testing.T) {
	t.Parallel()
	for _, also := range slices.Compact([]string{kind, "bridge", "wireguard"}) {
		s := newSpace(t)
		if _, err := s.run("", "ip", "link", "add", "x0", "type", also); err != nil {
			t.Logf("without %s, which this kernel does not have", also)
			continue
		}
		s.ip("link del x0")
		h := s.open(Options{})
		if _, _, err := h.Adopt(s.ctx(), also, nil); err != nil {
			t.Fatal(err)
		}
		must(t, h.Up(s.ctx(), 1420))
		if out := s.show("-6 addr show dev wg0"); out != "" {
			t.Fatalf("%s: there is an address: %s", also, out)
		}
		for _, c := range []struct{ name, value string }{
			{"ipv6/conf/wg0/disable_ipv6", "1"}, {"ipv6/conf/wg0/disable_ipv6", "0"},
			{"ipv6/conf/all/disable_ipv6", "1"}, {"ipv6/conf/all/disable_ipv6", "0"},
			{"ipv4/conf/wg0/rp_filter", "1"}, {"ipv4/conf/wg0/rp_filter", "2"},
			{"ipv4/conf/all/rp_filter", "1"}, {"ipv4/conf/all/rp_filter", "0"},
			{"mtu", "1200"}, {"mtu", "1420"},
		} {
			for quiet := false; !quiet; {
				select {
				case <-h.Changed():
				case <-time.After(100 * time.Millisecond):
					quiet = true
				}
			}
			if c.name == "mtu" {
				s.ip("link set wg0 mtu " + c.value)
			} else {
				s.sysctl(c.name, c.value)
			}
			select {
			case <-h.Changed():
			case <-time.After(time.Second):
				t.Errorf("%s: %s set to %s: not seen", also, c.name, c.value)
			}
		}
	}
}

// Two meshes in two namespaces of one process, over and over: each works in its own, the parent has none
// of it, and no thread is left in the wrong one.
func TestNamespaces(t *testing.T) {
	need(t)
	cycles := 100
	if raceEnabled {
		cycles = 30
	}
	parent, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	spaces := []*space{newSpace(t), newSpace(t)}
	outside, err := net.Interfaces()
	must(t, err)
	var wg sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for range 1 { // load
		wg.Go(func() {
			for ctx.Err() == nil {
				runtime.Gosched()
			}
		})
	}
	// threads counts all, and those elsewhere.
	threads := func() (all, astray int) {
		ls, err := os.ReadDir("/proc/self/task")
		must(t, err)
		for _, l := range ls {
			if ns, err := os.Readlink("/proc/self/task/" + l.Name() + "/ns/net"); err == nil && ns != parent {
				astray++
			}
		}
		return len(ls), astray
	}
	var works sync.WaitGroup
	first := 0
	for i, s := range spaces {
		works.Go(func() {
			for n := range cycles {
				h, err := Open(s.options(Options{}))
				if err != nil {
					t.Error(err)
					return
				}
				_, _, err = h.Adopt(s.ctx(), kind, nil)
				err = errors.Join(err, h.Up(s.ctx(), 1400+i))
				err = errors.Join(err, h.AddAddrs(s.ctx(), prefixes.Must(prefixes.Host(netip.AddrFrom4([4]byte{10, 7, byte(i), 1})))))
				if err := errors.Join(err, h.Do(func() error {
					ls, err := net.Interfaces()
					if err == nil && (len(ls) != 2 || ls[1].MTU != 1400+i) {
						err = fmt.Errorf("mesh %d, cycle %d: links are %v", i, n, ls)
					}
					return err
				}), h.Remove(s.ctx()), h.Close()); err != nil {
					t.Error(err)
					return
				}
				if i == 0 && n == 10 {
					first, _ = threads() // the other mesh may be at work on one
				}
			}
		})
	}
	works.Wait()
	become(t, "threads in the wrong namespace", "0", func() string { // those that end take a moment
		_, astray := threads()
		return fmt.Sprint(astray)
	})
	if last, _ := threads(); last > first+8 {
		t.Errorf("%d threads, after %d", last, first)
	}
	stop()
	wg.Wait()
	if now, err := net.Interfaces(); err != nil || len(now) != len(outside) {
		t.Errorf("outside: %v, before %v", now, outside)
	}
}

func TestDo(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.open(Options{})
	boom := errors.New("boom")
	if err := h.Do(func() error { return boom }); err != boom {
		t.Errorf("got %v", err)
	}
	if err := h.Do(func() error { runtime.Goexit(); return nil }); err == nil {
		t.Error("no error")
	}
	func() {
		defer func() {
			if p := recover(); p != boom {
				t.Errorf("recovered %v", p)
			}
		}()
		h.Do(func() error { panic(boom) })
	}()
	must(t, h.Close())
	if err := h.Do(func() error { return nil }); !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if _, err := Open(Options{Interface: "wg0", Namespace: "/run/netns/nonesuch"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestClose(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	for range 20 {
		h := s.up(Options{})
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				for {
					if _, err := h.Read(s.ctx()); err != nil {
						if !errors.Is(err, net.ErrClosed) {
							t.Errorf("got %v", err)
						}
						return
					}
				}
			})
			wg.Go(func() {
				time.Sleep(time.Millisecond)
				if err := h.Close(); err != nil {
					t.Errorf("got %v", err)
				}
			})
		}
		wg.Wait()
	}
	h := s.open(Options{})
	ctx, cancel := context.WithCancel(s.ctx())
	cancel()
	if _, err := h.Read(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// Ten thousand routes are no reason to wait.
func TestThousands(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	must(t, h.AddAddrs(s.ctx(), one.addrs.Union(two.addrs)))
	var routes, other []datapath.Route
	var all prefixes.Set
	var ps []netip.Prefix
	n := 10000
	if raceEnabled {
		n = 1000
	}
	for i := range n / 2 {
		four, six := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(64 + i>>8), byte(i), 0}), 24), netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 9, 4: byte(i >> 8), 5: byte(i)}), 64)
		routes = append(routes, datapath.Route{Prefix: four, Source: ap("10.7.0.1")}, datapath.Route{Prefix: six, Source: ap("fd07::1")})
		other = append(other, datapath.Route{Prefix: four, Source: ap("10.7.0.2")}, datapath.Route{Prefix: six, Source: ap("fd07::2")})
		ps = append(ps, four, six)
	}
	all = prefixes.Must(ps...)
	for _, step := range []struct {
		what string
		f    func() error
		left int
	}{
		{"add", func() error { return h.AddRoutes(s.ctx(), routes) }, n},
		{"add again", func() error { return h.AddRoutes(s.ctx(), routes) }, n},
		{"change the source of", func() error { return h.AddRoutes(s.ctx(), other) }, n},
		{"remove one of", func() error { return h.RemoveRoutes(s.ctx(), prefixes.Must(all.At(7))) }, n - 1},
		{"remove", func() error { return h.RemoveRoutes(s.ctx(), all) }, 0},
	} {
		start := time.Now()
		must(t, step.f())
		took := time.Since(start)
		start = time.Now()
		st := s.read(h)
		t.Logf("%s %d routes: %v; read: %v", step.what, n, took, time.Since(start))
		if len(st.Routes) != step.left {
			t.Fatalf("%d routes", len(st.Routes))
		}
		if took > 20*time.Second {
			t.Errorf("too slow")
		}
	}
}

// A reading that is given up in the middle spoils none that follows.
func TestGivenUp(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.open(Options{})
	h.c.buf = h.c.buf[:8192]
	_, _, err := h.Adopt(s.ctx(), kind, nil)
	must(t, err)
	must(t, h.Up(s.ctx(), 1420))
	var routes []datapath.Route
	for i := range 500 {
		routes = append(routes, datapath.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 8, byte(i >> 8), byte(i)}), 32)})
	}
	must(t, h.AddRoutes(s.ctx(), routes))
	up := 0
	for i := range 200 {
		ctx, cancel := context.WithTimeout(s.ctx(), time.Duration(i)*20*time.Microsecond)
		if _, err := h.Read(ctx); errors.Is(err, context.DeadlineExceeded) {
			up++
		} else if err != nil {
			t.Fatal(err)
		}
		cancel()
		// One that is given up between two pieces of a list.
		seq, err := h.c.send(s.ctx(), newRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP, []byte{unix.AF_INET, 11: 0}))
		must(t, err)
		if b, err := h.c.receive(); err != nil || len(b) == 0 || seq == 0 {
			t.Fatal(err)
		}
		if st := s.read(h); len(st.Routes) != len(routes) {
			t.Fatalf("%d routes", len(st.Routes))
		}
	}
	t.Logf("%d of 200 given up", up)
}

// A Host may be closed while others are in a call, which may be about to say that something changed.
func TestCloseBesideCalls(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	o := s.options(Options{})
	for range 50 {
		h, err := Open(o)
		must(t, err)
		var calls sync.WaitGroup
		for range 3 {
			calls.Go(func() {
				for {
					h.notify()
					if _, err := h.Read(t.Context()); err != nil {
						return
					}
				}
			})
		}
		time.Sleep(time.Millisecond)
		must(t, h.Close())
		calls.Wait()
		h.notify()
	}
}
