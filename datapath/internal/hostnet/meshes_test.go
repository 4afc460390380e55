//go:build linux

package hostnet

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// A process that finds all in order when it starts puts rules back as fast as the one before.
func TestAdoptedRestores(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	o := Options{Policy: true, Guard: prefixes.MustParse("0.0.0.0/0")}
	must(t, s.up(o).Close())
	h := s.open(o)
	if st := s.read(h); !st.Ready { // so that no driver calls Up
		t.Fatalf("got %+v", st)
	}
	s.batch("route del unreachable default table 8787", "rule flush protocol 87")
	time.Sleep(2 * time.Second)
	if got := s.way("", "9.9.9.9"); got != "none" {
		t.Errorf("2 s after a flush, what is guarded goes to %s", got)
	}
}

// A mesh that starts later on with the same protocol does not keep the first from being put right.
func TestSameProtocolLater(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	before := s.dump()
	a := s.up(Options{Policy: true, Guard: prefixes.MustParse("10.0.0.0/8")})
	b := s.open(Options{Interface: "wg1"})
	_, _, err := b.Adopt(s.ctx(), kind, nil)
	must(t, err)
	must(t, b.Up(s.ctx(), 1420))
	if _, _, err := a.Adopt(s.ctx(), kind, nil); err != nil { // as kernel's mend does
		t.Errorf("the first cannot be put right any more: %v", err)
	}
	must(t, a.Remove(s.ctx()))
	if out := s.show("rule") + s.show("route show table all"); strings.Contains(out, "8787") {
		t.Errorf("Remove of the first leaves its rules and guard:\n%s", out)
	}
	must(t, b.Remove(s.ctx()))
	if s.dump() != before {
		t.Errorf("both removed: had\n%s\nnow\n%s", before, s.dump())
	}
}

// The guard of a mesh whose process ended holds, whatever other mesh starts.
func TestGuardBesideAnotherMesh(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	must(t, s.up(Options{Policy: true, Guard: prefixes.MustParse("0.0.0.0/0")}).Close())
	s.ip("link del wg0") // as with the end of a process that has a TUN
	s.ways("no link", [3]string{"", "9.9.9.9", "none"})
	s.up(Options{Interface: "wg1"})
	s.ways("another mesh, by the main table", [3]string{"", "9.9.9.9", "none"})
}

// A table in use is refused also by a mesh that finds its link.
func TestTableInUseAdopted(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	must(t, s.up(Options{}).Close())
	s.ip("route add default via 203.0.113.77 table 100 proto static") // of the administrator's, for something else
	h := s.open(Options{Policy: true, Table: 100})
	_, _, err := h.Adopt(s.ctx(), kind, nil)
	if err == nil {
		err = h.Up(s.ctx(), 0)
	}
	if err == nil {
		t.Errorf("a table with somebody else's default route was taken; the host's packets now go %s; problems %q", s.show("route get 9.9.9.9"), subjects(s.read(h).Problems))
	}
}

// Another table, or another way to route: nothing that was routed into the link leaves it in the clear meanwhile.
func TestOtherOptionsWithoutLeak(t *testing.T) {
	t.Parallel()
	for _, c := range [][2]Options{{{Policy: true}, {Policy: true, Table: 8800}}, {{Policy: true}, {}}} {
		s := newSpace(t)
		s.uplink()
		h := s.up(c[0])
		must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.0.0.0/8")}}))
		must(t, h.Close())
		s.ways("before", [3]string{"", "10.1.1.1", "wg0"})
		s.up(c[1])
		s.ways(fmt.Sprintf("between Up and AddRoutes, from %+v", c), [3]string{"", "10.1.1.1", "wg0"})
	}
}

// What is guarded and leaks is said, routes or none.
func TestGuardShadowed(t *testing.T) {
	t.Parallel()
	for _, leak := range [][]string{
		{"route add default via 203.0.113.1 table 77", "rule add lookup 77 priority 100"},
		{"route add default via 203.0.113.1 table 8787"},
	} {
		s := newSpace(t)
		s.uplink()
		h := s.up(Options{Policy: true, Guard: prefixes.MustParse("0.0.0.0/0")})
		s.batch(leak...)
		if way := s.way("", "9.9.9.9"); way == "eth0" {
			if st := s.read(h); st.Ready && len(st.Problems) == 0 {
				t.Errorf("%v: what is guarded leaves by %s, and nothing is said", leak, way)
			}
		}
	}
}

// Many routes of one family do not keep the other from being looked at.
func TestProblemsOfIPv6(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{Policy: true})
	var rs []datapath.Route
	for i := range 16 {
		rs = append(rs, datapath.Route{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i)}), 16)})
	}
	rs = append(rs, datapath.Route{Prefix: pp("fd00::/16")})
	must(t, h.AddRoutes(s.ctx(), rs))
	s.batch("route add default via 2001:db8:1::1 table 77", "-6 rule add lookup 77 priority 102")
	if way := s.way("", "fd00::7"); way != "eth0" {
		t.Fatal(way)
	}
	if st := s.read(h); len(st.Problems) == 0 {
		t.Error("all IPv6 of the mesh leaves by eth0 because of rule 102, and nothing is said")
	}
}

