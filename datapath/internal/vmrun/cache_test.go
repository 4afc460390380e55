package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParsePackage(t *testing.T) {
	p, ok := parsePackage(`Package: linux-image-7.3.4+deb13-cloud-amd64
Source: linux-signed-amd64 (7.3.4+1~bpo13+1)
Version: 7.3.4-1~bpo13+1
Depends: dracut | initramfs-tools (>= 0.120+deb8u2) | linux-initramfs-tool, linux-base-7.3.4+deb13-cloud-amd64 (= 7.3.4-1~bpo13+1), linux-binary-7.3.4+deb13-cloud-amd64 (= 7.3.4-1~bpo13+1), kmod
Pre-Depends: linux-base (>= 4.17~)
Description: Linux
 Depends: on nothing

Package: other
Version: 1
`)
	want := debPackage{"linux-image-7.3.4+deb13-cloud-amd64", "7.3.4-1~bpo13+1", []string{"linux-base-7.3.4+deb13-cloud-amd64", "linux-binary-7.3.4+deb13-cloud-amd64"}}
	if !ok || fmt.Sprint(p) != fmt.Sprint(want) {
		t.Errorf("%+v", p)
	}
	if _, ok := parsePackage("\n"); ok {
		t.Error("nothing is a package")
	}
}

func TestResolve(t *testing.T) {
	all := map[string][]string{"image": {"binary", "base"}, "binary": {"base"}, "base": nil, "broken": {"gone"}}
	show := func(name string) (debPackage, error) {
		deps, ok := all[name]
		if !ok {
			return debPackage{}, fmt.Errorf("%s: %w", name, errNoPackage)
		}
		return debPackage{name: name, depends: deps}, nil
	}
	got, err := resolve(debPackage{name: "meta", depends: []string{"image", "base"}}, show)
	var names []string
	for _, p := range got {
		names = append(names, p.name)
	}
	if want := []string{"meta", "image", "base", "binary"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("%q, %v", names, err)
	}
	if _, err := resolve(debPackage{name: "meta", depends: []string{"broken"}}, show); !errors.Is(err, errNoPackage) || !strings.Contains(err.Error(), "broken depends on gone") {
		t.Error(err)
	}
}

func TestUnpackTar(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		{Name: "./", Typeflag: tar.TypeDir},
		{Name: "./boot/vmlinuz-1", Typeflag: tar.TypeReg},
		{Name: "./usr/lib/modules/1/kernel/a.ko", Typeflag: tar.TypeReg},
		{Name: "./usr/share/doc/x", Typeflag: tar.TypeReg},
		{Name: "./lib/modules/1/build", Typeflag: tar.TypeSymlink, Linkname: "/usr/src"},
		{Name: "../../boot/escape", Typeflag: tar.TypeReg},
	} {
		h.Mode = 0o777
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	packed := b.Bytes()
	if err := unpackTar(root, bytes.NewReader(packed)); err != nil {
		t.Fatal(err)
	}
	var files []string
	for _, pattern := range []string{"*/*", "*/*/*/*/*", "lib/modules/1/*"} {
		found, err := filepath.Glob(filepath.Join(dir, filepath.FromSlash(pattern)))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range found {
			if info, err := os.Lstat(f); err == nil && !info.IsDir() {
				rel, _ := filepath.Rel(dir, f)
				files = append(files, filepath.ToSlash(rel))
			}
		}
	}
	if want := []string{"boot/escape", "boot/vmlinuz-1", "lib/modules/1/kernel/a.ko"}; !slices.Equal(files, want) {
		t.Errorf("%q", files)
	}
	if err := unpackTar(root, bytes.NewReader(packed)); err == nil {
		t.Error("a file is written twice")
	}
	if err := unpackTar(root, bytes.NewReader(packed[:700])); err == nil {
		t.Error("half an archive is taken")
	}
}

// With a warm cache nothing else is needed; an old one is used if there is no other.
func TestCache(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // no apt
	var notes []string
	c := cache{
		dir:  t.TempDir(),
		log:  t.Logf,
		note: func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) },
	}
	now := time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC)
	get := func(at time.Time, always bool) (kernel, error) {
		return c.kernel(t.Context(), releases[0], at, always)
	}
	if _, err := get(now, false); !errors.As(err, new(cannotError)) || !strings.Contains(err.Error(), "apt-cache is missing") {
		t.Errorf("a cold cache: %v", err)
	}
	put := func(version string) cached {
		dir := filepath.Join("kernels", "6.1_"+version)
		if err := os.MkdirAll(filepath.Join(c.dir, dir, "boot"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(c.dir, dir, "boot", "vmlinuz-"+version), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		return cached{Dir: dir, Checked: now}
	}
	e := put("6.1.5")
	if err := c.write("6.1", e); err != nil {
		t.Fatal(err)
	}
	if k, err := get(now.Add(fresh-1), false); err != nil || k.release != "6.1.5" || len(notes) > 0 {
		t.Errorf("a warm cache: %+v, %v, %q", k, err, notes)
	}
	if k, err := get(now.Add(fresh), false); err != nil || k.release != "6.1.5" || len(notes) != 1 || !strings.Contains(notes[0], "2026-01-31") {
		t.Errorf("an old cache: %+v, %v, %q", k, err, notes)
	}
	if k, err := get(now.Add(fresh+retry-1), false); err != nil || k.release != "6.1.5" || len(notes) != 1 {
		t.Errorf("an old cache, again: %+v, %v, %q", k, err, notes)
	}
	if _, err := get(now.Add(fresh+retry), false); err != nil || len(notes) != 2 {
		t.Errorf("an old cache, a day later: %v, %q", err, notes)
	}
	if _, err := get(now, true); err == nil {
		t.Error("fetched without apt")
	}

	// Of kernels that were replaced, the last stays: somebody may be booting it.
	e2, e3 := put("6.1.6"), put("6.1.7")
	e2.Before, e3.Before = e.Dir, e2.Dir
	c.prune("6.1", e2)
	if left := kernels(t, c); !slices.Equal(left, []string{"6.1_6.1.5", "6.1_6.1.6"}) {
		t.Errorf("%q", left)
	}
	put("6.1.7")
	c.prune("6.1", e3)
	if left := kernels(t, c); !slices.Equal(left, []string{"6.1_6.1.6", "6.1_6.1.7"}) {
		t.Errorf("%q", left)
	}

	for _, text := range []string{"", "{", `{"Dir": "../.."}`} {
		if err := os.WriteFile(filepath.Join(c.dir, "6.1.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := get(now, false); !errors.As(err, new(cannotError)) {
			t.Errorf("%q for an index: %v", text, err)
		}
	}
}

func kernels(t *testing.T, c cache) (names []string) {
	t.Helper()
	all, err := os.ReadDir(filepath.Join(c.dir, "kernels"))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		names = append(names, d.Name())
	}
	return names
}
