package offload

import (
	"bytes"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func drawPacket(t *rapid.T, most int) packet {
	b := func(n int, name string) []byte { return rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, name) }
	p := packet{
		v6: rapid.Bool().Draw(t, "v6"), udp: rapid.Bool().Draw(t, "udp"), id: rapid.Uint16().Draw(t, "id"), hops: rapid.Byte().Draw(t, "hops"),
		seq: rapid.Uint32().Draw(t, "seq"), ack: rapid.Uint32().Draw(t, "ack"), flags: 0x10, window: rapid.Uint16().Draw(t, "window"),
	}
	n := 4
	if p.v6 {
		n = 16
		copy(p.first[:], b(4, "class and label"))
		p.first[0] = 0x60 | p.first[0]&0xf
	} else {
		p.first = [4]byte{0, rapid.Byte().Draw(t, "service"), rapid.SampledFrom([]byte{0, 0x40, 0x80}).Draw(t, "fragment"), 0}
	}
	p.src, p.dst = b(n, "from"), b(n, "to")
	copy(p.ports[:], b(4, "ports"))
	if !p.udp {
		p.options = b(4*rapid.IntRange(0, 10).Draw(t, "options"), "option")
	}
	data := rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "data")
	p.data = make([]byte, rapid.IntRange(1, most).Draw(t, "size"))
	for i := range p.data {
		p.data[i] = data[i%16] + byte(i>>4)
	}
	return p
}

// apart splits as a reader does: begin bytes are where the first part shall be, and as much room is at the end of bufs.
func apart(t interface{ Fatalf(string, ...any) }, h Header, b []byte, begin int) (parts [][]byte) {
	return apartIn(t, Splitter{}, h, b, begin)
}

func apartIn(t interface{ Fatalf(string, ...any) }, s Splitter, h Header, b []byte, begin int) (parts [][]byte) {
	first := make([]byte, maxPacket)
	begin = min(begin, len(b))
	copy(first, b[:begin])
	n, err := s.Start(&h, first[:begin], len(b))
	if err != nil {
		if s.Len() != 0 {
			t.Fatalf("something is left after %v", err)
		}
		return nil
	}
	if n > begin {
		copy(first[begin:], b[begin:n])
	}
	s.Rest(b[n:])
	for to := first; s.Len() > 0; to = make([]byte, maxPacket) {
		want := s.Len()
		for i := range to[want:] {
			to[want+i] = 0xaa
		}
		if n := s.Next(to); n != want {
			t.Fatalf("%d bytes, said %d", n, want)
		}
		if want < len(to) && to[want] != 0xaa {
			t.Fatalf("written beyond the end")
		}
		parts = append(parts, to[:want])
	}
	return parts
}

func equal(a, b [][]byte) bool { return slices.EqualFunc(a, b, bytes.Equal) }

// TestSplit compares with what is written down from the parts' meaning.
func TestSplit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPacket(t, 20000)
		p.flags = rapid.Byte().Draw(t, "flags")
		p.reserved, p.urgent = rapid.ByteRange(0, 15).Draw(t, "reserved"), rapid.Uint16().Draw(t, "urgent")
		if rapid.IntRange(0, 3).Draw(t, "extended") == 0 {
			n := 8
			if !p.v6 {
				n = 4
			}
			p.extension = make([]byte, n*rapid.IntRange(1, 5).Draw(t, "extension"))
		}
		size := rapid.IntRange(1, 3000).Draw(t, "part")
		if len(p.data)/size > 300 {
			size = len(p.data)/300 + 1
		}
		ecn := !p.udp && rapid.Bool().Draw(t, "ecn")
		want := p.parts(size, ecn)
		h, b := p.large(size, ecn)
		h.Len = rapid.Uint16().Draw(t, "header length")
		var s Splitter
		if rapid.Bool().Draw(t, "smaller") {
			heads := len(b) - len(p.data)
			s.Most = rapid.IntRange(heads+100, heads+2000).Draw(t, "most")
			if !p.udp && (p.v6 || p.first[2]&0x40 != 0) {
				want = p.parts(min(size, s.Most-heads), ecn)
			}
		}
		got := apartIn(t, s, h, b, rapid.IntRange(200, 3000).Draw(t, "begin"))
		if !equal(got, want) {
			t.Fatalf("%d parts, want %d: first\n%x\nwant\n%x", len(got), len(want), got[:min(1, len(got))], want[0])
		}
	})
}

