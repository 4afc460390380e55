package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/roles"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	goleak.VerifyTestMain(m)
}

// Another node sees the role's prefix for as long as alpha has the role, is answered there, and loses no packet to
// alpha itself when the role comes and goes.
func TestRole(t *testing.T) {
	records := memory.New()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	file := filepath.Join(t.TempDir(), "roles")
	assign := func(text string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	assign("")
	prefix := netip.MustParsePrefix("10.90.1.0/24")
	go func() {
		ended <- run(ctx, "alpha", netip.MustParseAddr("10.80.0.1"), prefix, records, roles.File(file))
	}()

	device, err := netstack.New(netstack.Options{})
	if err != nil {
		t.Fatal(err)
	}
	beta, err := mesh.New(mesh.Config{
		Node: "beta", Registry: records, Datapath: device, Addresses: []netip.Addr{netip.MustParseAddr("10.80.0.2")},
		Endpoints: []mesh.Endpoint{mesh.MustEndpoint("127.0.0.1:0")},
	})
	if err != nil {
		t.Fatal(err)
	}
	go func() { ended <- beta.Run(ctx) }()
	defer func() {
		stop()
		if err := errors.Join(<-ended, <-ended, device.Close()); err != nil {
			t.Error(err)
		}
	}()
	sees := func(what string, ok func(mesh.Peer) bool) {
		t.Helper()
		late := time.After(20 * time.Second)
		for {
			v, newer := beta.Current()
			if p, _ := v.Peer("alpha"); ok(p) {
				return
			}
			select {
			case <-newer:
			case <-late:
				t.Fatalf("%s: beta does not see it: %+v", what, v)
			}
		}
	}
	sees("alpha", func(p mesh.Peer) bool { return p.Prefixes.HasAddr(netip.MustParseAddr("10.80.0.1")) })

	pings, count := make(chan struct{}), make(chan [2]int, 1)
	go func() {
		var sent, lost int
		for {
			select {
			case <-pings:
				count <- [2]int{sent, lost}
				return
			default:
			}
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			if _, err := device.Ping(ctx, netip.MustParseAddr("10.80.0.1")); err != nil {
				lost++
			}
			cancel()
			sent++
			time.Sleep(time.Millisecond)
		}
	}()

	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return device.DialContext(ctx, network, addr)
		},
	}}
	for range 3 {
		assign("greeter\n")
		sees("the role", func(p mesh.Peer) bool { return p.Prefixes.Has(prefix) })
		text := ""
		for end := time.Now().Add(20 * time.Second); text == "" && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			if r, err := client.Get("http://10.90.1.1/"); err == nil {
				b, _ := io.ReadAll(r.Body)
				r.Body.Close()
				text = strings.TrimSpace(string(b))
			}
		}
		if text != "alpha greets its 1 peers" {
			t.Errorf("got %q", text)
		}
		assign("# none\n")
		sees("no role", func(p mesh.Peer) bool { return !p.Prefixes.Has(prefix) })
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			s, err := device.Read(t.Context())
			_, there := s.Routes[prefix]
			if err == nil && !there {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("the route is still on beta's device: %v, %v", s.Routes, err)
			}
		}
	}
	close(pings)
	n := <-count
	t.Logf("%d of %d echoes to alpha's own address lost", n[1], n[0])
	if n[0] < 100 || n[1] > 0 {
		t.Errorf("%d of %d echoes to alpha's own address lost", n[1], n[0])
	}
}

// The whole of it is short, and the README shows parts of it as they are.
func TestSource(t *testing.T) {
	b, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{"// greeter is a role:": "\n// run runs a node", "	manager, err := roles.New(": "	if err != nil {\n		return errors.Join(err, device.Close())\n	}\n	return errors.Join(manager.Run("} {
		_, part, ok := strings.Cut(string(b), from)
		part, _, ok2 := strings.Cut(part, to)
		if !ok || !ok2 || !strings.Contains(string(readme), "```go\n"+from+part+"```\n") {
			t.Errorf("the README does not show\n%s%s", from, part)
		}
	}
	if n := strings.Count(string(b), "\n"); n >= 100 {
		t.Errorf("main.go has %d lines", n)
	}
}
