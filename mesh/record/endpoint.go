package record

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Endpoint is where a node may be reached over the underlay: a UDP port at an IP address or at a host
// name. Exactly one of Host and Addr is set. Endpoints compare with ==.
type Endpoint struct {
	// Host is a DNS host name in lower case (RFC 1123, section 2.1), at most 253 bytes, maybe with a
	// final dot. Its last label has a letter and does not look like a hexadecimal number, so that no one
	// takes it for an IPv4 address, or a mistyped address for a name.
	//
	// Whoever reads the record looks the name up, with its own name servers and hosts file, in the
	// background, again by the answer's TTL, and again when its addresses do not answer.
	Host string

	// Addr is an IP address that is neither unspecified nor multicast nor the IPv4 broadcast address. An
	// IPv6 address may have a zone, which means something only where it was published. An IPv4 address
	// is never mapped to IPv6.
	Addr netip.Addr

	Port uint16 // not 0
}

// MaxZone is how many bytes the zone of an endpoint's address may have. Interface names are shorter
// everywhere; on Linux they have at most 15 bytes.
const MaxZone = 63

// EndpointFrom makes an endpoint of an address and a port. It unmaps an IPv4 address mapped to IPv6 and
// checks nothing.
func EndpointFrom(ap netip.AddrPort) Endpoint {
	return Endpoint{Addr: ap.Addr().Unmap(), Port: ap.Port()}
}

// ParseEndpoint takes host:port, where host is an IPv4 address, an IPv6 address in brackets, maybe with
// a zone, or a host name. Host names become lower case and addresses canonical, so that the result of
// String may differ from s. Service names are not ports. Nothing is looked up.
func ParseEndpoint(s string) (Endpoint, error) {
	e, why := parseEndpoint(s)
	if why != "" {
		return Endpoint{}, fmt.Errorf("endpoint %q: %s", cut(s), why)
	}
	return e, nil
}

func parseEndpoint(s string) (e Endpoint, why string) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return Endpoint{}, "has no port"
	}
	host, port := s[:i], s[i+1:]
	if e.Port, why = parsePort(port); why != "" {
		return Endpoint{}, why
	}
	switch inner, bracket := strings.CutPrefix(host, "["); {
	case bracket:
		inner, closed := strings.CutSuffix(inner, "]")
		a, err := netip.ParseAddr(inner)
		if !closed || err != nil || !a.Is6() {
			return Endpoint{}, "is not an IPv6 address in brackets"
		}
		if a.Is4In6() && a.Zone() != "" {
			return Endpoint{}, "has a zone on an IPv4 address"
		}
		e.Addr = a.Unmap()
	case strings.ContainsRune(host, ':'):
		return Endpoint{}, "has an IPv6 address without brackets"
	default:
		if a, err := netip.ParseAddr(host); err == nil {
			e.Addr = a
		} else {
			e.Host = asciiLower(host)
		}
	}
	if why := e.check(); why != "" {
		return Endpoint{}, why
	}
	return e, ""
}

// parsePort knows one form for every port: no sign, no leading zero.
func parsePort(s string) (uint16, string) {
	if s == "" || len(s) > 5 || s[0] == '0' && s != "0" || strings.Trim(s, "0123456789") != "" {
		return 0, "has no decimal port"
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, "has a port above 65535"
	}
	if n == 0 {
		return 0, "has port 0"
	}
	return uint16(n), ""
}

// asciiLower leaves what is not ASCII as it is, to be refused: strings.ToLower would make a plain k of
// the Kelvin sign.
func asciiLower(s string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s)
}

// Validate says why e is not an endpoint, or nil.
func (e Endpoint) Validate() error {
	if why := e.check(); why != "" {
		return fmt.Errorf("endpoint %q: %s", cut(e.String()), why)
	}
	return nil
}

func (e Endpoint) check() string {
	switch {
	case e.Port == 0:
		return "has port 0"
	case e.Host != "" && e.Addr.IsValid():
		return "has both a host name and an address"
	case e.Host != "":
		return checkHost(e.Host)
	case !e.Addr.IsValid():
		return "has neither a host name nor an address"
	case e.Addr.Is4In6():
		return "has an IPv4 address mapped to IPv6"
	case e.Addr.IsUnspecified():
		return "has the unspecified address"
	case e.Addr.IsMulticast():
		return "has a multicast address"
	case e.Addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "has the broadcast address"
	}
	zone := e.Addr.Zone()
	if len(zone) > MaxZone {
		return fmt.Sprintf("has a zone of %d bytes, at most %d are allowed", len(zone), MaxZone)
	}
	for _, c := range []byte(zone) {
		if c <= ' ' || c > '~' || strings.IndexByte("%[]/\"'\\", c) >= 0 {
			return fmt.Sprintf("has %q in its zone", c)
		}
	}
	return ""
}

func checkHost(host string) string {
	name := strings.TrimSuffix(host, ".")
	if name == "" {
		return "has no host"
	}
	if len(name) > 253 {
		return fmt.Sprintf("has a host name of %d bytes, at most 253 are allowed", len(name))
	}
	last := ""
	for label := range strings.SplitSeq(name, ".") {
		switch {
		case label == "":
			return "has a host name with an empty label"
		case len(label) > 63:
			return fmt.Sprintf("has a host name with a label of %d bytes, at most 63 are allowed", len(label))
		case label[0] == '-' || label[len(label)-1] == '-':
			return "has a host name with a label that begins or ends with '-'"
		}
		for _, c := range []byte(label) {
			if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-') {
				return fmt.Sprintf("has %q in its host name, only a-z, 0-9, '-' and '.' are allowed", c)
			}
		}
		last = label
	}
	if strings.Trim(last, "0123456789") == "" {
		return "is neither an IPv4 address nor a host name"
	}
	if hex, ok := strings.CutPrefix(last, "0x"); ok && strings.Trim(hex, "0123456789abcdef") == "" {
		return "has a host name that looks like a number"
	}
	return ""
}

// String returns the form ParseEndpoint takes, with IPv6 addresses in brackets. What is not valid has
// some form too, for logs.
func (e Endpoint) String() string {
	if e.Host == "" && e.Addr.IsValid() {
		return netip.AddrPortFrom(e.Addr, e.Port).String()
	}
	return e.Host + ":" + strconv.Itoa(int(e.Port))
}

// MarshalText returns what String does. It refuses what is not valid, so that nothing is written that
// cannot be read back.
func (e Endpoint) MarshalText() ([]byte, error) {
	if err := e.Validate(); err != nil {
		return nil, err
	}
	return []byte(e.String()), nil
}

// UnmarshalText is ParseEndpoint.
func (e *Endpoint) UnmarshalText(text []byte) error {
	parsed, err := ParseEndpoint(string(text))
	if err != nil {
		return err
	}
	*e = parsed
	return nil
}
