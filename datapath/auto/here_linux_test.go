package auto

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/datapathtest"
	"github.com/warren-mesh/warren/datapath/internal/hostnet"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/datapath/tun"
	"github.com/warren-mesh/warren/prefixes"
)

// The main thread stays with the main goroutine: one that ended on it in another namespace would leave it
// there, and /proc/self would be about that.
func init() { runtime.LockOSThread() }

// works reports whether a datapath works here.
func works(t testing.TB, name string) bool {
	t.Helper()
	if name == Netstack {
		return true
	}
	a, err := New(Options{Try: []string{name}, Interface: nettest.UniqueName(t), Socket: tun.NoSocket})
	if err == nil {
		a.Close()
		return true
	}
	if !notHere(err) {
		t.Fatal(err)
	}
	if name == Kernel && nettest.InVM() {
		t.Fatalf("in a VM made for it: %v", err)
	}
	return false
}

// need skips a test where a datapath does not work. The kernel's is tested in a VM.
func need(t testing.TB, name string) {
	t.Helper()
	switch {
	case works(t, name):
	case name == Kernel:
		t.Skip("this runs in a VM (go test -exec, see datapath/internal/vmrun)")
	default:
		nettest.Need(t, errors.New("it takes root and /dev/net/tun"))
	}
}

