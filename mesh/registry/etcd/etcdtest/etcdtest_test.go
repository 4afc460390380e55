package etcdtest_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// each runs a test against both versions.
func each(t *testing.T, f func(*testing.T, etcdtest.Options)) {
	t.Run("3.7", func(t *testing.T) { f(t, etcdtest.Options{}) })
	t.Run("installed", func(t *testing.T) { f(t, etcdtest.Options{Program: etcdtest.Installed(t, "etcd-server")}) })
}

func TestCluster(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		o.Members, o.TLS, o.Auth = 3, true, true
		c := etcdtest.Start(t, o)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		get := func() string {
			t.Helper()
			resp, err := c.Client().Get(ctx, "key")
			if err != nil {
				t.Fatal(err)
			}
			if len(resp.Kvs) == 0 {
				return ""
			}
			return string(resp.Kvs[0].Value)
		}
		put := func(value string) {
			t.Helper()
			if _, err := c.Client().Put(ctx, "key", value); err != nil {
				t.Fatal(err)
			}
		}
		put("old")
		saved := c.Snapshot()
		put("new")
		leader := c.Leader()
		c.Kill(leader)
		if got := get(); got != "new" {
			t.Errorf("after the leader was killed: %q", got)
		}
		if now := c.Leader(); now == leader {
			t.Errorf("%d leads, and was killed", now)
		}
		c.Start(leader)
		c.Compact()
		c.Restore(saved)
		if got := get(); got != "old" {
			t.Errorf("after the restore: %q", got)
		}
		if n := c.Metric(0, "etcd_server_has_leader"); n != 1 {
			t.Errorf("etcd_server_has_leader is %v", n)
		}
	})
}

// echo is a server that sends back what it gets.
func echo(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l
}

func TestProxy(t *testing.T) {
	p := etcdtest.NewProxy(t, echo(t).Addr().String())
	dial := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", p.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		return c
	}
	read := func(c net.Conn, patience time.Duration) error {
		if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 5)
		_, err := io.ReadFull(c, buf)
		return err
	}
	old := dial()
	if err := read(old, time.Minute); err != nil {
		t.Fatal(err)
	}
	p.Silence()
	if _, err := old.Write([]byte("again")); err != nil {
		t.Fatal(err)
	}
	fresh := dial()
	for _, c := range []net.Conn{old, fresh} {
		if err := read(c, 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("in silence: %v", err)
		}
	}
	p.Heal()
	for _, c := range []net.Conn{old, fresh} {
		if err := read(c, time.Minute); err != nil {
			t.Errorf("after it: %v", err)
		}
	}
	p.Cut()
	for _, c := range []net.Conn{old, fresh} {
		if err := read(c, time.Minute); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("cut: %v", err)
		}
	}
	if c, err := net.Dial("tcp", p.Addr()); err == nil {
		c.Close()
		t.Error("a proxy that is cut accepts connections")
	}
	p.Heal()
	last := dial()
	if err := read(last, time.Minute); err != nil {
		t.Error(err)
	}
	p.Drop()
	if err := read(last, time.Minute); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("dropped: %v", err)
	}
	if n := len(p.Conns()); n != 3 {
		t.Errorf("%d connections were made, want 3", n)
	}
}
