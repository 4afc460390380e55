//go:build linux

package nft

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var some = Rules{
	ClampMTU: 1280,
	SNAT:     set("0.0.0.0/0", "10.0.0.0/8", "10.0.0.0/9", "10.128.0.0/9", "10.1.2.3/32", "::/0", "fd00::/8", "fd00::/9", "fd01::1/128"),
	Turned:   []string{ForwardIPv4, ForwardIPv6},
}

// someText is some as nft would have it written.
const someText = `table inet warren-mesh0 {
	comment "warren:mesh0:87; turned on: net.ipv4.ip_forward net.ipv6.conf.all.forwarding"
	chain forward {
		type filter hook forward priority mangle; policy accept;
		iifname "mesh0" meta nfproto ipv4 tcp flags syn / syn,rst tcp option maxseg size set 1240
		iifname "mesh0" meta nfproto ipv6 tcp flags syn / syn,rst tcp option maxseg size set 1220
		oifname "mesh0" meta nfproto ipv4 tcp flags syn / syn,rst tcp option maxseg size set 1240
		oifname "mesh0" meta nfproto ipv6 tcp flags syn / syn,rst tcp option maxseg size set 1220
	}

	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 0.0.0.0/0 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 10.0.0.0/8 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 10.0.0.0/9 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 10.1.2.3 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 10.128.0.0/9 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip6 daddr ::/0 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip6 daddr fd00::/8 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip6 daddr fd00::/9 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip6 daddr fd01::1 masquerade
	}
}
`

// nft shows the table as it is written by hand, and what it makes of that text is the same table.
func TestText(t *testing.T) {
	t.Parallel()
	need(t, "nft")
	s, other := newSpace(t), newSpace(t)
	a, b := s.open(), other.open()
	s.is(a, Rules{}, true)
	s.set(a, some)
	s.is(a, some, true)
	if d := cmp.Diff(someText, s.list()); d != "" {
		t.Error(d)
	}
	other.nft(someText)
	other.is(b, some, true)
	_ = context.Background
}
