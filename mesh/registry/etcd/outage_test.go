package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
)

// Killing each member in turn, and then the leader three times, is neither a gap nor a deletion to
// anyone, though the history is compacted in between and one of the kinds is idle.
func TestMembersKilled(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		o.Members = 3
		c := etcdtest.Start(t, o)
		var all []*follower
		var idle []*follower
		var rs []*etcd.Registry
		for i := range 4 {
			r := open(t, etcd.Config{Endpoints: c.Endpoints(), Prefix: "/all", Timeout: 2 * short})
			if i == 0 {
				put(t, r, "trust/t", "idle")
				put(t, r, "node/stays", "stays")
			}
			rs = append(rs, r)
			all = append(all, follow(t, r, registry.KindNode))
			idle = append(idle, follow(t, r, registry.KindTrust))
		}
		for i := range all {
			all[i].has("node/stays", "stays")
			idle[i].has("trust/t", "idle")
		}
		round := 0
		kill := func(i int) {
			round++
			c.Kill(i)
			id := fmt.Sprintf("node/n%d", round)
			put(t, rs[round%len(rs)], id, "put while a member was away")
			for _, f := range all {
				f.has(id, "put while a member was away")
			}
			c.Start(i)
			for _, f := range all {
				f.has(id, "put while a member was away")
			}
			c.Compact()
		}
		for i := range 3 {
			kill(i)
		}
		for range 3 {
			kill(c.Leader())
		}
		// A watcher that is still away has missed what comes now, since the history is compacted.
		watching := func() (n int) {
			for i := range o.Members {
				n += int(c.Metric(i, "etcd_debugging_mvcc_watcher_total"))
			}
			return n
		}
		want := len(all) + len(idle)
		for deadline := time.Now().Add(patience); watching() != want; time.Sleep(short / 20) {
			if time.Now().After(deadline) {
				t.Fatalf("%d watchers are back, want %d", watching(), want)
			}
		}
		put(t, rs[0], "trust/t", "not idle any more")
		for i := range all {
			for _, f := range []*follower{all[i], idle[i]} {
				if f == idle[i] {
					f.has("trust/t", "not idle any more")
				}
				s, _ := f.now()
				if s.resets != 1 || s.deleted != 0 {
					t.Errorf("a watcher saw %d resets and %d deletions, want 1 and 0", s.resets, s.deleted)
				}
			}
		}
	})
}

// A server that is silent, with its connections open and new ones accepted, is noticed within Timeout,
// and forgiven within Timeout.
func TestSilence(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		c := etcdtest.Start(t, o)
		p := c.Proxy(0)
		const timeout = 4 * short
		cfg := etcd.Config{Endpoints: []string{p.Addr()}, Prefix: "/silence", Timeout: timeout}
		r := open(t, cfg)
		cfg.Endpoints = c.Endpoints()
		other := open(t, cfg)
		put(t, other, "node/a", "before")
		f := follow(t, r, registry.KindNode)
		f.has("node/a", "before")

		p.Silence()
		began := time.Now()
		if err := r.Put(t.Context(), registry.Entry{ID: "node/b"}); !errors.Is(err, etcd.ErrTimeout) || !strings.Contains(err.Error(), p.Addr()) {
			t.Errorf("put: %v, want ErrTimeout that names the endpoint", err)
		}
		s := f.await("an error", func(s seen) bool { return len(s.errs) > 0 })
		const slack = short // of a busy machine
		if took := s.at[0].Sub(began); took > timeout+slack {
			t.Errorf("the silence was told after %v, want %v at most", took, timeout)
		}
		if !errors.Is(s.errs[0], etcd.ErrTimeout) || !strings.Contains(s.errs[0].Error(), p.Addr()) {
			t.Errorf("the silence was told as %v, want ErrTimeout that names the endpoint", s.errs[0])
		}
		time.Sleep(timeout) // attempts are made, and come to nothing
		put(t, other, "node/a", "meanwhile")
		p.Heal()
		began = time.Now()
		s = f.has("node/a", "meanwhile")
		if took := time.Since(began); took > timeout+slack {
			t.Errorf("recovery took %v, want %v at most", took, timeout)
		}
		if s.resets != 1 || s.deleted != 0 {
			t.Errorf("%d resets and %d deletions, want 1 and 0", s.resets, s.deleted)
		}
		put(t, r, "node/c", "after")
		f.has("node/c", "after")
	})
}

