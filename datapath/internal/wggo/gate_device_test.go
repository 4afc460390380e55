package wggo

import (
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/sockets"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// endless is a tun.Device with no end of packets to 10.0.0.2 once it is told to.
type endless struct {
	*idle
	begin chan struct{}
	read  atomic.Int64
	flow  atomic.Bool // all that there are, else one
}

func (d *endless) BatchSize() int { return 128 }

func (d *endless) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	select {
	case <-d.closed:
		return 0, os.ErrClosed
	case <-d.begin:
	}
	n := len(bufs)
	if !d.flow.Load() {
		time.Sleep(5 * time.Millisecond)
		n = 1
	}
	for i := range n {
		p := bufs[i][offset:][:1400]
		clear(p)
		p[0], p[2], p[3] = 0x45, 1400>>8, 1400&255
		copy(p[12:], []byte{10, 0, 0, 1, 10, 0, 0, 2})
		sizes[i] = 1400
	}
	d.read.Add(int64(n))
	return n, nil
}

// slowBind sends a batch of data in 2 ms: 700 Mbit/s.
type slowBind struct {
	conn.Bind
	sent atomic.Int64
	slow atomic.Bool
}

func (b *slowBind) Send(bufs [][]byte, ep conn.Endpoint) error {
	if len(bufs[0]) < 1400 {
		return b.Bind.Send(bufs, ep)
	}
	if b.slow.Load() {
		time.Sleep(2 * time.Millisecond)
	}
	b.sent.Add(int64(len(bufs)))
	return nil
}

// What is inside a real device whose link is slower than what it is given stays within the limit.
func TestGatedDevice(t *testing.T) {
	k1, _ := key.NewPrivate()
	k2, _ := key.NewPrivate()
	slow := &slowBind{Bind: sockets.New(sockets.Options{})}
	a := New(Options{Mu: new(sync.Mutex), Logger: slog.New(slog.DiscardHandler), Bind: func() conn.Bind { return slow }})
	b := New(Options{Mu: new(sync.Mutex), Logger: slog.New(slog.DiscardHandler)})
	defer a.Close()
	defer b.Close()
	src := &endless{idle: newIdle(), begin: make(chan struct{})}
	if err := a.Create(datapath.Device{Key: k1}, func() (tun.Device, error) { return src, nil }); err != nil {
		t.Fatal(err)
	}
	if err := b.Create(datapath.Device{Key: k2}, func() (tun.Device, error) { return newIdle(), nil }); err != nil {
		t.Fatal(err)
	}
	at := func(w *WireGuard) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), w.wg.bind.at())
	}
	if err := b.PutPeer(datapath.PutPeer{Key: k1.Public(), Peer: datapath.Peer{Prefixes: prefixes.MustParse("10.0.0.1/32")}}); err != nil {
		t.Fatal(err)
	}
	if err := a.PutPeer(datapath.PutPeer{Key: k2.Public(), Peer: datapath.Peer{Endpoint: at(b), Prefixes: prefixes.MustParse("10.0.0.2/32")}}); err != nil {
		t.Fatal(err)
	}
	close(src.begin)
	for end := time.Now().Add(10 * time.Second); slow.sent.Load() < 10; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no handshake")
		}
	}
	lost := src.read.Load() - slow.sent.Load() // before the handshake
	slow.slow.Store(true)
	src.flow.Store(true)
	most := int64(0)
	for range 60 {
		time.Sleep(5 * time.Millisecond)
		most = max(most, src.read.Load()-slow.sent.Load()-lost)
	}
	src.flow.Store(false)
	if most > gateLimit+3*128 {
		t.Errorf("%d packets, %d MiB of buffers, were inside the device in 0.3 s, with a limit of %d", most, most/16, gateLimit)
	}
}
