package netstack

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"pgregory.net/rapid"
)

// A queue is a list of what fits it.
func TestUDPQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := udpQueue{ready: make(chan struct{}, 1)}
		type item struct {
			data []byte
			from netip.AddrPort
		}
		var model []item
		size, lost := 0, uint64(0)
		buf := make([]byte, 1<<16)
		n := 0
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				for range rapid.IntRange(1, 60).Draw(t, "how many") {
					n++
					i := item{bytes.Repeat([]byte{byte(n)}, rapid.SampledFrom([]int{0, 1, 64, 1392, 9000, slabSize, slabSize + 1, 65507}).Draw(t, "size")),
						netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), uint16(n))}
					q.put(i.data, i.from)
					if cost := len(i.data) + datagramCost; size+cost <= queueBytes {
						model, size = append(model, i), size+cost
					} else {
						lost++
					}
				}
			},
			"take": func(t *rapid.T) {
				for range rapid.IntRange(1, 90).Draw(t, "how many") {
					n, from, ok, err := q.take(buf)
					if ok != (len(model) > 0) || err != nil {
						t.Fatalf("%v, %v with %d in it", ok, err, len(model))
					}
					if ok {
						if !bytes.Equal(buf[:n], model[0].data) || from != model[0].from {
							t.Fatalf("%d bytes from %v, want %d from %v", n, from, len(model[0].data), model[0].from)
						}
						model, size = model[1:], size-len(model[0].data)-datagramCost
					}
				}
			},
			"": func(t *rapid.T) {
				if q.size != size || q.lost != lost || len(q.list)-q.head != len(model) {
					t.Fatalf("%d bytes, %d lost, %d there; want %d, %d, %d", q.size, q.lost, len(q.list)-q.head, size, lost, len(model))
				}
				if len(model) == 0 && (q.filled != nil || cap(q.list) > keptList) {
					t.Fatal("an empty queue has memory")
				}
			},
		})
		q.refuse()
		if _, _, ok, err := q.take(buf); ok || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("refused: %v", err)
		}
		q.close()
		q.put([]byte{1}, netip.AddrPort{})
		if _, _, ok, err := q.take(buf); ok || err != nil || q.size != 0 {
			t.Fatalf("closed: %v, %v, %d bytes", ok, err, q.size)
		}
	})
}

// Ports are opened, closed and found as a list of sockets has it, each of which is asked.
func TestUDPPorts(t *testing.T) {
	addrs := []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
	for _, a := range []string{"10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"} {
		addrs = append(addrs, netip.MustParseAddr(a))
	}
	hears := func(c *UDPConn, a netip.Addr) bool {
		return c.family.has(a) && (c.local.Addr().IsUnspecified() || c.local.Addr() == a)
	}
	rapid.Check(t, func(t *rapid.T) {
		var s sockets
		var model []*UDPConn
		port := func(t *rapid.T) uint16 {
			return rapid.SampledFrom([]uint16{1, 2, firstEphemeral, lastEphemeral}).Draw(t, "port")
		}
		t.Repeat(map[string]func(*rapid.T){
			"open": func(t *rapid.T) {
				a := rapid.SampledFrom(addrs).Draw(t, "address")
				c := &UDPConn{family: family{a.Is4(), a.Is6()}}
				p := port(t)
				switch rapid.IntRange(0, 3).Draw(t, "kind") {
				case 0:
					p = 0
				case 1:
					if !a.IsUnspecified() {
						p, c.remote = 0, netip.AddrPortFrom(a.Next(), port(t))
					}
				case 2:
					c.family.v4 = c.family.v4 || a.IsUnspecified()
				}
				c.local = netip.AddrPortFrom(a, p)
				err := s.add(c)
				taken := false
				for _, o := range model {
					for _, x := range addrs[2:] {
						taken = taken || o.local.Port() == c.local.Port() && hears(o, x) && hears(c, x)
					}
				}
				if p == 0 && (err != nil || taken || c.local.Port() < firstEphemeral || c.local.Port() > lastEphemeral) || p != 0 && (err != nil) != taken {
					t.Fatalf("%v: %v, taken: %v", c.local, err, taken)
				}
				if err == nil {
					model = append(model, c)
				}
			},
			"close": func(t *rapid.T) {
				if len(model) > 0 {
					i := rapid.IntRange(0, len(model)-1).Draw(t, "which")
					s.remove(model[i])
					model = slices.Delete(model, i, i+1)
				}
			},
			"find": func(t *rapid.T) {
				to := netip.AddrPortFrom(rapid.SampledFrom(addrs[2:]).Draw(t, "to"), port(t))
				from := netip.AddrPortFrom(to.Addr().Next(), port(t))
				if len(model) > 0 && rapid.Bool().Draw(t, "of a socket") {
					c := rapid.SampledFrom(model).Draw(t, "socket")
					if to = netip.AddrPortFrom(to.Addr(), c.local.Port()); c.remote.IsValid() {
						to = c.local
						from = netip.AddrPortFrom(c.remote.Addr(), rapid.SampledFrom([]uint16{from.Port(), c.remote.Port()}).Draw(t, "from"))
					}
				}
				var want *UDPConn
				for _, c := range model {
					if c.local.Port() == to.Port() && hears(c, to.Addr()) && (!c.remote.IsValid() || c.remote == from) {
						want = c
					}
				}
				if got := s.find(from, to); got != want {
					t.Fatalf("%v to %v: %+v, want %+v", from, to, got, want)
				}
			},
		})
		for _, c := range model {
			s.remove(c)
		}
		if len(s.four)+len(s.six) > 0 {
			t.Fatalf("of closed sockets there are left %v, %v", s.four, s.six)
		}
	})
}

