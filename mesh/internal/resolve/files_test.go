package resolve

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

func TestParseResolvConf(t *testing.T) {
	for _, test := range []struct {
		name, text         string
		servers, search    []string
		ndots, time, tries int
	}{
		{"empty", "", nil, []string{"example.org"}, 1, 5, 2},
		{"comments", "# nameserver 192.0.2.1\n; nameserver 192.0.2.2\n#options ndots:3\n", nil, []string{"example.org"}, 1, 5, 2},
		{"usual", "nameserver 192.0.2.1\nnameserver 2001:db8::1\nsearch a.example b.example.\noptions ndots:5 timeout:2 attempts:3 edns0 trust-ad\n",
			[]string{"192.0.2.1", "2001:db8::1"}, []string{"a.example", "b.example"}, 5, 2, 3},
		{"CRLF and tabs", "nameserver\t192.0.2.1\r\nsearch\ta.example\r\n", []string{"192.0.2.1"}, []string{"a.example"}, 1, 5, 2},
		{"three servers at most", "nameserver 192.0.2.1\nnameserver 192.0.2.2\nnameserver no\nnameserver 192.0.2.3\nnameserver 192.0.2.4\n",
			[]string{"192.0.2.1", "192.0.2.2", "192.0.2.3"}, []string{"example.org"}, 1, 5, 2},
		{"zone", "nameserver fe80::1%eth0\n", []string{"fe80::1%eth0"}, []string{"example.org"}, 1, 5, 2},
		{"no final newline", "nameserver 192.0.2.1", []string{"192.0.2.1"}, []string{"example.org"}, 1, 5, 2},
		{"the last search counts", "search a.example\ndomain b.example\n", nil, []string{"b.example"}, 1, 5, 2},
		{"root", "search .\n", nil, nil, 1, 5, 2},
		{"dots", "search .a.example b..example\n", nil, []string{"a.example"}, 1, 5, 2},
		{"too much", "options ndots:99999999999999999999 timeout:99999999999999999999 attempts:1000\n", nil, []string{"example.org"}, 15, 30, 5},
		{"too little", "options ndots:-1 timeout:0 attempts:-5\n", nil, []string{"example.org"}, 0, 1, 1},
		{"nonsense", "options ndots: timeout:x attempts\nnameserver\nsearch\n\x00\xff\n", nil, []string{"example.org"}, 0, 1, 2},
	} {
		c := parseResolvConf([]byte(test.text), "host.example.org")
		if !slices.Equal(c.Servers, test.servers) || !slices.Equal(c.Search, test.search) || c.Ndots != test.ndots || c.Timeout != test.time || c.Attempts != test.tries {
			t.Errorf("%s: %+v", test.name, c)
		}
	}
	c := parseResolvConf([]byte("options rotate use-vc\noptions no-aaaa\n"), "host")
	if !c.useTCP || !c.noAAAA || len(c.Search) != 0 {
		t.Errorf("%+v", c)
	}
}

func TestPlain(t *testing.T) {
	for text, want := range map[string]bool{
		"":                          true,
		"passwd: ldap\n":            true,
		"#hosts: ldap\n":            true,
		"hosts: files dns\n":        true,
		"hosts:files dns":           true,
		"  hosts :\tfiles\tdns\r\n": true,
		"hosts: files dns # ldap":   true,
		"hosts: files mdns4_minimal [NOTFOUND=return] dns myhostname":          true,
		"hosts: files mdns4_minimal[NOTFOUND=return]dns":                       true,
		"hosts: mymachines resolve [!UNAVAIL=return] files myhostname dns":     true,
		"hosts: files myhostname resolve [!UNAVAIL=return SUCCESS=return] dns": true,
		"hosts: files resolve":               true,
		"hosts: dns files":                   false,
		"hosts: files":                       false,
		"hosts: dns":                         false,
		"hosts:":                             false,
		"hosts: files [NOTFOUND=return] dns": false,
		"hosts: files dns [NOTFOUND=return":  false,
		"hosts: files nis dns":               false,
		"hosts: files dns wins":              false,
		"hosts: FILES DNS":                   false,
	} {
		if got := plain([]byte(text)); got != want {
			t.Errorf("%q: got %t", text, got)
		}
	}
}

func TestParseHosts(t *testing.T) {
	const text = "127.0.0.1 localhost\n::1\tlocalhost ip6-localhost\r\n\n# 192.0.2.1 node\n192.0.2.2 node node # other\n" +
		"192.0.2.3 NODE.\nnot-an-address node\nfe80::1%eth0 node\n192.0.2.5\n192.0.2.6 xnode nodex no de\n  192.0.2.7   node"
	for host, want := range map[string][]netip.Addr{
		"localhost": addrs("127.0.0.1", "::1"),
		"node":      addrs("192.0.2.2", "192.0.2.3", "fe80::1%eth0", "192.0.2.7"),
		"Node.":     addrs("192.0.2.2", "192.0.2.3", "fe80::1%eth0", "192.0.2.7"),
		"other":     nil,
		"192.0.2.5": nil,
	} {
		if got, err := parseHosts(strings.NewReader(text), host); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s is %v, %v; want %v", host, got, err, want)
		}
	}
	if got, err := parseHosts(strings.NewReader("192.0.2.1 node\n"+strings.Repeat("x", maxLine+1)), "node"); err == nil {
		t.Errorf("of a line without end come %v", got)
	}
}

func FuzzParseResolvConf(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte, hostname, host string) {
		c := parseResolvConf(data, hostname)
		if len(c.Servers) > maxServers || c.Ndots < 0 || c.Ndots > 15 || c.Timeout < 1 || c.Timeout > 30 || c.Attempts < 1 || c.Attempts > 5 {
			t.Fatalf("%+v", c)
		}
		for _, s := range c.Servers {
			if _, err := netip.ParseAddr(s); err != nil {
				t.Fatal(err)
			}
		}
		if _, ok := dns.IsDomainName(host); !ok {
			return
		}
		names := c.NameList(host)
		if len(names) == 0 || len(names) > len(c.Search)+1 {
			t.Fatalf("names of %q are %q", host, names)
		}
		for _, name := range names {
			if !dns.IsFqdn(name) || !strings.HasPrefix(name, strings.TrimSuffix(host, ".")) {
				t.Fatalf("%q is looked up as %q", host, name)
			}
			if _, ok := dns.IsDomainName(name); !ok && len(name) < 200 {
				t.Fatalf("%q is looked up as %q", host, name)
			}
		}
		plain(data)
	})
}

// FuzzParseHosts compares with a parser that takes the text apart in the simplest way.
func FuzzParseHosts(f *testing.F) {
	f.Fuzz(func(t *testing.T, text, host string) {
		got, err := parseHosts(strings.NewReader(text), host)
		if err != nil {
			return // a line without end
		}
		var want []netip.Addr
		for line := range strings.SplitSeq(text, "\n") {
			line, _, _ = strings.Cut(line, "#")
			fields := strings.Fields(line)
			for i, name := range fields {
				if i > 0 && strings.EqualFold(strings.TrimSuffix(name, "."), strings.TrimSuffix(host, ".")) {
					if a, err := netip.ParseAddr(fields[0]); err == nil {
						want = append(want, a)
					}
					break
				}
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%q in %q is %v, want %v", host, text, got, want)
		}
	})
}
