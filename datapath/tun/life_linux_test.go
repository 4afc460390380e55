package tun

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
)

// works has a byte go to the other node and back.
func (p pair) works(what string) {
	t := p.a.T
	t.Helper()
	l, err := p.b.space.Listen("tcp", "10.0.0.2:0")
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer l.Close()
	served := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_ = c.SetDeadline(time.Now().Add(20 * time.Second))
			_, err = io.Copy(c, c)
			c.Close()
		}
		served <- err
	}()
	c, err := p.a.space.Dial("tcp", l.Addr().String())
	if err != nil {
		l.Close()
		<-served
		t.Fatalf("%s: %v", what, err)
	}
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err = c.Write([]byte{1}); err == nil {
		_, err = io.ReadFull(c, make([]byte, 1))
	}
	c.Close()
	if err := errors.Join(err, <-served); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// TestOutsiders has others change the device in every way there is. It is noticed and, once the wanted State is
// brought about as a mesh does, as it was.
func TestOutsiders(t *testing.T) {
	p := newPair(t)
	nettest.NeedProgram(t, "ip")
	a, b := p.a, p.b
	p.connect(plain)
	a.Want.Device.ListenPort, a.Want.Device.Mark = a.Have().Device.ListenPort, 0x77
	a.Want.Device.MTU = a.Have().Device.MTU
	a.Sync()
	p.works("at first")
	stranger := nettest.NewKey(t)
	bk, sk, ok := hexOf(b.Public()), hexOf(stranger.Public()), stranger.Bytes()
	set := func(text string) func() { return func() { outside(t, a.TUN, text) } }
	ip := func(command string) func() { return func() { a.space.IP(command) } }
	for _, test := range []struct {
		what string
		do   func()
	}{
		{"a peer removed", set("public_key=" + bk + "\nremove=true\n")},
		{"a peer added", set("public_key=" + sk + "\nallowed_ip=10.0.0.2/32\n")},
		{"all peers replaced", set("replace_peers=true\npublic_key=" + sk + "\nallowed_ip=10.0.0.2/32\n")},
		{"prefixes replaced", set("public_key=" + bk + "\nreplace_allowed_ips=true\nallowed_ip=10.9.0.0/16\n")},
		{"another endpoint", set("public_key=" + bk + "\nendpoint=192.0.2.77:9\n")},
		{"a preshared key", set("public_key=" + bk + "\npreshared_key=" + fmt.Sprintf("%x", ok) + "\n")},
		{"a keepalive", set("public_key=" + bk + "\npersistent_keepalive_interval=7\n")},
		{"another port", set("listen_port=0\n")},
		{"another mark", set("fwmark=1\n")},
		{"another key", set("private_key=" + fmt.Sprintf("%x", ok) + "\n")},
		{"the key of the peer", set("private_key=" + fmt.Sprintf("%x", b.Want.Device.Key.Bytes()) + "\n")},
		{"an address removed", ip("addr del 10.0.0.1/32 dev warren0")},
		{"an IPv6 address removed", ip("addr del fd00::1/128 dev warren0")},
		{"a route removed", ip("route del 10.0.0.2/32 dev warren0")},
		{"an IPv6 route removed", ip("-6 route del fd00::2/128 dev warren0")},
		{"a route added", ip("route add 10.77.0.0/16 dev warren0 proto 87 metric 50")},
		{"another MTU", ip("link set warren0 mtu 1300")},
		{"taken down", ip("link set warren0 down")},
		{"renamed", func() { a.space.IP("link set warren0 down"); a.space.IP("link set warren0 name other0") }},
		{"its mark removed", func() { a.space.Must(func() error { return mark("warren0", "not ours") }) }},
		{"deleted", ip("link del warren0")},
	} {
		nettest.Quiet(a.TUN)
		begun := time.Now()
		test.do()
		nettest.Notified(t, a.TUN, test.what)
		took := time.Since(begun)
		if took > 2*time.Second {
			t.Errorf("%s: noticed after %v", test.what, took)
		}
		nettest.Within(t, 10*time.Second, test.what+": is brought back", func() bool {
			return datapath.Sync(t.Context(), a.TUN, a.Want) == nil && len(datapath.Plan(a.Want, a.Have())) == 0
		})
		if links := a.space.Links(); !slices.Contains(links, "warren0") || slices.Contains(links, "other0") {
			t.Errorf("%s: links are %v", test.what, links)
		}
		p.works(test.what)
		t.Logf("%s: noticed after %v, works after %v", test.what, took.Round(time.Millisecond), time.Since(begun).Round(time.Millisecond))
	}
}

