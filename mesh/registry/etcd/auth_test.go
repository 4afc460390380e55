package etcd_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
)

// user adds a user that may do anything below a prefix.
func user(t *testing.T, c *clientv3.Client, name, password, prefix string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := c.UserAdd(ctx, name, password)
	if err == nil {
		_, err = c.RoleAdd(ctx, name)
	}
	if err == nil {
		_, err = c.RoleGrantPermission(ctx, name, prefix, clientv3.GetPrefixRangeEnd(prefix), clientv3.PermissionType(clientv3.PermReadWrite))
	}
	if err == nil {
		_, err = c.UserGrantRole(ctx, name, name)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Who is not authorised is told so, tries seldom, and gets on at once after Reload.
func TestUnauthorised(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		o.Auth = true
		c := etcdtest.Start(t, o)
		admin := c.Client()
		user(t, admin, "agent", hush, "/agents/")
		right := etcd.Config{Endpoints: c.Endpoints(), Prefix: "/agents", Username: "agent", Password: hush}
		good := open(t, right)
		put(t, good, "node/a", "there")
		for name, cfg := range map[string]etcd.Config{
			"wrong password": {Endpoints: c.Endpoints(), Prefix: "/agents", Username: "agent", Password: "wrong-wrong"},
			"unknown user":   {Endpoints: c.Endpoints(), Prefix: "/agents", Username: "nobody", Password: "wrong-wrong"},
			"no user":        {Endpoints: c.Endpoints(), Prefix: "/agents"},
			"no permission":  {Endpoints: c.Endpoints(), Prefix: "/others", Username: "agent", Password: hush},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				cfg.Timeout = 3 * short
				p := c.Proxy(0)
				cfg.Endpoints = []string{p.Addr()}
				r := open(t, cfg)
				err := r.Put(t.Context(), registry.Entry{ID: "node/b"})
				if !errors.Is(err, etcd.ErrUnauthorised) || !strings.Contains(err.Error(), p.Addr()) {
					t.Errorf("put: %v, want ErrUnauthorised that names the endpoint", err)
				}
				f := follow(t, r, registry.KindNode)
				f.await("an error", func(s seen) bool { return len(s.errs) > 0 })
				time.Sleep(4 * short)
				s, _ := f.now()
				if n := len(s.errs); n > 1 || s.Known {
					t.Errorf("told %d times: %v", n, s.errs)
				}
				for _, err := range append(s.errs, err) {
					if !errors.Is(err, etcd.ErrUnauthorised) || strings.Contains(err.Error(), cfg.Password) && cfg.Password != "" {
						t.Errorf("told as %v, want ErrUnauthorised without the password", err)
					}
				}
				right := right
				right.Timeout = cfg.Timeout
				if err := r.Reload(right); err != nil {
					t.Fatal(err)
				}
				f.has("node/a", "there")
			})
		}
	})
}

// Tokens that expired, or that a restarted server forgot, are asked for anew without anyone noticing. A
// changed password file is read again.
func TestTokensExpire(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		o.Auth, o.TokenTTL = true, time.Second
		c := etcdtest.Start(t, o)
		admin := c.Client()
		user(t, admin, "agent", hush, "/agents/")
		file := filepath.Join(t.TempDir(), "password")
		write := func(password string) {
			if err := os.WriteFile(file, []byte(password+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write(hush)
		r := open(t, etcd.Config{Endpoints: c.Endpoints(), Prefix: "/agents", Username: "agent", PasswordFile: file, Timeout: 3 * short})
		f := follow(t, r, registry.KindNode)
		must := func(id, data string) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := r.Put(ctx, registry.Entry{ID: id, Data: []byte(data)}); err != nil {
				t.Fatal(err)
			}
			f.has(id, data)
		}
		must("node/a", "1")
		time.Sleep(2500 * time.Millisecond) // longer than the token is good for
		must("node/a", "2")
		c.Kill(0) // does not wait for the watch
		c.Start(0)
		put(t, r, "node/a", "3")
		f.has("node/a", "3")

		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		write("another")
		for { // a client that was there before the restart may need more than one try
			if _, err := c.Client().UserChangePassword(ctx, "agent", "another"); err == nil {
				break
			} else if ctx.Err() != nil {
				t.Fatal(err)
			}
		}
		put(t, r, "node/a", "4")
		s := f.has("node/a", "4")
		if s.resets != 1 || s.deleted != 0 {
			t.Errorf("%d resets and %d deletions, want 1 and 0; errors %v", s.resets, s.deleted, s.errs)
		}
		for _, err := range s.errs {
			if errors.Is(err, etcd.ErrUnauthorised) {
				t.Error(err)
			}
		}
	})
}

