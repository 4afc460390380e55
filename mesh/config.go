package mesh

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/internal/resolve"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/prefixes"
)

// Config is what a node is told. Node, Registry and Datapath are needed; every other zero field is a
// default.
type Config struct {
	// Node is this node's ID, one per node: a DNS name in lower case, at most 253 bytes. Of two nodes
	// that claim the same prefix or key, the lower ID has it.
	Node string
	// Registry is where the nodes' records are kept. The caller owns and closes it.
	Registry registry.Registry
	// Datapath is what carries the packets. The caller owns it, and closes it when Run has returned.
	Datapath datapath.Datapath
	// Trust seals and opens records. nil: identity.Plain, which believes what the registry says.
	Trust identity.Trust

	// StateDir is a folder, made with mode 0700, that keeps the node's key, counts its starts, and has what
	// the registry last said of the others, so that a start with the registry down reaches them. One process
	// at a time has it. Empty: a key that lives as long as the Mesh, and nothing else.
	StateDir string
	// Key is the node's key, for those who keep it themselves. Not together with StateDir.
	Key key.Private

	// Addresses are this node's own in the mesh. They are announced as host prefixes.
	Addresses []netip.Addr
	// Announce are prefixes this node can reach, for as long as it runs. They are announced under the
	// name ConfigSource. More, and those that change, go through Mesh.Prefixes.
	Announce []netip.Prefix
	// Endpoints are where others may reach this node over the underlay, the best first: addresses, or host
	// names, which those others look up. Port 0 stands for the device's real one. Mesh.SetEndpoints changes
	// them. Empty: the node cannot be called and calls others, and keeps the
	// mappings of a NAT between open. Loopback endpoints of others are called only where this is empty
	// or has one, too.
	Endpoints []Endpoint
	// ListenPorts are the UDP ports the device may have.
	ListenPorts Ports
	// Mark is the firewall mark of encrypted packets. 0: the datapath chooses.
	Mark uint32
	// MTU is that of inner packets in bytes, 1280 to 65535. 0: the datapath chooses.
	MTU int
	// Keepalive is how often an idle peer is sent an empty packet, in whole seconds up to 65535.
	// 0: every 25 s where Endpoints is empty, else never. Below 0: never.
	Keepalive time.Duration
	// Roles and Labels are published in the node's record.
	Roles  []string
	Labels map[string]string

	// Accept says which prefixes of a node are accepted, this node's own announcements included. It is
	// asked once for each, must give the same answer on every node and at any time, and must neither block
	// nor call the Mesh.
	// nil: AcceptNarrow. What no policy may allow is not asked for: loopback, link-local, multicast and
	// unspecified addresses.
	Accept func(node string, p netip.Prefix) bool

	// Lookup returns the addresses of a host name that is an endpoint of another node, and how long they
	// may be used. It is called in the background, several times at once, and is to return soon after ctx
	// ends. nil: HostLookup(nil).
	Lookup func(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error)

	// Logger is told what an operator can act on, once: conditions, and peers that come and go. nil: nobody.
	Logger *slog.Logger

	// Window is how long changes are gathered before the device is written, so that a burst is one
	// write. 0: 10 ms. At most 1 s.
	Window time.Duration
	// Audit is how often the device is read and compared as a whole. 0: 15 s. At least 1 s.
	Audit time.Duration
	// Linger is how long packets for a withdrawn prefix are still accepted after the record without it
	// was published, so that what is on its way when a prefix moves is not lost. 0: 3 s. Below 0: not
	// at all.
	Linger time.Duration
}

// Ports is a range of UDP ports, both ends included. The zero Ports is any port. Last may be left 0
// for the one port First. In a range, the first free port is taken.
type Ports struct{ First, Last uint16 }

func (p Ports) String() string {
	switch {
	case p.First == 0:
		return "any"
	case p.Last == 0 || p.Last == p.First:
		return fmt.Sprint(p.First)
	}
	return fmt.Sprintf("%d-%d", p.First, p.Last)
}

// AcceptNarrow is the default of Config.Accept: no default route, and nothing wider than /8 (IPv4) or
// /16 (IPv6).
func AcceptNarrow(_ string, p netip.Prefix) bool { return core.Narrow(p) }

// ErrConfig is wrapped by the errors of New.
var ErrConfig = errors.New("bad configuration")

