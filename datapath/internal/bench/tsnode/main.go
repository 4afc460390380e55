// Tsnode does one measure with two nodes of Tailscale's tsnet, which know each other by a control server in the same
// process and have a direct path over loopback.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tailscale.com/client/local"
	"tailscale.com/ipn/store/mem"
	"tailscale.com/net/netns"
	"tailscale.com/tailcfg"
	"tailscale.com/tsnet"
	"tailscale.com/tstest/integration"
	"tailscale.com/tstest/integration/testcontrol"
	"tailscale.com/types/logger"

	"github.com/warren-mesh/warren/datapath/internal/bench/measure"
)

func main() {
	what := flag.String("what", "tcp,1,2s", "the measure")
	flag.Parse()
	w, err := measure.Parse(*what)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	dir, err := os.MkdirTemp("", "tsnode")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	measure.Main(func() (p measure.Pair, err error) {
		defer os.RemoveAll(dir)
		return open(dir)
	}, w)
}

// tb is as much of a testing.TB as the test servers need.
type tb struct{ testing.TB }

func (tb) Helper()                   {}
func (tb) Cleanup(func())            {} // the process ends anyway
func (tb) Logf(string, ...any)       {}
func (tb) Fatal(args ...any)         { panic(fmt.Sprint(args...)) }
func (tb) Fatalf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }

func open(dir string) (measure.Pair, error) {
	netns.SetEnabled(false)
	control := &testcontrol.Server{
		DERPMap:        integration.RunDERPAndSTUN(tb{}, logger.Discard, "127.0.0.1"),
		DNSConfig:      &tailcfg.DNSConfig{Proxied: true},
		MagicDNSDomain: "bench.example", Logf: logger.Discard,
	}
	control.HTTPTestServer = httptest.NewUnstartedServer(control)
	control.HTTPTestServer.Start()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var nodes [2]*tsnet.Server
	var addrs [2]netip.Addr
	var clients [2]*local.Client
	for i := range nodes {
		name := fmt.Sprintf("node%d", i)
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(at, 0o755); err != nil {
			return measure.Pair{}, err
		}
		nodes[i] = &tsnet.Server{
			Dir: at, ControlURL: control.HTTPTestServer.URL, Hostname: name, Store: new(mem.Store), Ephemeral: true,
			Logf: logger.Discard, UserLogf: logger.Discard,
		}
		status, err := nodes[i].Up(ctx)
		if err != nil {
			return measure.Pair{}, err
		}
		addrs[i] = status.TailscaleIPs[0]
		if clients[i], err = nodes[i].LocalClient(); err != nil {
			return measure.Pair{}, err
		}
	}
	// Until the path is direct, packets go by the relay.
	for direct := false; !direct; {
		r, err := clients[0].Ping(ctx, addrs[1], tailcfg.PingDisco)
		switch {
		case ctx.Err() != nil:
			return measure.Pair{}, errors.New("no direct path within a minute")
		case err == nil && r.Endpoint != "":
			direct = true
		default:
			time.Sleep(100 * time.Millisecond)
		}
	}
	dial := func(network string) func(uint16) (net.Conn, error) {
		return func(port uint16) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			return nodes[0].Dial(ctx, network, netip.AddrPortFrom(addrs[1], port).String())
		}
	}
	return measure.Pair{
		Listen: func(port uint16) (net.Listener, error) { return nodes[1].Listen("tcp", fmt.Sprintf(":%d", port)) },
		Dial:   dial("tcp"),
		ListenPacket: func(port uint16) (net.PacketConn, error) {
			return nodes[1].ListenPacket("udp", netip.AddrPortFrom(addrs[1], port).String())
		},
		DialPacket: dial("udp"),
	}, nil
}
