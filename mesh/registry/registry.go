package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"
)

// MaxData is how many bytes the Data of one Entry may have: 1 MiB. It leaves room below etcd's default
// request limit of 1.5 MiB, the tightest of the stores in use.
const MaxData = 1 << 20

// MaxName is how many bytes a name may have: 253, the longest DNS name in text form (RFC 1035, section 2.3.4).
const MaxName = 253

// MaxKind is how many bytes a kind may have.
const MaxKind = 63

// The kinds that a mesh uses.
const (
	KindNode  = "node"  // one record per node, by node ID
	KindTrust = "trust" // for signed trust, which is planned: certificates, revocations
)

var (
	// ErrInvalidID says that an ID is not "kind/name". It is wrapped in an IDError.
	ErrInvalidID = errors.New("invalid registry ID")

	// ErrTooLarge says that an Entry has more than MaxData bytes.
	ErrTooLarge = errors.New("registry entry too large")
)

// IDError names an ID, or the part of one, that is no good. It wraps ErrInvalidID.
type IDError struct {
	ID     string // what was given, whole
	Reason string // to be read after it: "has no '/'"
}

// Error quotes the ID, cut if it is long.
func (e *IDError) Error() string {
	const most = 64
	id, dots := e.ID, ""
	if len(id) > most {
		id, dots = id[:most], "..."
	}
	return fmt.Sprintf("%v %q%s: %s", ErrInvalidID, id, dots, e.Reason)
}

func (e *IDError) Unwrap() error { return ErrInvalidID }

// Entry is one thing that is kept: opaque bytes by ID.
type Entry struct {
	ID   string // "kind/name", see ParseID
	Data []byte // at most MaxData; nil and empty are the same
}

// Equal says whether both have the same ID and the same bytes.
func (e Entry) Equal(other Entry) bool { return e.ID == other.ID && bytes.Equal(e.Data, other.Data) }

// Registry keeps entries and tells of their changes. All methods may be called at the same time from
// any goroutine.
//
// A Registry is shared by those it was given to and is closed, where it needs closing, by whoever
// opened it.
type Registry interface {
	// Put stores e and replaces what was there under its ID. When it returns nil, the store has
	// accepted the entry and every watcher will see it, or something newer.
	//
	// An error that is neither ErrInvalidID nor ErrTooLarge leaves open whether the entry was stored:
	// the answer may have been lost after the store had taken it. Putting the same again is harmless.
	// Put refuses an ID that ParseID refuses, with that error, and Data longer than MaxData with
	// ErrTooLarge, without asking the store. It returns as soon as ctx ends, with an error that wraps
	// ctx's.
	//
	// Put does not keep e.Data: the caller may change it afterwards.
	Put(ctx context.Context, e Entry) error

	// Delete removes what is stored under id. Deleting what is absent is no error. Otherwise it is as
	// Put: an error leaves open whether it happened, doing it twice is harmless.
	Delete(ctx context.Context, id string) error

	// Watch yields what the store has of one kind, and then its changes, for as long as it is ranged
	// over. Nothing is asked of the store until then. The sequence may be ranged over again, which
	// starts anew, and by several goroutines, which do not see one another.
	//
	//   - The first batch is a Reset: everything there is, be it nothing.
	//   - An error is yielded with a zero Batch, and watching goes on: the registry retries by itself,
	//     with a delay of its own choosing. A repeated failure may be yielded each time or once.
	//     An error may have a method Remedy() string that says what an operator can do.
	//   - When watching works again after an error, a batch says so at once, an empty one if nothing changed.
	//   - After a gap, which is whenever changes may have been missed, the next batch is a Reset. Where
	//     the store resumed without a gap there is none.
	//   - Batches are in the order in which the store took the changes. A consumer that is too slow for
	//     single changes gets them merged: the newest per ID, so that memory is bounded by the mesh.
	//   - An entry put again with the same bytes may be delivered or not.
	//   - The sequence ends when ctx ends or the consumer breaks, and in no other way, except that a
	//     kind ParseID would refuse is yielded once as an error. It ends promptly, without yielding
	//     ctx's error, and all it started has ended when the range loop has.
	//
	// See Batch for who owns what.
	Watch(ctx context.Context, kind string) iter.Seq2[Batch, error]
}

// Swapper is a Registry that can also compare and replace in one step. Not every store can; ask with a
// type assertion.
type Swapper interface {
	// Swap stores new under id if old is what is stored there, byte for byte, and returns new and true.
	// Otherwise it changes nothing and returns what is stored and false, which is no error. Nil means
	// absent, in old (create, never replace), in new (delete), and in current. What is stored with no
	// bytes is not absent: it is an empty slice that is not nil.
	//
	// After an error it is open whether the swap happened, as with Put; read again through a further
	// Swap. IDs and sizes are refused as by Put. Swap keeps neither old nor new, and current belongs to
	// the caller.
	Swap(ctx context.Context, id string, old, new []byte) (current []byte, ok bool, err error)
}

// Rejoiner is a Registry whose watchers may be some time in finding it again. Not every one is; ask with a
// type assertion.
type Rejoiner interface {
	// Rejoin returns how long after the store is back, at most, all who watch it are.
	Rejoin() time.Duration
}