func hexOf(k key.Public) string { b := k.Bytes(); return fmt.Sprintf("%x", b[:]) }

// mark gives a link an alias.
func mark(name, alias string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkSetAlias(l, alias)
}

// TestTools has the programs that administrators use see and change the device.
func TestTools(t *testing.T) {
	s := newSpace(t)
	s.Out()
	name := nettest.UniqueName(t)
	n := newNode(t, s, "a", addrsA, func(o *Options) { o.Interface, o.Socket = name, "" })
	other := nettest.NewKey(t).Public()
	n.Peer(other, datapath.Peer{Prefixes: addrsB})

	fi, err := os.Stat(socketPath(DefaultSocket, name))
	if err != nil {
		t.Fatal(err)
	}
	if fi.Mode() != fs0600 {
		t.Errorf("the socket's mode is %v, want %v", fi.Mode(), fs0600)
	}
	c, err := wgctrl.New()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d, err := c.Device(name)
	if err != nil {
		t.Fatal(err)
	}
	if d.PublicKey != wgtypes.Key(n.Public().Bytes()) || len(d.Peers) != 1 || len(d.Peers[0].AllowedIPs) != 2 {
		t.Errorf("wgctrl sees %+v", d)
	}
	nettest.Quiet(n.TUN)
	err = c.ConfigureDevice(name, wgtypes.Config{Peers: []wgtypes.PeerConfig{{PublicKey: wgtypes.Key(other.Bytes()), Remove: true}}})
	if err != nil {
		t.Fatal(err)
	}
	nettest.Notified(t, n.TUN, "a peer removed by wgctrl")
	if len(n.Have().Peers) != 0 {
		t.Error("the peer that wgctrl removed is there")
	}
	n.Sync()

	wg := nettest.NeedProgram(t, "wg")
	out, err := s.Run(wg, "show", name, "allowed-ips")
	b := other.Bytes()
	if want := base64.StdEncoding.EncodeToString(b[:]) + "\t10.0.0.2/32 fd00::2/128\n"; err != nil || out != want {
		t.Errorf("wg shows %q, %v; want %q", out, err, want)
	}
	nettest.Quiet(n.TUN)
	if _, err := s.Run(wg, "set", name, "peer", base64.StdEncoding.EncodeToString(b[:]), "persistent-keepalive", "25"); err != nil {
		t.Fatal(err)
	}
	nettest.Notified(t, n.TUN, "a keepalive set by wg")
	if k := n.Have().Peers[other].Keepalive; k != 25*time.Second {
		t.Errorf("the keepalive is %v", k)
	}
	n.Sync()
	dir := folder(t)
	conf, err := s.Run(wg, "showconf", name)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "conf")
	if err := os.WriteFile(file, []byte(strings.Split(conf, "[Peer]")[0]), 0o600); err != nil {
		t.Fatal(err)
	}
	nettest.Quiet(n.TUN)
	if _, err := s.Run(wg, "syncconf", name, file); err != nil {
		t.Fatal(err)
	}
	nettest.Notified(t, n.TUN, "wg syncconf")
	if len(n.Have().Peers) != 0 {
		t.Error("the peer that wg syncconf removed is there")
	}
	n.Sync()
	n.Do(datapath.RemoveDevice{})
	if _, err := os.Stat(socketPath(DefaultSocket, name)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket of a device that was removed: %v", err)
	}
}

