package hostaddr_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/warren-mesh/warren/roles/hostaddr"
)

func addrs(s ...string) (as []netip.Addr) {
	for _, s := range s {
		as = append(as, netip.MustParseAddr(s))
	}
	return as
}

func TestChoose(t *testing.T) {
	lo := hostaddr.Link{Name: "lo", Up: true, Addrs: addrs("127.0.0.1", "::1")}
	eth := hostaddr.Link{Name: "eth0", Up: true, Addrs: addrs("fe80::1", "2001:db8::9", "192.0.2.9", "10.0.0.9", "192.0.2.9", "169.254.1.1", "224.0.0.1", "0.0.0.0")}
	down := hostaddr.Link{Name: "eth1", Addrs: addrs("192.0.2.1")}
	own := netip.MustParsePrefix("fd00::/8")
	tun := hostaddr.Link{Name: "mesh0", Up: true, Addrs: addrs("fd00::5")}
	skip := own.Contains
	for _, test := range []struct {
		name  string
		links []hostaddr.Link
		first []netip.Addr
		max   int
		want  []netip.Addr
	}{
		{"IPv4 first", []hostaddr.Link{lo, eth, down, tun}, nil, 64, addrs("10.0.0.9", "192.0.2.9", "2001:db8::9")},
		{"what the host sends from before all", []hostaddr.Link{lo, eth, tun}, addrs("192.0.2.9", "2001:db8::9", "192.0.2.77"), 64, addrs("192.0.2.9", "2001:db8::9", "10.0.0.9")},
		{"not too many", []hostaddr.Link{eth}, nil, 1, addrs("10.0.0.9")},
		{"loopback alone", []hostaddr.Link{lo, down, tun}, addrs("127.0.0.1"), 64, addrs("127.0.0.1", "::1")},
		{"nothing", []hostaddr.Link{down}, nil, 64, nil},
	} {
		if got := hostaddr.Choose(test.links, test.first, skip, test.max); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %v, want %v", test.name, got, test.want)
		}
	}
}

func TestThisHost(t *testing.T) {
	ls, err := hostaddr.Links()
	if err != nil {
		t.Fatal(err)
	}
	sources, err := hostaddr.Sources(nil)
	if err != nil {
		t.Fatal(err)
	}
	as := hostaddr.Choose(ls, sources, nil, 64)
	if len(as) == 0 {
		t.Skip("needs a host with an address, be it loopback")
	}
	for _, a := range as {
		if a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified() || a.Is4In6() {
			t.Errorf("%v is no address for others", a)
		}
	}
}
