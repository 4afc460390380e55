package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"pgregory.net/rapid"
)

// load loads what a shell, a file and a command line would give. The file is agent.yaml.
func load(use Use, file string, environ []string, args ...string) (Config, error) {
	h := Host{
		Environ:  environ,
		Hostname: func() (string, error) { return "Host_1.example.org", nil },
		StateDir: func() (string, error) { return "state", nil },
		ReadFile: func(path string) ([]byte, error) {
			if path != "agent.yaml" && path != "etc/agent.yaml" {
				return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
			}
			return []byte(file), nil
		},
	}
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	f := Bind(set, use)
	if err := set.Parse(args); err != nil {
		return Config{}, err
	}
	return f.Load(h)
}

// The table is what everything is made of: each setting is a flag, a variable and a key of the file, all
// three take its example, and what is printed is read again as the same.
func TestTable(t *testing.T) {
	needs := map[string][]string{ // other settings, for one to make sense
		"registry-ca": {"--registry=etcds://a:1"}, "registry-cert": {"--registry=etcds://a:1", "--registry-key=k"},
		"registry-key": {"--registry=etcds://a:1", "--registry-cert=c"}, "registry-user": {"--registry-password-file=p"},
		"registry-password-file": {"--registry-user=u"},
	}
	for _, s := range Settings() {
		if s.Host {
			needs[s.Name] = []string{"--datapath=tun"}
		}
	}
	for _, name := range []string{"priority", "mark", "guard"} {
		needs[name] = append(needs[name], "--routing=policy")
	}
	seen := make(map[string]bool)
	for _, s := range Settings() {
		if seen[s.Name] || s.Usage == "" || s.Value == "" || s.Example == "" || strings.ToLower(s.Name) != s.Name {
			t.Errorf("%s: is there twice, or lacks something: %+v", s.Name, s)
		}
		seen[s.Name] = true
		args := needs[s.Name]
		if s.Name != "registry" && !slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--registry=") }) {
			args = append(slices.Clone(args), "--registry=etcd://a:1")
		}
		text := s.Name + ": " + s.Example
		if s.Kind == Pairs {
			text = s.Name + ":\n  " + strings.Replace(s.Example, "=", ": ", 1)
		}
		var first []string
		for how, got := range map[string]func() (Config, error){
			"flag":     func() (Config, error) { return load(ToRun, "", nil, append(args, "--"+s.Name+"="+s.Example)...) },
			"variable": func() (Config, error) { return load(ToRun, "", []string{s.Variable() + "=" + s.Example}, args...) },
			"file":     func() (Config, error) { return load(ToRun, text, nil, append(args, "--config=agent.yaml")...) },
		} {
			c, err := got()
			if err != nil {
				t.Errorf("%s by %s: %v", s.Name, how, err)
				continue
			}
			if first == nil {
				first = s.get(c)
			}
			if !c.Given(s.Name) || c.Origin(s.Name) == "default" || len(first) == 0 || !slices.Equal(first, s.get(c)) {
				t.Errorf("%s by %s: %q from %s, otherwise %q", s.Name, how, s.get(c), c.Origin(s.Name), first)
			}
		}
	}
}

