package memory_test

import (
	"context"
	"fmt"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/memory"
)

func Example() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	store := memory.New()
	if err := store.Put(ctx, registry.Entry{ID: registry.NodeID("a"), Data: []byte("record of a")}); err != nil {
		fmt.Println(err)
		return
	}

	node := store.Handle() // a node's own way to the store, to be cut off alone
	for batch, err := range node.Watch(ctx, registry.KindNode) {
		if err != nil {
			fmt.Println("error:", err)
			_ = store.Delete(ctx, registry.NodeID("a"))
			node.Heal()
			continue
		}
		fmt.Printf("reset %t, %d entries\n", batch.Reset, len(batch.Put))
		if len(batch.Put) == 0 {
			break
		}
		node.Cut()
	}
	// Output:
	// reset true, 1 entries
	// error: watch node: memory registry: cut off
	// reset true, 0 entries
}
