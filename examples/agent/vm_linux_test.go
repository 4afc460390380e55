package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
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
	v := &machine{t: t, a: newSite(t, "a"), b: newSite(t, "b")}
	v.join()
	etcd := etcdtest.Start(t, etcdtest.Options{})
	v.a.forward(etcd.Endpoint(0))
	v.b.forward(etcd.Endpoint(0))
	v.settle()
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
		const size = 1 << 20
		l := way.to.listen("tcp", net.JoinHostPort(way.addr, "4000"))
		sums := make(chan string, 1)
		go func() {
			h := sha256.New()
			c, err := l.Accept()
			if err == nil {
				_ = c.SetDeadline(time.Now().Add(soon))
				_, err = io.Copy(h, c)
				_ = c.Close()
			}
			sums <- fmt.Sprintf("%x %v", h.Sum(nil), err)
		}()
		h := sha256.New()
		c, err := way.from.dial("tcp", net.JoinHostPort(way.addr, "4000"))
		if err != nil {
			t.Fatalf("to %s: %v", way.addr, err)
		}
		start := time.Now()
		_ = c.SetDeadline(start.Add(soon))
		_, err = io.Copy(io.MultiWriter(c, h), io.LimitReader(&counting{}, size))
		_ = c.Close()
		if got, want := <-sums, fmt.Sprintf("%x %v", h.Sum(nil), err); got != want || err != nil {
			t.Errorf("to %s: SHA-256 %s, want %s", way.addr, got, want)
		} else {
			t.Logf("to %s: %d MiB in %v, SHA-256 %.16s... on both sides", way.addr, size>>20, time.Since(start).Round(time.Millisecond), got)
		}
		_ = l.Close()
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
	v.a.must(func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte("0 2147483647"), 0)
	})
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
	v.b.must(func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_unprivileged_port_start", []byte("1024"), 0)
	})
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
	v.anna.saying("an earlier run with other settings may have left an interface")
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
	if code != exitFailed || !strings.Contains(out, "modprobe wireguard") || !strings.Contains(out, "have --datapath netstack") {
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

func index(name string) int {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return -1
	}
	return l.Attrs().Index
}

func (s *site) index(name string) (i int) {
	_ = s.in(func() error { i = index(name); return nil })
	return i
}

func host(addr string) *net.IPNet {
	a := netip.MustParseAddr(addr)
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// site is a network namespace, and what runs in it.
type site struct {
	t        *testing.T
	name     string
	ns       netns.NsHandle
	jobs     chan func()
	registry string // the URL that agents there take
}

func newSite(t *testing.T, name string) *site {
	t.Helper()
	s := &site{t: t, name: name, jobs: make(chan func())}
	ready, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			s.ns, err = netns.GetFromPath("/proc/thread-self/ns/net")
		}
		ready <- err
		for f := range s.jobs {
			f()
		}
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(s.jobs); <-ended; _ = s.ns.Close() })
	s.must(func() error {
		return netlink.LinkSetUp(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index("lo")}})
	})
	return s
}

// in runs f on a thread in the namespace.
func (s *site) in(f func() error) error {
	done := make(chan error, 1)
	s.jobs <- func() { done <- f() }
	return <-done
}

func (s *site) must(f func() error) {
	s.t.Helper()
	if err := s.in(f); err != nil {
		s.t.Fatalf("namespace %s: %v", s.name, err)
	}
}

// join connects the two namespaces.
func (v *machine) join() {
	v.t.Helper()
	v.a.must(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(v.b.ns)})
	})
	for s, addr := range map[*site]string{v.a: "10.99.0.1/24", v.b: "10.99.0.2/24"} {
		s.must(func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(addr)
			if err != nil {
				return err
			}
			return errors.Join(netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
		})
	}
}