// open returns an Auto of one datapath, in a namespace. netstack's sockets are where its device is made.
func open(t testing.TB, s *nettest.Space, name string, change ...func(*Options)) *Auto {
	t.Helper()
	o := Options{Try: []string{name}, Namespace: s.Path, Socket: t.TempDir(), Logger: nettest.Logger()}
	if name == Netstack {
		o.Namespace = ""
	}
	for _, f := range change {
		f(&o)
	}
	var a *Auto
	s.Must(func() (err error) { a, err = New(o); return err })
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// Here the best that works is chosen, and it is said why nothing better is.
func TestHere(t *testing.T) {
	need(t, TUN)
	s := nettest.NewSpace(t)
	a, err := New(Options{Namespace: s.Path, Socket: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := a.Apply(t.Context(), datapath.SetDevice{Device: datapath.Device{Key: nettest.NewKey(t)}}); err != nil {
		t.Fatal(err)
	}
	st, err := a.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := TUN
	if works(t, Kernel) {
		want = Kernel
	}
	if a.Chosen() != want || st.Host.Driver != want || a.Netstack() != nil || !st.Device.Exists() {
		t.Errorf("chosen: %s, which is %s; want %s", a.Chosen(), st.Host.Driver, want)
	}
	if want == Kernel && st.Host.Instead != "" || want == TUN && (!strings.HasPrefix(st.Host.Instead, "kernel: ") || !strings.Contains(st.Host.Instead, "modprobe wireguard")) {
		t.Errorf("instead of a better one: %q", st.Host.Instead)
	}
	t.Logf("%s (%s)", a.Chosen(), st.Host.Instead)
	if links := s.Links(); !slices.Contains(links, kernel.DefaultInterface) {
		t.Errorf("links are %v", links)
	}
	if err := a.Apply(t.Context(), datapath.RemoveDevice{}); err != nil {
		t.Error(err)
	}
}

// Without privilege it is netstack, and it is said what the others take.
func TestUnprivileged(t *testing.T) {
	if os.Getuid() != 0 {
		nettest.Need(t, errors.New("to be another user takes root"))
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var f found
	if err := json.Unmarshal(out, &f); err != nil {
		t.Fatalf("%q: %v", out, err)
	}
	if f.Chosen != Netstack || f.Driver != Netstack || !f.Device || f.Error != "" {
		t.Errorf("found %+v", f)
	}
	for _, word := range []string{"kernel: ", "; tun: ", "run as root"} {
		if !strings.Contains(f.Instead, word) {
			t.Errorf("%q does not say %q", f.Instead, word)
		}
	}
	if strings.Contains(f.Instead, "\n") || strings.Contains(f.Instead, "unsupported operation") {
		t.Errorf("%q is not for an operator", f.Instead)
	}
	t.Log(f.Instead)
}

// Wrong input is an error, and not a reason to have something worse.
func TestNewWithInputThatNobodyTakes(t *testing.T) {
	need(t, TUN)
	dir := t.TempDir()
	for _, test := range []struct {
		o  Options
		is error
		in string
	}{
		{Options{Interface: "a/b"}, hostnet.ErrName, `"a/b"`},
		{Options{Interface: "a-name-too-long0"}, hostnet.ErrName, "15"},
		{Options{Namespace: dir + "/none"}, fs.ErrNotExist, dir + "/none"},
		{Options{UnderlayNamespace: dir + "/none"}, fs.ErrNotExist, "UDP sockets"},
		{Options{Table: 255}, nil, "255"},
		{Options{Protocol: 3}, nil, "3"},
		{Options{Sources: 9}, nil, "9"},
		{Options{Routing: 9}, nil, "9"},
	} {
		a, err := New(test.o)
		if err == nil {
			a.Close()
			t.Errorf("%+v: %s was chosen", test.o, a.Chosen())
			continue
		}
		if test.is != nil && !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.in) || notHere(err) {
			t.Errorf("%+v: %v", test.o, err)
		}
	}
}

// What the kernel cannot do is done by tun, which says so.
func TestKernelIsPassedOver(t *testing.T) {
	need(t, TUN)
	s, under := nettest.NewSpace(t), nettest.NewSpace(t)
	under.Out()
	for option, o := range map[string]Options{
		"UnderlayNamespace": {Namespace: s.Path, UnderlayNamespace: under.Path},
		"Bind":              {Namespace: s.Path, Bind: under.Bind},
	} {
		o.Socket = t.TempDir()
		a, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		st, err := a.Read(t.Context())
		if err != nil || a.Chosen() != TUN || !strings.Contains(st.Host.Instead, "kernel: it cannot do what Options."+option+" asks: ") {
			t.Errorf("Options.%s: chosen: %s (%s), %v", option, a.Chosen(), st.Host.Instead, err)
		}
		a.Close()
	}
}

func mark(s *nettest.Space, name string) {
	s.T.Helper()
	s.Must(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetAlias(l, "warren:"+kernel.DefaultInterface+":87"), netlink.LinkSetUp(l))
	})
}

// An interface that is left beside netstack is a problem, for as long as it is there.
func TestLeftBesideNetstack(t *testing.T) {
	need(t, TUN)
	nettest.NeedProgram(t, "ip")
	s := nettest.NewSpace(t)
	s.IP("tuntap add mode tun name " + kernel.DefaultInterface)
	problems := func(a *Auto) []datapath.Problem {
		t.Helper()
		st, err := a.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return st.Problems
	}
	if ps := problems(open(t, s, Netstack)); len(ps) > 0 {
		t.Errorf("for an interface of somebody else: %+v", ps)
	}
	mark(s, kernel.DefaultInterface)
	a := open(t, s, Netstack)
	ps := problems(a)
	if len(ps) != 1 || ps[0].Subject != "interface "+kernel.DefaultInterface || !strings.Contains(ps[0].Remedy, "ip link delete "+kernel.DefaultInterface) {
		t.Errorf("problems are %+v", ps)
	}
	if err := Cleanup(t.Context(), Options{Namespace: s.Path, Socket: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	if links := s.Links(); !slices.Equal(links, []string{"lo"}) {
		t.Errorf("links are %v", links)
	}
	if ps := problems(a); len(ps) > 0 {
		t.Errorf("when it is gone: %+v", ps)
	}
}

// What one datapath left, the next one takes over or replaces.
func TestLeftByAnother(t *testing.T) {
	need(t, Kernel)
	need(t, TUN)
	s := nettest.NewSpace(t)
	s.Out()
	want := datapath.State{Device: datapath.Device{Key: nettest.NewKey(t)}, Addrs: prefixes.MustParse("10.0.0.1", "fd00::1")}
	loopback := func(o *Options) { o.Sources = SourceLoopback }
	kind := func() (kind string) {
		t.Helper()
		s.Must(func() error {
			l, err := netlink.LinkByName(kernel.DefaultInterface)
			if err == nil {
				kind = l.Type()
			}
			return err
		})
		return kind
	}
	for i, c := range []struct{ name, left, kind string }{
		{Kernel, "", "wireguard"}, {TUN, "wireguard", "tuntap"}, {Kernel, "", "wireguard"}, {Kernel, "wireguard", "wireguard"},
	} {
		a := open(t, s, c.name, loopback)
		before, err := a.Read(t.Context())
		if err != nil || before.Device.Exists() != (c.left == c.kind) {
			t.Errorf("%d: %s finds %+v, %v", i, c.name, before.Device, err)
		}
		if i > 0 && before.Device.Exists() && before.Addrs != want.Addrs {
			t.Errorf("%d: %s finds the addresses %v", i, c.name, before.Addrs)
		}
		if c.left != "" && kind() != c.left {
			t.Errorf("%d: %s was left, want %s", i, kind(), c.left)
		}
		if err := datapath.Sync(t.Context(), a, want); err != nil {
			t.Fatalf("%d: %v", i, err)
		}
		if got := kind(); got != c.kind {
			t.Errorf("%d: with %s there is a link of kind %s, want %s", i, c.name, got, c.kind)
		}
		if got, err := a.Read(t.Context()); err != nil || got.Addrs != want.Addrs {
			t.Errorf("%d: addresses are %v, %v", i, got.Addrs, err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
	beside := open(t, s, Netstack)
	if st, err := beside.Read(t.Context()); err != nil || len(st.Problems) != 1 || !strings.Contains(st.Problems[0].Message, "wireguard") {
		t.Errorf("problems are %+v, %v", st.Problems, err)
	}
	o := Options{Namespace: s.Path, Socket: t.TempDir()}
	busy := open(t, s, Kernel)
	if err := Cleanup(t.Context(), o); !errors.Is(err, kernel.ErrInUse) {
		t.Errorf("Cleanup while it is in use: %v", err)
	}
	if _, err := New(o); !errors.Is(err, kernel.ErrInUse) {
		t.Errorf("New while it is in use: %v", err)
	}
	if links := s.Links(); !slices.Contains(links, kernel.DefaultInterface) {
		t.Errorf("links are %v", links)
	}
	busy.Close()
	if err := Cleanup(t.Context(), o); err != nil {
		t.Error(err)
	}
	if links := s.Links(); slices.Contains(links, kernel.DefaultInterface) {
		t.Errorf("links are %v", links)
	}
}

// Each passes the suite as an Auto: the kernel's in a VM, the others where they are faster.
func TestSuite(t *testing.T) {
	t.Parallel()
	for _, name := range []string{Kernel, TUN, Netstack} {
		t.Run(name, func(t *testing.T) {
			if nettest.InVM() && name != Kernel {
				t.Skip("this runs outside of the VM")
			}
			t.Parallel()
			need(t, name)
			datapathtest.Run(t, harness(name))
		})
	}
}

func harness(name string) datapathtest.Harness {
	var last *nettest.Space
	h := datapathtest.Harness{
		New: func(t testing.TB) datapath.Datapath {
			last = nettest.NewSpace(t)
			last.Out()
			return open(t, last, name)
		},
		Occupy: func(t testing.TB, port uint16) func() {
			if name != Netstack {
				return last.Occupy(port)
			}
			c, err := net.ListenUDP("udp", &net.UDPAddr{Port: int(port)}) // its sockets are where this program is
			if err != nil {
				t.Fatal(err)
			}
			return func() { c.Close() }
		},
		Checks: 5, // they are about the datapath itself, which has its own tests
		Lacks:  []datapathtest.Lack{datapathtest.Outsider},
	}
	if name == Kernel {
		h.Lacks = nil
		h.Outside = func(t testing.TB, _ datapath.Datapath, op datapath.Op) {
			last.Must(func() error {
				w, err := wgctrl.New()
				if err != nil {
					return err
				}
				defer w.Close()
				gone := wgtypes.PeerConfig{PublicKey: wgtypes.Key(op.(datapath.RemovePeer).Key.Bytes()), Remove: true}
				return w.ConfigureDevice(kernel.DefaultInterface, wgtypes.Config{Peers: []wgtypes.PeerConfig{gone}})
			})
		}
	}
	return h
}
