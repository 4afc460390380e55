package arch

import (
	"bytes"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// files returns the files of the tree, below root and with slashes: those that git tracks where this
// is a checkout, else all there are.
func files(t *testing.T) []string {
	t.Helper()
	if _, err := os.Stat(filepath.Join(root, ".git")); err == nil {
		// The checkout may belong to another user, which is no matter for reading a list of names.
		cmd := exec.Command("git", "-c", "safe.directory=*", "ls-files", "-z")
		cmd.Dir = root
		if out, err := cmd.Output(); err == nil && len(out) > 0 {
			return slices.DeleteFunc(strings.Split(string(out), "\x00"), func(s string) bool { return s == "" })
		}
	}
	var all []string
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			if d != nil && d.Name() == ".git" {
				return filepath.SkipDir
			}
			return err
		}
		rel, err := filepath.Rel(root, p)
		all = append(all, filepath.ToSlash(rel))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestTopLevel(t *testing.T) {
	allowed := []string{"mesh", "datapath", "prefixes", "roles", "examples",
		"go.mod", "go.sum", "README.md", "LICENSE", "Makefile", "CHANGELOG.md"}
	seen := make(map[string]bool)
	for _, f := range files(t) {
		top, _, _ := strings.Cut(f, "/")
		seen[top] = true
	}
	for top := range maps.Keys(seen) {
		if !strings.HasPrefix(top, ".") && !slices.Contains(allowed, top) {
			t.Errorf("%s does not belong at the top of the tree", top)
		}
	}
	for _, must := range []string{"go.mod", "go.sum", "README.md", "LICENSE", "Makefile", "CHANGELOG.md"} {
		if !seen[must] {
			t.Errorf("there is no %s", must)
		}
	}
}

func TestEveryPackageIsDocumented(t *testing.T) {
	for _, p := range load(t) {
		if !p.ours() {
			continue
		}
		switch {
		case p.Doc == "":
			t.Errorf("%s has no package comment", p.short())
		case p.Name != "main" && !strings.HasPrefix(p.Doc, "Package "+p.Name+" "):
			t.Errorf("the comment of %s begins with %q, not with Package %s", p.short(), p.Doc, p.Name)
		}
	}
}

// machinePath finds paths that exist on one person's machine only. (Put together from pieces, so that
// this file has none.)
var machinePath = regexp.MustCompile(`(?:^|[^\w.~/-])(?:/(?:work|root|home|Users|private/tmp)/[\w.-]|[A-Z]:\\` + `Users)`)

func TestNoMachinePaths(t *testing.T) {
	for _, f := range files(t) {
		data, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(f)))
		if os.IsNotExist(err) {
			continue // removed, but not yet in a commit
		}
		if err != nil {
			t.Fatal(err)
		}
		if bytes.IndexByte(data, 0) >= 0 {
			continue // no text
		}
		for i, line := range strings.Split(string(data), "\n") {
			if m := machinePath.FindString(line); m != "" {
				t.Errorf("%s:%d: %q is a path of one machine", f, i+1, m)
			}
		}
	}
}

func TestMachinePath(t *testing.T) {
	sep := "/"
	for s, want := range map[string]bool{
		`"` + sep + `root` + sep + `x"`:     true,
		sep + `home` + sep + `me`:           true,
		`see ` + sep + `Users` + sep + `me`: true,
		`C:\` + `Users\me`:                  true,
		`example.org/home/x`:                false,
		`GOROOT/root/x`:                     false,
		`/roots/x`:                          false,
	} {
		if got := machinePath.MatchString(s); got != want {
			t.Errorf("%q: got %t", s, got)
		}
	}
}
