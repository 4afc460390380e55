package tun

import (
	"bufio"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/internal/uapi"
	"github.com/warren-mesh/warren/prefixes"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(childOf); path != "" {
		child(path)
	}
	if text := os.Getenv(benchEnv); text != "" {
		benchChild(text)
	}
	goleak.VerifyTestMain(m)
}

// The main thread stays with the main goroutine: one that ended on it in another namespace would leave it
// there, and /proc/self would be about that.
func init() { runtime.LockOSThread() }

// need skips a test where the machine cannot run it.
func need(t testing.TB) {
	t.Helper()
	nettest.Need(t, check(clonePath, true))
}

// space is a network namespace that a TUN can be in.
type space struct{ *nettest.Space }

func newSpace(t testing.TB) *space {
	t.Helper()
	need(t)
	return &space{nettest.NewSpace(t)}
}

// wired returns two namespaces that are joined by a wire.
func wired(t testing.TB) (a, b *space) {
	t.Helper()
	a, b = newSpace(t), newSpace(t)
	nettest.Wire(a.Space, b.Space)
	return a, b
}

// tun returns a TUN in s, whose socket is in a folder of its own.
func (s *space) tun(t testing.TB, change ...func(*Options)) *TUN {
	t.Helper()
	o := Options{Namespace: s.Path, Socket: folder(t), Logger: nettest.Logger()}
	for _, f := range change {
		f(&o)
	}
	d, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// folder is one with a short name, which a socket needs.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tun")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// say says something to the socket of a device, as wg(8) would, and returns the answer.
func say(path, text string) (string, error) {
	c, err := net.Dial("unix", path)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := io.WriteString(c, text+"\n"); err != nil {
		return "", err
	}
	var b strings.Builder
	for r := bufio.NewReader(c); ; {
		line, err := r.ReadString('\n')
		if err != nil {
			return b.String(), err
		}
		if line == "\n" {
			return b.String(), nil
		}
		b.WriteString(line)
	}
}

// outside sets something of the device from outside.
func outside(t testing.TB, d *TUN, text string) {
	t.Helper()
	if answer, err := say(d.opts.socket(), "set=1\n"+text); err != nil || answer != "errno=0\n" {
		t.Fatalf("setting something from outside: %q, %v", answer, err)
	}
}

func harness() datapathtest.Harness {
	var last *space
	return datapathtest.Harness{
		New: func(t testing.TB) datapath.Datapath {
			s := newSpace(t)
			s.Out()
			last = s
			return s.tun(t)
		},
		Occupy: func(_ testing.TB, port uint16) func() { return last.Occupy(port) },
		Outside: func(t testing.TB, d datapath.Datapath, op datapath.Op) {
			o, ok := op.(datapath.RemovePeer)
			if !ok {
				t.Fatalf("op %T from outside", op)
			}
			outside(t, d.(*TUN), uapi.RemovePeer(o.Key))
		},
	}
}

func TestSuite(t *testing.T) {
	t.Parallel()
	need(t)
	datapathtest.Run(t, harness())
}

// node is a TUN with a State that says what it shall be.
type node struct {
	*TUN
	*nettest.Node
	space *space
}

func set(s ...string) prefixes.Set { return prefixes.MustParse(s...) }

func newNode(t testing.TB, s *space, name string, addrs prefixes.Set, change ...func(*Options)) *node {
	t.Helper()
	d := s.tun(t, change...)
	return &node{d, nettest.NewNode(t, name, d, addrs), s}
}

// pair is two namespaces joined by a wire, with a node in each; the nodes know each other.
type pair struct{ a, b *node }

func newPair(t testing.TB, change ...func(*Options)) pair {
	t.Helper()
	sa, sb := wired(t)
	return pair{newNode(t, sa, "a", addrsA, change...), newNode(t, sb, "b", addrsB, change...)}
}

// connect makes the two peers of each other.
func (p pair) connect(o nettest.Outer) {
	p.a.T.Helper()
	o.Connect(p.a.Node, p.b.Node)
}

// plain is an underlay of IPv4, without preshared keys.
var plain = nettest.Outers[0]

var addrsA, addrsB = set("10.0.0.1", "fd00::1"), set("10.0.0.2", "fd00::2")
