//go:build unix

package key

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestRule17ModesWhateverTheUmask(t *testing.T) {
	for _, umask := range []int{0o000, 0o022, 0o027, 0o077, 0o177, 0o777} {
		t.Run(fmt.Sprintf("%04o", umask), func(t *testing.T) {
			folder := t.TempDir()
			defer syscall.Umask(syscall.Umask(umask))
			path := filepath.Join(folder, "a", "b", "private.key")
			if _, _, err := LoadOrCreate(path); err != nil {
				t.Fatal(err)
			}
			check := func() {
				t.Helper()
				for p, want := range map[string]fs.FileMode{
					path:                            0o600,
					path + backupSuffix:             0o600,
					filepath.Join(folder, "a"):      0o700 | fs.ModeDir,
					filepath.Join(folder, "a", "b"): 0o700 | fs.ModeDir,
				} {
					info, err := os.Stat(p)
					if err != nil {
						t.Fatal(err)
					}
					if info.Mode() != want {
						t.Errorf("%s has mode %v, want %v", p, info.Mode(), want)
					}
				}
			}
			check()
			if err := Replace(path, newKey()); err != nil {
				t.Fatal(err)
			}
			check()
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if _, err := Load(path); err != nil {
				t.Fatal(err)
			}
			check()
		})
	}
}

func TestRule17FolderThatExistsKeepsItsMode(t *testing.T) {
	path := in(t)
	if err := os.Chmod(filepath.Dir(path), 0o751); err != nil {
		t.Fatal(err)
	}
	if _, _, err := LoadOrCreate(path); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Dir(path)); err != nil || info.Mode().Perm() != 0o751 {
		t.Errorf("mode %v, error %v, want 0751", info.Mode(), err)
	}
}

func TestRule17FilesThatOthersCanReachAreRefused(t *testing.T) {
	for _, suffix := range []string{"", backupSuffix} {
		for _, mode := range []fs.FileMode{0o644, 0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o666, 0o777, 0o444} {
			t.Run(fmt.Sprintf("%v%s", mode, suffix), func(t *testing.T) {
				path := in(t, fixed(), fixed())
				if err := os.Chmod(path+suffix, mode); err != nil {
					t.Fatal(err)
				}
				for operation, do := range map[string]func() (Private, error){
					"Load":         func() (Private, error) { return Load(path) },
					"LoadOrCreate": func() (Private, error) { k, _, err := LoadOrCreate(path); return k, err },
					"Replace":      func() (Private, error) { return Private{}, Replace(path, newKey()) },
				} {
					k, err := do()
					if !errors.Is(err, ErrInsecure) || errors.Is(err, ErrCorrupt) || !k.IsZero() {
						t.Fatalf("%s: got error %v, want one that wraps ErrInsecure", operation, err)
					}
					if e := asFileError(t, err); e.Path != path+suffix || !strings.Contains(err.Error(), fmt.Sprintf("%#o", mode)) {
						t.Errorf("%s: error %q does not name file and mode", operation, err)
					}
				}
				if info, err := os.Stat(path + suffix); err != nil || info.Mode() != mode {
					t.Errorf("the mode is %v, error %v, and was %v", info.Mode(), err, mode)
				}
			})
		}
	}
}

func TestRule17NoNewIdentityBesideAnInsecureBackup(t *testing.T) {
	path := in(t, Private{}, fixed())
	if err := os.Chmod(path+backupSuffix, 0o644); err != nil {
		t.Fatal(err)
	}
	_, _, err := LoadOrCreate(path)
	if !errors.Is(err, ErrInsecure) || !strings.Contains(err.Error(), path+backupSuffix) {
		t.Errorf("got error %v, want one that wraps ErrInsecure and names the backup", err)
	}
	if got := names(t, path); len(got) != 1 {
		t.Errorf("the folder has %q", got)
	}
}

func TestRule17StricterModesAreFine(t *testing.T) {
	path := in(t, fixed(), fixed())
	if err := os.Chmod(path, 0o400); err != nil {
		t.Fatal(err)
	}
	if k, created, err := LoadOrCreate(path); err != nil || created || k != fixed() {
		t.Errorf("the file's key is %v, created %v, error %v", k == fixed(), created, err)
	}
}

