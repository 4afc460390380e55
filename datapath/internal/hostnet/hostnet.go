package hostnet

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/prefixes"
)

const (
	// DefaultProtocol marks what is ours. It is not in iproute2's rt_protos, where 0 to 4 belong to the
	// kernel and the administrator.
	DefaultProtocol = 87
	// DefaultMetric is that of our routes. The kernel's own are at 0 (IPv4) and 256 (IPv6), and DHCP's
	// usually from 100 on.
	DefaultMetric = 50
	// DefaultPriority is that of the first of our three rules, which are before the one of the main table at 32766.
	DefaultPriority = 32500
	// MainTable is the routing table that every packet is looked up in.
	MainTable = 254
	// PolicyTable is that of Options.Policy where none is chosen. Nobody is known to use that number.
	PolicyTable = 8787
	// DefaultMark and DefaultMask are those of Options.Policy where none are chosen: four bits which the marks
	// of kube-proxy (0x4000, 0x8000), Calico (0xffff0000), wg-quick (0xca6c), Tailscale (0xff0000), KubeSpan
	// (0x60) and the AWS CNI (0x80) do not have set in this way. All meshes of a host that have the same ones
	// stay out of each other's tunnels too.
	DefaultMark = 0x50
	DefaultMask = 0xf0
	// MinMTU is the least MTU of a link that has IPv6 (RFC 8200, section 5).
	MinMTU = 1280
)

// Sources says where the addresses of this node are put, and how packets come by them.
type Sources uint8

const (
	// SourceHint puts addresses on the link, and the source address of a route on the route.
	SourceHint Sources = iota
	// SourceDevice puts addresses on the link and leaves the choice among them to the kernel: the first
	// one for IPv4, RFC 6724 for IPv6.
	SourceDevice
	// SourceLoopback puts addresses on the loopback interface, where they outlive the link's going
	// down, and the source address of a route on the route. It needs Linux 5.18.
	SourceLoopback
)

// Options are the settings of a Host. Only Interface must be given, and with Observe not even that.
type Options struct {
	// Interface is the name of the link: see CheckInterface.
	Interface string
	// Observe has no link be ours: Read says what there is in the namespace for packets with Mark, and nothing can be
	// changed. It is for the underlay of a link that is in another namespace.
	Observe bool
	// Namespace is the path of the network namespace to work in, such as /run/netns/name or
	// /proc/<pid>/ns/net. Default: the namespace of the thread that calls Open, whichever threads
	// call later. It is held until Close.
	Namespace string
	// Table is the routing table of the routes. Default: MainTable, or PolicyTable with Policy. Another
	// one than the main table must not hold routes of anybody else when the link is created.
	Table int
	// Policy has packets looked up in Table by rules of ours, but for those with Mark: these can never follow
	// the routes into the link, whatever those are. What the main table knows better than by a default route goes
	// there. Without it, looking up another table than the main one is left to the rules of the administrator.
	Policy bool
	// Priority is that of the first of the three rules; the others have the next two numbers. Default:
	// DefaultPriority.
	Priority int
	// Mark is the firewall mark of encrypted packets, without Policy too: other meshes of the host may have it. Mask are
	// the bits of it that count, with Policy. Defaults: DefaultMark and DefaultMask, or all bits of a Mark that is given.
	Mark, Mask uint32
	// Guard are prefixes that packets of this host may leave to by way of the link only, with Policy: what is not
	// routed into it is unreachable there, be it that there is no link. It fails closed. Only what the main table
	// knows better than by a default route, and what is marked, still goes. Default: none, it fails open.
	Guard prefixes.Set
	// SNAT are destinations beside the mesh. Packets that come out of the link and leave by another one to there get
	// this host's address as source. Default: none.
	SNAT prefixes.Set
	// Forward has the host forward packets, where it does not: Up turns on net.ipv4.ip_forward and
	// net.ipv6.conf.all.forwarding, and Remove turns off what was turned on, unless another mesh has noted it too. The
	// table of nftables notes it, beyond the end of the process. Interfaces of which alone packets were forwarded before,
	// and net.ipv4.conf.all.accept_redirects, are remembered by the process only: where another one turns off, no
	// interface forwards then, and redirects are accepted by what each interface says. What an administrator turned off
	// and on again, while no mesh looked, counts as turned on by the mesh. Default: they are left alone, but for
	// net.ipv4.conf of our own link, which forwards where the host does.
	Forward bool
	// Metric is that of the routes. The one after it serves for the time a source address is changed.
	// Default: DefaultMetric.
	Metric int
	// Protocol marks what is ours, 5 to 255. Two meshes in one namespace need two protocols where they
	// use SourceLoopback or Policy. Default: DefaultProtocol.
	Protocol int
	// Cover are prefixes that are routed whole, as soon as one route inside them is wanted: many
	// prefixes then need one route. Default: none, each prefix has its own route.
	Cover prefixes.Set
	// Sources says where addresses are put. Default: SourceHint.
	Sources Sources
	// Logger is told what was found and removed. Default: nobody.
	Logger *slog.Logger
}

