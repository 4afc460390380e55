//go:build linux

package hostnet

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// way says where packets with a mark to an address go: a link's name, or "none".
func (s *space) way(mark, to string) string {
	s.t.Helper()
	args := []string{"route", "get", to}
	if mark != "" {
		args = append(args, "mark", mark)
	}
	out, err := s.run("", "ip", args...)
	if err != nil {
		return "none"
	}
	_, dev, _ := strings.Cut(out, " dev ")
	dev, _, _ = strings.Cut(dev, " ")
	return dev
}

func (s *space) ways(what string, want ...[3]string) {
	s.t.Helper()
	for _, w := range want {
		if got := s.way(w[0], w[1]); got != w[2] {
			s.t.Errorf("%s: to %s with mark %q: by %s, want %s", what, w[1], w[0], got, w[2])
		}
	}
}

var defaults = []datapath.Route{{Prefix: pp("0.0.0.0/0")}, {Prefix: pp("::/0")}}

// A default route into the link is everybody's but for what the host knows better and what is marked.
func TestPolicy(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.ip("route add 192.168.7.0/24 via 203.0.113.9")
	before := s.dump()
	h := s.up(Options{Policy: true})
	must(t, h.AddRoutes(s.ctx(), defaults))
	through := [][3]string{
		{"", "9.9.9.9", "wg0"}, {"", "2620:fe::9", "wg0"}, {"0x3", "9.9.9.9", "wg0"}, {"0x60", "9.9.9.9", "wg0"}, // other marks
		{"0x50", "9.9.9.9", "eth0"}, {"0xff5f", "9.9.9.9", "eth0"}, {"0x50", "2620:fe::9", "eth0"}, // ours, whatever else is in it
		{"", "203.0.113.7", "eth0"}, {"", "2001:db8:1::7", "eth0"}, {"", "192.168.7.7", "eth0"}, // local ones win
		{"", "198.51.100.7", "lo"},
	}
	s.ways("up", through...)
	st := s.read(h)
	if !st.Ready || len(st.Problems) != 0 || len(st.Routes) != 2 {
		t.Errorf("got %+v", st)
	}
	if m, err := h.Mark(0); m != DefaultMark || err != nil {
		t.Errorf("mark %#x, %v", m, err)
	}
	if m, err := h.Mark(0x1050); m != 0x1050 || err != nil {
		t.Errorf("mark %#x, %v", m, err)
	}
	if _, err := h.Mark(0x1060); err == nil || !strings.Contains(err.Error(), "0x1060") || !strings.Contains(err.Error(), "0x50") {
		t.Errorf("a mark that would loop: %v", err)
	}

	// What others take away is noticed, and put back.
	for _, flush := range []string{"rule flush protocol 87", "-6 rule flush protocol 87", "rule del priority 32500", "rule del priority 32501", "-6 rule del priority 32501"} {
		s.drain(h)
		s.batch(flush)
		s.notified(h, flush)
		within(t, flush+": put back", func() bool { return s.read(h).Ready })
		s.ways(flush, through...)
	}
	if st := s.read(h); len(st.Problems) != 1 || st.Problems[0].Subject != "rules" || !strings.Contains(st.Problems[0].Remedy, "protocol 87") {
		t.Errorf("nothing of who keeps removing them: %+v", st.Problems)
	}
	must(t, h.Remove(s.ctx()))
	if s.dump() != before {
		t.Errorf("had\n%s\nnow\n%s", before, s.dump())
	}
}

// batch runs ip commands, some of which may have nothing to do, and some of which are IPv6's.
func (s *space) batch(commands ...string) {
	for _, c := range commands {
		_, _ = s.run("", "ip", strings.Fields(c)...)
	}
}

// drain waits until the kernel has told what it had to.
func (s *space) drain(h *Host) {
	s.t.Helper()
	s.read(h)
	select {
	case <-h.Changed():
	default:
	}
}

func within(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 10 s", what)
		}
	}
}

func (s *space) notified(h *Host, what string) {
	s.t.Helper()
	select {
	case <-h.Changed():
	case <-s.ctx().Done():
		s.t.Errorf("%s: nobody was told", what)
	}
}

