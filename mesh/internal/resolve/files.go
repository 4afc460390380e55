package resolve

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

const (
	maxServers = 3       // resolv.conf(5), MAXNS
	maxConf    = 1 << 16 // bytes of a configuration file that are read
	maxLine    = 1 << 20 // bytes of a line of the hosts file
)

// config is what resolv.conf says.
type config struct {
	dns.ClientConfig
	useTCP bool // option use-vc
	noAAAA bool // option no-aaaa
}

// config reads the configuration files. It returns false if name servers are not to be asked directly.
func (s *system) config() (config, bool) {
	switch data, err := readFile(s.nsswitch); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil || !plain(data):
		return config{}, false
	}
	data, err := readFile(s.resolvConf)
	if err != nil {
		return config{}, false
	}
	name, _ := s.hostname()
	c := parseResolvConf(data, name)
	return c, len(c.Servers) > 0
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, maxConf))
}

// parseResolvConf reads a resolv.conf on a host with the given name, whose domain is the search domain if
// the file has none. What makes no sense is passed over, and numbers are brought into their range.
func parseResolvConf(data []byte, hostname string) config {
	parsed, err := dns.ClientConfigFromReader(bytes.NewReader(data))
	if err != nil {
		return config{}
	}
	c := config{ClientConfig: *parsed}
	c.Servers = slices.DeleteFunc(c.Servers, func(s string) bool {
		_, err := netip.ParseAddr(s)
		return err != nil
	})
	c.Servers = c.Servers[:min(len(c.Servers), maxServers)]
	if _, domain, ok := strings.Cut(hostname, "."); ok && len(c.Search) == 0 {
		c.Search = []string{domain}
	}
	for i, domain := range c.Search {
		c.Search[i] = strings.Trim(domain, ".")
	}
	c.Search = slices.DeleteFunc(c.Search, func(s string) bool {
		_, ok := dns.IsDomainName(s)
		return s == "" || !ok // the root is asked anyway
	})
	c.Timeout = min(max(c.Timeout, 1), 30)
	c.Attempts = min(max(c.Attempts, 1), 5)
	for line := range bytes.Lines(data) {
		if f := bytes.Fields(line); len(f) > 0 && string(f[0]) == "options" {
			for _, option := range f[1:] {
				c.useTCP = c.useTCP || string(option) == "use-vc"
				c.noAAAA = c.noAAAA || string(option) == "no-aaaa"
			}
		}
	}
	return c
}

// plain reports whether an nsswitch.conf has host names come from the hosts file and then from DNS.
// Sources that add names which nobody has as an endpoint are passed over. systemd's resolve counts as
// DNS: it reads the hosts file itself, and resolv.conf names it or the servers it asks.
func plain(data []byte) bool {
	for line := range bytes.Lines(data) {
		line, _, _ := strings.Cut(string(line), "#")
		key, sources, ok := strings.Cut(line, ":")
		if !ok || strings.TrimSpace(key) != "hosts" {
			continue
		}
		var files, servers, resolve bool
		last := ""
		for sources = strings.TrimSpace(sources); sources != ""; sources = strings.TrimSpace(sources) {
			if strings.HasPrefix(sources, "[") {
				if _, sources, ok = strings.Cut(sources, "]"); !ok || last == "files" {
					return false
				}
				continue
			}
			end := strings.IndexAny(sources, " \t\r\n[")
			if end < 0 {
				end = len(sources)
			}
			last, sources = sources[:end], sources[end:]
			switch {
			case last == "files":
				if servers {
					return false
				}
				files = true
			case last == "dns":
				servers = true
			case last == "resolve":
				resolve = true
			case last == "myhostname", last == "mymachines", strings.HasPrefix(last, "mdns"):
			default:
				return false
			}
		}
		return files && (servers || resolve)
	}
	return true
}

// hostsFile returns the addresses a hosts file has for a name; none if there is no file.
func hostsFile(path, host string) ([]netip.Addr, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	addrs, err := parseHosts(f, host)
	if err != nil {
		// Not to be taken for a file without the name: DNS may have another answer.
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return addrs, nil
}

// parseHosts reads a hosts file, line by line: it may be large, and one name is wanted.
func parseHosts(r io.Reader, host string) (addrs []netip.Addr, err error) {
	want := []byte(strings.TrimSuffix(host, "."))
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		line, _, _ := bytes.Cut(lines.Bytes(), []byte("#"))
		var addr []byte
		for field := range bytes.FieldsSeq(line) {
			if addr == nil {
				addr = field
			} else if bytes.EqualFold(bytes.TrimSuffix(field, []byte(".")), want) {
				if a, err := netip.ParseAddr(string(addr)); err == nil {
					addrs = append(addrs, a)
				}
				break
			}
		}
	}
	return addrs, lines.Err()
}
