package offload

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tb is what *testing.T and *rapid.T have in common.
type tb interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// cut returns the segments of a packet, which is handed over in pieces as rnd has it.
func cut(t tb, s *Segmenter, b []byte, rnd *rand.Rand, mss, mtu int) (out [][]byte, ok bool) {
	t.Helper()
	var pieces [][]byte
	rest := b
	if n := min(len(rest), maxHeader); n > 0 { // of which there may be more in the first piece than headers
		if p, ok := read(b); ok {
			n = p.headerSize() + rnd.IntN(len(p.payload)+1)
		}
		pieces, rest = append(pieces, rest[:n]), rest[n:]
	}
	for len(rest) > 0 {
		n := 1 + rnd.IntN(len(rest))
		if rnd.IntN(4) == 0 {
			n = min(len(rest), 1+rnd.IntN(8))
		}
		pieces, rest = append(pieces, rest[:n]), rest[n:]
		if rnd.IntN(4) == 0 {
			pieces = append(pieces, nil)
		}
	}
	if !s.Start(pieces, mss, mtu) {
		if s.More() {
			t.Fatal("there is more of what was not begun")
		}
		return nil, false
	}
	for s.More() {
		to := make([]byte, min(mtu, len(b))+9)
		n := s.Next(to)
		if n > mtu {
			t.Fatalf("a segment has %d bytes, the MTU is %d", n, mtu)
		}
		if slices.Max(to[n:]) != 0 {
			t.Fatal("something was written behind the segment")
		}
		out = append(out, to[:n])
		if len(out) > MaxPacket {
			t.Fatal("it does not end")
		}
	}
	return out, true
}

// checkCut compares with slowCut.
func checkCut(t tb, b []byte, seed uint64, mss, mtu int) [][]byte {
	t.Helper()
	rnd := rand.New(rand.NewPCG(seed, 0))
	var s Segmenter
	before := bytes.Clone(b)
	out, ok := cut(t, &s, b, rnd, mss, mtu)
	if !bytes.Equal(before, b) {
		t.Fatal("the packet was changed")
	}
	p, whole := read(b)
	var want []packet
	if whole && len(b) == p.headerSize()+len(p.payload) {
		want, whole = slowCut(p, mss, mtu)
	} else {
		whole = false
	}
	if ok != whole || len(out) != len(want) {
		t.Fatalf("cutting %+v to %d and %d: %v, %d segments; want %v, %d", p, mss, mtu, ok, len(out), whole, len(want))
	}
	for i := range out {
		if got, ok := read(out[i]); !ok || got != want[i] || len(out[i]) != got.headerSize()+len(got.payload) {
			t.Fatalf("segment %d is\n%+v\nwant\n%+v", i, got, want[i])
		}
	}
	return out
}

// merge returns what the Coalescer makes of a batch, as whole packets.
func merge(c *Coalescer, batch [][]byte) (out [][]byte, verified []bool) {
	for _, b := range batch {
		c.Add(b)
	}
	ps := c.Packets()
	for i := range ps {
		b := bytes.Clone(ps[i].Header())
		n := 0
		for _, p := range ps[i].Pieces {
			b, n = append(b, p...), n+len(p)
		}
		if n != ps[i].Size {
			panic("Size is not the sum of Pieces")
		}
		out, verified = append(out, b), append(verified, ps[i].Verified)
	}
	c.Reset()
	return out, verified
}

// checkMerge holds what comes of a batch against it: each packet of the batch is in one of the result, in
// the order of its connection, and those that were merged may have been. It returns the result.
func checkMerge(t tb, c *Coalescer, batch [][]byte) [][]byte {
	t.Helper()
	return check(t, c, batch, true)
}

// checkOrder is checkMerge where not everything that may be merged is to be.
func checkOrder(t tb, c *Coalescer, batch [][]byte) [][]byte {
	t.Helper()
	return check(t, c, batch, false)
}

