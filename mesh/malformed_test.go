package mesh_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/meshtest"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/view"
)

// bad are values for the fields of a record that make it no record, as JSON.
var bad = map[string][]string{
	"version":    {`0`, `-1`, `2`, `"1"`, `null`, `1.5`, `99999999999999999999`},
	"id":         {`""`, `"n00002"`, `"N00001"`, `"../n00001"`, `"a b"`, `null`, `1`, `["n00001"]`, `"\u0000"`},
	"key":        {`""`, `"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="`, `"abc"`, `null`, `7`, `"kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk"`},
	"endpoints":  {`"198.18.0.1:1"`, `["198.18.0.1"]`, `["198.18.0.1:0"]`, `["0.0.0.0:1"]`, `["[::ffff:1.2.3.4%eth0]:1"]`, `["224.0.0.1:1"]`, `[null]`, `{}`, `["host:99999"]`},
	"prefixes":   {`"10.0.0.0/8"`, `["10.0.0.0/33"]`, `["10.0.0"]`, `["fe80::1%eth0/64"]`, `[7]`, `null`, `["10.0.0.0/08"]`},
	"addresses":  {`["100.64.0.0/24"]`, `["0.0.0.0"]`, `["ff02::1"]`, `["::%a"]`, `[{}]`, `true`},
	"roles":      {`[""]`, `["a b"]`, `["\u0007"]`, `{"a":1}`, `null`},
	"labels":     {`{"":"x"}`, `{"a b":"x"}`, `{"a":"\u0000"}`, `{"a":1}`, `{"a":"x","a":"y"}`, `[]`, `null`},
	"instance":   {`"XYZ"`, `"0123456789abcdef0123456789abcdef0"`, `null`, `1`},
	"epoch":      {`-1`, `1.5`, `"1"`, `18446744073709551616`, `null`},
	"generation": {`-1`, `1e3`, `"1"`, `null`},
	"sequence":   {`-1`, `0.1`, `"1"`, `null`},
}

// broken are entries that are no record as a whole.
var broken = []string{"", "{", "null", "[]", "{}", "\xff\xfe", "not JSON", strings.Repeat("[", 100000), `{"version":1}{"version":1}`}

// replaced returns record data with one field's value replaced.
func replaced(t testing.TB, data []byte, field, value string) []byte {
	t.Helper()
	var m map[string]json.RawMessage
	must(t, json.Unmarshal(data, &m))
	if field == "labels" && value == `{"a":"x","a":"y"}` || !json.Valid([]byte(value)) {
		delete(m, field)
		out, err := json.Marshal(m)
		must(t, err)
		return append(out[:len(out)-1], fmt.Sprintf(`,%q:%s}`, field, value)...)
	}
	m[field] = json.RawMessage(value)
	out, err := json.Marshal(m)
	must(t, err)
	return out
}

// states returns what the devices of the other two are.
func states(t testing.TB, c *meshtest.Cluster) (ss []datapath.State) {
	t.Helper()
	for _, i := range []int{0, 2} {
		st, err := c.Nodes[i].Device.Read(t.Context())
		must(t, err)
		ss = append(ss, st)
	}
	return ss
}

// putRaw puts data as the record of a node that is stopped, waits, and checks what must hold whatever
// data is: nothing but the peer with that record is affected, and what is not believed shows as a
// condition and changes nothing at all. It then puts the good record again.
func putRaw(t *testing.T, c *meshtest.Cluster, good, data []byte) {
	t.Helper()
	id := registry.NodeID(c.Nodes[1].Config.Node)
	before := states(t, c)
	must(t, c.Store.Put(t.Context(), registry.Entry{ID: id, Data: data}))
	time.Sleep(time.Second)
	o, err := identity.Plain().Open(id, data, time.Now())
	for i, st := range states(t, c) {
		if err != nil {
			if !st.Equal(before[i]) {
				t.Errorf("%s: the device is another: %v", err, datapath.Plan(before[i], st))
			}
			mustHave(t, c.Nodes[2*i], view.RecordRefused, c.Nodes[1].Config.Node)
			continue
		}
		// What others have, they keep, unless this record rightly claims it: it is n00001's, so n00000 wins
		// against it and n00002 loses.
		other := c.Nodes[2-2*i].Config.Key.Public()
		was, is := before[i].Peers[other], st.Peers[other]
		lost := was.Prefixes.Minus(is.Prefixes)
		if o.Record.Key != other && !lost.Minus(o.Record.Reachable()).IsEmpty() || i == 1 && !lost.IsEmpty() {
			t.Errorf("another peer lost %v", lost)
		}
	}
	if err == nil {
		check(t, c)
	}
	must(t, c.Store.Put(t.Context(), registry.Entry{ID: id, Data: good}))
	time.Sleep(time.Second)
	check(t, c)
	mustBeWell(t, c)
}

