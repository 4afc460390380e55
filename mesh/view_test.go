package mesh_test

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/mesh"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
)

// Whoever waits for a View in which a peer has a prefix may send to it: the device has it by then.
func TestViewIsWhatTheDeviceHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		net, reg := memory.NewNetwork(), regmem.New()
		done := make(chan error, 2)
		start := func(name string, last byte) (mesh.Mesh, *memory.Device) {
			ip := netip.AddrFrom4([4]byte{192, 0, 2, last})
			d := memory.New(memory.Options{Network: net, Addrs: []netip.Addr{ip}})
			m, err := mesh.New(mesh.Config{
				Node: name, Registry: reg.Handle(), Datapath: d, Window: time.Second,
				Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, last})},
				Endpoints: []mesh.Endpoint{{Addr: ip}},
			})
			if err != nil {
				t.Fatal(err)
			}
			go func() { done <- m.Run(ctx) }()
			return m, d
		}
		a, device := start("a", 1)
		if err := mesh.Ready(ctx, a); err != nil {
			t.Fatal(err)
		}
		start("b", 2)
		host := netip.MustParsePrefix("10.0.0.2/32")
		for v := range mesh.Watch(ctx, a) {
			p, ok := v.Peer("b")
			if !ok || !p.Prefixes.Has(host) {
				continue
			}
			st, err := device.Read(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if _, routed := st.Routes[host]; !routed || !st.Peers[p.Key].Prefixes.Has(host) {
				t.Errorf("the view says that %v goes to b, and the device has %v and %v", host, st.Routes, st.Peers)
			}
			break
		}
		if ctx.Err() != nil {
			t.Error("never seen")
		}
		cancel()
		if err := errors.Join(<-done, <-done); err != nil {
			t.Error(err)
		}
	})
}
