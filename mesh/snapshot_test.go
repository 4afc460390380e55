package mesh_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/meshtest"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/mesh/watch"
)

// withState gives the first node a state folder, which keeps its key.
func withState(t *testing.T, o meshtest.Options) (_ meshtest.Options, folder string) {
	folder = t.TempDir()
	o.Configure = func(n *meshtest.Node, c *mesh.Config) {
		if n.Index == 0 {
			c.StateDir = folder
		}
	}
	return o, folder
}

// A node whose host boots while the registry is down has its peers, and they have it.
func TestRule18_AColdStartWithTheRegistryDown(t *testing.T) {
	o, folder := withState(t, meshtest.Options{Nodes: 4})
	started(t, o, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		time.Sleep(2 * time.Minute)
		_, err := os.Stat(filepath.Join(folder, "snapshot"))
		must(t, err)
		port := current(n).Self.ListenPort
		c.Store.Restore(regmem.Snapshot{}) // what comes is of the snapshot
		for _, n := range c.Nodes {
			n.Registry.Cut()
		}
		n.Stop()
		n.Renew()
		time.Sleep(30 * time.Second) // the others notice that their session is over
		if got := c.Send(); got != 12 {
			t.Errorf("%d packets of 12 arrived: %v", got, conditions(n))
		}
		v := current(n)
		if v.Ready || v.Self.ListenPort != port || len(v.Peers) != 3 {
			t.Errorf("ready %v, port %d (%d before), %d peers", v.Ready, v.Self.ListenPort, port, len(v.Peers))
		}
		for _, n := range c.Nodes {
			n.Registry.Heal()
		}
		settle(t, c, time.Minute)
	})
}

// The snapshot is written rarely, at the end of Run, and not when nothing changed; leaving removes it.
func TestSnapshot_IsWrittenRarely(t *testing.T) {
	o, folder := withState(t, meshtest.Options{})
	started(t, o, func(t *testing.T, c *meshtest.Cluster) {
		path := filepath.Join(folder, "snapshot")
		written := 0
		var was []byte
		look := func() {
			data, err := os.ReadFile(path)
			must(t, err)
			if !bytes.Equal(data, was) {
				was = data
				written++
			}
		}
		look()
		if written = 0; !strings.Contains(string(was), registry.NodeID(c.Nodes[1].Config.Node)) {
			t.Errorf("the snapshot lacks a node:\n%s", was)
		}
		for i := range 300 { // for 5 minutes
			must(t, c.Nodes[1].AnnouncePrefixes("x", netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(i), 0}), 24)))
			time.Sleep(time.Second)
			look()
		}
		if written < 4 || written > 6 {
			t.Errorf("written %d times in 5 minutes", written)
		}
		must(t, c.Nodes[1].AnnouncePrefixes("x", netip.MustParsePrefix("172.17.0.0/16")))
		time.Sleep(time.Second)
		c.Nodes[0].Stop()
		look()
		if want := recordOf(c, c.Nodes[1]); !bytes.Contains(was, []byte(base64.StdEncoding.EncodeToString(want))) {
			t.Error("the end of Run did not write what was newest")
		}
		c.Nodes[0].Start()
		settle(t, c, time.Minute)
		must(t, c.Nodes[0].Leave(after(t, time.Minute)))
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after leaving there is a snapshot: %v", err)
		}
	})
}

// A corrupt snapshot is told of, and replaced. One that cannot be written is told of until it can.
func TestSnapshot_IsNotNeeded(t *testing.T) {
	o, folder := withState(t, meshtest.Options{})
	path := filepath.Join(folder, "snapshot")
	must(t, os.WriteFile(path, []byte("nonsense"), 0o600))
	started(t, o, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		mustBeWell(t, c) // it was replaced
		must(t, os.Remove(path))
		must(t, os.MkdirAll(filepath.Join(path, "in the way"), 0o700))
		must(t, c.Nodes[1].AnnouncePrefixes("x", netip.MustParsePrefix("172.17.0.0/16")))
		time.Sleep(2 * time.Minute)
		check(t, c)
		mustHave(t, n, view.StateUnkept, n.Config.Node)
		must(t, os.RemoveAll(path))
		time.Sleep(time.Minute)
		mustBeWell(t, c)
	})
}

