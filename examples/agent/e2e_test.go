//go:build unix

package main

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
	"github.com/warren-mesh/warren/mesh/view"
)

// outage is how long etcd is away as a whole.
func outage() time.Duration {
	if testing.Short() {
		return 8 * time.Second
	}
	return time.Minute
}

// Three agents, each a process of its own, over an etcd of three members:
//
//	anna --+-- etcd 0
//	bert --+-- etcd 1        cora's connections to etcd go through proxies, so that she can be cut off
//	cora --+-- etcd 2
//
// Whatever happens to etcd, the agents go on.
func TestMesh(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute: leave out -short")
	}
	etcd := etcdtest.Start(t, etcdtest.Options{Members: 3})
	var proxies []*etcdtest.Proxy
	var through []string
	for i := range etcd.Members() {
		proxies = append(proxies, etcd.Proxy(i))
		through = append(through, proxies[i].Addr())
	}
	const quick = "?timeout=1s" // of silence, and for all that follows from it
	anna := newProc(t, "anna", etcd.URL()+quick)
	bert := newProc(t, "bert", etcd.URL()+quick)
	cora := newProc(t, "cora", "etcd://"+strings.Join(through, ",")+quick)
	all := []*proc{anna, bert, cora}

	anna.start().until("published", published)
	backup := etcd.Snapshot() // of a mesh of anna alone
	bert.start()
	cora.start()
	whole := func() {
		t.Helper()
		anna.until("in a whole mesh", knows("bert", "cora"))
		bert.until("in a whole mesh", knows("anna", "cora"))
		cora.until("in a whole mesh", knows("anna", "bert"))
		for _, p := range all {
			p.until("published", published)
		}
	}
	whole()
	reachAll(t, all...)
	if t.Failed() {
		return
	}

	t.Run("curl", func(t *testing.T) {
		curl := lookCurl(t)
		for _, from := range all {
			proxy := from.status().Agent.Socks5
			for _, to := range all {
				cmd := exec.Command(curl, "-sS", "--fail", "-m", "60", "--proxy", "socks5h://"+proxy, "http://"+to.name+".warren/name")
				unprivileged(cmd)
				if out, err := cmd.CombinedOutput(); err != nil || string(out) != to.name {
					t.Errorf("from %s to %s: %v: %s", from.name, to.name, err, out)
				}
			}
		}
	})

	t.Run("killed", func(t *testing.T) {
		key := cora.status().Self.Key
		check := stream(t, anna, bert)
		cora.signal(syscall.SIGKILL)
		reachAll(t, anna, bert)
		cora.start().until("ready", published)
		if got := cora.status().Self.Key; got != key {
			t.Errorf("cora had the key %s and has %s", key, got)
		}
		reachAll(t, all...)
		check()
	})

	t.Run("members killed", func(t *testing.T) {
		var os []*observed
		for _, p := range all {
			os = append(os, p.observe())
		}
		there, back := stream(t, bert, cora), stream(t, cora, bert)
		for i := range etcd.Members() {
			etcd.Kill(i)
			etcd.Leader()
			reachAll(t, all...)
			etcd.Start(i)
		}
		for range 3 {
			leader := etcd.Leader()
			etcd.Kill(leader)
			etcd.Leader()
			etcd.Start(leader)
		}
		whole()
		reachAll(t, all...)
		there()
		back()
		for i, o := range os {
			o.stop()
			if len(o.lost) > 0 || strings.Contains(all[i].said(), `msg="peer left"`) {
				t.Errorf("%s lost %q", all[i].name, o.lost)
			}
		}
	})

	t.Run("etcd away", func(t *testing.T) {
		if code := cora.stop(); code != exitOK {
			t.Errorf("cora stopped with %d", code)
		}
		lost := []*observed{anna.observe(), bert.observe()}
		there, back := stream(t, anna, bert), stream(t, bert, anna)
		for i := range etcd.Members() {
			etcd.Kill(i)
		}
		end := time.Now().Add(outage())
		anna.until("aware that the registry is away", has(view.RegistryDown))
		// With what she knew last, cora reaches the others.
		cora.start().until("with the peers of before", knows("anna", "bert"))
		reachAll(t, all...)
		time.Sleep(time.Until(end))
		reachAll(t, all...)
		for i := range etcd.Members() {
			etcd.Launch(i)
		}
		anna.until("sure that the registry is back", func(s control.Status) bool { return !has(view.RegistryDown)(s) })
		whole()
		reachAll(t, all...)
		there()
		back()
		for _, o := range lost {
			o.stop()
			if len(o.lost) > 0 {
				t.Errorf("%q were lost", o.lost)
			}
		}
	})

	t.Run("compacted", func(t *testing.T) {
		dora := newProc(t, "dora", etcd.URL()+quick, "--endpoint", "localhost").start() // a name, which the others look up
		for _, p := range all {
			p.until("aware of dora", func(s control.Status) bool { return slices.Contains(peers(s), "dora") })
		}
		reachAll(t, anna, dora)
		dora.signal(syscall.SIGKILL)
		for _, p := range proxies {
			p.Cut()
		}
		cora.until("cut off", has(view.RegistryDown))
		// dora had a handshake a moment ago.
		if out, err := run(anna, "forget", "dora"); err == nil || !strings.Contains(out, "dora had a handshake ") || !strings.Contains(out, "--force") {
			t.Errorf("forget of a node that seems alive: %v: %s", err, out)
		}
		if out, err := run(anna, "forget", "--force", "dora"); err != nil || !strings.Contains(out, "the record of dora is deleted") {
			t.Errorf("forget: %v: %s", err, out)
		}
		bert.until("without dora", knows("anna", "cora"))
		if !slices.Contains(peers(cora.status()), "dora") {
			t.Error("cora was cut off, and yet heard of dora's end")
		}
		etcd.Compact()
		for _, p := range proxies {
			p.Heal()
		}
		whole()
		reachAll(t, all...)
	})

	t.Run("restored", func(t *testing.T) {
		etcd.Restore(backup)
		records := func() int {
			resp, err := etcd.Client().Get(t.Context(), "/warren/warren/node/", clientv3.WithPrefix(), clientv3.WithCountOnly())
			if err != nil {
				return 0
			}
			return int(resp.Count)
		}
		for end := time.Now().Add(patient); records() != len(all); time.Sleep(50 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("etcd has %d records", records())
			}
		}
		whole()
		reachAll(t, all...)
	})

	t.Run("leave", func(t *testing.T) {
		if out, err := run(cora, "leave"); err != nil || !strings.Contains(out, "left the mesh") {
			t.Errorf("leave: %v: %s", err, out)
		}
		if code := cora.wait(); code != exitOK {
			t.Errorf("cora ended with %d", code)
		}
		anna.until("without cora", knows("bert"))
		// Without an agent it does the same.
		if code := bert.stop(); code != exitOK {
			t.Errorf("bert ended with %d", code)
		}
		if !slices.Equal(peers(anna.status()), []string{"bert"}) {
			t.Error("who is merely stopped is no peer any more")
		}
		if out, err := run(bert, "leave", "--registry", etcd.URL()); err != nil || !strings.Contains(out, "bert has left mesh warren; no agent was running") {
			t.Errorf("leave without an agent: %v: %s", err, out)
		}
		anna.until("alone", knows())
		if code := anna.stop(); code != exitOK {
			t.Errorf("anna ended with %d", code)
		}
		if out, err := run(anna, "forget", "annna", "--registry", etcd.URL()); err == nil || !strings.Contains(out, `no node is called "annna", did you mean "anna"?`) {
			t.Errorf("forget without an agent: %v: %s", err, out)
		}
	})
	for _, p := range all {
		if s := p.said(); strings.Contains(s, "panic") || strings.Contains(s, "goroutine ") {
			t.Errorf("%s panicked", p.name)
		}
	}
}

