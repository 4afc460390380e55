package view_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func publicKey(n byte) key.Public {
	var b [key.Size]byte
	b[0], b[31] = n, 1
	k, err := key.PublicFromBytes(b[:])
	if err != nil {
		panic(err)
	}
	return k
}

func drawView(t *rapid.T) view.View {
	var v view.View
	for _, node := range []string{"a", "b", "c"} {
		if !rapid.Bool().Draw(t, node) {
			continue
		}
		p := view.Peer{Node: node, Key: publicKey(rapid.SampledFrom([]byte{1, 2}).Draw(t, "key"))}
		if rapid.Bool().Draw(t, "prefixes") {
			p.Prefixes = prefixes.MustParse("10.0.0.0/8")
		}
		if rapid.Bool().Draw(t, "roles") {
			p.Roles, p.Labels = []string{"dns"}, map[string]string{"zone": "1"}
		}
		if rapid.Bool().Draw(t, "shook hands") {
			p.LastHandshake = epoch.Add(time.Duration(rapid.IntRange(0, 1).Draw(t, "at")) * time.Second)
		}
		p.Received = rapid.Uint64Range(0, 1).Draw(t, "received")
		v.Peers = append(v.Peers, p)
	}
	for _, kind := range []view.Kind{view.KeyConflict, view.LocalWins} {
		for _, subject := range []string{"", "10.0.0.0/8"} {
			if rapid.Bool().Draw(t, "condition") {
				v.Conditions = append(v.Conditions, view.Condition{
					Kind: kind, Node: "a", Subject: subject, Message: rapid.SampledFrom([]string{"so", "or so"}).Draw(t, "message"),
					Since: epoch.Add(time.Duration(rapid.IntRange(0, 1).Draw(t, "since")) * time.Second),
				})
			}
		}
	}
	view.Sort(v.Conditions)
	return v
}

// What a Diff says, done to the old View, gives the new one but for what merely counts.
func TestDiff(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		old, new := drawView(t), drawView(t)
		c := view.Diff(old, new)

		// What merely counts left out, peers and conditions as text.
		peer := func(p view.Peer) string {
			p.Received, p.Sent = 0, 0
			shook := !p.LastHandshake.IsZero()
			p.LastHandshake = time.Time{}
			return fmt.Sprint(p, shook)
		}
		condition := func(c view.Condition) string { return fmt.Sprint(c.Kind, c.Node, c.Subject, c.Since) }
		have, want := map[string]int{}, map[string]int{}
		for _, p := range old.Peers {
			have[peer(p)]++
		}
		for _, x := range old.Conditions {
			have[condition(x)]++
		}
		for _, p := range new.Peers {
			want[peer(p)]++
		}
		for _, x := range new.Conditions {
			want[condition(x)]++
		}
		for _, p := range c.Joined {
			have[peer(p)]++
		}
		for _, p := range c.Left {
			have[peer(p)]--
		}
		for _, ch := range c.Changed {
			if ch.Old.Node != ch.New.Node {
				t.Fatalf("%s changed to %s", ch.Old.Node, ch.New.Node)
			}
			if peer(ch.Old) == peer(ch.New) {
				t.Fatalf("%s did not change", ch.Old.Node)
			}
			have[peer(ch.Old)]--
			have[peer(ch.New)]++
		}
		for _, x := range c.Raised {
			have[condition(x)]++
		}
		for _, x := range c.Cleared {
			have[condition(x)]--
		}
		maps.DeleteFunc(have, func(_ string, n int) bool { return n == 0 })
		if !maps.Equal(have, want) {
			t.Fatalf("diff %+v gives %v, want %v", c, have, want)
		}
		if same := maps.EqualFunc(texts(old, peer, condition), texts(new, peer, condition), func(a, b int) bool { return a == b }); c.IsEmpty() != same {
			t.Fatalf("empty %v, and the same %v", c.IsEmpty(), same)
		}
	})
}

func texts(v view.View, peer func(view.Peer) string, condition func(view.Condition) string) map[string]int {
	all := map[string]int{}
	for _, p := range v.Peers {
		all[peer(p)]++
	}
	for _, c := range v.Conditions {
		all[condition(c)]++
	}
	return all
}

func TestDiffSeesEachField(t *testing.T) {
	old := view.Peer{Node: "a", Key: publicKey(1)}
	for name, change := range map[string]func(*view.Peer){
		"Key":           func(p *view.Peer) { p.Key = publicKey(2) },
		"Addresses":     func(p *view.Peer) { p.Addresses = prefixes.MustParse("10.0.0.1/32") },
		"Prefixes":      func(p *view.Peer) { p.Prefixes = prefixes.MustParse("10.0.0.0/8") },
		"Roles":         func(p *view.Peer) { p.Roles = []string{"dns"} },
		"Labels":        func(p *view.Peer) { p.Labels = map[string]string{"a": "b"} },
		"Endpoint":      func(p *view.Peer) { p.Endpoint = netip.MustParseAddrPort("192.0.2.1:1") },
		"Candidates":    func(p *view.Peer) { p.Candidates = []record.Endpoint{{Port: 1}} },
		"SetAside":      func(p *view.Peer) { p.SetAside = true },
		"LastHandshake": func(p *view.Peer) { p.LastHandshake = epoch },
	} {
		new := old
		change(&new)
		c := view.Diff(view.View{Peers: []view.Peer{old}}, view.View{Peers: []view.Peer{new}})
		if len(c.Changed) != 1 || c.Changed[0].Old.Node != "a" {
			t.Errorf("%s: %+v", name, c)
		}
	}
	later := old
	old.LastHandshake, later.LastHandshake = epoch, epoch.Add(time.Hour)
	later.Received, later.Sent = 1, 1
	if c := view.Diff(view.View{Peers: []view.Peer{old}}, view.View{Peers: []view.Peer{later}}); !c.IsEmpty() {
		t.Errorf("counting is a change: %+v", c)
	}
}

func TestPeerAndFind(t *testing.T) {
	v := view.View{
		Peers:      []view.Peer{{Node: "a"}, {Node: "b"}, {Node: "c"}},
		Conditions: []view.Condition{{Kind: view.KeyConflict, Node: "a"}, {Kind: view.LocalWins, Node: "a"}, {Kind: view.LocalWins, Node: "b"}},
	}
	for _, n := range []string{"a", "b", "c"} {
		if p, ok := v.Peer(n); !ok || p.Node != n {
			t.Errorf("%s: %v, %v", n, p.Node, ok)
		}
	}
	if _, ok := v.Peer("bb"); ok {
		t.Error("found a peer that is not there")
	}
	var found []string
	for c := range v.Find(view.LocalWins) {
		found = append(found, c.Node)
	}
	if !slices.Equal(found, []string{"a", "b"}) {
		t.Errorf("found %v", found)
	}
	for range v.Find(view.LocalWins) {
		break
	}
}

func TestConditionString(t *testing.T) {
	for _, test := range []struct {
		c    view.Condition
		want string
	}{
		{view.Condition{Kind: view.RegistryDown, Message: "no answer"}, "registry-down: no answer"},
		{view.Condition{Kind: view.PrefixConflict, Node: "a", Subject: "10.0.0.0/8", Message: "is taken", Remedy: "take another"}, "prefix-conflict a 10.0.0.0/8: is taken (take another)"},
	} {
		if got := test.c.String(); got != test.want {
			t.Errorf("%q, want %q", got, test.want)
		}
	}
}
