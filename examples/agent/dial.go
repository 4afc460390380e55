package main

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/warren-mesh/warren/mesh"
)

// headStart is how long what is dialled beside the mesh has before it is tried through the mesh as well.
const headStart = 500 * time.Millisecond

// besideMesh returns how the registry is dialled where packets of this host may be routed into the mesh, or be guarded,
// wherever they go: as the mesh's encrypted packets are, with their mark, and with that on what is asked of name
// servers too. A node without a mesh would not get to the registry otherwise, and so not to the mesh. A registry that
// is in the mesh is not reached so, and is dialled as ever.
func besideMesh(mark uint32) func(ctx context.Context, address string) (net.Conn, error) {
	marked := net.Dialer{Control: markWith(mark)}
	beside := marked
	beside.Resolver = &net.Resolver{PreferGo: true, Dial: marked.DialContext}
	return func(ctx context.Context, address string) (net.Conn, error) {
		closing := func(c net.Conn) { _ = c.Close() }
		return eitherWay(ctx, headStart, closing, func(ctx context.Context) (net.Conn, error) {
			return beside.DialContext(ctx, "tcp", address)
		}, func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", address)
		})
	}
}

// lookupBesideMesh returns how the names of other nodes' endpoints are looked up there: like the registry's.
func lookupBesideMesh(mark uint32) func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
	type answer struct {
		addrs []netip.Addr
		ttl   time.Duration
	}
	asking := func(d *net.Dialer, host string) func(context.Context) (answer, error) {
		lookup := mesh.HostLookup(d)
		return func(ctx context.Context) (answer, error) {
			addrs, ttl, err := lookup(ctx, host)
			return answer{addrs, ttl}, err
		}
	}
	return func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
		a, err := eitherWay(ctx, headStart, func(answer) {}, asking(&net.Dialer{Control: markWith(mark)}, host), asking(nil, host))
		return a.addrs, a.ttl, err
	}
}

// eitherWay returns what comes of whichever way succeeds first, of which the second begins when the first has failed,
// or has had its time. What comes of the other one too is discarded, and all is over when it returns.
func eitherWay[T any](ctx context.Context, after time.Duration, discard func(T), first, second func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		is  T
		err error
	}
	results := make(chan result)
	start := func(way func(context.Context) (T, error)) {
		go func() {
			is, err := way(ctx)
			results <- result{is, err}
		}()
	}
	start(first)
	var won *T
	var errs []error
	begin := time.After(after) // nil: the second has begun
	for waiting := 1; waiting > 0; {
		select {
		case <-begin:
		case r := <-results:
			waiting--
			switch {
			case r.err != nil:
				errs = append(errs, r.err)
			case won != nil:
				discard(r.is)
			default:
				won = &r.is
				cancel()
			}
		}
		if begin != nil && won == nil {
			start(second)
			waiting++
			begin = nil
		}
	}
	if won != nil {
		return *won, nil
	}
	var none T
	return none, errors.Join(errs...)
}
