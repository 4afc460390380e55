package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/warren-mesh/warren/examples/agent/internal/control"
	"github.com/warren-mesh/warren/mesh/registry/etcd/etcdtest"
	"github.com/warren-mesh/warren/mesh/view"
)

// soon is how long anything may take in a virtual machine that a test waits for.
const soon = 20 * time.Second

// mending is how long what somebody else changed may stay as it is.
const mending = 2 * time.Second

// Agents, each a process of its own that is not root, with the kernel's WireGuard and without:
//
//	namespace a                              namespace b
//	anna 10.80.0.1 warren0                   bert 10.80.0.2 warren0
//	      10.99.0.1 eth0 ------ veth ------ eth0 10.99.0.2
//	                                         cora 10.80.0.3 (netstack)
//	127.0.0.1:PORT -> etcd                   127.0.0.1:PORT -> etcd, of the machine's own namespace
//
// The tests go on where the one before ended.
func TestVM(t *testing.T) {
	if os.Getenv("WARREN_VMRUN") == "" {
		t.Skip("needs a virtual machine: go test -exec \"go run github.com/warren-mesh/warren/datapath/internal/vmrun\" (see there)")
	}
	v := &machine{t: t, a: newSite(t, "a", nil), b: newSite(t, "b", nil)}
	wire(end{v.a, "eth0", "10.99.0.1/24"}, end{v.b, "eth0", "10.99.0.2/24"})
	etcd := etcdtest.Start(t, etcdtest.Options{})
	v.a.forward(etcd.Endpoint(0))
	v.b.forward(etcd.Endpoint(0))
	settle(v.a, v.b)
	v.bare = v.a.dump() // before any agent
	v.anna = v.a.agent("anna", "10.80.0.1", "--datapath", "kernel", "--listen", "51820")
	v.bert = v.b.agent("bert", "10.80.0.2", "--datapath", "kernel", "--expose", "8080="+v.b.web("bert"), "--expose", "7007/udp="+v.b.echo())
	v.cora = v.b.agent("cora", "10.80.0.3", "--expose", "8080="+v.b.web("cora"))
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"without capability", v.withoutCapability},
		{"whole host", v.wholeHost},
		{"commands", v.commands},
		{"killed and restarted", v.restarts},
		{"undone by hand", v.undone},
		{"leave", v.leave},
		{"cleanup", v.cleanup},
		{"other settings", v.otherSettings},
		{"without module", v.withoutModule},
	} {
		if !t.Run(test.name, func(t *testing.T) {
			start := time.Now()
			for _, p := range []*proc{v.anna, v.bert, v.cora} {
				p.t = t
			}
			v.a.t, v.b.t = t, t
			test.run(t)
			t.Logf("took %v", time.Since(start).Round(time.Millisecond))
		}) {
			return
		}
	}
}

type machine struct {
	t                *testing.T
	a, b             *site
	anna, bert, cora *proc
	bare             []string
}

// without capability: it is said what is missing, and nothing is made.
func (v *machine) withoutCapability(t *testing.T) {
	out, code := v.a.exec(nil, v.anna.args...)
	for _, want := range []string{"needs CAP_NET_ADMIN", "AmbientCapabilities=CAP_NET_ADMIN", "have --datapath netstack"} {
		if code != exitFailed || !strings.Contains(out, want) {
			t.Errorf("it ended with %d, and does not say %q: %s", code, want, out)
		}
	}
	t.Logf("%s", strings.TrimSpace(out))
	v.a.same(v.bare)
	if _, err := os.Stat(v.anna.state); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there is a state folder: %v", err)
	}
}

