package relay_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/examples/agent/internal/relay"
	"github.com/warren-mesh/warren/examples/agent/internal/relay/relaytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tcpPair returns the two ends of a connection over loopback.
func tcpPair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	l := relaytest.Listen(t, "127.0.0.1:0")
	defer l.Close()
	x, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	y, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close(); y.Close() })
	_, _ = x.SetDeadline(time.Now().Add(relaytest.Timeout)), y.SetDeadline(time.Now().Add(relaytest.Timeout))
	return x.(*net.TCPConn), y.(*net.TCPConn)
}

type result struct {
	toB, toA int64
	err      error
}

// relayed returns the outer ends of two connections between whose inner ends is copied:
//
//	client ── a │ Copy │ b ── server
func relayed(t testing.TB, ctx context.Context, idle time.Duration) (client, server *net.TCPConn, end <-chan result) {
	t.Helper()
	client, a := tcpPair(t)
	server, b := tcpPair(t)
	done := make(chan result, 1)
	go func() {
		toB, toA, err := relay.Copy(ctx, a, b, idle)
		done <- result{toB, toA, err}
	}()
	t.Cleanup(func() { client.Close(); server.Close() })
	return client, server, done
}

// both runs a test with the kernel copying and with Copy itself.
func both(t *testing.T, test func(*testing.T, time.Duration)) {
	for _, idle := range []time.Duration{0, time.Hour} {
		t.Run(fmt.Sprintf("idle=%v", idle), func(t *testing.T) { test(t, idle) })
	}
}

func TestHalfClose(t *testing.T) {
	both(t, func(t *testing.T, idle time.Duration) {
		client, server, end := relayed(t, t.Context(), idle)
		question, answer := relaytest.Bytes(1, 1<<20), relaytest.Bytes(2, 5<<20)
		served := make(chan error, 1)
		go func() {
			got, err := io.ReadAll(server) // to the end, and only then answers
			if err == nil && !bytes.Equal(got, question) {
				err = errors.New("the question is another")
			}
			_, werr := server.Write(answer)
			served <- errors.Join(err, werr, server.Close())
		}()
		if err := relaytest.Exchange(client, question, answer); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
		if r := <-end; r.err != nil || r.toB != int64(len(question)) || r.toA != int64(len(answer)) {
			t.Errorf("Copy returns %+v", r)
		}
	})
}

// The server's end may come first, too.
func TestHalfCloseOfServer(t *testing.T) {
	both(t, func(t *testing.T, idle time.Duration) {
		client, server, end := relayed(t, t.Context(), idle)
		server.CloseWrite()
		if n, err := client.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Fatalf("the client reads %d, %v", n, err)
		}
		client.Write([]byte("still here"))
		client.Close()
		if b, err := io.ReadAll(server); string(b) != "still here" || err != nil {
			t.Errorf("the server reads %q, %v", b, err)
		}
		if r := <-end; r.err != nil {
			t.Error(r.err)
		}
	})
}

func TestReset(t *testing.T) {
	both(t, func(t *testing.T, idle time.Duration) {
		client, server, end := relayed(t, t.Context(), idle)
		server.Write([]byte("half of it"))
		io.ReadFull(client, make([]byte, 10))
		relay.Reset(server)
		if n, err := client.Read(make([]byte, 1)); err == nil || err == io.EOF {
			t.Errorf("the client reads %d, %v; want an error, as this is no regular end", n, err)
		}
		if r := <-end; r.err == nil || r.toA != 10 {
			t.Errorf("Copy returns %+v", r)
		}
	})
}

// A server that answers without reading all of the question, and closes, as one does that finds it too
// long. The relay must not lose the answer because it cannot pass on the question.
func TestEarlyAnswer(t *testing.T) {
	both(t, func(t *testing.T, idle time.Duration) {
		client, server, end := relayed(t, t.Context(), idle)
		written := make(chan struct{})
		go func() {
			defer close(written)
			for b := make([]byte, 1<<16); ; {
				if _, err := client.Write(b); err != nil {
					return
				}
			}
		}()
		io.ReadFull(server, make([]byte, 1<<16))
		server.Write([]byte("too long"))
		b := make([]byte, 8)
		if _, err := io.ReadFull(client, b); string(b) != "too long" || err != nil {
			t.Errorf("the client reads %q, %v", b, err)
		}
		server.Close()
		if r := <-end; r.err == nil {
			t.Error("Copy returns no error though the question was not passed on")
		}
		<-written
	})
}

