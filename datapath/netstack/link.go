package netstack

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// link is the one network interface of the stack, and the place where packets are judged. The stack
// itself accepts every address (it is promiscuous) and has a default route into the link, because its
// own tables are made for a handful of addresses and routes: it keeps an object for each address, and
// searches its routes from first to last.
//
//	stack -> WritePackets -> out (queue) -> tun.Read  -> WireGuard       a routed destination
//	                      -> in (queue)  -> loopback goroutine -> stack  this node, or an ICMP error
//	WireGuard -> tun.Write -> receive -> stack                           Local and Addrs
type link struct {
	table atomic.Pointer[table]
	mtu   atomic.Uint32

	mu         sync.RWMutex
	dispatcher stack.NetworkDispatcher

	out queue // to the device
	in  queue // to this node itself

	answer func(netip.Addr) bool // whether echo requests to one of Local are for the stack to answer
	allow  func() bool           // whether one more ICMP error may be sent now
	pings  *pings                // who waits for answers that the stack does not know of
}

const (
	outPackets = 512
	inPackets  = 4096
)

func newLink(mtu int) *link {
	l := &link{}
	l.table.Store(newTable())
	l.mtu.Store(uint32(mtu))
	l.out.init(outPackets)
	l.in.init(inPackets)
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

// receive takes a packet that came out of the device. b is the caller's again when it returns.
func (l *link) receive(b []byte) {
	dst, ok := destination(b)
	if !ok || dst.IsMulticast() {
		return
	}
	t := l.table.Load()
	if src, _ := source(b); t.mine(src) || tooBig(b) {
		return
	}
	switch {
	case !t.accepts(dst):
		l.reject(t, b, netUnreachable)
	case isEcho(b) && !t.isAddr(dst) && !l.answer(dst):
		l.reject(t, b, hostUnreachable)
	case l.pings.take(b):
	default:
		l.deliver(stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)}))
	}
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

// loop delivers one packet of loopback's.
func (l *link) loop(pkt *stack.PacketBuffer) {
	v := pkt.ToView()
	defer v.Release()
	pkt.DecRef()
	b := v.AsSlice()
	if dst, _ := destination(b); isEcho(b) && !l.answer(dst) || l.pings.take(b) {
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
	max      int
	open     bool
	pkts     []*stack.PacketBuffer
}

func (q *queue) init(max int) {
	q.readable.L, q.writable.L, q.max = &q.mu, &q.mu, max
}

// put appends pkt. Where the queue is full it waits, or drops pkt and returns false; where the queue
// is closed it drops pkt and returns true, as there is nobody to send it again for.
func (q *queue) put(pkt *stack.PacketBuffer, wait bool) bool {
	q.mu.Lock()
	for q.open && len(q.pkts) >= q.max {
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
	pkts, q.pkts = q.pkts, empty[:0]
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
	q.pkts = nil
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