// What is guarded is reached by the link or not at all, be there a link or none, a route or none.
func TestGuard(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	before := s.dump()
	o := Options{Policy: true, Guard: prefixes.MustParse("0.0.0.0/0", "2000::/3")}
	h := s.up(o)
	closed := [][3]string{
		{"", "9.9.9.9", "none"}, {"", "2620:fe::9", "none"}, {"0x50", "9.9.9.9", "eth0"}, {"0x50", "2620:fe::9", "eth0"},
		{"", "203.0.113.7", "eth0"}, {"", "2001:db8:1::7", "eth0"}, {"", "fd00::7", "eth0"},
	}
	s.ways("no route", closed...)
	if st := s.read(h); !st.Ready || len(st.Routes) != 0 {
		t.Errorf("got %+v", st)
	}
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("0.0.0.0/0")}, {Prefix: pp("2600::/12")}}))
	s.ways("routes", [3]string{"", "9.9.9.9", "wg0"}, [3]string{"", "2620:fe::9", "none"}, [3]string{"", "2601::9", "wg0"})
	must(t, h.RemoveRoutes(s.ctx(), prefixes.MustParse("0.0.0.0/0", "2600::/12")))
	s.ways("no route again", closed...)
	must(t, h.Close())

	s.ip("link del wg0") // as with the end of a process that has a TUN
	s.ways("no link", closed...)
	h = s.up(o) // what it finds in its table is its own
	s.ways("a new link", closed...)
	for _, del := range []string{"route del unreachable default table 8787", "-6 route flush table 8787"} {
		s.drain(h)
		s.batch(del)
		s.notified(h, del)
		within(t, del+": put back", func() bool { return s.read(h).Ready })
		s.ways(del, closed...)
	}
	// A narrower one takes its place, and then none.
	o.Guard = prefixes.MustParse("10.0.0.0/8")
	must(t, h.Close())
	h = s.up(o)
	s.ways("another", [3]string{"", "9.9.9.9", "eth0"}, [3]string{"", "2620:fe::9", "eth0"}, [3]string{"", "10.1.1.1", "none"})
	must(t, h.Close())
	h = s.up(Options{})
	s.ways("no policy", [3]string{"", "9.9.9.9", "eth0"}, [3]string{"", "10.1.1.1", "eth0"})
	must(t, h.Remove(s.ctx()))
	if s.dump() != before {
		t.Errorf("had\n%s\nnow\n%s", before, s.dump())
	}
}

// Without IPv6 IPv4 is guarded all the same.
func TestGuardWithoutIPv6(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv6/conf/all/disable_ipv6", "1")
	s.sysctl("ipv6/conf/default/disable_ipv6", "1")
	h := s.up(Options{Policy: true, Guard: prefixes.MustParse("0.0.0.0/0", "::/0")})
	s.ways("IPv4", [3]string{"", "9.9.9.9", "none"}, [3]string{"0x50", "9.9.9.9", "eth0"})
	if st := s.read(h); !st.Ready {
		t.Errorf("got %+v", st)
	}
	s.sysctl("ipv6/conf/all/disable_ipv6", "0")
	s.batch("addr add 2001:db8:1::2/64 dev eth0 nodad", "route add default via 2001:db8:1::1 proto static metric 1024")
	if st := s.read(h); !st.Ready {
		must(t, h.Up(s.ctx(), 0))
	}
	s.ways("IPv6", [3]string{"", "2620:fe::9", "none"}, [3]string{"0x50", "2620:fe::9", "eth0"})
}

// What others do that keeps packets from the link is named, with the way out.
func TestProblems(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{Policy: true})
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.0.0.0/8")}, {Prefix: pp("fd00::/16")}}))
	for _, c := range []struct {
		what     string
		do, undo string
		subject  string
		has      []string
	}{
		{"a rule that comes first", "rule add lookup 77 priority 100", "rule del lookup 77 priority 100", "rule 100", []string{"10.0.0.0/8", "wg0", "eth0", "priority 100", "table 77", "above 32501"}},
		{"one that forbids", "rule add prohibit priority 101", "rule del prohibit priority 101", "rule 101", []string{"10.0.0.0/8", "refused"}},
		{"one of IPv6", "-6 rule add lookup 77 priority 102", "-6 rule del lookup 77 priority 102", "rule 102", []string{"fd00::/16", "IPv6 rule"}},
		{"a route that is narrower than default", "route add 10.0.0.0/8 via 203.0.113.1", "route del 10.0.0.0/8", "route to 10.0.0.0/8", []string{"10.0.0.0/8", "eth0", "table 254"}},
		{"our mark", "rule add fwmark 0x10/0x30 lookup main priority 40000", "rule del fwmark 0x10/0x30 priority 40000", "mark", []string{"0x10/0x30", "0x50/0xf0", "priority 40000"}},
		{"our mark in IPv6", "-6 rule add fwmark 0xff lookup 99 priority 103", "-6 rule del fwmark 0xff priority 103", "mark", []string{"0xff/0xffffffff"}},
		{"another mesh's, which is to have the same", "rule add not fwmark 0x50/0xf0 lookup 88 priority 104", "rule del not fwmark 0x50/0xf0 priority 104", "", nil},
		{"another mark", "rule add fwmark 0xca00/0xff00 lookup 99 priority 105", "rule del fwmark 0xca00/0xff00 priority 105", "", nil},
		{"a narrower route", "route add 10.1.0.0/16 via 203.0.113.1", "route del 10.1.0.0/16", "", nil},
		{"a rule that leads nowhere", "rule add lookup 99 priority 106", "rule del lookup 99 priority 106", "", nil},
		{"a rule that comes later", "rule add lookup 77 priority 32600", "rule del lookup 77 priority 32600", "", nil},
	} {
		s.batch("route add default via 203.0.113.1 table 77", "route add default via 2001:db8:1::1 table 77")
		s.batch(c.do)
		st := s.read(h)
		var got []string
		for _, p := range st.Problems {
			got = append(got, p.Subject+": "+p.Message+" ("+p.Remedy+")")
		}
		all := strings.Join(got, "\n")
		if c.subject == "" && len(got) > 0 || c.subject != "" && (len(got) != 1 || !strings.HasPrefix(all, c.subject+": ")) {
			t.Errorf("%s: got %q", c.what, got)
		}
		for _, has := range c.has {
			if !strings.Contains(all, has) {
				t.Errorf("%s: nothing of %q in %s", c.what, has, all)
			}
		}
		if !st.Ready {
			t.Errorf("%s: not ready", c.what)
		}
		s.batch(c.undo)
		if st := s.read(h); len(st.Problems) > 0 {
			t.Fatalf("%s: is over, but %+v", c.what, st.Problems)
		}
	}
}

