package resolve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// zone answers as a recursive server that knows these records does: with the chain of CNAME records, and
// truncated over UDP where the client's size demands it.
type zone struct {
	mu      sync.Mutex
	records map[string][]dns.RR // by name; there, but without records: the name exists
	queries []string            // "udp A name."
}

func newZone(t *testing.T, records ...string) *zone {
	t.Helper()
	z := &zone{records: make(map[string][]dns.RR)}
	for _, s := range records {
		rr, err := dns.NewRR(s)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.ToLower(rr.Header().Name)
		z.records[name] = append(z.records[name], rr)
	}
	return z
}

func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	m := z.answer(w, q)
	size := dns.MinMsgSize
	if opt := q.IsEdns0(); opt != nil {
		size = int(opt.UDPSize())
	}
	if w.LocalAddr().Network() == "tcp" {
		size = dns.MaxMsgSize
	}
	m.Truncate(size)
	w.WriteMsg(m)
}

func (z *zone) answer(w dns.ResponseWriter, q *dns.Msg) *dns.Msg {
	z.mu.Lock()
	defer z.mu.Unlock()
	name, qtype := strings.ToLower(q.Question[0].Name), q.Question[0].Qtype
	z.queries = append(z.queries, fmt.Sprintf("%s %s %s", w.LocalAddr().Network(), dns.TypeToString[qtype], name))
	m := new(dns.Msg).SetReply(q)
	m.RecursionAvailable = true
	for range 20 {
		rrs, ok := z.records[name]
		if !ok {
			m.Rcode = dns.RcodeNameError
			return m
		}
		next := ""
		for _, rr := range rrs {
			if c, ok := rr.(*dns.CNAME); ok {
				m.Answer, next = append(m.Answer, rr), strings.ToLower(c.Target)
			} else if rr.Header().Rrtype == qtype {
				m.Answer = append(m.Answer, rr)
			}
		}
		if next == "" {
			return m
		}
		name = next
	}
	return m
}

func (z *zone) asked() []string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return slices.Clone(z.queries)
}

// port is one that is free for UDP and TCP at all addresses.
func port(t *testing.T, ips ...string) string {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", net.JoinHostPort(ips[0], "0"))
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(l.Addr().String())
		l.Close()
		free := true
		for _, ip := range ips {
			c, err := net.ListenPacket("udp", net.JoinHostPort(ip, port))
			if err == nil {
				c.Close()
				l, err = net.Listen("tcp", net.JoinHostPort(ip, port))
			}
			if err == nil {
				l.Close()
			}
			free = free && err == nil
		}
		if free {
			return port
		}
	}
	t.Skip("no port is free at " + strings.Join(ips, " and "))
	return ""
}

// serve starts a server over UDP and TCP.
func serve(t *testing.T, ip, port string, h dns.Handler) {
	t.Helper()
	for _, network := range []string{"udp", "tcp"} {
		started, ended := make(chan struct{}), make(chan error, 1)
		s := &dns.Server{Addr: net.JoinHostPort(ip, port), Net: network, Handler: h, NotifyStartedFunc: func() { close(started) }}
		go func() { ended <- s.ListenAndServe() }()
		select {
		case <-started:
		case err := <-ended:
			t.Fatal(err)
		}
		t.Cleanup(func() {
			s.Shutdown()
			<-ended
		})
	}
}

