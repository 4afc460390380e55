package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warren-mesh/warren/examples/agent/internal/namespace"
)

// listLeftovers is leftovers in the namespace of this thread: all interfaces of the kinds that meshes make, the
// addresses of lo, the tables of nftables that are called as a mesh's, and the rules and unreachable routes with the
// protocol of d.
func listLeftovers(d device) (all []leftover, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("the host's interfaces cannot be listed: %w", err)
	}
	for _, l := range links {
		name, alias := l.Attrs().Name, l.Attrs().Alias
		switch {
		case l.Type() == "wireguard" || l.Type() == "tuntap":
			of := unmarked
			if mark, ok := strings.CutPrefix(alias, ownAlias); ok {
				of, _, _ = strings.Cut(mark, ":")
			}
			all = append(all, leftover{"the interface " + name, of})
		case name == "lo":
			as, err := netlink.AddrList(l, netlink.FAMILY_ALL)
			if err != nil {
				return nil, fmt.Errorf("the addresses of lo cannot be listed: %w", err)
			}
			for _, a := range as {
				all = append(all, leftover{fmt.Sprintf("the address %v of lo", a.IPNet), unmarked})
			}
		}
	}
	for _, version := range []int{4, 6} {
		family := map[int]int{4: netlink.FAMILY_V4, 6: netlink.FAMILY_V6}[version]
		rules, err := netlink.RuleList(family)
		if unknownFamily(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("the host's rules for IPv%d cannot be listed: %w", version, err)
		}
		for _, r := range rules {
			if int(r.Protocol) == d.Protocol {
				all = append(all, leftover{fmt.Sprintf("the rule %d of IPv%d, to table %d", r.Priority, version, r.Table), ""})
			}
		}
		guards := &netlink.Route{Protocol: netlink.RouteProtocol(d.Protocol), Type: unix.RTN_UNREACHABLE, Table: unix.RT_TABLE_UNSPEC}
		routes, err := netlink.RouteListFiltered(family, guards, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TYPE|netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("the host's routes for IPv%d cannot be listed: %w", version, err)
		}
		for _, r := range routes {
			all = append(all, leftover{fmt.Sprintf("the guard of %v, in table %d", r.Dst, r.Table), ""})
		}
	}
	tables, err := (&nftables.Conn{}).ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil { // without the privilege, or nftables: then none of it can be a mesh's to remove
		return all, nil
	}
	for _, t := range tables {
		if of, ok := strings.CutPrefix(t.Name, "warren-"); ok {
			all = append(all, leftover{"the nftables table inet " + t.Name, of})
		}
	}
	return all, nil
}

// unknownFamily says that the kernel does not have it.
func unknownFamily(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

func changedMeanwhile(err error) bool { return errors.Is(err, netlink.ErrDumpInterrupted) }

// inUse reports that a process has d, the interface of which is on a TUN device in the namespace of this thread: unless
// somebody made it persistent, it is there for as long as its process. That one of the kernel's is in use is found
// out by the datapath.
func inUse(d device) error {
	l, err := netlink.LinkByName(d.Name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("the host's interfaces cannot be listed: %w", err)
	}
	t, ok := l.(*netlink.Tuntap)
	if !ok || !t.NonPersist || !strings.HasPrefix(l.Attrs().Alias, ownAlias) {
		return nil
	}
	return errors.New("it is in use: a TUN interface is there for as long as the process that made it, an agent with another state folder say; stop that one")
}

// forwards names the sysctls of a namespace by which it forwards packets.
func forwards(in *namespace.Namespace) (on []string) {
	_ = in.Do(func() error {
		for _, name := range []string{"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"} {
			b, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
			if err == nil && string(bytes.TrimSpace(b)) != "0" {
				on = append(on, name)
			}
		}
		return nil
	})
	return on
}