// Of several members, one that stands still is left for another.
func TestMemberPaused(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, etcdtest.Options{Members: 3})
	r := open(t, etcd.Config{Endpoints: c.Endpoints(), Timeout: 2 * short})
	f := follow(t, r, registry.KindNode)
	put(t, r, "node/a", "0")
	f.has("node/a", "0")
	for i := range 3 {
		c.Pause(i)
		put(t, r, "node/a", fmt.Sprint(i+1))
		f.has("node/a", fmt.Sprint(i+1))
		c.Resume(i)
		f.has("node/a", fmt.Sprint(i+1))
		// The member that was away follows the others again before the next one leaves.
		put(t, r, "node/b", fmt.Sprint(i+1))
	}
	if s, _ := f.now(); s.resets != 1 || s.deleted != 0 {
		t.Errorf("%d resets and %d deletions, want 1 and 0", s.resets, s.deleted)
	}
}

// A member that stands still is left for another by calls alone, however short their deadlines are, and
// whether one follows the other or many wait at the same time.
func TestMemberPausedShortDeadlines(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, etcdtest.Options{Members: 3})
	const timeout, deadline = 2 * short, short / 4
	var proxies []*etcdtest.Proxy
	var endpoints []string
	for i := range 3 {
		proxies = append(proxies, c.Proxy(i))
		endpoints = append(endpoints, proxies[i].Addr())
	}
	for member, callers := range []int{1, 8} {
		name := fmt.Sprintf("%d callers", callers)
		for i := range proxies {
			if i != member {
				proxies[i].Cut()
			}
		}
		r := open(t, etcd.Config{Endpoints: endpoints, Prefix: fmt.Sprintf("/%d", callers), Timeout: timeout})
		put(t, r, "node/a", "0")
		for _, p := range proxies {
			p.Heal()
		}
		c.Pause(member)
		began := time.Now()
		var first sync.Once
		var wg sync.WaitGroup
		for range callers {
			wg.Go(func() {
				for {
					ctx, cancel := context.WithTimeout(t.Context(), deadline)
					err := r.Put(ctx, registry.Entry{ID: "node/a", Data: []byte("1")})
					cancel()
					took := time.Since(began)
					if err == nil {
						first.Do(func() {
							t.Logf("%s: answered after %v", name, took)
							if took < timeout {
								t.Errorf("%s: the member was left after %v, before it was silent for %v", name, took, timeout)
							}
						})
						return
					}
					if took > patience {
						t.Errorf("%s: still %v after %v", name, err, took)
						return
					}
				}
			})
		}
		wg.Wait()
		c.Resume(member)
	}
}

