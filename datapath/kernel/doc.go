// Package kernel is the datapath of Linux's own WireGuard, which encrypts and forwards without this
// process: a device goes on when the process that made it ends, and another one adopts it.
//
// It needs Linux 5.6 with its wireguard module and CAP_NET_ADMIN, and nothing else of root's. [New] says
// what is missing, and changes nothing; elsewhere than on Linux it returns errors.ErrUnsupported.
//
// # What is said to the device
//
// Messages of its own, not those of wgctrl: a peer is put, never replaced, and so are its prefixes;
// many peers share a message, and one peer with many prefixes has several. A prefix is taken away
// without touching the others of its peer: Linux 6.16 can do that; before, the prefix is put on a peer that
// nobody is (see [Kernel.RemovesPrefixes]). Which of the two is found out on a device made
// for that and removed again. What was said is read back, and what the device has otherwise is an error.
//
// A list that changed while Linux wrote it is read again: no decision rests on half of one.
//
// # Who else touches it
//
// Changed reports what others do to links, addresses, routes and rules as it happens. Linux tells nobody
// of changes of WireGuard's own, so the device is read every second for them, or less often where that
// would take more than a twentieth of the time.
package kernel
