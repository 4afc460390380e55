package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/memory"
	"github.com/warren-mesh/warren/mesh/registry/registrytest"
	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
)

// Every datapath that can be configured can be opened, or says what is missing, and the way out. With auto there is
// one everywhere.
func TestCarriers(t *testing.T) {
	for _, name := range config.Datapaths() {
		args := []string{"--registry", "memory", "--node", "alpha", "--state", "none", "--datapath", name}
		if name != "netstack" {
			args = append(args, "--interface", "wrn-carrier")
		}
		d, chosen, err := openCarrier(loaded(t, args...), nil, new(agent), slog.New(slog.DiscardHandler))
		switch {
		case err == nil:
			if chosen != name && name != "auto" {
				t.Errorf("%s: %s is chosen", name, chosen)
			}
			if err := d.Close(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		case name != "kernel" && name != "tun":
			t.Errorf("%s: %v", name, err)
		case !strings.Contains(err.Error(), "--datapath netstack") || strings.Contains(err.Error(), "\n"):
			t.Errorf("%s: %v", name, err)
		}
	}
}

func guarded(r *memory.Registry, mesh string) *guard {
	return &guard{store: alone{r}, mesh: mesh, where: "somewhere", founds: true}
}

// Of its own mesh, a guard is a registry as any other.
func TestGuardIsARegistry(t *testing.T) {
	on := func(r registry.Registry) *memory.Registry { return r.(*guard).store.(alone).Registry }
	registrytest.Run(t, registrytest.Harness{
		New: func(testing.TB) registry.Registry { return guarded(memory.New(), "blue") },
		Outage: func(_ testing.TB, r registry.Registry) (registry.Registry, func()) {
			on(r).Cut()
			return guarded(on(r).Handle(), "blue"), on(r).Heal
		},
		Gap: func(_ testing.TB, r registry.Registry) (registry.Registry, func()) {
			on(r).Cut()
			return guarded(on(r).Handle(), "blue"), func() { on(r).Compact(); on(r).Heal() }
		},
		Backup: func(_ testing.TB, r registry.Registry) func() {
			s := on(r).Snapshot()
			return func() { on(r).Restore(s) }
		},
		Entries: 100, Updates: 100, Joins: 5,
	})
}

// Of another mesh it lets nothing in or out.
func TestGuard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		r := memory.New()
		e := registry.Entry{ID: "node/a", Data: []byte("x")}
		if err := guarded(r, "blue").Put(ctx, e); err != nil {
			t.Fatal(err)
		}
		var told error
		g := guarded(r, "red")
		g.foreign = func(err error) { told = err }
		want := `somewhere is that of mesh "blue", and this node is of mesh "red"; say --mesh=blue`
		for what, err := range map[string]error{"put": g.Put(ctx, registry.Entry{ID: "node/b"}), "delete": g.Delete(ctx, e.ID)} {
			if !errors.Is(err, errOtherMesh) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v", what, err)
			}
		}
		for b, err := range g.Watch(ctx, registry.KindNode) {
			if !errors.Is(err, errOtherMesh) {
				t.Errorf("got %+v and %v", b, err)
			}
			break
		}
		if !errors.Is(told, errOtherMesh) {
			t.Errorf("nobody was told: %v", told)
		}
		var s registry.State
		for b := range r.Watch(t.Context(), registry.KindNode) {
			s.Apply(b)
			break
		}
		if got := s.IDs(); !slices.Equal(got, []string{"node/a"}) {
			t.Errorf("the registry has %q", got)
		}
	})
}

