package tun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
)

// stubborn is a tun.Device that refuses several packets at a time, or those from one of them on.
type stubborn struct {
	tun.Device
	takes  int // of several packets, before it refuses
	reason error

	mu      sync.Mutex
	got     map[uint64]int // by number
	refused int
}

func (d *stubborn) Write(bufs [][]byte, offset int) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := len(bufs)
	if n > 1 && d.reason != nil {
		d.refused++
		n = min(n, d.takes)
	}
	for _, b := range bufs[:n] {
		d.got[binary.BigEndian.Uint64(b[offset:])]++
	}
	if n < len(bufs) {
		return n, &os.PathError{Op: "write", Path: "/dev/net/tun", Err: d.reason}
	}
	return n, nil
}

// TestOffloadRefused writes 10,000 packets to a device that refuses several at a time: each arrives once.
func TestOffloadRefused(t *testing.T) {
	const packets, writers = 10_000, 4
	for _, takes := range []int{0, 1, 7} {
		d := &stubborn{takes: takes, reason: unix.EINVAL, got: make(map[uint64]int)}
		var told atomic.Int32
		o := newOffload(d, func(err error) {
			if told.Add(1); !errors.Is(err, unix.EINVAL) {
				t.Errorf("told of %v", err)
			}
		})
		var next atomic.Uint64
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(w), 1))
				for {
					var bufs [][]byte
					for range 1 + r.IntN(128) {
						i := next.Add(1)
						if i > packets {
							break
						}
						b := make([]byte, 16+28+r.IntN(100))
						binary.BigEndian.PutUint64(b[16:], i)
						bufs = append(bufs, b)
					}
					if len(bufs) == 0 {
						return
					}
					if n, err := o.Write(bufs, 16); n != len(bufs) || err != nil {
						t.Errorf("%d of %d packets written, %v", n, len(bufs), err)
					}
				}
			})
		}
		wg.Wait()
		if len(d.got) != packets {
			t.Errorf("%d packets arrived, want %d", len(d.got), packets)
		}
		for i, n := range d.got {
			if n != 1 {
				t.Errorf("packet %d arrived %d times", i, n)
			}
		}
		if told.Load() != 1 || o.fallbacks.Load() != 1 || d.refused != 1 {
			t.Errorf("%d refusals, %d fallbacks, told %d times; want one", d.refused, o.fallbacks.Load(), told.Load())
		}
	}
}

// TestOffloadKept holds that an error which is not about several packets at a time changes nothing.
func TestOffloadKept(t *testing.T) {
	for _, reason := range []error{nil, unix.EIO, unix.ENOMEM, unix.EAGAIN, os.ErrClosed} {
		d := &stubborn{reason: reason, got: make(map[uint64]int)}
		o := newOffload(d, func(err error) { t.Errorf("fell back for %v", err) })
		bufs := [][]byte{make([]byte, 64), make([]byte, 64)}
		if _, err := o.Write(bufs, 16); !errors.Is(err, reason) || (err == nil) != (reason == nil) {
			t.Errorf("%v became %v", reason, err)
		}
		if o.alone.Load() || o.fallbacks.Load() > 0 {
			t.Errorf("fell back for %v", reason)
		}
	}
	// One that is refused for itself is an error, and keeps no other from being written.
	d := &stubborn{got: make(map[uint64]int)}
	o := newOffload(&picky{d, 2}, func(error) {})
	o.alone.Store(true)
	var bufs [][]byte
	for i := range uint64(3) {
		bufs = append(bufs, binary.BigEndian.AppendUint64(make([]byte, 16), i+1))
	}
	if n, err := o.Write(bufs, 16); n != 2 || !errors.Is(err, unix.EINVAL) || len(d.got) != 2 {
		t.Errorf("%d packets written, %d arrived, %v", n, len(d.got), err)
	}
}

// picky refuses the packet of one number.
type picky struct {
	*stubborn
	not uint64
}

func (d *picky) Write(bufs [][]byte, offset int) (int, error) {
	if binary.BigEndian.Uint64(bufs[0][offset:]) == d.not {
		return 0, unix.EINVAL
	}
	return d.stubborn.Write(bufs, offset)
}

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