const fs0600 = os.ModeSocket | 0o600

// TestSocket is about the file: who has it, and clients that do not behave.
func TestSocket(t *testing.T) {
	s := newSpace(t)
	s.Out()
	dir := folder(t)
	use := func(o *Options) { o.Socket = dir }
	path := socketPath(dir, DefaultInterface)

	// One that a process left which was killed.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	n := newNode(t, s, "a", addrsA, use)
	if answer, err := say(path, "get=1\n"); err != nil || !strings.HasPrefix(answer, "private_key=") || !strings.HasSuffix(answer, "errno=0\n") {
		t.Errorf("get: %q, %v", answer, err)
	}
	for text, want := range map[string]string{
		"set=1\nlisten_port=x\n": "errno=-22\n", "set=1\nnonsense\n": "errno=-71\n", "set=1\nlisten_port=70000\n": "errno=-22\n", "get=2\n": "", "get=1\nx\n": "",
	} {
		if answer, _ := say(path, text); answer != want && !strings.HasPrefix(answer, want) || want == "" && answer != "" {
			t.Errorf("%q: %q, want %q", text, answer, want)
		}
	}

	// A client that stops in the middle holds up nobody.
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "set=1\nreplace_peers=true\n")
	time.Sleep(20 * time.Millisecond)
	begun := time.Now()
	n.Peer(nettest.NewKey(t).Public(), datapath.Peer{Prefixes: addrsB})
	if took := time.Since(begun); took > 2*time.Second {
		t.Errorf("with a client that says no more, a change takes %v", took)
	}

	// A port that is taken leaves the device on the one it has.
	port := n.Have().Device.ListenPort
	var taken *net.UDPConn
	s.Must(func() (err error) { taken, err = net.ListenUDP("udp", nil); return err })
	defer taken.Close()
	if answer, err := say(path, fmt.Sprintf("set=1\nlisten_port=%d\n", taken.LocalAddr().(*net.UDPAddr).Port)); err != nil || answer != "errno=-98\n" {
		t.Errorf("a port that is taken: %q, %v", answer, err)
	}
	if now := n.Have().Device.ListenPort; now != port {
		t.Errorf("the port was %d and is %d", port, now)
	}

	// One that is in use is left alone, and so is a file that is no socket.
	other := newSpace(t)
	other.Out()
	second := other.tun(t, use)
	set := datapath.SetDevice{Device: datapath.Device{Key: nettest.NewKey(t)}}
	err = second.Apply(t.Context(), set)
	if !errors.Is(err, datapath.ErrNoDevice) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "this process") {
		t.Errorf("a device whose socket is in use: %v", err)
	}
	if links := other.Links(); slices.Contains(links, DefaultInterface) {
		t.Errorf("half a device is left: %v", links)
	}
	if _, err := say(path, "get=1\n"); err != nil {
		t.Errorf("the socket there was: %v", err)
	}
	file := folder(t)
	if err := os.WriteFile(socketPath(file, DefaultInterface), []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	third := other.tun(t, func(o *Options) { o.Socket = file })
	if err := third.Apply(t.Context(), set); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a file in place of the socket: %v", err)
	}
	if b, err := os.ReadFile(socketPath(file, DefaultInterface)); err != nil || string(b) != "precious" {
		t.Errorf("that file: %q, %v", b, err)
	}
	long := other.tun(t, func(o *Options) { o.Socket = filepath.Join(folder(t), strings.Repeat("x", 100)) })
	if err := long.Apply(t.Context(), set); err == nil || !strings.Contains(err.Error(), "107") {
		t.Errorf("a path that is too long: %v", err)
	}

	// One that was removed comes back; one that took its place stays.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	nettest.Within(t, 5*time.Second, "the socket is back", func() bool { _, err := say(path, "get=1\n"); return err == nil })
	_ = os.Remove(path)
	if l, err = net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("another's socket: %v", err)
	}
	none := other.tun(t, func(o *Options) { o.Socket = NoSocket })
	if err := none.Apply(t.Context(), set); err != nil {
		t.Error(err)
	}
}

