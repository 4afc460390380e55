package core_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/view"
)

// names is what is known of names: "host=addr addr", or "host=" for one that is not found.
func names(t testing.TB, known map[string]string) core.Named {
	in := core.Named{Names: make(map[string]core.Name)}
	for host, addr := range known {
		n := core.Name{Err: errors.New("no such host")}
		if addr != "" {
			n = core.Name{Addrs: []netip.Addr{netip.MustParseAddr(addr)}}
		}
		in.Names[host] = n
	}
	return in
}

func TestNames_AreAskedForAndUsed(t *testing.T) {
	s := up(t)
	out := s.m.Step(s.now, put(good(rec("a", "10.1.0.0/16", "example.net:51820")), good(rec("b", "10.2.0.0/16", "203.0.113.2:1"))))
	if !slices.Equal(out.Names, []string{"example.net"}) || len(out.Renew) > 0 {
		t.Fatalf("asks for %q, renews %q", out.Names, out.Renew)
	}
	s.handle(out)
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16", "b 10.2.0.0/16")
	if c, _ := s.condition(view.EndpointUnusable, "a", ""); c.Message != "none of its endpoints can be used from here: example.net:51820 is being looked up" {
		t.Errorf("while it is looked up: %q", c.Message)
	}
	s.step(names(t, map[string]string{"example.net": ""}))
	if c, _ := s.condition(view.EndpointUnusable, "a", ""); c.Message != "none of its endpoints can be used from here: example.net:51820 is not found: no such host" {
		t.Errorf("when it is not found: %q", c.Message)
	}
	s.step(names(t, map[string]string{"example.net": "203.0.113.7"}))
	s.run(soon)
	s.wantNoCondition(view.EndpointUnusable, "a", "")
	if p, _ := s.peer("a"); p.Endpoint != netip.MustParseAddrPort("203.0.113.7:51820") {
		t.Errorf("a is sent to at %v", p.Endpoint)
	}

	// What changes nothing causes nothing.
	s.take()
	s.step(names(t, map[string]string{"example.net": "203.0.113.7", "example.org": "203.0.113.9"}))
	s.run(soon)
	s.wantOps()

	// Nobody has it any more.
	if out := s.m.Step(s.now, deleted("a")); out.Names == nil || len(out.Names) > 0 {
		t.Errorf("asks for %#v", out.Names)
	}
}

// A name whose address changes does not end a session that works. One that falls silent is looked up again.
func TestNames_ASessionOutlivesItsName(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16", "example.net:51820"))
	s.step(names(t, map[string]string{"example.net": "203.0.113.7"}))
	s.run(soon)
	s.dev.hears(publicKey("a"), s.now)
	s.run(15 * time.Second)
	s.take()
	s.step(names(t, map[string]string{"example.net": "203.0.113.8"}))
	s.run(time.Minute)
	s.wantOps()
	s.dev.sends(publicKey("a"), 5000)
	s.run(5 * time.Minute)
	if !slices.Equal(s.renewed, []string{"example.net"}) {
		t.Errorf("renews %q", s.renewed)
	}
	if p, _ := s.peer("a"); p.Endpoint != netip.MustParseAddrPort("203.0.113.8:51820") {
		t.Errorf("a is sent to at %v", p.Endpoint)
	}
}

// An address that a name has counts as one in the record: it is never sent to through the mesh.
func TestNames_InsideAPrefixDoNotLoop(t *testing.T) {
	s := newSim(t)
	s.dev.host.Underlay = datapath.UnderlayShared
	s.start(rec("a", "10.1.0.0/16", "example.net:1"), rec("b", "10.2.0.0/16", "203.0.113.2:1"))
	s.step(names(t, map[string]string{"example.net": "10.1.1.1"}))
	s.run(soon)
	s.wantPeers("a", "b 10.2.0.0/16")
	s.wantCondition(view.EndpointLoops, "a", "10.1.0.0/16")
	s.step(names(t, map[string]string{"example.net": "10.2.1.1"}))
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16", "b 10.2.0.0/16")
	s.wantCondition(view.EndpointLoops, "a", "10.2.1.1:1")
	s.step(names(t, map[string]string{"example.net": "203.0.113.1"}))
	s.run(soon)
	s.wantNoCondition(view.EndpointLoops, "a", "")
}

func TestEndpoints_OfThisNodeMayChange(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16", "127.0.0.1:5", "203.0.113.1:1"))
	at := func(es ...string) {
		t.Helper()
		var list []record.Endpoint
		for _, e := range es {
			list = append(list, endpoint(e))
		}
		s.step(core.Endpoints{List: list})
		s.run(soon)
		if got := s.m.View().Self.Record.Endpoints; !slices.Equal(got, list) {
			t.Errorf("publishes %v, want %v", got, list)
		}
	}
	at("203.0.113.50:7", "example.net:9")
	s.wantOps()
	if len(s.puts) != 0 { // taken with the ops
		t.Errorf("put %v", s.puts)
	}
	at("203.0.113.50:7", "example.net:9") // the same
	at()
	if p, _ := s.peer("a"); p.Keepalive != core.KeepaliveNAT {
		t.Errorf("without endpoints a is %+v", p)
	}
	at("203.0.113.50:7")
	if p, _ := s.peer("a"); p.Keepalive != 0 {
		t.Errorf("with one again a is %+v", p)
	}
	s.dev.hears(publicKey("a"), s.now)
	s.run(15 * time.Second)
	s.take()
	at("203.0.113.51:7")
	s.wantOps() // the session is left alone
}

