package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// one is a node with a peer, in a namespace of its own that can send.
func one(t testing.TB) (*node, key.Public) {
	t.Helper()
	s := newSpace(t)
	s.Out()
	n := newNode(t, s, "one", "10.0.0.1", "fd00::1")
	k := nettest.NewKey(t).Public()
	n.Peer(k, datapath.Peer{Endpoint: netip.MustParseAddrPort("192.0.2.99:51820"), Keepalive: 25 * time.Second, Prefixes: set("10.2.0.0/24", "fd00:2::/64")})
	return n, k
}

// mended brings n to what it shall be, as often as it takes, within 2 s from a change.
func (n *node) mended(what string) {
	n.T.Helper()
	took := nettest.Within(n.T, 5*time.Second, what+" is repaired", func() bool {
		err := datapath.Sync(n.T.Context(), n.Kernel, n.Want)
		if err != nil {
			n.T.Logf("%s: not yet: %v", what, err)
		}
		name := ""
		for _, l := range n.space.Links() {
			if l == DefaultInterface {
				name = l
			}
		}
		return err == nil && name != ""
	})
	n.T.Logf("%s: repaired in %v", what, took.Round(time.Millisecond))
	if ops := datapath.Plan(n.Want, n.Have()); len(ops) > 0 {
		n.T.Errorf("%s: still to do: %v", what, ops)
	}
}

// Whatever somebody else does is noticed, and repaired by a plan.
func TestOutsiders(t *testing.T) {
	t.Parallel()
	n, k := one(t)
	name := DefaultInterface
	pk := func(k key.Public) wgtypes.Key { return wgtypes.Key(k.Bytes()) }
	other := nettest.NewKey(t)
	otherBytes := wgtypes.Key(other.Bytes())
	port, mark := 50001, 77
	_, more, _ := net.ParseCIDR("10.77.0.0/24")
	for _, c := range []struct {
		what string
		do   func() error
	}{
		{"a peer removed", func() error {
			return n.space.wgctrl(name, wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: pk(k), Remove: true}}})
		}},
		{"a peer added", func() error {
			return n.space.wgctrl(name, wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: pk(other.Public()), AllowedIPs: []net.IPNet{*more}}}})
		}},
		{"a prefix stolen", func() error {
			_, p, _ := net.ParseCIDR("10.2.0.0/24")
			return n.space.wgctrl(name, wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: pk(other.Public()), AllowedIPs: []net.IPNet{*p}}}})
		}},
		{"the key changed", func() error { return n.space.wgctrl(name, wgtypes.Config{PrivateKey: &otherBytes}) }},
		{"the port changed", func() error { return n.space.wgctrl(name, wgtypes.Config{ListenPort: &port}) }},
		{"the mark changed", func() error { return n.space.wgctrl(name, wgtypes.Config{FirewallMark: &mark}) }},
		{"an address removed", func() error {
			return n.space.In(func() error { a, _ := netlink.ParseAddr("10.0.0.1/32"); return netlink.AddrDel(n.link(), a) })
		}},
		{"a route removed", func() error {
			return n.space.In(func() error {
				rs, err := netlink.RouteList(n.link(), netlink.FAMILY_V4)
				for _, r := range rs {
					err = errors.Join(err, netlink.RouteDel(&r))
				}
				return err
			})
		}},
		{"the link taken down", func() error { return n.space.In(func() error { return netlink.LinkSetDown(n.link()) }) }},
		{"the link renamed", func() error {
			return n.space.In(func() error {
				l := n.link()
				return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, "stolen0"), netlink.LinkSetUp(l))
			})
		}},
		{"the link deleted", func() error { return n.space.In(func() error { return netlink.LinkDel(n.link()) }) }},
	} {
		n.Want.Device.ListenPort = n.Have().Device.ListenPort
		if c.what == "the mark changed" {
			n.Want.Device.Mark = 5
			n.Sync()
		}
		nettest.Quiet(n.Kernel)
		if err := c.do(); err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		nettest.Notified(t, n.Kernel, c.what)
		n.mended(c.what)
	}
	if links := n.space.Links(); !slices.Contains(links, name) || slices.Contains(links, "stolen0") || slices.ContainsFunc(links, func(s string) bool { return strings.HasPrefix(s, "wrn") }) {
		t.Errorf("links are %v", links)
	}
}

