package mesh_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath/key"
	devmem "github.com/warren-mesh/warren/datapath/memory"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/internal/state"
	"github.com/warren-mesh/warren/mesh/meshtest"
	regmem "github.com/warren-mesh/warren/mesh/registry/memory"
)

func goodConfig() mesh.Config {
	return mesh.Config{Node: "a", Registry: regmem.New(), Datapath: devmem.New(devmem.Options{})}
}

func TestNewNamesWhatIsWrong(t *testing.T) {
	secret := meshtest.Key(0, 0)
	for _, test := range []struct {
		set  func(*mesh.Config)
		want []string // in the error: the field, and the value
	}{
		{func(c *mesh.Config) { c.Node = "" }, []string{"Node", "empty"}},
		{func(c *mesh.Config) { c.Node = "Upper" }, []string{"Node", "Upper"}},
		{func(c *mesh.Config) { c.Node = strings.Repeat("x", 254) }, []string{"Node", "254"}},
		{func(c *mesh.Config) { c.Registry = nil }, []string{"Registry", "nil"}},
		{func(c *mesh.Config) { c.Datapath = nil }, []string{"Datapath", "nil"}},
		{func(c *mesh.Config) { c.Key, c.StateDir = secret, "/some/folder" }, []string{"Key", "StateDir", "/some/folder"}},
		{func(c *mesh.Config) { c.Addresses = []netip.Addr{{}} }, []string{"Addresses", "invalid IP"}},
		{func(c *mesh.Config) { c.Addresses = []netip.Addr{netip.MustParseAddr("127.0.0.1")} }, []string{"Addresses", "127.0.0.1"}},
		{func(c *mesh.Config) { c.Addresses = []netip.Addr{netip.MustParseAddr("fd00::1%eth0")} }, []string{"Addresses", "fd00::1%eth0"}},
		{func(c *mesh.Config) {
			for i := range 65 {
				c.Addresses = append(c.Addresses, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))
			}
		}, []string{"Addresses", "64"}},
		{func(c *mesh.Config) { c.Announce = []netip.Prefix{{}} }, []string{"Announce", "invalid Prefix"}},
		{func(c *mesh.Config) { c.Announce = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")} }, []string{"Announce", "0.0.0.0/0", "Accept"}},
		{func(c *mesh.Config) { c.Announce = []netip.Prefix{netip.MustParsePrefix("2000::/3")} }, []string{"Announce", "2000::/3", "Accept"}},
		{func(c *mesh.Config) { c.Announce = manyPrefixes(16385) }, []string{"Announce", "16385", "16384"}},
		{func(c *mesh.Config) { c.Announce = []netip.Prefix{netip.MustParsePrefix("224.0.0.0/8")} }, []string{"Announce", "224.0.0.0/8"}},
		{func(c *mesh.Config) {
			c.Accept = func(string, netip.Prefix) bool { return false }
			c.Announce = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}
		}, []string{"Announce", "10.0.0.0/24"}},
		{func(c *mesh.Config) { c.Endpoints = []mesh.Endpoint{{}} }, []string{"Endpoints", "number 1"}},
		{func(c *mesh.Config) { c.Endpoints = []mesh.Endpoint{{Addr: netip.MustParseAddr("0.0.0.0"), Port: 1}} }, []string{"Endpoints", "0.0.0.0:1"}},
		{func(c *mesh.Config) {
			c.Endpoints = slices.Repeat([]mesh.Endpoint{mesh.MustEndpoint("192.0.2.1:1")}, 65)
		}, []string{"Endpoints", "65", "64"}},
		{func(c *mesh.Config) { c.ListenPorts = mesh.Ports{First: 2, Last: 1} }, []string{"ListenPorts", "2-1"}},
		{func(c *mesh.Config) { c.ListenPorts = mesh.Ports{Last: 1} }, []string{"ListenPorts", "0-1"}},
		{func(c *mesh.Config) { c.MTU = 1279 }, []string{"MTU", "1279"}},
		{func(c *mesh.Config) { c.MTU = 65536 }, []string{"MTU", "65536"}},
		{func(c *mesh.Config) { c.Keepalive = 1500 * time.Millisecond }, []string{"Keepalive", "1.5s"}},
		{func(c *mesh.Config) { c.Keepalive = 70000 * time.Second }, []string{"Keepalive", "19h26m40s"}},
		{func(c *mesh.Config) { c.Roles = []string{"a b"} }, []string{"Roles", "a b"}},
		{func(c *mesh.Config) { c.Labels = map[string]string{"k": "\x00"} }, []string{"Labels", "k"}},
		{func(c *mesh.Config) { c.Window = -1 }, []string{"Window", "-1ns"}},
		{func(c *mesh.Config) { c.Window = 2 * time.Second }, []string{"Window", "2s"}},
		{func(c *mesh.Config) { c.Audit = time.Millisecond }, []string{"Audit", "1ms"}},
		{func(c *mesh.Config) { *c = mesh.Config{MTU: 1, Roles: []string{""}} }, []string{"Node", "Registry", "Datapath", "MTU", "Roles"}}, // all at once
	} {
		c := goodConfig()
		test.set(&c)
		_, err := mesh.New(c)
		if !errors.Is(err, mesh.ErrConfig) {
			t.Errorf("want %v: error is %v", test.want, err)
			continue
		}
		for _, w := range test.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("error does not name %q: %v", w, err)
			}
		}
		if b := secret.Bytes(); strings.Contains(err.Error(), fmt.Sprintf("%x", b[:4])) || strings.Contains(err.Error(), secret.Base64()) {
			t.Errorf("the error has the key")
		}
	}
	if _, err := mesh.New(goodConfig()); err != nil {
		t.Errorf("a Config with what is needed: %v", err)
	}
}

