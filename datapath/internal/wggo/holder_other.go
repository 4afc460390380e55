//go:build !linux

package wggo

// portHolder returns which process has a UDP port; no portable way is known.
func portHolder(uint16) string { return "" }
