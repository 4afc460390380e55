package nettest

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The addresses of the two ends of a Wire.
const (
	Wire4A, Wire4B = "192.0.2.1", "192.0.2.2"
	Wire6A, Wire6B = "2001:db8::1", "2001:db8::2"
)

// AddAddress gives a link of the namespace of this thread an address that can be used at once.
func AddAddress(l netlink.Link, prefix string) error {
	a, err := netlink.ParseAddr(prefix)
	if err != nil {
		return err
	}
	a.Flags = unix.IFA_F_NODAD
	return netlink.AddrAdd(l, a)
}

// up gives a link of the namespace of this thread addresses, and takes it up.
func up(name string, addrs ...string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if err := AddAddress(l, a); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(l)
}

// named are the attributes of a new link.
func named(name string) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return attrs
}

// Out gives the namespace a link "out" with an address of both families: without one there is no way to send.
func (s *Space) Out() {
	s.T.Helper()
	// The module, where it is not loaded, would be, and make an interface on the machine.
	_, err := os.Stat("/sys/module/dummy")
	dummy := err == nil
	s.Must(func() error {
		if dummy {
			if err := netlink.LinkAdd(&netlink.Dummy{LinkAttrs: named("out")}); err != nil {
				return err
			}
		} else {
			if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: named("out"), PeerName: "far"}); err != nil {
				return err
			}
			if err := up("far"); err != nil {
				return err
			}
		}
		return up("out", "192.0.2.9/24", "2001:db8::9/64")
	})
	if dummy { // which asks no neighbours, so that all of its addresses are about to be used
		Within(s.T, 10*time.Second, "every IPv6 address of the link has its route", func() bool {
			var addrs, routes int
			s.Must(func() (err error) {
				addrs, routes, err = hosts("out")
				return err
			})
			return routes >= addrs
		})
	}
}

// hosts counts the IPv6 addresses of a link of the namespace of this thread, and their own routes, which Linux
// makes a moment later.
func hosts(name string) (addrs, routes int, err error) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return 0, 0, err
	}
	as, err := netlink.AddrList(l, netlink.FAMILY_V6)
	if err != nil {
		return 0, 0, err
	}
	rs, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{LinkIndex: l.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL},
		netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
	return len(as), len(rs), err
}

// Bridge makes a bridge, with addresses of this namespace.
func (s *Space) Bridge(name string, addrs ...string) {
	s.T.Helper()
	s.Must(func() error {
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: named(name)}); err != nil {
			return err
		}
		return up(name, addrs...)
	})
}

// End is one end of a wire: a link of a namespace, with addresses, or plugged into a bridge.
type End struct {
	Space  *Space
	Name   string
	Addrs  []string
	Bridge string
}

// The indices that Join chooses are none that Linux would.
const firstIndex = 1 << 20

var lastIndex atomic.Int64

// Join puts a wire between two namespaces.
func Join(a, b End) {
	a.Space.T.Helper()
	a.Space.Must(func() error {
		// Linux takes up to a second over the carrier of a link that has the same index as what it is joined to
		// (linkwatch_urgent_event), and IPv6 waits for that.
		attrs := named(a.Name)
		attrs.Index = int(firstIndex + lastIndex.Add(1))
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: b.Name, PeerNamespace: netlink.NsFd(b.Space.File.Fd())})
	})
	for _, e := range []End{a, b} {
		e.Space.Must(func() error {
			if e.Bridge != "" {
				br, err := netlink.LinkByName(e.Bridge)
				if err != nil {
					return err
				}
				l, err := netlink.LinkByName(e.Name)
				if err != nil {
					return err
				}
				if err := netlink.LinkSetMaster(l, br); err != nil {
					return err
				}
			}
			return up(e.Name, e.Addrs...)
		})
	}
	// What is sent before is lost, and the neighbours are asked for again a second later.
	for _, e := range []End{a, b} {
		Within(e.Space.T, 10*time.Second, e.Name+" has a carrier", func() (up bool) {
			e.Space.Must(func() error {
				l, err := netlink.LinkByName(e.Name)
				up = err == nil && l.Attrs().OperState == netlink.OperUp
				return err
			})
			return up
		})
	}
}

