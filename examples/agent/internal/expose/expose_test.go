package expose

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/examples/agent/internal/relay/relaytest"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var addr = netip.MustParseAddr("10.0.0.2")

// run publishes a target on node b until the test's end, or until stop.
func run(t testing.TB, b Listener, rule string, o Options) (stop func()) {
	t.Helper()
	r, err := Parse(rule)
	if err != nil {
		t.Fatal(err)
	}
	return relaytest.Serve(t, func(ctx context.Context) error { return Serve(ctx, b, addr, r, o) })
}

// dial connects from node a, and tries again while the service is not yet published.
func dial(t testing.TB, a *relaytest.Node, network, address string) net.Conn {
	t.Helper()
	ctx := relaytest.Within(t)
	for {
		c, err := a.DialContext(ctx, network, address)
		if err == nil {
			t.Cleanup(func() { c.Close() })
			_ = c.SetDeadline(time.Now().Add(relaytest.Timeout))
			return c
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func echoed(c net.Conn, s string) error {
	if _, err := io.WriteString(c, s); err != nil {
		return err
	}
	b := make([]byte, len(s))
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if string(b) != s {
		return fmt.Errorf("%q came back, not %q", b, s)
	}
	return nil
}

// eventually tries until there is no error.
func eventually(t *testing.T, what string, try func() error) {
	t.Helper()
	for end := time.Now().Add(relaytest.Timeout); ; time.Sleep(20 * time.Millisecond) {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %v", what, err)
		}
	}
}

func TestTCP(t *testing.T) {
	a, b := relaytest.Pair(t)
	echo := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.EchoTCP(t, echo)
	stop := run(t, b, "7="+echo.Addr().String(), Options{})
	c := dial(t, a, "tcp", "10.0.0.2:7")
	if err := echoed(c, "hello"); err != nil {
		t.Error(err)
	}

	question, answer := relaytest.Bytes(1, 1e6), relaytest.Bytes(2, 2e6)
	late := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.Accept(t, late, relaytest.AnswerAfterEnd(answer))
	run(t, b, "9="+late.Addr().String(), Options{})
	if err := relaytest.Exchange(dial(t, a, "tcp", "10.0.0.2:9"), question, answer); err != nil {
		t.Errorf("half-close: %v", err)
	}

	var all sync.WaitGroup
	for i := range 30 {
		c := dial(t, a, "tcp", "10.0.0.2:7")
		all.Go(func() {
			data := relaytest.Bytes(byte(i), 20000+i)
			if err := relaytest.Exchange(c, data, data); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()

	stop() // with c open
	if n, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("after the end a connection reads %d, %v", n, err)
	}
	if c, err := a.DialContext(relaytest.Within(t), "tcp", "10.0.0.2:7"); err == nil {
		c.Close()
		t.Error("after the end there is still a listener")
	}
}

func TestUDP(t *testing.T) {
	a, b := relaytest.Pair(t)
	echo, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	sources := make(chan string, 1000)
	relaytest.EchoUDP(t, noting{echo, sources})
	stop := run(t, b, "7/udp="+echo.LocalAddr().String(), Options{MaxClients: 2})
	one, two := dial(t, a, "udp", "10.0.0.2:7"), dial(t, a, "udp", "10.0.0.2:7")
	for _, size := range []int{1, 1300, 9000, 60000} {
		if err := errors.Join(relaytest.AskUDP(one, relaytest.Bytes(1, size)), relaytest.AskUDP(two, relaytest.Bytes(2, size))); err != nil {
			t.Error(err)
		}
	}
	seen := make(map[string]bool)
	for len(sources) > 0 {
		seen[<-sources] = true
	}
	if len(seen) != 2 {
		t.Errorf("the target sees %d sources, want one for each client", len(seen))
	}
	for i := range 5 { // each of which takes the place of another
		if err := relaytest.AskUDP(dial(t, a, "udp", "10.0.0.2:7"), []byte{byte(i)}); err != nil {
			t.Error(err)
		}
	}
	if err := relaytest.AskUDP(one, []byte("again")); err != nil {
		t.Error(err)
	}
	stop()
}

// noting tells the sources of datagrams.
type noting struct {
	net.PacketConn
	sources chan<- string
}

func (n noting) ReadFrom(b []byte) (int, net.Addr, error) {
	size, from, err := n.PacketConn.ReadFrom(b)
	if err == nil {
		n.sources <- from.String()
	}
	return size, from, err
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

func (l *lines) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), s)
}

// TestTargetDown has a target that is not there at first.
func TestTargetDown(t *testing.T) {
	a, b := relaytest.Pair(t)
	l := relaytest.Listen(t, "127.0.0.1:0")
	at := l.Addr().String()
	l.Close()
	var log lines
	o := Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}
	run(t, b, "7="+at, o)
	run(t, b, "7/udp="+at, o)
	for range 10 {
		c := dial(t, a, "tcp", "10.0.0.2:7")
		began := time.Now()
		if n, err := c.Read(make([]byte, 1)); err == nil || time.Since(began) > relaytest.Timeout/2 {
			t.Errorf("a connection to nobody reads %d, %v after %v", n, err, time.Since(began))
		}
		c.Close()
	}
	if n := log.count("target cannot be reached"); n != 1 {
		t.Errorf("%d lines in the log, want 1", n)
	}
	u := dial(t, a, "udp", "10.0.0.2:7")
	for range 10 {
		u.Write([]byte("is anybody there"))
	}

	relaytest.EchoTCP(t, relaytest.Listen(t, at))
	pc, err := net.ListenPacket("udp", at)
	if err != nil {
		t.Fatal(err)
	}
	relaytest.EchoUDP(t, pc)
	if err := echoed(dial(t, a, "tcp", "10.0.0.2:7"), "hello"); err != nil {
		t.Error(err)
	}
	if err := relaytest.AskUDP(u, []byte("hello")); err != nil {
		t.Error(err)
	}
}

// TestAddressComes publishes on an address that the node does not have, then has, loses and has again.
func TestAddressComes(t *testing.T) {
	a, b := relaytest.Pair(t)
	apply := func(op datapath.Op) {
		t.Helper()
		if err := b.Apply(context.Background(), op); err != nil {
			t.Fatal(err)
		}
	}
	mine := prefixes.MustParse("10.0.0.2")
	apply(datapath.RemoveAddrs{Addrs: mine})
	echo := relaytest.Listen(t, "127.0.0.1:0")
	relaytest.EchoTCP(t, echo)
	pc, err := net.ListenPacket("udp", echo.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	relaytest.EchoUDP(t, pc)
	var log lines
	o := Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}
	run(t, b, "7="+echo.Addr().String(), o)
	run(t, b, "7/udp="+echo.Addr().String(), o)
	eventually(t, "the log says why", func() error {
		if n := log.count("not exposed for now"); n < 2 {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	both := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		c, err := a.DialContext(ctx, "tcp", "10.0.0.2:7")
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		u, err := a.DialContext(ctx, "udp", "10.0.0.2:7")
		if err != nil {
			return err
		}
		defer u.Close()
		return errors.Join(echoed(c, "hello"), relaytest.AskUDP(u, []byte("hello")))
	}
	if err := both(); err == nil {
		t.Error("served at an address that is not there")
	}
	for range 2 {
		apply(datapath.AddAddrs{Addrs: mine})
		eventually(t, "the address is there", both)
		apply(datapath.RemoveAddrs{Addrs: mine})
	}
	if n := log.count("not exposed for now"); n > 4 {
		t.Errorf("%d lines in the log about one reason", n)
	}
}

// mortal is a Listener whose listeners come to an end, as one's may whose address vanished.
type mortal struct {
	mu   sync.Mutex
	open []io.Closer
}

func (m *mortal) add(c io.Closer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open = append(m.open, c)
}

func (m *mortal) kill() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.open {
		c.Close()
	}
	n := len(m.open)
	m.open = nil
	return n
}

func (m *mortal) Listen(network, address string) (net.Listener, error) {
	l, err := net.Listen(network, address)
	if err == nil {
		m.add(l)
	}
	return l, err
}

func (m *mortal) ListenPacket(network, address string) (net.PacketConn, error) {
	c, err := net.ListenPacket(network, address)
	if err == nil {
		m.add(c)
	}
	return c, err
}

func TestListenerEnds(t *testing.T) {
	l := relaytest.Listen(t, "127.0.0.1:0")
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	m := &mortal{}
	for _, network := range []string{"tcp", "udp"} {
		rule := Rule{uint16(port), network, "127.0.0.1:1"}
		relaytest.Serve(t, func(ctx context.Context) error {
			return Serve(ctx, m, netip.MustParseAddr("127.0.0.1"), rule, Options{})
		})
	}
	for killed := 0; killed < 6; {
		n := m.kill()
		if killed += n; n == 0 {
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// TestClosed has the mesh end first.
func TestClosed(t *testing.T) {
	for _, network := range []string{"tcp", "udp"} {
		b := relaytest.NewNode(t, "10.0.0.2")
		done := make(chan error, 1)
		go func() { done <- Serve(t.Context(), b, addr, Rule{80, network, "127.0.0.1:80"}, Options{}) }()
		time.Sleep(50 * time.Millisecond)
		b.Close()
		if err := <-done; !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: Serve on a closed mesh returns %v", network, err)
		}
	}
}

func TestServeErrors(t *testing.T) {
	good := Rule{80, "tcp", "127.0.0.1:80"}
	for _, test := range []struct {
		addr netip.Addr
		rule Rule
		o    Options
		want string
	}{
		{netip.Addr{}, good, Options{}, "address"},
		{addr, Rule{0, "tcp", "a:1"}, Options{}, "port is 0"},
		{addr, Rule{80, "sctp", "a:1"}, Options{}, `network "sctp"`},
		{addr, good, Options{MaxClients: -1}, "MaxClients is -1"},
		{addr, good, Options{DialTimeout: -1}, "DialTimeout is -1ns"},
		{addr, good, Options{TCPIdle: -1}, "TCPIdle is -1ns"},
		{addr, good, Options{UDPIdle: -1}, "UDPIdle is -1ns"},
	} {
		if err := Serve(t.Context(), nil, test.addr, test.rule, test.o); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("Serve returns %v, want %s", err, test.want)
		}
	}
}

// A target that takes its time does not keep the end waiting.
func TestCancelWhileDialling(t *testing.T) {
	a, b := relaytest.Pair(t)
	dialling := make(chan struct{}, 2)
	o := Options{Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		dialling <- struct{}{}
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	stop, stopUDP := run(t, b, "7", o), run(t, b, "7/udp", o)
	dial(t, a, "tcp", "10.0.0.2:7")
	<-dialling
	u := dial(t, a, "udp", "10.0.0.2:7")
	eventually(t, "the datagram arrives", func() error {
		u.Write([]byte("x"))
		select {
		case <-dialling:
			return nil
		default:
			return errors.New("not yet")
		}
	})
	stop()
	stopUDP()
}

func ExampleParse() {
	for _, s := range []string{"8080", "53/udp=[::1]:5353", "80=8080"} {
		r, err := Parse(s)
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(r)
	}
	// Output:
	// 8080=127.0.0.1:8080
	// 53/udp=[::1]:5353
	// exposed service "80=8080": target "8080": address 8080: missing port in address; want PORT, PORT=HOST:PORT or either with PORT/udp, such as 8080=127.0.0.1:80
}
