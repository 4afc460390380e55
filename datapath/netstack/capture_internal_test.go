package netstack

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// end is a stack with its TUN, without WireGuard.
type end struct {
	link  *link
	stack *stack.Stack
	tun   *tunDevice
	tasks sync.WaitGroup
}

// newEnd returns an end with two addresses, to which all else is outside.
func newEnd(t testing.TB, mtu int, addrs ...string) *end {
	t.Helper()
	l := newLink(mtu)
	l.allow = func() bool { return true }
	l.answer = func(netip.Addr) bool { return false }
	l.pings = &pings{}
	s, err := newStack(l)
	if err != nil {
		t.Fatal(err)
	}
	ed := edit{*newTable()}
	for _, p := range []string{"0.0.0.0/0", "::/0"} {
		ed.hop(netip.MustParsePrefix(p), func(h *hop) { h.route = true })
	}
	for _, a := range addrs {
		a := netip.MustParseAddr(a)
		ed.hop(netip.PrefixFrom(a, a.BitLen()), func(h *hop) { h.addr = true })
		if a.Is4() {
			ed.src4 = a
		} else {
			ed.src6 = a
		}
	}
	l.table.Store(&ed.table)
	l.in.reopen()
	e := &end{link: l, stack: s, tun: newTUN(l)}
	e.tasks.Go(l.loopback)
	t.Cleanup(func() {
		e.tun.Close()
		l.in.close()
		s.Close()
		s.Wait()
		e.tasks.Wait()
	})
	return e
}

// capture is what went over the TUNs of two ends.
type capture struct {
	mu      sync.Mutex
	packets [][]byte
	largest int
	err     error
}

// carry takes what comes out of e to another until e's TUN is closed. A share of it is lost.
func (c *capture) carry(e, to *end, loss float64) {
	const offset = 16
	bufs, sizes := make([][]byte, 128), make([]int, 128)
	for i := range bufs {
		bufs[i] = make([]byte, offset+65535)
	}
	rnd := rand.New(rand.NewPCG(1, 1))
	for {
		before := e.link.MTU()
		n, err := e.tun.Read(bufs, sizes, offset)
		if err != nil {
			return
		}
		mtu := int(max(before, e.link.MTU())) // a change may come in between
		var out [][]byte
		c.mu.Lock()
		for i, b := range bufs[:n] {
			b = b[:offset+sizes[i]]
			c.largest = max(c.largest, sizes[i])
			if sizes[i] > mtu {
				c.err = fmt.Errorf("a packet has %d bytes, the MTU is %d", sizes[i], mtu)
			}
			if loss == 0 || rnd.Float64() >= loss {
				out = append(out, b)
			}
			c.packets = append(c.packets, bytes.Clone(b[offset:]))
		}
		c.mu.Unlock()
		_, _ = to.tun.Write(out, offset)
	}
}

// write writes a file that libpcap reads, of link type RAW.
func (c *capture) write(t *testing.T) string {
	t.Helper()
	b := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	b = append(b, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint32(b, 65535)
	b = binary.LittleEndian.AppendUint32(b, 101)
	for i, p := range c.packets {
		b = binary.LittleEndian.AppendUint32(b, uint32(i/1e6))
		b = binary.LittleEndian.AppendUint32(b, uint32(i%1e6))
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p)))
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p)))
		b = append(b, p...)
	}
	name := filepath.Join(t.TempDir(), "tun.pcap")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// onesSum is the Internet checksum of what is in parts, which have even lengths but for the last.