// Where the registry cannot be reached, that is what is said, and it is looked at before anything else is
// done. What becomes of the mark later is found out at the next Reset.
func TestGuardLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		r := memory.New()
		h := r.Handle()
		h.Cut()
		g := guarded(h, "red")
		var told error
		g.foreign = func(err error) { told = err; cancel() }
		if err := g.Put(ctx, registry.Entry{ID: "node/a"}); !errors.Is(err, memory.ErrCut) || told != nil {
			t.Errorf("got %v", err)
		}
		h.Heal()
		if err := g.Put(ctx, registry.Entry{ID: "node/a"}); err != nil {
			t.Error(err)
		}
		resets := 0
		for b, err := range g.Watch(ctx, registry.KindNode) {
			if err != nil {
				t.Error(err)
				continue
			}
			if !b.Reset {
				continue
			}
			switch resets++; resets {
			case 1: // the mark is lost, as in a backup of before, and put again
				if _, ok, err := r.Swap(ctx, "mesh/name", []byte("red"), nil); !ok || err != nil {
					t.Fatal(err)
				}
				r.Compact()
			case 2: // another mesh is there
				if _, ok, err := r.Swap(ctx, "mesh/name", []byte("red"), []byte("green")); !ok || err != nil {
					t.Fatal(err)
				}
				r.Compact()
			}
		}
		if resets != 2 || !errors.Is(told, errOtherMesh) || !strings.Contains(told.Error(), `of mesh "green"`) {
			t.Errorf("%d resets, and then %v", resets, told)
		}
	})
}

// moving is a store that reload has be another one.
type moving struct {
	alone
	to *memory.Registry
}

func (m *moving) reload(config.Config) error { m.alone = alone{m.to}; return nil }
func (m *moving) check(config.Config) error  { return nil }

// A reload to a registry that is another mesh's is refused; to one that is not seen it is not, and then nothing
// goes in before it is. What is under way is done again, in the new one.
func TestGuardReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		first, second, foreign := memory.New(), memory.New(), memory.New()
		m := &moving{alone: alone{first}}
		g := guarded(first, "blue")
		g.store = m
		g.open = func(config.Config) (store, error) { return alone{m.to}, nil }
		var told error
		g.foreign = func(err error) { told = err }
		has := func(r *memory.Registry) (ids []string) {
			for b := range r.Handle().Watch(ctx, registry.KindNode) {
				for _, e := range b.Put {
					ids = append(ids, e.ID)
				}
				break
			}
			return ids
		}
		to := func(r *memory.Registry) (unseen, err error) {
			m.to = r
			return g.reload(ctx, config.Config{Registry: "etcd://" + map[*memory.Registry]string{second: "second", foreign: "foreign"}[r] + ":1"})
		}
		if err := g.Put(ctx, registry.Entry{ID: "node/a"}); err != nil {
			t.Fatal(err)
		}
		if err := guarded(foreign, "red").Put(ctx, registry.Entry{ID: "node/r"}); err != nil {
			t.Fatal(err)
		}
		if _, err := to(foreign); !errors.Is(err, errOtherMesh) || !strings.Contains(err.Error(), "etcd://foreign:1 is that") || g.at() != "somewhere" || told != nil {
			t.Errorf("got %v, it is at %s and told %v", err, g.at(), told)
		}

		first.SetDelay(func(string, string) time.Duration { return time.Hour })
		done := make(chan error, 1)
		go func() { done <- g.Put(ctx, registry.Entry{ID: "node/b"}) }()
		synctest.Wait()
		if unseen, err := to(second); unseen != nil || err != nil || g.at() != "etcd://second:1" {
			t.Errorf("got %v and %v, it is at %s", unseen, err, g.at())
		}
		if err := <-done; err != nil || !slices.Equal(has(second), []string{"node/b"}) {
			t.Errorf("got %v, the second has %q", err, has(second))
		}

		cut := foreign.Handle()
		cut.Cut()
		m.to = cut
		start := time.Now()
		unseen, err := g.reload(ctx, config.Config{Registry: "etcd://cut:1"})
		if !errors.Is(unseen, memory.ErrCut) || err != nil || time.Since(start) != lookFor {
			t.Errorf("got %v and %v after %v", unseen, err, time.Since(start))
		}
		if err := g.Put(ctx, registry.Entry{ID: "node/c"}); !errors.Is(err, memory.ErrCut) || told != nil {
			t.Errorf("got %v, told %v", err, told)
		}
		cut.Heal()
		if err := g.Put(ctx, registry.Entry{ID: "node/c"}); !errors.Is(err, errOtherMesh) || !errors.Is(told, errOtherMesh) || !strings.Contains(told.Error(), "etcd://cut:1 is that of mesh \"red\"") {
			t.Errorf("got %v, told %v", err, told)
		}
		if got := has(foreign); !slices.Equal(got, []string{"node/r"}) {
			t.Errorf("it has %q", got)
		}
	})
}

