// Agent is a program that makes a host a node of a Warren mesh, without privilege or, where the whole host is to
// use it, with CAP_NET_ADMIN. It is what a node agent looks like that imports Warren, and of use as
// it is.
//
//	agent run --registry etcd://192.0.2.1:2379 --expose 80=127.0.0.1:8080 --socks5 127.0.0.1:1080
//
// Nodes find each other in the registry: an etcd, or with "memory" nobody, to try it alone. A node is
// called as its host is. Its address follows from its name and the mesh's (RFC 4193), so that none has to
// be handed out, and its endpoints are the host's addresses, as they come and go. --node, --address,
// --endpoint and more say otherwise; "agent help settings" has them all. The same settings are flags,
// variables of the environment (WARREN_REGISTRY) and keys of a YAML file (--config), in this order of
// precedence, and "agent config" says what is in force and why.
//
// Other programs use the mesh through the agent. --socks5 lets those of this host connect to nodes by name
// or address, by TCP and UDP. --expose lets the mesh reach a service of this host. "agent fetch" and "agent
// ping" try it.
//
// # The whole host
//
// With another --datapath than netstack the whole host is in the mesh, through the interface that --interface names.
// With kernel, Linux's own WireGuard carries the packets. It goes on when the agent stops or dies, and the next agent
// adopts it as it is. With tun this process does, and the interface ends with it. auto has the best that works here:
// kernel, tun, or else netstack; "agent status" says which, and why no better one.
//
// What reaches the mesh is then the host's network stack: --socks5, --expose, "agent fetch" and "agent ping" use it,
// and are kept to the mesh. "agent leave" removes the interface and what belongs to it, and "agent cleanup" what an
// agent left that is gone. agent.service is a unit for systemd.
//
// With --routing policy a prefix may contain the endpoints of nodes, and a default route may lead into the mesh:
// encrypted packets have a mark, by which rules keep them out of the mesh's own routing table, and so does what the
// agent sends to its registry. What --guard names leaves by way of the mesh or not at all, be the agent there or not.
//
// --netns has the interface in another network namespace, and what uses the mesh by it: the ends of --socks5,
// --expose, "agent fetch" and "agent ping" that are in the mesh. Their other ends, the registry and the control socket
// stay where the agent is. With tun, --underlay-netns has the UDP sockets elsewhere than the interface.
//
// # State
//
// The state folder has what a node must not lose: its key, how often it started, and what it last knew of
// the others, with which it starts where the registry is away. One process at a time has it, for one node
// of one mesh. The socket agent.sock in it is how the other commands reach the agent: "agent status" shows
// node, peers and what is wrong, "agent leave" takes the node out of the mesh, "agent forget NODE" deletes
// what a dead node left behind. Only the agent's user can open it.
//
// # Meshes in one registry
//
// What a mesh has in an etcd is below /warren/NAME/, so that several share one. The first node marks the
// registry with the entry mesh/name, which has the mesh's name. A node that finds another name there, as
// it was given a wrong prefix, neither reads nor writes anything and ends with exit status 5. Where the
// registry cannot be reached this is found out later, before anything else is read. "agent leave" and "agent
// forget" mark nothing: without an agent they work on a registry that is the mesh's already, or not at all.
//
// A user of etcd needs permission to read /warren/NAME/ and to read and write /warren/NAME/node/ID, where ID
// is its node. The first node of a mesh writes the mark, and needs /warren/NAME/mesh/name for that.
//
// # Signals
//
// SIGTERM and SIGINT end the agent within seconds and keep the node's record: it has its place in the mesh
// when it is back. A second one ends it at once. SIGHUP has it read its configuration again, and take up
// what may change: the registry's members and credentials, and the log level. A registry that turns out to
// be another mesh's is not taken up, and the agent goes on with the one it has; one that cannot be reached is
// taken up, and looked at before anything goes in or out. It tells systemd when it is up (Type=notify).
//
// # Exit status
//
// 0: done. 1: failed. 2: wrong flags, arguments or configuration. 3: no agent is running. 4: the state
// folder is in use, or another node's or mesh's. 5: the registry holds another mesh.
//
// # Reading it
//
// agent.go puts the parts together, and is the place to begin. carrier.go has the datapaths, device.go knows what
// they leave on a host, store.go keeps two meshes apart, internal/config has the table of settings, internal/control
// the socket's protocol.
package main
