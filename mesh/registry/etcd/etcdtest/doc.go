// Package etcdtest starts real etcd servers for tests, as processes that can be killed, stopped, paused,
// restarted on their data, put back to a snapshot, and cut off.
//
// The server of version 3.7 is linked in: the test binary runs itself again as the server, which an
// importer gets without doing anything for it. Another version is run from where it is installed. All
// listens on loopback only, on ports outside the range that the system takes for outgoing connections,
// so that a restarted server finds its port free, and never on etcd's own 2379 and 2380. Servers do not
// wait for the disk.
//
// Methods that take no error fail the test. All may be called from any goroutine that may call t.Fatal.
// A server does not outlive the test process, however that ends.
//
// This package links etcd's server: import it from tests only.
package etcdtest
