package key

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func content(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// in returns the path of a key file in a new folder, and the keys in it and its
// backup, in the order given; a zero key is no file.
func in(t *testing.T, keys ...Private) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "private.key")
	for i, k := range keys {
		if !k.IsZero() {
			write(t, path+[]string{"", backupSuffix}[i], k.Base64()+"\n")
		}
	}
	return path
}

// names returns the names in the folder of path.
func names(t *testing.T, path string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func onlyKeyFiles(t *testing.T, path string) {
	t.Helper()
	if got := names(t, path); len(got) != 2 || got[0] != "private.key" || got[1] != "private.key.bak" {
		t.Errorf("the folder has %q, want the key file and its backup", got)
	}
}

// logged returns a File at path and what it logs.
func logged(path string) (File, *bytes.Buffer) {
	var out bytes.Buffer
	return File{Path: path, Logger: slog.New(slog.NewTextHandler(&out, nil))}, &out
}

func TestRule17CreateThenTheSameKeyAtEveryStart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "var", "lib", "warren", "private.key")
	k, created, err := LoadOrCreate(path)
	if err != nil || !created || k.IsZero() {
		t.Fatalf("first start: created is %v, error %v", created, err)
	}
	for start := range 5 {
		again, created, err := LoadOrCreate(path)
		if err != nil || created || again != k {
			t.Errorf("start %d: created is %v, the same key %v, error %v", start+2, created, again == k, err)
		}
	}
	if again, err := Load(path); err != nil || again != k {
		t.Errorf("Load: the same key is %v, error %v", again == k, err)
	}
	for _, p := range []string{path, path + backupSuffix} {
		if got, want := content(t, p), k.Base64()+"\n"; got != want {
			t.Errorf("%s is not the line that wg genkey writes", p)
		}
	}
	onlyKeyFiles(t, path)
}

// wg is the program that is to read the files.
func TestRule17FilesAreReadByWg(t *testing.T) {
	wg, err := exec.LookPath("wg")
	if err != nil {
		t.Skip("needs wg, of wireguard-tools")
	}
	path := in(t)
	k, _, err := LoadOrCreate(path)
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(wg, "pubkey")
	c.Stdin = strings.NewReader(content(t, path))
	if out, err := c.Output(); err != nil || string(out) != k.Public().String()+"\n" {
		t.Errorf("wg pubkey says %q, %v, want %v", out, err, k.Public())
	}
	out, err := exec.Command(wg, "genkey").Output()
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, string(out))
	if k, err := Load(path); err != nil || k.Base64()+"\n" != string(out) {
		t.Errorf("the key of wg genkey is read as it is: %v, error %v", k.Base64()+"\n" == string(out), err)
	}
	out, err = exec.Command(wg, "genpsk").Output()
	if err != nil {
		t.Fatal(err)
	}
	if psk, err := ParsePreshared(strings.TrimSuffix(string(out), "\n")); err != nil || psk.Base64()+"\n" != string(out) {
		t.Errorf("the key of wg genpsk is read as it is: %v, error %v", psk.Base64()+"\n" == string(out), err)
	}
}

func TestRule17PathWithoutFolder(t *testing.T) {
	t.Chdir(t.TempDir())
	k, created, err := LoadOrCreate("private.key")
	if err != nil || !created {
		t.Fatalf("created is %v, error %v", created, err)
	}
	if err := Replace("private.key", newKey()); err != nil {
		t.Fatal(err)
	}
	if old, err := Load("private.key" + backupSuffix); err != nil || old != k {
		t.Errorf("the backup is the old key: %v, error %v", old == k, err)
	}
	onlyKeyFiles(t, "private.key")
}

func TestRule17LoadOfNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "missing", "private.key")
	_, err := Load(path)
	if !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("got error %v, want one that wraps fs.ErrNotExist", err)
	}
	if e := asFileError(t, err); e.Path != path || e.Op != "load" {
		t.Errorf("got path %q and operation %q, want %q and load", e.Path, e.Op, path)
	}
	if _, err := os.Stat(filepath.Dir(path)); err == nil {
		t.Error("Load made the folder")
	}
	if err := Replace(path, newKey()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Replace of nothing: got error %v, want one that wraps fs.ErrNotExist", err)
	}
}

