package netstack

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// pings are the echo requests that wait for an answer. They do not go through the stack, which has no
// way to tell the sender of a ping that it was answered with an error.
type pings struct {
	mu   sync.Mutex
	wait map[uint16]*ping // by identifier
}

type ping struct {
	to     netip.Addr
	answer chan answer // capacity 1
}

type answer struct {
	seq uint16
	at  time.Time
	err error
}

func (ps *pings) add(to netip.Addr) (uint16, *ping, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if ps.wait == nil {
		ps.wait = make(map[uint16]*ping)
	}
	if len(ps.wait) >= 1<<15 {
		return 0, nil, syscall.EAGAIN
	}
	for {
		id := uint16(rand.Uint32())
		if _, taken := ps.wait[id]; !taken {
			p := &ping{to: to, answer: make(chan answer, 1)}
			ps.wait[id] = p
			return id, p, nil
		}
	}
}

func (ps *pings) remove(id uint16) {
	ps.mu.Lock()
	delete(ps.wait, id)
	ps.mu.Unlock()
}

// take looks for an answer to a ping in a packet that arrived, and returns whether it was one.
func (ps *pings) take(b []byte) bool {
	proto, p, ok := transport(b)
	if !ok || len(p) < 8 {
		return false
	}
	var err error
	v4 := b[0]>>4 == 4
	from, _ := source(b)
	switch {
	case v4 && proto == uint8(header.ICMPv4ProtocolNumber):
		switch header.ICMPv4Type(p[0]) {
		case header.ICMPv4EchoReply:
		case header.ICMPv4DstUnreachable:
			err = syscall.EHOSTUNREACH
			if header.ICMPv4Code(p[1]) == header.ICMPv4NetUnreachable {
				err = syscall.ENETUNREACH
			}
		default:
			return false
		}
		if checksum.Checksum(p, 0) != 0xffff {
			return false
		}
	case !v4 && proto == uint8(header.ICMPv6ProtocolNumber):
		switch header.ICMPv6Type(p[0]) {
		case header.ICMPv6EchoReply:
		case header.ICMPv6DstUnreachable:
			err = syscall.EHOSTUNREACH
			if header.ICMPv6Code(p[1]) == header.ICMPv6NetworkUnreachable {
				err = syscall.ENETUNREACH
			}
		default:
			return false
		}
		to, _ := destination(b)
		if checksum.Checksum(p, pseudo6(from, to, len(p))) != 0xffff {
			return false
		}
	default:
		return false
	}
	echo, of := p, from
	if err != nil {
		quote := p[8:]
		of, _ = destination(quote)
		if !isEcho(quote) {
			return false
		}
		if _, echo, ok = transport(quote); !ok || len(echo) < 8 {
			return false
		}
		err = fmt.Errorf("reported by %v: %w", from, err)
	}
	id, seq := binary.BigEndian.Uint16(echo[4:]), binary.BigEndian.Uint16(echo[6:])
	ps.mu.Lock()
	w := ps.wait[id]
	ps.mu.Unlock()
	if w == nil || w.to != of {
		return false
	}
	select {
	case w.answer <- answer{seq, time.Now(), err}:
	default:
	}
	return true
}

// Ping sends an echo request to an address, another one each second, and returns how long the first
// one that was answered took. It waits as DialContext does, and for 10 s where ctx has no deadline.
// An ICMP error is an error that is syscall.EHOSTUNREACH or ENETUNREACH. Every address in Addrs
// answers pings; an address in Local answers only if somebody listens on it, as an answer says that
// there is a host.
func (n *Net) Ping(ctx context.Context, to netip.Addr) (time.Duration, error) {
	rtt, err := n.ping(ctx, to.Unmap())
	if err != nil {
		return 0, &net.OpError{Op: "ping", Net: "ip", Addr: &net.IPAddr{IP: to.AsSlice(), Zone: to.Zone()}, Err: err}
	}
	return rtt, nil
}

func (n *Net) ping(ctx context.Context, to netip.Addr) (time.Duration, error) {
	if !single(to) || to.Zone() != "" {
		return 0, &net.AddrError{Err: "not an address to ping", Addr: to.String()}
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, dialTimeout)
		defer cancel()
	}
	if err := n.await(ctx, to); err != nil {
		return 0, err
	}
	id, p, err := n.pings.add(to)
	if err != nil {
		return 0, err
	}
	defer n.pings.remove(id)
	again := time.NewTicker(time.Second)
	defer again.Stop()
	sent := make(map[uint16]time.Time)
	for seq := uint16(0); ; seq++ {
		sent[seq] = time.Now()
		if err := n.link.sendEcho(to, id, seq); err != nil {
			return 0, err
		}
		select {
		case a := <-p.answer:
			if a.err != nil {
				return 0, a.err
			}
			if at, ok := sent[a.seq]; ok {
				return a.at.Sub(at), nil
			}
		case <-again.C:
		case <-ctx.Done():
			return 0, n.noAnswer(ctx, to)
		case <-n.done:
			return 0, errClosed
		}
	}
}

// sendEcho sends an echo request.
func (l *link) sendEcho(to netip.Addr, id, seq uint16) error {
	t := l.table.Load()
	v, _ := t.send(to)
	from := t.source(to)
	switch {
	case v == unreachable:
		return &WaitError{Addr: to, Err: ErrNoRoute}
	case !from.IsValid():
		return &WaitError{Addr: to, Err: ErrNoSource}
	case v == inside:
		if !t.isAddr(to) && !l.answer(to) {
			return syscall.EHOSTUNREACH
		}
	}
	b := echoRequest(from, to, id, seq)
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(b)})
	if v == inside {
		l.in.put(pkt, false)
	} else {
		l.out.put(pkt, true)
	}
	return nil
}

// echoRequest returns the packet of an echo request with 32 bytes of data.
func echoRequest(from, to netip.Addr, id, seq uint16) []byte {
	const size = 8 + 32
	var b, p []byte
	if to.Is4() {
		b = make([]byte, header.IPv4MinimumSize+size)
		ip := header.IPv4(b)
		ip.Encode(&header.IPv4Fields{
			TotalLength: uint16(len(b)), TTL: 64, Protocol: uint8(header.ICMPv4ProtocolNumber),
			SrcAddr: tcpipAddr(from), DstAddr: tcpipAddr(to),
		})
		ip.SetChecksum(^ip.CalculateChecksum())
		p = b[header.IPv4MinimumSize:]
		p[0] = uint8(header.ICMPv4Echo)
	} else {
		b = make([]byte, header.IPv6MinimumSize+size)
		header.IPv6(b).Encode(&header.IPv6Fields{
			PayloadLength: size, TransportProtocol: header.ICMPv6ProtocolNumber, HopLimit: 64,
			SrcAddr: tcpipAddr(from), DstAddr: tcpipAddr(to),
		})
		p = b[header.IPv6MinimumSize:]
		p[0] = uint8(header.ICMPv6EchoRequest)
	}
	binary.BigEndian.PutUint16(p[4:], id)
	binary.BigEndian.PutUint16(p[6:], seq)
	var sum uint16
	if to.Is6() {
		sum = pseudo6(from, to, size)
	}
	binary.BigEndian.PutUint16(p[2:], ^checksum.Checksum(p, sum))
	return b
}
