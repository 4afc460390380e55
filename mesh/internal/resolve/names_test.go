package resolve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func addrs(s ...string) []netip.Addr {
	var out []netip.Addr
	for _, a := range s {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// server is a Lookup whose answers a test sets, and that keeps who asked when.
type server struct {
	mu      sync.Mutex
	answers map[string]func(context.Context) ([]netip.Addr, time.Duration, error)
	asked   map[string][]time.Time
	running int
	most    int
}

func newServer() *server {
	return &server{
		answers: make(map[string]func(context.Context) ([]netip.Addr, time.Duration, error)),
		asked:   make(map[string][]time.Time),
	}
}

func (s *server) lookup(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
	s.mu.Lock()
	s.asked[host] = append(s.asked[host], time.Now())
	s.running++
	s.most = max(s.most, s.running)
	f := s.answers[host]
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.running--
		s.mu.Unlock()
	}()
	if f == nil {
		return nil, 0, ErrNoName
	}
	return f(ctx)
}

func (s *server) has(host string, ttl time.Duration, a ...string) {
	s.does(host, func(context.Context) ([]netip.Addr, time.Duration, error) { return addrs(a...), ttl, nil })
}

func (s *server) fails(host string, err error) {
	s.does(host, func(context.Context) ([]netip.Addr, time.Duration, error) { return nil, 0, err })
}

// hangs until the context ends.
func (s *server) hangs(host string) {
	s.does(host, func(ctx context.Context) ([]netip.Addr, time.Duration, error) {
		<-ctx.Done()
		return nil, 0, ctx.Err()
	})
}

func (s *server) does(host string, f func(context.Context) ([]netip.Addr, time.Duration, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[host] = f
}

func (s *server) times(host string) []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked[host])
}

// gaps are the times between lookups.
func (s *server) gaps(host string) []time.Duration {
	var out []time.Duration
	at := s.times(host)
	for i := 1; i < len(at); i++ {
		out = append(out, at[i].Sub(at[i-1]))
	}
	return out
}

// run starts Run, and has the test end it.
func run(t *testing.T, n *Names) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run returns %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// bubble runs a test of Names that run.
func bubble(t *testing.T, f func(*testing.T, *Names, *server)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		n := New(s.lookup, nil)
		stop := run(t, n)
		f(t, n, s)
		stop()
		if s.running != 0 || n.busy != [2]int{} {
			t.Errorf("%d lookups run after Run, %v are counted", s.running, n.busy)
		}
	})
}

func answer(n *Names, host string) Answer {
	all, _ := n.Current()
	return all[host]
}

// woken waits until the channel closes, but not for ever: where timers go on, time never ends.
func woken(t *testing.T, stale <-chan struct{}) {
	t.Helper()
	select {
	case <-stale:
	case <-time.After(24 * time.Hour):
		t.Fatal("nobody was woken for a change")
	}
}

func TestFirstLookupIsAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		s.has("a", time.Minute, "192.0.2.2", "2001:db8::1", "192.0.2.1")
		all, stale := n.Current()
		if len(all) != 0 {
			t.Fatalf("before any name there is %v", all)
		}
		start := time.Now()
		n.Set([]string{"a", "b", "", "a"})
		woken(t, stale)
		synctest.Wait()
		if time.Since(start) != 0 {
			t.Errorf("it took %v", time.Since(start))
		}
		if got := answer(n, "a"); !slices.Equal(got.Addrs, addrs("192.0.2.1", "192.0.2.2", "2001:db8::1")) || got.Err != nil {
			t.Errorf("a is %v", got)
		}
		b := answer(n, "b")
		if b.Addrs != nil || !errors.Is(b.Err, ErrNoName) || !strings.Contains(b.Err.Error(), " b: ") {
			t.Errorf("b is %v", b)
		}
		if all, _ := n.Current(); len(all) != 2 {
			t.Errorf("there is %v", all)
		}
	})
}

