package netstack_test

import (
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
)

// BenchmarkUDP compares how many datagrams a second arrive, sent as fast as the sender can, with wireguard-go's own
// netstack: two devices over loopback each, which take turns.
//
//	go test -run '^$' -bench UDP -benchtime 10x ./datapath/netstack/
func BenchmarkUDP(b *testing.B) {
	for _, size := range []int{64, 1392} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			x, y := pair(b)
			to, err := y.ListenPacket("udp", "10.0.0.2:9")
			if err != nil {
				b.Fatal(err)
			}
			from, err := x.DialContext(within(b, timeout), "udp", "10.0.0.2:9")
			if err != nil {
				b.Fatal(err)
			}
			ours := newFlood(b, from, to.(net.Conn), size)
			p, q := theirPair(b, conn.NewDefaultBind)
			to2, err := q.ListenUDPAddrPort(netip.MustParseAddrPort("10.0.0.2:9"))
			if err != nil {
				b.Fatal(err)
			}
			from2, err := p.DialUDPAddrPort(netip.AddrPort{}, netip.MustParseAddrPort("10.0.0.2:9"))
			if err != nil {
				b.Fatal(err)
			}
			other := newFlood(b, from2, to2, size)
			const turn = 300 * time.Millisecond
			ours.run(b, turn)
			other.run(b, turn)
			var n1, n2, s1, s2 float64
			b.ResetTimer()
			for range b.N {
				sent, arrived := ours.run(b, turn)
				s1, n1 = s1+sent, n1+arrived
				sent, arrived = other.run(b, turn)
				s2, n2 = s2+sent, n2+arrived
			}
			all := float64(b.N) * turn.Seconds()
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(n1/all, "ours-packets/s")
			b.ReportMetric(n2/all, "theirs-packets/s")
			b.ReportMetric(100*(s1-n1)/s1, "ours-lost-%")
			b.ReportMetric(100*(s2-n2)/s2, "theirs-lost-%")
			b.ReportMetric(n1/n2, "ratio")
		})
	}
}

// flood is a socket that sends and one that counts what arrives.
type flood struct {
	from    net.Conn
	packet  []byte
	arrived atomic.Int64
}

func newFlood(b *testing.B, from, to net.Conn, size int) *flood {
	f := &flood{from: from, packet: make([]byte, size)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p := make([]byte, 2048)
		for {
			if _, err := to.Read(p); err != nil {
				return
			}
			f.arrived.Add(1)
		}
	}()
	b.Cleanup(func() { from.Close(); to.Close(); <-ended })
	return f
}

// run sends for that long, and returns how many it sent, and how many arrived until nothing came any more.
func (f *flood) run(b *testing.B, d time.Duration) (sent, arrived float64) {
	b.Helper()
	before := f.arrived.Load()
	for end := time.Now().Add(d); time.Now().Before(end); {
		for range 64 {
			if _, err := f.from.Write(f.packet); err == nil {
				sent++
			}
		}
	}
	for last := f.arrived.Load(); ; {
		time.Sleep(5 * time.Millisecond)
		now := f.arrived.Load()
		if now == last {
			return sent, float64(now - before)
		}
		last = now
	}
}