// Who may not write the mark can be of a mesh that has one.
func TestGuardReadsFirst(t *testing.T) {
	ctx := t.Context()
	r := memory.New()
	if err := guarded(r, "blue").Put(ctx, registry.Entry{ID: "node/a"}); err != nil {
		t.Fatal(err)
	}
	refuse := errors.New("permission denied")
	h := r.Handle()
	h.SetFault(func(op, _ string) error {
		if op == memory.OpSwap {
			return refuse
		}
		return nil
	})
	if err := guarded(h, "blue").Put(ctx, registry.Entry{ID: "node/b"}); err != nil {
		t.Error(err)
	}
	if err := guarded(h, "red").Put(ctx, registry.Entry{ID: "node/b"}); !errors.Is(err, errOtherMesh) {
		t.Errorf("got %v", err)
	}
	h = memory.New()
	g := guarded(h, "blue")
	g.founds = false
	if err := g.Put(ctx, registry.Entry{ID: "node/b"}); !errors.Is(err, errNoMesh) {
		t.Errorf("got %v", err)
	}
	h.SetFault(func(op, _ string) error { return map[string]error{memory.OpSwap: refuse}[op] })
	if err := guarded(h, "blue").Put(ctx, registry.Entry{ID: "node/b"}); !errors.Is(err, refuse) {
		t.Errorf("got %v", err)
	}
}

// The descriptors of all clients together are a part of those that there are.
func TestShare(t *testing.T) {
	if got := share(1, 1); got != 1 {
		t.Errorf("got %d", got)
	}
	n := descriptors()
	if got := share(1, 1<<30); n == 0 && got != 1<<30 || n > 0 && uint64(got) != min(max(n/4, 1), 1<<30) {
		t.Errorf("of %d: got %d", n, got)
	}
}

