package auto_test

import (
	"context"
	"fmt"
	"log"
	"net"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/auto"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// The best device that this host can have, and how the program reaches what the mesh reaches.
func ExampleNew() {
	d, err := auto.New(auto.Options{Interface: "mesh0"})
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()
	dial := new(net.Dialer).DialContext
	if n := d.Netstack(); n != nil {
		dial = n.DialContext
	}
	private, err := key.NewPrivate()
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	err = datapath.Sync(ctx, d, datapath.State{
		Device: datapath.Device{Key: private},
		Addrs:  prefixes.MustParse("10.0.0.1/32"),
	})
	if err != nil {
		log.Fatal(err)
	}
	s, err := d.Read(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(s.Host.Driver, "because:", s.Host.Instead)
	conn, err := dial(ctx, "tcp", "10.0.0.2:80")
	if err != nil {
		log.Fatal(err)
	}
	conn.Close()
}