func TestSnapshot_CorruptIsSaid(t *testing.T) {
	o, folder := withState(t, meshtest.Options{})
	must(t, os.WriteFile(filepath.Join(folder, "snapshot"), []byte("nonsense"), 0o600))
	bubble(t, o, func(t *testing.T, c *meshtest.Cluster) {
		c.Nodes[0].Registry.Cut()
		c.Start()
		time.Sleep(time.Minute)
		mustHave(t, c.Nodes[0], view.StateUnkept, c.Nodes[0].Config.Node)
	})
}

// A store that comes back empty takes no peer away: all put their records again.
func TestRule18_AnEmptiedStoreRemovesNobody(t *testing.T) {
	started(t, meshtest.Options{Nodes: 12}, func(t *testing.T, c *meshtest.Cluster) {
		removed := watchRemovals(c)
		for range 3 {
			c.Store.Restore(regmem.Snapshot{})
			time.Sleep(20 * time.Second)
			check(t, c)
		}
		if n := removed.Load(); n != 0 {
			t.Errorf("%d peers were removed", n)
		}
		mustBeWell(t, c)
	})
}

// Where most have left indeed, a second reading confirms it.
func TestRule18_MostHaveLeft(t *testing.T) {
	started(t, meshtest.Options{Nodes: 12}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		n.Registry.Cut()
		for _, o := range c.Nodes[3:] {
			must(t, o.Leave(after(t, time.Minute)))
		}
		n.Registry.Heal()
		time.Sleep(4 * time.Second)
		mustHave(t, n, view.RegistryShrank, "")
		if got := len(current(n).Peers); got != 11 {
			t.Errorf("%d peers", got)
		}
		time.Sleep(2 * time.Second)
		check(t, c)
		if got := len(current(n).Peers); got != 2 {
			t.Errorf("%d peers", got)
		}
		mustBeWell(t, c)
	})
}

func watchRemovals(c *meshtest.Cluster) *atomic.Int64 {
	var removed atomic.Int64
	for _, n := range c.Nodes {
		n.Device.Fault(func(op datapath.Op) error {
			if _, is := op.(datapath.RemovePeer); is {
				removed.Add(1)
			}
			return nil
		})
	}
	return &removed
}

func TestSetEndpoints(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[1]
		endpoints := func() []mesh.Endpoint {
			p, _ := current(c.Nodes[0]).Peer(n.Config.Node)
			return p.Candidates
		}
		must(t, n.Mesh().SetEndpoints(mesh.MustEndpoint("vpn.example.net:700"), mesh.MustEndpoint("198.18.0.1")))
		time.Sleep(time.Second)
		want := []mesh.Endpoint{{Host: "vpn.example.net", Port: 700}, {Addr: netip.MustParseAddr("198.18.0.1"), Port: current(n).Self.ListenPort}}
		if got := endpoints(); len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
			t.Errorf("the others know %v, want %v", got, want)
		}
		err := n.Mesh().SetEndpoints(mesh.MustEndpoint("198.18.0.9"), mesh.Endpoint{})
		if !errors.Is(err, mesh.ErrConfig) || !strings.Contains(err.Error(), "number 2") {
			t.Errorf("a bad one: %v", err)
		}
		time.Sleep(time.Second)
		if got := endpoints(); len(got) != 2 || got[0] != want[0] {
			t.Errorf("after a bad one: %v", got)
		}
		must(t, n.Mesh().SetEndpoints())
		time.Sleep(time.Second)
		if got := endpoints(); len(got) != 0 {
			t.Errorf("without: %v", got)
		}
	})
}

