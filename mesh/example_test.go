package mesh_test

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	devmem "github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/mesh"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
)

// Two nodes find each other through a registry. Here it and their devices are in memory; a program takes
// a registry that both hosts reach, and a datapath that carries packets.
func Example_twoNodes() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	store, network := regmem.New(), devmem.NewNetwork()
	node := func(name, underlay, address, prefix string) mesh.Mesh {
		at := netip.MustParseAddr(underlay)
		m, err := mesh.New(mesh.Config{
			Node:      name,
			Registry:  store,
			Datapath:  devmem.New(devmem.Options{Network: network, Addrs: []netip.Addr{at}}),
			Addresses: []netip.Addr{netip.MustParseAddr(address)},
			Announce:  []netip.Prefix{netip.MustParsePrefix(prefix)},
			Endpoints: []mesh.Endpoint{{Addr: at}}, // at the port that the device gets
		})
		if err != nil {
			panic(err)
		}
		return m
	}
	amsterdam := node("amsterdam", "192.0.2.1", "100.64.0.1", "10.1.0.0/16")
	berlin := node("berlin", "192.0.2.2", "100.64.0.2", "10.2.0.0/16")

	ended := make(chan error)
	for _, m := range []mesh.Mesh{amsterdam, berlin} {
		go func() { ended <- m.Run(ctx) }()
	}
	for view := range mesh.Watch(ctx, amsterdam) {
		if peer, ok := view.Peer("berlin"); ok && !peer.Prefixes.IsEmpty() {
			fmt.Println("to berlin go", peer.Prefixes)
			break
		}
	}
	if err := berlin.Leave(ctx); err != nil {
		panic(err)
	}
	fmt.Println("berlin:", <-ended)
	cancel()
	fmt.Println("amsterdam:", <-ended)
	// Output:
	// to berlin go 10.2.0.0/16 100.64.0.2/32
	// berlin: left the mesh
	// amsterdam: <nil>
}