func TestTTL(t *testing.T) {
	for _, test := range []struct{ ttl, least time.Duration }{
		{-time.Hour, 5 * time.Second},
		{0, 5 * time.Second},
		{5 * time.Second, 5 * time.Second},
		{time.Minute, time.Minute},
		{time.Hour, time.Hour},
		{1000 * time.Hour, time.Hour},
	} {
		bubble(t, func(t *testing.T, n *Names, s *server) {
			s.has("a", test.ttl, "192.0.2.1")
			n.Set([]string{"a"})
			synctest.Wait()
			most := test.least + test.least/10
			if until := time.Until(answer(n, "a").Next); until < test.least || until > most {
				t.Errorf("TTL %v: next in %v", test.ttl, until)
			}
			_, stale := n.Current()
			time.Sleep(100 * test.least)
			synctest.Wait()
			gaps := s.gaps("a")
			if low, high := slices.Min(gaps), slices.Max(gaps); low < test.least || high > most || low == high {
				t.Errorf("TTL %v: lookups %v to %v apart", test.ttl, low, high)
			}
			if closed(stale) {
				t.Error("the same answer again woke somebody")
			}
			if until := time.Until(answer(n, "a").Next); until < 0 || until > most {
				t.Errorf("TTL %v: next in %v later", test.ttl, until)
			}
		})
	}
}

func TestReorderedIsNoChange(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		s.has("a", 0, "192.0.2.1", "192.0.2.2", "2001:db8::1")
		n.Set([]string{"a"})
		synctest.Wait()
		_, stale := n.Current()
		s.has("a", 0, "2001:db8::1", "::ffff:192.0.2.2", "192.0.2.1", "192.0.2.1", "0.0.0.0", "fe80::1%eth0")
		time.Sleep(time.Minute)
		if closed(stale) || len(s.times("a")) < 5 {
			t.Errorf("woken %t after %d lookups", closed(stale), len(s.times("a")))
		}
		s.has("a", 0, "192.0.2.1", "192.0.2.2")
		time.Sleep(time.Minute)
		if got := answer(n, "a").Addrs; !closed(stale) || !slices.Equal(got, addrs("192.0.2.1", "192.0.2.2")) {
			t.Errorf("woken %t for %v", closed(stale), got)
		}
	})
}

func TestFailureKeepsWhatWasFound(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		s.has("a", time.Minute, "192.0.2.1")
		n.Set([]string{"a"})
		synctest.Wait()
		good, stale := n.Current()
		broken := errors.New("out of order")
		s.fails("a", broken)
		woken(t, stale)
		got := answer(n, "a")
		if !slices.Equal(got.Addrs, addrs("192.0.2.1")) || !errors.Is(got.Err, broken) || !strings.Contains(got.Err.Error(), "looking up a: out of order") {
			t.Fatalf("have %v", got)
		}
		if good["a"].Err != nil {
			t.Error("an answer that was given away has changed")
		}
		// Empty and unusable are failures too.
		for _, unusable := range [][]string{nil, {"0.0.0.0"}, {"ff02::1", "255.255.255.255", "224.0.0.1", "::", "fe80::1%eth0"}} {
			s.has("a", time.Minute, unusable...)
			time.Sleep(5 * time.Minute)
			if got := answer(n, "a"); !slices.Equal(got.Addrs, addrs("192.0.2.1")) || !errors.Is(got.Err, ErrNoAddress) {
				t.Fatalf("of %v have %v", unusable, got)
			}
		}
		_, stale = n.Current()
		s.has("a", time.Minute, "192.0.2.1")
		woken(t, stale)
		if got := answer(n, "a"); got.Err != nil || !slices.Equal(got.Addrs, addrs("192.0.2.1")) {
			t.Fatalf("have %v", got)
		}
	})
}

