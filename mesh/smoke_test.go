package mesh_test

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/mesh"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
)

func TestSmoke(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		net := memory.NewNetwork()
		reg := regmem.New()
		var ms []mesh.Mesh
		done := make(chan error, 3)
		for i := range 3 {
			ip := netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})
			m, err := mesh.New(mesh.Config{
				Node: fmt.Sprintf("n%d", i), Registry: reg.Handle(),
				Datapath:  memory.New(memory.Options{Network: net, Addrs: []netip.Addr{ip}}),
				Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})},
				Announce:  []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, byte(i + 1), 0}), 24)},
				Endpoints: []netip.AddrPort{netip.AddrPortFrom(ip, 0)},
			})
			if err != nil {
				t.Fatal(err)
			}
			ms = append(ms, m)
			go func() { done <- m.Run(ctx) }()
		}
		for _, m := range ms {
			rctx, c := context.WithTimeout(ctx, time.Minute)
			if err := mesh.Ready(rctx, m); err != nil {
				t.Fatal(err)
			}
			c()
		}
		time.Sleep(10 * time.Second)
		for _, m := range ms {
			v, _ := m.Current()
			t.Logf("%+v", v)
			if len(v.Peers) != 2 || len(v.Conditions) > 0 || v.Peers[0].LastHandshake.IsZero() {
				t.Errorf("bad view")
			}
		}
		cancel()
		for range ms {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
}
