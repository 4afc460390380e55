package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/examples/agent/internal/expose"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
	"github.com/warren-mesh/warren/prefixes"
)

// Kind is how many values a setting has.
type Kind int

// The kinds of settings.
const (
	One   Kind = iota // a value; of a flag that is given again, the last
	List              // values: the flag again or commas, commas in the environment, a list in the file
	Pairs             // KEY=VALUE: the flag again, commas in the environment, a map in the file
)

// Use is which commands have a setting.
type Use int

// The uses of settings.
const (
	ToFind     Use = iota // a running agent: all commands
	ToRegister            // what is in the registry: leave and forget, too
	ToClean               // what is on the host: cleanup, too
	ToRun                 // only run and config
)

// has returns whether commands of this use have settings of another.
func (u Use) has(of Use) bool { return of == ToFind || of == u || u == ToRun }

// Setting is one thing that an agent can be told.
type Setting struct {
	Name    string // of the flag and in the file; see Variable
	Value   string // what a value looks like, in the help
	Kind    Kind
	Use     Use
	Host    bool   // about a network interface of the host, which netstack has not
	Default string // what holds where nothing is set, in words or as a value; "" is nothing
	Usage   string // one line for --help
	Reload  bool   // a running agent takes up a change at SIGHUP
	Example string // a value that is right

	rebase func(s, dir string) string // has the paths in a value of the file be relative to its folder; nil: there are none
	set    func(*Config, string) error
	get    func(Config) []string
	redact func(string) string
}

// Variable returns the name of s in the environment.
func (s Setting) Variable() string { return Variable(s.Name) }

