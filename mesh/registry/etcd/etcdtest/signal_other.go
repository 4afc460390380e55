//go:build !unix

package etcdtest

import (
	"errors"
	"os"
)

func pauseProcess(*os.Process, bool) error { return errors.ErrUnsupported }

func endProcess(*os.Process) error { return errors.ErrUnsupported }
