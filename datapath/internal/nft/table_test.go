//go:build linux

package nft

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

var some = Rules{
	ClampMTU: 1280,
	SNAT:     set("0.0.0.0/0", "10.0.0.0/8", "10.0.0.0/9", "10.128.0.0/9", "10.1.2.3/32", "::/0", "fd00::/8", "fd00::/9", "fd01::1/128"),
	Turned:   []string{ForwardIPv4, ForwardIPv6},
}

// someText is some as an administrator would write it.
const someText = `table inet warren-mesh0 {
	comment "warren:mesh0:87; turned on: net.ipv4.ip_forward net.ipv6.conf.all.forwarding"

	chain forward {
		type filter hook forward priority mangle; policy accept;
		iifname "mesh0" meta nfproto ipv4 tcp flags syn / syn,rst tcp option maxseg size set 1240
		iifname "mesh0" meta nfproto ipv6 tcp flags syn / syn,rst tcp option maxseg size set 1220
		oifname "mesh0" meta nfproto ipv4 tcp flags syn / syn,rst tcp option maxseg size set 1240
		oifname "mesh0" meta nfproto ipv6 tcp flags syn / syn,rst tcp option maxseg size set 1220
	}

	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 0.0.0.0/0 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 10.0.0.0/8 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 10.0.0.0/9 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 10.1.2.3 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip daddr 10.128.0.0/9 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip6 daddr ::/0 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip6 daddr fd00::/8 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip6 daddr fd00::/9 masquerade
		iifname "mesh0" oifname != "mesh0" oif != "lo" ip6 daddr fd01::1 masquerade
	}
}
`

// nft shows our table as it shows what it makes of that text, and what it makes is our table. Saved and
// restored, it is the same one.
func TestText(t *testing.T) {
	t.Parallel()
	need(t, "nft")
	s, other := newSpace(t), newSpace(t)
	a, b := s.open(), other.open()
	s.is(a, Rules{}, true)
	s.set(a, some)
	s.is(a, some, true)
	other.nft(someText)
	other.is(b, some, true)
	saved := s.list()
	if d := cmp.Diff(other.list(), saved); d != "" {
		t.Error(d)
	}
	other.nft("flush ruleset\n" + saved)
	other.is(b, some, true)
	must(t, b.Set(t.Context(), Rules{}))
	if out := other.run("", "nft", "list", "ruleset"); out != "" {
		t.Errorf("left: %s", out)
	}
}

// hears reports whether a change is told.
func hears(tb *Table) bool {
	select {
	case <-tb.Changed():
		return true
	case <-time.After(5 * time.Second):
		return false
	}
}

// settle waits until the watcher has heard of all that was done, and reports whether it told of a change.
func (s *space) settle(tb *Table) (told bool) {
	s.t.Helper()
	now, err := tb.c.generation(s.t.Context())
	must(s.t, err)
	for end := time.Now().Add(5 * time.Second); tb.watch.heard.Load() != now; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatal("the watcher is deaf")
		}
	}
	select {
	case <-tb.Changed():
		return true
	default:
		return false
	}
}

func TestChanged(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb, c := s.open(), s.other()
	s.set(tb, some)
	s.set(tb, Rules{ClampMTU: 1280})
	s.set(tb, Rules{})
	s.set(tb, some)
	if s.settle(tb) {
		t.Error("our own changes are told")
	}
	c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: ourTable.Name})
	c.AddTable(table("unrelated"))
	c.AddChain(&nftables.Chain{Table: table("unrelated"), Name: "forward"})
	must(t, c.Flush())
	if s.settle(tb) {
		t.Error("other tables are told of")
	}

	c.FlushRuleset()
	must(t, c.Flush())
	if !hears(tb) {
		t.Fatal("flush ruleset: not told")
	}
	s.settle(tb)
	s.is(tb, Rules{}, true)
	s.set(tb, some)
	s.is(tb, some, true)
	for kind, edit := range map[string]func(){
		"a chain":   func() { c.AddChain(&nftables.Chain{Table: ourTable, Name: "mine"}) },
		"a set":     func() { must(t, addSet(c)) },
		"an object": func() { c.AddObj(&nftables.CounterObj{Table: ourTable, Name: "mine"}) },
		"a rule": func() {
			c.AddRule(&nftables.Rule{Table: ourTable, Chain: &nftables.Chain{Name: forward.name}})
		},
		"all rules": func() { c.FlushTable(ourTable) },
	} {
		edit()
		must(t, c.Flush())
		if !hears(tb) {
			t.Errorf("%s: not told", kind)
		}
		r, exact, err := tb.Read(t.Context())
		must(t, err)
		if exact {
			t.Errorf("%s: read %s, exact", kind, show(r))
		}
		s.set(tb, some)
		s.is(tb, some, true)
		s.settle(tb) // what is told of one change may come in pieces
	}
	another := s.open()
	s.set(another, Rules{ClampMTU: 1400})
	if !hears(tb) {
		t.Error("another Table of the same: not told")
	}
}

