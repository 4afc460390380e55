package etcdtest_test

import (
	"testing"

	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
)

func ExampleStart() {
	// In a test this is func TestLeaderKilled.
	_ = func(t *testing.T) {
		c := etcdtest.Start(t, etcdtest.Options{Members: 3})
		cfg, err := etcd.ParseURL(c.URL())
		if err != nil {
			t.Fatal(err)
		}
		r, err := etcd.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		// Watch and put with r, and then:
		leader := c.Leader()
		c.Kill(leader)
		c.Start(leader)
	}
	// Output:
}
