package tun

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
)

// askerOf has this test binary be a program that asks the socket it names, and fails if it may not.
const askerOf = "WARREN_TUN_ASK"

func init() {
	path := os.Getenv(askerOf)
	if path == "" {
		return
	}
	c, err := net.Dial("unix", path)
	if err == nil {
		_, err = fmt.Fprint(c, "get=1\n\n")
	}
	b := make([]byte, 1<<12)
	n := 0
	if err == nil {
		n, err = c.Read(b)
	}
	if err != nil || !strings.Contains(string(b[:n]), "listen_port=") {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// The socket is its group's, and nobody else's.
func TestSocketGroup(t *testing.T) {
	const group = 4242
	s := newSpace(t)
	s.Out()
	dir := t.TempDir()
	for d := dir; d != "/tmp" && d != "/"; d = d[:strings.LastIndexByte(d, '/')] {
		if err := os.Chmod(d, 0o755); err != nil {
			break
		}
	}
	n := newNode(t, s, "a", addrsA, func(o *Options) { o.Socket, o.SocketGroup = dir, fmt.Sprint(group) })
	path := socketPath(dir, DefaultInterface)
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if st := fi.Sys().(*syscall.Stat_t); fi.Mode() != os.ModeSocket|0o660 || st.Gid != group {
		t.Errorf("the socket is %v, of group %d", fi.Mode(), st.Gid)
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	exe := dir + "/ask" // where everybody may run it
	if err := os.WriteFile(exe, self, 0o755); err != nil {
		t.Fatal(err)
	}
	ask := func(gid uint32) (string, error) {
		cmd := exec.CommandContext(t.Context(), exe)
		cmd.Env = append(os.Environ(), askerOf+"="+path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: gid, Groups: []uint32{gid}}}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := ask(group); err != nil {
		t.Errorf("a member of the group: %v: %s", err, out)
	}
	if out, err := ask(65534); err == nil || !strings.Contains(out, "permission denied") {
		t.Errorf("somebody else: %v: %s", err, out)
	}
	if !n.Have().Device.Exists() {
		t.Error("no device")
	}
	if _, err := New(Options{Namespace: nettest.NewSpace(t).Path, SocketGroup: "no such group"}); err == nil || !strings.Contains(err.Error(), `"no such group"`) {
		t.Errorf("got %v", err)
	}
}

// What a TUN has is not cleaned away.
func TestCleanupRefused(t *testing.T) {
	s := newSpace(t)
	s.Out()
	var o Options
	n := newNode(t, s, "a", addrsA, func(to *Options) { o = *to })
	if err := Cleanup(t.Context(), o); err == nil || !strings.Contains(err.Error(), DefaultInterface) || !strings.Contains(err.Error(), "end that one first") {
		t.Errorf("got %v", err)
	}
	if !n.Have().Device.Exists() {
		t.Error("it is gone")
	}
}

// A device of another kind, which is somebody's, is not removed for want of being a TUN.
func TestHeldByAnotherKind(t *testing.T) {
	s := newSpace(t)
	s.Out()
	h, err := hostnet.Open(hostnet.Options{Interface: DefaultInterface, Namespace: s.Path})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if _, _, err := h.Adopt(t.Context(), "bridge", nil); err != nil {
		t.Fatal(err)
	}
	kept, err := h.Hold()
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Interface: DefaultInterface, Namespace: s.Path, Socket: NoSocket}
	d, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	set := datapath.SetDevice{Device: datapath.Device{Key: nettest.NewKey(t)}}
	for _, err := range []error{d.Apply(t.Context(), set), Cleanup(t.Context(), o)} {
		if !errors.Is(err, hostnet.ErrInUse) || !strings.Contains(err.Error(), "this process") {
			t.Errorf("got %v", err)
		}
	}
	if l, err := h.Link(t.Context()); err != nil || l.Kind != "bridge" {
		t.Errorf("it is %+v, %v", l, err)
	}
	// Once nobody has it, it is taken over; and held while there is a device.
	kept.Close()
	for range 2 {
		if err := d.Apply(t.Context(), set); err != nil {
			t.Fatal(err)
		}
		if _, err := h.Hold(); !errors.Is(err, hostnet.ErrInUse) {
			t.Errorf("got %v", err)
		}
		if err := d.Apply(t.Context(), datapath.RemoveDevice{}); err != nil {
			t.Fatal(err)
		}
		kept, err := h.Hold()
		if err != nil {
			t.Fatal(err)
		}
		kept.Close()
	}
}
