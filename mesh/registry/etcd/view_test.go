package etcd

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/mesh/registry"
)

func changed(id, data string, mod int64) change { return change{id: id, data: []byte(data), mod: mod} }
func gone(id string, mod int64) change          { return change{id: id, mod: mod, deleted: true} }

// Many events on one key come as one, one that changes nothing as none.
func TestViewFolds(t *testing.T) {
	now := time.Now()
	v := newView()
	v.replace(map[string]item{"node/a": {[]byte("0"), 1}, "node/b": {[]byte("b"), 1}}, 1)
	if b, _, ok, _ := v.take(now); !ok || !b.Reset || len(b.Put) != 2 || b.Revision != 1 {
		t.Fatalf("%+v", b)
	}
	v.apply([]change{changed("node/a", "1", 2), changed("node/a", "2", 3), gone("node/a", 4), changed("node/a", "3", 5)}, 5)
	b, _, ok, _ := v.take(now)
	if !ok || b.Reset || len(b.Put) != 1 || string(b.Put[0].Data) != "3" || len(b.Deleted) != 0 || b.Revision != 5 {
		t.Fatalf("%+v", b)
	}
	for what, changes := range map[string][]change{
		"the same value again":             {changed("node/a", "3", 6)},
		"the deletion of what was not":     {gone("node/x", 6)},
		"what came and went":               {changed("node/x", "x", 6), gone("node/x", 7)},
		"what came and went, and the same": {changed("node/x", "x", 6), gone("node/x", 7), changed("node/b", "b", 8)},
	} {
		v.apply(changes, 8)
		if b, _, ok, _ := v.take(now); ok {
			t.Errorf("%s is a batch: %+v", what, b)
		}
	}
	v.apply([]change{gone("node/b", 9)}, 9)
	if b, _, ok, _ := v.take(now); !ok || !slices.Equal(b.Deleted, []string{"node/b"}) || b.Revision != 9 {
		t.Errorf("%+v", b)
	}
}

// An error waits until it is due, and is forgotten if all is well before; a newer one does not wait longer.
func TestViewErrors(t *testing.T) {
	now := time.Now()
	v := newView()
	first, second := errors.New("first"), errors.New("second")
	v.fail(first, now.Add(time.Second))
	if _, later, ok, err := v.take(now); ok || err != nil || !later.Equal(now.Add(time.Second)) {
		t.Fatal(err, later, ok)
	}
	v.fail(second, now.Add(time.Hour))
	if _, _, ok, err := v.take(now.Add(time.Second)); !ok || err != second {
		t.Fatal(err, ok)
	}
	v.fail(first, now.Add(time.Second))
	v.recovered(now)
	over := func() {
		t.Helper()
		if b, _, ok, err := v.take(now); !ok || err != nil || b.Reset || len(b.Put)+len(b.Deleted) > 0 {
			t.Fatal(b, ok, err)
		}
		if _, later, ok, err := v.take(now.Add(time.Hour)); ok || err != nil || !later.IsZero() {
			t.Fatal(err, later, ok)
		}
	}
	over() // of the second
	v.fail(first, now)
	v.recovered(now) // too late, it is told
	if _, _, ok, err := v.take(now); !ok || err != first {
		t.Fatal(err, ok)
	}
	over()

	// Any batch says that it is over; what was known before comes first.
	v.replace(map[string]item{}, 2)
	v.take(now)
	v.apply([]change{{id: "node/a", data: []byte("1"), mod: 3}}, 3)
	v.fail(first, now)
	if b, _, ok, err := v.take(now); !ok || err != nil || len(b.Put) != 1 {
		t.Fatal(b, ok, err)
	}
	if _, _, ok, err := v.take(now); !ok || err != first {
		t.Fatal(err, ok)
	}
	v.replace(nil, 4)
	if b, _, ok, err := v.take(now); !ok || err != nil || !b.Reset {
		t.Fatal(b, ok, err)
	}
	v.recovered(now)
	if b, _, ok, err := v.take(now); ok || err != nil {
		t.Fatal(b, ok, err)
	}
}

