package nft

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"

	"github.com/warren-mesh/warren/prefixes"
)

// Rules is what the table says, or shall say. The zero Rules is no table.
type Rules struct {
	// ClampMTU is the MTU of the mesh's interface in bytes, 68 to 65535. TCP connections that are forwarded
	// into it or out of it get segments that fit: of at most ClampMTU-40 bytes with IPv4, ClampMTU-60 with IPv6.
	// 0: they are left as they are.
	ClampMTU int
	// SNAT are destinations. Packets that came in by the mesh's interface and leave by another one to there
	// get the address of this host on that one as source. It takes effect on new connections.
	SNAT prefixes.Set
	// Turned are the names of sysctls that the mesh turned on, and is to turn off in the end, such as
	// "net.ipv4.ip_forward". The table keeps them in mind; it does nothing with them. Their order is of no account.
	Turned []string
}

// IsZero reports whether r is no table.
func (r Rules) IsZero() bool { return r.ClampMTU == 0 && r.SNAT.IsEmpty() && len(r.Turned) == 0 }

// Equal reports whether r and o say the same.
func (r Rules) Equal(o Rules) bool {
	return r.ClampMTU == o.ClampMTU && r.SNAT == o.SNAT && slices.Equal(sorted(r.Turned), sorted(o.Turned))
}

func sorted(s []string) []string { return slices.Compact(slices.Sorted(slices.Values(s))) }

// Options are the settings of a Table. Interface and Owner must be given.
type Options struct {
	// Interface is the name of the mesh's, 1 to 15 bytes. It need not exist.
	Interface string
	// Owner marks the table as ours, for instance "warren:<interface>:<protocol>". It must not change while
	// there is a table.
	Owner string
	// Do runs f, which opens sockets, on a thread in the network namespace to work in. Default: it runs on the
	// thread that calls Open.
	Do func(f func() error) error
	// Logger is told where changes may be missed. Default: nobody.
	Logger *slog.Logger
}

func (o Options) defaulted() (Options, error) {
	var errs []error
	if o.Interface == "" || len(o.Interface) > 15 || strings.Contains(o.Interface, "\x00") {
		errs = append(errs, fmt.Errorf("interface %q: not 1 to 15 bytes without a zero one", o.Interface))
	}
	switch {
	case o.Owner == "" || strings.Contains(o.Owner, "\x00"):
		errs = append(errs, fmt.Errorf("owner %q: empty, or with a zero byte in it; give the text that marks the table", o.Owner))
	case len(comment(o.Owner, names)) > maxComment:
		errs = append(errs, fmt.Errorf("owner %q: has %d bytes, which is %d too many for the comment of a table", o.Owner, len(o.Owner), len(comment(o.Owner, names))-maxComment))
	}
	if o.Do == nil {
		o.Do = here
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, errors.Join(errs...)
}

func here(f func() error) error { return f() }

// ForeignError says that there is a table of our name which is not ours, and is left as it is.
type ForeignError struct {
	What   string // "nftables table inet warren-wg0"
	Owner  string // what is known of it
	Remedy string // what an operator can do
}

func (e *ForeignError) Error() string {
	return fmt.Sprintf("%s is not ours: %s; %s", e.What, e.Owner, e.Remedy)
}

// tableName is the name of the table of a mesh.
func tableName(iface string) string { return tablePrefix + iface }

// maxComment is how many bytes of a comment nft takes: with a longer one, a table could not be restored.
const maxComment = 128

const (
	tablePrefix = "warren-"
	turnedOn    = "; turned on: "
)

// comment is that of a table.
func comment(owner string, turned []string) string {
	if len(turned) == 0 {
		return owner
	}
	return owner + turnedOn + strings.Join(turned, " ")
}

// parseComment returns what a comment of ours says was turned on; ok is false if it is not ours.
func parseComment(owner, s string) (turned []string, ok bool) {
	rest, ok := strings.CutPrefix(s, owner)
	if !ok || rest == "" {
		return nil, ok
	}
	rest, ok = strings.CutPrefix(rest, turnedOn)
	return sorted(strings.Fields(rest)), ok
}

// commentNoted returns what a table of any mesh has in mind as turned on, given its name and comment.
func commentNoted(name, comment string) []string {
	owner, list, ok := strings.Cut(comment, turnedOn)
	if iface, mesh := strings.CutPrefix(name, tablePrefix); !ok || !mesh || !strings.Contains(owner, iface) {
		return nil
	}
	return strings.Fields(list)
}

// checked returns r in its canonical form, or what is wrong with it.
func (o Options) checked(r Rules) (Rules, error) {
	var errs []error
	if r.ClampMTU != 0 && (r.ClampMTU < 68 || r.ClampMTU > 65535) {
		errs = append(errs, fmt.Errorf("MTU %d to clamp by: outside 68 to 65535; 0 is to leave segments as they are", r.ClampMTU))
	}
	r.Turned = sorted(r.Turned)
	for _, n := range r.Turned {
		if n == "" || strings.ContainsFunc(n, func(c rune) bool { return c <= ' ' || c > '~' || c == '"' }) {
			errs = append(errs, fmt.Errorf("sysctl %q: not a name, as in \"net.ipv4.ip_forward\"", n))
		}
	}
	if n := len(comment(o.Owner, r.Turned)); n > maxComment {
		errs = append(errs, fmt.Errorf("sysctls %q: with owner %q they take %d bytes of the table's comment, which has %d; use fewer", r.Turned, o.Owner, n, maxComment))
	}
	return r, errors.Join(errs...)
}

// tooOld reports why a kernel of that release cannot keep our mark: tables have comments since Linux 5.10.
func tooOld(release string) error {
	major, rest, _ := strings.Cut(release, ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, _ := strconv.Atoi(major)
	b, _ := strconv.Atoi(strings.TrimRightFunc(minor, func(r rune) bool { return r < '0' || r > '9' }))
	if a > 5 || a == 5 && b >= 10 {
		return nil
	}
	return fmt.Errorf("%w: Linux %s cannot mark a table of nftables as ours, 5.10 can", errors.ErrUnsupported, release)
}
