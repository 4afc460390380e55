// Package meshtest runs a whole mesh in one process: real nodes over a registry and devices in memory
// that fail on demand, or over any other datapath. What the devices end up as is compared with an
// oracle: slow and obvious code that computes, from what the registry holds, what every device has to
// be, and shares nothing with the code that it judges.
//
// It is for tests of programs that embed package mesh: of their Config, of a datapath or a registry of
// their own, of what they announce and when. It runs in real time, and, with what is in memory, inside a
// testing/synctest bubble, where an hour of outage takes milliseconds.
//
// All that is random follows Options.Seed: keys, and the steps of [Cluster.Chaos]. How goroutines
// interleave is not replayed.
package meshtest
