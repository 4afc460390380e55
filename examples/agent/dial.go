package main

import (
	"context"
	"errors"
	"net"
	"time"
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
		return eitherWay(ctx, headStart, func(ctx context.Context) (net.Conn, error) {
			return beside.DialContext(ctx, "tcp", address)
		}, func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", address)
		})
	}
}

// eitherWay returns the connection of whichever dial has one first, of which the second begins when the first has
// failed, or has had its time. What the other one does is over when it returns.
func eitherWay(ctx context.Context, after time.Duration, first, second func(context.Context) (net.Conn, error)) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		c   net.Conn
		err error
	}
	results := make(chan result)
	start := func(dial func(context.Context) (net.Conn, error)) {
		go func() {
			c, err := dial(ctx)
			results <- result{c, err}
		}()
	}
	start(first)
	var won net.Conn
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
				_ = r.c.Close()
			default:
				won = r.c
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
		return won, nil
	}
	return nil, errors.Join(errs...)
}
