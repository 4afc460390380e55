package datapath_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/tools/txtar"

	"github.com/google/go-cmp/cmp"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
)

var update = flag.Bool("update", false, "write the ops of the scenarios as they are now")

func TestPlanScenarios(t *testing.T) {
	for _, s := range datapathtest.Scenarios(t) {
		t.Run(s.Name, func(t *testing.T) {
			got := s.Format(datapath.Plan(s.Want, s.Have))
			if *update {
				rewrite(t, s.Name, got)
				return
			}
			if diff := cmp.Diff(s.Ops, got); diff != "" {
				t.Errorf("%s\nops differ (-want +got):\n%s", s.Why, diff)
			}
		})
	}
}

func rewrite(t *testing.T, name, ops string) {
	file := filepath.Join("datapathtest", "testdata", name+".txtar")
	a, err := txtar.ParseFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for i := range a.Files {
		if a.Files[i].Name == "ops" {
			a.Files[i].Data = []byte(ops)
		}
	}
	if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
		t.Fatal(err)
	}
}
