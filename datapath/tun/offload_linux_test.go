package tun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
)

// aloneEnv names the test that a process runs.
const aloneEnv = "WARREN_TUN_ALONE"

// alone runs the test that calls it in a process of its own, and reports whether this is that one.
func alone(t *testing.T) bool {
	t.Helper()
	need(t)
	if os.Getenv(aloneEnv) == t.Name() {
		return true
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), aloneEnv+"="+t.Name())
	out, err := cmd.CombinedOutput()
	if t.Logf("%s", out); err != nil {
		t.Errorf("in a process of its own: %v", err)
	} else if bytes.Contains(out, []byte("--- SKIP")) {
		t.Skip("it was skipped in a process of its own")
	}
	return false
}

// deny has Linux answer some system calls of this process with an error from now on (seccomp(2)): those for which
// program jumps to denied. What comes to its end is allowed, as what jumps there.
func deny(t *testing.T, errno syscall.Errno, program ...bpf.Instruction) {
	t.Helper()
	for i, at := range program {
		if jump, ok := at.(bpf.JumpIf); ok {
			if jump.SkipTrue == allowed {
				jump.SkipTrue = uint8(len(program) - i - 1)
			} else if jump.SkipTrue == denied {
				jump.SkipTrue = uint8(len(program) - i)
			}
			program[i] = jump
		}
	}
	raw, err := bpf.Assemble(append(program,
		bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW},
		bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(errno)}))
	if err != nil {
		t.Fatal(err)
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog))); e != 0 {
		t.Skipf("this takes seccomp(2): %v", e)
	}
}

// Where a program of deny may jump to.
const (
	allowed = 255
	denied  = 254
)

// Where the number and the arguments of a system call are, on a machine that keeps the low half first.
const sysNumber = 0

func sysArg(i uint32) uint32 { return 16 + 8*i }

// denyMerged has writes to a file be invalid that hand several packets over as one.
func denyMerged(t *testing.T, fd uint32) {
	t.Helper()
	deny(t, unix.EINVAL,
		bpf.LoadAbsolute{Off: sysNumber, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_WRITEV, SkipTrue: allowed},
		bpf.LoadAbsolute{Off: sysArg(0), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: fd, SkipTrue: allowed},
		bpf.LoadAbsolute{Off: sysArg(2), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: 3, SkipTrue: denied}) // headers, and two payloads or more
}

// tunFiles are the descriptors of all TUN interfaces of this process.
func tunFiles(t *testing.T) (fds []uint32) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && to == clonePath {
			fd, _ := strconv.Atoi(f.Name())
			fds = append(fds, uint32(fd))
		}
	}
	return fds
}

// TestOffloadEndToEnd has Linux refuse large packets while TCP and UDP go from one node to another.
func TestOffloadEndToEnd(t *testing.T) {
	t.Parallel()
	if !alone(t) {
		return
	}
	p := newPair(t)
	p.connect(plain)
	p.exchange("before")
	if ps := p.b.Have().Problems; slices.ContainsFunc(ps, isOffload) {
		t.Errorf("problems are %v", ps)
	}
	nettest.Quiet(p.b.TUN)
	for _, fd := range tunFiles(t) {
		denyMerged(t, fd)
	}
	p.exchange("with large packets refused")
	nettest.Notified(t, p.b.TUN, "a refusal")
	for _, n := range []*node{p.a, p.b} {
		if ps := n.Have().Problems; !slices.ContainsFunc(ps, isOffload) {
			t.Errorf("problems of %s are %v", n.Name, ps)
		}
	}
	// A device that is made anew tries again.
	p.b.Do(datapath.RemoveDevice{})
	p.b.Sync()
	if ps := p.b.Have().Problems; slices.ContainsFunc(ps, isOffload) {
		t.Errorf("problems of a new device are %v", ps)
	}
}

func isOffload(p datapath.Problem) bool { return p.Subject == "offload" }