// whole host: programs that know nothing of the mesh use it, both ways, and agents are not privileged.
func (v *machine) wholeHost(t *testing.T) {
	for _, p := range []*proc{v.anna, v.bert, v.cora} {
		p.start()
	}
	v.whole()
	for _, p := range []*proc{v.anna, v.bert} {
		uid, caps := credentials(t, p.cmd.Process.Pid)
		if uid != nobodyText || caps != "0000000000001000" { // CAP_NET_ADMIN is the twelfth
			t.Errorf("%s has the user %s and the capabilities %s", p.name, uid, caps)
		}
	}
	if s := v.anna.status(); s.Agent.Datapath != "kernel" || s.Self.Datapath != "kernel" || s.Agent.Interface != "warren0" || s.Self.Endpoints[0] != "10.99.0.1:51820" || len(s.Self.Endpoints) != 1 {
		t.Errorf("its status has datapath %q, which is %q, interface %q, endpoints %q", s.Agent.Datapath, s.Self.Datapath, s.Agent.Interface, s.Self.Endpoints)
	}
	// cora is on the host of bert, whose mesh addresses are none to reach her at.
	if s := v.cora.status(); len(s.Self.Endpoints) != 1 || !strings.HasPrefix(s.Self.Endpoints[0], "10.99.0.2:") {
		t.Errorf("cora's endpoints are %q", s.Self.Endpoints)
	}
	for _, way := range []struct {
		from, to *site
		addr     string
	}{{v.a, v.b, "10.80.0.2"}, {v.b, v.a, "10.80.0.1"}, {v.a, v.b, v.bert.own6()}, {v.b, v.a, v.anna.own6()}} {
		carry(t, way.from, way.to, way.addr)
	}
}

