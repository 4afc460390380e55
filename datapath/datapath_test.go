package datapath_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func state(t testing.TB, text string) datapath.State {
	t.Helper()
	s, err := datapathtest.ParseState(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func pub(name string) key.Public { return datapathtest.Key(name).Public() }

// Every reason is given, with the thing it is about, and no key is in it.
func TestCheck(t *testing.T) {
	good := `
		device key=me port=51820 mtu=1420
		addr 10.1.0.1
		peer b keepalive=25s 10.2.0.0/24
		route 10.2.0.0/24 from 10.1.0.1`
	if err := state(t, good).Check(); err != nil {
		t.Errorf("a good state: %v", err)
	}
	for _, c := range []struct {
		name   string
		change func(*datapath.State)
		says   string
	}{
		{"peers without a device", func(s *datapath.State) { s.Device = datapath.Device{} }, "without a device key"},
		{"mtu", func(s *datapath.State) { s.Device.MTU = 70000 }, "MTU 70000"},
		{"address is no host", func(s *datapath.State) { s.Addrs = prefixes.MustParse("10.1.0.0/24") }, "address 10.1.0.0/24"},
		{"own key", func(s *datapath.State) { s.Peers[pub("me")] = datapath.Peer{} }, "own key"},
		{"no key", func(s *datapath.State) { s.Peers[key.Public{}] = datapath.Peer{} }, "no public key"},
		{"keepalive", func(s *datapath.State) { s.Peers[pub("c")] = datapath.Peer{Keepalive: 500 * time.Millisecond} }, "keepalive 500ms"},
		{"two owners", func(s *datapath.State) {
			s.Peers[pub("c")] = datapath.Peer{Prefixes: prefixes.MustParse("10.2.0.0/24")}
		}, "prefix 10.2.0.0/24: with two peers"},
		{"route to nobody", func(s *datapath.State) { s.Routes[netip.MustParsePrefix("10.9.0.0/24")] = netip.Addr{} }, "route 10.9.0.0/24: no peer"},
		{"route with host bits", func(s *datapath.State) { s.Routes[netip.MustParsePrefix("10.2.0.1/24")] = netip.Addr{} }, "canonical is 10.2.0.0/24"},
		{"source of another family", func(s *datapath.State) {
			s.Routes[netip.MustParsePrefix("10.2.0.0/24")] = netip.MustParseAddr("fd00::1")
		}, "source address fd00::1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := state(t, good)
			c.change(&s)
			err := s.Check()
			if !errors.Is(err, datapath.ErrState) || !strings.Contains(fmt.Sprint(err), c.says) {
				t.Errorf("Check: %v, want ErrState that says %q", err, c.says)
			}
			if sync := datapath.Sync(t.Context(), memory.New(memory.Options{}), s); !errors.Is(sync, datapath.ErrState) {
				t.Errorf("Sync: %v", sync)
			}
		})
	}
}

func TestSync(t *testing.T) {
	d := memory.New(memory.Options{})
	want := state(t, "device key=me port=51820\npeer b 10.2.0.0/24\nroute 10.2.0.0/24")
	for range 2 {
		if err := datapath.Sync(t.Context(), d, want); err != nil {
			t.Fatal(err)
		}
	}
	if n := d.Writes(); n != 3 {
		t.Errorf("%d writes in two Syncs, want 3 in the first and none in the second", n)
	}
	// A device that says yes and does nothing is found out.
	err := datapath.Sync(t.Context(), deaf{d}, state(t, "device key=me port=51820\npeer c 10.2.0.0/24\nroute 10.2.0.0/24"))
	if err == nil || !strings.Contains(err.Error(), "did not take") {
		t.Errorf("a device that does nothing: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := datapath.Sync(t.Context(), d, want); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a closed device: %v", err)
	}
}

type deaf struct{ datapath.Datapath }

func (deaf) Apply(context.Context, ...datapath.Op) error { return nil }

// What an op relies on is in the doc of Each; here is each of its cases.
func TestEachSkips(t *testing.T) {
	set := prefixes.MustParse
	put := func(name string, ps ...string) datapath.Op {
		return datapath.PutPeer{Key: pub(name), Peer: datapath.Peer{Prefixes: set(ps...)}}
	}
	route := func(ps ...string) datapath.Op {
		var r datapath.AddRoutes
		for _, p := range ps {
			r.Routes = append(r.Routes, datapath.Route{Prefix: netip.MustParsePrefix(p)})
		}
		return r
	}
	dev := datapath.SetDevice{Device: datapath.Device{Key: datapathtest.Key("me")}}
	for _, c := range []struct {
		name string
		ops  []datapath.Op
		fail error  // of the first op
		want string // what is tried after it
	}{
		{"no device, nothing", []datapath.Op{dev, put("b", "10.2.0.0/24"), route("10.2.0.0/24")}, datapath.ErrNoDevice, ""},
		{"port taken, the rest goes on", []datapath.Op{dev, put("b", "10.2.0.0/24")}, datapath.ErrPortInUse, "put peer b + 10.2.0.0/24\n"},
		{"route of the peer that failed", []datapath.Op{put("b", "10.2.0.0/24"), route("10.2.0.0/24", "10.3.0.0/24")}, errBoom, "add routes 10.3.0.0/24\n"},
		{"peer whose prefix was to move", []datapath.Op{put("b", "10.2.0.0/24"), datapath.RemovePeer{Key: pub("c"), Prefixes: set("10.2.0.0/24")}}, errBoom, ""},
		{"peer of other prefixes", []datapath.Op{put("b", "10.2.0.0/24"), datapath.RemovePeer{Key: pub("c"), Prefixes: set("10.3.0.0/24")}}, errBoom, "remove peer c\n"},
		{"whole of which a half was to move", []datapath.Op{put("b", "10.2.0.0/25"), datapath.DropPrefixes{Key: pub("c"), Prefixes: set("10.2.0.0/24", "10.9.0.0/24")}}, errBoom, "drop prefixes of c - 10.9.0.0/24\n"},
		{"prefix still routed", []datapath.Op{datapath.RemoveRoutes{Prefixes: set("10.2.0.0/24")}, datapath.DropPrefixes{Key: pub("c"), Prefixes: set("10.2.0.0/24")}}, errBoom, ""},
		{"whole route of which a half was to be routed elsewhere", []datapath.Op{route("10.2.0.0/25"), datapath.RemoveRoutes{Prefixes: set("10.2.0.0/24", "10.5.0.0/24")}}, errBoom, "remove routes 10.5.0.0/24\n"},
		{"peer still routed to", []datapath.Op{datapath.RemoveRoutes{Prefixes: set("10.2.0.0/24")}, datapath.RemovePeer{Key: pub("c"), Prefixes: set("10.2.0.0/24")}}, errBoom, ""},
		{"address that may be a route's source", []datapath.Op{route("10.2.0.0/24"), datapath.RemoveAddrs{Addrs: set("10.1.0.1")}}, errBoom, ""},
		{"local prefix that was to be a peer's", []datapath.Op{put("b", "10.2.0.0/24"), datapath.RemoveLocal{Prefixes: set("10.2.0.0/24", "10.4.0.0/24")}}, errBoom, "remove local 10.4.0.0/24\n"},
		{"key before routes are gone", []datapath.Op{datapath.RemoveRoutes{Prefixes: set("10.2.0.0/24")}, dev}, errBoom, ""},
		{"another peer", []datapath.Op{put("b", "10.2.0.0/24"), put("c", "10.3.0.0/24")}, errBoom, "put peer c + 10.3.0.0/24\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var tried []datapath.Op
			first := true
			err := datapath.Each(t.Context(), c.ops, func(_ context.Context, op datapath.Op) error {
				if first {
					first = false
					return c.fail
				}
				tried = append(tried, op)
				return nil
			})
			if got := datapathtest.FormatOps(tried, "b", "c", "me"); got != c.want {
				t.Errorf("tried:\n%swant:\n%s", got, c.want)
			}
			for f := range datapath.Failures(err) {
				if !errors.Is(f, c.fail) {
					t.Errorf("%v: does not wrap the cause", f)
				}
			}
		})
	}
}