// defaulted returns o with its defaults, or what is wrong with it.
func (o Options) defaulted() (Options, error) {
	var errs []error
	if o.Observe {
		o.Interface = ""
	} else if err := CheckInterface(o.Interface); err != nil {
		errs = append(errs, err)
	}
	def := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	if o.Policy {
		def(&o.Table, PolicyTable)
		if o.Mark == 0 && o.Mask == 0 {
			o.Mark, o.Mask = DefaultMark, DefaultMask
		} else if o.Mask == 0 {
			o.Mask = ^uint32(0)
		}
	}
	if o.Mark == 0 && !o.Policy {
		o.Mark = DefaultMark
	}
	def(&o.Table, MainTable)
	def(&o.Priority, DefaultPriority)
	def(&o.Metric, DefaultMetric)
	def(&o.Protocol, DefaultProtocol)
	if badTable(int64(o.Table)) {
		errs = append(errs, fmt.Errorf("routing table %d: not 1 to 4294967295, or kept by Linux (253, 255); leave it out for the main table", o.Table))
	}
	if o.Policy && o.Table == MainTable {
		errs = append(errs, errors.New("policy routing by the main table, in which encrypted packets are looked up too: choose another table"))
	}
	if o.Policy && (o.Mark == 0 || o.Mark&^o.Mask != 0) {
		errs = append(errs, fmt.Errorf("mark %#x with mask %#x: none of its bits may be outside of the mask, and one has to be in it", o.Mark, o.Mask))
	}
	if !o.Policy && o.Mask != 0 {
		errs = append(errs, fmt.Errorf("mask %#x: there is no rule that would have it; it is for policy routing", o.Mask))
	}
	if !o.Policy && !o.Guard.IsEmpty() {
		errs = append(errs, fmt.Errorf("guarded prefixes %v: without policy routing they would cut off this host, encrypted packets too", o.Guard))
	}
	if badPriority(int64(o.Priority)) || badPriority(int64(o.Priority)+2) {
		errs = append(errs, fmt.Errorf("rule priority %d: outside 1 to 32763, which with the next two come before the main table", o.Priority))
	}
	if o.Metric < 1 || int64(o.Metric) > maxMetric {
		errs = append(errs, fmt.Errorf("metric %d: outside 1 to %d", o.Metric, int64(maxMetric)))
	}
	if o.Protocol < 5 || o.Protocol > 255 {
		errs = append(errs, fmt.Errorf("route protocol %d: outside 5 to 255, of which no other program may use it", o.Protocol))
	}
	if o.Sources > SourceLoopback {
		errs = append(errs, fmt.Errorf("sources %d: unknown", o.Sources))
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, errors.Join(errs...)
}

const (
	// guardMetric is that of the routes of Options.Guard, which come after all others.
	guardMetric = 1<<32 - 2
	// maxMetric leaves room for the next one, and for the guard's.
	maxMetric = guardMetric - 2
)

func badTable(n int64) bool    { return n < 1 || n > 1<<32-1 || n == 255 || n == 253 }
func badPriority(n int64) bool { return n < 1 || n > 32765 }

// ErrName is wrapped by the errors of CheckInterface.
var ErrName = errors.New("not a name for an interface")

// CheckInterface reports why Linux would refuse, or confuse, an interface of that name: it must have 1
// to 15 bytes, not characters (IFNAMSIZ in linux/if.h), none of them a slash, a colon, a percent sign, white
// space or a control character, and be neither "." nor "..". Linux takes a byte 0xa0 for white space (isspace in
// lib/ctype.c), which UTF-8 has in some letters. A name too long is not cut: two would be one.
func CheckInterface(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: it is empty", ErrName)
	case len(name) > 15:
		return fmt.Errorf("%w: %q has %d bytes, and Linux takes 15", ErrName, name, len(name))
	case name == "." || name == "..":
		return fmt.Errorf("%w: %q means a folder", ErrName, name)
	case name == "all" || name == "default" || name == "lo":
		return fmt.Errorf("%w: %q means something else to Linux", ErrName, name)
	case !utf8.ValidString(name):
		return fmt.Errorf("%w: %q is not UTF-8", ErrName, name)
	}
	for _, r := range name {
		switch {
		case r <= ' ' || r == 0x7f || r == '/' || r == ':' || r == '%':
			return fmt.Errorf("%w: %q has %q in it", ErrName, name, r)
		case unicode.IsSpace(r):
			return fmt.Errorf("%w: %q has white space in it: %U", ErrName, name, r)
		case strings.IndexByte(string(r), 0xa0) >= 0:
			return fmt.Errorf("%w: %q has %q in it, with the byte 0xa0, which is white space to Linux", ErrName, name, r)
		}
	}
	return nil
}

