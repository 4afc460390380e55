//go:build linux && race

package tun

const raceEnabled = true
