package netstack_test

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"
)

const timeout = 30 * time.Second

// bulk is how much a test sends through one connection.
func bulk() int64 {
	if raceEnabled {
		return 16 << 20
	}
	return 64 << 20
}

// transfer sends bulk() random bytes from w to r, and compares their hashes.
func transfer(w io.WriteCloser, r io.Reader, seed uint64) error {
	sent := make(chan [32]byte, 1)
	fail := make(chan error, 1)
	go func() {
		h := sha256.New()
		src := rand.NewChaCha8([32]byte{byte(seed)})
		_, err := io.CopyN(io.MultiWriter(w, h), src, bulk())
		if c, ok := w.(interface{ CloseWrite() error }); ok && err == nil {
			err = c.CloseWrite()
		}
		sent <- [32]byte(h.Sum(nil))
		fail <- err
	}()
	h := sha256.New()
	n, err := io.Copy(h, r)
	want := <-sent
	if err := errors.Join(err, <-fail); err != nil {
		return err
	}
	if n != bulk() || [32]byte(h.Sum(nil)) != want {
		return fmt.Errorf("received %d bytes of %d, or others", n, bulk())
	}
	return nil
}

func TestTCP(t *testing.T) {
	a, b := pair(t)
	for _, test := range []struct{ network, listen, dial string }{
		{"tcp", ":80", "10.0.0.2:80"},
		{"tcp", "[fd00::2]:81", "[fd00::2]:81"},
		{"tcp4", "10.0.0.2:82", "10.0.0.2:82"},
		{"tcp6", "[::]:83", "[fd00::2]:83"},
	} {
		t.Run(test.network+test.listen, func(t *testing.T) {
			l, err := b.Listen(test.network, test.listen)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			both := make(chan error, 2)
			go func() {
				c, err := l.Accept()
				if err != nil {
					both <- err
					both <- nil
					return
				}
				defer c.Close()
				up := make(chan error)
				go func() { up <- transfer(c.(io.WriteCloser), eofReader{}, 2) }()
				both <- <-up
				both <- nil
			}()
			_ = both
			c, err := a.DialContext(within(t, timeout), test.network, test.dial)
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
		})
	}
}

type eofReader struct{}

func (eofReader) Read([]byte) (int, error) { return 0, io.EOF }

var _ = []any{net.ErrClosed, netip.Addr{}, syscall.ECONNREFUSED}
