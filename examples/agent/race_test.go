//go:build race

package main

// big is how many bytes are downloaded: with the race detector, encryption is slow.
const big = 16 << 20
