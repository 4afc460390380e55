package netstack_test

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

// wanted draws a State that a device can have, from few keys and prefixes, so that consecutive ones
// have much to move.
func wanted(t *rapid.T, keys []key.Private) datapath.State {
	draw := func(name string, max int) int { return rapid.IntRange(0, max).Draw(t, name) }
	s := datapath.State{
		Device: datapath.Device{Key: keys[draw("own", 2)], MTU: []int{0, 1280, 1420, 9000}[draw("mtu", 3)]},
		Routes: make(map[netip.Prefix]netip.Addr), Peers: make(map[key.Public]datapath.Peer),
	}
	pool := make([]netip.Prefix, 0, 40)
	for i := range 10 {
		pool = append(pool, prefix("10.%d.0.0/16", i), prefix("10.%d.%d.0/24", i, i), prefix("fd00:%x::/32", i), prefix("192.0.2.%d/32", i))
	}
	owner := rapid.SliceOfN(rapid.IntRange(0, len(keys)+3), len(pool), len(pool)).Draw(t, "owner")
	var ps [16][]netip.Prefix
	for i, p := range pool {
		ps[owner[i]] = append(ps[owner[i]], p)
	}
	for i, k := range keys {
		if k == s.Device.Key || !rapid.Bool().Draw(t, "peer") {
			continue
		}
		p := datapath.Peer{Prefixes: prefixes.Must(ps[i]...), Keepalive: time.Duration(draw("keepalive", 3)) * 25 * time.Second}
		switch draw("endpoint", 3) {
		case 1:
			p.Endpoint = netip.MustParseAddrPort(fmt.Sprintf("127.0.0.1:%d", 60000+i))
		case 2:
			p.Endpoint = netip.MustParseAddrPort(fmt.Sprintf("[::1]:%d", 60000+i))
		}
		if rapid.Bool().Draw(t, "psk") { // a device with none reports zeros
			b := [key.Size]byte{1, byte(i), byte(draw("pskbyte", 255))}
			p.Preshared, _ = key.PresharedFromBytes(b[:])
		}
		s.Peers[k.Public()] = p
		for q := range p.Prefixes.All() {
			if rapid.Bool().Draw(t, "route") {
				s.Routes[q] = netip.Addr{}
				if q.Addr().Is4() && rapid.Bool().Draw(t, "source") {
					s.Routes[q] = netip.AddrFrom4([4]byte{198, 51, 100, byte(i)})
				}
			}
		}
	}
	s.Local = prefixes.Must(ps[len(keys)]...)
	for i := range draw("addrs", 3) {
		s.Addrs = s.Addrs.Union(set(fmt.Sprintf("198.51.100.%d", i), fmt.Sprintf("fd01::%d", i)))
	}
	return s
}

// TestPlan goes from random States to random States. What Plan calls no difference is compared field
// by field as well.
func TestPlan(t *testing.T) {
	var keys []key.Private
	for i := range 6 {
		b := [key.Size]byte{1: byte(i)} // the first byte is clamped
		if i == 0 {
			for j := range b {
				b[j] = 0xff // is clamped by the device
			}
		}
		k, err := key.PrivateFromBytes(b[:])
		if i == 1 {
			k, err = key.NewPrivate()
		}
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, k)
	}
	rapid.Check(t, func(t *rapid.T) {
		n, err := netstack.New(netstack.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		ctx := context.Background()
		endpoints := make(map[key.Public]netip.AddrPort)
		for range rapid.IntRange(1, 6).Draw(t, "states") {
			want := wanted(t, keys)
			if err := datapath.Sync(ctx, n, want); err != nil {
				t.Fatal(err)
			}
			have, err := n.Read(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if ops := datapath.Plan(want, have); len(ops) > 0 {
				t.Fatalf("still to do: %v", ops)
			}
			for k, e := range endpoints {
				if _, ok := want.Peers[k]; !ok {
					delete(endpoints, k)
				}
				_ = e
			}
			for k, p := range want.Peers {
				if p.Endpoint.IsValid() {
					endpoints[k] = p.Endpoint
				}
				p.Endpoint = endpoints[k]
				if have.Peers[k] != p {
					t.Fatalf("peer %v is %+v, want %+v", k, have.Peers[k], p)
				}
			}
			if want.Device.MTU == 0 {
				have.Device.MTU = 0
			}
			have.Device.ListenPort = 0
			if have.Device != want.Device || have.Addrs != want.Addrs || have.Local != want.Local ||
				!maps.Equal(have.Routes, want.Routes) || len(have.Peers) != len(want.Peers) || have.Host.Underlay != datapath.UnderlaySeparate {
				t.Fatalf("is %+v, want %+v", have, want)
			}
		}
	})
}
