package datapathtest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/prefixes"
)

// Key returns the private key that a name stands for in scenarios; the same name, the same key.
func Key(name string) key.Private {
	sum := sha256.Sum256([]byte("datapathtest private " + name))
	k, err := key.PrivateFromBytes(sum[:])
	if err != nil {
		panic(err)
	}
	return k
}

// Preshared is Key for preshared keys. The empty name is none.
func Preshared(name string) key.Preshared {
	if name == "" {
		return key.Preshared{}
	}
	sum := sha256.Sum256([]byte("datapathtest preshared " + name))
	k, err := key.PresharedFromBytes(sum[:])
	if err != nil {
		panic(err)
	}
	return k
}

// ParseState reads a State written one thing a line:
//
//	device key=NAME [port=N] [mark=N] [mtu=N]
//	addr ADDRESS...
//	local PREFIX...
//	peer NAME [endpoint=ADDR:PORT] [keepalive=DURATION] [psk=NAME] PREFIX...
//	route PREFIX [from ADDRESS]
//
// Empty lines and lines that begin with # are left out. Names stand for keys, see Key.
func ParseState(text string) (datapath.State, error) {
	s := datapath.State{Routes: map[netip.Prefix]netip.Addr{}, Peers: map[key.Public]datapath.Peer{}}
	for i, line := range strings.Split(text, "\n") {
		f := strings.Fields(line)
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		if err := parseLine(&s, f[0], f[1:]); err != nil {
			return s, fmt.Errorf("line %d: %q: %w", i+1, line, err)
		}
	}
	return s, nil
}

func parseLine(s *datapath.State, word string, args []string) error {
	opts := make(map[string]string)
	var rest []string
	for _, a := range args {
		if k, v, ok := strings.Cut(a, "="); ok {
			opts[k] = v
		} else {
			rest = append(rest, a)
		}
	}
	switch word {
	case "device":
		s.Device.Key = Key(opts["key"])
		port, err1 := number(opts["port"], 16)
		mark, err2 := number(opts["mark"], 32)
		mtu, err3 := number(opts["mtu"], 16)
		s.Device.ListenPort, s.Device.Mark, s.Device.MTU = uint16(port), uint32(mark), int(mtu)
		return errors.Join(err1, err2, err3)
	case "addr", "local":
		set, err := prefixes.Parse(rest...)
		if word == "addr" {
			s.Addrs = s.Addrs.Union(set)
		} else {
			s.Local = s.Local.Union(set)
		}
		return err
	case "route":
		p, err := netip.ParsePrefix(rest[0])
		if err != nil {
			return err
		}
		var from netip.Addr
		if len(rest) == 3 {
			if from, err = netip.ParseAddr(rest[2]); err != nil {
				return err
			}
		}
		s.Routes[p] = from
	case "peer":
		set, err := prefixes.Parse(rest[1:]...)
		if err != nil {
			return err
		}
		p := datapath.Peer{Prefixes: set, Preshared: Preshared(opts["psk"])}
		if v, ok := opts["endpoint"]; ok {
			if p.Endpoint, err = netip.ParseAddrPort(v); err != nil {
				return err
			}
		}
		if v, ok := opts["keepalive"]; ok {
			if p.Keepalive, err = time.ParseDuration(v); err != nil {
				return err
			}
		}
		s.Peers[Key(rest[0]).Public()] = p
	default:
		return errors.New("unknown word")
	}
	return nil
}

func number(s string, bits int) (uint64, error) {
	if s == "" {
		return 0, nil
	}
	return strconv.ParseUint(s, 10, bits)
}

// FormatOps writes ops one a line, with the given names in place of keys.
func FormatOps(ops []datapath.Op, names ...string) string {
	var pairs []string
	for _, n := range names {
		pairs = append(pairs, Key(n).Public().String(), n)
	}
	var lines []string
	for _, op := range ops {
		lines = append(lines, op.String()+"\n")
	}
	return strings.NewReplacer(pairs...).Replace(strings.Join(lines, ""))
}

// names returns the names of keys in a scenario's text.
func names(texts ...string) []string {
	var all []string
	for _, t := range texts {
		for line := range strings.Lines(t) {
			f := strings.Fields(line)
			for i, w := range f {
				if n, ok := strings.CutPrefix(w, "key="); ok {
					all = append(all, n)
				}
				if i == 1 && f[0] == "peer" {
					all = append(all, w)
				}
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