// Neighbour has a namespace know for good that an address is at the other end of a link, so that it need not ask: IPv6
// may take a second over that.
func Neighbour(from, to End, addrs ...netip.Addr) {
	from.Space.T.Helper()
	var mac net.HardwareAddr
	to.Space.Must(func() error {
		l, err := netlink.LinkByName(to.Name)
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	})
	from.Space.Must(func() error {
		l, err := netlink.LinkByName(from.Name)
		for _, a := range addrs {
			if err == nil {
				err = netlink.NeighSet(&netlink.Neigh{LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac})
			}
		}
		return err
	})
}

// Gateway has all that the namespace knows no other way for go through a link, by way of these addresses.
func (s *Space) Gateway(name string, via ...netip.Addr) {
	s.T.Helper()
	s.Must(func() error {
		l, err := netlink.LinkByName(name)
		for _, a := range via {
			if err == nil {
				none := netip.PrefixFrom(a, 0).Masked()
				err = netlink.RouteAdd(&netlink.Route{
					LinkIndex: l.Attrs().Index, Gw: a.AsSlice(),
					Dst: &net.IPNet{IP: none.Addr().AsSlice(), Mask: net.CIDRMask(0, none.Addr().BitLen())},
				})
			}
		}
		return err
	})
}

// Wire joins two namespaces, with an address of both families at either end.
func Wire(a, b *Space) {
	a.T.Helper()
	var x [4]byte
	rand.Read(x[:])
	Join(End{Space: a, Name: fmt.Sprintf("v%xa", x), Addrs: []string{Wire4A + "/24", Wire6A + "/64"}},
		End{Space: b, Name: fmt.Sprintf("v%xb", x), Addrs: []string{Wire4B + "/24", Wire6B + "/64"}})
	Reach(a, b, Wire4B)
	Reach(a, b, Wire6B)
}

// Reach waits until datagrams from one namespace arrive at an address of another: the first ones over a new
// wire are lost until it is up, and the neighbours know each other.
func Reach(from, to *Space, addr string) {
	from.T.Helper()
	var in net.PacketConn
	var out net.Conn
	to.Must(func() (err error) { in, err = net.ListenPacket("udp", net.JoinHostPort(addr, "0")); return err })
	defer in.Close()
	from.Must(func() (err error) { out, err = net.Dial("udp", in.LocalAddr().String()); return err })
	defer out.Close()
	Within(from.T, 20*time.Second, "a datagram arrives at "+addr, func() bool {
		_, _ = out.Write([]byte{1})
		_ = in.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		_, _, err := in.ReadFrom(make([]byte, 1))
		return err == nil
	})
}

// each does something to every link of this namespace that is an end of a wire.
func (s *Space) each(f func(netlink.Link) error) {
	s.T.Helper()
	s.Must(func() error {
		ls, err := netlink.LinkList()
		for _, l := range ls {
			if l.Type() == "veth" {
				err = errors.Join(err, f(l))
			}
		}
		return err
	})
}

// Narrow gives the wires of the namespace an MTU.
func (s *Space) Narrow(mtu int) {
	s.T.Helper()
	s.each(func(l netlink.Link) error { return netlink.LinkSetMTU(l, mtu) })
}

// Delay has every packet that the namespace sends over a wire take its time.
func (s *Space) Delay(d time.Duration) {
	s.T.Helper()
	s.each(func(l netlink.Link) error {
		return netlink.QdiscAdd(netlink.NewNetem(netlink.QdiscAttrs{
			LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT,
		}, netlink.NetemQdiscAttrs{Latency: uint32(d.Microseconds())}))
	})
}

// UniqueName is a name for an interface that nothing on this machine has, not even a socket.
func UniqueName(t testing.TB) string {
	t.Helper()
	var b [4]byte
	rand.Read(b[:])
	return fmt.Sprintf("wt%x", b)
}
