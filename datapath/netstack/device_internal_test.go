package netstack

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// TestDeviceDies ends a device behind the Net's back, which then still says yes to everything.
func TestDeviceDies(t *testing.T) {
	n, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	ctx := context.Background()
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	want := datapath.State{Device: datapath.Device{Key: k}, Addrs: prefixes.MustParse("10.0.0.1")}
	for range 3 {
		if err := datapath.Sync(ctx, n, want); err != nil {
			t.Fatal(err)
		}
		n.Settle()
		l, err := n.Listen("tcp", "10.0.0.1:80")
		if err != nil {
			t.Fatal(err)
		}
		busy := make(chan struct{})
		go func() { // reads and writes what the end of the device clears
			defer close(busy)
			for !errors.Is(n.Apply(ctx, datapath.AddLocal{Prefixes: prefixes.MustParse("10.9.0.0/24")}), datapath.ErrNoDevice) {
			}
		}()
		n.tun.Close() // with which the device ends, too
		<-busy
		if err := n.Apply(ctx, datapath.SetDevice{Device: datapath.Device{Mark: 1}}); !errors.Is(err, datapath.ErrNoDevice) {
			t.Errorf("telling a dead device something: %v, want ErrNoDevice", err)
		}
		if err := n.Apply(ctx, datapath.PutPeer{Key: newPublic(t)}); !errors.Is(err, datapath.ErrNoDevice) {
			t.Errorf("PutPeer on a dead device: %v, want ErrNoDevice", err)
		}
		select {
		case <-n.Changed():
		case <-time.After(10 * time.Second):
			t.Fatal("Changed did not fire")
		}
		if _, h := n.link.table.Load().send(netip.MustParseAddr("10.9.0.1")); h.local || !n.local.IsEmpty() {
			t.Errorf("without a device, %v is still local", n.local)
		}
		if s, err := n.Read(ctx); err != nil || s.Device.Exists() || !s.Addrs.IsEmpty() {
			t.Errorf("read %+v, %v, want no device", s, err)
		}
		l.Close()
	}
}

func newPublic(t *testing.T) key.Public {
	t.Helper()
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	return k.Public()
}

// TestPortReuse has more short connections to one address than there are ports.
func TestPortReuse(t *testing.T) {
	n, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := datapath.Sync(ctx, n, datapath.State{Device: datapath.Device{Key: k}, Addrs: prefixes.MustParse("10.0.0.1")}); err != nil {
		t.Fatal(err)
	}
	const ports = 16
	if err := n.stack.SetPortRange(50000, 50000+ports-1); err != nil {
		t.Fatal(err)
	}
	l, err := n.Listen("tcp", "10.0.0.1:80")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for i := range 3 * ports {
		c, err := n.DialContext(ctx, "tcp", "10.0.0.1:80")
		for err != nil && ctx.Err() == nil { // all were in use within the last second
			time.Sleep(50 * time.Millisecond)
			c, err = n.DialContext(ctx, "tcp", "10.0.0.1:80")
		}
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		far, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		far.Close()
	}
}
