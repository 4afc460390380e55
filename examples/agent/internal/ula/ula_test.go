package ula_test

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/examples/agent/internal/ula"
)

// What a node was called yesterday it is called tomorrow: these never change. They were worked out with
// sha256sum:
//
//	printf 'warren/ula\0warren' | sha256sum
//	printf 'warren/ula\0warren\0alpha' | sha256sum
func TestVectors(t *testing.T) {
	for _, test := range []struct{ mesh, node, prefix, addr string }{
		{"warren", "alpha", "fdf6:24e9:a210::/48", "fdf6:24e9:a210:0:5ba1:a7dc:5a9:c494"},
		{"warren", "beta", "fdf6:24e9:a210::/48", "fdf6:24e9:a210:0:3e34:5074:69ab:a450"},
		{"warren", "node-1.example.org", "fdf6:24e9:a210::/48", "fdf6:24e9:a210:0:987f:544d:2a8:5168"},
		{"blue", "alpha", "fdfc:f7d:3125::/48", "fdfc:f7d:3125:0:50e2:13f2:9521:4635"},
		{"a", "b", "fdbb:338a:2e9b::/48", "fdbb:338a:2e9b:0:7672:7eb1:3c27:c449"},
	} {
		if got := ula.Prefix(test.mesh); got != netip.MustParsePrefix(test.prefix) {
			t.Errorf("mesh %s: got %v, want %s", test.mesh, got, test.prefix)
		}
		if got := ula.Addr(test.mesh, test.node); got != netip.MustParseAddr(test.addr) {
			t.Errorf("node %s of mesh %s: got %v, want %s", test.node, test.mesh, got, test.addr)
		}
	}
}

func TestProperties(t *testing.T) {
	name := rapid.StringMatching(`[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?`)
	local := netip.MustParsePrefix("fd00::/8")
	rapid.Check(t, func(t *rapid.T) {
		mesh, node := name.Draw(t, "mesh"), name.Draw(t, "node")
		a := ula.Addr(mesh, node)
		if !local.Contains(a) || !ula.Prefix(mesh).Contains(a) || ula.Prefix(mesh).Masked() != ula.Prefix(mesh) {
			t.Errorf("%v is not in %v, or that is no prefix of %v", a, ula.Prefix(mesh), local)
		}
		if b := a.As16(); b[6] != 0 || b[7] != 0 {
			t.Errorf("%v is not in subnet 0", a)
		}
		if a != ula.Addr(mesh, node) || !a.IsPrivate() {
			t.Errorf("%v is not the same twice, or not private", a)
		}
		other := name.Draw(t, "other")
		if (ula.Addr(mesh, other) == a) != (other == node) || (ula.Prefix(other) == ula.Prefix(mesh)) != (other == mesh) {
			t.Errorf("%q is not told from %q and %q", other, mesh, node)
		}
	})
}