// link returns the link. It is for those who are on the namespace's thread.
func (n *node) link() netlink.Link {
	l, err := netlink.LinkByName(DefaultInterface)
	if err != nil {
		return &netlink.Wireguard{}
	}
	return l
}

// Changes of the host around the device are reported too.
func TestChangedOfHost(t *testing.T) {
	n, _ := one(t)
	out := func() netlink.Link { l, _ := netlink.LinkByName("out"); return l }
	for _, c := range []struct {
		what string
		do   func() error
	}{
		{"a link", func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "more"
			return netlink.LinkAdd(&netlink.Dummy{LinkAttrs: attrs})
		}},
		{"an address", func() error { return nettest.AddAddress(out(), "198.51.100.1/24") }},
		{"a default route", func() error {
			_, all, _ := net.ParseCIDR("0.0.0.0/0")
			return netlink.RouteAdd(&netlink.Route{Dst: all, Gw: net.ParseIP("192.0.2.1"), LinkIndex: out().Attrs().Index})
		}},
		{"a rule", func() error {
			r := netlink.NewRule()
			r.Priority, r.Table, r.Family = 1000, 254, unix.AF_INET
			return netlink.RuleAdd(r)
		}},
		{"an IPv6 rule", func() error {
			r := netlink.NewRule()
			r.Priority, r.Table, r.Family = 1000, 254, unix.AF_INET6
			return netlink.RuleAdd(r)
		}},
	} {
		nettest.Quiet(n.Kernel)
		if err := n.space.In(c.do); err != nil {
			t.Fatalf("%s: %v", c.what, err)
		}
		nettest.Notified(t, n.Kernel, c.what)
	}
	if h := n.Have().Host; !h.IPv4 || !h.Connected.OverlapsPrefix(netip.MustParsePrefix("198.51.100.0/24")) || h.Underlay != datapath.UnderlayShared {
		t.Errorf("host is %+v", h)
	}
}

// A link that a mesh did not make is left as it is, and the error says whose it is.
func TestForeignLink(t *testing.T) {
	s := newSpace(t)
	s.Out()
	s.Must(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = DefaultInterface
		return errors.Join(netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs}), netlink.LinkSetAlias(&netlink.Wireguard{LinkAttrs: attrs}, "the VPN of somebody else"))
	})
	k := s.kernel(t)
	if st, err := k.Read(t.Context()); err != nil || st.Device.Exists() {
		t.Errorf("Read: %v, %v", st.Device, err)
	}
	err := k.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{Key: nettest.NewKey(t)}})
	var foreign *hostnet.ForeignError
	if !errors.As(err, &foreign) || !errors.Is(err, datapath.ErrNoDevice) || !strings.Contains(err.Error(), "the VPN of somebody else") {
		t.Errorf("a foreign link: %v", err)
	}
	if err := k.Apply(t.Context(), datapath.RemoveDevice{}); err != nil {
		t.Logf("removing: %v", err)
	}
	k.Close() // or Cleanup is refused for that, and does not come to the link
	if err := Cleanup(t.Context(), Options{Namespace: s.Path}); err != nil {
		t.Errorf("cleaning up where nothing is ours: %v", err)
	}
	d, err := s.device(DefaultInterface)
	if err != nil || d.PrivateKey != (wgtypes.Key{}) {
		t.Errorf("the foreign device: %v, %v", d, err)
	}
}

