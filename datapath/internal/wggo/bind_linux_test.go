package wggo

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
)

// inSpace runs f on a thread in a network namespace of its own, whose loopback interface is up.
func inSpace(t *testing.T, f func() error) error {
	t.Helper()
	errc := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if errors.Is(err, unix.EPERM) {
			err = errPrivilege
		}
		var lo netlink.Link
		if err == nil {
			lo, err = netlink.LinkByName("lo")
		}
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err == nil {
			err = f()
		}
		errc <- err
	}()
	err := <-errc
	if errors.Is(err, errPrivilege) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	return err
}

var errPrivilege = errors.New("a network namespace takes CAP_SYS_ADMIN")

// TestBothFamilies sends to addresses of both families by turns, from several goroutines: each packet gets where it was
// sent to.
func TestBothFamilies(t *testing.T) {
	addrs := []string{"127.0.0.1", "fd00:1::1", "127.0.0.2", "fd00:1::2", "fd00:1:2:3:4:5:6:7"}
	const each = 2000 // to each address, from each goroutine
	var ins []*net.UDPConn
	b := &bind{Bind: conn.NewStdNetBind(), watch: new(watch)}
	err := inSpace(t, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if ip := net.ParseIP(a); ip.To4() == nil {
				err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: ip, Mask: net.CIDRMask(128, 128)}, Flags: unix.IFA_F_NODAD})
				if err != nil {
					return err
				}
			}
			in, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(a)})
			if err != nil {
				return err
			}
			ins = append(ins, in)
		}
		b.do = func(f func() error) error { return f() }
		// Opened again after it sent over IPv4, as where the port changes.
		for try := range 2 {
			if _, _, err = b.Open(0); err != nil || try > 0 {
				return err
			}
			ep, err := b.ParseEndpoint(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), ins[0].LocalAddr().(*net.UDPAddr).AddrPort().Port()).String())
			if err != nil {
				return err
			}
			for range 100 {
				if err := b.Send([][]byte{{0, 0, 0, 0}}, ep); err != nil {
					return err
				}
			}
			if err := b.Close(); err != nil {
				return err
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	var reading, sending sync.WaitGroup
	got := make([]int, len(addrs))
	astray := make([]int, len(addrs))
	for i, in := range ins {
		_ = in.SetReadBuffer(16 << 20)
		reading.Go(func() {
			defer in.Close()
			p := make([]byte, 64)
			for got[i]+astray[i] < each*runtime.NumCPU() {
				_ = in.SetReadDeadline(time.Now().Add(2 * time.Second))
				n, _, err := in.ReadFromUDP(p)
				if err != nil {
					return
				}
				if n == 4 && binary.BigEndian.Uint32(p) == uint32(i) {
					got[i]++
				} else {
					astray[i]++
				}
			}
		})
	}
	for range runtime.NumCPU() {
		sending.Go(func() {
			for n := range each {
				for i, in := range ins {
					to := netip.AddrPortFrom(netip.MustParseAddr(addrs[i]), in.LocalAddr().(*net.UDPAddr).AddrPort().Port())
					ep, err := b.ParseEndpoint(to.String())
					if err == nil {
						err = b.Send([][]byte{binary.BigEndian.AppendUint32(nil, uint32(i))}, ep)
					}
					if err != nil {
						t.Errorf("to %v: %v", to, err)
						return
					}
				}
				if n%50 == 0 {
					time.Sleep(time.Millisecond) // for the receivers
				}
			}
		})
	}
	sending.Wait()
	reading.Wait()
	for i, a := range addrs {
		if got[i] != each*runtime.NumCPU() || astray[i] > 0 {
			t.Errorf("%s got %d of its %d packets, and %d of others", a, got[i], each*runtime.NumCPU(), astray[i])
		}
	}
}
