package offload

import (
	"strings"
	"testing"
)

// large is a packet of 64 KiB, and its segments at an MTU of 1420.
func large(t testing.TB) (whole []byte, segments [][]byte) {
	p := packet{version: 4, ttl: 64, frag: 0x4000, src: "\x0a\x00\x00\x01", dst: "\x0a\x00\x00\x02", flags: flagACK | flagPSH,
		tcpOptions: "\x01\x01\x08\x0a12345678", payload: strings.Repeat("0123456789", 6432), ipSumRight: true, tcpSumRight: true}
	whole = p.write()
	return whole, checkCut(t, whole, 1, 1340, 1420)
}

func cutter(t testing.TB) (cutAll func(), size int) {
	whole, _ := large(t)
	var s Segmenter
	pieces := make([][]byte, 3)
	to := make([]byte, 1500)
	return func() {
		pieces[0], pieces[1], pieces[2] = whole[:52], whole[52:30001], whole[30001:]
		if !s.Start(pieces, 1340, 1420) {
			t.Fatal("it cannot be cut")
		}
		for s.More() {
			s.Next(to)
		}
	}, len(whole)
}

func merger(t testing.TB) (mergeAll func(), size int) {
	whole, segments := large(t)
	var c Coalescer
	return func() {
		for _, s := range segments {
			c.Add(s)
		}
		if p := c.Packets(); len(p) != 1 || len(p[0].Header())+p[0].Size != len(whole) {
			t.Fatal("it was not merged")
		}
		c.Reset()
	}, len(whole)
}

func TestAllocs(t *testing.T) {
	for name, of := range map[string]func(testing.TB) (func(), int){"cutting": cutter, "merging": merger} {
		do, _ := of(t)
		do()
		if n := testing.AllocsPerRun(100, do); n != 0 {
			t.Errorf("%s takes %v allocations", name, n)
		}
	}
}

func BenchmarkCut(b *testing.B) {
	do, size := cutter(b)
	b.ReportAllocs()
	b.SetBytes(int64(size))
	for b.Loop() {
		do()
	}
}

func BenchmarkMerge(b *testing.B) {
	do, size := merger(b)
	b.ReportAllocs()
	b.SetBytes(int64(size))
	for b.Loop() {
		do()
	}
}
