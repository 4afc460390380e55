package meshtest_test

import (
	"context"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/mesh/meshtest"
)

// A test of what happens when a node moves a prefix to another while the registry is away.
func ExampleNew() {
	test := func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			c := meshtest.New(t, meshtest.Options{Nodes: 4, Seed: 1})
			c.Start()
			service := netip.MustParsePrefix("172.16.1.0/24")
			c.Nodes[1].AnnouncePrefixes("service", service)

			c.Nodes[3].Registry.Cut()
			c.Nodes[1].AnnouncePrefixes("service")
			c.Nodes[2].AnnouncePrefixes("service", service)
			time.Sleep(time.Hour)
			c.Nodes[3].Registry.Heal()

			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := c.Settled(ctx); err != nil {
				t.Fatal(err)
			}
		})
	}
	_ = test // go test runs it
}
