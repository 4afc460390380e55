//go:build linux && race

package hostnet

const raceEnabled = true
