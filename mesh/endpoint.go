package mesh

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/record"
)

// Endpoint is where a node may be reached over the underlay; see record.Endpoint. Of a node's own, port 0
// stands for the one its device gets.
type Endpoint = record.Endpoint

// ParseEndpoint takes a node's own endpoint: an address or a host name, with or without a port after a
// colon. Without one, or with port 0, it is the device's. An IPv6 address with a port is in brackets.
func ParseEndpoint(s string) (Endpoint, error) {
	if e, err := record.ParseEndpoint(s); err == nil {
		return e, nil
	}
	host := strings.TrimSuffix(s, ":0")
	if a, err := netip.ParseAddr(s); err == nil && a.Is6() {
		host = "[" + s + "]"
	}
	e, err := record.ParseEndpoint(host + ":1")
	if err != nil && strings.Contains(host, ":") {
		_, err = record.ParseEndpoint(s)
	}
	if err != nil {
		return Endpoint{}, err
	}
	e.Port = 0
	return e, nil
}

// MustEndpoint is ParseEndpoint for what is known to be good; it panics at what is not.
func MustEndpoint(s string) Endpoint {
	e, err := ParseEndpoint(s)
	if err != nil {
		panic(err)
	}
	return e
}

func checkEndpoints(es []Endpoint) (errs []error) {
	for i, e := range es {
		checked := e
		if e.Port == 0 {
			checked.Port = 1
		}
		if err := checked.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("number %d, %v: %w", i+1, e, err))
		}
	}
	if len(es) > record.MaxEndpoints {
		errs = append(errs, fmt.Errorf("has %d, at most %d are allowed", len(es), record.MaxEndpoints))
	}
	return errs
}

// SetEndpoints implements Mesh.
func (m *node) SetEndpoints(es ...Endpoint) error {
	if err := errors.Join(checkEndpoints(es)...); err != nil {
		return fmt.Errorf("%w: endpoints: %w", ErrConfig, err)
	}
	m.endpoints.Set(slices.Clone(es))
	return nil
}

// takeEndpoints returns where this node is reached now.
func (r *run) takeEndpoints() []Endpoint {
	es, _, moved := r.endpoints.Get()
	r.moved = moved
	return es
}

// named has the machine know what was found of host names.
func (r *run) named() core.Named {
	answers, changed := r.names.Current()
	r.found = changed
	in := core.Named{Names: make(map[string]core.Name, len(answers))}
	for host, a := range answers {
		in.Names[host] = core.Name{Addrs: a.Addrs, Err: a.Err}
	}
	return in
}