// newTestSystem has its files in a folder of the test.
func newTestSystem(t *testing.T, port, resolvConf string) *system {
	t.Helper()
	s := newSystem(t.TempDir())
	s.port = port
	s.hostname = func() (string, error) { return "here", nil }
	s.fallback = func(context.Context, string) ([]netip.Addr, time.Duration, error) {
		return nil, 0, errors.New("not from here")
	}
	write(t, s.resolvConf, resolvConf)
	return s
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// one returns a system with one server.
func one(t *testing.T, h dns.Handler, options string) *system {
	t.Helper()
	p := port(t, "127.0.0.1")
	serve(t, "127.0.0.1", p, h)
	return newTestSystem(t, p, "nameserver 127.0.0.1\n"+options)
}

func look(t *testing.T, s *system, host string) ([]netip.Addr, time.Duration, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	return s.lookup(ctx, host)
}

func want(t *testing.T, s *system, host string, ttl time.Duration, a ...string) {
	t.Helper()
	got, gotTTL, err := look(t, s, host)
	if got = canonical(got); err != nil || !slices.Equal(got, addrs(a...)) || gotTTL != ttl {
		t.Errorf("%s is %v for %v, %v; want %v for %v", host, got, gotTTL, err, a, ttl)
	}
}

func wantErr(t *testing.T, s *system, host string, want error) {
	t.Helper()
	if got, _, err := look(t, s, host); !errors.Is(err, want) {
		t.Errorf("%s is %v, %v; want %v", host, got, err, want)
	}
}

func TestSystemBothFamilies(t *testing.T) {
	z := newZone(t,
		"a.example. 300 IN A 192.0.2.1", "a.example. 300 IN A 192.0.2.2", "a.example. 200 IN AAAA 2001:db8::1",
		"four.example. 300 IN A 192.0.2.4", "six.example. 400 IN AAAA 2001:db8::6",
		"txt.example. 300 IN TXT nothing", "week.example. 604800 IN A 192.0.2.7", "odd.example. 4294967295 IN A 192.0.2.8")
	s := one(t, z, "")
	want(t, s, "a.example", 200*time.Second, "192.0.2.1", "192.0.2.2", "2001:db8::1")
	want(t, s, "A.Example.", 200*time.Second, "192.0.2.1", "192.0.2.2", "2001:db8::1")
	want(t, s, "four.example", 300*time.Second, "192.0.2.4")
	want(t, s, "six.example", 400*time.Second, "2001:db8::6")
	want(t, s, "week.example", maxTTL, "192.0.2.7")
	want(t, s, "odd.example", 0, "192.0.2.8")
	wantErr(t, s, "txt.example", ErrNoAddress)
	wantErr(t, s, "none.example", ErrNoName)
	wantErr(t, s, strings.Repeat("x", 64)+".example", errNotName)
	wantErr(t, s, strings.Repeat("x.", 130)+"example", errNotName)
	wantErr(t, s, "a..example", errNotName)
	write(t, s.resolvConf, "nameserver 127.0.0.1\noptions no-aaaa")
	want(t, s, "a.example", 300*time.Second, "192.0.2.1", "192.0.2.2")
	before := len(z.asked())
	write(t, s.resolvConf, "nameserver 127.0.0.1\noptions use-vc")
	want(t, s, "a.example", 200*time.Second, "192.0.2.1", "192.0.2.2", "2001:db8::1")
	for _, q := range z.asked()[before:] {
		if !strings.HasPrefix(q, "tcp ") {
			t.Errorf("with use-vc, it asks %s", q)
		}
	}
}

func TestSystemTruncated(t *testing.T) {
	var records, all []string
	for i := range 100 {
		all = append(all, fmt.Sprintf("10.0.%d.1", i))
		records = append(records, fmt.Sprintf("many.example. 300 IN A 10.0.%d.1", i))
	}
	z := newZone(t, records...)
	s := one(t, z, "")
	got, _, err := look(t, s, "many.example")
	slices.SortFunc(got, netip.Addr.Compare)
	if err != nil || !slices.Equal(got, addrs(all...)) {
		t.Errorf("of 100 addresses, %d came, %v", len(got), err)
	}
	if asked := z.asked(); !slices.Contains(asked, "udp A many.example.") || !slices.Contains(asked, "tcp A many.example.") {
		t.Errorf("it asked %q", asked)
	}
	// Cut off within a record.
	cut := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		if w.LocalAddr().Network() == "tcp" {
			z.ServeDNS(w, q)
			return
		}
		m := z.answer(w, q)
		m.Truncated = true
		data, err := m.Pack()
		if err != nil {
			panic(err)
		}
		w.Write(data[:min(len(data), 100)])
	})
	got, _, err = look(t, one(t, cut, ""), "many.example")
	if err != nil || len(got) != 100 {
		t.Errorf("of 100 addresses, %d came, %v", len(got), err)
	}
}

