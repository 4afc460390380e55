package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/warren-mesh/warren/datapath/kernel"
	"github.com/warren-mesh/warren/examples/agent/internal/nearest"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/mesh/registry/etcd"
)

// Host is what Load asks the host. A nil function has no answer.
type Host struct {
	Environ  []string                          // as os.Environ has it
	Hostname func() (string, error)            // as os.Hostname
	StateDir func() (string, error)            // the default
	Owner    func(dir string) string           // the node that a state folder belongs to; "" is nobody
	ReadFile func(path string) ([]byte, error) // nil: os.ReadFile
}

// ThisHost returns the Host that the process is on.
func ThisHost() Host {
	return Host{Environ: os.Environ(), Hostname: os.Hostname, StateDir: stateDir, Owner: Owner}
}

// stateDir is where programs of this user keep what they must not lose.
func stateDir() (string, error) {
	switch runtime.GOOS {
	case "windows", "darwin", "ios":
		dir, err := os.UserConfigDir()
		return filepath.Join(dir, "warren"), err
	}
	if os.Geteuid() == 0 {
		return "/var/lib/warren", nil
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) { // as the XDG Base Directory Specification has it
		return filepath.Join(dir, "warren"), nil
	}
	home, err := os.UserHomeDir()
	return filepath.Join(home, ".local", "state", "warren"), err
}

// Owner returns the node that has used a state folder, or "".
func Owner(dir string) string {
	data, err := os.ReadFile(filepath.Join(dir, "owner"))
	node, _, _ := strings.Cut(strings.TrimSpace(string(data)), " ")
	if err != nil || registry.CheckName(node) != nil {
		return ""
	}
	return node
}

// Flags are the settings as flags of one command.
type Flags struct {
	use    Use
	file   flag
	values map[string]*flag
}

// flag is a pflag.Value that takes what it is given. It is read later, with the setting's other sources.
type flag struct {
	kind  string
	given []string
}

func (f *flag) String() string     { return "" }
func (f *flag) Type() string       { return f.kind }
func (f *flag) Set(s string) error { f.given = append(f.given, s); return nil }

// Bind adds the settings that commands of this use have to fs.
func Bind(fs *pflag.FlagSet, use Use) *Flags {
	f := &Flags{use: use, file: flag{kind: "FILE"}, values: make(map[string]*flag)}
	fs.SortFlags = false
	fs.Var(&f.file, "config", "YAML file with settings under the names that they have as flags")
	for _, s := range Settings() {
		if !use.has(s.Use) {
			continue
		}
		v := &flag{kind: s.Value}
		f.values[s.Name] = v
		fs.Var(v, s.Name, usage(s))
	}
	return f
}

// usage is the line of --help.
func usage(s Setting) string {
	u := s.Usage
	if s.Kind != One {
		u += " (may be repeated)"
	}
	if s.Default != "" {
		u += " (default: " + s.Default + ")"
	}
	return u
}

// Load returns the effective configuration. Its error names everything that is wrong, each with where it was
// written and what would be right, and is ErrConfig.
func (f *Flags) Load(h Host) (Config, error) {
	environ := environ(h.Environ)
	c := Config{given: make(map[string]given), LogFormat: "text"}
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, problem(fmt.Sprintf(format, a...)))
	}

	var file map[string][]value
	if n := len(f.file.given); n > 0 {
		c.File = f.file.given[n-1]
	} else {
		c.File = environ[Variable("config")]
	}
	if c.File != "" {
		read := h.ReadFile
		if read == nil {
			read = os.ReadFile
		}
		var problems []string
		file, problems = readFile(c.File, read)
		for _, p := range problems {
			bad("%s", p)
		}
	}

	for _, s := range Settings() {
		if !f.use.has(s.Use) {
			continue
		}
		g := given{}
		switch flags, env := f.values[s.Name].given, environ[s.Variable()]; {
		case len(flags) > 0:
			if s.Kind == One {
				flags = flags[len(flags)-1:]
			}
			g.origin = "--" + s.Name
			for _, text := range flags {
				for _, text := range split(text, s.Kind == List) {
					g.values = append(g.values, value{text, g.origin})
				}
			}
		case env != "":
			g.origin = s.Variable()
			for _, text := range split(env, s.Kind != One) {
				g.values = append(g.values, value{text, g.origin})
			}
		case len(file[s.Name]) > 0:
			g.values = file[s.Name]
			g.origin = g.values[0].where
			for i := range g.values {
				if v := &g.values[i]; s.rebase != nil && v.text != "" {
					v.text = s.rebase(v.text, filepath.Dir(c.File))
				}
			}
		}
		for _, v := range g.values {
			err := errors.New("is empty")
			if v.text != "" {
				err = s.set(&c, v.text)
			}
			if err != nil {
				bad("%s: %s %q %v", v.where, s.Name, redact(s, v.text), err)
			}
		}
		c.given[s.Name] = g
	}
	c.misspelt(environ)
	if len(errs) == 0 {
		c.defaults(h, f.use, bad)
		c.conflicts(f.use, bad)
	}
	return c, errors.Join(errs...)
}

