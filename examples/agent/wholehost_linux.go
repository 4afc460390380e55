package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/examples/agent/internal/namespace"
)

// ownAlias begins the alias of an interface that a mesh made.
const ownAlias = "warren:"

// meshInterfaces names the interfaces that meshes made in the namespace of this thread, by the alias that those have.
func meshInterfaces() (names []string) {
	links, _ := netlink.LinkList() // what it tells though it failed is better than nothing
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Alias, ownAlias) {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}

// ownNamespace tells the network namespace of this process from all others since the host was started: an ID of that
// start, and a name of Linux's.
func ownNamespace() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	name, nerr := os.Readlink("/proc/self/ns/net")
	if err != nil || nerr != nil {
		return ""
	}
	return strings.TrimSpace(string(boot)) + " " + name
}

// bindTo has a socket send through one interface only. From Linux 5.7 on it needs no privilege.
func bindTo(device string) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), device) }); cerr != nil {
			return cerr
		}
		if err != nil {
			return fmt.Errorf("interface %s: %w", device, err)
		}
		return nil
	}
}

// markWith has a socket send packets with a firewall mark. It needs CAP_NET_ADMIN.
func markWith(mark uint32) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)) })
		if err = errors.Join(cerr, os.NewSyscallError("setsockopt SO_MARK", err)); err != nil {
			return fmt.Errorf("mark %#x: %w", mark, err)
		}
		return nil
	}
}

// echo pings an address through an interface of a namespace, or where device is "", the host itself. The kernel fills
// in identifier and checksum, and hands in the answers to this socket only: icmp(7).
func echo(ctx context.Context, to netip.Addr, device string, in *namespace.Namespace) (time.Duration, error) {
	var c net.Conn
	err := in.Do(func() (err error) {
		c, err = pingSocket(to, device)
		return err
	})
	if errors.Is(err, fs.ErrPermission) {
		return 0, &control.Error{Code: control.Failed, Message: fmt.Sprintf("this host lets the agent send no pings (net.ipv4.ping_group_range does not have its group); use the system's: ping %v", to)}
	}
	if err != nil {
		return 0, fmt.Errorf("ping %v: %w", to, err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	request, reply := byte(8), byte(0) // RFC 792
	if to.Is6() {
		request, reply = 128, 129 // RFC 4443, section 4
	}
	ask := append([]byte{request, 0, 0, 0, 0, 0, 0, 1}, rand.Text()...)
	start := time.Now()
	if _, err = c.Write(ask); err == nil {
		b := make([]byte, 1500)
		for n := 0; err == nil; {
			n, err = c.Read(b)
			if err == nil && n == len(ask) && b[0] == reply && bytes.Equal(b[8:n], ask[8:]) {
				return time.Since(start), nil
			}
		}
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return 0, fmt.Errorf("%v: no answer: %w", to, err)
}

// pingSocket returns a socket for echo requests to an address.
func pingSocket(to netip.Addr, device string) (_ net.Conn, err error) {
	family, protocol := unix.AF_INET, unix.IPPROTO_ICMP
	var sa unix.Sockaddr
	if to.Is4() {
		sa = &unix.SockaddrInet4{Addr: to.As4()}
	} else {
		family, protocol = unix.AF_INET6, unix.IPPROTO_ICMPV6
		sa = &unix.SockaddrInet6{Addr: to.As16()}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "ping")
	defer f.Close() // net.FileConn has its own
	if device != "" {
		if err := unix.BindToDevice(fd, device); err != nil {
			return nil, fmt.Errorf("interface %s: %w", device, err)
		}
	}
	if err := unix.Connect(fd, sa); err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	return net.FileConn(f)
}
