package registry_test

import (
	"fmt"

	"github.com/warren-mesh/warren/mesh/registry"
)

// A watcher that folds batches knows what there is, and forgets at a Reset what is gone.
func ExampleState() {
	var s registry.State
	for _, b := range []registry.Batch{
		{Reset: true, Revision: 7, Put: []registry.Entry{{ID: "node/a"}, {ID: "node/b"}}},
		{Revision: 8, Put: []registry.Entry{{ID: "node/c"}}, Deleted: []string{"node/a"}},
		{Reset: true, Revision: 3, Put: []registry.Entry{{ID: "node/d"}}},
	} {
		s.Apply(b)
		fmt.Println(s.IDs())
	}
	// Output:
	// [node/a node/b]
	// [node/b node/c]
	// [node/d]
}

func ExampleParseID() {
	kind, name, err := registry.ParseID("node/a.example")
	fmt.Println(kind, name, err)

	_, _, err = registry.ParseID("node/../etc")
	fmt.Println(err)
	// Output:
	// node a.example <nil>
	// invalid registry ID "node/../etc": the name has '/', only a-z, 0-9, '-' and '.' are allowed
}