func TestBadInput(t *testing.T) {
	for _, name := range []string{"sixteen-bytes-16", "wg/0", "wg 0", "..", "wg0\n", "🐇🐇🐇🐇"} {
		if k, err := New(Options{Interface: name}); err == nil {
			k.Close()
			t.Errorf("interface %q was taken", name)
		} else if !errors.Is(err, hostnet.ErrName) {
			t.Errorf("interface %q: %v", name, err)
		}
	}
	n, _ := one(t)
	for _, mtu := range []int{1279, 576, -1, 65536} {
		err := n.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{MTU: mtu}})
		if err == nil || errors.Is(err, datapath.ErrNoDevice) || !strings.Contains(err.Error(), fmt.Sprint(mtu)) {
			t.Errorf("MTU %d: %v", mtu, err)
		}
	}
	if got := n.Have(); got.Device.MTU < 1280 || got.Addrs != n.Want.Addrs {
		t.Errorf("refused MTUs left %+v with %v", got.Device, got.Addrs)
	}
	// An address that another link has, a route that is somebody else's: an error for each, and the rest done.
	err := n.Apply(t.Context(), datapath.AddAddrs{Addrs: set("192.0.2.9", "10.0.0.7")})
	if failures(err) != 1 || !strings.Contains(err.Error(), "192.0.2.9") || !strings.Contains(err.Error(), "out") {
		t.Errorf("an address of another link: %v", err)
	}
	if !n.Have().Addrs.Has(netip.MustParsePrefix("10.0.0.7/32")) {
		t.Error("the other address is missing")
	}
}

// An MTU that nobody asked for follows the underlay, and whatever somebody else makes of it is put right.
func TestMTU(t *testing.T) {
	n, _ := one(t)
	set := func(link string, mtu int) {
		n.space.Must(func() error {
			l, err := netlink.LinkByName(link)
			if err != nil {
				return err
			}
			return netlink.LinkSetMTU(l, mtu)
		})
	}
	for _, c := range []struct {
		link      string
		mtu, want int
	}{{DefaultInterface, 1500, 1420}, {DefaultInterface, 1200, 1420}, {"out", 1400, 1320}, {"out", 1300, 1280}, {"out", 9000, 8920}, {"out", 1500, 1420}} {
		nettest.Quiet(n.Kernel)
		set(c.link, c.mtu)
		nettest.Notified(t, n.Kernel, "an MTU")
		nettest.Within(t, 5*time.Second, fmt.Sprintf("the device has MTU %d", c.want), func() bool {
			return datapath.Sync(t.Context(), n.Kernel, n.Want) == nil && n.Have().Device.MTU == c.want
		})
		if ops := datapath.Plan(n.Want, n.Have()); len(ops) > 0 {
			t.Errorf("%s at %d: still to do: %v", c.link, c.mtu, ops)
		}
	}
	// One that was asked for stays.
	n.Want.Device.MTU = 1300
	n.Sync()
	set("out", 9000)
	time.Sleep(1500 * time.Millisecond)
	if got := n.Have().Device.MTU; got != 1300 {
		t.Errorf("MTU %d, asked for was 1300", got)
	}
	set(DefaultInterface, 1400)
	nettest.Within(t, 5*time.Second, "what was asked for is back", func() bool { return n.Have().Device.MTU == 1300 })
}

// A process that finds its link down, or filtered strictly, brings that right and writes nothing else.
func TestRestartOfWhatIsNotReady(t *testing.T) {
	n, _ := one(t)
	n.Close()
	for what, spoil := range map[string]func() error{
		"down": func() error { return netlink.LinkSetDown(n.link()) },
		"strict": func() error {
			return os.WriteFile("/proc/sys/net/ipv4/conf/"+DefaultInterface+"/rp_filter", []byte("1"), 0)
		},
	} {
		n.space.Must(spoil)
		k := n.space.kernel(t)
		got, err := k.Read(t.Context())
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		for _, op := range datapath.Plan(n.Want, got) {
			switch op.(type) {
			case datapath.AddAddrs, datapath.AddRoutes: // which went with the link
			default:
				t.Errorf("%s: a new process plans %v", what, op)
			}
		}
		if err := datapath.Sync(t.Context(), k, n.Want); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if k.conn.written != 0 {
			t.Errorf("%s: %d messages were written to WireGuard", what, k.conn.written)
		}
		k.Close()
	}
}

