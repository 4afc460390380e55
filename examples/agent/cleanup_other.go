//go:build !linux

package main

// leftovers returns nothing: only Linux has a kernel datapath.
func leftovers() ([]string, error) { return nil, nil }
