package part_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/warren-mesh/warren/roles/part"
)

func Example() {
	tries := 0
	r := part.New("connection", part.Options{Initial: 50 * time.Millisecond}, part.Part{
		Name: "connection",
		Run: func(ctx context.Context) error {
			if tries++; tries < 3 {
				return errors.New("refused")
			}
			return part.ErrDone
		},
	})
	fmt.Println(r.Serve(context.Background()))
	s, _ := r.State()
	fmt.Println(s.Phase, "after", s.Restarts, "restarts; the last failure was:", s.Err)
	// Output:
	// <nil>
	// done after 2 restarts; the last failure was: refused
}
