package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
	"github.com/warren-mesh/warren/mesh/view"
)

// Agents, each a process of its own that is not root, with a TUN interface, in network namespaces on this machine's
// kernel. What they leave when they end is as much the matter as what they do.
func TestTUN(t *testing.T) {
	if testing.Short() {
		t.Skip("takes half a minute: leave out -short")
	}
	newStage(t) // or skips
	etcd := etcdtest.Start(t, etcdtest.Options{})
	for _, test := range []struct {
		name string
		run  func(*stageTest)
	}{
		{"whole host", (*stageTest).wholeHost},
		{"default route", (*stageTest).defaultRoute},
		{"namespaces", (*stageTest).namespaces},
		{"two in one namespace", (*stageTest).two},
		{"in the way", (*stageTest).inTheWay},
		{"auto", (*stageTest).auto},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			test.run(&stageTest{T: t, stage: newStage(t), etcd: etcd.Endpoint(0), mesh: strings.ReplaceAll(test.name, " ", "-")})
			t.Logf("took %v", time.Since(start).Round(time.Millisecond))
		})
	}
}

// stageTest is a test with files, namespaces and a mesh of its own.
type stageTest struct {
	*testing.T
	*stage
	etcd string
	mesh string
}

func (st *stageTest) site(name string) *site {
	st.Helper()
	return newSite(st.T, name, st.stage)
}

// pair returns two sites with a wire between them, from where etcd can be reached.
//
//	namespace a                              namespace b
//	      10.99.0.1 eth0 ------ veth ------ eth0 10.99.0.2
//	127.0.0.1:PORT -> etcd                   127.0.0.1:PORT -> etcd
func (st *stageTest) pair() (a, b *site) {
	st.Helper()
	a, b = st.site("a"), st.site("b")
	wire(end{a, "eth0", "10.99.0.1/24"}, end{b, "eth0", "10.99.0.2/24"})
	a.forward(st.etcd)
	b.forward(st.etcd)
	settle(a, b)
	return a, b
}

// agent makes an agent of the test's mesh, which is not started yet.
func (st *stageTest) agent(s *site, name, addr string, args ...string) *proc {
	st.Helper()
	if !slices.Contains(args, "--mesh") {
		args = append(args, "--mesh", st.mesh)
	}
	return s.agent(name, addr, args...)
}

// start starts agents and waits until they are a mesh.
func start(ps ...*proc) {
	for _, p := range ps {
		p.start()
	}
	meet(ps...)
}

func meet(ps ...*proc) {
	for _, p := range ps {
		p.until("with all others", func(s control.Status) bool { return published(s) && len(s.Peers) == len(ps)-1 })
	}
}

var admin = []uintptr{unix.CAP_NET_ADMIN}

// reaches has an agent fetch from another, at /name and port 8080, until it comes.
func (p *proc) reaches(to string, want string) {
	p.t.Helper()
	var got string
	var err error
	for end := time.Now().Add(soon); time.Now().Before(end) && got != want; time.Sleep(50 * time.Millisecond) {
		got, err = p.fetch(to+":8080", "/name")
	}
	if got != want {
		p.t.Fatalf("%s fetched from %s: %q and %v", p.name, to, got, err)
	}
}