// Link is our network interface.
type Link struct {
	Index int
	Name  string
	Kind  string // "wireguard", "tun", ...; empty for hardware
	Alias string
	MTU   int // bytes
	Up    bool
}

// State is what the host is like, as far as it is ours or bears on us.
type State struct {
	Link Link // zero: there is none

	// Ready says that the link is up, has its name, its rules, guard and reverse path filter, and that
	// nothing is left of other Options. Where it is false, Up has something to do.
	Ready bool

	// Addrs are our addresses, where Options.Sources puts them. What is no host prefix was put on the
	// link by somebody else, and RemoveAddrs removes it too.
	Addrs prefixes.Set

	// Routes are what our routes lead into the link, with their source addresses. A prefix that is not
	// routed as Options have it, or twice, has the unspecified address as its source, which nobody
	// wants: AddRoutes puts it right. With Options.Cover, a route that is covered is there if AddRoutes
	// was asked for it and its cover is there; a cover that nobody asked for stands for itself.
	Routes map[netip.Prefix]netip.Addr

	// Host is what there is around the link. Its Addrs are those that packets can be sent from now: on
	// links that are up, and not tentative. Its Underlay is left to the driver.
	Host datapath.Host

	// NoIPv4 and NoIPv6 say why the link cannot carry a family; nil where it can.
	NoIPv4, NoIPv6 error

	// Problems are what keeps packets from arriving though everything is in place: a strict reverse
	// path filter, a rule or route of somebody else that comes first, a mark that others have too.
	Problems problems
}

// problems has one for each subject.
type problems []datapath.Problem

func (ps *problems) add(subject, message, remedy string) {
	if !slices.ContainsFunc(*ps, func(p datapath.Problem) bool { return p.Subject == subject }) {
		*ps = append(*ps, datapath.Problem{Subject: subject, Message: message, Remedy: remedy})
	}
}