func onesSum(parts ...[]byte) uint16 {
	var sum uint64
	for _, p := range parts {
		for i, b := range p {
			sum += uint64(b) << (8 * (1 - i%2))
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// check returns what is wrong with the packets, each and as the streams of so many directions: bytes
// sent again are to be what they were.
func (c *capture) check(directions int) error {
	type direction struct {
		isn   uint32
		begun bool
		data  []byte
	}
	streams := make(map[string]*direction)
	for i, p := range c.packets {
		fail := func(format string, a ...any) error {
			return fmt.Errorf("packet %d of %d, %x: %s", i, len(c.packets), p[:min(len(p), 80)], fmt.Sprintf(format, a...))
		}
		var tcp, addrs []byte
		switch {
		case p[0] == 0x45:
			if int(binary.BigEndian.Uint16(p[2:])) != len(p) {
				return fail("its length is %d", len(p))
			}
			if onesSum(p[:20]) != 0xffff {
				return fail("wrong checksum of the IP header")
			}
			if p[6]&0x20 != 0 || p[6]&0x1f != 0 || p[7] != 0 {
				return fail("a fragment")
			}
			tcp, addrs = p[20:], p[12:20]
		case p[0]>>4 == 6:
			if int(binary.BigEndian.Uint16(p[4:]))+40 != len(p) {
				return fail("its length is %d", len(p))
			}
			tcp, addrs = p[40:], p[8:40]
		default:
			return fail("no IP")
		}
		length := binary.BigEndian.AppendUint32(nil, uint32(len(tcp)))
		if onesSum(addrs, length, []byte{0, 6}, tcp) != 0xffff {
			return fail("wrong checksum of TCP")
		}
		key := string(addrs) + string(tcp[:4])
		d := streams[key]
		if d == nil {
			d = new(direction)
			streams[key] = d
		}
		seq, flags, payload := binary.BigEndian.Uint32(tcp[4:]), tcp[13], tcp[tcp[12]>>4*4:]
		if flags&2 != 0 {
			d.isn, d.begun = seq, true
			continue
		}
		if !d.begun {
			return fail("data before SYN")
		}
		at := int(int32(seq - d.isn - 1))
		if len(payload) <= 1 && at+len(payload) <= len(d.data) && flags&1 == 0 {
			continue // asks whether the connection is alive, or the window open, with any byte that was acknowledged
		}
		if at < 0 || at > len(d.data) {
			return fail("sequence %d, so far there are %d bytes", at, len(d.data))
		}
		if n := min(len(payload), len(d.data)-at); !bytes.Equal(payload[:n], d.data[at:at+n]) {
			return fail("other bytes than before at %d", at)
		} else {
			d.data = append(d.data, payload[n:]...)
		}
	}
	if len(streams) != directions {
		return fmt.Errorf("%d directions, want %d", len(streams), directions)
	}
	return c.err
}

// tshark has Wireshark judge: nothing may be malformed, no checksum wrong, no byte acknowledged that was not
// sent.
func (c *capture) tshark(t *testing.T) {
	t.Helper()
	name, err := exec.LookPath("tshark")
	if err != nil {
		t.Log("tshark is not here: the capture is checked by this test alone")
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, "-n", "-r", c.write(t),
		"-d", "tcp.port==80,data", // else it takes what is in them for HTTP
		"-o", "ip.check_checksum:TRUE", "-o", "tcp.check_checksum:TRUE",
		"-Y", `_ws.malformed || _ws.expert.severity == error || ip.checksum.status == "Bad" || tcp.checksum.status == "Bad" || tcp.analysis.ack_lost_segment || tcp.analysis.lost_segment`)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tshark: %v\n%s", err, stderr.Bytes())
	}
	if len(out) > 0 {
		t.Errorf("tshark complains:\n%s", out[:min(len(out), 2000)])
	}
}

// TestCapture transfers both ways at once, in writes of odd sizes, and looks at all that goes over the TUN.
func TestCapture(t *testing.T) {
	for _, test := range []struct {
		name string
		mtu  int
		then int // the MTU from half of the transfer on
		loss float64
		six  bool
	}{
		{name: "1420", mtu: 1420},
		{name: "1280, IPv6", mtu: 1280, six: true},
		{name: "9000", mtu: 9000},
		{name: "largest, IPv6", mtu: MaxMTU, six: true},
		{name: "1420, then 1281", mtu: 1420, then: 1281},
		{name: "1500, then 1280, IPv6", mtu: 1500, then: 1280, six: true},
		{name: "1300, then 9000", mtu: 1300, then: 9000},
		{name: "loss", mtu: 1420, loss: 0.005},
		{name: "loss, then 1333, IPv6", mtu: 1420, loss: 0.005, then: 1333, six: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			a, b := newEnd(t, test.mtu, "10.0.0.1", "fd00::1"), newEnd(t, test.mtu, "10.0.0.2", "fd00::2")
			var c capture
			a.tasks.Go(func() { c.carry(a, b, test.loss) })
			b.tasks.Go(func() { c.carry(b, a, test.loss) })
			to := netip.MustParseAddrPort("10.0.0.2:80")
			if test.six {
				to = netip.MustParseAddrPort("[fd00::2]:80")
			}
			l, err := gonet.ListenTCP(b.stack, fullAddr(to), protocolOf(to.Addr()))
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			const size = 2 << 20
			turn := func() {
				if test.then != 0 {
					a.link.SetMTU(uint32(test.then))
					b.link.SetMTU(uint32(test.then))
				}
			}
			result := make(chan error, 1)
			go func() {
				conn, err := l.Accept()
				if err != nil {
					result <- err
					return
				}
				defer conn.Close()
				result <- exchange(conn, size, 1, turn)
			}()
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			conn, err := gonet.DialContextTCP(ctx, a.stack, fullAddr(to), protocolOf(to.Addr()))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := errors.Join(exchange(conn, size, 2, turn), <-result); err != nil {
				t.Fatal(err)
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			if err := c.check(2); err != nil {
				t.Fatal(err)
			}
			if want := min(test.mtu, 9000) * 9 / 10; c.largest < want {
				t.Errorf("the largest packet has %d bytes with an MTU of %d", c.largest, test.mtu)
			}
			c.tshark(t)
		})
	}
}

// exchange sends and receives size bytes at once, and calls turn when half of them are sent. What it receives
// is to be what the other one sends.
func exchange(c net.Conn, size int, seed uint64, turn func()) error {
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	sent := make(chan error, 1)
	go func() {
		rnd := rand.New(rand.NewPCG(seed, 0))
		data := randomBytes(seed, size)
		for left, turned := data, false; len(left) > 0; {
			n := min(len(left), 1+rnd.IntN(1<<rnd.IntN(18)))
			if _, err := c.Write(left[:n]); err != nil {
				sent <- err
				return
			}
			left = left[n:]
			if !turned && len(left) < size/2 {
				turned = true
				turn()
			}
		}
		sent <- nil
	}()
	got := fnv.New64a()
	if _, err := io.CopyN(got, c, int64(size)); err != nil {
		return errors.Join(err, <-sent)
	}
	want := fnv.New64a()
	want.Write(randomBytes(3-seed, size))
	if got.Sum64() != want.Sum64() {
		return errors.New("received other bytes than were sent")
	}
	return <-sent
}

func randomBytes(seed uint64, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(seed)}).Read(b)
	return b
}
