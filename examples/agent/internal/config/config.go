// Package config is what an agent is told, and by whom. One table, Settings, has every setting with its
// name, how it is written, what it means and how it is read. Flags, environment variables, the keys of the
// YAML file, the help and the printed configuration are made of it, so that they cannot tell different
// stories.
//
// A setting has one name in three spellings: --registry-ca, WARREN_REGISTRY_CA, and registry-ca in the
// file. A flag goes before the environment, the environment before the file, the file before the default;
// values of several are not merged.
package config

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/warren-mesh/warren/examples/agent/internal/expose"
	"github.com/warren-mesh/warren/mesh"
	"github.com/warren-mesh/warren/mesh/record"
)

// Config is the effective configuration: checked, and with its defaults. Its fields are the settings of the
// same names; Settings says what they mean.
type Config struct {
	File   string // the YAML file; empty: none
	State  string
	Socket string // empty: in State

	Mesh     string
	Node     string
	Registry string

	RegistryCA, RegistryCert, RegistryKey string
	RegistryUser, RegistryPasswordFile    string

	Datapath string

	// Of an interface of the host. With netstack they are zero.

	Interface            string
	NetNS, UnderlayNetNS string // paths; empty: the agent's, and the interface's
	Routing              string
	Table                int
	Priority             int    // with policy routing, as are Mark, Mask and Guard
	Mark, Mask           uint32 // Mark 0: none is given
	Guard                []netip.Prefix
	Metric               int
	Protocol             int
	Source               string
	SNAT                 []netip.Prefix
	Forward              string

	Address      []netip.Addr // empty: one that follows from mesh and node
	Announce     []netip.Prefix
	Endpoint     []record.Endpoint // Port 0: the device's real one. Empty: those of the host, unless NoEndpoint
	NoEndpoint   bool
	Listen       mesh.Ports
	MTU          int
	Keepalive    time.Duration // 0: the mesh's default; below 0: never
	Role         []string
	Label        map[string]string
	AcceptWide   []netip.Prefix
	Socks5       string // host:port; empty: none
	Expose       []expose.Rule
	LogLevel     slog.Level
	LogFormat    string
	given        map[string]given
	misspeltVars []string
}

// ErrConfig is what every error of Load is. Each has a line of its own.
var ErrConfig = errors.New("bad configuration")

// given is what a setting was given, and where.
type given struct {
	values []value
	origin string // of all of them; "" is the default
}

type value struct {
	text  string
	where string // --flag, VARIABLE or file:line
}

// Origin says where the setting called name has its value from: a flag, a variable, a line of the file,
// or "default".
func (c Config) Origin(name string) string {
	if g := c.given[name]; g.origin != "" {
		return g.origin
	}
	return "default"
}

// Given says whether somebody set name.
func (c Config) Given(name string) bool {
	g := c.given[name]
	return len(g.values) > 0
}

// Misspelt returns a line for each environment variable that looks like a misspelt setting. They are no
// errors: the environment is shared with programs that have nothing to do with Warren.
func (c Config) Misspelt() []string { return c.misspeltVars }

// Changed returns the names of the settings that have another value in d. Reloadable says which of them a
// running agent takes up.
func (c Config) Changed(d Config) (names []string) {
	for _, s := range Settings() {
		if !slices.Equal(s.get(c), s.get(d)) {
			names = append(names, s.Name)
		}
	}
	return names
}

// Print writes c as YAML that Load reads again, each value with a comment that says where it comes from.
// What nobody set and has no value is a comment altogether. Passwords are replaced.
func (c Config) Print(w io.Writer) error {
	var b strings.Builder
	if c.File != "" {
		fmt.Fprintf(&b, "# read from %s\n", comment(c.File))
	}
	for _, s := range Settings() {
		values := s.get(c)
		from := comment(c.Origin(s.Name))
		if from == "default" && s.Default != "" && !slices.Equal(values, []string{s.Default}) {
			from = "default: " + s.Default
		}
		if len(values) == 0 {
			fmt.Fprintf(&b, "# %s: not set # %s\n", s.Name, from)
			continue
		}
		for i := range values {
			values[i] = redact(s, values[i])
		}
		switch s.Kind {
		case One:
			fmt.Fprintf(&b, "%s: %s # %s\n", s.Name, quote(values[0]), from)
		case List:
			fmt.Fprintf(&b, "%s: # %s\n", s.Name, from)
			for _, v := range values {
				fmt.Fprintf(&b, "  - %s\n", quote(v))
			}
		case Pairs:
			fmt.Fprintf(&b, "%s: # %s\n", s.Name, from)
			for _, v := range values {
				k, v, _ := strings.Cut(v, "=")
				fmt.Fprintf(&b, "  %s: %s\n", quote(k), quote(v))
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func redact(s Setting, v string) string {
	if s.redact != nil {
		return s.redact(v)
	}
	return v
}

// quote writes s as a YAML scalar that is read again as s.
func quote(s string) string {
	plain := s != "" && s != "null" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789./_-+=") == "" &&
		('a' <= s[0] && s[0] <= 'z' || '0' <= s[0] && s[0] <= '9' || s[0] == '/')
	switch {
	case plain:
		return s
	case !utf8.ValidString(s): // which YAML has no other way to write
		return "!!binary " + base64.StdEncoding.EncodeToString([]byte(s))
	}
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default: // which has the line breaks beyond ASCII, too
			fmt.Fprintf(&b, `\U%08X`, r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// comment returns s, or where that is more than a line of text, in quotes.
func comment(s string) string {
	if utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return s
	}
	return strconv.QuoteToGraphic(s)
}
