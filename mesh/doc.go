// Package mesh makes a node a member of a WireGuard mesh: it announces what the node can reach, learns
// from a registry what the others can reach, and keeps the node's device right while nodes come, go,
// move, restart and misbehave.
//
// A [Mesh] is made of a [Config] and does everything in [Mesh.Run]. Where the records are kept is a
// registry.Registry; what carries the packets is a datapath.Datapath; package mesh knows no particular
// one of either. DESIGN.md beside this file has the rules that it holds to, each with its test.
package mesh
