package socks5

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/examples/agent/internal/relay/relaytest"
)

// names is a Lookup that knows two names.
func names(_ context.Context, host string) ([]netip.Addr, error) {
	switch host {
	case "node-1":
		return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
	case "node-2": // whose first address nobody has
		return []netip.Addr{netip.MustParseAddr("198.51.100.2"), netip.MustParseAddr("127.0.0.1")}, nil
	case "nobody":
		return nil, nil
	}
	return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
}

func TestConnect(t *testing.T) {
	server, _ := start(t, &Server{Lookup: names, Dialer: hostDialer{map[string]error{"198.51.100.2": netstack.ErrNoRoute}}})
	l := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.EchoTCP(t, l)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for _, host := range []string{"127.0.0.1", "::ffff:127.0.0.1", "node-1", "node-2"} {
		c, bound := mustAsk(t, server, connect, net.JoinHostPort(host, port))
		if !bound.Addr().IsLoopback() || bound.Port() == 0 {
			t.Errorf("%s: bound to %v", host, bound)
		}
		if err := echoed(c, "hello "+host); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	if l6, err := net.Listen("tcp6", "[::1]:0"); err == nil {
		relaytest.EchoTCP(t, l6)
		c, bound := mustAsk(t, server, connect, l6.Addr().String())
		if bound.Addr() != netip.IPv6Loopback() {
			t.Errorf("IPv6: bound to %v", bound)
		}
		if err := echoed(c, "hello"); err != nil {
			t.Error(err)
		}
	}
	// What comes with the request is the connection's.
	c, _, err := ask(t, server, connect, l.Addr().String(), []byte("early")...)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); string(b) != "early" || err != nil {
		t.Errorf("%q comes back, %v", b, err)
	}
}

func TestReplies(t *testing.T) {
	closed := relaytest.Listen(t, "127.0.0.1:0")
	closed.Close()
	server, _ := start(t, &Server{Lookup: names, DialTimeout: 200 * time.Millisecond, Dialer: hostDialer{map[string]error{
		"10.0.0.1": &netstack.WaitError{Err: netstack.ErrNoRoute},
		"10.0.0.2": &netstack.WaitError{Err: netstack.ErrNoHandshake, Cause: context.DeadlineExceeded},
		"10.0.0.3": &netstack.WaitError{Err: netstack.ErrNoAnswer, Cause: context.DeadlineExceeded},
		"10.0.0.4": fs.ErrPermission,
		"10.0.0.5": syscall.ECONNREFUSED,
	}}})
	noNames, _ := start(t, &Server{})
	for _, test := range []struct {
		server, to string
		command    command
		want       code
	}{
		{server, "10.0.0.1:80", connect, networkUnreachable},
		{server, "10.0.0.2:80", connect, hostUnreachable},
		{server, "10.0.0.3:80", connect, ttlExpired},
		{server, "10.0.0.4:80", connect, notAllowed},
		{server, "10.0.0.5:80", connect, connectionRefused},
		{server, "198.51.100.1:80", connect, ttlExpired},
		{server, "nobody:80", connect, hostUnreachable},
		{server, "stranger:80", connect, hostUnreachable},
		{server, "10.0.0.1:80", bind, commandNotSupported},
		{noNames, "node-1:80", connect, typeNotSupported},
	} {
		c, _, err := ask(t, test.server, test.command, test.to)
		if !errors.Is(err, replyError(test.want)) {
			t.Errorf("%v to %s: %v, want reply %d", test.command, test.to, err, test.want)
		}
		if n, err := c.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("after its reply a connection has %d, %v", n, err)
		}
	}
	if runtime.GOOS != "windows" { // whose errors are others
		if _, _, err := ask(t, server, connect, closed.Addr().String()); !errors.Is(err, replyError(connectionRefused)) {
			t.Errorf("a closed port: %v", err)
		}
	}
}

func TestAuth(t *testing.T) {
	server, _ := start(t, &Server{Auth: onlyAnn})
	l := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.EchoTCP(t, l)
	if _, _, err := ask(t, server, connect, l.Addr().String()); err == nil {
		t.Error("served without a name")
	}
	for _, password := range []string{"secret", "guess"} {
		c := open(t, server)
		fmt.Fprintf(c, "\x05\x01\x02\x01\x03ann%c%s", len(password), password)
		b := make([]byte, 4)
		if _, err := io.ReadFull(c, b); err != nil || (b[3] == 0) != (password == "secret") {
			t.Errorf("password %q is answered %x, %v", password, b, err)
		}
	}
}

func TestHalfClose(t *testing.T) {
	server, _ := start(t, &Server{})
	question, answer := relaytest.Bytes(1, 1<<20), relaytest.Bytes(2, 3<<20)
	l := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.Accept(t, l, relaytest.AnswerAfterEnd(answer))
	c, _ := mustAsk(t, server, connect, l.Addr().String())
	if err := relaytest.Exchange(c, question, answer); err != nil {
		t.Error(err)
	}
}

