//go:build linux

package hostnet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

func subjects(ps problems) string {
	var all []string
	for _, p := range ps {
		all = append(all, p.Subject+": "+p.Message+" ("+p.Remedy+")")
	}
	return strings.Join(all, "\n")
}

func (s *space) sysctlGet(name string) string {
	s.t.Helper()
	got, err := s.run("", "cat", "/proc/sys/net/"+name)
	must(s.t, err)
	return strings.TrimSpace(got)
}

// The operator does what the problem says; the problem is to end, and the table to come.
func TestForeignFilterRemoved(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.sysctl("ipv4/ip_forward", "1")
	other := s.open(Options{})
	theirs, err := nft.Open(nft.Options{Interface: "wg0", Owner: "theirs", Do: other.Do})
	must(t, err)
	defer theirs.Close()
	must(t, theirs.Set(s.ctx(), nft.Rules{ClampMTU: 1000}))
	h := s.up(Options{})
	if st := s.read(h); len(st.Problems) != 1 {
		t.Fatalf("got %+v", st.Problems)
	}
	must(t, theirs.Set(s.ctx(), nft.Rules{})) // as the remedy says
	st := s.read(h)
	if st.Ready { // a driver calls Up only where it is not ready
		t.Errorf("the foreign table is gone, ours is not there, and Up has nothing to do: problems %q, table %+v", subjects(st.Problems), s.rulesOfTable(h))
	}
	must(t, h.Up(s.ctx(), 0))
	if st := s.read(h); !st.Ready || len(st.Problems) > 0 || s.rulesOfTable(h).ClampMTU != 1420 {
		t.Errorf("got %+v", st)
	}
}

// Forward beside an IPv6 default route of a router advertisement: what others flush comes back all the same.
func TestFlushBesideAdvertised(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.ip("link add eth0 type veth peer name far0")
	s.sysctl("ipv6/conf/all/forwarding", "0")
	s.sysctl("ipv6/conf/eth0/accept_ra", "1")
	s.ip("link set far0 up", "link set eth0 up", "addr add 203.0.113.2/24 dev eth0", "addr add fe80::2/64 dev eth0 nodad", "addr add fe80::1/64 dev far0 nodad")
	s.settle()
	other := s.open(Options{})
	within(t, "an advertised route", func() bool {
		must(t, other.Do(func() error { return advertiseAt("far0") }))
		return strings.Contains(s.show("-6 route show default"), "default")
	})
	h := s.up(Options{Forward: true, SNAT: prefixes.MustParse("203.0.113.0/24")})
	f, err := nft.ReadForwarding(h.Do)
	must(t, err)
	if f.Notice == nil {
		t.Fatalf("this route is not taken for an advertised one: %+v\n%s", f, s.show("-6 route show default"))
	}
	if s.rulesOfTable(h).SNAT.IsEmpty() {
		t.Fatal("no table to begin with")
	}
	if st := s.read(h); strings.Contains(subjects(st.Problems), "keep the source addresses") || strings.Contains(subjects(st.Problems), "not made to fit") {
		t.Errorf("false alarm: the table is there, exactly as it is to be, and it is said: %s", subjects(st.Problems))
	}
	_, err = s.run("", "nft", "flush", "ruleset")
	must(t, err)
	if st := s.read(h); st.Ready {
		t.Errorf("the table was flushed, and the host is said to be ready: SNAT and clamp never come back. Problems: %s", subjects(st.Problems))
	}
	must(t, h.Up(s.ctx(), 0))
	if st := s.read(h); !st.Ready || s.rulesOfTable(h).SNAT.IsEmpty() || len(st.Problems) != 1 || st.Problems[0].Subject != "IPv6 forwarding" {
		t.Errorf("put right: got %v, problems %s", st.Ready, subjects(st.Problems))
	}
}

// A flush of all rules takes the note of what was turned on along; it is to be turned off in the end all the same.
func TestFlushForgets(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv4/ip_forward", "0")
	h := s.up(Options{Forward: true})
	s.sysctlIs("ipv4/ip_forward", "1")
	_, err := s.run("", "nft", "flush", "ruleset")
	must(t, err)
	if s.read(h).Ready {
		t.Fatal("ready")
	}
	must(t, h.Up(s.ctx(), 0))
	must(t, h.Remove(s.ctx()))
	s.sysctlIs("ipv4/ip_forward", "0")
}

