// Package socks5 is a SOCKS5 server (RFC 1928, and RFC 1929 for user names) through which programs that
// know nothing of the mesh use it, without privilege: CONNECT for TCP, UDP ASSOCIATE for UDP. It is
// written here because the libraries at hand lack the latter.
//
//	curl --socks5-hostname 127.0.0.1:1080 http://node-7:8080/
//
// BIND is refused. So is authentication by GSSAPI, which no client insists on.
//
// Whoever reaches the listener uses the mesh in this node's name. It belongs on a loopback address, or
// behind Server.Auth.
package socks5