// A node that takes any port comes back at the one it had, unless another program has it.
func TestPort_TheLastOneIsTakenAgain(t *testing.T) {
	s := newSim(t)
	s.start()
	if len(s.starts) != 0 {
		t.Fatal("start takes them")
	}
	dev := newDevice()
	s = simOn(t, dev, func(c *core.Config) { c.Starts = core.Starts{Epoch: 4, Generation: 4, Port: 41234} })
	s.step(reset())
	s.run(soon)
	if got := dev.model.State().Device.ListenPort; got != 41234 {
		t.Errorf("the device has port %d", got)
	}
	if len(s.starts) != 1 || s.starts[0] != (core.Starts{Epoch: 5, Generation: 5, Port: 41234}) {
		t.Errorf("keeps %+v", s.starts)
	}

	dev = newDevice()
	dev.taken[41234] = true
	s = simOn(t, dev, func(c *core.Config) { c.Starts = core.Starts{Port: 41234} })
	s.step(reset())
	s.run(soon)
	if got := dev.model.State().Device.ListenPort; got != 40000 {
		t.Errorf("another has the port: the device has %d", got)
	}
	s.wantNoCondition(view.PortInUse, "m", "")
	if n := len(s.starts); n != 1 || s.starts[0].Port != 40000 {
		t.Errorf("keeps %+v", s.starts)
	}

	// A device that is adopted keeps the port it has.
	dev = newDevice()
	dev.model = *datapath.NewModel(datapath.State{Device: datapath.Device{Key: privateKey("m"), ListenPort: 5555, MTU: 1420}})
	s = simOn(t, dev, func(c *core.Config) { c.Starts = core.Starts{Port: 41234} })
	s.step(reset())
	s.run(soon)
	if got := dev.model.State().Device.ListenPort; got != 5555 {
		t.Errorf("the adopted device has port %d", got)
	}
}

// What the registry said meanwhile is newer than what was on disk.
func TestRemembered_IsOlderThanAReset(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16", "203.0.113.1:1"))
	s.step(core.Remembered{Put: []core.Opened{good(rec("a", "10.9.0.0/16")), good(rec("b", "10.2.0.0/16"))}})
	s.run(soon)
	s.wantPeers("a 10.1.0.0/16")
}

func TestKept(t *testing.T) {
	s := up(t)
	s.step(core.Kept{What: "snapshot", Err: errors.New("no space left on device")})
	if c, ok := s.condition(view.StateUnkept, "m", "snapshot"); !ok || c.Message != "the snapshot on disk: no space left on device" {
		t.Errorf("condition %v", c)
	}
	s.step(core.Kept{What: "snapshot"})
	s.wantNoCondition(view.StateUnkept, "m", "")
}

// A name that moves after its old address fell silent is followed at once.
func TestNames_ANewAddressIsTriedAtOnce(t *testing.T) {
	s := up(t, rec("a", "10.1.0.0/16", "example.net:51820"))
	s.step(names(t, map[string]string{"example.net": "203.0.113.7"}))
	s.run(soon)
	s.dev.hears(publicKey("a"), s.now)
	s.run(15 * time.Second)
	s.dev.sends(publicKey("a"), 5000)
	s.run(time.Minute)
	s.wantCondition(view.NoHandshake, "a", "")
	s.step(names(t, map[string]string{"example.net": "203.0.113.8"}))
	s.run(soon)
	if p, _ := s.peer("a"); p.Endpoint != netip.MustParseAddrPort("203.0.113.8:51820") {
		t.Errorf("a is sent to at %v", p.Endpoint)
	}
	// Heard again, it is left alone.
	s.dev.hears(publicKey("a"), s.now)
	s.run(15 * time.Second)
	s.take()
	s.step(names(t, map[string]string{"example.net": "203.0.113.9"}))
	s.run(time.Minute)
	s.wantOps()
}

// remedied is an error that knows what can be done.
type remedied struct{ error }

func (remedied) Remedy() string { return "give the user the right to read" }

func TestRegistryFailed_SaysWhatTheErrorAdvises(t *testing.T) {
	s := up(t)
	s.step(core.RegistryFailed{Err: fmt.Errorf("watching: %w", remedied{errTest})})
	if c, _ := s.condition(view.RegistryDown, "", ""); c.Remedy != "forwarding goes on; the watch is retried; give the user the right to read" {
		t.Errorf("remedy %q", c.Remedy)
	}
}
