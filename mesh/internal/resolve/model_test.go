package resolve

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// model is what is to be known, from what the lookups returned and in the simplest way there is. It runs
// the lookups itself, one lock around all.
type model struct {
	*server
	t       *rapid.T
	n       *Names
	wanted  map[string]*wanted
	changes int // how often readers are to be woken
	// A channel that Current gave, and how many changes there were.
	stale <-chan struct{}
	at    int
}

// wanted is what is to be known of one name.
type wanted struct {
	addrs  []netip.Addr
	err    error
	known  bool
	ended  time.Time // the last lookup
	began  time.Time
	ttl    time.Duration
	fails  int       // in a row
	failed time.Time // when Failed was called since
	runs   bool
}

func (m *model) lookup(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
	m.mu.Lock()
	w := m.wanted[host]
	switch now := time.Now(); {
	case w == nil:
		m.t.Errorf("%s is looked up, and nobody wants it", host)
	case w.runs:
		m.t.Errorf("%s is looked up twice at a time", host)
	case w.known && w.fails == 0 && now.Before(w.ended.Add(w.ttl)) && (w.failed.IsZero() || now.Before(w.began.Add(minRetry))):
		m.t.Errorf("%s is looked up %v after a TTL of %v began", host, now.Sub(w.ended), w.ttl)
	case w.fails > 0 && now.Before(w.ended.Add(minBackoff)):
		m.t.Errorf("%s is looked up %v after a failure", host, now.Sub(w.ended))
	}
	if w != nil {
		w.runs, w.began, w.failed = true, time.Now(), time.Time{}
	}
	m.mu.Unlock()

	addrs, ttl, err := m.server.lookup(ctx, host)

	m.mu.Lock()
	defer m.mu.Unlock()
	if w == nil || m.wanted[host] != w {
		return addrs, ttl, err
	}
	was := *w
	w.runs, w.known, w.ended = false, true, time.Now()
	set := make(map[netip.Addr]bool)
	for _, a := range addrs {
		if a.Zone() == "" && !a.IsUnspecified() {
			set[a.Unmap()] = true
		}
	}
	if err == nil && len(set) == 0 {
		err = ErrNoAddress
	}
	if w.err = err; err == nil {
		w.fails, w.ttl = 0, min(max(ttl, minTTL), maxTTL)
		w.addrs = slices.SortedFunc(maps.Keys(set), func(a, b netip.Addr) int {
			switch {
			case a.Is4() && b.Is6():
				return -1
			case a.Is6() && b.Is4():
				return 1
			}
			return slices.Compare(a.AsSlice(), b.AsSlice())
		})
	} else {
		w.fails++
	}
	// Errors of one name are told apart by their text; of this server, whether it was out of time counts.
	if !was.known || !slices.Equal(was.addrs, w.addrs) || fmt.Sprint(was.err) != fmt.Sprint(w.err) {
		m.changes++
	}
	return addrs, ttl, err
}

func (m *model) set(hosts []string) {
	m.mu.Lock()
	forgotten := false
	for host, w := range m.wanted {
		if !slices.Contains(hosts, host) {
			forgotten = forgotten || w.known
			delete(m.wanted, host)
		}
	}
	for _, host := range hosts {
		if m.wanted[host] == nil {
			m.wanted[host] = new(wanted)
		}
	}
	if forgotten {
		m.changes++
	}
	m.mu.Unlock()
	m.n.Set(hosts)
}

func (m *model) failed(host string) {
	m.mu.Lock()
	if w := m.wanted[host]; w != nil && !w.runs && w.failed.IsZero() {
		w.failed = time.Now()
	}
	m.mu.Unlock()
	m.n.Failed(host)
}

func (m *model) check(t *rapid.T) {
	synctest.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.most > maxLookups {
		t.Fatalf("%d lookups ran at a time", m.most)
	}
	if m.stale != nil && closed(m.stale) != (m.changes > m.at) {
		t.Fatalf("a channel is closed %t, there were %d changes", closed(m.stale), m.changes-m.at)
	}
	all, stale := m.n.Current()
	m.stale, m.at = stale, m.changes
	known := 0
	for host, w := range m.wanted {
		got, ok := all[host]
		if ok != w.known {
			t.Fatalf("%s has an answer: %t, want %t", host, ok, w.known)
		}
		if w.known {
			known++
			m.same(t, host, w, got)
		} else if !w.runs && m.running < maxRetries {
			t.Fatalf("%s waits for its first lookup while %d run", host, m.running)
		}
	}
	if len(all) != known {
		t.Fatalf("there are %d answers, want %d", len(all), known)
	}
}

