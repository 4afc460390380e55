//go:build linux

package nft

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func (s *space) forwarding() Forwarding {
	s.t.Helper()
	f, err := ReadForwarding(s.do)
	must(s.t, err)
	return f
}

func (s *space) forwards(v4, v6 bool, off ...string) {
	s.t.Helper()
	f := s.forwarding()
	if f.IPv4 != v4 || f.IPv6 != v6 || !slices.Equal(f.Off, off) || f.Notice != nil {
		s.t.Errorf("got %+v", f)
	}
}

// off is a namespace that does not forward, as the host may have it otherwise.
func off(t *testing.T) *space {
	s := newSpace(t)
	s.sysctl("ipv4/ip_forward", "0")
	s.sysctl("ipv6/conf/all/forwarding", "0")
	return s
}

func TestForwarding(t *testing.T) {
	t.Parallel()
	s := off(t)
	s.forwards(false, false, ForwardIPv4, ForwardIPv6)
	s.sysctl("ipv4/ip_forward", "1")
	s.forwards(true, false, ForwardIPv6)
	turned, err := TurnOn(s.do, []string{ForwardIPv6, ForwardIPv4}, nil)
	must(t, err)
	if !slices.Equal(turned, []string{ForwardIPv6}) {
		t.Errorf("turned on %q", turned)
	}
	s.forwards(true, true)
	if s.read("ipv4/ip_forward") != "1" || s.read("ipv6/conf/lo/forwarding") != "1" {
		t.Error("not on")
	}
	turned, err = TurnOn(s.do, names, nil)
	must(t, err)
	if turned != nil {
		t.Errorf("turned on %q", turned)
	}
	must(t, TurnOff(s.do, []string{ForwardIPv6}, nil))
	s.forwards(true, false, ForwardIPv6)
	must(t, TurnOff(s.do, names, nil))
	must(t, TurnOff(s.do, names, nil))
	s.forwards(false, false, ForwardIPv4, ForwardIPv6)

	// The table of somebody else does not get us to write what a mesh does not.
	for _, name := range []string{"net.ipv4.conf.all.accept_local", "kernel/core_pattern", "../../etc/x", ""} {
		turned, err := TurnOn(s.do, []string{name, ForwardIPv4}, nil)
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), ForwardIPv6) || !slices.Equal(turned, []string{ForwardIPv4}) {
			t.Errorf("%q: turned on %q, %v", name, turned, err)
		}
		if err := TurnOff(s.do, []string{name, ForwardIPv4}, nil); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: got %v", name, err)
		}
	}
	s.forwards(false, false, ForwardIPv4, ForwardIPv6)
	failed := errors.New("no namespace")
	none := func(func() error) error { return failed }
	_, rerr := ReadForwarding(none)
	_, oerr := TurnOn(none, names, nil)
	for _, err := range []error{rerr, oerr, TurnOff(none, names, nil)} {
		if !errors.Is(err, failed) {
			t.Errorf("got %v", err)
		}
	}
}

// What Linux changes along with what is turned on and off is as it was before, as far as that is known.
func TestAlong(t *testing.T) {
	t.Parallel()
	for _, known := range []bool{true, false} {
		s := off(t)
		s.ip("link add a0 type veth peer name b0", "link add a1 type veth peer name b1")
		one := []string{"ipv4/conf/a0/forwarding", "ipv6/conf/a0/forwarding", "ipv4/conf/b0/forwarding", "ipv6/conf/default/forwarding"}
		for _, name := range one {
			s.sysctl(name, "1")
		}
		s.sysctl("ipv4/conf/all/accept_redirects", "0")
		all := append([]string{"ipv4/conf/all/accept_redirects", "ipv4/conf/a1/forwarding", "ipv6/conf/b0/forwarding", "ipv4/conf/default/forwarding"}, one...)
		values := func() (vs []string) {
			for _, name := range all {
				vs = append(vs, name+" "+s.read(name))
			}
			return vs
		}
		want := values()
		var before Before
		if known {
			before = Before{}
		}
		_, err := TurnOn(s.do, names, before)
		must(t, err)
		s.ip("link del a1") // one that is gone is left out
		s.ip("link add a1 type veth peer name b1")
		must(t, TurnOff(s.do, names, before))
		got := values()
		if !known { // but for redirects, nothing
			for _, name := range one {
				want[slices.Index(all, name)] = name + " 0"
			}
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("known %t: %s", known, d)
		}
	}

	// What somebody turned off meanwhile stays off, and redirects are what they were where they were accepted.
	s := off(t)
	s.ip("link add a0 type veth peer name b0")
	s.sysctl("ipv4/conf/a0/forwarding", "1")
	before := Before{}
	_, err := TurnOn(s.do, names, before)
	must(t, err)
	if s.read("ipv4/conf/all/accept_redirects") != "0" {
		t.Error("a router that accepts redirects")
	}
	s.sysctl("ipv4/conf/a0/forwarding", "0")
	must(t, TurnOff(s.do, names, before))
	if a, r := s.read("ipv4/conf/a0/forwarding"), s.read("ipv4/conf/all/accept_redirects"); a != "0" || r != "1" {
		t.Errorf("got %s, %s", a, r)
	}
	must(t, ForwardFrom(s.do, "a0"))
	if got := s.read("ipv4/conf/a0/forwarding"); got != "1" {
		t.Errorf("got %s", got)
	}
	if err := ForwardFrom(s.do, "none.1"); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "net.ipv4.conf.none/1.forwarding") {
		t.Errorf("got %v", err)
	}
}

