package nft

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/warren-mesh/warren/prefixes"
	"pgregory.net/rapid"
)

func TestRules(t *testing.T) {
	t.Parallel()
	if !(Rules{}).IsZero() || !(Rules{Turned: []string{}}).Equal(Rules{}) {
		t.Error("the zero Rules is not zero")
	}
	all := []Rules{{}, {ClampMTU: 1280}, {ClampMTU: 1420}, {SNAT: prefixes.MustParse("10.0.0.0/8")}, {SNAT: prefixes.MustParse("fd00::/8")}, {Turned: []string{"a"}}, {Turned: []string{"a", "b"}}}
	for i, a := range all {
		for j, b := range all {
			if a.Equal(b) != (i == j) {
				t.Errorf("%v, %v: equal %t", a, b, i != j)
			}
		}
		if i > 0 && a.IsZero() {
			t.Errorf("%v is zero", a)
		}
	}
	if !(Rules{Turned: []string{"b", "a", "b"}}).Equal(Rules{Turned: []string{"a", "b"}}) {
		t.Error("the order of sysctls counts")
	}
}

func TestComment(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		owner := rapid.StringMatching(`[a-z:; ]{1,20}`).Draw(t, "owner")
		turned := sorted(rapid.SliceOfN(rapid.StringMatching(`[a-z.0-9_]{1,9}`), 0, 4).Draw(t, "turned"))
		got, ours := parseComment(owner, comment(owner, turned))
		if !ours || !slices.Equal(got, turned) {
			t.Fatalf("read %q, ours %t", got, ours)
		}
		other := rapid.StringMatching(`[a-z]{1,20}`).Draw(t, "other")
		if _, ours := parseComment(owner, comment(owner+other, turned)); ours {
			t.Fatal("another's is ours")
		}
	})
	for _, s := range []string{"", "w", "warren:a", "warren:ab", "warren:b extra", "warren:b; turned"} {
		if _, ours := parseComment("warren:b", s); ours {
			t.Errorf("%q is ours", s)
		}
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for want, o := range map[string]Options{
		"interface":  {Interface: "", Owner: "warren:x"},
		"15 bytes":   {Interface: "a234567890123456", Owner: "warren:x"},
		"owner \"\"": {Interface: "mesh0"},
		"3 too many": {Interface: "mesh0", Owner: strings.Repeat("x", 70)},
	} {
		if _, err := o.defaulted(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	o, err := Options{Interface: "mesh0", Owner: strings.Repeat("x", 66)}.defaulted()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := o.checked(Rules{ClampMTU: 68, Turned: []string{ForwardIPv6, ForwardIPv4, ForwardIPv6}}); err != nil {
		t.Error(err)
	}
	for want, r := range map[string]Rules{
		"MTU 67":             {ClampMTU: 67},
		"MTU -1":             {ClampMTU: -1},
		"MTU 65536":          {ClampMTU: 65536},
		`sysctl "a b"`:       {Turned: []string{"a b"}},
		`sysctl "a\"b"`:      {Turned: []string{`a"b`}},
		`sysctl ""`:          {Turned: []string{""}},
		"has 128; use fewer": {Turned: []string{ForwardIPv4, ForwardIPv6, "net.ipv4.conf.eth0.forwarding"}},
	} {
		if _, err := o.checked(r); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

func TestTooOld(t *testing.T) {
	t.Parallel()
	for release, old := range map[string]bool{"4.19.0-27-amd64": true, "5.9.16": true, "5.10.0-30-amd64": false, "5.10": false, "6.1.0": false, "6.1-rc3": false, "10.0.1": false, "4.4.0": true} {
		if err := tooOld(release); (err != nil) != old || old && (!errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), release)) {
			t.Errorf("%s: got %v", release, err)
		}
	}
}

func TestForeignError(t *testing.T) {
	t.Parallel()
	e := &ForeignError{"nftables table inet warren-x", "it has no comment", "remove it"}
	if got := e.Error(); got != "nftables table inet warren-x is not ours: it has no comment; remove it" {
		t.Error(got)
	}
}

func TestAdvertisedError(t *testing.T) {
	t.Parallel()
	e := &AdvertisedError{[]string{"eth0", "eth1.5"}}
	if s := e.Error(); !strings.Contains(s, "through eth0 and eth1.5,") || !strings.Contains(s, "net.ipv6.conf.eth0.accept_ra=2 and net.ipv6.conf.eth1/5.accept_ra=2") {
		t.Error(s)
	}
}