// denyWrites has writes of from bytes or more to a file be invalid; where ends are given, only those whose number of
// bytes ends in one of them, of 0 to 99.
func denyWrites(t *testing.T, fd, from uint32, ends ...uint32) {
	t.Helper()
	size := bpf.LoadAbsolute{Off: sysArg(2), Size: 4}
	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: sysNumber, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SYS_WRITE, SkipTrue: allowed},
		bpf.LoadAbsolute{Off: sysArg(0), Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: fd, SkipTrue: allowed},
		size,
	}
	if len(ends) == 0 {
		deny(t, unix.EINVAL, append(program, bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: from, SkipTrue: denied})...)
		return
	}
	program = append(program,
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: from, SkipTrue: allowed},
		bpf.ALUOpConstant{Op: bpf.ALUOpDiv, Val: 100}, bpf.ALUOpConstant{Op: bpf.ALUOpMul, Val: 100},
		bpf.TAX{}, size, bpf.ALUOpX{Op: bpf.ALUOpSub})
	for _, end := range ends {
		program = append(program, bpf.JumpIf{Cond: bpf.JumpEqual, Val: end, SkipTrue: denied})
	}
	deny(t, unix.EINVAL, program...)
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

// payload is how many bytes the packets of the tests below carry, of which the first eight are their number.
const payload = 100

// flow makes packets of one connection, as a peer would send them.
type flow struct {
	v6, tcp  bool
	port     uint16
	sequence uint32
}

