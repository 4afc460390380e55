package control

import (
	"net/netip"
	"slices"
	"time"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// Status is what a running agent says of itself and the mesh. Its JSON may get more fields, and keeps
// those it has.
type Status struct {
	Agent Process `json:"agent"`

	Ready    bool   `json:"ready"` // all that the registry had at first is on the device
	Version  uint64 `json:"version"`
	Revision uint64 `json:"revision"` // of the registry

	Self       Self        `json:"self"`
	Peers      []Peer      `json:"peers"`
	Withheld   []Withheld  `json:"withheld"`
	Conditions []Condition `json:"conditions"`
}

// Process is the agent itself.
type Process struct {
	PID      int       `json:"pid"`
	Build    string    `json:"build"`
	Started  time.Time `json:"started"`
	Mesh     string    `json:"mesh"`
	Registry string    `json:"registry"` // without a password
	Datapath string    `json:"datapath"` // as it was asked for

	// Of the interface of the host, where there is one.
	Interface         string         `json:"interface,omitempty"`
	Namespace         string         `json:"namespace,omitempty"`         // that it is in; empty: the agent's
	UnderlayNamespace string         `json:"underlayNamespace,omitempty"` // that the UDP sockets are in; empty: that of the interface
	Routing           string         `json:"routing,omitempty"`           // main or policy
	Table             int            `json:"table,omitempty"`             // of the routes
	Mark              string         `json:"mark,omitempty"`              // of encrypted packets, and its mask; for policy routing
	Guard             []netip.Prefix `json:"guard,omitempty"`             // reached by way of the interface or not at all

	State  string   `json:"state"`
	Socks5 string   `json:"socks5,omitempty"` // where it listens, with the real port
	Expose []string `json:"expose,omitempty"`
}

// Self is this node.
type Self struct {
	Node      string         `json:"node"`
	Key       string         `json:"key"`
	Addresses []netip.Addr   `json:"addresses"`
	Local     prefixes.Set   `json:"local"` // what is accepted here
	Endpoints []string       `json:"endpoints"`
	Listen    uint16         `json:"listen"` // UDP port; 0: no device yet
	MTU       int            `json:"mtu"`
	Datapath  string         `json:"datapath"`          // what carries the packets; "" is not known yet
	Instead   string         `json:"instead,omitempty"` // why no better one does, where one was looked for
	Published bool           `json:"published"`         // the registry has taken the newest record
	Record    *record.Record `json:"record,omitempty"`
}

// Peer is another node.
type Peer struct {
	Node          string            `json:"node"`
	State         State             `json:"state"`
	Key           key.Public        `json:"key"`
	Addresses     []netip.Addr      `json:"addresses"`
	Prefixes      prefixes.Set      `json:"prefixes"` // what goes to it, addresses included
	Endpoint      string            `json:"endpoint"` // in use; "" is none
	Candidates    []string          `json:"candidates"`
	LastHandshake *time.Time        `json:"lastHandshake"` // null: none yet
	Received      uint64            `json:"received"`
	Sent          uint64            `json:"sent"`
	Roles         []string          `json:"roles,omitempty"`
	Labels        map[string]string `json:"labels,omitempty"`
}

// State is how it stands with a peer.
type State string

// The states of peers.
const (
	Up       State = "up"        // there is a session
	Idle     State = "idle"      // there was one; the next packet makes another
	Waiting  State = "new"       // there was none yet
	SetAside State = "set-aside" // a condition says why
)

// sessionLasts is how long after its handshake a WireGuard session may be used: Reject-After-Time of the
// protocol, section 6.1 of the paper.
const sessionLasts = 180 * time.Second

// Withheld is a prefix that a node claims and that is not sent to it.
type Withheld struct {
	Node   string       `json:"node"`
	Prefix netip.Prefix `json:"prefix"`
	Kind   view.Kind    `json:"kind"`
	Winner string       `json:"winner,omitempty"`
}

// Condition is something that is wrong now.
type Condition struct {
	Kind    view.Kind `json:"kind"`
	Node    string    `json:"node,omitempty"`
	Subject string    `json:"subject,omitempty"`
	Since   time.Time `json:"since"`
	Message string    `json:"message"`
	Remedy  string    `json:"remedy,omitempty"`
}

// StatusOf returns the Status of a View at a moment.
func StatusOf(p Process, v view.View, now time.Time) Status {
	s := Status{
		Agent: p, Ready: v.Ready, Version: v.Version, Revision: v.Revision,
		Self: Self{
			Node: v.Self.Node, Key: v.Self.Key.String(), Local: v.Self.Local, Listen: v.Self.ListenPort,
			MTU: v.Self.MTU, Datapath: v.Self.Datapath, Instead: v.Self.Instead, Published: v.Self.Published,
			Addresses: hosts(v.Self.Record.Addresses), Endpoints: texts(v.Self.Record.Endpoints),
		},
		Peers: []Peer{}, Withheld: []Withheld{}, Conditions: []Condition{},
	}
	if v.Self.Record.ID != "" {
		s.Self.Record = &v.Self.Record
	} else { // what it would publish
		for p := range v.Self.Local.All() {
			if p.IsSingleIP() {
				s.Self.Addresses = append(s.Self.Addresses, p.Addr())
			}
		}
	}
	for _, p := range v.Peers {
		q := Peer{
			Node: p.Node, Key: p.Key, Addresses: hosts(p.Addresses), Prefixes: p.Prefixes, State: Waiting,
			Candidates: texts(p.Candidates), Received: p.Received, Sent: p.Sent, Roles: slices.Clone(p.Roles), Labels: p.Labels,
		}
		if p.Endpoint.IsValid() {
			q.Endpoint = p.Endpoint.String()
		}
		if !p.LastHandshake.IsZero() {
			q.LastHandshake, q.State = &p.LastHandshake, Idle
			if now.Sub(p.LastHandshake) < sessionLasts {
				q.State = Up
			}
		}
		if p.SetAside {
			q.State = SetAside
		}
		s.Peers = append(s.Peers, q)
	}
	for _, w := range v.Withheld {
		s.Withheld = append(s.Withheld, Withheld(w))
	}
	for _, c := range v.Conditions {
		s.Conditions = append(s.Conditions, Condition(c))
	}
	return s
}

func hosts(s prefixes.Set) []netip.Addr {
	out := []netip.Addr{}
	for p := range s.All() {
		out = append(out, p.Addr())
	}
	return out
}

func texts(es []record.Endpoint) []string {
	out := []string{}
	for _, e := range es {
		out = append(out, e.String())
	}
	return out
}

// Pong is the answer of a node.
type Pong struct {
	Addr netip.Addr    `json:"addr"`
	RTT  time.Duration `json:"rtt"` // in nanoseconds
}

// Error is what a running agent answers when it cannot do what it was asked.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"error"`
}

func (e *Error) Error() string { return e.Message }

// Code is what kind of Error it is.
type Code string

// The codes.
const (
	BadRequest Code = "bad-request"
	NoSuchNode Code = "no-such-node"
	Refused    Code = "refused" // as asked for, but it may be forced
	NoAnswer   Code = "no-answer"
	Failed     Code = "failed"
)