// merged is what a Merger makes of packets, split again, in the order in which it is written.
func merged(t interface{ Fatalf(string, ...any) }, packets [][]byte, kinds Kinds) (out [][]byte, runs int) {
	var m Merger
	seen := 0
	before := make([][]byte, len(packets))
	for i := range packets {
		before[i] = slices.Clone(packets[i])
	}
	rs := m.Runs(packets, kinds)
	for i := range rs {
		r := &rs[i]
		var run [][]byte
		for i, n := r.First, r.Count; n > 0; n-- {
			run = append(run, packets[i])
			i = m.Next(i)
		}
		seen += len(run)
		if r.Count == 1 {
			out = append(out, run...)
			continue
		}
		if r.Kind&kinds == 0 {
			t.Fatalf("kind %d merged", r.Kind)
		}
		b := make([]byte, MaxHeads)
		n, payload := m.Head(b, r)
		b = b[:n]
		for _, p := range run {
			b = append(b, p[payload:]...)
		}
		var h Header
		h.Decode(b)
		if len(b)-HeaderLen > maxPacket {
			t.Fatalf("%d bytes", len(b))
		}
		parts, err := split(h, b[HeaderLen:])
		if err != nil {
			t.Fatalf("%v", err)
		}
		h.Len = 0
		if again := apart(t, h, b[HeaderLen:], 1280); !equal(again, parts) {
			t.Fatalf("the Splitter makes something else of it")
		}
		for i := range parts {
			if v4 := parts[i][0]>>4 == 4; v4 && i > 0 && parts[i][6]&0x40 != 0 && len(run) == len(parts) {
				// The identification of what cannot be fragmented says nothing, and may be another one.
				copy(parts[i][4:6], run[i][4:6])
				copy(parts[i][10:12], run[i][10:12])
			}
		}
		if !equal(parts, run) {
			t.Fatalf("%d packets become %d others", len(run), len(parts))
		}
		out = append(out, parts...)
	}
	if seen != len(packets) {
		t.Fatalf("%d of %d packets", seen, len(packets))
	}
	if !equal(before, packets) {
		t.Fatalf("a packet was changed")
	}
	return out, len(rs)
}

// flowOf names what a packet belongs to, where it has ports.
func flowOf(p []byte) string {
	if len(p) >= 28 && p[0]>>4 == 4 && int(p[2])<<8+int(p[3]) == len(p) && (p[9] == 6 || p[9] == 17) && p[6]&0x3f == 0 && p[7] == 0 {
		ip := int(p[0]&0xf) * 4
		if p[9] == 6 && len(p) < ip+20 || len(p) < ip+8 {
			return ""
		}
		return string(p[9:10]) + string(p[12:20]) + string(p[ip:ip+4])
	}
	if len(p) >= 48 && p[0]>>4 == 6 && int(p[4])<<8+int(p[5])+40 == len(p) && (p[6] == 6 && len(p) >= 60 || p[6] == 17) {
		return string(p[6:7]) + string(p[8:44])
	}
	return ""
}

// kept holds that what comes out is what went in, in the order of each flow.
func kept(t interface{ Fatalf(string, ...any) }, in, out [][]byte) {
	flows := func(ps [][]byte) map[string][][]byte {
		m := make(map[string][][]byte)
		for _, p := range ps {
			p = slices.Clone(p)
			if f := flowOf(p); f != "" {
				m[f] = append(m[f], p)
			} else {
				m["other"] = append(m["other"], p)
			}
		}
		return m
	}
	a, b := flows(in), flows(out)
	if len(a) != len(b) {
		t.Fatalf("%d flows, were %d", len(b), len(a))
	}
	for f := range a {
		if !equal(a[f], b[f]) {
			t.Fatalf("a flow of %d packets is another one, of %d", len(a[f]), len(b[f]))
		}
	}
}

