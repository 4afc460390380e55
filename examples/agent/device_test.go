package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
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
	old, x := device{"warren0", "", 87}, device{"mesh-x", "/run/netns/blue", 88}
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
		{"the same name elsewhere", `{"version":2,"mesh":"warren","interfaces":[{"name":"mesh-x","protocol":88}]}`, x, []device{{"mesh-x", "", 88}, x}, []device{{"mesh-x", "", 88}}},
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