func has(kind view.Kind) func(control.Status) bool {
	return func(s control.Status) bool {
		return slices.ContainsFunc(s.Conditions, func(c control.Condition) bool { return c.Kind == kind })
	}
}

// run runs a command for an agent's state folder and returns what it says.
func run(p *proc, args ...string) (string, error) {
	path, err := program()
	if err != nil {
		return "", err
	}
	if !slices.Contains(args, "--state") {
		args = append(args, "--state", p.state)
	}
	cmd := exec.Command(path, args...)
	unprivileged(cmd)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Programs that know nothing of the mesh use it, and neither they nor the agents are privileged.
func TestWithoutPrivilege(t *testing.T) {
	etcd := etcdtest.Start(t, etcdtest.Options{})
	var zone dns.ServeMux
	zone.HandleFunc("example.org.", func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		rr, err := dns.NewRR("www.example.org. 60 IN A 192.0.2.7")
		if err != nil {
			t.Error(err)
		}
		m.Answer = append(m.Answer, rr)
		_ = w.WriteMsg(m)
	})
	started := make(chan struct{})
	server := &dns.Server{Addr: "127.0.0.1:0", Net: "udp", Handler: &zone, NotifyStartedFunc: func() { close(started) }}
	served := make(chan error, 1)
	go func() { served <- server.ListenAndServe() }()
	<-started
	defer func() {
		if err := server.Shutdown(); err != nil {
			t.Error(err)
		}
		<-served
	}()

	// Without --endpoint: the host's own addresses, whatever they are.
	anna := newProc(t, "anna", etcd.URL(), "--expose", "53/udp="+server.PacketConn.LocalAddr().String())
	bert := newProc(t, "bert", etcd.URL())
	anna.args = slices.Concat(anna.args[:slices.Index(anna.args, "--endpoint")], anna.args[slices.Index(anna.args, "--endpoint")+2:])
	anna.start()
	bert.start()
	anna.until("with bert", knows("bert"))
	bert.until("with anna", knows("anna"))
	reachAll(t, anna, bert)
	proxy := bert.status().Agent.Socks5
	if os.Geteuid() == 0 {
		if info, err := os.Stat(anna.control.Path); err != nil || info.Sys().(*syscall.Stat_t).Uid != nobody {
			t.Errorf("the agent does not run as nobody: %v", err)
		}
	}

	t.Run("DNS", func(t *testing.T) {
		q, err := new(dns.Msg).SetQuestion("www.example.org.", dns.TypeA).Pack()
		if err != nil {
			t.Fatal(err)
		}
		u := associate(t, proxy)
		var answer []byte
		for end := time.Now().Add(patient); answer == nil && time.Now().Before(end); {
			u.send(t, "anna.warren", 53, q)
			answer, err = u.receive(2 * time.Second)
		}
		var m dns.Msg
		if err != nil || m.Unpack(answer) != nil || len(m.Answer) != 1 || !strings.Contains(m.Answer[0].String(), "192.0.2.7") {
			t.Errorf("got %v and %v", m.String(), err)
		}
	})

	t.Run("curl", func(t *testing.T) {
		curl := lookCurl(t)
		h := sha256.New()
		if _, err := io.Copy(h, bigBody()); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(folder(t), "big")
		cmd := exec.Command(curl, "-sS", "--fail", "-m", "120", "--proxy", "socks5h://"+proxy, "-o", file, "http://anna/big")
		unprivileged(cmd)
		start := time.Now()
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		t.Logf("%d MB in %v", big>>20, time.Since(start).Round(time.Millisecond))
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		got := sha256.New()
		if _, err := io.Copy(got, f); err != nil {
			t.Fatal(err)
		}
		if a, b := fmt.Sprintf("%x", got.Sum(nil)), fmt.Sprintf("%x", h.Sum(nil)); a != b {
			t.Errorf("SHA-256 is %s, want %s", a, b)
		}
	})

	t.Run("ping", func(t *testing.T) {
		out, err := run(bert, "ping", "-c", "3", "-i", "10ms", "-W", "20s", "anna")
		if err != nil || !strings.Contains(out, "3 sent, 3 answered, 0 lost") {
			t.Errorf("%v: %s", err, out)
		}
		// A peer is up by a reading of the device, which is made once a second at this time.
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
			out, err = run(bert, "status")
			if err == nil && strings.Contains(out, "anna  up") {
				break
			}
			if err != nil || time.Now().After(end) {
				t.Errorf("%v: %s", err, out)
				break
			}
		}
		if out, err := run(bert, "__complete", "ping", "--state", bert.state, ""); err != nil || !strings.HasPrefix(out, "anna\n") {
			t.Errorf("%v: %s", err, out)
		}
	})
}