// commands: ping, fetch and the proxy go through the host's stack, and into the mesh only.
func (v *machine) commands(t *testing.T) {
	out, code := v.a.run(v.anna, "status")
	if code != exitOK || !strings.Contains(out, "\ndatapath   kernel, interface warren0\n") {
		t.Errorf("status ended with %d: %s", code, out)
	}
	out, code = v.a.run(v.anna, "ping", "-c", "2", "bert")
	if code != exitFailed || !strings.Contains(out, "(net.ipv4.ping_group_range does not have its group); use the system's: ping "+v.bert.first()) {
		t.Errorf("ping without the right ended with %d: %s", code, out)
	}
	v.a.sysctl("net/ipv4/ping_group_range", "0 2147483647")
	out, code = v.a.run(v.anna, "ping", "-c", "3", "-i", "10ms", "bert")
	if code != exitOK || !strings.Contains(out, "3 sent, 3 answered, 0 lost") {
		t.Errorf("ping ended with %d: %s", code, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	for _, to := range []string{"10.80.0.2", v.bert.own6(), "cora", "10.80.0.3", "anna", "10.80.0.1"} {
		if _, err := v.anna.control.Ping(ctx, to, 10*time.Second); err != nil {
			t.Errorf("ping %s: %v", to, err)
		}
	}
	v.reach()
	// What is there, and not in the mesh.
	outside := v.b.webAt("10.99.0.2:0", "outside")
	for _, to := range []string{"10.99.0.2", "127.0.0.1"} {
		if _, err := v.anna.control.Ping(ctx, to, time.Second); err == nil || !strings.Contains(err.Error(), "no peer has this address") {
			t.Errorf("ping %s: %v", to, err)
		}
	}
	for _, to := range []string{outside, v.a.web("local")} {
		if _, err := v.anna.fetch(to, "/"); err == nil || !strings.Contains(err.Error(), "no peer has this address") {
			t.Errorf("fetch from %s: %v", to, err)
		}
	}
	// A SOCKS5 client that connects to bert by name, and is refused what is not in the mesh.
	port := binary.BigEndian.AppendUint16(nil, 8080)
	if got, err := v.socks(slices.Concat([]byte{5, 1, 0, 5, 1, 0, 3, 4}, []byte("bert"), port), "GET /name HTTP/1.0\r\n\r\n"); err != nil || !strings.HasSuffix(got, "\r\n\r\nbert") {
		t.Errorf("through SOCKS5 came %q and %v", got, err)
	}
	ap := netip.MustParseAddrPort(outside)
	if got, err := v.socks(slices.Concat([]byte{5, 1, 0, 5, 1, 0, 1}, ap.Addr().AsSlice(), binary.BigEndian.AppendUint16(nil, ap.Port())), ""); err != nil || len(got) < 4 || got[:4] != "\x05\x00\x05\x03" { // network unreachable
		t.Errorf("through SOCKS5 to outside the mesh came %q and %v", got, err)
	}
	// What bert exposes by UDP.
	c, err := v.a.dial("udp", "10.80.0.2:7007")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	b := make([]byte, 100)
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(b); err != nil || string(b[:n]) != "hello" {
		t.Errorf("by UDP came %q and %v", b[:n], err)
	}
	// A port that is for the privileged.
	v.b.sysctl("net/ipv4/ip_unprivileged_port_start", "1024")
	dora := v.b.agent("dora", "10.80.0.4", "--datapath", "kernel", "--interface", "dora", "--expose", "80="+v.b.web("dora")).start()
	dora.saying("expose a port from 1024 on")
	if out, code := v.b.run(dora, "leave"); code != exitOK {
		t.Errorf("leave ended with %d: %s", code, out)
	}
	dora.wait()
	v.whole()
}

// socks sends a SOCKS5 request through anna's proxy and returns all that comes back; more is sent after the
// reply.
func (v *machine) socks(request []byte, more string) (string, error) {
	c, err := v.a.dial("tcp", v.anna.status().Agent.Socks5)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(soon))
	if _, err := c.Write(request); err != nil {
		return "", err
	}
	var got bytes.Buffer
	if more == "" {
		_, err = io.Copy(&got, c)
		return got.String(), err
	}
	if _, err := io.CopyN(&got, c, 12); err != nil {
		return got.String(), err
	}
	if _, err := io.WriteString(c, more); err != nil {
		return got.String(), err
	}
	_, err = io.Copy(&got, c)
	return got.String(), err
}

// restarts: the device outlives the agent, which adopts it and writes nothing where nothing differs.
func (v *machine) restarts(t *testing.T) {
	probe(t)
	before, device := v.a.dump(), v.a.index("warren0")
	// restart restarts anna under traffic in both directions, and returns what was written meanwhile.
	restart := func(how syscall.Signal, away func(), what func(control.Status) bool) map[string]int {
		t.Helper()
		there, back := v.stream(v.a, v.b, "10.80.0.2"), v.stream(v.b, v.a, "10.80.0.1")
		time.Sleep(300 * time.Millisecond)
		v.anna.signal(how)
		v.anna.wait()
		v.a.same(before)
		away()
		trace(t, "trace", "")
		v.anna.start()
		v.anna.until("back", func(s control.Status) bool { return published(s) && what(s) })
		time.Sleep(time.Second) // it would have written something by now
		w := writes(t, v.anna, v.bert)
		sent, lost := there()
		sentBack, lostBack := back()
		t.Logf("%v and restart: %d datagrams there, %d lost; %d back, %d lost; written: %v", how, sent, lost, sentBack, lostBack, w)
		if lost+lostBack > 0 {
			t.Errorf("after %v, %d and %d datagrams were lost", how, lost, lostBack)
		}
		if now := v.a.index("warren0"); now != device {
			t.Errorf("the interface is another one, %d in place of %d", now, device)
		}
		return w
	}
	w := restart(syscall.SIGKILL, func() {}, knows("bert", "cora"))
	if len(w) > 0 {
		t.Errorf("nothing differed, and written was %v", w)
	}
	v.a.same(before)
	// Of what differs, only that is written: a peer left meanwhile.
	w = restart(syscall.SIGTERM, func() {
		if err := v.cora.control.Leave(t.Context()); err != nil {
			t.Fatal(err)
		}
		v.cora.wait()
		v.bert.until("alone", knows("anna"))
	}, knows("bert"))
	if want := map[string]int{"anna: wg_set_device": 1, "anna: inet_rtm_delroute": 1, "anna: inet6_rtm_delroute": 1}; !maps.Equal(w, want) {
		t.Errorf("written was %v, want %v", w, want)
	}
	v.cora.start()
	v.whole()
	v.a.same(before)
}

// undone by hand: it is put right, and soon.
func (v *machine) undone(t *testing.T) {
	want, wanted := v.a.dump(), v.a.wireguard("warren0")
	for _, test := range []struct {
		name string
		undo func() error
	}{
		{"peer removed", func() error {
			return configure(func(d *wgtypes.Device) wgtypes.Config {
				return wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: d.Peers[0].PublicKey, Remove: true}}}
			})
		}},
		{"a peer of nobody's", func() error {
			k, err := wgtypes.GeneratePrivateKey()
			if err != nil {
				return err
			}
			return configure(func(*wgtypes.Device) wgtypes.Config {
				return wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: k.PublicKey(), AllowedIPs: []net.IPNet{{IP: net.IPv4(10, 80, 0, 2).To4(), Mask: net.CIDRMask(32, 32)}}}}}
			})
		}},
		{"port changed", func() error {
			port := 51900
			return configure(func(*wgtypes.Device) wgtypes.Config { return wgtypes.Config{ListenPort: &port} })
		}},
		{"routes flushed", func() error { return errors.Join(flush(netlink.FAMILY_V4), flush(netlink.FAMILY_V6)) }},
		{"address removed", func() error {
			return change(func(l netlink.Link) error { return netlink.AddrDel(l, &netlink.Addr{IPNet: host("10.80.0.1")}) })
		}},
		{"interface down", func() error { return change(netlink.LinkSetDown) }},
		{"interface deleted", func() error { return change(netlink.LinkDel) }},
	} {
		// On a busy machine one may be late; then it is tried again.
		took := time.Hour
		for i := 0; i < 3 && took > mending; i++ {
			time.Sleep(500 * time.Millisecond)
			start := time.Now()
			v.a.must(test.undo)
			for !slices.Equal(v.a.dump(), want) || v.a.wireguard("warren0") != wanted {
				if time.Since(start) > soon {
					v.a.same(want)
					t.Fatalf("%s: it stays so: %s, want %s", test.name, v.a.wireguard("warren0"), wanted)
				}
				time.Sleep(10 * time.Millisecond)
			}
			took = time.Since(start)
			t.Logf("%s: repaired after %v", test.name, took.Round(time.Millisecond))
		}
		if took > mending {
			t.Errorf("%s: it took more than %v", test.name, mending)
		}
	}
	v.whole()
	v.reach() // through what is exposed on an address that went and came, too
	// So much in a row is said.
	if s := v.anna.status(); !has(view.DeviceContested)(s) || has(view.OpFailed)(s) {
		t.Errorf("the conditions are %+v", s.Conditions)
	}
}

