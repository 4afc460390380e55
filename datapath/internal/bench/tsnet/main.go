// Program tsnet puts load on two tsnet servers that talk directly, over loopback, with the test control server of
// tailscale.com in the same process. See the bench module, which runs it.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tailscale.com/ipn/store/mem"
	"tailscale.com/net/netns"
	"tailscale.com/tailcfg"
	"tailscale.com/tsnet"
	"tailscale.com/tstest/integration"
	"tailscale.com/tstest/integration/testcontrol"
	"tailscale.com/types/logger"

	"github.com/warren-mesh/warren/datapath/internal/bench/load"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "tsnet: run by the bench program")
		os.Exit(2)
	}
	load.Main(os.Args[1], open)
	os.Exit(0) // what the servers leave running ends here
}

// tb lets RunDERPAndSTUN, which is written for tests, run in a program.
type tb struct{ testing.TB }

func (tb) Helper()                   {}
func (tb) Logf(string, ...any)       {}
func (tb) Cleanup(func())            {} // with the process
func (tb) Fatal(a ...any)            { panic(fmt.Sprint(a...)) }
func (tb) Fatalf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }
func (tb) Errorf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }

func open(s load.Spec) (load.Pair, func(), error) {
	fail := func(err error) (load.Pair, func(), error) { return load.Pair{}, nil, err }
	if s.Impaired() || s.MTU != 0 {
		return fail(errors.New("tsnet has no option for its sockets, nor for its MTU"))
	}
	os.Setenv("TS_NO_LOGS_NO_SUPPORT", "true")
	netns.SetEnabled(false) // loopback only
	control := &testcontrol.Server{
		DERPMap:        integration.RunDERPAndSTUN(tb{}, logger.Discard, "127.0.0.1"),
		DNSConfig:      &tailcfg.DNSConfig{Proxied: true},
		MagicDNSDomain: "bench.ts.net", Logf: logger.Discard,
	}
	control.HTTPTestServer = httptest.NewUnstartedServer(control)
	control.HTTPTestServer.Start()
	dir, err := os.MkdirTemp("", "bench-tsnet-")
	if err != nil {
		return fail(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	var servers [2]*tsnet.Server
	var addrs [2]netip.Addr
	end := func() {
		for _, s := range servers {
			if s != nil {
				s.Close()
			}
		}
		os.RemoveAll(dir)
	}
	for i := range servers {
		servers[i] = &tsnet.Server{
			Dir: filepath.Join(dir, fmt.Sprint(i)), ControlURL: control.HTTPTestServer.URL, Hostname: fmt.Sprint("node", i),
			Store: new(mem.Store), Ephemeral: true, Logf: logger.Discard, UserLogf: logger.Discard,
		}
		if err := os.MkdirAll(servers[i].Dir, 0o700); err != nil {
			end()
			return fail(err)
		}
		st, err := servers[i].Up(ctx)
		if err != nil {
			end()
			return fail(err)
		}
		addrs[i] = st.TailscaleIPs[0]
	}
	note, err := direct(ctx, servers[0], addrs[1])
	if err != nil {
		end()
		return fail(err)
	}
	node := func(i int) load.Node {
		return load.Node{Addr: addrs[i].String(), Listen: servers[i].Listen, ListenPacket: servers[i].ListenPacket, Dial: servers[i].Dial}
	}
	return load.Pair{A: node(0), B: node(1), Note: note}, end, nil
}

// direct waits until packets go to the other node directly and not by way of the relay.
func direct(ctx context.Context, s *tsnet.Server, to netip.Addr) (string, error) {
	c, err := s.LocalClient()
	if err != nil {
		return "", err
	}
	for {
		once, cancel := context.WithTimeout(ctx, 2*time.Second) // a ping that is lost is not sent again
		r, err := c.Ping(once, to, tailcfg.PingDisco)
		cancel()
		if err == nil && r.Endpoint != "" {
			return "direct, " + r.Endpoint, nil
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("no direct path: %v", errors.Join(err, ctx.Err()))
		case <-time.After(200 * time.Millisecond):
		}
	}
}
