package netstack

import (
	"fmt"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

const nicID tcpip.NICID = 1

// Buffers of one connection, in bytes. The stack tunes both up to the maximum by what a path turns
// out to carry; they take no memory but for what is in them. Half of the maximum can be on its way: 840
// Mbit/s with 80 ms of round trip.
const (
	tcpBuffer    = 1 << 20
	tcpBufferMax = 16 << 20
	udpBuffer    = 1 << 20
)

func newStack(l *link) (*stack.Stack, error) {
	s := stack.New(stack.Options{
		NetworkProtocols: []stack.NetworkProtocolFactory{
			func(s *stack.Stack) stack.NetworkProtocol { return &protocol{ipv4.NewProtocol(s), l} },
			func(s *stack.Stack) stack.NetworkProtocol { return &protocol{ipv6.NewProtocol(s), l} },
		},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	if err := configure(s, l); err != nil {
		s.Destroy()
		return nil, err
	}
	return s, nil
}

func configure(s *stack.Stack, l *link) error {
	sack := tcpip.TCPSACKEnabled(true)
	// gVisor's RACK (RFC 8985), which is its default, often sends one packet a timeout once many in a row were lost, as
	// the socket of a slower peer loses them: 12 MiB took 32 to 53 s, and 3 s without (RFC 6675).
	recovery := tcpip.TCPRecovery(0)
	// Its CUBIC ends slow start where a round trip took an eighth longer (HyStart), which a busy host is enough for, and
	// counts from there: its window then grows by less than a packet in the first second, and by 50 in 5 s. With one lost
	// packet in 100 and 20 ms it is 0.7 of Reno, as it grows by 0.53 packets a round trip from 0.7 of the window.
	control := tcpip.CongestionControlOption("reno")
	moderate := tcpip.TCPModerateReceiveBufferOption(true)
	rcv := tcpip.TCPReceiveBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBuffer, Max: tcpBufferMax}
	snd := tcpip.TCPSendBufferSizeRangeOption{Min: tcp.MinBufferSize, Default: tcpBuffer, Max: tcpBufferMax}
	// Else all ports towards one address are used up by as many short connections in a minute. A port is
	// taken again a second after the end of its last connection at the earliest (RFC 6191).
	reuse := tcpip.TCPTimeWaitReuseOption(tcpip.TCPTimeWaitReuseGlobal)
	for _, o := range []tcpip.SettableTransportProtocolOption{&sack, &recovery, &control, &moderate, &rcv, &snd, &reuse} {
		if err := s.SetTransportProtocolOption(tcp.ProtocolNumber, o); err != nil {
			return fmt.Errorf("TCP option %T: %v", o, err)
		}
	}
	for _, o := range []any{
		tcpip.ReceiveBufferSizeOption{Min: 4 << 10, Default: udpBuffer, Max: tcpBufferMax},
		tcpip.SendBufferSizeOption{Min: 4 << 10, Default: udpBuffer, Max: tcpBufferMax},
	} {
		if err := s.SetOption(o); err != nil {
			return fmt.Errorf("option %T: %v", o, err)
		}
	}
	if err := s.CreateNIC(nicID, l); err != nil {
		return fmt.Errorf("interface: %v", err)
	}
	// Every address is accepted and may be sent from; link and the listening calls judge which.
	if err := s.SetPromiscuousMode(nicID, true); err != nil {
		return fmt.Errorf("interface: %v", err)
	}
	if err := s.SetSpoofing(nicID, true); err != nil {
		return fmt.Errorf("interface: %v", err)
	}
	s.SetRouteTable([]tcpip.Route{
		{Destination: header.IPv4EmptySubnet, NIC: nicID},
		{Destination: header.IPv6EmptySubnet, NIC: nicID},
	})
	return nil
}

// near is a round trip that buffers of nearBuffer are large enough for: they have half of it on its way, 500 MB/s.
// It is measured in whole milliseconds, of which a shorter one has up to two.
const (
	near       = 3 * time.Millisecond
	nearBuffer = 3 << 20
)

// tune gives a new connection buffers of one size where its handshake took no longer than near. Else what
// waits in WireGuard's queues, in 64 KiB a packet, is taken for the length of the path, and all buffers grow
// to the maximum between hosts that are next to each other. With half of nearBuffer four streams take a
// quarter less memory, but one stream alone waits as often as not.
func tune(ep tcpip.Endpoint) {
	var info tcpip.TCPInfoOption
	if ep.GetSockOpt(&info) != nil || info.RTT > near {
		return
	}
	o := ep.SocketOptions()
	o.SetSendBufferSize(nearBuffer, true)
	o.SetReceiveBufferSize(nearBuffer, true)
}

// protocol is IPv4 or IPv6 with link's choice of source addresses. The stack would take the first of
// the interface's addresses, or search its routes for a hint, neither of which grows to a mesh.
type protocol struct {
	stack.NetworkProtocol
	link *link
}

func (p *protocol) NewEndpoint(nic stack.NetworkInterface, d stack.TransportDispatcher) stack.NetworkEndpoint {
	e := p.NetworkProtocol.NewEndpoint(nic, d)
	w := &endpoint{NetworkEndpoint: e, AddressableEndpoint: e.(stack.AddressableEndpoint), GroupAddressableEndpoint: e.(stack.GroupAddressableEndpoint), link: p.link}
	if p.Number() == ipv4.ProtocolNumber {
		w.temps = new(stack.AddressableEndpointState)
		w.temps.Init(e, stack.AddressableEndpointStateOptions{})
	}
	return w
}

type endpoint struct {
	stack.NetworkEndpoint
	stack.AddressableEndpoint
	stack.GroupAddressableEndpoint
	link *link

	// temps are the addresses that connections are from, of IPv4. Its own endpoint compares every
	// packet's source with the broadcast address of each address it has, one after the other.
	temps *stack.AddressableEndpointState
}

// HandlePacket takes a packet from link, by way of the interface, which has forgotten what link verified.
func (e *endpoint) HandlePacket(pkt *stack.PacketBuffer) {
	if pkt.Hash == verified {
		pkt.RXChecksumValidated = true
	}
	e.NetworkEndpoint.HandlePacket(pkt)
}

// AcquireAssignedAddress is what the stack calls for a route; ipv4 itself calls its own.
func (e *endpoint) AcquireAssignedAddress(local tcpip.Address, allowTemp bool, peb stack.PrimaryEndpointBehavior, readOnly bool) stack.AddressEndpoint {
	if e.temps == nil {
		return e.AddressableEndpoint.AcquireAssignedAddress(local, allowTemp, peb, readOnly)
	}
	return e.temps.AcquireAssignedAddress(local, allowTemp, peb, readOnly)
}

// AcquireOutgoingPrimaryAddress chooses the source of packets that have none.
func (e *endpoint) AcquireOutgoingPrimaryAddress(remote, _ tcpip.Address, _ bool) stack.AddressEndpoint {
	dst, ok := netip.AddrFromSlice(remote.AsSlice())
	if !ok {
		return nil
	}
	src := e.link.table.Load().source(dst)
	if !src.IsValid() {
		return nil
	}
	return e.AcquireAssignedAddress(tcpipAddr(src), true, stack.NeverPrimaryEndpoint, false)
}

func tcpipAddr(a netip.Addr) tcpip.Address {
	if a.Is4() {
		return tcpip.AddrFrom4(a.As4())
	}
	return tcpip.AddrFrom16(a.As16())
}

func netipAddr(a tcpip.Address) netip.Addr {
	b, _ := netip.AddrFromSlice(a.AsSlice())
	return b.Unmap()
}

// fullAddr returns a for the stack; an unspecified address is its wildcard.
func fullAddr(a netip.AddrPort) tcpip.FullAddress {
	f := tcpip.FullAddress{Port: a.Port()}
	if !a.Addr().IsUnspecified() && a.Addr().IsValid() {
		f.NIC, f.Addr = nicID, tcpipAddr(a.Addr())
	}
	return f
}

func addrPort(f tcpip.FullAddress) netip.AddrPort {
	a := netipAddr(f.Addr)
	if !a.IsValid() {
		a = netip.IPv6Unspecified()
	}
	return netip.AddrPortFrom(a, f.Port)
}

func protocolOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return header.IPv4ProtocolNumber
	}
	return header.IPv6ProtocolNumber
}
