package hostnet

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/warren-mesh/warren/datapath/internal/nft"
	"github.com/warren-mesh/warren/prefixes"
	"golang.org/x/sys/unix"
)

// Host is one link and what belongs to it, in one network namespace. Its methods may be called from any
// goroutine, and wait for each other.
type Host struct {
	o       Options
	alias   string // marks our link
	temp    string // the name of our link until it is marked
	ns      *namespace
	closed  atomic.Bool
	watch   *watcher
	changed chan struct{}

	telling sync.Mutex // guards changed against its closing
	told    bool       // it is closed

	filter filter // locked before mu

	mu       sync.Mutex
	c        *conn
	asked    map[netip.Prefix]netip.Addr // routes that a cover stands for, or whose source the kernel chooses
	behind   map[netip.Prefix]behind     // by cover: what it stands for, as asked has it
	known    *known                      // our routes, if nothing is known to have changed them; nil: not known
	restorer restorer
	leads    bool   // rules of former Options are left, by which packets come to routes of ours
	sendMark uint32 // of encrypted packets
	reach    reach
	before   func(what string) error // called before each change, for tests
}

// Open checks o and opens sockets. It changes nothing, and needs no link.
func Open(o Options) (*Host, error) {
	o, err := o.defaulted()
	if err != nil {
		return nil, fmt.Errorf("host network: %w", err)
	}
	h := &Host{
		o:        o,
		alias:    fmt.Sprintf("%s%s:%d", aliasPrefix, o.Interface, o.Protocol),
		temp:     tempName(o.Interface),
		sendMark: o.Mark,
		changed:  make(chan struct{}, 1),
	}
	h.filter.open = nft.Open
	h.forget()
	h.startRestorer()
	defer func() {
		if err != nil {
			h.stopRestorer()
		}
	}()
	if h.ns, err = openNamespace(o.Namespace); err != nil {
		return nil, fmt.Errorf("host network: %w", err)
	}
	if h.c, err = dial(h.ns, &h.closed); err == nil {
		if h.watch, err = watch(h); err != nil {
			h.c.nl.Close()
		}
	}
	if err != nil {
		h.ns.close()
		return nil, fmt.Errorf("host network: %w", err)
	}
	return h, nil
}

// aliasPrefix begins the alias of every mesh's link.
const aliasPrefix = "warren:"

// tempName is the name that the link called name has until it is marked.
func tempName(name string) string {
	sum := sha256.Sum256([]byte(aliasPrefix + name))
	return fmt.Sprintf("wn-%x", sum[:6])
}

// Close closes the sockets, and the channel of Changed. Twice is harmless. Other methods then return an
// error that is net.ErrClosed.
func (h *Host) Close() error {
	if h.closed.Swap(true) {
		return nil
	}
	err := errors.Join(h.c.nl.Close(), h.closeFilter(), h.watch.close(), h.ns.close())
	h.stopRestorer()
	h.telling.Lock()
	defer h.telling.Unlock()
	h.told = true
	close(h.changed)
	return err
}

// Changed returns a channel that receives after somebody else changed a link, an address, a rule, or a
// route that is ours or a default. Several changes may be reported as one, ours as somebody else's, and an
// overrun as a change: the answer to all is to Read. The channel is the same at every call; Close closes it.
func (h *Host) Changed() <-chan struct{} { return h.changed }

// Do runs f on a thread in the namespace of h, to open a socket or to create a link there. Where the thread
// that calls is in it, f runs there, and it takes no privilege; otherwise on another one that enters it, which
// takes CAP_SYS_ADMIN. A thread that cannot be brought back ends with f. f must not start goroutines that count
// on the namespace.
func (h *Host) Do(f func() error) error {
	if h.closed.Load() {
		return fmt.Errorf("host network: %w", net.ErrClosed)
	}
	return h.ns.do(f)
}

// change is one change of the host.
type change struct {
	what string
	r    request
}

var errObserve = errors.New("this host is only looked at")

// apply makes changes, and returns the error of each.
func (h *Host) apply(ctx context.Context, cs []change) []error {
	if h.o.Observe {
		return slices.Repeat([]error{errObserve}, len(cs))
	}
	rs := make([]request, len(cs))
	for i, c := range cs {
		rs[i] = c.r
		ne.PutUint16(c.r[6:], ne.Uint16(c.r[6:])|unix.NLM_F_ACK)
		switch ne.Uint16(c.r[4:]) {
		case unix.RTM_NEWROUTE, unix.RTM_DELROUTE, unix.RTM_NEWADDR: // see applyRoutes
		default:
			h.known = nil // routes may go with it
		}
	}
	if h.before == nil {
		return h.c.do(ctx, rs)
	}
	errs := make([]error, len(cs))
	for i := range cs {
		if errs[i] = h.before(cs[i].what); errs[i] == nil {
			errs[i] = h.c.do(ctx, rs[i:i+1])[0]
		}
	}
	return errs
}

func (h *Host) apply1(ctx context.Context, what string, r request) error {
	if err := h.apply(ctx, []change{{what, r}})[0]; err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// gone leaves out errors that say that what was to be deleted is not there.
func gone(err error) error {
	for _, not := range []error{unix.ESRCH, unix.ENOENT, unix.ENODEV, unix.EADDRNOTAVAIL} {
		if errors.Is(err, not) {
			return nil
		}
	}
	return err
}

// unsupported reports whether err says that the kernel has no such family or table.
func unsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.ENOENT)
}

// Mark returns the firewall mark for encrypted packets of a device that is to have asked; 0: none in particular.
func (h *Host) Mark(asked uint32) (uint32, error) {
	switch {
	case asked == 0:
		return h.o.Mark, nil
	case h.o.Policy && !h.Apart(asked):
		return 0, fmt.Errorf("mark %#x: encrypted packets would follow the routes into %s; leave it out, or have one of which mask %#x leaves %#x", asked, h.o.Interface, h.o.Mask, h.o.Mark)
	}
	return asked, nil
}

// Apart reports whether packets with that mark never follow the routes into the link.
func (h *Host) Apart(mark uint32) bool { return h.o.Policy && mark&h.o.Mask == h.o.Mark }

// Lists.

