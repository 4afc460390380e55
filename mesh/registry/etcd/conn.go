package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
)

// keepalive is how often gRPC asks whether a connection is alive that carries nothing. gRPC takes no
// less, and etcd closes the connection of who asks more often than every 5 s.
const keepalive = 10 * time.Second

// conn is one etcd client, with the settings it was made with. It talks to one member at a time: whoever
// finds that one out of order retires the conn, and the next one begins with another member.
//
// Of the client's own means, the watcher is not used, nor its credentials: the first resumes without a
// delay that differs between clients, keeps without bound what is not taken, and does not notice
// silence; the second ask the network in New.
type conn struct {
	set    *settings
	client *clientv3.Client
	watch  pb.WatchClient

	// Guarded by Registry.mu.
	users   int
	retired bool
	silence silence

	turn  chan struct{} // capacity 1: held while token and open are looked at or asked for
	token string        // empty: to be asked for
	open  bool          // the server knows no users, so that there is no token
}

// silence is how long calls waited since the last answer. What several waited at the same time counts once.
type silence struct {
	sum time.Duration
	end time.Time // of what is in sum
}

// add counts a call, after those that ended before it.
func (s *silence) add(began, ended time.Time) {
	if began.Before(s.end) {
		began = s.end
	}
	if ended.After(began) {
		s.sum, s.end = s.sum+ended.Sub(began), ended
	}
}

// dial returns a conn to the endpoints in this order. It does not wait.
func dial(s *settings, endpoints []string) (*conn, error) {
	opts := []grpc.DialOption{
		// The client spreads calls over all members, one connection each. Here all that belongs together
		// goes to one, so that it is known which one does not answer.
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"pick_first":{}}]}`),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: s.timeout / 5, Multiplier: 1.6, Jitter: 0.2, MaxDelay: s.timeout * 3 / 5},
			MinConnectTimeout: s.timeout * 2 / 5,
		}),
		grpc.WithChainUnaryInterceptor(failFast),
	}
	scheme := "http://"
	if s.https {
		scheme = "https://"
		opts = append(opts, grpc.WithTransportCredentials(handshaker{s.tls}))
	}
	if s.dial != nil {
		opts = append(opts, grpc.WithContextDialer(s.dial))
	}
	urls := make([]string, len(endpoints))
	for i, e := range endpoints {
		urls[i] = scheme + e
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            urls,
		DialKeepAliveTime:    keepalive,
		DialKeepAliveTimeout: s.timeout,
		MaxUnaryRetries:      1, // of the client's own: none
		DialOptions:          opts,
		Logger:               zap.NewNop(),
	})
	if err != nil {
		return nil, err
	}
	return &conn{set: s, client: client, watch: pb.NewWatchClient(client.ActiveConnection()), turn: make(chan struct{}, 1)}, nil
}

// failFast has a call fail with the reason when no member can be connected to, where the client would
// have it wait until its context ends.
func failFast(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return invoke(ctx, method, req, reply, cc, append(opts[:len(opts):len(opts)], grpc.WaitForReady(false))...)
}

// broken reports whether no member could be connected to. gRPC would go on trying, with delays of its own.
func (c *conn) broken() bool {
	return c.client.ActiveConnection().GetState() == connectivity.TransientFailure
}

func (c *conn) close() { _ = c.client.Close() }

// do has f ask etcd, for at most the timeout. The error wraps its kind.
func (c *conn) do(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.set.timeout, ErrTimeout)
	defer cancel()
	for try := 0; ; try++ {
		asked, err := c.authorise(ctx)
		if err == nil {
			err = f(clientv3.WithRequireLeader(asked))
		}
		if err == nil {
			return nil
		}
		if try == 0 && stale(err) && ctx.Err() == nil {
			if err := c.forget(ctx); err == nil {
				continue
			}
		}
		return classify(ctx, err)
	}
}

// authorise returns ctx with a token where there is a user, and asks for one where there is none yet.
func (c *conn) authorise(ctx context.Context) (context.Context, error) {
	if c.set.username == "" {
		return ctx, nil
	}
	if err := c.take(ctx); err != nil {
		return nil, err
	}
	defer c.give()
	if c.token == "" && !c.open {
		password, err := c.set.secret()
		if err != nil {
			return nil, err
		}
		resp, err := c.client.Authenticate(ctx, c.set.username, password)
		switch {
		case errors.Is(err, rpctypes.ErrAuthNotEnabled):
			c.open = true
		case err != nil:
			return nil, err
		default:
			c.token = resp.Token
		}
	}
	if c.open {
		return ctx, nil
	}
	return metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, c.token), nil
}

// forget has the next call ask for a token: tokens expire, and servers forget them when they restart.
func (c *conn) forget(ctx context.Context) error {
	if err := c.take(ctx); err != nil {
		return err
	}
	defer c.give()
	c.token, c.open = "", false
	return nil
}

func (c *conn) take(ctx context.Context) error {
	select {
	case c.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *conn) give() { <-c.turn }

// secret returns the password.
func (s *settings) secret() (string, error) {
	if s.file == "" {
		return s.password.Value(), nil
	}
	data, err := os.ReadFile(s.file)
	if err != nil {
		return "", fmt.Errorf("%w: PasswordFile: %w", ErrUnauthorised, err)
	}
	password := strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r")
	if password == "" {
		return "", fmt.Errorf("%w: PasswordFile: %s is empty", ErrUnauthorised, s.file)
	}
	return password, nil
}

// handshaker makes TLS connections, and reads the files for each.
type handshaker struct{ tls TLS }

func (h handshaker) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cfg, err := h.tls.load()
	if err != nil {
		return nil, nil, err
	}
	if cfg.ServerName != "" {
		authority = cfg.ServerName // gRPC prefers the authority, which is the endpoint
	}
	return credentials.NewTLS(cfg).ClientHandshake(ctx, authority, raw)
}

func (handshaker) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.ErrUnsupported
}

func (handshaker) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

func (h handshaker) Clone() credentials.TransportCredentials { return h }

// OverrideServerName is deprecated, and nothing calls it.
func (handshaker) OverrideServerName(string) error { return errors.ErrUnsupported }

// load reads the files.
func (t TLS) load() (*tls.Config, error) {
	cfg := new(tls.Config)
	if t.Config != nil {
		cfg = t.Config.Clone()
	}
	if t.ServerName != "" {
		cfg.ServerName = t.ServerName
	}
	if t.CAFile != "" {
		pem, err := os.ReadFile(t.CAFile)
		if err != nil {
			return nil, fmt.Errorf("TLS.CAFile: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("TLS.CAFile: %s has no certificate in PEM", t.CAFile)
		}
	}
	if t.CertFile != "" {
		cert, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("TLS.CertFile %s, TLS.KeyFile %s: %w", t.CertFile, t.KeyFile, err)
		}
		cfg.Certificates, cfg.GetClientCertificate = []tls.Certificate{cert}, nil
	}
	return cfg, nil
}