// Whatever a slow consumer was told last is not trouble that is over, and nothing says that it is over
// while it lasts.
func TestViewSaysThatItIsOver(t *testing.T) {
	now := time.Now()
	trouble := errors.New("trouble")
	put := func(v *view) { v.apply([]change{changed("node/a", "1", 2)}, 2) }
	fails := func(v *view) { v.fail(trouble, now) }
	mayFail := func(v *view) { v.fail(trouble, now.Add(time.Second)) }
	recovers := func(v *view) { v.recovered(now) }
	closes := func(v *view) { v.fail(ErrClosed, now) }
	takes := func(v *view) { v.take(now) }
	for _, test := range []struct {
		name string
		does []func(*view)
		want []string // what is to be taken after that
	}{
		{"told", []func(*view){fails, takes}, nil},
		{"told and over", []func(*view){fails, takes, recovers}, []string{"batch"}},
		{"over before it is told", []func(*view){fails, recovers}, []string{"trouble", "batch"}},
		{"over before it was trouble", []func(*view){mayFail, recovers}, nil},
		{"over twice", []func(*view){fails, takes, recovers, takes, recovers}, nil},
		{"over, and again", []func(*view){fails, takes, recovers, fails}, []string{"trouble"}},
		{"over, and perhaps again", []func(*view){fails, takes, recovers, mayFail}, nil},
		{"over, perhaps again, and over", []func(*view){fails, takes, recovers, mayFail, recovers}, []string{"batch"}},
		{"over, again, and over", []func(*view){fails, takes, recovers, fails, recovers}, []string{"trouble", "batch"}},
		{"over with a change", []func(*view){fails, takes, recovers, put}, []string{"changes"}},
		{"a change before it", []func(*view){put, fails}, []string{"changes", "trouble"}},
		{"a change before it, and over", []func(*view){put, fails, recovers}, []string{"changes", "trouble", "batch"}},
		{"closed", []func(*view){fails, takes, closes}, []string{ErrClosed.Error()}},
		{"closed when over", []func(*view){fails, takes, recovers, closes}, []string{ErrClosed.Error()}},
		{"closed before it is told", []func(*view){fails, closes}, []string{ErrClosed.Error()}},
		{"closed before it was trouble", []func(*view){mayFail, closes}, []string{ErrClosed.Error()}},
	} {
		v := newView()
		v.replace(map[string]item{}, 1)
		v.take(now)
		for _, f := range test.does {
			select {
			case <-v.wake:
			default:
			}
			f(v)
		}
		var got []string
		for {
			b, _, ok, err := v.take(now)
			if !ok {
				break
			}
			switch {
			case err != nil:
				got = append(got, err.Error())
			case len(b.Put) > 0:
				got = append(got, "changes")
			case b.Reset:
				t.Errorf("%s: %+v", test.name, b)
			default:
				got = append(got, "batch")
			}
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: taken are %q, want %q", test.name, got, test.want)
		}
	}
}

// A consumer that sleeps is woken for it.
func TestViewWakes(t *testing.T) {
	v := newView()
	v.fail(errors.New("trouble"), time.Now())
	v.take(time.Now())
	<-v.wake
	v.recovered(time.Now())
	select {
	case <-v.wake:
	default:
		t.Error("nobody is woken when the trouble is over")
	}
}

// However the consumer takes, it knows in the end what the store has, and dirty is bounded by what the
// consumer and the store have.
func TestViewModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := newView()
		store := make(map[string]string)
		var consumer registry.State
		var rev int64
		well, told := true, false // whether an error was the last the consumer got
		take := func() {
			for {
				b, _, ok, err := v.take(time.Now())
				if !ok {
					break
				}
				if err != nil {
					told = true
					continue
				}
				if !b.Reset && b.Revision < consumer.Revision {
					t.Fatalf("the revision fell from %d to %d", consumer.Revision, b.Revision)
				}
				if !b.Reset && len(b.Put)+len(b.Deleted) == 0 && !(told && well) {
					t.Fatal("an empty batch")
				}
				told = false
				consumer.Apply(b)
			}
		}
		id := func(t *rapid.T) string {
			return rapid.SampledFrom([]string{"node/a", "node/b", "node/c"}).Draw(t, "id")
		}
		reset := func(t *rapid.T) {
			rev = max(1, rev-rapid.Int64Range(0, 3).Draw(t, "back"))
			items := make(map[string]item)
			for id, data := range store {
				items[id] = item{[]byte(data), 1}
			}
			v.replace(items, rev)
		}
		reset(t)
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				if n, most := len(v.dirty), len(consumer.Entries)+len(store); n > most {
					t.Fatalf("%d entries are kept for a consumer that has %d of a store that has %d", n, len(consumer.Entries), len(store))
				}
			},
			"change": func(t *rapid.T) {
				var changes []change
				for range rapid.IntRange(1, 4).Draw(t, "events") {
					rev++
					i := id(t)
					if rapid.Bool().Draw(t, "delete") {
						delete(store, i)
						changes = append(changes, gone(i, rev))
					} else {
						store[i] = fmt.Sprint(rapid.IntRange(0, 2).Draw(t, "data"))
						changes = append(changes, changed(i, store[i], rev))
					}
				}
				v.apply(changes, rev)
			},
			"reset": reset,
			"take":  func(*rapid.T) { take() },
			"fail": func(t *rapid.T) {
				due := time.Duration(rapid.IntRange(0, 1).Draw(t, "hours")) * time.Hour
				v.fail(errors.New("trouble"), time.Now().Add(due))
				well = false
			},
			"recover": func(*rapid.T) {
				v.recovered(time.Now())
				well = true
			},
		})
		take()
		if well && told {
			t.Fatal("all is well, and the last the consumer was told is an error")
		}
		have := make(map[string]string)
		for id, e := range consumer.Entries {
			have[id] = string(e.Data)
		}
		if !maps.Equal(have, store) {
			t.Fatalf("the consumer knows %v, the store has %v", have, store)
		}
	})
}
