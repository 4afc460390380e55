package netstack

import (
	"net/netip"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

var (
	a4, b4, c4 = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	a6, b6, c6 = netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2"), netip.MustParseAddr("fd00::3")
)

// packet returns an IP packet whose payload begins with the given bytes.
func packet(from, to netip.Addr, proto uint8, size int, payload ...byte) []byte {
	if from.Is4() {
		b := make([]byte, header.IPv4MinimumSize+size)
		header.IPv4(b).Encode(&header.IPv4Fields{TotalLength: uint16(len(b)), TTL: 9, Protocol: proto, SrcAddr: tcpipAddr(from), DstAddr: tcpipAddr(to)})
		copy(b[header.IPv4MinimumSize:], payload)
		return b
	}
	b := make([]byte, header.IPv6MinimumSize+size)
	header.IPv6(b).Encode(&header.IPv6Fields{PayloadLength: uint16(size), HopLimit: 9, SrcAddr: tcpipAddr(from), DstAddr: tcpipAddr(to)})
	b[6] = proto
	copy(b[header.IPv6MinimumSize:], payload)
	return b
}

// TestICMPError holds icmpError to what RFC 1122 section 3.2.2 and RFC 4443 section 2.4 allow.
func TestICMPError(t *testing.T) {
	multicast4, multicast6 := netip.MustParseAddr("224.0.0.1"), netip.MustParseAddr("ff02::1")
	fragment := packet(b4, a4, 17, 100)
	fragment[7] = 1
	first := packet(b4, a4, 17, 100)
	first[6] = 0x20
	for name, test := range map[string]struct {
		b    []byte
		from netip.Addr
		ok   bool
	}{
		"UDP":                        {packet(b4, a4, 17, 100), c4, true},
		"UDP, big":                   {packet(b4, a4, 17, 1400), c4, true},
		"UDP, v6":                    {packet(b6, a6, 17, 1400), c6, true},
		"echo request":               {packet(b4, a4, 1, 8, 8), c4, true},
		"echo request, v6":           {packet(b6, a6, 58, 8, 128), c6, true},
		"first fragment":             {first, c4, true},
		"empty":                      {nil, c4, false},
		"short":                      {[]byte{0x45, 0}, c4, false},
		"later fragment":             {fragment, c4, false},
		"fragment, v6":               {packet(b6, a6, 44, 100), c6, false},
		"ICMP error":                 {packet(b4, a4, 1, 40, 3), c4, false},
		"unknown ICMP":               {packet(b4, a4, 1, 40, 99), c4, false},
		"no ICMP at all":             {packet(b4, a4, 1, 0), c4, false},
		"ICMP error, v6":             {packet(b6, a6, 58, 40, 1), c6, false},
		"to multicast":               {packet(b4, multicast4, 17, 9), c4, false},
		"from multicast":             {packet(multicast4, a4, 17, 9), c4, false},
		"to broadcast":               {packet(b4, netip.MustParseAddr("255.255.255.255"), 17, 9), c4, false},
		"from nowhere":               {packet(netip.IPv4Unspecified(), a4, 17, 9), c4, false},
		"to multicast, v6":           {packet(b6, multicast6, 17, 9), c6, false},
		"from nowhere, v6":           {packet(netip.IPv6Unspecified(), a6, 17, 9), c6, false},
		"no address":                 {packet(b4, a4, 17, 9), netip.Addr{}, false},
		"address of another family":  {packet(b4, a4, 17, 9), c6, false},
		"address of another family6": {packet(b6, a6, 17, 9), c4, false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, why := range []reason{netUnreachable, hostUnreachable} {
				e := icmpError(test.b, why, test.from)
				if !test.ok {
					if e != nil {
						t.Fatalf("answered with %x", e)
					}
					continue
				}
				from, _ := source(e)
				to, _ := destination(e)
				sender, _ := source(test.b)
				proto, p, ok := transport(e)
				if !ok || from != test.from || to != sender {
					t.Fatalf("from %v to %v", from, to)
				}
				limit := maxError4
				var sum uint16
				var code byte
				switch {
				case from.Is4():
					h := header.IPv4(e)
					if int(h.TotalLength()) != len(e) || !h.IsChecksumValid() || proto != 1 || p[0] != 3 {
						t.Errorf("header %x", e[:28])
					}
					code = map[reason]byte{netUnreachable: 0, hostUnreachable: 1}[why]
				default:
					limit, sum = maxError6, pseudo6(from, to, len(p))
					if int(header.IPv6(e).PayloadLength()) != len(p) || proto != 58 || p[0] != 1 {
						t.Errorf("header %x", e[:48])
					}
					code = map[reason]byte{netUnreachable: 0, hostUnreachable: 3}[why]
				}
				if p[1] != code || checksum.Checksum(p, sum) != 0xffff || len(e) > limit {
					t.Errorf("code %d, sum %x, %d bytes", p[1], checksum.Checksum(p, sum), len(e))
				}
				if quote := string(p[8:]); quote != string(test.b[:len(quote)]) || len(quote) < min(len(test.b), 500) {
					t.Errorf("quotes %d bytes, or others", len(quote))
				}
			}
		})
	}
}

func TestTooBig(t *testing.T) {
	for name, test := range map[string]struct {
		b    []byte
		want bool
	}{
		"fragmentation needed":     {packet(b4, a4, 1, 40, 3, 4), true},
		"port unreachable":         {packet(b4, a4, 1, 40, 3, 3), false},
		"echo request":             {packet(b4, a4, 1, 40, 8, 4), false},
		"UDP that begins like it":  {packet(b4, a4, 17, 40, 3, 4), false},
		"packet too big":           {packet(b6, a6, 58, 40, 2), true},
		"port unreachable, v6":     {packet(b6, a6, 58, 40, 1, 4), false},
		"UDP like it, v6":          {packet(b6, a6, 17, 40, 2), false},
		"ICMPv6 over IPv4":         {packet(b4, a4, 58, 40, 2), false},
		"cut off behind the type":  {packet(b4, a4, 1, 1, 3), false},
		"a fragment but the first": {append([]byte{0x45, 0, 0, 28, 0, 0, 0, 1}, packet(b4, a4, 1, 8, 3, 4)[8:]...), false},
	} {
		if got := tooBig(test.b); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// FuzzReceive holds that no packet that arrives makes a link panic.
func FuzzReceive(f *testing.F) {
	f.Add(packet(b4, a4, 17, 20))
	f.Add(packet(b6, a6, 58, 20, 128))
	f.Add(packet(b4, a4, 1, 20, 3, 0, 0, 0, 0, 0, 0, 0, 0x45))
	l := newLink(DefaultMTU)
	l.allow = func() bool { return true }
	l.answer = func(netip.Addr) bool { return false }
	l.pings = &pings{}
	s, err := newStack(l)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(s.Destroy)
	e := edit{*newTable()}
	for _, a := range []netip.Addr{a4, a6} {
		e.hop(netip.PrefixFrom(a, a.BitLen()), func(h *hop) { h.addr = true })
	}
	e.hop(netip.MustParsePrefix("10.0.0.0/8"), func(h *hop) { h.route = true })
	e.src4, e.src6 = a4, a6
	l.table.Store(&e.table)
	f.Fuzz(func(t *testing.T, b []byte) { l.receive([][]byte{b}, 0) })
}
