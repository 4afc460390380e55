package netstack

import (
	"math"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/warren-mesh/warren/datapath/netstack/internal/offload"
)

// link is the one network interface of the stack, and the place where packets are judged. The stack
// itself accepts every address (it is promiscuous) and has a default route into the link, because its
// own tables are made for a handful of addresses and routes: it keeps an object for each address, and
// searches its routes from first to last.
//
//	stack -> WritePackets -> out (queue) -> tun.Read, cut  -> WireGuard       a routed destination
//	                      -> in (queue)  -> loopback goroutine -> stack       this node, or an ICMP error
//	WireGuard -> tun.Write -> accept -> merge -> deliver -> stack             Local and Addrs
//
// The stack hands over TCP segments of up to 64 KiB without checksums, as to a network card that cuts
// them, and gets ones of that size: a packet costs it the same at any size. So it is link, and not the
// stack, that keeps to the MTU and to checksums of TCP.
type link struct {
	table   atomic.Pointer[table]
	mtu     atomic.Uint32
	batches sync.Pool // of *offload.Coalescer, for tun.Write
	holes   offload.Holes

	mu         sync.RWMutex
	dispatcher stack.NetworkDispatcher

	out queue // to the device
	in  queue // to this node itself

	several bool         // processors
	begun   time.Time    // the clock of rests
	rests   atomic.Int64 // until when receive does not yield

	answer func(netip.Addr) bool // whether echo requests to one of Local are for the stack to answer
	allow  func() bool           // whether one more ICMP error may be sent now
	pings  *pings                // who waits for answers that the stack does not know of
	udp    sockets               // of our own
}

// Bounds of the queues. A packet that is still to be cut counts as one, but with all its bytes. Twice as
// much as waits in out can be on its way into the device, as that takes all there is at once; 1 MiB is not
// faster.
const (
	outPackets = 512
	outBytes   = 256 << 10
	inPackets  = 4096
)

// maxSegment is the largest TCP segment asked of the stack, which keeps 161 bytes of it for headers that
// it does not have. What is left is 48 times the 1340 bytes that a packet of 1420 carries where there is
// room for SACK: all of them are of one size then, which UDP GSO below WireGuard wants.
const maxSegment = 48*1340 + 161

func newLink(mtu int) *link {
	l := &link{several: runtime.GOMAXPROCS(0) > 1, begun: time.Now()}
	l.table.Store(newTable())
	l.mtu.Store(uint32(mtu))
	l.batches.New = func() any { return &offload.Coalescer{Holes: &l.holes} }
	l.out.init(outPackets, outBytes)
	l.in.init(inPackets, math.MaxInt)
	return l
}

// MTU and the methods below make link a stack.LinkEndpoint.
func (l *link) MTU() uint32                                  { return l.mtu.Load() }
func (l *link) SetMTU(mtu uint32)                            { l.mtu.Store(mtu) }
func (l *link) MaxHeaderLength() uint16                      { return 0 }
func (l *link) LinkAddress() tcpip.LinkAddress               { return "" }
func (l *link) SetLinkAddress(tcpip.LinkAddress)             {}
func (l *link) Capabilities() stack.LinkEndpointCapabilities { return 0 }
func (l *link) Wait()                                        {}
func (l *link) ARPHardwareType() header.ARPHardwareType      { return header.ARPHardwareNone }
func (l *link) AddHeader(*stack.PacketBuffer)                {}
func (l *link) ParseHeader(*stack.PacketBuffer) bool         { return true }
func (l *link) Close()                                       {}
func (l *link) SetOnCloseAction(func())                      {}

// GSOMaxSize and SupportedGSO make it a stack.GSOEndpoint.
func (l *link) GSOMaxSize() uint32               { return maxSegment }
func (l *link) SupportedGSO() stack.SupportedGSO { return stack.HostGSOSupported }

func (l *link) Attach(d stack.NetworkDispatcher) {
	l.mu.Lock()
	l.dispatcher = d
	l.mu.Unlock()
}

func (l *link) IsAttached() bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.dispatcher != nil
}

// WritePackets takes what the stack sends.
func (l *link) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	t := l.table.Load()
	for i, pkt := range pkts.AsSlice() {
		dst, ok := destination(pkt.NetworkHeader().Slice())
		if !ok {
			continue
		}
		v, _ := t.send(dst)
		switch v {
		case outside:
			if pkt.TransportProtocolNumber == header.TCPProtocolNumber {
				l.holes.Sent(pkt.NetworkHeader().Slice(), pkt.TransportHeader().Slice())
			}
			if !l.out.put(pkt.IncRef(), mayWait(pkt)) {
				return i, &tcpip.ErrNoBufferSpace{}
			}
		case inside:
			l.in.put(pkt.IncRef(), false)
		case unreachable:
			l.refuse(pkt)
		}
	}
	return pkts.Len(), nil
}