// Variable returns what a flag is called in the environment.
func Variable(flag string) string {
	return "WARREN_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Settings returns the table, in the order in which help shows it.
func Settings() []Setting {
	return []Setting{
		{
			Name: "state", Value: "DIR", Use: ToFind, Example: "/var/lib/warren", rebase: rebase,
			Default: "/var/lib/warren for root, else a folder of the user",
			Usage:   "folder of the node's key, starts, snapshot and socket; one process at a time has it",
			set:     func(c *Config, s string) error { c.State = filepath.Clean(s); return nil },
			get:     func(c Config) []string { return one(c.State) },
		},
		{
			Name: "socket", Value: "PATH", Use: ToFind, Example: "/run/warren.sock", rebase: rebase,
			Default: "agent.sock in the state folder",
			Usage:   "socket through which the other commands reach a running agent",
			set:     func(c *Config, s string) error { c.Socket = filepath.Clean(s); return nil },
			get:     func(c Config) []string { return one(c.Socket) },
		},
		{
			Name: "mesh", Value: "NAME", Use: ToRegister, Example: "warren", Default: "warren",
			Usage: "name of the mesh; meshes of different names share nothing, be it in one registry",
			set:   setName(func(c *Config) *string { return &c.Mesh }),
			get:   func(c Config) []string { return one(c.Mesh) },
		},
		{
			Name: "node", Value: "NAME", Use: ToRegister, Example: "alpha",
			Default: "the node that the state folder belongs to, else the name of the host",
			Usage:   "ID of this node, one per node of the mesh",
			set:     setName(func(c *Config) *string { return &c.Node }),
			get:     func(c Config) []string { return one(c.Node) },
		},
		{
			Name: "registry", Value: "URL", Use: ToRegister, Example: "etcd://192.0.2.1:2379,192.0.2.2:2379", Reload: true,
			Usage: "where nodes find each other: etcd://HOST:PORT[,HOST:PORT...][/PREFIX], etcds:// with TLS, or memory for a mesh of this node alone (prefix: /warren/MESH/)",
			set:   setRegistry, get: func(c Config) []string { return one(c.Registry) }, redact: redactURL, rebase: rebaseURL,
		},
		{
			Name: "registry-ca", Value: "FILE", Use: ToRegister, Example: "ca.pem", Default: "what the system trusts", rebase: rebase, Reload: true,
			Usage: "certificates, in PEM, of whom the registry's certificate must be from (etcds)",
			set:   setPath(func(c *Config) *string { return &c.RegistryCA }), get: func(c Config) []string { return one(c.RegistryCA) },
		},
		{
			Name: "registry-cert", Value: "FILE", Use: ToRegister, Example: "node.pem", rebase: rebase, Reload: true,
			Usage: "this node's certificate for the registry, in PEM; with registry-key (etcds)",
			set:   setPath(func(c *Config) *string { return &c.RegistryCert }), get: func(c Config) []string { return one(c.RegistryCert) },
		},
		{
			Name: "registry-key", Value: "FILE", Use: ToRegister, Example: "node-key.pem", rebase: rebase, Reload: true,
			Usage: "key of registry-cert, in PEM",
			set:   setPath(func(c *Config) *string { return &c.RegistryKey }), get: func(c Config) []string { return one(c.RegistryKey) },
		},
		{
			Name: "registry-user", Value: "NAME", Use: ToRegister, Example: "warren", Reload: true,
			Usage: "user of the registry; with registry-password-file",
			set:   func(c *Config, s string) error { c.RegistryUser = s; return nil },
			get:   func(c Config) []string { return one(c.RegistryUser) },
		},
		{
			Name: "registry-password-file", Value: "FILE", Use: ToRegister, Example: "password", rebase: rebase, Reload: true,
			Usage: "file with the password of registry-user",
			set:   setPath(func(c *Config) *string { return &c.RegistryPasswordFile }), get: func(c Config) []string { return one(c.RegistryPasswordFile) },
		},
		{
			Name: "datapath", Value: "NAME", Use: ToRun, Example: "netstack", Default: "netstack",
			Usage: "what carries the packets: netstack, this process, which takes no privilege; kernel, WireGuard of the Linux kernel, or tun, this process on a network interface, both for the whole host, with CAP_NET_ADMIN; auto, the best of kernel, tun and netstack that works here",
			set:   setWord(Datapaths, func(c *Config) *string { return &c.Datapath }), get: func(c Config) []string { return one(c.Datapath) },
		},
		{
			Name: "interface", Value: "NAME", Use: ToClean, Host: true, Example: "warren0", Default: kernel.DefaultInterface,
			Usage: "network interface of the mesh, of at most 15 bytes",
			set:   setInterface, get: func(c Config) []string { return one(c.Interface) },
		},
		{
			Name: "netns", Value: "NAMESPACE", Use: ToClean, Host: true, Example: "blue", Default: "that of the agent", rebase: rebaseNamespace,
			Usage: "network namespace of the interface, and of the programs that use the mesh by it: a name below /run/netns, or a path; it takes CAP_SYS_ADMIN",
			set:   setNamespace(func(c *Config) *string { return &c.NetNS }), get: func(c Config) []string { return one(c.NetNS) },
		},
		{
			Name: "underlay-netns", Value: "NAMESPACE", Use: ToRun, Host: true, Example: "red", Default: "that of the interface", rebase: rebaseNamespace,
			Usage: "network namespace of the UDP sockets, by which others reach this node, where it is another one than the interface's; only tun can do that",
			set:   setNamespace(func(c *Config) *string { return &c.UnderlayNetNS }), get: func(c Config) []string { return one(c.UnderlayNetNS) },
		},
		{
			Name: "routing", Value: "HOW", Use: ToRun, Host: true, Example: "policy", Default: "main",
			Usage: "how packets come to the mesh's routes: main, as to any other; policy, by rules and a table of the mesh's own, in which its encrypted packets are never looked up, so that a prefix may contain endpoints of nodes, and a default route may lead into the mesh",
			set:   setWord(Routings, func(c *Config) *string { return &c.Routing }), get: func(c Config) []string { return one(c.Routing) },
		},
		{
			Name: "table", Value: "TABLE", Use: ToRun, Host: true, Example: "100", Default: fmt.Sprintf("main, or %d with --routing policy", policyTable),
			Usage: "routing table of the mesh's routes, main or a number; in another than main, packets are looked up by --routing policy, or by rules of yours",
			set:   setTable, get: getTable,
		},
		{
			Name: "priority", Value: "PRIORITY", Use: ToRun, Host: true, Example: "1000", Default: strconv.Itoa(defaultPriority),
			Usage: "priority of the first of the three rules of --routing policy, 1 to 32763; the others have the next two",
			set:   setPriority, get: func(c Config) []string { return one(orWord(c.Priority, "")) },
		},
		{
			Name: "mark", Value: "MARK[/MASK]", Use: ToRun, Host: true, Example: "0x10/0x10", Default: formatMark(defaultMark, defaultMask),
			Usage: "firewall mark of encrypted packets with --routing policy, and which of its bits count (all); nobody else may use these, and all meshes of a host do well to have the same",
			set:   setMark, get: getMark,
		},
		{
			Name: "guard", Value: "PREFIX", Kind: List, Use: ToRun, Host: true, Example: "0.0.0.0/0",
			Usage: "prefix to which packets may leave by way of the mesh only, with --routing policy: it is unreachable while there is no way through the mesh, and after the agent's end too, until \"agent cleanup\"",
			set:   setPrefix(func(c *Config) *[]netip.Prefix { return &c.Guard }), get: func(c Config) []string { return texts(c.Guard) },
		},
		{
			Name: "metric", Value: "METRIC", Use: ToRun, Host: true, Example: "60", Default: strconv.Itoa(defaultMetric),
			Usage: "metric of the mesh's routes; the lowest of several to one prefix counts",
			set:   setMetric, get: func(c Config) []string { return one(orWord(c.Metric, "")) },
		},
		{
			Name: "protocol", Value: "NUMBER", Use: ToClean, Host: true, Example: "88", Default: strconv.Itoa(DefaultProtocol),
			Usage: "routing protocol, 5 to 255, that marks what is this agent's; two agents in one namespace need two with --routing policy or --source loopback",
			set:   setProtocol, get: func(c Config) []string { return one(orWord(c.Protocol, "")) },
		},
		{
			Name: "source", Value: "WHERE", Use: ToRun, Host: true, Example: "device", Default: "hint",
			Usage: "where this node's addresses are: hint, on the interface, and routes say which to send from; device, on the interface, and the kernel chooses; loopback, on lo, and routes say",
			set:   setWord(Sources, func(c *Config) *string { return &c.Source }), get: func(c Config) []string { return one(c.Source) },
		},
		{
			Name: "snat", Value: "PREFIX", Kind: List, Use: ToRun, Host: true, Example: "10.90.1.0/24",
			Usage: "network behind this node: packets that come out of the mesh and go there get this host's address as source, so that it needs no way back",
			set:   setPrefix(func(c *Config) *[]netip.Prefix { return &c.SNAT }), get: func(c Config) []string { return texts(c.SNAT) },
		},
		{
			Name: "forward", Value: "SWITCH", Use: ToRun, Host: true, Example: "on", Default: "off",
			Usage: "on has the host forward packets, for networks behind this node, until it leaves the mesh; off leaves that as the host has it",
			set:   setWord(Switches, func(c *Config) *string { return &c.Forward }), get: func(c Config) []string { return one(c.Forward) },
		},
		{
			Name: "address", Value: "ADDR", Kind: List, Use: ToRun, Example: "10.80.0.1",
			Default: "a unique local IPv6 address that follows from mesh and node",
			Usage:   "address of this node in the mesh",
			set:     setAddress, get: func(c Config) []string { return texts(c.Address) },
		},
		{
			Name: "announce", Value: "PREFIX", Kind: List, Use: ToRun, Example: "10.90.1.0/24",
			Usage: "prefix that the mesh can reach through this node",
			set:   setPrefix(func(c *Config) *[]netip.Prefix { return &c.Announce }), get: func(c Config) []string { return texts(c.Announce) },
		},
		{
			Name: "endpoint", Value: "HOST[:PORT]", Kind: List, Use: ToRun, Example: "vpn.example.org:51820",
			Default: "the host's addresses, as they come and go",
			Usage:   "where others reach this node, the best first: an address or a host name; without a port or with 0, the device's real one; none if nobody can call this node",
			set:     setEndpoint, get: getEndpoint,
		},
		{
			Name: "listen", Value: "PORT[-PORT]", Use: ToRun, Example: "51820-51829", Default: "any",
			Usage: "UDP port of the device, or a range of which the first free one is taken",
			set:   setListen, get: func(c Config) []string { return one(c.Listen.String()) },
		},
		{
			Name: "mtu", Value: "BYTES", Use: ToRun, Example: "1380", Default: "auto",
			Usage: "largest packet inside the mesh, 1280 to 65535",
			set:   setMTU, get: func(c Config) []string { return one(orWord(c.MTU, "auto")) },
		},
		{
			Name: "keepalive", Value: "DURATION", Use: ToRun, Example: "25s", Default: "auto",
			Usage: "how often an idle peer is sent an empty packet, or off; auto is 25s for a node without endpoints, else off",
			set:   setKeepalive, get: getKeepalive,
		},
		{
			Name: "role", Value: "NAME", Kind: List, Use: ToRun, Example: "gateway",
			Usage: "role of this node, published in its record",
			set: func(c *Config, s string) error {
				if err := check(record.Record{Roles: []string{s}}); err != nil {
					return err
				}
				c.Role = append(c.Role, s)
				return nil
			},
			get: func(c Config) []string { return slices.Clone(c.Role) },
		},
		{
			Name: "label", Value: "KEY=VALUE", Kind: Pairs, Use: ToRun, Example: "zone=west",
			Usage: "label of this node, published in its record",
			set:   setLabel, get: getLabel,
		},
		{
			Name: "accept-wide", Value: "PREFIX", Kind: List, Use: ToRun, Example: "0.0.0.0/0",
			Usage: "prefix wider than /8 (IPv4) or /16 (IPv6) that any node may announce, a default route say; it has to be the same on every node",
			set:   setAcceptWide, get: func(c Config) []string { return texts(c.AcceptWide) },
		},
		{
			Name: "socks5", Value: "ADDR:PORT", Use: ToRun, Example: "127.0.0.1:1080",
			Usage: "where to be a SOCKS5 proxy into the mesh, for TCP and UDP; whoever reaches it may use it",
			set:   setSocks5, get: func(c Config) []string { return one(c.Socks5) },
		},
		{
			Name: "expose", Value: "PORT=HOST:PORT", Kind: List, Use: ToRun, Example: "80=127.0.0.1:8080",
			Usage: "service that the mesh reaches at this node's addresses and the first port; PORT/udp=HOST:PORT for UDP",
			set:   setExpose, get: func(c Config) []string { return texts(c.Expose) },
		},
		{
			Name: "log-level", Value: "LEVEL", Use: ToRun, Example: "info", Default: "info", Reload: true,
			Usage: "least of what is logged: debug, info, warn or error",
			set: func(c *Config, s string) error {
				if !slices.Contains([]string{"debug", "info", "warn", "error"}, s) {
					return errors.New("is none of debug, info, warn, error")
				}
				return c.LogLevel.UnmarshalText([]byte(s))
			},
			get: func(c Config) []string { return one(strings.ToLower(c.LogLevel.String())) },
		},
		{
			Name: "log-format", Value: "FORMAT", Use: ToRun, Example: "text", Default: "text",
			Usage: "how is logged, to standard error: text or json",
			set: func(c *Config, s string) error {
				if s != "text" && s != "json" {
					return errors.New("is neither text nor json")
				}
				c.LogFormat = s
				return nil
			},
			get: func(c Config) []string { return one(c.LogFormat) },
		},
	}
}

// Datapaths are the names that the setting datapath takes.
func Datapaths() []string { return []string{"netstack", "kernel", "tun", "auto"} }

// HostDatapaths are those that have, or may have, an interface of the host.
func HostDatapaths() []string { return []string{"kernel", "tun", "auto"} }

// Routings are the words that the setting routing takes.
func Routings() []string { return []string{"main", "policy"} }

// Sources are the words that the setting source takes.
func Sources() []string { return []string{"hint", "device", "loopback"} }

// Switches are the words that the setting forward takes.
func Switches() []string { return []string{"on", "off"} }

// What the zero Options of the host's datapaths stand for. The mark and table are those with policy routing.
const (
	mainTable       = 254
	policyTable     = 8787
	defaultPriority = 32500
	defaultMark     = 0x50
	defaultMask     = 0xf0
	defaultMetric   = 50
)

// DefaultProtocol is the setting protocol where nobody says anything.
const DefaultProtocol = 87

// RegistrySchemes are what the setting registry begins with. Memory has nothing after it.
func RegistrySchemes() []string { return []string{"etcd", "etcds", "memory"} }

func one(s string) []string {
	if s == "" {
		return nil
	}
	return []string{s}
}

func texts[T fmt.Stringer](vs []T) []string {
	var out []string
	for _, v := range vs {
		out = append(out, v.String())
	}
	return out
}

func orWord(n int, zero string) string {
	if n == 0 {
		return zero
	}
	return strconv.Itoa(n)
}

func setPath(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, s string) error { *field(c) = filepath.Clean(s); return nil }
}

