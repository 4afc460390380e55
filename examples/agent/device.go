package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strings"

	"github.com/warren-mesh/warren/datapath/auto"
	"github.com/warren-mesh/warren/examples/agent/internal/config"
	"github.com/warren-mesh/warren/examples/agent/internal/namespace"
)

// device is an interface of the host that a datapath made, or may have made: all that has to be known to remove it,
// and what belongs to it. The state folder has notes of those. The zero device is none.
type device struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace,omitempty"` // path; empty: the agent's
	Protocol  int    `json:"protocol"`            // that marks what is beside it
	Own       string `json:"own,omitempty"`       // what tells the agent's namespace from others, where Namespace is empty
}

// deviceOf is the one that c names.
func deviceOf(c config.Config) device {
	d := device{Name: c.Interface, Namespace: c.NetNS, Protocol: cmp.Or(c.Protocol, config.DefaultProtocol)}
	if d.Namespace == "" {
		d.Own = ownNamespace()
	}
	return d
}

// same reports whether d and e are one device, as far as can be told: an older note may lack where it was, and one from
// before the host was started says nothing any more.
func (d device) same(e device) bool {
	return d.Name == e.Name && d.Namespace == e.Namespace && d.Protocol == e.Protocol && !apart(d.Own, e.Own)
}

// apart reports whether two values of device.Own are of two namespaces that there are at once.
func apart(a, b string) bool {
	bootA, _, _ := strings.Cut(a, " ")
	bootB, _, _ := strings.Cut(b, " ")
	return a != "" && bootA == bootB && a != b
}

// elsewhere reports that a device was made in another namespace than this process's: what is left of it is there.
func (d device) elsewhere() error {
	if !apart(d.Own, ownNamespace()) {
		return nil
	}
	_, name, _ := strings.Cut(d.Own, " ")
	return fmt.Errorf("it was made in another network namespace than this one, %s; run this there (ip netns exec, or nsenter --net); the note of it stays until then", name)
}

// UnmarshalJSON takes the name alone too, which is what agents noted that knew the kernel datapath only.
func (d *device) UnmarshalJSON(data []byte) error {
	type plain device
	var p plain
	var err error
	if len(data) > 0 && data[0] == '"' {
		err = json.Unmarshal(data, &p.Name)
	} else {
		err = json.Unmarshal(data, &p)
	}
	p.Protocol = cmp.Or(p.Protocol, config.DefaultProtocol)
	*d = device(p)
	return err
}

func (d device) String() string {
	if d.Namespace == "" {
		return "interface " + d.Name
	}
	return fmt.Sprintf("interface %s in namespace %s", d.Name, d.Namespace)
}

// leftover is a thing on the host that may be an agent's.
type leftover struct {
	what string
	of   string // the interface that it is marked for; empty: it has the mark of a protocol alone
}

// unmarked is leftover.of of what is anybody's.
const unmarked = "-"

// leftovers names what there is in a namespace that may be of d, or of others, as far as what Linux lists allows to
// tell. A list that changed while Linux wrote it is read again.
func leftovers(in *namespace.Namespace, d device) (all []leftover, err error) {
	for range 10 {
		err = in.Do(func() error {
			var err error
			all, err = listLeftovers(d)
			return err
		})
		if !changedMeanwhile(err) {
			break
		}
	}
	return all, err
}

// left returns what there is of a device, but for what the agent that runs now with another one takes for its own.
func (d device) left(now device) (said []string, err error) {
	if d.elsewhere() != nil {
		return nil, nil // which cannot be seen from here
	}
	in, err := namespace.Open(d.Namespace)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer in.Close()
	all, err := leftovers(in, d)
	beside := d.Namespace == now.Namespace && d.Protocol == now.Protocol
	for _, l := range all {
		if l.of == d.Name || l.of == "" && !beside {
			said = append(said, l.what)
		}
	}
	return said, err
}

// clean removes a device and what belongs to it, and returns a line for each thing that is gone, or in question.
func (d device) clean(ctx context.Context) (lines []string, err error) {
	in, err := namespace.Open(d.Namespace)
	if errors.Is(err, fs.ErrNotExist) {
		return []string{fmt.Sprintf("there is no namespace %s any more, and nothing that was in it", d.Namespace)}, nil
	}
	if err != nil {
		return nil, err
	}
	defer in.Close()
	before, err := leftovers(in, d)
	forwarded := forwards(in)
	if err == nil {
		err = in.Do(func() error { return inUse(d) })
	}
	if err != nil {
		return nil, err
	}
	err = auto.Cleanup(ctx, auto.Options{Interface: d.Name, Namespace: d.Namespace, Protocol: d.Protocol})
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w: to remove it needs %s; run this as root", err, capNetAdmin)
	}
	after, lerr := leftovers(in, d)
	for _, l := range before {
		if !slices.Contains(after, l) {
			lines = append(lines, "removed "+l.what)
		}
	}
	for _, name := range forwarded {
		if !slices.Contains(forwards(in), name) {
			lines = append(lines, "turned off "+name)
		}
	}
	if err := errors.Join(err, lerr); err != nil {
		return lines, err
	}
	_ = in.Do(func() error {
		if _, err := net.InterfaceByName(d.Name); err == nil {
			lines = append(lines, fmt.Sprintf("the interface %s is not an agent's, and is left alone", d.Name))
		}
		return nil
	})
	return lines, nil
}
