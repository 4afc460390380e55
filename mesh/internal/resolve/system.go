package resolve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	// hostsTTL is for how long an entry of the hosts file is used.
	hostsTTL = 30 * time.Second
	// fallbackTTL is for how long an answer is used that tells no TTL.
	fallbackTTL = time.Minute
	// partialTTL is for how long an answer is used at most where one address family failed.
	partialTTL = time.Minute
	// grace is how long one address family waits for the other.
	grace = 2 * time.Second
	// silence is how long a name server that did not answer is asked last.
	silence = time.Minute
	// maxChain is how many CNAME records are followed.
	maxChain = 16
	// udpSize is what answers over UDP may have: what gets through without fragments (DNS flag day 2020).
	udpSize = 1232
)

var (
	errSilent  = errors.New("does not answer")
	errNobody  = errors.New("nobody answers")
	errLame    = errors.New("knows nothing of the name and asks nobody")
	errCircle  = errors.New("its CNAME records go in a circle or too far")
	errNotName = errors.New("is no host name")
)

// System returns a Lookup that looks a name up as the host's own programs do: the hosts file first, then
// the name servers of resolv.conf with its search domains, options ndots, timeout, attempts, use-vc and
// no-aaaa (resolv.conf(5)). The files are read for each lookup, so that a change of them counts at once.
//
// It asks for A and AAAA at the same time and follows CNAME records; the TTL is the smallest among the
// records used. If only one family has addresses, or the other does not answer within 2 s, what came is
// the answer, for a minute at most if the other failed. A server that did not answer is asked last for a
// minute. The timeout of a server is shortened where others could not be asked any more before ctx ends.
//
// Where resolv.conf is missing, names no server or is not what programs use (Windows, Apple's systems),
// and where nsswitch.conf has sources of host names that matter besides the hosts file and DNS, in this
// order, the standard library's resolver is asked. It tells no TTL: a minute is assumed. Multicast DNS is not asked.
//
// d dials the name servers; nil: as ever.
func System(d *net.Dialer) Lookup {
	s := newSystem("/etc")
	if d != nil {
		s.dialer, s.fallback = d, fallback(resolver(d))
	}
	switch runtime.GOOS {
	case "windows", "darwin", "ios", "plan9", "js", "wasip1":
		return s.fallback
	}
	return s.lookup
}

// resolver is the standard library's, with name servers that d dials.
func resolver(d *net.Dialer) *net.Resolver { return &net.Resolver{PreferGo: true, Dial: d.DialContext} }

// fallback asks a resolver of the standard library.
func fallback(r *net.Resolver) Lookup {
	return func(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
		return standard(ctx, r, host)
	}
}

func standard(ctx context.Context, r *net.Resolver, host string) ([]netip.Addr, time.Duration, error) {
	addrs, err := r.LookupNetIP(ctx, "ip", host)
	if e, ok := errors.AsType[*net.DNSError](err); ok {
		switch { // without the host, which the caller knows, and without ports, which differ each time
		case e.IsNotFound:
			err = ErrNoName
		case e.IsTimeout:
			err = errNobody
		default:
			err = errors.New(e.Err)
		}
	}
	return addrs, fallbackTTL, err
}

// system is what System works with.
type system struct {
	resolvConf, hosts, nsswitch string // paths
	port                        string // of name servers
	hostname                    func() (string, error)
	fallback                    Lookup
	dialer                      *net.Dialer // nil: the usual one

	mu     sync.Mutex
	silent map[string]time.Time // servers that did not answer, and when
}

// newSystem has the files in a folder.
func newSystem(folder string) *system {
	return &system{
		resolvConf: filepath.Join(folder, "resolv.conf"),
		hosts:      filepath.Join(folder, "hosts"),
		nsswitch:   filepath.Join(folder, "nsswitch.conf"),
		port:       "53",
		hostname:   os.Hostname,
		fallback:   fallback(net.DefaultResolver),
		silent:     make(map[string]time.Time),
	}
}

func (s *system) lookup(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
	if _, ok := dns.IsDomainName(host); !ok {
		return nil, 0, errNotName
	}
	conf, ok := s.config()
	if !ok {
		return s.fallback(ctx, host)
	}
	addrs, err := hostsFile(s.hosts, host)
	if err != nil || len(addrs) > 0 {
		return addrs, hostsTTL, err
	}
	// As the C library does: what does not exist, or what its servers have trouble with, is looked for below
	// the next domain. When no server answers at all, the next domain would only take longer.
	var worst error
	for _, name := range conf.NameList(host) {
		if _, ok := dns.IsDomainName(name); !ok {
			continue // too long with this domain
		}
		addrs, ttl, err := s.both(ctx, conf, name)
		if err == nil {
			return addrs, ttl, nil
		}
		if says, _ := errors.AsType[rcodeError](err); says != dns.RcodeServerFailure && rank(err) == unknown {
			return nil, 0, err
		}
		if worst == nil || rank(err) > rank(worst) {
			worst = err
		}
	}
	return nil, 0, worst
}

