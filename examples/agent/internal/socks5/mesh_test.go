package socks5

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/warren-mesh/warren/datapath/netstack"
	"github.com/warren-mesh/warren/examples/agent/internal/relay/relaytest"
)

// meshed returns a server in front of a node, and the node's peer at 10.0.0.2, whose name is "b":
//
//	client ── loopback ── server, node a ── WireGuard ── node b
func meshed(t testing.TB) (server string, stop func(), a, b *relaytest.Node) {
	t.Helper()
	a, b = relaytest.Pair(t)
	server, stop = start(t, &Server{Dialer: a, Lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
		if host == "b" {
			return []netip.Addr{netip.MustParseAddr("fd00::2"), netip.MustParseAddr("10.0.0.2")}, nil
		}
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}})
	return server, stop, a, b
}

func listen(t testing.TB, b *relaytest.Node, address string) net.Listener {
	t.Helper()
	l, err := b.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestMesh(t *testing.T) {
	server, _, _, b := meshed(t)
	relaytest.EchoTCP(t, listen(t, b, ":7"))
	for _, to := range []string{"10.0.0.2:7", "[fd00::2]:7", "b:7"} {
		c, _ := mustAsk(t, server, connect, to)
		if err := echoed(c, "hello"); err != nil {
			t.Errorf("%s: %v", to, err)
		}
	}
	for to, want := range map[string]code{
		"10.0.0.2:8":  connectionRefused,
		"10.0.0.9:7":  networkUnreachable,
		"[fd09::1]:7": networkUnreachable,
		"stranger:80": hostUnreachable,
	} {
		if _, _, err := ask(t, server, connect, to); !errors.Is(err, replyError(want)) {
			t.Errorf("%s: %v, want reply %d", to, err, want)
		}
	}

	t.Run("half-close", func(t *testing.T) {
		question, answer := relaytest.Bytes(1, 1e6), relaytest.Bytes(2, 2e6)
		relaytest.Accept(t, listen(t, b, ":9"), relaytest.AnswerAfterEnd(answer))
		c, _ := mustAsk(t, server, connect, "b:9")
		if err := relaytest.Exchange(c, question, answer); err != nil {
			t.Error(err)
		}
	})

	t.Run("UDP", func(t *testing.T) {
		pc, err := b.ListenPacket("udp", "10.0.0.2:7")
		if err != nil {
			t.Fatal(err)
		}
		relaytest.EchoUDP(t, pc)
		_, relay := mustAsk(t, server, associate, "0.0.0.0:0")
		u := dialUDP(t, relay, "10.0.0.2:7")
		for _, size := range []int{1, 1300, 9000, 60000} { // the latter in fragments
			if err := relaytest.AskUDP(u, relaytest.Bytes(3, size)); err != nil {
				t.Error(err)
			}
		}
		if u.source != netip.MustParseAddrPort("10.0.0.2:7") {
			t.Errorf("the source is %v", u.source)
		}
	})

	t.Run("DNS", func(t *testing.T) {
		pc, err := b.ListenPacket("udp", ":53")
		if err != nil {
			t.Fatal(err)
		}
		ds := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			m := new(dns.Msg).SetReply(q)
			rr, _ := dns.NewRR(q.Question[0].Name + " 60 IN AAAA fd00::7")
			m.Answer = append(m.Answer, rr)
			w.WriteMsg(m)
		})}
		done := make(chan error, 1)
		go func() { done <- ds.ActivateAndServe() }()
		defer func() { pc.Close(); <-done }()
		_, relay := mustAsk(t, server, associate, "0.0.0.0:0")
		c := &dns.Conn{Conn: dialUDP(t, relay, "b:53"), UDPSize: 4096}
		var answer *dns.Msg
		for tries := 0; answer == nil && tries < 10; tries++ {
			q := new(dns.Msg).SetQuestion("service.mesh.", dns.TypeAAAA)
			answer, _, err = (&dns.Client{Net: "udp", Timeout: 3 * time.Second}).ExchangeWithConn(q, c)
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(answer.Answer) != 1 || answer.Answer[0].(*dns.AAAA).AAAA.String() != "fd00::7" {
			t.Errorf("answer is %v", answer)
		}
	})

	t.Run("100 clients", func(t *testing.T) {
		var all sync.WaitGroup
		for i := range 100 {
			all.Go(func() {
				c, _, err := ask(t, server, connect, "b:7")
				if err == nil {
					data := relaytest.Bytes(byte(i), 20000+i)
					err = relaytest.Exchange(c, data, data)
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
	})
}

// TestMeshBulk gets a long file over HTTP, sends a tenth of it, and gets that with curl where there is one.
func TestMeshBulk(t *testing.T) {
	server, _, _, b := meshed(t)
	data := relaytest.Bytes(4, bulk)
	tenth := data[:bulk/10]
	want, wantTenth := sha256.Sum256(data), sha256.Sum256(tenth)
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			h := sha256.New()
			io.Copy(h, r.Body)
			w.Write(h.Sum(nil))
			return
		}
		if r.URL.Path == "/tenth" {
			w.Write(tenth)
			return
		}
		w.Write(data)
	})}
	l := listen(t, b, ":80")
	done := make(chan error, 1)
	go func() { done <- web.Serve(l) }()
	t.Cleanup(func() { web.Close(); <-done })

	t.Run("net/http", func(t *testing.T) {
		transport := &http.Transport{DialContext: func(_ context.Context, _, to string) (net.Conn, error) {
			c, _, err := ask(t, server, connect, to)
			if err == nil {
				err = c.SetDeadline(time.Now().Add(2 * relaytest.Timeout))
			}
			return c, err
		}, DisableKeepAlives: true}
		get, err := (&http.Client{Transport: transport}).Get("http://b/")
		if err != nil {
			t.Fatal(err)
		}
		defer get.Body.Close()
		h := sha256.New()
		if n, err := io.Copy(h, get.Body); err != nil || !bytes.Equal(h.Sum(nil), want[:]) {
			t.Errorf("%d bytes came that differ from the %d sent: %v", n, len(data), err)
		}
		post, err := (&http.Client{Transport: transport}).Post("http://b/", "", bytes.NewReader(tenth))
		if err != nil {
			t.Fatal(err)
		}
		defer post.Body.Close()
		if sum, err := io.ReadAll(post.Body); err != nil || !bytes.Equal(sum, wantTenth[:]) {
			t.Errorf("other bytes arrived than were sent: %v", err)
		}
	})
	t.Run("curl", func(t *testing.T) {
		curl, err := exec.LookPath("curl")
		if err != nil {
			t.Skip("needs curl")
		}
		for _, test := range []struct {
			how, url string
			want     []byte
		}{
			{"--socks5-hostname", "http://b/tenth", tenth},
			{"--socks5", "http://10.0.0.2/tenth", tenth},
			{"--socks5", "http://[fd00::2]/tenth", tenth},
		} {
			cmd := exec.CommandContext(relaytest.Within(t), curl, "--silent", "--show-error", "--fail", "--noproxy", "", test.how, server, test.url)
			var out, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &stderr
			if err := cmd.Run(); err != nil || !bytes.Equal(out.Bytes(), test.want) {
				t.Errorf("curl %s %s: %d bytes, %v: %s", test.how, test.url, out.Len(), err, &stderr)
			}
		}
		cmd := exec.CommandContext(relaytest.Within(t), curl, "--silent", "--show-error", "--noproxy", "", "--socks5-hostname", server, "http://b:81/")
		if out, err := cmd.CombinedOutput(); err == nil {
			t.Errorf("curl to a closed port: %s", out)
		}
	})
}

