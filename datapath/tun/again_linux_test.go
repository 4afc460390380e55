package tun

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
)

// TestDeletedAgain has the interface deleted 20 times in a row: each time the device is back as it was, and nothing
// of those before it is left.
func TestDeletedAgain(t *testing.T) {
	nettest.NeedProgram(t, "ip")
	p := newPair(t)
	p.connect(nettest.Outers[1])
	a := p.a
	a.Want.Device.ListenPort = a.Have().Device.ListenPort
	a.Sync()
	p.works("at first")
	want := a.Have()
	var before count
	for i := range 20 {
		select {
		case <-a.Changed():
		default:
		}
		a.space.IP("link del warren0")
		nettest.Notified(t, a.TUN, "a deletion")
		took := nettest.Within(t, 2*time.Second, "the device is back", func() bool {
			return datapath.Sync(t.Context(), a.TUN, a.Want) == nil && len(datapath.Plan(a.Want, a.Have())) == 0
		})
		if got := a.Have(); !got.Equal(want) {
			t.Fatalf("deleted %d times, it is\n%+v\nwant\n%+v", i+1, got, want)
		}
		if i%5 == 0 {
			p.works(fmt.Sprintf("deleted %d times, back after %v", i+1, took))
		}
		if i == 0 {
			before = settled(a.space)
		}
	}
	p.works("in the end")
	// A few come and go: those of a handshake, and the pipes of io.Copy. One that each device leaves would be 20.
	if after := settled(a.space); after.goroutines > before.goroutines+5 || after.fds > before.fds+5 || after.links != before.links {
		t.Errorf("%+v after the first time, %+v after the last", before, after)
	}
}

// settled counts when nothing changes any more.
func settled(s *space) count {
	now := counted(s)
	for since, end := time.Now(), time.Now().Add(5*time.Second); time.Since(since) < 200*time.Millisecond && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if next := counted(s); next != now {
			now, since = next, time.Now()
		}
	}
	return now
}

// TestCloseUnderFlood closes a device that is being flooded, while others use it.
func TestCloseUnderFlood(t *testing.T) {
	rounds := 50 // as a round takes longer here, netstack has 200 of them
	if testing.Short() {
		rounds = 10
	}
	burst := 64
	if raceEnabled { // or a handshake finds no room in the socket's buffer
		burst = 4
	}
	p := newPair(t)
	p.connect(plain)
	want := p.b.Want
	want.Device.ListenPort = p.b.Have().Device.ListenPort
	var in net.PacketConn
	p.b.space.Must(func() (err error) { in, err = net.ListenPacket("udp", ":9"); return err })
	var out net.Conn
	p.a.space.Must(func() (err error) { out, err = net.Dial("udp", "10.0.0.2:9"); return err })
	var arrived atomic.Uint64
	stop := make(chan struct{})
	var flooding sync.WaitGroup
	flooding.Go(func() {
		b := make([]byte, 64)
		for {
			select {
			case <-stop:
				return
			default:
			}
			for range burst {
				_, _ = out.Write(b) // refused while nobody is there
			}
			time.Sleep(100 * time.Microsecond)
		}
	})
	flooding.Go(func() {
		b := make([]byte, 64)
		for {
			if _, _, err := in.ReadFrom(b); err != nil {
				return
			}
			arrived.Add(1)
		}
	})
	defer flooding.Wait()
	defer in.Close()
	defer out.Close()
	defer close(stop)
	d := p.b.TUN
	for i := range rounds {
		was := arrived.Load()
		nettest.Within(t, 20*time.Second, fmt.Sprintf("the flood arrives in round %d", i), func() bool { return arrived.Load() > was+10 })
		var busy sync.WaitGroup
		busy.Go(func() { _ = d.Close() })
		busy.Go(func() { _ = d.Apply(context.Background(), datapath.RemovePeer{Key: p.a.Public()}) })
		busy.Go(func() { _, _ = d.Read(context.Background()) })
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		busy.Wait()
		if _, err := d.Read(t.Context()); !errors.Is(err, net.ErrClosed) {
			t.Errorf("closed, it says %v", err)
		}
		d = p.b.space.tun(t)
		if err := datapath.Sync(t.Context(), d, want); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
	}
}

