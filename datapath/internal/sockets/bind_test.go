package sockets

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"pgregory.net/rapid"
)

// binds are what has to hold to the contract of conn.Bind, wireguard-go's own among them.
var binds = map[string]func() conn.Bind{
	"ours":     func() conn.Bind { return New(Options{}) },
	"impaired": func() conn.Bind { return Impair(New(Options{}), Impairment{}) },
	"std":      conn.NewStdNetBind,
}

func each(t *testing.T, f func(t *testing.T, open func() conn.Bind)) {
	for name, open := range binds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, open)
		})
	}
}

// got is a packet that arrived.
type got struct {
	data []byte
	from conn.Endpoint
}

// ear receives from a Bind until it is closed.
type ear struct {
	conn.Bind
	t     testing.TB
	port  uint16
	heard chan got
	fns   sync.WaitGroup
}

func listen(t testing.TB, b conn.Bind, port uint16) *ear {
	t.Helper()
	e := &ear{Bind: b, t: t, heard: make(chan got, 1<<14)}
	fns, port, err := b.Open(port)
	if err != nil {
		t.Fatal(err)
	}
	if e.port = port; port == 0 || len(fns) == 0 {
		t.Fatalf("port %d and %d receive functions", port, len(fns))
	}
	for _, fn := range fns {
		e.fns.Go(func() {
			n := b.BatchSize()
			packets, sizes, from := make([][]byte, n), make([]int, n), make([]conn.Endpoint, n)
			for i := range packets {
				packets[i] = make([]byte, 1<<16)
			}
			for {
				n, err := fn(packets, sizes, from)
				if err != nil {
					if !errors.Is(err, net.ErrClosed) {
						t.Errorf("%s: %v", fn.PrettyName(), err)
					}
					return
				}
				for i := range n {
					e.heard <- got{bytes.Clone(packets[i][:sizes[i]]), from[i]}
				}
			}
		})
	}
	t.Cleanup(e.end)
	return e
}

func (e *ear) end() {
	e.Close()
	e.fns.Wait()
}

func (e *ear) at(addr string) string {
	return netip.AddrPortFrom(netip.MustParseAddr(addr), e.port).String()
}

// to returns an endpoint of e's, for packets to another.
func (e *ear) to(o *ear, addr string) conn.Endpoint {
	e.t.Helper()
	ep, err := e.ParseEndpoint(o.at(addr))
	if err != nil {
		e.t.Fatal(err)
	}
	return ep
}

func (e *ear) next() got {
	e.t.Helper()
	for {
		select {
		case g := <-e.heard:
			if len(g.data) == 0 {
				continue // wireguard-go passes over these too
			}
			return g
		case <-time.After(10 * time.Second):
			e.t.Fatal("a packet did not arrive")
		}
	}
}

func noIPv6(t testing.TB) bool {
	t.Helper()
	c, err := net.ListenPacket("udp6", "[::1]:0")
	if err == nil {
		c.Close()
	}
	return err != nil
}

func TestOpen(t *testing.T) {
	each(t, func(t *testing.T, open func() conn.Bind) {
		b := listen(t, open(), 0)
		if _, _, err := b.Open(0); !errors.Is(err, conn.ErrBindAlreadyOpen) {
			t.Errorf("opened twice: %v", err)
		}
		if _, _, err := open().Open(b.port); !InUse(err) {
			t.Errorf("a port that is taken: %v", err)
		}
		for range 3 {
			port := b.port
			b.end()
			b.end() // which is harmless
			b = listen(t, b.Bind, port)
			if b.port != port {
				t.Errorf("port %d, asked for %d", b.port, port)
			}
		}
		ep := b.to(b, "127.0.0.1")
		b.end()
		if err := b.Send([][]byte{{1}}, ep); !errors.Is(err, net.ErrClosed) && err == nil {
			t.Errorf("sent after it was closed: %v", err)
		}
		if err := b.SetMark(0); err != nil {
			t.Errorf("a mark without sockets: %v", err)
		}
	})
}

func TestParseEndpoint(t *testing.T) {
	each(t, func(t *testing.T, open func() conn.Bind) {
		b := open()
		for _, s := range []string{"", "192.0.2.1", "[2001:db8::1]", "name.example:9", "192.0.2.1:70000"} {
			if _, err := b.ParseEndpoint(s); err == nil {
				t.Errorf("%q is an endpoint", s)
			}
		}
		for _, s := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} {
			e, err := b.ParseEndpoint(s)
			if err != nil {
				t.Fatal(err)
			}
			want := netip.MustParseAddrPort(s)
			if raw, _ := want.MarshalBinary(); e.DstToString() != s || e.DstIP() != want.Addr() || !bytes.Equal(e.DstToBytes(), raw) || e.SrcIP().IsValid() {
				t.Errorf("%s is %s, from %q", s, e.DstToString(), e.SrcToString())
			}
		}
	})
	if e, err := New(Options{}).ParseEndpoint("[::ffff:192.0.2.1]:9"); err != nil || e.DstToString() != "192.0.2.1:9" {
		t.Errorf("an IPv4 address in IPv6 is %v, %v", e, err)
	}
	b := New(Options{})
	if err := b.Send([][]byte{{1}}, &conn.StdNetEndpoint{}); !errors.Is(err, conn.ErrWrongEndpointType) {
		t.Errorf("another's endpoint: %v", err)
	}
}