func TestPrecedence(t *testing.T) {
	single := map[string][]string{
		"mesh": {"m1", "m2", "m3"}, "mtu": {"1300", "1400", "1500"}, "listen": {"1", "2-3", "any"},
		"log-level": {"debug", "warn", "error"}, "keepalive": {"25s", "off", "auto"},
		"datapath": {"kernel", "tun", "auto"}, "routing": {"policy", "policy", "policy"},
	}
	onHost := map[string][]string{
		"interface": {"wg0", "a", "x-1"}, "netns": {"/run/netns/blue", "/proc/1/ns/net", "/x"}, "table": {"1", "100", "4294967295"}, "metric": {"1", "50", "4294967292"},
		"protocol": {"5", "87", "255"}, "source": {"hint", "device", "loopback"}, "forward": {"on", "off", "on"},
	}
	policy := map[string][]string{"priority": {"1", "32500", "32763"}, "mark": {"0x50/0xf0", "0x1/0x1", "0xffffffff/0xffffffff"}}
	lists := map[string][]string{
		"snat": {"10.0.0.0/8", "192.0.2.1/32", "fd00::/8"}, "guard": {"0.0.0.0/0", "::/0", "10.0.0.0/8"},
		"address": {"10.0.0.1", "10.0.0.2", "fd00::1"}, "role": {"a", "b", "c"}, "endpoint": {"a:0", "192.0.2.1:5", "[2001:db8::1]:7"},
	}
	rapid.Check(t, func(t *rapid.T) {
		var file strings.Builder
		environ, args := []string{}, []string{"--config=agent.yaml", "--registry=memory"}
		want, from := make(map[string][]string), make(map[string]string)
		line := 1
		give := func(name string, values []string, list bool) {
			n := 1
			if list {
				n = rapid.IntRange(1, len(values)).Draw(t, "values")
			}
			pick := func() []string { return rapid.Permutation(values).Draw(t, name)[:n] }
			for source := range 3 {
				if !rapid.Bool().Draw(t, "given") {
					continue
				}
				v := pick()
				switch source {
				case 0:
					from[name] = fmt.Sprintf("agent.yaml:%d", line)
					if list {
						from[name] = fmt.Sprintf("agent.yaml:%d", line+1)
						fmt.Fprintf(&file, "%s:\n", name)
						for _, v := range v {
							fmt.Fprintf(&file, "- %q\n", v)
						}
						line += 1 + len(v)
					} else {
						fmt.Fprintf(&file, "%s: %s\n", name, v[0])
						line++
					}
				case 1:
					environ = append(environ, Variable(name)+"="+strings.Join(v, ","))
					from[name] = Variable(name)
				case 2:
					from[name] = "--" + name
					for _, v := range v {
						args = append(args, "--"+name+"="+v)
					}
				}
				want[name] = v
			}
		}
		for _, s := range Settings() {
			_, forPolicy := policy[s.Name]
			switch host := want["datapath"] != nil; {
			case s.Host && !host, (forPolicy || s.Name == "guard") && want["routing"] == nil:
			case lists[s.Name] != nil:
				give(s.Name, lists[s.Name], true)
			default:
				for _, m := range []map[string][]string{single, onHost, policy} {
					if v := m[s.Name]; v != nil {
						give(s.Name, v, false)
					}
				}
			}
		}
		c, err := load(ToRun, file.String(), environ, args...)
		if err != nil {
			t.Fatalf("%v; file:\n%s\nenvironment: %q, flags: %q", err, file.String(), environ, args)
		}
		for _, s := range Settings() {
			if w := want[s.Name]; w != nil && (!slices.Equal(s.get(c), w) || c.Origin(s.Name) != from[s.Name]) {
				t.Errorf("%s: got %q from %s, want %q from %s", s.Name, s.get(c), c.Origin(s.Name), w, from[s.Name])
			}
		}
		// What is printed is the same configuration.
		var b bytes.Buffer
		if err := c.Print(&b); err != nil {
			t.Fatal(err)
		}
		d, err := load(ToRun, b.String(), nil, "--config=agent.yaml")
		if err != nil || len(c.Changed(d)) > 0 {
			t.Errorf("printed and read again, %q differ: %v\n%s", c.Changed(d), err, b.String())
		}
	})
}

func TestDefaults(t *testing.T) {
	c, err := load(ToRun, "", nil, "--registry=memory")
	if err != nil {
		t.Fatal(err)
	}
	if c.State != "state" || c.Node != "host-1.example.org" || c.Mesh != "warren" || c.Datapath != "netstack" || c.LogFormat != "text" || len(c.Address) > 0 || c.NoEndpoint {
		t.Errorf("got %+v", c)
	}
	for host, want := range map[string]string{"A": "a", "My_PC": "my-pc", "-x-.y": "x.y", "a..b": "a.b", "localhost": "", "localhost.localdomain": "", "localhosts": "localhosts", "": "", "日本": ""} {
		if got, err := NodeName(host); got != want || (err != nil) != (want == "") {
			t.Errorf("host %q: got %q and %v, want %q", host, got, err, want)
		}
	}
}

