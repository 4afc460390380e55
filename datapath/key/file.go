package key

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
)

var (
	// ErrInsecure is wrapped by the error about a key file that somebody else
	// can read, or that belongs to somebody else.
	ErrInsecure = errors.New("insecure key file")

	// ErrCorrupt is wrapped by the error about a path at which there is
	// something, but not a private key.
	ErrCorrupt = errors.New("corrupt key file")
)

// FileError says which file an operation failed on. It contains no part of any
// private key.
type FileError struct {
	Path string // the file or folder at fault, which may be the backup
	Op   string // "load", "create", "restore", "back up" or "replace"
	Err  error
}

func (e *FileError) Error() string { return "key: " + e.Op + " " + e.Path + ": " + e.Err.Error() }

// Unwrap returns e.Err.
func (e *FileError) Unwrap() error { return e.Err }

// fileError leaves out what package os says of names: they are the same path
// again, or that of a temporary.
func fileError(op, path string, err error) error {
	switch e := err.(type) {
	case *fs.PathError:
		err = e.Err
	case *os.LinkError:
		err = e.Err
	}
	return &FileError{Path: path, Op: op, Err: err}
}

// backupSuffix is what the path of a key file's second copy ends in.
const backupSuffix = ".bak"

// File is a private key in a file, and a second copy of it in Path + ".bak".
//
// Both hold one line as "wg genkey" prints it, so that "wg set DEVICE
// private-key PATH" reads them; the newline may be missing. They are regular
// files of this user or root, and nobody else has any permission on them: a
// file of mode 0640, say, is refused with [ErrInsecure]. (Modes and owners are
// checked on Unix only.) Anything else at either path is refused with
// [ErrCorrupt], and no method overwrites or removes it.
//
// A file comes to be under a temporary name in the same folder, ".NAME.*.tmp",
// and gets its own name, which is never on less than a whole key, once its
// content is on the disk. After a crash the temporary may stay; nothing reads
// it, and it may be deleted.
//
// To give a node a new identity, delete both files; a machine that was cloned
// needs that. If Path alone is missing, it is restored from the backup.
type File struct {
	Path string

	// Logger is told when a file was restored, and of a backup that does not
	// serve. Nil discards.
	Logger *slog.Logger

	// step is called, where it is not nil, after each change to the disk.
	step func(string)
}

// Load returns the key in the file at path. It is File{Path: path}.Load().
func Load(path string) (Private, error) { return File{Path: path}.Load() }

// LoadOrCreate returns the key in the file at path, which it makes if there is
// none. It is File{Path: path}.LoadOrCreate().
func LoadOrCreate(path string) (k Private, created bool, err error) {
	return File{Path: path}.LoadOrCreate()
}

// Replace puts k into the file at path in place of the key that is there. It is
// File{Path: path}.Replace(k).
func Replace(path string, k Private) error { return File{Path: path}.Replace(k) }

// Load returns the key in the file. If there is no file but there is a backup,
// the file is restored from it first and Logger told, since the backup may hold
// the key before the last Replace. If there is neither, the error wraps
// [fs.ErrNotExist]. Every error is a [*FileError].
func (f File) Load() (Private, error) {
	k, err := read("load", f.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return f.restore(err)
	case errors.Is(err, ErrCorrupt):
		return Private{}, f.advise(err)
	case err != nil:
		return Private{}, err
	}
	// A backup that others can read gives the key away as the file itself would.
	switch _, err := read("load", f.backup()); {
	case errors.Is(err, ErrInsecure):
		return Private{}, err
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		f.log().Warn("backup of the private key cannot be used", "path", f.backup(), "err", err)
	}
	return k, nil
}

// LoadOrCreate returns what Load does, and makes a new key if there is neither
// file nor backup. It makes the folders that are missing, with mode 0700, and
// the files with mode 0600, whatever the umask. created tells that the key is
// this call's; of any number of processes that call LoadOrCreate at once, one
// makes the key and the others return it. A key is returned once it will
// survive a loss of power, so that it may be published. Every error is a
// [*FileError].
func (f File) LoadOrCreate() (k Private, created bool, err error) {
	k, err = f.Load()
	if errors.Is(err, fs.ErrNotExist) {
		k, created, err = f.create()
	}
	if err != nil {
		return Private{}, false, err
	}
	if !created {
		// The process that made the file may have ended before it did this.
		if err := syncFolder(filepath.Dir(f.Path)); err != nil {
			f.log().Warn("private key may not survive a loss of power", "path", f.Path, "err", err)
		}
	}
	f.backUp(k)
	return k, created, nil
}

