package etcdtest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
)

// The environment in which a test binary is no test, but a helper of one.
const (
	envServer = "WARREN_ETCDTEST_SERVER" // a server, as JSON
	envGuard  = "WARREN_ETCDTEST_GUARD"  // the process to kill when this one's input ends
)

// bcryptCost is the least there is: a password is checked in no time.
const bcryptCost = 4

// server is what a member is told.
type server struct {
	Name, Data, Log, Client, Peer, Initial, Token string
	TLS                                           bool
	Files                                         Files
	TokenTTL                                      uint // seconds; 0: etcd's default
}

// A helper must not get to the tests, and all who import this package have one: hence init.
func init() {
	if !testing.Testing() {
		return
	}
	if s := os.Getenv(envServer); s != "" {
		err := serve(s)
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if pid, err := strconv.Atoi(os.Getenv(envGuard)); err == nil {
		_, _ = io.Copy(io.Discard, os.Stdin)
		if p, err := os.FindProcess(pid); err == nil {
			_ = p.Kill()
		}
		os.Exit(0)
	}
}

// serve runs the server that is linked in until standard input ends, and then exits.
func serve(how string) error {
	var s server
	if err := json.Unmarshal([]byte(how), &s); err != nil {
		return err
	}
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = s.Name, s.Data
	cfg.ListenPeerUrls = []url.URL{{Scheme: "http", Host: s.Peer}}
	cfg.AdvertisePeerUrls = cfg.ListenPeerUrls
	cfg.ListenClientUrls = []url.URL{{Scheme: "http", Host: s.Client}}
	cfg.InitialCluster, cfg.InitialClusterToken = s.Initial, s.Token
	cfg.UnsafeNoFsync = true
	cfg.BcryptCost = bcryptCost
	cfg.LogLevel, cfg.LogOutputs = "warn", []string{"stderr"}
	if s.TokenTTL > 0 {
		cfg.AuthTokenTTL = s.TokenTTL
	}
	if s.TLS {
		cfg.ListenClientUrls[0].Scheme = "https"
		cfg.ClientTLSInfo = transport.TLSInfo{CertFile: s.Files.ServerCert, KeyFile: s.Files.ServerKey, TrustedCAFile: s.Files.CA, ClientCertAuth: true}
	}
	cfg.AdvertiseClientUrls = cfg.ListenClientUrls
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	select {
	case <-ended:
		e.Close()
		os.Exit(0)
	case <-e.Server.StopNotify():
	case err := <-e.Err():
		return err
	}
	return fmt.Errorf("the server ended by itself")
}

// process is a running server.
type process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser // its end ends cmd, or its guard
	guard *exec.Cmd      // nil where cmd is a helper itself
	done  chan struct{}  // closed when cmd has ended
}

// spawn starts a member.
func (c *Cluster) spawn(m *member) (*process, error) {
	log, err := os.OpenFile(m.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	s := server{
		Name: m.name, Data: m.data, Client: m.client, Peer: m.peer, Initial: c.initial(),
		Token: fmt.Sprintf("etcdtest-%s-%d", filepath.Base(c.dir), c.token), TLS: c.opts.TLS, Files: c.files,
		TokenTTL: uint(c.opts.TokenTTL / time.Second),
	}
	p := &process{done: make(chan struct{})}
	if c.opts.Program != "" {
		p.cmd = exec.Command(c.opts.Program, s.flags()...)
	} else {
		how, err := json.Marshal(s)
		if err != nil {
			return nil, err
		}
		if p.cmd, err = helper(envServer + "=" + string(how)); err != nil {
			return nil, err
		}
		if p.stdin, err = p.cmd.StdinPipe(); err != nil {
			return nil, err
		}
	}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Dir = c.dir
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait()
	}()
	if c.opts.Program != "" {
		if err := p.guarded(); err != nil {
			p.kill()
			return nil, err
		}
	}
	return p, nil
}

// guarded starts the guard, which kills the server should this process end without doing so.
func (p *process) guarded() error {
	guard, err := helper(envGuard + "=" + strconv.Itoa(p.cmd.Process.Pid))
	if err != nil {
		return err
	}
	if p.stdin, err = guard.StdinPipe(); err != nil {
		return err
	}
	if err := guard.Start(); err != nil {
		return err
	}
	p.guard = guard
	return nil
}

// helper returns the command that runs this program as a helper.
func helper(env string) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), env)
	return cmd, nil
}

// unguard ends the guard, before what it guards, lest it kill another process with that number.
func (p *process) unguard() {
	if p.guard != nil {
		_ = p.guard.Process.Kill()
		_ = p.guard.Wait()
		p.guard = nil
	}
}

func (p *process) kill() {
	p.unguard()
	_ = p.cmd.Process.Kill()
	<-p.done
	if p.stdin != nil {
		_ = p.stdin.Close()
	}
}

// stop ends the server in order, or after a while, as kill does.
func (p *process) stop() {
	if p.guard != nil {
		p.unguard()
		if endProcess(p.cmd.Process) != nil {
			p.kill()
			return
		}
	} else {
		_ = p.stdin.Close()
	}
	late := time.NewTimer(patience / 2)
	defer late.Stop()
	select {
	case <-p.done:
	case <-late.C:
	}
	p.kill()
}

// flags are for an etcd program of any version since 3.4.
func (s server) flags() []string {
	scheme := "http://"
	if s.TLS {
		scheme = "https://"
	}
	flags := []string{
		"--name", s.Name, "--data-dir", s.Data,
		"--listen-client-urls", scheme + s.Client, "--advertise-client-urls", scheme + s.Client,
		"--listen-peer-urls", "http://" + s.Peer, "--initial-advertise-peer-urls", "http://" + s.Peer,
		"--initial-cluster", s.Initial, "--initial-cluster-token", s.Token, "--initial-cluster-state", "new",
		"--unsafe-no-fsync", "--bcrypt-cost", strconv.Itoa(bcryptCost), "--logger", "zap", "--log-level", "warn", "--log-outputs", "stderr",
	}
	if s.TLS {
		flags = append(flags, "--cert-file", s.Files.ServerCert, "--key-file", s.Files.ServerKey,
			"--trusted-ca-file", s.Files.CA, "--client-cert-auth")
	}
	if s.TokenTTL > 0 {
		flags = append(flags, "--auth-token-ttl", strconv.Itoa(int(s.TokenTTL)))
	}
	return flags
}
