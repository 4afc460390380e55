package roles

import (
	"context"
	"reflect"

	"github.com/warren-mesh/warren/roles/part"
)

// runBeside runs those of as that have to run, and calls look at once and whenever one of the channels that it returned
// last closes, until ctx ends.
func runBeside(ctx context.Context, as []Assigned, look func() []<-chan struct{}) error {
	g := part.NewGroup(ctx)
	for _, a := range as {
		if r, ok := a.(interface{ Run(context.Context) error }); ok {
			g.Go("an assignment", func(ctx context.Context) error {
				if err := r.Run(ctx); err != nil {
					return err
				}
				if ctx.Err() == nil {
					return part.ErrEnded
				}
				return nil
			})
		}
	}
	g.Go("an assignment", func(ctx context.Context) error {
		for {
			cases := []reflect.SelectCase{{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())}}
			for _, c := range look() {
				if c != nil {
					cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(c)})
				}
			}
			if chosen, _, _ := reflect.Select(cases); chosen == 0 {
				return nil
			}
		}
	})
	return g.Wait()
}
