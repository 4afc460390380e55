package record_test

import (
	"bytes"
	"encoding/base64"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// publicText is the public key of RFC 7748, section 6.1 (Alice's), in base64.
const publicText = "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo="

func public(t testing.TB) key.Public {
	t.Helper()
	k, err := key.ParsePublic(publicText)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func full(t testing.TB) record.Record {
	return record.Record{
		Version: record.Version,
		ID:      "a.example",
		Key:     public(t),
		Endpoints: []record.Endpoint{
			{Addr: netip.MustParseAddr("192.0.2.1"), Port: 51820},
			{Addr: netip.MustParseAddr("fe80::1%eth0"), Port: 51820},
			{Host: "a.example.com", Port: 443},
		},
		Prefixes:   prefixes.MustParse("10.1.0.0/16", "2001:db8::/32"),
		Addresses:  prefixes.MustParse("10.9.0.1/32", "fd00::1/128"),
		Roles:      []string{"dns", "hostaddr"},
		Labels:     map[string]string{"site": "Köln \U0001F40E", "rack": ""},
		Instance:   "0123456789abcdef0123456789abcdef",
		Epoch:      3,
		Generation: 18446744073709551615,
		Sequence:   9007199254740993, // 2^53+1, which a float would round
	}
}

const fullJSON = `{"version":1,"id":"a.example","key":"hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=",` +
	`"endpoints":["192.0.2.1:51820","[fe80::1%eth0]:51820","a.example.com:443"],` +
	`"prefixes":["10.1.0.0/16","2001:db8::/32"],"addresses":["10.9.0.1/32","fd00::1/128"],` +
	`"roles":["dns","hostaddr"],"labels":{"rack":"","site":"Köln ` + "\U0001F40E" + `"},` +
	`"instance":"0123456789abcdef0123456789abcdef","epoch":3,"generation":18446744073709551615,"sequence":9007199254740993}`

const minimal = `{"version":1,"id":"a","key":"` + publicText + `"}`

func TestMarshal(t *testing.T) {
	data, err := record.Marshal(full(t))
	if err != nil {
		t.Fatal(err)
	}
	if string(data) != fullJSON {
		t.Errorf("have %s\nwant %s", data, fullJSON)
	}
	r, err := record.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if !record.Equal(r, full(t)) {
		t.Errorf("came back as %+v", r)
	}
	std, err := stdjson.Marshal(full(t))
	if err != nil || !bytes.Equal(std, data) {
		t.Errorf("encoding/json writes %s, %v", std, err)
	}
	var back record.Record
	if err := stdjson.Unmarshal(data, &back); err != nil || !record.Equal(back, r) {
		t.Errorf("encoding/json reads %+v, %v", back, err)
	}
	if _, err := stdjson.Marshal(record.Record{}); err != nil { // to be shown, though no good
		t.Error(err)
	}
	for range 20 { // map order
		if again, _ := record.Marshal(r); !bytes.Equal(again, data) {
			t.Fatal("Marshal is not deterministic")
		}
	}
}

func TestParseAccepts(t *testing.T) {
	base, err := record.Parse([]byte(minimal))
	if err != nil {
		t.Fatal(err)
	}
	with := func(f func(*record.Record)) record.Record {
		r := base.Clone()
		f(&r)
		return r
	}
	add := func(fields string) string { return minimal[:len(minimal)-1] + "," + fields + "}" }
	for _, c := range []struct {
		name, data string
		want       record.Record
	}{
		{"white space", " \t\r\n" + strings.ReplaceAll(minimal, ",", " ,\n\t") + "\n", base},
		{"empty lists", add(`"endpoints":[],"prefixes":[],"addresses":[],"roles":[],"labels":{},"instance":""`), base},
		{"unknown fields", add(`"new":{"a":[1,{"b":null}]},"ID":"B","Key":1,"Version":7,"":0`), base},
		{"order", `{"sequence":1,"key":"` + publicText + `","id":"a","version":1}`, with(func(r *record.Record) { r.Sequence = 1 })},
		{"escaped names", strings.Replace(minimal, `"id"`, `"\u0069d"`, 1), base},
		{"roles in any order, twice", add(`"roles":["b","a","b"]`), with(func(r *record.Record) { r.Roles = []string{"a", "b"} })},
		{"prefixes in any form", add(`"prefixes":["10.1.2.3/8","::ffff:10.0.0.0/104","10.0.0.1","2001:DB8:0::/32"]`),
			with(func(r *record.Record) { r.Prefixes = prefixes.MustParse("10.0.0.0/8", "10.0.0.1/32", "2001:db8::/32") })},
		{"addresses mapped and bare", add(`"addresses":["::ffff:10.0.0.1/128","fd00::1"]`),
			with(func(r *record.Record) { r.Addresses = prefixes.MustParse("10.0.0.1/32", "fd00::1/128") })},
		{"endpoints in any form", add(`"endpoints":["[::ffff:192.0.2.1]:1","[2001:DB8::0]:65535","Host.Example.:7","127.0.0.1:1"]`),
			with(func(r *record.Record) {
				r.Endpoints = []record.Endpoint{
					{Addr: netip.MustParseAddr("192.0.2.1"), Port: 1},
					{Addr: netip.MustParseAddr("2001:db8::"), Port: 65535},
					{Host: "host.example.", Port: 7},
					{Addr: netip.MustParseAddr("127.0.0.1"), Port: 1},
				}
			})},
		{"label values", add(`"labels":{"a":"","b":"\u00fc \"quoted\" <b>"}`), with(func(r *record.Record) {
			r.Labels = map[string]string{"a": "", "b": `ü "quoted" <b>`}
		})},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, err := record.Parse([]byte(c.data))
			if err != nil {
				t.Fatal(err)
			}
			if !record.Equal(r, c.want) {
				t.Fatalf("have %+v, want %+v", r, c.want)
			}
			if !slices.IsSorted(r.Roles) {
				t.Fatalf("roles %q", r.Roles)
			}
		})
	}
}

