package expose

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestParse(t *testing.T) {
	for _, test := range []struct {
		s    string
		want Rule
	}{
		{"80", Rule{80, "tcp", "127.0.0.1:80"}},
		{"53/udp", Rule{53, "udp", "127.0.0.1:53"}},
		{"80/tcp", Rule{80, "tcp", "127.0.0.1:80"}},
		{"8080=127.0.0.1:80", Rule{8080, "tcp", "127.0.0.1:80"}},
		{"8080/tcp=web.example:80", Rule{8080, "tcp", "web.example:80"}},
		{"53/udp=[::1]:5353", Rule{53, "udp", "[::1]:5353"}},
		{"80=[fe80::1%eth0]:80", Rule{80, "tcp", "[fe80::1%eth0]:80"}},
		{"65535=a:1", Rule{65535, "tcp", "a:1"}},
	} {
		r, err := Parse(test.s)
		if err != nil || r != test.want {
			t.Errorf("%q is %+v, %v; want %+v", test.s, r, err, test.want)
		}
		if again, err := Parse(r.String()); err != nil || again != r {
			t.Errorf("%v comes back as %+v, %v", r, again, err)
		}
	}
	for _, test := range []struct{ s, want string }{
		{"", `port ""`},
		{"0", `port "0"`},
		{"65536", `port "65536"`},
		{"-1", `port "-1"`},
		{"+80", `port "+80"`},
		{"http", `port "http"`},
		{"80/sctp", `network "sctp"`},
		{"80/", `network ""`},
		{"80/udp/tcp", `network "udp/tcp"`},
		{"80=", `target ""`},
		{"80=8080", `target "8080"`},
		{"80=:8080", `target ":8080" has no host`},
		{"80=::1:8080", `target "::1:8080"`},
		{"80=a:http", `port "http"`},
		{"80=a:0", `port "0"`},
		{"80=a b:80", `host "a b"`},
		{"80=http://a:80", `target "http://a:80"`},
		{"80=a=b:80", `host "a=b"`},
		{"10.0.0.1:80=a:80", `port "10.0.0.1:80"`},
	} {
		if r, err := Parse(test.s); err == nil || !strings.Contains(err.Error(), test.want) ||
			!strings.Contains(err.Error(), fmt.Sprintf("%q", test.s)) || !strings.Contains(err.Error(), "PORT=HOST:PORT") {
			t.Errorf("%q is %v, %v; want an error that says %s", test.s, r, err, test.want)
		}
	}
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		host := rapid.SampledFrom([]string{"127.0.0.1", "[::1]", "[fe80::1%en0]", "a", "web-1.example"}).Draw(t, "host")
		want := Rule{
			rapid.Uint16Min(1).Draw(t, "port"), rapid.SampledFrom([]string{"tcp", "udp"}).Draw(t, "network"),
			fmt.Sprintf("%s:%d", host, rapid.Uint16Min(1).Draw(t, "target port")),
		}
		if got, err := Parse(want.String()); err != nil || got != want {
			t.Fatalf("%v comes back as %v, %v", want, got, err)
		}
	})
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"80", "53/udp=[::1]:5353", "8080=127.0.0.1:80", "80=", "/udp", "80=a:b:c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := Parse(s)
		if err != nil {
			return
		}
		if again, err := Parse(r.String()); err != nil || again != r {
			t.Errorf("%q is %v, which comes back as %v, %v", s, r, again, err)
		}
	})
}