// With IPv6 disabled the device works over IPv4, and what is IPv6 is reported.
func TestWithoutIPv6(t *testing.T) {
	s := newSpace(t)
	s.Out()
	s.Sysctl("net/ipv6/conf/all/disable_ipv6", "1")
	s.Sysctl("net/ipv6/conf/default/disable_ipv6", "1")
	k := s.kernel(t)
	want := datapath.State{
		Device: datapath.Device{Key: nettest.NewKey(t)}, Addrs: set("10.0.0.1", "fd00::1"),
		Routes: map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.2.0.0/24"): {}, netip.MustParsePrefix("fd00:2::/64"): {}},
		Peers:  map[key.Public]datapath.Peer{nettest.NewKey(t).Public(): {Prefixes: set("10.2.0.0/24", "fd00:2::/64")}},
	}
	err := k.Apply(t.Context(), datapath.Plan(want, datapath.State{})...)
	if !errors.Is(err, hostnet.ErrFamily) || failures(err) != 2 {
		t.Errorf("%d failures, want the address and the route of IPv6: %v", failures(err), err)
	}
	got, err := k.Read(t.Context())
	if err != nil || got.Addrs != set("10.0.0.1") || len(got.Routes) != 1 || got.Host.IPv6 {
		t.Errorf("device has %v, %v, host %+v: %v", got.Addrs, got.Routes, got.Host, err)
	}
	s.Sysctl("net/ipv6/conf/all/disable_ipv6", "0")
	nettest.Within(t, 5*time.Second, "IPv6 comes with it", func() bool { return datapath.Sync(t.Context(), k, want) == nil })
}

// Where others rewrite the device as fast as they can, a reading is whole or an error, never a part.
func TestReadUnderChurn(t *testing.T) {
	s := newSpace(t)
	s.Out()
	n := newNode(t, s, "one", "10.0.0.1")
	const peers = 300 // several messages
	var ops []datapath.Op
	for i := range peers {
		var ps []netip.Prefix
		for j := range 8 {
			ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), byte(j * 32)}), 27))
		}
		ops = append(ops, datapath.PutPeer{Key: nettest.NewKey(t).Public(), Peer: datapath.Peer{Prefixes: prefixes.Must(ps...)}})
	}
	n.Do(ops...)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	churn := wgtypes.Key(nettest.NewKey(t).Public().Bytes())
	wg.Go(func() {
		_, p, _ := net.ParseCIDR("10.99.0.0/24")
		c := wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: churn, AllowedIPs: []net.IPNet{*p}}}}
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			if err := s.wgctrl(DefaultInterface, c); err != nil {
				t.Error(err)
				return
			}
		}
	})
	reads, failed := 0, 0
	for begun := time.Now(); time.Since(begun) < 4*time.Second; {
		got, err := n.Read(t.Context())
		if errors.Is(err, errInterrupted) {
			failed++
			continue
		}
		if err != nil {
			t.Error(err)
			break
		}
		reads++
		delete(got.Peers, mustPublic(t, churn))
		if len(got.Peers) != peers {
			t.Errorf("reading %d has %d peers", reads, len(got.Peers))
		}
		for _, p := range got.Peers {
			if p.Prefixes.Len() != 8 {
				t.Errorf("reading %d has a peer with %d prefixes", reads, p.Prefixes.Len())
			}
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d readings of %d peers while somebody wrote every millisecond: all whole; %d begun again, %d given up", reads, peers, n.conn.interrupted, failed)
	if reads == 0 {
		t.Error("no reading came through")
	}
}

func mustPublic(t testing.TB, k wgtypes.Key) key.Public {
	t.Helper()
	p, err := key.PublicFromBytes(k[:])
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A reply that finds no room in the socket's buffer is ENOBUFS: what was said is said again.
func TestNoBufferSpace(t *testing.T) {
	n, _ := one(t)
	if err := n.conn.sock.SetReceiveBufferSize(1, false); err != nil {
		t.Fatal(err)
	}
	var ops []datapath.Op
	want := n.Have()
	for i := range 200 {
		p := datapath.PutPeer{Key: nettest.NewKey(t).Public(), Peer: datapath.Peer{Prefixes: prefixes.Must(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 3, byte(i)}), 24))}}
		want.Peers[p.Key] = p.Peer
		ops = append(ops, p)
	}
	n.budget = 512 // many messages, whose acknowledgements do not fit
	err := n.Apply(t.Context(), ops...)
	t.Logf("with no room for acknowledgements: %d sockets, %d failures", n.conn.opened, failures(err))
	if n.conn.opened < 2 {
		t.Error("there was room")
	}
	if err := datapath.Sync(t.Context(), n.Kernel, want); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if left := datapath.Plan(want, n.Have()); len(left) > 0 {
		t.Errorf("%d ops are left", len(left))
	}
}