// leave: the device goes with the node, be there an agent or not.
func (v *machine) leave(t *testing.T) {
	if out, code := v.a.run(v.anna, "leave"); code != exitOK || !strings.Contains(out, "left the mesh") {
		t.Fatalf("leave ended with %d: %s", code, out)
	}
	if code := v.anna.wait(); code != exitOK {
		t.Errorf("anna ended with %d", code)
	}
	v.a.same(v.bare)
	v.bert.until("without anna", knows("cora"))

	v.anna.start()
	v.whole()
	if code := v.anna.stop(); code != exitOK {
		t.Errorf("anna ended with %d", code)
	}
	if out, code := v.a.exec([]uintptr{unix.CAP_NET_ADMIN}, "leave", "--state", v.anna.state, "--registry", v.a.registry); code != exitOK ||
		!strings.Contains(out, "anna has left mesh warren; no agent was running\nremoved the interface warren0\n") {
		t.Errorf("leave without an agent ended with %d: %s", code, out)
	}
	v.a.same(v.bare)
	v.bert.until("without anna", knows("cora"))
}

// cleanup: what a dead agent left is removed, and nothing else.
func (v *machine) cleanup(t *testing.T) {
	// What is not the agent's, some of it of the kind that is.
	v.a.must(func() error {
		for _, l := range []netlink.Link{
			&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: "theirs"}},
			&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "dummy0"}},
		} {
			if err := netlink.LinkAdd(l); err != nil {
				return err
			}
			if err := netlink.LinkSetUp(l); err != nil {
				return err
			}
		}
		theirs := index("theirs")
		return errors.Join(
			netlink.AddrAdd(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: theirs}}, &netlink.Addr{IPNet: host("10.81.0.1")}),
			netlink.RouteAdd(&netlink.Route{Dst: host("10.82.0.1"), LinkIndex: theirs, Protocol: 87}),
			netlink.RouteAdd(&netlink.Route{Dst: host("10.83.0.1"), LinkIndex: index("eth0"), Protocol: 87, Priority: 50}),
		)
	})
	time.Sleep(200 * time.Millisecond)
	before := v.a.dump()

	v.anna.start()
	v.whole()
	pid, key := v.anna.cmd.Process.Pid, v.anna.status().Self.Key
	admin := []uintptr{unix.CAP_NET_ADMIN}
	run := func(caps []uintptr, code int, want string, args ...string) {
		t.Helper()
		if out, got := v.a.exec(caps, append([]string{"cleanup"}, args...)...); got != code || !strings.Contains(out, want) {
			t.Errorf("cleanup %q ended with %d, want %d and %q: %s", args, got, code, want, out)
		}
	}
	run(admin, exitState, fmt.Sprintf("in process %d; stop that agent", pid), "--state", v.anna.state)
	v.anna.signal(syscall.SIGKILL)
	run(nil, exitFailed, "to remove it needs CAP_NET_ADMIN; run this as root", "--state", v.anna.state)
	run(admin, exitOK, "removed the interface warren0\n", "--state", v.anna.state)
	v.a.same(before)
	run(nil, exitOK, "there is nothing to remove", "--state", v.anna.state)
	run(admin, exitOK, "the interface theirs is not an agent's, and is left alone", "--state", v.anna.state, "--interface", "theirs")
	run(admin, exitOK, "the interface eth0 is not an agent's, and is left alone", "--state", v.anna.state+"/none", "--interface", "eth0")
	v.a.same(before)

	// It comes back with the key it had. Without a state folder it is the default interface that is removed.
	v.anna.start()
	v.whole()
	v.reach()
	if got := v.anna.status().Self.Key; got != key {
		t.Errorf("it had the key %s, and has %s", key, got)
	}
	v.anna.signal(syscall.SIGKILL)
	run(admin, exitOK, "removed the interface warren0\n", "--state", filepath.Join(filepath.Dir(v.anna.state), "none"))
	v.a.same(before)
	run(nil, exitOK, "removed the control socket "+v.anna.control.Path, "--state", v.anna.state)
	v.a.must(func() error {
		return errors.Join(netlink.RouteDel(&netlink.Route{Dst: host("10.83.0.1"), LinkIndex: index("eth0"), Protocol: 87, Priority: 50}),
			netlink.LinkDel(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index("theirs")}}), netlink.LinkDel(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index("dummy0")}}))
	})
	v.a.same(v.bare)
}

