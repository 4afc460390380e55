package netstack_test

import (
	"net"
	"testing"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/netstack"
)

func TestSuite(t *testing.T) {
	datapathtest.Run(t, datapathtest.Harness{
		New: func(t testing.TB) datapath.Datapath {
			n, err := netstack.New(netstack.Options{})
			if err != nil {
				t.Fatal(err)
			}
			return n
		},
		Occupy: func(t testing.TB, port uint16) func() {
			c, err := net.ListenUDP("udp", &net.UDPAddr{Port: int(port)})
			if err != nil {
				t.Fatal(err)
			}
			return func() { c.Close() }
		},
		Lacks: []datapathtest.Lack{datapathtest.Outsider},
	})
}