// TestNoOffload has packets go to and come from Linux one by one.
func TestNoOffload(t *testing.T) {
	p := newPair(t, func(o *Options) { o.NoOffload = true })
	p.connect(plain)
	p.exchange("one by one")
	if p.a.link.BatchSize() != 1 {
		t.Errorf("%d packets are read at a time", p.a.link.BatchSize())
	}

	// On the read side: a large write of a TCP socket is in packets that fit the MTU already.
	s := newSpace(t)
	for _, together := range []bool{true, false} {
		var l *link
		var fellBack func(error)
		if together {
			fellBack = func(err error) { t.Error(err) }
		}
		s.Must(func() (err error) {
			if l, err = newLink("warren0", fellBack); err != nil {
				return err
			}
			nl, err := netlink.LinkByName("warren0")
			if err != nil {
				return err
			}
			return errors.Join(netlink.LinkSetMTU(nl, 1420), nettest.AddAddress(nl, "10.0.0.1/24"), netlink.LinkSetUp(nl))
		})
		most, packets := readMost(t, s, l)
		t.Logf("together %t: %d packets, at most %d by one read", together, packets, most)
		if together != (most > 1) {
			t.Errorf("together %t: %d packets were read at once", together, most)
		}
		l.Close()
	}
}

// readMost sends 200 datagrams as few large ones into the interface (UDP_SEGMENT, udp(7)) and reads them from it; it
// returns how many came by one read at most, and in all.
func readMost(t *testing.T, s *space, l *link) (most, packets int) {
	t.Helper()
	var c *net.UDPConn
	s.Must(func() error {
		nc, err := net.Dial("udp", "10.0.0.2:9")
		if err != nil {
			return err
		}
		c = nc.(*net.UDPConn)
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		var serr error
		err = raw.Control(func(fd uintptr) { serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000) })
		return errors.Join(err, serr)
	})
	defer c.Close()
	const datagrams, each = 200, 10
	for range datagrams / each {
		if _, err := c.Write(make([]byte, 1000*each)); err != nil {
			t.Fatal(err)
		}
	}
	bufs, sizes := make([][]byte, conn.IdealBatchSize), make([]int, conn.IdealBatchSize)
	for i := range bufs {
		bufs[i] = make([]byte, 65535)
	}
	watchdog := time.AfterFunc(20*time.Second, func() { l.Close() })
	defer watchdog.Stop()
	for packets < datagrams {
		n, err := l.Read(bufs, sizes, deviceOffset)
		if err != nil {
			t.Fatalf("after %d packets: %v", packets, err)
		}
		got := 0
		for i := range n {
			p := bufs[i][deviceOffset : deviceOffset+sizes[i]]
			if p[0]>>4 != 4 || p[9] != unix.IPPROTO_UDP {
				continue // Linux introduces itself to its neighbours
			}
			if len(p) != 20+8+1000 || fold(sum(p[20:], sum(p[12:20], uint32(unix.IPPROTO_UDP)+uint32(len(p)-20)))) != 0xffff {
				t.Errorf("a packet of %d bytes, or with a wrong checksum", len(p))
			}
			got++
		}
		most, packets = max(most, got), packets+got
	}
	return most, packets
}

// TestPortWithoutIPv6 has a device on a host whose Linux has no IPv6 at all, so that no socket can be made for it.
func TestPortWithoutIPv6(t *testing.T) {
	t.Parallel()
	if !alone(t) {
		return
	}
	sa, sb := wired(t)
	deny(t, unix.EAFNOSUPPORT,
		bpf.LoadAbsolute{Off: sysNumber, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_SOCKET, SkipTrue: allowed},
		bpf.LoadAbsolute{Off: sysArg(0), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_INET6, SkipTrue: denied},
	)
	a, b := newNode(t, sa, "a", addrsA), newNode(t, sb, "b", addrsB)
	if chosen := a.Have(); chosen.Device.ListenPort == 0 || !chosen.Host.IPv4 || chosen.Host.IPv6 {
		t.Errorf("port %d was chosen, host %+v", chosen.Device.ListenPort, chosen.Host)
	}
	a.Want.Device.ListenPort = 45222
	a.Sync()
	pair{a, b}.connect(plain)
	pair{a, b}.works("over IPv4")
	for range 10 {
		st := a.Have()
		if ops := datapath.Plan(a.Want, st); len(ops) > 0 || st.Device.ListenPort != 45222 {
			t.Fatalf("port %d, still to do: %v", st.Device.ListenPort, ops)
		}
	}
	sockets, err := sa.Run("cat", "/proc/net/udp")
	if err != nil || !strings.Contains(sockets, fmt.Sprintf(":%04X ", 45222)) {
		t.Errorf("no socket has the port: %s, %v", sockets, err)
	}
}

// deviceOffset is where wireguard-go has packets begin in its buffers (device.MessageTransportOffsetContent).
const deviceOffset = 16

// sum and fold are those of RFC 1071.
func sum(b []byte, s uint32) uint32 {
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	return s
}

func fold(s uint32) uint16 {
	for s>>16 != 0 {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}
