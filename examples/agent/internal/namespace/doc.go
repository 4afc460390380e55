// Package namespace has things done in a network namespace of Linux, such as to make sockets there. A socket
// belongs for good to the namespace of the thread that made it, whoever uses it later.
package namespace