// list writes n JSON strings.
func list(n int, each func(i int) string) string {
	s := make([]string, n)
	for i := range s {
		s[i] = fmt.Sprintf("%q", each(i))
	}
	return "[" + strings.Join(s, ",") + "]"
}

// Every field in turn, in each way it can be malformed: the error names it.
func TestParseRefuses(t *testing.T) {
	// set replaces or adds one field of the minimal record.
	set := func(field, value string) string {
		fields := map[string]string{"version": "1", "id": `"a"`, "key": `"` + publicText + `"`}
		fields[field] = value
		var b strings.Builder
		for _, k := range slices.Sorted(maps.Keys(fields)) {
			if fields[k] != "" {
				fmt.Fprintf(&b, ",%q:%s", k, fields[k])
			}
		}
		return "{" + b.String()[1:] + "}"
	}
	long := strings.Repeat("x", 5000)
	type bad struct{ data, field, reason string }
	cases := []bad{
		{"", "", "is empty"},
		{" ", "", "is empty"},
		{"null", "", "is null, not an object"},
		{"[]", "", "is a list, not an object"},
		{`"x"`, "", "is a string, not an object"},
		{"{", "", "strict JSON: unexpected EOF"},
		{minimal[:len(minimal)-1], "", "strict JSON: unexpected EOF"},
		{minimal[:20], "id", "EOF"},
		{minimal + "x", "", "strict JSON: invalid character 'x'"},
		{minimal + minimal, "", "has more after its end"},
		{minimal + " null", "", "has more after its end"},
		{"\ufeff" + minimal, "", "strict JSON: invalid character"},
		{strings.Replace(minimal, `"id":`, `id:`, 1), "", "strict JSON: invalid character 'i'"},
		{strings.Replace(minimal, `}`, `,}`, 1), "", "strict JSON: invalid character ','"},
		{`{"id":"b",` + minimal[1:], "id", "duplicate object member name"},
		{`{"\u0069d":"a",` + minimal[1:], "id", "duplicate object member name"},
		{`{"new":1,"new":2,` + minimal[1:], "new", "duplicate object member name"},
		{`{"new":[{"a":{"b":1,"b":2}}],` + minimal[1:], `new[0]["a"]["b"]`, "duplicate object member name"},
		{set("new", "\"\xff\""), "new", "invalid UTF-8"},
		{set("new", `"\ud800"`), "new", "surrogate"},
		{set("new", "\"\x01\""), "new", "invalid character"},
		{set("new", "nul"), "new", "strict JSON: invalid character"},
		{set("new", strings.Repeat("[", 20000)), "new[0][0][0][0][0][0][0]...", "max depth"},
		{set(strings.Repeat("n", 1000), "nul"), `["` + strings.Repeat("n", 64) + `..."]`, "invalid character"},
		{set("new", `"`+strings.Repeat("x", record.MaxSize)+`"`), "", "at most 524288 are allowed"},

		{set("version", ""), "version", "is missing"},
		{set("version", "0"), "version", "is missing"},
		{set("version", "-1"), "version", "is not a whole number"},
		{set("version", "1.0"), "version", "is not a whole number"},
		{set("version", "1e0"), "version", "is not a whole number"},
		{set("version", `"1"`), "version", "is a string, not a number"},
		{set("version", "null"), "version", "is null, not a number"},
		{set("version", "true"), "version", "is true, not a number"},
		{set("version", "1e400"), "version", "is not a whole number"},
		{set("version", "9223372036854775808"), "version", "is not a version"},

		{set("id", ""), "id", "is missing"},
		{set("id", `""`), "id", "is missing"},
		{set("id", "null"), "id", "is null, not a string"},
		{set("id", "7"), "id", "is a number, not a string"},
		{set("id", `"A"`), "id", "has 'A'"},
		{set("id", `"a/b"`), "id", "has '/'"},
		{set("id", `".."`), "id", "has an empty label"},
		{set("id", `"`+long+`"`), "id", "has 5000 bytes"},
		{strings.Replace(minimal, `"id"`, `"ID"`, 1), "id", "is missing"},

		{set("key", ""), "key", "is missing"},
		{set("key", `""`), "key", "is missing"},
		{set("key", "null"), "key", "is null, not a string"},
		{set("key", `["`+publicText+`"]`), "key", "is a list, not a string"},
		{set("key", `"`+publicText[:43]+`"`), "key", "is not a public key"},
		{set("key", `"`+publicText[:40]+`!mo="`), "key", "is not a public key"},
		{set("key", `"`+publicText+`\n"`), "key", "is not a public key"},
		{set("key", `"`+base64.StdEncoding.EncodeToString(make([]byte, 32))+`"`), "key", "is not a public key"},
		{set("key", `"`+long+`"`), "key", "is not a public key"},

		{set("endpoints", "null"), "endpoints", "is null, not a list"},
		{set("endpoints", `"192.0.2.1:1"`), "endpoints", "is a string, not a list"},
		{set("endpoints", `["192.0.2.1:1",null]`), "endpoints[1]", "is null, not a string"},
		{set("endpoints", `["192.0.2.1:1",{}]`), "endpoints[1]", "is an object, not a string"},
		{set("endpoints", `["192.0.2.1:1","x"]`), "endpoints[1]", "has no port"},
		{set("endpoints", `["192.0.2.1:1"`), "endpoints", "strict JSON"},
		{set("endpoints", list(65, func(int) string { return "192.0.2.1:1" })), "endpoints", "more than 64 entries"},

		{set("prefixes", `{}`), "prefixes", "is an object, not a list"},
		{set("prefixes", `"10.0.0.0/8 10.1.0.0/16"`), "prefixes", "is a string, not a list"},
		{set("prefixes", `["10.0.0.0/8",8]`), "prefixes[1]", "is a number, not a string"},
		{set("prefixes", `["10.0.0.0/8","10.0.0.0/33"]`), "prefixes[1]", "is not a prefix"},
		{set("prefixes", `["10.0.0.0/8","10.0.0.0/8","fe80::1%eth0/64"]`), "prefixes[2]", "has a zone"},
		{set("prefixes", `["::ffff:10.0.0.0/8"]`), "prefixes[0]", "is IPv4-mapped and shorter than /96"},
		{set("prefixes", `["10.0.0.0/8 "]`), "prefixes[0]", "is not a prefix"},
		{set("prefixes", `[""]`), "prefixes[0]", "is neither a prefix nor an address"},
		{set("prefixes", `["`+long+`"]`), "prefixes[0]", "is neither a prefix nor an address"},
		{set("prefixes", list(16385, func(int) string { return "10.0.0.0/8" })), "prefixes", "more than 16384 entries"},

		{set("addresses", `["10.0.0.1/32","10.0.0.0/31"]`), "addresses[1]", "is not a host prefix"},
		{set("addresses", `["fd00::/64"]`), "addresses[0]", "is not a host prefix"},
		{set("addresses", `["fd00::1/32"]`), "addresses[0]", "is not a host prefix"},
		{set("addresses", `["0.0.0.0"]`), "addresses[0]", "is the unspecified address"},
		{set("addresses", `["::/128"]`), "addresses[0]", "is the unspecified address"},
		{set("addresses", `["224.0.0.1/32"]`), "addresses[0]", "is a multicast address"},
		{set("addresses", `["ff02::1/128"]`), "addresses[0]", "is a multicast address"},
		{set("addresses", `["fe80::1%eth0/128"]`), "addresses[0]", "has a zone"},
		{set("addresses", list(65, func(i int) string { return "10.0.0.1" })), "addresses", "more than 64 entries"},

		{set("roles", `"dns"`), "roles", "is a string, not a list"},
		{set("roles", `["dns",[]]`), "roles[1]", "is a list, not a string"},
		{set("roles", `[""]`), "roles[0]", "is empty"},
		{set("roles", `["a b"]`), "roles[0]", "has ' '"},
		{set("roles", `["a\n"]`), "roles[0]", `has '\n'`},
		{set("roles", `["\u202ea"]`), "roles[0]", `has '\u202e'`},
		{set("roles", `["é"]`), "roles[0]", "printable ASCII"},
		{set("roles", `["`+strings.Repeat("r", 129)+`"]`), "roles[0]", "has 129 bytes"},
		{set("roles", list(129, func(i int) string { return "dns" })), "roles", "more than 128 entries"},

		{set("labels", `[]`), "labels", "is a list, not an object"},
		{set("labels", `null`), "labels", "is null, not an object"},
		{set("labels", `{"a":1}`), `labels["a"]`, "is a number, not a string"},
		{set("labels", `{"a":null}`), `labels["a"]`, "is null, not a string"},
		{set("labels", `{"a":"1","a":"1"}`), `labels["a"]`, "duplicate object member name"},
		{set("labels", `{"":"1"}`), `labels[""]`, "as a key is empty"},
		{set("labels", `{"a b":"1"}`), `labels["a b"]`, "as a key has ' '"},
		{set("labels", `{"a\u0000":"1"}`), `labels["a\x00"]`, `as a key has '\x00'`},
		{set("labels", `{"a":"\u001b[31m"}`), `labels["a"]`, `control character '\x1b'`},
		{set("labels", `{"a":"\u0085"}`), `labels["a"]`, "control character"},
		{set("labels", `{"a":"\u202e"}`), `labels["a"]`, "control character"},
		{set("labels", `{"a":"\u2028"}`), `labels["a"]`, "control character"},
		{set("labels", `{"a":"`+long+`"}`), `labels["a"]`, "has 5000 bytes"},
		{set("labels", `{"`+long+`":""}`), `labels["` + long[:64] + `..."]`, "as a key has 5000 bytes"},
		{set("labels", "{"+strings.TrimSuffix(strings.Repeat(`"%":"",`, 129), ",")+"}"), "labels", "more than 128 entries"},

		{set("instance", `7`), "instance", "is a number, not a string"},
		{set("instance", `"A0"`), "instance", "is not lower-case hex"},
		{set("instance", `"xyz"`), "instance", "is not lower-case hex"},
		{set("instance", `"`+strings.Repeat("0", 33)+`"`), "instance", "has 33 bytes"},
	}
	for _, field := range []string{"epoch", "generation", "sequence"} {
		for _, value := range []string{"-1", "-0", "1.5", "1e3", "18446744073709551616"} {
			cases = append(cases, bad{set(field, value), field, "is not a whole number"})
		}
		cases = append(cases,
			bad{set(field, `"1"`), field, "is a string, not a number"},
			bad{set(field, "null"), field, "is null, not a number"},
			bad{set(field, "01"), "", "invalid character '1'"})
	}
	for _, c := range cases {
		for i := 0; strings.Contains(c.data, "%\""); i++ { // distinct label names
			c.data = strings.Replace(c.data, "%\"", fmt.Sprintf("k%d\"", i), 1)
		}
		r, err := record.Parse([]byte(c.data))
		e, ok := errors.AsType[*record.FieldError](err)
		if !ok {
			t.Errorf("%.100s: %v, %+v", c.data, err, r)
			continue
		}
		if e.Field != c.field || !strings.Contains(e.Reason, c.reason) {
			t.Errorf("%.100s:\nhave %q, %q\nwant %q, %q", c.data, e.Field, e.Reason, c.field, c.reason)
		}
		if n := len(e.Error()); n > 600 {
			t.Errorf("%.100s: the error has %d bytes", c.data, n)
		}
		if e.Field == "key" && e.Value != "" {
			t.Errorf("%.100s: the error shows %q", c.data, e.Value)
		}
		if !cmp.Equal(r, record.Record{}, cmp.Comparer(func(a, b record.Record) bool { return record.Equal(a, b) })) {
			t.Errorf("%.100s: an error came with %+v", c.data, r)
		}
	}
}

