//go:build race

package netstack

const raceOn = true