// other settings: interface, table, metric and source are what they are told to be, and cleanup finds what
// was made though nobody tells it.
func (v *machine) otherSettings(t *testing.T) {
	args := v.anna.args
	defer func() { v.anna.args = args }()
	v.anna.args = append(slices.Clone(args), "--interface", "mesh-x", "--table", "100", "--metric", "70", "--source", "loopback")
	v.anna.start()
	v.whole()
	dump := strings.Join(v.a.dump(), "\n")
	for _, want := range []string{"link mesh-x wireguard", "addr lo 10.80.0.1/32", "route 10.80.0.2/32 dev mesh-x table 100 metric 70 proto 87 src 10.80.0.1"} {
		if !strings.Contains(dump, want) {
			t.Errorf("%q is not there:\n%s", want, dump)
		}
	}
	v.reach() // it needs no rule for the agent's own
	v.anna.signal(syscall.SIGKILL)
	// Another interface later: that there is one of before is said.
	v.anna.args = args
	v.anna.start()
	v.anna.saying("an earlier run with other settings may have left what is still in force")
	v.anna.until("in want of its port, which that one has", has(view.PortInUse))
	v.anna.signal(syscall.SIGKILL)
	out, code := v.a.exec(asRoot, "cleanup", "--state", v.anna.state)
	if info, err := os.Stat(filepath.Join(v.anna.state, stateName)); err != nil || info.Sys().(*syscall.Stat_t).Uid != nobody {
		t.Errorf("the agent can read its state no more: %v, %v", info, err)
	}
	for _, want := range []string{"removed the interface mesh-x\n", "removed the address 10.80.0.1/32 of lo\n"} {
		if code != exitOK || !strings.Contains(out, want) {
			t.Errorf("cleanup ended with %d, and does not say %q: %s", code, want, out)
		}
	}
	v.a.same(v.bare)

	// With policy routing a prefix may have the endpoint in it by which its node is reached.
	bert := v.bert.args
	defer func() { v.bert.args = bert }()
	v.bert.signal(syscall.SIGKILL)
	v.bert.args = append(slices.Clone(bert), "--announce", "10.99.0.0/16")
	v.bert.start()
	v.anna.args = append(slices.Clone(args), "--routing", "policy", "--protocol", "88", "--guard", "10.99.0.0/16", "--forward", "on")
	v.anna.start()
	v.whole()
	carry(t, v.a, v.b, "10.80.0.2")
	dump = strings.Join(v.a.dump(), "\n")
	for _, want := range []string{
		"route 10.99.0.0/16 dev warren0 table 8787 metric 50 proto 88", "route 10.99.0.0/16 dev none table 8787 metric 4294967294 proto 88", "rule 32501 family 2 table 8787 proto 88",
		"nftables 1 warren-warren0", "forwarding net.ipv4.ip_forward",
	} {
		if !strings.Contains(dump, want) {
			t.Errorf("%q is not there:\n%s", want, dump)
		}
	}
	if code := v.anna.stop(); code != exitOK {
		t.Errorf("anna ended with %d", code)
	}
	v.anna.saying("the kernel goes on forwarding")
	carry(t, v.a, v.b, "10.80.0.2")
	out, code = v.a.exec([]uintptr{unix.CAP_NET_ADMIN}, "cleanup", "--state", v.anna.state)
	for _, want := range []string{"removed the interface warren0\n", "removed the guard of 10.99.0.0/16, in table 8787\n", "removed the rule 32500 of IPv6, to table 254\n", "removed the nftables table inet warren-warren0\n", "turned off net.ipv4.ip_forward\n"} {
		if code != exitOK || !strings.Contains(out, want) {
			t.Errorf("cleanup ended with %d, and does not say %q: %s", code, want, out)
		}
	}
	v.a.same(v.bare)
}

