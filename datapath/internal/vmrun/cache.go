package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gofrs/flock"
)

const (
	fresh     = 7 * 24 * time.Hour // how long a kernel is not looked for again
	retry     = 24 * time.Hour     // nor one that is older, after that failed
	fetchTime = 10 * time.Minute   // how long it may take to get one
)

// cache keeps kernels in a folder: <release>.json names the current one of kernels/, which a rename put
// there complete, so that whoever reads needs no lock. <release>.lock is held to replace it.
type cache struct {
	dir  string
	log  func(format string, args ...any) // what is done
	note func(format string, args ...any) // what is not as it should be
}

// cached is what <release>.json has.
type cached struct {
	Dir      string    // in the cache's folder
	Before   string    // the one it took the place of, which somebody may just be booting
	Packages []string  // name=version
	Checked  time.Time // when it was known to be the newest
	Failed   time.Time // when that was to be seen again, and could not
}

// good reports whether it is as good as any at now.
func (e cached) good(now time.Time) bool {
	return now.Sub(e.Checked) < fresh || now.Sub(e.Failed) < retry
}

func openCache(log, note func(string, ...any)) (cache, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return cache{}, fmt.Errorf("no folder to keep kernels in: %w", err)
	}
	c := cache{filepath.Join(dir, "warren-vmrun"), log, note}
	if err := os.MkdirAll(filepath.Join(c.dir, "kernels"), 0o755); err != nil {
		return cache{}, fmt.Errorf("no folder to keep kernels in: %w", err)
	}
	return c, nil
}

// current returns what there is of a release; an error that is fs.ErrNotExist if there is none.
func (c cache) current(name string) (cached, kernel, error) {
	var e cached
	b, err := os.ReadFile(filepath.Join(c.dir, name+".json"))
	if err != nil {
		return e, kernel{}, err
	}
	if err := json.Unmarshal(b, &e); err != nil || !filepath.IsLocal(e.Dir) {
		return e, kernel{}, fs.ErrNotExist // written by something else: as good as nothing
	}
	k, err := openKernel(filepath.Join(c.dir, e.Dir))
	return e, k, err
}

// kernel returns the kernel of a release, and fetches it if it is not there, or old, or always is set.
func (c cache) kernel(ctx context.Context, r release, now time.Time, always bool) (kernel, error) {
	if e, k, err := c.current(r.name); err == nil && !always && e.good(now) {
		return k, nil
	}
	lock := flock.New(filepath.Join(c.dir, r.name+".lock"))
	ctx, cancel := context.WithTimeout(ctx, fetchTime)
	defer cancel()
	if _, err := lock.TryLockContext(ctx, 100*time.Millisecond); err != nil {
		return kernel{}, fmt.Errorf("wait for another vmrun that fetches kernel %s: %w", r.name, err)
	}
	defer lock.Unlock()
	left, _ := filepath.Glob(filepath.Join(c.dir, "tmp-"+r.name+"-*"))
	for _, dir := range left {
		_ = os.RemoveAll(dir) // of a vmrun that was killed
	}

	e, k, err := c.current(r.name) // by now somebody else may have fetched it
	if err == nil && !always && e.good(now) {
		return k, nil
	}
	fetched, fetchErr := c.fetch(ctx, r, now, e)
	switch {
	case fetchErr == nil:
		return fetched, nil
	case err == nil && !always:
		c.note("using kernel %s of %s, as there is no telling whether there is a newer one: %v", k.release, e.Checked.Format(time.DateOnly), fetchErr)
		e.Failed = now
		return k, c.write(r.name, e)
	}
	return kernel{}, fetchErr
}

// fetch gets the kernel of a release from the machine's sources, or else from Debian's archive.
func (c cache) fetch(ctx context.Context, r release, now time.Time, before cached) (kernel, error) {
	k, err := c.fetchFrom(ctx, apt{log: c.log}, r, r.own, now, before)
	if err == nil || errors.As(err, new(cannotError)) {
		return k, err
	}
	c.log("not from the sources of this machine: %v", err)
	a, err := privateApt(filepath.Join(c.dir, "apt-"+r.name), r, c.log)
	if err != nil {
		return kernel{}, err
	}
	if _, err := a.run(ctx, "", "apt-get", "update"); err != nil {
		return kernel{}, cannot("kernel %s is not among the package sources of this machine, and Debian's archive cannot be read: %v", r.name, err)
	}
	k, err = c.fetchFrom(ctx, a, r, []string{r.meta}, now, before)
	if errors.Is(err, errNoPackage) {
		return kernel{}, cannot("kernel %s is neither among the package sources of this machine nor, as %s, in Debian's archive (%s)", r.name, r.meta, strings.Join(r.sources, "; "))
	}
	return k, err
}

func (c cache) fetchFrom(ctx context.Context, a apt, r release, metas []string, now time.Time, before cached) (kernel, error) {
	packages, err := a.find(ctx, r, metas...)
	if err != nil {
		return kernel{}, err
	}
	e := cached{
		Dir:     filepath.Join("kernels", r.name+"_"+strings.Map(fileRune, packages[0].version)),
		Before:  before.Dir,
		Checked: now,
	}
	for _, p := range packages {
		e.Packages = append(e.Packages, p.name+"="+p.version)
	}
	dir := filepath.Join(c.dir, e.Dir)
	k, err := openKernel(dir)
	if errors.Is(err, fs.ErrNotExist) {
		k, err = c.unpack(ctx, a, r.name, packages, dir)
	}
	if err != nil {
		return kernel{}, err
	}
	if e.Dir == before.Dir {
		e.Before = before.Before
	}
	if err := c.write(r.name, e); err != nil {
		return kernel{}, err
	}
	c.prune(r.name, e)
	return k, nil
}

// fileRune replaces what may not be in the name of a file.
func fileRune(r rune) rune {
	switch {
	case r >= '0' && r <= '9', r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', strings.ContainsRune(".+~-", r):
		return r
	}
	return '_'
}

// unpack puts a kernel at dir, whole or not at all.
func (c cache) unpack(ctx context.Context, a apt, name string, packages []debPackage, dir string) (kernel, error) {
	tmp, err := os.MkdirTemp(c.dir, "tmp-"+name+"-")
	if err != nil {
		return kernel{}, err
	}
	defer os.RemoveAll(tmp)
	tree := filepath.Join(tmp, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		return kernel{}, err
	}
	if err := a.get(ctx, packages, tree); err != nil {
		return kernel{}, err
	}
	k, err := openKernel(tree)
	if err != nil {
		return kernel{}, fmt.Errorf("the packages hold no kernel: %w", err)
	}
	if err := k.decompress(slices.Concat(consoleModules, defaultModules)...); err != nil {
		return kernel{}, err
	}
	if err := os.Rename(tree, dir); err != nil {
		return kernel{}, err
	}
	return openKernel(dir)
}

func (c cache) write(name string, e cached) error {
	b, err := json.MarshalIndent(e, "", "\t")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(c.dir, "tmp-"+name+"-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(b)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), filepath.Join(c.dir, name+".json"))
}

// prune removes the kernels of a release but the current one and the one before. What it cannot remove
// takes up room and does no other harm.
func (c cache) prune(name string, e cached) {
	all, _ := filepath.Glob(filepath.Join(c.dir, "kernels", name+"_*"))
	for _, dir := range all {
		if dir != filepath.Join(c.dir, e.Dir) && dir != filepath.Join(c.dir, e.Before) {
			_ = os.RemoveAll(dir)
		}
	}
}