func TestSystemCNAME(t *testing.T) {
	z := newZone(t,
		"www.example. 300 IN CNAME cdn.example.", "cdn.example. 20 IN CNAME Node.Example.",
		"node.example. 600 IN A 192.0.2.1", "node.example. 700 IN AAAA 2001:db8::1",
		"loop.example. 300 IN CNAME pool.example.", "pool.example. 300 IN CNAME loop.example.",
		"self.example. 300 IN CNAME self.example.",
		"gone.example. 300 IN CNAME nowhere.example.", "empty.example. 300 IN CNAME txt.example.", "txt.example. 300 IN TXT x")
	for i := range maxChain + 1 {
		rr, err := dns.NewRR(fmt.Sprintf("c%d.example. 300 IN CNAME c%d.example.", i, i+1))
		if err != nil {
			t.Fatal(err)
		}
		z.records[rr.Header().Name] = []dns.RR{rr}
	}
	end, err := dns.NewRR(fmt.Sprintf("c%d.example. 300 IN A 192.0.2.9", maxChain+1))
	if err != nil {
		t.Fatal(err)
	}
	z.records[end.Header().Name] = []dns.RR{end}
	check := func(t *testing.T, h dns.Handler) {
		s := one(t, h, "")
		want(t, s, "www.example", 20*time.Second, "192.0.2.1", "2001:db8::1")
		want(t, s, "cdn.example", 20*time.Second, "192.0.2.1", "2001:db8::1")
		want(t, s, "c1.example", 300*time.Second, "192.0.2.9")
		wantErr(t, s, "c0.example", errCircle)
		wantErr(t, s, "loop.example", errCircle)
		wantErr(t, s, "self.example", errCircle)
		wantErr(t, s, "gone.example", ErrNoName)
		wantErr(t, s, "empty.example", ErrNoAddress)
	}
	t.Run("whole", func(t *testing.T) { check(t, z) })
	t.Run("in any order", func(t *testing.T) {
		check(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			m := z.answer(w, q)
			slices.Reverse(m.Answer)
			w.WriteMsg(m)
		}))
	})
	t.Run("one record at a time", func(t *testing.T) { // as a server does that does not know the target
		check(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			m := z.answer(w, q)
			if len(m.Answer) > 0 {
				m.Answer, m.Rcode = m.Answer[:1], dns.RcodeSuccess
			}
			w.WriteMsg(m)
		}))
	})
	t.Run("with addresses of others", func(t *testing.T) {
		check(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			m := z.answer(w, q)
			for _, s := range []string{"bank.example. 1 IN A 192.0.2.66", "bank.example. 1 IN AAAA 2001:db8::66", "www.example. 1 CH A 192.0.2.66"} {
				if rr, err := dns.NewRR(s); err == nil {
					m.Answer = slices.Insert(m.Answer, 0, rr)
				}
			}
			w.WriteMsg(m)
		}))
	})
}

// rcode always answers with a code.
func rcode(code int) dns.Handler {
	return dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) { w.WriteMsg(new(dns.Msg).SetRcode(q, code)) })
}

// mute never answers, over UDP; over TCP it hangs up.
var mute = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) { w.Close() })

// two returns a system with two servers.
func two(t *testing.T, first, second dns.Handler, options string) *system {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("needs a second loopback address")
	}
	p := port(t, "127.0.0.1", "127.0.0.2")
	if first != nil {
		serve(t, "127.0.0.1", p, first)
	}
	if second != nil {
		serve(t, "127.0.0.2", p, second)
	}
	return newTestSystem(t, p, "nameserver 127.0.0.1\nnameserver 127.0.0.2\n"+options)
}