// TestNamespaces has two devices in two namespaces of one process come and go: each is where it belongs, none is in
// the process's own namespace, and no thread is left in the wrong one.
func TestNamespaces(t *testing.T) {
	need(t)
	cycles := 200
	if raceEnabled {
		cycles = 60
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	name := nettest.UniqueName(t)
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	// threads counts all, and those elsewhere.
	threads := func() (all, astray int) {
		ls, _ := os.ReadDir("/proc/self/task")
		for _, l := range ls {
			if ns, err := os.Readlink("/proc/self/task/" + l.Name() + "/ns/net"); err == nil && ns != own {
				astray++
			}
		}
		return len(ls), astray
	}
	spaces := []*space{newSpace(t), newSpace(t)}
	for _, s := range spaces {
		s.Out()
	}
	_, elsewhere := threads()

	var load sync.WaitGroup
	defer load.Wait()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	load.Go(func() {
		for ctx.Err() == nil {
			runtime.Gosched()
		}
	})
	load.Go(func() { // it looks around wherever its thread is
		for ctx.Err() == nil {
			if _, err := net.InterfaceByName(name); err == nil {
				t.Errorf("%s is in the namespace of the process", name)
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	var works sync.WaitGroup
	first := 0
	for i, s := range spaces {
		dir, others := folder(t), s.Links()
		works.Go(func() {
			mtu := 1400 + i
			addr := set(fmt.Sprintf("10.7.%d.1", i))
			cycle := func() error {
				d, err := New(Options{Namespace: s.Path, Interface: name, Socket: dir})
				if err != nil {
					return err
				}
				defer d.Close()
				if err := datapath.Sync(ctx, d, datapath.State{Device: datapath.Device{Key: nettest.NewKey(t), MTU: mtu}, Addrs: addr}); err != nil {
					return err
				}
				st, err := d.Read(ctx)
				if err != nil || st.Addrs != addr || st.Device.MTU != mtu {
					return fmt.Errorf("it is %+v, %w", st, err)
				}
				return errors.Join(exact(s, others, name, mtu), d.Close(), exact(s, others, "", 0))
			}
			for n := range cycles {
				if err := cycle(); err != nil {
					t.Errorf("namespace %d, cycle %d: %v", i, n, err)
					return
				}
				if i == 0 && n == 10 {
					first, _ = threads()
				}
			}
		})
	}
	works.Wait()
	nettest.Within(t, 10*time.Second, "all threads are where they were", func() bool { // one that ends takes a moment
		_, astray := threads()
		return astray == elsewhere
	})
	last, _ := threads()
	t.Logf("%d threads after 10 cycles, %d after %d", first, last, 2*cycles)
	if last > first+8 {
		t.Errorf("%d threads after 10 cycles, %d after %d", first, last, 2*cycles)
	}
}

// exact says what is wrong where the links of a namespace are not those of others and one called name, if any, with an MTU.
func exact(s *space, others []string, name string, mtu int) error {
	return s.In(func() error {
		ls, err := net.Interfaces()
		if err != nil {
			return err
		}
		var got []string
		for _, l := range ls {
			got = append(got, l.Name)
			if l.Name == name && l.MTU != mtu {
				return fmt.Errorf("%s has MTU %d, want %d: it is another's", l.Name, l.MTU, mtu)
			}
		}
		want := slices.Clone(others)
		if name != "" {
			want = append(want, name)
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			return fmt.Errorf("links are %v, want %v", got, want)
		}
		return nil
	})
}

// formerEnv has a process be the one that ran before: it names the namespace and where the addresses are.
const formerEnv = "WARREN_TUN_FORMER"

// againState is what every process of TestAppliedAgain wants, but for the key.
func againState(t *testing.T) datapath.State {
	return datapath.State{
		Device: datapath.Device{Key: nettest.NewKey(t)}, Addrs: addrsA,
		Routes: map[netip.Prefix]netip.Addr{netip.MustParsePrefix("10.8.0.0/16"): addrsA.At(0).Addr(), netip.MustParsePrefix("fd08::/64"): {}},
		Peers:  map[key.Public]datapath.Peer{nettest.NewKey(t).Public(): {Prefixes: set("10.8.0.0/16", "fd08::/64")}},
	}
}

// TestAppliedAgain applies the same twice, and once more in another process after the first was killed: no error,
// and no difference.
func TestAppliedAgain(t *testing.T) {
	t.Parallel()
	if where, sources, ok := strings.Cut(os.Getenv(formerEnv), " "); ok {
		n, _ := strconv.Atoi(sources)
		d, err := New(Options{Namespace: where, Socket: NoSocket, Sources: Sources(n)})
		if err == nil {
			want := againState(t)
			err = errors.Join(datapath.Sync(t.Context(), d, want), d.Apply(t.Context(), datapath.Plan(want, datapath.State{})...))
		}
		fmt.Println("former:", err)
		_, _ = io.Copy(io.Discard, os.Stdin) // until it is killed
		return
	}
	nettest.NeedProgram(t, "ip")
	s := newSpace(t)
	s.Sysctl("net/ipv6/conf/default/addr_gen_mode", "1") // or each device has a link-local address of its own
	s.Out()
	for _, sources := range []Sources{SourceHint, SourceDevice, SourceLoopback} {
		former := exec.Command("/proc/self/exe", "-test.run=^TestAppliedAgain$")
		former.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", formerEnv, s.Path, sources))
		stdin, err := former.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer stdin.Close()
		out, err := former.StdoutPipe()
		if err == nil {
			err = former.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		said := ""
		for lines := bufio.NewScanner(out); said == "" && lines.Scan(); {
			if strings.HasPrefix(lines.Text(), "former:") {
				said = lines.Text()
			}
		}
		before := shown(s)
		_ = former.Process.Kill()
		_ = former.Wait()
		if said != "former: <nil>" || !strings.Contains(before, "10.8.0.0/16 dev warren0") {
			t.Fatalf("the process before says %q, and leaves\n%s", said, before)
		}

		d := s.tun(t, func(o *Options) { o.Sources = sources })
		want := againState(t)
		for _, what := range []string{"after the other process", "again"} {
			if err := d.Apply(t.Context(), datapath.Plan(want, datapath.State{})...); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			if after := shown(s); after != before {
				t.Errorf("%s: it was\n%s\nis\n%s", what, before, after)
			}
		}
		if err := errors.Join(d.Apply(t.Context(), datapath.RemoveDevice{}), d.Close()); err != nil {
			t.Error(err)
		}
	}
}

// shown is what ip shows of the addresses, routes and rules of a namespace, once its links have come up.
func shown(s *space) (all string) {
	s.T.Helper()
	nettest.Within(s.T, 5*time.Second, "the links have come up", func() bool {
		time.Sleep(10 * time.Millisecond) // the routes of addresses come after them, too
		all = ""
		for _, args := range []string{"-br addr", "route show table all", "-6 route show table all", "rule", "-6 rule"} {
			out, err := s.Run("ip", strings.Fields(args)...)
			if err != nil {
				s.T.Fatal(err)
			}
			all += out
		}
		return !strings.Contains(all, "LOWERLAYERDOWN")
	})
	return all
}