func TestRule17UnclampedKeyOnDisk(t *testing.T) {
	k := fixed()
	b := k.Bytes()
	b[0] |= 7
	path := in(t)
	write(t, path, encode(b)) // and no newline
	if got, err := Load(path); err != nil || got != k {
		t.Errorf("the same key is %v, error %v", got == k, err)
	}
}

// corrupt lists what can be in a file in place of a key.
func corrupt() map[string]string {
	good := fixed().Base64()
	return map[string]string{
		"empty":            "",
		"newline":          "\n",
		"truncated":        good[:20],
		"one short":        good[:43],
		"one short, line":  good[:43] + "\n",
		"zero bytes":       strings.Repeat("\x00", 45),
		"zero key":         strings.Repeat("A", 43) + "=\n",
		"two newlines":     good + "\n\n",
		"two lines":        good + "\n" + good + "\n",
		"Windows line":     good + "\r\n",
		"space before":     " " + good + "\n",
		"space after":      good + " \n",
		"hexadecimal":      strings.Repeat("a5", 32) + "\n",
		"padding bits":     good[:42] + "B=\n",
		"byte order mark":  "\ufeff" + good,
		"configuration":    "[Interface]\nPrivateKey = " + good + "\n",
		"32 bytes":         string(bytes.Repeat([]byte{0xa5}, 32)),
		"much":             strings.Repeat("x", 1<<20),
		"a line too short": good[:22] + "\n" + good[22:43],
	}
}

func TestRule17CorruptFileIsNamedAndKept(t *testing.T) {
	operations := map[string]func(File) error{
		"Load":         func(f File) error { _, err := f.Load(); return err },
		"LoadOrCreate": func(f File) error { _, _, err := f.LoadOrCreate(); return err },
		"Replace":      func(f File) error { return f.Replace(newKey()) },
	}
	for name, text := range corrupt() {
		for operation, do := range operations {
			for _, backup := range []string{"", "valid", "corrupt"} {
				t.Run(fmt.Sprintf("%s/%s/backup %s", name, operation, backup), func(t *testing.T) {
					path := in(t)
					write(t, path, text)
					kept := newKey()
					switch backup {
					case "valid":
						write(t, path+backupSuffix, kept.Base64()+"\n")
					case "corrupt":
						write(t, path+backupSuffix, text)
					}
					before := names(t, path)
					err := do(File{Path: path})
					if !errors.Is(err, ErrCorrupt) || errors.Is(err, ErrInsecure) {
						t.Fatalf("got error %v, want one that wraps ErrCorrupt", err)
					}
					if e := asFileError(t, err); e.Path != path {
						t.Errorf("the error is about %s, want %s", e.Path, path)
					}
					if !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), path+backupSuffix) {
						t.Errorf("error %q does not name the file and its backup", err)
					}
					if backup == "valid" && (!strings.Contains(err.Error(), "to restore it, move "+path+" away") ||
						!strings.Contains(err.Error(), kept.Public().String())) {
						t.Errorf("error %q does not say how to restore which key", err)
					}
					silent(t, err.Error(), fixed(), kept)
					if content(t, path) != text {
						t.Error("the file was changed")
					}
					if backup == "valid" && content(t, path+backupSuffix) != kept.Base64()+"\n" {
						t.Error("the backup was changed")
					}
					if after := names(t, path); fmt.Sprint(after) != fmt.Sprint(before) {
						t.Errorf("the folder had %q and has %q", before, after)
					}
				})
			}
		}
	}
}

// The advice in the error works.
func TestRule17RestoreOverCorruptByHand(t *testing.T) {
	path := in(t, Private{}, fixed())
	write(t, path, "rubbish")
	if _, _, err := LoadOrCreate(path); err == nil {
		t.Fatal("rubbish is accepted")
	}
	if err := os.Rename(path, path+".broken"); err != nil {
		t.Fatal(err)
	}
	if k, created, err := LoadOrCreate(path); err != nil || created || k != fixed() {
		t.Errorf("the backup's key is %v, created %v, error %v", k == fixed(), created, err)
	}
}