// It fails, for hours; then there is one family; then another.
func TestNeverGivesUp(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		s.fails("a", errors.New("out of order"))
		n.Set([]string{"a"})
		synctest.Wait()
		_, stale := n.Current()
		time.Sleep(10 * time.Hour)
		if closed(stale) {
			t.Error("the same failure again woke somebody")
		}
		gaps := s.gaps("a")
		for i, ceiling := 0, 2*time.Second; i < len(gaps); i, ceiling = i+1, min(2*ceiling, time.Minute) {
			if gaps[i] < time.Second || gaps[i] > ceiling {
				t.Errorf("gap %d is %v, want 1 s to %v", i, gaps[i], ceiling)
			}
		}
		// Full jitter: half a minute on average, all over the range.
		late := gaps[10:]
		sum := time.Duration(0)
		for _, g := range late {
			sum += g
		}
		if mean := sum / time.Duration(len(late)); mean < 26*time.Second || mean > 35*time.Second ||
			slices.Min(late) > 3*time.Second || slices.Max(late) < 57*time.Second {
			t.Errorf("%d gaps of %v to %v, %v on average", len(late), slices.Min(late), slices.Max(late), mean)
		}
		s.has("a", time.Minute, "2001:db8::1")
		woken(t, stale)
		if got := answer(n, "a"); got.Err != nil || !slices.Equal(got.Addrs, addrs("2001:db8::1")) {
			t.Errorf("have %v", got)
		}
		_, stale = n.Current()
		s.has("a", time.Minute, "192.0.2.1")
		woken(t, stale)
		if got := answer(n, "a"); got.Err != nil || !slices.Equal(got.Addrs, addrs("192.0.2.1")) {
			t.Errorf("have %v", got)
		}
		// Backoff begins anew.
		s.fails("a", errors.New("out of order"))
		_, stale = n.Current()
		woken(t, stale)
		if until := time.Until(answer(n, "a").Next); until < time.Second || until > 2*time.Second {
			t.Errorf("after a success, the first failure waits %v", until)
		}
	})
}

func TestFailedIsLimited(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		s.has("a", time.Hour, "192.0.2.1")
		n.Failed("a") // not wanted
		n.Set([]string{"a"})
		synctest.Wait()
		n.Failed("a")
		if until := time.Until(answer(n, "a").Next); until != minRetry {
			t.Errorf("next in %v", until)
		}
		time.Sleep(10 * time.Minute)
		if got := s.gaps("a"); !slices.Equal(got, []time.Duration{minRetry}) {
			t.Errorf("lookups are %v apart", got)
		}
		asked := len(s.times("a"))
		n.Failed("a") // long after the last lookup: at once
		synctest.Wait()
		if len(s.times("a")) != asked+1 {
			t.Error("it was not looked up at once")
		}
		for range 1000 {
			n.Failed("a")
			n.Failed("b")
			time.Sleep(100 * time.Millisecond)
		}
		if got := len(s.times("a")) - asked - 1; got < 9 || got > 10 {
			t.Errorf("in 100 s it was looked up %d times", got)
		}
		if len(s.times("b")) != 0 {
			t.Error("a name was looked up that nobody wants")
		}
		// No way around the backoff.
		time.Sleep(time.Hour)
		s.fails("a", errors.New("out of order"))
		time.Sleep(2 * time.Hour)
		asked = len(s.times("a"))
		for range 6000 {
			n.Failed("a")
			time.Sleep(100 * time.Millisecond)
		}
		if got := len(s.times("a")) - asked; got > 40 {
			t.Errorf("in 10 min a name that fails was looked up %d times", got)
		}
	})
}

func TestHangingNamesDelayNobody(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		var all []string
		for i := range 100 {
			host := fmt.Sprintf("hangs-%d", i)
			s.hangs(host)
			all = append(all, host)
		}
		n.Set(all[:maxLookups-1])
		synctest.Wait()
		s.has("good", 0, "192.0.2.1")
		n.Set(append(all[:maxLookups-1:maxLookups-1], "good"))
		synctest.Wait()
		if answer(n, "good").Addrs == nil {
			t.Error("with one place left, a name waits")
		}
		n.Set(append(all, "good"))
		time.Sleep(100 * timeout / maxLookups * 2) // until all have failed once
		for _, host := range all {
			if got := answer(n, host); !errors.Is(got.Err, context.DeadlineExceeded) || !strings.Contains(got.Err.Error(), "within 10s") {
				t.Fatalf("%s has %v", host, got)
			}
		}
		// From now on half of the places are for names that answer.
		s.mu.Lock()
		s.asked, s.most = make(map[string][]time.Time), 0
		s.mu.Unlock()
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := slices.Max(s.gaps("good")); got > minTTL+minTTL/10 {
			t.Errorf("a name with a TTL of 5 s waited %v", got)
		}
		if s.most > maxRetries+1 {
			t.Errorf("%d lookups ran at a time", s.most)
		}
		s.has("new", 0, "192.0.2.2")
		n.Set(append(all, "good", "new"))
		synctest.Wait()
		if answer(n, "new").Addrs == nil {
			t.Error("a new name waits for those that hang")
		}
		n.Set(nil) // ends their lookups at once
		synctest.Wait()
		if s.running != 0 {
			t.Errorf("%d lookups run for names that nobody wants", s.running)
		}
	})
}

