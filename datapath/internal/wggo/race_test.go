//go:build race

package wggo

const raceEnabled = true
