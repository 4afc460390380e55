package tun

import (
	"bytes"
	cryptorand "crypto/rand"
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

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

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
	for _, n := range []*node{p.a, p.b} {
		if whole(t, n.link) {
			t.Errorf("%s has packets handed over together", n.Name)
		}
	}

}

// whole reports whether Linux may hand over packets together (TUNGETIFF).
func whole(t *testing.T, l *link) (yes bool) {
	t.Helper()
	raw, err := l.File().SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	ifr, err := unix.NewIfreq("")
	if err != nil {
		t.Fatal(err)
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.IoctlIfreq(int(fd), unix.TUNGETIFF, ifr) })
	if err := errors.Join(cerr, err); err != nil {
		t.Fatal(err)
	}
	return ifr.Uint16()&unix.IFF_VNET_HDR != 0
}

// TestSizes has TCP and datagrams go both ways, over both families, with packets handed over together on either side or
// not, at the MTUs that there are; what arrives is what was sent.
func TestSizes(t *testing.T) {
	for _, mtu := range []int{1280, 1420, 8920, MaxMTU} {
		for mode := range 4 {
			a, b := mode&1 == 0, mode&2 == 0
			t.Run(fmt.Sprintf("%d, together %t and %t", mtu, a, b), func(t *testing.T) {
				sa, sb := wired(t)
				sa.Narrow(min(mtu+80, 65535))
				sb.Narrow(min(mtu+80, 65535))
				option := func(together bool) func(*Options) {
					return func(o *Options) { o.NoOffload, o.MTU = !together, mtu }
				}
				p := pair{newNode(t, sa, "a", addrsA, option(a)), newNode(t, sb, "b", addrsB, option(b))}
				p.connect(plain)
				if got := p.a.Have().Device.MTU; got != mtu || whole(t, p.a.link) != a || whole(t, p.b.link) != b {
					t.Errorf("the MTU is %d, together %t and %t", got, whole(t, p.a.link), whole(t, p.b.link))
				}
				const size = 1 << 20
				nettest.Exchange(t, "IPv4", size, p.b.space, p.a.space, "10.0.0.2")
				nettest.Exchange(t, "IPv6", size, p.a.space, p.b.space, "fd00::1")
				datagrams(t, p.a.space, p.b.space, "10.0.0.2", mtu-28)
				datagrams(t, p.b.space, p.a.space, "fd00::1", mtu-48)
				for _, n := range []*node{p.a, p.b} {
					if ps := n.Have().Problems; slices.ContainsFunc(ps, isOffload) {
						t.Errorf("problems of %s are %v", n.Name, ps)
					}
				}
			})
		}
	}
}

// datagrams has bursts of datagrams of all sizes go to another namespace and back, where each burst is sent by one call
// (UDP_SEGMENT, udp(7)), as far as the largest of them allow.
func datagrams(t *testing.T, from, to *space, addr string, largest int) {
	t.Helper()
	server, err := to.ListenPacket("udp", net.JoinHostPort(addr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		b := make([]byte, 65535)
		for {
			n, who, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = server.WriteTo(b[:n], who)
		}
	}()
	c, err := from.Dial("udp", server.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	segment := func(size int) {
		var serr error
		if err := raw.Control(func(fd uintptr) { serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size) }); err != nil || serr != nil {
			t.Fatal(err, serr)
		}
	}
	back := make([]byte, 65535)
	for round, size := range []int{9, 64, 1000, largest / 2, largest - 1, largest} {
		n := min(20, 60000/size)
		segment(size)
		if n <= 1 {
			n = 1
			segment(0)
		}
		burst := make([]byte, n*size-size/2) // the last one is shorter
		for try := 0; ; try++ {
			if try == 10 {
				t.Fatalf("datagrams of %d bytes do not come back from %s", size, addr)
			}
			_, _ = cryptorand.Read(burst)
			burst[0] = byte(round<<4 + try)
			for i := 0; i < len(burst); i += size {
				burst[i] = burst[0]
			}
			if _, err := c.Write(burst); err != nil {
				t.Fatalf("%d datagrams of %d bytes: %v", n, size, err)
			}
			var got []byte
			_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
			for len(got) < len(burst) {
				k, err := c.Read(back)
				if err != nil {
					break // one was lost, as it may be
				}
				if back[0] == burst[0] {
					got = append(got, back[:k]...)
				}
			}
			if bytes.Equal(got, burst) {
				break
			}
			if len(got) == len(burst) {
				t.Fatalf("datagrams of %d bytes come back from %s as others", size, addr)
			}
		}
	}
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