// get fetches http://to/ as a program in the namespace does.
func (s *site) get(to string) (string, error) {
	c, err := s.dial("tcp", to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	if _, err := io.WriteString(c, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	_, body, _ := strings.Cut(string(b), "\r\n\r\n")
	return body, err
}

// echoes answers with name and with who asks, at an address of the namespace.
func (s *site) echoes(address, name string) {
	l := s.listen("tcp", address)
	h := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s to %s", name, r.RemoteAddr[:strings.LastIndexByte(r.RemoteAddr, ':')])
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = h.Serve(l) }()
	s.t.Cleanup(func() { _ = h.Close(); <-done })
}

// cleanup runs "agent cleanup" for an agent's state folder, which has to end well, and to say this.
func (s *site) cleanup(p *proc, caps []uintptr, says ...string) {
	s.t.Helper()
	out, code := s.exec(caps, "cleanup", "--state", p.state)
	for _, want := range says {
		if code != exitOK || !strings.Contains(out, want) {
			s.t.Errorf("cleanup of %s ended with %d, want %q:\n%s", p.name, code, want, out)
		}
	}
}

// mtu is that of a link; 0 is none.
func (s *site) mtu(name string) (mtu int) {
	_ = s.in(func() error {
		if l, err := netlink.LinkByName(name); err == nil {
			mtu = l.Attrs().MTU
		}
		return nil
	})
	return mtu
}

// whole host: programs that know nothing of the mesh use it, both ways, with CAP_NET_ADMIN alone; a killed agent
// leaves nothing in the way, and is back as it was.
func (st *stageTest) wholeHost() {
	a, b := st.pair()
	bareA, bareB := a.dump(), b.dump()
	anna := st.agent(a, "anna", "10.80.0.1", "--datapath", "tun", "--mtu", "1380")
	bert := st.agent(b, "bert", "10.80.0.2", "--datapath", "tun", "--expose", "8080="+b.web("bert"))
	start(anna, bert)
	for _, p := range []*proc{anna, bert} {
		if uid, caps := credentials(st.T, p.cmd.Process.Pid); uid != nobodyText || caps != "0000000000001000" {
			st.Errorf("%s has the user %s and the capabilities %s", p.name, uid, caps)
		}
	}
	carry(st.T, a, b, "10.80.0.2")
	carry(st.T, b, a, "10.80.0.1")
	carry(st.T, a, b, bert.own6())
	anna.reaches("bert", "bert")
	a.sysctl("net/ipv4/ping_group_range", "0 2147483647")
	if out, code := a.run(anna, "ping", "-c", "2", "-i", "10ms", "bert"); code != exitOK || !strings.Contains(out, "2 sent, 2 answered") {
		st.Errorf("ping ended with %d: %s", code, out)
	}
	if out, code := a.run(anna, "status", "-o", "wide"); code != exitOK || !strings.Contains(out, "\ndatapath   tun, interface warren0\n") || !strings.Contains(out, ", MTU 1380\n") || strings.Contains(out, "\nrouting ") {
		st.Errorf("status ended with %d: %s", code, out)
	}
	if a.mtu("warren0") != 1380 || b.mtu("warren0") != 1440 {
		st.Errorf("the MTUs are %d, which was asked for, and %d", a.mtu("warren0"), b.mtu("warren0"))
	}

	// The interface is not for two, be it that the second has a folder of its own, and not to be cleaned away.
	second := st.agent(a, "second", "10.80.0.9", "--datapath", "tun").start()
	second.until("told that it cannot have the interface", func(s control.Status) bool {
		return slices.ContainsFunc(s.Conditions, func(c control.Condition) bool {
			return strings.Contains(c.Message, "a mesh with the same settings has it") && strings.Contains(c.Message, "choose another interface name")
		})
	})
	if code := second.stop(); code != exitOK {
		st.Errorf("the second ended with %d", code)
	}
	if out, code := a.exec(admin, "cleanup", "--state", second.state); code != exitFailed || !strings.Contains(out, "interface warren0: it is in use: a TUN interface is there for as long as the process that made it") {
		st.Errorf("cleanup of what is in use ended with %d: %s", code, out)
	}
	if out, code := a.exec(nil, "forget", "second", "--state", anna.state, "--force"); code != exitOK {
		st.Errorf("forget ended with %d: %s", code, out)
	}

	anna.signal(syscall.SIGKILL)
	if got := a.mtu("warren0"); got != 0 {
		st.Error("there is an interface without its process")
	}
	anna.start()
	meet(anna, bert)
	carry(st.T, a, b, "10.80.0.2")
	carry(st.T, b, a, "10.80.0.1")
	if code := anna.stop(); code != exitOK {
		st.Errorf("anna ended with %d", code)
	}
	anna.saying("the interface ends with the agent, and packets for the mesh go by the host's other routes until it is back")
	a.same(bareA)
	a.cleanup(anna, nil, "there is nothing to remove\n")
	anna.start()
	meet(anna, bert)
	anna.signal(syscall.SIGKILL)
	a.cleanup(anna, admin, "removed the control socket "+anna.control.Path+"\n")
	a.same(bareA)
	if out, code := b.run(bert, "leave"); code != exitOK {
		st.Errorf("leave ended with %d: %s", code, out)
	}
	bert.wait()
	b.same(bareB)
}

// default route: anna sends everything into the mesh, out of which bert sends it on; what she is to send there goes
// nowhere else, while she is away too. To her registry she gets by the other way.
//
//	a: anna 10.99.1.2 ---- 10.99.1.1 net 10.99.2.1 ---- 10.99.2.2 bert :b 10.99.3.1 ---- 10.99.3.2 :c
//	                       198.51.100.1, another                                        198.51.100.1
func (st *stageTest) defaultRoute() {
	a, internet, b, c := st.site("a"), st.site("net"), st.site("b"), st.site("c")
	wire(end{a, "eth0", "10.99.1.2/24"}, end{internet, "a", "10.99.1.1/24"})
	wire(end{b, "eth0", "10.99.2.2/24"}, end{internet, "b", "10.99.2.1/24"})
	wire(end{b, "eth1", "10.99.3.1/24"}, end{c, "eth0", "10.99.3.2/24"})
	internet.sysctl("net/ipv4/ip_forward", "1")
	for s, name := range map[*site]string{internet: "outside", c: "inside"} {
		s.must(func() error {
			return netlink.AddrAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index("lo")}}, &netlink.Addr{IPNet: host("198.51.100.1")})
		})
		s.echoes("198.51.100.1:80", name)
	}
	a.must(func() error { // from which nothing is sent
		return netlink.AddrAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index("eth0")}}, &netlink.Addr{IPNet: host("10.97.0.1")})
	})
	a.route("0.0.0.0/0", "10.99.1.1")
	b.route("0.0.0.0/0", "10.99.2.1")
	b.route("198.51.100.0/24", "10.99.3.2")
	internet.forwardAt("10.99.2.1:0", st.etcd)
	a.registry, b.registry = internet.registry, internet.registry
	settle(a, b)
	bareA, bareB := a.dump(), b.dump()
	const there = "198.51.100.1:80"
	if got, err := a.get(there); got != "outside to 10.99.1.2" {
		st.Fatalf("without a mesh it is %q and %v", got, err)
	}

	anna := st.agent(a, "anna", "10.80.0.1", "--datapath", "tun", "--routing", "policy", "--guard", "0.0.0.0/0", "--accept-wide", "0.0.0.0/0", "--expose", "8080="+a.web("anna"))
	bert := st.agent(b, "bert", "10.80.0.2", "--datapath", "tun", "--announce", "0.0.0.0/0", "--accept-wide", "0.0.0.0/0", "--snat", "0.0.0.0/0", "--forward", "on")
	start(anna, bert)
	inside := func(when string) {
		st.Helper()
		var got string
		var err error
		for end := time.Now().Add(soon); time.Now().Before(end) && got == ""; time.Sleep(20 * time.Millisecond) {
			got, err = a.get(there)
		}
		if got != "inside to 10.99.3.1" {
			st.Errorf("%s: it is %q and %v", when, got, err)
		}
	}
	inside("by the mesh")
	carry(st.T, a, b, "10.80.0.2")
	carry(st.T, b, a, "10.80.0.1")
	bert.reaches("anna", "anna")
	out, code := a.run(anna, "status")
	for _, want := range []string{"\ndatapath   tun, interface warren0\n", "\nrouting    policy, by table 8787; encrypted packets have the mark 0x50/0xf0\n", "\nguards     0.0.0.0/0\n", "0.0.0.0/0"} {
		if code != exitOK || !strings.Contains(out, want) {
			st.Errorf("status ended with %d, and does not say %q: %s", code, want, out)
		}
	}
	if s := anna.status(); len(s.Conditions) > 0 {
		st.Errorf("something is wrong with anna: %+v", s.Conditions)
	}
	if s := bert.status(); len(s.Conditions) > 0 {
		st.Errorf("something is wrong with bert: %+v", s.Conditions)
	}

	guarded := func(when string) {
		st.Helper()
		if got, err := a.get(there); !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EHOSTUNREACH) {
			st.Errorf("%s: it is %q and %v", when, got, err)
		}
	}
	anna.signal(syscall.SIGKILL)
	guarded("killed")
	anna.start() // of which the registry is where the guard is
	meet(anna, bert)
	inside("restarted")
	if s := anna.status(); len(s.Self.Endpoints) != 2 || !strings.HasPrefix(s.Self.Endpoints[0], "10.99.1.2:") {
		st.Errorf("she publishes the endpoints %q, and sends from 10.99.1.2", s.Self.Endpoints)
	}
	if code := anna.stop(); code != exitOK {
		st.Errorf("anna ended with %d", code)
	}
	anna.saying(`what is guarded stays unreachable until the agent is back, or \"agent cleanup\"`)
	guarded("stopped")
	a.cleanup(anna, admin, "removed the guard of 0.0.0.0/0, in table 8787\n", "removed the rule 32500 of IPv4, to table 254\n", "removed the rule 32501 of IPv4, to table 8787\n", "removed the rule 32501 of IPv6, to table 8787\n")
	a.same(bareA)
	if got, err := a.get(there); got != "outside to 10.99.1.2" {
		st.Errorf("after cleanup it is %q and %v", got, err)
	}
	bert.signal(syscall.SIGKILL)
	b.cleanup(bert, admin, "removed the nftables table inet warren-warren0\n", "turned off net.ipv4.ip_forward\n", "turned off net.ipv6.conf.all.forwarding\n")
	b.same(bareB)
}

