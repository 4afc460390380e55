//go:build linux

package hostnet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// smallBuffer gives a socket the smallest receive buffer there is.
func smallBuffer(t *testing.T, c *conn) {
	t.Helper()
	var err error
	must(t, c.raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) }))
	must(t, err)
}

// without returns those of routes that are not in have.
func without(routes []datapath.Route, have map[netip.Prefix]netip.Addr) (rest []datapath.Route) {
	for _, r := range routes {
		if src, ok := have[r.Prefix]; !ok || src != r.Source {
			rest = append(rest, r)
		}
	}
	return rest
}

func asMap(routes []datapath.Route) map[netip.Prefix]netip.Addr {
	m := make(map[netip.Prefix]netip.Addr, len(routes))
	for _, r := range routes {
		m[r.Prefix] = r.Source
	}
	return m
}

// An overrun of the socket for notifications is a change, and what is read afterwards is exact.
func TestOverrun(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h, other := s.up(Options{}), s.open(Options{})
	must(t, h.AddAddrs(s.ctx(), one.addrs))
	smallBuffer(t, h.watch.c)
	routes := many(2000)
	seen := func(what string) {
		t.Helper()
		select {
		case <-h.Changed():
		case <-time.After(5 * time.Second):
			t.Error(what)
		}
	}
	for len(h.Changed()) > 0 {
		<-h.Changed()
	}
	must(t, other.AddRoutes(s.ctx(), routes))
	seen("not seen")
	if st := s.read(h); !maps.Equal(st.Routes, asMap(routes)) {
		t.Errorf("got %d routes", len(st.Routes))
	}
	n := h.watch.lost.Load()
	if n == 0 {
		t.Error("nothing was lost: does this test anything?")
	}
	// Nor is a change missed that nothing was heard of.
	var some prefixes.Set
	for _, r := range routes[:1000] {
		some = some.With(r.Prefix)
	}
	must(t, other.RemoveRoutes(s.ctx(), some))
	must(t, h.AddRoutes(s.ctx(), routes))
	if st := s.read(h); !maps.Equal(st.Routes, asMap(routes)) {
		t.Errorf("got %d routes", len(st.Routes))
	}
	t.Logf("%d overruns, then %d", n, h.watch.lost.Load()-n)
	time.Sleep(50 * time.Millisecond)
	for len(h.Changed()) > 0 {
		<-h.Changed()
	}
	s.ip("route del 10.64.0.0/24") // and it goes on
	seen("deaf after an overrun")
}

// Where answers overrun the socket, what was done is told from what was not by reading, which is exact; the
// calls that follow do the rest.
func TestAnswersLost(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h, look := s.up(Options{}), s.open(Options{})
	must(t, h.AddAddrs(s.ctx(), one.addrs))
	smallBuffer(t, h.c)
	routes := many(1000)
	lost, again := 0, 0
	// flood has answers lost that nobody waited for.
	flood := func() {
		t.Helper()
		var rs []request
		for range 300 {
			rs = append(rs, newRequest(unix.RTM_DELROUTE, unix.NLM_F_ACK, []byte{unix.AF_INET, 32, 11: 0}))
		}
		_, err := h.c.send(s.ctx(), rs...)
		must(t, err)
	}
	exact := func() State {
		t.Helper()
		want := s.read(look)
		for range 2 {
			st := s.read(h)
			if !maps.Equal(st.Routes, want.Routes) || st.Addrs != want.Addrs || fmt.Sprint(st.Host) != fmt.Sprint(want.Host) {
				t.Fatalf("read %d routes of %d, addresses %v of %v, %v of %v", len(st.Routes), len(want.Routes), st.Addrs, want.Addrs, st.Host, want.Host)
			}
			flood()
		}
		again = h.c.again
		return want
	}
	calls := 0
	for rest := routes; len(rest) > 0; calls++ {
		if calls > 50 {
			t.Fatalf("%d routes are still not there", len(rest))
		}
		failed := 0
		for _, err := range Items(h.AddRoutes(s.ctx(), rest)) {
			if failed++; !errors.Is(err, unix.ENOBUFS) {
				t.Fatal(err)
			}
		}
		lost += failed
		now := without(routes, exact().Routes)
		if failed == 0 && len(now) > 0 {
			t.Fatalf("%d routes are not there, and no error was said", len(now))
		}
		rest = now
	}
	t.Logf("added in %d calls", calls)
	var all prefixes.Set
	for _, r := range routes {
		all = all.With(r.Prefix)
	}
	for calls = 0; len(exact().Routes) > 0; calls++ {
		if calls > 50 {
			t.Fatal("routes are still there")
		}
		for _, err := range Items(h.RemoveRoutes(s.ctx(), all)) {
			if lost++; !errors.Is(err, unix.ENOBUFS) {
				t.Fatal(err)
			}
		}
	}
	t.Logf("removed in %d calls; %d answers were lost, and %d lists overran and were read again", calls, lost, again)
	if lost == 0 || again == 0 {
		t.Error("nothing was lost: does this test anything?")
	}
}

