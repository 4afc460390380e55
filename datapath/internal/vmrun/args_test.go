package main

import (
	"bytes"
	"errors"
	"flag"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParseArgs(t *testing.T) {
	o, err := parseArgs(strings.Fields("-kernel newest -append=ipv6.disable=1 -modules vrf,nf_tables -modules tun -with ip,wg -date 2031-05-06 -timeout 5m -v x.test -test.v -kernel 1"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if o.kernel != "newest" || o.append != "ipv6.disable=1" || o.timeout != 5*time.Minute || !o.verbose || o.memory != 1024 || o.accel != "tcg" || o.smp != 2 ||
		!slices.Equal(o.modules, []string{"vrf", "nf_tables", "tun"}) || !slices.Equal(o.with, []string{"ip", "wg"}) ||
		!o.date.Equal(time.Date(2031, 5, 6, 0, 0, 0, 0, time.UTC)) {
		t.Errorf("%+v", o)
	}
	if o.program != "x.test" || !slices.Equal(o.args, []string{"-test.v", "-kernel", "1"}) {
		t.Errorf("%q %q", o.program, o.args)
	}
	for args, want := range map[string]string{
		"":                  "usage",
		"-v":                "usage",
		"-accel hvf x":      "-accel",
		"-memory 10 x":      "-memory",
		"-smp 0 x":          "-smp",
		"-timeout -1s x":    "-timeout",
		"-timeout soon x":   "-timeout",
		"-date yesterday x": "2026-01-31",
		"-no x":             "-no",
	} {
		if _, err := parseArgs(strings.Fields(args), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", args, err)
		}
	}
	var usage bytes.Buffer
	if _, err := parseArgs([]string{"-h"}, &usage); !errors.Is(err, flag.ErrHelp) || !strings.Contains(usage.String(), "-append words") {
		t.Errorf("%v, %s", err, usage.String())
	}
}

func TestParseDate(t *testing.T) {
	for s, want := range map[string]string{
		"2026-01-31":                "2026-01-31T00:00:00Z",
		"2026-01-31 15:04:05":       "2026-01-31T15:04:05Z",
		"2026-01-31T15:04:05+02:00": "2026-01-31T13:04:05Z",
	} {
		if got, err := parseDate(s); err != nil || got.Format(time.RFC3339) != want {
			t.Errorf("%s: %v, %v", s, got, err)
		}
	}
}

func TestGuestArgs(t *testing.T) {
	cwd := t.TempDir()
	other := filepath.Join(cwd, "other")
	got, out, timeout := guestArgs([]string{
		"-test.testlogfile=/tmp/log", "-test.paniconexit0", "-test.timeout=10m0s", "-test.coverprofile=c.out",
		"--test.memprofile=" + filepath.Join(cwd, "m.out"), "-test.outputdir=" + other, "-test.gocoverdir=/tmp/g", "-test.run=A=b", "arg", "-test.testlogfile=mine",
	}, cwd)
	want := []string{
		"-test.paniconexit0", "-test.timeout=10m0s", "-test.coverprofile=/run/vmrun/test.coverprofile",
		"--test.memprofile=/run/vmrun/test.memprofile", "-test.run=A=b", "arg", "-test.testlogfile=mine",
	}
	if !slices.Equal(got, want) || timeout != 10*time.Minute {
		t.Errorf("%q, %v", got, timeout)
	}
	wantOut := []outFile{
		{"/run/vmrun/test.coverprofile", filepath.Join(other, "c.out")},
		{"/run/vmrun/test.memprofile", filepath.Join(cwd, "m.out")},
	}
	if !slices.Equal(out, wantOut) {
		t.Errorf("%q", out)
	}
	if got, out, timeout := guestArgs([]string{"-test.timeout=0s", "--", "-test.trace=x"}, cwd); len(got) != 3 || len(out) != 0 || timeout != 0 {
		t.Errorf("%q, %q, %v", got, out, timeout)
	}
}

func TestGuestEnv(t *testing.T) {
	got := guestEnv([]string{"CI=true", "HOME=/nonexistent", "WARREN_A=b=c", "WARREN_VMRUN=6", "SECRET=1", "TERM=dumb", "WARREN=1"})
	if want := []string{"CI=true", "WARREN_A=b=c", "TERM=dumb"}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}