// namespaces: the agent is in one, its interface in another, and its UDP sockets where it is, or where the interface
// is.
//
//	a: anna and dora, anna's sockets 10.99.0.1 ---- 10.99.0.2 bert :b
//	                                 10.98.0.1 ---- 10.98.0.2 :e, dora's interface and sockets
//	d: anna's interface
func (st *stageTest) namespaces() {
	a, b := st.pair()
	d, e := st.site("d"), st.site("e")
	wire(end{a, "eth1", "10.98.0.1/24"}, end{e, "eth0", "10.98.0.2/24"})
	settle(a, b, d, e)
	bareA, bareB, bareD := a.dump(), b.dump(), d.dump()
	both := []uintptr{unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN}
	enters := func(p *proc) *proc {
		p.launch = func(cmd *exec.Cmd) error { return a.start(cmd, both...) }
		return p
	}
	anna := enters(st.agent(a, "anna", "10.80.0.1", "--datapath", "tun", "--netns", "d", "--underlay-netns", "/run/netns/a", "--routing", "policy", "--guard", "10.80.0.0/16", "--expose", "8080="+a.web("anna")))
	bert := st.agent(b, "bert", "10.80.0.2", "--datapath", "tun", "--expose", "8080="+b.web("bert"))
	dora := enters(st.agent(a, "dora", "10.80.0.3", "--datapath", "tun", "--netns", "e", "--interface", "dora", "--expose", "8080="+a.web("dora")))

	out, code := a.exec(admin, anna.args...)
	if code != exitFailed || !strings.Contains(out, "netns (--netns): network namespace /run/netns/d: operation not permitted: to enter it takes CAP_SYS_ADMIN: run this as root") {
		st.Errorf("without CAP_SYS_ADMIN it ended with %d: %s", code, out)
	}
	start(anna, bert, dora)
	for p, at := range map[*proc][]string{anna: {"10.98.0.1", "10.99.0.1"}, bert: {"10.99.0.2"}, dora: {"10.98.0.2"}} {
		got := p.status().Self.Endpoints
		for i := range got {
			got[i], _, _ = strings.Cut(got[i], ":")
		}
		if !slices.Equal(got, at) {
			st.Errorf("%s publishes the endpoints %q", p.name, got)
		}
	}
	carry(st.T, d, b, "10.80.0.2")
	carry(st.T, b, d, "10.80.0.1")
	carry(st.T, d, e, "10.80.0.3")
	carry(st.T, e, d, "10.80.0.1")
	anna.reaches("bert", "bert")
	anna.reaches("dora", "dora")
	anna.reaches("anna", "anna")
	dora.reaches("anna", "anna")
	bert.reaches("anna", "anna")
	d.sysctl("net/ipv4/ping_group_range", "0 2147483647")
	ctx, cancel := context.WithTimeout(st.Context(), soon)
	defer cancel()
	for _, to := range []string{"bert", "10.80.0.1"} {
		if _, err := anna.control.Ping(ctx, to, 10*time.Second); err != nil {
			st.Errorf("ping %s: %v", to, err)
		}
	}
	if out, code := a.run(anna, "status"); code != exitOK || !strings.Contains(out, "\ndatapath   tun, interface warren0 in namespace /run/netns/d, UDP sockets in namespace /run/netns/a\n") {
		st.Errorf("status ended with %d: %s", code, out)
	}
	own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", anna.cmd.Process.Pid))
	if err != nil {
		st.Fatal(err)
	}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/ns/net", anna.cmd.Process.Pid))
	for _, task := range tasks {
		if ns, err := os.Readlink(task); err == nil && ns != own {
			st.Errorf("a thread of anna's is in %s, want %s", ns, own)
		}
	}
	a.same(bareA) // of her own she has touched nothing

	for _, p := range []*proc{anna, dora} {
		p.signal(syscall.SIGKILL)
	}
	if out, code := a.exec(admin, "cleanup", "--state", anna.state); code != exitFailed || !strings.Contains(out, "to enter it takes CAP_SYS_ADMIN") {
		st.Errorf("cleanup without CAP_SYS_ADMIN ended with %d: %s", code, out)
	}
	a.cleanup(anna, both, "removed the guard of 10.80.0.0/16, in table 8787\n", "removed the rule 32500 of IPv4, to table 254\n")
	d.same(bareD)
	a.same(bareA)
	if code := bert.stop(); code != exitOK {
		st.Errorf("bert ended with %d", code)
	}
	b.same(bareB)
}

