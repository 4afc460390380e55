package netstack

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// errnoOf translates what the stack says into what the net package would say, so that errors.Is finds
// the same errors whether a connection is the host's or the mesh's.
func errnoOf(err tcpip.Error) error {
	var errno syscall.Errno
	switch err.(type) {
	case nil:
		return nil
	case *tcpip.ErrConnectionRefused:
		errno = syscall.ECONNREFUSED
	case *tcpip.ErrConnectionReset:
		errno = syscall.ECONNRESET
	case *tcpip.ErrConnectionAborted, *tcpip.ErrAborted:
		errno = syscall.ECONNABORTED
	case *tcpip.ErrTimeout:
		errno = syscall.ETIMEDOUT
	case *tcpip.ErrNetworkUnreachable:
		errno = syscall.ENETUNREACH
	case *tcpip.ErrHostUnreachable:
		errno = syscall.EHOSTUNREACH
	case *tcpip.ErrHostDown:
		errno = syscall.EHOSTDOWN
	case *tcpip.ErrPortInUse:
		errno = syscall.EADDRINUSE
	case *tcpip.ErrNoPortAvailable:
		errno = syscall.EAGAIN
	case *tcpip.ErrBadLocalAddress:
		errno = syscall.EADDRNOTAVAIL
	case *tcpip.ErrClosedForSend:
		errno = syscall.EPIPE
	case *tcpip.ErrMessageTooLong:
		errno = syscall.EMSGSIZE
	case *tcpip.ErrNoBufferSpace:
		errno = syscall.ENOBUFS
	case *tcpip.ErrNotConnected:
		errno = syscall.ENOTCONN
	case *tcpip.ErrDestinationRequired:
		errno = syscall.EDESTADDRREQ
	case *tcpip.ErrAddressFamilyNotSupported:
		errno = syscall.EAFNOSUPPORT
	case *tcpip.ErrBroadcastDisabled, *tcpip.ErrNotPermitted:
		errno = syscall.EACCES
	case *tcpip.ErrInvalidOptionValue, *tcpip.ErrInvalidEndpointState:
		errno = syscall.EINVAL
	default:
		return errors.New(err.String())
	}
	return errno
}

// sysError is errnoOf with the operation in front, as the net package puts it.
func sysError(op string, err tcpip.Error) error {
	e := errnoOf(err)
	if errno, ok := e.(syscall.Errno); ok {
		return os.NewSyscallError(op, errno)
	}
	return fmt.Errorf("%s: %w", op, e)
}
