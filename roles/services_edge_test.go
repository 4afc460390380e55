package roles

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/roles/part"
)

// A service that fails for good while the Manager stops for another reason; and one that fails for good when ctx ends.
func TestEdgeTwoFatalServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, two := errors.New("one"), errors.New("two")
		svc := func(name string, err error) part.Part {
			return part.Part{Name: name, Run: func(context.Context) error { time.Sleep(time.Minute); return part.Fatal(err) }}
		}
		m, err := New(Config{Assigned: Static(), Services: []part.Part{svc("x", one), svc("y", two)}})
		if err != nil {
			t.Fatal(err)
		}
		err = m.Run(t.Context())
		if !errors.Is(err, one) || !errors.Is(err, two) {
			t.Errorf("both failed for good: %v", err)
		}
	})
}