// What is turned on and off again leaves the other sysctls as they were.
func TestSysctlsRestored(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv4/ip_forward", "0")
	s.sysctl("ipv6/conf/all/forwarding", "0")
	s.sysctl("ipv4/conf/all/accept_redirects", "0") // as hardened hosts have it
	s.sysctl("ipv4/conf/far0/forwarding", "1")      // one network is forwarded
	s.sysctl("ipv6/conf/far0/forwarding", "1")
	names := []string{"ipv4/ip_forward", "ipv4/conf/all/accept_redirects", "ipv4/conf/default/accept_redirects", "ipv4/conf/eth0/forwarding", "ipv4/conf/far0/forwarding", "ipv6/conf/all/forwarding", "ipv6/conf/eth0/forwarding", "ipv6/conf/far0/forwarding", "ipv6/conf/default/forwarding"}
	before := map[string]string{}
	for _, n := range names {
		before[n] = s.sysctlGet(n)
	}
	h := s.up(Options{Forward: true})
	must(t, h.Remove(s.ctx()))
	for _, n := range names {
		if got := s.sysctlGet(n); got != before[n] {
			t.Errorf("%s was %s, and is %s after Remove", n, before[n], got)
		}
	}
}

// Two meshes forward: the end of one costs the other nothing.
func TestForwardOfTwo(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv4/ip_forward", "0")
	a := s.up(Options{Forward: true})
	b := s.up(Options{Interface: "wg1", Protocol: 88, Forward: true})
	must(t, a.Remove(s.ctx()))
	s.sysctlIs("ipv4/ip_forward", "1")
	if st := s.read(b); !st.Ready {
		t.Error("the other mesh does not forward any more")
	}
	must(t, b.Remove(s.ctx()))
	s.sysctlIs("ipv4/ip_forward", "0")
}

// A host that forwards between some interfaces only does forward: no alarm, and segments that fit.
func TestForwardPerInterface(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv4/ip_forward", "0")
	s.sysctl("ipv4/conf/default/forwarding", "1")
	s.sysctl("ipv4/conf/eth0/forwarding", "1")
	h := s.up(Options{})
	s.sysctlIs("ipv4/conf/wg0/forwarding", "1")
	if out, err := s.run("", "ip", "route", "get", "203.0.113.9", "from", "10.1.1.1", "iif", "wg0"); err != nil {
		t.Skipf("Linux does not forward: %s %v", out, err)
	}
	ps, err := h.Problems(s.ctx(), datapath.State{Local: prefixes.MustParse("203.0.113.0/24")})
	must(t, err)
	if len(ps) > 0 {
		t.Errorf("false alarm: %s", subjects(ps))
	}
	if got := s.rulesOfTable(h); got.ClampMTU == 0 {
		t.Error("packets are forwarded, and segments not clamped")
	}
}

// ip_forward is on, and new links do not forward: packets that come out of the mesh are dropped.
func TestForwardNotOurLink(t *testing.T) {
	t.Parallel()
	for _, forward := range []bool{false, true} {
		s := newSpace(t)
		s.uplink()
		s.sysctl("ipv4/ip_forward", "1")
		s.sysctl("ipv4/conf/default/forwarding", "0")
		h := s.up(Options{Forward: forward})
		st := s.read(h)
		ps, err := h.Problems(s.ctx(), datapath.State{Local: prefixes.MustParse("203.0.113.0/24")})
		must(t, err)
		if _, err := s.run("", "ip", "route", "get", "203.0.113.9", "from", "10.1.1.1", "iif", "wg0"); err != nil && len(ps)+len(st.Problems) == 0 && st.Ready {
			t.Errorf("Forward %t: what comes out of wg0 is dropped (%v; wg0/forwarding is %s), and no problem is reported", forward, err, s.sysctlGet("ipv4/conf/wg0/forwarding"))
		}
	}
}

// advertiseAt sends a router advertisement that is valid for half an hour, as package nft's tests do.
func advertiseAt(name string) error {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	to := &unix.SockaddrInet6{Addr: [16]byte{0: 0xff, 1: 2, 15: 1}, ZoneId: uint32(i.Index)}
	from := &unix.SockaddrInet6{Addr: [16]byte{0: 0xfe, 1: 0x80, 15: 1}, ZoneId: uint32(i.Index)}
	return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255), unix.Bind(fd, from),
		unix.Sendto(fd, []byte{0: 134, 4: 64, 6: 7, 7: 8, 15: 0}, 0, to))
}

