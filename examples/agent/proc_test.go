//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/warren-mesh/warren/examples/agent/internal/control"
)

// nobody is whom agents run as where the tests run as root.
const (
	nobody     = 65534
	nobodyText = "65534"
)

// program returns a path of the agent that every user may run: the test binary, which is the agent where
// it is called so.
var program = sync.OnceValues(func() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "agent-test-")
	if err != nil {
		return "", err
	}
	atEnd = append(atEnd, func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "agent")
	if err := os.Chmod(dir, 0o755); err != nil {
		return "", err
	}
	if os.Link(self, path) == nil {
		return path, nil
	}
	from, err := os.Open(self)
	if err != nil {
		return "", err
	}
	defer from.Close()
	to, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return "", err
	}
	_, err = io.Copy(to, from)
	return path, errors.Join(err, to.Close())
})

// unprivileged has a command run as nobody where the tests run as root.
func unprivileged(cmd *exec.Cmd) {
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
}

// folder returns a folder of whoever unprivileged has run.
func folder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if os.Geteuid() == 0 {
		if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chown(dir, nobody, nobody)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// proc is an agent in a process of its own.
type proc struct {
	t       *testing.T
	name    string
	args    []string
	state   string
	control control.Client
	web     string                // host:port of what it exposes on port 80
	sink    *sink                 // behind port 7/udp
	limit   int                   // of descriptors; 0: the system's
	launch  func(*exec.Cmd) error // starts it; nil: as nobody where the tests run as root

	mu    sync.Mutex
	log   bytes.Buffer
	cmd   *exec.Cmd
	ended chan struct{}
}

func (p *proc) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *proc) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// newProc makes an agent that is not started yet. At /name it answers with its name, at /big with as many
// bytes.
func newProc(t *testing.T, name, registry string, args ...string) *proc {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/name", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, name) })
	mux.HandleFunc("/big", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.Copy(w, bigBody()) })
	web := httptest.NewServer(mux)
	t.Cleanup(web.Close)
	dir := folder(t)
	p := &proc{t: t, name: name, state: filepath.Join(dir, "state"), web: strings.TrimPrefix(web.URL, "http://"), sink: newSink(t)}
	p.control = control.Client{Path: filepath.Join(p.state, "agent.sock")}
	if !slices.Contains(args, "--endpoint") {
		args = append(args, "--endpoint", "127.0.0.1")
	}
	p.args = append([]string{"run", "--state", p.state, "--node", name, "--registry", registry,
		"--socks5", "127.0.0.1:0", "--expose", "80=" + p.web, "--expose", "7/udp=" + p.sink.addr.String()}, args...)
	t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		if t.Failed() {
			t.Logf("%s said:\n%s", name, p.said())
		}
	})
	return p
}

func (p *proc) start() *proc {
	p.t.Helper()
	path, err := program()
	if err != nil {
		p.t.Fatal(err)
	}
	p.cmd = exec.Command(path, p.args...)
	if p.limit > 0 {
		p.cmd = exec.Command("sh", append([]string{"-c", fmt.Sprintf(`ulimit -n %d && exec "$0" "$@"`, p.limit), path}, p.args...)...)
	}
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "WARREN_") })
	launch := p.launch
	if launch == nil {
		launch = func(cmd *exec.Cmd) error { unprivileged(cmd); return cmd.Start() }
	}
	if err := launch(p.cmd); err != nil {
		p.t.Fatal(err)
	}
	p.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // its exit status is in cmd
		close(ended)
	}(p.cmd, p.ended)
	return p
}

// signal sends a signal, if the process runs. After SIGKILL it waits for its end.
func (p *proc) signal(s syscall.Signal) {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Signal(s) // fails if it ended
	if s == syscall.SIGKILL {
		<-p.ended
	}
}

// stop stops the agent as an operator does, and returns its exit status.
func (p *proc) stop() int {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	return p.wait()
}

func (p *proc) wait() int {
	p.t.Helper()
	select {
	case <-p.ended:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patient):
		p.t.Fatalf("%s does not end", p.name)
		return 0
	}
}

