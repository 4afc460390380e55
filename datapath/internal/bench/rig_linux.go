package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/datapath/tun"
	"github.com/warren-mesh/warren/prefixes"
)

// rig is one contender in two network namespaces of its own:
//
//	namespace a                                     namespace b
//	iperf3 -c --- tunnel 10.0.0.1                   tunnel 10.0.0.2 --- iperf3 -s
//	                    |                               |
//	              veth u 192.0.2.1 ------------- veth u 192.0.2.2
//
// It lives as long as the comparison. While it is not its turn, it has nothing to do.
type rig struct {
	spaces  [2]string
	target  string // what iperf3 connects to
	daemons []*process
	all     []*process // daemons and iperf3's server
	dir     string
	half    bool
}

// rigSpec says what is in a rig.
type rigSpec struct {
	contender string // a key of tunnels
	mtu       int    // of the tunnel; 0: the contender's own
	underlay  int    // MTU of the veth
	half      bool   // it has half of the processors, as Warren's agent does
}

var outer = [2]string{"192.0.2.1", "192.0.2.2"}
var inner = [2]string{addrA, addrB}

// tunnels start what carries the packets.
var tunnels = map[string]func(*rig, rigSpec, programs) error{
	"veth":         func(r *rig, _ rigSpec, _ programs) error { r.target = outer[1]; return nil },
	"warren":       (*rig).warren,
	"wireguard-go": (*rig).wireguardGo,
	"nebula":       func(r *rig, s rigSpec, p programs) error { return r.nebula(s, p, false) },
	"nebula tuned": func(r *rig, s rigSpec, p programs) error { return r.nebula(s, p, true) },
}

// programs are the paths of what was built, or why it could not be.
type programs struct {
	self   string
	path   map[string]string
	broken map[string]error
}

func (p programs) get(name string) (string, error) {
	if err := p.broken[name]; err != nil {
		return "", err
	}
	return p.path[name], nil
}

// tied has a process end with the thread that started it, which is the main one's: see main.
func tied(c *exec.Cmd) *exec.Cmd {
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return c
}

// ip runs ip(8) with words.
func ip(words string) error {
	if out, err := tied(exec.Command("ip", strings.Fields(words)...)).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", words, err, bytes.TrimSpace(out))
	}
	return nil
}

var rigs int // that were made so far, for names

func newRig(s rigSpec, p programs) (r *rig, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("network namespaces need root")
	}
	for _, program := range []string{"ip", "iperf3"} {
		if _, err := exec.LookPath(program); err != nil {
			return nil, err
		}
	}
	rigs++
	r = &rig{target: inner[1], half: s.half}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if r.dir, err = os.MkdirTemp("", "bench-rig-"); err != nil {
		return nil, err
	}
	for i, end := range []string{"a", "b"} {
		name := fmt.Sprintf("bench%d-%d%s", os.Getpid(), rigs, end)
		if err := ip("netns add " + name); err != nil {
			return nil, err
		}
		r.spaces[i] = name
	}
	steps := []string{fmt.Sprintf("-n %s link add u type veth peer name u netns %s", r.spaces[0], r.spaces[1])}
	for i, n := range r.spaces {
		steps = append(steps, "-n "+n+" link set lo up", "-n "+n+" addr add "+outer[i]+"/24 dev u",
			fmt.Sprintf("-n %s link set u mtu %d up", n, s.underlay))
	}
	for _, step := range steps {
		if err := ip(step); err != nil {
			return nil, err
		}
	}
	if err := tunnels[s.contender](r, s, p); err != nil {
		return nil, fmt.Errorf("%s: %w", s.contender, err)
	}
	if _, err := r.start(1, "iperf3", "-s"); err != nil {
		return nil, err
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		_, err := r.iperf("-n", "1K")
		if err == nil {
			return r, nil
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("%s: %w", s.contender, err)
		}
		if err := r.ended(); err != nil {
			return nil, fmt.Errorf("%s: %w", s.contender, err)
		}
	}
}

