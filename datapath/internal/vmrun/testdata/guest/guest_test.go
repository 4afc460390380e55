//go:build linux

package guest

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestKernel(t *testing.T) {
	var u syscall.Utsname
	if err := syscall.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var release strings.Builder
	for _, c := range u.Release {
		if c == 0 {
			break
		}
		release.WriteByte(byte(c))
	}
	if got := release.String(); got != os.Getenv("WARREN_VMRUN") || !strings.HasPrefix(got, os.Getenv("WARREN_TEST_RELEASE")) {
		t.Errorf("release %s; WARREN_VMRUN=%s, wanted %s", got, os.Getenv("WARREN_VMRUN"), os.Getenv("WARREN_TEST_RELEASE"))
	}
	if os.Geteuid() != 0 {
		t.Error("not root")
	}
}

func TestFiles(t *testing.T) {
	if b, err := os.ReadFile("testdata/file"); string(b) != "taken along\n" {
		t.Errorf("%q, %v", b, err)
	}
	if err := os.WriteFile("testdata/new", nil, 0o600); err != nil {
		t.Errorf("the working directory: %v", err)
	}
	for _, name := range []string{"/tmp/x", "/run/x", "/dev/shm/x", "/var/run/x"} {
		if err := os.WriteFile(name, []byte("x"), 0o600); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"/proc/self/fd", "/dev/fd", "/dev/net/tun", "/sys/class/net/lo", "/dev/ptmx"} {
		if _, err := os.Stat(name); err != nil {
			t.Error(err)
		}
	}
}

func TestLoopback(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", addr)
		if addr == "[::1]:0" && os.Getenv("WARREN_TEST_NO_IPV6") != "" {
			if err == nil {
				t.Errorf("IPv6 is there")
			}
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		defer l.Close()
		c, err := net.DialTimeout("tcp", l.Addr().String(), 5*time.Second)
		if err != nil {
			t.Error(err)
			continue
		}
		c.Close()
	}
}

func TestLinks(t *testing.T) {
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if l.Attrs().Name != "lo" {
			t.Errorf("there is a link %s before any was made", l.Attrs().Name)
		}
	}
	attrs := func(name string) netlink.LinkAttrs {
		a := netlink.NewLinkAttrs()
		a.Name = name
		return a
	}
	for _, l := range []netlink.Link{
		&netlink.Wireguard{LinkAttrs: attrs("wg0")},
		&netlink.Dummy{LinkAttrs: attrs("dummy0")},
		&netlink.Veth{LinkAttrs: attrs("veth0"), PeerName: "veth1"},
		&netlink.Tuntap{LinkAttrs: attrs("tun0"), Mode: netlink.TUNTAP_MODE_TUN},
		&netlink.Bridge{LinkAttrs: attrs("bridge0")},
		&netlink.Vrf{LinkAttrs: attrs("vrf0"), Table: 100},
	} {
		if err := netlink.LinkAdd(l); err != nil {
			t.Errorf("%s: %v", l.Attrs().Name, err)
			continue
		}
		if err := netlink.LinkSetUp(l); err != nil {
			t.Errorf("%s: %v", l.Attrs().Name, err)
		}
	}
	dummy, err := netlink.LinkByName("dummy0")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.QdiscAdd(netlink.NewNetem(
		netlink.QdiscAttrs{LinkIndex: dummy.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		netlink.NetemQdiscAttrs{Latency: 1000, Loss: 1},
	)); err != nil {
		t.Errorf("netem: %v", err)
	}
}

func TestClock(t *testing.T) {
	want := os.Getenv("WARREN_TEST_DATE")
	if want == "" {
		t.Skip("WARREN_TEST_DATE is not set")
	}
	start, err := time.Parse(time.DateTime, want)
	if err != nil {
		t.Fatal(err)
	}
	if now := time.Now().UTC(); now.Before(start) || now.Sub(start) > 2*time.Minute {
		t.Errorf("it is %v, and was to be %v at the start", now, start)
	}
}

func TestTools(t *testing.T) {
	for tool := range strings.FieldsSeq(os.Getenv("WARREN_TEST_TOOLS")) {
		if out, err := exec.Command(tool, "-V").CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", tool, err, out)
		}
	}
}

// TestDo does what WARREN_TEST_DO says.
func TestDo(t *testing.T) {
	switch os.Getenv("WARREN_TEST_DO") {
	case "":
		t.Skip("WARREN_TEST_DO is not set")
	case "exit": // with a child that outlives it, and holds its output open
		if len(os.Args) > 1 && os.Args[len(os.Args)-1] == "child" {
			time.Sleep(time.Hour)
		}
		child := exec.Command("/proc/self/exe", append(os.Args[1:], "child")...)
		child.Stdout, child.Stderr = os.Stdout, os.Stderr
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		fmt.Println("to standard output")
		fmt.Fprintln(os.Stderr, "to standard error")
		os.Exit(3)
	case "stream":
		fmt.Println("first")
		time.Sleep(3 * time.Second)
		fmt.Println("second")
		if err := os.WriteFile("/dev/kmsg", []byte("<0>noise of the kernel\n"), 0); err != nil {
			t.Fatal(err)
		}
		fmt.Print(strings.Repeat(strings.Repeat("x", 999)+"\n", 4000))
		os.Exit(0)
	case "panic":
		fmt.Println("about to panic")
		// A panic stops every CPU at once, also the one that is carrying this line to the host.
		for unread(t, os.Stdout) > 0 {
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Second)
		if err := os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0); err != nil {
			t.Fatal(err)
		}
		select {}
	case "reboot":
		t.Fatal(syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART))
	case "hang":
		fmt.Println("about to hang")
		time.Sleep(time.Hour)
	case "signal":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

// unread returns how many bytes of the pipe f nobody has read yet.
func unread(t *testing.T, f *os.File) int {
	t.Helper()
	n, err := unix.IoctlGetInt(int(f.Fd()), unix.TIOCINQ)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
