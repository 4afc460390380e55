//go:build linux && !race

package auto

const raceEnabled = false
