package record_test

import (
	"errors"
	"fmt"

	"github.com/warren-mesh/warren/mesh/record"
)

func Example() {
	r, err := record.Parse([]byte(`{
		"version": 1,
		"id": "a",
		"key": "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=",
		"endpoints": ["192.0.2.1:51820", "a.example.com:51820"],
		"prefixes": ["10.1.0.0/16"],
		"addresses": ["10.9.0.1/32"]
	}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(r.ID, r.Endpoints[0], r.Reachable())
	// Output: a 192.0.2.1:51820 10.1.0.0/16 10.9.0.1/32
}

func ExampleFieldError() {
	_, err := record.Parse([]byte(`{"version": 1, "id": "a", "endpoints": ["192.0.2.1:51820", "192.0.2.1"]}`))
	fmt.Println(err)
	if e, ok := errors.AsType[*record.FieldError](err); ok {
		fmt.Println(e.Field)
	}
	// Output:
	// record: endpoints[1] "192.0.2.1": has no port
	// endpoints[1]
}
