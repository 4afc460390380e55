package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
)

// cannotError is why a program cannot be run here, with the way to change that.
type cannotError string

func (e cannotError) Error() string { return string(e) }

func cannot(format string, args ...any) error { return cannotError(fmt.Sprintf(format, args...)) }

// statusError is an error with an exit status of its own.
type statusError struct {
	status int
	text   string
}

func (e statusError) Error() string { return e.text }

func main() {
	if isInit() {
		initGuest()
		return
	}
	o, err := parseArgs(os.Args[1:], os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	status := 0
	if err == nil {
		status, err = run(o)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "vmrun: %v\n", err)
		status = statusCannot
		if e := (statusError{}); errors.As(err, &e) {
			status = e.status
		}
	}
	os.Exit(status)
}
