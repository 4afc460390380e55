package socks5

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
)

// What is in the messages of RFC 1928 and 1929.
const (
	version     = 5
	authVersion = 1

	methodNone     = 0
	methodPassword = 2
	noMethod       = 0xff

	typeIPv4 = 1
	typeName = 3
	typeIPv6 = 4

	// maxUDPHeader is the longest header this server writes: an address, never a name.
	maxUDPHeader = 3 + 1 + 16 + 2
)

type command uint8

const (
	connect   command = 1
	bind      command = 2
	associate command = 3
)

func (c command) String() string {
	switch c {
	case connect:
		return "CONNECT"
	case bind:
		return "BIND"
	case associate:
		return "UDP ASSOCIATE"
	}
	return fmt.Sprintf("command %d", uint8(c))
}

// destination is where a client wants to: a name or an address, and a port.
type destination struct {
	name string // "": addr is valid
	addr netip.Addr
	port uint16
}

func (d destination) String() string {
	host := d.name
	if d.addr.IsValid() {
		host = d.addr.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(d.port)))
}

// append appends the type, the address and the port.
func (d destination) append(b []byte) []byte {
	switch {
	case d.name != "":
		b = append(b, typeName, byte(len(d.name)))
		b = append(b, d.name...)
	case d.addr.Is6():
		b = append(b, typeIPv6)
		b = append(b, d.addr.AsSlice()...)
	case d.addr.Is4():
		b = append(b, typeIPv4)
		b = append(b, d.addr.AsSlice()...)
	default: // where there is no address to tell
		b = append(b, typeIPv4, 0, 0, 0, 0)
	}
	return binary.BigEndian.AppendUint16(b, d.port)
}

// addressSize returns how many bytes of address and port follow the type and the byte after it, which
// for a name is its length. 0: there is no such type, or the name is empty.
func addressSize(kind, next byte) int {
	switch {
	case kind == typeIPv4:
		return 4 + 2 - 1
	case kind == typeIPv6:
		return 16 + 2 - 1
	case kind == typeName && next > 0:
		return int(next) + 2
	}
	return 0
}

// parseDestination parses what append appended. b has the right length.
func parseDestination(b []byte) destination {
	d := destination{port: binary.BigEndian.Uint16(b[len(b)-2:])}
	kind, host := b[0], b[1:len(b)-2]
	if kind == typeName {
		d.name = string(host[1:])
	} else {
		d.addr, _ = netip.AddrFromSlice(host)
	}
	return d
}

func appendReply(b []byte, c code, bound netip.AddrPort) []byte {
	return destination{addr: bound.Addr(), port: bound.Port()}.append(append(b, version, byte(c), 0))
}

// request is what a client wants.
type request struct {
	command command
	to      destination
}

// errGone is the error of a client that closed the connection without a word, as one does that only
// looks whether the port is open.
var errGone = errors.New("closed without a request")

// handshake agrees with a client on how it authenticates, has it do that, and reads its request. A
// request that cannot be served is answered, and is an error. No byte after the request is read.
func handshake(c io.ReadWriter, auth func(user, password string) bool) (request, error) {
	var buf [2 + 255]byte
	b := buf[:2]
	if _, err := io.ReadFull(c, b); err != nil {
		if err == io.EOF {
			err = errGone
		}
		return request{}, fmt.Errorf("reading the greeting: %w", err)
	}
	if b[0] != version {
		return request{}, stranger(c, b)
	}
	methods := buf[:b[1]]
	if _, err := io.ReadFull(c, methods); err != nil {
		return request{}, fmt.Errorf("reading the methods of authentication: %w", truncated(err))
	}
	want := byte(methodNone)
	if auth != nil {
		want = methodPassword
	}
	method := byte(noMethod)
	for _, m := range methods {
		if m == want {
			method = m
		}
	}
	if _, err := c.Write([]byte{version, method}); err != nil {
		return request{}, fmt.Errorf("writing the method of authentication: %w", err)
	}
	if method == noMethod {
		return request{}, fmt.Errorf("methods of authentication are %d, want %d among them", methods, want)
	}
	if auth != nil {
		if err := authenticate(c, auth); err != nil {
			return request{}, err
		}
	}
	return readRequest(c)
}

