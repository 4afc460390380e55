package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"

	"github.com/warren-mesh/warren/examples/agent/internal/control"
)

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

// stage is where sites are on a machine that is not the test's alone: files that programs in them see, and nobody
// else. Sites there have a name below /run/netns, and /dev/net/tun is for everybody, as it is on most hosts.
type stage struct{ files *os.File }

func newStage(t *testing.T) *stage {
	t.Helper()
	st := &stage{}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		for _, dir := range []string{"/run", "/dev/net"} {
			if err == nil {
				err = unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755")
			}
		}
		if err == nil {
			err = os.Mkdir("/run/netns", 0o755)
		}
		if err == nil {
			err = unix.Mknod("/dev/net/tun", unix.S_IFCHR, int(unix.Mkdev(10, 200)))
		}
		if err == nil {
			err = os.Chmod("/dev/net/tun", 0o666)
		}
		if err == nil {
			st.files, err = os.Open("/proc/thread-self/ns/mnt")
		}
		ready <- err
	}()
	err := <-ready
	if err == nil {
		t.Cleanup(func() { _ = st.files.Close() })
		var f *os.File
		if f, err = os.OpenFile("/dev/net/tun", os.O_RDWR, 0); err == nil {
			_ = f.Close()
		}
	}
	switch {
	case err == nil:
	case os.Getenv("CI") == "true":
		t.Fatalf("needs root, namespaces and /dev/net/tun: %v", err)
	default:
		t.Skipf("needs root, namespaces and /dev/net/tun: %v", err)
	}
	return st
}

// enter brings a locked thread there, which is to have the name of a network namespace of its own.
func (st *stage) enter(name string) error {
	err := unix.Unshare(unix.CLONE_FS)
	if err == nil {
		err = unix.Setns(int(st.files.Fd()), unix.CLONE_NEWNS)
	}
	if err == nil {
		err = os.WriteFile("/run/netns/"+name, nil, 0o644)
	}
	if err == nil {
		err = unix.Mount("/proc/thread-self/ns/net", "/run/netns/"+name, "", unix.MS_BIND, "")
	}
	return err
}

// newSite makes a namespace, on a stage if there is one.
func newSite(t *testing.T, name string, st *stage) *site {
	t.Helper()
	s := &site{t: t, name: name, jobs: make(chan func())}
	ready, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil && st != nil {
			err = st.enter(name)
		}
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

// end is an interface in a namespace, with its address.
type end struct {
	*site
	name, addr string
}

// wire connects two namespaces, and waits until the kernel is done with what comes of it.
func wire(a, b end) {
	a.t.Helper()
	a.must(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: a.name}, PeerName: b.name, PeerNamespace: netlink.NsFd(b.ns)})
	})
	for _, e := range []end{a, b} {
		e.must(func() error {
			l, err := netlink.LinkByName(e.name)
			if err != nil {
				return err
			}
			a, err := netlink.ParseAddr(e.addr)
			if err != nil {
				return err
			}
			dad := "/proc/sys/net/ipv6/conf/" + e.name + "/accept_dad" // takes a second
			return errors.Join(os.WriteFile(dad, []byte("0"), 0), netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
		})
	}
	for _, e := range []end{a, b} {
		e.must(func() error {
			l, err := netlink.LinkByName(e.name)
			for end := time.Now().Add(soon); err == nil && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
				var as []netlink.Addr
				if as, err = netlink.AddrList(l, netlink.FAMILY_V6); len(as) > 0 {
					return nil
				}
			}
			return fmt.Errorf("%s gets no address of IPv6: %w", e.name, err)
		})
	}
}

// settle waits until the kernel is done with what comes of links that go up.
func settle(sites ...*site) {
	last, since := "", time.Now()
	for end := time.Now().Add(soon); time.Now().Before(end) && (last == "" || time.Since(since) < 500*time.Millisecond); time.Sleep(50 * time.Millisecond) {
		var now []string
		for _, s := range sites {
			now = append(now, s.dump()...)
		}
		if now := strings.Join(now, "\n"); now != last {
			last, since = now, time.Now()
		}
	}
}

// route has packets to a prefix go by way of a neighbour.
func (s *site) route(to, by string) {
	s.t.Helper()
	s.must(func() error {
		_, dst, err := net.ParseCIDR(to)
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(by)})
	})
}

// sysctl sets one of the namespace's, called by its path below /proc/sys.
func (s *site) sysctl(name, value string) {
	s.t.Helper()
	s.must(func() error { return os.WriteFile("/proc/sys/"+name, []byte(value), 0) })
}

// carry sends a MiB by TCP from one namespace to an address in another, and compares what arrives.
func carry(t *testing.T, from, to *site, addr string) {
	t.Helper()
	const size = 1 << 20
	l := to.listen("tcp", net.JoinHostPort(addr, "4000"))
	defer l.Close()
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
	c, err := from.dial("tcp", net.JoinHostPort(addr, "4000"))
	if err != nil {
		t.Fatalf("to %s: %v", addr, err)
	}
	start := time.Now()
	_ = c.SetDeadline(start.Add(soon))
	_, err = io.Copy(io.MultiWriter(c, h), io.LimitReader(&counting{}, size))
	_ = c.Close()
	if got, want := <-sums, fmt.Sprintf("%x %v", h.Sum(nil), err); got != want || err != nil {
		t.Errorf("to %s: SHA-256 %s, want %s", addr, got, want)
	} else {
		t.Logf("to %s: %d MiB in %v, SHA-256 %.16s... on both sides", addr, size>>20, time.Since(start).Round(time.Millisecond), got)
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
func (s *site) forward(url string) { s.forwardAt("127.0.0.1:0", url) }

func (s *site) forwardAt(address, url string) {
	l := s.listen("tcp", address)
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
	ts, _ := (&nftables.Conn{}).ListTables() // fails where the kernel has none
	for _, t := range ts {
		all = append(all, fmt.Sprintf("nftables %d %s", t.Family, t.Name))
	}
	for _, name := range forwards(nil) {
		all = append(all, "forwarding "+name)
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
