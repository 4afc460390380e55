package wggo

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
)

// waits has somebody wait at g, and says whether it is through.
func waits(g *gate) *atomic.Bool {
	through := new(atomic.Bool)
	go func() {
		g.wait(newIdleTimer())
		through.Store(true)
	}()
	synctest.Wait()
	return through
}

// pass has packets come out.
func pass(g *gate, n int) {
	g.leaving()
	g.left(n)
}

// A gate that is full opens with what comes out, and for all who wait, without any time going by.
func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		g.enter(gateLimit - 1)
		if !waits(g).Load() {
			t.Fatal("not full, and closed")
		}
		g.enter(100)
		a, b := waits(g), waits(g)
		if a.Load() || b.Load() {
			t.Fatal("full, and open")
		}
		begun := time.Now()
		pass(g, 50)
		synctest.Wait()
		if a.Load() || b.Load() {
			t.Error("still full, and open")
		}
		pass(g, 50)
		synctest.Wait()
		if !a.Load() || !b.Load() {
			t.Errorf("not full any more, and closed to one of two: %v, %v", a.Load(), b.Load())
		}
		if d := time.Since(begun); d != 0 {
			t.Errorf("it took %v", d)
		}
		if n := g.waiting; n != 0 {
			t.Errorf("%d wait for ever", n)
		}
	})
}

// Packets of which nothing comes out hold others up for a moment, which begins anew with each that does come out.
func TestGateForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		for range 3 {
			g.enter(gateLimit)
			through := waits(g)
			time.Sleep(gateIdle - 1)
			if through.Load() {
				t.Fatal("it opened before the moment was over")
			}
			time.Sleep(time.Nanosecond)
			synctest.Wait()
			if !through.Load() || g.inside != 0 {
				t.Fatalf("it is open: %v, with %d inside", through.Load(), g.inside)
			}
		}
		g.enter(10 * gateLimit)
		through := waits(g)
		for range 5 {
			time.Sleep(gateIdle / 2)
			pass(g, 1)
			synctest.Wait()
		}
		if through.Load() {
			t.Error("it opened while packets came out")
		}
		time.Sleep(gateIdle + time.Microsecond)
		synctest.Wait()
		if !through.Load() {
			t.Error("closed")
		}
	})
}

// What is taken out slowly is not forgotten, and what was forgotten and comes out all the same makes no room.
func TestGateSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		g.enter(gateLimit)
		g.leaving()
		through := waits(g)
		time.Sleep(time.Hour)
		if through.Load() {
			t.Fatal("it opened while packets were being taken out")
		}
		g.left(0)
		time.Sleep(2 * gateIdle)
		synctest.Wait()
		if !through.Load() {
			t.Fatal("closed")
		}
		g.enter(gateLimit)
		pass(g, gateLimit) // those of before
		if g.inside != gateLimit {
			t.Errorf("%d are inside, want %d", g.inside, gateLimit)
		}
		pass(g, gateLimit)
		if g.inside != 0 {
			t.Errorf("%d are inside, want none", g.inside)
		}
	})
}

// WireGuard's own messages are none of a gate's, and what nobody keeps was not taken.
func TestTaken(t *testing.T) {
	buffer := func(b byte, size int) []byte { return append([]byte{b, 0, 0, 0}, make([]byte, size-4)...) }
	for _, test := range []struct {
		msg  []byte
		want bool
	}{{buffer(4, 33), true}, {buffer(4, 32), false}, {buffer(1, 148), false}, {buffer(2, 92), false}, {nil, false}} {
		if carries(test.msg) != test.want {
			t.Errorf("%d bytes of type %v: %v", len(test.msg), test.msg, !test.want)
		}
	}
	var kept taken
	a, b, c := buffer(4, 100), buffer(4, 100), buffer(4, 100)
	kept.gave(0, &a[0])
	kept.gave(2, &c[0])
	if n := kept.count([][]byte{a, b, buffer(4, 100)}); n != 1 {
		t.Errorf("%d were kept, want 1", n)
	}
	if n := kept.count([][]byte{b, a, c}); n != 0 {
		t.Errorf("%d were kept, want none", n)
	}
}

// plenty is a tun.Device that always has as many packets as are asked for.
type plenty struct{ tun.Device }

func (plenty) Read(bufs [][]byte, _ []int, _ int) (int, error) { return len(bufs), nil }
func (plenty) Write(bufs [][]byte, _ int) (int, error)         { return len(bufs), nil }

// A device reads no more than a batch beyond the limit until something is sent; and what it writes makes room for what
// is received.
func TestGated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &gated{Device: plenty{}, in: newGate(), out: newGate(), idle: newIdleTimer()}
		const batch = 100
		read := 0
		go func() {
			for read < 1000 {
				n, _ := d.Read(make([][]byte, batch), make([]int, batch), 0)
				read += n
			}
		}()
		synctest.Wait()
		if read < gateLimit || read >= gateLimit+batch {
			t.Errorf("%d packets were read, with a limit of %d", read, gateLimit)
		}
		for sent := 0; sent+2*batch <= 1000; sent += batch {
			before := read
			pass(d.out, batch)
			synctest.Wait()
			if read != min(before+batch, 1000) {
				t.Errorf("%d packets were read after %d were sent, before it were %d", read, batch, before)
			}
		}
		pass(d.out, 1000)
		synctest.Wait()
		d.in.enter(gateLimit)
		through := waits(d.in)
		if _, err := d.Write(make([][]byte, 1), 0); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if !through.Load() {
			t.Error("a packet was written, and there is no room")
		}
	})
}

func TestGateAllocates(t *testing.T) {
	d := &gated{Device: plenty{}, in: newGate(), out: newGate(), idle: newIdleTimer()}
	bufs, sizes := make([][]byte, 100), make([]int, 100)
	if n := testing.AllocsPerRun(100, func() {
		_, _ = d.Read(bufs, sizes, 0)
		pass(d.out, 100)
	}); n != 0 {
		t.Errorf("%v allocations a batch", n)
	}
}

// What strangers send, and wireguard-go does not keep, takes no room: it brings the same buffers again.
func TestGateJunk(t *testing.T) {
	b := &bind{watch: &watch{wake: make(chan struct{}, 1)}, in: newGate(), out: newGate()}
	fn := b.receive(func(_ [][]byte, sizes []int, _ []conn.Endpoint) (int, error) {
		for i := range sizes {
			sizes[i] = device.MessageKeepaliveSize + 1
		}
		return len(sizes), nil
	})
	packets, sizes, eps := make([][]byte, 128), make([]int, 128), make([]conn.Endpoint, 128)
	fresh := func(i int) {
		packets[i] = make([]byte, 64)
		packets[i][0] = transportData
	}
	for i := range packets {
		fresh(i)
	}
	for range 100 {
		if _, err := fn(packets, sizes, eps); err != nil {
			t.Fatal(err)
		}
	}
	if b.in.inside != 0 {
		t.Errorf("%d packets of strangers are inside", b.in.inside)
	}
	for i := range 50 { // which it keeps
		fresh(i)
	}
	if _, err := fn(packets, sizes, eps); err != nil || b.in.inside != 50 {
		t.Errorf("%d are inside, want 50, %v", b.in.inside, err)
	}
}
