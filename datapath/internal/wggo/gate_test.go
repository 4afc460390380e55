package wggo

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

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
		g.leave(50)
		synctest.Wait()
		if a.Load() || b.Load() {
			t.Error("still full, and open")
		}
		g.leave(50)
		synctest.Wait()
		if !a.Load() || !b.Load() {
			t.Errorf("not full any more, and closed to one of two: %v, %v", a.Load(), b.Load())
		}
		if d := time.Since(begun); d != 0 {
			t.Errorf("it took %v", d)
		}
		if n := g.waiting.Load(); n != 0 {
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
			if !through.Load() || g.inside.Load() != 0 {
				t.Fatalf("it is open: %v, with %d inside", through.Load(), g.inside.Load())
			}
		}
		g.enter(10 * gateLimit)
		through := waits(g)
		for range 5 {
			time.Sleep(gateIdle / 2)
			g.leave(1)
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

// What wireguard-go sends by itself leaves no more room than there is.
func TestGateOwnPackets(t *testing.T) {
	g := newGate()
	g.leave(1000)
	g.wait(newIdleTimer())
	g.enter(gateLimit)
	if n := g.inside.Load(); n != gateLimit {
		t.Errorf("%d inside, want %d", n, gateLimit)
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
			d.out.leave(batch)
			synctest.Wait()
			if read != min(before+batch, 1000) {
				t.Errorf("%d packets were read after %d were sent, before it were %d", read, batch, before)
			}
		}
		d.out.leave(1000)
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
		d.out.leave(100)
	}); n != 0 {
		t.Errorf("%v allocations a batch", n)
	}
}