func TestCancel(t *testing.T) {
	both(t, func(t *testing.T, idle time.Duration) {
		enough := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		client, server, end := relayed(t, ctx, idle)
		client.Write([]byte("x"))
		io.ReadFull(server, make([]byte, 1))
		cancel(enough)
		if r := <-end; r != (result{1, 0, enough}) {
			t.Errorf("Copy returns %+v", r)
		}
		for _, c := range []net.Conn{client, server} {
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) && !isWindowsReset(err) {
				t.Errorf("an end reads %v, want a reset", err)
			}
		}
	})
}

// isWindowsReset is WSAECONNRESET or WSAECONNABORTED, which the syscall package does not know.
func isWindowsReset(err error) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) && (errno == 10054 || errno == 10053)
}

// Pipes have deadlines but neither CloseWrite nor buffers, and their time is that of synctest.
func TestIdle(t *testing.T) {
	const idle = time.Hour
	for _, test := range []struct {
		name string
		act  func(client, server net.Conn)
		want time.Duration
	}{
		{"silent", func(_, _ net.Conn) {}, idle},
		{"one way busy", func(client, server net.Conn) {
			for range 10 {
				time.Sleep(50 * time.Minute)
				server.Write([]byte("x"))
				io.ReadFull(client, make([]byte, 1))
			}
		}, 500*time.Minute + idle},
		{"slow reader", func(client, server net.Conn) { // never takes what one Write of Copy has
			go server.Write(make([]byte, 1000))
			for range 10 {
				time.Sleep(50 * time.Minute)
				client.Read(make([]byte, 10))
			}
		}, 10 * time.Hour}, // what moved is found out at the full hour
		{"never reads", func(_, server net.Conn) {
			go server.Write(make([]byte, 1<<20))
			time.Sleep(time.Nanosecond)
		}, idle},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, a := net.Pipe()
				b, server := net.Pipe()
				start := time.Now()
				var acting sync.WaitGroup
				acting.Go(func() { test.act(client, server) })
				_, _, err := relay.Copy(t.Context(), a, b, idle)
				if !errors.Is(err, relay.ErrIdle) || !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("Copy returns %v, want ErrIdle", err)
				}
				if took := time.Since(start); took < test.want || took > test.want+time.Minute {
					t.Errorf("Copy returns after %v, want %v", took, test.want)
				}
				acting.Wait()
			})
		})
	}
}

// A connection without CloseWrite is closed as a whole.
func TestNoCloseWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, a := net.Pipe()
		b, server := net.Pipe()
		go func() { client.Write([]byte("all")); client.Close() }()
		got := make(chan string, 1)
		go func() { b, _ := io.ReadAll(server); got <- string(b) }()
		toB, toA, err := relay.Copy(t.Context(), a, b, 0)
		if s := <-got; s != "all" || toB != 3 || toA != 0 {
			t.Errorf("server got %q; Copy returns %d, %d, %v", s, toB, toA, err)
		}
	})
}

// Copy does not allocate its buffers anew.
func BenchmarkCopy(b *testing.B) {
	for _, idle := range []time.Duration{0, time.Hour} {
		b.Run(fmt.Sprintf("idle=%v", idle), func(b *testing.B) {
			client, server, end := relayed(b, b.Context(), idle)
			_, _ = client.SetDeadline(time.Time{}), server.SetDeadline(time.Time{})
			go func() { io.Copy(io.Discard, server); server.Close() }()
			buf := make([]byte, 1<<20)
			b.SetBytes(int64(len(buf)))
			for b.Loop() {
				if _, err := client.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
			client.CloseWrite()
			<-end
		})
	}
}

func ExampleCopy() {
	client, a := net.Pipe()
	b, server := net.Pipe()
	go func() {
		client.Write([]byte("hello"))
		client.Close()
	}()
	go io.Copy(io.Discard, server)

	sent, received, _ := relay.Copy(context.Background(), a, b, time.Minute)
	fmt.Println(sent, received)
	// Output: 5 0
}
