package control_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/mesh/watch"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is an agent that does as it is told by the names it is asked about.
type fake struct {
	status watch.Value[control.Status]
	stop   context.CancelFunc // of the server, which leave brings about

	mu    sync.Mutex
	asked []string
}

func (f *fake) note(format string, a ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, fmt.Sprintf(format, a...))
}

func (f *fake) Status() (control.Status, <-chan struct{}) {
	s, _, stale := f.status.Get()
	return s, stale
}

func (f *fake) Leave(context.Context) error { f.note("leave"); f.stop(); return nil }

func (f *fake) Forget(_ context.Context, node string, force bool) error {
	f.note("forget %s %t", node, force)
	switch node {
	case "alive":
		return &control.Error{Code: control.Refused, Message: "alive is alive"}
	case "broken":
		return errors.New("the registry is broken")
	}
	return nil
}

func (f *fake) Ping(ctx context.Context, to string) (control.Pong, error) {
	if to == "silent" {
		<-ctx.Done()
		return control.Pong{}, &control.Error{Code: control.NoAnswer, Message: "silent is silent"}
	}
	return control.Pong{Addr: netip.MustParseAddr("fd00::1"), RTT: time.Millisecond}, nil
}

// Dial connects to an end that sends back what it gets, in capitals, once all of it has come.
func (f *fake) Dial(_ context.Context, network, to string) (net.Conn, error) {
	f.note("dial %s %s", network, to)
	if to != "echo:1" {
		return nil, fmt.Errorf("dialling: %w", &control.Error{Code: control.NoSuchNode, Message: "no such node"})
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c)
		_, _ = io.WriteString(c, strings.ToUpper(string(b)))
	}()
	return net.Dial("tcp", l.Addr().String())
}

// serve serves a fake until the test ends, and returns a client of it.
func serve(t *testing.T) (*fake, control.Client, func()) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := control.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	f := &fake{stop: cancel}
	served := make(chan error, 1)
	go func() { served <- control.Serve(ctx, l, f, slog.New(slog.DiscardHandler)) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serving: %v", err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the socket stays: %v", err)
		}
	})
	t.Cleanup(stop)
	return f, control.Client{Path: path}, stop
}