// until waits until ok holds for what the agent sees.
func (p *proc) until(what string, ok func(control.Status) bool) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patient)
	defer cancel()
	var last control.Status
	var err error
	for ctx.Err() == nil {
		for last, err = range p.control.Watch(ctx) {
			if err == nil && ok(last) {
				return
			}
		}
		select {
		case <-p.ended:
			p.t.Fatalf("%s ended, and was to be: %s", p.name, what)
		case <-time.After(20 * time.Millisecond):
		}
	}
	p.t.Fatalf("%s is not: %s; it has the peers %q, conditions %v: %v", p.name, what, peers(last), last.Conditions, err)
}

func published(s control.Status) bool { return s.Ready && s.Self.Published }

func peers(s control.Status) (names []string) {
	for _, p := range s.Peers {
		names = append(names, p.Node)
	}
	return names
}

// knows is that the agent has just these peers.
func knows(names ...string) func(control.Status) bool {
	return func(s control.Status) bool { return slices.Equal(peers(s), names) }
}

func (p *proc) status() control.Status {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), patient)
	defer cancel()
	s, err := p.control.Status(ctx)
	if err != nil {
		p.t.Fatalf("%s: %v", p.name, err)
	}
	return s
}

// fetch fetches http://to/path through the agent.
func (p *proc) fetch(to, path string) (string, error) {
	ctx, cancel := context.WithTimeout(p.t.Context(), patient)
	defer cancel()
	client := http.Client{Transport: &http.Transport{
		DialContext:       func(ctx context.Context, _, to string) (net.Conn, error) { return p.control.Dial(ctx, "tcp", to) },
		DisableKeepAlives: true,
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+to+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

// reachAll has each agent fetch from each.
func reachAll(t *testing.T, ps ...*proc) {
	t.Helper()
	var all sync.WaitGroup
	for _, from := range ps {
		for _, to := range ps {
			all.Go(func() {
				// Who has just heard of a node may hear of its new address a moment later.
				var got string
				var err error
				for end := time.Now().Add(patient); time.Now().Before(end) && got != to.name; time.Sleep(50 * time.Millisecond) {
					got, err = from.fetch(to.name, "/name")
				}
				if got != to.name {
					t.Errorf("%s fetched from %s: %q and %v", from.name, to.name, got, err)
				}
			})
		}
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// observe notes which peers an agent loses from now on. It goes on until the agent or the test ends.
func (p *proc) observe() *observed {
	o := &observed{}
	ready := make(chan struct{})
	ctx, cancel := context.WithCancel(p.t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		var was []string
		for s, err := range p.control.Watch(ctx) {
			if err != nil {
				return
			}
			for _, n := range was {
				if !slices.Contains(peers(s), n) {
					o.mu.Lock()
					o.lost = append(o.lost, n)
					o.mu.Unlock()
				}
			}
			if was == nil {
				close(ready)
			}
			was = peers(s)
		}
	})
	<-ready
	o.stop = func() { cancel(); done.Wait() }
	p.t.Cleanup(o.stop)
	return o
}

type observed struct {
	stop func()
	mu   sync.Mutex
	lost []string
}

// sink counts the datagrams that arrive at it, by sender.
type sink struct {
	addr netip.AddrPort
	mu   sync.Mutex
	got  map[string]map[uint64]bool
}

func newSink(t *testing.T) *sink {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadBuffer(1 << 20)
	s := &sink{addr: c.LocalAddr().(*net.UDPAddr).AddrPort(), got: make(map[string]map[uint64]bool)}
	var done sync.WaitGroup
	done.Go(func() {
		b := make([]byte, 2048)
		for {
			n, err := c.Read(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil || n < 8 {
				continue
			}
			s.mu.Lock()
			from := string(b[8:n])
			if s.got[from] == nil {
				s.got[from] = make(map[uint64]bool)
			}
			s.got[from][binary.BigEndian.Uint64(b)] = true
			s.mu.Unlock()
		}
	})
	t.Cleanup(func() { _ = c.Close(); done.Wait() })
	return s
}

func (s *sink) count(from string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.got[from])
}

// stream sends numbered datagrams from one agent's SOCKS5 proxy to another agent's exposed service, 50 a
// second, until check, which fails the test where one did not arrive.
func stream(t *testing.T, from, to *proc) (check func()) {
	t.Helper()
	u := associate(t, from.status().Agent.Socks5)
	name := from.name + " " + t.Name()
	send := func(n uint64) {
		b := binary.BigEndian.AppendUint64(nil, n)
		u.send(t, to.name, 7, append(b, name...))
	}
	// Until the first arrives there is no session, and what is sent may be too early.
	for end := time.Now().Add(patient); to.sink.count(name) == 0; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no datagram gets from %s to %s", from.name, to.name)
		}
		send(0)
	}
	var sent atomic.Uint64
	stop := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				send(sent.Add(1))
			case <-stop:
				return
			}
		}
	})
	end := sync.OnceFunc(func() { close(stop); done.Wait() })
	t.Cleanup(end)
	return func() {
		t.Helper()
		end()
		want := int(sent.Load()) + 1
		for end := time.Now().Add(10 * time.Second); to.sink.count(name) < want && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		}
		if got := to.sink.count(name); got != want {
			t.Errorf("from %s to %s, %d of %d datagrams were lost", from.name, to.name, want-got, want)
		} else {
			t.Logf("from %s to %s, %d datagrams arrived and none was lost", from.name, to.name, want)
		}
	}
}