// No method waits for a lookup, whatever it does.
func TestNothingBlocks(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		var all []string
		for i := range 20 {
			host := fmt.Sprintf("hangs-%d", i)
			s.hangs(host)
			all = append(all, host)
		}
		start := time.Now()
		for i := range 100 {
			n.Set(all[i%20:])
			n.Failed(all[i%20])
			n.Current()
		}
		if time.Since(start) != 0 {
			t.Errorf("it took %v", time.Since(start))
		}
		synctest.Wait()
		if s.most > maxLookups {
			t.Errorf("%d lookups ran at a time", s.most)
		}
	})
}

func TestForgottenIsCancelledAndDropped(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		ended := 0
		s.does("a", func(ctx context.Context) ([]netip.Addr, time.Duration, error) {
			<-ctx.Done()
			ended++
			return addrs("192.0.2.66"), time.Hour, nil // all the same
		})
		n.Set([]string{"a"})
		synctest.Wait()
		_, stale := n.Current()
		start := time.Now()
		n.Set([]string{"b"})
		synctest.Wait()
		if ended != 1 || time.Since(start) != 0 {
			t.Errorf("%d lookups were cancelled", ended)
		}
		if all, _ := n.Current(); len(all) != 1 || all["b"].Err == nil {
			t.Error("the result of a forgotten name is kept")
		}
		if !closed(stale) { // by b
			t.Error("nobody was woken for b")
		}
		// Wanted again while the lookup of before runs: that one's result counts for nothing.
		s.does("c", func(ctx context.Context) ([]netip.Addr, time.Duration, error) {
			<-ctx.Done()
			time.Sleep(time.Second)
			return addrs("192.0.2.66"), time.Hour, nil
		})
		n.Set([]string{"c"})
		synctest.Wait()
		n.Set(nil)
		s.has("c", time.Hour, "192.0.2.1")
		n.Set([]string{"c"})
		time.Sleep(time.Minute)
		if got := answer(n, "c").Addrs; !slices.Equal(got, addrs("192.0.2.1")) {
			t.Errorf("have %v", got)
		}
		// What is forgotten and wanted again is looked up anew, and readers are told of both.
		all, stale := n.Current()
		n.Set(nil)
		if now, _ := n.Current(); len(now) != 0 || len(all) != 1 || !closed(stale) {
			t.Errorf("have %v of %v, woken %t", now, all, closed(stale))
		}
		asked := len(s.times("c"))
		n.Set([]string{"c"})
		synctest.Wait()
		if len(s.times("c")) != asked+1 {
			t.Error("it was not looked up anew")
		}
	})
}

func TestPanicsAreErrors(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		s.does("a", func(context.Context) ([]netip.Addr, time.Duration, error) { panic("no") })
		s.has("b", 0, "192.0.2.1")
		n.Set([]string{"a", "b"})
		synctest.Wait()
		if err := answer(n, "a").Err; err == nil || err.Error() != "looking up a: panic: no" {
			t.Errorf("have %v", err)
		}
		if answer(n, "b").Err != nil {
			t.Errorf("b has %v", answer(n, "b"))
		}
		s.has("a", 0, "192.0.2.2")
		time.Sleep(time.Minute)
		if got := answer(n, "a"); got.Err != nil {
			t.Errorf("have %v", got)
		}
	})
}

