//go:build linux

package nft

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/prefixes"
)

// other is somebody else who changes tables in s.
func (s *space) other() *nftables.Conn {
	s.t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(int(s.ns.Fd())))
	must(s.t, err)
	return c
}

func table(name string) *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: name}
}

var ourTable = table("warren-mesh0")

// rules are those of a table, in their order.
func rulesOf(c *nftables.Conn, tb *nftables.Table) (rs []*nftables.Rule, err error) {
	for _, ch := range chains {
		more, err := c.GetRules(tb, &nftables.Chain{Name: ch.name})
		if err != nil {
			return nil, err
		}
		rs = append(rs, more...)
	}
	return rs, nil
}

// edits are what somebody may do to a table of ours; ok is false where it cannot be done to this one.
var edits = map[string]func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) (ok bool){
	"remove a rule": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		if len(rs) == 0 {
			return false
		}
		return c.DelRule(one(t, rs)) == nil
	},
	"repeat a rule": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		if len(rs) == 0 {
			return false
		}
		r := *one(t, rs)
		r.Handle, r.Position = 0, 0
		c.AddRule(&r)
		return true
	},
	"insert a rule": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		if len(rs) == 0 {
			return false
		}
		c.InsertRule(&nftables.Rule{Table: ourTable, Chain: one(t, rs).Chain, Exprs: []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictAccept}}})
		return true
	},
	"change an instruction": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		if len(rs) == 0 {
			return false
		}
		r := one(t, rs)
		var cmps []*expr.Cmp
		for _, e := range r.Exprs {
			if e, ok := e.(*expr.Cmp); ok {
				cmps = append(cmps, e)
			}
		}
		e := cmps[rapid.IntRange(0, len(cmps)-1).Draw(t, "instruction")]
		if rapid.Bool().Draw(t, "operator") {
			e.Op = map[expr.CmpOp]expr.CmpOp{expr.CmpOpEq: expr.CmpOpNeq, expr.CmpOpNeq: expr.CmpOpEq}[e.Op]
		} else {
			e.Data[rapid.IntRange(0, len(e.Data)-1).Draw(t, "byte")] ^= 1
		}
		c.ReplaceRule(r)
		return true
	},
	"add an instruction": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		if len(rs) == 0 {
			return false
		}
		r := one(t, rs)
		r.Exprs = slices.Insert(r.Exprs, rapid.IntRange(0, len(r.Exprs)-1).Draw(t, "at"), expr.Any(&expr.Counter{}))
		c.ReplaceRule(r)
		return true
	},
	"ports at random": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		if len(rs) == 0 {
			return false
		}
		r := rs[len(rs)-1]
		m, ok := r.Exprs[len(r.Exprs)-1].(*expr.Masq)
		if !ok {
			return false
		}
		r.Table, r.Position, m.FullyRandom = ourTable, 0, true
		c.ReplaceRule(r)
		return true
	},
	"comment a rule": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		if len(rs) == 0 {
			return false
		}
		r := one(t, rs)
		r.UserData = withComment("look")
		c.ReplaceRule(r)
		return true
	},
	"another order": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		if len(rs) < 2 || rs[0].Chain.Name != rs[1].Chain.Name {
			return false
		}
		if c.DelRule(rs[0]) != nil {
			return false
		}
		r := *rs[0]
		r.Handle, r.Position = 0, 0
		c.AddRule(&r)
		return true
	},
	"drop by default": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		if len(rs) == 0 {
			return false
		}
		drop := nftables.ChainPolicyDrop
		c.AddChain(&nftables.Chain{Table: ourTable, Name: one(t, rs).Chain.Name, Policy: &drop})
		return true
	},
	"add a chain": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		c.AddChain(&nftables.Chain{Table: ourTable, Name: "mine"})
		return true
	},
	"add a set": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		return addSet(c) == nil
	},
	"add an object": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		c.AddObj(&nftables.CounterObj{Table: ourTable, Name: "mine"})
		return true
	},
	"flush it": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		c.FlushTable(ourTable)
		return len(rs) > 0
	},
	"remove it": func(t *rapid.T, c *nftables.Conn, rs []*nftables.Rule) bool {
		c.DelTable(ourTable)
		return true
	},
}