// two in one namespace: agents of two meshes, with an interface each, share nothing.
func (st *stageTest) two() {
	a, b := st.pair()
	bareA, bareB := a.dump(), b.dump()
	red := []string{"--mesh", st.mesh + "-red", "--datapath", "tun", "--interface", "red0", "--source", "loopback", "--protocol", "86"}
	blue := []string{"--mesh", st.mesh + "-blue", "--datapath", "tun", "--interface", "blue0", "--routing", "policy", "--guard", "10.81.0.0/16", "--forward", "on"}
	anna := st.agent(a, "anna", "10.80.0.1", red...)
	bert := st.agent(b, "bert", "10.80.0.2", red...)
	start(anna, bert)
	redA := a.dump()
	annb := st.agent(a, "anna", "10.81.0.1", blue...)
	berb := st.agent(b, "bert", "10.81.0.2", blue...)
	start(annb, berb)
	for range 2 {
		carry(st.T, a, b, "10.80.0.2")
		carry(st.T, b, a, "10.80.0.1")
		carry(st.T, a, b, "10.81.0.2")
	}
	check := (&machine{}).stream(a, b, "10.80.0.2")
	annb.signal(syscall.SIGKILL)
	a.cleanup(annb, admin, "removed the guard of 10.81.0.0/16, in table 8787\n", "removed the rule 32500 of IPv4, to table 254\n", "turned off net.ipv4.ip_forward\n")
	a.same(redA)
	if sent, lost := check(); lost > 0 {
		st.Errorf("of %d datagrams of the other mesh, %d were lost", sent, lost)
	}
	anna.signal(syscall.SIGKILL)
	a.cleanup(anna, admin, "removed the address 10.80.0.1/32 of lo\n")
	a.same(bareA)
	for _, p := range []*proc{bert, berb} {
		if out, code := b.run(p, "leave"); code != exitOK {
			st.Errorf("leave ended with %d: %s", code, out)
		}
		p.wait()
	}
	b.same(bareB)
}