// Batch is what changed, or with Reset, what there is.
//
// The slices Put and Deleted belong to the receiver, who may keep, sort and change them. The bytes of
// each Entry's Data do not: other receivers may have the same. They never change, may be kept, and must
// not be written to.
type Batch struct {
	// Revision numbers the state of the store after this batch. It only rises, except that a Reset may
	// lower it: a store restored from a backup counts again from the backup. It may stay the same.
	Revision uint64

	// Reset says that Put is everything there is of the kind: whatever is not in it is gone. Deleted is
	// then empty.
	Reset bool

	// Put and Deleted are in no particular order. Without Reset they are not both empty, except in the first
	// batch after an error. Within a batch,
	// an ID is in one of them at most once. An ID may be in Deleted that the receiver has never seen.
	Put     []Entry
	Deleted []string
}

// State is the fold of batches: what a watcher knows of the store. The zero State is ready, and knows
// nothing yet. It is for tests and for small consumers; a State is not safe for concurrent use.
type State struct {
	Known    bool // a Reset was seen, so that what is not in Entries is known to be absent
	Revision uint64
	Entries  map[string]Entry
}

// Apply takes in one batch. It keeps the entries' Data and none of the batch's slices.
func (s *State) Apply(b Batch) {
	if b.Reset || s.Entries == nil {
		s.Entries = make(map[string]Entry, len(b.Put))
	}
	s.Known = s.Known || b.Reset
	s.Revision = b.Revision
	for _, e := range b.Put {
		s.Entries[e.ID] = e
	}
	for _, id := range b.Deleted {
		delete(s.Entries, id)
	}
}

// IDs returns the IDs that are there, sorted.
func (s *State) IDs() []string { return slices.Sorted(maps.Keys(s.Entries)) }

// ParseID takes an ID apart. A kind begins with a lower-case letter, goes on with lower-case letters,
// digits and '-', and has at most MaxKind bytes. A name is a DNS subdomain in lower case (RFC 1123,
// section 2.1): labels of lower-case letters, digits and '-', which begin and end with a letter or
// digit, joined by single dots, at most MaxName bytes in all; labels are not limited by themselves.
// What is accepted needs no escaping as a path, a file name, a label or in a log.
//
// The error is an *IDError.
func ParseID(id string) (kind, name string, err error) {
	kind, name, ok := strings.Cut(id, "/")
	if !ok {
		return "", "", &IDError{id, "has no '/' between kind and name"}
	}
	if why := checkKind(kind); why != "" {
		return "", "", &IDError{id, "the kind " + why}
	}
	if why := checkName(name); why != "" {
		return "", "", &IDError{id, "the name " + why}
	}
	return kind, name, nil
}

// CheckKind says why kind cannot be one, or nil. The error is an *IDError.
func CheckKind(kind string) error {
	if why := checkKind(kind); why != "" {
		return &IDError{kind, "as a kind " + why}
	}
	return nil
}

// CheckName says why name cannot be one, or nil. The error is an *IDError.
func CheckName(name string) error {
	if why := checkName(name); why != "" {
		return &IDError{name, "as a name " + why}
	}
	return nil
}

// CheckEntry is what Put refuses without asking the store, for those who write a Registry: an invalid
// ID and too many bytes. Both errors name the ID.
func CheckEntry(e Entry) error {
	if _, _, err := ParseID(e.ID); err != nil {
		return err
	}
	if len(e.Data) > MaxData {
		return fmt.Errorf("%w: %s has %d bytes, at most %d are allowed", ErrTooLarge, e.ID, len(e.Data), MaxData)
	}
	return nil
}

// ID joins kind and name. It checks neither.
func ID(kind, name string) string { return kind + "/" + name }

// NodeID is the ID of the record of the node called name. It does not check name.
func NodeID(name string) string { return ID(KindNode, name) }

func checkKind(kind string) string {
	switch {
	case kind == "":
		return "is empty"
	case len(kind) > MaxKind:
		return fmt.Sprintf("has %d bytes, at most %d are allowed", len(kind), MaxKind)
	case !lower(kind[0]):
		return "does not begin with a lower-case letter"
	}
	for i := range len(kind) {
		if c := kind[i]; !lower(c) && !digit(c) && c != '-' {
			return fmt.Sprintf("has %q, only a-z, 0-9 and '-' are allowed", c)
		}
	}
	return ""
}

func checkName(name string) string {
	switch {
	case name == "":
		return "is empty"
	case len(name) > MaxName:
		return fmt.Sprintf("has %d bytes, at most %d are allowed", len(name), MaxName)
	}
	for i := range len(name) {
		if c := name[i]; !lower(c) && !digit(c) && c != '-' && c != '.' {
			return fmt.Sprintf("has %q, only a-z, 0-9, '-' and '.' are allowed", c)
		}
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" {
			return "has an empty label"
		}
		if label[0] == '-' || label[len(label)-1] == '-' {
			return "has a label that begins or ends with '-'"
		}
	}
	return ""
}

func lower(c byte) bool { return 'a' <= c && c <= 'z' }
func digit(c byte) bool { return '0' <= c && c <= '9' }