// silent fails if text shows any part of the keys.
func silent(t *testing.T, text string, keys ...Private) {
	t.Helper()
	for _, k := range keys {
		b := k.Bytes()
		for _, secret := range []string{k.Base64(), hex.EncodeToString(b[:]), string(b[:])} {
			for i := range len(secret) - 6 {
				if part := secret[i : i+6]; strings.Contains(text, part) {
					t.Errorf("%q shows %q of a key", text, part)
				}
			}
		}
	}
}

func TestRule17FolderInPlaceOfFile(t *testing.T) {
	path := in(t)
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	_, _, err := LoadOrCreate(path)
	if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "a folder") {
		t.Errorf("got error %v, want one that wraps ErrCorrupt and says folder", err)
	}
}

func TestRule17MissingFileIsRestored(t *testing.T) {
	for name, load := range map[string]func(File) (Private, error){
		"Load": File.Load,
		"LoadOrCreate": func(f File) (Private, error) {
			k, created, err := f.LoadOrCreate()
			if created {
				t.Error("LoadOrCreate says that it made a restored key")
			}
			return k, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := in(t, Private{}, fixed())
			f, log := logged(path)
			k, err := load(f)
			if err != nil || k != fixed() {
				t.Fatalf("the backup's key is %v, error %v", k == fixed(), err)
			}
			if content(t, path) != content(t, path+backupSuffix) {
				t.Error("the file is not as its backup")
			}
			onlyKeyFiles(t, path)
			if got := log.String(); strings.Count(got, "restored from its backup") != 1 ||
				!strings.Contains(got, path) || !strings.Contains(got, k.Public().Short()) {
				t.Errorf("log: %s", got)
			}
			silent(t, log.String(), k)

			// And that was that.
			log.Reset()
			if again, err := load(f); err != nil || again != k || log.Len() > 0 {
				t.Errorf("next time: the same key is %v, error %v, log %q", again == k, err, log)
			}
		})
	}
}

func TestRule17NoNewIdentityBesideADamagedBackup(t *testing.T) {
	path := in(t)
	write(t, path+backupSuffix, "rubbish")
	for _, load := range []func() error{
		func() error { _, err := Load(path); return err },
		func() error { _, _, err := LoadOrCreate(path); return err },
		func() error { return Replace(path, newKey()) },
	} {
		err := load()
		if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), path+backupSuffix) {
			t.Errorf("got error %v, want one that wraps ErrCorrupt and names the backup", err)
		}
		if e := asFileError(t, err); e.Path != path || e.Op != "restore" {
			t.Errorf("got path %s and operation %q", e.Path, e.Op)
		}
		if got := names(t, path); len(got) != 1 || content(t, path+backupSuffix) != "rubbish" {
			t.Errorf("the folder has %q", got)
		}
	}
}

func TestRule17DamagedBackupBesideAGoodFile(t *testing.T) {
	path := in(t, fixed())
	write(t, path+backupSuffix, "rubbish")
	f, log := logged(path)
	k, created, err := f.LoadOrCreate()
	if err != nil || created || k != fixed() {
		t.Errorf("the file's key is %v, created %v, error %v", k == fixed(), created, err)
	}
	if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, path+backupSuffix) {
		t.Errorf("log: %q", got)
	}
	err = f.Replace(newKey())
	if e := asFileError(t, err); !errors.Is(err, ErrCorrupt) || e.Path != path+backupSuffix || e.Op != "back up" {
		t.Errorf("Replace: got error %v, want one about the backup that wraps ErrCorrupt", err)
	}
	if content(t, path+backupSuffix) != "rubbish" || content(t, path) != fixed().Base64()+"\n" {
		t.Error("a file was changed")
	}
}

func TestRule17MissingBackupIsMade(t *testing.T) {
	path := in(t, fixed())
	if k, err := Load(path); err != nil || k != fixed() {
		t.Fatalf("the file's key is %v, error %v", k == fixed(), err)
	}
	if got := names(t, path); len(got) != 1 {
		t.Errorf("Load wrote: the folder has %q", got)
	}
	if k, created, err := LoadOrCreate(path); err != nil || created || k != fixed() {
		t.Fatalf("the file's key is %v, created %v, error %v", k == fixed(), created, err)
	}
	onlyKeyFiles(t, path)
	if content(t, path+backupSuffix) != content(t, path) {
		t.Error("the backup is not as the file")
	}
}

