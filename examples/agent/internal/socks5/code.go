package socks5

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/warren-mesh/warren/datapath/netstack"
)

// code is what a reply says (RFC 1928 section 6).
type code uint8

const (
	succeeded           code = 0
	generalFailure      code = 1
	notAllowed          code = 2
	networkUnreachable  code = 3
	hostUnreachable     code = 4
	connectionRefused   code = 5
	ttlExpired          code = 6
	commandNotSupported code = 7
	typeNotSupported    code = 8
)

var (
	errNoNames   = errors.New("names are not served")
	errNoAddress = errors.New("no address")
)

// lookupError is the error of a name.
type lookupError struct {
	name string
	err  error
}

func (e *lookupError) Error() string { return fmt.Sprintf("looking up %q: %v", e.name, e.err) }
func (e *lookupError) Unwrap() error { return e.err }

// codeOf returns what a client is told of an error of dial. Of the errors of several addresses the one
// counts that came closest to a connection.
func codeOf(err error) code {
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	switch lookup := (*lookupError)(nil); {
	case is(errNoNames):
		return typeNotSupported
	case errors.As(err, &lookup):
		return hostUnreachable
	case is(fs.ErrPermission):
		return notAllowed
	case is(syscall.ECONNREFUSED):
		return connectionRefused
	case is(netstack.ErrNoAnswer): // the peer is there, what is behind it is not
		return ttlExpired
	case is(netstack.ErrNoHandshake, syscall.EHOSTUNREACH, syscall.EHOSTDOWN): // the peer is not
		return hostUnreachable
	case is(netstack.ErrNoRoute, netstack.ErrNoSource, syscall.ENETUNREACH): // there is no peer
		return networkUnreachable
	case is(context.DeadlineExceeded, os.ErrDeadlineExceeded, syscall.ETIMEDOUT):
		return ttlExpired
	case is(syscall.EAFNOSUPPORT):
		return typeNotSupported
	}
	return generalFailure
}