// A host name is looked up by those who read it, and followed when it moves and the node with it.
func TestHostNameEndpoints(t *testing.T) {
	var at atomic.Value // netip.Addr
	var asked atomic.Int64
	o := meshtest.Options{Configure: func(n *meshtest.Node, c *mesh.Config) {
		c.Lookup = func(_ context.Context, host string) ([]netip.Addr, time.Duration, error) {
			asked.Add(1)
			if a, ok := at.Load().(netip.Addr); ok && host == "vpn.example.net" {
				return []netip.Addr{a}, time.Minute, nil
			}
			return nil, 0, errors.New("no such host")
		}
		if n.Index == 1 {
			at.Store(c.Endpoints[0].Addr)
			c.Endpoints = []mesh.Endpoint{mesh.MustEndpoint("vpn.example.net")}
		}
		c.Keepalive = -1
	}}
	bubble(t, o, func(t *testing.T, c *meshtest.Cluster) {
		home := at.Load().(netip.Addr)
		at.Store(netip.MustParseAddr("198.18.99.99")) // nobody is there yet
		c.Nodes[0].Start()
		c.Nodes[1].Start()
		time.Sleep(10 * time.Second)
		at.Store(home)
		for range 200 { // the name is asked for again, and no later than by its TTL
			time.Sleep(time.Second)
			c.Nodes[0].Device.Send(c.Nodes[1].Config.Addresses[0])
		}
		p, _ := current(c.Nodes[0]).Peer(c.Nodes[1].Config.Node)
		if p.Endpoint.Addr() != home || p.LastHandshake.IsZero() {
			t.Errorf("sent to at %v, handshake %v: %v", p.Endpoint, p.LastHandshake, conditions(c.Nodes[0]))
		}
		if n := asked.Load(); n > 40 {
			t.Errorf("asked %d times in 3.5 minutes", n)
		}
	})
}

func TestParseEndpoint(t *testing.T) {
	for text, want := range map[string]mesh.Endpoint{
		"192.0.2.1:5":        {Addr: netip.MustParseAddr("192.0.2.1"), Port: 5},
		"192.0.2.1":          {Addr: netip.MustParseAddr("192.0.2.1")},
		"192.0.2.1:0":        {Addr: netip.MustParseAddr("192.0.2.1")},
		"2001:db8::1":        {Addr: netip.MustParseAddr("2001:db8::1")},
		"2001:db8::0":        {Addr: netip.MustParseAddr("2001:db8::")},
		"::ffff:192.0.2.1":   {Addr: netip.MustParseAddr("192.0.2.1")},
		"[2001:db8::1]":      {Addr: netip.MustParseAddr("2001:db8::1")},
		"[2001:db8::1]:0":    {Addr: netip.MustParseAddr("2001:db8::1")},
		"[2001:db8::1]:5":    {Addr: netip.MustParseAddr("2001:db8::1"), Port: 5},
		"VPN.example.net":    {Host: "vpn.example.net"},
		"vpn.example.net:0":  {Host: "vpn.example.net"},
		"vpn.example.net:99": {Host: "vpn.example.net", Port: 99},
		"host":               {Host: "host"},
	} {
		got, err := mesh.ParseEndpoint(text)
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", ":", ":5", ":0", "host:", "host:x", "host:70000", "2001:db8::1:zz", "[::1", "0.0.0.0", "224.0.0.1:5", "foo_bar", "a b", "[192.0.2.1]:5", "1.2.3", "host:0:0"} {
		if e, err := mesh.ParseEndpoint(text); err == nil {
			t.Errorf("%q is taken as %v", text, e)
		} else if !strings.Contains(err.Error(), `"`) {
			t.Errorf("%q: %v", text, err)
		}
		if _, err := record.ParseEndpoint(text); err == nil {
			t.Errorf("%q: a record takes it", text)
		}
	}
}

// An outage in which nothing happened is over when it is, not when something happens next.
func TestRegistryIsBackWithoutNews(t *testing.T) {
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		n.Registry.Cut()
		time.Sleep(time.Minute)
		mustHave(t, n, view.RegistryDown, "")
		n.Registry.Resume()
		time.Sleep(time.Second)
		mustBeWell(t, c)
	})
}