func check(t tb, c *Coalescer, batch [][]byte, all bool) [][]byte {
	t.Helper()
	var before [][]byte
	for _, b := range batch {
		before = append(before, bytes.Clone(b))
	}
	out, verified := merge(c, batch)
	for i := range batch {
		if !bytes.Equal(before[i], batch[i]) {
			t.Fatal("a packet was changed")
		}
	}
	// By connection; what belongs to none by its bytes.
	flow := func(b []byte) string {
		p, ok := read(b)
		if !ok || p.ipOptions != "" {
			return string(b)
		}
		return p.src + p.dst + string(binary.BigEndian.AppendUint16(nil, p.srcPort)) + string(binary.BigEndian.AppendUint16(nil, p.dstPort))
	}
	in := make(map[string][][]byte)
	for _, b := range batch {
		in[flow(b)] = append(in[flow(b)], b)
	}
	could := make(map[string][]packet) // the packets that went into the newest of each connection
	for i, b := range out {
		f := flow(b)
		big, ok := read(b)
		if !ok || big.ipOptions != "" {
			if len(in[f]) == 0 || verified[i] {
				t.Fatalf("out of nowhere, or verified %v: %x", verified[i], b)
			}
			in[f] = in[f][1:]
			continue
		}
		if verified[i] != (big.ipSumRight && big.tcpSumRight) {
			t.Fatalf("verified is %v of %+v", verified[i], big)
		}
		var parts []packet
		for n := 0; len(parts) == 0 || n < len(big.payload); {
			if len(in[f]) == 0 {
				t.Fatalf("more came out than went in: %+v", big)
			}
			p, _ := read(in[f][0])
			in[f] = in[f][1:]
			parts, n = append(parts, p), n+len(p.payload)
		}
		if err := explain(big, parts); err != nil {
			t.Fatal(err)
		}
		if old := could[f]; all && old != nil && len(batch) <= maxBatch && mayFollow(old, parts[0]) {
			t.Fatalf("%+v was not merged with what it follows", parts[0])
		}
		could[f] = parts
	}
	for _, left := range in {
		if len(left) > 0 {
			t.Fatalf("%d packets were lost, %x", len(left), left[0])
		}
	}
	return out
}

// drawPacket draws a TCP packet of a connection between two of few hosts.
func drawPacket(t *rapid.T) packet {
	p := packet{
		version: rapid.SampledFrom([]int{4, 6}).Draw(t, "version"),
		tos:     rapid.SampledFrom([]byte{0, 1, 2, 3, 0xb8}).Draw(t, "tos"),
		ttl:     rapid.SampledFrom([]byte{64, 63}).Draw(t, "ttl"),
		srcPort: rapid.Uint16Range(80, 81).Draw(t, "from"), dstPort: 443,
		seq:        rapid.SampledFrom([]uint32{1, 1<<32 - 5000}).Draw(t, "seq"),
		ack:        rapid.Uint32().Draw(t, "ack"),
		flags:      rapid.SampledFrom([]byte{flagACK, flagACK, flagACK, flagACK, flagACK | flagPSH, flagACK | flagPSH, flagACK | flagFIN, flagACK | flagCWR | flagPSH, flagACK | 1<<6, flagACK | flagURG, flagSYN, flagRST}).Draw(t, "flags"),
		window:     rapid.Uint16().Draw(t, "window"),
		tcpOptions: strings.Repeat(string(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "option")), rapid.IntRange(0, 10).Draw(t, "options")),
		ipSumRight: true, tcpSumRight: true,
	}
	n := 4
	if p.version == 6 {
		n, p.flow = 16, rapid.Uint32Range(0, 1<<20-1).Draw(t, "flow label")
	} else {
		p.id = rapid.SampledFrom([]uint16{0, 7, 65534}).Draw(t, "id")
		p.frag = rapid.SampledFrom([]uint16{0, 0, 0x4000, 0x4000, 0x4000, 0x8000, 0xc000, 0x2000, 1}).Draw(t, "frag")
		p.ipOptions = strings.Repeat("\x01\x01\x01\x00", rapid.SampledFrom([]int{0, 0, 0, 0, 1, 10}).Draw(t, "IP options"))
	}
	p.src, p.dst = strings.Repeat("\x0a", n), strings.Repeat("\x0b", n)
	size := rapid.OneOf(rapid.IntRange(0, 3000), rapid.IntRange(0, MaxPacket-p.headerSize())).Draw(t, "size")
	b := make([]byte, size)
	rand.NewChaCha8([32]byte{rapid.Byte().Draw(t, "payload")}).Read(b)
	p.payload = string(b)
	return p
}

