// Package relay moves bytes and datagrams between two networks. It is what the agent's SOCKS server
// and its exposed services have in common: connections that are accepted and counted, streams copied
// in both directions, datagrams carried over one connection for each who sends.
//
// Everything is bounded: connections and flows in number, memory in bytes, silence in time. Whatever
// starts a goroutine waits for it before it returns.
package relay
