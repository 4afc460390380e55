// Package relaytest has what the tests of the agent's packages have in common: nodes of a mesh in this
// process, and services on them.
package relaytest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/prefixes"
)

// Timeout is more than anything takes that works.
const Timeout = 30 * time.Second

// Node is a node of a mesh, with the State it shall have.
type Node struct {
	*netstack.Net
	Want datapath.State
	t    testing.TB
}

// NewNode returns a settled node with addresses, which the test's end closes.
func NewNode(t testing.TB, addrs ...string) *Node {
	t.Helper()
	n, err := netstack.New(netstack.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	k, err := key.NewPrivate()
	if err != nil {
		t.Fatal(err)
	}
	d := &Node{Net: n, t: t, Want: datapath.State{
		Device: datapath.Device{Key: k}, Addrs: prefixes.MustParse(addrs...),
		Routes: make(map[netip.Prefix]netip.Addr), Peers: make(map[key.Public]datapath.Peer),
	}}
	d.Sync()
	n.Settle()
	return d
}

// Sync makes the node what Want says.
func (d *Node) Sync() {
	d.t.Helper()
	if err := datapath.Sync(context.Background(), d.Net, d.Want); err != nil {
		d.t.Fatal(err)
	}
}

// Peer makes o a peer of d that has the prefixes.
func (d *Node) Peer(o *Node, has prefixes.Set) {
	d.t.Helper()
	there, err := o.Read(context.Background())
	if err != nil {
		d.t.Fatal(err)
	}
	d.Want.Peers[there.Device.Key.Public()] = datapath.Peer{
		Endpoint: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), there.Device.ListenPort), Prefixes: has,
	}
	for p := range has.All() {
		d.Want.Routes[p] = netip.Addr{}
	}
	d.Sync()
}

// Pair returns nodes at 10.0.0.1 and fd00::1, and at 10.0.0.2 and fd00::2, that are each other's peers.
func Pair(t testing.TB) (a, b *Node) {
	t.Helper()
	a, b = NewNode(t, "10.0.0.1", "fd00::1"), NewNode(t, "10.0.0.2", "fd00::2")
	a.Peer(b, b.Want.Addrs)
	b.Peer(a, a.Want.Addrs)
	return a, b
}

// EchoTCP sends back what each connection sends, until l is closed by the test's end.
func EchoTCP(t testing.TB, l net.Listener) {
	Accept(t, l, func(c net.Conn) { _, _ = io.Copy(c, c) })
}

// Accept has serve deal with each connection of l, until the test's end closes both.
func Accept(t testing.TB, l net.Listener, serve func(net.Conn)) {
	var all sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); l.Close(); all.Wait() })
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				defer context.AfterFunc(ctx, func() { c.Close() })()
				serve(c)
			})
		}
	})
}

// EchoUDP sends back each datagram, until the test's end closes c.
func EchoUDP(t testing.TB, c net.PacketConn) {
	var done sync.WaitGroup
	t.Cleanup(func() { c.Close(); done.Wait() })
	done.Go(func() {
		b := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = c.WriteTo(b[:n], from)
			}
		}
	})
}

// Listen listens on a loopback address of the host.
func Listen(t testing.TB, address string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// Within returns a context that ends after Timeout, and with the test.
func Within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	t.Cleanup(cancel)
	return ctx
}

// Serve runs serve until the test's end, or until stop, and expects that it returns nil then.
func Serve(t testing.TB, serve func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- serve(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(Timeout):
			t.Error("does not end with its context")
		}
	})
	t.Cleanup(stop)
	return stop
}

// Bytes returns n pseudo-random bytes, the same for the same seed.
func Bytes(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// Exchange sends a question over c and ends it (CloseWrite), reads to the end, and compares with want.
func Exchange(c net.Conn, question, want []byte) error {
	_ = c.SetDeadline(time.Now().Add(Timeout))
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(question)
		if err == nil {
			err = c.(interface{ CloseWrite() error }).CloseWrite()
		}
		sent <- err
	}()
	h := sha256.New()
	n, err := io.Copy(h, c)
	if err := errors.Join(err, <-sent); err != nil {
		return err
	}
	if sum := sha256.Sum256(want); n != int64(len(want)) || !bytes.Equal(h.Sum(nil), sum[:]) {
		return fmt.Errorf("%d bytes came that differ from the %d sent", n, len(want))
	}
	return nil
}

// AnswerAfterEnd is a service for Accept and Exchange: it reads to the end, and only then answers.
func AnswerAfterEnd(answer []byte) func(net.Conn) {
	return func(c net.Conn) {
		if _, err := io.Copy(io.Discard, c); err == nil {
			_, _ = c.Write(answer)
		}
	}
}

// AskUDP sends a datagram until the same comes back: any may be lost.
func AskUDP(c net.Conn, b []byte) error {
	end := time.Now().Add(Timeout)
	buf := make([]byte, 1<<16)
	for time.Now().Before(end) {
		if _, err := c.Write(b); err != nil {
			return err
		}
		_ = c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		for {
			n, err := c.Read(buf)
			if err != nil {
				break
			}
			if bytes.Equal(buf[:n], b) {
				return nil
			}
		}
	}
	return fmt.Errorf("no answer to a datagram of %d bytes", len(b))
}