// A private key in the place of the public one must not be told on. Here it is one that is no public
// key by its last character.
func TestKeyIsNeverShown(t *testing.T) {
	secret := publicText[:42] + "/="
	for _, data := range []string{
		strings.Replace(minimal, publicText, secret, 1),
		strings.Replace(minimal, publicText, secret+"\\n", 1),
		strings.Replace(minimal, publicText, secret+"\xff", 1),
		strings.Replace(minimal, `"`+publicText+`"`, `["`+secret+`"]`, 1),
		strings.Replace(minimal, `"`+publicText, `"`+secret+`,`, 1)[:70],
	} {
		_, err := record.Parse([]byte(data))
		if err == nil {
			t.Errorf("%s was accepted", data)
		} else if s := fmt.Sprintf("%v %+v %#v", err, err, err); strings.Contains(s, secret[:8]) {
			t.Errorf("the error shows the key: %s", s)
		}
	}
}

func TestNewerVersion(t *testing.T) {
	for _, data := range []string{
		`{"version":2}`,
		strings.Replace(minimal, `"version":1`, `"version":2`, 1),
		`{"id":{"name":"a"},"key":[1],"version":2}`,
		`{"id":"NOT A NAME","key":"x","version":2,"endpoints":{}}`,
	} {
		_, err := record.Parse([]byte(data))
		e, ok := errors.AsType[*record.FieldError](err)
		if !errors.Is(err, record.ErrVersion) || !ok || e.Field != "version" || e.Value != "2" {
			t.Errorf("%s: %v", data, err)
		}
	}
	for _, data := range []string{`{"version":2`, `{"version":2}{}`, `{"version":2,"version":2}`, `{"version":2.0}`} {
		if _, err := record.Parse([]byte(data)); err == nil || errors.Is(err, record.ErrVersion) {
			t.Errorf("%s: %v", data, err)
		}
	}
}

