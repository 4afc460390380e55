// Package memory is a registry in the process's own memory, for tests and for meshes whose nodes share
// a process.
//
// It keeps the whole contract of package registry, and can break down in the ways a store does:
// cut off and heal, resume without a gap, lose its history, come back from a backup, fail now and then,
// be slow. These faults are shipped because whoever embeds a mesh has to test against them too.
//
// It waits on nothing but channels and timers, and starts no goroutine, so that it works inside a
// testing/synctest bubble.
package memory
