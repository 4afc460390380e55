package wggo

import (
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// idle is a tun.Device without packets.
type idle struct {
	events chan tun.Event
	closed chan struct{}
}

func newIdle() *idle { return &idle{make(chan tun.Event), make(chan struct{})} }

func (d *idle) Read([][]byte, []int, int) (int, error)       { <-d.closed; return 0, os.ErrClosed }
func (d *idle) Write(bufs [][]byte, offset int) (int, error) { return len(bufs), nil }
func (d *idle) File() *os.File                               { return nil }
func (d *idle) MTU() (int, error)                            { return 1420, nil }
func (d *idle) Name() (string, error)                        { return "idle", nil }
func (d *idle) Events() <-chan tun.Event                     { return d.events }
func (d *idle) BatchSize() int                               { return 1 }
func (d *idle) Close() error                                 { close(d.closed); close(d.events); return nil }

// deaf is a Bind without a network.
type deaf struct{ conn.Bind }

func (deaf) Open(uint16) ([]conn.ReceiveFunc, uint16, error) { return nil, 9, nil }
func (deaf) Close() error                                    { return nil }
func (deaf) SetMark(uint32) error                            { return nil }
func (deaf) Send([][]byte, conn.Endpoint) error              { return nil }
func (deaf) BatchSize() int                                  { return 1 }

// lookup is what the device sends by. wireguard-go shows nobody but a packet.
func lookup(w *wireguard) *device.AllowedIPs {
	f := reflect.ValueOf(w.Device).Elem().FieldByName("allowedips")
	return (*device.AllowedIPs)(unsafe.Pointer(f.UnsafeAddr()))
}

// TestPrefixesAfterRemovals has peers with nested prefixes come and go, in every way there is, and compares whom
// the device would send to with a search of all they have, at every step.
func TestPrefixesAfterRemovals(t *testing.T) {
	steps := 100_000
	if raceEnabled || testing.Short() {
		steps = 10_000
	}
	n := New(Options{Mu: new(sync.Mutex), Logger: slog.New(slog.DiscardHandler), Bind: func() conn.Bind { return deaf{} }})
	defer n.Close()
	private, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Create(datapath.Device{Key: private}, func() (tun.Device, error) { return newIdle(), nil }); err != nil {
		t.Fatal(err)
	}
	w, err := n.device()
	if err != nil {
		t.Fatal(err)
	}
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	addr := func() netip.Addr {
		if r.IntN(2) == 0 {
			return netip.AddrFrom4([4]byte{10, byte(r.IntN(2)) << 7, byte(r.IntN(4)) << 6, byte(r.IntN(8))})
		}
		return netip.AddrFrom16([16]byte{0: 0xfd, 7: byte(r.IntN(2)) << 7, 8: byte(r.IntN(4)) << 6, 15: byte(r.IntN(8))})
	}
	some := func() prefixes.Set {
		var ps []netip.Prefix
		for range 1 + r.IntN(4) {
			a := addr()
			ps = append(ps, netip.PrefixFrom(a, r.IntN(a.BitLen()+1)).Masked())
		}
		return prefixes.Must(ps...)
	}
	type held struct {
		key      key.Public
		prefixes []netip.Prefix
	}
	peers := make([]held, 10)
	for i := range peers {
		peers[i].key = newPublic(t)
	}
	for step := range steps {
		p := &peers[r.IntN(len(peers))]
		switch c := r.IntN(10); {
		case c < 5:
			s := some()
			err = n.PutPeer(datapath.PutPeer{Key: p.key, Peer: datapath.Peer{Prefixes: s}})
			for i := range peers {
				peers[i].prefixes = slices.DeleteFunc(peers[i].prefixes, s.Has)
			}
			p.prefixes = slices.AppendSeq(p.prefixes, s.All())
		case c < 8:
			s := some()
			if len(p.prefixes) > 0 {
				s = s.With(p.prefixes[r.IntN(len(p.prefixes))])
			}
			err = n.DropPrefixes(datapath.DropPrefixes{Key: p.key, Prefixes: s})
			p.prefixes = slices.DeleteFunc(p.prefixes, s.Has)
		default:
			err = n.RemovePeer(p.key)
			p.prefixes = nil
		}
		if err != nil {
			t.Fatalf("seed %d, step %d: %v", seed, step, err)
		}
		for range 4 {
			a := addr()
			best, who := -1, key.Public{}
			for _, p := range peers {
				for _, q := range p.prefixes {
					if q.Bits() > best && q.Contains(a) {
						best, who = q.Bits(), p.key
					}
				}
			}
			var want *device.Peer
			if best >= 0 {
				want = w.LookupPeer(who.Bytes())
			}
			if got := lookup(w).Lookup(a.AsSlice()); got != want || best >= 0 && want == nil {
				t.Fatalf("seed %d, step %d: %v goes to %v, want %v, by a prefix of %d bits", seed, step, a, got, want, best)
			}
		}
	}
	st, err := n.Read()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range peers {
		if got, want := st.Peers[p.key].Prefixes, prefixes.Must(p.prefixes...); got != want {
			t.Errorf("seed %d: %v reads as %v, want %v", seed, p.key.Short(), got, want)
		}
	}
}
