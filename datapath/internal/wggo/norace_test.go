//go:build !race

package wggo

const raceEnabled = false
