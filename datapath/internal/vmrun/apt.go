package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// release is a kernel that -kernel names.
type release struct {
	name    string
	about   string
	version string   // what its version begins with; empty: any
	own     []string // metapackages to look for in the machine's sources, where the version fits
	meta    string   // metapackage in sources
	sources []string // of Debian's archive
}

var releases = []release{
	{
		name: "6.1", about: "Debian bookworm", version: "6.1.",
		own: []string{"linux-image-cloud-amd64"}, meta: "linux-image-cloud-amd64",
		sources: []string{"debian bookworm main", "debian-security bookworm-security main"},
	},
	{
		name: "6.12", about: "Debian bookworm, linux-image-6.12", version: "6.12.",
		own: []string{"linux-image-6.12-cloud-amd64", "linux-image-cloud-amd64"}, meta: "linux-image-6.12-cloud-amd64",
		sources: []string{"debian-security bookworm-security main"},
	},
	{
		name: "newest", about: "Debian trixie-backports",
		meta: "linux-image-cloud-amd64", sources: []string{"debian trixie-backports main"},
	},
}

const (
	archiveURL = "http://deb.debian.org/"
	keyring    = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

// apt is a set of package sources: with no options the machine's.
type apt struct {
	options []string
	log     func(format string, args ...any)
}

// privateApt returns an apt that has no other sources than r's, and keeps what it knows in dir.
func privateApt(dir string, r release, log func(string, ...any)) (apt, error) {
	if _, err := os.Stat(keyring); err != nil {
		return apt{}, cannot("%s is missing, which Debian's packages are verified with: apt-get install debian-archive-keyring", keyring)
	}
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return apt{}, err
		}
	}
	var list strings.Builder
	for _, s := range r.sources {
		archive, rest, _ := strings.Cut(s, " ")
		fmt.Fprintf(&list, "deb [arch=amd64 signed-by=%s] %s%s %s\n", keyring, archiveURL, archive, rest)
	}
	for name, text := range map[string]string{"sources.list": list.String(), "status": "", "preferences": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return apt{}, err
		}
	}
	a := apt{log: log}
	for _, o := range []string{
		"Dir::State=" + dir, "Dir::State::Lists=" + filepath.Join(dir, "lists"), "Dir::State::Status=" + filepath.Join(dir, "status"),
		"Dir::Cache=" + filepath.Join(dir, "cache"),
		"Dir::Etc::SourceList=" + filepath.Join(dir, "sources.list"), "Dir::Etc::SourceParts=/dev/null",
		"Dir::Etc::Preferences=" + filepath.Join(dir, "preferences"), "Dir::Etc::PreferencesParts=/dev/null",
		"APT::Architecture=amd64", "APT::Update::Error-Mode=any", "Acquire::Languages=none",
	} {
		a.options = append(a.options, "-o", o)
	}
	return a, nil
}

// run runs a program of apt's and returns what it wrote.
func (a apt) run(ctx context.Context, dir, program string, args ...string) ([]byte, error) {
	options := append([]string{"-q", "-o", "Acquire::Retries=3"}, a.options...)
	if os.Geteuid() == 0 {
		// Else apt downloads as a user of its own, who has no access to the cache.
		options = append(options, "-o", "APT::Sandbox::User=root")
	}
	cmd := exec.CommandContext(ctx, program, append(options, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	a.log("%s %s", program, strings.Join(args, " "))
	if err := cmd.Run(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return nil, cannot("%s is missing, which gets the kernels: this needs Debian or a relative of it, or -kernel with the path of a kernel", program)
		}
		said := errs.Bytes()
		if len(said) == 0 {
			said = out.Bytes()
		}
		return nil, fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, bytes.TrimSpace(said))
	}
	return out.Bytes(), nil
}

// debPackage is a package as apt-cache shows it.
type debPackage struct {
	name, version string
	depends       []string // the names of kernel packages only
}

// errNoPackage is a package that the sources have not got.
var errNoPackage = errors.New("no such package")

