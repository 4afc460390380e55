package etcdtest_test

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// each runs a test against both versions.
func each(t *testing.T, f func(*testing.T, etcdtest.Options)) {
	t.Run("3.7", func(t *testing.T) { f(t, etcdtest.Options{}) })
	t.Run("installed", func(t *testing.T) { f(t, etcdtest.Options{Program: etcdtest.Installed(t, "etcd")}) })
}

func TestCluster(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		o.Members, o.TLS, o.Auth = 3, true, true
		c := etcdtest.Start(t, o)
		client := c.Client()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		get := func() string {
			t.Helper()
			resp, err := client.Get(ctx, "key")
			if err != nil {
				t.Fatal(err)
			}
			if len(resp.Kvs) == 0 {
				return ""
			}
			return string(resp.Kvs[0].Value)
		}
		put := func(value string) {
			t.Helper()
			if _, err := client.Put(ctx, "key", value); err != nil {
				t.Fatal(err)
			}
		}
		put("old")
		saved := c.Snapshot()
		put("new")
		leader := c.Leader()
		c.Kill(leader)
		if got := get(); got != "new" {
			t.Errorf("after the leader was killed: %q", got)
		}
		if now := c.Leader(); now == leader {
			t.Errorf("%d leads, and was killed", now)
		}
		c.Start(leader)
		c.Compact()
		c.Restore(saved)
		if got := get(); got != "old" {
			t.Errorf("after the restore: %q", got)
		}
		if n := c.Metric(0, "etcd_server_has_leader"); n != 1 {
			t.Errorf("etcd_server_has_leader is %v", n)
		}
	})
}

func TestProxy(t *testing.T) {
	c := etcdtest.Start(t, etcdtest.Options{})
	p := c.Proxy(0)
	_ = p
	_ = c
}