// Marshal refuses what Parse would.
func TestValidate(t *testing.T) {
	r := full(t)
	if err := r.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		field string
		spoil func(*record.Record)
	}{
		{"version", func(r *record.Record) { r.Version = 0 }},
		{"version", func(r *record.Record) { r.Version = -1 }},
		{"version", func(r *record.Record) { r.Version = 2 }},
		{"id", func(r *record.Record) { r.ID = "" }},
		{"id", func(r *record.Record) { r.ID = "A" }},
		{"key", func(r *record.Record) { r.Key = key.Public{} }},
		{"endpoints", func(r *record.Record) { r.Endpoints = make([]record.Endpoint, 65) }},
		{"endpoints[0]", func(r *record.Record) { r.Endpoints[0].Port = 0 }},
		{"endpoints[0]", func(r *record.Record) { r.Endpoints[0].Host = "both" }},
		{"endpoints[0]", func(r *record.Record) { r.Endpoints[0].Addr = netip.MustParseAddr("::ffff:192.0.2.1") }},
		{"endpoints[2]", func(r *record.Record) { r.Endpoints[2].Host = "Upper" }},
		{"endpoints[2]", func(r *record.Record) { r.Endpoints[2].Host = "" }},
		{"addresses[1]", func(r *record.Record) { r.Addresses = prefixes.MustParse("10.0.0.1", "fd00::/64") }},
		{"roles[1]", func(r *record.Record) { r.Roles[1] = "\xff" }},
		{"roles", func(r *record.Record) { r.Roles = make([]string, 129) }},
		{`labels["a"]`, func(r *record.Record) { r.Labels = map[string]string{"a": "\xff"} }},
		{"instance", func(r *record.Record) { r.Instance = "AB" }},
		{"", func(r *record.Record) { r.Prefixes = manyPrefixes(record.MaxPrefixes) }},
		{"prefixes", func(r *record.Record) { r.Prefixes = manyPrefixes(record.MaxPrefixes + 1) }},
	} {
		r := full(t)
		c.spoil(&r)
		_, err := record.Marshal(r)
		e, ok := errors.AsType[*record.FieldError](err)
		if !ok || e.Field != c.field {
			t.Errorf("%s: %v", c.field, err)
		}
	}
}