// TestMeshCancel ends a server, then its node, under traffic.
func TestMeshCancel(t *testing.T) {
	server, stop, a, b := meshed(t)
	relaytest.EchoTCP(t, listen(t, b, ":7"))
	pc, err := b.ListenPacket("udp", ":7")
	if err != nil {
		t.Fatal(err)
	}
	relaytest.EchoUDP(t, pc)
	var all sync.WaitGroup
	for range 5 {
		c, _ := mustAsk(t, server, connect, "b:7")
		if err := echoed(c, "hello"); err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			go io.Copy(io.Discard, c)
			for buf := make([]byte, 1<<16); ; {
				if _, err := c.Write(buf); err != nil {
					return
				}
			}
		})
		_, relay := mustAsk(t, server, associate, "0.0.0.0:0")
		if err := relaytest.AskUDP(dialUDP(t, relay, "b:7"), []byte("hello")); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	a.Close()
	all.Wait()
}

// BenchmarkConnect compares a transfer through the server with one of the node itself:
//
//	go test -run '^$' -bench Connect -benchtime 20x ./examples/agent/internal/socks5/
func BenchmarkConnect(b *testing.B) {
	server, _, x, y := meshed(b)
	const size = 16 << 20
	relaytest.Accept(b, listen(b, y, ":80"), func(c net.Conn) {
		for buf := make([]byte, 1<<16); ; {
			n, err := io.ReadFull(c, buf[:8])
			if n < 8 || err != nil {
				return
			}
			for left := size; left > 0; left -= len(buf) {
				if _, err := c.Write(buf); err != nil {
					return
				}
			}
		}
	})
	fetch := func(b *testing.B, c net.Conn) {
		_ = c.SetDeadline(time.Time{})
		buf := make([]byte, 1<<16)
		b.SetBytes(size)
		for b.Loop() {
			if _, err := c.Write(buf[:8]); err != nil {
				b.Fatal(err)
			}
			for left := size; left > 0; {
				n, err := c.Read(buf)
				if err != nil {
					b.Fatal(err)
				}
				left -= n
			}
		}
	}
	b.Run("direct", func(b *testing.B) {
		c, err := x.DialContext(relaytest.Within(b), "tcp", "10.0.0.2:80")
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		fetch(b, c)
	})
	b.Run("socks", func(b *testing.B) {
		c, _ := mustAsk(b, server, connect, "10.0.0.2:80")
		fetch(b, c)
	})
}

// A server in front of a node that knows nobody, and a client of it.
func Example() {
	n, err := netstack.New(netstack.Options{}) // what a mesh.Mesh has as its Datapath
	if err != nil {
		fmt.Println(err)
		return
	}
	defer n.Close()
	n.Settle()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- (&Server{Dialer: n}).Serve(ctx, l) }()

	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	c.Write([]byte{5, 1, 0})                        // version 5, no authentication
	c.Write([]byte{5, 1, 0, 1, 10, 0, 0, 2, 0, 80}) // CONNECT to 10.0.0.2:80
	var answer [2 + 10]byte
	if _, err := io.ReadFull(c, answer[:]); err != nil {
		fmt.Println(err)
	}
	fmt.Println("reply", answer[3]) // network unreachable: 10.0.0.2 is nobody's

	cancel()
	fmt.Println(<-served)
	// Output:
	// reply 3
	// <nil>
}