// Packets of all sizes arrive as they are and in their order, however they are sent together.
func TestArrives(t *testing.T) {
	each(t, func(t *testing.T, open func() conn.Bind) {
		a, b := listen(t, open(), 0), listen(t, open(), 0)
		for _, addr := range []string{"127.0.0.1", "::1"} {
			if addr == "::1" && noIPv6(t) {
				continue
			}
			to := a.to(b, addr)
			rapid.Check(t, func(t *rapid.T) {
				var packets [][]byte
				sizes := rapid.SampledFrom([]int{1, 2, 32, 148, 1280, 1423, 1424, 1452, 1460, 9000, 32768, 65000, 65487})
				for len(packets) < rapid.IntRange(1, a.BatchSize()).Draw(t, "packets") {
					size := sizes.Draw(t, "size")
					for range rapid.IntRange(1, 100).Draw(t, "of that size") {
						if len(packets) < a.BatchSize() && len(packets)*size < 3<<19 {
							packets = append(packets, fill(size, len(packets)))
						}
					}
					if size > 9000 {
						break // a socket's buffer holds few of these
					}
				}
				packets = packets[:min(len(packets), a.BatchSize())]
				if err := a.Send(packets, to); err != nil {
					// wireguard-go's gives up joining, and says so
					if off, is := errors.AsType[conn.ErrUDPGSODisabled](err); !is || off.RetryErr != nil {
						t.Fatalf("%v", err)
					}
				}
				for i, want := range packets {
					if g := b.next(); !bytes.Equal(g.data, want) {
						t.Fatalf("packet %d of %d, of %d bytes, is another of %d bytes", i, len(packets), len(want), len(g.data))
					}
				}
			})
		}
	})
}

// fill is a packet that no other one is like.
func fill(size, seed int) []byte {
	p := make([]byte, size)
	r := rand.New(rand.NewPCG(uint64(seed), uint64(size)))
	for i := 0; i < size; i += 8 {
		var x [8]byte
		binary.NativeEndian.PutUint64(x[:], r.Uint64())
		copy(p[i:], x[:])
	}
	return p
}

// What cannot be sent keeps nothing else from it.
func TestOneTooLarge(t *testing.T) {
	a, b := listen(t, New(Options{}), 0), listen(t, New(Options{}), 0)
	packets := [][]byte{fill(100, 1), fill(100, 2), make([]byte, 65508), fill(100, 3)}
	if err := a.Send(packets, a.to(b, "127.0.0.1")); err == nil {
		t.Error("a datagram of 65,508 bytes was sent")
	}
	for _, i := range []int{0, 1, 3} {
		if g := b.next(); !bytes.Equal(g.data, packets[i]) {
			t.Errorf("packet %d is another", i)
		}
	}
	empty := [][]byte{{}, fill(10, 1), {}, {}, fill(10, 2)}
	if err := a.Send(empty, a.to(b, "127.0.0.1")); err != nil {
		t.Error(err)
	}
	for _, i := range []int{1, 4} {
		if g := b.next(); !bytes.Equal(g.data, empty[i]) {
			t.Errorf("packet %d beside empty ones is another", i)
		}
	}
	if err := a.Send(nil, a.to(b, "127.0.0.1")); err != nil {
		t.Errorf("nothing was sent: %v", err)
	}
}

// Many send at once, to addresses of both families: each packet gets where it was sent to.
func TestBothFamilies(t *testing.T) {
	addrs := []string{"127.0.0.1", "::1"}
	if noIPv6(t) {
		addrs = addrs[:1]
	}
	const each, senders = 300, 4
	a := listen(t, New(Options{}), 0)
	// Opened again after it sent over one family, as where the port changes.
	if err := a.Send([][]byte{{1}}, a.to(a, "127.0.0.1")); err != nil {
		t.Fatal(err)
	}
	a.end()
	a = listen(t, a.Bind, 0)
	var ears []*ear
	for range addrs {
		ears = append(ears, listen(t, New(Options{}), 0))
	}
	var sending sync.WaitGroup
	for range senders {
		sending.Go(func() {
			for n := range each {
				for i, addr := range addrs {
					if err := a.Send([][]byte{{byte(i)}, {byte(i)}, {byte(i), 1}}, a.to(ears[i], addr)); err != nil {
						t.Errorf("to %s: %v", addr, err)
					}
				}
				if n%50 == 0 {
					time.Sleep(time.Millisecond)
				}
			}
		})
	}
	sending.Wait()
	for i, e := range ears {
		for range each * senders * 3 {
			g := e.next()
			if g.data[0] != byte(i) || g.from.DstIP().String() != addrs[i] {
				t.Fatalf("%s got what was sent to %s, from %v", addrs[i], addrs[g.data[0]], g.from.DstIP())
			}
		}
	}
}