// A name that leaves no room for that of a temporary stands for a folder that
// cannot be written to, which root can.
func TestRule17NoBackupIsNoFailure(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("k", 250))
	if err := os.WriteFile(path, []byte(fixed().Base64()), 0o600); err != nil {
		t.Skipf("needs a file system with names of 250 bytes: %v", err)
	}
	f, log := logged(path)
	k, created, err := f.LoadOrCreate()
	if err != nil || created || k != fixed() {
		t.Errorf("the file's key is %v, created %v, error %v", k == fixed(), created, err)
	}
	if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "no backup") {
		t.Errorf("log: %q", got)
	}
	if err := f.Replace(newKey()); asFileError(t, err).Op != "back up" {
		t.Errorf("Replace without a backup: %v", err)
	}
	if content(t, path) != fixed().Base64() {
		t.Error("the file was changed")
	}
}

func TestRule17FolderThatCannotBeWrittenTo(t *testing.T) {
	file := in(t, fixed())
	paths := []string{filepath.Join(file, "private.key"), filepath.Join(file, "below", "private.key")}
	if info, err := os.Stat("/proc/self"); err == nil && info.IsDir() {
		paths = append(paths, "/proc/self/private.key", "/proc/self/warren/private.key")
	}
	if closed := filepath.Join(t.TempDir(), "closed"); os.Mkdir(closed, 0o500) == nil &&
		os.WriteFile(filepath.Join(closed, "probe"), nil, 0o600) != nil {
		paths = append(paths, filepath.Join(closed, "private.key"), filepath.Join(closed, "below", "private.key"))
	}
	for _, path := range paths {
		k, created, err := LoadOrCreate(path)
		if err == nil || created || !k.IsZero() {
			t.Fatalf("%s: created is %v, error %v", path, created, err)
		}
		if e := asFileError(t, err); e.Path != path || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %q does not name it", path, err)
		}
	}
}

func TestRule17Replace(t *testing.T) {
	path := in(t)
	first, _, err := LoadOrCreate(path)
	if err != nil {
		t.Fatal(err)
	}
	want := first
	for range 3 {
		old := want
		want = newKey()
		if err := Replace(path, want); err != nil {
			t.Fatal(err)
		}
		if got, err := Load(path); err != nil || got != want {
			t.Errorf("the new key is in the file: %v, error %v", got == want, err)
		}
		if got, err := Load(path + backupSuffix); err != nil || got != old {
			t.Errorf("the old key is in the backup: %v, error %v", got == old, err)
		}
		onlyKeyFiles(t, path)

		// The same again is nothing new, and the old key stays where it is.
		if err := Replace(path, want); err != nil {
			t.Fatal(err)
		}
		if got, err := Load(path + backupSuffix); err != nil || got != old {
			t.Errorf("after the same again, the old key is in the backup: %v, error %v", got == old, err)
		}
	}
	if err := Replace(path, Private{}); asFileError(t, err).Path != path {
		t.Errorf("no key: got error %v", err)
	}
	if got, err := Load(path); err != nil || got != want {
		t.Errorf("no key took the place of one (%v)", err)
	}
}

// Whoever reads while keys are replaced sees the one or the other.
func TestRule17ReplaceUnderReaders(t *testing.T) {
	one, two := newKey(), newKey()
	path := in(t, one, two)
	done := make(chan struct{})
	result := make(chan error, 1)
	go func() {
		for n := 0; ; n++ {
			select {
			case <-done:
				result <- nil
				return
			default:
			}
			f, log := logged(path)
			k, created, err := f.LoadOrCreate()
			if err != nil || created || k != one && k != two || log.Len() > 0 {
				result <- fmt.Errorf("read %d: created is %v, error %v, log %q", n, created, err, log)
				return
			}
		}
	}()
	for range 20 {
		for _, k := range []Private{two, one} {
			if err := Replace(path, k); err != nil {
				t.Error(err)
			}
		}
	}
	close(done)
	if err := <-result; err != nil {
		t.Error(err)
	}
	onlyKeyFiles(t, path)
}