// A registry that does not know the agent is asked again, and a password that was put right is taken up at
// SIGHUP.
func TestCredentials(t *testing.T) {
	etcd := etcdtest.Start(t, etcdtest.Options{Auth: true})
	dir := folder(t)
	password, file := filepath.Join(dir, "password"), filepath.Join(dir, "agent.yaml")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(password, "wrong\n")
	write(file, "registry-user: "+etcdtest.Root+"\nregistry-password-file: password\n")
	anna := newProc(t, "anna", "etcd://"+strings.TrimPrefix(etcd.Endpoint(0), "http://"), "--config", file).start()
	anna.until("not let in", func(s control.Status) bool {
		return has(view.RegistryDown)(s) && strings.Contains(fmt.Sprint(s.Conditions), "not authorised")
	})
	if s := anna.said(); strings.Count(s, "condition=registry-down") != 1 {
		t.Errorf("it is said more than once: %s", s)
	}
	write(file, "registry-user: root\nregistry-password-file: pass\n\tword\n")
	anna.signal(syscall.SIGHUP)
	anna.saying(`agent.yaml:2: is no YAML`)
	write(password, etcdtest.RootPassword+"\n")
	write(file, "registry-user: root\nregistry-password-file: password\nmtu: 1300\nlog-level: debug\n")
	anna.signal(syscall.SIGHUP)
	anna.until("let in", published)
	anna.saying("a setting has changed that is taken up at the next start\" setting=mtu")
	if s := anna.said(); strings.Contains(s, "wrong") || strings.Contains(s, etcdtest.RootPassword) {
		t.Errorf("a password is in the log: %s", s)
	}
	if code := anna.stop(); code != exitOK {
		t.Errorf("it ended with %d", code)
	}
}