func TestVia(t *testing.T) {
	var via []netip.AddrPort
	a := listen(t, New(Options{Via: func(to netip.AddrPort) []netip.AddrPort {
		if to.Port() != 9 {
			return nil
		}
		return via
	}}), 0)
	b, c := listen(t, New(Options{}), 0), listen(t, New(Options{}), 0)
	via = []netip.AddrPort{netip.MustParseAddrPort(b.at("127.0.0.1")), netip.MustParseAddrPort(c.at("127.0.0.1"))}
	nobody, err := a.ParseEndpoint("192.0.2.1:9")
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Send([][]byte{[]byte("to both")}, nobody); err != nil {
		t.Fatal(err)
	}
	if err := a.Send([][]byte{[]byte("to c")}, a.to(c, "127.0.0.1")); err != nil {
		t.Fatal(err)
	}
	for e, want := range map[*ear][]string{b: {"to both"}, c: {"to both", "to c"}} {
		for _, want := range want {
			if g := e.next(); string(g.data) != want {
				t.Errorf("got %q, want %q", g.data, want)
			}
		}
	}
}

// A path that refused joined packets of a size carries smaller ones, and is asked again after a while, which is longer
// each time.
func TestPath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p path
		joins := func(when string, want int) {
			t.Helper()
			if got := p.joins(); got != want {
				t.Errorf("%s: packets of up to %d bytes are joined, want %d", when, got, want)
			}
		}
		time.Sleep(time.Since(start) + time.Hour)
		joins("at first", math.MaxInt)
		for i := range 20 {
			want := min(minAlone<<min(i, 10), maxAlone)
			p.refused(1400)
			joins("refused", 1399)
			p.refused(1300)
			p.refused(1452)
			joins("refused smaller ones too", 1299)
			p.carried(1299)
			time.Sleep(want - time.Millisecond)
			joins("before "+want.String(), 1299)
			time.Sleep(time.Millisecond)
			joins("after "+want.String(), math.MaxInt)
			p.carried(1299)
		}
		p.carried(1300)
		p.refused(1400)
		time.Sleep(minAlone)
		joins("a larger one was carried meanwhile", math.MaxInt)
		p.refused(1400)
		p.forget()
		joins("forgotten", math.MaxInt)
	})
}

// Joined packets are as many, and as large, as Linux takes.
func TestSegment(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.SampledFrom([]int{0, 1, 2, 100, 1452, 30000, 65507}), 1, 128).Draw(t, "sizes")
		var packets [][]byte
		for _, n := range sizes {
			packets = append(packets, make([]byte, n))
		}
		n := segment(packets)
		total := 0
		for i, p := range packets[:n] {
			total += len(p)
			if i < n-1 && len(p) != len(packets[0]) || len(p) > len(packets[0]) || n > 1 && len(p) == 0 {
				t.Fatalf("%d of %v are joined", n, sizes)
			}
		}
		if n < 1 || n > maxSegments || n > 1 && total > maxJoined {
			t.Fatalf("%d of %v are joined, %d bytes", n, sizes, total)
		}
		// It is the longest run.
		if n < len(packets) && n < maxSegments && len(packets[n-1]) == len(packets[0]) && len(packets[n]) > 0 && len(packets[0]) > 0 &&
			len(packets[n]) <= len(packets[0]) && total+len(packets[n]) <= maxJoined {
			t.Fatalf("no more than %d of %v are joined", n, sizes)
		}
	})
}

// Strangers cannot have more remembered than there is room for, and who is known is known again.
func TestEndpoints(t *testing.T) {
	var es endpoints
	at := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), 9)
	}
	to := netip.MustParseAddr("192.0.2.1")
	for i := range 3 * maxEndpoints {
		if e := es.get(at(i), to, 7); e.dst != at(i) || e.src != to || e.srcIf != 0 {
			t.Fatalf("endpoint of %v is %v, from %v", at(i), e.dst, e.src)
		}
		if len(es.all) > maxEndpoints {
			t.Fatalf("%d are remembered", len(es.all))
		}
	}
	e := es.get(at(1), to, 0)
	if es.get(at(2), to, 0) == e || es.get(at(1), to, 0) != e || es.get(at(1), netip.MustParseAddr("192.0.2.2"), 0) == e {
		t.Error("endpoints are mixed up")
	}
	es.get(at(1), to, 0).ClearSrc()
	if again := es.get(at(1), to, 0); again == e || again.SrcIP() != to || e.SrcIP().IsValid() {
		t.Error("an address that packets come to is not known again")
	}
}