// After the store came back empty, nodes find it again one by one. A late one must not take those for gone
// that are later still.
func TestRule18_AnEmptiedStoreIsFoundAgainOneByOne(t *testing.T) {
	for _, nodes := range []int{4, 12} {
		started(t, meshtest.Options{Nodes: nodes}, func(t *testing.T, c *meshtest.Cluster) {
			removed := watchRemovals(c)
			for round := range 3 {
				for _, n := range c.Nodes {
					n.Registry.Cut()
				}
				time.Sleep(10 * time.Second)
				c.Store.Restore(regmem.Snapshot{})
				for _, n := range c.Nodes {
					n.Registry.Heal()
					time.Sleep(4 * time.Second / time.Duration(nodes))
				}
				time.Sleep(20 * time.Second)
				check(t, c)
				if n := removed.Load(); n != 0 {
					t.Fatalf("round %d: %d peers were removed", round, n)
				}
			}
			mustBeWell(t, c)
		})
	}
}

// slowRegistry takes long to be found again.
type slowRegistry struct{ *regmem.Registry }

func (slowRegistry) Rejoin() time.Duration { return 30 * time.Second }

func TestRule18_ARegistryThatTakesLongToBeFoundAgain(t *testing.T) {
	o := meshtest.Options{Nodes: 4, Configure: func(n *meshtest.Node, c *mesh.Config) { c.Registry = slowRegistry{n.Registry} }}
	started(t, o, func(t *testing.T, c *meshtest.Cluster) {
		removed := watchRemovals(c)
		for _, n := range c.Nodes {
			n.Registry.Cut()
		}
		c.Store.Restore(regmem.Snapshot{})
		for _, n := range c.Nodes {
			n.Registry.Heal()
			time.Sleep(9 * time.Second)
		}
		time.Sleep(time.Minute)
		check(t, c)
		if n := removed.Load(); n != 0 {
			t.Errorf("%d peers were removed", n)
		}
	})
}

// revoking is a Trust that can revoke.
type revoking struct {
	identity.Trust
	revoked atomic.Value // string: the node
	changed watch.Value[struct{}]
}

func (r *revoking) Open(id string, data []byte, now time.Time) (identity.Opened, error) {
	if node, _ := r.revoked.Load().(string); registry.NodeID(node) == id {
		return identity.Opened{}, identity.ErrRevoked
	}
	return r.Trust.Open(id, data, now)
}

func (r *revoking) Changed() <-chan struct{} {
	_, _, stale := r.changed.Get()
	return stale
}

// Nodes that a Reset lacks and that are kept for now can be revoked meanwhile.
func TestRule18_DelaysNoRevocation(t *testing.T) {
	trust := &revoking{Trust: identity.Plain()}
	o := meshtest.Options{Nodes: 12, Configure: func(n *meshtest.Node, c *mesh.Config) {
		if n.Index == 0 {
			c.Trust = trust
		}
	}}
	started(t, o, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		for _, o := range c.Nodes[1:] {
			o.Registry.Cut()
		}
		c.Store.Restore(regmem.Snapshot{})
		time.Sleep(time.Second)
		n.Registry.Cut()
		mustHave(t, n, view.RegistryShrank, "")
		revoked := c.Nodes[3].Config.Node
		trust.revoked.Store(revoked)
		trust.changed.Set(struct{}{})
		time.Sleep(time.Second)
		if _, there := current(n).Peer(revoked); there || len(current(n).Peers) != 10 {
			t.Errorf("there %v, %d peers", there, len(current(n).Peers))
		}
	})
}

// What the state folder does not take at first is written later, and at the end of Run at the latest.
func TestStarts_AreWrittenAgain(t *testing.T) {
	for _, within := range []bool{true, false} {
		o, folder := withState(t, meshtest.Options{})
		starts := filepath.Join(folder, "starts")
		bubble(t, o, func(t *testing.T, c *meshtest.Cluster) {
			n := c.Nodes[0]
			n.Registry.Cut()
			c.Start()
			time.Sleep(time.Second)
			must(t, os.MkdirAll(filepath.Join(starts, "in the way"), 0o700))
			n.Registry.Heal()
			time.Sleep(time.Minute)
			mustHave(t, n, view.StateUnkept, n.Config.Node)
			must(t, os.RemoveAll(starts))
			if within {
				time.Sleep(time.Minute)
				mustBeWell(t, c)
			}
			n.Stop()
			data, err := os.ReadFile(starts)
			must(t, err)
			if !strings.Contains(string(data), `"Epoch":1`) {
				t.Errorf("kept is %s", data)
			}
		})
	}
}
