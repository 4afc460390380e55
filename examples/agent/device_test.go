package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
)

// What agents noted that knew names only is read, and what is noted is read again; a run adds what it has, and is told
// what else there is.
func TestStateFile(t *testing.T) {
	dir := t.TempDir()
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, stateName), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c := config.Config{State: dir, Mesh: "warren", Node: "alpha"}
	old, x := device{Name: "warren0", Protocol: 87}, device{Name: "mesh-x", Namespace: "/run/netns/blue", Protocol: 88}
	here, away := old, old
	here.Own, away.Own = "a net:[1]", "a net:[2]"
	for _, test := range []struct {
		name         string
		text         string
		now          device
		kept, others []device
	}{
		{"of names", `{"version":1,"mesh":"warren","interfaces":["warren0"]}`, old, []device{old}, nil},
		{"of names, and another", `{"version":1,"mesh":"warren","interfaces":["warren0"]}`, x, []device{old, x}, []device{old}},
		{"none, and none now", `{"version":1,"mesh":"warren"}`, device{}, nil, nil},
		{"one, and none now", `{"version":2,"mesh":"warren","interfaces":[{"name":"mesh-x","namespace":"/run/netns/blue","protocol":88}]}`, device{}, []device{x}, []device{x}},
		{"the same name elsewhere", `{"version":2,"mesh":"warren","interfaces":[{"name":"mesh-x","protocol":88}]}`, x, []device{{Name: "mesh-x", Protocol: 88}, x}, []device{{Name: "mesh-x", Protocol: 88}}},
		{"without where it was", `{"version":2,"mesh":"warren","interfaces":[{"name":"warren0","protocol":87}]}`, here, []device{here}, nil},
		{"before the host was started", `{"version":2,"mesh":"warren","interfaces":[{"name":"warren0","protocol":87,"own":"b net:[1]"}]}`, here, []device{here}, nil},
		{"in another namespace", `{"version":2,"mesh":"warren","interfaces":[{"name":"warren0","protocol":87,"own":"a net:[2]"}]}`, here, []device{away, here}, []device{away}},
		{"without a protocol", `{"version":2,"mesh":"warren","interfaces":[{"name":"warren0"}]}`, old, []device{old}, nil},
	} {
		write(test.text)
		if err := checkState(c); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		others, err := keepState(c, test.now)
		if err != nil || !slices.Equal(others, test.others) {
			t.Errorf("%s: there are %v besides, and %v, want %v", test.name, others, err, test.others)
		}
		if s, err := readState(dir); err != nil || !slices.Equal(s.Interfaces, test.kept) || s.Version != stateVersion || s.Mesh != "warren" {
			t.Errorf("%s: it has %+v, and %v, want %v", test.name, s, err, test.kept)
		}
	}
	for _, text := range []string{`{"interfaces":[7]}`, `{"interfaces":[{"name":7}]}`, `{"interfaces":["a",`} {
		write(text)
		if s, err := readState(dir); err == nil {
			t.Errorf("%s is read as %+v", text, s)
		}
	}
	b, err := json.Marshal(x)
	if got := string(b); err != nil || got != `{"name":"mesh-x","namespace":"/run/netns/blue","protocol":88}` {
		t.Errorf("written is %s, %v", got, err)
	}
}

// What was made in another namespace is not cleaned away in this one, and not forgotten.
func TestCleanElsewhere(t *testing.T) {
	own := ownNamespace()
	if own == "" {
		t.Skip("this system tells no namespaces apart")
	}
	boot, _, _ := strings.Cut(own, " ")
	dir := t.TempDir()
	c := config.Config{State: dir, Mesh: "warren", Node: "alpha", Interface: "wt-elsewhere"}
	away := device{Name: "wt-elsewhere", Protocol: 87, Own: boot + " net:[1]"}
	if err := writeState(dir, stateFile{stateVersion, "warren", []device{away}}); err != nil {
		t.Fatal(err)
	}
	if lines, err := cleanHost(t.Context(), c, true); err == nil || !strings.Contains(err.Error(), "another network namespace than this one, net:[1]") || len(lines) > 0 {
		t.Errorf("got %q and %v", lines, err)
	}
	// Who leaves is told, and has left.
	if lines, err := cleanHost(t.Context(), c, false); err != nil || !strings.Contains(strings.Join(lines, "\n"), "another network namespace") {
		t.Errorf("got %q and %v", lines, err)
	}
	// Of many that a container has had, one is known.
	newer := away
	newer.Own = boot + " net:[2]"
	if err := writeState(dir, stateFile{stateVersion, "warren", []device{away, newer}}); err != nil {
		t.Fatal(err)
	}
	now := deviceOf(c)
	if others, err := keepState(c, now); err != nil || !slices.Equal(others, []device{newer}) {
		t.Errorf("there are %v besides, %v", others, err)
	}
	if s, err := readState(dir); err != nil || !slices.Equal(s.Interfaces, []device{newer, now}) {
		t.Errorf("it has %+v, %v", s, err)
	}
}