// TestCut compares packets of any kind with the oracle, and holds that merging the segments of one gives it
// back.
func TestCut(t *testing.T) {
	var c Coalescer
	rapid.Check(t, func(t *rapid.T) {
		p := drawPacket(t)
		mtu := rapid.OneOf(rapid.IntRange(1280, 1500), rapid.IntRange(1, MaxPacket)).Draw(t, "mtu")
		mss := rapid.OneOf(rapid.Just(MaxPacket), rapid.IntRange(0, 2*mtu)).Draw(t, "mss")
		if mss < 20 || mtu < 120 {
			p.payload = p.payload[:min(len(p.payload), 2000)]
		}
		p.tcpSumRight = rapid.Bool().Draw(t, "summed up")
		segments := checkCut(t, p.write(), rapid.Uint64().Draw(t, "pieces"), mss, mtu)
		if len(segments) == 0 || len(segments) > maxBatch || p.flags&^flagPSH != flagACK || p.ipOptions != "" {
			return
		}
		p.tcpSumRight = true
		if out := checkMerge(t, &c, segments); len(out) != 1 || !bytes.Equal(out[0], p.write()) {
			got, _ := read(out[0])
			t.Fatalf("cut and merged, it is %d packets, the first\n%+v\nwant\n%+v", len(out), got, p)
		}
	})
}

// TestLimit has the MTU become smaller while a packet is cut.
func TestLimit(t *testing.T) {
	p := packet{version: 4, ttl: 64, src: "\x0a\x00\x00\x01", dst: "\x0a\x00\x00\x02", flags: flagACK | flagPSH, payload: strings.Repeat("abcdefg", 1000), ipSumRight: true, tcpSumRight: true}
	var s Segmenter
	if !s.Start([][]byte{p.write()}, 1460, 1500) {
		t.Fatal("it cannot be cut")
	}
	got, b := "", make([]byte, 1500)
	for _, mtu := range []int{1500, 1300, 1280, 1400, 1280, 1280} {
		s.Limit(mtu)
		n := s.Next(b)
		q, ok := read(b[:n])
		if !ok || n > mtu || q.seq != uint32(len(got)) || !q.ipSumRight || !q.tcpSumRight || (q.flags&flagPSH == 0) != s.More() {
			t.Fatalf("with an MTU of %d: %d bytes, %+v", mtu, n, q)
		}
		got += q.payload
	}
	if s.More() || got != p.payload {
		t.Errorf("%d bytes came of %d, more: %v", len(got), len(p.payload), s.More())
	}
}

