package roles

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/mesh/watch"
	"github.com/warren-mesh/warren/roles/internal/textfile"
)

// Assigned says which roles a node has. One that has to do something for it has a Run(context.Context) error, which
// has to run meanwhile; one that may be wrong about something has Conditions() []view.Condition. A Manager, and every
// Assigned here that is made of others, sees to both.
type Assigned interface {
	// Current returns the names, whether they are known at all, and a channel that closes when either is out of date;
	// nil: never. The slice is not to be written to.
	Current() (names []string, known bool, changed <-chan struct{})
}

// Static is the same roles for ever.
func Static(names ...string) Assigned { return static(slices.Clone(names)) }

type static []string

func (s static) Current() ([]string, bool, <-chan struct{}) { return s, true, nil }

// assignment is what is known, and what is wrong with it.
type assignment struct {
	names      []string
	known      bool
	complete   bool // of a union
	conditions []view.Condition
}

// conditioned is an Assigned whose value is set from elsewhere.
type conditioned struct{ v watch.Value[assignment] }

func (c *conditioned) Current() ([]string, bool, <-chan struct{}) {
	a, _, stale := c.v.Get()
	return a.names, a.known, stale
}

func (c *conditioned) Conditions() []view.Condition {
	a, _, _ := c.v.Get()
	return slices.Clone(a.conditions)
}

// same reports whether two assignments say the same.
func (a assignment) same(b assignment) bool {
	return a.known == b.known && a.complete == b.complete && slices.Equal(a.names, b.names) && slices.Equal(a.conditions, b.conditions)
}

func (c *conditioned) set(a assignment) {
	if old, ok, _ := c.v.Get(); !ok || !old.same(a) {
		c.v.Set(a)
	}
}

// FileEvery is how often a File is read. It is small, and not every file system tells of changes.
const FileEvery = time.Second

// File is the roles that a text file names: one a line, with nothing else but white space, empty lines, and comments
// that begin with "#". A file that is empty says that there are none. While it is not there, or has anything else in
// it, what it said last holds, and a condition says which line is wrong. It has to be written in one piece, as by
// renaming, or may be read half.
func File(path string) Assigned { return &file{path: path} }

type file struct {
	conditioned
	path string
}