var (
	// ErrNoLink says that our link does not exist. It is datapath.ErrNoDevice too.
	ErrNoLink = fmt.Errorf("no link: %w", datapath.ErrNoDevice)
	// ErrFamily says that the host, or the link, does not do IPv4 or IPv6.
	ErrFamily = errors.New("address family not available")
	// ErrInUse says that another mesh has the device.
	ErrInUse = errors.New("in use by another mesh")
	// ErrMTU says that an MTU is out of bounds.
	ErrMTU = errors.New("MTU out of bounds")
)

// ForeignError says that something is in the way which is not ours, and is left as it is.
type ForeignError struct {
	What   string // "link wg0", "route 10.0.0.0/8", "address 10.0.0.1", "table 100"
	Owner  string // what is known of it: interface, protocol, kind, alias
	Remedy string // what an operator can do
}

func (e *ForeignError) Error() string {
	return fmt.Sprintf("%s is not ours: %s; %s", e.What, e.Owner, e.Remedy)
}

// ItemError is the error of one prefix among several.
type ItemError struct {
	Prefix netip.Prefix
	Err    error
}

func (e *ItemError) Error() string { return fmt.Sprintf("%v: %v", e.Prefix, e.Err) }
func (e *ItemError) Unwrap() error { return e.Err }

// Items yields every *ItemError in err, in order. An error that is of no prefix, and so of all of them, is
// yielded with the zero Prefix.
func Items(err error) iter.Seq2[netip.Prefix, error] {
	return func(yield func(netip.Prefix, error) bool) { items(err, yield) }
}

func items(err error, yield func(netip.Prefix, error) bool) bool {
	switch e := err.(type) {
	case nil:
		return true
	case *ItemError:
		return yield(e.Prefix, e.Err)
	case interface{ Unwrap() []error }:
		for _, sub := range e.Unwrap() {
			if !items(sub, yield) {
				return false
			}
		}
		return true
	}
	return yield(netip.Prefix{}, err)
}

// Split replaces the error of an op about several prefixes by one for each part of it that failed.
func Split(err error) error {
	var errs []error
	for f := range datapath.Failures(err) {
		if parts := partsOf(f); parts != nil {
			errs = append(errs, parts...)
		} else {
			errs = append(errs, f)
		}
	}
	return errors.Join(errs...)
}

// partsOf returns an *OpError for each prefix of an op that failed; nil where all of it did.
func partsOf(f *datapath.OpError) (parts []error) {
	for p, err := range Items(f.Err) {
		if !p.IsValid() {
			return nil
		}
		var op datapath.Op
		switch o := f.Op.(type) {
		case datapath.AddAddrs:
			op = datapath.AddAddrs{Addrs: prefixes.Must(p)}
		case datapath.RemoveAddrs:
			op = datapath.RemoveAddrs{Addrs: prefixes.Must(p)}
		case datapath.RemoveRoutes:
			op = datapath.RemoveRoutes{Prefixes: prefixes.Must(p)}
		case datapath.AddRoutes:
			i := slices.IndexFunc(o.Routes, func(r datapath.Route) bool { return r.Prefix == p })
			if i < 0 {
				return nil
			}
			op = datapath.AddRoutes{Routes: o.Routes[i : i+1]}
		default:
			return nil
		}
		parts = append(parts, &datapath.OpError{Op: op, Err: err})
	}
	return parts
}

// Cleanup removes what a mesh with these Options left on the host, and nothing else: links, with all that
// is on them or leads into them, addresses on the loopback interface, and rules. It does not matter which
// Sources, Table, Metric or Cover it used. A second call finds nothing to do. The mesh must not run.
func Cleanup(ctx context.Context, o Options) error {
	h, err := Open(o)
	if err != nil {
		return err
	}
	defer h.Close()
	return h.Remove(ctx)
}