// process is a program that runs until it is told to end.
type process struct {
	name string
	*os.Process
	said  *tail
	ended chan struct{} // closed once it has
}

// start runs a program in a namespace until the rig is closed.
func (r *rig) start(node int, name string, args ...string) (*process, error) {
	c := tied(exec.Command("ip", append([]string{"netns", "exec", r.spaces[node], name}, args...)...))
	c.Env = append(os.Environ(), "LOG_LEVEL=error", "WG_PROCESS_FOREGROUND=1")
	if r.half {
		c.Env = append(c.Env, fmt.Sprint("GOMAXPROCS=", max(1, runtime.NumCPU()/2)))
	}
	p, err := launch(filepath.Base(name), c)
	if err == nil {
		r.all = append(r.all, p)
	}
	return p, err
}

// launch starts c and keeps what it says for errors.
func launch(name string, c *exec.Cmd) (*process, error) {
	p := &process{name: name, said: new(tail), ended: make(chan struct{})}
	c.Stderr = p.said
	if name != "iperf3" { // which would repeat every result
		c.Stdout = p.said
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	p.Process = c.Process
	go func() {
		defer close(p.ended)
		if err := c.Wait(); err != nil { // without it the process would seem to be there
			fmt.Fprintf(p.said, "%v\n", err)
		}
	}()
	return p, nil
}

// ended says which of the programs has ended, and what it said last.
func (r *rig) ended() error {
	for _, p := range r.all {
		select {
		case <-p.ended:
			return fmt.Errorf("%s ended: %s", p.name, p.said)
		default:
		}
	}
	return nil
}

// tail keeps the last of what a program said.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	t.b = t.b[max(0, len(t.b)-2000):]
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.b))
}

func (r *rig) daemon(node int, name string, args ...string) error {
	c, err := r.start(node, name, args...)
	if err == nil {
		r.daemons = append(r.daemons, c)
	}
	return err
}

func (r *rig) close() {
	for _, p := range r.all { // wireguard-go removes its socket
		p.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
		case <-time.After(2 * time.Second):
			p.Kill()
			<-p.ended
		}
	}
	for _, n := range r.spaces {
		if n != "" {
			if err := ip("netns del " + n); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}
	}
	if r.dir != "" {
		os.RemoveAll(r.dir)
	}
}

// cpu is the processor time of the daemons.
func (r *rig) cpu() (sum time.Duration) {
	for _, d := range r.daemons {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.Pid))
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		if len(f) < 13 {
			continue
		}
		for _, ticks := range f[11:13] { // of 1/100 s: proc(5)
			n, _ := strconv.Atoi(ticks)
			sum += time.Duration(n) * 10 * time.Millisecond
		}
	}
	return sum
}

// memory is the sum of the daemons' peaks of resident memory, in bytes, since iperf began.
func (r *rig) memory() (sum float64) {
	for _, d := range r.daemons {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.Pid))
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" {
				kb, _ := strconv.ParseFloat(f[1], 64)
				sum += kb * 1024
			}
		}
	}
	return sum
}

// iperf has traffic go through the rig and returns the figures by name, as of load.Result; cpu and peak are those of
// the two daemons.
func (r *rig) iperf(args ...string) (map[string]float64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", r.spaces[0], "iperf3", "-J", "-c", r.target, "--connect-timeout", "2000"}, args...)...)
	for _, d := range r.daemons { // the peak begins anew: proc_pid_clear_refs(5)
		os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", d.Pid), []byte("5"), 0)
	}
	before := r.cpu()
	out, err := tied(c).Output()
	spent := r.cpu() - before
	v, perr := parseIperf(out)
	if err := errors.Join(perr, err, r.ended()); err != nil {
		return nil, fmt.Errorf("iperf3 %s: %w", strings.Join(args, " "), err)
	}
	if sent := v["all"]; sent > 0 && len(r.daemons) > 0 {
		v["cpu"], v["peak"] = spent.Seconds()/sent*1e9, r.memory()
	}
	return v, nil
}

