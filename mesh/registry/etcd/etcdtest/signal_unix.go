//go:build unix

package etcdtest

import (
	"os"
	"syscall"
)

func pauseProcess(p *os.Process, pause bool) error {
	if pause {
		return p.Signal(syscall.SIGSTOP)
	}
	return p.Signal(syscall.SIGCONT)
}

func endProcess(p *os.Process) error { return p.Signal(syscall.SIGTERM) }