func setName(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, s string) error {
		if err := registry.CheckName(s); err != nil {
			reason := err.Error()
			if e, ok := errors.AsType[*registry.IDError](err); ok {
				reason = e.Reason
			}
			return errors.New(reason)
		}
		*field(c) = s
		return nil
	}
}

func setRegistry(c *Config, s string) error {
	scheme, _, ok := cutScheme(s)
	switch {
	case s == "memory":
	case !ok:
		return errors.New("is no URL; write etcd://HOST:PORT, etcds://HOST:PORT, or memory")
	case scheme != "etcd" && scheme != "etcds":
		return fmt.Errorf("has the scheme %q, which is none of etcd, etcds; or write memory", scheme)
	default:
		if _, err := etcd.ParseURL(s); err != nil {
			return fmt.Errorf("cannot be used: %w", err)
		}
	}
	c.Registry = s
	return nil
}

// redactURL hides a password in what may be a registry's URL, or was meant to be one. Of what is no URL of a
// registry, no more is shown than cannot be one.
func redactURL(s string) string {
	if s == "memory" {
		return s
	}
	scheme, rest, ok := cutScheme(s)
	if ok {
		scheme += "://"
	}
	if _, err := etcd.ParseURL(s); err == nil {
		return scheme + redactUser(rest)
	}
	// The last '@' is what ends a password at the latest, wherever the one who wrote it took that to be.
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		user, hosts := rest[:at], rest[at+1:]
		if end := strings.IndexAny(user, ":/?#@"); end >= 0 {
			user = user[:end] + ":" + redacted
		}
		return scheme + user + "@" + redactHosts(hosts)
	}
	return scheme + redactHosts(rest)
}

