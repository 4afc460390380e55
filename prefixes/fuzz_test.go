package prefixes_test

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/warren-mesh/warren/prefixes"
)

// For any text: it is either refused by name, or taken, canonical, and reads
// back the same.
func FuzzParse(f *testing.F) {
	f.Add("10.0.0.0/8")
	f.Add("::ffff:10.1.2.3/104")
	f.Add("fe80::1%eth0/64")
	f.Add("10.1.2.3/0")
	f.Fuzz(func(t *testing.T, in string) {
		s, err := prefixes.Parse(in)
		if err != nil {
			if !s.IsEmpty() {
				t.Fatalf("%q: %v with %v", in, s, err)
			}
			e, ok := err.(interface{ Unwrap() []error }).Unwrap()[0].(*prefixes.Error)
			if !ok || e.Value != in || e.Reason == "" || strings.ContainsAny(err.Error(), "\n\r\x1b") || len(err.Error()) > 1000 {
				t.Fatalf("%q: error %q", in, err)
			}
			return
		}
		if s.Len() != 1 {
			t.Fatalf("%q: %v", in, s)
		}
		p := s.At(0)
		if c, masked, err := prefixes.Canonical(p); c != p || masked || err != nil || p.Addr().Is4In6() || p != p.Masked() {
			t.Fatalf("%q: %v is not canonical", in, p)
		}
		// What netip takes without a doubt about its meaning, Parse takes too.
		if q, err := netip.ParsePrefix(in); err == nil && !q.Addr().Is4In6() && q.Masked() != p {
			t.Fatalf("%q: %v, netip says %v", in, p, q)
		}
		if again, err := prefixes.Parse(s.String()); again != s || err != nil {
			t.Fatalf("%q: %q reads back as %v, %v", in, s, again, err)
		}
		if !s.Has(p) || !s.CoversPrefix(p) || !s.HasAddr(p.Addr()) {
			t.Fatalf("%q: %v is not in its own set", in, p)
		}
	})
}

// For any bytes: never a panic, never a change on an error, and what is read is
// what an array of strings would have been.
func FuzzJSON(f *testing.F) {
	f.Add([]byte(`["10.0.0.0/8","fd00::1"]`))
	f.Add([]byte(`null`))
	f.Add([]byte(`[null, 7, {"a":[]}]`))
	f.Fuzz(func(t *testing.T, in []byte) {
		old := prefixes.MustParse("203.0.113.0/24")
		s := old
		err := json.Unmarshal(in, &s)
		direct := old
		if derr := direct.UnmarshalJSON(in); (derr == nil) != (err == nil) || direct != s {
			t.Fatalf("%q: %v, %v; called directly %v, %v", in, s, err, direct, derr)
		}
		if err != nil {
			if s != old {
				t.Fatalf("%q: changed to %v by an error", in, s)
			}
			return
		}
		var texts []*string
		if err := json.Unmarshal(in, &texts); err != nil {
			t.Fatalf("%q: taken, but %v", in, err)
		}
		var all []string
		for _, p := range texts {
			all = append(all, *p) // a null in it would be nil
		}
		if want, err := prefixes.Parse(all...); err != nil || s != want {
			t.Fatalf("%q: %v, want %v, %v", in, s, want, err)
		}
		out, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var again prefixes.Set
		if err := json.Unmarshal(out, &again); err != nil || again != s {
			t.Fatalf("%q: %s reads back as %v, %v", in, out, again, err)
		}
	})
}
