package hostnet

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"
)

// What golang.org/x/sys/unix does not name.
const (
	ifaProto            = 11     // IFA_PROTO, linux/if_addr.h
	ifaProtoKernelLL    = 3      // IFAPROT_KERNEL_LL: a link-local address that the kernel made
	devconfRPFilter     = 8      // IPV4_DEVCONF_RP_FILTER, linux/ip.h
	devconfDisableIPv6  = 26     // DEVCONF_DISABLE_IPV6, linux/ipv6.h
	devconfForceForward = 59     // DEVCONF_FORCE_FORWARDING, since Linux 6.17
	netconfaIfindex     = 1      // NETCONFA_IFINDEX, linux/netconf.h
	netconfaForwarding  = 2      // NETCONFA_FORWARDING
	netconfaRPFilter    = 3      // NETCONFA_RP_FILTER
	netconfaAll         = -1     // NETCONFA_IFINDEX_ALL
	rtextFilterSkipStat = 1 << 3 // RTEXT_FILTER_SKIP_STATS, linux/rtnetlink.h
)

var ne = binary.NativeEndian

// request is a netlink message being written: header, fixed part, attributes.
type request []byte

func newRequest(typ, flags uint16, fixed []byte) request {
	r := make(request, unix.NLMSG_HDRLEN, 128)
	ne.PutUint16(r[4:], typ)
	ne.PutUint16(r[6:], flags|unix.NLM_F_REQUEST)
	return r.pad(fixed)
}

func (r request) pad(b []byte) request {
	r = append(r, b...)
	for len(r)%unix.NLMSG_ALIGNTO != 0 {
		r = append(r, 0)
	}
	return r
}

func (r request) attr(typ uint16, value []byte) request {
	r = ne.AppendUint16(r, uint16(unix.SizeofNlAttr+len(value)))
	r = ne.AppendUint16(r, typ)
	return r.pad(value)
}

func (r request) u32(typ uint16, v uint32) request { return r.attr(typ, ne.AppendUint32(nil, v)) }
func (r request) u8(typ uint16, v uint8) request   { return r.attr(typ, []byte{v}) }
func (r request) text(typ uint16, s string) request {
	return r.attr(typ, append([]byte(s), 0))
}
func (r request) addr(typ uint16, a netip.Addr) request { return r.attr(typ, a.AsSlice()) }

// nest has f write the attributes inside one.
func (r request) nest(typ uint16, f func(request) request) request {
	return r.attr(typ|unix.NLA_F_NESTED, f(nil))
}

// seal gives r its length and number.
func (r request) seal(seq uint32) {
	ne.PutUint32(r[0:], uint32(len(r)))
	ne.PutUint32(r[8:], seq)
}

// message is one that was received.
type message struct {
	typ, flags uint16
	seq, pid   uint32
	body       []byte
}

// messages walks through a datagram. What does not parse ends it.
func messages(b []byte) iter.Seq[message] {
	return func(yield func(message) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			n := int(ne.Uint32(b))
			if n < unix.NLMSG_HDRLEN || n > len(b) {
				return
			}
			m := message{ne.Uint16(b[4:]), ne.Uint16(b[6:]), ne.Uint32(b[8:]), ne.Uint32(b[12:]), b[unix.NLMSG_HDRLEN:n]}
			if !yield(m) {
				return
			}
			b = b[min(align(n), len(b)):]
		}
	}
}

func align(n int) int { return (n + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1) }

// attrs walks through the attributes behind a fixed part of n bytes.
func attrs(b []byte, n int) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for b := b[min(align(n), len(b)):]; len(b) >= unix.SizeofNlAttr; {
			l := int(ne.Uint16(b))
			if l < unix.SizeofNlAttr || l > len(b) {
				return
			}
			typ := ne.Uint16(b[2:]) &^ uint16(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)
			if !yield(typ, b[unix.SizeofNlAttr:l]) {
				return
			}
			b = b[min(align(l), len(b)):]
		}
	}
}

func u32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return ne.Uint32(b)
}

func text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

func addr(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}

