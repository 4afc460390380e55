//go:build linux

package nft

import (
	"reflect"
	"testing"

	"github.com/google/nftables/expr"
	"pgregory.net/rapid"
)

// Whatever there is in a message, nothing panics, and nothing of it is taken for ours.
func TestGarbage(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		bs := rapid.SliceOfN(rapid.Byte(), 0, 80)
		b := bs.Draw(t, "message")
		for m := range messages(b) {
			_ = failure(m)
			m.object().text(1)
			commentOf(m.object()[tableUserdata])
		}
		ch := rapid.SampledFrom([]string{forward.name, postrouting.name, "other"}).Draw(t, "chain")
		r, exact, err := read("mesh0", []rule{{ch, b, false}})
		if err != nil || exact || !r.IsZero() {
			t.Fatalf("read %+v, exact %t, %v", r, exact, err)
		}
		commentOf(b)
	})
}

// A rule of ours that is cut, or has one byte changed, is none of ours, or says something else.
func TestSpoiled(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := Rules{ClampMTU: 1280, SNAT: set("10.0.0.0/9", "fd00::/8")}
		ws, err := write("mesh0", want)
		must0(t, err)
		var have []rule
		for _, w := range ws {
			have = append(have, w.rule)
		}
		i := rapid.IntRange(0, len(have)-1).Draw(t, "rule")
		b := append([]byte(nil), have[i].exprs...)
		at := rapid.IntRange(0, len(b)-1).Draw(t, "at")
		if rapid.Bool().Draw(t, "cut") {
			b = b[:at]
		} else {
			b[at] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		}
		have[i].exprs = b
		r, exact, err := read("mesh0", have)
		must0(t, err)
		if exact && r.Equal(want) && !reflect.DeepEqual(typed(t, ws[i].exprs), typed(t, b)) {
			t.Fatalf("rule %d is taken for what it was", i)
		}
	})
}

// typed is what the package nftables makes of a rule, which does not see flags of attributes and padding.
func typed(t *rapid.T, b []byte) (es []expr.Any) {
	for name, data := range (rule{exprs: b}).expressions() {
		e := map[string]expr.Any{
			"meta": &expr.Meta{}, "cmp": &expr.Cmp{}, "payload": &expr.Payload{}, "bitwise": &expr.Bitwise{},
			"immediate": &expr.Immediate{}, "exthdr": &expr.Exthdr{}, "masq": &expr.Masq{},
		}[name]
		if e == nil || expr.Unmarshal(inet, data, e) != nil {
			return nil
		}
		es = append(es, e)
	}
	return es
}

func must0(t *rapid.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
