package netstack

import (
	"net/netip"
	"strings"
	"testing"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/warren-mesh/warren/datapath/netstack/internal/offload"
)

// largeSegment returns a TCP segment as the stack hands it over, with its checksum left out.
func largeSegment(src, dst netip.Addr, payload string) *stack.PacketBuffer {
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: header.IPv4MinimumSize + header.TCPMinimumSize,
		Payload:            buffer.MakeWithData([]byte(payload)),
	})
	header.TCP(pkt.TransportHeader().Push(header.TCPMinimumSize)).Encode(&header.TCPFields{
		SrcPort: 1000, DstPort: 80, SeqNum: 1, AckNum: 1, DataOffset: header.TCPMinimumSize, Flags: header.TCPFlagAck | header.TCPFlagPsh, WindowSize: 1000,
	})
	pkt.TransportProtocolNumber = header.TCPProtocolNumber
	header.IPv4(pkt.NetworkHeader().Push(header.IPv4MinimumSize)).Encode(&header.IPv4Fields{
		TotalLength: uint16(pkt.Size()), TTL: 64, Protocol: uint8(header.TCPProtocolNumber), Flags: header.IPv4FlagDontFragment,
		SrcAddr: tcpipAddr(src), DstAddr: tcpipAddr(dst),
	})
	pkt.GSOOptions = stack.GSO{Type: stack.GSOTCPv4, NeedsCsum: true, MSS: 1340}
	return pkt
}

// sink is a stack that drops what it is given.
type sink struct{ packets, bytes int }

func (s *sink) DeliverNetworkPacket(_ tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	s.packets++
	s.bytes += pkt.Size()
}
func (s *sink) DeliverLinkPacket(tcpip.NetworkProtocolNumber, *stack.PacketBuffer) {}

// passage returns a function that takes a large segment out of one TUN, in packets that fit, and puts these
// into another.
func passage(t testing.TB) (pass func(), s *sink, size int) {
	e := newEnd(t, DefaultMTU, "10.0.0.1")
	to := newEnd(t, DefaultMTU, "10.0.0.2")
	s = new(sink)
	to.link.Attach(s)
	payload := strings.Repeat("0123456789", 6432)
	var list stack.PacketBufferList
	bufs, sizes := make([][]byte, 128), make([]int, 128)
	full := make([][]byte, len(bufs))
	for i := range full {
		full[i] = make([]byte, 2048)
	}
	pkt := largeSegment(netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), payload)
	t.Cleanup(pkt.DecRef)
	list.PushBack(pkt)
	return func() {
		if _, err := e.link.WritePackets(list); err != nil {
			t.Fatal(err)
		}
		copy(bufs, full)
		n, err := e.tun.Read(bufs, sizes, 16)
		if err != nil || n != 48 {
			t.Fatalf("read %d packets, %v", n, err)
		}
		for i := range n {
			bufs[i] = bufs[i][:16+sizes[i]]
		}
		if n, err := to.tun.Write(bufs[:n], 16); err != nil {
			t.Fatalf("wrote %d packets, %v", n, err)
		}
	}, s, len(payload)
}

// TestPassage holds that one large segment becomes one again, and that nothing is allocated for it in steady state.
func TestPassage(t *testing.T) {
	if testing.CoverMode() != "" {
		t.Skip("coverage allocates")
	}
	pass, s, size := passage(t)
	pass()
	if want := size + 40; s.packets != 1 || s.bytes != want {
		t.Fatalf("%d packets of %d bytes came of one of %d", s.packets, s.bytes, want)
	}
	n := testing.AllocsPerRun(200, pass)
	t.Logf("%v allocations for a segment of 48 packets", n)
	if !raceOn && n >= 1 {
		t.Errorf("%v allocations for a segment of 48 packets", n)
	}
}

func BenchmarkPassage(b *testing.B) {
	pass, _, size := passage(b)
	b.ReportAllocs()
	b.SetBytes(int64(size))
	for b.Loop() {
		pass()
	}
}

// TestShrunk holds that a packet which no longer fits is dropped, and the next is read.
func TestShrunk(t *testing.T) {
	e := newEnd(t, 1500, "10.0.0.1")
	src, dst := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for _, n := range []int{1400, 100} {
		pkt := largeSegment(src, dst, strings.Repeat("x", n))
		pkt.GSOOptions = stack.GSO{}
		e.link.out.put(pkt, false)
	}
	e.link.SetMTU(1280)
	bufs, sizes := [][]byte{make([]byte, 2048), make([]byte, 2048)}, make([]int, 2)
	if n, err := e.tun.Read(bufs, sizes, 0); n != 1 || sizes[0] != 140 || err != nil {
		t.Errorf("read %d packets, the first of %d bytes, %v; want the one of 140", n, sizes[0], err)
	}
}

// TestInbound holds that what the stack is given is the packet, whatever its pieces.
func TestInbound(t *testing.T) {
	for _, sizes := range [][]int{{0}, {1}, {1340, 1340, 7}, {viewSize}, {viewSize, 1}, {viewSize - 1, 2}, {30000, 30000}, {65000}} {
		var p offload.Packet
		var want []byte
		for i, n := range sizes {
			b := []byte(strings.Repeat(string(rune('a'+i)), n))
			p.Pieces, p.Size = append(p.Pieces, b), p.Size+n
			want = append(want, b...)
		}
		pkt := inbound(&p)
		v := pkt.ToView()
		if got := v.AsSlice(); string(got) != string(want) {
			t.Errorf("pieces of %v: %d bytes, not the same", sizes, len(got))
		}
		v.Release()
		pkt.DecRef()
	}
}
