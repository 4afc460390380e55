//go:build linux

package hostnet

import (
	"strings"
	"testing"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nft"
	"github.com/warren-mesh/warren/prefixes"
)

// rulesOfTable is our table as another reader has it.
func (s *space) rulesOfTable(h *Host) nft.Rules {
	s.t.Helper()
	t, err := nft.Open(nft.Options{Interface: h.o.Interface, Owner: h.tableOwner(), Do: h.Do})
	must(s.t, err)
	defer t.Close()
	r, exact, err := t.Read(s.ctx())
	must(s.t, err)
	if !exact {
		s.t.Errorf("the table is not what it says: %+v", r)
	}
	return r
}

func (s *space) sysctlIs(name, want string) {
	s.t.Helper()
	got, err := s.run("", "cat", "/proc/sys/net/"+name)
	if err != nil || strings.TrimSpace(got) != want {
		s.t.Errorf("%s is %q, %v; want %s", name, got, err, want)
	}
}

// A host that begins to forward gets a table, which follows the MTU, comes back where somebody removes it, and
// goes with the link. One that forwards nothing has none.
func TestClamp(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{})
	settled := func(what string, mtu int) {
		t.Helper()
		if st := s.read(h); !st.Ready || len(st.Problems) > 0 {
			t.Errorf("%s: got %+v", what, st)
		}
		if got := s.rulesOfTable(h); !got.Equal(nft.Rules{ClampMTU: mtu}) {
			t.Errorf("%s: got %+v, want %d", what, got, mtu)
		}
	}
	settled("nothing forwarded", 0)
	if h.filter.table != nil {
		t.Error("nftables is looked at though nothing is forwarded")
	}
	s.drain(h)
	s.sysctl("ipv4/ip_forward", "1")
	s.notified(h, "forwarding")
	if s.read(h).Ready {
		t.Error("forwarding: ready")
	}
	must(t, h.Up(s.ctx(), 0))
	settled("forwarding", 1420)
	must(t, h.Up(s.ctx(), 1300))
	settled("another MTU", 1300)

	other, err := nft.Open(nft.Options{Interface: "wg0", Owner: h.tableOwner(), Do: h.Do})
	must(t, err)
	defer other.Close()
	s.drain(h)
	must(t, other.Set(s.ctx(), nft.Rules{}))
	s.notified(h, "the table removed")
	if s.read(h).Ready {
		t.Error("the table removed: ready")
	}
	must(t, h.Up(s.ctx(), 0))
	settled("back", 1300)

	s.sysctl("ipv4/ip_forward", "0")
	must(t, h.Up(s.ctx(), 0))
	settled("no longer", 0)
	s.sysctl("ipv4/ip_forward", "1")
	must(t, h.Up(s.ctx(), 0))
	must(t, h.Remove(s.ctx()))
	if got := s.rulesOfTable(h); !got.IsZero() {
		t.Errorf("left: %+v", got)
	}
	s.sysctlIs("ipv4/ip_forward", "1")
}

// What is turned on is noted, and turned off by whoever cleans up, or does not want it any more.
func TestForward(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv6/conf/all/forwarding", "1") // the administrator's
	o := Options{Forward: true, SNAT: prefixes.MustParse("192.168.0.0/16", "fd77::/16")}
	on := func() *Host {
		h := s.up(o)
		if st := s.read(h); !st.Ready || len(st.Problems) > 0 {
			t.Errorf("got %+v", st)
		}
		if got, want := s.rulesOfTable(h), (nft.Rules{ClampMTU: 1420, SNAT: o.SNAT, Turned: []string{nft.ForwardIPv4}}); !got.Equal(want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
		s.sysctlIs("ipv4/ip_forward", "1")
		return h
	}
	off := func(what string) {
		t.Helper()
		s.sysctlIs("ipv4/ip_forward", "0")
		s.sysctlIs("ipv6/conf/all/forwarding", "1")
		for _, p := range []string{"wg0"} {
			h := s.open(Options{Interface: p})
			if got := s.rulesOfTable(h); len(got.Turned) > 0 || !got.SNAT.IsEmpty() {
				t.Errorf("%s: left %+v", what, got)
			}
		}
	}
	h := on()
	s.sysctl("ipv4/ip_forward", "0")
	if s.read(h).Ready {
		t.Error("turned off by somebody: ready")
	}
	must(t, h.Up(s.ctx(), 0))
	s.sysctlIs("ipv4/ip_forward", "1")
	must(t, h.Close())
	must(t, Cleanup(s.ctx(), s.options(Options{}))) // knows of no option
	off("cleaned up")

	must(t, on().Close())
	h = s.up(Options{}) // started again without
	must(t, h.Up(s.ctx(), 0))
	off("started without")
	if st := s.read(h); !st.Ready {
		t.Errorf("got %+v", st)
	}
}

// A table of our name that is somebody else's is left alone, and said.
func TestForeignFilter(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.sysctl("ipv4/ip_forward", "1")
	other := s.open(Options{})
	theirs, err := nft.Open(nft.Options{Interface: "wg0", Owner: "theirs", Do: other.Do})
	must(t, err)
	defer theirs.Close()
	must(t, theirs.Set(s.ctx(), nft.Rules{ClampMTU: 1000}))
	h := s.up(Options{})
	st := s.read(h)
	if !st.Ready || len(st.Problems) != 1 || st.Problems[0].Subject != "nftables" || !strings.Contains(st.Problems[0].Message, "warren-wg0") {
		t.Errorf("got %+v", st)
	}
	must(t, h.Remove(s.ctx()))
	if r, exact, err := theirs.Read(s.ctx()); err != nil || !exact || r.ClampMTU != 1000 {
		t.Errorf("theirs is %+v, %t, %v", r, exact, err)
	}
}

// What is announced and is behind the host takes forwarding, which is said.
func TestUnpassed(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.ip("route add local 10.50.0.0/16 dev lo")
	h := s.up(Options{})
	check := func(want string, local ...string) {
		t.Helper()
		ps, err := h.Problems(s.ctx(), datapath.State{Local: prefixes.MustParse(local...)})
		must(t, err)
		got := ""
		for _, p := range ps {
			got += p.Subject + ": " + p.Message + " (" + p.Remedy + ") "
		}
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%v: got %q, want %q", local, got, want)
		}
	}
	check("", "203.0.113.2", "2001:db8:1::2", "10.50.0.0/16")
	check("IPv4 forwarding: this node announces 203.0.113.0/24, which is behind it", "203.0.113.0/24")
	check("IPv6 forwarding: this node announces 2001:db8:1::/64", "2001:db8:1::/64")
	check("net.ipv4.ip_forward to 1", "192.168.9.0/24")
	s.sysctl("ipv4/ip_forward", "1")
	check("", "203.0.113.0/24")
}
