package etcdtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Options says what to start. The zero Options is one member of version 3.7, without TLS and users.
type Options struct {
	// Program is the etcd to run; see Installed. Empty: the one that is linked in, of version 3.7.
	Program string

	// Members is how many there are: 1 if zero.
	Members int

	// TLS has clients come over TLS, with a certificate. See Cluster.Files.
	TLS bool

	// Auth has clients come with user and password. There is the user Root with RootPassword; further
	// ones are made through Cluster.Client.
	Auth bool

	// TokenTTL is how long a client's token is good for, in whole seconds; etcd's 5 min if zero.
	TokenTTL time.Duration
}

// The user of a cluster with Options.Auth.
const (
	Root         = "root"
	RootPassword = "root-password"
)

// patience is how long anything may take that a cluster needs to do.
const patience = time.Minute

// Installed returns the path of the etcd that the named package of the system installs: "etcd-server" on
// Debian, where it is of version 3.4. Where there is none, the test is skipped, or with CI=true, fails.
func Installed(t testing.TB, from string) string {
	t.Helper()
	path, err := exec.LookPath("etcd")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("needs etcd, on Debian from the package %s: %v", from, err)
		}
		t.Skipf("needs etcd, on Debian from the package %s: %v", from, err)
	}
	return path
}

// Cluster is an etcd of one member or several.
type Cluster struct {
	t       testing.TB
	opts    Options
	dir     string // of logs and files
	files   Files
	members []*member

	mu    sync.Mutex
	token int // counts the clusters that were here one after the other
}

// member is one server, running or not.
type member struct {
	name         string
	client, peer string // host:port
	data, log    string
	process      *process // nil: not running
}

// Start starts a cluster and waits until all its members serve. It ends with the test.
func Start(t testing.TB, o Options) *Cluster {
	t.Helper()
	o.Members = max(o.Members, 1)
	c := &Cluster{t: t, opts: o, dir: t.TempDir()}
	if o.TLS {
		c.files = newFiles(t, c.dir)
	}
	ports := freePorts(t, 2*o.Members)
	for i := range o.Members {
		name := "m" + strconv.Itoa(i)
		c.members = append(c.members, &member{
			name: name, client: ports[2*i], peer: ports[2*i+1],
			data: filepath.Join(c.dir, name), log: filepath.Join(c.dir, name+".log"),
		})
	}
	t.Cleanup(func() {
		for i := range c.members {
			c.Kill(i)
		}
	})
	c.startAll()
	if o.Auth {
		c.enableAuth()
	}
	return c
}

// Members is how many there are.
func (c *Cluster) Members() int { return len(c.members) }

// Endpoints returns the URLs of the members, in their order.
func (c *Cluster) Endpoints() []string {
	var all []string
	for i := range c.members {
		all = append(all, c.Endpoint(i))
	}
	return all
}

// Endpoint returns the URL of a member: "http://127.0.0.1:20000".
func (c *Cluster) Endpoint(i int) string { return c.scheme() + c.members[i].client }

func (c *Cluster) scheme() string {
	if c.opts.TLS {
		return "https://"
	}
	return "http://"
}

// URL returns what an agent is given to find the cluster: "etcd://127.0.0.1:20000,127.0.0.1:20001", with
// user, password and the files of Files where they are needed.
func (c *Cluster) URL() string {
	var addrs []string
	for _, m := range c.members {
		addrs = append(addrs, m.client)
	}
	scheme, user, query := "etcd://", "", ""
	if c.opts.Auth {
		user = Root + ":" + RootPassword + "@"
	}
	if c.opts.TLS {
		scheme, query = "etcds://", "?ca="+c.files.CA+"&cert="+c.files.Cert+"&key="+c.files.Key
	}
	return scheme + user + strings.Join(addrs, ",") + query
}

// Files returns the certificates for clients of a cluster with TLS.
func (c *Cluster) Files() Files { return c.files }

// Kill ends a member at once, as kill -9 does, unless it does not run. Its data stay.
func (c *Cluster) Kill(i int) {
	if p := c.take(i); p != nil {
		p.kill()
	}
}

// Stop ends a member as an operator does, and waits for it. Its data stay.
func (c *Cluster) Stop(i int) {
	if p := c.take(i); p != nil {
		p.stop()
	}
}

func (c *Cluster) take(i int) *process {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.members[i].process
	c.members[i].process = nil
	return p
}