// packet returns the next one, in a buffer as wireguard-go has it. last has it be the last of a burst.
func (f *flow) packet(number uint64, last bool) []byte {
	var p []byte // from the transport's header on
	data := make([]byte, payload)
	binary.BigEndian.PutUint64(data, number)
	if f.tcp {
		p = make([]byte, 20, 20+payload)
		binary.BigEndian.PutUint32(p[4:], f.sequence)
		p[12], p[13] = 5<<4, 0x10 // ACK
		if last {
			p[13] |= 0x08 // PSH
		}
		f.sequence += payload
	} else {
		p = make([]byte, 8, 8+payload)
		binary.BigEndian.PutUint16(p[4:], 8+payload)
	}
	binary.BigEndian.PutUint16(p, f.port)
	binary.BigEndian.PutUint16(p[2:], 9)
	p = append(p, data...)
	proto, at := byte(unix.IPPROTO_UDP), 6
	if f.tcp {
		proto, at = unix.IPPROTO_TCP, 16
	}
	var ip []byte
	var pseudo uint32
	if f.v6 {
		ip = make([]byte, 40)
		ip[0], ip[6], ip[7] = 6<<4, proto, 64
		binary.BigEndian.PutUint16(ip[4:], uint16(len(p)))
		copy(ip[8:], netip.MustParseAddr("fd00::2").AsSlice())
		copy(ip[24:], netip.MustParseAddr("fd00::1").AsSlice())
		pseudo = sum(ip[8:40], 0)
	} else {
		ip = make([]byte, 20)
		ip[0], ip[8], ip[9] = 4<<4|5, 64, proto
		binary.BigEndian.PutUint16(ip[2:], uint16(20+len(p)))
		copy(ip[12:], netip.MustParseAddr("10.0.0.2").AsSlice())
		copy(ip[16:], netip.MustParseAddr("10.0.0.1").AsSlice())
		binary.BigEndian.PutUint16(ip[10:], ^fold(sum(ip, 0)))
		pseudo = sum(ip[12:20], 0)
	}
	binary.BigEndian.PutUint16(p[at:], ^fold(sum(p, pseudo+uint32(proto)+uint32(len(p)))))
	b := make([]byte, deviceOffset, 65535)
	return append(append(b, ip...), p...)
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

// numbers returns the numbers of the packets that are in one which Linux got, and whether it is several.
func numbers(p []byte) (ns []uint64, large bool) {
	head := 20
	proto := p[9]
	if p[0]>>4 == 6 {
		head, proto = 40, p[6]
	}
	if proto == unix.IPPROTO_TCP {
		head += 20
	} else {
		head += 8
	}
	for at := head; at+8 <= len(p); at += payload {
		ns = append(ns, binary.BigEndian.Uint64(p[at:]))
	}
	return ns, len(ns) > 1
}

// TestOffloadOfLinux has Linux refuse what wireguard-go makes of several packets: of every protocol, of some, in the
// middle of a mixed batch. All arrive as they were, each once.
func TestOffloadOfLinux(t *testing.T) {
	t.Parallel()
	if !alone(t) {
		return
	}
	var links []*link
	defer func() {
		for _, l := range links {
			l.Close()
		}
	}()
	// With the header before it, and without the payload, a packet of each protocol has one size.
	const tcp4, tcp6, udp4, udp6 = vnetLen + 20 + 20, vnetLen + 40 + 20, vnetLen + 20 + 8, vnetLen + 40 + 8
	for _, test := range []struct {
		name    string
		refused []uint32 // nil: nothing
	}{
		{"nothing", nil},
		{"all", []uint32{tcp4, tcp6, udp4, udp6}},
		{"UDP", []uint32{udp4, udp6}},
		{"TCP", []uint32{tcp4, tcp6}},
		{"IPv6", []uint32{tcp6, udp6}},
		{"UDP4", []uint32{udp4}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSpace(t)
			var l *link
			var capture int
			told := 0
			s.Must(func() (err error) {
				if l, err = newLink("warren0", func(error) { told++ }); err != nil {
					return err
				}
				nl, err := netlink.LinkByName("warren0")
				if err == nil {
					err = errors.Join(netlink.LinkSetUp(nl), nettest.AddAddress(nl, "10.0.0.1/24"), nettest.AddAddress(nl, "fd00::1/64"))
				}
				if err == nil {
					capture, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
				}
				if err != nil {
					return err
				}
				to := &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: nl.Attrs().Index}
				return errors.Join(unix.SetsockoptInt(capture, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20), unix.Bind(capture, to))
			})
			defer unix.Close(capture)
			defer func() { links = append(links, l) }() // what is denied is so of a number, which no other is to have
			fds := tunFiles(t)
			if len(fds) != len(links)+1 {
				t.Fatalf("TUN files %v", fds)
			}
			if test.refused != nil {
				denyWrites(t, slices.Max(fds), 2*payload, test.refused...) // of one packet there are less
			}
			o := l.Device.(*offload)

			const packets = 10_000
			r := rand.New(rand.NewPCG(1, 2))
			sent := make(map[uint64][]byte)
			flows := []*flow{
				{port: 1}, {port: 2}, {port: 3, v6: true}, {port: 4, tcp: true}, {port: 5, tcp: true}, {port: 6, tcp: true, v6: true}, {port: 7, v6: true, tcp: true},
			}
			var fallbacks uint64
			for len(sent) < packets {
				var bufs [][]byte
				for _, f := range flows {
					n := 1 + r.IntN(8)
					var burst [][]byte
					for i := range n {
						p := f.packet(uint64(len(sent)+1), f.tcp && i == n-1)
						if r.IntN(40) == 0 {
							p[len(p)-1] ^= 1 // what is wrong on the way is not mended by accident
						}
						sent[uint64(len(sent)+1)] = slices.Clone(p[deviceOffset:])
						burst = append(burst, p)
					}
					if n > 1 && r.IntN(3) == 0 { // out of order
						i := r.IntN(n - 1)
						burst[i], burst[i+1] = burst[i+1], burst[i]
					}
					bufs = append(bufs, burst...)
				}
				if r.IntN(2) == 0 { // the flows mixed
					for i := range bufs {
						j := max(0, i-r.IntN(3))
						bufs[i], bufs[j] = bufs[j], bufs[i]
					}
				}
				if len(sent) > packets/2 { // as if it were the first refusal, every time
					o.alone.Store(false)
				} else {
					fallbacks = o.fallbacks.Load()
				}
				if n, err := l.Write(bufs, deviceOffset); n != len(bufs) || err != nil {
					t.Fatalf("%d of %d packets written: %v", n, len(bufs), err)
				}
			}
			got := make(map[uint64]int)
			b := make([]byte, 1<<16)
			larges, odd := 0, 0
			for {
				n, from, err := unix.Recvfrom(capture, b, unix.MSG_DONTWAIT)
				if errors.Is(err, unix.EAGAIN) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
					continue // answers
				}
				ns, large := numbers(b[:n])
				for _, i := range ns {
					got[i]++
				}
				if large {
					larges++
				} else if len(ns) == 1 && !bytes.Equal(b[:n], sent[ns[0]]) {
					odd++
				}
			}
			missing, twice := 0, 0
			for i := range sent {
				if got[i] == 0 {
					missing++
				} else if got[i] > 1 {
					twice++
				}
			}
			t.Logf("%d packets, %d large ones; %d fallbacks, %d when half was written", len(sent), larges, o.fallbacks.Load(), fallbacks)
			if missing+twice+odd > 0 || len(got) != len(sent) {
				t.Errorf("of %d packets %d are missing, %d came more than once, %d are not as they were sent; %d came", len(sent), missing, twice, odd, len(got))
			}
			if want := min(1, len(test.refused)); int(fallbacks) != want || told != int(o.fallbacks.Load()) {
				t.Errorf("%d fallbacks, want %d; told %d times", fallbacks, want, told)
			}
			if (larges > 0) != (len(test.refused) < 4) {
				t.Errorf("%d large packets were taken", larges)
			}
		})
	}
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

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
		denyWrites(t, fd, 1600)
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
