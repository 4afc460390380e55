//go:build race

package meshtest_test

// raceEnabled: memory and time are those of the race detector.
const raceEnabled = true
