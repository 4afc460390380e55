package roles

import (
	"context"
	"reflect"
	"sync"
	"time"

	"github.com/warren-mesh/warren/roles/part"
)

// lookAgain is how often an Assigned that is made of others looks at them though none has changed.
const lookAgain = time.Minute

// runBeside runs those of as that have to run, each by itself, and calls look at once, whenever one of the channels that
// it returned last closes, and now and then, until ctx ends.
func runBeside(ctx context.Context, as []Assigned, look func() []<-chan struct{}) error {
	var all sync.WaitGroup
	defer all.Wait()
	for _, a := range as {
		if r, ok := a.(interface{ Run(context.Context) error }); ok {
			runner := part.New("an assignment", part.Options{}, part.Part{Name: "an assignment", Run: r.Run})
			all.Go(func() { _ = runner.Serve(ctx) })
		}
	}
	t := time.NewTimer(lookAgain)
	defer t.Stop()
	for ctx.Err() == nil {
		t.Reset(lookAgain)
		cases := []reflect.SelectCase{
			{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())},
			{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(t.C)},
		}
		for _, c := range look() {
			if c != nil {
				cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(c)})
			}
		}
		if chosen, _, _ := reflect.Select(cases); chosen > 1 {
			time.Sleep(pace)
		}
	}
	return nil
}