// check returns what is wrong with c, naming field and value, and c with its defaults.
func (c Config) check() (Config, error) {
	var errs []error
	bad := func(field, format string, a ...any) {
		errs = append(errs, fmt.Errorf("%w: Config.%s: %s", ErrConfig, field, fmt.Sprintf(format, a...)))
	}
	if err := registry.CheckName(c.Node); err != nil {
		bad("Node", "%v", err)
	}
	if c.Registry == nil {
		bad("Registry", "is nil")
	}
	if c.Datapath == nil {
		bad("Datapath", "is nil")
	}
	if c.Trust == nil {
		c.Trust = identity.Plain()
	}
	if c.StateDir != "" && !c.Key.IsZero() {
		bad("Key", "is set, and so is StateDir (%s), which has a key of its own", c.StateDir)
	}
	for _, a := range c.Addresses {
		switch p := prefixes.Host(a); {
		case !p.IsValid():
			bad("Addresses", "%v is no address, or has a zone", a)
		case core.Never(p):
			bad("Addresses", "%v is loopback, link-local, multicast or unspecified", a)
		}
	}
	accept := c.Accept
	if accept == nil {
		accept = AcceptNarrow
	}
	for _, p := range c.Announce {
		switch q, _, err := prefixes.Canonical(p); {
		case err != nil:
			bad("Announce", "%v", err)
		case core.Never(q):
			bad("Announce", "%v is loopback, link-local, multicast or unspecified", q)
		case !accept(c.Node, q):
			bad("Announce", "%v is not allowed: default routes, and what is wider than /8 (IPv4) or /16 (IPv6), need Accept to allow them", q)
		}
	}
	if len(c.Announce) > record.MaxPrefixes {
		bad("Announce", "has %d, at most %d are allowed", len(c.Announce), record.MaxPrefixes)
	}
	for _, err := range checkEndpoints(c.Endpoints) {
		bad("Endpoints", "%v", err)
	}
	if p := c.ListenPorts; p.Last != 0 && p.Last < p.First || p.First == 0 && p.Last != 0 {
		bad("ListenPorts", "%d-%d is no range", p.First, p.Last)
	}
	if c.MTU != 0 && (c.MTU < 1280 || c.MTU > 65535) {
		bad("MTU", "%d is outside 1280 to 65535", c.MTU)
	}
	if c.Keepalive > 0 {
		if err := datapath.CheckKeepalive(c.Keepalive); err != nil {
			bad("Keepalive", "%v", err)
		}
	}
	if c.Window < 0 || c.Window > time.Second {
		bad("Window", "%v is outside 0 to 1s", c.Window)
	}
	if c.Audit != 0 && c.Audit < time.Second {
		bad("Audit", "%v is below 1s", c.Audit)
	}
	c.probe(bad)
	// What is handed in stays the caller's to change.
	c.Addresses, c.Announce, c.Endpoints = slices.Clone(c.Addresses), slices.Clone(c.Announce), slices.Clone(c.Endpoints)
	c.Roles, c.Labels = slices.Clone(c.Roles), maps.Clone(c.Labels)
	if c.Window == 0 {
		c.Window = 10 * time.Millisecond
	}
	if c.Audit == 0 {
		c.Audit = 15 * time.Second
	}
	if c.Linger == 0 {
		c.Linger = 3 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, errors.Join(errs...)
}

// probe checks that addresses, roles and labels make a record.
func (c Config) probe(bad func(field, format string, a ...any)) {
	k, err := key.NewPrivate()
	if err != nil {
		bad("Key", "%v", err)
		return
	}
	for _, f := range []struct {
		name string
		r    record.Record
	}{{"Addresses", record.Record{Addresses: c.addresses()}}, {"Roles", record.Record{Roles: c.Roles}}, {"Labels", record.Record{Labels: c.Labels}}} {
		f.r.Version, f.r.ID, f.r.Key = record.Version, "node", k.Public()
		if err := f.r.Validate(); err != nil {
			bad(f.name, "%v", err)
		}
	}
}

func (c Config) addresses() prefixes.Set {
	var hosts []netip.Prefix
	for _, a := range c.Addresses {
		if p := prefixes.Host(a); p.IsValid() {
			hosts = append(hosts, p)
		}
	}
	return prefixes.Must(hosts...)
}

// HostLookup returns a Config.Lookup that looks names up as the host's own programs do: through its hosts file, and
// the name servers of resolv.conf, which d dials; nil: as ever. One that marks its packets (SO_MARK) finds the
// endpoints of peers also where the way to the name servers is through the mesh, which would need them first.
func HostLookup(d *net.Dialer) func(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error) {
	return resolve.System(d)
}