// race starts n processes, lets them go at once, and returns what they print.
func race(t *testing.T, n int, operation, path string) []string {
	t.Helper()
	hold, release, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	defer release.Close()
	var commands []*exec.Cmd
	var outs []*bytes.Buffer
	for range n {
		c, out := run(operation, 0, path)
		c.Stdin = hold
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		commands, outs = append(commands, c), append(outs, out)
	}
	time.Sleep(20 * time.Millisecond) // until most have come to the gate
	release.Close()
	var lines []string
	for i, c := range commands {
		if err := c.Wait(); err != nil {
			t.Fatalf("%v: %s", err, outs[i])
		}
		lines = append(lines, outs[i].String())
	}
	return lines
}

func TestRule17TwentyProcessesOneKey(t *testing.T) {
	for round := range 10 {
		path := filepath.Join(t.TempDir(), "state", "warren", "private.key")
		makers := 0
		lines := race(t, 20, "create", path)
		k, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			switch line {
			case fmt.Sprintln(k.Public(), true, error(nil)):
				makers++
			case fmt.Sprintln(k.Public(), false, error(nil)):
			default:
				t.Errorf("round %d: the file has %v, a process had %s", round, k.Public(), line)
			}
		}
		if makers != 1 {
			t.Errorf("round %d: %d processes made the key", round, makers)
		}
		if b, err := Load(path + backupSuffix); err != nil || b != k {
			t.Errorf("round %d: the backup has the key: %v, error %v", round, b == k, err)
		}
		onlyKeyFiles(t, path)
	}
}

func TestRule17TwentyProcessesRestoreOneKey(t *testing.T) {
	path := in(t, Private{}, fixed())
	for _, line := range race(t, 20, "load", path) {
		if want := fmt.Sprintln(fixed().Public(), false, error(nil)); line != want {
			t.Errorf("got %s, want %s", line, want)
		}
	}
	onlyKeyFiles(t, path)
}

// Whatever comes to be at the path in the last moment stays there, and is what
// counts.
func TestRule17FirstOneWins(t *testing.T) {
	for name, prepare := range map[string]func() string{
		"create":  func() string { return in(t) },
		"restore": func() string { return in(t, Private{}, newKey()) },
	} {
		for _, text := range []string{fixed().Base64() + "\n", "rubbish"} {
			t.Run(name+" "+text[:7], func(t *testing.T) {
				f, log := logged(prepare())
				f.step = func(step string) {
					if _, err := os.Lstat(f.Path); step == "temporary synced" && err != nil {
						write(t, f.Path, text)
					}
				}
				k, created, err := f.LoadOrCreate()
				if text == "rubbish" {
					if !errors.Is(err, ErrCorrupt) {
						t.Errorf("got error %v, want one that wraps ErrCorrupt", err)
					}
				} else if err != nil || k != fixed() {
					t.Errorf("the first one's key is %v, error %v", k == fixed(), err)
				}
				if created || log.Len() > 0 || content(t, f.Path) != text {
					t.Errorf("created %v, the file is as it was %v, log %q", created, content(t, f.Path) == text, log)
				}
			})
		}
	}
}

// crashes runs the operation on a new path from prepare once for each step
// there is, in a process that dies after it, and calls check.
func crashes(t *testing.T, operation string, want int, prepare func() string, check func(t *testing.T, path string)) {
	t.Helper()
	var steps []string
	f := File{Path: prepare(), step: func(s string) { steps = append(steps, s) }}
	var err error
	switch operation {
	case "create":
		_, _, err = f.LoadOrCreate()
	case "load":
		_, err = f.Load()
	case "replace":
		err = f.Replace(newKey())
	}
	if err != nil || len(steps) < want {
		t.Fatalf("steps %q, error %v, want at least %d steps", steps, err, want)
	}
	for i, step := range steps {
		t.Run(fmt.Sprintf("%d %s", i+1, step), func(t *testing.T) {
			path := prepare()
			c, out := run(operation, i+1, path)
			if err := c.Run(); err == nil {
				t.Fatalf("the process did not die: %s", out)
			}
			check(t, path)
		})
	}
}

