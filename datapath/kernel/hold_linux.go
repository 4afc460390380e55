package kernel

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// ErrInUse is wrapped by the errors of New and Cleanup where another Kernel has the device.
var ErrInUse = errors.New("in use by another mesh")

// hold keeps others who use this package from having the device of that name at the same time: by a socket with
// a name made from it, which Linux has once in a network namespace, and not any more when the process ends. in
// runs a function in the namespace.
func hold(in func(func() error) error, device string) (held *net.UnixListener, err error) {
	addr := &net.UnixAddr{Net: "unix", Name: "@warren/" + device}
	err = in(func() (err error) {
		held, err = net.ListenUnix("unix", addr)
		return err
	})
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