// A store that went back to a backup and then counted beyond where it was seen last, because others write
// to it too, is not taken for the one before, whatever of it the watch knows.
func TestRestoredAndOvertaken(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		c := etcdtest.Start(t, o)
		p := c.Proxy(0)
		client := c.Client()
		others := func(n int) { // another program's writes
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			for range n {
				for {
					_, err := client.Put(ctx, "/others/key", "value")
					if err == nil {
						break
					}
					if ctx.Err() != nil {
						t.Fatal(err)
					}
				}
			}
		}
		type steps func(r *etcd.Registry)
		both := func(f ...steps) steps {
			return func(r *etcd.Registry) {
				for _, f := range f {
					f(r)
				}
			}
		}
		puts := func(data string, ids ...string) steps {
			return func(r *etcd.Registry) {
				for _, id := range ids {
					put(t, r, id, data)
				}
			}
		}
		removes := func(id string) steps { return func(r *etcd.Registry) { remove(t, r, id) } }
		nothing := func(*etcd.Registry) {}
		cases := []struct {
			name        string
			lost, after steps // what is done since the backup, and again since it was restored
			late        bool  // the watch begins when the former is done
			resets      int
		}{
			{"put", both(removes("node/a"), puts("lost", "node/b", "node/z")), puts("new", "node/c"), false, 2},
			{"deleted", removes("node/x"), puts("new", "node/y"), false, 2},
			{"deleted-before", removes("node/x"), puts("new", "node/y"), true, 2},
			{"another-deleted", removes("node/x"), removes("node/a"), true, 2},
			{"deleted-again", removes("node/x"), both(removes("node/x"), puts("new", "node/a")), true, 2},
			{"put-there-again", puts("lost", "node/a"), puts("new", "node/a"), false, 2},
			{"came-and-went", both(puts("lost", "node/y"), removes("node/y")), nothing, false, 1},
			{"untouched", nothing, nothing, false, 1},
		}
		watched, direct := make([]*follower, len(cases)), make([]*etcd.Registry, len(cases))
		begin := func(i int) {
			cfg := etcd.Config{Endpoints: []string{p.Addr()}, Prefix: "/" + cases[i].name}
			watched[i] = follow(t, open(t, cfg), registry.KindNode)
			watched[i].await("a Reset", func(s seen) bool { return s.Known })
		}
		for i, test := range cases {
			direct[i] = open(t, etcd.Config{Endpoints: c.Endpoints(), Prefix: "/" + test.name})
			puts("old", "node/a", "node/x", "node/b")(direct[i])
		}
		saved := c.Snapshot()
		for i, test := range cases {
			if !test.late {
				begin(i)
			}
			test.lost(direct[i])
		}
		others(20)
		for i, test := range cases {
			if test.late {
				begin(i)
			}
			puts("seen", "trust/t")(direct[i]) // not of the kind
		}
		settle := func() {
			t.Helper()
			for i, test := range cases {
				want := follow(t, direct[i], registry.KindNode)
				s := want.await("a Reset", func(s seen) bool { return s.Known })
				want.stop()
				watched[i].await(test.name+": all there is", func(now seen) bool {
					return maps.EqualFunc(now.Entries, s.Entries, registry.Entry.Equal)
				})
			}
		}
		settle()

		p.Cut()
		c.Restore(saved)
		for i, test := range cases {
			test.after(direct[i])
		}
		others(100)
		p.Heal()
		for i := range cases {
			puts("last", "node/last")(direct[i])
		}
		settle()
		for i, test := range cases {
			if s, _ := watched[i].now(); s.resets != test.resets {
				t.Errorf("%s: %d resets, want %d", test.name, s.resets, test.resets)
			}
		}
	})
}

// Another cluster at the same addresses is another store.
func TestAnotherCluster(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		c := etcdtest.Start(t, o)
		r := open(t, etcd.Config{Endpoints: c.Endpoints()})
		f := follow(t, r, registry.KindNode)
		put(t, r, "node/a", "here")
		f.has("node/a", "here")
		c.Kill(0) // does not wait for the watch
		c.Renew()
		s := f.hasNot("node/a")
		if s.resets != 2 || s.deleted != 0 {
			t.Errorf("%d resets and %d deletions, want 2 and 0", s.resets, s.deleted)
		}
		put(t, r, "node/b", "new")
		f.has("node/b", "new")
	})
}

// Who cannot reach etcd is told so once, and then less and less often, and gets on when it is there.
func TestUnreachableIsToldOnce(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, etcdtest.Options{})
	p := c.Proxy(0)
	p.Cut()
	const timeout = short / 2
	r := open(t, etcd.Config{Endpoints: []string{p.Addr()}, Timeout: timeout})
	f := follow(t, r, registry.KindNode)
	f.await("an error", func(s seen) bool { return len(s.errs) > 0 })
	time.Sleep(12 * timeout)
	s, _ := f.now()
	// Again after 6 times the timeout, and then after 12 more.
	if n := len(s.errs); n > 2 {
		t.Errorf("told %d times: %v", n, s.errs)
	}
	for _, err := range s.errs {
		if !errors.Is(err, etcd.ErrUnreachable) || !strings.Contains(err.Error(), p.Addr()) {
			t.Errorf("told as %v, want ErrUnreachable that names the endpoint", err)
		}
	}
	began := time.Now()
	err := r.Put(t.Context(), registry.Entry{ID: "node/a"})
	if !errors.Is(err, etcd.ErrUnreachable) || time.Since(began) > patience/2 {
		t.Errorf("put after %v: %v", time.Since(began), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	p.Heal()
	p.Silence()
	if err := r.Put(ctx, registry.Entry{ID: "node/a"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("put past its deadline: %v", err)
	}
	p.Heal()
	put(t, r, "node/a", "there")
	f.has("node/a", "there")
}
