package main

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/warren-mesh/warren/datapath/internal/bench/measure"
	"github.com/warren-mesh/warren/datapath/key"
)

// spaces are two network namespaces, joined by a veth, and the programs in them.
type spaces struct {
	names    [2]string
	programs []*exec.Cmd
	tunnels  []*exec.Cmd // those of programs that carry packets
	dir      string
	said     bytes.Buffer // by what failed
}

// tunnel is who carries packets from one namespace to the other.
type tunnel struct {
	mtu      int // of the tunnel
	underlay int // MTU of the veth
	tuned    bool
}

// Addresses of the two ends, of the underlay and in the tunnel.
var outside, within = [2]string{"192.0.2.1", "192.0.2.2"}, [2]string{"10.98.0.1", "10.98.0.2"}

func newSpaces(dir string, underlay int) (*spaces, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("network namespaces take root")
	}
	s := &spaces{dir: dir}
	for i := range s.names {
		s.names[i] = fmt.Sprintf("bench-%d-%d", os.Getpid(), i)
		if err := s.do("ip", "netns", "add", s.names[i]); err != nil {
			s.close()
			return nil, err
		}
	}
	for _, args := range [][]string{
		{"ip", "-n", s.names[0], "link", "add", "under", "mtu", strconv.Itoa(underlay), "type", "veth", "peer", "name", "under", "mtu", strconv.Itoa(underlay), "netns", s.names[1]},
		{"ip", "-n", s.names[0], "addr", "add", outside[0] + "/24", "dev", "under"}, {"ip", "-n", s.names[1], "addr", "add", outside[1] + "/24", "dev", "under"},
		{"ip", "-n", s.names[0], "link", "set", "under", "up"}, {"ip", "-n", s.names[1], "link", "set", "under", "up"},
		{"ip", "-n", s.names[0], "link", "set", "lo", "up"}, {"ip", "-n", s.names[1], "link", "set", "lo", "up"},
	} {
		if err := s.do(args...); err != nil {
			s.close()
			return nil, err
		}
	}
	return s, nil
}

// do runs a program to its end.
func (s *spaces) do(args ...string) error {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// start runs a program in a namespace, until close.
func (s *spaces) start(i int, args ...string) (*exec.Cmd, error) {
	cmd := exec.Command("ip", append([]string{"netns", "exec", s.names[i]}, args...)...) // which becomes the program
	cmd.Stdout, cmd.Stderr = &s.said, &s.said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	s.programs = append(s.programs, cmd)
	return cmd, nil
}

func (s *spaces) close() {
	for _, p := range s.programs {
		_ = p.Process.Signal(syscall.SIGTERM)
	}
	for _, p := range s.programs {
		ended := time.AfterFunc(3*time.Second, func() { _ = p.Process.Kill() })
		_ = p.Wait()
		ended.Stop()
	}
	for _, name := range s.names {
		_ = s.do("ip", "netns", "del", name)
	}
}

// used is the processor time of the programs that carry packets.
func (s *spaces) used() (d time.Duration) {
	for _, p := range s.tunnels {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(b), ") ")
		if f := strings.Fields(rest); len(f) > 12 {
			user, _ := strconv.Atoi(f[11])
			system, _ := strconv.Atoi(f[12])
			d += time.Duration(user+system) * 10 * time.Millisecond // USER_HZ is 100
		}
	}
	return d
}

// opens are the contenders. Each has the two namespaces reach each other, and returns the address of the second.
var opens = map[string]func(s *spaces, t tunnel, bin string) (string, error){
	"veth":         func(*spaces, tunnel, string) (string, error) { return outside[1], nil },
	"warren":       openWarren,
	"wireguard-go": openWireGuardGo,
	"nebula":       openNebula,
}

func keys() (private [2]key.Private, err error) {
	for i := range private {
		if private[i], err = key.NewPrivate(); err != nil {
			return private, err
		}
	}
	return private, nil
}

