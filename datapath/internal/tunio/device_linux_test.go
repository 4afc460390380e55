package tunio

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/internal/offload"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const mtu = 1420

// newDevice makes an interface in a namespace, with addresses of both families and a network behind it.
func newDevice(t testing.TB, vnet bool, refused func(error)) (*Device, *nettest.Space) {
	t.Helper()
	f, err := os.OpenFile("/dev/net/tun", os.O_RDWR, 0)
	nettest.Need(t, err)
	f.Close()
	s := nettest.NewSpace(t)
	var d *Device
	s.Must(func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		ifr, err := unix.NewIfreq("warren0")
		if err != nil {
			return err
		}
		flags := uint16(unix.IFF_TUN | unix.IFF_NO_PI)
		if vnet {
			flags |= unix.IFF_VNET_HDR
		}
		if ifr.SetUint16(flags); unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr) != nil {
			return errors.New("TUNSETIFF")
		}
		d, err = New(fd, Options{MTU: func() int { return mtu }, Refused: refused})
		if err != nil {
			return err
		}
		nl, err := netlink.LinkByName("warren0")
		if err != nil {
			return err
		}
		return errors.Join(os.WriteFile("/proc/sys/net/ipv6/conf/warren0/accept_dad", []byte("0"), 0),
			netlink.LinkSetMTU(nl, mtu), netlink.LinkSetUp(nl), nettest.AddAddress(nl, "10.0.0.1/24"), nettest.AddAddress(nl, "fd00::1/64"))
	})
	t.Cleanup(func() { d.Close() })
	return d, s
}

