package record

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/registry"
	"github.com/warren-mesh/warren/prefixes"
)

// Version is the version of the records this package reads and writes. It rises only when an older
// program would misread a newer record; what it may safely ignore is added without.
const Version = 1

// Limits of what one node can make all others hold. Lengths are in bytes.
const (
	MaxSize       = 512 << 10 // the whole record as JSON
	MaxEndpoints  = 64
	MaxPrefixes   = 16384
	MaxAddresses  = 64
	MaxRoles      = 128
	MaxRole       = 128 // one role's name
	MaxLabels     = 128
	MaxLabelKey   = 128
	MaxLabelValue = 1024
	MaxInstance   = 32
)

// Record is what a node says of itself. In JSON, the names are those of the fields in lower case, and
// fields that are empty lists, maps or strings are left out.
//
// A Record is passed by value, yet its slices and its map are shared by the copies: they must not be
// changed once the Record was handed on. Clone makes one whose are its own.
type Record struct {
	// Version is the constant of that name.
	Version int

	// ID is the node's name: what registry.ParseID takes as one. It is what a node is known by; its key
	// may change, and with unsigned records someone else may claim the same key.
	ID string

	// Key is the node's WireGuard public key, not zero.
	Key key.Public

	// Endpoints are where the node may be reached, the best first. A node without any can only call
	// others. The same endpoint twice is no error.
	Endpoints []Endpoint

	// Prefixes can be reached through the node.
	Prefixes prefixes.Set

	// Addresses are the node's own in the mesh: host prefixes (/32, /128) of addresses that are neither
	// unspecified nor multicast. They can be reached through the node as well, whether they are in
	// Prefixes or not.
	Addresses prefixes.Set

	// Roles are the names of the roles the node has: printable ASCII without space. They are a set,
	// written sorted.
	Roles []string

	// Labels are for people and for embedders. Keys are printable ASCII without space. Values are text
	// that shows as it is: no control characters, line separators or marks that turn the direction of
	// writing. They may be empty.
	Labels map[string]string

	// Instance is random per process start, in lower-case hex: it tells two processes apart that publish
	// as one node, which no counter could. It may be empty.
	Instance string

	// Epoch counts the starts of the node's process.
	Epoch uint64

	// Generation is the device's: it changes only when a device was created anew, so that others
	// know whether the sessions they have with it can still be alive.
	Generation uint64

	// Sequence counts the changes of the record within an epoch.
	Sequence uint64
}

// Reachable returns what can be reached through the node: its prefixes and its addresses.
func (r Record) Reachable() prefixes.Set { return r.Prefixes.Union(r.Addresses) }

// Clone returns a copy that shares nothing that can be changed.
func (r Record) Clone() Record {
	r.Endpoints = slices.Clone(r.Endpoints)
	r.Roles = slices.Clone(r.Roles)
	r.Labels = maps.Clone(r.Labels)
	return r
}

// Equal says whether a and b say the same. The order of endpoints counts; roles are compared as a set,
// and nil is the same as empty.
func Equal(a, b Record) bool {
	return a.Version == b.Version &&
		a.ID == b.ID &&
		a.Key == b.Key &&
		slices.Equal(a.Endpoints, b.Endpoints) &&
		a.Prefixes == b.Prefixes &&
		a.Addresses == b.Addresses &&
		slices.Equal(sortedSet(a.Roles), sortedSet(b.Roles)) &&
		maps.Equal(a.Labels, b.Labels) &&
		a.Instance == b.Instance &&
		a.Epoch == b.Epoch &&
		a.Generation == b.Generation &&
		a.Sequence == b.Sequence
}

// sortedSet does not change s, and copies it only if it has to.
func sortedSet(s []string) []string {
	for i := 1; i < len(s); i++ {
		if s[i-1] >= s[i] {
			s = slices.Clone(s)
			slices.Sort(s)
			return slices.Compact(s)
		}
	}
	return s
}

// Validate says why r is not a record that Parse would accept, or nil. Size is not looked at: that
// takes Marshal. The error is a *FieldError.
func (r Record) Validate() error {
	if err := r.check(); err != nil {
		return err
	}
	return nil
}