// Run ends while lookups run, which is no failure of theirs, and another one goes on.
func TestRunAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		n := New(s.lookup, nil)
		n.Set([]string{"early", "hangs"}) // before any Run
		n.Failed("early")
		s.has("early", time.Minute, "192.0.2.1")
		s.hangs("hangs")
		time.Sleep(time.Hour)
		for i := range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			start := time.Now()
			other := make(chan error)
			go func() { time.Sleep(time.Second); other <- n.Run(ctx) }()
			if err := n.Run(ctx); err != nil || time.Since(start) != 5*time.Second {
				t.Fatalf("Run returns %v after %v", err, time.Since(start))
			}
			if err := <-other; err == nil {
				t.Error("two run at a time")
			}
			cancel()
			if got := len(s.times("early")); got != i+1 {
				t.Errorf("the TTL went by %d times, and there were %d lookups", i, got)
			}
			if got := answer(n, "early"); got.Err != nil || len(got.Addrs) != 1 {
				t.Errorf("early has %v", got)
			}
			if got, _ := n.Current(); len(got) != 1 {
				t.Errorf("the end of Run is taken for a failure: %v", got)
			}
			if s.running != 0 {
				t.Error("a lookup runs after Run")
			}
			n.Set([]string{"early", "hangs"})
			time.Sleep(2 * time.Minute)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		asked := len(s.times("early"))
		if err := n.Run(ctx); err != nil || len(s.times("early")) != asked {
			t.Errorf("Run without time returns %v", err)
		}
	})
}

func TestThousandNames(t *testing.T) {
	bubble(t, func(t *testing.T, n *Names, s *server) {
		var hosts []string
		for i := range 1000 {
			host := fmt.Sprintf("node-%d.example.org", i)
			hosts = append(hosts, host)
			s.does(host, func(context.Context) ([]netip.Addr, time.Duration, error) {
				time.Sleep(20 * time.Millisecond)
				return []netip.Addr{netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})}, time.Minute, nil
			})
		}
		start := time.Now()
		n.Set(hosts)
		for {
			all, stale := n.Current()
			if len(all) == len(hosts) {
				break
			}
			woken(t, stale)
		}
		if took := time.Since(start); took != 1000/maxLookups*20*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		_, stale := n.Current()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if closed(stale) || s.most > maxLookups {
			t.Errorf("woken %t, %d lookups at a time", closed(stale), s.most)
		}
		for i, host := range hosts {
			if got := answer(n, host); got.Addrs[0] != netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}) {
				t.Fatalf("%s has %v", host, got)
			}
			if asked := len(s.times(host)); asked < 10 || asked > 11 {
				t.Fatalf("in 10 TTLs there were %d lookups", asked)
			}
		}
		slices.Reverse(hosts)
		if allocs := testing.AllocsPerRun(10, func() { n.Set(hosts) }); allocs != 0 {
			t.Errorf("Set that changes nothing allocates %v times", allocs)
		}
	})
}

// Memory is that of the names wanted now: not of those wanted once, nor of the texts they were part of.
func TestMemory(t *testing.T) {
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	n := New(func(context.Context, string) ([]netip.Addr, time.Duration, error) { return nil, 0, ErrNoName }, nil)
	before := heap()
	for range 3 {
		var hosts []string
		for i := range 20_000 {
			hosts = append(hosts, fmt.Sprint("node-", i))
		}
		n.Set(hosts)
		n.Set(hosts[:20])
		n.Set([]string{(strings.Repeat("x", 1<<20) + "name")[1<<20:]})
	}
	if after := heap(); after > before+100<<10 {
		t.Errorf("one name takes %d KiB", (after-before)>>10)
	}
	if len(n.names) != 1 || len(n.fresh) != 1 {
		t.Errorf("%d names, %d due", len(n.names), len(n.fresh))
	}
	runtime.KeepAlive(n)
}