// Replace makes k the key in the file and the key that was there the backup, in
// this order and each at once: at any moment the file holds the old or the new
// key. The key before the old one is gone. If k is in the file already, nothing
// changes. Replace fails if Load does, if k is zero, or if the backup is not a
// key file. Two calls must not overlap, not even from two processes. Every error
// is a [*FileError].
func (f File) Replace(k Private) error {
	if k.IsZero() {
		return fileError("replace", f.Path, errors.New("no private key to replace it with"))
	}
	old, err := f.Load()
	if err != nil {
		return err
	}
	if old != k {
		if _, err := read("back up", f.backup()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := f.put("back up", f.backup(), old, os.Rename); err != nil {
			return err
		}
		return f.put("replace", f.Path, k, os.Rename)
	}
	if err := syncFolder(filepath.Dir(f.Path)); err != nil {
		return fileError("replace", f.Path, err)
	}
	return nil
}

func (f File) backup() string { return f.Path + backupSuffix }

func (f File) log() *slog.Logger {
	if f.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return f.Logger
}

func (f File) did(step string) {
	if f.step != nil {
		f.step(step)
	}
}

// create makes a new key, or returns the one that another process was first
// with.
func (f File) create() (k Private, created bool, err error) {
	if err := f.makeFolder(filepath.Dir(f.Path)); err != nil {
		// With the name of the folder at fault, which may be one further up.
		return Private{}, false, &FileError{Path: f.Path, Op: "create", Err: err}
	}
	k, err = NewPrivate()
	if err != nil {
		return Private{}, false, fileError("create", f.Path, err)
	}
	err = f.put("create", f.Path, k, os.Link)
	if errors.Is(err, fs.ErrExist) {
		k, err = read("load", f.Path)
		return k, false, err
	}
	return k, err == nil, err
}

// restore makes the file of its backup. missing is the error that says there is
// no file.
func (f File) restore(missing error) (Private, error) {
	k, err := read("load", f.backup())
	if errors.Is(err, fs.ErrNotExist) {
		return Private{}, missing
	}
	if err != nil {
		// A new key now would be a new identity for a node that had one.
		return Private{}, fileError("restore", f.Path, fmt.Errorf(
			"the file is missing and its backup does not serve (delete that as well to start with a new key): %w", err))
	}
	err = f.put("restore", f.Path, k, os.Link)
	if errors.Is(err, fs.ErrExist) {
		return read("load", f.Path)
	}
	if err != nil {
		return Private{}, err
	}
	f.log().Warn("private key was missing and is restored from its backup",
		"path", f.Path, "backup", f.backup(), "public", k.Public().Short())
	return k, nil
}

// backUp makes the backup unless there is something in its place. The node can
// do without: its folder may be one that only an administrator writes to.
func (f File) backUp(k Private) {
	if _, err := os.Lstat(f.backup()); err == nil {
		return
	}
	err := f.put("back up", f.backup(), k, os.Link)
	if err != nil && !errors.Is(err, fs.ErrExist) {
		f.log().Warn("private key has no backup", "path", f.Path, "err", err)
	}
}

// advise adds to the error about a corrupt file what can be done about it.
func (f File) advise(corrupt error) error {
	advice := "there is no usable backup at " + f.backup()
	if k, err := read("load", f.backup()); err == nil {
		advice = fmt.Sprintf("%s holds the key with the public key %s: to restore it, move %s away and start again",
			f.backup(), k.Public(), f.Path)
	}
	return fileError("load", f.Path, fmt.Errorf("%w; %s", errors.Unwrap(corrupt), advice))
}

// put writes k to a temporary file and gives that its name with move, which is
// os.Link where what is there must stay (the error wraps fs.ErrExist then) and
// os.Rename where it is replaced. When it returns, content and name are on the
// disk, even if both are another process's.
func (f File) put(op, path string, k Private, move func(from, to string) error) error {
	temporary, err := f.writeTemporary(path, k)
	if err != nil {
		return fileError(op, path, err)
	}
	moved := move(temporary, path)
	f.did("moved")
	os.Remove(temporary) // nothing is left of it after a rename
	f.did("temporary removed")
	if moved != nil && !errors.Is(moved, fs.ErrExist) {
		return fileError(op, path, moved)
	}
	if err := syncFolder(filepath.Dir(path)); err != nil {
		return fileError(op, path, err)
	}
	f.did("folder synced")
	if moved != nil {
		return fileError(op, path, moved)
	}
	return nil
}

// writeTemporary returns the name of a new file, next to path, that holds k and
// whose content is on the disk. If there is an error there is no file.
func (f File) writeTemporary(path string, k Private) (temporary string, err error) {
	// The name is random so that nobody can be there first, and O_EXCL follows
	// no link.
	temporary = filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"."+rand.Text()+".tmp")
	file, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", err
	}
	f.did("temporary made")
	defer func() {
		if closed := file.Close(); err == nil {
			err = closed
		}
		if err != nil {
			os.Remove(temporary)
		}
	}()
	// A umask can only have taken from the mode.
	if err := file.Chmod(0o600); err != nil {
		return "", err
	}
	if _, err := io.WriteString(file, k.Base64()+"\n"); err != nil {
		return "", err
	}
	f.did("temporary written")
	if err := file.Sync(); err != nil {
		return "", err
	}
	f.did("temporary synced")
	return temporary, nil
}