// whole fails if there is something at path that is not a key.
func whole(t *testing.T, path string) (Private, bool) {
	t.Helper()
	k, err := read("load", path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return k, err == nil
}

func TestRule17CrashWhileCreating(t *testing.T) {
	crashes(t, "create", 13, func() string {
		return filepath.Join(t.TempDir(), "state", "warren", "private.key")
	}, func(t *testing.T, path string) {
		first, existed := whole(t, path)
		backup, backedUp := whole(t, path+backupSuffix)
		if backedUp && (!existed || backup != first) {
			t.Error("the backup was before the file")
		}
		f, log := logged(path)
		k, created, err := f.LoadOrCreate()
		if err != nil || created == existed || existed && k != first || log.Len() > 0 {
			t.Fatalf("next start: there was a key: %v, created %v, the same %v, error %v, log %q", existed, created, k == first, err, log)
		}
		if again, created, err := LoadOrCreate(path); err != nil || created || again != k {
			t.Errorf("start after: created %v, the same %v, error %v", created, again == k, err)
		}
		if b, ok := whole(t, path+backupSuffix); !ok || b != k {
			t.Error("there is no backup")
		}
	})
}

func TestRule17CrashWhileReplacing(t *testing.T) {
	old, before, next := newKey(), newKey(), newKey()
	crashes(t, "replace", 12, func() string { return in(t, old, before) }, func(t *testing.T, path string) {
		f, log := logged(path)
		k, err := f.Load()
		if err != nil || log.Len() > 0 {
			t.Fatalf("error %v, log %q", err, log)
		}
		b, ok := whole(t, path+backupSuffix)
		if !ok || k == old && b != old && b != before || k != old && b != old {
			t.Errorf("the file has the old key: %v; the backup has the old key: %v, the one before: %v", k == old, b == old, b == before)
		}
		// Done once more, it succeeds.
		if err := Replace(path, next); err != nil {
			t.Fatal(err)
		}
		if got, ok := whole(t, path); !ok || got != next {
			t.Error("the new key is not in the file")
		}
		if got, ok := whole(t, path+backupSuffix); !ok || got != k {
			t.Error("the key before is not in the backup")
		}
	})
}

func TestRule17CrashWhileRestoring(t *testing.T) {
	crashes(t, "load", 6, func() string { return in(t, Private{}, fixed()) }, func(t *testing.T, path string) {
		if k, created, err := LoadOrCreate(path); err != nil || created || k != fixed() {
			t.Errorf("the backup's key is %v, created %v, error %v", k == fixed(), created, err)
		}
	})
}

func TestRule17CrashWhileBackingUp(t *testing.T) {
	crashes(t, "create", 6, func() string { return in(t, fixed()) }, func(t *testing.T, path string) {
		f, log := logged(path)
		if k, created, err := f.LoadOrCreate(); err != nil || created || k != fixed() || log.Len() > 0 {
			t.Errorf("the file's key is %v, created %v, error %v, log %q", k == fixed(), created, err, log)
		}
		if b, ok := whole(t, path+backupSuffix); !ok || b != fixed() {
			t.Error("there is no backup")
		}
	})
}

// What a crash leaves behind is not a key file, even if it is the only file.
func TestRule17LeftoversAreNotRead(t *testing.T) {
	path := in(t)
	left := filepath.Join(filepath.Dir(path), ".private.key.AAAA.tmp")
	write(t, left, fixed().Base64()+"\n")
	if _, err := Load(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got error %v, want one that wraps fs.ErrNotExist", err)
	}
	k, created, err := LoadOrCreate(path)
	if err != nil || !created || k == fixed() {
		t.Errorf("created %v, the key of the leftover %v, error %v", created, k == fixed(), err)
	}
}

func TestFileErrorsAreOfTheirKind(t *testing.T) {
	err := error(&FileError{Path: "/etc/warren/private.key", Op: "load", Err: io.ErrUnexpectedEOF})
	if got, want := err.Error(), "key: load /etc/warren/private.key: unexpected EOF"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error("Unwrap does not lead to the cause")
	}
}
