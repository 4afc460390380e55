package etcd_test

import (
	"bytes"
	"flag"
	"log/slog"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	const parallel = "test.parallel"
	if f := flag.Lookup(parallel); f.Value.String() == f.DefValue {
		// These tests wait more than they compute.
		if err := flag.Set(parallel, strconv.Itoa(2*runtime.GOMAXPROCS(0))); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

// each runs a test against the newest and the oldest version, at the same time, and at that of others.
func each(t *testing.T, f func(*testing.T, etcdtest.Options)) {
	t.Parallel()
	alone(t, func(t *testing.T, o etcdtest.Options) {
		t.Parallel()
		f(t, o)
	})
}

// alone is each for what counts goroutines: one after the other.
func alone(t *testing.T, f func(*testing.T, etcdtest.Options)) {
	t.Run("3.7", func(t *testing.T) { f(t, etcdtest.Options{}) })
	t.Run("installed", func(t *testing.T) { f(t, etcdtest.Options{Program: etcdtest.Installed(t, "etcd-server")}) })
}

// short is a timeout for tests that have to wait for it.
const short = time.Second

// patience is how long anything may take on a busy machine.
const patience = time.Minute

func open(t testing.TB, cfg etcd.Config) *etcd.Registry {
	t.Helper()
	if cfg.Prefix == "" {
		cfg.Prefix = "/" + strings.NewReplacer("/", "-", "#", "-").Replace(t.Name()) + "/"
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = short
	}
	if cfg.Logger == nil && testing.Verbose() {
		cfg.Logger = slog.New(slog.NewTextHandler(writer{t}, nil))
	}
	r, err := etcd.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// writer logs to a test.
type writer struct{ t testing.TB }

func (w writer) Write(p []byte) (int, error) {
	w.t.Logf("%s", p)
	return len(p), nil
}

// lockedBuffer is a log to look at.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *lockedBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }
