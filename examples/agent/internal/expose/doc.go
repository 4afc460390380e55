// Package expose publishes a service of the host on an address of the mesh: connections and datagrams
// that arrive on a port there are passed on to a target that is reached through the host's own network.
// The service needs to know nothing of the mesh, and sees connections from this process.
package expose