// mayWait reports whether the sender of pkt may be held up until there is room. That slows a sender
// down without loss, but must not happen to what the stack sends from within the delivery of another
// packet: resets, and all ICMP. Then the device could wait for the stack while the stack waits for it.
func mayWait(pkt *stack.PacketBuffer) bool {
	switch pkt.TransportProtocolNumber {
	case header.TCPProtocolNumber:
		h := pkt.TransportHeader().Slice()
		return len(h) >= header.TCPMinimumSize && header.TCP(h).Flags()&header.TCPFlagRst == 0
	case header.UDPProtocolNumber:
		return true
	}
	return false
}

// destination returns where a packet goes, from its network header.
func destination(h []byte) (netip.Addr, bool) {
	switch {
	case len(h) >= header.IPv4MinimumSize && h[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(h[16:20])), true
	case len(h) >= header.IPv6MinimumSize && h[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(h[24:40])), true
	}
	return netip.Addr{}, false
}

// refuse tells this node's own sender of pkt that nobody has the destination.
func (l *link) refuse(pkt *stack.PacketBuffer) {
	v := pkt.ToView()
	defer v.Release()
	b := v.AsSlice()
	src, _ := source(b)
	if e := icmpError(b, netUnreachable, src); e != nil && l.allow() {
		p := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(e)})
		l.in.put(p, false)
	}
}

// receive takes packets that came out of the device, which are the caller's again when it returns.
//
// The stack answers once what it finds of a connection. Of a flight that arrives as a whole that is a single
// acknowledgement, and if it is lost, the sender waits for its timer, 200 ms. So a few packets are handed
// over in four parts, with a moment in which the stack may look at each; where there are many, more
// arrive meanwhile anyhow. With 1 % lost each way at 20 ms of round trip that is a fifth faster.
func (l *link) receive(bufs [][]byte, offset int) {
	if n := len(bufs); n < conn.IdealBatchSize/4 {
		for part := max(2, n/4); len(bufs) > part && l.yields(); bufs = bufs[part:] {
			l.receiveBatch(bufs[:part], offset)
			l.yield()
		}
	}
	l.receiveBatch(bufs, offset)
}

// yields reports whether others may be let run: that there are others, and that it did not take long the last time. On one
// processor, or beside those who compute, it may take them tens of milliseconds.
func (l *link) yields() bool {
	return l.several && time.Since(l.begun) >= time.Duration(l.rests.Load())
}

func (l *link) yield() {
	before := time.Since(l.begun)
	runtime.Gosched()
	if after := time.Since(l.begun); after-before > 200*time.Microsecond {
		l.rests.Store(int64(after + time.Second))
	}
}

func (l *link) receiveBatch(bufs [][]byte, offset int) {
	t := l.table.Load()
	batch := l.batches.Get().(*offload.Coalescer)
	for _, b := range bufs {
		if b = b[offset:]; l.accept(t, b) {
			batch.Add(b)
		}
	}
	packets := batch.Packets()
	for i := range packets {
		l.deliver(inbound(&packets[i]))
	}
	batch.Reset()
	l.batches.Put(batch)
}

// accept judges a packet that came out of the device: whether it is for the stack. What there is to
// answer, it answers.
func (l *link) accept(t *table, b []byte) bool {
	dst, ok := destination(b)
	if !ok || dst.IsMulticast() {
		return false
	}
	if src, _ := source(b); t.mine(src) || tooBig(b) {
		return false
	}
	switch {
	case !t.accepts(dst):
		l.reject(t, b, netUnreachable)
	case isEcho(b) && !t.isAddr(dst) && !l.answer(dst):
		l.reject(t, b, hostUnreachable)
	case l.pings.take(b), l.udp.take(b):
	default:
		return true
	}
	return false
}

// verified is the Hash, which the stack does not use of packets that come in, of one whose checksums are
// right. That of others is 0, and the stack looks for itself.
const verified = 1

// viewSize is the size of the pieces that packets are given to the stack in: pools have powers of two,
// and two of these hold the largest packet with less to spare than one does.
const viewSize = 32 << 10

// inbound returns a packet for the stack. Headers and payload are in views of their own: the stack copies
// a view whole before it looks at a header in it that comes second.
func inbound(p *offload.Packet) *stack.PacketBuffer {
	var all, payload buffer.Buffer
	if h := p.Header(); len(h) > 0 {
		all = buffer.MakeWithData(h)
	}
	var v *buffer.View
	left := p.Size
	for _, b := range p.Pieces {
		for len(b) > 0 {
			if v == nil {
				v = buffer.NewView(min(left, viewSize))
			}
			n, _ := v.Write(b[:min(len(b), min(left, viewSize)-v.Size())])
			b = b[n:]
			if v.Size() == min(left, viewSize) {
				left -= v.Size()
				payload.Append(v)
				v = nil
			}
		}
	}
	all.Merge(&payload)
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: all})
	if p.Verified {
		pkt.Hash = verified
	}
	return pkt
}

