package nft

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Table is the table of a mesh in one network namespace. It is safe for concurrent use.
type Table struct {
	o       Options
	name    string
	closed  atomic.Bool
	changed chan struct{}
	watch   *watcher

	mu      sync.Mutex // one after the other
	c       *conn
	again   int    // what was read or decided again, for tests
	whole   int    // lists of the rules of all tables, for tests
	between func() // is called before each list, for tests
}

// Open checks o and opens sockets. It changes nothing, and needs no table. The error is errors.ErrUnsupported
// where the kernel does not have what it takes, and os.ErrPermission without CAP_NET_ADMIN.
func Open(o Options) (*Table, error) {
	o, err := o.defaulted()
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	t := &Table{o: o, name: tableName(o.Interface), changed: make(chan struct{}, 1), between: func() {}}
	var u unix.Utsname
	if err = unix.Uname(&u); err == nil {
		err = tooOld(unix.ByteSliceToString(u.Release[:]))
	}
	if err == nil {
		t.c, err = dial(o.Do, &t.closed)
	}
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	if _, err = t.c.generation(context.Background()); err == nil {
		t.watch, err = watch(t)
	}
	if err != nil {
		t.c.nl.Close()
		return nil, fmt.Errorf("nftables: %w", err)
	}
	return t, nil
}

// Close closes the sockets, and the channel of Changed; the table stays. Twice is harmless. Other methods then return
// an error that is net.ErrClosed.
func (t *Table) Close() error {
	if t.closed.Swap(true) {
		return nil
	}
	return errors.Join(t.c.nl.Close(), t.watch.close())
}

// Changed returns a channel that receives after somebody else changed our table, or all tables. Several
// changes may be reported as one, and an overrun as a change: the answer to all is to Read. The channel is the
// same at every call; Close closes it.
func (t *Table) Changed() <-chan struct{} { return t.changed }

// found is what was found in one generation.
type found struct {
	generation uint32
	there      bool // a table of ours
	rules      Rules
	exact      bool
}

// Read returns what is in the table: what rules of ours there are, and what the comment says. exact is true
// where the table is precisely what Set makes of r; where somebody removed, added or changed something in it, it is
// false. Without a table r is zero, and exact. A table of our name that is not ours is a *ForeignError.
func (t *Table) Read(ctx context.Context) (r Rules, exact bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f, err := t.find(ctx)
	if err != nil {
		return Rules{}, false, t.wrap(err)
	}
	return f.rules, f.exact, nil
}

// Set has the table be r, at once or not at all; the zero Rules removes it. Where the table is that already, nothing
// is written. Connections that are translated stay so as long as r has destinations at all. A table of our name that is
// not ours is a *ForeignError, whatever r is; a kernel that lacks what r takes is errors.ErrUnsupported.
func (t *Table) Set(ctx context.Context, r Rules) error {
	r, err := t.o.checked(r)
	if err != nil {
		return t.wrap(err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.wrap(t.set(ctx, r))
}

func (t *Table) wrap(err error) error {
	var f *ForeignError
	if err == nil || errors.As(err, &f) {
		return err
	}
	return fmt.Errorf("nftables table inet %s: %w", t.name, err)
}

func (t *Table) set(ctx context.Context, r Rules) error {
	for begun := time.Now(); time.Since(begun) < patience; {
		f, err := t.find(ctx)
		if err != nil {
			return err
		}
		if f.exact && f.rules.Equal(r) {
			return nil
		}
		cs, err := t.changes(f.there, r)
		if err != nil {
			return err
		}
		var rs []request
		for _, c := range cs {
			rs = append(rs, c.request)
		}
		which, err := t.c.batch(ctx, f.generation, rs)
		switch {
		case errors.Is(err, unix.ERESTART): // somebody else changed something
			t.again++
		case err != nil && which >= 0:
			return cs[which].explain(err)
		default:
			return err
		}
	}
	return fmt.Errorf("the rules of the host changed before it was written, again and again for %v: %w", patience, unix.EAGAIN)
}

// change is one request of a transaction.
type change struct {
	what  string
	needs string // what the kernel must have been built with
	request
}

// explain says what failed, and what the kernel lacks where that is why.
func (c change) explain(err error) error {
	for _, e := range []error{unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT} {
		if errors.Is(err, e) && c.needs != "" {
			return fmt.Errorf("%s: %w: %w: it takes a kernel with %s", c.what, errors.ErrUnsupported, err, c.needs)
		}
	}
	return fmt.Errorf("%s: %w", c.what, err)
}

// changes are what makes the table r, and removes the one that is there.
func (t *Table) changes(there bool, r Rules) (cs []change, err error) {
	if there {
		cs = append(cs, change{"remove the former table", "", newRequest(unix.NFT_MSG_DELTABLE, 0).text(unix.NFTA_TABLE_NAME, t.name)})
	}
	if r.IsZero() {
		return cs, nil
	}
	const create = unix.NLM_F_CREATE | unix.NLM_F_EXCL
	cs = append(cs, change{"add it", "CONFIG_NF_TABLES_INET", newRequest(unix.NFT_MSG_NEWTABLE, create).
		text(unix.NFTA_TABLE_NAME, t.name).u32(unix.NFTA_TABLE_FLAGS, 0).attr(tableUserdata, withComment(comment(t.o.Owner, r.Turned)))})
	rules, err := write(t.o.Interface, r)
	if err != nil {
		return nil, err
	}
	for _, ch := range chains {
		first := true
		for _, w := range rules {
			if w.chain != ch.name {
				continue
			}
			if first {
				cs = append(cs, change{"add chain " + ch.name, ch.needs, newRequest(unix.NFT_MSG_NEWCHAIN, create).
					text(unix.NFTA_CHAIN_TABLE, t.name).text(unix.NFTA_CHAIN_NAME, ch.name).
					nest(unix.NFTA_CHAIN_HOOK, func(r request) request {
						return r.u32(unix.NFTA_HOOK_HOOKNUM, ch.hook).u32(unix.NFTA_HOOK_PRIORITY, uint32(ch.priority))
					}).
					u32(unix.NFTA_CHAIN_POLICY, accept).text(unix.NFTA_CHAIN_TYPE, ch.typ)})
				first = false
			}
			cs = append(cs, change{w.what, w.needs, newRequest(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND).
				text(unix.NFTA_RULE_TABLE, t.name).text(unix.NFTA_RULE_CHAIN, ch.name).
				attr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, w.exprs)})
		}
	}
	return cs, nil
}

// find reads the table, again where anybody changed any meanwhile.
func (t *Table) find(ctx context.Context) (found, error) {
	for begun := time.Now(); time.Since(begun) < patience; {
		before, err := t.c.generation(ctx)
		if err != nil {
			return found{}, err
		}
		l, clean, err := t.look(ctx)
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return found{}, err
		}
		after, err := t.c.generation(ctx)
		if err != nil {
			return found{}, err
		}
		if clean && before == after {
			return t.judge(l, after)
		}
		t.again++
	}
	return found{}, fmt.Errorf("the rules of the host changed while they were read, again and again for %v: %w", patience, unix.EAGAIN)
}