const redacted = "REDACTED"

// cutScheme takes SCHEME://REST apart. What has no scheme is all rest.
func cutScheme(s string) (scheme, rest string, ok bool) {
	scheme, rest, ok = strings.Cut(s, "://")
	if !ok || scheme == "" || strings.Trim(scheme, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.") != "" { // RFC 3986, section 3.1
		return "", s, false
	}
	return scheme, rest, true
}

// redactUser hides the password of a URL, but for its scheme, that can be read.
func redactUser(s string) string {
	authority := s
	if end := strings.IndexAny(s, "/?"); end >= 0 {
		authority = s[:end]
	}
	at := strings.LastIndexByte(authority, '@')
	if at < 0 {
		return s
	}
	user, _, has := strings.Cut(authority[:at], ":")
	if !has {
		return s
	}
	return user + ":" + redacted + s[at:]
}

// redactHosts hides what may be a password in HOST:PORT,HOST:PORT/PREFIX?QUERY: whatever follows a ':' and
// is no port, and in the query from the first parameter on that a registry does not know.
func redactHosts(s string) string {
	end := len(s)
	if i := strings.IndexAny(s, "/?#"); i >= 0 {
		end = i
	}
	n := 0 // bytes of hosts
	for host := range strings.SplitSeq(s[:end], ",") {
		name, port, has := cutPort(host)
		if has && !isPort(port) {
			return s[:n] + name + ":" + redacted
		}
		n += len(host) + 1
	}
	before, query, has := strings.Cut(s, "?")
	if !has {
		return s
	}
	var shown []string
	for kv := range strings.SplitSeq(query, "&") {
		k, _, has := strings.Cut(kv, "=")
		if slices.Contains(urlParameters, k) {
			shown = append(shown, kv)
			continue
		}
		if has {
			k += "="
		} else {
			k = ""
		}
		shown = append(shown, k+redacted)
		break
	}
	return before + "?" + strings.Join(shown, "&")
}

