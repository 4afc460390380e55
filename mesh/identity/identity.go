package identity

import (
	"errors"
	"fmt"
	"time"

	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/mesh/registry"
)

// ErrRevoked says that whoever wrote the record has no right to any more. It is the only error of Open
// that takes a node out of the mesh; after any other, the last good record of the node stays in force.
var ErrRevoked = errors.New("revoked")

// Opened is a record that is believed, and for how long.
type Opened struct {
	Record record.Record

	// NotBefore and NotAfter bound when the record is good, both included. A zero time is no bound.
	NotBefore, NotAfter time.Time
}

// ValidAt says whether the bounds have t inside.
func (o Opened) ValidAt(t time.Time) bool {
	return (o.NotBefore.IsZero() || !t.Before(o.NotBefore)) && (o.NotAfter.IsZero() || !t.After(o.NotAfter))
}

// Trust seals this node's records and opens those of all. All methods may be called at the same time
// from any goroutine.
type Trust interface {
	// Seal returns the bytes to store under registry.NodeID(r.ID). It refuses a record that Open would
	// refuse, and one this node may not speak for.
	Seal(r record.Record) ([]byte, error)

	// Open returns the record that data, stored under id, holds, if it is to be believed at now. now is
	// the only clock there is. Opening the same bytes again gives the same, unless Changed said
	// otherwise or a bound was crossed. Open does no I/O that the caller would have to wait for, keeps
	// nothing of data, and does not change it. The record's slices and map may be shared with
	// other callers and must not be changed.
	//
	// ErrRevoked takes the node out of the mesh; any other error leaves it as it last was.
	Open(id string, data []byte, now time.Time) (Opened, error)

	// Changed returns a channel that closes when what is trusted has changed, so that everything has to
	// be opened again. Take the next channel first and open then, so that no change falls in between.
	// It is nil if trust never changes.
	Changed() <-chan struct{}
}

// Plain returns a Trust that believes what the registry says. It checks the form of a record and that
// the record is stored under its own ID, so that no node takes the place of another by mistake. Anyone
// who can write to the registry can speak for any node. Nothing is ever revoked; delete the record
// instead.
func Plain() Trust { return plain{} }

type plain struct{}

func (plain) Seal(r record.Record) ([]byte, error) { return record.Marshal(r) }

func (plain) Open(id string, data []byte, _ time.Time) (Opened, error) {
	kind, name, err := registry.ParseID(id)
	if err != nil {
		return Opened{}, err
	}
	if kind != registry.KindNode {
		return Opened{}, fmt.Errorf("open %s: not of kind %q", id, registry.KindNode)
	}
	r, err := record.Parse(data)
	if err != nil {
		return Opened{}, fmt.Errorf("open %s: %w", id, err)
	}
	if r.ID != name {
		return Opened{}, fmt.Errorf("open %s: %w", id, &record.FieldError{
			Field:  "id",
			Value:  r.ID,
			Reason: "is not the name it is stored under",
		})
	}
	return Opened{Record: r}, nil
}

func (plain) Changed() <-chan struct{} { return nil }
