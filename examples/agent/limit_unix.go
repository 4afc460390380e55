//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package main

import "syscall"

// descriptors returns how many the process may have open; 0 is unknown.
func descriptors() uint64 {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return 0
	}
	return uint64(l.Cur)
}
