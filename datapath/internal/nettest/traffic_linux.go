package nettest

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Sockets are where the connections of a program come from: a namespace, or a network stack of the
// program's own.
type Sockets interface {
	DialContext(ctx context.Context, network, addr string) (net.Conn, error)
	Listen(network, addr string) (net.Listener, error)
	ListenPacket(network, addr string) (net.PacketConn, error)
}

// DialContext implements Sockets.
func (s *Space) DialContext(ctx context.Context, network, addr string) (c net.Conn, err error) {
	err = s.In(func() error {
		c, err = (&net.Dialer{Timeout: 20 * time.Second}).DialContext(ctx, network, addr)
		return err
	})
	return c, err
}

// Dial is DialContext without a context.
func (s *Space) Dial(network, addr string) (net.Conn, error) {
	return s.DialContext(context.Background(), network, addr)
}

// Listen implements Sockets.
func (s *Space) Listen(network, addr string) (l net.Listener, err error) {
	err = s.In(func() error {
		l, err = net.Listen(network, addr)
		return err
	})
	return l, err
}

// ListenPacket implements Sockets.
func (s *Space) ListenPacket(network, addr string) (c net.PacketConn, err error) {
	err = s.In(func() error {
		c, err = net.ListenPacket(network, addr)
		return err
	})
	return c, err
}

// exchangeTimeout bounds an exchange.
const exchangeTimeout = time.Minute

// Exchange has a TCP connection to an address of server carry size random bytes both ways at once, and compares
// hashes.
func Exchange(t testing.TB, what string, size int, server, client Sockets, addr string) {
	t.Helper()
	said, err := TryExchange(size, server, client, addr)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	t.Logf("%s: %s", what, said)
}

var errHashes = errors.New("what arrived is not what was sent")

// TryExchange is Exchange for whoever wants to know how it went.
func TryExchange(size int, server, client Sockets, addr string) (said string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), exchangeTimeout)
	defer cancel()
	l, err := server.Listen("tcp", net.JoinHostPort(addr, "0"))
	if err != nil {
		return "", err
	}
	defer l.Close()
	type end struct {
		sent, got [32]byte
		err       error
	}
	both := func(c net.Conn) (e end) {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(exchangeTimeout))
		out := make([]byte, size)
		rand.Read(out)
		e.sent = sha256.Sum256(out)
		werr := make(chan error, 1)
		go func() {
			_, err := c.Write(out)
			werr <- err
		}()
		in := make([]byte, size)
		_, e.err = io.ReadFull(c, in)
		e.got = sha256.Sum256(in)
		if err := <-werr; e.err == nil {
			e.err = err
		}
		if e.err == nil { // keep it open until the other side has it all
			_, _ = c.Write([]byte{1})
			_, e.err = io.ReadFull(c, in[:1])
		}
		return e
	}
	served := make(chan end, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			served <- end{err: err}
			return
		}
		served <- both(c)
	}()
	begun := time.Now()
	c, err := client.DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		l.Close()
		<-served
		return "", err
	}
	connected := time.Since(begun)
	here := both(c)
	there := <-served
	if here.err != nil || there.err != nil {
		return "", errors.Join(here.err, there.err)
	}
	if here.sent != there.got || there.sent != here.got {
		return "", errHashes
	}
	return fmt.Sprintf("connected in %v, %d KiB each way in %v, hashes equal", connected.Round(time.Millisecond), size>>10, time.Since(begun).Round(time.Millisecond)), nil
}

// Flow is a TCP connection that carries random bytes both ways, evenly, for as long as it is left to.
type Flow struct {
	begun time.Time
	stop  chan struct{}
	ends  [2]*flowEnd
	wg    sync.WaitGroup
}

type flowEnd struct {
	net.Conn
	sent, got hash.Hash
	bytes     int // sent
	errs      [2]error
}

// flowChunk is how many bytes of a Flow go at once. The first says whether more come.
const flowChunk = 16 << 10

// NewFlow begins a Flow to an address of server, which ends with the test. Every so often 16 KiB go either way.
func NewFlow(t testing.TB, server, client Sockets, addr string, every time.Duration) *Flow {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), exchangeTimeout)
	defer cancel()
	l, err := server.Listen("tcp", net.JoinHostPort(addr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	here, err := client.DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { here.Close() })
	there, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { there.Close() })
	f := &Flow{begun: time.Now(), stop: make(chan struct{})}
	for i, c := range []net.Conn{here, there} {
		_ = c.SetDeadline(time.Now().Add(exchangeTimeout))
		e := &flowEnd{Conn: c, sent: sha256.New(), got: sha256.New()}
		f.ends[i] = e
		f.wg.Go(func() { e.errs[0] = e.send(f.stop, every) })
		f.wg.Go(func() { e.errs[1] = e.receive() })
	}
	return f
}

func (e *flowEnd) send(stop <-chan struct{}, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	b := make([]byte, flowChunk)
	for b[0] = 1; b[0] == 1; e.bytes += len(b) {
		rand.Read(b[1:])
		select {
		case <-stop:
			b[0] = 0
		case <-tick.C:
		}
		e.sent.Write(b)
		if _, err := e.Write(b); err != nil {
			return err
		}
	}
	return nil
}

func (e *flowEnd) receive() error {
	b := make([]byte, flowChunk)
	for b[0] = 1; b[0] == 1; {
		if _, err := io.ReadFull(e, b); err != nil {
			return err
		}
		e.got.Write(b)
	}
	return nil
}

