package etcd_test

import (
	"context"
	"fmt"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
)

func ExampleParseURL() {
	c, err := etcd.ParseURL("etcds://agent:secret@10.0.0.1:2379,10.0.0.2:2379/warren?ca=/etc/warren/ca.pem")
	fmt.Println(c.Endpoints, c.Prefix, err)
	fmt.Println(c)

	_, err = etcd.ParseURL("etcd://10.0.0.1:2379?timout=1s")
	fmt.Println(err)
	// Output:
	// [https://10.0.0.1:2379 https://10.0.0.2:2379] /warren <nil>
	// etcds://agent@10.0.0.1:2379,10.0.0.2:2379/warren?ca=%2Fetc%2Fwarren%2Fca.pem
	// etcd: unknown parameter "timout" in the URL, did you mean "timeout"? (There are ca, cert, key, server-name, password-file, timeout.)
}

func ExampleRegistry_Watch() {
	// Needs an etcd at this address.
	_ = func(ctx context.Context) error {
		r, err := etcd.New(etcd.Config{Endpoints: []string{"http://10.0.0.1:2379"}})
		if err != nil {
			return err
		}
		defer r.Close()
		var state registry.State
		for batch, err := range r.Watch(ctx, registry.KindNode) {
			if err != nil {
				fmt.Println("still trying:", err)
				continue
			}
			state.Apply(batch)
			fmt.Println(state.IDs())
		}
		return nil
	}
	// Output:
}