// cutPort takes HOST:PORT apart, of which HOST may be an IPv6 address in brackets.
func cutPort(s string) (host, port string, has bool) {
	if i := strings.IndexByte(s, ']'); i >= 0 && strings.HasPrefix(s, "[") {
		if _, err := netip.ParseAddr(s[1:i]); err == nil {
			port, has = strings.CutPrefix(s[i+1:], ":")
			return s[:i+1], port, has || port != ""
		}
	}
	return strings.Cut(s, ":")
}

func isPort(s string) bool {
	_, err := parsePort(s)
	return err == nil
}

// The parameters of a registry's URL.
var (
	urlFiles      = []string{"ca", "cert", "key", "password-file"} // paths, in the file relative to its folder
	urlParameters = append([]string{"server-name", "timeout"}, urlFiles...)
)

// rebaseURL has the paths in a registry's URL be relative to dir.
func rebaseURL(s, dir string) string {
	if _, err := etcd.ParseURL(s); err != nil {
		return s
	}
	before, query, has := strings.Cut(s, "?")
	if !has {
		return s
	}
	parts := strings.Split(query, "&")
	for i, kv := range parts {
		k, v, _ := strings.Cut(kv, "=")
		path, err := url.QueryUnescape(v)
		if err == nil && slices.Contains(urlFiles, k) {
			parts[i] = k + "=" + strings.ReplaceAll(url.QueryEscape(rebase(path, dir)), "%2F", "/")
		}
	}
	return before + "?" + strings.Join(parts, "&")
}

