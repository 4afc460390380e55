// Package auto is the best datapath that works on this host: Linux's own WireGuard (package kernel), else
// wireguard-go on a network interface (package tun), else wireguard-go on a network stack in this process
// (package netstack), which works everywhere.
//
//	d, err := auto.New(auto.Options{})
//	// d.Chosen() is "kernel", "tun" or "netstack"; datapath.Host.Instead of a reading says why no better one
//
// # What makes it go on to the next
//
// Only what says "not here": an error that is errors.ErrUnsupported (no WireGuard in the kernel, no
// /dev/net/tun, not Linux), or that is fs.ErrPermission (no CAP_NET_ADMIN). Whatever else is wrong is New's error: a
// name that cannot be an interface's, a namespace that does not exist, a device in use by another mesh. A worse
// datapath in its place would hide that.
//
// A datapath that cannot do what Options ask for is passed over too: the kernel has its sockets where its device
// is, for one. Where none is left, New's error says of each why.
//
// The choice is made once, by New. A program that is started again chooses again, so that it has the kernel's
// WireGuard as soon as the host has.
//
// # What a program does with netstack
//
// kernel and tun have the whole host in the mesh. With netstack only this program is: it dials and listens
// through [Auto.Netstack], as nothing of the mesh can be reached by way of the host. [Options] whose loss other
// programs would notice, such as Namespace or Guard, are therefore an error of New where only netstack is left; those
// that say what an interface is like are of no account then. A program that has no use for netstack leaves it out of
// Options.Try.
//
// # What an earlier start left
//
// A device of the same Options.Interface is taken over where it is of the same kind, and replaced by the first
// SetDevice where it is not: the kernel's by a TUN interface, and the other way round. Addresses that SourceLoopback
// put on the loopback interface are taken over by both. netstack touches nothing of the host. A device of the kernel's
// that is left beside it would go on answering with a key of its own, and be in the way of the port; a reading
// reports it as a problem, and [Cleanup] removes it.
package auto
