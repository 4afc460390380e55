package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
)

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(b), "\r\n", "\n")
}

// The unit in the README is the one in the file, and what it says to the agent is what the agent knows.
func TestUnit(t *testing.T) {
	unit, readme := read(t, "agent.service"), read(t, "../../README.md")
	_, shown, _ := strings.Cut(readme, "```ini\n")
	shown, _, _ = strings.Cut(shown, "```")
	if shown != unit {
		t.Errorf("the README shows\n%s\nand agent.service is\n%s", shown, unit)
	}
	_, line, _ := strings.Cut(unit, "\nExecStart=/usr/local/bin/agent run ")
	line, _, _ = strings.Cut(line, "\n")
	set := pflag.NewFlagSet("run", pflag.ContinueOnError)
	f := config.Bind(set, config.ToRun)
	if err := set.Parse(strings.Fields(line)); err != nil {
		t.Fatal(err)
	}
	c, err := f.Load(config.Host{Hostname: func() (string, error) { return "alpha", nil }})
	if err != nil || c.Datapath != "kernel" || c.State != "/var/lib/warren" {
		t.Errorf("the unit's flags %q are %+v, %v", line, c, err)
	}
	_, again, _ := strings.Cut(exitCodes, "RestartPreventExitStatus=")
	if again = strings.TrimSuffix(again[:strings.Index(again, " keeps")], "\n"); !strings.Contains(unit, "\nRestartPreventExitStatus="+again+"\n") {
		t.Errorf("the help says RestartPreventExitStatus=%s, and the unit otherwise", again)
	}
	for _, want := range []string{"\nType=notify\n", "\nAmbientCapabilities=" + capNetAdmin + "\n", "\nCapabilityBoundingSet=" + capNetAdmin + "\n", "\nStateDirectory=warren\n"} {
		if !strings.Contains(unit, want) {
			t.Errorf("the unit has no %q", want)
		}
	}
}

// The README's table of what there is to say of an interface is what the settings say.
func TestReadmeTable(t *testing.T) {
	var b strings.Builder
	b.WriteString("| setting | default | |\n|---|---|---|\n")
	for _, s := range config.Settings() {
		if !s.Host {
			continue
		}
		words := s.Default
		if words != "" && !strings.Contains(words, " ") {
			words = "`" + words + "`"
		}
		fmt.Fprintf(&b, "| `--%s %s` | %s | %s |\n", s.Name, s.Value, words, s.Usage)
	}
	if !strings.Contains(read(t, "../../README.md"), b.String()) {
		t.Errorf("the README does not have\n%s", &b)
	}
}