// Whether there is a module is known from lists, or not.
func TestLoaded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, text string) string {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
		return filepath.Join(dir, name)
	}
	none := filepath.Join(dir, "none")
	with, without := file("with", "veth 1 0\nnf_tables 2 1 -\n"), file("without", "veth 1 0\nnf_tables_x 2 1 -\n")
	built, not := file("built", "kernel/net/netfilter/nf_tables.ko\n"), file("not", "kernel/net/netfilter/x.ko\n")
	for _, c := range []struct {
		modules, builtin string
		want             bool
	}{{with, not, true}, {without, not, false}, {without, built, true}, {without, none, true}, {none, not, true}} {
		if got := loaded(c.modules, c.builtin); got != c.want {
			t.Errorf("%+v: got %t", c, got)
		}
	}
	if need(t); !Loaded() {
		newSpace(t).open()
		if !Loaded() {
			t.Error("not loaded though it is used")
		}
	}
}

// mounted runs f in the namespace, and in a view of the file system in which only it sees what mount does.
func (s *space) mounted(mount func() error, f func(do func(func() error) error)) {
	s.t.Helper()
	must(s.t, s.do(func() error {
		err := unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = mount()
		}
		if err == nil {
			f(nil)
		}
		return err
	}))
}

// In a container that has /proc/sys to read only, it is said what to set.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	s := off(t)
	s.sysctl("ipv4/ip_forward", "1")
	s.mounted(func() error {
		if err := unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, ""); err != nil {
			return err
		}
		return unix.Mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	}, func(do func(func() error) error) {
		f, err := ReadForwarding(do)
		if err != nil || !f.IPv4 || !slices.Equal(f.Off, []string{ForwardIPv6}) {
			t.Errorf("got %+v, %v", f, err)
		}
		turned, err := TurnOn(do, names, nil)
		if turned != nil || !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "sysctl net.ipv6.conf.all.forwarding: ") || !strings.Contains(err.Error(), "--sysctl net.ipv6.conf.all.forwarding=1") || strings.Contains(err.Error(), ForwardIPv4) {
			t.Errorf("turned on %q, %v", turned, err)
		}
		if err := TurnOff(do, names, nil); !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "--sysctl net.ipv4.ip_forward=0") {
			t.Errorf("got %v", err)
		}
	})
	s.forwards(true, false, ForwardIPv6)
}

// A kernel without IPv6 has nothing to turn on there; without /proc there is nothing to read at all.
func TestMissing(t *testing.T) {
	t.Parallel()
	s := off(t)
	empty := t.TempDir()
	s.mounted(func() error { return unix.Mount(empty, "/proc/sys/net/ipv6", "", unix.MS_BIND, "") }, func(do func(func() error) error) {
		f, err := ReadForwarding(do)
		if err != nil || f.IPv4 || f.IPv6 || !slices.Equal(f.Off, []string{ForwardIPv4}) {
			t.Errorf("got %+v, %v", f, err)
		}
		turned, err := TurnOn(do, names, nil)
		if err != nil || !slices.Equal(turned, []string{ForwardIPv4}) {
			t.Errorf("turned on %q, %v", turned, err)
		}
		if err := TurnOff(do, names, nil); err != nil {
			t.Error(err)
		}
	})
	s.mounted(func() error { return unix.Mount(empty, "/proc/sys", "", unix.MS_BIND, "") }, func(do func(func() error) error) {
		_, rerr := ReadForwarding(do)
		_, oerr := TurnOn(do, names, nil)
		for _, err := range []error{rerr, oerr, TurnOff(do, names, nil)} {
			if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "net.ipv4.ip_forward") {
				t.Errorf("got %v", err)
			}
		}
	})
	if found, err := filepath.Glob(empty + "/*"); err != nil || found != nil {
		t.Errorf("made %q, %v", found, err)
	}
	s.forwards(false, false, ForwardIPv4, ForwardIPv6)
}