// saying waits until the agent has said something.
func (p *proc) saying(what string) {
	p.t.Helper()
	for end := time.Now().Add(patient); !strings.Contains(p.said(), what); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("%s did not say %q", p.name, what)
		}
	}
}

// Two meshes in one etcd share nothing. One that is sent into the other's place touches nothing there, and
// says how to get out; be it that this can be found out later only.
func TestTwoMeshes(t *testing.T) {
	etcd := etcdtest.Start(t, etcdtest.Options{})
	anna := newProc(t, "anna", etcd.URL(), "--mesh", "blue").start()
	bert := newProc(t, "bert", etcd.URL(), "--mesh", "red").start()
	for _, p := range []*proc{anna, bert} {
		p.until("alone", func(s control.Status) bool { return published(s) && len(s.Peers) == 0 })
	}
	// A registry that hangs keeps nobody from stopping.
	silent := etcd.Proxy(0)
	silent.Silence()
	dora := newProc(t, "dora", "etcd://"+silent.Addr(), "--mesh", "red").start()
	dora.saying("msg=running")
	start := time.Now()
	if code := dora.stop(); code != exitOK || time.Since(start) > patience+5*time.Second {
		t.Errorf("dora ended with %d after %v", code, time.Since(start))
	}

	proxy := etcd.Proxy(0)
	proxy.Cut()
	cora := newProc(t, "cora", "etcd://"+proxy.Addr()+"/warren/blue?timeout=1s", "--mesh", "red").start()
	cora.until("without registry", has(view.RegistryDown))
	proxy.Heal()
	if code := cora.wait(); code != exitOtherMesh {
		t.Errorf("cora ended with %d", code)
	}
	want := `/warren/blue?timeout=1s is that of mesh "blue", and this node is of mesh "red"; say --mesh=blue to join that one, or give the registry's URL another prefix`
	if s := cora.said(); !strings.Contains(s, want) {
		t.Errorf("it said: %s", s)
	}
	resp, err := etcd.Client().Get(t.Context(), "/warren/blue/node/cora")
	if err != nil || len(resp.Kvs) > 0 {
		t.Errorf("cora's record is there: %v %v", resp, err)
	}
	if out, err := run(cora, "leave", "--mesh", "red", "--registry", etcd.URL()+"/warren/blue"); err == nil || !strings.Contains(out, `is that of mesh "blue"`) {
		t.Errorf("leaving the wrong mesh: %v: %s", err, out)
	}
	if !published(anna.status()) || len(anna.status().Peers) != 0 {
		t.Errorf("anna noticed: %+v", anna.status())
	}
}
