//go:build race

package offload

const raceEnabled = true