// Paths in a file are relative to it, others to where the program runs.
func TestPaths(t *testing.T) {
	c, err := load(ToRun, "state: lib\nregistry-ca: /x/ca.pem", []string{"WARREN_SOCKET=s"}, "--config=etc/agent.yaml", "--registry=etcds://a:1")
	if err != nil || c.State != "etc/lib" || c.RegistryCA != "/x/ca.pem" || c.Socket != "s" {
		t.Errorf("got %q, %q, %q and %v", c.State, c.RegistryCA, c.Socket, err)
	}
}

// So are those in a registry's URL.
func TestPathsInURL(t *testing.T) {
	url := "etcds://u@h:1/pre/fix?ca=pki/ca.pem&cert=/x/a+b.pem&key=k%26.pem&password-file=p&server-name=s"
	want := "etcds://u@h:1/pre/fix?ca=etc/pki/ca.pem&cert=/x/a+b.pem&key=etc/k%26.pem&password-file=etc/p&server-name=s"
	if c, err := load(ToRun, "registry: "+url, nil, "--config=etc/agent.yaml"); err != nil || c.Registry != want {
		t.Errorf("from a file: %q and %v", c.Registry, err)
	}
	if c, err := load(ToRun, "", nil, "--registry="+url); err != nil || c.Registry != url {
		t.Errorf("from a flag: %q and %v", c.Registry, err)
	}
}

// A namespace is called by its name, or has a path.
func TestNamespaces(t *testing.T) {
	for _, test := range []struct{ file, flag, want string }{
		{"netns: blue", "", "/run/netns/blue"}, {"netns: ns/blue", "", "etc/ns/blue"}, {"netns: /proc/7/ns/net", "", "/proc/7/ns/net"},
		{"", "blue", "/run/netns/blue"}, {"", "./blue", "./blue"}, {"", "/run//netns/../netns/a.b", "/run/netns/a.b"},
	} {
		args := []string{"--config=etc/agent.yaml", "--registry=memory", "--datapath=tun"}
		if test.flag != "" {
			args = append(args, "--netns="+test.flag)
		}
		if c, err := load(ToRun, test.file, nil, args...); err != nil || c.NetNS != test.want {
			t.Errorf("%+v: got %q and %v", test, c.NetNS, err)
		}
	}
}