// TestMerge has flows in disorder merged, with all that must not be. What was merged is, split again, what it was.
func TestMerge(t *testing.T) {
	most := 0
	rapid.Check(t, func(t *rapid.T) {
		flows := make([]packet, rapid.IntRange(1, 4).Draw(t, "flows"))
		for i := range flows {
			flows[i] = drawPacket(t, 1)
		}
		size := rapid.SampledFrom([]int{1, 100, 1368, 8000}).Draw(t, "payload")
		var in [][]byte
		for range rapid.IntRange(1, 60).Draw(t, "packets") {
			f := &flows[rapid.IntRange(0, len(flows)-1).Draw(t, "flow")]
			f.data = bytes.Repeat([]byte{byte(len(in))}, size)
			q := *f
			switch rapid.IntRange(0, 30).Draw(t, "oddity") {
			case 0:
				q.flags |= 0x08
			case 1:
				q.flags |= rapid.Byte().Draw(t, "flags")
			case 2:
				q.badSum = true
			case 3:
				q.noSum = true
			case 4:
				q.data = q.data[:rapid.IntRange(0, size).Draw(t, "short")]
			case 5:
				q.seq ^= 1
			case 6:
				q.hops ^= 1
			case 7:
				q.first[1] ^= 3
			case 8:
				q.window++
			case 9:
				q.id += 7
			case 10:
				q.urgent++
			case 11:
				q.reserved = 1
			case 12:
				q.ack++
			case 13:
				if !q.v6 {
					q.first[2] |= 0x20
				} else {
					q.first[3] ^= 1
				}
			case 14:
				if len(q.options) > 0 {
					q.options = slices.Clone(q.options)
					q.options[0] ^= 1
				}
			case 15:
				f.flags ^= 0x40 // of all that follow
				q.flags |= 0x80
			case 16:
				if q.extension = make([]byte, 8); !q.v6 {
					q.extension = q.extension[:4]
				}
			}
			b := q.bytes()
			if rapid.IntRange(0, 50).Draw(t, "cut") == 0 {
				b = b[:rapid.IntRange(0, len(b)).Draw(t, "to")]
			}
			in = append(in, b)
			f.seq += uint32(len(q.data))
			f.id++
		}
		kinds := KindsTCP | KindsUDP
		if rapid.IntRange(0, 4).Draw(t, "some kinds") == 0 {
			kinds = Kinds(rapid.IntRange(0, 15).Draw(t, "kinds"))
		}
		out, runs := merged(t, in, kinds)
		// Fragments and what has no ports are written where they were.
		kept(t, in, out)
		most = max(most, len(in)-runs)
	})
	if most < 10 {
		t.Errorf("at most %d packets were merged into others", most)
	}
}

// TestMergeAll has each kind of flow, without any oddity, make as few large packets as can be.
func TestMergeAll(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, udp := range []bool{false, true} {
			p := packet{v6: v6, udp: udp, flags: 0x10, first: [4]byte{0x60, 0, 0x40, 0}, hops: 64, src: make([]byte, 4), dst: make([]byte, 4), data: make([]byte, 128*1300)}
			if v6 {
				p.src, p.dst = make([]byte, 16), make([]byte, 16)
			}
			parts := p.parts(1300, false)
			want := 3 // 128 packets by 49, 48 where the headers are larger
			_, runs := merged(t, parts, KindsTCP|KindsUDP)
			if runs != want {
				t.Errorf("IPv6 %t, UDP %t: %d packets become %d, want %d", v6, udp, len(parts), runs, want)
			}
		}
	}
}

// TestSum compares sums of all lengths, and at every value of the sum so far that may lose a carry.
func TestSum(t *testing.T) {
	b := make([]byte, 300)
	for _, fill := range []byte{0, 1, 0x7f, 0xff} {
		for i := range b {
			b[i] = fill + byte(i)*(fill&1)
			if fill == 0xff {
				b[i] = 0xff
			}
		}
		for n := range len(b) {
			want := ^oneSum(b[:n])
			to := make([]byte, n)
			if got := fold(sum(b[:n], 0)); got != want && (got%0xffff != 0 || want%0xffff != 0) {
				t.Errorf("%d bytes of %#x: %#x, want %#x", n, fill, got, want)
			}
			for _, acc := range []uint64{0, 0xffff, 1<<64 - 1, 1<<64 - 2, 1 << 63} {
				if sum(b[:n], acc) != copySum(to, b[:n], acc) || !bytes.Equal(to, b[:n]) {
					t.Errorf("%d bytes of %#x onto %#x: copied otherwise", n, fill, acc)
				}
			}
			if fill == 0xff && n > 0 && fold(sum(b[:n&^1], 1<<64-1)) != 0xffff {
				t.Errorf("%d bytes: a carry is lost", n)
			}
		}
	}
}

// TestComplete completes the checksum of packets that are sent as they are.
func TestComplete(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPacket(t, 2000)
		h, b := p.large(1, false)
		h.Type = None
		if err := h.Complete(b); err != nil || !bytes.Equal(b, p.bytes()) {
			t.Fatalf("%x, want %x; %v", b, p.bytes(), err)
		}
		h.Start = uint16(len(b))
		if h.Complete(b) == nil {
			t.Fatalf("a checksum beyond the end")
		}
	})
}

