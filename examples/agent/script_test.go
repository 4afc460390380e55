package main

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
)

func TestMain(m *testing.M) {
	testscript.Main(tests{m}, map[string]func(){"agent": main})
}

type tests struct{ *testing.M }

func (m tests) Run() int {
	defer func() {
		for _, f := range atEnd {
			f()
		}
	}()
	return m.M.Run()
}

// atEnd is done when all tests are.
var atEnd []func()

// patient is how long something may take that a test waits for: much longer than it takes, for a busy
// machine.
const patient = time.Minute

// The scripts run the program as its users do. WARREN_STATE is a folder of the script's own, WEB is
// host:port of a web server on the host.
func TestScripts(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/hello", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "hello from the host") })
	mux.HandleFunc("/moved", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/hello", http.StatusFound) })
	mux.HandleFunc("/cut", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		fmt.Fprintln(w, "and then nothing")
	})
	mux.HandleFunc("/never", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	web := httptest.NewServer(mux)
	t.Cleanup(web.Close)
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			e.Setenv("WARREN_STATE", e.WorkDir+"/state")
			e.Setenv("WEB", strings.TrimPrefix(web.URL, "http://"))
			return nil
		},
		Condition: func(cond string) (bool, error) {
			_, err := exec.LookPath(cond)
			return err == nil, nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code":       code,
			"eventually": eventually,
			"settings":   settings,
		},
	})
}

// code N COMMAND... runs a command that has to end with exit status N.
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: code N COMMAND...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		e, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = e.ExitCode()
	}
	if got != want {
		ts.Fatalf("%s ended with %d, want %d; it said:\n%s%s", strings.Join(args[1:], " "), got, want, ts.ReadFile("stdout"), ts.ReadFile("stderr"))
	}
}

// eventually REGEXP COMMAND... runs a command until it succeeds with output that matches.
func eventually(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: eventually REGEXP COMMAND...")
	}
	re, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	for end := time.Now().Add(patient); ; time.Sleep(50 * time.Millisecond) {
		err := ts.Exec(args[1], args[2:]...)
		if err == nil && re.MatchString(ts.ReadFile("stdout")) {
			return
		}
		if time.Now().After(end) {
			ts.Fatalf("%q does not match what %s says: %v\n%s%s", args[0], strings.Join(args[1:], " "), err, ts.ReadFile("stdout"), ts.ReadFile("stderr"))
		}
	}
}

// settings FORMAT has the last command's output contain, for each setting, its flag, variable or name, as
// FORMAT says: --%s, $%s or %s.
func settings(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: settings FORMAT")
	}
	out := ts.ReadFile("stdout")
	for _, s := range config.Settings() {
		name := s.Name
		if strings.HasPrefix(args[0], "$") {
			name = s.Variable()
		}
		if text := strings.TrimPrefix(fmt.Sprintf(args[0], name), "$"); !strings.Contains(out, text) {
			ts.Fatalf("%q is missing", text)
		}
	}
}