// What errors say, in the order of what is known to be there.
const (
	noName = iota
	noAddress
	unknown
)

func rank(err error) int {
	switch {
	case errors.Is(err, ErrNoName):
		return noName
	case errors.Is(err, ErrNoAddress):
		return noAddress
	}
	return unknown
}

// family is what one query type gave.
type family struct {
	addrs []netip.Addr
	ttl   time.Duration
	err   error
}

// both looks a full name up in both address families.
func (s *system) both(ctx context.Context, conf config, name string) ([]netip.Addr, time.Duration, error) {
	types := []uint16{dns.TypeA, dns.TypeAAAA}
	if conf.noAAAA {
		types = types[:1]
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	enough := time.AfterFunc(timeout, cancel)
	defer enough.Stop()
	families := make([]family, len(types))
	var wg sync.WaitGroup
	for i, f := range families {
		wg.Go(func() {
			f.err = guard(func() (err error) {
				f.addrs, f.ttl, err = s.family(ctx, conf, name, types[i])
				return err
			})
			if f.err == nil {
				enough.Reset(grace)
			}
			families[i] = f
		})
	}
	wg.Wait()
	return merge(families)
}

// merge makes one answer of those of the families.
func merge(families []family) (addrs []netip.Addr, ttl time.Duration, err error) {
	ttl = maxTTL
	for _, f := range families {
		if f.err == nil {
			addrs, ttl = append(addrs, f.addrs...), min(ttl, f.ttl)
			continue
		}
		if rank(f.err) == unknown {
			ttl = min(ttl, partialTTL)
		}
		if err == nil || rank(f.err) > rank(err) {
			err = f.err
		}
	}
	if len(addrs) > 0 {
		return addrs, ttl, nil
	}
	return nil, 0, err
}

// family looks a full name up in one family, and the names it is an alias of.
func (s *system) family(ctx context.Context, conf config, name string, qtype uint16) ([]netip.Addr, time.Duration, error) {
	c := chain{name: name, ttl: maxTTL}
	for {
		asked := c.name
		m, err := s.exchange(ctx, conf, asked, qtype)
		if err != nil {
			return nil, 0, err
		}
		addrs, err := c.follow(m, qtype)
		switch {
		case err != nil || len(addrs) > 0:
			return addrs, c.ttl, err
		case m.Rcode == dns.RcodeNameError:
			return nil, 0, ErrNoName
		case strings.EqualFold(c.name, asked):
			return nil, 0, ErrNoAddress
		}
	}
}

// chain is a walk along CNAME records.
type chain struct {
	name  string // where it is
	steps int
	ttl   time.Duration // the smallest so far
}

// follow walks on as far as the answer goes. It returns the addresses there, if any. Records of other
// names count for nothing.
func (c *chain) follow(m *dns.Msg, qtype uint16) (addrs []netip.Addr, err error) {
	for {
		var next *dns.CNAME
		for _, rr := range m.Answer {
			h := rr.Header()
			if h.Class != dns.ClassINET || !strings.EqualFold(h.Name, c.name) {
				continue
			}
			switch rr := rr.(type) {
			case *dns.A:
				if a, ok := netip.AddrFromSlice(rr.A.To4()); ok && qtype == dns.TypeA {
					addrs = append(addrs, a)
					c.uses(h)
				}
			case *dns.AAAA:
				if a, ok := netip.AddrFromSlice(rr.AAAA); ok && qtype == dns.TypeAAAA {
					addrs = append(addrs, a)
					c.uses(h)
				}
			case *dns.CNAME:
				if next == nil {
					next = rr
				}
			}
		}
		if len(addrs) > 0 || next == nil {
			return addrs, nil
		}
		if c.steps++; c.steps > maxChain {
			return nil, errCircle
		}
		c.name = next.Target
		c.uses(next.Header())
	}
}

func (c *chain) uses(h *dns.RR_Header) {
	ttl := h.Ttl
	if ttl > 1<<31-1 {
		ttl = 0 // RFC 2181, section 8
	}
	c.ttl = min(c.ttl, time.Duration(ttl)*time.Second)
}

// rcodeError is a response code that is a failure.
type rcodeError int

func (e rcodeError) Error() string {
	if s, ok := dns.RcodeToString[int(e)]; ok {
		return "says " + s
	}
	return fmt.Sprintf("says code %d", int(e))
}

// exchange asks the servers in order, and in rounds, until one says that the name exists or does not.
func (s *system) exchange(ctx context.Context, conf config, name string, qtype uint16) (*dns.Msg, error) {
	servers := s.order(conf.Servers)
	last := errNobody
	for range conf.Attempts {
		for i, server := range servers {
			if ctx.Err() != nil {
				return nil, last
			}
			limit := time.Duration(conf.Timeout) * time.Second
			if end, ok := ctx.Deadline(); ok {
				limit = min(limit, time.Until(end)/time.Duration(len(servers)-i))
			}
			m, err := s.ask(ctx, conf, limit, server, name, qtype)
			if err == nil {
				return m, nil
			}
			last = fmt.Errorf("name server %s %w", server, err)
		}
	}
	return nil, last
}

// order puts servers last that did not answer.
func (s *system) order(servers []string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for server, since := range s.silent {
		if time.Since(since) > silence {
			delete(s.silent, server)
		}
	}
	quiet := func(server string) int {
		if _, ok := s.silent[server]; ok {
			return 1
		}
		return 0
	}
	servers = slices.Clone(servers)
	slices.SortStableFunc(servers, func(a, b string) int { return quiet(a) - quiet(b) })
	return servers
}

// answered keeps whether a server did.
func (s *system) answered(server string, did bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if did {
		delete(s.silent, server)
	} else {
		s.silent[server] = time.Now()
	}
}

// ask asks one server once, and again where it has to be asked differently.
func (s *system) ask(ctx context.Context, conf config, limit time.Duration, server, name string, qtype uint16) (*dns.Msg, error) {
	one, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	query := func(network string, edns bool) (*dns.Msg, error) {
		q := new(dns.Msg).SetQuestion(name, qtype)
		if edns {
			q.SetEdns0(udpSize, false)
		}
		return transfer(one, s.dialer, network, net.JoinHostPort(server, s.port), q)
	}
	network := "udp"
	if conf.useTCP {
		network = "tcp"
	}
	edns := true
	m, err := query(network, edns)
	if err == nil && slices.Contains([]int{dns.RcodeFormatError, dns.RcodeNotImplemented, dns.RcodeBadVers}, m.Rcode) {
		edns = false // which it may not know
		m, err = query(network, edns)
	}
	if err == nil && m.Truncated && network == "udp" {
		m, err = query("tcp", edns)
	}
	if err == nil || ctx.Err() == nil && limit >= time.Second { // else it had no time to answer
		s.answered(server, err == nil)
	}
	switch {
	case err != nil:
		return nil, reason(err)
	case m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError:
		return nil, rcodeError(m.Rcode)
	case m.Rcode == dns.RcodeSuccess && len(m.Answer) == 0 && !m.Authoritative && !m.RecursionAvailable:
		return nil, errLame
	}
	return m, nil
}

// reason is what is the same each time of an error of the network: no local port.
func reason(err error) error {
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() || errors.Is(err, context.Canceled) {
		return errSilent
	}
	if e, ok := errors.AsType[*net.OpError](err); ok {
		err = e.Err
	}
	return fmt.Errorf("cannot be asked: %w", err)
}

// transfer sends a query and waits for its answer until ctx ends. Over UDP, what is no answer to it is
// passed over, since anybody may send that.
func transfer(ctx context.Context, d *net.Dialer, network, server string, q *dns.Msg) (*dns.Msg, error) {
	conn, err := (&dns.Client{Net: network, Dialer: d}).DialContext(ctx, server)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	conn.UDPSize = dns.DefaultMsgSize // more than what was asked for, for servers that do not care
	if end, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(end); err != nil {
			return nil, err
		}
	}
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	if err := conn.WriteMsg(q); err != nil {
		return nil, err
	}
	for {
		data, err := conn.ReadMsgHeader(nil)
		if err != nil && !(network == "udp" && errors.Is(err, dns.ErrShortRead)) {
			return nil, err
		}
		m := new(dns.Msg)
		// What is cut off may end within a record.
		if err == nil {
			err = m.Unpack(data)
		}
		if (err == nil || m.Truncated && network == "udp") && answers(q, m) {
			return m, nil
		}
		if network != "udp" {
			return nil, errors.New("answers something else")
		}
	}
}

// answers reports whether m is an answer to q.
func answers(q, m *dns.Msg) bool {
	return m.Id == q.Id && m.Response && m.Opcode == dns.OpcodeQuery && len(m.Question) == 1 &&
		m.Question[0].Qtype == q.Question[0].Qtype && m.Question[0].Qclass == q.Question[0].Qclass &&
		strings.EqualFold(m.Question[0].Name, q.Question[0].Name)
}
