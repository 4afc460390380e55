package tun

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/tunio"
)

// clonePath is where a TUN interface comes from: Documentation/networking/tuntap.rst of Linux.
const clonePath = "/dev/net/tun"

// link is the end of a TUN interface that wireguard-go reads from and writes to (tun.Device). It knows the MTU from
// whoever sets it, and leaves it to hostnet what state the interface is in.
type link struct {
	*tunio.Device
	name string
	mtu  atomic.Int64

	// whole is the size of the largest packet that is not fragmented on the underlay. Where that is less than the
	// MTU, which IPv6 bounds, TCP is taken apart into what fits: fragments cost many times as much.
	whole atomic.Int64

	mu     sync.Mutex // guards events against its closing
	closed bool
	events chan tun.Event
}

var _ tun.Device = (*link)(nil)

// attach has a file of its own speak for the interface called name, in the namespace of this thread. Linux
// makes one where there is none, and removes it when the file is closed. more are flags of the file.
func attach(name string, more uint16) (fd int, err error) {
	if fd, err = unix.Open(clonePath, unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return -1, missing(clonePath, err)
	}
	ifr, err := unix.NewIfreq(name)
	if err == nil {
		ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | more)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
	}
	if err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w: %w", err, errPrivilege)
		}
		return -1, fmt.Errorf("TUN interface %s: %w", name, err)
	}
	return fd, nil
}

// newLink makes an interface in the namespace of this thread. Where Linux turns out not to take packets that are
// handed to it together, fellBack is told why; nil: they never are, nor does it hand any out so.
func newLink(name string, fellBack func(error)) (*link, error) {
	var more uint16
	if fellBack != nil {
		more = unix.IFF_VNET_HDR
	}
	fd, err := attach(name, more)
	if err != nil {
		return nil, err
	}
	l := &link{name: name, events: make(chan tun.Event, 4)}
	l.Device, err = tunio.New(fd, tunio.Options{
		MTU: func() int { return int(l.mtu.Load()) }, Whole: l.largest, Refused: fellBack,
	})
	if err != nil {
		return nil, fmt.Errorf("TUN interface %s: %w", name, err)
	}
	return l, nil
}

func (l *link) Name() (string, error)    { return l.name, nil }
func (l *link) MTU() (int, error)        { return int(l.mtu.Load()), nil }
func (l *link) Events() <-chan tun.Event { return l.events }

// largest is the size of the largest packet that is not fragmented on the underlay. WireGuard pads a packet to a multiple
// of 16 bytes, though to no more than the MTU.
func (l *link) largest() int {
	n := int(l.whole.Load())
	if n < int(l.mtu.Load()) {
		n &^= 15
	}
	return n
}

// setMTU tells of the MTU, by which wireguard-go pads packets.
func (l *link) setMTU(mtu int) {
	if l.mtu.Swap(int64(mtu)) == int64(mtu) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	select {
	case l.events <- tun.EventMTUUpdate:
	default: // it has yet to look at an earlier change, and will see this one then
	}
}

// Close removes the interface, once nobody reads or writes any more.
func (l *link) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	close(l.events)
	return l.Device.Close()
}

var errPrivilege = errors.New("it takes CAP_NET_ADMIN: run as root, or give the program the capability " +
	"(AmbientCapabilities=CAP_NET_ADMIN of systemd, --cap-add NET_ADMIN of a container, setcap cap_net_admin+ep)")

// missing says what to do about an error of opening path.
func missing(path string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return fmt.Errorf("%s: %w: %w: load the module (modprobe tun), or give the container the device (--device %s)", path, err, errors.ErrUnsupported, clonePath)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: %w: run as root, or give the container the device (--device %s)", path, err, clonePath)
	}
	return fmt.Errorf("%s: %w", path, err)
}

// check says what keeps this process from having a TUN interface. It changes nothing.
func check(path string, namespaces bool) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return missing(path, err)
	}
	unix.Close(fd)
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("capabilities of this process: %w", err)
	}
	has := func(c uint) bool { return data[c/32].Effective&(1<<(c%32)) != 0 }
	if !has(unix.CAP_NET_ADMIN) {
		return fmt.Errorf("%w: %w", unix.EPERM, errPrivilege)
	}
	if namespaces && !has(unix.CAP_SYS_ADMIN) {
		return fmt.Errorf("%w: entering a network namespace takes CAP_SYS_ADMIN: run as root, or start the program in that namespace (NetworkNamespacePath= of systemd, ip netns exec)", unix.EPERM)
	}
	return nil
}

// stillHeld is held, after a moment in which that may pass: a child that another goroutine is starting has the file
// of an interface that was closed meanwhile until it runs a program of its own, and keeps it for as long.
func stillHeld(ctx context.Context, h *hostnet.Host) (inUse, left bool, err error) {
	const moment = 200 * time.Millisecond
	for end := time.Now().Add(moment); ; time.Sleep(5 * time.Millisecond) {
		inUse, left, err = held(ctx, h)
		if !inUse || err != nil || time.Now().After(end) {
			return inUse, left, err
		}
	}
}

// holders names the processes that have a TUN interface of that name, as far as this one may see them:
// the interface of a file is in proc_pid_fdinfo(5).
func holders(name string) string {
	var who []string
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/[0-9]*")
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err != nil || to != clonePath {
			continue
		}
		info, _ := os.ReadFile(strings.Replace(fd, "/fd/", "/fdinfo/", 1))
		if !slices.Contains(strings.Fields(string(info)), name) {
			continue
		}
		pid := strings.Split(fd, "/")[2]
		comm, _ := os.ReadFile("/proc/" + pid + "/comm")
		p := fmt.Sprintf("process %s (%s)", pid, strings.TrimSpace(string(comm)))
		if pid == fmt.Sprint(os.Getpid()) {
			p = "this process"
		}
		if !slices.Contains(who, p) {
			who = append(who, p)
		}
	}
	if len(who) == 0 {
		return "a process that cannot be seen from here"
	}
	return strings.Join(who, " or ")
}
