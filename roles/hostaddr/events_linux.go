package hostaddr

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const again = time.Minute

// events returns a channel that has a value once links, addresses or routes have changed, and is closed when no more is
// heard of them.
func (r *Role) events() (<-chan struct{}, func(), error) {
	var f *os.File
	err := r.o.In(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		const groups = unix.RTMGRP_LINK | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR | unix.RTMGRP_IPV4_ROUTE | unix.RTMGRP_IPV6_ROUTE
		if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		f = os.NewFile(uintptr(fd), "rtnetlink")
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("rtnetlink: %w", err)
	}
	heard, ended := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(ended)
		defer close(heard)
		b := make([]byte, 1<<16)
		for {
			// What it says does not matter: the host is looked at. Nor does it that some was lost (ENOBUFS).
			if _, err := f.Read(b); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return
			}
			select {
			case heard <- struct{}{}:
			default:
			}
		}
	}()
	return heard, func() { f.Close(); <-ended }, nil
}
