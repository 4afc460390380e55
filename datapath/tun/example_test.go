package tun_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/tun"
	"github.com/warren-mesh/warren/prefixes"
)

// A device that lasts as long as the program, with an address. "wg show mesh0" shows it.
func ExampleNew() {
	d, err := tun.New(tun.Options{Interface: "mesh0"})
	if errors.Is(err, errors.ErrUnsupported) {
		fmt.Println("no TUN interfaces here:", err)
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()
	private, err := key.NewPrivate()
	if err != nil {
		log.Fatal(err)
	}
	err = datapath.Sync(context.Background(), d, datapath.State{
		Device: datapath.Device{Key: private},
		Addrs:  prefixes.MustParse("10.0.0.1/32"),
	})
	if err != nil {
		log.Fatal(err)
	}
}