// makeFolder makes the folder and those above it that are missing, and keeps
// them from others whatever the umask.
func (f File) makeFolder(folder string) error {
	if info, err := os.Stat(folder); err == nil && info.IsDir() {
		return nil
	}
	parent := filepath.Dir(folder)
	if parent != folder {
		if err := f.makeFolder(parent); err != nil {
			return err
		}
	}
	err := os.Mkdir(folder, 0o700)
	if errors.Is(err, fs.ErrExist) {
		// Another process was first, or it is a file, which fails later on.
		return nil
	}
	if err != nil {
		return err
	}
	if err := os.Chmod(folder, 0o700); err != nil {
		return err
	}
	f.did("folder made")
	return syncFolder(parent)
}

// read returns the key in one file, and an error that wraps ErrCorrupt,
// ErrInsecure, fs.ErrNotExist or what the system says.
func read(op, path string) (Private, error) {
	k, err := readKey(path)
	if err != nil {
		return Private{}, fileError(op, path, err)
	}
	return k, nil
}

func readKey(path string) (Private, error) {
	// Asked first, because opening a device or a pipe can do something.
	info, err := os.Lstat(path)
	if err != nil {
		return Private{}, err
	}
	if err := regular(info); err != nil {
		return Private{}, err
	}
	file, err := os.OpenFile(path, os.O_RDONLY|openFlags, 0)
	if err != nil {
		return Private{}, err
	}
	defer file.Close()
	info, err = file.Stat()
	if err != nil {
		return Private{}, err
	}
	if err := regular(info); err != nil {
		return Private{}, err
	}
	if err := checkAccess(info); err != nil {
		return Private{}, err
	}

	// One byte more than a key and its newline have, to see that it ends there.
	text, err := io.ReadAll(io.LimitReader(file, textSize+2))
	if err != nil {
		return Private{}, err
	}
	if len(text) == 0 {
		return Private{}, fmt.Errorf("%w: the file is empty", ErrCorrupt)
	}
	if len(text) == textSize+2 {
		return Private{}, fmt.Errorf("%w: the file holds more than one line of %d characters", ErrCorrupt, textSize)
	}
	if text[len(text)-1] == '\n' {
		text = text[:len(text)-1]
	}
	k, err := ParsePrivate(string(text))
	if err != nil {
		return Private{}, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return k, nil
}

func regular(info fs.FileInfo) error {
	switch mode := info.Mode(); {
	case mode.IsRegular():
		return nil
	case mode&fs.ModeSymlink != 0:
		return fmt.Errorf("%w: a symbolic link, not a regular file", ErrCorrupt)
	case mode.IsDir():
		return fmt.Errorf("%w: a folder, not a regular file", ErrCorrupt)
	default:
		return fmt.Errorf("%w: of mode %v, not a regular file", ErrCorrupt, mode)
	}
}
