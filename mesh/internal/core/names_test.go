package core_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
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

// many is n nodes, n00 and so on.
func many(n int) (all []core.Opened) {
	for i := range n {
		all = append(all, good(rec(fmt.Sprintf("n%02d", i), fmt.Sprintf("10.%d.0.0/16", i+1), fmt.Sprintf("203.0.113.%d:1", i+1))))
	}
	return all
}

func withMany(t testing.TB, n int) *sim {
	s := newSim(t)
	s.step(announce())
	s.step(reset(many(n)...))
	s.run(soon)
	s.wantCount(n)
	s.take()
	return s
}

func (s *sim) wantCount(n int) {
	s.t.Helper()
	if got := len(s.dev.model.State().Peers); got != n {
		s.t.Errorf("the device has %d peers, want %d", got, n)
	}
}

// second answers that the registry was read once more.
func second(os ...core.Opened) core.Records {
	return core.Records{Reset: true, Second: true, Put: os}
}

func TestRule18_AResetWithoutMostPeersIsConfirmed(t *testing.T) {
	s := withMany(t, 10)
	all := many(10)
	s.step(reset(all[:4]...))
	s.run(4900 * time.Millisecond)
	s.wantCount(10)
	s.wantCondition(view.RegistryShrank, "", "")
	if s.relists != 0 {
		t.Error("the second reading comes too early")
	}
	s.run(200 * time.Millisecond)
	if s.relists != 1 {
		t.Errorf("%d second readings asked for", s.relists)
	}
	s.run(time.Hour) // the registry is away again
	s.wantCount(10)
	if s.relists != 1 {
		t.Errorf("%d second readings asked for", s.relists)
	}
	s.step(second(all[:4]...))
	s.run(soon)
	s.wantCount(4)
	s.wantNoCondition(view.RegistryShrank, "", "")
}

func TestRule18_TheyCameBack(t *testing.T) {
	s := withMany(t, 10)
	all := many(10)
	s.step(reset())
	s.run(time.Second)
	for _, o := range all[:8] { // they publish their records again
		s.step(put(o))
	}
	s.run(5 * time.Second)
	s.take()
	s.step(second(all[:8]...))
	s.run(soon)
	s.wantCount(8)
	for _, op := range s.take() {
		switch op := op.(type) {
		case datapath.RemovePeer, datapath.RemoveRoutes, datapath.DropPrefixes:
		default:
			t.Errorf("those that came back are written: %v", op)
		}
	}
}

// The guard delays nothing else: what a Reset changes, single deletions, revocations, half of the peers or
// fewer, few peers.
func TestRule18_DelaysNothingElse(t *testing.T) {
	all := many(12)
	s := withMany(t, 10)
	s.step(reset(append(all[:2:2], bad("n02", fmt.Errorf("it was: %w", identity.ErrRevoked)), all[10], all[11])...))
	s.run(soon)
	s.wantCount(11) // less n02, which was revoked; two are new
	s.step(deleted("n05"))
	s.run(soon)
	s.wantCount(10)
	s.step(put(bad("n06", identity.ErrRevoked)))
	s.run(soon)
	s.wantCount(9)

	s = withMany(t, 10)
	s.step(reset(all[:5]...)) // half
	s.run(soon)
	s.wantCount(5)
	s.step(reset())
	s.run(soon)
	s.wantCount(0) // of 5

	s = withMany(t, 10)
	s.step(reset())
	s.run(time.Second)
	s.step(reset(all[:8]...)) // another Reset has most of them: it needs no second one
	s.run(soon)
	s.wantCount(8)
	s.wantNoCondition(view.RegistryShrank, "", "")
	s.run(time.Minute)
	if s.relists != 0 {
		t.Errorf("%d second readings asked for", s.relists)
	}
}

// What was remembered from disk is guarded as what was seen.
func TestRule18_RememberedPeers(t *testing.T) {
	s := newSim(t)
	s.step(announce())
	s.step(core.Remembered{Put: append(many(10), good(rec("m")))})
	s.run(soon)
	s.wantCount(10)
	if v := s.m.View(); v.Ready || s.settles > 0 || len(s.puts) > 0 {
		t.Errorf("ready %v, put %v: what is on disk is no Reset", v.Ready, s.puts)
	}
	s.step(reset())
	s.run(time.Second)
	s.wantCount(10)
	if len(s.puts) != 1 {
		t.Errorf("put %d times: the guard keeps the node from publishing", len(s.puts))
	}
	s.run(5 * time.Second)
	s.step(second(many(3)...))
	s.run(soon)
	s.wantCount(3)
}

// Peers of a device that was found, of which no snapshot tells, are guarded too.
func TestRule18_PeersOfADeviceThatWasFound(t *testing.T) {
	for _, deviceFirst := range []bool{true, false} {
		dev := newDevice()
		st := datapath.State{Device: datapath.Device{Key: privateKey("m"), ListenPort: 40000, MTU: 1420}, Routes: map[netip.Prefix]netip.Addr{}}
		st.Peers = map[key.Public]datapath.Peer{}
		for _, o := range many(10) {
			st.Peers[o.Record.Key] = datapath.Peer{Prefixes: o.Record.Prefixes}
			for p := range o.Record.Prefixes.All() {
				st.Routes[p] = netip.Addr{}
			}
		}
		dev.model = *datapath.NewModel(st)
		s := simOn(t, dev)
		all := many(10)
		if deviceFirst {
			s.step(announce())
			s.step(reset(all[:2]...))
		} else {
			s.lag = true
			s.step(announce())
			s.step(reset(all[:2]...))
			s.lag = false
			s.answer()
		}
		s.run(soon)
		s.wantCount(10)
		s.step(deleted("n01")) // which is no stray
		s.run(soon)
		s.wantCount(9)
		s.run(20 * time.Second) // an audit comes by
		s.wantCount(9)
		if s.relists != 1 {
			t.Errorf("%d second readings asked for", s.relists)
		}
		s.step(second(all[:1]...))
		s.run(soon)
		s.wantCount(1)
		s.wantNoCondition(view.RegistryShrank, "", "")
		if n := len(dev.model.State().Routes); n != 1 {
			t.Errorf("%d routes are left", n)
		}
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