func (f *file) Run(ctx context.Context) error {
	t := time.NewTicker(FileEvery)
	defer t.Stop()
	for {
		f.read()
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

func (f *file) read() {
	now, _, _ := f.v.Get()
	names, err := readNames(f.path)
	now.conditions = nil
	if err == nil {
		now.names, now.known = names, true
	} else {
		keeps := "the roles that it named last are kept"
		if !now.known {
			keeps = "no role is known"
		}
		now.conditions = []view.Condition{{
			Kind: AssignmentRefused, Subject: f.path, Message: fmt.Sprintf("%v: %s", err, keeps),
			Remedy: "put a file there that has the name of one role in each line",
		}}
	}
	f.set(now)
}

// readNames reads a file of roles.
func readNames(path string) ([]string, error) {
	data, err := textfile.Read(path)
	if err != nil {
		return nil, err
	}
	names := []string{}
	for n, line := range textfile.Lines(data) {
		if !nameRE.MatchString(line) {
			return nil, fmt.Errorf("%s, line %d: %q is no name of a role", path, n, textfile.Cut(line))
		}
		names = append(names, line)
	}
	return tidy(names), nil
}

// tidy sorts names and leaves out what is there twice.
func tidy(names []string) []string {
	slices.Sort(names)
	return slices.Compact(names)
}

// FromMesh is the roles that a mesh's own record has: those of mesh.Config.Roles, once it was published. pick chooses
// others of what the mesh knows of this node, as by its labels; known: false is that it does not say. nil: the
// record's Roles.
func FromMesh(m Mesh, pick func(view.Self) (names []string, known bool)) Assigned {
	if pick == nil {
		pick = func(s view.Self) ([]string, bool) { return s.Record.Roles, s.Published }
	}
	return &fromMesh{m, pick}
}

type fromMesh struct {
	m    Mesh
	pick func(view.Self) ([]string, bool)
}

func (f *fromMesh) Current() ([]string, bool, <-chan struct{}) {
	v, stale := f.m.Current()
	names, known := f.pick(v.Self)
	return names, known, stale
}

// Union is the roles that any of several has, or had when it last knew. It is known as soon as one of them is.
func Union(as ...Assigned) Assigned { return &union{as: slices.Clone(as)} }

type union struct {
	conditioned
	as []Assigned
}

// Complete reports whether all of them are known, or were: else there may be more roles than are known.
func (u *union) Complete() bool {
	a, _, _ := u.v.Get()
	return a.complete
}

func (u *union) Run(ctx context.Context) error {
	last, ever := make([][]string, len(u.as)), make([]bool, len(u.as))
	return runBeside(ctx, u.as, func() []<-chan struct{} {
		a := assignment{complete: true}
		var stale []<-chan struct{}
		for i, of := range u.as {
			names, known, changed := of.Current()
			if known {
				last[i], ever[i] = names, complete(of)
				a.known = true
			}
			a.known = a.known || ever[i]
			a.complete = a.complete && ever[i]
			a.names = append(a.names, last[i]...)
			if c, ok := of.(interface{ Conditions() []view.Condition }); ok {
				a.conditions = append(a.conditions, c.Conditions()...)
			}
			stale = append(stale, changed)
		}
		a.names = tidy(a.names)
		u.set(a)
		return stale
	})
}

// complete reports whether an Assigned that is known knows all.
func complete(a Assigned) bool {
	c, ok := a.(interface{ Complete() bool })
	return !ok || c.Complete()
}

// Cached is what another Assigned says, or said when it last knew: that is kept in a file, from which a program that
// starts without being told takes it. While of a Union not all are known, what was kept holds beside it. A file that is
// corrupt is as good as none, which a condition says.
func Cached(a Assigned, path string, log *slog.Logger) Assigned {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &cached{of: a, path: path, log: log}
}

type cached struct {
	conditioned
	of   Assigned
	path string
	log  *slog.Logger
}

// cacheFile is what is kept.
type cacheFile struct {
	Version int      `json:"version"`
	Roles   []string `json:"roles"`
}

func (c *cached) Run(ctx context.Context) error {
	kept, err := c.load() // what is on disk
	onDisk := err == nil
	var own []view.Condition
	unkept := func(err error, remedy string) {
		own = []view.Condition{{Kind: AssignmentUnkept, Subject: c.path, Message: err.Error(), Remedy: remedy}}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		unkept(fmt.Errorf("%w: the roles that were known last are not known", err), "")
		c.log.Warn("the roles that were known last cannot be read", "err", err)
	}
	a := assignment{names: kept, known: onDisk}
	return runBeside(ctx, []Assigned{c.of}, func() []<-chan struct{} {
		names, known, stale := c.of.Current()
		if known {
			names = tidy(slices.Clone(names))
			if !complete(c.of) {
				names = tidy(append(names, kept...))
			} else if !onDisk || !slices.Equal(names, kept) {
				if err := c.save(names); err != nil {
					unkept(fmt.Errorf("%w: at a start without being told, this node will not know its roles", err), "see that the folder can be written to")
				} else {
					onDisk, kept, own = true, names, nil
				}
			}
			a.names, a.known = names, true
		}
		a.conditions = own
		if of, ok := c.of.(interface{ Conditions() []view.Condition }); ok {
			a.conditions = slices.Concat(own, of.Conditions())
		}
		c.set(a)
		return []<-chan struct{}{stale}
	})
}

func (c *cached) load() ([]string, error) {
	data, err := textfile.Read(c.path)
	if err != nil {
		return nil, err
	}
	var f cacheFile
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return nil, fmt.Errorf("%s is corrupt: %w", c.path, err)
	}
	if _, err := d.Token(); err != io.EOF || f.Roles == nil {
		return nil, fmt.Errorf("%s is corrupt: it is not one object with roles", c.path)
	}
	if f.Version != 1 {
		return nil, fmt.Errorf("%s: has version %d, this program knows 1", c.path, f.Version)
	}
	for _, n := range f.Roles {
		if !nameRE.MatchString(n) {
			return nil, fmt.Errorf("%s is corrupt: %q is no name of a role", c.path, textfile.Cut(n))
		}
	}
	return tidy(f.Roles), nil
}

func (c *cached) save(names []string) (err error) {
	data, err := json.Marshal(cacheFile{1, append([]string{}, names...)}) // [], not null
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(c.path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(c.path), "."+filepath.Base(c.path)+"-*")
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), c.path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
