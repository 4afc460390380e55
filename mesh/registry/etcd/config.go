package etcd

import (
	"context"
	"crypto/tls"
	"encoding"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"
	"unique"
)

// DefaultPrefix is the key prefix where Config has none.
const DefaultPrefix = "/warren/"

// DefaultTimeout is the timeout where Config has none.
const DefaultTimeout = 5 * time.Second

// minTimeout is the shortest timeout that New accepts. What is shorter takes a busy server for a dead one.
const minTimeout = 100 * time.Millisecond

// Config says which etcd, and who asks. Formatted or marshalled in whatever way, a Config is what String
// returns, without the password. (Package fmt does not ask a value how it
// prints under %p, nor one in an unexported field of another struct: do not print these.)
type Config struct {
	// Endpoints are the members of one cluster, as "http://host:port" or "https://host:port". A plain
	// "host:port" is https where TLS has anything set, else http. At least one, and all the same scheme.
	// One of them is talked to at a time, chosen at random; the others are tried when it fails.
	Endpoints []string

	// Prefix goes before the IDs: with "/warren/", which it is if empty, the entry "node/a" is at the key
	// "/warren/node/a". A '/' is added where it does not end with one.
	Prefix string

	// TLS is for https endpoints.
	TLS TLS

	// Username and Password are those of an etcd user; none if Username is empty. A client certificate
	// whose common name is a user needs neither.
	Username string
	Password string

	// PasswordFile is a file to read the password from instead, without the newline at its end. It is
	// read whenever etcd is asked for a token: at each new connection, and when a token expired.
	PasswordFile string

	// Timeout is how long silence of the server lasts before it is an error; 0: 5 s. Retry delays are
	// proportional to it, see the package comment. At least 100 ms.
	Timeout time.Duration

	// Dial connects to an endpoint, "host:port", for a host on which that takes more than to ask for it. TLS is
	// spoken on what it returns. nil: as gRPC does, which minds HTTPS_PROXY in the environment.
	Dial func(ctx context.Context, address string) (net.Conn, error)

	// Logger gets what an operator can act on: gaps, ignored keys, outages and their end. Nil: discard.
	Logger *slog.Logger
}

// TLS says how to know the server, and how to be known to it. Files are read again for each connection,
// so that renewed ones need no Reload.
type TLS struct {
	// CAFile has the certificates of the authorities to believe, as PEM. Empty: those of Config, or the
	// system's.
	CAFile string

	// CertFile and KeyFile are the client certificate, as PEM: both or neither.
	CertFile, KeyFile string

	// ServerName is what the server's certificate must be valid for. Empty: the endpoint's host.
	ServerName string

	// Config is what everything else is taken from; may be nil. It is copied.
	Config *tls.Config
}

func (t TLS) empty() bool { return t == TLS{} }

var (
	_ fmt.Formatter          = Config{}
	_ slog.LogValuer         = Config{}
	_ encoding.TextMarshaler = Config{}
)

// Format writes what String returns, for every verb.
func (c Config) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, c.String()) }

// LogValue is what String returns.
func (c Config) LogValue() slog.Value { return slog.StringValue(c.String()) }

// MarshalText returns what String returns, so that JSON and YAML have no password.
func (c Config) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// settings are a Config that was checked, in the form in which a Registry keeps it: however it is
// printed, the password is not.
type settings struct {
	endpoints []string // "host:port"
	https     bool
	prefix    string
	tls       TLS
	username  string
	password  unique.Handle[string]
	file      string // PasswordFile
	timeout   time.Duration
	dial      func(ctx context.Context, address string) (net.Conn, error) // nil: gRPC's own
	log       *slog.Logger
}

// check returns c with defaults. The error names field and value.
func (c Config) check() (*settings, error) {
	s := &settings{
		prefix: c.Prefix, tls: c.TLS, username: c.Username, password: unique.Make(c.Password),
		file: c.PasswordFile, timeout: c.Timeout, dial: c.Dial, log: c.Logger,
	}
	if len(c.Endpoints) == 0 {
		return nil, errors.New("etcd: Endpoints is empty, at least one is needed")
	}
	for i, e := range c.Endpoints {
		addr, https, err := endpoint(e, !c.TLS.empty())
		if err != nil {
			return nil, fmt.Errorf("etcd: Endpoints[%d]: %w", i, err)
		}
		if i > 0 && https != s.https {
			return nil, fmt.Errorf("etcd: Endpoints[%d]: %q: http and https cannot be mixed", i, e)
		}
		s.endpoints, s.https = append(s.endpoints, addr), https
	}
	switch {
	case !s.https && !c.TLS.empty():
		return nil, fmt.Errorf("etcd: TLS is set, but Endpoints[0] is http: %q", c.Endpoints[0])
	case (c.TLS.CertFile == "") != (c.TLS.KeyFile == ""):
		return nil, fmt.Errorf("etcd: TLS.CertFile is %q and TLS.KeyFile is %q, both or neither are needed", c.TLS.CertFile, c.TLS.KeyFile)
	case c.Username == "" && c.Password != "":
		return nil, errors.New("etcd: Password is set, but Username is not")
	case c.Username == "" && c.PasswordFile != "":
		return nil, fmt.Errorf("etcd: PasswordFile is %q, but Username is not set", c.PasswordFile)
	case c.Password != "" && c.PasswordFile != "":
		return nil, fmt.Errorf("etcd: Password and PasswordFile (%q) are both set, one is enough", c.PasswordFile)
	case c.Username != "" && c.Password == "" && c.PasswordFile == "":
		return nil, fmt.Errorf("etcd: Username is %q, but neither Password nor PasswordFile is set", c.Username)
	case c.Timeout != 0 && c.Timeout < minTimeout:
		return nil, fmt.Errorf("etcd: Timeout is %v, at least %v are needed", c.Timeout, minTimeout)
	}
	if s.tls.Config != nil {
		s.tls.Config = s.tls.Config.Clone()
	}
	if s.prefix == "" {
		s.prefix = DefaultPrefix
	}
	if !strings.HasSuffix(s.prefix, "/") {
		s.prefix += "/"
	}
	if s.timeout == 0 {
		s.timeout = DefaultTimeout
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s, nil
}

// endpoint takes an endpoint apart. secure is for one without a scheme.
func endpoint(e string, secure bool) (addr string, https bool, err error) {
	addr, https = e, secure
	if scheme, rest, ok := strings.Cut(e, "://"); ok {
		switch scheme {
		case "http", "https":
			addr, https = strings.TrimSuffix(rest, "/"), scheme == "https"
		default:
			return "", false, fmt.Errorf("the scheme of %q is neither http nor https", e)
		}
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil || host == "" || strings.ContainsAny(host, "/@?# ") {
		return "", false, fmt.Errorf("%q is not host:port, with or without http:// or https://", e)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", false, fmt.Errorf("the port of %q is not a number from 1 to 65535", e)
	}
	return addr, https, nil
}

// urls returns the endpoints for people: with their scheme.
func (s *settings) urls() string {
	scheme := "http://"
	if s.https {
		scheme = "https://"
	}
	return scheme + strings.Join(s.endpoints, ","+scheme)
}