// A deadline that is put off, or taken away, ends no call, though it wakes those that wait.
func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d deadline
		d.init()
		woken := func(c <-chan struct{}) bool {
			synctest.Wait()
			select {
			case <-c:
				return true
			default:
				return false
			}
		}
		check := func(what string, c <-chan struct{}, wakes, expires bool) {
			t.Helper()
			w := woken(c)
			if _, expired := d.wait(); w != wakes || expired != expires {
				t.Errorf("%s: woken: %v, expired: %v", what, w, expired)
			}
		}
		c, _ := d.wait()
		check("none", c, false, false)
		d.set(time.Now().Add(time.Second))
		check("set", c, true, false)
		c, _ = d.wait()
		time.Sleep(time.Second - 1)
		check("not yet", c, false, false)
		d.set(time.Now().Add(time.Second))
		check("put off", c, true, false)
		c, _ = d.wait()
		time.Sleep(time.Second - 1)
		check("not yet", c, false, false)
		time.Sleep(time.Nanosecond)
		check("its time has come", c, true, true)
		d.set(time.Now().Add(time.Hour))
		c, _ = d.wait()
		check("again", c, false, false)
		d.set(time.Now().Add(-1))
		check("past", c, true, true)
		d.set(time.Time{})
		c, _ = d.wait()
		time.Sleep(2 * time.Hour)
		check("taken away", c, false, false)
	})
}

func TestUDPQueueAllocatesNothing(t *testing.T) {
	q := udpQueue{ready: make(chan struct{}, 1)}
	data, buf, from := make([]byte, 1392), make([]byte, 1500), netip.MustParseAddrPort("10.0.0.1:9")
	if n := testing.AllocsPerRun(100, func() {
		for range 100 {
			q.put(data, from)
		}
		for range 100 {
			if _, _, ok, _ := q.take(buf); !ok {
				t.Fatal("nothing there")
			}
		}
	}); n > 5 { // a slab has 23 of them, and the pool may lose it
		t.Errorf("%v allocations for 100 datagrams", n)
	}
}

func fragments(from, to netip.AddrPort, payload []byte, mtu int) (packets [][]byte) {
	l := newLink(mtu)
	l.out.reopen()
	l.sendUDP(outside, from, to, payload)
	for _, p := range l.out.pkts {
		packets = append(packets, p.ToView().AsSlice())
		p.DecRef()
	}
	return packets
}

