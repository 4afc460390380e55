package main

import (
	"fmt"
	"io"
	"io/fs"
	"math"
	"path"
	"strings"
)

// The types of a file in an archive, as stat(2) has them.
const (
	typeDir     = 0o040000
	typeRegular = 0o100000
	typeSymlink = 0o120000
)

// archive writes a cpio archive as the kernel unpacks it at boot: newc, as described in the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst. Everything belongs to root, and has no
// time.
type archive struct {
	w      io.Writer
	at     int64
	inode  uint32
	folder map[string]bool
	err    error
}

func newArchive(w io.Writer) *archive {
	return &archive{w: w, folder: map[string]bool{"": true}}
}

// dir adds a folder, and those it is in, once; the permissions are of whoever adds it first.
func (a *archive) dir(name string, perm fs.FileMode) {
	name = clean(name)
	if a.folder[name] {
		return
	}
	a.parents(name)
	a.folder[name] = true
	a.entry(name, typeDir|unixPerm(perm), 0, nil)
}

// file adds a file of size bytes, which it reads from r. It is an error for r to have less.
func (a *archive) file(name string, perm fs.FileMode, size int64, r io.Reader) {
	name = clean(name)
	a.parents(name)
	a.entry(name, typeRegular|unixPerm(perm), size, r)
}

func (a *archive) symlink(name, to string) {
	name = clean(name)
	a.parents(name)
	a.entry(name, typeSymlink|0o777, int64(len(to)), strings.NewReader(to))
}

// close ends the archive and returns the first error there was.
func (a *archive) close() error {
	a.inode = 0
	a.entry("TRAILER!!!", 0, 0, nil)
	return a.err
}

func (a *archive) parents(name string) {
	if dir := path.Dir(name); dir != "." {
		a.dir(dir, 0o755)
	}
}

func (a *archive) entry(name string, mode uint32, size int64, r io.Reader) {
	switch {
	case a.err != nil:
		return
	case size > math.MaxUint32:
		a.err = fmt.Errorf("%s: over 4 GiB", name)
		return
	case strings.ContainsRune(name, 0):
		a.err = fmt.Errorf("%q: a name with a zero byte", name)
		return
	}
	a.inode++
	links := 1
	if mode&typeDir != 0 {
		links = 2
	}
	// inode, mode, user, group, links, time, size, device (2), device of a node (2), length of name, sum
	a.printf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		a.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, len(name)+1, 0, name)
	a.pad()
	if r != nil && a.err == nil {
		n, err := io.CopyN(a.w, r, size)
		a.at += n
		if err != nil {
			a.err = fmt.Errorf("%s: %w", name, err)
		}
	}
	a.pad()
}

func (a *archive) pad() {
	a.printf("%s", "\x00\x00\x00"[:(4-a.at%4)%4])
}

func (a *archive) printf(format string, args ...any) {
	if a.err == nil {
		var n int
		n, a.err = fmt.Fprintf(a.w, format, args...)
		a.at += int64(n)
	}
}

// clean is name as an archive has it: without a slash in front, and "" for the root.
func clean(name string) string {
	return strings.TrimPrefix(path.Clean("/"+name), "/")
}

func unixPerm(m fs.FileMode) uint32 {
	p := uint32(m.Perm())
	if m&fs.ModeSticky != 0 {
		p |= 0o1000
	}
	return p
}