// A mesh without Forward leaves the administrator's sysctl alone, whatever an earlier one noted.
func TestStaleNote(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv4/ip_forward", "0")
	must(t, s.up(Options{Forward: true}).Close())
	s.sysctl("ipv4/ip_forward", "0") // the administrator does not want that
	s.sysctl("ipv6/conf/all/forwarding", "0")
	h := s.up(Options{}) // nor does he any more
	if st := s.read(h); !st.Ready {
		t.Fatalf("got %+v", st)
	}
	s.sysctl("ipv4/ip_forward", "1") // now he does, by himself
	if st := s.read(h); !st.Ready {
		must(t, h.Up(s.ctx(), 0))
	}
	s.sysctlIs("ipv4/ip_forward", "1")
}

// behind checks what is said of a network behind eth0.
func (s *space) behind(h *Host, want string) {
	s.t.Helper()
	ps, err := h.Problems(s.ctx(), datapath.State{Local: prefixes.MustParse("203.0.113.0/24")})
	must(s.t, err)
	if got := subjects(ps); want == "" && got != "" || !strings.Contains(got, want) {
		s.t.Errorf("got %q, want %q", got, want)
	}
}

// It is said which interface keeps packets from being forwarded, to the mesh or from it.
func TestUnpassedByInterface(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{})
	s.sysctl("ipv4/ip_forward", "1")
	s.behind(h, "")
	s.sysctl("ipv4/conf/eth0/forwarding", "0")
	s.behind(h, "forwards no IPv4 that comes from eth0: what it answers is dropped (set net.ipv4.conf.eth0.forwarding to 1")
	s.sysctl("ipv4/conf/eth0/forwarding", "1")
	s.sysctl("ipv4/conf/wg0/forwarding", "0")
	s.behind(h, "comes from wg0: packets that arrive for it are dropped (set net.ipv4.conf.wg0.forwarding to 1")
	if s.read(h).Ready {
		t.Error("ready")
	}
	must(t, h.Up(s.ctx(), 0))
	s.behind(h, "")
	s.sysctl("ipv4/ip_forward", "0")
	s.behind(h, "set net.ipv4.ip_forward to 1")
	s.sysctl("ipv4/conf/wg0/forwarding", "1")
	s.behind(h, "set net.ipv4.conf.eth0.forwarding to 1")

	// An interface that has IPv6 forwarded though the host does not, since Linux 6.17.
	if _, err := s.run("", "cat", "/proc/sys/net/ipv6/conf/eth0/force_forwarding"); err != nil {
		return
	}
	six := func() string {
		ps, err := h.Problems(s.ctx(), datapath.State{Local: prefixes.MustParse("2001:db8:1::/64")})
		must(t, err)
		return subjects(ps)
	}
	if six() == "" {
		t.Error("nothing is said of IPv6")
	}
	s.sysctl("ipv6/conf/eth0/force_forwarding", "1")
	s.sysctl("ipv6/conf/wg0/force_forwarding", "1")
	if got := six(); got != "" {
		t.Errorf("got %q", got)
	}
}

// What cannot be opened is tried again after a while only, and then found.
func TestFilterUnable(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.sysctl("ipv4/ip_forward", "1")
	h := s.open(Options{})
	opened, fails := 0, error(nil)
	h.filter.open = func(o nft.Options) (*nft.Table, error) {
		if opened++; fails != nil {
			return nil, fails
		}
		return nft.Open(o)
	}
	up := func() {
		t.Helper()
		_, _, err := h.Adopt(s.ctx(), kind, nil)
		must(t, err)
		must(t, h.Up(s.ctx(), 1420))
	}
	for _, fails = range []error{fmt.Errorf("nftables: %w", errors.ErrUnsupported), fmt.Errorf("nftables: %w", fs.ErrPermission)} {
		opened = 0
		up()
		for range 3 {
			if st := s.read(h); !st.Ready || !strings.Contains(subjects(st.Problems), fails.Error()) {
				t.Errorf("got %t, %s", st.Ready, subjects(st.Problems))
			}
		}
		if opened != 1 {
			t.Errorf("%v: opened %d times", fails, opened)
		}
		h.filter.since = time.Now().Add(-forgiven)
	}
	fails = unix.EMFILE // that may be over the next time
	opened = 0
	for range 3 {
		s.read(h)
	}
	if opened != 3 {
		t.Errorf("opened %d times", opened)
	}
	fails = nil
	if st := s.read(h); st.Ready || len(st.Problems) > 0 {
		t.Errorf("got %t, %s", st.Ready, subjects(st.Problems))
	}
	up()
	if st := s.read(h); !st.Ready || len(st.Problems) > 0 || s.rulesOfTable(h).ClampMTU != 1420 {
		t.Errorf("got %t, %s", st.Ready, subjects(st.Problems))
	}
}