// manyPrefixes are long in text: as many as are allowed are too large.
func manyPrefixes(n int) prefixes.Set {
	ps := make([]netip.Prefix, n)
	for i := range ps {
		a := netip.MustParseAddr("2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff").As16()
		a[6], a[7] = byte(i>>8)|0x10, byte(i)
		a[4] |= byte(i >> 12)
		ps[i] = prefixes.Host(netip.AddrFrom16(a))
	}
	return prefixes.Must(ps...)
}

// A record that fits as it was written, but not in canonical form, is refused: what was accepted can be
// written again.
func TestCanonicalFormMustFit(t *testing.T) {
	var b strings.Builder
	b.WriteString(minimal[:len(minimal)-1] + `,"prefixes":[`)
	n := 0
	for ; b.Len() < record.MaxSize-40; n++ {
		if n > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `"1111:1111:1111:1111:1111:%x::1111"`, 0x1000+n) // 35 bytes; canonical 36
		if n == record.MaxPrefixes-1 {
			break
		}
	}
	pad := record.MaxSize - b.Len() - len(`],"x":""}`)
	if pad < 0 {
		t.Fatal(pad)
	}
	// With the padding, an unknown field, it is exactly as large as allowed; without it, it is smaller.
	data := b.String() + `],"x":"` + strings.Repeat("y", pad) + `"}`
	if len(data) != record.MaxSize {
		t.Fatal(len(data))
	}
	r, err := record.Parse([]byte(data))
	if err == nil {
		if _, err := record.Marshal(r); err != nil {
			t.Errorf("accepted, but cannot be written: %v", err)
		}
	} else if e, ok := errors.AsType[*record.FieldError](err); !ok || !strings.Contains(e.Reason, "at most") {
		t.Error(err)
	}
}

