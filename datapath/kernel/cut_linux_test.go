package kernel

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// raw is all of a namespace that a mesh may change, as lines: links, addresses, routes of all tables, rules.
func (s *space) raw() (lines []string) {
	s.T.Helper()
	s.Must(func() error {
		ls, err := netlink.LinkList()
		if err != nil {
			return err
		}
		names := make(map[int]string)
		for _, l := range ls {
			a := l.Attrs()
			names[a.Index] = a.Name
			lines = append(lines, fmt.Sprintf("link %s %s alias=%q mtu=%d up=%t", a.Name, l.Type(), a.Alias, a.MTU, a.Flags&1 != 0))
		}
		as, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, a := range as {
			lines = append(lines, fmt.Sprintf("address %v of %s", a.IPNet, names[a.LinkIndex]))
		}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			rs, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, r := range rs {
				lines = append(lines, fmt.Sprintf("route %v to %s from %v metric=%d table=%d protocol=%d", r.Dst, names[r.LinkIndex], r.Src, r.Priority, r.Table, r.Protocol))
			}
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, r := range rules {
				lines = append(lines, fmt.Sprintf("rule %d: %v", family, r))
			}
		}
		return nil
	})
	slices.Sort(lines)
	return lines
}

// becomes waits until the namespace is as it should be: IPv6 takes a moment over some of its routes.
func (s *space) becomes(what string, want []string) {
	s.T.Helper()
	var d string
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if d = cmp.Diff(want, s.raw()); d == "" {
			return
		}
		if time.Now().After(end) {
			s.T.Fatalf("%s:\n%s", what, d)
		}
	}
}

var errKilled = errors.New("killed")

// killAt has k change nothing any more after n changes, as if its process had ended, and returns how many
// changes it was asked for.
func (k *Kernel) killAt(n int) (asked *int) {
	asked = new(int)
	before := func() error {
		if *asked++; *asked > n {
			return errKilled
		}
		return nil
	}
	k.conn.before = before
	k.host.Intercept(func(string) error { return before() })
	return asked
}

// Killed before any change of the device or the host, and started again, the driver makes both what they
// should be; or Cleanup makes the host what it was.
func TestCut(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.Out()
	before := s.raw()
	a, b, c := nettest.NewKey(t).Public(), nettest.NewKey(t).Public(), nettest.NewKey(t).Public()
	private, psk := nettest.NewKey(t), nettest.NewPreshared(t)
	at := netip.MustParseAddrPort("192.0.2.77:51820")
	hint := netip.MustParseAddr("10.0.0.1")
	one := datapath.State{
		Device: datapath.Device{Key: private, ListenPort: 51820, MTU: 1400}, Addrs: set("10.0.0.1", "fd00::1"),
		Routes: map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.1.0.0/16"): hint, netip.MustParsePrefix("fd01::/64"): {}, netip.MustParsePrefix("10.2.0.0/16"): {}},
		Peers: map[key.Public]datapath.Peer{
			a: {Endpoint: at, Prefixes: set("10.1.0.0/16", "fd01::/64")},
			b: {Prefixes: set("10.2.0.0/16", "10.3.0.0/16"), Keepalive: 25 * time.Second},
		},
	}
	// two moves a prefix, drops one, changes a key, an address, a source and the MTU.
	two := datapath.State{
		Device: datapath.Device{Key: private, ListenPort: 51821, MTU: 1380}, Addrs: set("10.0.0.1", "fd00::2"),
		Routes: map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.1.0.0/16"): {}, netip.MustParsePrefix("10.2.0.0/16"): hint, netip.MustParsePrefix("fd02::/64"): {}},
		Peers: map[key.Public]datapath.Peer{
			a: {Endpoint: at, Preshared: psk, Prefixes: set("10.2.0.0/16")},
			c: {Prefixes: set("10.1.0.0/16", "fd02::/64")},
		},
	}
	// reach makes the device what it should be, as a mesh does.
	reach := func(k *Kernel, want datapath.State) error { return datapath.Sync(t.Context(), k, want) }
	story := func(k *Kernel) error {
		if err := reach(k, one); err != nil {
			return err
		}
		if err := reach(k, two); err != nil {
			return err
		}
		return k.Apply(t.Context(), datapath.RemoveDevice{})
	}
	clean := func(what string) {
		t.Helper()
		if err := Cleanup(t.Context(), Options{Namespace: s.Path}); err != nil {
			t.Fatalf("%s, cleaned up: %v", what, err)
		}
		s.becomes(what+", cleaned up", before)
	}
	k := s.kernel(t)
	if err := reach(k, two); err != nil {
		t.Fatal(err)
	}
	fresh, err := k.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond) // for the routes of addresses
	want := s.raw()
	k.Close()
	clean("a fresh device")

	cuts := 0
	for n, again := 0, true; ; again = !again {
		k := s.kernel(t)
		asked := k.killAt(n)
		err := story(k)
		cut := *asked > n
		if cut != (err != nil) {
			t.Fatalf("cut at %d: %t, %v", n, cut, err)
		}
		k.Close()
		what := fmt.Sprintf("cut at change %d", n)
		if cut && again {
			k := s.kernel(t)
			if err := reach(k, two); err != nil {
				t.Fatalf("%s, started again: %v", what, err)
			}
			got, err := k.Read(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if left := datapath.Plan(two, got); len(left) > 0 {
				t.Fatalf("%s, started again: still to do: %v", what, left)
			}
			if !maps.Equal(got.Peers, fresh.Peers) || got.Addrs != fresh.Addrs || !maps.Equal(got.Routes, fresh.Routes) {
				t.Fatalf("%s, started again: %+v, want %+v", what, got, fresh)
			}
			s.becomes(what+", started again", want)
			k.Close()
			if d, err := s.device(DefaultInterface); err != nil || len(d.Peers) != len(two.Peers) {
				t.Fatalf("%s, started again: another program sees %d peers: %v", what, len(d.Peers), err)
			}
			clean(what)
			continue // the same cut, cleaned up at once
		}
		clean(what)
		if !cut {
			break
		}
		cuts++
		n++
	}
	t.Logf("cut at each of %d changes", cuts)
	if cuts < 20 {
		t.Errorf("%d changes: too few to be all", cuts)
	}
}