// parseIperf reads what iperf3 -J writes. all is the bytes over the whole run, warm-up included, as far as is known.
func parseIperf(out []byte) (map[string]float64, error) {
	type sum struct {
		Bytes float64 `json:"bytes"`
		Rate  float64 `json:"bits_per_second"`
	}
	var r struct {
		Error string `json:"error"`
		Start struct {
			Test struct {
				Protocol string  `json:"protocol"`
				Size     float64 `json:"blksize"`
				Omit     float64 `json:"omit"`
				Duration float64 `json:"duration"`
			} `json:"test_start"`
		} `json:"start"`
		End struct {
			Received *sum `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return nil, fmt.Errorf("what it wrote: %w", err)
	}
	if r.Error != "" {
		return nil, errors.New(r.Error)
	}
	got := r.End.Received
	if got == nil {
		return nil, errors.New("it wrote no sum of what was received")
	}
	v := map[string]float64{"rate": got.Rate / 8}
	whole := 1.0
	if d := r.Start.Test.Duration; d > 0 {
		whole = (d + r.Start.Test.Omit) / d
	}
	v["all"] = got.Bytes * whole
	if r.Start.Test.Protocol == "UDP" {
		// Its count of lost packets includes those of the warm-up, and that of packets does not.
		if r.Start.Test.Size == 0 {
			return nil, errors.New("it wrote no size of datagrams")
		}
		v["packets"] = v["rate"] / r.Start.Test.Size
	}
	return v, nil
}

// embedded is what the program is told that runs Warren's tun in a namespace.
type embedded struct {
	Private, Peer, Addr, PeerAddr, Endpoint, Name string
	MTU                                           int
}

func (r *rig) warren(s rigSpec, p programs) error {
	var keys [2]key.Private
	for i := range keys {
		var err error
		if keys[i], err = key.NewPrivate(); err != nil {
			return err
		}
	}
	for i := range keys {
		file := filepath.Join(r.dir, fmt.Sprint(i))
		b, err := json.Marshal(embedded{
			Private: privateHex(keys[i]), Peer: keys[1-i].Public().String(), Addr: inner[i], PeerAddr: inner[1-i],
			Endpoint: outer[1-i] + ":51820", Name: "bench0", MTU: s.mtu,
		})
		if err != nil {
			return err
		}
		if err := os.WriteFile(file, b, 0o600); err != nil {
			return err
		}
		if err := r.daemon(i, p.self, "-embed", file); err != nil {
			return err
		}
	}
	return nil
}

// embed runs Warren's tun with its defaults, as an embedder does, until it is told to end.
func embed(file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var e embedded
	if err := json.Unmarshal(b, &e); err != nil {
		return err
	}
	raw, err := hex.DecodeString(e.Private)
	if err != nil {
		return errors.New("no private key")
	}
	private, err := key.PrivateFromBytes(raw)
	if err != nil {
		return err
	}
	peer, err := key.ParsePublic(e.Peer)
	if err != nil {
		return err
	}
	d, err := tun.New(tun.Options{Interface: e.Name, MTU: e.MTU, Socket: tun.NoSocket})
	if err != nil {
		return err
	}
	defer d.Close()
	other := prefixes.MustParse(e.PeerAddr + "/32")
	err = datapath.Sync(context.Background(), d, datapath.State{
		Device: datapath.Device{Key: private, ListenPort: 51820},
		Addrs:  prefixes.MustParse(e.Addr + "/32"),
		Routes: map[netip.Prefix]netip.Addr{netip.MustParsePrefix(e.PeerAddr + "/32"): netip.MustParseAddr(e.Addr)},
		Peers:  map[key.Public]datapath.Peer{peer: {Endpoint: netip.MustParseAddrPort(e.Endpoint), Prefixes: other}},
	})
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	<-ctx.Done()
	return nil
}

func (r *rig) wireguardGo(s rigSpec, p programs) error {
	program, err := p.get("wireguard-go")
	if err != nil {
		return err
	}
	var keys [2]key.Private
	for i := range keys {
		if keys[i], err = key.NewPrivate(); err != nil {
			return err
		}
	}
	for i := range keys {
		// The socket is in a folder that all namespaces share.
		name := fmt.Sprintf("bn%d.%d%c", os.Getpid()%100000, rigs, 'a'+i)
		if err := r.daemon(i, program, "-f", name); err != nil {
			return err
		}
		conf := fmt.Sprintf("set=1\nprivate_key=%s\nlisten_port=51820\n%s\n", privateHex(keys[i]),
			peerUAPI(keys[1-i].Public(), outer[1-i]+":51820", inner[1-i]))
		if err := setUAPI("/var/run/wireguard/"+name+".sock", conf); err != nil {
			return fmt.Errorf("%w: %s", err, r.daemons[len(r.daemons)-1].said)
		}
		mtu := s.mtu
		if mtu == 0 {
			mtu = 1420
		}
		for _, step := range []string{
			"addr add " + inner[i] + "/24 dev " + name, fmt.Sprintf("link set %s mtu %d up", name, mtu),
		} {
			if err := ip("-n " + r.spaces[i] + " " + step); err != nil {
				return err
			}
		}
	}
	return nil
}

// setUAPI tells a device what it should be, as soon as it has a socket.
func setUAPI(path, conf string) error {
	var c net.Conn
	var err error
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if c, err = net.Dial("unix", path); err == nil {
			break
		}
		if time.Now().After(end) {
			return err
		}
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(c, conf); err != nil {
		return err
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err != nil {
		return err
	}
	if got := strings.TrimSpace(string(b[:n])); got != "errno=0" {
		return fmt.Errorf("the device answers %s", got)
	}
	return nil
}

// nebula has each node know where the other is. Tuned, it has what its reference of settings advises: an MTU that
// fits the underlay, larger socket buffers, larger batches and a routine for each processor.
func (r *rig) nebula(s rigSpec, p programs, tuned bool) error {
	program, err := p.get("nebula")
	if err != nil {
		return err
	}
	cert, err := p.get("nebula-cert")
	if err != nil {
		return err
	}
	sign := func(args ...string) error {
		c := tied(exec.Command(cert, args...))
		c.Dir = r.dir
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("nebula-cert: %w: %s", err, out)
		}
		return nil
	}
	if err := sign("ca", "-name", "bench"); err != nil {
		return err
	}
	for i := range inner {
		name := string(rune('a' + i))
		if err := sign("sign", "-name", name, "-ip", inner[i]+"/24"); err != nil {
			return err
		}
		more := ""
		if tuned {
			mtu := s.mtu
			if mtu == 0 {
				mtu = 1420
			}
			more = fmt.Sprintf("routines: %d\n", runtime.NumCPU())
			more += fmt.Sprintf("tun:\n  dev: neb0\n  mtu: %d\n  tx_queue: 2000\n", mtu)
		} else {
			more = "tun:\n  dev: neb0\n"
		}
		listen := "listen:\n  host: 0.0.0.0\n  port: 4242\n"
		if tuned {
			listen += "  batch: 128\n  read_buffer: 10485760\n  write_buffer: 10485760\n"
		}
		conf := fmt.Sprintf(`pki:
  ca: %[1]s/ca.crt
  cert: %[1]s/%[2]s.crt
  key: %[1]s/%[2]s.key
static_host_map:
  "%[3]s": ["%[4]s:4242"]
lighthouse:
  am_lighthouse: false
punchy:
  punch: true
logging:
  level: error
%[5]s%[6]sfirewall:
  outbound:
    - {port: any, proto: any, host: any}
  inbound:
    - {port: any, proto: any, host: any}
`, r.dir, name, inner[1-i], outer[1-i], listen, more)
		file := filepath.Join(r.dir, name+".yml")
		if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
			return err
		}
		if err := r.daemon(i, program, "-config", file); err != nil {
			return err
		}
	}
	return nil
}