func one(t *rapid.T, rs []*nftables.Rule) *nftables.Rule {
	r := rs[rapid.IntRange(0, len(rs)-1).Draw(t, "rule")]
	r.Table, r.Position = ourTable, 0
	return r
}

var sets sync.Mutex // the package nftables counts sets for all its connections

func addSet(c *nftables.Conn) error {
	sets.Lock()
	defer sets.Unlock()
	return c.AddSet(&nftables.Set{Table: ourTable, Name: "mine", KeyType: nftables.TypeIPAddr}, []nftables.SetElement{{Key: []byte{10, 0, 0, 1}}})
}

var (
	addrs4 = rapid.Custom(func(t *rapid.T) string {
		return fmt.Sprintf("10.%d.%d.%d/%d", rapid.IntRange(0, 3).Draw(t, "b"), rapid.IntRange(0, 255).Draw(t, "c"), rapid.IntRange(0, 255).Draw(t, "d"), rapid.IntRange(0, 32).Draw(t, "bits"))
	})
	addrs6 = rapid.Custom(func(t *rapid.T) string {
		return fmt.Sprintf("fd%02x:%x::%x/%d", rapid.IntRange(0, 3).Draw(t, "a"), rapid.IntRange(0, 0xffff).Draw(t, "b"), rapid.IntRange(0, 0xffff).Draw(t, "c"), rapid.IntRange(0, 128).Draw(t, "bits"))
	})
	anyRules = rapid.Custom(func(t *rapid.T) (r Rules) {
		if rapid.Bool().Draw(t, "clamp") {
			r.ClampMTU = rapid.IntRange(68, 65535).Draw(t, "MTU")
		}
		r.SNAT, _ = prefixes.Parse(append(rapid.SliceOfN(addrs4, 0, 5).Draw(t, "IPv4"), rapid.SliceOfN(addrs6, 0, 5).Draw(t, "IPv6")...)...)
		r.Turned = rapid.SliceOfN(rapid.SampledFrom([]string{ForwardIPv4, ForwardIPv6, "net.x"}), 0, 2).Draw(t, "turned")
		return r
	})
)

