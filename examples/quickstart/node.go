package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry"
)

// audit is how often a node reads its device when nothing happens. The tables show counters as of then,
// and the default of 15 s is too long to wait for.
const audit = time.Second

// node is a member of the mesh. What Warren needs is a device and a mesh.Mesh that keeps it right; the
// web server and client beside them know nothing of either, and merely dial and listen on the device.
type node struct {
	name   string
	addr   netip.Addr
	device *netstack.Net
	mesh   mesh.Mesh
	web    *http.Server
	client *http.Client

	stop    context.CancelFunc // ends mesh.Run
	ended   chan struct{}      // closed when mesh.Run has returned
	err     error              // what it returned, once ended is closed
	serving sync.WaitGroup
}

// newNode makes a node and starts it. It is a member soon after: see until.
func newNode(name string, addr netip.Addr, records registry.Registry) (*node, error) {
	device, err := netstack.New(netstack.Options{})
	if err != nil {
		return nil, fmt.Errorf("%s: making its device: %w", name, err)
	}
	m, err := mesh.New(mesh.Config{
		Node:      name,
		Registry:  records, // where the nodes find each other
		Datapath:  device,  // what carries their packets
		Addresses: []netip.Addr{addr},
		// Where the others reach this node. Port 0 stands for the one that the device gets.
		Endpoints: []mesh.Endpoint{mesh.MustEndpoint("127.0.0.1:0")},
		Audit:     audit,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", name, err), device.Close())
	}
	n := &node{name: name, addr: addr, device: device, mesh: m, ended: make(chan struct{})}
	// Without kept connections, every request shows where the mesh sends it now.
	n.client = &http.Client{Transport: &http.Transport{DialContext: device.DialContext, DisableKeepAlives: true}}
	if err := n.serve(); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: serving HTTP: %w", name, err), device.Close())
	}
	ctx, stop := context.WithCancel(context.Background())
	n.stop = stop
	go func() {
		n.err = m.Run(ctx)
		close(n.ended)
	}()
	return n, nil
}

// serve answers HTTP requests with the node's name, at every address it has now or comes to have.
func (n *node) serve() error {
	l, err := n.device.Listen("tcp", ":80")
	if err != nil {
		return err
	}
	n.web = &http.Server{
		ReadHeaderTimeout: 5 * time.Second,
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, n.name) }),
	}
	n.serving.Go(func() { _ = n.web.Serve(l) }) // until Close
	return nil
}

// fetch asks the web server at an address of the mesh for its name.
func (n *node) fetch(ctx context.Context, from netip.Addr) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(from.String(), "80"), nil)
	if err != nil {
		return "", err
	}
	resp, err := n.client.Do(req)
	if err != nil {
		return "", fmt.Errorf("%s: %w", n.name, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if err != nil {
		return "", fmt.Errorf("%s: reading the answer of %v: %w", n.name, from, err)
	}
	return strings.TrimSpace(string(body)), nil
}

// until waits until ok holds for what the node sees of the mesh.
func (n *node) until(ctx context.Context, what string, ok func(mesh.View) bool) error {
	for {
		view, stale := n.mesh.Current()
		if ok(view) {
			return nil
		}
		select {
		case <-stale:
		case <-n.ended:
			return fmt.Errorf("%s waited until %s, but its mesh ended: %v", n.name, what, n.err)
		case <-ctx.Done():
			return fmt.Errorf("%s waited until %s: %w", n.name, what, context.Cause(ctx))
		}
	}
}

// leave withdraws the node from the mesh.
func (n *node) leave(ctx context.Context) error {
	if err := n.mesh.Leave(ctx); err != nil {
		return fmt.Errorf("%s: %w", n.name, err)
	}
	<-n.ended
	if !errors.Is(n.err, mesh.ErrLeft) {
		return fmt.Errorf("%s left, but its mesh ended with: %v", n.name, n.err)
	}
	return nil
}

// close ends the node without leaving the mesh: its peers would keep its place for when it is back.
func (n *node) close() error {
	n.stop()
	<-n.ended
	errs := []error{n.web.Close(), n.device.Close()}
	n.serving.Wait()
	if n.err != nil && !errors.Is(n.err, mesh.ErrLeft) {
		errs = append(errs, fmt.Errorf("%s: its mesh ended: %w", n.name, n.err))
	}
	return errors.Join(errs...)
}