// What holds where nobody says anything depends on the datapath, and on how it is routed.
func TestHostDefaults(t *testing.T) {
	for args, want := range map[string]string{
		"":                                 "     ",
		"--datapath=kernel":                "warren0 main main   87",
		"--datapath=auto --routing=policy": "warren0 policy 8787 32500 0x50/0xf0 87",
		"--datapath=tun --mark=1 --routing=policy --table=main --table=5": "warren0 policy 5 32500 0x1/0xffffffff 87",
	} {
		c, err := load(ToRun, "", nil, append(strings.Fields(args), "--registry=memory")...)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, name := range []string{"interface", "routing", "table", "priority", "mark", "protocol"} {
			for _, s := range Settings() {
				if s.Name == name {
					got = append(got, strings.Join(s.get(c), ","))
				}
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q: got %q, want %q", args, got, want)
		}
	}
	if c, err := load(ToClean, "", nil, "--netns=blue"); err != nil || c.Interface != "warren0" || c.Protocol != 87 || c.NetNS != "/run/netns/blue" {
		t.Errorf("to clean: got %+v and %v", c, err)
	}
}

// Whatever a value is, what is printed is read again as the same.
func TestPrintedIsRead(t *testing.T) {
	for _, s := range []string{"null", "~", "NULL", "true", "0x1", "- a", "a: b", "# a", "a #b", "<<", "\x00", "\x85", "\u2028", "\ufeff", "\ufffe", "\xff", "\x7f", "a\nb", " a ", "'", `"`, `\`, "日本", "😀", "!!binary x", "*a", "%", "x/"} {
		printed(t, s)
	}
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.OneOf(rapid.String(), rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) })).Draw(t, "text")
		printed(t, s)
	})
}

func printed(t interface {
	Helper()
	Errorf(string, ...any)
}, s string) {
	t.Helper()
	if s == "" {
		return // which no setting may be
	}
	for _, args := range [][]string{{"--state=" + s}, {"--socket=" + s}, {"--label=" + s + "=" + s}, {"--label=a=" + s}, {"--role=" + s}, {"--registry-user=" + s, "--registry-password-file=" + s}, {"--datapath=tun", "--netns=" + s}} {
		c, err := load(ToRun, "", nil, append([]string{"--registry=etcd://h:1"}, args...)...)
		if err != nil {
			continue // it may not be that
		}
		c.File = s
		var b bytes.Buffer
		if err := c.Print(&b); err != nil {
			t.Errorf("%q: %v", s, err)
		}
		d, err := load(ToRun, b.String(), nil, "--config=agent.yaml")
		if err != nil || len(c.Changed(d)) > 0 {
			t.Errorf("%q, printed and read again, %q differ: %v\n%s", args, c.Changed(d), err, b.String())
		}
	}
}

func TestErrors(t *testing.T) {
	for _, test := range []struct {
		file string
		env  string
		args string
		want string
	}{
		{file: "mesh: a\n\nanounce: 10.0.0.0/8", want: `agent.yaml:3: unknown key "anounce", did you mean "announce"?`},
		{file: "registry_ca: x", want: `agent.yaml:1: unknown key "registry_ca", did you mean "registry-ca"?`},
		{file: "colour: red", want: `agent.yaml:1: unknown key "colour"`},
		{file: "mesh: a\nmtu: 1400\nmesh: b", want: `agent.yaml:3: the key "mesh" is in line 1 already`},
		{file: "mesh: [a]", want: `agent.yaml:1: mesh is a list, where NAME belongs`},
		{file: "mesh:\n  a: b", want: `agent.yaml:2: mesh is a map, where NAME belongs`},
		{file: "mesh:", want: `agent.yaml:1: mesh has no value; write one or remove the line`},
		{file: "address: [10.0.0.1, [a]]", want: `agent.yaml:1: address has a list in its list, where ADDR belongs`},
		{file: "address:\n- 10.0.0.1\n- 10.0.0.1", want: `agent.yaml:3: address "10.0.0.1" is there twice`},
		{file: "label: x", want: `agent.yaml:1: label is the text "x", where a map of texts belongs`},
		{file: "label:\n  a: 1\n  a: 2", want: `agent.yaml:3: label has the key "a" in line 2 already`},
		{file: "- a", want: `agent.yaml:1: is a list, where settings such as "mesh: warren" belong`},
		{file: "mesh: a\n---\nmesh: b", want: `agent.yaml:2: a second document begins; a configuration is one`},
		{file: "mesh: a\n\tmtu: 5", want: `agent.yaml:2: is no YAML: found a tab character that violates indentation`},
		{file: "mtu: 100\nlisten: 7-5\nkeepalive: 25", want: `agent.yaml:2: listen "7-5" is a range that ends before it begins
agent.yaml:1: mtu "100" is neither auto nor a number from 1280 to 65535
agent.yaml:3: keepalive "25" has no unit; write 25s`},
		{args: "--config=none.yaml", want: `the configuration cannot be read: open none.yaml: file does not exist`},
		{env: "WARREN_MESH=Blue", want: `WARREN_MESH: mesh "Blue" as a name has 'B', only a-z, 0-9, '-' and '.' are allowed`},
		{args: "--address=10.0.0.1/24", want: `--address: address "10.0.0.1/24" is a prefix; an address has no length, and prefixes are for announce`},
		{args: "--address=127.0.0.1", want: `--address: address "127.0.0.1" is loopback, link-local, multicast or unspecified`},
		{args: "--announce=10.1.2.3/16", want: `--announce: announce "10.1.2.3/16" has bits beyond its length; write 10.1.0.0/16, or 10.1.2.3/32 for the one address`},
		{args: "--announce=10.1.2.3", want: `--announce: announce "10.1.2.3" has no length; for the one address write 10.1.2.3/32`},
		{args: "--announce=0.0.0.0/0", want: `announce (--announce): 0.0.0.0/0 is wider than /8 (IPv4) or /16 (IPv6), or is nothing a mesh carries; for a wide prefix, have --accept-wide=0.0.0.0/0 on every node`},
		{args: "--accept-wide=10.0.0.0/8", want: `--accept-wide: accept-wide "10.0.0.0/8" is narrow enough to be accepted anyway`},
		{args: "--endpoint=none,192.0.2.1", want: `--endpoint: endpoint "192.0.2.1" cannot stand beside none`},
		{args: "--endpoint=192.0.2.300:1", want: `--endpoint: endpoint "192.0.2.300:1" is neither an IPv4 address nor a host name`},
		{args: "--endpoint=none --keepalive=off", want: `endpoint (--endpoint) is none and keepalive (--keepalive) is off, so that this node could be reached by nobody; leave keepalive out`},
		{args: "--expose=80=:80", want: `--expose: expose "80=:80" is no service to expose: target ":80" has no host; want PORT, PORT=HOST:PORT or either with PORT/udp, such as 8080=127.0.0.1:80`},
		{args: "--expose=80=a:1,80/tcp=b:2", want: `--expose: expose "80/tcp=b:2" has tcp port 80, which goes to a:1 already`},
		{args: "--socks5=1080", want: `--socks5: socks5 "1080" is not ADDR:PORT`},
		{args: "--registry=consul://x", want: `--registry: registry "consul://x" has the scheme "consul", which is none of etcd, etcds; or write memory`},
		{args: "--registry=http:x", want: `--registry: registry "http:REDACTED" is no URL; write etcd://HOST:PORT, etcds://HOST:PORT, or memory`},
		{args: "--registry=etcd://u:secret@h:1 --registry-user=u --registry-password-file=p", want: `registry-user (--registry-user) is given, and registry (--registry) names a user as well: etcd://u:REDACTED@h:1; keep one of them`},
		{env: "WARREN_REGISTRY_CA=ca.pem", args: "--registry=etcd://h:1", want: `registry-ca (WARREN_REGISTRY_CA) is for TLS, and registry (--registry) is etcd://h:1; write etcds:// for a registry with TLS`},
		{file: "registry-cert: c", args: "--registry=etcds://h:1", want: `registry-cert (agent.yaml:1) is given without registry-key; both are needed`},
		{args: "--registry-user=u --registry-password-file=p", want: `registry-user (--registry-user) means nothing, as registry (--registry) is memory
registry-password-file (--registry-password-file) means nothing, as registry (--registry) is memory`},
		{args: "--log-level=loud", want: `--log-level: log-level "loud" is none of debug, info, warn, error`},
		{args: "--label=a", want: `--label: label "a" is not KEY=VALUE`},
		{args: "--role=", want: `--role: role "" is empty`},
		{args: "--datapath=wg", want: `--datapath: datapath "wg" is none of netstack, kernel, tun, auto`},
		{args: "--guard=10.0.0.0/8,::/0 --netns=blue --mark=7", want: `netns (--netns) "/run/netns/blue" is about a network interface of the host, and datapath (default) is netstack, which has none; leave it out, or say --datapath kernel, tun or auto
mark (--mark) "0x7/0xffffffff" is about a network interface of the host, and datapath (default) is netstack, which has none; leave it out, or say --datapath kernel, tun or auto
guard (--guard) "10.0.0.0/8" is about a network interface of the host, and datapath (default) is netstack, which has none; leave it out, or say --datapath kernel, tun or auto`},
		{args: "--datapath=tun --routing=static", want: `--routing: routing "static" is none of main, policy`},
		{file: "datapath: auto\nrouting: main\npriority: 100\nmark: 0x50/0xf0\nguard: [0.0.0.0/0]", want: `priority (agent.yaml:3) "100" is for policy routing, and routing (agent.yaml:2) is main; leave it out, or say --routing policy
mark (agent.yaml:4) "0x50/0xf0" is for policy routing, and routing (agent.yaml:2) is main; leave it out, or say --routing policy
guard (agent.yaml:5) "0.0.0.0/0" is for policy routing, and routing (agent.yaml:2) is main; leave it out, or say --routing policy`},
		{args: "--datapath=tun --routing=policy --table=254", want: `table (--table) is main, in which encrypted packets are looked up too, and routing (--routing) is policy; leave it out for 8787, or name another one`},
		{args: "--datapath=kernel --underlay-netns=red", want: `underlay-netns (--underlay-netns) "/run/netns/red" is not for the kernel datapath, as Linux has WireGuard's sockets where it made the interface; leave it out, or say --datapath tun`},
		{args: "--datapath=tun --netns=..", want: `--netns: netns ".." means a folder`},
		{args: "--datapath=tun --forward=yes", want: `--forward: forward "yes" is none of on, off`},
		{args: "--datapath=tun --snat=10.1.2.3/16", want: `--snat: snat "10.1.2.3/16" has bits beyond its length; write 10.1.0.0/16, or 10.1.2.3/32 for the one address`},
		{args: "--datapath=tun --snat=10.0.0.0/8,10.0.0.0/8", want: `--snat: snat "10.0.0.0/8" is there twice`},
		{args: "--datapath=tun --routing=policy --priority=32764", want: `--priority: priority "32764" is no number from 1 to 32763`},
		{args: "--datapath=tun --protocol=4", want: `--protocol: protocol "4" is no number from 5 to 255`},
		{args: "--datapath=tun --mark=0x50/0x0f", want: `--mark: mark "0x50/0x0f" has a bit that its mask has not, 0x50`},
		{args: "--datapath=tun --mark=0/0xf0", want: `--mark: mark "0/0xf0" is no mark: at least one bit has to be set`},
		{args: "--datapath=tun --mark=80/", want: `--mark: mark "80/" has "" where a number up to 0xffffffff belongs, such as 0x50 or 80`},
		{args: "--datapath=tun --mark=0x100000000", want: `--mark: mark "0x100000000" has "0x100000000" where a number up to 0xffffffff belongs, such as 0x50 or 80`},
	} {
		var environ []string
		if test.env != "" {
			environ = []string{test.env}
		}
		args := strings.Fields(test.args)
		if test.file != "" {
			args = append(args, "--config=agent.yaml")
		}
		if !strings.Contains(test.args, "--registry=") {
			args = append(args, "--registry=memory")
		}
		_, err := load(ToRun, test.file, environ, args...)
		if !errors.Is(err, ErrConfig) {
			t.Errorf("%q %q %q: got %v, which is not ErrConfig", test.file, test.env, test.args, err)
			continue
		}
		if got := err.Error(); got != test.want {
			t.Errorf("%q %q %q:\ngot  %s\nwant %s", test.file, test.env, test.args, got, test.want)
		}
	}
	if _, err := load(ToRun, "", nil); err == nil || !strings.Contains(err.Error(), "no registry is given") {
		t.Errorf("without a registry: got %v", err)
	}
	if _, err := load(ToFind, "registry: nonsense\nmtu: 5", nil, "--config=agent.yaml"); err != nil {
		t.Errorf("what a command has no use for is its concern: %v", err)
	}
}

// What is no configuration at all is not quoted at length.
func TestNoConfiguration(t *testing.T) {
	for _, text := range []string{strings.Repeat("x", 1<<19) + ": 1", strings.Repeat("? [a]\n: b\n", 1000), strings.Repeat("{", 10_000), strings.Repeat("a: b\n", 10_000), strings.Repeat(" ", 2<<20)} {
		_, problems := parse("agent.yaml", []byte(text))
		if n := len(strings.Join(problems, "\n")); len(problems) == 0 || len(problems) > most+1 || n > 4000 {
			t.Errorf("%.10q...: %d problems in %d bytes", text, len(problems), n)
		}
	}
}

// A password is never printed, be the configuration good or bad.
func TestRedacted(t *testing.T) {
	for _, url := range []string{"etcd://u:hunter2@h:1,i:2/p", "etcds://u:hun:ter2:hunter2@h:1"} {
		c, err := load(ToRun, "", nil, "--registry="+url)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		if err := c.Print(&b); err != nil || strings.Contains(b.String(), "hunter2") || !strings.Contains(b.String(), "u:REDACTED@h:1") {
			t.Errorf("%v, printed:\n%s", err, b.String())
		}
		if _, err := load(ToRun, "", nil, "--registry-user=x", "--registry="+url); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("got %v", err)
		}
	}
	for _, url := range []string{"consul://u:hunter2@h", "etcd://u:a@hunter2@h:1:2", "etcd://u:hun/hunter2@h:1", "etcd://u:hunter2@h", "u:hunter2@h:1", "etcd://u:hunter2?@h:1#"} {
		if _, err := load(ToRun, "", nil, "--registry="+url); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: got %v", url, err)
		}
	}
}