// What is set is read, exactly; what somebody else does to it is seen, and Set puts it right.
func TestAny(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb, c := s.open(), s.other()
	kinds := make([]string, 0, len(edits))
	for kind := range edits {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	done := make(map[string]int)
	rapid.Check(t, func(t *rapid.T) {
		exactly := func(want Rules) {
			t.Helper()
			r, exact, err := tb.Read(s.t.Context())
			must0(t, err)
			if !exact || !r.Equal(want) {
				t.Fatalf("read %s, exact %t, want %s", show(r), exact, show(want))
			}
		}
		put := func(r Rules) {
			t.Helper()
			must0(t, tb.Set(s.t.Context(), r))
			exactly(r)
		}
		put(anyRules.Draw(t, "first"))
		r := anyRules.Draw(t, "rules")
		put(r)
		before, err := tb.c.generation(s.t.Context())
		must0(t, err)
		put(r)
		if after, err := tb.c.generation(s.t.Context()); err != nil || after != before {
			t.Fatalf("written again, %v", err)
		}
		if r.IsZero() {
			return
		}
		rs, err := rulesOf(c, ourTable)
		must0(t, err)
		kind := rapid.SampledFrom(kinds).Draw(t, "edit")
		ok := edits[kind](t, c, rs)
		must0(t, c.Flush())
		if !ok {
			return
		}
		done[kind]++
		got, exact, err := tb.Read(s.t.Context())
		must0(t, err)
		if exact && got.Equal(r) || kind == "remove it" && !(exact && got.IsZero()) {
			t.Fatalf("%s: read %s, exact %t", kind, show(got), exact)
		}
		if exact { // it says something else now, and is what Set makes of that
			edited, err := rulesOf(c, ourTable)
			must0(t, err)
			put(Rules{})
			put(got)
			made, err := rulesOf(c, ourTable)
			must0(t, err)
			if d := cmp.Diff(edited, made, cmpopts.IgnoreFields(nftables.Rule{}, "Handle", "Position"), cmpopts.EquateEmpty()); d != "" {
				t.Fatalf("%s: exact:\n%s", kind, d)
			}
		}
		if kind != "remove it" && !slices.Equal(got.Turned, sorted(r.Turned)) {
			t.Fatalf("%s: turned on %q, want %q", kind, got.Turned, r.Turned)
		}
		put(r)
	})
	if len(done) < len(edits) && !testing.Short() && !t.Failed() {
		t.Logf("not all was done: %v", done)
	}
}

// isForeign checks that err has a *ForeignError which names all of words.
func isForeign(t *testing.T, err error, words ...string) {
	t.Helper()
	var f *ForeignError
	if !errors.As(err, &f) {
		t.Fatalf("got %v, want a *ForeignError", err)
	}
	for _, w := range append(words, "warren-mesh0", "nft delete table inet warren-mesh0") {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}

// A table of our name without our mark is named, and left as it is.
func TestForeign(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb, c := s.open(), s.other()
	check := func(words ...string) {
		t.Helper()
		before, err := tb.c.generation(t.Context())
		must(t, err)
		_, exact, err := tb.Read(t.Context())
		isForeign(t, err, words...)
		if exact {
			t.Error("exact")
		}
		isForeign(t, tb.Set(t.Context(), some), words...)
		isForeign(t, tb.Set(t.Context(), Rules{}), words...)
		if after, err := tb.c.generation(t.Context()); err != nil || after != before {
			t.Errorf("written to, %v", err)
		}
	}
	c.AddTable(ourTable)
	must(t, c.Flush())
	check("no comment", owner)
	c.DelTable(ourTable)
	must(t, c.Flush())
	s.is(tb, Rules{}, true)

	// Another mesh's: its mark begins with ours.
	theirs, err := Open(Options{Interface: "mesh0", Owner: owner + "0", Do: s.do})
	must(t, err)
	defer theirs.Close()
	s.set(theirs, some)
	check(`"warren:mesh0:870; turned on`, `"warren:mesh0:87"`)
	s.set(theirs, Rules{})
	s.set(tb, some)
	s.is(tb, some, true)

	// The same name in another family is another table.
	c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: ourTable.Name})
	must(t, c.Flush())
	s.is(tb, some, true)
}

// Put to sleep, or with what nftables.Conn cannot add, the table is not what it was.
func TestSleeping(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb := s.open()
	s.set(tb, some)
	dormant := newRequest(unix.NFT_MSG_NEWTABLE, 0).text(unix.NFTA_TABLE_NAME, tb.name).u32(unix.NFTA_TABLE_FLAGS, unix.NFT_TABLE_F_DORMANT)
	must(t, s.write(tb, dormant))
	s.is(tb, some, false)
	s.set(tb, some)
	s.is(tb, some, true)
	empty := newRequest(unix.NFT_MSG_DELCHAIN, 0).text(unix.NFTA_CHAIN_TABLE, tb.name).text(unix.NFTA_CHAIN_NAME, postrouting.name)
	must(t, s.write(tb, newRequest(unix.NFT_MSG_DELRULE, 0).text(unix.NFTA_RULE_TABLE, tb.name), empty))
	s.is(tb, Rules{Turned: some.Turned}, false) // a chain without rules is left
	s.set(tb, Rules{Turned: some.Turned})
	s.is(tb, Rules{Turned: some.Turned}, true)

	s.set(tb, Rules{SNAT: some.SNAT})
	must(t, s.write(tb, newRequest(unix.NFT_MSG_DELRULE, 0).text(unix.NFTA_RULE_TABLE, tb.name), empty))
	s.is(tb, Rules{}, false) // a table with nothing in it is left
	s.set(tb, Rules{})
	s.is(tb, Rules{}, true)
}

// write has somebody else make changes.
func (s *space) write(tb *Table, rs ...request) error {
	other := s.open()
	defer other.Close()
	gen, err := other.c.generation(s.t.Context())
	if err == nil {
		_, err = other.c.batch(s.t.Context(), gen, rs)
	}
	return err
}

