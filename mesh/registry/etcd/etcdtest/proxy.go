package etcdtest

import (
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Proxy passes TCP connections on to a server, until it is told not to. It begins healthy.
type Proxy struct {
	t      testing.TB
	addr   string
	target string

	mu      sync.Mutex
	listen  net.Listener // nil: cut
	silent  bool
	changed chan struct{} // closed when what is above changes
	conns   map[net.Conn]struct{}
	made    []time.Time
	wg      sync.WaitGroup
}

// NewProxy starts a proxy for a server at an endpoint: "http://host:port" or "host:port". It ends with
// the test.
func NewProxy(t testing.TB, endpoint string) *Proxy {
	t.Helper()
	_, target, ok := strings.Cut(endpoint, "://")
	if !ok {
		target = endpoint
	}
	p := &Proxy{t: t, target: target, addr: freePorts(t, 1)[0], changed: make(chan struct{}), conns: make(map[net.Conn]struct{})}
	p.Heal()
	t.Cleanup(func() {
		p.Cut()
		p.wg.Wait()
	})
	return p
}

// Proxy starts a proxy for a member.
func (c *Cluster) Proxy(i int) *Proxy {
	c.t.Helper()
	return NewProxy(c.t, c.Endpoint(i))
}

// Addr returns "host:port".
func (p *Proxy) Addr() string { return p.addr }

// Conns returns when each of the connections so far was made.
func (p *Proxy) Conns() []time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.made)
}

// Silence has the proxy pass on nothing, as a network that drops packets: connections stay, new ones are
// accepted, nobody is told. What is sent meanwhile gets through after Heal.
func (p *Proxy) Silence() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent = true
	p.wake()
}

// Cut closes all connections and refuses new ones.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listen != nil {
		p.listen.Close()
		p.listen = nil
	}
	for c := range p.conns {
		c.Close()
	}
	p.wake()
}

// Drop closes all connections. New ones are as before.
func (p *Proxy) Drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
	p.wake()
}

// Heal ends Silence and Cut.
func (p *Proxy) Heal() {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.silent = false
	p.wake()
	if p.listen != nil {
		return
	}
	l, err := net.Listen("tcp", p.addr)
	if err != nil {
		p.t.Fatalf("etcdtest: proxy: %v", err)
	}
	p.listen = l
	p.wg.Go(func() { p.accept(l) })
}

func (p *Proxy) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Proxy) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.serve(c, l) })
	}
}

// serve passes one connection on. The server is called only when there is no silence.
func (p *Proxy) serve(c net.Conn, l net.Listener) {
	defer c.Close()
	p.mu.Lock()
	p.made = append(p.made, time.Now())
	if p.listen != l { // cut meanwhile
		p.mu.Unlock()
		return
	}
	p.conns[c] = struct{}{}
	p.mu.Unlock()
	defer p.forget(c)
	if !p.pass() {
		return
	}
	s, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer s.Close()
	p.mu.Lock()
	_, open := p.conns[c]
	if p.listen != l {
		open = false
	}
	p.conns[s] = struct{}{}
	p.mu.Unlock()
	defer p.forget(s)
	if !open {
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() { p.copy(s, c) })
	wg.Go(func() { p.copy(c, s) })
	wg.Wait()
}

func (p *Proxy) forget(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// copy passes on in one direction, and ends both when it ends.
func (p *Proxy) copy(dst, src net.Conn) {
	defer dst.Close()
	defer src.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if !p.pass() {
				return
			}
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			// The end of a connection is a packet too.
			p.pass()
			return
		}
	}
}

// pass waits until there is no silence. It returns false where there is no use in going on.
func (p *Proxy) pass() bool {
	for {
		p.mu.Lock()
		silent, cut, changed := p.silent, p.listen == nil, p.changed
		p.mu.Unlock()
		if cut {
			return false
		}
		if !silent {
			return true
		}
		<-changed
	}
}
