package tun

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/internal/nettest"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// benchEnv has this test binary be a program with one end of a tunnel, as benchEnd says.
const benchEnv = "WARREN_TUN_BENCH_END"

// othersEnv are other builds of this test binary, separated by colons, that BenchmarkThroughput compares with.
const othersEnv = "WARREN_TUN_BENCH_OTHERS"

type benchEnd struct {
	Namespace, Socket string
	Key, Peer         string
	Port              uint16
	Endpoint          netip.AddrPort
	Addrs, PeerAddrs  []string
	MTU               int
}

func (e *benchEnd) run() error {
	k, err := key.ParsePrivate(e.Key)
	if err != nil {
		return err
	}
	peer, err := key.ParsePublic(e.Peer)
	if err != nil {
		return err
	}
	d, err := New(Options{Namespace: e.Namespace, Socket: e.Socket, MTU: e.MTU})
	if err != nil {
		return err
	}
	want := datapath.State{
		Device: datapath.Device{Key: k, ListenPort: e.Port},
		Addrs:  prefixes.MustParse(e.Addrs...), Routes: make(map[netip.Prefix]netip.Addr),
		Peers: map[key.Public]datapath.Peer{peer: {Endpoint: e.Endpoint, Prefixes: prefixes.MustParse(e.PeerAddrs...)}},
	}
	for p := range want.Peers[peer].Prefixes.All() {
		want.Routes[p] = netip.Addr{}
	}
	if err := datapath.Sync(context.Background(), d, want); err != nil {
		return err
	}
	select {}
}

