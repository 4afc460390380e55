//go:build race

package socks5

const bulk = 8e6
