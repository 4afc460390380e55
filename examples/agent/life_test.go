package main

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
)

func loaded(t *testing.T, args ...string) config.Config {
	t.Helper()
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	f := config.Bind(set, config.ToRun)
	if err := set.Parse(args); err != nil {
		t.Fatal(err)
	}
	c, err := f.Load(config.Host{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Whenever it is stopped, it ends soon, without an error, and leaves nothing behind but its state.
func TestStoppedAtAnyTime(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	// systemd, as far as the agent knows.
	notified := make(chan string, 100)
	if runtime.GOOS == "linux" {
		path := filepath.Join(t.TempDir(), "notify")
		c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		t.Setenv("NOTIFY_SOCKET", path)
		done := make(chan struct{})
		go func() {
			defer close(done)
			b := make([]byte, 100)
			for {
				n, err := c.Read(b)
				if err != nil {
					return
				}
				notified <- string(b[:n])
			}
		}()
		defer func() { _ = c.Close(); <-done }()
	}
	state := filepath.Join(t.TempDir(), "state")
	c := loaded(t, "--state", state, "--node", "alpha", "--registry", "memory", "--socks5", "127.0.0.1:0", "--expose", "80=127.0.0.1:9", "--expose", "53/udp=127.0.0.1:9")
	log := slog.New(slog.DiscardHandler)
	for _, after := range []time.Duration{0, time.Millisecond, 20 * time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond} {
		a, err := newAgent(c, log, new(slog.LevelVar))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), after)
		if err := runUntil(ctx, a, log); err != nil {
			t.Errorf("stopped after %v: %v", after, err)
		}
		cancel()
		es, err := os.ReadDir(state)
		if err != nil && !os.IsNotExist(err) {
			t.Error(err)
		}
		for _, e := range es {
			if strings.HasPrefix(e.Name(), ".") || strings.HasSuffix(e.Name(), ".sock") {
				t.Errorf("stopped after %v: %s is left behind", after, e.Name())
			}
		}
	}
	if runtime.GOOS == "linux" {
		seen := map[string]bool{}
		for len(seen) < 2 {
			select {
			case s := <-notified:
				seen[s] = true
			case <-time.After(patient):
				t.Fatalf("systemd was told %v", seen)
			}
		}
		if !seen["READY=1"] || !seen["STOPPING=1"] {
			t.Errorf("systemd was told %v", seen)
		}
	}
}

// Without --endpoint the host's own addresses are published, with the device's port.
func TestHostEndpoints(t *testing.T) {
	c := loaded(t, "--state", filepath.Join(t.TempDir(), "state"), "--node", "alpha", "--registry", "memory", "--listen", "30000-39999")
	log := slog.New(slog.DiscardHandler)
	a, err := newAgent(c, log, new(slog.LevelVar))
	if err != nil {
		t.Fatal(err)
	}
	want, err := a.hostEndpoints()
	if err != nil {
		t.Fatal(err)
	}
	if len(want) == 0 {
		t.Skip("needs a host with an address, be it loopback")
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- runUntil(ctx, a, log) }()
	var s control.Status
	for end := time.Now().Add(patient); !s.Self.Published && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		s, _ = a.Status()
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if s.Self.Record == nil || len(s.Self.Record.Endpoints) != len(want) {
		t.Fatalf("published %v, want %v with port %d", s.Self.Endpoints, want, s.Self.Listen)
	}
	for i, e := range s.Self.Record.Endpoints {
		if e.Addr != want[i].Addr || e.Port != s.Self.Listen || e.Port < 30000 || e.Port > 39999 {
			t.Errorf("published %v, want %v with port %d", e, want[i].Addr, s.Self.Listen)
		}
	}
}