func authenticate(c io.ReadWriter, auth func(user, password string) bool) error {
	var buf [255]byte
	var fields [2]string
	if _, err := io.ReadFull(c, buf[:1]); err != nil {
		return fmt.Errorf("reading user and password: %w", truncated(err))
	}
	if buf[0] != authVersion {
		_, _ = c.Write([]byte{authVersion, 1})
		return fmt.Errorf("version of authentication is %d, want %d", buf[0], authVersion)
	}
	for i := range fields {
		if _, err := io.ReadFull(c, buf[:1]); err != nil {
			return fmt.Errorf("reading user and password: %w", truncated(err))
		}
		b := buf[:buf[0]]
		if _, err := io.ReadFull(c, b); err != nil {
			return fmt.Errorf("reading user and password: %w", truncated(err))
		}
		fields[i] = string(b)
	}
	status := byte(0)
	if !auth(fields[0], fields[1]) {
		status = 1
	}
	if _, err := c.Write([]byte{authVersion, status}); err != nil {
		return fmt.Errorf("answering user and password: %w", err)
	}
	if status != 0 {
		return fmt.Errorf("user %q is refused", fields[0])
	}
	return nil
}

func readRequest(c io.ReadWriter) (request, error) {
	// VER CMD RSV ATYP, and the byte after it; then the longest name, and the port.
	var buf [5 + 255 + 2]byte
	if _, err := io.ReadFull(c, buf[:5]); err != nil {
		return request{}, fmt.Errorf("reading the request: %w", truncated(err))
	}
	refuse := func(r code, format string, args ...any) (request, error) {
		_, _ = c.Write(appendReply(nil, r, netip.AddrPort{}))
		return request{}, fmt.Errorf(format, args...)
	}
	if buf[0] != version {
		return refuse(generalFailure, "version of the request is %d, want %d", buf[0], version)
	}
	size := addressSize(buf[3], buf[4])
	switch {
	case size == 0 && buf[3] == typeName:
		return refuse(generalFailure, "name in the request is empty")
	case size == 0:
		return refuse(typeNotSupported, "address type of the request is %d, want %d, %d or %d", buf[3], typeIPv4, typeName, typeIPv6)
	}
	if _, err := io.ReadFull(c, buf[5:5+size]); err != nil {
		return request{}, fmt.Errorf("reading the request: %w", truncated(err))
	}
	r := request{command: command(buf[1]), to: parseDestination(buf[3 : 5+size])}
	if r.command != connect && r.command != associate {
		return refuse(commandNotSupported, "%v to %v is not supported", r.command, r.to)
	}
	return r, nil
}

func truncated(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// stranger answers, where there is something to say, a client that began with two bytes which are not
// SOCKS5.
func stranger(c io.Writer, b []byte) error {
	switch string(b) {
	case "GE", "HE", "PO", "PU", "DE", "CO", "OP", "TR", "PA", "PR": // GET, HEAD, POST, ... and HTTP/2's PRI
		const text = "This port speaks SOCKS5, not HTTP.\n"
		_, _ = fmt.Fprintf(c, "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(text), text)
		return errors.New("an HTTP request, not SOCKS5")
	}
	switch b[0] {
	case 4:
		_, _ = c.Write([]byte{0, 91, 0, 0, 0, 0, 0, 0}) // rejected
		return errors.New("SOCKS4, not SOCKS5")
	case 22:
		return errors.New("TLS, not SOCKS5")
	}
	return fmt.Errorf("first byte is %d, want %d", b[0], version)
}

// parseUDP parses the header of a datagram and returns what follows. A fragment is an error: RFC 1928
// allows to drop them, and nobody sends them.
func parseUDP(b []byte) (destination, []byte, error) {
	if len(b) < 5 {
		return destination{}, nil, fmt.Errorf("datagram of %d bytes: %w", len(b), io.ErrUnexpectedEOF)
	}
	if b[2] != 0 {
		return destination{}, nil, fmt.Errorf("fragment %d: not supported", b[2])
	}
	size := addressSize(b[3], b[4])
	if size == 0 {
		return destination{}, nil, fmt.Errorf("address type %d, followed by %d: not supported", b[3], b[4])
	}
	if len(b) < 5+size {
		return destination{}, nil, fmt.Errorf("datagram of %d bytes: %w", len(b), io.ErrUnexpectedEOF)
	}
	return parseDestination(b[3 : 5+size]), b[5+size:], nil
}

// appendUDP appends a header.
func appendUDP(b []byte, d destination) []byte { return d.append(append(b, 0, 0, 0)) }
