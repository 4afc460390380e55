//go:build !race

package main

const big = 100 << 20
