package main

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
)

// leftovers names what an agent's may be among: all WireGuard interfaces, and the addresses of lo. A list that
// changed while Linux wrote it is read again.
func leftovers() (all []string, err error) {
	for range 10 {
		if all, err = listLeftovers(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}

func listLeftovers() (all []string, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("the host's interfaces cannot be listed: %w", err)
	}
	for _, l := range links {
		switch {
		case l.Type() == "wireguard":
			all = append(all, "the interface "+l.Attrs().Name)
		case l.Attrs().Name == "lo":
			as, err := netlink.AddrList(l, netlink.FAMILY_ALL)
			if err != nil {
				return nil, fmt.Errorf("the addresses of lo cannot be listed: %w", err)
			}
			for _, a := range as {
				all = append(all, fmt.Sprintf("the address %v of lo", a.IPNet))
			}
		}
	}
	return all, nil
}
