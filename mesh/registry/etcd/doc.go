// Package etcd is a registry on an existing etcd, of version 3.4 or newer.
//
// An entry "node/a" is kept as it is, opaque, at the key Prefix+"node/a". Nothing hangs on a lease: what
// was put stays until it is deleted, whatever becomes of who put it. Keys below the prefix that are no
// valid ID, and values longer than registry.MaxData, are ignored and logged.
//
// # Watching
//
// A Watch lists its kind with linearizable reads, page by page at one revision, and then watches from
// the next. Ranging over Watch anew is therefore a linearizable read of everything there is: it sees
// whatever any client was told to be stored before.
//
// When the connection or the leader is lost, the watch resumes where it was, and no Reset is seen. A
// Reset comes only after a gap: the history was compacted while cut off and the kind changed since, the
// cluster is another one (its ID changed), the store went back (a backup was restored), or the server
// cancelled the watch for a reason it does not tell. A re-list after a gap waits a random time, of 1 ms
// per entry on average and at most Timeout, so that a thousand nodes do not list at once.
//
// A store that went back may have been written to since, by other programs too, and be ahead of where it
// was seen last; its IDs and its term may be the same. So before a watch resumes, it compares what it
// knows with what the store had at that revision, or where that is compacted, has now: all keys and the
// revisions that put them, and the values too where they are less than 64 KiB in all, else that of the
// entry put last. Where they are the same, resuming is right whatever happened in between. This costs,
// for each watch that resumes, about 100 bytes per entry on the wire and 1.5 ms of the server's time for
// a thousand. That is hardly more than a look for the last change would cost, for which the server reads
// every entry too. When a member is lost, only the watches that it served resume, spread as below.
//
// # Times
//
// With T for Config.Timeout, 5 s if not set:
//
//   - A server that is silent, whatever state its connections are in, is an error at most T after its
//     last sign of life: a running watch asks for one every T/2. What is lost and found again within T
//     is no error.
//   - A lost connection is tried again after a random time of up to 0.6 T, and then of 0.4 T to
//     0.8 T: however many watchers lost it at once, they do not come back at once. Recovery takes at
//     most T, not counting a re-list. With one, and where the loss has to be noticed first, all are back
//     after 4 T: see Registry.Rejoin.
//   - A server that answers with errors is asked again after a random time of up to 0.6 T, doubling to
//     6 T; one that refuses the credentials, doubling to 12 T, or at once after Reload. Retries never
//     end. The delays shrink again once a watch has been running for 12 T.
//   - An error of one kind is yielded once, and while it lasts again after 6 T, then after delays that
//     double up to an hour.
//   - Put, Delete and Swap take at most T. A member that answers none of them for T, in one call or in
//     several whose contexts ended before, is left for another.
//
// # Weight
//
// This package links etcd's client, gRPC and protobuf. Only programs that import it do.
package etcd