// A user is no trouble to an etcd that knows none.
func TestUserWithoutAuth(t *testing.T) {
	t.Parallel()
	c := etcdtest.Start(t, etcdtest.Options{})
	r := open(t, etcd.Config{Endpoints: c.Endpoints(), Username: "agent", Password: hush})
	put(t, r, "node/a", "1")
	follow(t, r, registry.KindNode).has("node/a", "1")
}

// Certificates that change on disk are taken at the next connection.
func TestTLS(t *testing.T) {
	each(t, func(t *testing.T, o etcdtest.Options) {
		o.TLS = true
		c := etcdtest.Start(t, o)
		files := c.Files()
		dir := t.TempDir()
		mine := etcd.TLS{CAFile: filepath.Join(dir, "ca"), CertFile: filepath.Join(dir, "cert"), KeyFile: filepath.Join(dir, "key")}
		copyFiles := func() {
			t.Helper()
			for from, to := range map[string]string{files.CA: mine.CAFile, files.Cert: mine.CertFile, files.Key: mine.KeyFile} {
				data, err := os.ReadFile(from)
				if err == nil {
					err = os.WriteFile(to, data, 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		r := open(t, etcd.Config{Endpoints: c.Endpoints(), Prefix: "/tls", TLS: mine})
		err := r.Put(t.Context(), registry.Entry{ID: "node/a"})
		if err == nil || !strings.Contains(err.Error(), mine.CAFile) {
			t.Errorf("put: %v, want the missing file to be named", err)
		}
		f := follow(t, r, registry.KindNode)
		f.await("an error", func(s seen) bool { return len(s.errs) > 0 })
		copyFiles()
		put(t, r, "node/a", "1")
		f.has("node/a", "1")

		// Another authority for all.
		c.Kill(0)
		a := etcdtest.NewAuthority(t, files.CA)
		a.Issue(t, "server", files.ServerCert, files.ServerKey)
		a.Issue(t, "client", files.Cert, files.Key)
		c.Start(0)
		if err := r.Put(t.Context(), registry.Entry{ID: "node/a"}); err == nil {
			t.Error("the server of another authority is believed")
		}
		copyFiles()
		put(t, r, "node/a", "2")
		if s := f.has("node/a", "2"); s.resets != 1 {
			t.Errorf("%d resets, want 1", s.resets)
		}

		bad := open(t, etcd.Config{Endpoints: c.Endpoints(), TLS: etcd.TLS{CAFile: files.CA}})
		if err := bad.Put(t.Context(), registry.Entry{ID: "node/a"}); err == nil {
			t.Error("the server takes who has no certificate")
		}
		named := open(t, etcd.Config{Endpoints: c.Endpoints(), TLS: etcd.TLS{CAFile: files.CA, CertFile: files.Cert, KeyFile: files.Key, ServerName: "other.example"}})
		if err := named.Put(t.Context(), registry.Entry{ID: "node/a"}); err == nil || !strings.Contains(err.Error(), "other.example") {
			t.Errorf("put to a server with another name: %v", err)
		}
		parsed, err := etcd.ParseURL(c.URL())
		if err != nil {
			t.Fatal(err)
		}
		put(t, open(t, parsed), "node/a", "3")
	})
}