// deliver hands a packet to the stack.
func (l *link) deliver(pkt *stack.PacketBuffer) {
	l.mu.RLock()
	d := l.dispatcher
	l.mu.RUnlock()
	if d != nil {
		proto := header.IPv4ProtocolNumber
		if v, ok := pkt.Data().PullUp(1); ok && v[0]>>4 == 6 {
			proto = header.IPv6ProtocolNumber
		}
		d.DeliverNetworkPacket(proto, pkt)
	}
	pkt.DecRef()
}

// reject answers a packet that arrived with an ICMP error.
func (l *link) reject(t *table, b []byte, why reason) {
	to, ok := source(b)
	if !ok {
		return
	}
	v, _ := t.send(to)
	if v != outside {
		return
	}
	from := t.source(to)
	if !from.IsValid() {
		if from, _ = destination(b); why == netUnreachable || !t.accepts(from) {
			return // no address to say it from
		}
	}
	e := icmpError(b, why, from)
	if e == nil || !l.allow() {
		return
	}
	l.out.put(stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(e)}), false)
}

// loopback delivers what this node sent to itself, until the queue is closed. It is a goroutine of
// its own because the sender holds locks that the receiver needs.
func (l *link) loopback() {
	var pkts []*stack.PacketBuffer
	for {
		var ok bool
		if pkts, ok = l.in.take(pkts); !ok {
			return
		}
		for i, pkt := range pkts {
			pkts[i] = nil
			l.loop(pkt)
		}
	}
}

// loop delivers one packet of loopback's. One of TCP may be large, and without a checksum.
func (l *link) loop(pkt *stack.PacketBuffer) {
	defer pkt.DecRef()
	if pkt.TransportProtocolNumber == header.TCPProtocolNumber {
		in := pkt.CloneToInbound()
		in.Hash = verified
		l.deliver(in)
		return
	}
	v := pkt.ToView()
	defer v.Release()
	b := v.AsSlice()
	if dst, _ := destination(b); isEcho(b) && !l.answer(dst) || l.pings.take(b) || l.udp.take(b) {
		return
	}
	l.deliver(stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)}))
}

// queue is a bounded queue of packets. It takes over the references of what is put, also where it
// drops it.
type queue struct {
	mu       sync.Mutex
	readable sync.Cond
	writable sync.Cond
	packets  int // the most there may be
	bytes    int // and the sum of sizes at which there may be no more
	open     bool
	pkts     []*stack.PacketBuffer
	size     int // of all in pkts
}

func (q *queue) init(packets, bytes int) {
	q.readable.L, q.writable.L, q.packets, q.bytes = &q.mu, &q.mu, packets, bytes
}

func (q *queue) full() bool { return len(q.pkts) >= q.packets || q.size >= q.bytes }

// put appends pkt. Where the queue is full it waits, or drops pkt and returns false; where the queue
// is closed it drops pkt and returns true, as there is nobody to send it again for.
func (q *queue) put(pkt *stack.PacketBuffer, wait bool) bool {
	q.mu.Lock()
	for q.open && q.full() {
		if !wait {
			q.mu.Unlock()
			pkt.DecRef()
			return false
		}
		q.writable.Wait()
	}
	if !q.open {
		q.mu.Unlock()
		pkt.DecRef()
		return true
	}
	q.pkts = append(q.pkts, pkt)
	q.size += pkt.Size()
	if len(q.pkts) == 1 {
		q.readable.Signal()
	}
	q.mu.Unlock()
	return true
}

// take waits for packets and returns all there are, in exchange for an empty slice to use next. ok is
// false once the queue is closed.
func (q *queue) take(empty []*stack.PacketBuffer) (pkts []*stack.PacketBuffer, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.open && len(q.pkts) == 0 {
		q.readable.Wait()
	}
	if !q.open {
		return nil, false
	}
	pkts, q.pkts, q.size = q.pkts, empty[:0], 0
	q.writable.Broadcast()
	return pkts, true
}

// reopen lets packets in, none of which is from before.
func (q *queue) reopen() {
	q.mu.Lock()
	q.open = true
	q.mu.Unlock()
}

// close drops what is in the queue and wakes all who wait.
func (q *queue) close() {
	q.mu.Lock()
	q.open = false
	for _, p := range q.pkts {
		p.DecRef()
	}
	q.pkts, q.size = nil, 0
	q.readable.Broadcast()
	q.writable.Broadcast()
	q.mu.Unlock()
}

// tooBig reports whether b says that a packet was too big for a path. In a mesh there is no path but the
// tunnel, whose MTU is known, and no peer is to choose that of connections with another.
func tooBig(b []byte) bool {
	proto, p, ok := transport(b)
	return ok && len(p) > 1 && (b[0]>>4 == 4 && proto == uint8(header.ICMPv4ProtocolNumber) && p[0] == uint8(header.ICMPv4DstUnreachable) && p[1] == uint8(header.ICMPv4FragmentationNeeded) ||
		b[0]>>4 == 6 && proto == uint8(header.ICMPv6ProtocolNumber) && p[0] == uint8(header.ICMPv6PacketTooBig))
}
