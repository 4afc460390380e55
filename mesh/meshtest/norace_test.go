//go:build !race

package meshtest_test

const raceEnabled = false