func (h *Host) links(ctx context.Context) ([]link, error) {
	var ls []link
	r := newRequest(unix.RTM_GETLINK, 0, linkHeader(0, 0, 0)).u32(unix.IFLA_EXT_MASK, rtextFilterSkipStat)
	err := h.c.dump(ctx, r, func(m message) {
		if l, ok := parseLink(m.body); ok && m.typ == unix.RTM_NEWLINK {
			ls = append(ls, l)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read links: %w", err)
	}
	return ls, nil
}

func (h *Host) addrs(ctx context.Context) ([]ifaddr, error) {
	var as []ifaddr
	for _, fam := range []uint8{unix.AF_INET, unix.AF_INET6} {
		r := newRequest(unix.RTM_GETADDR, 0, []byte{fam, 0, 0, 0, 0, 0, 0, 0})
		err := h.c.dump(ctx, r, func(m message) {
			if a, ok := parseAddr(m.body); ok && m.typ == unix.RTM_NEWADDR && m.body[0] == fam {
				as = append(as, a)
			}
		})
		if err != nil && !unsupported(err) {
			return nil, fmt.Errorf("read addresses: %w", err)
		}
	}
	return as, nil
}

// routesOf says which routes to list: of a family, and of a table, protocol and type and into an interface
// where these are not 0.
type routesOf struct {
	fam   uint8
	table uint32
	proto uint8
	typ   uint8
	oif   int
}

func (h *Host) list(ctx context.Context, o routesOf) (rs []route, err error) {
	err = h.eachRoute(ctx, o, func(b []byte) {
		r, _ := parseRoute(b)
		rs = append(rs, r)
	})
	return rs, err
}

// eachRoute gives the routes to each, as the kernel writes them.
func (h *Host) eachRoute(ctx context.Context, o routesOf, each func([]byte)) error {
	small := uint8(0)
	if o.table < 256 {
		small = uint8(o.table)
	}
	q := newRequest(unix.RTM_GETROUTE, 0, []byte{o.fam, 0, 0, 0, small, o.proto, 0, o.typ, 0, 0, 0, 0})
	if o.table != 0 {
		q = q.u32(unix.RTA_TABLE, o.table)
	}
	if o.oif != 0 {
		q = q.u32(unix.RTA_OIF, uint32(o.oif))
	}
	err := h.c.dump(ctx, q, func(m message) {
		// A kernel without that family answers with what the others have.
		r, ok := parseRoute(m.body)
		if ok && m.typ == unix.RTM_NEWROUTE && m.body[0] == o.fam &&
			(o.table == 0 || r.table == o.table) && (o.proto == 0 || r.proto == o.proto) && (o.typ == 0 || r.typ == o.typ) && (o.oif == 0 || r.oif == o.oif) {
			each(m.body)
		}
	})
	if err != nil && !unsupported(err) {
		return fmt.Errorf("read routes: %w", err)
	}
	return nil
}

// known is what is known of our routes since they were listed. It saves a list of them all for a change of
// one, and is no more than a hint: a deletion names all that makes a route ours, so that it can hit no other;
// and a route counts as there only if the kernel has just created it, or listed it. Missing from it can be
// only what somebody else added after all that the watcher was sent.
type known struct {
	routes  map[netip.Prefix][]route
	index   int    // of the link that they lead into
	changes uint64 // of the watcher, before they were listed
}

// knownRoutes returns our routes by prefix, as they are known or as they are listed now.
func (h *Host) knownRoutes(ctx context.Context, index int) (ours map[netip.Prefix][]route, listed bool, err error) {
	if k := h.known; k != nil && k.index == index {
		if changes, ok := h.watch.catchUp(h); ok && changes == k.changes {
			return k.routes, false, nil
		}
	}
	ours, err = h.ourRoutes(ctx, index)
	return ours, true, err
}

// ourRoutes lists our routes by prefix, in whatever table and with whatever metric.
func (h *Host) ourRoutes(ctx context.Context, index int) (map[netip.Prefix][]route, error) {
	h.known = nil
	m := make(map[netip.Prefix][]route)
	if index == 0 {
		return m, nil
	}
	h.watch.ours.Store(int64(index))
	changes, ok := h.watch.catchUp(h)
	for _, fam := range []uint8{unix.AF_INET, unix.AF_INET6} {
		rs, err := h.list(ctx, routesOf{fam: fam, proto: uint8(h.o.Protocol), oif: index})
		if err != nil {
			return nil, err
		}
		for _, r := range rs {
			m[r.dst] = append(m[r.dst], r)
		}
	}
	if ok {
		h.known = &known{m, index, changes}
	}
	return m, nil
}

func (h *Host) rules(ctx context.Context) ([]rule, error) {
	var rs []rule
	for _, fam := range []uint8{unix.AF_INET, unix.AF_INET6} {
		q := newRequest(unix.RTM_GETRULE, 0, []byte{fam, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
		err := h.c.dump(ctx, q, func(m message) {
			if r, ok := parseRule(m.body); ok && m.typ == unix.RTM_NEWRULE && r.fam == fam {
				rs = append(rs, r)
			}
		})
		if err != nil && !unsupported(err) {
			return nil, fmt.Errorf("read rules: %w", err)
		}
	}
	return rs, nil
}

// lookup asks the kernel where a packet to dst goes; ok is false where there is no way.
func (h *Host) lookup(ctx context.Context, dst netip.Addr, mark uint32) (r route, ok bool) {
	fam := family(dst.Is4())
	q := newRequest(unix.RTM_GETROUTE, 0, []byte{fam, uint8(dst.BitLen()), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	q = q.addr(unix.RTA_DST, dst)
	if mark != 0 {
		q = q.u32(unix.RTA_MARK, mark)
	}
	err := h.c.one(ctx, q, func(m message) {
		// This answer is of a route made for the packet, which IPv4 flags as cloned.
		if m.typ == unix.RTM_NEWROUTE && len(m.body) >= unix.SizeofRtMsg && m.body[0] == fam {
			ne.PutUint32(m.body[8:], 0)
			r, ok = parseRoute(m.body)
		}
	})
	return r, ok && err == nil && r.typ == unix.RTN_UNICAST
}

// netconf are the values of net.ipv4.conf and net.ipv6.conf that bear on us.
type netconf struct {
	forwarding
	rpFilter uint32 // net.ipv4.conf.all.rp_filter
}

func (h *Host) netconf(ctx context.Context) (c netconf, err error) {
	c.from4 = make(map[int]bool)
	for _, fam := range []uint8{unix.AF_INET, unix.AF_INET6} {
		err := h.c.dump(ctx, newRequest(unix.RTM_GETNETCONF, 0, []byte{fam}), func(m message) {
			var index int32
			var rp, forward uint32
			for typ, v := range attrs(m.body, 1) {
				switch typ {
				case netconfaIfindex:
					index = int32(u32(v))
				case netconfaRPFilter:
					rp = u32(v)
				case netconfaForwarding:
					forward = u32(v)
				}
			}
			switch {
			case len(m.body) == 0 || m.body[0] != fam: // a kernel without that family answers with another
			case fam == unix.AF_INET && index == netconfaAll:
				c.rpFilter, c.all.ipv4 = rp, forward != 0
			case fam == unix.AF_INET:
				c.from4[int(index)] = forward != 0
			case index == netconfaAll:
				c.all.ipv6 = forward != 0
			}
		})
		if err != nil && !unsupported(err) {
			return c, fmt.Errorf("read the reverse path filter, and what is forwarded: %w", err)
		}
	}
	return c, nil
}

// Ownership.

// found is what a list of links says of ours, or of findLink the link and proto only.
type found struct {
	link    link // ours; zero: none
	foreign link // has our name and is not ours; zero: none
	temp    link // has the name that ours has until it is marked, and no mark; zero: none
	extra   []link
	lo      link
	others  []string // aliases of other meshes
	proto   int      // of our link
	byIndex map[int]link
}

func (h *Host) find(ctx context.Context) (found, error) {
	ls, err := h.links(ctx)
	if err != nil {
		return found{}, err
	}
	f := found{proto: h.o.Protocol, byIndex: make(map[int]link, len(ls))}
	for _, l := range ls {
		f.byIndex[l.Index] = l
		proto, ours := h.marked(l)
		switch {
		case ours && f.link.Index != 0 && l.Name != h.o.Interface:
			f.extra = append(f.extra, l)
		case ours:
			if f.link.Index != 0 {
				f.extra = append(f.extra, f.link)
			}
			f.link, f.proto = l, proto
		case l.Name == h.o.Interface:
			f.foreign = l
		case l.Name == h.temp && l.Alias == "":
			f.temp = l
		case strings.HasPrefix(l.Alias, aliasPrefix):
			f.others = append(f.others, l.Alias)
		case l.loopback && f.lo.Index == 0:
			f.lo = l
		}
	}
	return f, nil
}

// marked reports whether a link has our mark, and with which protocol.
func (h *Host) marked(l link) (proto int, ours bool) {
	rest, ours := strings.CutPrefix(l.Alias, aliasPrefix+h.o.Interface+":")
	proto, err := strconv.Atoi(rest)
	return proto, ours && err == nil && !h.o.Observe
}

// findLink is find for those who need nothing but our link. Where it has its name, other links are not listed.
func (h *Host) findLink(ctx context.Context) (found, error) {
	var l link
	r := newRequest(unix.RTM_GETLINK, 0, linkHeader(0, 0, 0)).text(unix.IFLA_IFNAME, h.o.Interface).u32(unix.IFLA_EXT_MASK, rtextFilterSkipStat)
	err := h.c.one(ctx, r, func(m message) {
		if m.typ == unix.RTM_NEWLINK {
			l, _ = parseLink(m.body)
		}
	})
	if proto, ours := h.marked(l); err == nil && ours && l.Name == h.o.Interface && l.inet && l.inet6 { // else the loopback interface tells why
		return found{link: l, proto: proto}, nil
	}
	return h.find(ctx)
}

// shared reports whether another mesh has our protocol, so that not all that has it on the loopback interface can be
// ours. Where we put addresses there, no other of that protocol does: see checkProtocol.
func (h *Host) shared(f found) bool {
	return h.o.Sources != SourceLoopback && slices.ContainsFunc(f.others, func(alias string) bool {
		return strings.HasSuffix(alias, ":"+strconv.Itoa(f.proto))
	})
}

func (h *Host) foreignLink(l link) error {
	owner := "a network interface"
	if l.Kind != "" {
		owner = "of kind " + l.Kind
	}
	if l.Alias != "" {
		owner += fmt.Sprintf(", with the alias %q", l.Alias)
	} else {
		owner += ", without an alias"
	}
	return &ForeignError{"link " + l.Name, owner, "remove or rename it, or choose another interface name"}
}

// Link returns our link: ErrNoLink where there is none, a *ForeignError where another has its name. A link
// of ours that was renamed is returned under the name it has.
func (h *Host) Link(ctx context.Context) (Link, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := h.findLink(ctx)
	switch {
	case err != nil:
		return Link{}, err
	case f.link.Index != 0:
		h.watch.ours.Store(int64(f.link.Index))
		return f.link.Link, nil
	case f.foreign.Index != 0:
		return Link{}, h.foreignLink(f.foreign)
	}
	return Link{}, fmt.Errorf("%s: %w", h.o.Interface, ErrNoLink)
}

// Adopt returns our link of that kind, and reports whether it had to be created. A link that was renamed
// gets its name back; one of ours that is of another kind, or has another protocol's mark, is removed
// first. A link of that name that is not ours is a *ForeignError; so is, where the link has to be created, a table other
// than the main one in which somebody else has routes.
//
// create makes the link under the name it is given, which is not Options.Interface, in the namespace (see
// Do, the one method it may call); Adopt then marks and renames it. nil has Adopt create a link of that kind without attributes. When
// something fails no link is left. A new link is down until Up.
func (h *Host) Adopt(ctx context.Context, kind string, create func(name string) error) (Link, bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := h.find(ctx)
	if err != nil {
		return Link{}, false, err
	}
	if f.foreign.Index != 0 {
		return Link{}, false, h.foreignLink(f.foreign)
	}
	if f.temp.Index != 0 || len(f.extra) > 0 || f.link.Index != 0 && (f.link.Kind != kind || f.proto != h.o.Protocol) {
		stale := f
		if f.link.Kind == kind && f.proto == h.o.Protocol {
			stale.link = link{}
		}
		if err := h.removeLinks(ctx, stale); err != nil {
			return Link{}, false, err
		}
		if f.proto != h.o.Protocol {
			if err := h.removeMarked(ctx, f); err != nil {
				return Link{}, false, err
			}
		}
		return h.adopt(ctx, kind, create)
	}
	return h.adoptFound(ctx, f, kind, create)
}

func (h *Host) adopt(ctx context.Context, kind string, create func(string) error) (Link, bool, error) {
	f, err := h.find(ctx)
	if err != nil {
		return Link{}, false, err
	}
	return h.adoptFound(ctx, f, kind, create)
}

func (h *Host) adoptFound(ctx context.Context, f found, kind string, create func(string) error) (_ Link, created bool, err error) {
	b, err := h.besides(ctx, f)
	if err != nil {
		return Link{}, false, err
	}
	if f.link.Index == 0 {
		if err := h.checkProtocol(f, b); err != nil {
			return Link{}, false, err
		}
	}
	if err := h.checkTable(ctx, f, b); err != nil {
		return Link{}, false, err
	}
	if f.link.Index == 0 {
		created = true
		defer func() {
			if err != nil {
				h.discard()
			}
		}()
		if create == nil {
			create = func(name string) error {
				return h.apply1(ctx, "create "+kind+" link "+name, newRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, linkHeader(0, 0, 0)).
					text(unix.IFLA_IFNAME, name).
					nest(unix.IFLA_LINKINFO, func(r request) request { return r.text(unix.IFLA_INFO_KIND, kind) }))
			}
		} else if h.before != nil {
			if err := h.before("create link " + h.temp); err != nil {
				return Link{}, false, err
			}
		}
		if err := create(h.temp); err != nil {
			if errors.Is(err, unix.EOPNOTSUPP) {
				err = fmt.Errorf("%w: this kernel has no links of kind %s, or may not load the module", err, kind)
			}
			return Link{}, false, err
		}
		if f, err = h.find(ctx); err != nil {
			return Link{}, false, err
		}
		if f.temp.Index == 0 {
			return Link{}, false, fmt.Errorf("link %s: %w: it was created, and is not there", h.temp, ErrNoLink)
		}
		f.link = f.temp
	}
	if f.link.Name != h.o.Interface || f.link.Alias != h.alias {
		if err := h.mark(ctx, f.link); err != nil {
			return Link{}, false, err
		}
		f.link.Name, f.link.Alias = h.o.Interface, h.alias
	}
	h.watch.ours.Store(int64(f.link.Index))
	return f.link.Link, created, nil
}

// mark gives a link its name and alias, in one request that is done while nobody else changes links.
func (h *Host) mark(ctx context.Context, l link) error {
	rename := newRequest(unix.RTM_NEWLINK, 0, linkHeader(l.Index, 0, 0)).
		text(unix.IFLA_IFNAME, h.o.Interface).attr(unix.IFLA_IFALIAS, []byte(h.alias))
	what := fmt.Sprintf("rename link %s to %s", l.Name, h.o.Interface)
	err := h.apply1(ctx, what, rename)
	if errors.Is(err, unix.EBUSY) { // before Linux 6.2 a link has to be down for that
		if err = h.apply1(ctx, "take link "+l.Name+" down", newRequest(unix.RTM_NEWLINK, 0, linkHeader(l.Index, 0, unix.IFF_UP))); err == nil {
			err = h.apply1(ctx, what, rename)
		}
	}
	return err
}

// discard removes a link that Adopt could not finish, whatever became of its context.
func (h *Host) discard() {
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	f, err := h.find(ctx)
	if err == nil {
		err = h.removeLinks(ctx, f)
	}
	if err != nil && !errors.Is(err, net.ErrClosed) {
		h.o.Logger.Warn("a link that could not be set up is left; Cleanup removes it", "link", h.temp, "err", err)
	}
}

// checkProtocol reports that another mesh has our protocol, where what we put beside our link would be taken for that
// of the other one.
func (h *Host) checkProtocol(f found, b beside) error {
	i := slices.IndexFunc(f.others, func(alias string) bool { return strings.HasSuffix(alias, ":"+strconv.Itoa(h.o.Protocol)) })
	if i >= 0 && (h.o.Policy || h.o.Sources == SourceLoopback) {
		return &ForeignError{"protocol " + strconv.Itoa(h.o.Protocol), fmt.Sprintf("of the mesh whose link has the alias %q", f.others[i]),
			"choose another protocol: what is on the loopback interface, and rules, would be taken for the other's"}
	}
	if o := b.owned(h.o.Protocol, h.o.Interface); h.o.Policy && len(o.names) > 0 {
		return &ForeignError{"protocol " + strconv.Itoa(h.o.Protocol), fmt.Sprintf("the mesh of interface %s has rules with it, or left them", o.names[0]),
			"choose another protocol, or clean up after that one"}
	}
	return nil
}

// checkTable reports whether somebody else has routes in our table, or rules for it, before we have.
func (h *Host) checkTable(ctx context.Context, f found, b beside) error {
	if h.o.Table == MainTable {
		return nil
	}
	if h.o.Policy {
		if !slices.ContainsFunc(h.wantRules(f), func(r rule) bool { return !r.specific && !slices.Contains(b.rules, r) }) {
			return nil // it is in use by us
		}
		o := b.owned(h.o.Protocol, h.o.Interface)
		for _, r := range b.rules {
			if r.table == uint32(h.o.Table) && !r.other && (int(r.proto) != h.o.Protocol || o.has(r)) { // another mesh's; an administrator may have more
				return &ForeignError{fmt.Sprintf("routing table %d", h.o.Table), fmt.Sprintf("%v, with protocol %s, is about it", r, protoName(r.proto)), "choose another table, or remove that rule"}
			}
		}
	} else if f.link.Index != 0 {
		return nil
	}
	for _, fam := range []uint8{unix.AF_INET, unix.AF_INET6} {
		rs, err := h.list(ctx, routesOf{fam: fam, table: uint32(h.o.Table)})
		if err != nil {
			return err
		}
		rs = slices.DeleteFunc(rs, func(r route) bool { // the guard's, and ours
			return int(r.proto) == h.o.Protocol && (r.typ == unix.RTN_UNREACHABLE || f.link.Index != 0 && r.oif == f.link.Index)
		})
		if len(rs) > 0 {
			return &ForeignError{fmt.Sprintf("routing table %d", h.o.Table), fmt.Sprintf("it has %s", h.owner(f, rs[0])), "choose another table, or empty it"}
		}
	}
	return nil
}

// owner names a route and whose it is.
func (h *Host) owner(f found, r route) string {
	dev := "no interface"
	if r.oif != 0 {
		dev = f.byIndex[r.oif].Name
		if dev == "" {
			dev = "interface " + strconv.Itoa(r.oif)
		}
	}
	return fmt.Sprintf("a route to %v on %s with protocol %s and metric %d", r.dst, dev, protoName(r.proto), r.metric)
}

func protoName(p uint8) string {
	switch p {
	case unix.RTPROT_KERNEL:
		return "kernel"
	case unix.RTPROT_BOOT:
		return "boot"
	case unix.RTPROT_STATIC:
		return "static"
	case unix.RTPROT_RA:
		return "ra"
	case unix.RTPROT_DHCP:
		return "dhcp"
	case unix.RTPROT_BGP:
		return "bgp"
	case unix.RTPROT_BIRD:
		return "bird"
	case unix.RTPROT_ZEBRA:
		return "zebra"
	}
	return strconv.Itoa(int(p))
}

// Up gives the link its MTU (bytes; 0 leaves it), has it up, with the rule of Options, and removes what is
// left of other Options: addresses move to where these have them, so that no route goes with them. An MTU below MinMTU is ErrMTU where the link has IPv6, since Linux would silently
// take all IPv6 addresses and routes from it.
func (h *Host) Up(ctx context.Context, mtu int) error {
	h.filter.Lock()
	defer h.filter.Unlock()
	var p *passing
	err := h.up(ctx, mtu, &p)
	if p != nil {
		h.setFilter(ctx, *p)
	}
	return err
}

// up is Up but for nftables. What is to be done there it puts into p, as far as it gets.
func (h *Host) up(ctx context.Context, mtu int, p **passing) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := h.find(ctx)
	if err != nil {
		return err
	}
	l := f.link
	if l.Index == 0 {
		return fmt.Errorf("%s: %w", h.o.Interface, ErrNoLink)
	}
	switch {
	case mtu < 0 || mtu > 65535 || mtu > 0 && mtu < 68:
		return fmt.Errorf("link %s: MTU %d: %w: outside 68 to 65535", l.Name, mtu, ErrMTU)
	case mtu > 0 && mtu < MinMTU && l.inet6 && !l.disabled:
		return fmt.Errorf("link %s: MTU %d: %w: IPv6 needs %d, and Linux would take it off the link; choose an MTU from %d on, or disable IPv6 on the host",
			l.Name, mtu, ErrMTU, MinMTU, MinMTU)
	}
	if l.Name != h.o.Interface {
		if f.foreign.Index != 0 {
			return h.foreignLink(f.foreign)
		}
		if err := h.mark(ctx, l); err != nil {
			return err
		}
	}
	if mtu > 0 && mtu != l.MTU {
		if err := h.apply1(ctx, fmt.Sprintf("give link %s MTU %d", h.o.Interface, mtu), newRequest(unix.RTM_NEWLINK, 0, linkHeader(l.Index, 0, 0)).u32(unix.IFLA_MTU, uint32(mtu))); err != nil {
			return err
		}
	}
	conf, err := h.netconf(ctx)
	if err != nil {
		return err
	}
	if max(conf.rpFilter, l.rpFilter) == 1 {
		r := newRequest(unix.RTM_NEWLINK, 0, linkHeader(l.Index, 0, 0)).nest(unix.IFLA_AF_SPEC, func(r request) request {
			return r.nest(unix.AF_INET, func(r request) request {
				return r.nest(unix.IFLA_INET_CONF, func(r request) request { return r.u32(devconfRPFilter, 2) })
			})
		})
		if err := h.apply1(ctx, "make the reverse path filter of link "+h.o.Interface+" loose", r); err != nil {
			return err
		}
	}
	if !l.Up {
		if err := h.apply1(ctx, "take link "+h.o.Interface+" up", newRequest(unix.RTM_NEWLINK, 0, linkHeader(l.Index, unix.IFF_UP, unix.IFF_UP))); err != nil {
			return err
		}
	}
	b, err := h.besides(ctx, f)
	if err != nil {
		return err
	}
	var errs []error
	if err := h.checkTable(ctx, f, b); err != nil {
		return err
	}
	want := h.wanted(f)
	rules, guards := want.missing(b)
	h.restorer.on = true
	errs = append(errs, h.addMissing(ctx, rules, guards), h.tidy(ctx, f, want))
	if mtu > 0 {
		l.MTU = mtu
	}
	pass := h.pass(conf, f, l)
	*p = &pass
	return errors.Join(errs...)
}

// wantRules are the rules of Options, in the order in which they are made: first one that does nothing but say whose
// they are, by the name of the interface, which Linux keeps when there is none of that name. Of the two others, the one
// for the main table comes first, so that no packet to a local network is ever looked up in ours.
func (h *Host) wantRules(f found) (want []rule) {
	if !h.o.Policy {
		return nil
	}
	for _, fam := range f.families() {
		first := rule{fam: fam, mark: h.o.Mark, mask: h.o.Mask, not: true, proto: uint8(h.o.Protocol), action: unix.FR_ACT_TO_TBL,
			priority: uint32(h.o.Priority), table: MainTable, specific: true}
		second := first
		second.priority, second.table, second.specific = first.priority+1, uint32(h.o.Table), false
		owner := rule{fam: fam, proto: first.proto, action: unix.FR_ACT_NOP, priority: first.priority + 2, table: second.table, iif: h.o.Interface}
		want = append(want, owner, first, second)
	}
	return want
}

// owned is what of a protocol belongs to meshes of other interfaces.
type owned struct {
	names      []string // of the interfaces
	tables     map[uint32]bool
	priorities map[uint32]bool // of rules for the main table
}

// owned returns what of a protocol does not belong to the mesh of an interface, by the rules that say whose they are.
func (b beside) owned(protocol int, iface string) owned {
	o := owned{tables: make(map[uint32]bool), priorities: make(map[uint32]bool)}
	for _, r := range b.rules {
		if int(r.proto) == protocol && !r.other && r.iif != "" && r.iif != iface {
			o.names = append(o.names, r.iif)
			o.tables[r.table], o.priorities[r.priority-2] = true, true
		}
	}
	return o
}

// has reports whether a rule is among it.
func (o owned) has(r rule) bool {
	return r.specific && o.priorities[r.priority] || !r.specific && o.tables[r.table]
}

// wantGuards are the routes of Options.Guard.
func (h *Host) wantGuards(f found) (want []route) {
	for p := range h.o.Guard.All() {
		if slices.Contains(f.families(), family(p.Addr().Is4())) {
			want = append(want, route{dst: p, table: uint32(h.o.Table), metric: guardMetric, proto: uint8(h.o.Protocol), typ: unix.RTN_UNREACHABLE})
		}
	}
	return want
}

// families are those that this host has.
func (f found) families() []uint8 {
	if f.lo.inet6 {
		return []uint8{unix.AF_INET, unix.AF_INET6}
	}
	return []uint8{unix.AF_INET}
}

// guards lists the unreachable routes with our protocol.
func (h *Host) guards(ctx context.Context, f found) (rs []route, err error) {
	for _, fam := range f.families() {
		some, err := h.list(ctx, routesOf{fam: fam, proto: uint8(f.proto), typ: unix.RTN_UNREACHABLE})
		if err != nil {
			return nil, err
		}
		for _, r := range some {
			r.oif = 0 // IPv6 has them lead into the loopback interface
			rs = append(rs, r)
		}
	}
	return rs, nil
}

// beside is what is ours beside the link, or may be.
type beside struct {
	addrs  []ifaddr
	rules  []rule  // all there are, in the order in which Linux has them
	guards []route // unreachable ones of our protocol
}

func (h *Host) besides(ctx context.Context, f found) (b beside, err error) {
	if b.addrs, err = h.addrs(ctx); err != nil {
		return b, err
	}
	if b.rules, err = h.rules(ctx); err != nil {
		return b, err
	}
	b.guards, err = h.guards(ctx, f)
	return b, err
}

// wants is what Options want beside the link, but for addresses; the zero one is nothing.
type wants struct {
	rules  []rule
	guards []route
}

func (h *Host) wanted(f found) wants { return wants{h.wantRules(f), h.wantGuards(f)} }

// missing returns what of it is not there.
func (w wants) missing(b beside) (rules []rule, guards []route) {
	for _, r := range w.rules {
		if !slices.Contains(b.rules, r) {
			rules = append(rules, r)
		}
	}
	for _, r := range w.guards {
		if !slices.Contains(b.guards, r) {
			guards = append(guards, r)
		}
	}
	return rules, guards
}

// stale returns what is ours beside the link and not, or no longer, wanted. all says that no address is.
func (h *Host) stale(f found, b beside, want wants, all bool) (s beside) {
	shared := h.shared(f)
	for _, a := range b.addrs {
		if a.index == f.lo.Index && int(a.proto) == f.proto && !shared && (all || h.o.Sources != SourceLoopback) {
			s.addrs = append(s.addrs, a)
		}
		if a.index == f.link.Index && h.o.Sources == SourceLoopback && !all && f.link.Index != 0 && !a.kernels() && !a.keeps() {
			s.addrs = append(s.addrs, a)
		}
	}
	others := b.owned(f.proto, h.o.Interface)
	seen := make(map[rule]bool)
	for _, r := range b.rules {
		if int(r.proto) == f.proto && !r.other && !others.has(r) && (seen[r] || !slices.Contains(want.rules, r)) {
			s.rules = append(s.rules, r)
		}
		seen[r] = true
	}
	order := func(r rule) int { // the tunnel's before the one that keeps local networks out of it, and last who has them
		switch {
		case r.iif != "":
			return 2
		case r.specific:
			return 1
		}
		return 0
	}
	slices.SortStableFunc(s.rules, func(a, b rule) int { return order(a) - order(b) })
	for _, r := range b.guards {
		if !others.tables[r.table] && !slices.Contains(want.guards, r) {
			s.guards = append(s.guards, r)
		}
	}
	return s
}

// leading are the rules among some by which packets still come to routes of ours: the routes are in a table of former
// Options, until they are wanted in that of these.
func leading(rules []rule, ours map[netip.Prefix][]route, want wants) (lead, rest []rule) {
	tables := make(map[uint32]bool)
	for _, rs := range ours {
		for _, r := range rs {
			tables[r.table] = true
		}
	}
	for _, r := range want.rules {
		delete(tables, r.table) // these lead there, too
	}
	for _, r := range rules {
		if !r.specific && tables[r.table] || r.specific && slices.ContainsFunc(rules, func(s rule) bool { return tables[s.table] && s.priority == r.priority+1 }) {
			lead = append(lead, r)
		} else {
			rest = append(rest, r)
		}
	}
	return lead, rest
}

// removeMarked removes all that is ours beside the link: what has its protocol, and what has that of Options.
func (h *Host) removeMarked(ctx context.Context, f found) error {
	var errs []error
	protocols := []int{f.proto}
	if f.proto != h.o.Protocol {
		protocols = append(protocols, h.o.Protocol)
	}
	for _, f.proto = range protocols {
		b, err := h.besides(ctx, f)
		if err != nil {
			return err
		}
		s := h.stale(f, b, wants{}, true)
		errs = append(errs, h.removeRules(ctx, b.rules, s.rules, nil), h.removeGuards(ctx, s.guards), h.removeLeft(ctx, f, b.addrs, s.addrs))
	}
	return errors.Join(errs...)
}

// tidy removes what is left of other Options, but for rules by which packets still come to routes of ours.
func (h *Host) tidy(ctx context.Context, f found, want wants) error {
	b, err := h.besides(ctx, f)
	if err != nil {
		return err
	}
	s := h.stale(f, b, want, false)
	errs := []error{h.tidyRules(ctx, f, b, s.rules, want), h.removeGuards(ctx, s.guards)}
	as, addrs, err := h.move(ctx, f, b.addrs, s.addrs)
	errs = append(errs, err, h.removeLeft(ctx, f, as, addrs))
	h.release(ctx, f, minus(as, addrs))
	return errors.Join(errs...)
}

// tidyRules removes stale rules that lead to none of our routes, and notes whether there are others.
func (h *Host) tidyRules(ctx context.Context, f found, b beside, stale []rule, want wants) error {
	h.leads = false
	if len(stale) == 0 {
		return nil
	}
	ours, err := h.ourRoutes(ctx, f.link.Index)
	if err != nil {
		return err
	}
	lead, rest := leading(stale, ours, want)
	h.leads = len(lead) > 0
	return h.removeRules(ctx, b.rules, rest, want.rules)
}

// tidyMoved is tidyRules once routes were moved.
func (h *Host) tidyMoved(ctx context.Context) error {
	if !h.leads {
		return nil
	}
	f, err := h.find(ctx)
	if err != nil {
		return err
	}
	b, err := h.besides(ctx, f)
	if err != nil {
		return err
	}
	want := h.wanted(f)
	return h.tidyRules(ctx, f, b, h.stale(f, b, want, false).rules, want)
}

// addMissing adds rules and guards.
func (h *Host) addMissing(ctx context.Context, rules []rule, guards []route) error {
	var errs []error
	for _, r := range guards {
		errs = append(errs, h.addGuard(ctx, r))
	}
	for _, r := range rules {
		errs = append(errs, h.addRule(ctx, r))
	}
	return errors.Join(errs...)
}

// addGuard makes a route of Options.Guard. One that is there is as good.
func (h *Host) addGuard(ctx context.Context, r route) error {
	err := h.apply1(ctx, fmt.Sprintf("guard %v", r.dst), r.request(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL))
	if errors.Is(err, unix.EEXIST) {
		err = &ForeignError{fmt.Sprintf("a route to %v with metric %d in table %d", r.dst, r.metric, r.table), "it is not unreachable, or has another protocol", "remove it, or choose another table"}
	}
	return err
}

func (h *Host) removeGuards(ctx context.Context, going []route) error {
	var errs []error
	for _, r := range going {
		err := gone(h.apply1(ctx, fmt.Sprintf("remove the guard of %v", r.dst), r.request(unix.RTM_DELROUTE, 0)))
		if err == nil {
			h.o.Logger.Info("removed what was left", "what", fmt.Sprintf("guard of %v in table %d", r.dst, r.table))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// move puts addresses that are not where Options have them there too, so that the routes from them stay when they
// go. It returns the addresses that there are then, and those that may go.
func (h *Host) move(ctx context.Context, f found, as, stale []ifaddr) (now, going []ifaddr, err error) {
	at := h.place(f)
	if len(stale) > 0 && at.loopback {
		if err := knowsProtocol(as); err != nil {
			return as, nil, err
		}
	}
	var moved []ifaddr
	var cs []change
	for _, a := range stale {
		elsewhere := slices.ContainsFunc(as, func(b ifaddr) bool {
			return b.index != a.index && b.local.Addr() == a.local.Addr() && (b.index == at.Index || b.usable(f.byIndex[b.index]))
		})
		if elsewhere || !a.local.IsSingleIP() || f.lacks(at, a.local.Addr().Is4()) != nil {
			going = append(going, a)
			continue
		}
		to := ifaddr{index: at.Index, local: a.local, proto: uint8(h.o.Protocol)}
		moved = append(moved, a)
		cs = append(cs, change{fmt.Sprintf("add address %v to %s", to.local.Addr(), at.Name), to.request(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL)})
	}
	now = slices.Clone(as)
	var errs []error
	for i, err := range h.apply(ctx, cs) {
		if err != nil && !errors.Is(err, unix.EEXIST) {
			errs = append(errs, fmt.Errorf("%s: %w", cs[i].what, err))
			continue
		}
		now = append(now, ifaddr{index: at.Index, local: moved[i].local})
		going = append(going, moved[i])
	}
	return now, going, errors.Join(errs...)
}

// addRule adds a rule, unless there is one that Linux takes for the same.
func (h *Host) addRule(ctx context.Context, r rule) error {
	err := h.apply1(ctx, "add "+r.String(), r.request(unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL))
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	if rs, lerr := h.rules(ctx); lerr != nil || slices.Contains(rs, r) {
		return lerr // somebody was faster
	}
	return &ForeignError{r.String(), "there is one that Linux takes for the same, and is not: it is inverted, or has a condition", "remove it, or choose another priority or protocol"}
}

// removeRules removes some of all the rules, which are in the order that Linux has them in, and none but these.
func (h *Host) removeRules(ctx context.Context, all, going, want []rule) error {
	all = slices.Clone(all)
	var errs []error
	for _, r := range going {
		var err error
		if all, err = h.removeRule(ctx, all, r, want); err != nil {
			errs = append(errs, fmt.Errorf("remove %v: %w", r, err))
		} else {
			h.o.Logger.Info("removed what was left", "what", r.String())
		}
	}
	return errors.Join(errs...)
}

// removeRule removes r, and returns all rules that are left. Where the request would hit one before it that is
// wanted, a copy of that is put behind r first.
func (h *Host) removeRule(ctx context.Context, all []rule, r rule, want []rule) ([]rule, error) {
	for {
		i := slices.IndexFunc(all, r.hits)
		if i < 0 {
			return all, nil
		}
		c := all[i]
		switch {
		case c == r:
		case c.other:
			return all, &ForeignError{c.String(), "it comes before ours, and Linux would remove it instead", "remove it, or both"}
		case !slices.Contains(want, c):
			return all, fmt.Errorf("it comes after %v, which is still there", c)
		default:
			if err := h.apply1(ctx, "add again "+c.String(), c.request(unix.RTM_NEWRULE, unix.NLM_F_CREATE)); err != nil {
				return all, err
			}
			all = append(all, c)
		}
		err := h.apply(ctx, []change{{"remove " + r.String(), r.request(unix.RTM_DELRULE, 0)}})[0]
		if err = h.removed(ctx, all, c, err); err != nil {
			return all, err
		}
		if all = slices.Delete(all, i, i+1); c == r {
			return all, nil
		}
	}
}

// removed returns the error of a removal of c from all rules. That it was not there is none, unless it is listed.
func (h *Host) removed(ctx context.Context, all []rule, c rule, err error) error {
	if err == nil || gone(err) != nil {
		return err
	}
	now, lerr := h.rules(ctx)
	if lerr != nil {
		return lerr
	}
	if count(now, c) >= count(all, c) {
		return fmt.Errorf("%w, and it is still listed", err)
	}
	return nil
}

func count(rs []rule, of rule) (n int) {
	for _, r := range rs {
		if r == of {
			n++
		}
	}
	return n
}

// removeLeft removes some of the addresses that there are.
func (h *Host) removeLeft(ctx context.Context, f found, as, going []ifaddr) error {
	errs := h.takeAway(ctx, f, as, going)
	for i, err := range errs {
		if err == nil {
			h.o.Logger.Info("removed what was left", "what", fmt.Sprintf("address %v", going[i].local))
		}
	}
	return errors.Join(errs...)
}

func (h *Host) removeLinks(ctx context.Context, f found) error {
	var errs []error
	for _, l := range append([]link{f.link, f.temp}, f.extra...) {
		if l.Index == 0 {
			continue
		}
		err := h.apply1(ctx, "remove link "+l.Name, newRequest(unix.RTM_DELLINK, 0, linkHeader(l.Index, 0, 0)))
		errs = append(errs, gone(err))
	}
	return errors.Join(errs...)
}

// RemoveLink removes the link, with what is on it or leads into it, and leaves what is beside it, such as what is guarded.
func (h *Host) RemoveLink(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := h.find(ctx)
	if err != nil {
		return err
	}
	h.forget()
	return h.removeLinks(ctx, f)
}

// Remove removes the link with all that is ours, as Cleanup does.
func (h *Host) Remove(ctx context.Context) error {
	h.filter.Lock()
	defer h.filter.Unlock()
	return errors.Join(h.remove(ctx), h.removeFilter(ctx))
}

// remove is Remove but for nftables.
func (h *Host) remove(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := h.find(ctx)
	if err != nil {
		return err
	}
	h.forget()
	h.restorer.on = false
	return errors.Join(h.removeLinks(ctx, f), h.removeMarked(ctx, f))
}

// place is the interface that our addresses are on.
func (h *Host) place(f found) link {
	if h.o.Sources == SourceLoopback {
		return f.lo
	}
	return f.link
}

// lacks says why an interface cannot carry a family; nil where it can.
func (f found) lacks(l link, is4 bool) error {
	switch {
	case is4 && !l.inet:
		return fmt.Errorf("%w: IPv4 on %s: MTU %d is below 68, or the kernel has none", ErrFamily, l.Name, l.MTU)
	case is4:
		return nil
	case !l.inet6 && !f.lo.inet6:
		return fmt.Errorf("%w: IPv6: the kernel has none, or was started with ipv6.disable=1", ErrFamily)
	case !l.inet6:
		return fmt.Errorf("%w: IPv6 on %s: MTU %d is below %d; raise it", ErrFamily, l.Name, l.MTU, MinMTU)
	case l.disabled:
		return fmt.Errorf("%w: IPv6 on %s: disabled by net.ipv6.conf.%s.disable_ipv6; set it to 0", ErrFamily, l.Name, l.Name)
	}
	return nil
}

// Read reports what is there. Lists that Linux says were disturbed while it wrote them are read again.
// Without a link the rest is still reported; a foreign link of our name counts as none.
func (h *Host) Read(ctx context.Context) (State, error) {
	h.filter.Lock()
	defer h.filter.Unlock()
	s, p, err := h.read(ctx)
	if err == nil && s.Ready {
		s.Ready = h.filtered(ctx, p, &s.Problems)
		err = ctx.Err()
	}
	return s, err
}

// read is Read but for nftables, and what is to be there.
func (h *Host) read(ctx context.Context) (_ State, p passing, _ error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := h.find(ctx)
	if err != nil {
		return State{}, p, err
	}
	b, err := h.besides(ctx, f)
	if err != nil {
		return State{}, p, err
	}
	ours, err := h.ourRoutes(ctx, f.link.Index)
	if err != nil {
		return State{}, p, err
	}
	conf, err := h.netconf(ctx)
	if err != nil {
		return State{}, p, err
	}
	s := State{Link: f.link.Link}
	if f.link.Index != 0 {
		s.NoIPv4, s.NoIPv6 = f.lacks(f.link, true), f.lacks(f.link, false)
		s.Addrs = h.readAddrs(f, b.addrs)
		s.Routes = h.readRoutes(ours)
		want := h.wanted(f)
		stale := h.stale(f, b, want, false)
		rules, guards := want.missing(b)
		s.Ready = f.link.Up && f.link.Name == h.o.Interface && f.link.Alias == h.alias &&
			len(stale.addrs)+len(stale.rules)+len(stale.guards)+len(rules)+len(guards)+len(f.extra)+len(redundant(f, b.addrs)) == 0 &&
			max(conf.rpFilter, f.link.rpFilter) != 1
		h.restorer.on = h.restorer.on || s.Ready
	}
	if err := h.around(ctx, f, b, ours, conf, &s); err != nil {
		return State{}, passing{}, err
	}
	return s, h.pass(conf, f, f.link), ctx.Err()
}

func (h *Host) readAddrs(f found, as []ifaddr) prefixes.Set {
	var ps []netip.Prefix
	at := h.place(f)
	for _, a := range as {
		if a.index != at.Index || a.kernels() || a.keeps() || at.loopback && int(a.proto) != h.o.Protocol {
			continue
		}
		ps = append(ps, a.local.Masked())
	}
	return prefixes.Set{}.With(ps...)
}

// around reports what is beside the link.
func (h *Host) around(ctx context.Context, f found, b beside, ours map[netip.Prefix][]route, conf netconf, s *State) error {
	as := b.addrs
	connected, err := h.connected(ctx, f)
	if err != nil {
		return err
	}
	var elsewhere []netip.Prefix
	mtu := 0
	least := func(m int) {
		if m > 0 && (mtu == 0 || m < mtu) {
			mtu = m
		}
	}
	for _, a := range as {
		l := f.byIndex[a.index]
		ip := a.local.Addr()
		if a.index == f.link.Index || a.keeps() || !l.Up || ip.IsLoopback() || ip.IsLinkLocalUnicast() || l.loopback && int(a.proto) == f.proto {
			continue
		}
		if a.usable(l) {
			elsewhere = append(elsewhere, prefixes.Host(ip))
			if !l.loopback {
				s.Host.IPv4, s.Host.IPv6 = s.Host.IPv4 || ip.Is4(), s.Host.IPv6 || ip.Is6()
			}
		}
		if a.peer.IsValid() {
			connected = append(connected, prefixes.Host(ip), netip.PrefixFrom(a.peer, a.local.Bits()).Masked())
		} else {
			connected = append(connected, a.local.Masked())
		}
	}
	s.Host.Connected, s.Host.Addrs = prefixes.Set{}.With(connected...), prefixes.Set{}.With(elsewhere...)

	var under link
	for _, w := range h.ways(ctx, f) {
		if w.is4 && under.Index == 0 {
			under = w.link
		}
		s.Host.IPv4, s.Host.IPv6 = s.Host.IPv4 || w.is4, s.Host.IPv6 || !w.is4
		least(w.mtu)
	}
	if mtu == 0 { // a host whose world is its own networks, of which another mesh is none
		for _, a := range as {
			if l := f.byIndex[a.index]; l.Up && !l.loopback && a.index != f.link.Index && !l.mesh() && !a.local.Addr().IsLinkLocalUnicast() {
				least(l.MTU)
			}
		}
	}
	s.Host.UnderlayMTU = mtu

	s.Problems = h.problems(ctx, f, under, b.rules, ours, conf.rpFilter)
	h.restorer.problem(h.o.Protocol, &s.Problems)
	return nil
}
