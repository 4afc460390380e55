//go:build !linux || !amd64

package main

import (
	"fmt"
	"runtime"
)

func isInit() bool { return false }
func initGuest()   {}

func run(options) (int, error) {
	return 0, fmt.Errorf("it runs on linux/amd64, and this is %s/%s", runtime.GOOS, runtime.GOARCH)
}
