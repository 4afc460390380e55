package socks5

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"github.com/warren-mesh/warren/datapath/netstack"
)

// client is a connection to a client that said everything at once.
type client struct {
	io.Reader
	bytes.Buffer
}

func (c *client) Read(b []byte) (int, error) { return c.Reader.Read(b) }

func onlyAnn(user, password string) bool { return user == "ann" && password == "secret" }

func TestHandshake(t *testing.T) {
	const (
		hello = "050100 "
		auth  = "05020002 "
		ann   = "01 03 616e6e 06 736563726574 "
	)
	for _, test := range []struct {
		name       string
		auth       func(user, password string) bool
		says, hear string // hex
		want       string // the request, or what is in the error
	}{
		{"IPv4", nil, hello + "050100 01 0a000002 0050 ffff", "0500", "CONNECT 10.0.0.2:80"},
		{"IPv6", nil, hello + "050100 04 fd000000000000000000000000000002 0050", "0500", "CONNECT [fd00::2]:80"},
		{"name", nil, hello + "050100 03 03 622e6d 01bb", "0500", "CONNECT b.m:443"},
		{"associate", nil, hello + "050300 01 00000000 0000", "0500", "UDP ASSOCIATE 0.0.0.0:0"},
		{"several methods", nil, "0503010200 050100 01 0a000002 0050", "0500", "CONNECT 10.0.0.2:80"},
		{"user", onlyAnn, auth + ann + "050100 01 0a000002 0050", "0502 0100", "CONNECT 10.0.0.2:80"},
		{"wrong user", onlyAnn, auth + "01 03 626f62 00", "0502 0101", `user "bob" is refused`},
		{"version of authentication", onlyAnn, auth + "05 03 616e6e 00", "0502 0101", "version of authentication is 5"},
		{"no user", onlyAnn, hello, "05ff", "want 2 among"},
		{"no methods", nil, "0500", "05ff", "want 0 among"},
		{"GSSAPI", nil, "050101", "05ff", "are [1]"},
		{"bind", nil, hello + "050200 01 0a000002 0050", "0500 050700 01 00000000 0000", "BIND to 10.0.0.2:80 is not supported"},
		{"no command", nil, hello + "050900 01 0a000002 0050", "0500 050700 01 00000000 0000", "command 9"},
		{"no type", nil, hello + "050100 02 0a000002 0050", "0500 050800 01 00000000 0000", "address type of the request is 2"},
		{"empty name", nil, hello + "050100 03 00 0050", "0500 050100 01 00000000 0000", "name in the request is empty"},
		{"another version", nil, hello + "040100 01 0a000002 0050", "0500 050100 01 00000000 0000", "version of the request is 4"},
		{"nothing", nil, "", "", "closed without a request"},
		{"one byte", nil, "05", "", io.ErrUnexpectedEOF.Error()},
		{"fewer methods", nil, "05ff0001", "", io.ErrUnexpectedEOF.Error()},
		{"no request", nil, hello, "0500", io.ErrUnexpectedEOF.Error()},
		{"half an address", nil, hello + "050100 01 0a", "0500", io.ErrUnexpectedEOF.Error()},
		{"half a name", nil, hello + "050100 03 ff 616161", "0500", io.ErrUnexpectedEOF.Error()},
		{"SOCKS4", nil, "040100500a00000200", "005b000000000000", "SOCKS4"},
		{"TLS", nil, "160301020001", "", "TLS"},
		{"noise", nil, "ffffffff", "", "first byte is 255"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := &client{Reader: bytes.NewReader(unhex(t, test.says))}
			r, err := handshake(c, test.auth)
			got := fmt.Sprintf("%v %v", r.command, r.to)
			if err != nil {
				got = err.Error()
			}
			if err == nil && got != test.want || !strings.Contains(got, test.want) {
				t.Errorf("got %s, want %s", got, test.want)
			}
			if heard := c.Buffer.Bytes(); !bytes.Equal(heard, unhex(t, test.hear)) {
				t.Errorf("the client hears %x, want %s", heard, test.hear)
			}
		})
	}
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestHTTP(t *testing.T) {
	for _, request := range []string{"GET / HTTP/1.1\r\n\r\n", "CONNECT b:80 HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\n"} {
		c := &client{Reader: strings.NewReader(request)}
		_, err := handshake(c, nil)
		if got := c.Buffer.String(); err == nil || !strings.HasPrefix(got, "HTTP/1.1 400 ") || !strings.Contains(got, "SOCKS5") {
			t.Errorf("%q is answered %q, %v", request, got, err)
		}
	}
}

func genDestination(t *rapid.T) destination {
	d := destination{port: rapid.Uint16().Draw(t, "port")}
	switch rapid.IntRange(0, 2).Draw(t, "type") {
	case 0:
		d.addr = netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "IPv4")))
	case 1:
		d.addr = netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "IPv6")))
	default:
		d.name = string(rapid.SliceOfN(rapid.Byte(), 1, 255).Draw(t, "name"))
	}
	return d
}