// TestMerge merges batches of segments of a few connections, with something wrong here and there, and holds
// that cutting what was merged gives them back.
func TestMerge(t *testing.T) {
	var c Coalescer
	rapid.Check(t, func(t *rapid.T) {
		var queues [][][]byte
		for range rapid.IntRange(1, 4).Draw(t, "connections") {
			p := drawPacket(t)
			p.payload = p.payload[:min(len(p.payload), 9000)]
			mss := rapid.IntRange(100, 1500).Draw(t, "mss")
			segments, ok := slowCut(p, mss, MaxPacket)
			if !ok {
				segments = []packet{p}
			}
			if rapid.IntRange(0, 3).Draw(t, "count") == 0 {
				for i := range segments {
					segments[i].id = p.id + uint16(i)
				}
			}
			for range rapid.IntRange(0, 3).Draw(t, "changes") {
				i := rapid.IntRange(0, len(segments)-1).Draw(t, "segment")
				s := &segments[i]
				switch rapid.IntRange(0, 17).Draw(t, "change") {
				case 0:
					s.tos ^= 3 // congestion experienced
				case 1:
					s.ttl--
				case 2:
					s.tcpSumRight = false
				case 3:
					s.ipSumRight = s.version == 6
				case 4:
					s.flags ^= flagPSH
				case 5:
					s.flags ^= 1 << rapid.IntRange(0, 7).Draw(t, "flag")
				case 6:
					s.ack++
				case 7:
					s.window++
				case 8:
					s.seq++
				case 9:
					if s.tcpOptions != "" {
						s.tcpOptions = "\x01" + s.tcpOptions[1:]
					}
				case 10:
					s.payload = s.payload[:len(s.payload)/2]
				case 11:
					segments = slices.Delete(segments, i, i+1)
				case 12:
					segments = slices.Insert(segments, i, *s)
				case 13:
					s.id += 3
				case 14:
					s.reserved ^= 1
				case 15, 16:
					n := len(s.payload) / 2
					s.payload = s.payload[n:]
					for j := range segments[i+1:] {
						segments[i+1+j].seq -= uint32(n)
					}
				case 17:
					for j := range segments {
						segments[j].id = p.id
					}
				}
				if len(segments) == 0 {
					break
				}
			}
			var q [][]byte
			for _, s := range segments {
				q = append(q, s.write())
			}
			queues = append(queues, q)
		}
		var batch [][]byte
		for len(queues) > 0 {
			i := rapid.IntRange(0, len(queues)-1).Draw(t, "which")
			n := min(len(queues[i]), rapid.IntRange(1, 8).Draw(t, "how many"))
			batch = append(batch, queues[i][:n]...)
			if queues[i] = queues[i][n:]; len(queues[i]) == 0 {
				queues = slices.Delete(queues, i, i+1)
			}
		}
		checkMerge(t, &c, batch)
	})
}

// TestMergeFew says of three segments in sequence, one of them changed, how many packets they become.
func TestMergeFew(t *testing.T) {
	for name, test := range map[string]struct {
		change func(s []packet)
		want   int
	}{
		"nothing":              {func([]packet) {}, 1},
		"constant ID, DF":      {func(s []packet) { s[1].id, s[2].id = s[0].id, s[0].id }, 1},
		"constant ID":          {func(s []packet) { s[0].frag, s[1].frag, s[2].frag, s[1].id, s[2].id = 0, 0, 0, s[0].id, s[0].id }, 3},
		"counted ID":           {func(s []packet) { s[0].frag, s[1].frag, s[2].frag = 0, 0, 0 }, 1},
		"ID that jumps":        {func(s []packet) { s[2].id++ }, 2},
		"ID that stops":        {func(s []packet) { s[2].id = s[1].id }, 2},
		"larger ones":          {func(s []packet) { s[0].payload, s[1].seq, s[2].seq = "x", s[1].seq-99, s[2].seq-99 }, 2},
		"a smaller one":        {func(s []packet) { s[1].payload, s[2].seq = "x", s[2].seq-99 }, 2},
		"a smaller one at end": {func(s []packet) { s[2].payload = "x" }, 1},
		"PSH":                  {func(s []packet) { s[1].flags |= flagPSH }, 2},
		"PSH first":            {func(s []packet) { s[0].flags |= flagPSH }, 2},
		"FIN":                  {func(s []packet) { s[2].flags |= flagFIN }, 2},
		"congestion":           {func(s []packet) { s[1].tos |= 3 }, 3},
		"CWR":                  {func(s []packet) { s[0].flags |= flagCWR }, 2},
		"pure ACK between":     {func(s []packet) { s[1].payload, s[2].seq = "", s[1].seq }, 3},
		"a hole":               {func(s []packet) { s[1].srcPort++ }, 3},
	} {
		p := packet{version: 4, ttl: 64, frag: 0x4000, src: "\x0a\x00\x00\x01", dst: "\x0a\x00\x00\x02", flags: flagACK,
			payload: strings.Repeat("abcd", 25), ipSumRight: true, tcpSumRight: true}
		var s []packet
		for range 3 {
			s = append(s, p)
			p.seq += uint32(len(p.payload))
			p.id++
		}
		test.change(s)
		if got := len(checkMerge(t, new(Coalescer), [][]byte{s[0].write(), s[1].write(), s[2].write()})); got != test.want {
			t.Errorf("%s: three became %d, want %d", name, got, test.want)
		}
	}
}