// settle waits until the kernel is done with what comes of links that go up.
func (v *machine) settle() {
	last, since := "", time.Now()
	for end := time.Now().Add(soon); time.Now().Before(end) && (last == "" || time.Since(since) < 500*time.Millisecond); time.Sleep(50 * time.Millisecond) {
		if now := strings.Join(slices.Concat(v.a.dump(), v.b.dump()), "\n"); now != last {
			last, since = now, time.Now()
		}
	}
}

func (s *site) listen(network, address string) net.Listener {
	s.t.Helper()
	var l net.Listener
	s.must(func() (err error) { l, err = net.Listen(network, address); return err })
	return l
}

func (s *site) listenPacket(network, address string) net.PacketConn {
	s.t.Helper()
	var c net.PacketConn
	s.must(func() (err error) { c, err = net.ListenPacket(network, address); return err })
	return c
}

func (s *site) dial(network, address string) (c net.Conn, err error) {
	err = s.in(func() (err error) { c, err = net.DialTimeout(network, address, soon); return err })
	return c, err
}

// forward has a port of the namespace's loopback interface lead to a URL in the machine's own.
func (s *site) forward(url string) {
	l := s.listen("tcp", "127.0.0.1:0")
	s.registry = "etcd://" + l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				var d net.Dialer
				to, err := d.DialContext(ctx, "tcp", strings.TrimPrefix(url, "http://"))
				if err != nil {
					return
				}
				defer to.Close()
				defer context.AfterFunc(ctx, func() { _ = c.Close(); _ = to.Close() })()
				all.Go(func() { _, _ = io.Copy(to, c); _ = to.Close() })
				_, _ = io.Copy(c, to)
			})
		}
	})
	s.t.Cleanup(func() { cancel(); _ = l.Close(); all.Wait() })
}

// web serves name at /name, on the namespace's loopback interface.
func (s *site) web(name string) string { return s.webAt("127.0.0.1:0", name) }

func (s *site) webAt(address, name string) string {
	l := s.listen("tcp", address)
	h := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, name) })}
	done := make(chan struct{})
	go func() { defer close(done); _ = h.Serve(l) }()
	s.t.Cleanup(func() { _ = h.Close(); <-done })
	return l.Addr().String()
}

// echo sends back what arrives by UDP on the namespace's loopback interface.
func (s *site) echo() string {
	c := s.listenPacket("udp", "127.0.0.1:0")
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 2048)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(b[:n], from)
		}
	}()
	s.t.Cleanup(func() { _ = c.Close(); <-done })
	return c.LocalAddr().String()
}

// agent makes an agent in the namespace, which runs as nobody with CAP_NET_ADMIN. It is not started yet.
func (s *site) agent(name, addr string, args ...string) *proc {
	s.t.Helper()
	dir := folder(s.t)
	p := &proc{t: s.t, name: name, state: filepath.Join(dir, "state")}
	p.control = control.Client{Path: filepath.Join(p.state, "agent.sock")}
	p.args = append([]string{"run", "--state", p.state, "--node", name, "--registry", s.registry, "--socks5", "127.0.0.1:0",
		"--address", addr, "--address", "fd80::" + addr[strings.LastIndexByte(addr, '.')+1:]}, args...)
	p.launch = func(cmd *exec.Cmd) error { return s.start(cmd, unix.CAP_NET_ADMIN) }
	s.t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		if s.t.Failed() {
			s.t.Logf("%s said:\n%s", name, p.said())
		}
	})
	return p
}

// asRoot has a command run as root, with all capabilities.
var asRoot = []uintptr{^uintptr(0)}

// start starts a command in the namespace, as nobody with these capabilities and no other.
func (s *site) start(cmd *exec.Cmd, caps ...uintptr) error {
	if !slices.Equal(caps, asRoot) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, AmbientCaps: caps}
	}
	return s.in(cmd.Start)
}

