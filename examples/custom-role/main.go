// Custom-role is a node agent with a role of its own: while the node has the role "greeter", it announces a prefix to
// the mesh, and answers HTTP at the first address of it.
//
//	go run ./examples/custom-role -node alpha -roles roles.txt
//
// The registry is memory, so that it runs alone; a mesh of several machines has one of etcd there.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"time"

	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles"
	"github.com/warren-mesh/warren/roles/meshservice"
	"github.com/warren-mesh/warren/roles/part"
)

// greeter is a role: a name, and what it does while the node has it.
type greeter struct {
	device *netstack.Net
	prefix netip.Prefix
}

func (greeter) Name() string { return "greeter" }

func (g greeter) Run(ctx context.Context, n roles.Node) error {
	addr := g.prefix.Addr().Next()
	// Withdrawn when Run returns, however it does.
	if err := n.Announce(prefixes.Announcement{Prefix: g.prefix, Source: addr}); err != nil {
		return err
	}
	for v, newer := n.Mesh(); !v.Self.Local.HasAddr(addr); v, newer = n.Mesh() { // until the device has it
		select {
		case <-newer:
		case <-ctx.Done():
			return nil
		}
	}
	l, err := g.device.Listen("tcp", netip.AddrPortFrom(addr, 80).String())
	if err != nil {
		return err // and it is tried again, less and less often
	}
	s := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		v, _ := n.Mesh()
		fmt.Fprintf(w, "%s greets its %d peers\n", v.Self.Node, len(v.Peers))
	})}
	n.Go("closing the server", func(ctx context.Context) error { <-ctx.Done(); return s.Close() })
	return s.Serve(l)
}

// run runs a node that has the roles which assigned says, until ctx ends.
func run(ctx context.Context, node string, addr netip.Addr, prefix netip.Prefix, records registry.Registry, assigned roles.Assigned) error {
	device, err := netstack.New(netstack.Options{})
	if err != nil {
		return err
	}
	m, err := mesh.New(mesh.Config{
		Node: node, Registry: records, Datapath: device, Addresses: []netip.Addr{addr},
		Endpoints: []mesh.Endpoint{mesh.MustEndpoint("127.0.0.1:0")},
	})
	if err != nil {
		return errors.Join(err, device.Close())
	}
	manager, err := roles.New(roles.Config{
		Roles: []roles.Role{greeter{device, prefix}}, Assigned: assigned,
		Services: []part.Part{meshservice.New(m)}, Mesh: m, Logger: slog.Default(),
	})
	if err != nil {
		return errors.Join(err, device.Close())
	}
	return errors.Join(manager.Run(ctx), device.Close())
}

func main() {
	node := flag.String("node", "alpha", "name of this node")
	file := flag.String("roles", "roles.txt", "file with the name of a role in each line, read again as it changes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *node, netip.MustParseAddr("10.80.0.1"), netip.MustParsePrefix("10.90.1.0/24"), memory.New(), roles.File(*file)); err != nil {
		fmt.Fprintln(os.Stderr, "custom-role:", err)
		os.Exit(1)
	}
}
