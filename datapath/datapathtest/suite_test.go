package datapathtest_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bug is one way in which a datapath breaks its contract, and the case that has to find it.
type bug struct {
	name, caughtBy string
	apply          func(d *memory.Device, ctx context.Context, ops []datapath.Op) error
	read           func(s *datapath.State)
}

// each changes the ops one by one.
func each(f func(d *memory.Device, op datapath.Op) []datapath.Op) func(*memory.Device, context.Context, []datapath.Op) error {
	return func(d *memory.Device, ctx context.Context, ops []datapath.Op) error {
		var all []datapath.Op
		for _, op := range ops {
			all = append(all, f(d, op)...)
		}
		return d.Apply(ctx, all...)
	}
}

var bugs = []bug{
	{name: "none"},
	{name: "a put replaces the peer's prefixes", caughtBy: "GivesNothingBack|StealsPrefix|LearnedEndpointStays|RandomStates|ReadWhileApplying|Scenarios",
		apply: each(func(d *memory.Device, op datapath.Op) []datapath.Op {
			if o, ok := op.(datapath.PutPeer); ok {
				s, _ := d.Read(context.Background())
				return []datapath.Op{datapath.DropPrefixes{Key: o.Key, Prefixes: s.Peers[o.Key].Prefixes}, op}
			}
			return []datapath.Op{op}
		})},
	{name: "a drop takes all of the peer's prefixes", caughtBy: "DropOnePrefix",
		apply: each(func(d *memory.Device, op datapath.Op) []datapath.Op {
			if o, ok := op.(datapath.DropPrefixes); ok {
				s, _ := d.Read(context.Background())
				return []datapath.Op{datapath.DropPrefixes{Key: o.Key, Prefixes: s.Peers[o.Key].Prefixes}}
			}
			return []datapath.Op{op}
		})},
	{name: "a dropped prefix of an unknown peer makes the peer", caughtBy: "DropOnePrefix",
		apply: each(func(_ *memory.Device, op datapath.Op) []datapath.Op {
			if o, ok := op.(datapath.DropPrefixes); ok {
				return []datapath.Op{datapath.PutPeer{Key: o.Key}, op}
			}
			return []datapath.Op{op}
		})},
	{name: "a bad keepalive is taken as none", caughtBy: "Keepalive",
		apply: each(func(_ *memory.Device, op datapath.Op) []datapath.Op {
			if o, ok := op.(datapath.PutPeer); ok && datapath.CheckKeepalive(o.Peer.Keepalive) != nil {
				o.Peer.Keepalive = 0
				return []datapath.Op{o}
			}
			return []datapath.Op{op}
		})},
	{name: "a preshared key is never taken away", caughtBy: "Preshared",
		apply: each(func(d *memory.Device, op datapath.Op) []datapath.Op {
			if o, ok := op.(datapath.PutPeer); ok && o.Peer.Preshared.IsZero() {
				s, _ := d.Read(context.Background())
				o.Peer.Preshared = s.Peers[o.Key].Preshared
				return []datapath.Op{o}
			}
			return []datapath.Op{op}
		})},
	{name: "the own key is swallowed", caughtBy: "OwnKey",
		apply: each(func(d *memory.Device, op datapath.Op) []datapath.Op {
			s, _ := d.Read(context.Background())
			if o, ok := op.(datapath.PutPeer); ok && s.Device.Exists() && o.Key == s.Device.Key.Public() {
				return nil
			}
			return []datapath.Op{op}
		})},
	{name: "it stops at the first error", caughtBy: "NoDevice|BadOpAlone|PortTaken|OwnKey|ContextEnded",
		apply: func(d *memory.Device, ctx context.Context, ops []datapath.Op) error {
			for _, op := range ops {
				if err := d.Apply(ctx, op); err != nil {
					return err
				}
			}
			return nil
		}},
	{name: "what relies on a failed op is done all the same", caughtBy: "BadOpAlone",
		apply: func(d *memory.Device, ctx context.Context, ops []datapath.Op) error {
			var errs []error
			for _, op := range ops {
				errs = append(errs, d.Apply(ctx, op))
			}
			return errors.Join(errs...)
		}},
	{name: "a taken port is just an error", caughtBy: "PortTaken",
		apply: func(d *memory.Device, ctx context.Context, ops []datapath.Op) error {
			if err := d.Apply(ctx, ops...); err != nil {
				if errors.Is(err, datapath.ErrPortInUse) {
					return errors.New("something went wrong")
				}
				return err
			}
			return nil
		}},
	{name: "the context is not minded", caughtBy: "ContextEnded",
		apply: func(d *memory.Device, _ context.Context, ops []datapath.Op) error {
			return d.Apply(context.Background(), ops...)
		}},
	{name: "after Close it says yes", caughtBy: "Close",
		apply: func(d *memory.Device, ctx context.Context, ops []datapath.Op) error {
			if err := d.Apply(ctx, ops...); err != nil && !errors.Is(err, net.ErrClosed) {
				return err
			}
			return nil
		}},
	{name: "a new key is not taken", caughtBy: "DeviceKey|RandomStates|Scenarios",
		apply: each(func(d *memory.Device, op datapath.Op) []datapath.Op {
			s, _ := d.Read(context.Background())
			if o, ok := op.(datapath.SetDevice); ok && s.Device.Exists() {
				o.Device.Key = s.Device.Key
				return []datapath.Op{o}
			}
			return []datapath.Op{op}
		})},
	{name: "a route's source is never changed", caughtBy: "Routes|RandomStates",
		apply: each(func(d *memory.Device, op datapath.Op) []datapath.Op {
			o, ok := op.(datapath.AddRoutes)
			if !ok {
				return []datapath.Op{op}
			}
			s, _ := d.Read(context.Background())
			o.Routes = slices.DeleteFunc(slices.Clone(o.Routes), func(r datapath.Route) bool { _, there := s.Routes[r.Prefix]; return there })
			return []datapath.Op{o}
		})},
	{name: "the port reads as 0", caughtBy: "Create", read: func(s *datapath.State) { s.Device.ListenPort = 0 }},
	{name: "it does not say what it is", caughtBy: "NoDevice|Create", read: func(s *datapath.State) { s.Host.Driver = "" }},
	{name: "two problems are about one thing", caughtBy: "NoDevice|Create", read: func(s *datapath.State) {
		s.Problems = []datapath.Problem{{Subject: "mtu", Message: "too small"}, {Subject: "mtu", Message: "not known"}}
	}},
	{name: "routes outlive the device", caughtBy: "RemoveAndCreate|NoDevice|Twice", read: func(s *datapath.State) {
		if !s.Device.Exists() {
			s.Routes = map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.2.0.0/24"): {}}
		}
	}},
	{name: "local prefixes are merged", caughtBy: "Local|RandomStates", read: func(s *datapath.State) {
		if s.Local.Len() > 1 {
			s.Local = prefixes.Must(s.Local.At(0))
		}
	}},
	{name: "a removed peer stays in the stats", caughtBy: "RandomStates", read: func(s *datapath.State) {
		if s.Device.Exists() {
			s.Stats[datapathtest.Key("ghost").Public()] = datapath.Stats{}
		}
	}},
}