func TestSystemSecondServer(t *testing.T) {
	z := newZone(t, "a.example. 300 IN A 192.0.2.1")
	for _, test := range []struct {
		name  string
		first dns.Handler
	}{
		{"SERVFAIL", rcode(dns.RcodeServerFailure)},
		{"REFUSED", rcode(dns.RcodeRefused)},
		{"NOTIMP", rcode(dns.RcodeNotImplemented)},
		{"unknown code", rcode(11)},
		{"lame", rcode(dns.RcodeSuccess)},
		{"closed", nil},
		{"mute", mute},
		{"truncated without TCP", dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			if w.LocalAddr().Network() == "tcp" {
				w.Close()
				return
			}
			m := new(dns.Msg).SetReply(q)
			m.Truncated = true
			w.WriteMsg(m)
		})},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := two(t, test.first, z, "options timeout:1")
			want(t, s, "a.example", 300*time.Second, "192.0.2.1")
			wantErr(t, s, "none.example", ErrNoName)
		})
	}
	t.Run("both broken", func(t *testing.T) {
		s := two(t, mute, rcode(dns.RcodeServerFailure), "options timeout:1 attempts:1")
		_, _, err := look(t, s, "a.example")
		if err == nil || err.Error() != "name server 127.0.0.2 says SERVFAIL" {
			t.Errorf("have %v", err)
		}
		s = two(t, nil, nil, "")
		_, _, err = look(t, s, "a.example")
		if err == nil || !strings.Contains(err.Error(), "name server 127.0.0.2 cannot be asked: ") || strings.Contains(err.Error(), s.port) {
			t.Errorf("have %v", err)
		}
	})
	t.Run("the first is believed", func(t *testing.T) {
		wantErr(t, two(t, newZone(t), z, ""), "a.example", ErrNoName)
	})
	t.Run("mute is asked last", func(t *testing.T) {
		s := two(t, mute, z, "options timeout:1")
		want(t, s, "a.example", 300*time.Second, "192.0.2.1")
		start := time.Now()
		for range 5 {
			want(t, s, "a.example", 300*time.Second, "192.0.2.1")
		}
		if took := time.Since(start); took > time.Second {
			t.Errorf("five lookups take %v", took)
		}
		s.silent["127.0.0.1"] = time.Now().Add(-silence - time.Second)
		if got := s.order([]string{"127.0.0.1", "127.0.0.2"}); got[0] != "127.0.0.1" || len(s.silent) != 0 {
			t.Errorf("after a minute the order is %v, %v are mute", got, s.silent)
		}
	})
}

// Each server gets its turn, however long the timeout of the one before.
func TestSystemSharesTime(t *testing.T) {
	t.Parallel()
	s := two(t, mute, newZone(t, "a.example. 300 IN A 192.0.2.1"), "options timeout:30")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if got, _, err := s.lookup(ctx, "a.example"); err != nil || len(got) != 1 {
		t.Errorf("have %v, %v", got, err)
	}
}

func TestSystemLostPacket(t *testing.T) {
	t.Parallel()
	z := newZone(t, "a.example. 300 IN A 192.0.2.1", "a.example. 300 IN AAAA 2001:db8::1")
	var mu sync.Mutex
	lost := make(map[uint16]bool)
	s := one(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		mu.Lock()
		again := lost[q.Question[0].Qtype]
		lost[q.Question[0].Qtype] = true
		mu.Unlock()
		if again {
			z.ServeDNS(w, q)
		}
	}), "options timeout:1")
	want(t, s, "a.example", 300*time.Second, "192.0.2.1", "2001:db8::1")
}

func TestSystemOneFamily(t *testing.T) {
	z := newZone(t, "a.example. 300 IN A 192.0.2.1", "a.example. 300 IN AAAA 2001:db8::1")
	for _, test := range []struct {
		name   string
		broken uint16
		h      dns.Handler
		a      string
	}{
		{"AAAA is not answered", dns.TypeAAAA, mute, "192.0.2.1"},
		{"A is not answered", dns.TypeA, mute, "2001:db8::1"},
		{"AAAA fails", dns.TypeAAAA, rcode(dns.RcodeServerFailure), "192.0.2.1"},
		{"A fails", dns.TypeA, rcode(dns.RcodeRefused), "2001:db8::1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := one(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
				if q.Question[0].Qtype == test.broken {
					test.h.ServeDNS(w, q)
				} else {
					z.ServeDNS(w, q)
				}
			}), "")
			start := time.Now()
			want(t, s, "a.example", partialTTL, test.a)
			if took := time.Since(start); took > grace+time.Second {
				t.Errorf("it took %v", took)
			}
			if len(s.silent) != 0 {
				t.Errorf("a server that answered passes for mute: %v", s.silent)
			}
		})
	}
	// There are servers that say so of AAAA though there is an A.
	t.Run("AAAA is NXDOMAIN", func(t *testing.T) {
		s := one(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			if q.Question[0].Qtype == dns.TypeAAAA {
				w.WriteMsg(new(dns.Msg).SetRcode(q, dns.RcodeNameError))
				return
			}
			time.Sleep(50 * time.Millisecond)
			z.ServeDNS(w, q)
		}), "")
		want(t, s, "a.example", 300*time.Second, "192.0.2.1")
	})
}

