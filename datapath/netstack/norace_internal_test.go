//go:build !race

package netstack

const raceOn = false