// TestRefused has Linux refuse large packets: of every protocol, of some, in the middle of a mixed batch. All arrive as they
// were, each once.
func TestRefused(t *testing.T) {
	for _, test := range []struct {
		name    string
		refused offload.Kinds
	}{
		{"nothing", 0},
		{"all", offload.KindsTCP | offload.KindsUDP},
		{"UDP", offload.KindsUDP},
		{"TCP", offload.KindsTCP},
		{"IPv6", offload.KindTCP6 | offload.KindUDP6},
		{"UDP4", offload.KindUDP4},
	} {
		t.Run(test.name, func(t *testing.T) {
			told := 0
			d, s := newDevice(t, true, func(err error) {
				if told++; !errors.Is(err, unix.EINVAL) {
					t.Errorf("told of %v", err)
				}
			})
			var capture int
			s.Must(func() error {
				nl, err := netlink.LinkByName("warren0")
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
			asked := offload.Kinds(0) // that were refused
			d.writev = func(fd uintptr, v []unix.Iovec) (int, syscall.Errno) {
				if k := kindOf(v); k&test.refused != 0 {
					asked |= k
					return 0, unix.EINVAL
				}
				return sysVector(unix.SYS_WRITEV, fd, v)
			}

			const packets = 10_000
			r := rand.New(rand.NewPCG(1, 2))
			sent := make(map[uint64][]byte)
			flows := []*flow{
				{port: 1}, {port: 2}, {port: 3, v6: true}, {port: 4, tcp: true}, {port: 5, tcp: true}, {port: 6, tcp: true, v6: true}, {port: 7, v6: true, tcp: true},
			}
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
					d.alone.Store(0)
				}
				if n, err := d.Write(bufs, deviceOffset); n != len(bufs) || err != nil {
					t.Fatalf("%d of %d packets written: %v", n, len(bufs), err)
				}
			}
			if test.refused != asked || (told == 1) != (test.refused != 0) {
				t.Errorf("refused were %b, want %b; told %d times", asked, test.refused, told)
			}
			got := make(map[uint64]int)
			b := make([]byte, 1<<16)
			odd := 0
			var larges offload.Kinds
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
				ns, kind := numbers(b[:n])
				for _, i := range ns {
					got[i]++
				}
				if len(ns) > 1 {
					larges |= kind
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
			if missing+twice+odd > 0 || len(got) != len(sent) {
				t.Errorf("of %d packets %d are missing, %d came more than once, %d are not as they were sent; %d came", len(sent), missing, twice, odd, len(got))
			}
			if larges != d.can&^test.refused {
				t.Errorf("large packets were of %b, want %b", larges, d.can&^test.refused)
			}
		})
	}
}

// kindOf tells of what a large packet is.
func kindOf(v []unix.Iovec) offload.Kinds {
	_, k := numbers(unsafe.Slice(v[0].Base, v[0].Len)[offload.HeaderLen:])
	return k
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
		ip[0], ip[6], ip[8], ip[9] = 4<<4|5, 0x40, 64, proto // not to be fragmented
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

// numbers returns the numbers of the packets that are in one which Linux got, and its kind.
func numbers(p []byte) (ns []uint64, kind offload.Kinds) {
	head, proto, kind := 20, p[9], offload.KindTCP4
	if p[0]>>4 == 6 {
		head, proto, kind = 40, p[6], offload.KindTCP6
	}
	if proto == unix.IPPROTO_TCP {
		head += 20
	} else {
		head += 8
		kind <<= 2
	}
	for at := head; at+8 <= len(p); at += payload {
		ns = append(ns, binary.BigEndian.Uint64(p[at:]))
	}
	return ns, kind
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// buffers are as wireguard-go has them.
func buffers(n int) (bufs [][]byte, sizes []int) {
	for range n {
		bufs = append(bufs, make([]byte, 65535))
	}
	return bufs, make([]int, n)
}

// TestRead has Linux hand over datagrams whole, and many by one call, to a reader with room for a few, whose MTU is right or
// not. None is lost, and each is as it was sent.
func TestRead(t *testing.T) {
	for _, test := range []struct {
		name      string
		vnet      bool
		datagram  int
		room, mtu int
	}{
		{"together", true, 1000, batch, mtu},
		{"one by one", false, 1000, batch, mtu},
		{"little room", true, 1000, 3, mtu},
		{"room for one", true, 1000, 1, mtu},
		{"a smaller MTU than there is", true, mtu - 28, 5, 1280},
		{"a larger MTU than there is", true, 1000, 7, 9000},
		{"small ones", true, 9, 128, mtu},
	} {
		t.Run(test.name, func(t *testing.T) {
			d, s := newDevice(t, test.vnet, nil)
			d.options.MTU = func() int { return test.mtu }
			const datagrams, each = 200, 20
			send(t, s, "10.0.0.2:9", datagrams, each, test.datagram)
			send(t, s, "[fd00::2]:9", datagrams, each, min(test.datagram, mtu-48))
			watchdog := time.AfterFunc(20*time.Second, func() { d.Close() })
			defer watchdog.Stop()
			bufs, sizes := buffers(test.room)
			next := map[byte]uint64{}
			for next[4]+next[6] < 2*datagrams {
				n, err := d.Read(bufs, sizes, deviceOffset)
				if err != nil {
					t.Fatalf("after %v packets: %v", next, err)
				}
				if n == 0 || n > test.room {
					t.Fatalf("%d packets were read", n)
				}
				for i := range n {
					p := bufs[i][deviceOffset : deviceOffset+sizes[i]]
					head, at, proto := 20, 12, p[9]
					if p[0]>>4 == 6 {
						head, at, proto = 40, 8, p[6]
					}
					if proto != unix.IPPROTO_UDP {
						continue // Linux introduces itself to its neighbours
					}
					v := p[0] >> 4
					want := uint64(min(test.datagram, mtu-8-head))
					if uint64(len(p)) != uint64(head)+8+want || binary.BigEndian.Uint64(p[head+8:]) != next[v] {
						t.Fatalf("IPv%d: datagram %d of %d bytes, want %d of %d", v, binary.BigEndian.Uint64(p[head+8:]), len(p)-head-8, next[v], want)
					}
					if fold(sum(pad(p[head:]), sum(p[at:head], uint32(unix.IPPROTO_UDP)+uint32(len(p)-head)))) != 0xffff {
						t.Fatalf("IPv%d: datagram %d has a wrong checksum", v, next[v])
					}
					next[v]++
				}
			}
		})
	}
}

func pad(b []byte) []byte {
	if len(b)%2 == 1 {
		return append(slices.Clone(b), 0)
	}
	return b
}

// send sends datagrams that are numbered, several by one call (UDP_SEGMENT, udp(7)).
func send(t *testing.T, s *nettest.Space, to string, datagrams, each, size int) {
	t.Helper()
	nc, err := s.Dial("udp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	raw, err := nc.(*net.UDPConn).SyscallConn()
	if err == nil {
		var serr error
		err = raw.Control(func(fd uintptr) { serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size) })
		err = errors.Join(err, serr)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < datagrams; i += each {
		b := make([]byte, size*each)
		for j := range each {
			binary.BigEndian.PutUint64(b[j*size:], uint64(i+j))
		}
		if _, err := nc.Write(b); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEnd has a Device closed, or its interface removed, while it is read and written.
func TestEnd(t *testing.T) {
	for _, vnet := range []bool{true, false} {
		for name, end := range map[string]func(*Device, *nettest.Space) error{
			"closed": func(d *Device, _ *nettest.Space) error { return d.Close() },
			"removed": func(_ *Device, s *nettest.Space) error {
				return s.In(func() error {
					nl, err := netlink.LinkByName("warren0")
					if err == nil {
						err = netlink.LinkDel(nl)
					}
					return err
				})
			},
		} {
			t.Run(name, func(t *testing.T) {
				d, s := newDevice(t, vnet, nil)
				var wg sync.WaitGroup
				errs := make(chan error, 3)
				wg.Go(func() {
					bufs, sizes := buffers(4)
					for {
						if _, err := d.Read(bufs, sizes, deviceOffset); err != nil {
							errs <- err
							return
						}
					}
				})
				for port := range uint16(2) {
					wg.Go(func() {
						f := &flow{port: port, tcp: true}
						for {
							var bufs [][]byte
							for i := range uint64(5) {
								bufs = append(bufs, f.packet(i, false))
							}
							// An interface that is removed is taken down first.
							if _, err := d.Write(bufs, deviceOffset); err != nil && !errors.Is(err, unix.EIO) {
								errs <- err
								return
							}
						}
					})
				}
				time.Sleep(20 * time.Millisecond)
				if err := end(d, s); err != nil {
					t.Fatal(err)
				}
				wg.Wait()
				for range 3 {
					if err := <-errs; !errors.Is(err, os.ErrClosed) {
						t.Errorf("the end is %v", err)
					}
				}
			})
		}
	}
}

// TestDown has packets written while the interface is down: that is said of them, and changes nothing for later.
func TestDown(t *testing.T) {
	d, s := newDevice(t, true, func(err error) { t.Errorf("told of %v", err) })
	set := func(f func(netlink.Link) error) {
		s.Must(func() error {
			nl, err := netlink.LinkByName("warren0")
			if err == nil {
				err = f(nl)
			}
			return err
		})
	}
	f := &flow{port: 1, tcp: true}
	write := func() (int, error) {
		var bufs [][]byte
		for i := range uint64(5) {
			bufs = append(bufs, f.packet(i, false))
		}
		return d.Write(bufs, deviceOffset)
	}
	set(netlink.LinkSetDown)
	if n, err := write(); n != 0 || !errors.Is(err, unix.EIO) {
		t.Errorf("%d packets were written to an interface that is down, %v", n, err)
	}
	set(netlink.LinkSetUp)
	if n, err := write(); n != 5 || err != nil || d.Alone() {
		t.Errorf("%d packets were written afterwards, %v", n, err)
	}
	// One that is refused by itself keeps no other from being written, and is no refusal of several.
	bad := make([]byte, deviceOffset+1)
	if n, err := d.Write([][]byte{f.packet(6, false), bad, f.packet(7, false)}, deviceOffset); n != 2 || err == nil || d.Alone() {
		t.Errorf("%d packets were written beside one that is none, %v", n, err)
	}
	if _, err := d.Write([][]byte{bad}, 0); err == nil {
		t.Error("a packet was written without room before it")
	}
}

// TestNoAllocations holds that packets take no memory.
func TestNoAllocations(t *testing.T) {
	d, s := newDevice(t, true, nil)
	f := &flow{port: 1, tcp: true}
	var out [][]byte
	for i := range uint64(64) {
		out = append(out, f.packet(i, false))
	}
	bufs, sizes := buffers(batch)
	nc, err := s.Dial("udp", "10.0.0.2:9")
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	b := make([]byte, 1000)
	n := testing.AllocsPerRun(100, func() {
		if n, err := d.Write(out, deviceOffset); n != len(out) || err != nil {
			t.Errorf("%d packets written, %v", n, err)
		}
		if _, err := nc.Write(b); err != nil {
			t.Error(err)
		}
		if _, err := d.Read(bufs, sizes, deviceOffset); err != nil {
			t.Error(err)
		}
	})
	if n >= 1 && !raceEnabled {
		t.Errorf("%v allocations", n)
	}
}
