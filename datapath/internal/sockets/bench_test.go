package sockets_test

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"

	"github.com/warren-mesh/warren/datapath/internal/sockets"
)

// BenchmarkPackets carries packets over loopback from one Bind to another, the sending and the receiving together. What
// a packet costs with wireguard-go's own Bind is found in the same run.
func BenchmarkPackets(b *testing.B) {
	for _, size := range []int{64, 1424, 1452} {
		for name, open := range map[string]func() conn.Bind{
			"ours": func() conn.Bind { return sockets.New(sockets.Options{}) },
			"std":  conn.NewStdNetBind,
		} {
			b.Run(fmt.Sprintf("%d/%s", size, name), func(b *testing.B) { carry(b, open(), open(), size) })
		}
	}
}

func carry(b *testing.B, from, to conn.Bind, size int) {
	fns, port, err := to.Open(0)
	if err != nil {
		b.Fatal(err)
	}
	if _, _, err := from.Open(0); err != nil {
		b.Fatal(err)
	}
	defer from.Close()
	var received atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n := to.BatchSize()
		packets, sizes, eps := make([][]byte, n), make([]int, n), make([]conn.Endpoint, n)
		for i := range packets {
			packets[i] = make([]byte, 1<<16)
		}
		for {
			n, err := fns[0](packets, sizes, eps)
			if err != nil {
				return
			}
			for _, size := range sizes[:n] {
				if size > 0 {
					received.Add(1)
				}
			}
		}
	}()
	defer func() { to.Close(); <-ended }()
	batch := make([][]byte, from.BatchSize())
	for i := range batch {
		batch[i] = make([]byte, size)
	}
	ep, err := from.ParseEndpoint(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port).String())
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	const window = 512
	sent := 0
	for sent < b.N {
		n := min(len(batch), b.N-sent)
		if err := from.Send(batch[:n], ep); err != nil {
			b.Fatal(err)
		}
		sent += n
		for begun := time.Now(); sent-int(received.Load()) > window; {
			if time.Since(begun) > time.Second {
				b.Logf("%d of %d were lost", sent-int(received.Load()), sent)
				received.Store(int64(sent))
			}
			time.Sleep(0)
		}
	}
}