// hostOp carries out an op, as far as it is the host's.
func hostOp(ctx context.Context, h *Host, op datapath.Op) error {
	switch o := op.(type) {
	case datapath.AddAddrs:
		return h.AddAddrs(ctx, o.Addrs)
	case datapath.RemoveAddrs:
		return h.RemoveAddrs(ctx, o.Addrs)
	case datapath.AddRoutes:
		return h.AddRoutes(ctx, o.Routes)
	case datapath.RemoveRoutes:
		return h.RemoveRoutes(ctx, o.Prefixes)
	}
	return fmt.Errorf("unexpected %T", op)
}

// While addresses come and go at full speed, on our link and beside it, a list never lacks what stayed, nor
// has what is not there: what is planned on it is nothing, or to bring back the one thing that somebody took.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	reads := 10000
	if raceEnabled || testing.Short() {
		reads = 500
	}
	s := newSpace(t)
	s.uplink()
	h, other := s.open(Options{}), s.open(Options{})
	h.c.buf = h.c.buf[:4096] // from the beginning, for lists in more pieces: Linux fills the largest ever offered
	_, _, err := h.Adopt(s.ctx(), kind, nil)
	must(t, err)
	must(t, h.Up(s.ctx(), 1420))
	private, err := key.NewPrivate()
	must(t, err)
	want := datapath.State{Device: datapath.Device{Key: private, MTU: 1420}, Routes: make(map[netip.Prefix]netip.Addr)}
	for i := range 50 {
		want.Addrs = want.Addrs.With(prefixes.Host(netip.AddrFrom4([4]byte{10, 7, 0, byte(i)})), prefixes.Host(netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(i)})))
		want.Routes[netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 8, byte(i), 0}), 32)] = netip.Addr{}
		want.Routes[netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 1, 5: byte(i)}), 64)] = netip.Addr{}
	}
	removals, applied := 0, 0
	plan := func() []datapath.Op {
		t.Helper()
		st := s.read(h)
		ops := datapath.Plan(want, datapath.State{Device: want.Device, Addrs: st.Addrs, Routes: st.Routes})
		for _, op := range ops {
			switch op.(type) {
			case datapath.RemoveAddrs, datapath.RemoveRoutes:
				removals++
				t.Errorf("planned %+v", op)
			}
			must(t, hostOp(s.ctx(), h, op))
			applied++
		}
		return ops
	}
	plan()
	f, err := h.find(s.ctx())
	must(t, err)
	eth0 := 0
	for i, l := range f.byIndex {
		if l.Name == "eth0" {
			eth0 = i
		}
	}
	ctx, stop := context.WithCancel(s.ctx())
	var wg sync.WaitGroup
	churned := 0
	churner := s.open(Options{})
	places := []int{eth0}
	if knowsProtocol(nil) == nil {
		places = append(places, f.link.Index) // as if the kernel made them, so that they are not ours
	}
	wg.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			var rs []request
			for j := range 4 {
				for _, typ := range []uint16{unix.RTM_NEWADDR, unix.RTM_DELADDR} {
					at := places[j%len(places)]
					rs = append(rs,
						ifaddr{index: at, proto: ifaProtoKernelLL, local: prefixes.Host(netip.AddrFrom4([4]byte{172, 16, byte(i), byte(j)}))}.request(typ, unix.NLM_F_ACK|unix.NLM_F_CREATE),
						ifaddr{index: at, proto: ifaProtoKernelLL, local: prefixes.Host(netip.AddrFrom16([16]byte{0: 0xfe, 1: 0xc0, 14: byte(i), 15: byte(j)}))}.request(typ, unix.NLM_F_ACK|unix.NLM_F_CREATE))
				}
			}
			churner.c.do(ctx, rs)
			churned += len(rs)
			time.Sleep(200 * time.Microsecond) // or the lock of all links is never free
		}
	})
	start, taken := time.Now(), 0
	addrs, routes := slices.Collect(want.Addrs.All()), slices.SortedFunc(maps.Keys(want.Routes), prefixes.Compare)
	for i := range reads {
		wanted := ""
		if i%20 == 0 { // somebody takes something
			taken++
			if i%40 == 0 {
				a := prefixes.Must(addrs[i/40%len(addrs)])
				must(t, other.RemoveAddrs(s.ctx(), a))
				wanted = fmt.Sprintf("%+v", []datapath.Op{datapath.AddAddrs{Addrs: a}})
			} else {
				r := routes[i/40%len(routes)]
				must(t, other.RemoveRoutes(s.ctx(), prefixes.Must(r)))
				wanted = fmt.Sprintf("%+v", []datapath.Op{datapath.AddRoutes{Routes: []datapath.Route{{Prefix: r}}}})
			}
		}
		if ops := plan(); len(ops) > 0 != (wanted != "") || wanted != "" && fmt.Sprintf("%+v", ops) != wanted {
			t.Fatalf("read %d: planned %+v, want %s", i, ops, wanted)
		}
	}
	took := time.Since(start)
	stop()
	wg.Wait()
	t.Logf("%d reads in %v; %d lists were disturbed and read again; %d address changes meanwhile; %d things were taken and brought back; %d removals were planned",
		reads, took, h.c.again, churned, taken, removals)
	if h.c.again == 0 {
		t.Error("nothing was disturbed: does this test anything?")
	}
}