// TestInTheWay is about a link that has the name already.
func TestInTheWay(t *testing.T) {
	s := newSpace(t)
	s.Out()
	nettest.NeedProgram(t, "ip")
	set := datapath.SetDevice{Device: datapath.Device{Key: nettest.NewKey(t)}}
	s.IP("link add warren0 type veth peer name x")
	d := s.tun(t)
	err := d.Apply(t.Context(), set)
	if f := (*hostnet.ForeignError)(nil); !errors.As(err, &f) || !errors.Is(err, datapath.ErrNoDevice) || !strings.Contains(err.Error(), "warren0") || !strings.Contains(err.Error(), "veth") {
		t.Errorf("a link of that name: %v", err)
	}
	if err := d.Apply(t.Context(), datapath.RemoveDevice{}); err != nil {
		t.Error(err)
	}
	if !slices.Contains(s.Links(), "warren0") {
		t.Error("it was removed")
	}
	s.IP("link del warren0")

	// Another device with the same settings.
	if err := d.Apply(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	second := s.tun(t)
	err = second.Apply(t.Context(), set)
	if f := (*hostnet.ForeignError)(nil); !errors.As(err, &f) || !errors.Is(err, datapath.ErrNoDevice) || !strings.Contains(err.Error(), "this process") {
		t.Errorf("another device with the same settings: %v", err)
	}
	t.Log(err)
	if st, err := second.Read(t.Context()); err != nil || st.Device.Exists() {
		t.Errorf("it reads as %+v, %v", st, err)
	}
	if err := second.Apply(t.Context(), datapath.RemoveDevice{}); err != nil {
		t.Error(err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	if st, err := d.Read(t.Context()); err != nil || !st.Device.Exists() {
		t.Errorf("the first then reads as %+v, %v", st, err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}

	// One that somebody made persistent, with our mark.
	s.IP("tuntap add mode tun name left0")
	s.Must(func() error { return mark("left0", "warren:warren0:87") })
	third := s.tun(t)
	if err := third.Apply(t.Context(), set); err != nil {
		t.Errorf("with one that is left: %v", err)
	}
	if links := s.Links(); slices.Contains(links, "left0") || !slices.Contains(links, "warren0") {
		t.Errorf("links are %v", links)
	}
}

// TestNewSaysWhatIsMissing is about errors of New, which name the thing and the way out.
func TestNewSaysWhatIsMissing(t *testing.T) {
	need(t)
	dir := t.TempDir()
	for _, test := range []struct {
		o    Options
		says []string
	}{
		{Options{Interface: "a-name-too-long0"}, []string{"a-name-too-long0", "15"}},
		{Options{Interface: "a/b"}, []string{"a/b"}},
		{Options{Interface: "a b"}, []string{"a b"}},
		{Options{Namespace: dir + "/none"}, []string{dir + "/none", "no such file", "ip netns add"}},
		{Options{Namespace: dir}, []string{dir, "no network namespace"}},
		{Options{Namespace: "/proc/self/ns/mnt"}, []string{"/proc/self/ns/mnt", "no network namespace"}},
		{Options{UnderlayNamespace: dir + "/none"}, []string{"UDP sockets", dir + "/none", "ip netns add"}},
		{Options{MTU: 1200}, []string{"1200", "1280"}},
		{Options{Protocol: 3}, []string{"3"}},
		{Options{Table: 255}, []string{"255"}},
	} {
		d, err := New(test.o)
		if err == nil {
			d.Close()
			t.Errorf("%+v: no error", test.o)
			continue
		}
		for _, s := range test.says {
			if !strings.Contains(err.Error(), s) {
				t.Errorf("%v: does not say %q", err, s)
			}
		}
	}
	if err := check(dir+"/tun", false); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "modprobe") {
		t.Errorf("without %s: %v", clonePath, err)
	}

	// Without privilege. A thread's capabilities are its own, and this one ends with them.
	without := func(c uint) error {
		errc := make(chan error)
		go func() {
			runtime.LockOSThread()
			hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var data [2]unix.CapUserData
			err := unix.Capget(&hdr, &data[0])
			if err == nil {
				data[0].Effective &^= 1 << c
				err = unix.Capset(&hdr, &data[0])
			}
			if err != nil {
				errc <- err
				return
			}
			d, err := New(Options{Namespace: "/proc/self/ns/net"})
			if err == nil {
				d.Close()
			}
			errc <- err
		}()
		return <-errc
	}
	for c, name := range map[uint]string{unix.CAP_NET_ADMIN: "CAP_NET_ADMIN", unix.CAP_SYS_ADMIN: "CAP_SYS_ADMIN"} {
		if err := without(c); !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

// TestWithoutIPv6 has a port on a host that was told to do without IPv6.
func TestWithoutIPv6(t *testing.T) {
	s := newSpace(t)
	s.Out()
	s.Sysctl("net/ipv6/conf/all/disable_ipv6", "1")
	s.Sysctl("net/ipv6/conf/default/disable_ipv6", "1")
	n := newNode(t, s, "a", set("10.0.0.1"))
	st := n.Have()
	if st.Device.ListenPort == 0 || st.Host.IPv6 || !st.Host.IPv4 {
		t.Errorf("port %d, IPv4 %t, IPv6 %t", st.Device.ListenPort, st.Host.IPv4, st.Host.IPv6)
	}
	sockets, err := s.Run("cat", "/proc/net/udp")
	if want := fmt.Sprintf(":%04X ", st.Device.ListenPort); err != nil || !strings.Contains(sockets, want) {
		t.Errorf("no socket has port %d: %s, %v", st.Device.ListenPort, sockets, err)
	}
	n.Want.Device.ListenPort = 51999
	n.Sync()
	if err := n.Apply(t.Context(), datapath.AddAddrs{Addrs: set("fd00::1")}); !errors.Is(err, hostnet.ErrFamily) {
		t.Errorf("an IPv6 address: %v", err)
	}
}

// TestUnderlayNamespace has the interface in one namespace, which has no other, and the sockets in another.
func TestUnderlayNamespace(t *testing.T) {
	under, sb := wired(t)
	inner := newSpace(t)
	under.Narrow(1400)
	a := newNode(t, inner, "a", addrsA, func(o *Options) { o.UnderlayNamespace = under.Path })
	p := pair{a, newNode(t, sb, "b", addrsB)}
	p.connect(plain)
	p.works("sockets elsewhere")
	st := a.Have()
	if st.Host.Underlay != datapath.UnderlaySeparate || st.Host.UnderlayMTU != 1400 || st.Device.MTU != 1320 || st.Host.Addrs != set(nettest.Wire4A, nettest.Wire6A) || !st.Host.IPv4 || !st.Host.Connected.IsEmpty() {
		t.Errorf("MTU %d, host %+v", st.Device.MTU, st.Host)
	}
	if links := under.Links(); slices.Contains(links, DefaultInterface) {
		t.Errorf("links of the underlay: %v", links)
	}
	// Another port is opened there too.
	outside(t, a.TUN, "listen_port=51998\n")
	var c *net.UDPConn
	under.Must(func() (err error) { c, err = net.ListenUDP("udp", &net.UDPAddr{Port: 51997}); return err })
	defer c.Close()
	err := a.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{ListenPort: 51997}})
	if !errors.Is(err, datapath.ErrPortInUse) || !strings.Contains(err.Error(), "process") {
		t.Errorf("a port that is taken there: %v", err)
	}
	p.b.Want.Peers[a.Public()] = datapath.Peer{Endpoint: netip.MustParseAddrPort(nettest.Wire4A + ":51998"), Prefixes: addrsA}
	p.b.Sync()
	p.works("on another port")
	// Both the same is one.
	same := sb.tun(t, func(o *Options) { o.Interface, o.UnderlayNamespace = "other0", sb.Path })
	if st, err := same.Read(t.Context()); err != nil || st.Host.Underlay != datapath.UnderlayShared {
		t.Errorf("host %+v, %v", st.Host, err)
	}
}

// TestHereByDefault has New called by a thread that is in another namespace than the process.
func TestHereByDefault(t *testing.T) {
	s := newSpace(t)
	s.Out()
	var d *TUN
	s.Must(func() (err error) {
		d, err = New(Options{Interface: nettest.UniqueName(t), Socket: NoSocket})
		return err
	})
	defer d.Close()
	if err := d.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{Key: nettest.NewKey(t)}}); err != nil {
		t.Fatal(err)
	}
	if links := s.Links(); !slices.Contains(links, d.opts.Interface) {
		t.Errorf("links of the namespace: %v", links)
	}
}

// count is what a process must not have more of, and a host not either.
type count struct{ goroutines, fds, threads, links, routes, rules int }

func counted(s *space) count {
	fds, _ := os.ReadDir("/proc/self/fd")
	threads, _ := os.ReadDir("/proc/self/task")
	c := count{goroutines: runtime.NumGoroutine(), fds: len(fds), threads: len(threads), links: len(s.Links())}
	s.Must(func() error {
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			c.routes += len(routes)
			c.rules += len(rules)
		}
		return nil
	})
	return c
}