func testView() view.View {
	k := func(b byte) key.Public {
		p, err := key.PublicFromBytes(bytes.Repeat([]byte{b}, key.Size))
		if err != nil {
			panic(err)
		}
		return p
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return view.View{
		Ready: true,
		Self: view.Self{
			Node: "alpha", Key: k(1), ListenPort: 51820, MTU: 1420, Published: true, Local: prefixes.MustParse("fd00::1/128", "10.9.0.0/16"),
			Record: record.Record{ID: "alpha", Addresses: prefixes.MustParse("fd00::1/128"), Endpoints: []record.Endpoint{{Host: "vpn.example.org", Port: 7}}},
		},
		Peers: []view.Peer{
			{Node: "beta", Key: k(2), Addresses: prefixes.MustParse("10.80.0.2/32", "fd00::2/128"), Prefixes: prefixes.MustParse("10.80.0.2/32", "fd00::2/128"),
				Endpoint: netip.MustParseAddrPort("192.0.2.2:51820"), LastHandshake: now.Add(-75 * time.Second), Received: 999, Sent: 12_345_678, Labels: map[string]string{"zone": "west", "a": "b"}, Roles: []string{"edge"}},
			{Node: "beta.warren", Key: k(3), Addresses: prefixes.MustParse("fd00::3/128"), Prefixes: prefixes.MustParse("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "fd00::3/128"), LastHandshake: now.Add(-50 * time.Hour)},
			{Node: "gamma", Key: k(4)},
			{Node: "kappa", Key: k(2), Addresses: prefixes.MustParse("fd00::4/128"), SetAside: true},
		},
		Conditions: []view.Condition{{Kind: view.KeyConflict, Node: "kappa", Subject: "key", Since: now.Add(-time.Hour), Message: "its key is beta's", Remedy: "give it another"}},
	}
}

func TestLookup(t *testing.T) {
	own := []netip.Addr{netip.MustParseAddr("fd00::1")}
	for host, want := range map[string]string{
		"beta": "10.80.0.2 fd00::2", "BETA.": "10.80.0.2 fd00::2", "alpha": "fd00::1", "alpha.warren": "fd00::1", "gamma.warren": "node gamma has no address in the mesh",
		"beta.warren": "fd00::3", "beta.warren.warren": "fd00::3", // a node of that name goes first
		"10.0.0.1": "10.0.0.1", "[fd00::9]": "fd00::9", "::ffff:10.0.0.1": "10.0.0.1", "kappa": "fd00::4",
		"bteta": `no node is called "bteta", did you mean "beta"?`, "example.org": `no node is called "example.org"`, "": `no node is called ""`,
	} {
		as, err := lookup(testView(), own, "warren", host)
		got := join(as)
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%q: got %s, want %s", host, got, want)
		}
	}
	if _, err := lookup(view.View{}, nil, "warren", "x"); err == nil || !strings.Contains(err.Error(), "has not been read yet") {
		t.Errorf("got %v", err)
	}
}

func TestTable(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	p := control.Process{PID: 7, Build: "warren x", Started: now.Add(-time.Minute), Mesh: "warren", Registry: "etcd://h:1", Datapath: "kernel", Interface: "warren0", Expose: []string{"80=a:1"}}
	s := control.StatusOf(p, testView(), now)
	var b strings.Builder
	if err := table(&b, s, now, false); err != nil {
		t.Fatal(err)
	}
	want := `node       alpha of mesh warren, published
addresses  fd00::1
announces  10.9.0.0/16 fd00::1/128
endpoints  vpn.example.org:7
registry   etcd://h:1
datapath   kernel, interface warren0
exposes    80=a:1

PEER         STATE      REACHES                   ENDPOINT         HANDSHAKE  RECEIVED  SENT
beta         up         10.80.0.2/32 fd00::2/128  192.0.2.2:51820  1m15s ago  999 B     12.3 MB
beta.warren  idle       10.1.0.0/16 and 3 more    -                2d2h ago   0 B       0 B
gamma        new        -                         -                never      0 B       0 B
kappa        set-aside  fd00::4                   -                never      0 B       0 B

wrong now:
  key-conflict kappa key, for 1h0m
      its key is beta's
      -> give it another
`
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	if err := table(&b, s, now, true); err != nil || !strings.Contains(b.String(), "a=b,zone=west") || !strings.Contains(b.String(), "agent      process 7 since 1m0s, warren x") {
		t.Errorf("got %v and\n%s", err, b.String())
	}
	// What carries the packets is what the device says, once it was read; and so is what it finds wrong.
	v := testView()
	v.Self.Datapath, v.Self.Instead = "tun", "the kernel has no WireGuard\nnor the right to load it"
	v.Conditions = []view.Condition{{Kind: view.HostProblem, Node: "alpha", Subject: "rp_filter of eth0", Since: now.Add(-time.Minute), Message: "it is strict", Remedy: "set it to 2"}}
	b.Reset()
	if err := table(&b, control.StatusOf(p, v, now), now, false); err != nil ||
		!strings.Contains(b.String(), "\ndatapath   tun, interface warren0\n           no better one: the kernel has no WireGuard; nor the right to load it\nexposes ") ||
		!strings.HasSuffix(b.String(), "wrong now:\n  host-problem alpha rp_filter of eth0, for 1m0s\n      it is strict\n      -> set it to 2\n") {
		t.Errorf("got %v and\n%s", err, b.String())
	}
	b.Reset()
	if err := table(&b, control.StatusOf(p, view.View{Self: view.Self{Node: "alpha"}}, now), now, false); err != nil ||
		!strings.Contains(b.String(), "alpha of mesh warren, not published yet, waiting for the registry and the device\naddresses  -\n") || !strings.Contains(b.String(), "\nno peers\n") {
		t.Errorf("of nothing: got %v and\n%s", err, b.String())
	}
}

func TestPing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := 0
		var out bytes.Buffer
		p := pinger{to: "beta", count: 4, interval: time.Second, wait: time.Second, out: &out, ask: func(context.Context) (control.Pong, error) {
			n++
			if n == 2 {
				return control.Pong{}, &control.Error{Code: control.NoAnswer, Message: "nothing"}
			}
			return control.Pong{Addr: netip.MustParseAddr("fd00::2"), RTT: time.Duration(n) * time.Millisecond}, nil
		}}
		start := time.Now()
		if err := p.run(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(start); took != 3*time.Second {
			t.Errorf("it took %v", took)
		}
		want := `beta (fd00::2): seq=1 time=1.00 ms
beta: seq=2 no answer: nothing
beta (fd00::2): seq=3 time=3.00 ms
beta (fd00::2): seq=4 time=4.00 ms

4 sent, 3 answered, 1 lost (25.0 %)
rtt min 1.00 ms, avg 2.67 ms, max 4.00 ms
`
		if out.String() != want {
			t.Errorf("got\n%s\nwant\n%s", out.String(), want)
		}
		// Without a count it goes on until it is interrupted.
		ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
		defer cancel()
		n = 10
		q := p
		q.count, q.sent, q.came, q.sum = 0, 0, 0, 0
		if err := q.run(ctx); err != nil || q.sent != 3 {
			t.Errorf("%d sent, %v", q.sent, err)
		}
		// Nothing that comes back is a failure, and one that is no use to repeat ends it at once.
		p = pinger{to: "beta", count: 2, out: &out, wait: 1, ask: func(context.Context) (control.Pong, error) {
			return control.Pong{}, &control.Error{Code: control.NoAnswer, Message: "nothing"}
		}}
		if err := p.run(t.Context()); !errors.Is(err, errNoAnswer) {
			t.Errorf("got %v", err)
		}
		gone := errors.New("gone")
		p = pinger{to: "beta", out: &out, wait: 1, ask: func(context.Context) (control.Pong, error) { return control.Pong{}, gone }}
		if err := p.run(t.Context()); err != gone {
			t.Errorf("got %v", err)
		}
	})
}

