package arch

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// module is the path of the module, and with a slash the prefix of its packages.
const module = "github.com/warren-mesh/warren"

// root is the module's folder, as seen from this package.
var root = filepath.Join("..", "..", "..")

// pkg is what go list says of a package.
type pkg struct {
	ImportPath string
	Dir        string
	Name       string
	Doc        string
	Standard   bool
	Module     *struct{ Path string }
	GoFiles    []string
	Imports    []string
	Deps       []string
	Error      *struct{ Err string }
}

// short is the import path below the module: "mesh/view".
func (p pkg) short() string { return strings.TrimPrefix(p.ImportPath, module+"/") }

// ours reports whether p is a package of this module.
func (p pkg) ours() bool { return p.Module != nil && p.Module.Path == module }

// tree is every package of the module, and all they depend on, by import path. Tests are left out.
var tree = sync.OnceValues(func() (map[string]pkg, error) { return list("-deps", "./...") })

func load(t *testing.T) map[string]pkg {
	t.Helper()
	ps, err := tree()
	if err != nil {
		t.Fatal(err)
	}
	return ps
}

// list runs go list in the module's folder.
func list(args ...string) (map[string]pkg, error) {
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Dir,Name,Doc,Standard,Module,GoFiles,Imports,Deps,Error"}, args...)...)
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, errors.Join(err, errors.New(stderr.String()))
	}
	ps := make(map[string]pkg)
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		switch err := d.Decode(&p); {
		case err == io.EOF:
			return ps, nil
		case err != nil:
			return nil, err
		case p.Error != nil:
			return nil, errors.New(p.Error.Err)
		}
		ps[p.ImportPath] = p
	}
}

// matches reports whether name is one of patterns: a path, a path with * for any one element, or a
// path that ends in /... for all at and below it.
func matches(name string, patterns ...string) bool {
	for _, p := range patterns {
		if base, all := strings.CutSuffix(p, "/..."); all {
			if name == base || strings.HasPrefix(name, base+"/") {
				return true
			}
			continue
		}
		if ok, err := path.Match(p, name); err == nil && ok {
			return true
		}
	}
	return false
}

func TestMatches(t *testing.T) {
	for _, test := range []struct {
		name, pattern string
		want          bool
	}{
		{"mesh", "mesh", true},
		{"mesh/view", "mesh", false},
		{"mesh/view", "mesh/*", true},
		{"mesh/internal/core", "mesh/*", false},
		{"mesh", "mesh/...", true},
		{"mesh/internal/core", "mesh/...", true},
		{"meshes", "mesh/...", false},
	} {
		if got := matches(test.name, test.pattern); got != test.want {
			t.Errorf("%s is %s: got %t", test.name, test.pattern, got)
		}
	}
}