func (r Record) check() *FieldError {
	if err := checkVersion(int64(r.Version)); err != nil {
		return err
	}
	if r.ID == "" {
		return fieldError("id", "", "is missing")
	}
	if err := registry.CheckName(r.ID); err != nil {
		reason := "is not a name"
		if e, ok := errors.AsType[*registry.IDError](err); ok {
			reason = e.Reason
		}
		return &FieldError{Field: "id", Value: cut(r.ID), Reason: reason, Err: err}
	}
	if r.Key.IsZero() {
		return fieldError("key", "", "is missing")
	}
	if n := len(r.Endpoints); n > MaxEndpoints {
		return tooMany("endpoints", MaxEndpoints)
	}
	for i, e := range r.Endpoints {
		if why := e.check(); why != "" {
			return fieldError(element("endpoints", i), e.String(), why)
		}
	}
	if r.Prefixes.Len() > MaxPrefixes {
		return tooMany("prefixes", MaxPrefixes)
	}
	if r.Addresses.Len() > MaxAddresses {
		return tooMany("addresses", MaxAddresses)
	}
	for i := range r.Addresses.Len() {
		p := r.Addresses.At(i)
		if why := checkAddress(p); why != "" {
			return fieldError(element("addresses", i), p.String(), why)
		}
	}
	if len(r.Roles) > MaxRoles {
		return tooMany("roles", MaxRoles)
	}
	for i, role := range r.Roles {
		if why := checkWord(role, MaxRole); why != "" {
			return fieldError(element("roles", i), role, why)
		}
	}
	if len(r.Labels) > MaxLabels {
		return tooMany("labels", MaxLabels)
	}
	for _, k := range slices.Sorted(maps.Keys(r.Labels)) {
		if why := checkWord(k, MaxLabelKey); why != "" {
			return fieldError(member("labels", k), "", "as a key "+why)
		}
		if why := checkText(r.Labels[k], MaxLabelValue); why != "" {
			return fieldError(member("labels", k), r.Labels[k], why)
		}
	}
	if len(r.Instance) > MaxInstance {
		return fieldErrorf("instance", r.Instance, "has %d bytes, at most %d are allowed", len(r.Instance), MaxInstance)
	}
	if strings.Trim(r.Instance, "0123456789abcdef") != "" {
		return fieldError("instance", r.Instance, "is not lower-case hex")
	}
	return nil
}

func checkVersion(v int64) *FieldError {
	switch {
	case v == Version:
		return nil
	case v == 0:
		return fieldError("version", "", "is missing")
	case v < 0:
		return fieldError("version", fmt.Sprint(v), "is negative")
	}
	return &FieldError{
		Field:  "version",
		Value:  fmt.Sprint(v),
		Reason: fmt.Sprintf("is newer than %d, the newest this program reads", Version),
		Err:    ErrVersion,
	}
}

func checkAddress(p netip.Prefix) string {
	switch a := p.Addr(); {
	case !p.IsSingleIP():
		return "is not a host prefix"
	case a.IsUnspecified():
		return "is the unspecified address"
	case a.IsMulticast():
		return "is a multicast address"
	}
	return ""
}

// checkWord is for what goes into lists, names of metrics, and command lines.
func checkWord(s string, most int) string {
	if s == "" {
		return "is empty"
	}
	if len(s) > most {
		return fmt.Sprintf("has %d bytes, at most %d are allowed", len(s), most)
	}
	for _, c := range s {
		if c <= ' ' || c > '~' {
			return fmt.Sprintf("has %q, only printable ASCII without space is allowed", c)
		}
	}
	return ""
}

func checkText(s string, most int) string {
	if len(s) > most {
		return fmt.Sprintf("has %d bytes, at most %d are allowed", len(s), most)
	}
	if !utf8.ValidString(s) {
		return "is not UTF-8"
	}
	for _, c := range s {
		if unicode.IsControl(c) || hidden(c) {
			return fmt.Sprintf("has the control character %q", c)
		}
	}
	return ""
}

// hidden has its list written out: unicode.IsPrint grows with every Go release, and then two nodes
// would not agree on a record. These are the line and paragraph separators, the marks of the
// bidirectional algorithm (UAX #9, section 2), and the byte order mark.
func hidden(c rune) bool {
	switch {
	case c == 0x061c, c == 0x200e, c == 0x200f, c == 0x2028, c == 0x2029, c == 0xfeff,
		0x202a <= c && c <= 0x202e,
		0x2066 <= c && c <= 0x2069:
		return true
	}
	return false
}

func tooMany(field string, most int) *FieldError {
	return fieldErrorf(field, "", "has more than %d entries", most)
}

func element(field string, i int) string { return fmt.Sprintf("%s[%d]", field, i) }

func member(field, name string) string { return fmt.Sprintf("%s[%q]", field, cut(name)) }
