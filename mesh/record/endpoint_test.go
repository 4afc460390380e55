package record_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/warren-mesh/warren/mesh/record"
)

func TestParseEndpoint(t *testing.T) {
	label := strings.Repeat("l", 63)
	host253 := label + "." + label + "." + label + "." + label[:61]
	for _, c := range []struct{ in, out, reason string }{
		{in: "192.0.2.1:51820"},
		{in: "[2001:db8::1]:51820"},
		{in: "[fe80::1%eth0]:51820"},
		{in: "[fe80::1%3]:1"},
		{in: "[2001:DB8:0:0::1]:1", out: "[2001:db8::1]:1"},
		{in: "[::ffff:192.0.2.1]:1", out: "192.0.2.1:1"},
		{in: "a:65535"},
		{in: "a.example.com.:1"},
		{in: "A.Example.COM:1", out: "a.example.com:1"},
		{in: "xn--kln-sna.example:1"},
		{in: "1.2.3.4.example:1"},
		{in: "0x7f.example:1"},
		{in: host253 + ":1"},
		{in: host253 + ".:1"},

		{in: "", reason: "has no port"},
		{in: "192.0.2.1", reason: "has no port"},
		{in: "192.0.2.1:", reason: "has no decimal port"},
		{in: "192.0.2.1:0", reason: "has port 0"},
		{in: "192.0.2.1:00", reason: "has no decimal port"},
		{in: "192.0.2.1:01", reason: "has no decimal port"},
		{in: "192.0.2.1:+1", reason: "has no decimal port"},
		{in: "192.0.2.1: 1", reason: "has no decimal port"},
		{in: "192.0.2.1:1 ", reason: "has no decimal port"},
		{in: "192.0.2.1:http", reason: "has no decimal port"},
		{in: "192.0.2.1:65536", reason: "has a port above 65535"},
		{in: "192.0.2.1:100000", reason: "has no decimal port"},
		{in: ":1", reason: "has neither a host name nor an address"},
		{in: "2001:db8::1:1", reason: "has an IPv6 address without brackets"},
		{in: "[2001:db8::1:1", reason: "is not an IPv6 address in brackets"},
		{in: "[192.0.2.1]:1", reason: "is not an IPv6 address in brackets"},
		{in: "[a.example]:1", reason: "is not an IPv6 address in brackets"},
		{in: "[]:1", reason: "is not an IPv6 address in brackets"},
		{in: "[fe80::1%]:1", reason: "is not an IPv6 address in brackets"},
		{in: "[::ffff:192.0.2.1%eth0]:1", reason: "IPv6 address in brackets|zone on an IPv4 address"},
		{in: "[fe80::1%eth 0]:1", reason: "has ' ' in its zone"},
		{in: "[fe80::1%a%b]:1", reason: "has '%' in its zone"},
		{in: "[fe80::1%a\x00]:1", reason: `has '\x00' in its zone`},
		{in: "[fe80::1%" + strings.Repeat("z", 64) + "]:1", reason: "has a zone of 64 bytes"},
		{in: "0.0.0.0:1", reason: "has the unspecified address"},
		{in: "[::]:1", reason: "has the unspecified address"},
		{in: "[::ffff:0.0.0.0]:1", reason: "has the unspecified address"},
		{in: "224.0.0.1:1", reason: "has a multicast address"},
		{in: "[ff02::1%eth0]:1", reason: "has a multicast address"},
		{in: "255.255.255.255:1", reason: "has the broadcast address"},
		{in: "192.0.2.256:1", reason: "is neither an IPv4 address nor a host name"},
		{in: "192.0.2:1", reason: "is neither an IPv4 address nor a host name"},
		{in: "192.0.2.01:1", reason: "is neither an IPv4 address nor a host name"},
		{in: "3221225985:1", reason: "is neither an IPv4 address nor a host name"},
		{in: "0x7f000001:1", reason: "has a host name that looks like a number"},
		{in: "0x:1", reason: "has a host name that looks like a number"},
		{in: ".:1", reason: "has no host"},
		{in: "a..b:1", reason: "has a host name with an empty label"},
		{in: ".a:1", reason: "has a host name with an empty label"},
		{in: "-a:1", reason: "begins or ends with '-'"},
		{in: "a-.b:1", reason: "begins or ends with '-'"},
		{in: "a_b:1", reason: "has '_' in its host name"},
		{in: "a b:1", reason: "has ' ' in its host name"},
		{in: "a/b:1", reason: "has '/' in its host name"},
		{in: "köln:1", reason: "in its host name"},
		{in: "\u212aoeln:1", reason: "in its host name"}, // the Kelvin sign is no k
		{in: label + "l:1", reason: "has a host name with a label of 64 bytes"},
		{in: "l" + host253 + ":1", reason: "bytes, at most"},
	} {
		e, err := record.ParseEndpoint(c.in)
		if c.reason != "" {
			ok := false
			for reason := range strings.SplitSeq(c.reason, "|") {
				ok = ok || err != nil && strings.Contains(err.Error(), reason)
			}
			if !ok || e != (record.Endpoint{}) || len(err.Error()) > 300 {
				t.Errorf("ParseEndpoint(%q) = %v, %v, want %q", c.in, e, err, c.reason)
			}
			continue
		}
		if c.out == "" {
			c.out = c.in
		}
		if err != nil || e.String() != c.out {
			t.Errorf("ParseEndpoint(%q) = %v, %v, want %q", c.in, e, err, c.out)
			continue
		}
		text, err := e.MarshalText()
		if err != nil || string(text) != c.out {
			t.Errorf("%v: MarshalText: %s, %v", e, text, err)
		}
		var back record.Endpoint
		if err := back.UnmarshalText(text); err != nil || back != e {
			t.Errorf("%v came back as %v, %v", e, back, err)
		}
	}
}

func TestEndpointFrom(t *testing.T) {
	e := record.EndpointFrom(netip.MustParseAddrPort("[::ffff:192.0.2.1]:7"))
	if e.String() != "192.0.2.1:7" || e.Validate() != nil {
		t.Errorf("%v, %v", e, e.Validate())
	}
	var zero record.Endpoint
	if _, err := zero.MarshalText(); err == nil {
		t.Error("the zero Endpoint was written")
	}
	keep := e
	if err := e.UnmarshalText([]byte("nonsense")); err == nil || e != keep {
		t.Errorf("%v, %v", e, err)
	}
}

func FuzzParseEndpoint(f *testing.F) {
	for _, s := range []string{"192.0.2.1:1", "[fe80::1%eth0]:51820", "Host.Example.:7", "[::ffff:1.2.3.4]:1", "0x1:1", "a%b:1", "[fe80::%]]:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		e, err := record.ParseEndpoint(s)
		if err != nil {
			if e != (record.Endpoint{}) || len(err.Error()) > 500 {
				t.Fatalf("%q: %v, %v", s, e, err)
			}
			return
		}
		if err := e.Validate(); err != nil {
			t.Fatalf("accepted %q: %v", s, err)
		}
		back, err := record.ParseEndpoint(e.String())
		if err != nil || back != e {
			t.Fatalf("%q became %v: %v, %v", s, e, back, err)
		}
		// netip is the oracle for addresses.
		ap, err := netip.ParseAddrPort(s)
		if err == nil && e.Addr.IsValid() && record.EndpointFrom(ap) != e {
			t.Fatalf("%q is %v, netip says %v", s, e, ap)
		}
		if (err == nil) != e.Addr.IsValid() {
			t.Fatalf("%q is %v, netip says %v", s, e, err)
		}
	})
}