// TestHoles has a segment lost, and merges nothing of its connection until the acknowledgements say that it
// came.
func TestHoles(t *testing.T) {
	for _, version := range []int{4, 6} {
		n := 4
		if version == 6 {
			n = 16
		}
		p := packet{version: version, ttl: 64, src: strings.Repeat("\x0a", n), dst: strings.Repeat("\x0b", n), srcPort: 80, dstPort: 1000,
			flags: flagACK, payload: "abcd", tcpOptions: "\x01\x01\x08\x0a12345678", ipSumRight: true, tcpSumRight: true}
		if version == 4 {
			p.frag = 0x4000
		}
		c := Coalescer{Holes: new(Holes)}
		// came returns how many packets the next 4 become.
		came := func() int {
			var batch [][]byte
			for range 4 {
				batch = append(batch, p.write())
				p.seq += 4
			}
			return len(checkOrder(t, &c, batch))
		}
		answer := func(options string) {
			a := p
			a.src, a.dst, a.srcPort, a.dstPort, a.payload, a.tcpOptions = p.dst, p.src, p.dstPort, p.srcPort, "", options
			b := a.write()
			ip := a.headerSize() - 20 - len(options)
			c.Holes.Sent(b[:ip], b[ip:])
		}
		const stamp, sack = "\x01\x01\x08\x0a12345678", "\x01\x01\x05\x0a12345678"
		steps := []struct {
			what string
			do   func()
			want int
		}{
			{"all came", func() { answer(stamp) }, 1},
			{"a hole between batches, acknowledged", func() { p.seq += 4; answer(stamp + sack) }, 4},
			{"still", func() { answer(stamp + sack); p.seq += 4 }, 4},
			{"almost filled", func() {
				for range quiet - 1 {
					answer(stamp)
				}
			}, 4},
			{"filled", func() { answer(stamp) }, 1},
			{"an option without its blocks", func() { answer("\x05\x02\x01\x01") }, 4},
			{"nonsense", func() {
				c.Holes.Sent(nil, nil)
				for range quiet / 2 {
					answer("\x09\xff\x01\x05")
					answer("")
				}
			}, 1},
		}
		for _, s := range steps {
			s.do()
			if got := came(); got != s.want {
				t.Errorf("IPv%d, %s: 4 packets became %d, want %d", version, s.what, got, s.want)
			}
		}
		a, b := p.write(), p
		b.seq += 8
		batch := [][]byte{a, b.write()}
		b.seq += 4
		batch = append(batch, b.write())
		if got := len(checkOrder(t, &c, batch)); got != 3 {
			t.Errorf("IPv%d, a hole in a batch: 3 packets became %d, want 3", version, got)
		}
		p.seq += 8
		if got := came(); got != 4 {
			t.Errorf("IPv%d, after a hole in a batch: 4 packets became %d, want 4", version, got)
		}
	}
}

// TestMergeMany merges more packets than a batch is meant to have.
func TestMergeMany(t *testing.T) {
	p := packet{version: 4, ttl: 64, frag: 0x4000, src: "\x0a\x00\x00\x01", dst: "\x0a\x00\x00\x02", flags: flagACK, payload: "x", ipSumRight: true, tcpSumRight: true}
	var batch [][]byte
	for i := range 1000 {
		p.seq = uint32(i / 4)
		p.srcPort = uint16(i % 4)
		batch = append(batch, p.write())
		p.seq, p.srcPort = 0, uint16(1000+i)
		batch = append(batch, p.write())
	}
	var c Coalescer
	for range 2 {
		checkMerge(t, &c, batch)
	}

	batch = nil
	for i := range 256 {
		p.srcPort = uint16(i)
		batch = append(batch, p.write())
	}
	p.seq, p.srcPort = 500, 0
	batch = append(batch, p.write())
	p.seq = 1
	batch = append(batch, p.write())
	checkMerge(t, &c, batch)
}