// What is no answer to the question is as if it had not come.
func TestSystemSpoofed(t *testing.T) {
	z := newZone(t, "a.example. 300 IN A 192.0.2.1", "a.example. 300 IN AAAA 2001:db8::1")
	bad := func(q *dns.Msg) *dns.Msg {
		m := new(dns.Msg).SetReply(q)
		m.RecursionAvailable = true
		for _, s := range []string{"A 192.0.2.66", "AAAA 2001:db8::66"} {
			rr, err := dns.NewRR(m.Question[0].Name + " 300 IN " + s)
			if err != nil {
				panic(err)
			}
			m.Answer = append(m.Answer, rr)
		}
		return m
	}
	wrong := map[string]func(*dns.Msg){
		"id":          func(m *dns.Msg) { m.Id++ },
		"name":        func(m *dns.Msg) { m.Question[0].Name = "b.example." },
		"type":        func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeMX },
		"class":       func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS },
		"no question": func(m *dns.Msg) { m.Question = nil },
		"two":         func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) },
		"query":       func(m *dns.Msg) { m.Response = false },
		"opcode":      func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify },
	}
	spoof := func(w dns.ResponseWriter, q *dns.Msg) {
		for _, change := range wrong {
			m := bad(q.Copy())
			change(m)
			w.WriteMsg(m)
		}
	}
	s := one(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		w.Write([]byte("x"))
		w.Write([]byte(strings.Repeat("garbage", 20)))
		if data, err := bad(q).Pack(); err == nil {
			w.Write(data[:len(data)-3])
		}
		spoof(w, q)
		z.ServeDNS(w, q)
	}), "")
	want(t, s, "a.example", 300*time.Second, "192.0.2.1", "2001:db8::1")

	t.Run("only", func(t *testing.T) {
		t.Parallel()
		s := one(t, dns.HandlerFunc(spoof), "options timeout:1 attempts:1")
		wantErr(t, s, "a.example", errSilent)
	})
	for name, change := range wrong {
		t.Run("over TCP: "+name, func(t *testing.T) {
			t.Parallel()
			s := one(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
				m := bad(q)
				change(m)
				w.WriteMsg(m)
			}), "options timeout:1 attempts:1 use-vc")
			if got, _, err := look(t, s, "a.example"); err == nil {
				t.Errorf("it believes %v", got)
			}
		})
	}
}

// A server that knows no EDNS is asked without.
func TestSystemNoEDNS(t *testing.T) {
	var records []string
	for i := range 60 {
		records = append(records, fmt.Sprintf("a.example. 300 IN A 10.0.%d.1", i))
	}
	z := newZone(t, records...)
	for _, code := range []int{dns.RcodeFormatError, dns.RcodeNotImplemented, dns.RcodeBadVers} {
		s := one(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			if opt := q.IsEdns0(); opt != nil {
				m := new(dns.Msg).SetRcode(q, code)
				if code == dns.RcodeBadVers {
					m.SetEdns0(512, false)
				}
				w.WriteMsg(m)
				return
			}
			z.ServeDNS(w, q)
		}), "")
		if got, _, err := look(t, s, "a.example"); err != nil || len(got) != 60 {
			t.Errorf("%s: have %v, %v", dns.RcodeToString[code], got, err)
		}
	}
}

