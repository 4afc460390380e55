package nft

import (
	"fmt"
	"slices"
	"strings"
)

// The sysctls that have Linux forward packets.
const (
	ForwardIPv4 = "net.ipv4.ip_forward"
	ForwardIPv6 = "net.ipv6.conf.all.forwarding"
)

// names are all of them, sorted.
var names = []string{ForwardIPv4, ForwardIPv6}

// Forwarding is what Linux does with packets that are for others.
type Forwarding struct {
	IPv4, IPv6 bool // it forwards them
	// Off are the sysctls that TurnOn would turn on, sorted. A family that the kernel lacks has none.
	Off []string
	// Notice is what to turn them on would cost: nil or an *AdvertisedError.
	Notice error
}

// Known reports whether a sysctl is one that a mesh turns on.
func Known(sysctl string) bool { return slices.Contains(names, sysctl) }

// InterfaceSysctl names the sysctl that has IPv4 packets forwarded that come in by an interface, as sysctl(8) has it.
func InterfaceSysctl(iface string) string {
	return "net.ipv4.conf." + strings.ReplaceAll(iface, ".", "/") + ".forwarding"
}

// Before are values of sysctls before TurnOn, by their paths below /proc/sys: those that Linux changes along with the
// ones that are turned on and off.
type Before map[string]string

// AdvertisedError says that the host would lose IPv6 default routes when it forwards. A router that
// forwards does not listen to routers (RFC 4861, section 6.2.7): Linux then removes the default routes that it learned
// from router advertisements at once, and takes no others, unless the interface has accept_ra=2.
type AdvertisedError struct {
	Interfaces []string // that have such a route, sorted
}

func (e *AdvertisedError) Error() string {
	var set []string
	for _, i := range e.Interfaces {
		set = append(set, "net.ipv6.conf."+strings.ReplaceAll(i, ".", "/")+".accept_ra=2") // as sysctl(8) has it
	}
	return fmt.Sprintf("%s=1 takes away the IPv6 default route through %s, which is from a router advertisement; set %s first, or give the host a static route",
		ForwardIPv6, strings.Join(e.Interfaces, " and "), strings.Join(set, " and "))
}
