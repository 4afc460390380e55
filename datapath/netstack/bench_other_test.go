//go:build !unix

package netstack_test

import (
	"os"
	"time"
)

// cpuTime is not known here.
func cpuTime() time.Duration { return 0 }

// peakMemory is not known here.
func peakMemory(*os.ProcessState) int64 { return 0 }
