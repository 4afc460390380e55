// Package roles runs what a node is there for: it learns which roles the node has, and runs each while it has it.
//
// A [Role] is a name and a Run. What it may use it gets as a [Node]: it announces prefixes, sees the mesh, publishes
// values for other roles. All of that is withdrawn when Run ends, however it ends. More a role says by further small
// interfaces: [Depender], [Prober], [Privileged], [Drainer].
//
// Which roles the node has is said by an [Assigned]: [Static], a [File], its own record in the mesh ([FromMesh]),
// several of them ([Union]), each as it was known last ([Cached]). Not knowing is not the same as having none: while
// nothing is known, nothing is stopped.
//
// A [Manager] brings the two together. It starts what is assigned once what it depends on is healthy, and stops it
// before that is stopped; each role restarts by itself (package part), and no other with it. What it does and what
// keeps it from doing more is in its [View].
package roles