func openWarren(s *spaces, t tunnel, bin string) (string, error) {
	ks, err := keys()
	if err != nil {
		return "", err
	}
	for i, k := range ks {
		text := k.Bytes()
		cmd, err := s.start(i, filepath.Join(bin, "tunnode"), "-key", base64.StdEncoding.EncodeToString(text[:]), "-address", within[i], "-mtu", strconv.Itoa(t.mtu),
			"-peer", ks[1-i].Public().String(), "-peer-address", within[1-i], "-endpoint", outside[1-i]+":51820")
		if err != nil {
			return "", err
		}
		s.tunnels = append(s.tunnels, cmd)
	}
	return within[1], nil
}

func openWireGuardGo(s *spaces, t tunnel, bin string) (string, error) {
	ks, err := keys()
	if err != nil {
		return "", err
	}
	for i, k := range ks {
		name := fmt.Sprintf("bwg%d", i) // sockets of both are in one folder
		cmd, err := s.start(i, filepath.Join(bin, "wireguard"), "-f", name)
		if err != nil {
			return "", err
		}
		s.tunnels = append(s.tunnels, cmd)
		private, public := k.Bytes(), ks[1-i].Public().Bytes()
		text := fmt.Sprintf("set=1\nprivate_key=%s\nlisten_port=51820\npublic_key=%s\nendpoint=%s:51820\nallowed_ip=%s/32\n\n",
			hex.EncodeToString(private[:]), hex.EncodeToString(public[:]), outside[1-i], within[1-i])
		if err := uapi("/var/run/wireguard/"+name+".sock", text); err != nil {
			return "", err
		}
		for _, args := range [][]string{{"addr", "add", within[i] + "/24", "dev", name}, {"link", "set", name, "mtu", strconv.Itoa(t.mtu), "up"}} {
			if err := s.do(append([]string{"ip", "-n", s.names[i]}, args...)...); err != nil {
				return "", err
			}
		}
	}
	return within[1], nil
}

func uapi(path, text string) error {
	var c net.Conn
	err := eventually(func() (err error) { c, err = net.Dial("unix", path); return err })
	if err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := c.Write([]byte(text)); err != nil {
		return err
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err == nil && !strings.HasPrefix(string(b[:n]), "errno=0") {
		err = fmt.Errorf("wireguard-go says %q", b[:n])
	}
	return err
}

func openNebula(s *spaces, t tunnel, bin string) (string, error) {
	cert := filepath.Join(bin, "nebula-cert")
	ca := filepath.Join(s.dir, "ca")
	_ = os.Remove(ca + ".crt")
	_ = os.Remove(ca + ".key")
	if err := s.do(cert, "ca", "-name", "bench", "-out-crt", ca+".crt", "-out-key", ca+".key"); err != nil {
		return "", err
	}
	for i := range s.names {
		at := filepath.Join(s.dir, fmt.Sprintf("node%d", i))
		_ = os.Remove(at + ".crt")
		_ = os.Remove(at + ".key")
		if err := s.do(cert, "sign", "-ca-crt", ca+".crt", "-ca-key", ca+".key", "-name", fmt.Sprintf("node%d", i), "-ip", within[i]+"/24", "-out-crt", at+".crt", "-out-key", at+".key"); err != nil {
			return "", err
		}
		// What its example of a configuration has, where it says anything that matters here.
		config := fmt.Sprintf(`
pki: {ca: %s.crt, cert: %s.crt, key: %s.key}
static_host_map: {"%s": ["%s:4242"]}
lighthouse: {am_lighthouse: false, interval: 60, hosts: []}
listen: {host: 0.0.0.0, port: 4242}
punchy: {punch: true}
tun: {dev: bneb%d, tx_queue: 500, mtu: 1300}
logging: {level: error, format: text}
firewall:
  outbound_action: drop
  inbound_action: drop
  conntrack: {tcp_timeout: 12m, udp_timeout: 3m, default_timeout: 10m}
  outbound: [{port: any, proto: any, host: any}]
  inbound: [{port: any, proto: any, host: any}]
`, ca, at, at, within[1-i], outside[1-i], i)
		if t.tuned {
			config = strings.Replace(config, "mtu: 1300", fmt.Sprintf("mtu: %d", t.mtu), 1)
			config = strings.Replace(config, "port: 4242}", "port: 4242, read_buffer: 10485760, write_buffer: 10485760}", 1)
		}
		file := at + ".yml"
		if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
			return "", err
		}
		cmd, err := s.start(i, filepath.Join(bin, "nebula"), "-config", file)
		if err != nil {
			return "", err
		}
		s.tunnels = append(s.tunnels, cmd)
	}
	return within[1], nil
}