// without module: it is said how to get it.
func (v *machine) withoutModule(t *testing.T) {
	for _, p := range []*proc{v.bert, v.cora} {
		if out, code := v.b.run(p, "leave"); code != exitOK {
			t.Errorf("%s: leave ended with %d: %s", p.name, code, out)
		}
		p.wait()
	}
	var err error
	for end := time.Now().Add(soon); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err = unix.DeleteModule("wireguard", unix.O_NONBLOCK); err == nil {
			break
		}
	}
	if err != nil {
		t.Fatalf("the module cannot be removed: %v", err)
	}
	out, code := v.a.exec([]uintptr{unix.CAP_NET_ADMIN}, v.anna.args...)
	if code != exitFailed || !strings.Contains(out, "modprobe wireguard") || !strings.Contains(out, "or --datapath netstack") {
		t.Errorf("it ended with %d: %s", code, out)
	}
	t.Logf("%s", strings.TrimSpace(out))
}

// whole waits until the three are one mesh.
func (v *machine) whole() {
	v.t.Helper()
	for p, others := range map[*proc][]string{v.anna: {"bert", "cora"}, v.bert: {"anna", "cora"}, v.cora: {"anna", "bert"}} {
		p.until("in a whole mesh", func(s control.Status) bool { return published(s) && knows(others...)(s) })
	}
}

// reach has anna fetch from bert and cora, and cora from bert.
func (v *machine) reach() {
	t := v.anna.t
	t.Helper()
	for _, way := range []struct{ from, to *proc }{{v.anna, v.bert}, {v.anna, v.cora}, {v.cora, v.bert}} {
		var got string
		var err error
		for end := time.Now().Add(soon); time.Now().Before(end) && got != way.to.name; time.Sleep(50 * time.Millisecond) {
			got, err = way.from.fetch(way.to.name+":8080", "/name")
		}
		if got != way.to.name {
			t.Fatalf("%s fetched from %s: %q and %v", way.from.name, way.to.name, got, err)
		}
	}
}

// stream sends 200 datagrams a second to an address until check, which returns how many and how many of
// them were lost.
func (v *machine) stream(from, to *site, addr string) (check func() (sent, lost int)) {
	pc := to.listenPacket("udp", addr+":0")
	at := pc.LocalAddr().String()
	c, err := from.dial("udp", at)
	if err != nil {
		from.t.Fatal(err)
	}
	got := make(map[uint64]bool)
	var all sync.WaitGroup
	all.Go(func() {
		b := make([]byte, 100)
		for {
			n, _, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			if n == 8 {
				got[binary.BigEndian.Uint64(b)] = true
			}
		}
	})
	stop := make(chan struct{})
	var sender sync.WaitGroup
	sent, failed := 0, 0
	sender.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				if _, err := c.Write(binary.BigEndian.AppendUint64(nil, uint64(sent))); err != nil {
					failed++
				}
				sent++
			}
		}
	})
	return func() (int, int) {
		close(stop)
		sender.Wait()
		time.Sleep(300 * time.Millisecond) // for the last to arrive
		_ = pc.Close()
		_ = c.Close()
		all.Wait()
		if failed > 0 {
			from.t.Errorf("%d datagrams could not be sent", failed)
		}
		return sent, sent - len(got)
	}
}