func TestEqualAndClone(t *testing.T) {
	a := full(t)
	b := a.Clone()
	if !record.Equal(a, b) {
		t.Fatal("a clone is not equal")
	}
	b.Roles = []string{"hostaddr", "dns", "dns"}
	if !record.Equal(a, b) || b.Roles[0] != "hostaddr" {
		t.Error("roles are not compared as a set, or were sorted in place")
	}
	if !record.Equal(record.Record{Labels: map[string]string{}, Roles: []string{}, Endpoints: []record.Endpoint{}}, record.Record{}) {
		t.Error("empty is not nil")
	}
	for i, change := range []func(*record.Record){
		func(r *record.Record) { r.Version++ },
		func(r *record.Record) { r.ID += "x" },
		func(r *record.Record) { r.Key = key.Public{} },
		func(r *record.Record) { slices.Reverse(r.Endpoints) },
		func(r *record.Record) { r.Prefixes = prefixes.Set{} },
		func(r *record.Record) { r.Addresses = prefixes.Set{} },
		func(r *record.Record) { r.Roles[0] = "x" },
		func(r *record.Record) { r.Labels["site"] = "x" },
		func(r *record.Record) { r.Instance = "" },
		func(r *record.Record) { r.Epoch++ },
		func(r *record.Record) { r.Generation++ },
		func(r *record.Record) { r.Sequence++ },
	} {
		c := a.Clone()
		change(&c)
		if record.Equal(a, c) {
			t.Errorf("change %d made no difference", i)
		}
	}
	if !record.Equal(a, full(t)) {
		t.Error("a clone shares what can be changed")
	}
	if got, want := a.Reachable(), prefixes.MustParse("10.1.0.0/16", "10.9.0.1", "2001:db8::/32", "fd00::1"); got != want {
		t.Errorf("reachable %v, want %v", got, want)
	}
}