// rebase has a path be relative to dir.
func rebase(path, dir string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}

// RedactURL returns a registry's URL without the password it may have.
func RedactURL(s string) string { return redactURL(s) }

// setWord takes one of a few words.
func setWord(words func() []string, field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, s string) error {
		if !slices.Contains(words(), s) {
			return fmt.Errorf("is none of %s", strings.Join(words(), ", "))
		}
		*field(c) = s
		return nil
	}
}

// setInterface takes what Linux does. A name that is too long is not cut: two would be one.
func setInterface(c *Config, s string) error {
	switch {
	case len(s) > 15:
		return fmt.Errorf("has %d bytes, and Linux takes 15", len(s))
	case s == "." || s == "..":
		return errors.New("means a folder")
	case s == "all" || s == "default" || s == "lo":
		return errors.New("means something else to Linux")
	case !utf8.ValidString(s):
		return errors.New("is not UTF-8")
	}
	for _, r := range s {
		if r <= ' ' || r == 0x7f || strings.ContainsRune("/:%\u00a0\u0085", r) {
			return fmt.Errorf("has %q in it, which no interface's name may have", r)
		}
	}
	c.Interface = s
	return nil
}

func setTable(c *Config, s string) error {
	if s == "main" {
		c.Table = mainTable
		return nil
	}
	n, err := strconv.ParseUint(s, 10, 32)
	switch {
	case err != nil || n == 0 || int(n) < 0:
		return errors.New("is neither main nor a number from 1 to 4294967295")
	case n == 253 || n == 255:
		return errors.New("is a table that Linux keeps for itself")
	}
	c.Table = int(n)
	return nil
}

func getTable(c Config) []string {
	if c.Table == mainTable {
		return []string{"main"}
	}
	return one(orWord(c.Table, ""))
}

// setNumber takes a number from first to last.
func setNumber(c *int, s string, first, last uint32) error {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n < uint64(first) || n > uint64(last) || int(n) < 0 {
		return fmt.Errorf("is no number from %d to %d", first, last)
	}
	*c = int(n)
	return nil
}

func setPriority(c *Config, s string) error { return setNumber(&c.Priority, s, 1, 32763) }
func setProtocol(c *Config, s string) error { return setNumber(&c.Protocol, s, 5, 255) }

// setMetric leaves room for the metrics that the datapaths have for themselves.
func setMetric(c *Config, s string) error { return setNumber(&c.Metric, s, 1, 1<<32-4) }

func setMark(c *Config, s string) error {
	m, mask, has := strings.Cut(s, "/")
	mark, err := parseBits(m)
	bits := ^uint32(0)
	if has && err == nil {
		bits, err = parseBits(mask)
	}
	switch {
	case err != nil:
		return err
	case mark == 0:
		return errors.New("is no mark: at least one bit has to be set")
	case mark&^bits != 0:
		return fmt.Errorf("has a bit that its mask has not, %#x", mark&^bits)
	}
	c.Mark, c.Mask = mark, bits
	return nil
}

// parseBits takes 32 bits, hexadecimal after 0x.
func parseBits(s string) (uint32, error) {
	base, digits := 10, s
	if rest, ok := strings.CutPrefix(strings.ToLower(s), "0x"); ok {
		base, digits = 16, rest
	}
	n, err := strconv.ParseUint(digits, base, 32)
	if err != nil {
		return 0, fmt.Errorf("has %q where a number up to 0xffffffff belongs, such as 0x50 or 80", s)
	}
	return uint32(n), nil
}

func getMark(c Config) []string {
	if c.Mark == 0 {
		return nil
	}
	return one(formatMark(c.Mark, c.Mask))
}

func formatMark(mark, mask uint32) string { return fmt.Sprintf("%#x/%#x", mark, mask) }

