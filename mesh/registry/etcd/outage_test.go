package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

// A store that went back to a backup and then counted beyond where it was seen last is not taken for the
// one before.
func TestRestoredAndOvertaken(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		c := etcdtest.Start(t, o)
		p := c.Proxy(0)
		cfg := etcd.Config{Endpoints: []string{p.Addr()}, Prefix: "/restored"}
		r := open(t, cfg)
		cfg.Endpoints = c.Endpoints()
		other := open(t, cfg)
		for i := range 5 {
			put(t, other, fmt.Sprintf("node/n%d", i), "old")
		}
		saved := c.Snapshot()
		remove(t, other, "node/n1")
		put(t, other, "node/n2", "lost")
		put(t, other, "node/n9", "lost")
		f := follow(t, r, registry.KindNode)
		f.hasNot("node/n1")
		f.has("node/n9", "lost")

		p.Cut()
		c.Restore(saved)
		for i := range 20 {
			put(t, other, "node/n3", fmt.Sprint(i))
		}
		p.Heal()
		s := f.has("node/n3", "19")
		f.has("node/n1", "old")
		f.has("node/n2", "old")
		f.hasNot("node/n9")
		if s.resets != 2 {
			t.Errorf("%d resets, want 2", s.resets)
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
