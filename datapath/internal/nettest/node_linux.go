package nettest

import (
	"net/netip"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// NewKey returns a new private key.
func NewKey(t testing.TB) key.Private {
	t.Helper()
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// NewPreshared returns a new preshared key.
func NewPreshared(t testing.TB) key.Preshared {
	t.Helper()
	k, err := key.NewPreshared()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// Node is a datapath with a State that says what it shall be.
type Node struct {
	T    testing.TB
	Name string
	Path datapath.Datapath
	Want datapath.State
}

// NewNode returns a Node whose device has a new key and addresses.
func NewNode(t testing.TB, name string, d datapath.Datapath, addrs prefixes.Set) *Node {
	t.Helper()
	n := &Node{T: t, Name: name, Path: d, Want: datapath.State{
		Device: datapath.Device{Key: NewKey(t)}, Addrs: addrs,
		Routes: make(map[netip.Prefix]netip.Addr), Peers: make(map[key.Public]datapath.Peer),
	}}
	n.Sync()
	return n
}

// Public returns the public key of the device that the Node shall have.
func (n *Node) Public() key.Public { return n.Want.Device.Key.Public() }

// Sync makes the device what n.Want says.
func (n *Node) Sync() {
	n.T.Helper()
	if err := datapath.Sync(n.T.Context(), n.Path, n.Want); err != nil {
		n.T.Fatalf("%s: %v", n.Name, err)
	}
}

// Do carries out ops, all of which are to succeed.
func (n *Node) Do(ops ...datapath.Op) {
	n.T.Helper()
	if err := n.Path.Apply(n.T.Context(), ops...); err != nil {
		n.T.Fatalf("%s: %v", n.Name, err)
	}
}

// Have returns what the device is.
func (n *Node) Have() datapath.State {
	n.T.Helper()
	s, err := n.Path.Read(n.T.Context())
	if err != nil {
		n.T.Fatalf("%s: %v", n.Name, err)
	}
	return s
}

// At returns where the device is reached, if the host is at addr.
func (n *Node) At(addr string) netip.AddrPort {
	n.T.Helper()
	return netip.AddrPortFrom(netip.MustParseAddr(addr), n.Have().Device.ListenPort)
}

// Peer makes the node with a public key a peer of n, with routes to what it has.
func (n *Node) Peer(k key.Public, p datapath.Peer) {
	n.T.Helper()
	n.Want.Peers[k] = p
	for q := range p.Prefixes.All() {
		n.Want.Routes[q] = netip.Addr{}
	}
	n.Sync()
}

// Outer is what a tunnel over a Wire runs over.
type Outer struct {
	Name          string
	Preshared, V6 bool
}

// Outers are all there are.
var Outers = []Outer{{"IPv4", false, false}, {"IPv4Preshared", true, false}, {"IPv6", false, true}, {"IPv6Preshared", true, true}}

// Addrs returns the addresses of both ends.
func (o Outer) Addrs() (a, b string) {
	if o.V6 {
		return Wire6A, Wire6B
	}
	return Wire4A, Wire4B
}

// Key returns a new preshared key, or none.
func (o Outer) Key(t testing.TB) key.Preshared {
	t.Helper()
	if !o.Preshared {
		return key.Preshared{}
	}
	return NewPreshared(t)
}

// Connect makes the nodes at both ends of a Wire peers of each other.
func (o Outer) Connect(a, b *Node) {
	a.T.Helper()
	psk := o.Key(a.T)
	addrA, addrB := o.Addrs()
	endA, endB := a.At(addrA), b.At(addrB)
	a.Peer(b.Public(), datapath.Peer{Endpoint: endB, Preshared: psk, Prefixes: b.Want.Addrs})
	b.Peer(a.Public(), datapath.Peer{Endpoint: endA, Preshared: psk, Prefixes: a.Want.Addrs})
}

// Notified waits until a datapath notices that somebody else touched its device.
func Notified(t testing.TB, n datapath.Notifier, what string) {
	t.Helper()
	select {
	case <-n.Changed():
	case <-time.After(10 * time.Second):
		t.Errorf("%s: not noticed within 10 s", what)
	}
}

// Quiet takes what a datapath has to say of others until it says no more.
func Quiet(n datapath.Notifier) {
	for {
		select {
		case <-n.Changed():
		case <-time.After(300 * time.Millisecond):
			return
		}
	}
}
