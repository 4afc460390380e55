package hostnet

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Hold keeps others from having a device of our interface's name at the same time, whatever kind it is of: by a socket
// with a name made from it, which Linux has once in a network namespace, and not any more when the process ends. It is
// ErrInUse where somebody has it. A child that is being started has all that this process has, until it runs its program:
// what was let go of a moment ago is waited for.
func (h *Host) Hold() (io.Closer, error) {
	const moment = 200 * time.Millisecond
	for end := time.Now().Add(moment); ; time.Sleep(5 * time.Millisecond) {
		held, err := hold(h.Do, h.o.Interface)
		if err == nil || !errors.Is(err, ErrInUse) || time.Now().After(end) {
			return held, err
		}
	}
}

func hold(in func(func() error) error, device string) (held io.Closer, err error) {
	addr := &net.UnixAddr{Net: "unix", Name: "@warren/" + device}
	err = in(func() error {
		l, err := net.ListenUnix("unix", addr)
		held = l
		return err
	})
	if err != nil {
		held = nil
	}
	if !errors.Is(err, unix.EADDRINUSE) {
		return held, err
	}
	who := "another process"
	_ = in(func() error {
		c, err := net.DialUnix("unix", nil, addr)
		if err != nil {
			return err
		}
		defer c.Close()
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		return raw.Control(func(fd uintptr) {
			cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
			switch {
			case err != nil || cred.Pid == 0: // of another PID namespace
			case int(cred.Pid) == os.Getpid():
				who = "this process"
			default:
				who = fmt.Sprintf("process %d", cred.Pid)
			}
		})
	})
	return nil, fmt.Errorf("device %s: %w: %s has it; end that one first, or give this one a device of its own", device, ErrInUse, who)
}