func withOneStopped(t *testing.T, f func(t *testing.T, c *meshtest.Cluster, good []byte)) {
	t.Helper()
	started(t, meshtest.Options{}, func(t *testing.T, c *meshtest.Cluster) {
		c.Nodes[1].Stop()
		f(t, c, recordOf(c, c.Nodes[1]))
	})
}

func TestMalformedRecordsAffectNoOtherPeer(t *testing.T) {
	withOneStopped(t, func(t *testing.T, c *meshtest.Cluster, good []byte) {
		for field, values := range bad {
			for _, v := range values {
				data := replaced(t, good, field, v)
				if _, err := identity.Plain().Open("node/n00001", data, time.Now()); err == nil {
					t.Errorf("%s: %s is a good value", field, v)
				}
				putRaw(t, c, good, data)
			}
		}
		for _, data := range broken {
			putRaw(t, c, good, []byte(data))
		}
		for i := range good { // cut off anywhere
			if i%16 == 0 {
				putRaw(t, c, good, good[:i])
			}
		}
	})
}

// Records that are well formed and claim what others have.
func TestGreedyRecordsAffectNoOtherPeer(t *testing.T) {
	withOneStopped(t, func(t *testing.T, c *meshtest.Cluster, good []byte) {
		for field, values := range map[string][]string{
			"key": {`"` + c.Nodes[0].Config.Key.Public().String() + `"`},
			"prefixes": {`["10.0.0.0/24","10.0.2.0/24"]`, `["100.64.0.0/32"]`, `["10.0.0.0/8"]`, `["0.0.0.0/0","::/0"]`, `["0.0.0.0/1","128.0.0.0/1"]`,
				`["127.0.0.0/8","169.254.0.0/16","224.0.0.0/4"]`, `["10.0.2.128/25"]`},
			"addresses": {`["100.64.0.0"]`, `["100.64.0.2"]`, `["127.0.0.1"]`},
			"endpoints": {`["198.18.0.0:49152"]`, `["10.0.2.1:1"]`, `["127.0.0.1:1"]`, `["example.com:1"]`},
		} {
			for _, v := range values {
				putRaw(t, c, good, replaced(t, good, field, v))
			}
		}
	})
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(nil), "prefixes", `["10.0.2.0/24"]`)
	for field, values := range bad {
		for _, v := range values {
			f.Add([]byte(nil), field, v)
		}
	}
	for _, b := range broken[:8] {
		if len(b) < 1000 {
			f.Add([]byte(b), "", "")
		}
	}
	f.Fuzz(func(t *testing.T, raw []byte, field, value string) {
		if len(raw) > registry.MaxData || len(value) > registry.MaxData/2 {
			t.Skip()
		}
		synctest.Test(t, func(t *testing.T) {
			c := meshtest.New(t, meshtest.Options{})
			c.Start()
			settle(t, c, time.Minute)
			c.Nodes[1].Stop()
			good := recordOf(c, c.Nodes[1])
			data := raw
			if field != "" {
				data = bytes.Replace(good, []byte("{"), fmt.Appendf(nil, "{%q:%s,", field, value), 1)
				if json.Valid([]byte(value)) {
					data = replaced(t, good, field, value)
				}
			}
			putRaw(t, c, good, data)
		})
	})
}