// own6 is the address of IPv6, and first the one that its name stands for first.
func (p *proc) own6() string {
	for _, a := range p.status().Self.Addresses {
		if a.Is6() {
			return a.String()
		}
	}
	p.t.Fatalf("%s has no address of IPv6", p.name)
	return ""
}

func (p *proc) first() string { return p.status().Self.Addresses[0].String() }

// credentials are the user and the effective capabilities of a process.
func credentials(t *testing.T, pid int) (uid, caps string) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		switch {
		case len(f) > 1 && f[0] == "Uid:":
			uid = f[1]
		case len(f) > 1 && f[0] == "CapEff:":
			caps = f[1]
		}
	}
	return uid, caps
}

const tracing = "/sys/kernel/tracing"

// probe has the kernel note what programs tell it to change of networks, until the end of the test.
func probe(t *testing.T) {
	t.Helper()
	if err := unix.Mount("tracefs", tracing, "tracefs", 0, ""); err != nil {
		t.Fatalf("tracing: %v", err)
	}
	known, err := os.ReadFile("/proc/kallsyms")
	if err != nil {
		t.Fatal(err)
	}
	var functions []string
	for _, f := range []string{
		"wg_set_device", "rtnl_newlink", "rtnl_setlink", "rtnl_dellink", "inet_rtm_newaddr", "inet_rtm_deladdr", "inet6_rtm_newaddr", "inet6_rtm_deladdr",
		"inet_rtm_newroute", "inet_rtm_delroute", "inet6_rtm_newroute", "inet6_rtm_delroute",
	} {
		if !bytes.Contains(known, []byte(" "+f+"\n")) && !bytes.Contains(known, []byte(" "+f+"\t")) {
			f += "_doit" // as Linux calls it where the code around it is generated
		}
		functions = append(functions, f)
	}
	trace(t, "set_ftrace_filter", strings.Join(functions, " ")+"\n")
	trace(t, "current_tracer", "function")
	t.Cleanup(func() { trace(t, "current_tracer", "nop") })
}

func trace(t *testing.T, file, text string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(tracing, file), os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		_, err = io.WriteString(f, text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatalf("tracing: %s: %v", text, err)
	}
}

// writes counts what agents told the kernel to change since the trace was emptied, by agent and the kernel's
// function for it.
func writes(t *testing.T, by ...*proc) map[string]int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(tracing, "trace"))
	if err != nil {
		t.Fatal(err)
	}
	counts := make(map[string]int)
	for _, m := range regexp.MustCompile(`-(\d+) .*: (\w+) <-`).FindAllStringSubmatch(string(b), -1) {
		who := "somebody"
		for _, p := range by {
			if _, err := os.Stat(fmt.Sprintf("/proc/%d/task/%s", p.cmd.Process.Pid, m[1])); err == nil {
				who = p.name
			}
		}
		counts[who+": "+strings.TrimSuffix(m[2], "_doit")]++
	}
	return counts
}

// configure changes warren0 as wg(8) would, in the namespace of this thread.
func configure(f func(*wgtypes.Device) wgtypes.Config) error {
	c, err := wgctrl.New()
	if err != nil {
		return err
	}
	defer c.Close()
	d, err := c.Device("warren0")
	if err != nil {
		return err
	}
	return c.ConfigureDevice("warren0", f(d))
}

// change changes warren0 as ip(8) would, in the namespace of this thread.
func change(f func(netlink.Link) error) error {
	l, err := netlink.LinkByName("warren0")
	if err != nil {
		return err
	}
	return f(l)
}

// flush removes the routes into warren0, in the namespace of this thread.
func flush(family int) error {
	rs, err := netlink.RouteListFiltered(family, &netlink.Route{LinkIndex: index("warren0"), Protocol: 87}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_PROTOCOL)
	if err != nil || len(rs) == 0 {
		return fmt.Errorf("there are %d routes: %w", len(rs), err)
	}
	for _, r := range rs {
		if err := netlink.RouteDel(&r); err != nil {
			return fmt.Errorf("%v: %w", r, err)
		}
	}
	return nil
}
