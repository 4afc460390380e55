package memory_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDatapath(t *testing.T) {
	nets := map[datapath.Datapath]*memory.Network{}
	var last *memory.Network
	datapathtest.Run(t, datapathtest.Harness{
		New: func(testing.TB) datapath.Datapath {
			last = memory.NewNetwork()
			d := memory.New(memory.Options{Network: last})
			nets[d] = last
			return d
		},
		Occupy: func(_ testing.TB, port uint16) func() {
			return last.Occupy(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port))
		},
		Outside: func(t testing.TB, d datapath.Datapath, op datapath.Op) {
			if err := d.(*memory.Device).Drift(op); err != nil {
				t.Fatal(err)
			}
		},
		Checks: 500,
	})
}

// pair returns two devices that know each other.
func pair(t *testing.T, psk [2]string) (a, b *memory.Device) {
	n := memory.NewNetwork()
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	a = memory.New(memory.Options{Network: n, Addrs: addrs[:1]})
	b = memory.New(memory.Options{Network: n, Addrs: addrs[1:]})
	put := func(d *memory.Device, self, other, psk string, at netip.Addr, prefix string) {
		err := d.Apply(t.Context(),
			datapath.SetDevice{Device: datapath.Device{Key: datapathtest.Key(self), ListenPort: 51820}},
			datapath.PutPeer{Key: datapathtest.Key(other).Public(), Peer: datapath.Peer{
				Endpoint: netip.AddrPortFrom(at, 51820), Preshared: datapathtest.Preshared(psk), Prefixes: prefixes.MustParse(prefix)}})
		if err != nil {
			t.Fatal(err)
		}
	}
	put(a, "a", "b", psk[0], addrs[1], "10.2.0.0/24")
	put(b, "b", "a", psk[1], addrs[0], "10.1.0.0/24")
	return a, b
}

func TestHandshake(t *testing.T) {
	a, b := pair(t, [2]string{"x", "x"})
	if a.Stats()[datapathtest.Key("b").Public()].LastHandshake.IsZero() || b.Stats()[datapathtest.Key("a").Public()].LastHandshake.IsZero() {
		t.Error("the later learner's greeting was not answered")
	}
	if to, ok := a.Send(netip.MustParseAddr("10.2.0.9")); !ok || to != datapathtest.Key("b").Public() {
		t.Errorf("packet went to %v, arrived %v", to, ok)
	}
	if _, ok := a.Send(netip.MustParseAddr("10.3.0.9")); ok {
		t.Error("a packet without an owner arrived")
	}
}

func TestNoHandshakeWithAnotherPresharedKey(t *testing.T) {
	a, _ := pair(t, [2]string{"x", "y"})
	if _, ok := a.Send(netip.MustParseAddr("10.2.0.9")); ok {
		t.Error("it arrived")
	}
	if s := a.Stats()[datapathtest.Key("b").Public()]; s.Sent == 0 || !s.LastHandshake.IsZero() {
		t.Errorf("stats are %+v, want attempts and no handshake", s)
	}
}

func TestFaults(t *testing.T) {
	d := memory.New(memory.Options{})
	boom := errors.New("boom")
	d.FailOp(2, boom)
	put := func(name, prefix string) datapath.Op {
		return datapath.PutPeer{Key: datapathtest.Key(name).Public(), Peer: datapath.Peer{Prefixes: prefixes.MustParse(prefix)}}
	}
	err := d.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{Key: datapathtest.Key("a")}}, put("b", "10.2.0.0/24"), put("c", "10.3.0.0/24"))
	if !errors.Is(err, boom) || d.Writes() != 2 || len(d.TakeLog()) != 3 {
		t.Errorf("error %v, %d writes", err, d.Writes())
	}
}

// What is around the device is what it was told, and reported as a change from outside.
func TestAround(t *testing.T) {
	d := memory.New(memory.Options{})
	read := func() datapath.State {
		t.Helper()
		s, err := d.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	changed := func(what string) {
		t.Helper()
		select {
		case <-d.Changed():
		default:
			t.Errorf("%s is no change", what)
		}
	}
	if s := read(); s.Host.Driver != "memory" || !s.Host.IPv4 || !s.Host.IPv6 || len(s.Problems) > 0 {
		t.Errorf("at first: host %+v, problems %v", s.Host, s.Problems)
	}
	h := datapath.Host{IPv4: true, Driver: "mine", Instead: "there is no better one"}
	d.SetHost(h)
	changed("another host")
	if got := read().Host; got != h {
		t.Errorf("host is %+v, want %+v", got, h)
	}
	ps := []datapath.Problem{{Subject: "mtu", Message: "1280 is too small", Remedy: "raise it"}, {Subject: "rp_filter of eth0", Message: "is strict"}}
	d.SetProblems(ps...)
	changed("a problem")
	if err := d.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{Key: datapathtest.Key("a")}}, datapath.RemoveDevice{}); err != nil {
		t.Fatal(err)
	}
	got := read().Problems
	if !slices.Equal(got, ps) {
		t.Errorf("problems are %v, want %v", got, ps)
	}
	got[0].Subject, ps[1].Subject = "scribbled", "scribbled"
	if got := read().Problems; got[0].Subject != "mtu" || got[1].Subject != "rp_filter of eth0" {
		t.Errorf("what a caller writes to its own is read back: %v", got)
	}
	d.SetProblems()
	changed("the end of problems")
	if got := read().Problems; len(got) > 0 {
		t.Errorf("there are still %v", got)
	}
}

func TestSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := memory.New(memory.Options{})
		d.Slow(time.Second)
		start := time.Now()
		if err := d.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{Key: datapathtest.Key("a")}}, datapath.AddAddrs{Addrs: prefixes.MustParse("10.0.0.1")}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != 2*time.Second {
			t.Errorf("two ops took %v", took)
		}
	})
}

func ExampleNew() {
	d := memory.New(memory.Options{})
	defer d.Close()
	want, err := datapathtest.ParseState(`
		device key=me port=51820
		peer b endpoint=192.0.2.2:51820 10.2.0.0/24
		route 10.2.0.0/24`)
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	if err := datapath.Sync(ctx, d, want); err != nil {
		panic(err)
	}
	have, _ := d.Read(ctx)
	fmt.Println(len(have.Peers), "peer on port", have.Device.ListenPort)
	// Output: 1 peer on port 51820
}
