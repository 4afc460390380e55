package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
)

// Running watches move to other endpoints of the same store without a Reset, and to another prefix or
// store with one.
func TestReload(t *testing.T) {
	t.Parallel()
	c, other := etcdtest.Start(t, etcdtest.Options{}), etcdtest.Start(t, etcdtest.Options{})
	old, new := c.Proxy(0), c.Proxy(0)
	cfg := etcd.Config{Endpoints: []string{old.Addr()}, Prefix: "/one", Timeout: 10 * short}
	r := open(t, cfg)
	f := follow(t, r, registry.KindNode)
	put(t, r, "node/a", "1")
	f.has("node/a", "1")

	if err := r.Reload(etcd.Config{}); err == nil {
		t.Error("an empty Config is accepted")
	}
	cfg.Endpoints = []string{new.Addr()}
	if err := r.Reload(cfg); err != nil {
		t.Fatal(err)
	}
	old.Cut()
	put(t, r, "node/a", "2")
	if s := f.has("node/a", "2"); s.resets != 1 || len(s.errs) != 0 {
		t.Errorf("moving to another endpoint: %d resets, errors %v, want 1 and none", s.resets, s.errs)
	}
	for range 20 { // again and again, with the same
		if err := r.Reload(cfg); err != nil {
			t.Fatal(err)
		}
	}
	put(t, r, "node/a", "3")
	if s := f.has("node/a", "3"); s.resets != 1 || len(s.errs) != 0 {
		t.Errorf("reloading often: %d resets, errors %v, want 1 and none", s.resets, s.errs)
	}
	cfg.Prefix = "/two"
	if err := r.Reload(cfg); err != nil {
		t.Fatal(err)
	}
	if s := f.hasNot("node/a"); s.resets != 2 || s.deleted != 0 {
		t.Errorf("moving to another prefix: %d resets, %d deletions, want 2 and 0", s.resets, s.deleted)
	}
	put(t, r, "node/b", "1")
	f.has("node/b", "1")
	cfg.Endpoints = other.Endpoints()
	if err := r.Reload(cfg); err != nil {
		t.Fatal(err)
	}
	if s := f.hasNot("node/b"); s.resets != 3 || s.deleted != 0 {
		t.Errorf("moving to another store: %d resets, %d deletions, want 3 and 0", s.resets, s.deleted)
	}
}

// Dial makes the connections, with TLS on top or not, and another one does after a Reload.
func TestDial(t *testing.T) {
	t.Parallel()
	for _, o := range []etcdtest.Options{{}, {TLS: true}} {
		t.Run(fmt.Sprintf("TLS %t", o.TLS), func(t *testing.T) {
			t.Parallel()
			c := etcdtest.Start(t, o)
			cfg, err := etcd.ParseURL(c.URL())
			if err != nil {
				t.Fatal(err)
			}
			_, at, _ := strings.Cut(c.Endpoint(0), "://")
			var dialled [2]atomic.Int32
			dial := func(i int) func(context.Context, string) (net.Conn, error) {
				return func(ctx context.Context, address string) (net.Conn, error) {
					if dialled[i].Add(1); address != at {
						t.Errorf("dials %s, want %s", address, at)
					}
					return new(net.Dialer).DialContext(ctx, "tcp", address)
				}
			}
			cfg.Dial = dial(0)
			r := open(t, cfg)
			put(t, r, "node/a", "1")
			before := dialled[0].Load()
			cfg.Dial = dial(1)
			if err := r.Reload(cfg); err != nil {
				t.Fatal(err)
			}
			put(t, r, "node/a", "2")
			if before == 0 || dialled[0].Load() != before || dialled[1].Load() == 0 {
				t.Errorf("the first dialled %d times, and %d after, the second %d times", before, dialled[0].Load()-before, dialled[1].Load())
			}
		})
	}
}

// A closed registry says so, once to each watch, and holds up nobody, whatever is under way.
func TestClose(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, etcdtest.Options{})
	p := c.Proxy(0)
	for _, state := range []string{"unused", "healthy", "silent", "cut"} {
		t.Run(state, func(t *testing.T) {
			p.Heal()
			r := open(t, etcd.Config{Endpoints: []string{p.Addr()}, Timeout: patience})
			fs := []*follower{}
			if state != "unused" {
				fs = append(fs, follow(t, r, registry.KindNode))
				fs[0].await("a Reset", func(s seen) bool { return s.Known })
			}
			switch state {
			case "silent":
				p.Silence()
			case "cut":
				p.Cut()
			}
			var wg sync.WaitGroup
			if state == "silent" {
				wg.Go(func() {
					if err := r.Put(context.Background(), registry.Entry{ID: "node/a"}); !errors.Is(err, etcd.ErrClosed) {
						t.Errorf("a put under way: %v, want ErrClosed", err)
					}
				})
				time.Sleep(100 * time.Millisecond)
			}
			for range 3 {
				wg.Go(func() {
					if err := r.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			fs = append(fs, follow(t, r, registry.KindNode))
			for _, f := range fs {
				f.await("ErrClosed", func(s seen) bool { return len(s.errs) > 0 && errors.Is(s.errs[len(s.errs)-1], etcd.ErrClosed) })
				f.stop()
			}
			if err := r.Put(t.Context(), registry.Entry{ID: "node/a"}); !errors.Is(err, etcd.ErrClosed) {
				t.Errorf("put: %v", err)
			}
			if err := r.Reload(etcd.Config{Endpoints: []string{p.Addr()}}); !errors.Is(err, etcd.ErrClosed) {
				t.Errorf("reload: %v", err)
			}
		})
	}
}

// After a restore that nobody was told of, all watchers have read everything anew within what Rejoin says.
func TestRejoin(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, etcdtest.Options{})
	p := c.Proxy(0)
	cfg := etcd.Config{Endpoints: []string{p.Addr()}, Timeout: 2 * short, Prefix: "/rejoin"}
	saved := c.Snapshot()
	var rs []*etcd.Registry
	var fs []*follower
	for i := range 20 {
		rs = append(rs, open(t, cfg))
		put(t, rs[i], fmt.Sprintf("node/n%d", i), "lost")
		fs = append(fs, follow(t, rs[i], registry.KindNode))
	}
	for i := range fs {
		fs[i].await("everything", func(s seen) bool { return len(s.Entries) == len(fs) })
		if i%2 == 0 {
			if err := rs[i].Reload(cfg); err != nil { // these begin anew shortly before
				t.Fatal(err)
			}
		}
	}
	most := rs[0].Rejoin()
	if most != 4*cfg.Timeout {
		t.Errorf("%v, want %v", most, 4*cfg.Timeout)
	}
	p.Silence()
	c.Kill(0) // does not wait for the watches
	c.Restore(saved)
	p.Heal()
	began := time.Now()
	for _, f := range fs {
		f.await("a Reset", func(s seen) bool { return s.resets == 2 && len(s.Entries) == 0 })
	}
	if took := time.Since(began); took > most {
		t.Errorf("the last was back after %v, want %v at most", took, most)
	}
	cfg.Timeout = 3 * short
	if err := rs[0].Reload(cfg); err != nil {
		t.Fatal(err)
	}
	if d := rs[0].Rejoin(); d != 4*cfg.Timeout {
		t.Errorf("after Reload: %v, want %v", d, 4*cfg.Timeout)
	}
	if err := rs[0].Close(); err != nil {
		t.Fatal(err)
	}
	if d := rs[0].Rejoin(); d != 4*cfg.Timeout {
		t.Errorf("after Close: %v, want %v", d, 4*cfg.Timeout)
	}
}
