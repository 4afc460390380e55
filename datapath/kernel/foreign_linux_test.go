package kernel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
)

// The kernel and the in-process datapath as peers of a device that was configured by hand with ip and wg.
func TestTrafficWithWG(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"ip", "wg"} {
		nettest.NeedProgram(t, program)
	}
	for _, o := range nettest.Outers {
		t.Run(o.Name, func(t *testing.T) {
			sa, sb := wired(t)
			psk := o.Key(t)
			addrA, addrB := o.Addrs()
			a := newNode(t, sa, "a", "10.0.0.1", "fd00::1")
			stack, err := netstack.New(netstack.Options{Bind: sa.Bind})
			if err != nil {
				t.Fatal(err)
			}
			defer stack.Close()
			third := nettest.NewNode(t, "third", stack, set("10.0.0.3", "fd00::3"))

			f := nettest.NewForeign(t, sb.Space, "", set("10.0.0.2", "fd00::2"))
			b := datapath.Peer{
				Endpoint:  netip.AddrPortFrom(netip.MustParseAddr(addrB), f.Port),
				Preshared: psk, Prefixes: set("10.0.0.2", "fd00::2"),
			}
			for _, n := range []*nettest.Node{a.Node, third} {
				f.Peer(n.Public(), datapath.Peer{Endpoint: n.At(addrA), Preshared: psk, Prefixes: n.Want.Addrs})
				n.Peer(f.Public(), b)
			}
			stack.Settle()
			nettest.Exchange(t, "kernel to wg, inner IPv4", transfer, sb, sa, "10.0.0.2")
			nettest.Exchange(t, "wg to kernel, inner IPv6", transfer, sa, sb, "fd00::1")
			nettest.Exchange(t, "netstack to wg, inner IPv6", transfer, sb, stack, "fd00::2")
			nettest.Exchange(t, "wg to netstack, inner IPv4", transfer, stack, sb, "10.0.0.3")
		})
	}
}

// What is in the way is named with its owner, nothing of it is touched, and the rest is done.
func TestForeignRoutes(t *testing.T) {
	n, k := one(t)
	add := func(prefix string, metric, table int) {
		n.space.Must(func() error {
			l, err := netlink.LinkByName("out")
			if err != nil {
				return err
			}
			_, dst, err := net.ParseCIDR(prefix)
			if err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Priority: metric, Table: table, Protocol: 99})
		})
	}
	for _, prefix := range []string{"10.3.0.0/24", "fd03::/64"} {
		add(prefix, hostnet.DefaultMetric, unix.RT_TABLE_MAIN)
	}
	before := n.space.raw()
	want := n.Have()
	p := want.Peers[k]
	p.Prefixes = p.Prefixes.Union(set("10.3.0.0/24", "fd03::/64", "10.4.0.0/24"))
	want.Peers[k] = p
	for _, q := range []string{"10.3.0.0/24", "fd03::/64", "10.4.0.0/24"} {
		want.Routes[netip.MustParsePrefix(q)] = netip.Addr{}
	}
	err := datapath.Sync(t.Context(), n.Kernel, want)
	var foreign *hostnet.ForeignError
	if failures(err) != 2 || !errors.As(err, &foreign) {
		t.Errorf("%d failures: %v", failures(err), err)
	}
	for _, word := range []string{"10.3.0.0/24", "fd03::/64", "out", "99", "metric"} {
		if !strings.Contains(fmt.Sprint(err), word) {
			t.Errorf("%q is not in: %v", word, err)
		}
	}
	n.Do(datapath.RemoveRoutes{Prefixes: set("10.3.0.0/24", "fd03::/64", "10.4.0.0/24")})
	n.space.becomes("after our routes were removed", before)

	// A table in which somebody else has routes.
	s := newSpace(t)
	s.Out()
	n.space = s
	add("10.9.0.0/16", 0, 4242)
	before = s.raw()
	other := s.kernel(t, func(o *Options) { o.Table = 4242 })
	err = other.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{Key: nettest.NewKey(t)}})
	if !errors.As(err, &foreign) || !errors.Is(err, datapath.ErrNoDevice) || !strings.Contains(err.Error(), "4242") || !strings.Contains(err.Error(), "out") {
		t.Errorf("a table of somebody else's: %v", err)
	}
	s.becomes("after a table of somebody else's was refused", before)
}