func TestImpair(t *testing.T) {
	const n = 2000
	arrive := func(i Impairment) (order []int, took time.Duration) {
		a, b := listen(t, Impair(New(Options{}), i), 0), listen(t, New(Options{}), 0)
		defer a.end()
		defer b.end()
		to := a.to(b, "127.0.0.1")
		begun := time.Now()
		var batch [][]byte
		for i := range n {
			batch = append(batch, binary.NativeEndian.AppendUint32(make([]byte, 0, 100), uint32(i)))
			if len(batch) == 100 {
				if err := a.Send(batch, to); err != nil {
					t.Fatal(err)
				}
				batch = nil
			}
		}
		for {
			select {
			case g := <-b.heard:
				order = append(order, int(binary.NativeEndian.Uint32(g.data)))
				took = time.Since(begun)
			case <-time.After(300*time.Millisecond + i.Delay + i.Jitter):
				return order, took
			}
		}
	}
	order, took := arrive(Impairment{Delay: 50 * time.Millisecond})
	if len(order) != n || !slices.IsSorted(order) || took < 50*time.Millisecond {
		t.Errorf("delayed: %d arrived, in order: %v, after %v", len(order), slices.IsSorted(order), took)
	}
	order, _ = arrive(Impairment{Loss: 0.1, Seed: 1})
	if len(order) < n*85/100 || len(order) > n*95/100 || !slices.IsSorted(order) {
		t.Errorf("with 10 %% loss %d of %d arrived, in order: %v", len(order), n, slices.IsSorted(order))
	}
	if again, _ := arrive(Impairment{Loss: 0.1, Seed: 1}); !slices.Equal(again, order) {
		t.Error("with the same seed others are lost")
	}
	order, _ = arrive(Impairment{Jitter: 20 * time.Millisecond})
	if len(order) != n || slices.IsSorted(order) {
		t.Errorf("with jitter %d arrived, in order: %v", len(order), slices.IsSorted(order))
	}
	order, took = arrive(Impairment{Rate: n * 4 * 5}) // it takes a fifth of a second
	if len(order) != n || took < 150*time.Millisecond {
		t.Errorf("at a rate %d arrived after %v", len(order), took)
	}
	order, _ = arrive(Impairment{Rate: 1000, Queue: 400})
	if len(order) > 200 || len(order) < 90 {
		t.Errorf("of a short queue %d arrived", len(order))
	}
}

func ExampleImpair() {
	// A path around the world, on which one packet in a hundred is lost.
	b := Impair(New(Options{}), Impairment{Delay: 150 * time.Millisecond, Loss: 0.01, Seed: 1})
	fmt.Println(b.BatchSize() > 0)
	// Output: true
}

// Who sends meanwhile finds all sockets open or all closed.
func TestSendWhileOpeningAndClosing(t *testing.T) {
	b := New(Options{})
	if _, _, err := b.Open(0); err != nil {
		t.Fatal(err)
	}
	var to []conn.Endpoint
	is4, is6 := b.Families()
	for at, has := range map[string]bool{"127.0.0.1:9": is4, "[::1]:9": is6} {
		if e, err := b.ParseEndpoint(at); err != nil {
			t.Fatal(err)
		} else if has {
			to = append(to, e)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 100 {
			b.Close()
			if _, _, err := b.Open(0); err != nil {
				t.Error(err)
				return
			}
		}
		b.Close()
	}()
	for {
		select {
		case <-done:
			return
		default:
		}
		for _, e := range to {
			if err := b.Send([][]byte{{1}}, e); errors.Is(err, syscall.EAFNOSUPPORT) {
				<-done
				t.Fatalf("%s: %v", e.DstToString(), err)
			}
		}
	}
}

// Strangers, however many, have nothing forgotten of who is heard meanwhile.
func TestPathAmongStrangers(t *testing.T) {
	var es endpoints
	peer, here := netip.MustParseAddrPort("192.0.2.1:51820"), netip.MustParseAddr("192.0.2.9")
	e := es.get(peer, here, 1)
	e.path.refused(1400)
	for i := range maxEndpoints {
		es.get(netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, byte(i >> 8), byte(i)}), 9), here, 1)
		es.get(peer, here, 1) // which is heard all the time
	}
	if g := es.get(peer, here, 1); g != e || g.path.joins() != 1399 {
		t.Errorf("after %d strangers packets to the peer are joined up to %d bytes, and its endpoint is the same: %t", maxEndpoints, g.path.joins(), g == e)
	}
}
