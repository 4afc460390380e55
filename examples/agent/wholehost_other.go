//go:build !linux

package main

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"time"

	"github.com/warren-mesh/warren/examples/agent/internal/namespace"
)

func meshInterfaces() []string { return nil }

func ownNamespace() string { return "" }

func bindTo(string) func(network, address string, c syscall.RawConn) error {
	return func(string, string, syscall.RawConn) error { return errors.ErrUnsupported }
}

func markWith(uint32) func(network, address string, c syscall.RawConn) error {
	return func(string, string, syscall.RawConn) error { return errors.ErrUnsupported }
}

func echo(context.Context, netip.Addr, string, *namespace.Namespace) (time.Duration, error) {
	return 0, errors.ErrUnsupported
}