// What Up failed to do is said, and tried again after a while, or at once where it was for want of time.
func TestFilterFailed(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	s.sysctl("ipv4/ip_forward", "1")
	p := passing{clamp: 1420}
	done, stop := context.WithCancel(s.ctx())
	stop()
	h.setFilter(done, p)
	if st := s.read(h); st.Ready || len(st.Problems) > 0 {
		t.Errorf("no time: got %t, %s", st.Ready, subjects(st.Problems))
	}
	h.filter.failed = undone{h.planFilter(s.ctx(), p).left(), errors.New("no way"), time.Now()}
	if st := s.read(h); !st.Ready || !strings.Contains(subjects(st.Problems), "no way") {
		t.Errorf("failed: got %t, %s", st.Ready, subjects(st.Problems))
	}
	s.sysctl("ipv4/conf/wg0/forwarding", "0") // something else to do
	if s.read(h).Ready {
		t.Error("something else: ready")
	}
	s.sysctl("ipv4/conf/wg0/forwarding", "1")
	h.filter.failed.at = time.Now().Add(-forgiven)
	if st := s.read(h); st.Ready || len(st.Problems) > 0 {
		t.Errorf("after a while: got %t, %s", st.Ready, subjects(st.Problems))
	}
	must(t, h.Up(s.ctx(), 0))
	if st := s.read(h); !st.Ready || len(st.Problems) > 0 {
		t.Errorf("got %t, %s", st.Ready, subjects(st.Problems))
	}
}

// What could not be turned on is not noted: whoever turns it on later is not to find it off some day.
func TestNoteTakenBack(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.sysctl("ipv4/ip_forward", "0")
	h := s.up(Options{})
	table, err := h.openFilter()
	must(t, err)
	on := []string{nft.ForwardIPv4, "net.ipv4.fails"}
	want := nft.Rules{ClampMTU: 1300, Turned: on}
	if err := h.turnOn(s.ctx(), plan{table: table, want: want, on: on}); err == nil {
		t.Error("no error")
	}
	s.sysctlIs("ipv4/ip_forward", "1")
	if got := s.rulesOfTable(h); !got.Equal(nft.Rules{ClampMTU: 1300, Turned: on[:1]}) || !slices.Equal(h.filter.noted, on[:1]) {
		t.Errorf("got %+v, noted %q", got, h.filter.noted)
	}
}

// A note of what no mesh turns on keeps nothing from being removed.
func TestStrangeNote(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.sysctl("ipv4/ip_forward", "1")
	h := s.open(Options{})
	table, err := nft.Open(nft.Options{Interface: "wg0", Owner: h.tableOwner(), Do: h.Do})
	must(t, err)
	defer table.Close()
	for _, f := range []func(){
		func() { must(t, Cleanup(s.ctx(), s.options(Options{}))) },
		func() { s.sysctl("ipv4/ip_forward", "0"); must(t, s.up(Options{}).Close()) },
	} {
		must(t, table.Set(s.ctx(), nft.Rules{ClampMTU: 1300, Turned: []string{nft.ForwardIPv4, "net.ipv4.conf.all.accept_local"}}))
		f()
		s.sysctlIs("ipv4/ip_forward", "0")
		s.sysctlIs("ipv4/conf/all/accept_local", "0")
		if r, exact, err := table.Read(s.ctx()); err != nil || !exact || !r.IsZero() {
			t.Errorf("left %+v, %t, %v", r, exact, err)
		}
	}
}

func (s *space) took(h *Host) time.Duration {
	s.read(h)
	best := time.Hour
	for range 5 {
		begun := time.Now()
		s.read(h)
		best = min(best, time.Since(begun))
	}
	return best
}