// What the kernel, or somebody else, refuses in the middle of a thousand holds up nothing else, and is made up
// for by one change when the way is free.
func TestRefused(t *testing.T) {
	t.Parallel()
	s := newSpace(t)
	h := s.up(Options{})
	must(t, h.AddAddrs(s.ctx(), one.addrs))
	s.ip("link add eth0 type veth peer name far0", "link set eth0 up", "link set far0 up")
	n := 1000
	routes := many(n)
	var ps []netip.Prefix
	for i := range n / 2 {
		ps = append(ps, prefixes.Host(netip.AddrFrom4([4]byte{10, 7, 1 + byte(i>>7), byte(i & 127)})), prefixes.Host(netip.AddrFrom16([16]byte{0: 0xfd, 14: 1 + byte(i>>8), 15: byte(i)})))
	}
	addrs := one.addrs.With(ps...)
	four, six, unsourced, theirs := routes[n/2], routes[n/2+1], &routes[n/2+40], ps[n/2]
	unsourced.Source = ap("10.20.0.1")
	refused := pp("ff0e::1/128") // Linux has no multicast address as a node's own
	s.ip(fmt.Sprintf("route add %v dev eth0 metric 50 proto bird", four.Prefix), fmt.Sprintf("route add %v dev eth0 metric 50 proto static", six.Prefix),
		fmt.Sprintf("addr add %v dev eth0", theirs))
	want := datapath.State{Device: datapath.Device{MTU: 1420}, Addrs: addrs.With(refused), Routes: asMap(routes)}
	want.Device.Key, _ = key.NewPrivate()
	apply := func() map[netip.Prefix]error {
		t.Helper()
		st := s.read(h)
		got := make(map[netip.Prefix]error)
		for _, op := range datapath.Plan(want, datapath.State{Device: want.Device, Addrs: st.Addrs, Routes: st.Routes}) {
			for p, err := range Items(hostOp(s.ctx(), h, op)) {
				got[p] = err
			}
		}
		return got
	}
	check := func(addrs prefixes.Set, routes map[netip.Prefix]netip.Addr) {
		t.Helper()
		if st := s.read(h); st.Addrs != addrs || !maps.Equal(st.Routes, routes) {
			t.Errorf("%d addresses of %d, %d routes of %d", st.Addrs.Len(), addrs.Len(), len(st.Routes), len(routes))
		}
	}
	there := asMap(routes)
	for _, r := range []datapath.Route{four, six, *unsourced} {
		delete(there, r.Prefix)
	}
	for range 2 {
		got := apply()
		if len(got) != 5 {
			t.Errorf("%d errors: %v", len(got), got)
		}
		foreign(t, got[four.Prefix], "route "+four.Prefix.String(), "eth0", "bird", "metric 50", "remove it")
		foreign(t, got[six.Prefix], "route "+six.Prefix.String(), "eth0", "static", "metric 50", "remove it")
		foreign(t, got[theirs], "address "+theirs.Addr().String(), "eth0")
		if err := got[unsourced.Prefix]; !errors.Is(err, unix.EINVAL) {
			t.Errorf("got %v", err)
		} else {
			t.Log(err)
		}
		if err := got[refused]; err == nil {
			t.Error("a multicast address was taken")
		} else {
			t.Log(err)
		}
		check(addrs.Without(theirs), there)
	}
	// The ways are made free, and one change follows each.
	s.ip(fmt.Sprintf("route del %v dev eth0", four.Prefix), fmt.Sprintf("route del %v dev eth0 metric 50", six.Prefix), fmt.Sprintf("addr del %v dev eth0", theirs),
		"addr add 10.20.0.1/32 dev eth0")
	want.Addrs = addrs
	var writes []string
	h.before = func(what string) error { writes = append(writes, what); return nil }
	if got := apply(); len(got) != 0 {
		t.Error(got)
	}
	slices.Sort(writes)
	all := []string{fmt.Sprintf("add address %v to wg0", theirs.Addr()), fmt.Sprintf("add route %v to wg0", four.Prefix), fmt.Sprintf("add route %v to wg0", six.Prefix), fmt.Sprintf("add route %v to wg0", unsourced.Prefix)}
	slices.Sort(all)
	if !slices.Equal(writes, all) {
		t.Errorf("changed %q, want %q", writes, all)
	}
	check(addrs, asMap(routes))
	writes = nil
	if got := apply(); len(got)+len(writes) != 0 {
		t.Errorf("changed %q, %v", writes, got)
	}
}