// association is a SOCKS5 UDP association (RFC 1928).
type association struct {
	tcp net.Conn
	udp net.Conn
}

func associate(t *testing.T, proxy string) *association {
	t.Helper()
	c, err := net.DialTimeout("tcp", proxy, patient)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patient))
	if _, err := c.Write([]byte{5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 12)
	if _, err := io.ReadFull(c, b); err != nil || !bytes.Equal(b[:6], []byte{5, 0, 5, 0, 0, 1}) {
		t.Fatalf("the proxy answers % x: %v", b, err)
	}
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[6:10])), binary.BigEndian.Uint16(b[10:]))
	u, err := net.Dial("udp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = u.Close() })
	return &association{c, u}
}

func (a *association) send(t *testing.T, host string, port uint16, data []byte) {
	b := append([]byte{0, 0, 0, 3, byte(len(host))}, host...)
	b = binary.BigEndian.AppendUint16(b, port)
	if _, err := a.udp.Write(append(b, data...)); err != nil {
		t.Errorf("sending to the proxy: %v", err)
	}
}

// receive returns the data of one datagram.
func (a *association) receive(timeout time.Duration) ([]byte, error) {
	_ = a.udp.SetReadDeadline(time.Now().Add(timeout))
	b := make([]byte, 2048)
	n, err := a.udp.Read(b)
	if err != nil {
		return nil, err
	}
	for kind, size := range map[byte]int{1: 4, 4: 16} {
		if n >= 4+size+2 && b[3] == kind {
			return b[4+size+2 : n], nil
		}
	}
	return nil, fmt.Errorf("the proxy sent % x", b[:n])
}

// bigBody is bytes that do not repeat, and are the same each time.
func bigBody() io.Reader { return io.LimitReader(&counting{}, big) }

type counting struct{ n uint64 }

func (c *counting) Read(b []byte) (int, error) {
	n := 0
	for ; n+8 <= len(b); n += 8 {
		c.n = c.n*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b[n:], c.n)
	}
	if n == 0 {
		return 0, io.ErrShortBuffer
	}
	return n, nil
}

// lookCurl returns the path of curl.
func lookCurl(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("curl")
	switch {
	case err != nil && os.Getenv("CI") == "true":
		t.Fatalf("needs curl: %v", err)
	case err != nil:
		t.Skipf("needs curl: %v", err)
	}
	return path
}