// TestMergeFull fills a packet to the brim.
func TestMergeFull(t *testing.T) {
	for _, version := range []int{4, 6} {
		p := packet{version: version, ttl: 64, flags: flagACK, ipSumRight: true, tcpSumRight: true}
		n := 4
		if version == 6 {
			n = 16
		}
		p.src, p.dst = strings.Repeat("\x0a", n), strings.Repeat("\x0b", n)
		p.frag = uint16(4-version) & 0x4000
		p.payload = strings.Repeat("0123456", 200)
		var batch [][]byte
		for i := range 100 {
			p.id = uint16(i)
			batch = append(batch, p.write())
			p.seq += uint32(len(p.payload))
		}
		p.id, p.frag = 0, 0
		var c Coalescer
		out := checkMerge(t, &c, batch)
		if want := 3; len(out) != want {
			t.Errorf("IPv%d: 100 packets became %d, want %d", version, len(out), want)
		}
	}
}

// FuzzCut cuts whatever it is given.
func FuzzCut(f *testing.F) {
	p := packet{version: 4, ttl: 64, frag: 0x4000, src: "\x0a\x00\x00\x01", dst: "\x0a\x00\x00\x02", srcPort: 1, dstPort: 2, seq: 1<<32 - 2, flags: flagACK | flagPSH | flagCWR, tcpOptions: "\x01\x01\x08\x0a12345678", payload: strings.Repeat("abc", 1000), ipSumRight: true}
	f.Add(p.write(), uint64(1), 1340, 1420)
	p.frag, p.flags = 0, flagACK|flagFIN
	f.Add(p.write(), uint64(2), 9, 1280)
	p.version, p.src, p.dst, p.flow, p.tos = 6, strings.Repeat("\xfd", 16), strings.Repeat("\xfc", 16), 77, 2
	f.Add(p.write(), uint64(3), 65535, 1280)
	f.Fuzz(func(t *testing.T, b []byte, seed uint64, mss, mtu int) {
		mss, mtu = max(0, min(mss, MaxPacket)), max(1, min(mtu, MaxPacket))
		checkCut(t, b[:min(len(b), 4096)], seed, mss, mtu)
	})
}

// FuzzMerge merges a batch that is written as sizes with packets, in which a packet may be said to be one
// before with some bytes changed and the checksums made right.
func FuzzMerge(f *testing.F) {
	for _, version := range []int{4, 6} {
		n := 4
		if version == 6 {
			n = 16
		}
		p := packet{version: version, ttl: 64, src: strings.Repeat("\x0a", n), dst: strings.Repeat("\x0b", n), flags: flagACK, payload: "0123456789", ipSumRight: true, tcpSumRight: true}
		var corpus []byte
		for i := range 4 {
			b := p.write()
			corpus = append(corpus, byte(len(b)), byte(i))
			corpus = append(corpus, b...)
			p.seq += 10
			p.id++
		}
		f.Add(corpus)
		f.Add(append(corpus, 0, 13, 8, 0, 4, 7, 0, 25, 1))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		b = b[:min(len(b), 4096)]
		var batch [][]byte
		for len(b) >= 2 {
			n, how := int(b[0]), b[1]
			b = b[2:]
			if n == 0 && len(batch) > 0 && len(b) >= 2 { // the one before, moved on by its payload
				p, ok := read(batch[len(batch)-1])
				if !ok {
					continue
				}
				p.seq += uint32(len(p.payload))
				p.id++
				p.ipSumRight, p.tcpSumRight = true, true
				next := p.write()
				if at := int(b[0]); at < len(next) && how&1 != 0 {
					next[at] ^= b[1]
					if q, ok := read(next); ok && how&2 != 0 {
						q.ipSumRight, q.tcpSumRight = true, true
						next = q.write()
					}
				}
				b = b[2:]
				batch = append(batch, next)
				continue
			}
			n = min(n, len(b))
			batch = append(batch, b[:n:n])
			b = b[n:]
		}
		checkMerge(t, new(Coalescer), batch)
	})
}