func TestUDPHeader(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := genDestination(t)
		payload := rapid.SliceOfN(rapid.Byte(), 0, 50).Draw(t, "payload")
		b := append(appendUDP(nil, d), payload...)
		got, rest, err := parseUDP(b)
		if err != nil || got != d || !bytes.Equal(rest, payload) {
			t.Fatalf("%v comes back as %v, %x, %v", d, got, rest, err)
		}
		if d.name == "" && len(b)-len(payload) > maxUDPHeader {
			t.Fatalf("header of %d bytes", len(b)-len(payload))
		}
		short := rapid.IntRange(0, len(b)-len(payload)-1).Draw(t, "short")
		if _, _, err := parseUDP(b[:short]); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%d of %d bytes: %v", short, len(b), err)
		}
		b[2] = rapid.ByteRange(1, 255).Draw(t, "fragment")
		if _, _, err := parseUDP(b); err == nil {
			t.Fatal("a fragment is no error")
		}
	})
}

// The byte-for-byte inverse of readRequest is append.
func TestRequest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := request{rapid.SampledFrom([]command{connect, associate}).Draw(t, "command"), genDestination(t)}
		after := rapid.SliceOfN(rapid.Byte(), 0, 9).Draw(t, "after")
		in := bytes.NewReader(append(want.to.append([]byte{version, byte(want.command), 0}), after...))
		got, err := readRequest(&client{Reader: in})
		if err != nil || got != want || in.Len() != len(after) {
			t.Fatalf("%v comes back as %v, %v, with %d bytes left of %d", want, got, err, in.Len(), len(after))
		}
	})
}

func FuzzRequest(f *testing.F) {
	for _, s := range []string{
		"050100 050100010a0000020050", "0502000201036162630361626305010003036162630050", "050100050300040000000000000000000000000000000000 00",
		"050100 050200010a0000020050", "0500", "05ff", "474554202f", "04010050", "160301", "050100 05010003ff61",
	} {
		f.Add(unhex(f, s), false)
	}
	f.Add(unhex(f, "050102 0103616e6e06736563726574 0501000100000000 0050"), true)
	f.Fuzz(func(t *testing.T, b []byte, auth bool) {
		in := bytes.NewReader(b)
		c := &client{Reader: in}
		var check func(user, password string) bool
		if auth {
			check = onlyAnn
		}
		r, err := handshake(c, check)
		if c.Buffer.Len() > 1024 || len(b)-in.Len() > 2+255+2+255+1+255+5+255+2 {
			t.Errorf("%d bytes read, %d answered", len(b)-in.Len(), c.Buffer.Len())
		}
		if err != nil {
			return
		}
		if r.command != connect && r.command != associate || (r.to.name == "") == !r.to.addr.IsValid() {
			t.Errorf("request is %+v", r)
		}
		read := b[:len(b)-in.Len()]
		if end := r.to.append(nil); !bytes.HasSuffix(read, end) {
			t.Errorf("%v is what was read of %x", r.to, read)
		}
		if auth && !bytes.Contains(read, []byte("secret")) {
			t.Error("served without password")
		}
	})
}

func FuzzUDPHeader(f *testing.F) {
	for _, s := range []string{
		"000000010a00000200357061796c6f6164", "00000004fd0000000000000000000000000000020035", "00000003036162630035ff",
		"000001010a0000020035", "0000000300", "00000003ff", "0000000500000000", "",
	} {
		f.Add(unhex(f, s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		d, payload, err := parseUDP(b)
		if err != nil {
			return
		}
		again := append(appendUDP(nil, d), payload...)
		if !bytes.Equal(again[2:], b[2:]) { // the first two bytes are reserved
			t.Errorf("%x comes back as %x", b, again)
		}
	})
}

func TestCodeOf(t *testing.T) {
	dialed := func(err error) error { return &net.OpError{Op: "dial", Net: "tcp", Err: err} }
	waited := func(err, cause error) error { return dialed(&netstack.WaitError{Err: err, Cause: cause}) }
	for _, test := range []struct {
		err  error
		want code
	}{
		{waited(netstack.ErrNoRoute, nil), networkUnreachable},
		{waited(netstack.ErrNoRoute, context.DeadlineExceeded), networkUnreachable},
		{waited(netstack.ErrNoSource, nil), networkUnreachable},
		{waited(netstack.ErrNoHandshake, context.DeadlineExceeded), hostUnreachable},
		{waited(netstack.ErrNoAnswer, context.DeadlineExceeded), ttlExpired},
		{dialed(os.NewSyscallError("connect", syscall.ECONNREFUSED)), connectionRefused},
		{dialed(os.NewSyscallError("connect", syscall.EHOSTUNREACH)), hostUnreachable},
		{dialed(os.NewSyscallError("connect", syscall.ENETUNREACH)), networkUnreachable},
		{dialed(os.NewSyscallError("connect", syscall.ETIMEDOUT)), ttlExpired},
		{dialed(os.NewSyscallError("connect", syscall.EAFNOSUPPORT)), typeNotSupported},
		{dialed(syscall.EACCES), notAllowed},
		{fmt.Errorf("policy: %w", fs.ErrPermission), notAllowed},
		{context.DeadlineExceeded, ttlExpired},
		{errors.New("what"), generalFailure},
		{&lookupError{"b", errNoNames}, typeNotSupported},
		{&lookupError{"b", errNoAddress}, hostUnreachable},
		{&lookupError{"b", context.DeadlineExceeded}, hostUnreachable},
		{errors.Join(waited(netstack.ErrNoRoute, nil), dialed(syscall.ECONNREFUSED)), connectionRefused},
	} {
		if got := codeOf(test.err); got != test.want {
			t.Errorf("%v is answered %d, want %d", test.err, got, test.want)
		}
	}
}