// Without the right to write it is said what it takes.
func TestNotRoot(t *testing.T) {
	t.Parallel()
	s := off(t)
	must(t, s.do(func() error {
		runtime.LockOSThread() // never unlocked: the thread ends without its rights
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, 65534, 65534, 65534); errno != 0 {
			return errno
		}
		turned, err := TurnOn(nil, []string{ForwardIPv4}, nil)
		if turned != nil || !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), "net.ipv4.ip_forward=1") {
			t.Errorf("turned on %q, %v", turned, err)
		}
		return nil
	}))
}

// Where a router advertised a default route, it is said that it would go; and it goes.
func TestAdvertised(t *testing.T) {
	t.Parallel()
	s, router := off(t), newSpace(t)
	s.ip("link add eth0 type veth peer name peer0", "link add eth1.5 type veth peer name peer1", "link add eth2 type veth peer name peer2")
	ifaces := map[string]string{"0": "eth0", "1": "eth1.5", "2": "eth2"}
	for i, name := range ifaces {
		s.sysctl("ipv6/conf/"+name+"/accept_ra", map[string]string{"0": "1", "1": "1", "2": "2"}[i])
		s.ip("link set peer"+i+" netns "+router.path(), "link set "+name+" up", "addr add fe80::2/64 dev "+name+" nodad")
		router.ip("link set peer"+i+" up", "addr add fe80::1/64 dev peer"+i+" nodad")
	}
	s.ip("link add eth3 type veth peer name peer3", "link set peer3 up", "link set eth3 up", "addr add 2001:db8::2/64 dev eth3 nodad", "route add default via 2001:db8::1 dev eth3 metric 2000")
	has := func(name string) bool {
		return strings.Contains(s.run("", "ip", "-6", "route", "show", "default", "dev", name), "default")
	}
	s.forwards(false, false, ForwardIPv4, ForwardIPv6)
	learn := func(numbers ...string) {
		t.Helper()
		for _, i := range numbers {
			for end := time.Now().Add(10 * time.Second); !has(ifaces[i]); time.Sleep(10 * time.Millisecond) {
				must(t, router.do(func() error { return advertise("peer" + i) }))
				if time.Now().After(end) {
					t.Fatal("no route: ", s.run("", "ip", "-6", "route"))
				}
			}
		}
	}
	learn("0", "1", "2")
	s.sysctl("ipv6/conf/eth1.5/accept_ra", "0") // what it has learned already goes, too
	var a *AdvertisedError
	if f := s.forwarding(); !errors.As(f.Notice, &a) || !slices.Equal(a.Interfaces, []string{"eth0", "eth1.5"}) {
		t.Fatalf("got %+v", f)
	}
	_, err := TurnOn(s.do, []string{ForwardIPv4}, nil)
	must(t, err)
	if !errors.As(s.forwarding().Notice, &a) {
		t.Error("IPv6 is still off, and nothing is said of it")
	}
	_, err = TurnOn(s.do, []string{ForwardIPv6}, nil)
	must(t, err)
	s.forwards(true, true)
	if has("eth0") || has("eth1.5") || !has("eth2") || !has("eth3") {
		t.Error(s.run("", "ip", "-6", "route"))
	}
	// Nothing is lost any more where it forwards already.
	s.sysctl("ipv6/conf/eth0/forwarding", "0")
	learn("0")
	s.forwards(true, true)
}

// advertise sends a router advertisement (RFC 4861, section 4.2) that is valid for half an hour.
func advertise(name string) error {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	to := &unix.SockaddrInet6{Addr: [16]byte{0: 0xff, 1: 2, 15: 1}, ZoneId: uint32(i.Index)}
	from := &unix.SockaddrInet6{Addr: [16]byte{0: 0xfe, 1: 0x80, 15: 1}, ZoneId: uint32(i.Index)}
	return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255), unix.Bind(fd, from),
		unix.Sendto(fd, []byte{0: 134, 4: 64, 6: 7, 7: 8, 15: 0}, 0, to))
}

func TestAdvertisedDefault(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00450003     eth0": "eth0",
		"00000000000000000000000000000000 00 00000000000000000000000000000000 00 fe800000000000000000000000000001 00000400 00000001 00000000 00000003     eth0": "", // by hand
		"20010db8000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00440001     eth0": "", // a prefix
		"00000000000000000000000000000000 00 00000000000000000000000000000000 00 00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo": "",
		"": "", "what else there may be in a line": "",
	} {
		if got, ok := advertisedDefault(line); ok != (want != "") || ok && got != want {
			t.Errorf("%s: got %q, %t", line, got, ok)
		}
	}
}