// in the way: what is somebody else's is left alone, and named with what can be done.
func (st *stageTest) inTheWay() {
	a := st.site("a")
	a.registry = "memory"
	a.must(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "theirs"}, PeerName: "peer"})
	})
	first := st.agent(a, "first", "10.80.0.1", "--datapath", "tun", "--routing", "policy", "--mesh", "first").start()
	first.until("published", published)
	before := a.dump()
	for _, test := range []struct {
		name string
		args []string
		says string
	}{
		{"interface", []string{"--interface", "theirs"}, "link theirs is not ours: of kind veth, without an alias; remove or rename it, or choose another interface name"},
		{"protocol", []string{"--interface", "two0", "--routing", "policy"}, "protocol 87 is not ours: of the mesh whose link has the alias \"warren:warren0:87\"; choose another protocol"},
		{"table", []string{"--interface", "two0", "--table", "8788"}, "routing table 8788 is not ours: it has a route to 192.0.2.0/24 on theirs"},
	} {
		if test.name == "table" {
			a.must(func() error {
				l, err := netlink.LinkByName("theirs")
				if err == nil {
					err = netlink.LinkSetUp(l)
				}
				if err != nil {
					return err
				}
				_, dst, _ := net.ParseCIDR("192.0.2.0/24")
				return netlink.RouteAdd(&netlink.Route{Dst: dst, LinkIndex: l.Attrs().Index, Table: 8788})
			})
			before = a.dump()
		}
		p := st.agent(a, test.name, "10.80.0.9", append([]string{"--datapath", "tun"}, test.args...)...).start()
		p.until("told what is in the way", func(s control.Status) bool {
			return slices.ContainsFunc(s.Conditions, func(c control.Condition) bool {
				return c.Kind == view.OpFailed && strings.Contains(c.Message, test.says)
			})
		})
		if code := p.stop(); code != exitOK {
			st.Errorf("%s: it ended with %d", test.name, code)
		}
		a.same(before)
	}
	if out, code := a.exec(admin, "cleanup", "--state", first.state+"-none", "--interface", "theirs"); code != exitOK || !strings.Contains(out, "the interface theirs is not an agent's, and is left alone\n") {
		st.Errorf("cleanup of somebody else's ended with %d: %s", code, out)
	}
	a.same(before)
}

