//go:build unix

package key

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// openFlags keep a link that took the file's place from being followed, and a
// pipe that did from blocking.
const openFlags = syscall.O_NOFOLLOW | syscall.O_NONBLOCK

// checkAccess checks that nobody but the owner has any permission, and that the
// owner is this process's user or root, who can read everything anyway.
func checkAccess(info fs.FileInfo) error {
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return fmt.Errorf("%w: its mode is %#o, want 0600", ErrInsecure, mode)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("owner of the key file: %w", errors.ErrUnsupported)
	}
	if user := os.Geteuid(); stat.Uid != 0 && int(stat.Uid) != user {
		return fmt.Errorf("%w: it belongs to user %d, want %d or root", ErrInsecure, stat.Uid, user)
	}
	return nil
}

// syncFolder makes the names in a folder last. Some file systems have no such
// operation, and say so in one of these ways.
func syncFolder(folder string) error {
	d, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer d.Close()
	err = d.Sync()
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, errors.ErrUnsupported) {
		return nil
	}
	return err
}