func TestCleanup(t *testing.T) {
	n, _ := one(t)
	_, _ = n.RemovesPrefixes(t.Context())
	// Not while it is in use; nor does another one get it.
	before := n.space.raw()
	err := Cleanup(t.Context(), Options{Namespace: n.space.Path})
	k, err2 := New(Options{Namespace: n.space.Path})
	if err2 == nil {
		k.Close()
	}
	for _, err := range []error{err, err2} {
		if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "this process") || !strings.Contains(err.Error(), DefaultInterface) {
			t.Errorf("while it is in use: %v", err)
		}
	}
	n.space.becomes("after it was refused", before)
	n.space.kernel(t, func(o *Options) { o.Interface = "another" }).Close()
	n.Close()
	for range 2 {
		if err := Cleanup(t.Context(), Options{Namespace: n.space.Path}); err != nil {
			t.Errorf("Cleanup: %v", err)
		}
		if links := n.space.Links(); !slices.Equal(links, []string{"lo", "out"}) {
			t.Errorf("links are %v", links)
		}
	}
}

// A probe that was killed in the middle leaves a link, which the next one and Cleanup remove.
func TestProbeLeftBehind(t *testing.T) {
	s := newSpace(t)
	leave := func() {
		s.Must(func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = probeName(DefaultInterface)
			return netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs})
		})
	}
	leave()
	k := s.kernel(t)
	first, err := k.probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if second, err := k.probe(t.Context()); err != nil || first != second {
		t.Errorf("probed %t, then %t: %v", first, second, err)
	}
	if links := s.Links(); !slices.Equal(links, []string{"lo"}) {
		t.Errorf("a probe leaves %v", links)
	}
	k.Close()
	leave()
	if err := Cleanup(t.Context(), Options{Namespace: s.Path}); err != nil {
		t.Error(err)
	}
	if links := s.Links(); !slices.Equal(links, []string{"lo"}) {
		t.Errorf("Cleanup leaves %v", links)
	}
}