// seen is what is in a table, whoever's.
type seen struct {
	table  attrs // nil: there is none
	chains map[string]attrs
	rules  []rule
	more   bool // sets, objects or flow tables
}

// look reads the table; clean is false where that is not all from one generation. What others have in tables of
// their own is not listed, since that may be a lot.
func (t *Table) look(ctx context.Context) (s seen, clean bool, err error) {
	if s.table, err = t.table(ctx); s.table == nil {
		return s, true, err
	}
	if s.chains, clean, err = t.chains(ctx, s.table); err != nil || !clean {
		return s, false, err
	}
	rules, clean, err := t.rules(ctx, s.chains)
	if err != nil || !clean {
		return s, false, err
	}
	for _, as := range rules {
		_, compat := as[unix.NFTA_RULE_COMPAT]
		s.rules = append(s.rules, rule{as.text(unix.NFTA_RULE_CHAIN), as[unix.NFTA_RULE_EXPRESSIONS], compat || len(as[unix.NFTA_RULE_USERDATA]) > 0})
	}
	for _, typ := range []uint16{unix.NFT_MSG_GETSET, unix.NFT_MSG_GETOBJ, unix.NFT_MSG_GETFLOWTABLE} {
		more, clean, err := t.list(ctx, newRequest(typ, 0).text(ofTable, t.name))
		if err != nil || !clean {
			return s, false, err
		}
		s.more = s.more || len(more) > 0
	}
	// Linux has a new number shortly before it has the new rules.
	now, err := t.table(ctx)
	return s, bytes.Equal(now[tableHandle], s.table[tableHandle]), err
}

// list lists what is in our table; clean is false where that was disturbed, or the table is gone.
func (t *Table) list(ctx context.Context, r request) (list []attrs, clean bool, err error) {
	t.between()
	ms, clean, err := t.c.list(ctx, r)
	if errors.Is(err, unix.ENOENT) {
		return nil, false, nil
	}
	for _, m := range ms {
		if as := m.object(); as.text(ofTable) == t.name {
			list = append(list, as)
		}
	}
	return list, clean, err
}

// chains returns the chains of the table. Linux lists those of all tables only: ours are asked for one by one, and a
// list is for where the table has more in it than these.
func (t *Table) chains(ctx context.Context, table attrs) (cs map[string]attrs, clean bool, err error) {
	t.between()
	cs = make(map[string]attrs)
	for _, ch := range chains {
		m, err := t.c.get(ctx, newRequest(unix.NFT_MSG_GETCHAIN, 0).text(unix.NFTA_CHAIN_TABLE, t.name).text(unix.NFTA_CHAIN_NAME, ch.name))
		switch {
		case errors.Is(err, unix.ENOENT):
		case err != nil:
			return nil, false, err
		default:
			cs[ch.name] = m.object()
		}
	}
	if int(table.u32(unix.NFTA_TABLE_USE)) == len(cs) {
		return cs, true, nil
	}
	list, clean, err := t.list(ctx, newRequest(unix.NFT_MSG_GETCHAIN, 0))
	cs = make(map[string]attrs)
	for _, as := range list {
		cs[as.text(unix.NFTA_CHAIN_NAME)] = as
	}
	return cs, clean, err
}