// netnsDir is where ip netns has the namespaces that have a name.
const netnsDir = "/run/netns/"

// setNamespace takes a path, or the name of a namespace that ip netns made.
func setNamespace(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, s string) error {
		switch {
		case s == "." || s == "..":
			return errors.New("means a folder")
		case strings.ContainsRune(s, 0):
			return errors.New("has a zero byte, which no path may have")
		case strings.Contains(s, "/"):
			*field(c) = asPath(path.Clean(s))
		default:
			*field(c) = netnsDir + s
		}
		return nil
	}
}

// rebaseNamespace has a path be relative to dir, and leaves a name.
func rebaseNamespace(s, dir string) string {
	if !strings.Contains(s, "/") {
		return s
	}
	return asPath(rebase(s, dir))
}

// asPath has a path of one element not be a name.
func asPath(p string) string {
	if !strings.Contains(p, "/") {
		return "./" + p
	}
	return p
}

func setAddress(c *Config, s string) error {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil && strings.Contains(s, "/"):
		return errors.New("is a prefix; an address has no length, and prefixes are for announce")
	case err != nil:
		return errors.New("is no IP address")
	case a.Zone() != "":
		return errors.New("has a zone")
	}
	a = a.Unmap()
	if err := check(record.Record{Addresses: prefixes.Must(prefixes.Host(a))}); err != nil || a.IsLoopback() || a.IsLinkLocalUnicast() {
		return errors.New("is loopback, link-local, multicast or unspecified")
	}
	if slices.Contains(c.Address, a) {
		return errors.New("is there twice")
	}
	c.Address = append(c.Address, a)
	return nil
}

// parsePrefix takes a prefix in the one form that says what is meant.
func parsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		if a, err := netip.ParseAddr(s); err == nil {
			return p, fmt.Errorf("has no length; for the one address write %v", prefixes.Host(a))
		}
		return p, errors.New("is no prefix such as 10.90.1.0/24")
	}
	c, masked, err := prefixes.Canonical(p)
	switch {
	case err != nil:
		return p, fmt.Errorf("is no prefix that can be used: %w", err)
	case masked:
		return p, fmt.Errorf("has bits beyond its length; write %v, or %v for the one address", c, prefixes.Host(p.Addr()))
	}
	return c, nil
}

// setPrefix adds a prefix to those there are.
func setPrefix(field func(*Config) *[]netip.Prefix) func(*Config, string) error {
	return func(c *Config, s string) error {
		p, err := parsePrefix(s)
		if err != nil {
			return err
		}
		if slices.Contains(*field(c), p) {
			return errors.New("is there twice")
		}
		*field(c) = append(*field(c), p)
		return nil
	}
}

func setAcceptWide(c *Config, s string) error {
	p, err := parsePrefix(s)
	switch {
	case err != nil:
		return err
	case mesh.AcceptNarrow("", p):
		return errors.New("is narrow enough to be accepted anyway")
	}
	c.AcceptWide = append(c.AcceptWide, p)
	return nil
}

func setEndpoint(c *Config, s string) error {
	if c.NoEndpoint || s == "none" && len(c.Endpoint) > 0 {
		return errors.New("cannot stand beside none")
	}
	if s == "none" {
		c.NoEndpoint = true
		return nil
	}
	e, err := ParseEndpoint(s)
	if err != nil {
		return err
	}
	if slices.Contains(c.Endpoint, e) {
		return errors.New("is there twice")
	}
	c.Endpoint = append(c.Endpoint, e)
	return nil
}

// ParseEndpoint takes what record.ParseEndpoint does, and port 0 or no port, which both are Port 0.
func ParseEndpoint(s string) (record.Endpoint, error) {
	try := s
	if a, err := netip.ParseAddr(strings.Trim(s, "[]")); err == nil && (a.Is4() || !strings.Contains(s, "]:")) {
		try = netip.AddrPortFrom(a.Unmap(), 1).String()
	} else if h, ok := strings.CutSuffix(s, ":0"); ok {
		try = h + ":1"
	} else if !strings.Contains(s, ":") {
		try = s + ":1"
	}
	e, err := record.ParseEndpoint(try)
	if err != nil {
		// Its error has the endpoint before the reason, and so has the one this becomes a part of.
		_, why, _ := strings.Cut(err.Error(), `": `)
		return e, errors.New(cmp.Or(why, err.Error()))
	}
	if try != s {
		e.Port = 0
	}
	return e, nil
}

