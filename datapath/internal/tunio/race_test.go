//go:build linux && race

package tunio

const raceEnabled = true
