// Package state keeps what a node must not lose between two processes: its key, and how often it
// started. One process at a time has the folder.
package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gofrs/flock"

	"github.com/warren-mesh/warren/datapath/key"
	"github.com/warren-mesh/warren/mesh/internal/core"
)

// Files in the folder.
const (
	keyFile    = "key"    // the private key, as `wg genkey` writes it
	lockFile   = "lock"   // held while the folder is in use
	ownerFile  = "owner"  // who has it: node ID and process ID, for those who find it locked
	startsFile = "starts" // core.Starts as JSON
	formatFile = "format" // the number of what is described here
)

// format is what this program writes. It rises when a program that knows only lower ones would lose or
// misread something.
const format = 1

var (
	// ErrLocked says that somebody else has the folder.
	ErrLocked = errors.New("in use")
	// ErrForeign says that the folder is not this node's, or not for a program of this age.
	ErrForeign = errors.New("not this node's")
)

// Dir is a locked state folder.
type Dir struct {
	path string
	lock *flock.Flock
	Key  key.Private
	// Created: the key is new.
	Created bool
	Starts  core.Starts
}

// Open locks the folder, makes it with mode 0700 where it does not exist, and loads what is in it. node
// is the ID of the node that is to use it: a folder that another node used is refused. log is told of a key that was restored from its backup; nil is nobody.
func Open(path, node string, log *slog.Logger) (*Dir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	d := &Dir{path: path, lock: flock.New(filepath.Join(path, lockFile), flock.SetPermissions(0o600))}
	ok, err := d.lock.TryLock()
	if err != nil {
		return nil, fmt.Errorf("state folder %s: locking: %w", path, err)
	}
	if !ok {
		return nil, fmt.Errorf("state folder %s: %w%s", path, ErrLocked, holder(path))
	}
	d.tidy(log)
	if err := d.load(node, log); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// tidy removes what a process left that was killed while it wrote.
func (d *Dir) tidy(log *slog.Logger) {
	for _, name := range []string{ownerFile, startsFile, formatFile, snapshotFile} {
		left, _ := filepath.Glob(filepath.Join(escapeGlob(d.path), "."+name+"-*")) // the pattern is good
		for _, path := range left {
			if err := os.Remove(path); err != nil && log != nil {
				log.Warn("what an earlier process left cannot be removed", "err", err)
			}
		}
	}
}

// escapeGlob has filepath.Glob take path as it is.
func escapeGlob(path string) string {
	if filepath.Separator == '\\' {
		return path // there is no escaping there, and no '*' or '?' in a path
	}
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(path)
}

func holder(path string) string {
	data, err := os.ReadFile(filepath.Join(path, ownerFile))
	if node, pid, ok := strings.Cut(strings.TrimSpace(string(data)), " "); err == nil && ok {
		return fmt.Sprintf(" by node %s in process %s", node, pid)
	}
	return ""
}

func (d *Dir) load(node string, log *slog.Logger) error {
	owner := filepath.Join(d.path, ownerFile)
	known := false
	switch data, err := os.ReadFile(owner); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("state folder: %w", err)
	default:
		was, _, ok := strings.Cut(strings.TrimSpace(string(data)), " ")
		if known = ok && was == node; ok && !known {
			return fmt.Errorf("state folder %s: %w: it is that of node %q, not of %q; give each node a folder of its own", d.path, ErrForeign, was, node)
		}
	}
	if err := d.checkFormat(); err != nil {
		return err
	}
	if err := write(owner, []byte(node+" "+strconv.Itoa(os.Getpid())+"\n")); err != nil && !known {
		return fmt.Errorf("state folder: %w", err)
	} else if err != nil && log != nil {
		// The process ID in it is an old one. That is no reason to be without the node.
		log.Warn("the state folder takes nothing", "folder", d.path, "err", err)
	}
	var err error
	if d.Key, d.Created, err = (key.File{Path: filepath.Join(d.path, keyFile), Logger: log}).LoadOrCreate(); err != nil {
		return err
	}
	starts := filepath.Join(d.path, startsFile)
	switch data, err := os.ReadFile(starts); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("state folder: %w", err)
	default:
		if err := json.Unmarshal(data, &d.Starts); err != nil {
			return fmt.Errorf("%s is corrupt: %w; remove it to count from what the registry has", starts, err)
		}
	}
	return nil
}

// checkFormat refuses a folder that a newer program has used.
func (d *Dir) checkFormat() error {
	path := filepath.Join(d.path, formatFile)
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := write(path, []byte(strconv.Itoa(format)+"\n")); err != nil {
			return fmt.Errorf("state folder: %w", err)
		}
		return nil
	case err != nil:
		return fmt.Errorf("state folder: %w", err)
	}
	switch n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32); {
	case err != nil:
		return fmt.Errorf("%s is corrupt: %.20q is no number; write %d into it if no newer program has used the folder", path, data, format)
	case n > format:
		return fmt.Errorf("state folder %s: %w: it has format %d, and this program knows formats up to %d; use the newer program, or another folder", d.path, ErrForeign, n, format)
	}
	return nil
}

// Keep writes s, so that the next start counts on from it.
func (d *Dir) Keep(s core.Starts) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	if err := write(filepath.Join(d.path, startsFile), append(data, '\n')); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	d.Starts = s
	return nil
}

// Close lets go of the folder. Close twice is harmless.
func (d *Dir) Close() error { return d.lock.Close() }

// write replaces a file such that a crash leaves the old or the new content.
func write(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return syncDir(filepath.Dir(path))
}
