// Package whole has the tests of whole hosts that the drivers of a network interface share: routing by policy, the
// MTU over underlays of all sizes, and what other programs of a host do meanwhile. There is nothing else in it.
//
// The driver of the kernel is tested where there is WireGuard, which is under vmrun; that of a TUN everywhere.
package whole
