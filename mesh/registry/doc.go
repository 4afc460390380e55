// Package registry says what a mesh needs of the place where its records are kept: put, delete, and
// watch opaque bytes by ID.
//
// A registry knows nothing of what it keeps. An ID is "kind/name"; a mesh watches the kind [KindNode],
// and signed trust, which is planned, will watch the kind [KindTrust]. What the bytes mean, and whether
// they are to be believed, is decided above, so that any store that can list and watch will do: the
// in-process one in registry/memory, the one in registry/etcd, or an embedder's own, which proves itself
// with registry/registrytest.
//
// A watcher never sees a history. It sees what is there, as one complete batch, and then what changed,
// merged as far as it was too slow to take single changes. Whenever changes may have been missed, a
// complete batch comes again. A deletion can therefore be missed only until the next complete batch,
// and memory is bounded by the size of the mesh and not by how much happened.
package registry