// problem is one thing that is wrong, and where.
type problem string

func (p problem) Error() string        { return string(p) }
func (p problem) Is(target error) bool { return target == ErrConfig }

func split(s string, list bool) []string {
	if !list {
		return []string{s}
	}
	parts := strings.Split(s, ",")
	for i := range parts {
		parts[i] = strings.TrimSpace(parts[i])
	}
	return parts
}

func environ(list []string) map[string]string {
	m := make(map[string]string)
	for _, kv := range list {
		if k, v, ok := strings.Cut(kv, "="); ok && strings.HasPrefix(k, Variable("")) {
			m[k] = v
		}
	}
	return m
}

func (c *Config) misspelt(environ map[string]string) {
	names := []string{Variable("config")}
	for _, s := range Settings() {
		names = append(names, s.Variable())
	}
	for _, k := range slices.Sorted(maps.Keys(environ)) {
		if near := nearest.To(k, names...); near != "" && !slices.Contains(names, k) && nearest.Distance(k, near) <= 2 {
			c.misspeltVars = append(c.misspeltVars, fmt.Sprintf("%s is set and means nothing, did you mean %s?", k, near))
		}
	}
}

func (c *Config) defaults(h Host, use Use, bad func(string, ...any)) {
	c.Mesh = cmp.Or(c.Mesh, "warren")
	c.Datapath = cmp.Or(c.Datapath, "netstack")
	if use == ToClean || use == ToRun && c.onHost() {
		c.Interface = cmp.Or(c.Interface, kernel.DefaultInterface)
		c.Protocol = cmp.Or(c.Protocol, DefaultProtocol)
	}
	if use == ToRun && c.onHost() {
		c.Routing = cmp.Or(c.Routing, "main")
		if c.Policy() {
			c.Table = cmp.Or(c.Table, policyTable)
			c.Priority = cmp.Or(c.Priority, defaultPriority)
			if c.Mark == 0 {
				c.Mark, c.Mask = defaultMark, defaultMask
			}
		}
		c.Table = cmp.Or(c.Table, mainTable)
		c.Metric = cmp.Or(c.Metric, defaultMetric)
		c.Source = cmp.Or(c.Source, "hint")
		c.Forward = cmp.Or(c.Forward, "off")
	}
	if c.State == "" && h.StateDir != nil {
		dir, err := h.StateDir()
		if err != nil {
			bad("there is no folder for the node's state: %v; name one with --state", err)
			return
		}
		c.State = dir
	}
	if c.Node == "" && h.Owner != nil {
		c.Node = h.Owner(c.State)
	}
	if c.Node == "" && use == ToRun && h.Hostname != nil {
		host, err := h.Hostname()
		if err == nil {
			c.Node, err = NodeName(host)
		}
		if err != nil {
			bad("the host's name is no name for a node: %v; name it with --node", err)
		}
	}
}

// onHost reports whether there is, or may be, an interface of the host.
func (c Config) onHost() bool { return slices.Contains(HostDatapaths(), c.Datapath) }

// Policy reports whether packets come to the mesh's routes by rules of its own.
func (c Config) Policy() bool { return c.Routing == "policy" }

// NodeName makes a node's name of a host's: in lower case, with '-' for what no name may have.
func NodeName(host string) (string, error) {
	name := strings.Map(func(r rune) rune {
		switch {
		case 'A' <= r && r <= 'Z':
			return r + 'a' - 'A'
		case 'a' <= r && r <= 'z', '0' <= r && r <= '9', r == '.':
			return r
		}
		return '-'
	}, host)
	labels := strings.Split(name, ".")
	for i := range labels {
		labels[i] = strings.Trim(labels[i], "-")
	}
	labels = slices.DeleteFunc(labels, func(l string) bool { return l == "" })
	name = strings.Join(labels, ".")
	if strings.HasPrefix(name, "localhost") && (len(name) == len("localhost") || name[len("localhost")] == '.') {
		return "", fmt.Errorf("%q is the name of every host", host)
	}
	if registry.CheckName(name) != nil {
		return "", fmt.Errorf("nothing of %q can be used", host)
	}
	return name, nil
}

