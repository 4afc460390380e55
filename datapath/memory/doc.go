// Package memory is a WireGuard device that carries no packets: the reference that other datapaths
// are compared with, and what an embedder tests against.
//
// It obeys the contract of [datapath.Datapath] to the letter: a prefix put on one peer leaves any
// other, a removed prefix is given back to nobody, and a peer that has the device's own key does not
// exist. It can be told to fail, to be slow, and to be changed by someone else.
//
// Devices on one [Network] shake hands as WireGuard does: an initiation reaches whoever listens at
// the peer's endpoint, and is answered only by a device that has the sender as a peer with the same
// preshared key. The answer is sent to where the initiation came from.
package memory