// Start starts a member again, on its data and ports, and waits until it serves. Without a majority of
// members none does: then use Launch for the first.
func (c *Cluster) Start(i int) {
	c.t.Helper()
	c.Launch(i)
	c.await(i)
}

// Launch is Start that does not wait.
func (c *Cluster) Launch(i int) {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.members[i]
	if m.process != nil {
		c.t.Fatalf("etcdtest: member %d runs already", i)
	}
	p, err := c.spawn(m)
	if err != nil {
		c.t.Fatalf("etcdtest: starting member %d: %v", i, err)
	}
	m.process = p
}

// Pause has a running member stand still, so that it answers nothing and closes nothing, until Resume.
// Where the system cannot do that, the test is skipped.
func (c *Cluster) Pause(i int) { c.signal(i, true) }

// Resume ends a Pause.
func (c *Cluster) Resume(i int) { c.signal(i, false) }

func (c *Cluster) signal(i int, pause bool) {
	c.t.Helper()
	c.mu.Lock()
	p := c.members[i].process
	c.mu.Unlock()
	if p == nil {
		c.t.Fatalf("etcdtest: member %d does not run", i)
	}
	switch err := pauseProcess(p.cmd.Process, pause); {
	case errors.Is(err, errors.ErrUnsupported):
		c.t.Skipf("needs a system on which a process can be paused: %v", err)
	case err != nil:
		c.t.Fatalf("etcdtest: pausing or resuming member %d: %v", i, err)
	}
}

func (c *Cluster) startAll() {
	c.t.Helper()
	for i := range c.members {
		c.Launch(i)
	}
	for i := range c.members {
		c.await(i)
	}
}

func (c *Cluster) stopAll() {
	for i := range c.members {
		c.Stop(i)
	}
}

