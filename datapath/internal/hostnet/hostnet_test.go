package hostnet

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"

	"github.com/warren-mesh/warren/prefixes"
)

func TestCheckInterface(t *testing.T) {
	for _, good := range []string{"w", "wg0", "wg-mesh.1", strings.Repeat("a", 15), "größe", "🕸🕸🕸"} {
		if err := CheckInterface(good); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", ".", "..", "all", "default", "lo", "wg/0", "a b", "a\tb", "a\nb", "a\x00", "a:b", "wg%d", "a\u00a0b",
		"voilà", "wgР0", "wg\u2003", "wg\u0085", "wg\u3000x", "a\x7fb", "a\x1fb",
		strings.Repeat("a", 16), "🕸🕸🕸🕸", "\xff"} {
		err := CheckInterface(bad)
		if !errors.Is(err, ErrName) {
			t.Errorf("%q: got %v", bad, err)
		}
		if _, err := Open(Options{Interface: bad, Namespace: "/nowhere"}); !errors.Is(err, ErrName) && !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%q: Open got %v", bad, err) // it would have complained of the namespace
		}
	}
}

// What is wrong with a name is named.
func TestCheckInterfaceSays(t *testing.T) {
	for name, want := range map[string]string{"voilà": "0xa0", "wgР0": "0xa0", "wg\u2003": "U+2003", "a\tb": `'\t'`, "a/b": "'/'", "a:b": "':'", "a%b": "'%'", "a\x7f": `'\x7f'`} {
		if err := CheckInterface(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %s", name, err, want)
		}
	}
}

func TestOptions(t *testing.T) {
	for _, test := range []struct {
		o    Options
		want string // in the error; empty: none
	}{
		{Options{}, ""},
		{Options{Table: 7777, Policy: true, Mark: 51820}, ""},
		{Options{Table: math.MaxInt32}, ""},
		{Options{Table: 255}, "routing table 255"},
		{Options{Table: 253}, "routing table 253"},
		{Options{Table: -1}, "routing table -1"},
		{Options{Policy: true}, ""},
		{Options{Policy: true, Mark: 0x10, Mask: 0x30, Guard: prefixes.MustParse("0.0.0.0/0", "::/0")}, ""},
		{Options{Policy: true, Table: 254}, "by the main table"},
		{Options{Policy: true, Mask: 0xff}, "mark 0x0 with mask 0xff"},
		{Options{Policy: true, Mark: 0x100, Mask: 0xff}, "mark 0x100 with mask 0xff"},
		{Options{Mark: 1, Mask: 0xff}, "mask 0xff"},
		{Options{Guard: prefixes.MustParse("10.0.0.0/8")}, "10.0.0.0/8"},
		{Options{Priority: 32764}, "rule priority 32764"},
		{Options{Priority: -1}, "rule priority -1"},
		{Options{Metric: -1}, "metric -1"},
		{Options{Metric: 1<<32 - 2}, "metric 4294967294"},
		{Options{Protocol: 2}, "route protocol 2"},
		{Options{Protocol: 256}, "route protocol 256"},
		{Options{Sources: 9}, "sources 9"},
	} {
		test.o.Interface = "wg0"
		_, err := test.o.defaulted()
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: got %v, want %q", test.o, err, test.want)
		}
	}
}

func TestItems(t *testing.T) {
	a, b, all := errors.New("a"), errors.New("b"), errors.New("all")
	p, q := netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")
	err := errors.Join(errors.Join(&ItemError{p, a}, &ItemError{q, b}), all)
	var got []string
	for p, err := range Items(err) {
		got = append(got, fmt.Sprint(p, " ", err))
	}
	if s := strings.Join(got, "; "); s != "10.0.0.0/8 a; fd00::/8 b; invalid Prefix all" {
		t.Error(s)
	}
	for range Items(nil) {
		t.Error("an item of no error")
	}
	for range Items(err) {
		break
	}
}
