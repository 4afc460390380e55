package view

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/prefixes"
)

// View is the mesh as one node sees it at one moment. It is shared by all who asked for it: its slices
// and maps are not to be written to.
type View struct {
	// Running: a Run is under way. Without one nothing here changes.
	Running bool
	// Err is what the last Run returned, where none is under way; nil also before the first.
	Err error
	// Ready: all that the registry had at the first complete reading has been put to the device.
	Ready bool
	// Version rises with every View of one Run.
	Version uint64
	// Revision is the registry's, see registry.Batch.
	Revision uint64
	Self     Self
	// Peers are all other nodes with a record that is believed, by node ID.
	Peers []Peer
	// Withheld are the prefixes of peers that are not used here, by node and prefix, each with a reason.
	Withheld []Withheld
	// Conditions are what is wrong, by kind, node and subject.
	Conditions []Condition
}

// Self is this node.
type Self struct {
	Node       string
	Key        key.Public
	ListenPort uint16        // the real one; 0: no device yet
	MTU        int           // bytes of the largest inner packet; 0: no device yet
	Datapath   string        // what carries the packets, as datapath.Host has it; empty: not known
	Instead    string        // why no better datapath does, where one was looked for; else empty
	Record     record.Record // as published last; the zero Record: not yet
	Published  bool          // the registry has accepted Record
	Local      prefixes.Set  // accepted here now, including what was withdrawn a moment ago
}

// Peer is another node.
type Peer struct {
	Node      string
	Key       key.Public
	Addresses prefixes.Set // its own addresses in the mesh, as host prefixes
	// Prefixes are what the device sends to it, Addresses included: what it claims less what is withheld,
	// once the device has it. They follow the device, and Conditions and Withheld what was decided. A moment
	// may lie between, in which a prefix is neither here nor withheld, or a condition is over and its
	// prefix not here yet.
	Prefixes prefixes.Set
	Roles    []string
	Labels   map[string]string

	// Endpoint is where its packets go now: the device's, be it configured or learned.
	Endpoint netip.AddrPort
	// Candidates are the endpoints that its record names.
	Candidates []record.Endpoint
	// LastHandshake is zero until the first on this device.
	LastHandshake  time.Time
	Received, Sent uint64 // encrypted bytes, as of the device's last reading
	// SetAside: it is no peer on the device; the reason is a condition.
	SetAside bool
}

// Withheld is a prefix that a node claims and that is not sent to it from here.
type Withheld struct {
	Node   string
	Prefix netip.Prefix
	Kind   Kind   // of the condition that says more
	Winner string // who has it instead; empty where it is nobody
}

// Kind is what is wrong. Kinds are stable: programs may match on them.
type Kind string

// The kinds of conditions.
const (
	AnnouncementRefused Kind = "announcement-refused" // something announced here was not taken, or only after a fix
	DeviceContested     Kind = "device-contested"     // another program takes the device, or keeps changing it; over after two audits without
	DeviceUnreadable    Kind = "device-unreadable"
	DuplicateNode       Kind = "duplicate-node" // another process publishes as this node; seen within some 30 s, over after 2 minutes without
	EndpointLoops       Kind = "endpoint-loops" // an endpoint is inside a prefix that goes, or would go, into the mesh
	EndpointUnusable    Kind = "endpoint-unusable"
	HostProblem         Kind = "host-problem" // something of the host keeps packets from arriving, or makes them slow; the subject says what
	KeyConflict         Kind = "key-conflict"
	LocalWins           Kind = "local-wins" // a peer's prefix is this node's own, or a network connected here
	NoHandshake         Kind = "no-handshake"
	OpFailed            Kind = "op-failed" // the device did not take a change
	PortInUse           Kind = "port-in-use"
	PrefixConflict      Kind = "prefix-conflict"
	PrefixRefused       Kind = "prefix-refused" // a prefix that policy does not allow
	PublishFailed       Kind = "publish-failed"
	RecordExpired       Kind = "record-expired"
	RecordRefused       Kind = "record-refused"
	RegistryDown        Kind = "registry-down"
	RegistryShrank      Kind = "registry-shrank" // it lost most nodes at once, or went back to an earlier state; what it lacks is kept until it was read again
	SourceOutside       Kind = "source-outside"  // a source address that peers would not accept from this node
	StateUnkept         Kind = "state-unkept"    // the state folder does not take what is to outlive the process, or has it corrupt
)