// rules returns the rules of the table. While it is being replaced, Linux lists by its name those of the former one,
// of which there are none any more (nf_tables_dump_rules in net/netfilter/nf_tables_api.c). So where none are listed of
// chains that are in use, they are looked for among those of all tables.
func (t *Table) rules(ctx context.Context, cs map[string]attrs) (list []attrs, clean bool, err error) {
	list, clean, err = t.list(ctx, newRequest(unix.NFT_MSG_GETRULE, 0).text(unix.NFTA_RULE_TABLE, t.name))
	if err != nil || !clean || len(list) > 0 {
		return list, clean, err
	}
	for _, as := range cs {
		if as.u32(unix.NFTA_CHAIN_USE) > 0 {
			t.whole++
			return t.list(ctx, newRequest(unix.NFT_MSG_GETRULE, 0))
		}
	}
	return nil, true, nil
}

// Noted returns the sysctls that tables of other meshes have in mind as turned on, sorted. Such a table has a name and
// a comment of the form of ours.
func (t *Table) Noted(ctx context.Context) (sysctls []string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for begun := time.Now(); time.Since(begun) < patience; t.again++ {
		ms, clean, err := t.c.list(ctx, newRequest(unix.NFT_MSG_GETTABLE, 0))
		if err != nil && !errors.Is(err, unix.ENOBUFS) {
			return nil, fmt.Errorf("nftables tables of other meshes: %w", err)
		}
		if !clean {
			continue
		}
		for _, m := range ms {
			as := m.object()
			if name := as.text(unix.NFTA_TABLE_NAME); name != t.name {
				sysctls = append(sysctls, commentNoted(name, commentOf(as[tableUserdata]))...)
			}
		}
		return sorted(sysctls), nil
	}
	return nil, fmt.Errorf("nftables tables of other meshes: they changed while they were read, again and again for %v: %w", patience, unix.EAGAIN)
}

// table returns the table of our name; nil: there is none.
func (t *Table) table(ctx context.Context) (attrs, error) {
	m, err := t.c.get(ctx, newRequest(unix.NFT_MSG_GETTABLE, 0).text(unix.NFTA_TABLE_NAME, t.name))
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return m.object(), nil
}

// judge says what is ours of what was seen.
func (t *Table) judge(s seen, generation uint32) (found, error) {
	f := found{generation: generation, exact: true}
	if s.table == nil {
		return f, nil
	}
	said := commentOf(s.table[tableUserdata])
	turned, ours := parseComment(t.o.Owner, said)
	if !ours {
		owner := "it has no comment"
		if said != "" {
			owner = fmt.Sprintf("its comment is %q", said)
		}
		return f, &ForeignError{"nftables table inet " + t.name, owner + fmt.Sprintf(", not %q", t.o.Owner),
			fmt.Sprintf("remove it (nft delete table inet %s), or give the interface another name", t.name)}
	}
	f.there = true
	var err error
	if f.rules, f.exact, err = read(t.o.Interface, s.rules); err != nil {
		return f, err
	}
	f.rules.Turned = turned
	needed := 0
	for _, ch := range chains {
		have, there := s.chains[ch.name]
		if uses(f.rules, ch) {
			needed++
			f.exact = f.exact && there && ch.same(have)
		}
	}
	f.exact = f.exact && said == comment(t.o.Owner, turned) && len(s.chains) == needed && !s.more && s.table.u32(unix.NFTA_TABLE_FLAGS) == 0 && !f.rules.IsZero()
	return f, nil
}

// uses reports whether r has rules in ch.
func uses(r Rules, ch chain) bool {
	return ch == forward && r.ClampMTU != 0 || ch == postrouting && !r.SNAT.IsEmpty()
}

// same reports whether a chain is ch, and does to packets what ch does.
func (ch chain) same(have attrs) bool {
	hook := parse(have[unix.NFTA_CHAIN_HOOK])
	_, counters := have[unix.NFTA_CHAIN_COUNTERS]
	return have.text(unix.NFTA_CHAIN_TYPE) == ch.typ && hook.u32(unix.NFTA_HOOK_HOOKNUM) == ch.hook &&
		int32(hook.u32(unix.NFTA_HOOK_PRIORITY)) == ch.priority && have.u32(unix.NFTA_CHAIN_POLICY) == accept &&
		!counters && have.u32(chainFlags)&^chainBase == 0 && len(have[chainUserdata]) == 0
}
