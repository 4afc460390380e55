package watch_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/mesh/watch"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestZero(t *testing.T) {
	var v watch.Value[int]
	n, ok, stale := v.Get()
	if n != 0 || ok || stale == nil || closed(stale) {
		t.Fatalf("zero Value has %d, %t, %v", n, ok, stale)
	}
	v.Set(0) // the zero T is a value too
	if !closed(stale) {
		t.Fatal("the first Set closed no channel")
	}
	if n, ok, _ = v.Get(); n != 0 || !ok {
		t.Fatalf("have %d, %t", n, ok)
	}
}

func TestStale(t *testing.T) {
	var v watch.Value[string]
	v.Set("a")
	_, _, one := v.Get()
	_, _, two := v.Get()
	if closed(one) || closed(two) {
		t.Fatal("a channel is closed though nothing changed")
	}
	v.Set("a")
	if !closed(one) || !closed(two) {
		t.Fatal("Set of an equal value closed no channel")
	}
	_, _, three := v.Get()
	v.Update(func(s string) string { return s + "b" })
	if s, _, _ := v.Get(); s != "ab" || !closed(three) {
		t.Fatalf("Update made %q", s)
	}
}

func TestUpdatePanics(t *testing.T) {
	var v watch.Value[int]
	v.Set(1)
	_, _, stale := v.Get()
	func() {
		defer func() { _ = recover() }()
		v.Update(func(int) int { panic("no") })
	}()
	if n, _, _ := v.Get(); n != 1 || closed(stale) {
		t.Fatalf("after a panic the value is %d", n)
	}
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var v watch.Value[int]
		enough := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Hour, enough)
		defer cancel()
		if n, err := v.Wait(ctx); n != 0 || !errors.Is(err, enough) {
			t.Fatalf("Wait returns %d, %v", n, err)
		}
		go func() { time.Sleep(time.Minute); v.Set(7) }()
		start := time.Now()
		if n, err := v.Wait(t.Context()); n != 7 || err != nil || time.Since(start) != time.Minute {
			t.Fatalf("Wait returns %d, %v after %v", n, err, time.Since(start))
		}
		if n, err := v.Wait(ctx); n != 7 || err != nil {
			t.Fatalf("Wait returns %d, %v though there is a value", n, err)
		}
	})
}

// Every reader sees values in order, and the last one in the end.
func TestConcurrent(t *testing.T) {
	const writers, each = 4, 1000
	var v watch.Value[int]
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			last := 0
			for last < writers*each {
				n, _, stale := v.Get()
				if n < last {
					t.Errorf("%d came after %d", n, last)
					return
				}
				last = n
				if n < writers*each {
					<-stale
				}
			}
		})
	}
	for range writers {
		wg.Go(func() {
			for range each {
				v.Update(func(n int) int { return n + 1 })
			}
		})
	}
	wg.Wait()
}

// The oracle keeps every channel with the number of Sets it was taken at.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var v watch.Value[int]
		sets, value := 0, 0
		var taken []<-chan struct{}
		var at []int
		t.Repeat(map[string]func(*rapid.T){
			"set":    func(t *rapid.T) { value = rapid.Int().Draw(t, "value"); v.Set(value); sets++ },
			"update": func(*rapid.T) { v.Update(func(n int) int { return n ^ 1 }); value ^= 1; sets++ },
			"get": func(t *rapid.T) {
				n, ok, stale := v.Get()
				if n != value || ok != (sets > 0) {
					t.Fatalf("have %d, %t, want %d after %d sets", n, ok, value, sets)
				}
				taken, at = append(taken, stale), append(at, sets)
			},
			"": func(t *rapid.T) {
				for i, c := range taken {
					if closed(c) != (at[i] < sets) {
						t.Fatalf("channel taken at set %d is closed %t at set %d", at[i], closed(c), sets)
					}
				}
			},
		})
	})
}

func TestSetAllocatesNothing(t *testing.T) {
	var v watch.Value[int]
	if n := testing.AllocsPerRun(100, func() { v.Set(1) }); n != 0 {
		t.Errorf("Set that nobody watches allocates %v times", n)
	}
}

func Example() {
	var endpoint watch.Value[string]
	go endpoint.Set("192.0.2.1:51820")

	for {
		value, ok, stale := endpoint.Get()
		if ok {
			fmt.Println(value)
			return
		}
		<-stale // and look again
	}
	// Output: 192.0.2.1:51820
}