func eventually(f func() error) (err error) {
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err = f(); err == nil {
			return nil
		}
	}
	return err
}

// between does one measure with iperf3 across the two namespaces.
func between(who string, t tunnel, w measure.What, bin string) (r measure.Result, err error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	s, err := newSpaces(dir, t.underlay)
	if err != nil {
		return r, err
	}
	defer s.close()
	to, err := opens[who](s, t, bin)
	if err == nil {
		err = eventually(func() error {
			return s.do("ip", "netns", "exec", s.names[0], "ping", "-c", "1", "-W", "1", to)
		})
	}
	if err != nil {
		return r, fmt.Errorf("%w: %s", err, bytes.TrimSpace(s.said.Bytes()))
	}
	if _, err := s.start(1, "iperf3", "-s", "-1", "-B", to); err != nil {
		return r, err
	}
	args := []string{"netns", "exec", s.names[0], "iperf3", "-c", to, "-J", "-O", "1", "-t", fmt.Sprint(w.For.Seconds()), "--connect-timeout", "2000"}
	switch w.Kind {
	case measure.TCP:
		args = append(args, "-P", strconv.Itoa(w.N))
	case measure.UDP:
		args = append(args, "-u", "-b", "0", "-l", strconv.Itoa(w.N))
	}
	var out []byte
	before := s.used()
	for range 20 { // the server may not listen yet
		if out, err = exec.Command("ip", args...).Output(); err == nil || !bytes.Contains(out, []byte("refused")) {
			break
		}
		time.Sleep(100 * time.Millisecond)
		before = s.used()
	}
	if err != nil {
		return r, fmt.Errorf("iperf3: %w: %s", err, out)
	}
	return iperf(out, w, s.used()-before)
}

// iperf reads what iperf3 says.
func iperf(out []byte, w measure.What, used time.Duration) (r measure.Result, err error) {
	var said struct {
		Error string
		End   struct {
			SumReceived struct {
				Bytes         float64
				BitsPerSecond float64 `json:"bits_per_second"`
				Seconds       float64
				Packets       float64
				LostPackets   float64 `json:"lost_packets"`
			} `json:"sum_received"`
			Sum struct {
				Seconds     float64
				Packets     float64
				LostPackets float64 `json:"lost_packets"`
			}
		}
	}
	if err := json.Unmarshal(out, &said); err != nil {
		return r, fmt.Errorf("iperf3 says %q: %w", out, err)
	}
	if said.Error != "" {
		return r, fmt.Errorf("iperf3: %s", said.Error)
	}
	if w.Kind == measure.UDP {
		u := said.End.Sum
		if u.Seconds == 0 || u.Packets <= u.LostPackets {
			return r, errors.New("iperf3: nothing arrived")
		}
		return measure.Result{Rate: (u.Packets - u.LostPackets) / u.Seconds, Sent: u.Packets / u.Seconds}, nil
	}
	t := said.End.SumReceived
	if t.Bytes == 0 {
		return r, errors.New("iperf3: nothing arrived")
	}
	r.Rate = t.BitsPerSecond / 8
	r.CPU = used.Seconds() / (t.Bytes + r.Rate) * 1e9 // the second that it leaves out was worked too
	return r, nil
}
