package etcd

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// The parameters of a URL.
const (
	paramCA           = "ca"
	paramCert         = "cert"
	paramKey          = "key"
	paramServerName   = "server-name"
	paramPasswordFile = "password-file"
	paramTimeout      = "timeout"
)

var params = []string{paramCA, paramCert, paramKey, paramServerName, paramPasswordFile, paramTimeout}

// ParseURL reads a Config from a URL:
//
//	etcd://[user[:password]@]host:port[,host:port...][/prefix][?parameter=value[&...]]
//	etcds://...
//
// The second is TLS. The parameters are ca, cert and key (files), server-name, password-file, and timeout
// (as "5s"). What has a special meaning in user, password, prefix or a value is written as in any URL:
// '@' as %40, '/' as %2F. No error has the password in it. What is returned is not yet checked: that is
// for New.
func ParseURL(s string) (Config, error) {
	var c Config
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok || scheme != "etcd" && scheme != "etcds" {
		return c, errors.New("etcd: the URL begins with neither etcd:// nor etcds://")
	}
	rest, query, _ := strings.Cut(rest, "?")
	authority, path := rest, ""
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		authority, path = rest[:i], rest[i:]
	}
	if !strings.Contains(authority, "@") && (strings.Contains(path, "@") || strings.Contains(query, "@")) {
		return c, errors.New("etcd: the URL has '@' after '/' or '?': in user and password write '/' as %2F and '?' as %3F, elsewhere '@' as %40")
	}
	if strings.Contains(s, "#") {
		return c, errors.New("etcd: the URL has '#', which is written as %23")
	}
	hosts := authority
	if i := strings.LastIndexByte(authority, '@'); i >= 0 {
		user, password, _ := strings.Cut(authority[:i], ":")
		hosts = authority[i+1:]
		var err, err2 error
		c.Username, err = url.PathUnescape(user)
		c.Password, err2 = url.PathUnescape(password)
		if err != nil || err2 != nil {
			return Config{}, errors.New("etcd: user or password of the URL has a '%' that begins no %XX; write '%' as %25")
		}
	}
	http := "http://"
	if scheme == "etcds" {
		http = "https://"
	}
	for host := range strings.SplitSeq(hosts, ",") {
		if _, _, err := endpoint(host, false); err != nil {
			// What is before the ':' may be a user whose host is missing, and what is after it a password.
			name, _, _ := strings.Cut(host, ":")
			return Config{}, fmt.Errorf("etcd: in the URL, the endpoint that begins with %q is not host:port", name)
		}
		c.Endpoints = append(c.Endpoints, http+host)
	}
	var err error
	if c.Prefix, err = url.PathUnescape(path); err != nil {
		return Config{}, fmt.Errorf("etcd: prefix of the URL: %w", err)
	}
	if c.Prefix == "/" && path == "/" {
		c.Prefix = "" // "etcd://host:port/" is "etcd://host:port"
	}
	return c.parameters(query, scheme == "etcds")
}

// parameters adds what is after the '?'.
func (c Config) parameters(query string, secure bool) (Config, error) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return Config{}, errors.New("etcd: the parameters of the URL are not name=value, joined by '&'")
	}
	for name, v := range values {
		if !slices.Contains(params, name) {
			return Config{}, fmt.Errorf("etcd: unknown parameter %q in the URL, did you mean %q? (There are %s.)", name, nearest(name, params), strings.Join(params, ", "))
		}
		if len(v) > 1 {
			return Config{}, fmt.Errorf("etcd: parameter %q is in the URL %d times", name, len(v))
		}
		if v[0] == "" {
			return Config{}, fmt.Errorf("etcd: parameter %q of the URL has no value", name)
		}
		if !secure && slices.Contains([]string{paramCA, paramCert, paramKey, paramServerName}, name) {
			return Config{}, fmt.Errorf("etcd: parameter %q of the URL needs etcds://", name)
		}
	}
	c.TLS.CAFile, c.TLS.CertFile, c.TLS.KeyFile = values.Get(paramCA), values.Get(paramCert), values.Get(paramKey)
	c.TLS.ServerName, c.PasswordFile = values.Get(paramServerName), values.Get(paramPasswordFile)
	if s := values.Get(paramTimeout); s != "" {
		if c.Timeout, err = time.ParseDuration(s); err != nil {
			return Config{}, fmt.Errorf("etcd: parameter %q of the URL is %q, not a duration such as 5s", paramTimeout, s)
		}
	}
	return c, nil
}

// String returns c as a URL that ParseURL reads, but for the password, which is left out, and what a URL
// cannot say.
func (c Config) String() string {
	var b strings.Builder
	scheme := "etcd://"
	if len(c.Endpoints) > 0 {
		if _, https, err := endpoint(c.Endpoints[0], !c.TLS.empty()); err == nil && https {
			scheme = "etcds://"
		}
	}
	b.WriteString(scheme)
	if c.Username != "" {
		b.WriteString(escape(c.Username) + "@")
	}
	for i, e := range c.Endpoints {
		if i > 0 {
			b.WriteByte(',')
		}
		addr, _, err := endpoint(e, false)
		if err != nil {
			addr = "invalid" // it may be anything, a URL with a password too
		}
		b.WriteString(addr)
	}
	if c.Prefix != "" {
		parts := strings.Split(c.Prefix, "/")
		for i := range parts {
			parts[i] = escape(parts[i])
		}
		if parts[0] != "" {
			b.WriteByte('/')
		}
		b.WriteString(strings.Join(parts, "/"))
	}
	v := make(url.Values)
	for name, value := range map[string]string{
		paramCA: c.TLS.CAFile, paramCert: c.TLS.CertFile, paramKey: c.TLS.KeyFile,
		paramServerName: c.TLS.ServerName, paramPasswordFile: c.PasswordFile,
	} {
		if value != "" {
			v.Set(name, value)
		}
	}
	if c.Timeout != 0 {
		v.Set(paramTimeout, c.Timeout.String())
	}
	if len(v) > 0 {
		b.WriteString("?" + v.Encode())
	}
	return b.String()
}

// escape is url.PathEscape that leaves nothing with a meaning before the '@'.
func escape(s string) string {
	return strings.NewReplacer(":", "%3A", "@", "%40").Replace(url.PathEscape(s))
}

// nearest returns which of names is the fewest edits away from s.
func nearest(s string, names []string) string {
	return slices.MinFunc(names, func(a, b string) int { return distance(s, a) - distance(s, b) })
}

// distance counts the insertions, deletions and replacements that make b of a (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