// Single prefixes are dropped with one message each time, and the peer that it takes on older kernels is
// seen by nobody who asks the driver, and gone from the device soon after.
func TestDropsAreCheap(t *testing.T) {
	n, k := one(t)
	n.fallback = true
	var ps []netip.Prefix
	for i := range 50 {
		ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 4, byte(i)}), 24))
	}
	n.Do(datapath.PutPeer{Key: k, Peer: datapath.Peer{Prefixes: prefixes.Must(ps...)}})
	time.Sleep(second + 200*time.Millisecond) // for the greeting
	n.op.Lock()
	n.conn.written = 0
	n.op.Unlock()
	for i, p := range ps {
		n.Do(datapath.DropPrefixes{Key: k, Prefixes: prefixes.Must(p)})
		if got := n.Have(); len(got.Peers) != 1 || got.Peers[k].Prefixes.Len() != 2+len(ps)-i-1 {
			t.Fatalf("after %d drops there are %d peers, and %d prefixes", i+1, len(got.Peers), got.Peers[k].Prefixes.Len())
		}
	}
	if n.conn.written != len(ps) {
		t.Errorf("%d messages for %d drops", n.conn.written, len(ps))
	}
	d, err := n.space.device(DefaultInterface)
	if err != nil || len(d.Peers) > 2 {
		t.Errorf("%d peers on the device, %v", len(d.Peers), err)
	}
	took := nettest.Within(t, 10*time.Second, "only the peer is left", func() bool {
		d, err := n.space.device(DefaultInterface)
		return err == nil && len(d.Peers) == 1
	})
	t.Logf("the peer that nobody is was gone %v after the last drop", took.Round(time.Millisecond))

	// What the driver leaves at Close is the peers alone.
	n.Do(datapath.DropPrefixes{Key: k, Prefixes: set("10.2.0.0/24")})
	n.Close()
	if d, err := n.space.device(DefaultInterface); err != nil || len(d.Peers) != 1 {
		t.Errorf("%d peers after Close, %v", len(d.Peers), err)
	}
}

// Where the device takes the prefixes and then nothing more, what was to be dropped is seen, and goes later.
func TestDropThatFails(t *testing.T) {
	n, k := one(t)
	n.fallback = true
	var ps []netip.Prefix
	for i := range 30 {
		ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 4, byte(i)}), 24))
	}
	n.Do(datapath.PutPeer{Key: k, Peer: datapath.Peer{Prefixes: prefixes.Must(ps...)}})
	time.Sleep(second + 200*time.Millisecond) // for the greeting
	var failing atomic.Bool
	failing.Store(true)
	sent := 0
	n.op.Lock()
	n.budget = 512
	n.conn.before = func() error {
		if sent++; failing.Load() && sent > 1 {
			return unix.ENOMEM
		}
		return nil
	}
	n.op.Unlock()
	if err := n.Apply(t.Context(), datapath.DropPrefixes{Key: k, Prefixes: prefixes.Must(ps...)}); !errors.Is(err, unix.ENOMEM) {
		t.Errorf("a drop that failed: %v", err)
	}
	if ops := datapath.Plan(n.Want, n.Have()); len(ops) == 0 {
		t.Error("nothing is left to do")
	}
	failing.Store(false)
	n.Sync()
	nettest.Within(t, 10*time.Second, "only the peer is left, with its own prefixes", func() bool {
		d, err := n.space.device(DefaultInterface)
		return err == nil && len(d.Peers) == 1 && len(d.Peers[0].AllowedIPs) == 2
	})
}
