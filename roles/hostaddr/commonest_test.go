package hostaddr

import (
	"net/netip"
	"testing"
)

func TestCommonest(t *testing.T) {
	a, b, c := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")
	for _, test := range []struct {
		as   []netip.Addr
		want netip.Addr
	}{
		{nil, netip.Addr{}},
		{[]netip.Addr{a}, a},
		{[]netip.Addr{a, b, b}, b},
		{[]netip.Addr{a, b, a}, a},
		{[]netip.Addr{c, b, a}, c},
	} {
		if got, ok := commonest(test.as); got != test.want || ok != test.want.IsValid() {
			t.Errorf("of %v: got %v, %v", test.as, got, ok)
		}
	}
}