// exec runs a command of the agent's in the namespace, as nobody with these capabilities.
func (s *site) exec(caps []uintptr, args ...string) (out string, code int) {
	s.t.Helper()
	path, err := program()
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	var b bytes.Buffer
	cmd.Stdout, cmd.Stderr = &b, &b
	if err := s.start(cmd, caps...); err != nil {
		s.t.Fatal(err)
	}
	_ = cmd.Wait() // its exit status is in cmd
	return b.String(), cmd.ProcessState.ExitCode()
}

// run runs a command for an agent's state folder, without capabilities.
func (s *site) run(p *proc, args ...string) (out string, code int) {
	s.t.Helper()
	return s.exec(nil, append(args, "--state", p.state)...)
}

// dump is all there is of links, addresses, routes and rules, but for what is never twice the same.
func (s *site) dump() (all []string) {
	s.t.Helper()
	for range 100 {
		var err error
		_ = s.in(func() error { all, err = dumpHere(); return nil })
		switch {
		case err == nil:
			return all
		case errors.Is(err, netlink.ErrDumpInterrupted), errors.As(err, new(netlink.LinkNotFoundError)), errors.Is(err, unix.ENODEV):
			continue // it changed meanwhile
		}
		s.t.Fatalf("namespace %s: %v", s.name, err)
	}
	s.t.Fatalf("namespace %s: it changes all the time", s.name)
	return nil
}

func dumpHere() (all []string, err error) {
	ls, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	names := map[int]string{0: "none"}
	for _, l := range ls {
		a := l.Attrs()
		names[a.Index] = a.Name
		all = append(all, fmt.Sprintf("link %s %s up %t mtu %d alias %q", a.Name, l.Type(), a.Flags&net.FlagUp != 0, a.MTU, a.Alias))
		as, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			return nil, err
		}
		for _, x := range as {
			all = append(all, fmt.Sprintf("addr %s %v scope %d", a.Name, x.IPNet, x.Scope))
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		rs, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, err
		}
		for _, r := range rs {
			all = append(all, fmt.Sprintf("route %v dev %s table %d metric %d proto %d src %v type %d", r.Dst, names[r.LinkIndex], r.Table, r.Priority, r.Protocol, r.Src, r.Type))
		}
		rules, err := netlink.RuleList(family)
		if err != nil {
			return nil, err
		}
		for _, r := range rules {
			all = append(all, fmt.Sprintf("rule %d family %d table %d proto %d", r.Priority, family, r.Table, r.Protocol))
		}
	}
	slices.Sort(all)
	return all, nil
}

// same fails the test if the namespace is not, or does not become in a moment, what it was.
func (s *site) same(want []string) {
	s.t.Helper()
	var got []string
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if got = s.dump(); slices.Equal(got, want) {
			return
		}
	}
	var diff []string
	for _, l := range want {
		if !slices.Contains(got, l) {
			diff = append(diff, "- "+l)
		}
	}
	for _, l := range got {
		if !slices.Contains(want, l) {
			diff = append(diff, "+ "+l)
		}
	}
	s.t.Errorf("namespace %s is not what it was:\n%s", s.name, strings.Join(diff, "\n"))
}

// wireguard is the configuration of a device, but for what is never twice the same.
func (s *site) wireguard(name string) (text string) {
	_ = s.in(func() error {
		c, err := wgctrl.New()
		if err != nil {
			text = err.Error()
			return nil
		}
		defer c.Close()
		d, err := c.Device(name)
		if err != nil {
			text = err.Error()
			return nil
		}
		ps := make(map[string]string)
		for _, p := range d.Peers {
			var ips []string
			for _, ip := range p.AllowedIPs {
				ips = append(ips, ip.String())
			}
			slices.Sort(ips)
			ps[p.PublicKey.String()] = fmt.Sprintf("%v keepalive %v", ips, p.PersistentKeepaliveInterval)
		}
		text = fmt.Sprintf("key %v port %d mark %d", d.PublicKey, d.ListenPort, d.FirewallMark)
		for _, k := range slices.Sorted(maps.Keys(ps)) {
			text += " peer " + k + " " + ps[k]
		}
		return nil
	})
	return text
}