func TestRedactURL(t *testing.T) {
	for url, want := range map[string]string{
		"memory": "memory", "etcd://h:1,i:2/p?timeout=1s": "etcd://h:1,i:2/p?timeout=1s", "etcd://u@h:1": "etcd://u@h:1",
		"etcd://u:p@h:1/a@b": "etcd://u:REDACTED@h:1/a@b", "etcd://[::1]:1/p": "etcd://[::1]:1/p", "etcd://[::1]:x": "etcd://[::1]:REDACTED",
		"etcd://warren:hun/ter2": "etcd://warren:REDACTED", "etcd://127.0.0.1:1?password=hunter2": "etcd://127.0.0.1:1?password=REDACTED",
		"etcd://127.0.0.1:1?timeout=1s&password=hun&ca=ter2": "etcd://127.0.0.1:1?timeout=1s&password=REDACTED", "etcd://h:1?hunter2": "etcd://h:1?REDACTED",
		"etcd://h:1,warren:hunter2": "etcd://h:1,warren:REDACTED", "etcd://:hunter2@h": "etcd://:REDACTED@h", "consul://h": "consul://h", "h:1": "h:1", "u:x": "u:REDACTED",
		"etcd://u:1@h:x@y": "etcd://u:REDACTED@y", "etcd://u/x:hunter2@h": "etcd://u:REDACTED@h", "[hunter2]:x": "[hunter2]:REDACTED", "etcd://[::1]hunter2": "etcd://[::1]:REDACTED",
	} {
		if got := redactURL(url); got != want {
			t.Errorf("%s: got %s, want %s", url, got, want)
		}
	}
}

