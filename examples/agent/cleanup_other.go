//go:build !linux

package main

import "github.com/warren-mesh/warren/examples/agent/internal/namespace"

// Only Linux has datapaths with an interface of the host.

func listLeftovers(device) ([]leftover, error) { return nil, nil }
func changedMeanwhile(error) bool              { return false }
func inUse(device) error                       { return nil }
func forwards(*namespace.Namespace) []string   { return nil }
