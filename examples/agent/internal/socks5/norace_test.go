//go:build !race

package socks5

// bulk is how many bytes a long transfer has. The race detector's are fewer: it slows down WireGuard
// more than anything else.
const bulk = 100e6
