// Package nettest is what tests that send real packets have in common: network namespaces, the wires and
// networks that join them, nodes in them, TCP transfers, streams of datagrams that tell what was lost, and
// programs of others. It is for tests alone, and for Linux alone: elsewhere it is empty.
//
// The machine's own namespace is never touched, and no kernel module is loaded.
package nettest