// Condition is something that is wrong: what, since when, for whom, and what to do about it. Where one kind
// is true of many prefixes of a node, or of many things of a host, the first 8 prefixes, or 16 things, have one
// each, and one without a subject counts the rest.
type Condition struct {
	Kind    Kind      `json:"kind"`
	Node    string    `json:"node,omitempty"`    // whom it is about; empty: no node in particular
	Subject string    `json:"subject,omitempty"` // the prefix, key, endpoint, source or step it is about; may be empty
	Since   time.Time `json:"since"`
	Message string    `json:"message"`          // what is wrong, naming things and never a private key
	Remedy  string    `json:"remedy,omitempty"` // what an operator can do; empty where it mends itself
}

// String is one line for a log.
func (c Condition) String() string {
	var b strings.Builder
	b.WriteString(string(c.Kind))
	for _, s := range []string{c.Node, c.Subject} {
		if s != "" {
			b.WriteString(" " + s)
		}
	}
	fmt.Fprintf(&b, ": %s", c.Message)
	if c.Remedy != "" {
		fmt.Fprintf(&b, " (%s)", c.Remedy)
	}
	return b.String()
}

// Peer returns the peer called node.
func (v View) Peer(node string) (Peer, bool) {
	i, ok := slices.BinarySearchFunc(v.Peers, node, func(p Peer, n string) int { return strings.Compare(p.Node, n) })
	if !ok {
		return Peer{}, false
	}
	return v.Peers[i], true
}

// Find yields the conditions of one kind.
func (v View) Find(kind Kind) iter.Seq[Condition] {
	return func(yield func(Condition) bool) {
		for _, c := range v.Conditions {
			if c.Kind == kind && !yield(c) {
				return
			}
		}
	}
}

// Changes is how one View differs from an earlier one. What merely counts (handshakes, bytes) is no
// difference.
type Changes struct {
	// Joined are not in the old View. Where a View lies between a peer's record and its place on the
	// device, the peer has no Prefixes yet, and is in a later Changed with them.
	Joined  []Peer
	Left    []Peer   // not in the new View, as they were
	Changed []Change // in both
	Raised  []Condition
	Cleared []Condition // as they were
}

// Change is one peer before and after.
type Change struct{ Old, New Peer }

// IsEmpty reports whether nothing changed.
func (c Changes) IsEmpty() bool {
	return len(c.Joined)+len(c.Left)+len(c.Changed)+len(c.Raised)+len(c.Cleared) == 0
}

// Diff returns what changed from old to new. The zero View stands for before the first.
func Diff(old, new View) Changes {
	var c Changes
	merge(old.Peers, new.Peers, func(p Peer) string { return p.Node },
		func(p Peer) { c.Left = append(c.Left, p) },
		func(p Peer) { c.Joined = append(c.Joined, p) },
		func(o, n Peer) {
			if !same(o, n) {
				c.Changed = append(c.Changed, Change{o, n})
			}
		})
	merge(old.Conditions, new.Conditions, sortKey,
		func(x Condition) { c.Cleared = append(c.Cleared, x) },
		func(x Condition) { c.Raised = append(c.Raised, x) },
		func(o, n Condition) {
			if !o.Since.Equal(n.Since) {
				c.Cleared = append(c.Cleared, o)
				c.Raised = append(c.Raised, n)
			}
		})
	return c
}

func sortKey(c Condition) string { return string(c.Kind) + "\x00" + c.Node + "\x00" + c.Subject }

// Sort puts conditions in the order a View has them.
func Sort(cs []Condition) {
	slices.SortFunc(cs, func(a, b Condition) int { return strings.Compare(sortKey(a), sortKey(b)) })
}

func same(a, b Peer) bool {
	return a.Key == b.Key && a.Addresses == b.Addresses && a.Prefixes == b.Prefixes && a.Endpoint == b.Endpoint &&
		a.SetAside == b.SetAside && a.LastHandshake.IsZero() == b.LastHandshake.IsZero() &&
		slices.Equal(a.Roles, b.Roles) && slices.Equal(a.Candidates, b.Candidates) && maps.Equal(a.Labels, b.Labels)
}

// merge walks two lists sorted by name.
func merge[T any](old, new []T, name func(T) string, gone, came func(T), both func(o, n T)) {
	for len(old) > 0 || len(new) > 0 {
		switch {
		case len(new) == 0 || len(old) > 0 && name(old[0]) < name(new[0]):
			gone(old[0])
			old = old[1:]
		case len(old) == 0 || name(new[0]) < name(old[0]):
			came(new[0])
			new = new[1:]
		default:
			both(old[0], new[0])
			old, new = old[1:], new[1:]
		}
	}
}