// auto: the best that there is, and why not a better one; for who has no privilege, what needs none.
func (st *stageTest) auto() {
	a := st.site("a")
	a.registry = "memory"
	bare := a.dump()
	best := "kernel"
	if k, err := kernel.New(kernel.Options{Interface: "wrn-probe"}); err == nil {
		_ = k.Close()
	} else {
		best = "tun"
	}
	anna := st.agent(a, "anna", "10.80.0.1", "--datapath", "auto", "--mtu", "1400").start()
	anna.until("published", published)
	s := anna.status()
	if s.Agent.Datapath != "auto" || s.Self.Datapath != best || s.Agent.Interface != "warren0" || (best == "tun") != strings.Contains(s.Self.Instead, "kernel: ") || a.mtu("warren0") != 1400 {
		st.Errorf("it has %+v, as %q; MTU %d", s.Agent, s.Self.Datapath, a.mtu("warren0"))
	}
	out, code := a.run(anna, "status")
	if want := fmt.Sprintf("\ndatapath   %s, interface warren0\n", best); code != exitOK || !strings.Contains(out, want) || best == "tun" && !strings.Contains(out, "\n           no better one: kernel: this kernel has no WireGuard") {
		st.Errorf("status ended with %d: %s", code, out)
	}
	if code := anna.stop(); code != exitOK {
		st.Errorf("anna ended with %d", code)
	}
	a.cleanup(anna, admin)
	a.same(bare)

	anna.launch = func(cmd *exec.Cmd) error { return a.start(cmd) }
	anna.start().until("published", published)
	s = anna.status()
	if s.Self.Datapath != "netstack" || s.Agent.Interface != "" || s.Agent.Routing != "" || !strings.Contains(s.Self.Instead, "tun: it takes CAP_NET_ADMIN") {
		st.Errorf("without privilege it has %+v, as %q instead of %q", s.Agent, s.Self.Datapath, s.Self.Instead)
	}
	if out, code := a.run(anna, "status"); code != exitOK || !strings.Contains(out, "\ndatapath   netstack\n           no better one: kernel: ") {
		st.Errorf("status ended with %d: %s", code, out)
	}
	if code := anna.stop(); code != exitOK {
		st.Errorf("anna ended with %d", code)
	}
	a.same(bare)
	out, code = a.exec(nil, append(slices.Clone(anna.args), "--routing", "policy")...)
	if code != exitFailed || !strings.Contains(out, "netstack, which needs nothing of the host, cannot do what routing (--routing) asks for") {
		st.Errorf("what netstack cannot do ended with %d: %s", code, out)
	}
	out, code = a.exec(nil, append(slices.Clone(anna.args), "--datapath", "tun")...)
	if code != exitFailed || !strings.Contains(out, "it takes CAP_NET_ADMIN: run as root") || !strings.Contains(out, "or have --datapath netstack, which needs no privilege") {
		st.Errorf("tun without privilege ended with %d: %s", code, out)
	}
	a.must(func() error { return os.Chmod("/dev/net/tun", 0o600) })
	out, code = a.exec(admin, append(slices.Clone(anna.args), "--datapath", "tun")...)
	if code != exitFailed || !strings.Contains(out, "/dev/net/tun: permission denied: run as root, or give the container the device") {
		st.Errorf("tun without its device ended with %d: %s", code, out)
	}
}
