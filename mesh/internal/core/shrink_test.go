package core_test

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/view"
)

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

// A store that went back is no word on who left, however few nodes it lacks: it is older than what was seen, or
// lacks this node's record, or has an old one of it. The others publish theirs again.
func TestRule18_AStoreThatWentBack(t *testing.T) {
	a, b := rec("a", "10.1.0.0/16"), rec("b", "10.2.0.0/16")
	old := func(s *sim) core.Opened {
		r := s.m.View().Self.Record
		r.Sequence--
		return good(r)
	}
	for name, in := range map[string]func(s *sim) core.Records{
		"without this node's record": func(s *sim) core.Records { s.bare = true; return reset(good(a)) },
		"empty":                      func(s *sim) core.Records { s.bare = true; return reset() },
		"with an older revision":     func(s *sim) core.Records { return core.Records{Reset: true, Revision: 90, Put: []core.Opened{good(a)}} },
		"with an older record":       func(s *sim) core.Records { return reset(good(a), old(s)) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.step(announce())
			s.step(core.Records{Reset: true, Revision: 100, Put: []core.Opened{good(a), good(b)}})
			s.run(soon)
			s.step(announce("10.5.0.0/16")) // so that there is an older record of this node
			s.run(soon)
			s.take()
			back := in(s)
			if back.Revision == 0 {
				back.Revision = 100
			}
			s.step(back)
			s.bare = false
			s.run(4900 * time.Millisecond)
			s.wantCount(2)
			s.wantCondition(view.RegistryShrank, "", "")
			s.step(core.Records{Reset: true, Revision: 101}) // watching fails once more: it is no confirmation
			s.run(200 * time.Millisecond)
			s.wantCount(2)
			if s.relists != 1 {
				t.Errorf("%d second readings asked for", s.relists)
			}
			s.step(second(good(a))) // one is back: let us see who else is
			s.run(5100 * time.Millisecond)
			s.wantCount(2)
			if s.relists != 2 {
				t.Errorf("%d readings asked for", s.relists)
			}
			s.step(second(good(a)))
			s.run(soon)
			s.wantCount(1)
			s.wantNoCondition(view.RegistryShrank, "", "")
		})
	}
}

// Everyone back ends it at once, without another reading.
func TestRule18_AllAreBack(t *testing.T) {
	a := rec("a", "10.1.0.0/16")
	s := up(t, a)
	s.bare = true
	s.step(reset())
	s.bare = false
	s.wantCondition(view.RegistryShrank, "", "")
	s.step(put(good(a)))
	s.wantNoCondition(view.RegistryShrank, "", "")
	s.run(time.Minute)
	s.wantCount(1)
	if s.relists != 0 {
		t.Errorf("%d readings asked for", s.relists)
	}
}

// A node that was in the mesh before and starts with what it remembers sees by its record's absence that the
// store went back. A new one, or one whose registry takes longer to be found again, does not take it amiss.
func TestRule18_AStartWithAStoreThatWentBack(t *testing.T) {
	start := func(f func(*core.Config)) *sim {
		s := newSim(t, f)
		s.step(announce())
		s.step(core.Remembered{Put: []core.Opened{good(rec("a", "10.1.0.0/16"))}})
		s.run(soon)
		s.step(reset())
		s.run(soon)
		return s
	}
	s := start(func(c *core.Config) { c.Starts.Epoch, c.Rejoin = 3, 30*time.Second })
	s.wantCount(1)
	s.run(29 * time.Second)
	if s.relists != 0 {
		t.Error("the second reading comes before the others can be back")
	}
	s.run(2 * time.Second)
	if s.relists != 1 {
		t.Errorf("%d second readings asked for", s.relists)
	}
	start(func(*core.Config) {}).wantCount(0)
}