// conflicts finds what does not go together.
func (c *Config) conflicts(use Use, bad func(string, ...any)) {
	at := func(name string) string { return fmt.Sprintf("%s (%s)", name, c.Origin(name)) }
	scheme, _, _ := strings.Cut(c.Registry, "://")
	hasUser := false
	if u, err := etcd.ParseURL(c.Registry); err == nil {
		hasUser = u.Username != ""
	}
	if use == ToRun && c.Registry == "" {
		bad("no registry is given: with --registry say where nodes find each other, such as etcd://192.0.2.1:2379, or memory to try the agent alone")
	}
	if c.Registry != "" {
		for _, name := range []string{"registry-ca", "registry-cert", "registry-key"} {
			if c.Given(name) && scheme != "etcds" {
				bad("%s is for TLS, and %s is %s; write etcds:// for a registry with TLS", at(name), at("registry"), redactURL(c.Registry))
			}
		}
		for _, name := range []string{"registry-user", "registry-password-file"} {
			if c.Given(name) && scheme == "memory" {
				bad("%s means nothing, as %s is memory", at(name), at("registry"))
			}
		}
		if c.Given("registry-user") && hasUser {
			bad("%s is given, and %s names a user as well: %s; keep one of them", at("registry-user"), at("registry"), redactURL(c.Registry))
		}
	}
	for _, pair := range [][2]string{{"registry-cert", "registry-key"}, {"registry-user", "registry-password-file"}} {
		for i, name := range pair {
			if other := pair[1-i]; c.Given(name) && !c.Given(other) && !(other == "registry-user" && hasUser) {
				bad("%s is given without %s; both are needed", at(name), other)
			}
		}
	}
	if use == ToRun {
		c.hostConflicts(at, bad)
	}
	for _, p := range c.Announce {
		if !mesh.AcceptNarrow(c.Node, p) && !slices.Contains(c.AcceptWide, p) {
			bad("%s: %v is wider than /8 (IPv4) or /16 (IPv6), or is nothing a mesh carries; for a wide prefix, have --accept-wide=%v on every node", at("announce"), p, p)
		}
	}
	if c.NoEndpoint && c.Keepalive < 0 {
		bad("%s is none and %s is off, so that this node could be reached by nobody; leave keepalive out", at("endpoint"), at("keepalive"))
	}
	for _, l := range []struct {
		name      string
		got, most int
	}{{"address", len(c.Address), 64}, {"endpoint", len(c.Endpoint), 64}, {"role", len(c.Role), 128}, {"label", len(c.Label), 128}} {
		if l.got > l.most {
			bad("%s has %d values, at most %d are allowed", at(l.name), l.got, l.most)
		}
	}
}

// hostConflicts finds what does not go together of what is about an interface of the host.
func (c *Config) hostConflicts(at func(string) string, bad func(string, ...any)) {
	value := func(name string) string {
		for _, s := range Settings() {
			if s.Name == name {
				return s.get(*c)[0]
			}
		}
		return ""
	}
	if !c.onHost() {
		for _, s := range Settings() {
			if s.Host && c.Given(s.Name) {
				bad("%s %q is about a network interface of the host, and %s is %s, which has none; leave it out, or say --datapath kernel, tun or auto", at(s.Name), value(s.Name), at("datapath"), c.Datapath)
			}
		}
		return
	}
	for _, name := range []string{"priority", "mark", "guard"} {
		if c.Given(name) && !c.Policy() {
			bad("%s %q is for policy routing, and %s is %s; leave it out, or say --routing policy", at(name), value(name), at("routing"), c.Routing)
		}
	}
	if c.Policy() && c.Table == mainTable {
		bad("%s is main, in which encrypted packets are looked up too, and %s is policy; leave it out for %d, or name another one", at("table"), at("routing"), policyTable)
	}
	if c.Datapath == "kernel" && c.UnderlayNetNS != "" {
		bad("%s %q is not for the kernel datapath, as Linux has WireGuard's sockets where it made the interface; leave it out, or say --datapath tun", at("underlay-netns"), c.UnderlayNetNS)
	}
}
