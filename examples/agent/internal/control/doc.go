// Package control is how the agent's commands talk to a running agent: HTTP and JSON through a unix
// socket that only the agent's user can open.
//
//	GET  /v1/status               Status
//	GET  /v1/status?watch=1       a Status now, and another whenever there is a newer one, a line each
//	POST /v1/leave                withdraws the node's record; the agent then ends
//	POST /v1/forget?node=&force=  deletes the record of another node
//	POST /v1/ping?to=&timeout=    Pong
//	POST /v1/dial?network=&to=    101, and then the bytes of a connection in the mesh
//
// What goes wrong is an Error with a status of 4xx or 5xx. To in ping and dial is a node's name, its name
// with that of the mesh (alpha.warren), or an address.
//
//	curl --unix-socket DIR/agent.sock http://agent/v1/status
package control