// End ends the Flow once all has arrived that was sent, and compares hashes.
func (f *Flow) End() (said string, err error) {
	close(f.stop)
	f.wg.Wait()
	a, b := f.ends[0], f.ends[1]
	if err := errors.Join(a.errs[0], a.errs[1], b.errs[0], b.errs[1]); err != nil {
		return "", err
	}
	if !bytes.Equal(a.sent.Sum(nil), b.got.Sum(nil)) || !bytes.Equal(b.sent.Sum(nil), a.got.Sum(nil)) {
		return "", errHashes
	}
	return fmt.Sprintf("%d and %d KiB in %v, hashes equal", a.bytes>>10, b.bytes>>10, time.Since(f.begun).Round(time.Millisecond)), nil
}

// Echo has datagrams of some sizes, the largest of which do not fit a packet, go to an address of server and
// back. Each may be lost now and then, as datagrams may.
func Echo(t testing.TB, what string, server, client Sockets, addr string, sizes ...int) {
	t.Helper()
	in, err := server.ListenPacket("udp", net.JoinHostPort(addr, "0"))
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	var served sync.WaitGroup
	defer served.Wait()
	defer in.Close()
	served.Go(func() {
		b := make([]byte, 1<<16)
		for {
			n, from, err := in.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = in.WriteTo(b[:n], from)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), exchangeTimeout)
	defer cancel()
	out, err := client.DialContext(ctx, "udp", in.LocalAddr().String())
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer out.Close()
	const tries = 5
	for _, size := range sizes {
		sent, got := make([]byte, size), make([]byte, 1<<16)
		rand.Read(sent)
		n, err := 0, errors.New("none was sent")
		for range tries {
			if _, err = out.Write(sent); err == nil {
				_ = out.SetReadDeadline(time.Now().Add(2 * time.Second))
				n, err = out.Read(got)
			}
			if err == nil && bytes.Equal(got[:n], sent) {
				break
			}
		}
		if err != nil || !bytes.Equal(got[:n], sent) {
			t.Errorf("%s: a datagram of %d bytes, %d times: %d bytes came back, %v", what, size, tries, n, err)
		}
	}
}

// Stream sends datagrams from one place to another, evenly, and knows which arrived.
type Stream struct {
	t    testing.TB
	sent atomic.Uint64
	mu   sync.Mutex
	got  map[uint64]bool // by number
	errs []error         // of sending
}

// NewStream begins a Stream to an address of to, which ends with the test: a datagram every 2 ms. It returns once
// the first has arrived.
func NewStream(t testing.TB, from, to Sockets, addr string) *Stream {
	t.Helper()
	return NewStreamEvery(t, from, to, addr, 2*time.Millisecond)
}

// NewStreamEvery is NewStream with another time from one datagram to the next.
func NewStreamEvery(t testing.TB, from, to Sockets, addr string, every time.Duration) *Stream {
	t.Helper()
	s := &Stream{t: t, got: make(map[uint64]bool)}
	in, err := to.ListenPacket("udp", net.JoinHostPort(addr, "0"))
	if err != nil {
		t.Fatal(err)
	}
	if c, ok := in.(*net.UDPConn); ok {
		_ = c.SetReadBuffer(4 << 20)
	}
	out, err := from.DialContext(t.Context(), "udp", in.LocalAddr().String())
	if err != nil {
		in.Close()
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		var b [128]byte
		for {
			n, _, err := in.ReadFrom(b[:])
			if err != nil {
				return
			}
			if n == len(b) {
				s.mu.Lock()
				s.got[binary.BigEndian.Uint64(b[:])] = true
				s.mu.Unlock()
			}
		}
	})
	wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		var b [128]byte
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			binary.BigEndian.PutUint64(b[:], s.sent.Load())
			if _, err := out.Write(b[:]); err != nil {
				s.mu.Lock()
				s.errs = append(s.errs, err)
				s.mu.Unlock()
			}
			s.sent.Add(1)
		}
	})
	t.Cleanup(func() {
		close(stop)
		out.Close()
		in.Close()
		wg.Wait()
	})
	Within(t, 20*time.Second, "the first datagram arrives", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.got) > 0
	})
	return s
}

// Late is how long after it was sent a datagram may arrive that counts.
const Late = 500 * time.Millisecond

// During runs f, and none of the datagrams that are sent meanwhile may be lost.
func (s *Stream) During(what string, f func() string) {
	s.t.Helper()
	if lost, sent := s.Loses(what, f); lost > 0 {
		s.t.Errorf("%s: %d of %d datagrams were lost", what, lost, sent)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.errs) > 0 {
		s.t.Errorf("sending: %v", s.errs[0])
	}
}

// Loses runs f and reports how many of the datagrams that were sent meanwhile were lost.
func (s *Stream) Loses(what string, f func() string) (lost, sent uint64) {
	s.t.Helper()
	from := s.Sent()
	begun := time.Now()
	said := f()
	took := time.Since(begun)
	upto := s.Sent()
	time.Sleep(Late)
	lost = s.Lost(from, upto)
	s.t.Logf("%s: %s in %v; %d datagrams, %d lost", what, said, took.Round(time.Millisecond), upto-from, lost)
	return lost, upto - from
}

// Sent returns how many datagrams were sent so far. With Lost it serves several Streams at a time.
func (s *Stream) Sent() uint64 { return s.sent.Load() }

// Lost returns how many of the datagrams from one number up to another have not arrived.
func (s *Stream) Lost(from, upto uint64) (lost uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := from; i < upto; i++ {
		if !s.got[i] {
			lost++
		}
	}
	return lost
}