// Where messages are lost, that is a change too.
func TestOverrun(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb := s.open()
	s.set(tb, some)
	var err error
	must(t, tb.watch.c.raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) }))
	must(t, err)
	other, err := Open(Options{Interface: "mesh1", Owner: "warren:mesh1:87", Do: s.do})
	must(t, err)
	defer other.Close()
	many := Rules{ClampMTU: 1280}
	for i := range 256 {
		many.SNAT = many.SNAT.With(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i), 0}), 24))
	}
	for end := time.Now().Add(10 * time.Second); ; {
		s.set(other, many)
		s.set(other, Rules{})
		select {
		case <-tb.Changed():
			s.is(tb, some, true)
			return
		case <-time.After(time.Millisecond):
		}
		if time.Now().After(end) {
			t.Fatal("not told")
		}
	}
}

// While others change what is ours and what is not at full speed, what is read is one state or the other, never
// parts of both, and what is set is set.
func TestConcurrent(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb, another, c := s.open(), s.open(), s.other()
	a, b := some, Rules{ClampMTU: 1420, SNAT: set("192.0.2.0/24")}
	s.set(tb, a)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() {
		for ctx.Err() == nil {
			for _, r := range []Rules{b, a} {
				if err := another.Set(t.Context(), r); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	wg.Go(func() {
		for ctx.Err() == nil {
			c.AddTable(table("unrelated"))
			c.DelTable(table("unrelated"))
			if err := c.Flush(); err != nil {
				t.Error(err)
				return
			}
		}
	})
	seen := map[int]int{}
	start := time.Now()
	for n := 0; n < 100 && time.Since(start) < 5*time.Second || len(seen) < 2 || tb.again == 0; n++ {
		r, exact, err := tb.Read(t.Context())
		must(t, err)
		if !exact || !r.Equal(a) && !r.Equal(b) {
			t.Fatalf("read %s, exact %t", show(r), exact)
		}
		seen[r.ClampMTU]++
		must(t, tb.Set(t.Context(), []Rules{a, b}[n%2]))
		if time.Since(start) > 30*time.Second {
			t.Fatalf("does this test anything? read %v, %d again", seen, tb.again)
		}
	}
	t.Logf("read %v; %d times again, and %d times the rules of all tables", seen, tb.again, tb.whole)
}

// Nor is what somebody does inside the table read in parts: here a rule goes as a chain comes.
func TestInside(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb, c := s.open(), s.other()
	both, one := Rules{SNAT: set("10.0.0.0/8", "10.1.0.0/16")}, Rules{SNAT: set("10.0.0.0/8")}
	s.set(tb, both)
	rs, err := rulesOf(c, ourTable)
	must(t, err)
	lists := 0
	tb.between = func() {
		if lists++; lists == 2 { // chains have been listed, rules have not
			c.AddChain(&nftables.Chain{Table: ourTable, Name: "mine"})
			must(t, errors.Join(c.DelRule(&nftables.Rule{Table: ourTable, Chain: rs[1].Chain, Handle: rs[1].Handle}), c.Flush()))
		}
	}
	s.is(tb, one, false)
	if lists <= 5 {
		t.Error("read once")
	}
	tb.between = func() { // there is no end to changes of others
		if lists++; lists%5 == 0 {
			c.AddTable(table("unrelated"))
			c.DelTable(table("unrelated"))
			must(t, c.Flush())
		}
	}
	ctx, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer stop()
	if _, _, err := tb.Read(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	begun := time.Now()
	if _, _, err := tb.Read(t.Context()); !errors.Is(err, unix.EAGAIN) || time.Since(begun) > 5*patience {
		t.Errorf("got %v after %v", err, time.Since(begun))
	}
	tb.between = func() {}
	s.set(tb, both)
	s.is(tb, both, true)
}

// What others have in tables of their own is not listed, however much; but where Linux lists the rules of a table that is
// being replaced, which are none.
func TestBeside(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb, c := s.open(), s.other()
	s.set(tb, some)
	c.AddTable(table("firewall"))
	ch := c.AddChain(&nftables.Chain{Table: table("firewall"), Name: "c"})
	for range 50 {
		c.AddRule(&nftables.Rule{Table: table("firewall"), Chain: ch})
	}
	must(t, c.Flush())
	listed := 0
	tb.between = func() { listed++ }
	s.is(tb, some, true)
	if tb.whole != 0 || listed != 5 {
		t.Errorf("%d lists, and %d of all rules", listed, tb.whole)
	}

	// A chain that is in use without a rule is as one that is being replaced.
	c.AddChain(&nftables.Chain{Table: ourTable, Name: "empty"})
	must(t, c.Flush())
	none, clean, err := tb.rules(t.Context(), map[string]attrs{"forward": {unix.NFTA_CHAIN_USE: be.AppendUint32(nil, 1)}})
	if err != nil || !clean || len(none) == 0 || tb.whole != 0 {
		t.Errorf("got %d rules, %t, %v, and %d lists of all", len(none), clean, err, tb.whole)
	}
	s.is(tb, some, false)
	s.set(tb, some)
	c.FlushTable(ourTable)
	must(t, c.Flush())
	list, clean, err := tb.rules(t.Context(), map[string]attrs{"forward": {unix.NFTA_CHAIN_USE: be.AppendUint32(nil, 1)}})
	if err != nil || !clean || len(list) != 0 || tb.whole != 1 {
		t.Errorf("got %d rules, %t, %v, and %d lists of all", len(list), clean, err, tb.whole)
	}
}

// What other meshes have in mind is told from what is not theirs, or ours.
func TestNoted(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb, c := s.open(), s.other()
	noted := func(want ...string) {
		t.Helper()
		if got, err := tb.Noted(t.Context()); err != nil || !slices.Equal(got, want) {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
	}
	s.set(tb, some)
	c.AddTable(table("firewall"))
	must(t, c.Flush())
	noted()
	other, err := Open(Options{Interface: "mesh1", Owner: "warren:mesh1", Do: s.do})
	must(t, err)
	defer other.Close()
	s.set(other, Rules{ClampMTU: 1280})
	noted()
	s.set(other, Rules{Turned: []string{ForwardIPv4}})
	noted(ForwardIPv4)
	third, err := Open(Options{Interface: "mesh2", Owner: "warren:mesh2", Do: s.do})
	must(t, err)
	defer third.Close()
	s.set(third, Rules{Turned: names})
	noted(names...)
	s.set(other, Rules{})
	s.set(third, Rules{})
	noted()
	for name, comment := range map[string]string{"firewall": "warren:mesh1; turned on: x", "warren-mesh1": "warren:mesh2; turned on: x", "warren-mesh2": "turned on: x"} {
		if got := commentNoted(name, comment); got != nil {
			t.Errorf("%s, %q: got %q", name, comment, got)
		}
	}
}

// Nothing is done where the time is up, and what is late is told from what is asked for next.
func TestContext(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb := s.open()
	long := some // so that its list comes in pieces
	var ps []netip.Prefix
	for i := range 3000 {
		ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	long.SNAT = long.SNAT.With(ps...)
	s.set(tb, long)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := tb.Set(ctx, Rules{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	for range 3 { // answers that nobody waits for
		_, err := tb.c.send(t.Context(), newRequest(unix.NFT_MSG_GETTABLE, 0).text(unix.NFTA_TABLE_NAME, "none"))
		must(t, err)
		_, err = tb.c.send(t.Context(), newRequest(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP).text(unix.NFTA_RULE_TABLE, tb.name))
		must(t, err)
		s.is(tb, long, true)
	}
	if tb.again == 0 {
		t.Error("no list was given up: does this test anything?")
	}
	late, stop := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer stop()
	if _, _, err := tb.Read(late); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}
