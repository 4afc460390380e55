package podnetwork

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/warren-mesh/warren/mesh/watch"
	"github.com/warren-mesh/warren/roles/internal/textfile"
)

// Every is how often files are read.
const Every = time.Second

// File is the networks that a text file has: one a line ("10.244.1.0/24"), with nothing else but white space, empty lines
// and comments that begin with "#". It may be written anew at any time, in one piece: half a file is read as such.
func File(path string) Source {
	return &file{path: path, read: func(path string) ([]Network, error) {
		data, err := textfile.Read(path)
		if err != nil {
			return nil, err
		}
		return parseLines(path, data)
	}}
}

// CNI is the subnets that the host-local plugin of CNI is configured with, in a file (.conf, .conflist, .json), or, where
// path is a folder, in the first such file there by name, as container runtimes have it. Their gateways are the node's
// addresses where the configuration names them.
//
// See https://www.cni.dev/plugins/current/ipam/host-local/ and section 1 of the CNI specification.
func CNI(path string) Source {
	return &file{path: path, read: func(path string) ([]Network, error) {
		path, err := cniFile(path)
		if err != nil {
			return nil, err
		}
		data, err := textfile.Read(path)
		if err != nil {
			return nil, err
		}
		return parseCNI(path, data)
	}}
}

type file struct {
	path string
	read func(path string) ([]Network, error)
	v    watch.Value[Reading]
}

func (f *file) Current() (Reading, <-chan struct{}) {
	r, _, stale := f.v.Get()
	return r, stale
}

func (f *file) Run(ctx context.Context) error {
	defer f.v.Set(Reading{}) // what is known then is of no time
	t := time.NewTicker(Every)
	defer t.Stop()
	for {
		was, ok, _ := f.v.Get()
		now := was
		nets, err := f.read(f.path)
		if now.Err = err; err == nil {
			now.Networks, now.Known = nets, true
		}
		if !ok || !slices.Equal(now.Networks, was.Networks) || now.Known != was.Known || text(now.Err) != text(was.Err) {
			f.v.Set(now)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// parseLines reads networks, one a line.
func parseLines(path string, data []byte) ([]Network, error) {
	nets := []Network{}
	for i, line := range textfile.Lines(data) {
		p, err := netip.ParsePrefix(line)
		n := Network{Prefix: p}
		if err != nil {
			err = fmt.Errorf("%q is no network, as 10.244.1.0/24 is one", textfile.Cut(line))
		} else {
			err = check(n)
		}
		if err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", path, i, err)
		}
		nets = append(nets, n)
	}
	return nets, nil
}

// cniFile returns the configuration that path is or has.
func cniFile(path string) (string, error) {
	es, err := os.ReadDir(path)
	if err != nil {
		if i, serr := os.Stat(path); serr == nil && !i.IsDir() {
			return path, nil
		}
		return "", err
	}
	for _, e := range es { // in order of their names
		switch filepath.Ext(e.Name()) {
		case ".conf", ".conflist", ".json":
			if !e.IsDir() {
				return filepath.Join(path, e.Name()), nil
			}
		}
	}
	return "", &fs.PathError{Op: "look for a CNI configuration in", Path: path, Err: fs.ErrNotExist}
}

// cniConf is what is of interest of a network configuration, or of a list of those.
type cniConf struct {
	IPAM    *ipam `json:"ipam"`
	Plugins []struct {
		IPAM *ipam `json:"ipam"`
	} `json:"plugins"`
}

type ipam struct {
	Type string `json:"type"`
	cniRange
	Ranges [][]cniRange `json:"ranges"`
}

type cniRange struct {
	Subnet  string `json:"subnet"`
	Gateway string `json:"gateway"`
}

// parseCNI reads the networks of a CNI configuration.
func parseCNI(path string, data []byte) ([]Network, error) {
	var c cniConf
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("%s: is no CNI configuration, or half of one: %w", path, err)
	}
	all := []*ipam{c.IPAM}
	for _, p := range c.Plugins {
		all = append(all, p.IPAM)
	}
	var nets []Network
	var others []string
	for _, i := range all {
		if i == nil || i.Type == "" {
			continue
		}
		if i.Type != "host-local" {
			others = append(others, i.Type)
			continue
		}
		ranges := slices.Concat(i.Ranges...)
		if i.Subnet != "" {
			ranges = append(ranges, i.cniRange)
		}
		for _, r := range ranges {
			n, err := r.network()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			if !slices.ContainsFunc(nets, func(o Network) bool { return o.Prefix == n.Prefix }) {
				nets = append(nets, n)
			}
		}
	}
	switch {
	case len(nets) > 0:
		return nets, nil
	case len(others) > 0:
		return nil, fmt.Errorf("%s: addresses are given out by %s, and not by host-local", path, strings.Join(others, ", "))
	}
	return nil, fmt.Errorf("%s: names no subnet for host-local", path)
}

func (r cniRange) network() (n Network, err error) {
	if n.Prefix, err = netip.ParsePrefix(r.Subnet); err != nil {
		return n, fmt.Errorf("subnet %q: is no network", textfile.Cut(r.Subnet))
	}
	n.Prefix = n.Prefix.Masked() // host-local takes both
	if r.Gateway != "" {
		if n.Gateway, err = netip.ParseAddr(r.Gateway); err != nil {
			return n, fmt.Errorf("gateway %q: is no address", textfile.Cut(r.Gateway))
		}
	}
	return n, check(n)
}
