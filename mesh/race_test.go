//go:build race

package mesh_test

// raceEnabled says that the race detector is on, which makes key exchange many times slower: what
// takes how long then says nothing.
const raceEnabled = true