// family is AF_INET or AF_INET6.
func family(is4 bool) uint8 {
	if is4 {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func unspecified(fam uint8) netip.Addr {
	if fam == unix.AF_INET {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// link is a network interface.
type link struct {
	Link
	loopback     bool
	pointToPoint bool // it has one other end
	inet         bool // it has IPv4
	inet6        bool // it has an IPv6 side, which may be disabled
	disabled     bool // disable_ipv6
	force        bool // force_forwarding of IPv6
	rpFilter     uint32
}

// mesh reports whether l is the device of a mesh, this one or another.
func (l link) mesh() bool { return strings.HasPrefix(l.Alias, aliasPrefix) }

func linkHeader(index int, flags, change uint32) []byte {
	b := make([]byte, 4, unix.SizeofIfInfomsg)
	b = ne.AppendUint32(b, uint32(index))
	b = ne.AppendUint32(b, flags)
	return ne.AppendUint32(b, change)
}

func parseLink(b []byte) (l link, ok bool) {
	if len(b) < unix.SizeofIfInfomsg {
		return l, false
	}
	flags := ne.Uint32(b[8:])
	l.Index, l.Up, l.loopback = int(int32(ne.Uint32(b[4:]))), flags&unix.IFF_UP != 0, flags&unix.IFF_LOOPBACK != 0
	l.pointToPoint = flags&unix.IFF_POINTOPOINT != 0
	for typ, v := range attrs(b, unix.SizeofIfInfomsg) {
		switch typ {
		case unix.IFLA_IFNAME:
			l.Name = text(v)
		case unix.IFLA_IFALIAS:
			l.Alias = text(v)
		case unix.IFLA_MTU:
			l.MTU = int(u32(v))
		case unix.IFLA_LINKINFO:
			for typ, v := range attrs(v, 0) {
				if typ == unix.IFLA_INFO_KIND {
					l.Kind = text(v)
				}
			}
		case unix.IFLA_AF_SPEC:
			for typ, v := range attrs(v, 0) {
				switch typ {
				case unix.AF_INET:
					l.inet = true
					for typ, v := range attrs(v, 0) {
						if typ == unix.IFLA_INET_CONF {
							l.rpFilter = conf(v, devconfRPFilter-1)
						}
					}
				case unix.AF_INET6:
					l.inet6 = true
					for typ, v := range attrs(v, 0) {
						if typ == unix.IFLA_INET6_CONF {
							l.disabled, l.force = conf(v, devconfDisableIPv6) != 0, conf(v, devconfForceForward) != 0
						}
					}
				}
			}
		}
	}
	return l, true
}

// conf is the i-th value of an array of them.
func conf(b []byte, i int) uint32 {
	if len(b) < 4*i+4 {
		return 0
	}
	return ne.Uint32(b[4*i:])
}

// ifaddr is an address of an interface.
type ifaddr struct {
	index int
	local netip.Prefix // with host bits
	peer  netip.Addr   // the other end's, if there is one
	flags uint32       // IFA_F_*
	proto uint8
	scope uint8
}

func parseAddr(b []byte) (a ifaddr, ok bool) {
	if len(b) < unix.SizeofIfAddrmsg {
		return a, false
	}
	fam, bits := b[0], int(b[1])
	a.flags, a.scope, a.index = uint32(b[2]), b[3], int(ne.Uint32(b[4:]))
	var local, address netip.Addr
	for typ, v := range attrs(b, unix.SizeofIfAddrmsg) {
		switch typ {
		case unix.IFA_LOCAL:
			local = addr(v)
		case unix.IFA_ADDRESS:
			address = addr(v)
		case unix.IFA_FLAGS: // all of them: those in the header are eight
			a.flags = u32(v)
		case ifaProto:
			if len(v) > 0 {
				a.proto = v[0]
			}
		}
	}
	if !local.IsValid() {
		local = address
	} else if address.IsValid() && address != local {
		a.peer = address
	}
	a.local = netip.PrefixFrom(local, bits)
	return a, a.local.IsValid() && family(local.Is4()) == fam
}

// usable reports whether packets can be sent from a, which is on l: IPv6 does not send from an address that it
// has not found to be nobody else's (RFC 4862, section 5.4), and on a link without carrier does not get to that.
func (a ifaddr) usable(l link) bool {
	return l.Up && a.flags&unix.IFA_F_DADFAILED == 0 && (a.flags&unix.IFA_F_TENTATIVE == 0 || a.flags&unix.IFA_F_OPTIMISTIC != 0)
}

func (a ifaddr) kernels() bool {
	return a.proto >= 1 && a.proto <= ifaProtoKernelLL || a.local.Addr().IsLinkLocalUnicast() && a.local.Addr().Is6()
}

// dummy is the IPv4 dummy address (RFC 7600), which nobody sends to.
var dummy = netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 0, 8}), 32)

// keeper is what keeps the IPv4 routes into a link that has no other IPv4 address: with the last one Linux
// removes them all (fib_disable_ip in net/ipv4/fib_frontend.c). Of its scope it is chosen as nobody's source.
func keeper(index int, proto uint8) ifaddr {
	return ifaddr{index: index, local: dummy, scope: unix.RT_SCOPE_HOST, proto: proto}
}

// keeps reports whether a is a keeper.
func (a ifaddr) keeps() bool { return a.local == dummy && a.scope == unix.RT_SCOPE_HOST }

func (a ifaddr) request(typ, flags uint16) request {
	local := a.local.Addr()
	r := newRequest(typ, flags, ne.AppendUint32([]byte{family(local.Is4()), uint8(a.local.Bits()), 0, a.scope}, uint32(a.index)))
	r = r.addr(unix.IFA_LOCAL, local)
	if a.peer.IsValid() {
		r = r.addr(unix.IFA_ADDRESS, a.peer)
	} else {
		r = r.addr(unix.IFA_ADDRESS, local)
	}
	if typ == unix.RTM_NEWADDR {
		r = r.u8(ifaProto, a.proto)
		if local.Is6() {
			r = r.u32(unix.IFA_FLAGS, unix.IFA_F_NODAD|unix.IFA_F_NOPREFIXROUTE)
		}
	}
	return r
}

// route is a route into one interface.
type route struct {
	dst    netip.Prefix
	src    netip.Addr
	table  uint32
	metric uint32
	oif    int
	mtu    uint32
	proto  uint8
	tos    uint8
	typ    uint8
}

func parseRoute(b []byte) (r route, ok bool) {
	if len(b) < unix.SizeofRtMsg {
		return r, false
	}
	fam, bits := b[0], int(b[1])
	if fam != unix.AF_INET && fam != unix.AF_INET6 || ne.Uint32(b[8:])&unix.RTM_F_CLONED != 0 {
		return r, false
	}
	r.tos, r.table, r.proto, r.typ = b[3], uint32(b[4]), b[5], b[7]
	dst := unspecified(fam)
	for typ, v := range attrs(b, unix.SizeofRtMsg) {
		switch typ {
		case unix.RTA_DST:
			dst = addr(v)
		case unix.RTA_PREFSRC:
			r.src = addr(v)
		case unix.RTA_TABLE:
			r.table = u32(v)
		case unix.RTA_PRIORITY:
			r.metric = u32(v)
		case unix.RTA_OIF:
			r.oif = int(u32(v))
		case unix.RTA_METRICS:
			for typ, v := range attrs(v, 0) {
				if typ == unix.RTAX_MTU {
					r.mtu = u32(v)
				}
			}
		}
	}
	r.dst = netip.PrefixFrom(dst, bits)
	return r, r.dst.IsValid()
}

// request writes r. It names all that makes it ours: prefix, table, metric, protocol, interface.
func (r route) request(typ, flags uint16) request {
	fam := family(r.dst.Addr().Is4())
	scope, kind := uint8(unix.RT_SCOPE_UNIVERSE), max(r.typ, unix.RTN_UNICAST)
	switch {
	case typ == unix.RTM_DELROUTE:
		scope, kind = unix.RT_SCOPE_NOWHERE, r.typ // whatever it has
	case fam == unix.AF_INET && kind == unix.RTN_UNICAST:
		scope = unix.RT_SCOPE_LINK
	}
	table := uint8(unix.RT_TABLE_UNSPEC)
	if r.table < 256 {
		table = uint8(r.table)
	}
	q := newRequest(typ, flags, []byte{fam, uint8(r.dst.Bits()), 0, r.tos, table, r.proto, scope, kind, 0, 0, 0, 0})
	if r.dst.Bits() > 0 {
		q = q.addr(unix.RTA_DST, r.dst.Addr())
	}
	if r.oif != 0 {
		q = q.u32(unix.RTA_OIF, uint32(r.oif))
	}
	q = q.u32(unix.RTA_PRIORITY, r.metric).u32(unix.RTA_TABLE, r.table)
	if r.src.IsValid() {
		q = q.addr(unix.RTA_PREFSRC, r.src)
	}
	return q
}

// rule is a routing rule. Values compare with ==.
type rule struct {
	fam      uint8
	priority uint32
	table    uint32
	mark     uint32
	mask     uint32 // of the mark; 0 where there is none
	not      bool
	specific bool   // only routes that are narrower than a default route count (suppress_prefixlength 0)
	iif      string // of the rule that says whose ours are, which does nothing
	proto    uint8
	action   uint8 // FR_ACT_*
	other    bool  // it is of a form that ours never has
}

// parseRule parses a rule. What is not known to say nothing is taken for a condition, and so makes it another's.
func parseRule(b []byte) (r rule, ok bool) {
	if len(b) < unix.SizeofRtMsg {
		return r, false
	}
	flags := ne.Uint32(b[8:])
	r.fam, r.table, r.action, r.not = b[0], uint32(b[4]), b[7], flags&unix.FIB_RULE_INVERT != 0
	flags &^= unix.FIB_RULE_IIF_DETACHED // there is no such interface now
	r.other = b[1] != 0 || b[2] != 0 || b[3] != 0 || b[5] != 0 || b[6] != 0 || flags&^unix.FIB_RULE_INVERT != 0
	masked := false
	for typ, v := range attrs(b, unix.SizeofRtMsg) {
		switch typ {
		case unix.FRA_PRIORITY:
			r.priority = u32(v)
		case unix.FRA_TABLE:
			r.table = u32(v)
		case unix.FRA_FWMARK:
			r.mark = u32(v)
		case unix.FRA_FWMASK:
			r.mask, masked = u32(v), true
		case unix.FRA_PROTOCOL:
			if len(v) > 0 {
				r.proto = v[0]
			}
		case unix.FRA_IIFNAME:
			r.iif = text(v)
		case unix.FRA_SUPPRESS_PREFIXLEN:
			r.specific = len(v) == 4 && u32(v) == 0
			r.other = r.other || !r.specific && u32(v) != ^uint32(0)
		case unix.FRA_SUPPRESS_IFGROUP:
			r.other = r.other || u32(v) != ^uint32(0)
		default:
			r.other = true
		}
	}
	if r.mark != 0 && !masked {
		r.mask = ^uint32(0)
	}
	r.other = r.other || badPriority(int64(r.priority))
	own := !badTable(int64(r.table)) && r.table != MainTable
	if r.iif != "" {
		r.other = r.other || r.action != unix.FR_ACT_NOP || r.not || r.mark != 0 || r.mask != 0 || r.specific || !own
	} else {
		r.other = r.other || r.action != unix.FR_ACT_TO_TBL || !r.not || r.mark == 0 || r.mark&^r.mask != 0 || r.specific != (r.table == MainTable) || !r.specific && !own
	}
	return r, r.fam == unix.AF_INET || r.fam == unix.AF_INET6
}

func (r rule) String() string {
	s := fmt.Sprintf("IPv%d rule for table %d with priority %d", map[uint8]int{unix.AF_INET: 4, unix.AF_INET6: 6}[r.fam], r.table, r.priority)
	if r.mark != 0 {
		s += fmt.Sprintf(" and mark %#x/%#x", r.mark, r.mask)
	}
	if r.iif != "" {
		s += " from " + r.iif
	}
	return s
}

// hits reports whether a request to remove r would remove c, which comes first: Linux compares only what a request
// names, which conditions that r does not have are not, and never whether a rule is inverted (rule_find in
// net/core/fib_rules.c).
func (r rule) hits(c rule) bool {
	return c.fam == r.fam && c.action == r.action && c.table == r.table && c.priority == r.priority && c.proto == r.proto &&
		(r.mark == 0 || c.mark == r.mark && c.mask == r.mask) && (!r.specific || c.specific) && (r.iif == "" || c.iif == r.iif)
}

func (r rule) request(typ, flags uint16) request {
	var invert uint32
	if r.not {
		invert = unix.FIB_RULE_INVERT
	}
	table := uint8(unix.RT_TABLE_UNSPEC)
	if r.table < 256 {
		table = uint8(r.table)
	}
	q := newRequest(typ, flags, ne.AppendUint32([]byte{r.fam, 0, 0, 0, table, 0, 0, r.action}, invert))
	q = q.u32(unix.FRA_PRIORITY, r.priority).u32(unix.FRA_TABLE, r.table).u8(unix.FRA_PROTOCOL, r.proto)
	if r.mark != 0 {
		q = q.u32(unix.FRA_FWMARK, r.mark).u32(unix.FRA_FWMASK, r.mask)
	}
	if r.specific {
		q = q.u32(unix.FRA_SUPPRESS_PREFIXLEN, 0)
	}
	if r.iif != "" {
		q = q.text(unix.FRA_IIFNAME, r.iif)
	}
	return q
}
