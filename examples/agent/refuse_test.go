//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
	"github.com/warren-mesh/warren/mesh/view"
)

// refused runs a command that has to end with an exit status, and to say something.
func refused(t *testing.T, p *proc, code int, says string, args ...string) {
	t.Helper()
	out, err := run(p, args...)
	got := 0
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		got = e.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	if got != code || !strings.Contains(out, says) {
		t.Errorf("%q ended with %d, want %d, and %q:\n%s", args, got, code, says, out)
	}
}

// keys returns what an etcd has.
func keys(t *testing.T, c *clientv3.Client) (all []string) {
	t.Helper()
	resp, err := c.Get(t.Context(), "", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range resp.Kvs {
		all = append(all, string(kv.Key))
	}
	return all
}

// Who takes a record out of a registry writes nothing into one that holds nothing of the mesh.
func TestLeaveWhatIsNotThere(t *testing.T) {
	etcd := etcdtest.Start(t, etcdtest.Options{})
	client := etcd.Client()
	anna := newProc(t, "anna", etcd.URL())
	const says = `has no mark of mesh "warren", nor of any other`
	refused(t, anna, exitFailed, says, "leave", "--node", "anna", "--registry", etcd.URL()+"/mistyped")
	refused(t, anna, exitFailed, says, "forget", "bert", "--force", "--registry", etcd.URL()+"/mistyped")
	refused(t, anna, exitFailed, says, "leave", "--node", "anna", "--registry", etcd.URL())
	if got := keys(t, client); len(got) > 0 {
		t.Errorf("etcd has %q", got)
	}
	if _, err := os.Stat(anna.state); err == nil {
		t.Error("there is a state folder of a node that never was")
	}
	anna.start().until("published", published)
	if code := anna.stop(); code != exitOK {
		t.Errorf("it ended with %d", code)
	}
	refused(t, anna, exitState, "is that of node anna", "leave", "--node", "bert", "--registry", etcd.URL())
	refused(t, anna, exitOK, "anna has left mesh warren; no agent was running", "leave", "--registry", etcd.URL())
	if _, err := os.Stat(filepath.Join(anna.state, "snapshot")); err == nil {
		t.Error("what was known of the mesh is still there")
	}
	refused(t, anna, exitOK, "anna had no record in mesh warren, and no agent was running", "leave", "--registry", etcd.URL())
	if got := keys(t, client); !slices.Equal(got, []string{"/warren/warren/mesh/name"}) {
		t.Errorf("etcd has %q", got)
	}
}

// A state folder is one process's, whatever socket and proxy it has, and who finds it taken is told by whom.
func TestStateInUse(t *testing.T) {
	etcd := etcdtest.Start(t, etcdtest.Options{})
	anna := newProc(t, "anna", etcd.URL())
	anna.control.Path = filepath.Join(filepath.Dir(anna.state), "s")
	anna.args = append(anna.args, "--socket", anna.control.Path)
	anna.start().until("published", published)
	by := fmt.Sprintf("in use by node anna in process %d", anna.cmd.Process.Pid)
	refused(t, anna, exitState, by+", which listens elsewhere; say where with --socket", "leave", "--registry", etcd.URL())
	refused(t, anna, exitState, by, "leave")
	refused(t, anna, exitState, by+"; stop that agent", append([]string{"run", "--socks5", anna.status().Agent.Socks5}, anna.args[1:]...)...)
	second := slices.Clone(anna.args)
	second[slices.Index(second, "--socks5")+1] = anna.status().Agent.Socks5
	refused(t, anna, exitState, by+"; stop that agent", second...)
	if got := keys(t, etcd.Client()); !slices.Contains(got, "/warren/warren/node/anna") {
		t.Errorf("etcd has %q", got)
	}
	refused(t, anna, exitOK, "left the mesh", "leave", "--socket", anna.control.Path)
	if code := anna.wait(); code != exitOK {
		t.Errorf("it ended with %d", code)
	}
}

// Without the privilege, or the kernel, that the kernel datapath needs, it is said what is missing and what
// else can be done, and nothing is made.
func TestKernelRefused(t *testing.T) {
	anna := newProc(t, "anna", "memory")
	refused(t, anna, exitFailed, "or --datapath netstack", append(slices.Clone(anna.args), "--datapath", "kernel", "--interface", "wrn-refused")...)
	if _, err := os.Stat(anna.state); err == nil {
		t.Error("there is a state folder")
	}
	if _, err := net.InterfaceByName("wrn-refused"); err == nil {
		t.Error("there is an interface")
	}
}

// A second signal does not wait for anything.
func TestSecondSignal(t *testing.T) {
	anna := newProc(t, "anna", "memory").start()
	anna.until("published", published)
	// Who is about to ask has 2 s to do so when the agent ends.
	c, err := net.Dial("unix", anna.control.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("GET ")); err != nil {
		t.Fatal(err)
	}
	anna.signal(syscall.SIGTERM)
	for ended := false; !ended; {
		select {
		case <-anna.ended:
			ended = true
		case <-time.After(50 * time.Millisecond):
			anna.signal(syscall.SIGTERM)
		}
	}
	if s := anna.cmd.ProcessState.Sys().(syscall.WaitStatus); !s.Signaled() || s.Signal() != syscall.SIGTERM {
		t.Errorf("it ended with %v", anna.cmd.ProcessState)
	}
}

// Those who use the proxy leave the agent the descriptors it needs.
func TestManyClients(t *testing.T) {
	anna := newProc(t, "anna", "memory")
	anna.args = slices.Concat(anna.args[:slices.Index(anna.args, "--endpoint")], anna.args[slices.Index(anna.args, "--endpoint")+2:])
	anna.limit = 100
	anna.start().until("published", published)
	was := anna.status()
	for range 200 {
		c, err := net.DialTimeout("tcp", was.Agent.Socks5, patient)
		if err != nil {
			continue // it is one too many
		}
		defer c.Close()
	}
	anna.saying("connection refused, there are too many")
	anna.saying("limit=25")
	time.Sleep(lookAgain + 2*time.Second)
	if s := anna.status(); !slices.Equal(s.Self.Endpoints, was.Self.Endpoints) {
		t.Errorf("it is at %v and was at %v", s.Self.Endpoints, was.Self.Endpoints)
	}
	if s := anna.said(); strings.Contains(s, "too many open files") {
		t.Errorf("it said: %s", s)
	}
}

// At SIGHUP another registry is taken up, but not another mesh's; and one that could not be seen is looked at
// before anything goes into it.
func TestOtherRegistry(t *testing.T) {
	first, second := etcdtest.Start(t, etcdtest.Options{}), etcdtest.Start(t, etcdtest.Options{})
	foreign := etcdtest.Start(t, etcdtest.Options{})
	put := func(c *etcdtest.Cluster, key, value string) {
		t.Helper()
		if _, err := c.Client().Put(t.Context(), key, value); err != nil {
			t.Fatal(err)
		}
	}
	put(foreign, "/warren/blue/mesh/name", "red")
	put(foreign, "/warren/blue/node/rosa", "a record of another mesh")
	proxy := foreign.Proxy(0)
	proxy.Cut()

	file := filepath.Join(folder(t), "agent.yaml")
	anna := newProc(t, "anna", "-", "--mesh", "blue", "--config", file)
	i := slices.Index(anna.args, "--registry")
	anna.args = slices.Delete(anna.args, i, i+2)
	configure := func(url string) {
		t.Helper()
		if err := os.WriteFile(file, []byte("registry: "+url+"/warren/blue?timeout=1s\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if anna.cmd != nil {
			anna.signal(syscall.SIGHUP)
		}
	}
	at := func(url string) {
		t.Helper()
		if s := anna.status(); s.Agent.Registry != url+"/warren/blue?timeout=1s" {
			t.Errorf("the registry is %s, want %s", s.Agent.Registry, url)
		}
	}
	configure(first.URL())
	anna.start().until("published", published)

	configure(foreign.URL())
	anna.saying(`the registry stays as it is`)
	anna.saying(`is that of mesh \"red\"`)
	at(first.URL())

	configure(second.URL())
	there := func() bool { return slices.Contains(keys(t, second.Client()), "/warren/blue/node/anna") }
	for end := time.Now().Add(patient); !there(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the second etcd has %q", keys(t, second.Client()))
		}
	}
	anna.until("published", published)
	at(second.URL())

	configure("etcd://" + proxy.Addr())
	anna.saying("the registry is taken up without having been seen")
	at("etcd://" + proxy.Addr())
	anna.until("without registry", has(view.RegistryDown))
	proxy.Heal()
	if code := anna.wait(); code != exitOtherMesh {
		t.Errorf("it ended with %d", code)
	}
	if s := anna.said(); !strings.Contains(s, "etcd://"+proxy.Addr()+`/warren/blue?timeout=1s is that of mesh "red"`) || strings.Contains(s, "rosa") {
		t.Errorf("it said: %s", s)
	}
	if got := keys(t, foreign.Client()); !slices.Equal(got, []string{"/warren/blue/mesh/name", "/warren/blue/node/rosa"}) {
		t.Errorf("the foreign etcd has %q", got)
	}
}

// A user of etcd needs no more than to read the mesh and write its own node. Who lacks something is told what.
func TestLeastPermission(t *testing.T) {
	etcd := etcdtest.Start(t, etcdtest.Options{Auth: true})
	client := etcd.Client()
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	const password = "hunter22"
	grant := func(key, end string, kind clientv3.PermissionType) {
		t.Helper()
		if _, err := client.RoleGrantPermission(ctx, "anna", key, end, kind); err != nil {
			t.Fatal(err)
		}
	}
	_, err := client.UserAdd(ctx, "anna", password)
	if err == nil {
		_, err = client.RoleAdd(ctx, "anna")
	}
	if err == nil {
		_, err = client.UserGrantRole(ctx, "anna", "anna")
	}
	if err != nil {
		t.Fatal(err)
	}
	const prefix = "/warren/warren/"
	grant(prefix, clientv3.GetPrefixRangeEnd(prefix), clientv3.PermissionType(clientv3.PermRead))
	grant(prefix+"node/anna", "", clientv3.PermissionType(clientv3.PermReadWrite))

	anna := newProc(t, "anna", "etcd://anna:"+password+"@"+strings.TrimPrefix(etcd.Endpoint(0), "http://")).start()
	const remedy = `user \"anna\" needs the right password, and permission to read the prefix /warren/warren/, to read and write /warren/warren/node/anna, and for the first node of the mesh /warren/warren/mesh/name`
	anna.saying(remedy)
	anna.until("not let in", func(s control.Status) bool { return has(view.RegistryDown)(s) && !published(s) })
	if got := keys(t, client); len(got) > 0 {
		t.Errorf("etcd has %q", got)
	}
	// The first node is one that may.
	bert := newProc(t, "bert", etcd.URL()).start()
	bert.until("with anna", knows("anna"))
	anna.until("with bert", knows("bert"))
	if strings.Contains(anna.said(), password) {
		t.Error("the password is in the log")
	}
	refused(t, bert, exitFailed, `user "anna" needs`, "forget", "bert", "--node", "anna", "--timeout", "3s", "--socket", bert.state+"/none", "--registry", anna.args[slices.Index(anna.args, "--registry")+1])
}