type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestNonsense has clients that do not speak SOCKS5, beside one that does. Each of the former must meet
// its end within the time of the handshake, and what they cost in memory must not grow with them.
func TestNonsense(t *testing.T) {
	var log lines
	const limit = 300 * time.Millisecond
	server, _ := start(t, &Server{HandshakeTimeout: limit, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	l := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.EchoTCP(t, l)
	good, _ := mustAsk(t, server, connect, l.Addr().String())

	var all sync.WaitGroup
	for name, says := range map[string][]byte{
		"nothing":      nil,
		"one byte":     {5},
		"no methods":   {5, 0},
		"many methods": {5, 255, 0},
		"no request":   {5, 1, 0},
		"huge name":    {5, 1, 0, 5, 1, 0, 3, 255, 'a'},
		"SOCKS4":       {4, 1, 0, 80, 10, 0, 0, 2, 0},
		"TLS":          {22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3},
		"HTTP":         []byte("GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
		"noise":        relaytest.Bytes(9, 1<<20),
		"zeros":        make([]byte, 1<<20),
	} {
		for range 5 {
			c := open(t, server)
			all.Go(func() {
				began := time.Now()
				c.Write(says) // may fail: nobody reads all of it
				_, err := io.Copy(io.Discard, c)
				if n := net.Error(nil); errors.As(err, &n) && n.Timeout() {
					t.Errorf("%s: the connection stays", name)
				}
				if took := time.Since(began); took > limit+10*time.Second {
					t.Errorf("%s: the end takes %v", name, took)
				}
			})
		}
	}
	drip := open(t, server)
	all.Go(func() { // a byte now and then
		began := time.Now()
		for i := 0; time.Since(began) < relaytest.Timeout; i++ {
			b := byte(0)
			if i < 2 {
				b = []byte{5, 255}[i]
			}
			if _, err := drip.Write([]byte{b}); err != nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Error("a drip keeps the connection open")
	})
	all.Wait()
	if err := echoed(good, "still here"); err != nil {
		t.Error(err)
	}
	if s := log.String(); strings.Count(s, "\n") > 4 || !strings.Contains(s, "not served") {
		t.Errorf("log is\n%s", s)
	}
}

func TestHTTPAnswer(t *testing.T) {
	server, _ := start(t, &Server{})
	transport := &http.Transport{DisableKeepAlives: true}
	response, err := (&http.Client{Transport: transport}).Post("http://"+server, "text/plain", bytes.NewReader(make([]byte, 10000)))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if b, err := io.ReadAll(response.Body); response.StatusCode != 400 || !strings.Contains(string(b), "SOCKS5") || err != nil {
		t.Errorf("answer is %s, %q, %v", response.Status, b, err)
	}
}

// A client that never reads holds up nobody, and goes once nothing moves.
func TestNeverReads(t *testing.T) {
	server, _ := start(t, &Server{TCPIdle: 500 * time.Millisecond})
	ended := make(chan error, 1)
	l := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.Accept(t, l, func(c net.Conn) {
		for b := make([]byte, 1<<16); ; {
			if _, err := c.Write(b); err != nil {
				ended <- err
				return
			}
		}
	})
	mustAsk(t, server, connect, l.Addr().String())
	select {
	case <-ended:
	case <-time.After(relaytest.Timeout):
		t.Error("the connection stays")
	}
}

func TestMaxClients(t *testing.T) {
	server, _ := start(t, &Server{MaxClients: 2})
	l := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.EchoTCP(t, l)
	one, _ := mustAsk(t, server, connect, l.Addr().String())
	two, _ := mustAsk(t, server, connect, l.Addr().String())
	if c, err := net.Dial("tcp", server); err == nil { // else it was reset before the dial had returned
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(relaytest.Timeout))
		if n, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Errorf("a third client reads %d, %v", n, err)
		}
	}
	if err := errors.Join(echoed(one, "one"), echoed(two, "two")); err != nil {
		t.Error(err)
	}
}

// TestCancel ends a server with connections in each state.
func TestCancel(t *testing.T) {
	server, stop := start(t, &Server{})
	l := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.EchoTCP(t, l)
	conns := []net.Conn{open(t, server)} // says nothing
	c, _ := mustAsk(t, server, connect, l.Addr().String())
	conns = append(conns, c)
	c, bound := mustAsk(t, server, associate, "0.0.0.0:0")
	conns = append(conns, c)
	echo, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	relaytest.EchoUDP(t, echo)
	if err := relaytest.AskUDP(dialUDP(t, bound, echo.LocalAddr().String()), []byte("x")); err != nil {
		t.Error(err)
	}
	dialling := open(t, server)
	dialling.Write(target(t, "198.51.100.1:80").append([]byte{5, 1, 0, 5, 1, 0}))
	io.ReadFull(dialling, make([]byte, 2))
	conns = append(conns, dialling)
	stop() // waits for Serve, and TestMain finds what that left
	for i, c := range conns {
		if n, err := io.Copy(io.Discard, c); n > 10 || isTimeout(err) {
			t.Errorf("connection %d has %d, %v", i, n, err)
		}
	}
}

func isTimeout(err error) bool {
	n := net.Error(nil)
	return errors.As(err, &n) && n.Timeout()
}

func TestServeErrors(t *testing.T) {
	for _, test := range []struct {
		s    Server
		want string
	}{
		{Server{}, "Dialer is nil"},
		{Server{Dialer: hostDialer{}, MaxClients: -1}, "MaxClients is -1"},
		{Server{Dialer: hostDialer{}, UDPIdle: -time.Second}, "UDPIdle is -1s"},
	} {
		l := relaytest.Listen(t, "127.0.0.1:0")
		if err := test.s.Serve(t.Context(), l); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("Serve returns %v, want %s", err, test.want)
		}
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			t.Error("the listener is left open")
		}
	}
	l := relaytest.Listen(t, "127.0.0.1:0")
	l.Close()
	if err := (&Server{Dialer: hostDialer{}}).Serve(t.Context(), l); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve on a closed listener returns %v", err)
	}
}