// FuzzSplit has anything taken apart: what comes out is well-formed, and carries what was there.
func FuzzSplit(f *testing.F) {
	p := packet{flags: 0x18, first: [4]byte{0x60}, src: make([]byte, 4), dst: make([]byte, 4), data: []byte("some bytes that are split")}
	for range 2 {
		h, b := p.large(7, false)
		f.Add(h.Flags, h.Type, h.Size, h.Start, b, 1280)
		p.v6, p.src, p.dst = true, make([]byte, 16), make([]byte, 16)
		p.udp = true
	}
	f.Fuzz(func(t *testing.T, flags, typ uint8, size, start uint16, b []byte, begin int) {
		if len(b) > maxPacket || size > 0 && len(b)/int(size) > 1000 {
			return
		}
		h := Header{Flags: flags, Type: typ, Size: size, Start: start}
		var data []byte
		for _, p := range apart(t, h, b, max(0, begin)) {
			if size == 0 || len(p) > len(b) {
				t.Fatalf("%d bytes of %d", len(p), len(b))
			}
			head := len(p) - min(int(size), len(b)-len(data))
			if head < 0 {
				t.Fatalf("%d bytes", len(p))
			}
			n := len(p)
			if p[0]>>4 == 4 {
				head = int(p[0]&0xf) * 4
			} else if head = 40; flags&1 != 0 {
				head = int(start)
			}
			if typ&^0x80 == 5 {
				head += 8
			} else {
				head += int(p[head+12]>>4) * 4
			}
			data = append(data, p[head:n]...)
			if len(b) < head || !bytes.HasPrefix(b[head:], data) {
				t.Fatalf("not the bytes there were")
			}
		}
		c := slices.Clone(b)
		_ = h.Complete(c)
	})
}

// FuzzMerge has anything merged, cut into packets at will.
func FuzzMerge(f *testing.F) {
	for _, v6 := range []bool{false, true} {
		for _, udp := range []bool{false, true} {
			p := packet{v6: v6, udp: udp, flags: 0x18, first: [4]byte{0x60, 0, 0x40}, src: make([]byte, 4), dst: make([]byte, 4), data: make([]byte, 30)}
			if v6 {
				p.src, p.dst = make([]byte, 16), make([]byte, 16)
			}
			parts := p.parts(10, false)
			f.Add(slices.Concat(parts...), uint16(len(parts[0])))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, size uint16) {
		if size == 0 || len(b)/int(size) > 600 {
			return
		}
		out, _ := merged(t, slices.Collect(slices.Chunk(b, int(size))), KindsTCP|KindsUDP)
		_ = out
	})
}

// TestNoAllocations holds that a batch takes no memory.
func TestNoAllocations(t *testing.T) {
	p := packet{flags: 0x10, first: [4]byte{0, 0, 0x40}, src: make([]byte, 4), dst: make([]byte, 4), data: make([]byte, 60000)}
	parts := p.parts(1300, false)
	h, b := p.large(1300, false)
	var m Merger
	var s Splitter
	head, to := make([]byte, MaxHeads), make([]byte, maxPacket)
	if n := testing.AllocsPerRun(100, func() {
		rs := m.Runs(parts, KindsTCP)
		m.Head(head, &rs[0])
		copy(to, b[:1340])
		n, _ := s.Start(&h, to[:1340], len(b))
		for s.Rest(b[n:]); s.Len() > 0; {
			s.Next(to)
		}
	}); n > 0 && !raceEnabled {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkSplit(b *testing.B) {
	p := packet{flags: 0x10, first: [4]byte{0, 0, 0x40}, src: make([]byte, 4), dst: make([]byte, 4), data: make([]byte, 64000)}
	h, large := p.large(1380, false)
	var s Splitter
	to := make([][]byte, 64)
	for i := range to {
		to[i] = make([]byte, maxPacket)
	}
	b.SetBytes(int64(len(large)))
	for b.Loop() {
		n, _ := s.Start(&h, large[:1420], len(large))
		s.Rest(large[n:])
		for i := 0; s.Len() > 0; i++ {
			s.Next(to[i])
		}
	}
}

func BenchmarkMerge(b *testing.B) {
	p := packet{flags: 0x10, first: [4]byte{0, 0, 0x40}, src: make([]byte, 4), dst: make([]byte, 4), data: make([]byte, 128*1380)}
	parts := p.parts(1380, false)
	var m Merger
	head := make([]byte, MaxHeads)
	b.SetBytes(int64(len(p.data)))
	for b.Loop() {
		rs := m.Runs(parts, KindsTCP)
		for i := range rs {
			if rs[i].Count > 1 {
				m.Head(head, &rs[i])
			}
		}
	}
}