// draw makes any record that is valid.
func draw(t *rapid.T) record.Record {
	addr := rapid.Custom(func(t *rapid.T) netip.Addr {
		if rapid.Bool().Draw(t, "v4") {
			return netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "addr")))
		}
		return netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "addr"))).Unmap()
	})
	endpoint := rapid.Custom(func(t *rapid.T) record.Endpoint {
		e := record.Endpoint{Port: rapid.Uint16Min(1).Draw(t, "port")}
		if rapid.Bool().Draw(t, "host") {
			e.Host = rapid.StringMatching(`([a-z0-9]([a-z0-9-]{0,5}[a-z0-9])?\.){0,3}[a-z]{1,5}\.?`).Draw(t, "name")
			return e
		}
		e.Addr = addr.Draw(t, "addr")
		if e.Addr.Is6() && rapid.Bool().Draw(t, "zoned") {
			e.Addr = e.Addr.WithZone(rapid.StringMatching(`[a-z0-9.:@_-]{1,15}`).Draw(t, "zone"))
		}
		return e
	}).Filter(func(e record.Endpoint) bool { return e.Validate() == nil })
	prefix := rapid.Custom(func(t *rapid.T) netip.Prefix {
		a := addr.Draw(t, "addr")
		return netip.PrefixFrom(a, rapid.IntRange(0, a.BitLen()).Draw(t, "bits"))
	})
	host := addr.Filter(func(a netip.Addr) bool { return !a.IsUnspecified() && !a.IsMulticast() })
	word := rapid.StringMatching(`[!-~]{1,20}`)
	value := rapid.String().Filter(func(s string) bool {
		return record.Record{Version: 1, ID: "a", Key: alice, Labels: map[string]string{"a": s}}.Validate() == nil
	})
	var addrs []netip.Prefix
	for _, a := range rapid.SliceOfN(host, 0, 4).Draw(t, "addresses") {
		addrs = append(addrs, prefixes.Host(a))
	}
	return record.Record{
		Version:    record.Version,
		ID:         rapid.StringMatching(`[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z0-9]{1,5}){0,2}`).Draw(t, "id"),
		Key:        alice,
		Endpoints:  rapid.SliceOfN(endpoint, 0, 5).Draw(t, "endpoints"),
		Prefixes:   prefixes.Must(rapid.SliceOfN(prefix, 0, 10).Draw(t, "prefixes")...),
		Addresses:  prefixes.Must(addrs...),
		Roles:      rapid.SliceOfN(word, 0, 5).Draw(t, "roles"),
		Labels:     rapid.MapOfN(word, value, 0, 5).Draw(t, "labels"),
		Instance:   rapid.StringMatching(`[0-9a-f]{0,32}`).Draw(t, "instance"),
		Epoch:      rapid.Uint64().Draw(t, "epoch"),
		Generation: rapid.Uint64().Draw(t, "generation"),
		Sequence:   rapid.Uint64().Draw(t, "sequence"),
	}
}