// same compares what is known of one name.
func (m *model) same(t *rapid.T, host string, w *wanted, got Answer) {
	if !slices.Equal(got.Addrs, w.addrs) {
		t.Fatalf("%s has %v, want %v", host, got.Addrs, w.addrs)
	}
	if (got.Err == nil) != (w.err == nil) || !errors.Is(got.Err, w.err) {
		t.Fatalf("%s has %v, want %v", host, got.Err, w.err)
	}
	if w.runs {
		if got.Next.After(w.began) {
			t.Fatalf("%s is looked up before its time", host)
		}
		return
	}
	low, high := w.ended.Add(w.ttl), w.ended.Add(w.ttl+w.ttl/10)
	switch {
	case w.fails > 0:
		low, high = w.ended.Add(minBackoff), w.ended.Add(min(minBackoff<<min(w.fails, 6), maxBackoff))
	case !w.failed.IsZero():
		low = w.began.Add(minRetry)
		if low.Before(w.failed) {
			low = w.failed
		}
		if high.Before(low) {
			low = w.ended.Add(w.ttl) // the TTL is over first
		} else if !got.Next.After(low) || w.ended.Add(w.ttl).After(low) {
			high = low
		}
	}
	if got.Next.Before(low) || got.Next.After(high) {
		t.Fatalf("%s is looked up again %v after a lookup that took %v, want %v to %v (TTL %v, %d failures, Failed %v)", host,
			got.Next.Sub(w.ended), w.ended.Sub(w.began), low.Sub(w.ended), high.Sub(w.ended), w.ttl, w.fails, w.failed)
	}
	if got.Next.Before(time.Now()) && m.running < maxRetries {
		t.Fatalf("%s is late by %v while %d lookups run", host, time.Since(got.Next), m.running)
	}
}

func TestModel(t *testing.T) {
	var hosts []string
	for i := range 12 {
		hosts = append(hosts, fmt.Sprint("host-", i))
	}
	pool := addrs("192.0.2.1", "192.0.2.2", "::ffff:192.0.2.2", "2001:db8::1", "2001:db8::2", "10.0.0.1", "0.0.0.0", "fe80::1%eth0")
	rapid.Check(t, func(t *rapid.T) {
		rapid.SyncTest(t, func(t *rapid.T) {
			m := &model{server: newServer(), t: t, wanted: make(map[string]*wanted)}
			m.n = New(m.lookup, nil)
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() { ended <- m.n.Run(ctx) }()
			defer func() {
				m.set(nil)
				cancel()
				if err := <-ended; err != nil {
					t.Errorf("Run returns %v", err)
				}
			}()
			host := rapid.SampledFrom(hosts)
			t.Repeat(map[string]func(*rapid.T){
				"set": func(t *rapid.T) { m.set(rapid.SliceOf(host).Draw(t, "hosts")) },
				"all": func(t *rapid.T) { m.set(hosts) },
				"has": func(t *rapid.T) {
					some := rapid.SliceOf(rapid.SampledFrom(pool)).Draw(t, "addrs")
					ttl := rapid.SampledFrom([]time.Duration{0, 10 * time.Second, time.Minute, time.Hour}).Draw(t, "ttl")
					wait := rapid.SampledFrom([]time.Duration{0, time.Second, 9 * time.Second}).Draw(t, "wait")
					m.does(host.Draw(t, "host"), func(ctx context.Context) ([]netip.Addr, time.Duration, error) {
						select {
						case <-time.After(wait):
							return some, ttl, nil
						case <-ctx.Done():
							return nil, 0, context.Cause(ctx)
						}
					})
				},
				"hangs":  func(t *rapid.T) { m.hangs(host.Draw(t, "host")) },
				"fails":  func(t *rapid.T) { m.fails(host.Draw(t, "host"), errors.New("out of order")) },
				"failed": func(t *rapid.T) { m.failed(host.Draw(t, "host")) },
				"sleep": func(t *rapid.T) {
					time.Sleep(rapid.SampledFrom([]time.Duration{1, time.Second, 10 * time.Second, time.Minute, 5 * time.Minute}).Draw(t, "time") + 1)
				},
				"": m.check,
			})
		})
	})
}
