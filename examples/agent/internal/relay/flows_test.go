package relay_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/examples/agent/internal/relay"
	"github.com/warren-mesh/warren/examples/agent/internal/relay/relaytest"
)

// config is one whose Dial is to be set, and the datagrams that come back.
func config(maximum int, idle time.Duration) (relay.FlowConfig[int], chan string) {
	back := make(chan string, 1000)
	return relay.FlowConfig[int]{
		Reply: func(k int, _ net.Addr, b []byte) { back <- fmt.Sprintf("%d:%s", k, b[7:]) },
		Max:   maximum, Idle: idle, Room: 7, Logger: slog.New(slog.DiscardHandler),
	}, back
}

// echo is a connection with someone who sends back what it sends.
func echo(ctx context.Context, _ int) (net.Conn, error) {
	a, b := net.Pipe()
	go func() {
		defer b.Close()
		for buf := make([]byte, relay.MaxDatagram); ; {
			n, err := b.Read(buf)
			if err != nil {
				return
			}
			if _, err := b.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	return a, nil
}

func TestFlows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, back := config(3, time.Minute)
		c.Dial = echo
		f := relay.NewFlows(t.Context(), c)
		defer f.Close()
		for i := range 9 { // the same flow, which does not end while it is used
			time.Sleep(50 * time.Second)
			f.Send(7, []byte(fmt.Sprint(i)))
			if got, want := <-back, fmt.Sprintf("7:%d", i); got != want {
				t.Fatalf("%q came back, want %q", got, want)
			}
			if f.Len() != 1 {
				t.Fatalf("there are %d flows", f.Len())
			}
		}
		time.Sleep(59 * time.Second)
		if f.Len() != 1 {
			t.Error("the flow ended early")
		}
		time.Sleep(2 * time.Second)
		if f.Len() != 0 {
			t.Error("the flow did not end")
		}
		f.Send(7, []byte("again"))
		if got := <-back; got != "7:again" {
			t.Errorf("%q came back", got)
		}
		f.Close()
		f.Send(7, []byte("too late"))
		if f.Len() != 0 {
			t.Error("there are flows after Close")
		}
	})
}

// A dial that takes its time holds up nobody else, and does not make its flow idle.
func TestSlowDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, back := config(3, time.Minute)
		c.Dial = func(ctx context.Context, k int) (net.Conn, error) {
			if k == 1 && !relay.Sleep(ctx, time.Hour) {
				return nil, ctx.Err()
			}
			return echo(ctx, k)
		}
		f := relay.NewFlows(t.Context(), c)
		defer f.Close()
		for range 1000 {
			f.Send(1, make([]byte, 60000)) // one of which waits, the others are dropped
		}
		f.Send(2, []byte("quick"))
		if got := <-back; got != "2:quick" {
			t.Errorf("%q came back", got)
		}
		if got := <-back; len(got) != 2+60000 {
			t.Errorf("%d bytes came back", len(got))
		}
		time.Sleep(time.Second)
		select {
		case <-back:
			t.Error("more than 64 KiB waited")
		default:
		}
	})
}

func TestDialFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		no := errors.New("no")
		c, back := config(3, time.Minute)
		fail := true
		c.Dial = func(ctx context.Context, k int) (net.Conn, error) {
			if fail {
				return nil, no
			}
			return echo(ctx, k)
		}
		failed := make(chan error, 1)
		c.Failed = func(_ int, err error) { failed <- err }
		f := relay.NewFlows(t.Context(), c)
		defer f.Close()
		f.Send(1, []byte("x"))
		if err := <-failed; err != no {
			t.Errorf("Failed is told %v", err)
		}
		synctest.Wait()
		if f.Len() != 0 {
			t.Error("a flow is left of a failed dial")
		}
		fail = false
		f.Send(1, []byte("y"))
		if got := <-back; got != "1:y" {
			t.Errorf("%q came back", got)
		}
	})
}

// deaf is a connection whose Read fails as one does after each datagram that nobody wanted.
type deaf struct {
	net.Conn
	reads int
}

func (d *deaf) Read(b []byte) (int, error) {
	if d.reads++; d.reads%10 != 0 {
		return 0, os.ErrInvalid
	}
	return d.Conn.Read(b)
}

func TestReadFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, back := config(3, time.Minute)
		c.Dial = func(ctx context.Context, k int) (net.Conn, error) {
			c, err := echo(ctx, k)
			return &deaf{Conn: c}, err
		}
		f := relay.NewFlows(t.Context(), c)
		defer f.Close()
		f.Send(1, []byte("x"))
		if got := <-back; got != "1:x" {
			t.Errorf("%q came back", got)
		}
	})
}

// TestEviction compares with a list of the keys in the order of their use.
func TestEviction(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var mu sync.Mutex
		open := make(map[int]bool)
		maximum := rapid.IntRange(1, 4).Draw(t, "max")
		c, _ := config(maximum, time.Hour)
		started := make(chan struct{})
		c.Dial = func(ctx context.Context, k int) (net.Conn, error) {
			mu.Lock()
			open[k] = true
			mu.Unlock()
			started <- struct{}{}
			<-ctx.Done()
			mu.Lock()
			delete(open, k)
			mu.Unlock()
			started <- struct{}{}
			return nil, ctx.Err()
		}
		f := relay.NewFlows(context.Background(), c)
		var model []int
		for _, k := range rapid.SliceOfN(rapid.IntRange(0, 6), 0, 50).Draw(t, "keys") {
			f.Send(k, nil)
			events := 0
			if i := slices.Index(model, k); i >= 0 {
				model = slices.Delete(model, i, i+1)
			} else {
				events++
			}
			if model = append(model, k); len(model) > maximum {
				model = model[1:]
				events++
			}
			for range events {
				<-started
			}
			mu.Lock()
			same := len(open) == len(model)
			for _, k := range model {
				same = same && open[k]
			}
			mu.Unlock()
			if !same || f.Len() != len(model) {
				t.Fatalf("there are %d flows, want those of %v", f.Len(), model)
			}
		}
		go func() {
			for range model {
				<-started
			}
		}()
		f.Close()
	})
}

// TestChurn has flows made faster than they end.
func TestChurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := config(4, time.Minute)
		dials := 0
		var mu sync.Mutex
		c.Dial = func(ctx context.Context, k int) (net.Conn, error) {
			mu.Lock()
			dials++
			mu.Unlock()
			time.Sleep(time.Minute) // whatever ctx says
			return nil, ctx.Err()
		}
		f := relay.NewFlows(t.Context(), c)
		defer f.Close()
		for k := range 10000 {
			f.Send(k, []byte("x"))
		}
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if dials > 2*4+16 || f.Len() > 4 {
			t.Errorf("%d dials are under way for %d flows", dials, f.Len())
		}
	})
}

// TestBiggest sends what fits into a datagram, and nothing at all, over real sockets.
func TestBiggest(t *testing.T) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	relaytest.EchoUDP(t, pc)
	c, back := config(1, time.Minute)
	c.Dial = func(ctx context.Context, _ int) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "udp", pc.LocalAddr().String())
	}
	f := relay.NewFlows(t.Context(), c)
	defer f.Close()
	for _, size := range []int{0, 1, 65507} {
		for tries := 0; ; tries++ {
			f.Send(1, relaytest.Bytes(3, size))
			select {
			case got := <-back:
				if got != "1:"+string(relaytest.Bytes(3, size)) {
					t.Errorf("of %d bytes others came back", size)
				}
			case <-time.After(time.Second):
				if tries < 10 {
					continue
				}
				t.Errorf("%d bytes did not come back", size)
			}
			break
		}
	}
}