var alice = func() key.Public {
	k, err := key.ParsePublic(publicText)
	if err != nil {
		panic(err)
	}
	return k
}()

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := draw(t)
		data, err := record.Marshal(r)
		if err != nil {
			t.Fatalf("%+v: %v", r, err)
		}
		back, err := record.Parse(data)
		if err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		if !record.Equal(r, back) {
			t.Fatalf("have %+v, want %+v", back, r)
		}
		if !stdjson.Valid(data) || bytes.ContainsAny(data, "\n\r") {
			t.Fatalf("%s is not JSON on one line", data)
		}
		// Any other spelling of the same JSON says the same.
		var loose map[string]any
		d := stdjson.NewDecoder(bytes.NewReader(data))
		d.UseNumber()
		if err := d.Decode(&loose); err != nil {
			t.Fatal(err)
		}
		other, err := stdjson.MarshalIndent(loose, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		if again, err := record.Parse(other); err != nil || !record.Equal(r, again) {
			t.Fatalf("%s: %v", other, err)
		}
		// Nothing shorter is a record.
		if n := rapid.IntRange(0, len(data)-1).Draw(t, "cut"); n < len(data) {
			if _, err := record.Parse(data[:n]); err == nil {
				t.Fatalf("accepted %s", data[:n])
			}
		}
	})
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(fullJSON))
	f.Add([]byte(minimal))
	f.Add([]byte(`{"version":2}`))
	f.Add([]byte(minimal[:len(minimal)-1] + `,"prefixes":["1:2:3:4:5:6::8","10.1.1.1/8","::ffff:1.2.3.4"],"endpoints":["[::ffff:1.2.3.4]:1","A.b:2"],"roles":["b","a","a"]}`))
	f.Add([]byte(minimal[:len(minimal)-1] + `,"labels":{"a":"\u00e9\/"},"epoch":18446744073709551615,"x":{"y":[1,2]}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := record.Parse(data)
		if err != nil {
			e, ok := errors.AsType[*record.FieldError](err)
			if !ok || e.Reason == "" || len(e.Error()) > 1000 {
				t.Fatalf("%q: %v", data, err)
			}
			return
		}
		if err := r.Validate(); err != nil {
			t.Fatalf("accepted %q: %v", data, err)
		}
		once, err := record.Marshal(r)
		if err != nil {
			t.Fatalf("accepted %q: %v", data, err)
		}
		back, err := record.Parse(once)
		if err != nil || !record.Equal(r, back) {
			t.Fatalf("%q became %q: %v", data, once, err)
		}
		if twice, err := record.Marshal(back); err != nil || !bytes.Equal(once, twice) {
			t.Fatalf("%q became %q: %v", once, twice, err)
		}
	})
}

func BenchmarkParse(b *testing.B) {
	r := full(b)
	r.Prefixes = manyPrefixes(1000)
	large, err := record.Marshal(r)
	if err != nil {
		b.Fatal(err)
	}
	for name, data := range map[string][]byte{"small": []byte(fullJSON), "1000prefixes": large} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := record.Parse(data); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
