package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/warren-mesh/warren/mesh/registry"
)

// snapshotFile has the registry's entries as they were when last seen: a line that begins with the
// SHA-256 of all that follows, and then a line of JSON an entry.
const snapshotFile = "snapshot"

// entry is a registry.Entry in the file.
type entry struct {
	ID   string `json:"id"`
	Data []byte `json:"data"` // sealed, in base64
}

// KeepSnapshot writes entries, as the registry had them, in place of what was kept before. A crash leaves
// the one or the other.
func (d *Dir) KeepSnapshot(entries []registry.Entry) error {
	entries = slices.SortedFunc(slices.Values(entries), func(a, b registry.Entry) int { return strings.Compare(a.ID, b.ID) })
	var body bytes.Buffer
	enc := json.NewEncoder(&body)
	for _, e := range entries {
		if err := enc.Encode(entry{e.ID, e.Data}); err != nil {
			return err
		}
	}
	sum := sha256.Sum256(body.Bytes())
	if err := write(filepath.Join(d.path, snapshotFile), append([]byte(hex.EncodeToString(sum[:])+"\n"), body.Bytes()...)); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	return nil
}

// Snapshot returns what was kept last, and nothing where nothing was. What is corrupt is an error that
// names the file; the next KeepSnapshot replaces it.
func (d *Dir) Snapshot() ([]registry.Entry, error) {
	path := filepath.Join(d.path, snapshotFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	sum, body, _ := bytes.Cut(data, []byte("\n"))
	if want := sha256.Sum256(body); string(sum) != hex.EncodeToString(want[:]) {
		return nil, fmt.Errorf("%s is corrupt: its checksum is another", path)
	}
	var entries []registry.Entry
	for dec := json.NewDecoder(bytes.NewReader(body)); dec.More(); {
		var e entry
		if err := dec.Decode(&e); err != nil {
			return nil, fmt.Errorf("%s is corrupt: %w", path, err)
		}
		entries = append(entries, registry.Entry{ID: e.ID, Data: e.Data})
	}
	return entries, nil
}

// DropSnapshot forgets what was kept.
func (d *Dir) DropSnapshot() error {
	if err := os.Remove(filepath.Join(d.path, snapshotFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("state folder: %w", err)
	}
	return syncDir(d.path)
}