// A peer beyond the 16th that is not heard is said, too.
func TestUnheardAmongMany(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{Policy: true})
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("90.0.0.0/8")}}))
	s.sysctl("ipv4/conf/eth0/rp_filter", "1")
	peers := map[key.Public]datapath.Peer{}
	add := func(ip netip.Addr) {
		private, err := key.NewPrivate()
		must(t, err)
		peers[private.Public()] = datapath.Peer{Endpoint: netip.AddrPortFrom(ip, 51820)}
	}
	for i := range 16 {
		add(netip.AddrFrom4([4]byte{8, 8, 8, byte(i)}))
	}
	add(ap("90.9.9.9"))
	ps, err := h.Problems(s.ctx(), datapath.State{Peers: peers})
	must(t, err)
	if len(ps) == 0 {
		t.Error("packets of 90.9.9.9 are dropped, and nothing is said")
	}
}

// Who is blamed is who does it.
func TestBlame(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{Policy: true})
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.0.0.0/8")}}))
	s.batch("rule add fwmark 0xca00/0xff00 lookup 99 priority 105", "route add unreachable 10.0.0.0/8")
	st := s.read(h)
	if got := subjects(st.Problems); strings.Contains(got, "rule 105") || got == "" {
		t.Errorf("it is the unreachable route of the main table, and said is: %s", got)
	}
}

// The name in the error is that of the mesh that has the protocol.
func TestWhoHasTheProtocol(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.up(Options{Interface: "wg1", Protocol: 99})
	s.up(Options{Interface: "wg2"})
	h := s.open(Options{Policy: true})
	if _, _, err := h.Adopt(s.ctx(), kind, nil); err == nil || !strings.Contains(err.Error(), "warren:wg2:87") {
		t.Errorf("got %v", err)
	}
}

// Two meshes by policy with marks whose masks have no bit in common: encrypted packets of each go into the other.
func TestTwoMarks(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	a := s.up(Options{Policy: true})
	b := s.up(Options{Interface: "wg1", Policy: true, Protocol: 88, Table: 9001, Priority: 32400, Mark: 0x100, Mask: 0xf00})
	must(t, a.AddRoutes(s.ctx(), defaults))
	must(t, b.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("8.0.0.0/8")}})) // a's peer is at 8.8.8.8, b's at 9.9.9.9
	of1, of2 := s.way("0x50", "8.8.8.8"), s.way("0x100", "9.9.9.9")
	if of1 == "wg1" && of2 == "wg0" && len(s.read(a).Problems)+len(s.read(b).Problems) == 0 {
		t.Errorf("encrypted packets of wg0 go into %s, those of wg1 into %s, round and round, and nothing is said", of1, of2)
	}
}

// A mesh by policy and one by the main table: the same, by way of a prefix with the first one's endpoints inside.
func TestPolicyBesideMain(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	a := s.up(Options{Policy: true})
	b := s.up(Options{Interface: "wg1", Protocol: 88})
	must(t, a.AddRoutes(s.ctx(), defaults))                                    // a's peer is at 8.8.8.8
	must(t, b.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("8.0.0.0/8")}})) // b's at 9.9.9.9, which is not inside
	mark, err := b.Mark(0)
	must(t, err)
	of1, of2 := s.way("0x50", "8.8.8.8"), s.way("", "9.9.9.9")
	if mark == 0 && of1 == "wg1" && of2 == "wg0" && len(s.read(a).Problems)+len(s.read(b).Problems) == 0 {
		t.Errorf("encrypted packets of wg0 to 8.8.8.8 go into %s, those of wg1 to 9.9.9.9 into %s, round and round, and nothing is said", of1, of2)
	}
}

// Cleanup removes what has the protocol of its Options and what has that of the link.
func TestCleanupOfTwoProtocols(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	before := s.dump()
	o := Options{Policy: true, Guard: prefixes.MustParse("0.0.0.0/0")}
	must(t, s.up(o).Close())
	s.ip("link del wg0") // as with the end of a process that has a TUN
	must(t, s.up(Options{Protocol: 90, Policy: true, Table: 9000}).Close())
	must(t, Cleanup(s.ctx(), s.options(o)))
	if after := s.dump(); after != before {
		var left []string
		for _, l := range strings.Split(after, "\n") {
			if !strings.Contains(before, l) {
				left = append(left, l)
			}
		}
		t.Errorf("left: %q", left)
	}
}

// Two meshes by policy with a protocol each, as is asked for, and the table that both have by default: the second is
// refused, and the first can start again.
func TestTwoInOneTable(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	a := s.up(Options{Policy: true})
	b := s.open(Options{Interface: "wg1", Policy: true, Protocol: 88})
	_, _, err := b.Adopt(s.ctx(), kind, nil)
	foreign(t, err, "routing table 8787", "priority 32501", "protocol 87")
	must(t, a.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("11.0.0.0/8")}}))
	s.ip("link del wg0") // somebody, or the end of a process that has a TUN
	_, _, err = a.Adopt(s.ctx(), kind, nil)
	must(t, err)
	_, _, err = b.Adopt(s.ctx(), kind, nil) // the rules are still the first one's
	foreign(t, err, "routing table 8787")
}