// show returns the version of a package that would be installed.
func (a apt) show(ctx context.Context, name string) (debPackage, error) {
	text, err := a.run(ctx, "", "apt-cache", "show", "--no-all-versions", name)
	if err != nil {
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			return debPackage{}, fmt.Errorf("%s: %w", name, errNoPackage)
		}
		return debPackage{}, err
	}
	p, ok := parsePackage(string(text))
	if !ok {
		return debPackage{}, fmt.Errorf("%s: %w", name, errNoPackage)
	}
	return p, nil
}

// parsePackage reads the first paragraph of what apt-cache show writes.
func parsePackage(text string) (debPackage, bool) {
	var p debPackage
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if line == "" && p.name != "" {
			break
		}
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch field {
		case "Package":
			p.name = value
		case "Version":
			p.version = value
		case "Depends", "Pre-Depends":
			for dep := range strings.SplitSeq(value, ",") {
				dep, _, _ = strings.Cut(strings.TrimSpace(dep), "|") // the first of alternatives
				dep, _, _ = strings.Cut(strings.TrimSpace(dep), " ")
				// A kernel also depends on what installs it, which nobody needs who boots it from here. What
				// is part of it is named for its architecture.
				if strings.HasPrefix(dep, "linux-") && strings.HasSuffix(dep, "-amd64") && !slices.Contains(p.depends, dep) {
					p.depends = append(p.depends, dep)
				}
			}
		}
	}
	return p, p.name != "" && p.version != ""
}

// resolve returns the kernel packages that a metapackage stands for, itself first.
func resolve(meta debPackage, show func(string) (debPackage, error)) ([]debPackage, error) {
	all := []debPackage{meta}
	seen := map[string]bool{meta.name: true}
	for i := 0; i < len(all); i++ {
		for _, name := range all[i].depends {
			if seen[name] {
				continue
			}
			seen[name] = true
			p, err := show(name)
			if err != nil {
				return nil, fmt.Errorf("%s depends on %w", all[i].name, err)
			}
			all = append(all, p)
		}
	}
	return all, nil
}

// find returns the packages of r if a has it, and errNoPackage if not.
func (a apt) find(ctx context.Context, r release, metas ...string) ([]debPackage, error) {
	for _, name := range metas {
		meta, err := a.show(ctx, name)
		if errors.Is(err, errNoPackage) || err == nil && !strings.HasPrefix(meta.version, r.version) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return resolve(meta, func(name string) (debPackage, error) { return a.show(ctx, name) })
	}
	return nil, errNoPackage
}

// get downloads packages and unpacks the kernel in them to dir: boot and lib/modules.
func (a apt) get(ctx context.Context, packages []debPackage, dir string) error {
	debs, err := os.MkdirTemp(filepath.Dir(dir), "debs-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(debs)
	args := []string{"download"}
	for _, p := range packages {
		args = append(args, p.name+"="+p.version)
	}
	if _, err := a.run(ctx, debs, "apt-get", args...); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(debs, "*.deb"))
	if err != nil {
		return err
	}
	if len(files) != len(packages) {
		return fmt.Errorf("apt-get downloaded %d packages of %d", len(files), len(packages))
	}
	for _, file := range files {
		if err := unpackDeb(ctx, file, dir); err != nil {
			return fmt.Errorf("unpack %s: %w", filepath.Base(file), err)
		}
	}
	return nil
}

// unpackDeb writes what a package has of a kernel to dir.
func unpackDeb(ctx context.Context, file, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", file)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return cannot("dpkg-deb is missing, which unpacks the kernels: apt-get install dpkg")
		}
		return err
	}
	err = unpackTar(root, out)
	_, _ = io.Copy(io.Discard, out)
	if wait := cmd.Wait(); err == nil && wait != nil {
		err = fmt.Errorf("%w: %s", wait, bytes.TrimSpace(errs.Bytes()))
	}
	return err
}

func unpackTar(root *os.Root, r io.Reader) error {
	for t := tar.NewReader(r); ; {
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		// Debian moves lib to usr/lib from release to release.
		name := strings.TrimPrefix(clean(h.Name), "usr/")
		if h.Typeflag != tar.TypeReg || !strings.HasPrefix(name, "boot/") && !strings.HasPrefix(name, "lib/modules/") {
			continue
		}
		if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
			return err
		}
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("%s is there already", name)
		}
		if err != nil {
			return err
		}
		_, err = io.Copy(f, t)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
}