// await waits until a member serves reads of the newest state.
func (c *Cluster) await(i int) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	client, err := c.dial(ctx, c.opts.Auth, c.Endpoint(i))
	if err == nil {
		defer client.Close()
		for {
			try, cancel := context.WithTimeout(ctx, 2*time.Second)
			_, err = client.Get(try, "etcdtest")
			cancel()
			if err == nil || ctx.Err() != nil {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	if err != nil {
		c.t.Fatalf("etcdtest: member %d does not serve: %v\n%s", i, err, c.members[i].tail())
	}
}

// tail returns the end of the member's log.
func (m *member) tail() string {
	log, err := os.ReadFile(m.log)
	if err != nil {
		return err.Error()
	}
	return string(log[max(0, len(log)-4000):])
}

// dial returns a client, authorised if the cluster wants it.
func (c *Cluster) dial(ctx context.Context, auth bool, endpoints ...string) (*clientv3.Client, error) {
	cfg := clientv3.Config{Endpoints: endpoints, DialTimeout: patience, Logger: zap.NewNop(), Context: ctx}
	if auth {
		cfg.Username, cfg.Password = Root, RootPassword
	}
	if c.opts.TLS {
		var err error
		if cfg.TLS, err = c.files.config(); err != nil {
			return nil, err
		}
	}
	for {
		client, err := clientv3.New(cfg)
		if err == nil || ctx.Err() != nil {
			return client, err
		}
		time.Sleep(20 * time.Millisecond) // it authenticates at once, and the server may not be there yet
	}
}

// Client returns a client of all members, as the user Root where there are users. It ends with the test.
func (c *Cluster) Client() *clientv3.Client {
	c.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	client, err := c.dial(ctx, c.opts.Auth, c.Endpoints()...)
	if err != nil {
		cancel()
		c.t.Fatalf("etcdtest: %v", err)
	}
	c.t.Cleanup(func() {
		cancel()
		client.Close()
	})
	return client
}

// with calls f with a client.
func (c *Cluster) with(what string, auth bool, f func(context.Context, *clientv3.Client) error) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	client, err := c.dial(ctx, auth, c.Endpoints()...)
	if err == nil {
		defer client.Close()
		err = f(ctx, client)
	}
	if err != nil {
		c.t.Fatalf("etcdtest: %s: %v", what, err)
	}
}

func (c *Cluster) enableAuth() {
	c.t.Helper()
	c.with("enabling users", false, func(ctx context.Context, client *clientv3.Client) error {
		if _, err := client.RoleAdd(ctx, Root); err != nil {
			return err
		}
		if _, err := client.UserAdd(ctx, Root, RootPassword); err != nil {
			return err
		}
		if _, err := client.UserGrantRole(ctx, Root, Root); err != nil {
			return err
		}
		_, err := client.AuthEnable(ctx)
		return err
	})
}

// Leader returns which member leads, and waits for there to be one.
func (c *Cluster) Leader() int {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	client, err := c.dial(ctx, c.opts.Auth, c.Endpoints()...)
	if err != nil {
		c.t.Fatalf("etcdtest: finding the leader: %v", err)
	}
	defer client.Close()
	for ctx.Err() == nil {
		for i, m := range c.members {
			c.mu.Lock()
			runs := m.process != nil
			c.mu.Unlock()
			if !runs {
				continue
			}
			try, cancel := context.WithTimeout(ctx, time.Second)
			s, err := client.Status(try, c.Endpoint(i))
			cancel()
			if err == nil && s.Leader == s.Header.MemberId {
				return i
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	c.t.Fatalf("etcdtest: the cluster has no leader")
	return 0
}

// Compact has the cluster forget all history before now.
func (c *Cluster) Compact() {
	c.t.Helper()
	c.with("compacting", c.opts.Auth, func(ctx context.Context, client *clientv3.Client) error {
		now, err := client.Get(ctx, "etcdtest")
		if err != nil {
			return err
		}
		_, err = client.Compact(ctx, now.Header.Revision, clientv3.WithCompactPhysical())
		return err
	})
}

// Snapshot is the data of a cluster's members.
type Snapshot struct{ dir string }

// Snapshot copies the data of all members, which are restarted for it.
func (c *Cluster) Snapshot() Snapshot {
	c.t.Helper()
	s := Snapshot{c.t.TempDir()}
	c.stopAll()
	for _, m := range c.members {
		if err := os.CopyFS(filepath.Join(s.dir, m.name), os.DirFS(m.data)); err != nil {
			c.t.Fatalf("etcdtest: saving the data of %s: %v", m.name, err)
		}
	}
	c.startAll()
	return s
}

// Restore puts the data of all members back to s: the same cluster, IDs and all, at an earlier revision.
// It may be done more than once.
func (c *Cluster) Restore(s Snapshot) {
	c.t.Helper()
	c.stopAll()
	for _, m := range c.members {
		err := os.RemoveAll(m.data)
		if err == nil {
			err = os.CopyFS(m.data, os.DirFS(filepath.Join(s.dir, m.name)))
		}
		if err != nil {
			c.t.Fatalf("etcdtest: restoring the data of %s: %v", m.name, err)
		}
	}
	c.startAll()
}

// Renew puts an empty cluster with another ID in place of this one, at the same addresses.
func (c *Cluster) Renew() {
	c.t.Helper()
	c.stopAll()
	for _, m := range c.members {
		if err := os.RemoveAll(m.data); err != nil {
			c.t.Fatalf("etcdtest: %v", err)
		}
	}
	c.token++
	c.startAll()
	if c.opts.Auth {
		c.enableAuth()
	}
}

// Metric returns the sum of a member's values of a metric; those it does not have are 0.
func (c *Cluster) Metric(i int, name string) float64 {
	c.t.Helper()
	transport := &http.Transport{DisableKeepAlives: true}
	if c.opts.TLS {
		var err error
		if transport.TLSClientConfig, err = c.files.config(); err != nil {
			c.t.Fatalf("etcdtest: %v", err)
		}
	}
	defer transport.CloseIdleConnections()
	client := http.Client{Transport: transport, Timeout: patience}
	resp, err := client.Get(c.Endpoint(i) + "/metrics")
	if err != nil {
		c.t.Fatalf("etcdtest: metrics of member %d: %v", i, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatalf("etcdtest: metrics of member %d: %v", i, err)
	}
	sum := 0.0
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, name); ok && (strings.HasPrefix(rest, " ") || strings.HasPrefix(rest, "{")) {
			value, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
			if err != nil {
				c.t.Fatalf("etcdtest: metrics of member %d: %q: %v", i, line, err)
			}
			sum += value
		}
	}
	return sum
}

// initial is what members are told of one another at first.
func (c *Cluster) initial() string {
	var all []string
	for _, m := range c.members {
		all = append(all, fmt.Sprintf("%s=http://%s", m.name, m.peer))
	}
	return strings.Join(slices.Sorted(slices.Values(all)), ",")
}