type broken struct {
	*memory.Device
	bug bug
}

func (b *broken) Apply(ctx context.Context, ops ...datapath.Op) error {
	if b.bug.apply == nil {
		return b.Device.Apply(ctx, ops...)
	}
	return b.bug.apply(b.Device, ctx, ops)
}

func (b *broken) Read(ctx context.Context) (datapath.State, error) {
	s, err := b.Device.Read(ctx)
	if err == nil && b.bug.read != nil {
		b.bug.read(&s)
	}
	return s, err
}

const planted = "DATAPATHTEST_BUG"

// TestBroken is run by TestSuiteFindsBugs in a process of its own, where it has to fail.
func TestBroken(t *testing.T) {
	i := slices.IndexFunc(bugs, func(b bug) bool { return b.name == os.Getenv(planted) })
	if i < 0 {
		t.SkipNow() // nothing is planted
	}
	var net *memory.Network
	datapathtest.Run(t, datapathtest.Harness{
		New: func(testing.TB) datapath.Datapath {
			net = memory.NewNetwork()
			return &broken{memory.New(memory.Options{Network: net}), bugs[i]}
		},
		Occupy: func(_ testing.TB, port uint16) func() {
			return net.Occupy(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port))
		},
		Lacks: []datapathtest.Lack{datapathtest.Outsider},
	})
}

// A suite that passes everything shows nothing: each bug has to be found, and by a case about it.
func TestSuiteFindsBugs(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range bugs {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(exe, "-test.run=^TestBroken$", "-test.v", "-rapid.nofailfile")
			cmd.Env = append(os.Environ(), planted+"="+b.name)
			out, err := cmd.CombinedOutput()
			if b.caughtBy == "" {
				if err != nil {
					t.Errorf("without a bug: %v\n%s", err, out)
				}
				return
			}
			var failed []string
			for line := range strings.Lines(string(out)) {
				if _, name, ok := strings.Cut(line, "    --- FAIL: TestBroken/"); ok {
					failed = append(failed, strings.Fields(name)[0])
				}
			}
			caught := slices.ContainsFunc(failed, func(name string) bool {
				return slices.Contains(strings.Split(b.caughtBy, "|"), name)
			})
			if err == nil || !caught {
				t.Errorf("not found by %s; failed: %v, %v", b.caughtBy, failed, err)
			}
		})
	}
}

// What a scenario says of a key is the key, everywhere.
func TestFormatOps(t *testing.T) {
	s, err := datapathtest.ParseState("device key=me\npeer b psk=x keepalive=25s endpoint=192.0.2.1:1 10.2.0.0/24")
	if err != nil {
		t.Fatal(err)
	}
	got := datapathtest.FormatOps(datapath.Plan(s, datapath.State{}), "me", "b")
	want := "set device key=me\nput peer b endpoint=192.0.2.1:1 preshared keepalive=25s + 10.2.0.0/24\n"
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for _, bad := range []string{"peer b 10.0.0.0/33", "wire x", "device key=me port=70000", "route 10.0.0.0", "peer b endpoint=x"} {
		if _, err := datapathtest.ParseState(bad); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", bad)) {
			t.Errorf("%q: %v, want an error that names the line", bad, err)
		}
	}
}