var errBoom = errors.New("boom")

func TestFailures(t *testing.T) {
	a := &datapath.OpError{Op: datapath.RemoveDevice{}, Err: errBoom}
	b := &datapath.OpError{Op: datapath.AddAddrs{}, Err: net.ErrClosed}
	got := slices.Collect(datapath.Failures(errors.Join(a, errors.Join(b), errBoom)))
	if len(got) != 3 || got[0] != a || got[1] != b || got[2].Op != nil || !errors.Is(got[2], errBoom) {
		t.Errorf("got %v", got)
	}
	if n := len(slices.Collect(datapath.Failures(nil))); n != 0 {
		t.Errorf("%d failures in nil", n)
	}
}

// Rule 22: no op, error or state prints a secret.
func TestRule22_OpsPrintNoSecret(t *testing.T) {
	priv, psk := datapathtest.Key("me"), datapathtest.Preshared("x")
	s := state(t, "device key=me port=51820\npeer b psk=x 10.2.0.0/24")
	ops := datapath.Plan(s, datapath.State{})
	for _, v := range []any{s, ops, &datapath.OpError{Op: ops[0], Err: errBoom}, datapath.NewModel(s)} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			text := fmt.Sprintf(verb, v)
			for _, secret := range []string{priv.Base64(), psk.Base64(), fmt.Sprintf("%x", priv.Bytes()), fmt.Sprintf("%x", psk.Bytes())} {
				if strings.Contains(text, secret) {
					t.Errorf("%s of %T shows a secret", verb, v)
				}
			}
		}
	}
}