// A transaction that fails leaves everything as it was, and says which part of it failed.
func TestFailure(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb := s.open()
	s.set(tb, some)
	gen, err := tb.c.generation(t.Context())
	must(t, err)
	cs, err := tb.changes(true, some)
	must(t, err)
	var rs []request
	for _, c := range cs {
		rs = append(rs, c.request)
	}
	bad := len(rs) - 2
	rs[bad] = newRequest(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE).text(unix.NFTA_RULE_TABLE, tb.name).text(unix.NFTA_RULE_CHAIN, "gone")
	if which, err := tb.c.batch(t.Context(), gen, rs); which != bad || !errors.Is(err, unix.ENOENT) {
		t.Errorf("got %d, %v", which, err)
	}
	if which, err := tb.c.batch(t.Context(), gen-1, rs); which != -1 || !errors.Is(err, unix.ERESTART) {
		t.Errorf("another generation: got %d, %v", which, err)
	}
	s.is(tb, some, true)

	err = change{"add rule for 10.0.0.0/8", "CONFIG_NFT_MASQ", nil}.explain(unix.ENOENT)
	if !errors.Is(err, errors.ErrUnsupported) || !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), "add rule for 10.0.0.0/8: ") || !strings.Contains(err.Error(), "CONFIG_NFT_MASQ") {
		t.Error(err)
	}
	if err := (change{"add chain", "CONFIG_NFT_NAT", nil}).explain(unix.EBUSY); errors.Is(err, errors.ErrUnsupported) || !errors.Is(err, unix.EBUSY) {
		t.Error(err)
	}
}

// Two thousand prefixes are more than a datagram of the usual size, and a list in many pieces.
func TestMany(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb := s.open()
	var ps []string
	for i := range 1000 {
		ps = append(ps, fmt.Sprintf("10.%d.%d.0/%d", i/256, i%256, 24+i%9), fmt.Sprintf("fd00:%x::/%d", i, 32+i%97))
	}
	rand.Shuffle(len(ps), func(i, j int) { ps[i], ps[j] = ps[j], ps[i] })
	r := Rules{ClampMTU: 1420, SNAT: set(ps...)}
	s.set(tb, r)
	s.is(tb, r, true)
	r.SNAT = r.SNAT.Without(r.SNAT.At(1234))
	s.set(tb, r)
	s.is(tb, r, true)
	s.set(tb, Rules{})
	s.is(tb, Rules{}, true)
}

// Without CAP_NET_ADMIN everything says what it takes.
func TestNoCapability(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb := s.open()
	s.set(tb, some)
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends without its capabilities
		if err := unix.Setns(int(s.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			return
		}
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&head, &data[0]); err != nil {
			t.Error(err)
			return
		}
		data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		if err := unix.Capset(&head, &data[0]); err != nil {
			t.Error(err)
			return
		}
		_, oerr := Open(Options{Interface: "mesh0", Owner: owner})
		_, _, rerr := tb.Read(t.Context())
		for what, err := range map[string]error{"Open": oerr, "Read": rerr, "Set": tb.Set(t.Context(), Rules{})} {
			if !errors.Is(err, os.ErrPermission) || !errors.Is(err, syscall.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
				t.Errorf("%s: got %v", what, err)
			}
		}
	}()
	<-done
	s.is(tb, some, true)
}

func TestClose(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	tb := s.open()
	s.set(tb, some)
	changed := tb.Changed()
	must(t, tb.Close())
	must(t, tb.Close())
	if _, open := <-changed; open {
		t.Error("Changed is not closed")
	}
	_, _, err := tb.Read(t.Context())
	for what, err := range map[string]error{"Read": err, "Set": tb.Set(t.Context(), some)} {
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: got %v", what, err)
		}
	}
	s.is(s.open(), some, true)

	tb = s.open() // and in the middle of something
	done := make(chan error)
	go func() {
		for i := 0; ; i++ {
			if err := tb.Set(t.Context(), Rules{ClampMTU: 1280 + i%2}); err != nil {
				done <- err
				return
			}
		}
	}()
	<-time.After(20 * time.Millisecond)
	must(t, tb.Close())
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("got %v", err)
	}
}
