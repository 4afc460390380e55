package netstack_test

import (
	"io"
	"net/netip"
	"testing"
	"time"
)

func TestFirst(t *testing.T) {
	a, b := pair(t)
	l, err := b.Listen("tcp", ":80")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		io.Copy(c, c)
		c.Close()
	}()
	start := time.Now()
	c, err := a.DialContext(within(t, timeout), "tcp", "10.0.0.2:80")
	if err != nil {
		t.Fatal(err)
	}
	t.Log("dialled in", time.Since(start), c.LocalAddr(), c.RemoteAddr())
	c.Write([]byte("hello"))
	b5 := make([]byte, 5)
	if _, err := io.ReadFull(c, b5); err != nil || string(b5) != "hello" {
		t.Fatal(err, b5)
	}
	c.Close()
	for _, to := range []string{"10.0.0.2", "fd00::2"} {
		rtt, err := a.Ping(within(t, timeout), netip.MustParseAddr(to))
		t.Log(to, rtt, err)
	}
	_, err = a.DialContext(within(t, timeout), "tcp", "[fd00::2]:81")
	t.Log(err)
	_, err = a.DialContext(within(t, timeout), "tcp", "10.9.9.9:81")
	t.Log(err)
	t.Logf("%+v", a.read())
}
