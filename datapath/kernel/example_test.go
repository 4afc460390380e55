package kernel_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// A device of Linux's own, with an address. It stays when the program ends.
func ExampleNew() {
	k, err := kernel.New(kernel.Options{Interface: "mesh0"})
	if errors.Is(err, errors.ErrUnsupported) {
		fmt.Println("no WireGuard here:", err)
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer k.Close()
	private, err := key.NewPrivate()
	if err != nil {
		log.Fatal(err)
	}
	err = datapath.Sync(context.Background(), k, datapath.State{
		Device: datapath.Device{Key: private},
		Addrs:  prefixes.MustParse("10.0.0.1/32"),
	})
	if err != nil {
		log.Fatal(err)
	}
}
