package meshtest_test

import (
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/meshtest"
)

// The nodes have real WireGuard devices here, and time is real.
func TestAnotherDatapath(t *testing.T) {
	c := meshtest.New(t, meshtest.Options{
		Datapath: func(*meshtest.Node) (datapath.Datapath, error) { return netstack.New(netstack.Options{}) },
		Configure: func(_ *meshtest.Node, c *mesh.Config) {
			c.Endpoints = []mesh.Endpoint{mesh.MustEndpoint("127.0.0.1:0")}
		},
	})
	c.Start()
	settle(t, c, time.Minute)
	c.Nodes[0].Restart()
	c.Nodes[1].Renew()
	if err := c.Nodes[2].Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	settle(t, c, time.Minute)
}