// A peer whose packets the host's reverse path filter would drop is named.
func TestUnheard(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{Policy: true})
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("9.0.0.0/8")}, {Prefix: pp("203.0.113.0/24")}}))
	check := func(want string, endpoints ...string) {
		t.Helper()
		peers := map[key.Public]datapath.Peer{}
		for _, e := range endpoints {
			private, err := key.NewPrivate()
			must(t, err)
			peers[private.Public()] = datapath.Peer{Endpoint: netip.AddrPortFrom(ap(e), 51820)}
		}
		ps, err := h.Problems(s.ctx(), datapath.State{Peers: peers})
		must(t, err)
		got := ""
		for _, p := range ps {
			got += p.Subject + ": " + p.Message
		}
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%v: got %q, want %q", endpoints, got, want)
		}
	}
	check("", "9.9.9.9", "8.8.8.8")
	s.sysctl("ipv4/conf/eth0/rp_filter", "1")
	check("", "8.8.8.8", "203.0.113.9", "2620:fe::9") // the local network's, too
	check("rp_filter of eth0: the reverse path filter of eth0 is strict, and without its mark a packet to the peer at 9.9.9.8 would go into wg0", "8.8.8.8", "9.9.9.9", "9.9.9.8")
	s.sysctl("ipv4/conf/all/rp_filter", "2")
	check("", "9.9.9.9")
}

// Samples are inside, and not all in the same half.
func TestSamples(t *testing.T) {
	for _, p := range []string{"0.0.0.0/0", "10.0.0.0/8", "10.9.8.0/23", "10.9.8.7/32", "::/0", "fd00::/9", "fd00::/64", "fd00::7/128"} {
		p := pp(p)
		as := samples(p)
		for _, a := range as {
			if !p.Contains(a) {
				t.Errorf("%v: %v", p, a)
			}
		}
		if !p.IsSingleIP() {
			half := netip.PrefixFrom(p.Addr(), p.Bits()+1)
			in := func(a netip.Addr) bool { return half.Contains(a) }
			if !slices.ContainsFunc(as, in) || !slices.ContainsFunc(as, func(a netip.Addr) bool { return !in(a) }) {
				t.Errorf("%v: %v", p, as)
			}
		}
	}
}

// A table that others use is refused, with what is in it; what is guarded there is ours.
func TestTableInUse(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.ip("route add 10.0.0.0/8 via 203.0.113.1 table 8787 proto static")
	h := s.open(Options{Policy: true})
	_, _, err := h.Adopt(s.ctx(), kind, nil)
	foreign(t, err, "routing table 8787", "10.0.0.0/8", "static")
	s.ip("route del 10.0.0.0/8 table 8787", "route add unreachable 10.0.0.0/8 table 8787 proto 87")
	_, _, err = h.Adopt(s.ctx(), kind, nil)
	must(t, err)
	must(t, h.Up(s.ctx(), 0))
	if rs, err := h.list(s.ctx(), routesOf{fam: unix.AF_INET, table: 8787}); err != nil || len(rs) > 0 {
		t.Errorf("left: %v, %v", fmt.Sprint(rs), err)
	}
}
