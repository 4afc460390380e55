package expose

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Rule says what is published where. Rules compare with ==.
type Rule struct {
	Port    uint16 // on the mesh address; not 0
	Network string // "tcp" or "udp"
	Target  string // host:port; the host is an address or a name, the port a number
}

// Forms are the forms Parse knows, for a help text.
const Forms = "PORT, PORT=HOST:PORT or either with PORT/udp"

// Parse parses a rule: "8080=127.0.0.1:80" publishes what listens on 127.0.0.1:80 at port 8080, "8080"
// is "8080=127.0.0.1:8080", "53/udp" and "53/udp=[::1]:5353" are for UDP. "/tcp" may be said too.
func Parse(s string) (Rule, error) {
	r, err := parse(s)
	if err != nil {
		return Rule{}, fmt.Errorf("exposed service %q: %w; want %s, such as 8080=127.0.0.1:80", s, err, Forms)
	}
	return r, nil
}

func parse(s string) (Rule, error) {
	left, target, ok := strings.Cut(s, "=")
	port, network, hasNetwork := strings.Cut(left, "/")
	if !hasNetwork {
		network = "tcp"
	}
	r := Rule{Network: network, Target: target}
	if network != "tcp" && network != "udp" {
		return r, fmt.Errorf("network %q is neither tcp nor udp", network)
	}
	var err error
	if r.Port, err = parsePort(port); err != nil {
		return r, err
	}
	if !ok {
		r.Target = net.JoinHostPort("127.0.0.1", strconv.Itoa(int(r.Port)))
		return r, nil
	}
	host, service, err := net.SplitHostPort(target)
	if err != nil {
		return r, fmt.Errorf("target %q: %w", target, err)
	}
	if host == "" {
		return r, fmt.Errorf("target %q has no host", target)
	}
	if strings.ContainsFunc(host, func(c rune) bool { return c <= ' ' || c >= 0x7f || strings.ContainsRune("/=[]", c) }) {
		return r, fmt.Errorf("target host %q is neither an address nor a name", host)
	}
	p, err := parsePort(service)
	if err != nil {
		return r, fmt.Errorf("target %q: %w", target, err)
	}
	r.Target = net.JoinHostPort(host, strconv.Itoa(int(p)))
	return r, nil
}

func parsePort(s string) (uint16, error) {
	p, err := strconv.ParseUint(s, 10, 16)
	if err != nil || p == 0 {
		return 0, fmt.Errorf("port %q is not a number from 1 to 65535", s)
	}
	return uint16(p), nil
}

// String returns the rule as Parse takes it.
func (r Rule) String() string {
	if r.Network == "tcp" {
		return fmt.Sprintf("%d=%s", r.Port, r.Target)
	}
	return fmt.Sprintf("%d/%s=%s", r.Port, r.Network, r.Target)
}