func benchChild(text string) {
	var e benchEnd
	err := json.Unmarshal([]byte(text), &e)
	if err == nil {
		err = e.run()
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// contender is a pair of namespaces with a tunnel between them, whose ends are processes.
type contender struct {
	name  string
	a, b  *space
	procs []*exec.Cmd
	bits  []float64 // a second, of each round
	cpu   []float64 // seconds a GB, of both processes
	lost  []float64 // part of the datagrams
}

const benchPort = 40000

// newContender makes the tunnel with a program: one of the arguments of wireguard-go, if it is plain, or else a build of
// this test binary. With "" there is no tunnel, but the wire alone.
func newContender(b *testing.B, name, program string, plain bool, underlay, mtu int) *contender {
	b.Helper()
	sa, sb := wired(b)
	sa.Narrow(underlay)
	sb.Narrow(underlay)
	c := &contender{name: name, a: sa, b: sb}
	keys := [2]key.Private{nettest.NewKey(b), nettest.NewKey(b)}
	addrs := [2][]string{{"10.0.0.1", "fd00::1"}, {"10.0.0.2", "fd00::2"}}
	outer := [2]string{nettest.Wire4A, nettest.Wire4B}
	for i, s := range []*space{sa, sb} {
		if program == "" {
			break
		}
		if !plain {
			text, err := json.Marshal(benchEnd{
				Namespace: s.Path, Socket: folder(b), Key: keys[i].Base64(), Peer: keys[1-i].Public().String(), Port: benchPort,
				Endpoint: netip.AddrPortFrom(netip.MustParseAddr(outer[1-i]), benchPort), Addrs: addrs[i], PeerAddrs: addrs[1-i], MTU: mtu,
			})
			if err != nil {
				b.Fatal(err)
			}
			cmd := s.start(b, append(os.Environ(), benchEnv+"="+string(text)), program)
			c.procs = append(c.procs, cmd)
			continue
		}
		link := nettest.UniqueName(b)
		c.procs = append(c.procs, s.start(b, nil, program, "-f", link))
		nettest.Within(b, 20*time.Second, program+" listens", func() bool {
			nc, err := net.Dial("unix", "/var/run/wireguard/"+link+".sock")
			if err == nil {
				nc.Close()
			}
			return err == nil
		})
		conf := fmt.Sprintf("[Interface]\nPrivateKey = %s\nListenPort = %d\n[Peer]\nPublicKey = %v\nAllowedIPs = %s\nEndpoint = %s:%d\n",
			keys[i].Base64(), benchPort, keys[1-i].Public(), strings.Join(addrs[1-i], ","), outer[1-i], benchPort)
		if _, err := s.Pipe(conf, "wg", "setconf", link, "/dev/stdin"); err != nil {
			b.Fatal(err)
		}
		if mtu == 0 {
			mtu = 1420
		}
		s.IP(fmt.Sprintf("link set %s up mtu %d", link, mtu))
		for j := range addrs[i] {
			s.IP(fmt.Sprintf("addr add %s dev %s", addrs[i][j], link))
			s.IP(fmt.Sprintf("route add %s dev %s", addrs[1-i][j], link))
		}
	}
	sb.start(b, nil, nettest.NeedProgram(b, "iperf3"), "-s")
	for i, s := range []*space{sa, sb} {
		if program == "" {
			break
		}
		nettest.Within(b, 20*time.Second, name+" is ready", func() bool {
			out, _ := s.Run("ip", "route", "get", addrs[1-i][0])
			have, _ := s.Run("ip", "addr")
			return strings.Contains(out, "10.0.0.") && strings.Contains(have, addrs[i][0])
		})
	}
	nettest.Reach(sa.Space, sb.Space, c.to())
	return c
}

func (c *contender) to() string {
	if c.procs == nil {
		return nettest.Wire4B
	}
	return "10.0.0.2"
}

// start has a program run in the namespace until the benchmark ends.
func (s *space) start(b *testing.B, env []string, program string, args ...string) *exec.Cmd {
	b.Helper()
	cmd := exec.Command(program, args...)
	cmd.Env, cmd.Stderr = env, os.Stderr
	s.Must(cmd.Start)
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

// used is the processor time of both ends.
func (c *contender) used(b *testing.B) (sum time.Duration) {
	for _, p := range c.procs {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
		if err != nil {
			b.Fatal(err)
		}
		f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		for _, at := range []int{11, 12} { // proc_pid_stat(5): utime, stime, in ticks of 10 ms
			n, _ := strconv.Atoi(f[at])
			sum += time.Duration(n) * 10 * time.Millisecond
		}
	}
	return sum
}

// round sends for a while.
func (c *contender) round(b *testing.B, d time.Duration, args ...string) {
	b.Helper()
	before := c.used(b)
	out, err := c.a.Run("iperf3", append([]string{"-c", c.to(), "-J", "-t", fmt.Sprint(d.Seconds())}, args...)...)
	if err != nil {
		b.Fatal(err, out)
	}
	used := c.used(b) - before
	type sum struct {
		Bytes   float64 `json:"bytes"`
		Bits    float64 `json:"bits_per_second"`
		Lost    float64 `json:"lost_percent"`
		Packets float64 `json:"packets"`
	}
	var said struct {
		End struct {
			Received sum `json:"sum_received"`
			Sum      sum `json:"sum"`
		} `json:"end"`
	}
	if err := json.Unmarshal([]byte(out), &said); err != nil {
		b.Fatal(err)
	}
	got := said.End.Received
	if said.End.Sum.Packets > 0 { // UDP: sent, and how much of it was lost
		left := 1 - said.End.Sum.Lost/100
		got.Bytes, got.Bits = said.End.Sum.Bytes*left, said.End.Sum.Bits*left
	}
	c.bits = append(c.bits, got.Bits)
	c.cpu = append(c.cpu, used.Seconds()/(got.Bytes/1e9))
	c.lost = append(c.lost, said.End.Sum.Lost)
}

func median(x []float64) float64 {
	x = slices.Sorted(slices.Values(x))
	return x[len(x)/2]
}

// BenchmarkThroughput compares a tunnel between two namespaces with the wireguard-go program of the module, both as
// two processes, by iperf3. Rounds of all take turns; what is reported are medians.
func BenchmarkThroughput(b *testing.B) {
	need(b)
	for _, p := range []string{"iperf3", "wg", "ip"} {
		nettest.NeedProgram(b, p)
	}
	plain := filepath.Join(b.TempDir(), "wireguard-go")
	if out, err := exec.Command("go", "build", "-o", plain, "golang.zx2c4.com/wireguard").CombinedOutput(); err != nil {
		b.Fatalf("building wireguard-go: %v: %s", err, out)
	}
	for _, test := range []struct {
		name          string
		underlay, mtu int
		args          []string
	}{
		{"TCP1", 1500, 1420, nil},
		{"TCP4", 1500, 1420, []string{"-P", "4"}},
		{"TCP6", 1500, 1420, []string{"-c", "fd00::2"}},
		{"MTU1280", 1500, 1280, nil},
		{"Narrow", 1280, 1280, nil}, // encrypted packets do not fit, as IPv6 wants 1280 bytes
		{"MTU8920", 9000, 8920, nil},
		{"MTU65455", 65535, 65455, nil},
		{"UDP1372", 1500, 1420, []string{"-u", "-b", "0", "-l", "1372"}},
		{"UDP64", 1500, 1420, []string{"-u", "-b", "0", "-l", "64"}},
	} {
		b.Run(test.name, func(b *testing.B) {
			all := []*contender{
				newContender(b, "warren", "/proc/self/exe", false, test.underlay, test.mtu),
				newContender(b, "plain", plain, true, test.underlay, test.mtu),
			}
			if test.underlay == 1280 {
				all = append(all, newContender(b, "over 1500", "/proc/self/exe", false, 1500, 1420))
			}
			if test.name == "TCP1" {
				all = append(all, newContender(b, "no tunnel", "", false, test.underlay, test.mtu))
			}
			for _, other := range filepath.SplitList(os.Getenv(othersEnv)) {
				all = append(all, newContender(b, filepath.Base(other), other, false, test.underlay, test.mtu))
			}
			const warm, length = time.Second, 2 * time.Second
			for _, c := range all {
				c.round(b, warm, test.args...)
				c.bits, c.cpu, c.lost = nil, nil, nil
			}
			for range 5 {
				for _, c := range all {
					c.round(b, length, test.args...)
				}
			}
			b.ReportMetric(0, "ns/op")
			for _, c := range all {
				b.Logf("%-10s %6.0f Mbit/s, %5.2f CPU s/GB, %4.1f %% lost; ratio %.2f, CPU %.2f", c.name, median(c.bits)/1e6, median(c.cpu), median(c.lost),
					median(all[0].bits)/median(c.bits), median(c.cpu)/median(all[0].cpu))
			}
			b.ReportMetric(median(all[0].bits)/median(all[1].bits), "x-plain")
			if test.underlay == 1280 {
				b.ReportMetric(median(all[0].bits)/median(all[2].bits), "x-1500")
			}
			b.ReportMetric(median(all[1].cpu)/median(all[0].cpu), "x-plain-cpu")
		})
	}
}