// Wherever a URL has its password, or what was meant to be one, it is not in what is printed.
func FuzzRedactURL(f *testing.F) {
	f.Add("hun", "/", "ter2", 0)
	f.Add("hun", "@", "ter2", 1)
	f.Add("hun", "?timeout=", "ter2", 2)
	f.Add("hun", "&", "ter2", 3)
	f.Add("hun", "://", "ter2", 4)
	f.Add("hun", ",", "ter2", 5)
	f.Fuzz(func(t *testing.T, a, between, b string, form int) {
		forms := []string{"etcd://warren:%s", "etcd://warren:%s@h:1", "etcd://warren:%s@h:1/p?ca=x", "etcd://127.0.0.1:1?password=%s", "etcd://h:1,i:2/p?timeout=1s&pass=%s", "warren:%s@h", "etcds://u@x:%s@[::1]:1", "etcd://:%s@h"}
		// A secret that is in the output anyway cannot be looked for, and a port is one.
		secret := "s3" + strings.Trim(a, "0123456789") + between + b + "cret"
		url := fmt.Sprintf(forms[uint(form)%uint(len(forms))], secret)
		if got := redactURL(url); strings.Contains(got, secret) {
			t.Errorf("%q is printed as %q", url, got)
		}
		_, err := load(ToRun, "", nil, "--registry="+url)
		if err == nil {
			return
		}
		if strings.Contains(err.Error(), secret) || strings.Contains(err.Error(), fmt.Sprintf("%q", secret)) {
			t.Errorf("%q is refused with %v", url, err)
		}
	})
}