// more says whether there is more of anything. Go ends no thread that it has no use for, and has one or two more when it
// was busy.
func (c count) more(before count) bool {
	return c.goroutines > before.goroutines || c.fds > before.fds || c.threads > before.threads+8 ||
		c.links != before.links || c.routes != before.routes || c.rules != before.rules
}

// inUse is how many bytes are in use when all is collected that can be.
func inUse() uint64 {
	runtime.GC()
	runtime.GC() // for what a pool kept through the first
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestLeaks starts and stops a thousand devices, ending them in every way.
func TestLeaks(t *testing.T) {
	s := newSpace(t)
	s.Sysctl("net/ipv6/conf/default/addr_gen_mode", "1") // no link-local addresses, which come by and by
	s.Out()
	dir := folder(t)
	const workers = 3
	rounds := 1000
	if raceEnabled {
		rounds = 300
	}
	if testing.Short() {
		rounds = 30
	}
	var states [workers]datapath.State
	for w := range states {
		theirs := set(fmt.Sprintf("10.0.%d.2", w), fmt.Sprintf("fd00:%d::2", w))
		states[w] = datapath.State{
			Device: datapath.Device{Key: nettest.NewKey(t)}, Addrs: set(fmt.Sprintf("10.0.%d.1", w), fmt.Sprintf("fd00:%d::1", w)),
			Routes: map[netip.Prefix]netip.Addr{theirs.At(0): {}},
			Peers:  map[key.Public]datapath.Peer{nettest.NewKey(t).Public(): {Prefixes: theirs, Endpoint: netip.MustParseAddrPort("192.0.2.77:9")}},
		}
	}
	round := func(w, i int) error {
		name := fmt.Sprint("leak", w)
		d, err := New(Options{Namespace: s.Path, Interface: name, Socket: dir})
		if err != nil {
			return err
		}
		defer d.Close()
		if i%7 != 0 {
			if err := datapath.Sync(t.Context(), d, states[w]); err != nil {
				return err
			}
		}
		switch i % 5 {
		case 1:
			if err := d.Apply(t.Context(), datapath.RemoveDevice{}); err != nil {
				t.Error(err)
			}
		case 2:
			go func() { _, _ = d.Read(context.Background()) }()
		case 3:
			_, _ = s.Run("ip", "link", "del", name)
		case 4:
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			_ = d.Apply(ctx, datapath.SetDevice{Device: datapath.Device{ListenPort: 9}})
		}
		return errors.Join(d.Close(), d.Close())
	}
	// Several at a time, as each waits for Linux most of the time.
	run := func(rounds int) {
		var all sync.WaitGroup
		for w := range workers {
			all.Go(func() {
				for i := w; i < rounds; i += workers {
					if err := round(w, i); err != nil {
						t.Errorf("device %d: %v", i, err)
						return
					}
				}
			})
		}
		all.Wait()
	}
	run(10)
	before := counted(s)
	for since := time.Now(); time.Since(since) < 300*time.Millisecond; time.Sleep(10 * time.Millisecond) {
		if now := counted(s); now != before {
			before, since = now, time.Now()
		}
	}
	memoryBefore := inUse()
	begun := time.Now()
	run(rounds)
	took := time.Since(begun)
	var after count
	end := time.Now().Add(5 * time.Second)
	for after = counted(s); after.more(before) && time.Now().Before(end); after = counted(s) {
		time.Sleep(10 * time.Millisecond)
	}
	memoryAfter := inUse()
	t.Logf("%d devices in %v; before %+v, %d KiB; after %+v, %d KiB", rounds, took.Round(time.Millisecond), before, memoryBefore>>10, after, memoryAfter>>10)
	if after.more(before) {
		t.Errorf("%+v before, %+v after", before, after)
	}
	if memoryAfter > memoryBefore+4<<20 { // a thousand times 4 KiB
		t.Errorf("%d KiB in use before, %d KiB after", memoryBefore>>10, memoryAfter>>10)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left in the socket's folder: %v", left)
	}
}

// TestTwo has two devices in one process and one namespace, which share nothing.
func TestTwo(t *testing.T) {
	p := newPair(t)
	s := p.a.space
	p.connect(plain)
	other := newNode(t, s, "other", set("10.5.0.1", "fd05::1"), func(o *Options) { o.Interface, o.Protocol = "other0", 88 })
	k := nettest.NewKey(t).Public()
	other.Peer(k, datapath.Peer{Prefixes: set("10.5.0.0/24"), Endpoint: netip.MustParseAddrPort("192.0.2.77:9")})
	before := p.a.Have()
	if got := other.Have(); got.Device.ListenPort == before.Device.ListenPort || len(got.Peers) != 1 || !other.Want.Addrs.Intersect(before.Addrs).IsEmpty() {
		t.Errorf("the other is %+v", got)
	}
	var wg sync.WaitGroup
	for _, n := range []*node{p.a, other} {
		wg.Go(func() {
			for i := range 50 {
				q := set(fmt.Sprintf("10.6.%d.0/24", i))
				peer := key.Public{}
				for k := range n.Want.Peers {
					peer = k
				}
				err := n.Apply(t.Context(), datapath.PutPeer{Key: peer, Peer: datapath.Peer{Prefixes: q}}, datapath.DropPrefixes{Key: peer, Prefixes: q})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	p.works("with another device")
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	if got := p.a.Have(); !got.Equal(before) {
		t.Errorf("the end of the other changed this one from\n%+v\nto\n%+v", before, got)
	}
	p.works("without the other device")
}

// TestCleanup removes all that a device left, and nothing of others.
func TestCleanup(t *testing.T) {
	s := newSpace(t)
	s.Sysctl("net/ipv6/conf/default/addr_gen_mode", "1") // no link-local addresses, which come by and by
	s.Out()
	dir := folder(t)
	o := Options{Namespace: s.Path, Socket: dir, Sources: SourceLoopback}
	nettest.NeedProgram(t, "ip")
	shown := func() string {
		var all string
		for _, what := range []string{"link", "addr", "route show table all", "-6 route show table all", "rule"} {
			out, err := s.Run("ip", strings.Fields("-oneline "+what)...)
			if err != nil {
				t.Fatal(err)
			}
			all += out
		}
		return all
	}
	var before string
	nettest.Within(t, 20*time.Second, "the kernel has come to rest", func() bool {
		was := before
		before = shown()
		time.Sleep(100 * time.Millisecond)
		return before == was && !strings.Contains(before, "tentative") && !strings.Contains(before, "LOWERLAYERDOWN")
	})
	n := newNode(t, s, "a", addrsA, func(to *Options) { *to = o })
	n.Peer(nettest.NewKey(t).Public(), datapath.Peer{Prefixes: addrsB})
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if links := s.Links(); slices.Contains(links, DefaultInterface) {
		t.Errorf("after Close there are %v", links)
	}
	// The next process takes over the addresses, and makes the rest anew.
	again := newNode(t, s, "again", addrsA, func(to *Options) { *to = o })
	again.Peer(nettest.NewKey(t).Public(), datapath.Peer{Prefixes: addrsB})
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	// What a process that was killed leaves, too.
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socketPath(dir, DefaultInterface), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if err := Cleanup(t.Context(), o); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(socketPath(dir, DefaultInterface)); err != nil {
		t.Errorf("a socket in use: %v", err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	for range 2 {
		if err := Cleanup(t.Context(), o); err != nil {
			t.Error(err)
		}
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("sockets are left: %v", left)
	}
	if after := shown(); after != before {
		t.Errorf("was\n%s\nis\n%s", before, after)
	}
}

// childOf has this test binary be a program that makes a device in the namespace it names, and waits to be killed.
const childOf = "WARREN_TUN_CHILD_OF"

func childOptions(namespace, dir string) Options {
	return Options{Namespace: namespace, Socket: dir, Sources: SourceLoopback}
}

func childState(k key.Private) datapath.State {
	return datapath.State{Device: datapath.Device{Key: k}, Addrs: addrsA}
}

func child(namespace string) {
	k, err := key.NewPrivate()
	var d *TUN
	if err == nil {
		d, err = New(childOptions(namespace, os.Args[1]))
	}
	if err == nil {
		err = datapath.Sync(context.Background(), d, childState(k))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("ready")
	select {}
}

// TestKilled has a process with a device killed. What it leaves is nobody's, and is in nobody's way.
func TestKilled(t *testing.T) {
	s := newSpace(t)
	s.Out()
	dir := folder(t)
	cmd := exec.Command("/proc/self/exe", dir)
	cmd.Env = append(os.Environ(), childOf+"="+s.Path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the process says %q, %v", line, err)
	}
	d := s.tun(t, func(o *Options) { *o = childOptions(s.Path, dir) })
	n := &node{d, &nettest.Node{T: t, Name: "next", Path: d, Want: childState(nettest.NewKey(t))}, s}
	set := datapath.SetDevice{Device: n.Want.Device}
	err = n.Apply(t.Context(), set)
	if pid := fmt.Sprintf("process %d ", cmd.Process.Pid); !errors.Is(err, datapath.ErrNoDevice) || !strings.Contains(fmt.Sprint(err), pid) {
		t.Errorf("while the process runs: %v", err)
	}
	n.Do(datapath.RemoveDevice{})
	if links := s.Links(); !slices.Contains(links, DefaultInterface) {
		t.Errorf("RemoveDevice took the device of the process: %v", links)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	begun := time.Now()
	if links := s.Links(); slices.Contains(links, DefaultInterface) {
		t.Errorf("the device outlives its process: %v", links)
	}
	n.Sync()
	t.Logf("a new device after %v", time.Since(begun).Round(time.Millisecond))
	if _, err := say(socketPath(dir, DefaultInterface), "get=1\n"); err != nil {
		t.Error(err)
	}
	n.Do(datapath.RemoveDevice{})
	if a := n.Have().Addrs; !a.IsEmpty() {
		t.Errorf("addresses are left: %v", a)
	}
}