func TestSystemHostsFile(t *testing.T) {
	z := newZone(t, "a.example. 300 IN A 192.0.2.1", "b.example. 300 IN A 192.0.2.2", "only.example. 300 IN A 192.0.2.3", "only.example. 300 IN AAAA 2001:db8::3")
	s := one(t, z, "search example\n")
	write(t, s.hosts, "# 192.0.2.65 b.example\n192.0.2.99\ta.example  a # b.example\n2001:db8::99 A.Example.\n192.0.2.98 only.example\n127.0.0.1 lo\n0.0.0.0 blocked\n")
	want(t, s, "a.example", hostsTTL, "192.0.2.99", "2001:db8::99")
	want(t, s, "a.example.", hostsTTL, "192.0.2.99", "2001:db8::99")
	want(t, s, "a", hostsTTL, "192.0.2.99")
	want(t, s, "only.example", hostsTTL, "192.0.2.98")
	want(t, s, "lo", hostsTTL, "127.0.0.1")
	want(t, s, "blocked", hostsTTL)
	if asked := z.asked(); len(asked) != 0 {
		t.Errorf("it asked %q", asked)
	}
	want(t, s, "b.example", 300*time.Second, "192.0.2.2")
	// Changes count at once.
	write(t, s.hosts, "192.0.2.97 b.example\n")
	want(t, s, "b.example", hostsTTL, "192.0.2.97")
	want(t, s, "a.example", 300*time.Second, "192.0.2.1")
	if err := os.Remove(s.hosts); err != nil {
		t.Fatal(err)
	}
	want(t, s, "b.example", 300*time.Second, "192.0.2.2")
	// What cannot be read is not taken for empty.
	if err := os.Mkdir(s.hosts, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, _, err := look(t, s, "b.example"); err == nil || !strings.Contains(err.Error(), "hosts") {
		t.Errorf("have %v, %v", got, err)
	}
}

func TestSystemSearch(t *testing.T) {
	z := newZone(t,
		"db.one.example. 300 IN TXT x", "db.two.example. 300 IN A 192.0.2.2",
		"a.b.one.example. 300 IN A 192.0.2.3", "a.b. 300 IN A 192.0.2.4", "plain. 300 IN A 192.0.2.5",
		"x.y. 300 IN A 192.0.2.6", "below.example. 300 IN A 192.0.2.7")
	s := one(t, z, "search one.example two.example.\n")
	want(t, s, "db", 300*time.Second, "192.0.2.2")
	want(t, s, "plain", 300*time.Second, "192.0.2.5")
	want(t, s, "a.b", 300*time.Second, "192.0.2.4")
	wantErr(t, s, "db.", ErrNoName)
	wantErr(t, s, "none", ErrNoName)
	write(t, s.resolvConf, "nameserver 127.0.0.1\nsearch one.example two.example\noptions ndots:2\n")
	want(t, s, "a.b", 300*time.Second, "192.0.2.3")
	want(t, s, "a.b.", 300*time.Second, "192.0.2.4")
	want(t, s, "x.y", 300*time.Second, "192.0.2.6")
	write(t, s.resolvConf, "nameserver 127.0.0.1\nsearch one.example\n")
	wantErr(t, s, "db", ErrNoAddress)
	write(t, s.resolvConf, "nameserver 127.0.0.1\ndomain two.example\n")
	want(t, s, "db", 300*time.Second, "192.0.2.2")
	// Without search domains, that of the host.
	s.hostname = func() (string, error) { return "here.example", nil }
	write(t, s.resolvConf, "nameserver 127.0.0.1\n")
	want(t, s, "below", 300*time.Second, "192.0.2.7")
	write(t, s.resolvConf, "nameserver 127.0.0.1\nsearch .\n")
	wantErr(t, s, "below", ErrNoName)
	// A domain makes the name too long: there are others.
	write(t, s.resolvConf, "nameserver 127.0.0.1\nsearch "+strings.Repeat("long.", 50)+"example two.example\n")
	want(t, s, "db", 300*time.Second, "192.0.2.2")
}

// A server that has trouble with one domain does not end the search; one that does not answer does.
func TestSystemSearchGoesOn(t *testing.T) {
	t.Parallel()
	z := newZone(t, "db.two.example. 300 IN A 192.0.2.2")
	for _, test := range []struct {
		name   string
		h      dns.Handler
		goesOn bool
	}{
		{"SERVFAIL", rcode(dns.RcodeServerFailure), true},
		{"REFUSED", rcode(dns.RcodeRefused), false},
		{"mute", mute, false},
	} {
		s := one(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			if strings.HasSuffix(q.Question[0].Name, ".one.example.") {
				test.h.ServeDNS(w, q)
			} else {
				z.ServeDNS(w, q)
			}
		}), "search one.example two.example\noptions timeout:1 attempts:1")
		if got, _, err := look(t, s, "db"); (err == nil) != test.goesOn {
			t.Errorf("%s: have %v, %v", test.name, got, err)
		}
		if _, _, err := look(t, s, "none"); err == nil || errors.Is(err, ErrNoName) {
			t.Errorf("%s: a name that may be there has %v", test.name, err)
		}
	}
}

