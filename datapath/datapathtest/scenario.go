package datapathtest

import (
	"embed"
	"fmt"
	"path"
	"strings"
	"testing"

	"golang.org/x/tools/txtar"

	"github.com/warren-mesh/warren/datapath"
)

//go:embed testdata/*.txtar
var scenarios embed.FS

// Scenario is one case of Plan that a stranger can read: a device which is Have shall be Want, and
// Ops are the steps.
type Scenario struct {
	Name       string
	Why        string
	Have, Want datapath.State
	Ops        string
	names      []string
}

// Scenarios returns the cases in testdata.
func Scenarios(t testing.TB) []Scenario {
	t.Helper()
	files, err := scenarios.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	var all []Scenario
	for _, f := range files {
		data, err := scenarios.ReadFile(path.Join("testdata", f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		s, err := parseScenario(strings.TrimSuffix(f.Name(), ".txtar"), data)
		if err != nil {
			t.Fatalf("%s: %v", f.Name(), err)
		}
		all = append(all, s)
	}
	return all
}

func parseScenario(name string, data []byte) (Scenario, error) {
	a := txtar.Parse(data)
	s := Scenario{Name: name, Why: strings.TrimSpace(string(a.Comment))}
	part := make(map[string]string)
	for _, f := range a.Files {
		part[f.Name] = string(f.Data)
	}
	var err error
	if s.Have, err = ParseState(part["have"]); err != nil {
		return s, fmt.Errorf("have: %w", err)
	}
	if s.Want, err = ParseState(part["want"]); err != nil {
		return s, fmt.Errorf("want: %w", err)
	}
	if err := s.Want.Check(); err != nil {
		return s, fmt.Errorf("want: %w", err)
	}
	s.Ops = part["ops"]
	s.names = names(part["have"], part["want"])
	return s, nil
}

// Format writes ops as the scenario's Ops are written.
func (s Scenario) Format(ops []datapath.Op) string { return FormatOps(ops, s.names...) }