func TestCalls(t *testing.T) {
	f, c, _ := serve(t)
	ctx := t.Context()
	f.status.Set(control.Status{Version: 7, Peers: []control.Peer{{Node: "beta", State: control.Up}}})
	if s, err := c.Status(ctx); err != nil || s.Version != 7 || len(s.Peers) != 1 || s.Peers[0].State != control.Up {
		t.Errorf("status: %+v, %v", s, err)
	}
	if p, err := c.Ping(ctx, "beta", time.Second); err != nil || p.RTT != time.Millisecond || p.Addr != netip.MustParseAddr("fd00::1") {
		t.Errorf("ping: %+v, %v", p, err)
	}
	if err := c.Forget(ctx, "beta", true); err != nil {
		t.Errorf("forget: %v", err)
	}
	for what, test := range map[string]struct {
		err  error
		code control.Code
		text string
	}{
		"what is refused":       {c.Forget(ctx, "alive", false), control.Refused, "alive is alive"},
		"what fails":            {c.Forget(ctx, "broken", false), control.Failed, "the registry is broken"},
		"who does not answer":   {second(c.Ping(ctx, "silent", 20*time.Millisecond)), control.NoAnswer, "silent is silent"},
		"a timeout of nothing":  {second(c.Ping(ctx, "beta", -1)), control.BadRequest, "timeout is no duration from 1ns to 5m"},
		"who cannot be dialled": {second(c.Dial(ctx, "tcp", "nobody:1")), control.NoSuchNode, "no such node"},
	} {
		e, ok := errors.AsType[*control.Error](test.err)
		if !ok || e.Code != test.code || e.Message != test.text {
			t.Errorf("%s: got %v, want %s: %s", what, test.err, test.code, test.text)
		}
	}
	if err := c.Leave(ctx); err != nil {
		t.Errorf("leave, which ends the server: %v", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if got := strings.Join(f.asked, ", "); got != "forget beta true, forget alive false, forget broken false, dial tcp nobody:1, leave" && !strings.HasSuffix(got, "leave") {
		t.Errorf("the agent was asked: %s", got)
	}
}

func second[T any](_ T, err error) error { return err }

// A connection in the mesh ends in one direction while the other goes on.
func TestDial(t *testing.T) {
	_, c, stop := serve(t)
	conn, err := c.Dial(t.Context(), "tcp", "echo:1")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	text := strings.Repeat("all of it. ", 100_000)
	go func() {
		_, _ = io.WriteString(conn, text)
		_ = conn.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil || string(got) != strings.ToUpper(text) {
		t.Errorf("%d bytes came back, and %v", len(got), err)
	}

	// The end of the agent is the end of its connections.
	conn, err = c.Dial(t.Context(), "tcp", "echo:1")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stop()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	if b, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) || len(b) > 0 {
		t.Errorf("got %q and %v", b, err)
	}
}

func TestWatch(t *testing.T) {
	f, c, stop := serve(t)
	f.status.Set(control.Status{Version: 1})
	var seen []uint64
	var last error
	for s, err := range c.Watch(t.Context()) {
		if err != nil {
			last = err
			break
		}
		seen = append(seen, s.Version)
		if s.Version < 5 {
			f.status.Set(control.Status{Version: s.Version + 1})
		} else {
			go stop()
		}
	}
	if fmt.Sprint(seen) != "[1 2 3 4 5]" || last == nil || !strings.Contains(last.Error(), "the agent ended") {
		t.Errorf("saw %v, and then %v", seen, last)
	}
	stop() // the watch may end before the socket does
	for _, err := range c.Watch(t.Context()) {
		if !errors.Is(err, control.ErrNotRunning) {
			t.Errorf("after its end: %v", err)
		}
	}
}

func TestSocket(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("needs sockets with permissions")
	}
	ctx := t.Context()
	for name, dir := range map[string]string{"short": t.TempDir(), "long": filepath.Join(t.TempDir(), strings.Repeat("long/", 30))} {
		t.Run(name, func(t *testing.T) {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "agent.sock")
			c := control.Client{Path: path}
			if _, err := c.Status(ctx); !errors.Is(err, control.ErrNotRunning) || !strings.Contains(err.Error(), path) {
				t.Errorf("before anybody listens: %v", err)
			}
			l, err := control.Listen(ctx, path)
			if err != nil {
				t.Fatal(err)
			}
			if info, err := os.Lstat(path); err != nil || info.Mode() != fs.ModeSocket|0o600 {
				t.Errorf("the socket is %v: %v", info.Mode(), err)
			}
			first := l // which l is not for the whole of the test
			go func() {
				for {
					conn, err := first.Accept()
					if err != nil {
						return
					}
					_ = conn.Close()
				}
			}()
			if _, err := control.Listen(ctx, path); !errors.Is(err, control.ErrInUse) {
				t.Errorf("a second one: %v", err)
			}
			if _, err := c.Status(ctx); err == nil || errors.Is(err, control.ErrNotRunning) {
				t.Errorf("one that says nothing: %v", err)
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			if es, err := os.ReadDir(dir); err != nil || len(es) > 0 {
				t.Errorf("left behind: %v, %v", es, err)
			}
			// One that was killed leaves its socket.
			dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s")})
			if err != nil {
				t.Fatal(err)
			}
			dead.SetUnlinkOnClose(false)
			if err := errors.Join(os.Rename(dead.Addr().String(), path), dead.Close()); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Status(ctx); !errors.Is(err, control.ErrNotRunning) {
				t.Errorf("of one that was killed: %v", err)
			}
			l, err = control.Listen(ctx, path)
			if err != nil {
				t.Fatal(err)
			}
			// Whose socket was replaced does not remove the new one.
			m := filepath.Join(dir, "other")
			if err := os.WriteFile(m, []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(os.Rename(m, path), l.Close()); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(path); err != nil {
				t.Errorf("something else was removed: %v", err)
			}
			if _, err := control.Listen(ctx, path); err == nil || !strings.Contains(err.Error(), "no socket") {
				t.Errorf("in place of a file: %v", err)
			}
		})
	}
}

// What an agent that was killed while it began to listen has left goes with the next one, and nothing else.
func TestSocketSwept(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("makes no temporary folder there")
	}
	dir := t.TempDir()
	for _, name := range []string{".agent.sock-123", ".agent.sock-", ".agent.sock-x1", ".other.sock-123"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, ".agent.sock-123", "s")})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	if err := errors.Join(dead.Close(), os.WriteFile(filepath.Join(dir, ".agent.sock-5"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	l, err := control.Listen(t.Context(), filepath.Join(dir, "agent.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, e := range es {
		left = append(left, e.Name())
	}
	if got := strings.Join(left, " "); got != ".agent.sock- .agent.sock-5 .agent.sock-x1 .other.sock-123 agent.sock" {
		t.Errorf("there are %s", got)
	}
}

// Whatever somebody sends, others are answered.
func TestNonsense(t *testing.T) {
	f, c, _ := serve(t)
	f.status.Set(control.Status{Version: 1})
	for _, text := range []string{"", "\x00\x01\x02", "GET / HTTP/1.1\r\n\r\n", "POST /v1/dial HTTP/1.1\r\nHost: x\r\n\r\n", "POST /v1/forget?force=maybe HTTP/1.1\r\nHost: x\r\n\r\n",
		"GET /v1/leave HTTP/1.1\r\nHost: x\r\n\r\n", "POST /v1/ping?timeout=1y HTTP/1.1\r\nHost: x\r\n\r\n", "GET /" + strings.Repeat("a", 1<<20)} {
		conn, err := net.Dial("unix", c.Path)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, text)
		_ = conn.(*net.UnixConn).CloseWrite()
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		b, _ := io.ReadAll(io.LimitReader(conn, 1<<16))
		if strings.Contains(string(b), " 200 ") {
			t.Errorf("%.40q is answered %q", text, b)
		}
		_ = conn.Close()
	}
	if s, err := c.Status(t.Context()); err != nil || s.Version != 1 {
		t.Errorf("status: %+v, %v", s, err)
	}
	// An agent that is none.
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	other := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })}
	done := make(chan struct{})
	go func() { _ = other.Serve(l); close(done) }()
	defer func() { _ = other.Close(); <-done }()
	if _, err := (control.Client{Path: path}).Status(t.Context()); err == nil || !strings.Contains(err.Error(), "no agent's answer") {
		t.Errorf("got %v", err)
	}
	if _, err := (control.Client{Path: path}).Dial(t.Context(), "tcp", "a:1"); err == nil || !strings.Contains(err.Error(), "no agent's answer") {
		t.Errorf("got %v", err)
	}
}