// Nothing secret is in what is logged, at any level.
func TestLogHasNoKeys(t *testing.T) {
	s := newSpace(t)
	s.Out()
	var b lockedBuffer
	k := s.kernel(t, func(o *Options) {
		o.Logger = slog.New(slog.NewJSONHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	private, psk := nettest.NewKey(t), nettest.NewPreshared(t)
	err := k.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{Key: private}},
		datapath.PutPeer{Key: nettest.NewKey(t).Public(), Peer: datapath.Peer{Preshared: psk, Prefixes: set("10.2.0.0/24")}},
		datapath.PutPeer{Key: private.Public(), Peer: datapath.Peer{Preshared: psk}})
	text := b.String() + fmt.Sprintf("%v %+v", err, err)
	for _, secret := range []string{private.Base64(), psk.Base64()} {
		if strings.Contains(text, secret) {
			t.Errorf("a secret key is in %s", text)
		}
	}
	if text == "" {
		t.Error("nothing was logged")
	}
}

type lockedBuffer struct {
	sync.Mutex
	b strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) { b.Lock(); defer b.Unlock(); return b.b.Write(p) }
func (b *lockedBuffer) String() string              { b.Lock(); defer b.Unlock(); return b.b.String() }

var _ io.Writer = (*lockedBuffer)(nil)

// Thousands of peers: applied, with a failure in the middle that the next try makes up for, and then one
// change is one message of one peer.
func TestThousandsOfPeers(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	s.Out()
	n := newNode(t, s, "one", "10.0.0.1", "fd00::1")
	n.Want.Addrs = set("10.0.0.1", "fd00::1")
	const peers = 5000
	var last key.Public
	for i := range peers {
		last = fakeKey(i)
		p := datapath.Peer{Prefixes: prefixes.Must(
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1 + byte(i>>8), byte(i)}), 24),
			netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1, byte(i >> 8), byte(i)}), 64))}
		n.Want.Peers[last] = p
		for q := range p.Prefixes.All() {
			n.Want.Routes[q] = netip.Addr{}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	begun := time.Now()
	ops := datapath.Plan(n.Want, n.Have())
	t.Logf("planned: %d ops in %v", len(ops), time.Since(begun).Round(time.Millisecond))
	// The failure: the time is up somewhere in the middle.
	n.onWrite = func() {
		if len(n.model.State().Peers) > peers/2 {
			cancel()
		}
	}
	begun = time.Now()
	err := n.Apply(ctx, ops...)
	n.onWrite = nil
	half := n.Have()
	t.Logf("stopped in the middle: %d peers, %d routes and %d failures after %v", len(half.Peers), len(half.Routes), failures(err), time.Since(begun).Round(time.Millisecond))
	if !errors.Is(err, context.Canceled) || len(half.Peers) == 0 || len(half.Peers) == peers {
		t.Errorf("%d peers, %d failures", len(half.Peers), failures(err))
	}
	// The failure: Linux refuses some peers in the middle of what is left. All others are put.
	refused := 0
	n.conn.before = func() error {
		if n.conn.written > 3 && refused < 30 {
			refused++
			return unix.ENOMEM
		}
		return nil
	}
	n.conn.written = 0
	begun = time.Now()
	err = datapath.Sync(t.Context(), n.Kernel, n.Want)
	n.conn.before = nil
	t.Logf("refused in the middle: %d messages, %d failures, %v", n.conn.written, failures(err), time.Since(begun).Round(time.Millisecond))
	if !errors.Is(err, unix.ENOMEM) || refused != 30 {
		t.Errorf("%d refused: %v", refused, failures(err))
	}
	if ops := datapath.Plan(n.Want, n.Have()); len(ops) == 0 || len(ops) > 3*refused {
		t.Errorf("%d ops are left after %d refusals", len(ops), refused)
	}
	n.conn.written = 0
	begun = time.Now()
	n.Sync()
	t.Logf("the rest: %d messages, %v", n.conn.written, time.Since(begun).Round(time.Millisecond))
	begun = time.Now()
	got := n.Have()
	t.Logf("read in %v", time.Since(begun).Round(time.Millisecond))
	if ops := datapath.Plan(n.Want, got); len(ops) > 0 {
		t.Errorf("%d ops are left", len(ops))
	}
	n.conn.written, n.conn.changes = 0, 0
	p := n.Want.Peers[last]
	p.Keepalive = 25 * time.Second
	n.Want.Peers[last] = p
	begun = time.Now()
	n.Do(datapath.Plan(n.Want, got)...)
	t.Logf("one change: %d messages, %d peers, %v", n.conn.written, n.conn.changes, time.Since(begun).Round(time.Millisecond))
	if n.conn.written != 1 || n.conn.changes != 1 {
		t.Errorf("%d messages about %d peers for one change", n.conn.written, n.conn.changes)
	}
}

// fakeKey is a public key, without the time that it takes to make a private one.
func fakeKey(i int) key.Public {
	var b [key.Size]byte
	b[0], b[1], b[2], b[8] = byte(i), byte(i>>8), byte(i>>16), 7
	k, err := key.PublicFromBytes(b[:])
	if err != nil {
		panic(err)
	}
	return k
}