// What is sent is what gVisor's parsers find right, fits the MTU, and is the payload put together.
func TestSendUDP(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		from, to := netip.MustParseAddrPort("10.0.0.1:1111"), netip.MustParseAddrPort("10.0.0.2:2222")
		most := maxUDP4
		if rapid.Bool().Draw(t, "IPv6") {
			from, to = netip.MustParseAddrPort("[fd00::1]:1111"), netip.MustParseAddrPort("[fd00::2]:2222")
			most = 65507
		}
		mtu := rapid.SampledFrom([]int{1280, 1281, 1420, 8920, 65475}).Draw(t, "MTU")
		payload := bytes.Repeat([]byte{rapid.Byte().Draw(t, "byte"), 7}, most/2+1)[:rapid.OneOf(rapid.IntRange(0, 3000), rapid.IntRange(0, most)).Draw(t, "size")]
		packets := fragments(from, to, payload, mtu)
		var u []byte
		for i, b := range packets {
			if len(b) > mtu {
				t.Fatalf("%d bytes over an MTU of %d", len(b), mtu)
			}
			if to.Addr().Is4() {
				h := header.IPv4(b)
				if !h.IsValid(len(b)) || !h.IsChecksumValid() || h.TTL() != 64 || h.More() != (i < len(packets)-1) || int(h.FragmentOffset()) != len(u) || h.ID() != header.IPv4(packets[0]).ID() {
					t.Fatalf("fragment %d is %v", i, h)
				}
				u = append(u, h.Payload()...)
				continue
			}
			h := header.IPv6(b)
			if !h.IsValid(len(b)) || h.HopLimit() != 64 {
				t.Fatalf("packet %d is %v", i, h)
			}
			p := h.Payload()
			if len(packets) > 1 {
				f := header.IPv6Fragment(p)
				if !f.IsValid() || f.More() != (i < len(packets)-1) || int(f.FragmentOffset())*8 != len(u) || f.ID() != header.IPv6Fragment(header.IPv6(packets[0]).Payload()).ID() {
					t.Fatalf("fragment %d: more %v, offset %d after %d bytes", i, f.More(), f.FragmentOffset()*8, len(u))
				}
				p = p[header.IPv6FragmentHeaderSize:]
			}
			u = append(u, p...)
		}
		h := header.UDP(u)
		if int(h.Length()) != len(u) || !h.IsChecksumValid(tcpipAddr(from.Addr()), tcpipAddr(to.Addr()), checksum.Checksum(u[8:], 0)) || !bytes.Equal(u[8:], payload) {
			t.Fatalf("of %d bytes, %d arrive", len(payload), len(u)-8)
		}
		if len(packets) == 1 {
			f, d, p, ok := parseUDP(packets[0])
			if !ok || f != from || d != to || !bytes.Equal(p, payload) {
				t.Fatalf("read as %v to %v, %d bytes, %v", f, d, len(p), ok)
			}
		} else if _, _, _, ok := parseUDP(packets[0]); ok {
			t.Fatal("a fragment is taken for a datagram")
		}
	})
}

// A packet is a datagram exactly where gVisor finds one.
func FuzzParseUDP(f *testing.F) {
	for _, to := range []string{"10.0.0.2:9", "[fd00::2]:9"} {
		dst := netip.MustParseAddrPort(to)
		src := netip.AddrPortFrom(dst.Addr().Prev(), 7)
		for _, n := range []int{0, 1, 5, 1392, 3000} {
			for _, b := range fragments(src, dst, make([]byte, n), 1420) {
				f.Add(b)
			}
		}
	}
	f.Add(append(fragments(netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:2"), []byte("padded"), 1420)[0], 0, 0, 0))
	f.Add(icmpError(fragments(netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:2"), []byte("refused"), 1420)[0], hostUnreachable, netip.MustParseAddr("10.0.0.2")))
	f.Fuzz(func(t *testing.T, b []byte) {
		from, to, payload, ok := parseUDP(b)
		wantFrom, wantTo, wantPayload, want := oracleUDP(b)
		if ok != want || ok && (from != wantFrom || to != wantTo || !bytes.Equal(payload, wantPayload)) {
			t.Errorf("%v: %v to %v, %x; want %v: %v to %v, %x", ok, from, to, payload, want, wantFrom, wantTo, wantPayload)
		}
		refusedUDP(b)
	})
}

func oracleUDP(b []byte) (from, to netip.AddrPort, payload []byte, ok bool) {
	if len(b) == 0 {
		return
	}
	var src, dst netip.Addr
	var u header.UDP
	switch b[0] >> 4 {
	case 4:
		h := header.IPv4(b)
		if !h.IsValid(len(b)) || !h.IsChecksumValid() || h.Protocol() != 17 || h.More() || h.FragmentOffset() != 0 {
			return
		}
		src, dst, u = netipAddr(h.SourceAddress()), netipAddr(h.DestinationAddress()), header.UDP(h.Payload())
	case 6:
		h := header.IPv6(b)
		if !h.IsValid(len(b)) || h.NextHeader() != 17 {
			return
		}
		src, dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		u = header.UDP(h.Payload())
	default:
		return
	}
	if !single(src) || len(u) < 8 || int(u.Length()) < 8 || int(u.Length()) > len(u) {
		return
	}
	u = u[:u.Length()]
	if u.Checksum() == 0 && src.Is6() || u.Checksum() != 0 && !u.IsChecksumValid(tcpipAddr(src), tcpipAddr(dst), checksum.Checksum(u[8:], 0)) {
		return
	}
	return netip.AddrPortFrom(src, u.SourcePort()), netip.AddrPortFrom(dst, u.DestinationPort()), u[8:], true
}
