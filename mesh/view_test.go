package mesh_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/mesh"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/view"
)

// Whoever waits for a View in which a peer has a prefix may send to it: the device has it by then.
func TestViewIsWhatTheDeviceHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		net, reg := memory.NewNetwork(), regmem.New()
		done := make(chan error, 2)
		start := func(name string, last byte) (mesh.Mesh, *memory.Device) {
			ip := netip.AddrFrom4([4]byte{192, 0, 2, last})
			d := memory.New(memory.Options{Network: net, Addrs: []netip.Addr{ip}})
			m, err := mesh.New(mesh.Config{
				Node: name, Registry: reg.Handle(), Datapath: d, Window: time.Second,
				Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, last})},
				Endpoints: []mesh.Endpoint{{Addr: ip}},
			})
			if err != nil {
				t.Fatal(err)
			}
			go func() { done <- m.Run(ctx) }()
			return m, d
		}
		a, device := start("a", 1)
		if err := mesh.Ready(ctx, a); err != nil {
			t.Fatal(err)
		}
		start("b", 2)
		host := netip.MustParsePrefix("10.0.0.2/32")
		for v := range mesh.Watch(ctx, a) {
			p, ok := v.Peer("b")
			if !ok || !p.Prefixes.Has(host) {
				continue
			}
			st, err := device.Read(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if _, routed := st.Routes[host]; !routed || !st.Peers[p.Key].Prefixes.Has(host) {
				t.Errorf("the view says that %v goes to b, and the device has %v and %v", host, st.Routes, st.Peers)
			}
			break
		}
		if ctx.Err() != nil {
			t.Error("never seen")
		}
		cancel()
		if err := errors.Join(<-done, <-done); err != nil {
			t.Error(err)
		}
	})
}

// What the datapath says of itself and of the host is in the View, and the log has each problem once when it
// comes and once when it goes.
func TestViewHasWhatTheDatapathSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var log bytes.Buffer // read when Run has ended
		h := datapath.Host{IPv4: true, Driver: "tun", Instead: "the kernel has no WireGuard"}
		d := memory.New(memory.Options{Host: h})
		m, err := mesh.New(mesh.Config{Node: "a", Registry: regmem.New().Handle(), Datapath: d, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- m.Run(ctx) }()
		if err := mesh.Ready(ctx, m); err != nil {
			t.Fatal(err)
		}
		says := func(driver, instead string, problems ...string) {
			t.Helper()
			time.Sleep(time.Minute)
			v, _ := m.Current()
			if v.Self.Datapath != driver || v.Self.Instead != instead {
				t.Errorf("datapath %q, instead %q, want %q, %q", v.Self.Datapath, v.Self.Instead, driver, instead)
			}
			var got []string
			for c := range v.Find(view.HostProblem) {
				got = append(got, c.String())
			}
			if strings.Join(got, "\n") != strings.Join(problems, "\n") {
				t.Errorf("problems %q, want %q", got, problems)
			}
		}
		says("tun", "the kernel has no WireGuard")
		d.SetProblems(datapath.Problem{Subject: "mtu", Message: "1280 bytes are too few", Remedy: "raise it"})
		says("tun", "the kernel has no WireGuard", "host-problem a mtu: 1280 bytes are too few (raise it)")
		_, stale := m.Current()
		says("tun", "the kernel has no WireGuard", "host-problem a mtu: 1280 bytes are too few (raise it)")
		select {
		case <-stale:
			t.Error("the same readings are news")
		default:
		}
		h.Driver, h.Instead = "kernel", ""
		d.SetHost(h)
		d.SetProblems()
		says("kernel", "")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		for text, want := range map[string]int{"level=WARN": 1, `msg="1280 bytes are too few"`: 1, `msg="over: 1280 bytes are too few"`: 1, "condition=host-problem": 2} {
			if n := strings.Count(log.String(), text); n != want {
				t.Errorf("%s is %d times in the log, want %d:\n%s", text, n, want, log.String())
			}
		}
	})
}
