package registrytest

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/mesh/registry"
)

// model runs random operations beside a map that is the oracle, while watchers come, dawdle and go.
// What each watcher has folded must in the end be what the map has. Every run has a kind of its own, so
// that one registry serves them all.
func model(t *testing.T, h Harness) {
	r := h.New(t)
	s, _ := r.(registry.Swapper)
	run := 0
	rapid.Check(t, func(t *rapid.T) {
		run++
		m := &modelRun{h: h, r: r, s: s, kind: fmt.Sprintf("model-%d", run), want: make(map[string]string)}
		defer m.end(t)
		t.Repeat(map[string]func(*rapid.T){
			"put":    m.put,
			"delete": m.delete,
			"swap":   m.swap,
			"join":   m.join,
			"leave":  m.leave,
			"settle": m.settle,
		})
		m.settle(t)
	})
}

type modelRun struct {
	h    Harness
	r    registry.Registry
	s    registry.Swapper // may be nil
	kind string
	want map[string]string
	ws   []*watcher
	n    int
}

func (m *modelRun) context() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), m.h.Timeout)
}

func (m *modelRun) id(t *rapid.T) string {
	return m.kind + "/" + rapid.SampledFrom([]string{"a", "b", "c", "a.b", "a-b"}).Draw(t, "name")
}

// data is short, so that values repeat.
func (m *modelRun) data(t *rapid.T) string { return rapid.StringMatching("[xyz]{0,2}").Draw(t, "data") }

func (m *modelRun) put(t *rapid.T) {
	id, data := m.id(t), m.data(t)
	ctx, cancel := m.context()
	defer cancel()
	if err := m.r.Put(ctx, registry.Entry{ID: id, Data: []byte(data)}); err != nil {
		t.Fatalf("put %s: %v", id, err)
	}
	m.want[id] = data
}

func (m *modelRun) delete(t *rapid.T) {
	id := m.id(t)
	ctx, cancel := m.context()
	defer cancel()
	if err := m.r.Delete(ctx, id); err != nil {
		t.Fatalf("delete %s: %v", id, err)
	}
	delete(m.want, id)
}

func (m *modelRun) swap(t *rapid.T) {
	if m.s == nil {
		t.Skip("needs a registry that implements registry.Swapper")
	}
	id := m.id(t)
	bytes := func(label string) []byte {
		if rapid.Bool().Draw(t, label+" is absent") {
			return nil
		}
		return append([]byte{}, m.data(t)...)
	}
	old, new := bytes("old"), bytes("new")
	if rapid.Bool().Draw(t, "old is right") {
		old = nil
		if have, ok := m.want[id]; ok {
			old = append([]byte{}, have...)
		}
	}
	ctx, cancel := m.context()
	defer cancel()
	current, ok, err := m.s.Swap(ctx, id, old, new)
	if err != nil {
		t.Fatalf("swap %s: %v", id, err)
	}
	have, there := m.want[id]
	if right := there == (old != nil) && have == string(old); ok != right {
		t.Fatalf("swap %s of %q by %q returns %t, want %t", id, old, new, ok, right)
	} else if right && new != nil {
		m.want[id] = string(new)
	} else if right {
		delete(m.want, id)
	}
	have, there = m.want[id]
	if there != (current != nil) || have != string(current) {
		t.Fatalf("swap %s says that %#v is there, want %q, %t", id, current, have, there)
	}
}

func (m *modelRun) join(t *rapid.T) {
	if len(m.ws) == 5 {
		t.Skip("enough watchers")
	}
	var pace func(registry.Batch)
	if rapid.Bool().Draw(t, "slow") {
		pace = func(registry.Batch) { time.Sleep(time.Millisecond) }
	}
	m.ws = append(m.ws, follow(m.r, m.kind, pace))
}

func (m *modelRun) leave(t *rapid.T) {
	if len(m.ws) == 0 {
		t.Skip("no watcher")
	}
	i := rapid.IntRange(0, len(m.ws)-1).Draw(t, "watcher")
	m.ws[i].stop(t, m.h.Prompt)
	m.ws = append(m.ws[:i:i], m.ws[i+1:]...)
}

func (m *modelRun) settle(t *rapid.T) {
	m.n++
	last, value := m.kind+"/zz-last", fmt.Sprint(m.n)
	ctx, cancel := m.context()
	defer cancel()
	if err := m.r.Put(ctx, registry.Entry{ID: last, Data: []byte(value)}); err != nil {
		t.Fatalf("put %s: %v", last, err)
	}
	want := maps.Clone(m.want)
	want[last] = value
	for _, w := range m.ws {
		v := w.await(t, m.h.Timeout, "the last entry", func(v view) bool { return string(v.Entries[last].Data) == value })
		if !same(v.Entries, want) {
			t.Fatalf("a watcher has everything up to the last entry, but it is not what the store has:\n%s", difference(v.Entries, want))
		}
	}
}

func (m *modelRun) end(t *rapid.T) {
	for _, w := range m.ws {
		w.stop(t, m.h.Prompt)
	}
}
