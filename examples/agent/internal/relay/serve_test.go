package relay_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/warren-mesh/warren/examples/agent/internal/relay"
	"github.com/warren-mesh/warren/examples/agent/internal/relay/relaytest"
)

// logged is a log that may be read.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logged) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func dial(t testing.TB, address string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(relaytest.Timeout))
	return c
}

func ask(c net.Conn, s string) error {
	if _, err := io.WriteString(c, s); err != nil {
		return err
	}
	b := make([]byte, len(s))
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if string(b) != s {
		return errors.New("another answer: " + string(b))
	}
	return nil
}

func TestServe(t *testing.T) {
	l := relaytest.Listen(t, "127.0.0.1:0")
	var log logged
	stop := relaytest.Serve(t, func(ctx context.Context) error {
		return relay.Serve(ctx, l, 2, log.Logger(), func(ctx context.Context, c net.Conn) {
			defer relay.OnEnd(ctx, func() { c.Close() })()
			for b := make([]byte, 1); ; {
				if _, err := c.Read(b); err != nil {
					return
				}
				if b[0] == '!' {
					panic("asked for it")
				}
				c.Write(b)
			}
		})
	})
	one, two := dial(t, l.Addr().String()), dial(t, l.Addr().String())
	if err := errors.Join(ask(one, "one"), ask(two, "two")); err != nil {
		t.Fatal(err)
	}
	another := func() error { // the reset may come before the dial has returned
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return err
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(relaytest.Timeout))
		return ask(c, "three")
	}
	if another() == nil {
		t.Error("a third connection is not closed")
	}
	two.Write([]byte("!"))
	if _, err := two.Read(make([]byte, 1)); err == nil {
		t.Error("the connection of a handle that panicked is not closed")
	}
	for end := time.Now().Add(relaytest.Timeout); another() != nil; {
		if time.Now().After(end) {
			t.Fatal("no place became free")
		}
	}
	if err := ask(one, "still there"); err != nil {
		t.Error(err)
	}
	stop()
	if _, err := one.Read(make([]byte, 1)); err == nil {
		t.Error("the end leaves a connection open")
	}
	if s := log.String(); !strings.Contains(s, "too many") || !strings.Contains(s, "asked for it") {
		t.Errorf("log is %s", s)
	}
}

// flaky is a listener that fails before it works.
type flaky struct {
	net.Listener
	fail int
}

func (f *flaky) Accept() (net.Conn, error) {
	if f.fail > 0 {
		f.fail--
		return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	return f.Listener.Accept()
}

func TestAcceptFails(t *testing.T) {
	l := relaytest.Listen(t, "127.0.0.1:0")
	done := make(chan error, 1)
	go func() {
		done <- relay.Serve(t.Context(), &flaky{l, 2}, 2, slog.New(slog.DiscardHandler), func(_ context.Context, c net.Conn) { io.Copy(c, c) })
	}()
	c := dial(t, l.Addr().String())
	if err := ask(c, "hello"); err != nil {
		t.Error(err)
	}
	c.Close()
	l.Close()
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve returns %v when its listener is closed", err)
	}
}

func TestThrottle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logged
		var th relay.Throttle
		for range 100 {
			th.Log(log.Logger(), slog.LevelInfo, "noise", "key", "value")
			time.Sleep(time.Second)
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) != 10 || !strings.Contains(lines[1], "key=value") || !strings.Contains(lines[1], `"left out"=9`) {
			t.Errorf("%d lines; the second is %s", len(lines), lines[1])
		}
	})
}

func TestSleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if !relay.Sleep(ctx, time.Second) || relay.Sleep(ctx, time.Hour) {
			t.Error("Sleep does not tell what ended it")
		}
	})
}
