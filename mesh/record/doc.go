// Package record is what a node says of itself: its name, its key, where it can be reached and what can
// be reached through it.
//
// A record is kept in a registry as JSON, so that a person with the store's own tools can read it. It
// comes from other machines, of other versions, and maybe from an enemy: [Parse] refuses whatever is
// not exactly a record, says which field is wrong, and bounds how much one node can make all others
// hold. Fields it does not know are ignored, so that a later version may add some.
//
// Whether what a record claims is true is decided elsewhere: by package identity, whether the node may
// speak for its name, and by the mesh, whether its prefixes conflict with those of others.
package record
