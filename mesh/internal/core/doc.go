// Package core decides what a node of a mesh does. It is a function of what it is told: [Machine.Step]
// takes one input and the time, and returns what is to be done. It does no I/O, has no clock, starts no
// goroutine, and knows no driver and no store.
//
// Inside, everything is an index that is brought up to date for what an input touches:
//
//	record of a node -> key claims    -> is it a peer here?
//	                 -> prefix claims -> who has each prefix? -> wanted peers and routes
//	                 -> candidates    -> where do its packets go?
//
// and what was touched in the wanted State is what the next plan compares with the device. The work for
// one changed record does not grow with the mesh.
package core