func TestMisspeltVariables(t *testing.T) {
	c, err := load(ToRun, "", []string{"WARREN_ANOUNCE=10.0.0.0/8", "WARREN_PORT_80_TCP=x", "WARREN_MESH=m"}, "--registry=memory")
	if err != nil || !slices.Equal(c.Misspelt(), []string{"WARREN_ANOUNCE is set and means nothing, did you mean WARREN_ANNOUNCE?"}) {
		t.Errorf("got %q and %v", c.Misspelt(), err)
	}
}

func TestEndpoint(t *testing.T) {
	for s, want := range map[string]string{
		"192.0.2.1": "192.0.2.1:0", "192.0.2.1:7": "192.0.2.1:7", "192.0.2.1:0": "192.0.2.1:0", "2001:db8::1": "[2001:db8::1]:0",
		"[2001:db8::1]": "[2001:db8::1]:0", "[2001:db8::1]:7": "[2001:db8::1]:7", "[2001:db8::1]:0": "[2001:db8::1]:0", "VPN.example.org": "vpn.example.org:0",
		"vpn.example.org:51820": "vpn.example.org:51820", "::ffff:192.0.2.1": "192.0.2.1:0",
		"": "", "a:b": "", "a:99999": "", "0.0.0.0": "", "[::]:5": "", "a_b:5": "", "192.0.2.1:": "",
	} {
		e, err := ParseEndpoint(s)
		if (err != nil) != (want == "") || err == nil && e.String() != want {
			t.Errorf("%q: got %v and %v, want %q", s, e, err, want)
		}
	}
}