func TestSystemFallsBack(t *testing.T) {
	z := newZone(t, "a.example. 300 IN A 192.0.2.1")
	s := one(t, z, "")
	s.fallback = func(_ context.Context, host string) ([]netip.Addr, time.Duration, error) {
		return addrs("192.0.2.77"), fallbackTTL, nil
	}
	conf := "nameserver 127.0.0.1\n"
	for _, test := range []struct {
		name, resolv, nsswitch string
		back                   bool
	}{
		{"usual", conf, "hosts: files dns\n", false},
		{"no nsswitch.conf", conf, "", false},
		{"no servers", "search example\n", "", true},
		{"no sensible server", "nameserver localhost\nnameserver 300.0.0.1\nnameserver\n", "", true},
		{"no resolv.conf", "", "", true},
		{"LDAP", conf, "hosts: files ldap dns\n", true},
	} {
		for path, text := range map[string]string{s.resolvConf: test.resolv, s.nsswitch: test.nsswitch} {
			if text != "" {
				write(t, path, text)
			} else if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
		}
		t.Log(test.name)
		if test.back {
			want(t, s, "a.example", fallbackTTL, "192.0.2.77")
		} else {
			want(t, s, "a.example", 300*time.Second, "192.0.2.1")
		}
	}
}

func TestFallback(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	got, ttl, err := fallback(net.DefaultResolver)(ctx, "localhost")
	if err != nil {
		t.Skip(err)
	}
	if got = canonical(got); len(got) == 0 || !got[0].IsLoopback() || ttl != time.Minute {
		t.Errorf("localhost is %v for %v", got, ttl)
	}
	cancel()
	if _, _, err := fallback(net.DefaultResolver)(ctx, "name.invalid"); err == nil || strings.Contains(err.Error(), "name.invalid") {
		t.Errorf("have %v", err)
	}
}

// Name servers are dialled by the dialer there is, also by the standard library's resolver.
func TestDialer(t *testing.T) {
	refused := errors.New("refused by the dialer")
	var asked atomic.Int32
	d := &net.Dialer{Control: func(string, string, syscall.RawConn) error {
		asked.Add(1)
		return refused
	}}
	s := one(t, mute, "")
	s.dialer = d
	if _, _, err := s.lookup(t.Context(), "a.example"); !errors.Is(err, refused) || asked.Load() == 0 {
		t.Errorf("got %v, with %d connections", err, asked.Load())
	}
	asked.Store(0)
	if _, _, err := fallback(resolver(d))(t.Context(), "name.invalid."); err == nil {
		t.Error("a name was found without a connection")
	} else if asked.Load() == 0 && !errors.Is(err, ErrNoName) { // by a hosts file, or without servers
		t.Errorf("got %v without a connection", err)
	}
}

// A lookup ends with its context, at once.
func TestSystemIsCancelled(t *testing.T) {
	s := one(t, mute, "")
	for _, options := range []string{"", "options use-vc\n"} {
		write(t, s.resolvConf, "nameserver 127.0.0.1\n"+options)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		start := time.Now()
		if got, _, err := s.lookup(ctx, "a.example"); err == nil || time.Since(start) > 2*time.Second {
			t.Errorf("%s: %v, %v after %v", options, got, err, time.Since(start))
		}
	}
}

// The whole of it: names found through System, by a server that comes late.
func TestNamesOverSystem(t *testing.T) {
	z := newZone(t, "a.example. 300 IN A 192.0.2.1")
	var mu sync.Mutex
	late := true
	s := one(t, dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		mu.Lock()
		defer mu.Unlock()
		if late {
			late = q.Question[0].Qtype != dns.TypeA
			rcode(dns.RcodeRefused).ServeDNS(w, q)
			return
		}
		z.ServeDNS(w, q)
	}), "options attempts:1")
	n := New(s.lookup, nil)
	run(t, n)
	n.Set([]string{"a.example", "none.example"})
	deadline := time.After(20 * time.Second)
	for {
		all, stale := n.Current()
		if a, none := all["a.example"], all["none.example"]; a.Err == nil && len(a.Addrs) == 1 && errors.Is(none.Err, ErrNoName) {
			return
		}
		select {
		case <-stale:
		case <-deadline:
			t.Fatalf("have %v", all)
		}
	}
}

func BenchmarkSystem(b *testing.B) {
	// Without the server: what the files cost that each lookup reads.
	s := newSystem(b.TempDir())
	s.fallback = func(context.Context, string) ([]netip.Addr, time.Duration, error) { return nil, 0, nil }
	for path, text := range map[string]string{
		s.resolvConf: "nameserver 127.0.0.1\n",
		s.hosts:      strings.Repeat("0.0.0.0 blocked.example\n", 100) + "192.0.2.1 a.example\n",
		s.nsswitch:   "hosts: files dns\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := s.lookup(b.Context(), "a.example"); err != nil {
			b.Fatal(err)
		}
	}
}