// What is handed to New can be changed afterwards.
func TestNewKeepsNoHold(t *testing.T) {
	o := meshtest.Options{Nodes: 1, Configure: func(_ *meshtest.Node, c *mesh.Config) { c.Labels = map[string]string{"a": "b"} }}
	bubble(t, o, func(t *testing.T, c *meshtest.Cluster) {
		cfg := c.Nodes[0].Config
		m, err := mesh.New(cfg)
		must(t, err)
		cfg.Labels["a"] = "\x00"
		cfg.Addresses[0], cfg.Endpoints[0] = netip.Addr{}, mesh.Endpoint{}
		ctx := after(t, time.Minute)
		done := make(chan error)
		go func() { done <- m.Run(ctx) }()
		must(t, mesh.Ready(ctx, m))
		v, _ := m.Current()
		if err := v.Self.Record.Validate(); err != nil {
			t.Error(err)
		}
		must(t, <-done)
	})
}

// runs returns the error of a Run with that state folder.
func runs(t *testing.T, node, folder string) error {
	c := goodConfig()
	c.Node, c.StateDir = node, folder
	m, err := mesh.New(c)
	must(t, err)
	return m.Run(after(t, 200*time.Millisecond))
}

func wantError(t *testing.T, err error, want ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error does not name %q: %v", w, err)
		}
	}
}

func TestRule17_StateFolder(t *testing.T) {
	t.Run("made", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "a", "b")
		must(t, runs(t, "a", dir))
		for path, mode := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, "key"): 0o600} {
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode {
				t.Errorf("%s: %v, mode %v", path, err, info.Mode())
			}
		}
		k, err := key.Load(filepath.Join(dir, "key"))
		must(t, err)
		must(t, runs(t, "a", dir))
		if again, err := key.Load(filepath.Join(dir, "key")); err != nil || again != k {
			t.Errorf("the key is another: %v", err)
		}
	})
	t.Run("corrupt key", func(t *testing.T) {
		dir := t.TempDir()
		path := filepath.Join(dir, "key")
		must(t, os.WriteFile(path, []byte("rubbish\n"), 0o600))
		wantError(t, runs(t, "a", dir), path)
		if data, err := os.ReadFile(path); err != nil || string(data) != "rubbish\n" {
			t.Errorf("the file is now %q, %v", data, err)
		}
	})
	t.Run("world-readable key", func(t *testing.T) {
		dir := t.TempDir()
		must(t, runs(t, "a", dir))
		path := filepath.Join(dir, "key")
		must(t, os.Chmod(path, 0o644))
		wantError(t, runs(t, "a", dir), path)
	})
	t.Run("corrupt starts", func(t *testing.T) {
		dir := t.TempDir()
		path := filepath.Join(dir, "starts")
		must(t, os.WriteFile(path, []byte("{"), 0o600))
		wantError(t, runs(t, "a", dir), path)
	})
	t.Run("unwritable", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "file")
		must(t, os.WriteFile(file, nil, 0o600))
		dir := filepath.Join(file, "state")
		wantError(t, runs(t, "a", dir), file)
	})
	t.Run("another node's", func(t *testing.T) {
		dir := t.TempDir()
		must(t, runs(t, "a", dir))
		wantError(t, runs(t, "b", dir), dir, `"a"`, `"b"`)
		must(t, runs(t, "a", dir))
	})
	t.Run("locked", func(t *testing.T) {
		dir := t.TempDir()
		self, err := os.Executable()
		must(t, err)
		holder := exec.Command(self)
		holder.Env = append(os.Environ(), holdEnv+"=a "+dir)
		in, err := holder.StdinPipe()
		must(t, err)
		out, err := holder.StdoutPipe()
		must(t, err)
		must(t, holder.Start())
		line := make([]byte, 100)
		n, _ := out.Read(line)
		if string(line[:n]) != "held <nil>\n" {
			t.Fatalf("the other process says %q", line[:n])
		}
		err = runs(t, "a", dir)
		wantError(t, err, dir, "node a", fmt.Sprint("process ", holder.Process.Pid))
		if !errors.Is(err, state.ErrLocked) {
			t.Errorf("error is %v", err)
		}
		must(t, in.Close())
		must(t, holder.Wait())
		must(t, runs(t, "a", dir))
	})
}

// The count of starts outlives the process and the registry's record.
func TestRule06_StartsAreCounted(t *testing.T) {
	dir := t.TempDir()
	o := meshtest.Options{Nodes: 1, Configure: func(_ *meshtest.Node, c *mesh.Config) {
		c.StateDir, c.Key = dir, key.Private{}
	}}
	bubble(t, o, func(t *testing.T, c *meshtest.Cluster) {
		n := c.Nodes[0]
		var first uint64 // the count of devices begins anywhere
		for epoch := range uint64(3) {
			n.Start()
			must(t, mesh.Ready(after(t, time.Minute), n.Mesh()))
			time.Sleep(time.Second)
			is := epochAndGeneration(t, c, n)
			if epoch == 0 {
				first = is[1]
			}
			if want := [2]uint64{epoch + 1, first}; is != want || first == 0 {
				t.Errorf("epoch and generation are %v, want %v", is, want)
			}
			n.Stop()
			c.Store.Restore(regmem.Snapshot{})
		}
		n.Renew()
		must(t, mesh.Ready(after(t, time.Minute), n.Mesh()))
		time.Sleep(time.Second)
		if is := epochAndGeneration(t, c, n); is != [2]uint64{4, first + 1} {
			t.Errorf("with a new device, epoch and generation are %v", is)
		}
	})
}

func manyPrefixes(n int) []netip.Prefix {
	ps := make([]netip.Prefix, n)
	for i := range ps {
		ps[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24)
	}
	return ps
}