// Without CAP_NET_ADMIN nothing is begun, and what is missing is said; with it alone all works.
func TestCapabilities(t *testing.T) {
	s := newSpace(t)
	s.Out()
	before := s.raw()
	// with calls f on a thread in the namespace that has some capabilities left.
	with := func(caps uint32, f func() error) error {
		errs := make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends as it is
			errs <- func() error {
				if err := unix.Setns(int(s.File.Fd()), unix.CLONE_NEWNET); err != nil {
					return err
				}
				head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
				data := [2]unix.CapUserData{{Effective: caps, Permitted: caps}}
				if err := unix.Capset(&head, &data[0]); err != nil {
					return err
				}
				return f()
			}()
		}()
		return <-errs
	}
	err := with(0, func() error {
		k, err := New(Options{})
		if err == nil {
			k.Close()
		}
		return err
	})
	if !errors.Is(err, os.ErrPermission) || !errors.Is(err, syscall.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Errorf("without CAP_NET_ADMIN: %v", err)
	}
	err = with(0, func() error { return Cleanup(t.Context(), Options{}) })
	t.Logf("cleaning up without CAP_NET_ADMIN, where there is nothing: %v", err)
	s.becomes("after it was refused", before)
	err = with(1<<unix.CAP_NET_ADMIN, func() error {
		k, err := New(Options{})
		if err != nil {
			return err
		}
		defer k.Close()
		want := datapath.State{
			Device: datapath.Device{Key: nettest.NewKey(t)}, Addrs: set("10.0.0.1", "fd00::1"),
			Routes: map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.2.0.0/24"): netip.MustParseAddr("10.0.0.1")},
			Peers:  map[key.Public]datapath.Peer{nettest.NewKey(t).Public(): {Prefixes: set("10.2.0.0/24")}},
		}
		if err := datapath.Sync(t.Context(), k, want); err != nil {
			return err
		}
		direct, err := k.RemovesPrefixes(t.Context())
		if err != nil {
			return err
		}
		t.Logf("with CAP_NET_ADMIN alone: device, route and probe (prefixes are removed directly: %t)", direct)
		return errors.Join(k.Close(), Cleanup(t.Context(), Options{}))
	})
	if err != nil {
		t.Errorf("with CAP_NET_ADMIN alone: %v", err)
	}
	s.becomes("after it was cleaned up", before)
}

// A host that was started without IPv6 at all carries IPv4.
func TestNoIPv6AtBoot(t *testing.T) {
	needWireGuard(t)
	if _, err := os.Stat("/proc/net/if_inet6"); err == nil {
		t.Skip("vmrun is to boot with -append ipv6.disable=1")
	}
	sa, sb := newSpace(t), newSpace(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth0"
	sa.Must(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(sb.File.Fd())})
	})
	nodes := make([]*node, 2)
	for i, s := range []*space{sa, sb} {
		s.Must(func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return errors.Join(nettest.AddAddress(l, []string{nettest.Wire4A, nettest.Wire4B}[i]+"/24"), netlink.LinkSetUp(l))
		})
		nodes[i] = newNode(t, s, s.Path, fmt.Sprintf("10.0.0.%d", i+1))
	}
	p := pair{nodes[0], nodes[1]}
	p.connect(nettest.Outer{Preshared: true})
	nettest.Exchange(t, "inner IPv4", transfer, sb, sa, "10.0.0.2")

	want := p.a.Want.Clone()
	want.Addrs = want.Addrs.Union(set("fd00::1"))
	peer := want.Peers[p.b.Public()]
	peer.Prefixes = peer.Prefixes.Union(set("fd00::2"))
	want.Peers[p.b.Public()] = peer
	want.Routes[netip.MustParsePrefix("fd00::2/128")] = netip.Addr{}
	err := datapath.Sync(t.Context(), p.a.Kernel, want)
	if !errors.Is(err, hostnet.ErrFamily) || failures(err) != 2 || !strings.Contains(err.Error(), "IPv6") {
		t.Errorf("%d failures, want the address and the route: %v", failures(err), err)
	}
	t.Logf("what is IPv6: %v", err)
	nettest.Exchange(t, "inner IPv4 still", transfer, sa, sb, "10.0.0.1")
	if h := p.a.Have().Host; h.IPv6 || !h.IPv4 {
		t.Errorf("host is %+v", h)
	}
	if err := errors.Join(p.a.Close(), Cleanup(t.Context(), Options{Namespace: sa.Path})); err != nil {
		t.Error(err)
	}
}

// Closed while it reads and writes, it returns, and so do they.
func TestCloseWhileBusy(t *testing.T) {
	s := newSpace(t)
	s.Out()
	for range 10 {
		n := newNode(t, s, "one", "10.0.0.1")
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				for {
					if _, err := n.Read(t.Context()); err != nil {
						if !errors.Is(err, net.ErrClosed) {
							t.Errorf("Read: %v", err)
						}
						return
					}
				}
			})
			wg.Go(func() {
				for i := 0; ; i++ {
					k := fakeKey(i % 5)
					err := n.Apply(t.Context(), datapath.PutPeer{Key: k, Peer: datapath.Peer{Prefixes: set("10.5.0.0/16")}}, datapath.RemovePeer{Key: k})
					if errors.Is(err, net.ErrClosed) {
						return
					}
				}
			})
		}
		time.Sleep(30 * time.Millisecond)
		wg.Go(func() { n.Close() })
		n.Close()
		wg.Wait()
	}
	if err := Cleanup(t.Context(), Options{Namespace: s.Path}); err != nil {
		t.Error(err)
	}
}
