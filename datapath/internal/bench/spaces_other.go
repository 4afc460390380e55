//go:build !linux

package main

import (
	"errors"

	"github.com/warren-mesh/warren/datapath/internal/bench/measure"
)

type tunnel struct {
	mtu, underlay int
	tuned         bool
}

func between(string, tunnel, measure.What, string) (measure.Result, error) {
	return measure.Result{}, errors.New("network namespaces are Linux's")
}