func getEndpoint(c Config) []string {
	if c.NoEndpoint {
		return []string{"none"}
	}
	return texts(c.Endpoint)
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || s[0] == '+' {
		return 0, fmt.Errorf("has %q where a port from 1 to 65535 belongs", s)
	}
	return uint16(n), nil
}

func setListen(c *Config, s string) (err error) {
	if s == "any" {
		c.Listen = mesh.Ports{}
		return nil
	}
	first, last, isRange := strings.Cut(s, "-")
	var p mesh.Ports
	if p.First, err = parsePort(first); err != nil {
		return err
	}
	if isRange {
		if p.Last, err = parsePort(last); err != nil {
			return err
		}
		if p.Last < p.First {
			return errors.New("is a range that ends before it begins")
		}
	}
	c.Listen = p
	return nil
}

func setMTU(c *Config, s string) error {
	if s == "auto" {
		c.MTU = 0
		return nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1280 || n > 65535 {
		return errors.New("is neither auto nor a number from 1280 to 65535")
	}
	c.MTU = n
	return nil
}

func setKeepalive(c *Config, s string) error {
	switch s {
	case "auto":
		c.Keepalive = 0
		return nil
	case "off":
		c.Keepalive = -1
		return nil
	}
	d, err := time.ParseDuration(s)
	switch {
	case err != nil && strings.Trim(s, "0123456789") == "":
		return fmt.Errorf("has no unit; write %ss", s)
	case err != nil:
		return errors.New("is neither auto nor off nor a duration such as 25s")
	case d <= 0:
		return errors.New("is not above zero; write off for none")
	}
	if err := datapath.CheckKeepalive(d); err != nil {
		return err
	}
	c.Keepalive = d
	return nil
}

func getKeepalive(c Config) []string {
	switch {
	case c.Keepalive == 0:
		return []string{"auto"}
	case c.Keepalive < 0:
		return []string{"off"}
	}
	return []string{c.Keepalive.String()}
}

func setLabel(c *Config, s string) error {
	k, v, ok := strings.Cut(s, "=")
	if !ok {
		return errors.New("is not KEY=VALUE")
	}
	if err := check(record.Record{Labels: map[string]string{k: v}}); err != nil {
		return err
	}
	if _, twice := c.Label[k]; twice {
		return fmt.Errorf("has the key %q, which is there twice", k)
	}
	if c.Label == nil {
		c.Label = make(map[string]string)
	}
	c.Label[k] = v
	return nil
}

func getLabel(c Config) (out []string) {
	for _, k := range slices.Sorted(maps.Keys(c.Label)) {
		out = append(out, k+"="+c.Label[k])
	}
	return out
}

// check says why a record could not have what r has, apart from what every record needs.
func check(r record.Record) error {
	k, err := key.PublicFromBytes(slices.Repeat([]byte{1}, key.Size))
	if err != nil {
		return err
	}
	r.Version, r.ID, r.Key = record.Version, "node", k
	if err := r.Validate(); err != nil {
		if e, ok := errors.AsType[*record.FieldError](err); ok {
			return errors.New(e.Reason)
		}
		return err
	}
	return nil
}

func setSocks5(c *Config, s string) error {
	host, port, err := net.SplitHostPort(s)
	switch {
	case err != nil:
		return errors.New("is not ADDR:PORT")
	case host == "":
		return errors.New("has no address; write 127.0.0.1 for this host alone, 0.0.0.0 or [::] for whoever can reach it")
	}
	if port != "0" { // which has one chosen
		if _, err := parsePort(port); err != nil {
			return err
		}
	}
	c.Socks5 = s
	return nil
}

func setExpose(c *Config, s string) error {
	r, err := expose.Parse(s)
	if err != nil {
		// Its error has the rule before the reason, and so has the one this becomes a part of.
		_, why, _ := strings.Cut(err.Error(), fmt.Sprintf("%q: ", s))
		return fmt.Errorf("is no service to expose: %s", cmp.Or(why, err.Error()))
	}
	for _, o := range c.Expose {
		if o.Network == r.Network && o.Port == r.Port {
			return fmt.Errorf("has %s port %d, which goes to %s already", r.Network, r.Port, o.Target)
		}
	}
	c.Expose = append(c.Expose, r)
	return nil
}