// file is a file of another user.
type file struct {
	mode fs.FileMode
	sys  any
}

func (file) Name() string        { return "private.key" }
func (file) Size() int64         { return 45 }
func (f file) Mode() fs.FileMode { return f.mode }
func (file) ModTime() time.Time  { return time.Time{} }
func (file) IsDir() bool         { return false }
func (f file) Sys() any          { return f.sys }

func TestRule17OwnerIsThisUserOrRoot(t *testing.T) {
	user := uint32(os.Geteuid())
	for _, c := range []struct {
		info file
		want error
	}{
		{file{0o600, &syscall.Stat_t{Uid: user}}, nil},
		{file{0o600, &syscall.Stat_t{Uid: 0}}, nil},
		{file{0o600, &syscall.Stat_t{Uid: user + 1}}, ErrInsecure},
		{file{0o600, &syscall.Stat_t{Uid: 65534}}, ErrInsecure},
		{file{0o640, &syscall.Stat_t{Uid: user}}, ErrInsecure},
		{file{0o600, nil}, errors.ErrUnsupported},
	} {
		if err := checkAccess(c.info); !errors.Is(err, c.want) {
			t.Errorf("%v of %v: got error %v, want %v", c.info.mode, c.info.sys, err, c.want)
		}
	}

	// The same on a real file, where this user can give one away.
	path := in(t, fixed())
	if os.Chown(path, 65534, -1) != nil {
		return
	}
	_, err := Load(path)
	if !errors.Is(err, ErrInsecure) || !strings.Contains(err.Error(), "65534") || !strings.Contains(err.Error(), path) {
		t.Errorf("a file of user 65534: got error %v, want one that wraps ErrInsecure and names file and user", err)
	}
}

func TestRule17OnlyRegularFiles(t *testing.T) {
	target := in(t, fixed())
	for name, make := range map[string]func(path string) error{
		"symbolic link":          func(path string) error { return os.Symlink(target, path) },
		"dangling symbolic link": func(path string) error { return os.Symlink(target+".missing", path) },
		"pipe":                   func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"folder":                 func(path string) error { return os.Mkdir(path, 0o600) },
	} {
		for _, suffix := range []string{"", backupSuffix} {
			t.Run(name+suffix, func(t *testing.T) {
				path := in(t)
				if err := make(path + suffix); err != nil {
					t.Fatal(err)
				}
				before, err := os.Lstat(path + suffix)
				if err != nil {
					t.Fatal(err)
				}
				k, created, err := LoadOrCreate(path)
				if !errors.Is(err, ErrCorrupt) || created || !k.IsZero() {
					t.Fatalf("created is %v, error %v, want one that wraps ErrCorrupt", created, err)
				}
				if !strings.Contains(err.Error(), path+suffix) || !strings.Contains(err.Error(), "not a regular file") {
					t.Errorf("error %q does not say what is wrong where", err)
				}
				if after, err := os.Lstat(path + suffix); err != nil || !os.SameFile(before, after) {
					t.Errorf("it was replaced (%v)", err)
				}
				if got := names(t, path); len(got) != 1 {
					t.Errorf("the folder has %q", got)
				}
			})
		}
	}
	if _, err := os.Stat(target + ".missing"); err == nil {
		t.Error("a key was written through a dangling link")
	}
	if content(t, target) != fixed().Base64()+"\n" {
		t.Error("the target of a link was changed")
	}
}

// A folder may be a link; only the file itself may not.
func TestRule17LinkedFolder(t *testing.T) {
	path := in(t, fixed())
	link := filepath.Join(t.TempDir(), "state")
	if err := os.Symlink(filepath.Dir(path), link); err != nil {
		t.Fatal(err)
	}
	if k, created, err := LoadOrCreate(filepath.Join(link, "private.key")); err != nil || created || k != fixed() {
		t.Errorf("the file's key is %v, created %v, error %v", k == fixed(), created, err)
	}
}