func TestText(t *testing.T) {
	for n, want := range map[uint64]string{0: "0 B", 999: "999 B", 1000: "1.0 kB", 999_949: "999.9 kB", 999_951: "1.0 MB", 1e18: "1000.0 PB"} {
		if got := size(n); got != want {
			t.Errorf("%d: got %s, want %s", n, got, want)
		}
	}
	now := time.Now()
	for d, want := range map[time.Duration]string{-time.Second: "0s", 59 * time.Second: "59s", 61 * time.Second: "1m1s", 25 * time.Hour: "25h0m", 49 * time.Hour: "2d1h"} {
		if got := ago(now, now.Add(-d)); got != want {
			t.Errorf("%v: got %s, want %s", d, got, want)
		}
	}
}

// The exit status that a failure has is what the help says.
func TestExitCodes(t *testing.T) {
	for code, line := range strings.Split(exitCodes, "\n")[:6] {
		if !strings.HasPrefix(line, string(rune('0'+code))+"  ") {
			t.Errorf("the help has %q for %d", line, code)
		}
	}
	for want, err := range map[int]error{exitFailed: errors.New("x"), exitUsage: &usageError{errors.New("x")}, exitNotRunning: control.ErrNotRunning, exitState: errState, exitOtherMesh: errOtherMesh} {
		if got := exitCode(errors.Join(errors.New("y"), err)); got != want {
			t.Errorf("%v: got %d, want %d", err, got, want)
		}
	}
	if got := exitCode(config.ErrConfig); got != exitUsage {
		t.Errorf("got %d", got)
	}
}