func TestCanonical(t *testing.T) {
	four := func(from, to int) (out []netip.Addr) {
		for i := from; i < to; i++ {
			out = append(out, netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}))
		}
		return out
	}
	six := func(from, to int) (out []netip.Addr) {
		for i := from; i < to; i++ {
			out = append(out, netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: byte(i)}))
		}
		return out
	}
	for _, test := range []struct {
		name     string
		in, want []netip.Addr
	}{
		{"nothing", nil, nil},
		{"zero", []netip.Addr{{}}, nil},
		{"sorted", addrs("2001:db8::1", "192.0.2.9", "192.0.2.1", "2001:db8::"), addrs("192.0.2.1", "192.0.2.9", "2001:db8::", "2001:db8::1")},
		{"mapped", addrs("::ffff:192.0.2.1", "192.0.2.1"), addrs("192.0.2.1")},
		{"loopback", addrs("127.0.0.1", "::1"), addrs("127.0.0.1", "::1")},
		{"unusable", addrs("0.0.0.0", "::", "::ffff:0.0.0.0", "224.0.0.1", "ff02::1", "255.255.255.255", "::ffff:255.255.255.255", "fe80::1%eth0"), nil},
		{"many IPv4", four(0, 200), four(0, 16)},
		{"many IPv6", six(0, 200), six(0, 16)},
		{"many of both", slices.Concat(four(0, 200), six(0, 200)), slices.Concat(four(0, 8), six(0, 8))},
		{"many IPv4, few IPv6", slices.Concat(six(0, 3), four(0, 200)), slices.Concat(four(0, 13), six(0, 3))},
		{"few IPv4, many IPv6", slices.Concat(six(0, 200), four(0, 3)), slices.Concat(four(0, 3), six(0, 13))},
		{"just enough", slices.Concat(six(0, 9), four(0, 7)), slices.Concat(four(0, 7), six(0, 9))},
	} {
		in := slices.Clone(test.in)
		got := canonical(in)
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
		if !slices.Equal(in, test.in) {
			t.Errorf("%s: what was given has changed", test.name)
		}
		if len(got) > 0 && len(in) > 0 && &got[0] == &in[0] {
			t.Errorf("%s: the slice is not its own", test.name)
		}
	}
}

// handler counts what is logged, and calls back as a handler that knows Names might.
type handler struct {
	slog.Handler
	n    *Names
	mu   *sync.Mutex
	logs *[]string
}

func (h handler) Enabled(context.Context, slog.Level) bool { return true }

func (h handler) Handle(_ context.Context, r slog.Record) error {
	h.n.Current()
	h.mu.Lock()
	defer h.mu.Unlock()
	*h.logs = append(*h.logs, r.Message)
	return nil
}

func TestLogsChangesOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		n := New(s.lookup, nil)
		var mu sync.Mutex
		var logs []string
		n.log = slog.New(handler{n: n, mu: &mu, logs: &logs})
		run(t, n)
		n.Set([]string{"a"})
		time.Sleep(time.Hour)
		s.has("a", 0, "192.0.2.1")
		time.Sleep(time.Hour)
		mu.Lock()
		defer mu.Unlock()
		if len(logs) != 2 || !strings.Contains(logs[0], "does not resolve") || !strings.Contains(logs[1], "again") {
			t.Errorf("in two hours it logs %q", logs)
		}
	})
}

func BenchmarkCurrent(b *testing.B) {
	n, _ := thousand(b)
	b.ReportAllocs()
	for b.Loop() {
		n.Current()
	}
}

// BenchmarkCurrentChanged is what a reader pays who looks after each change.
func BenchmarkCurrentChanged(b *testing.B) {
	n, _ := thousand(b)
	b.ReportAllocs()
	for b.Loop() {
		n.mu.Lock()
		n.changed()
		n.mu.Unlock()
		n.Current()
	}
}

func BenchmarkSet(b *testing.B) {
	n, hosts := thousand(b)
	b.ReportAllocs()
	for b.Loop() {
		n.Set(hosts)
	}
}

// BenchmarkSetOneMore wants a name, and forgets it.
func BenchmarkSetOneMore(b *testing.B) {
	n, hosts := thousand(b)
	more := append(slices.Clone(hosts), "one-more")
	b.ReportAllocs()
	for b.Loop() {
		n.Set(more)
		n.Set(hosts)
	}
}

func thousand(b *testing.B) (*Names, []string) {
	n := New(func(context.Context, string) ([]netip.Addr, time.Duration, error) {
		return addrs("192.0.2.1", "2001:db8::1"), time.Hour, nil
	}, nil)
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-ended })
	var hosts []string
	for i := range 1000 {
		hosts = append(hosts, fmt.Sprintf("node-%d.example.org", i))
	}
	n.Set(hosts)
	for {
		all, stale := n.Current()
		if len(all) == len(hosts) {
			return n, hosts
		}
		<-stale
	}
}