// What others have in nftables does not make a reading slow.
func TestManyForeignRules(t *testing.T) {
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv4/ip_forward", "1")
	h := s.up(Options{})
	before := s.took(h)
	var b strings.Builder
	b.WriteString("table inet firewall {\n chain c {\n")
	for i := range 20000 {
		fmt.Fprintf(&b, "meta nfproto ipv4 ip daddr 10.%d.%d.%d tcp dport %d counter accept comment \"svc-%d\"\n", i>>16, i>>8&255, i&255, 1000+i%1000, i)
	}
	b.WriteString("}\n}\n")
	_, err := s.run(b.String(), "nft", "-f", "-")
	must(t, err)
	if !s.read(h).Ready {
		t.Error("not ready")
	}
	after := s.took(h)
	t.Logf("Read takes %v, and %v beside 20,000 foreign rules", before, after)
	if after > 10*before && after > 20*time.Millisecond {
		t.Errorf("Read takes %v, and %v beside 20,000 rules of nftables that are somebody else's", before, after)
	}
}

// Rules of others that never rest keep neither a reading nor Close from ending, nor rules of ours from being put back.
func TestWhileRulesChange(t *testing.T) {
	s := newSpace(t)
	s.uplink()
	s.sysctl("ipv4/ip_forward", "1")
	h := s.up(Options{Policy: true})
	var b strings.Builder
	b.WriteString("table inet firewall {\n chain c {\n")
	for i := range 20000 {
		fmt.Fprintf(&b, "meta nfproto ipv4 ip daddr 10.%d.%d.%d tcp dport %d counter accept comment \"svc-%d\"\n", i>>16, i>>8&255, i&255, 1000+i%1000, i)
	}
	b.WriteString("}\n}\n")
	_, err := s.run(b.String(), "nft", "-f", "-")
	must(t, err)
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() { // a container engine, say: 20 changes a second
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
			_, _ = s.run([]string{"add table ip x\n", "delete table ip x\n"}[i%2], "nft", "-f", "-")
		}
	}()
	defer func() { close(stop); <-done }()
	ctx := s.ctx()
	begun := time.Now()
	read := make(chan error, 1)
	go func() { _, err := h.Read(ctx); read <- err }()
	time.Sleep(100 * time.Millisecond)
	s.batch("rule flush protocol 87")
	flushed := time.Now()
	for !strings.Contains(s.show("rule"), "8787") && time.Since(flushed) < 3*time.Second {
		time.Sleep(5 * time.Millisecond)
	}
	if took := time.Since(flushed); took > 2500*time.Millisecond {
		t.Errorf("rules of ours are not back after %v", took)
	}
	select {
	case err := <-read:
		t.Logf("Read: %v after %v", err, time.Since(begun))
	case <-time.After(5 * time.Second):
		t.Errorf("Read takes more than %v", time.Since(begun))
	}
	begun = time.Now()
	closed := make(chan struct{})
	go func() { h.Close(); close(closed) }()
	select {
	case <-closed:
		t.Logf("closed after %v", time.Since(begun))
	case <-time.After(5 * time.Second):
		t.Errorf("Close takes more than %v", time.Since(begun))
		<-closed
		t.Logf("closed after %v", time.Since(begun))
	}
}

// nftables keeps nobody waiting but who deals with it: neither the restorer, nor routes, nor Close.
func TestFilterWaits(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.uplink()
	h := s.up(Options{Policy: true})
	entered, leave := make(chan struct{}), make(chan struct{})
	h.filter.open = func(o nft.Options) (*nft.Table, error) {
		close(entered)
		<-leave
		o.Do = func(f func() error) error { return f() } // h is closed by now
		return nft.Open(o)
	}
	s.sysctl("ipv4/ip_forward", "1")
	read := make(chan error)
	go func() { _, err := h.Read(context.Background()); read <- err }()
	<-entered
	must(t, h.AddRoutes(s.ctx(), []datapath.Route{{Prefix: pp("10.0.0.0/8")}}))
	s.batch("rule flush protocol 87")
	within(t, "the rules are back", func() bool { return strings.Contains(s.show("rule"), "8787") })
	must(t, h.Close())
	close(leave)
	must(t, <-read)
}