// Whatever a file says, each thing that is wrong is said with file and line, in one line of text.
func FuzzFile(f *testing.F) {
	f.Add("mesh: a\nanounce: [b]")
	f.Add("label: {a: b, a: c, ? [x] : y}\naddress: &x [*x, 10.0.0.1]\n")
	f.Add("address: &a 10.0.0.1\nannounce: *a\n<<: {mesh: b}\n--- \nx")
	f.Add("registry: \"etcd://u:p@h\"\nexpose:\n  - 80=a:1\n  - 80/udp=a:1\nmtu: !!int 1400")
	f.Add("mesh: ~\n\tx")
	f.Add("datapath: tun\nrouting: policy\nmark: 0x50/0xf0\npriority: 7\nguard: [0.0.0.0/0, \"::/0\"]\nnetns: blue\nunderlay-netns: ./red\nsnat: [10.0.0.0/8]\nforward: on\nprotocol: 88\n")
	f.Add("datapath: auto\nrouting: main\ntable: 253\nmark: 7/8\nnetns: \"/\"\n")
	f.Fuzz(func(t *testing.T, text string) {
		values, problems := parse("agent.yaml", []byte(text))
		for _, p := range problems {
			if !strings.HasPrefix(p, "agent.yaml:") {
				t.Errorf("%q: no line is named", p)
			}
		}
		for name, vs := range values {
			if !slices.ContainsFunc(Settings(), func(s Setting) bool { return s.Name == name }) || len(vs) == 0 {
				t.Errorf("%q is no setting, or has no value", name)
			}
		}
		c, err := load(ToRun, text, nil, "--config=agent.yaml", "--registry=memory")
		if (err == nil) && len(problems) > 0 {
			t.Errorf("problems are lost: %q", problems)
		}
		if err != nil {
			return
		}
		var b bytes.Buffer
		if err := c.Print(&b); err != nil {
			t.Fatal(err)
		}
		d, err := load(ToRun, b.String(), nil, "--config=agent.yaml")
		if err != nil || len(c.Changed(d)) > 0 {
			t.Errorf("printed and read again, %q differ: %v\n%s", c.Changed(d), err, b.String())
		}
	})
}
