package arch

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var (
	drivers = []string{"datapath/memory", "datapath/netstack", "datapath/tun", "datapath/kernel", "datapath/auto"}
	stores  = []string{"mesh/registry/memory", "mesh/registry/etcd"}
)

// rule says what the packages it is about may depend on, at whatever remove. Arrows point down only.
type rule struct {
	of   []string
	only []string // packages of this module; nil: any
	not  []string // nor these
	from []string // other modules; nil: any
	why  string
}

func rules() []rule {
	values := []string{"prefixes", "datapath/key"}
	leafModules := []string{"go4.org/netipx", "golang.org/x/crypto", "golang.org/x/sys", "github.com/google/renameio/v2"}
	datapathModules := append(slices.Clone(leafModules), "github.com/gaissmai/bart")
	return []rule{
		{of: []string{"prefixes"}, only: []string{}, from: []string{"go4.org/netipx"}, why: "it is a leaf"},
		{of: []string{"datapath/key"}, only: []string{}, from: leafModules[1:], why: "it is a leaf"},
		{of: []string{"datapath"}, only: values, from: datapathModules, why: "it knows neither drivers nor the mesh"},
		{of: []string{"datapath/..."}, not: []string{"mesh/...", "roles/..."}, why: "a datapath serves whoever drives it"},
		{of: []string{"datapath/memory"}, only: append(values, "datapath"), from: datapathModules, why: "the reference device needs nothing else"},
		{of: []string{"datapath/internal/uapi", "datapath/internal/wgconv", "datapath/internal/hostnet", "datapath/internal/wggo", "datapath/internal/sockets", "datapath/internal/tunio", "datapath/internal/offload", "datapath/internal/world"}, not: drivers, why: "drivers share it"},
		{of: []string{"datapath/datapathtest"}, not: drivers, why: "the suite knows no driver"},
		{of: []string{"datapath/internal/nettest"}, not: drivers, why: "the tests of drivers share it"},
		{of: []string{"prefixes", "datapath/...", "mesh/...", "examples/..."}, not: []string{"datapath/internal/nettest"}, why: "it is for tests alone"},

		{of: []string{"mesh/watch", "mesh/registry"}, only: []string{}, from: []string{}, why: "it is a leaf"},
		{of: []string{"mesh/registry/memory"}, only: []string{"mesh/registry", "mesh/watch"}, from: []string{}, why: "a store knows nothing of what it keeps"},
		{of: []string{"mesh/registry/..."}, not: []string{"datapath/...", "mesh", "mesh/record", "mesh/identity/...", "mesh/view", "mesh/internal/...", "roles/..."}, why: "a store knows nothing of what it keeps"},
		{of: []string{"mesh/registry/registrytest"}, not: stores, why: "the suite knows no store"},
		{of: []string{"mesh/record"}, only: append(values, "mesh/registry"), why: "a record is a value"},
		{of: []string{"mesh/view"}, only: append(values, "mesh/registry", "mesh/record"), why: "a view is a value"},
		{of: []string{"mesh/identity/..."}, not: slices.Concat(drivers, stores, []string{"datapath", "mesh", "mesh/view", "mesh/internal/...", "roles/..."}), why: "whom to believe does not depend on the mesh"},
		{of: []string{"mesh/internal/resolve"}, only: []string{}, from: []string{"github.com/miekg/dns", "github.com/cenkalti/backoff/v5", "golang.org/x/net", "golang.org/x/sys"}, why: "a name is looked up for whoever asks"},
		{of: []string{"mesh/internal/core"}, not: slices.Concat(drivers, stores, []string{"mesh", "mesh/watch", "mesh/internal/state"}), why: "deciding knows no driver, no store and no loop"},
		{of: []string{"mesh", "mesh/internal/..."}, not: slices.Concat(drivers, stores, []string{"roles/...", "mesh/meshtest", "mesh/control/..."}), why: "the embedder chooses driver and store"},
		{of: []string{"roles", "roles/part"}, not: slices.Concat(drivers, stores, []string{"mesh", "mesh/internal/..."}), why: "the embedder chooses driver, store and mesh"},
		{of: []string{"roles/part"}, only: []string{"mesh/watch"}, from: []string{"github.com/cenkalti/backoff/v5"}, why: "embedders have parts of their own"},
		{of: []string{"roles/podnetwork", "roles/meshservice", "roles/hostaddr"}, not: slices.Concat(drivers, stores), why: "the embedder chooses driver and store"},
	}
}

func TestArrows(t *testing.T) {
	ps := load(t)
	for _, r := range rules() {
		for _, p := range ps {
			if p.ours() && matches(p.short(), r.of...) {
				for _, bad := range r.broken(p, ps) {
					t.Errorf("%s must not depend on %s: %s", p.short(), bad, r.why)
				}
			}
		}
	}
}

// broken returns what p depends on and may not.
func (r rule) broken(p pkg, ps map[string]pkg) []string {
	bad := make(map[string]bool)
	for _, dep := range p.Deps {
		d := ps[dep]
		switch {
		case d.Standard || d.Module == nil:
		case d.ours():
			if r.only != nil && !matches(d.short(), r.only...) || matches(d.short(), r.not...) && d.short() != p.short() {
				bad[d.short()] = true
			}
		case r.from != nil && !slices.Contains(r.from, d.Module.Path):
			bad[d.Module.Path] = true
		}
	}
	return slices.Sorted(maps.Keys(bad))
}

// The rules bite: a leaf that used the mesh, and a driver in the mesh, would be seen.
func TestRuleSeesWhatItForbids(t *testing.T) {
	own := &struct{ Path string }{module}
	ps := map[string]pkg{
		module + "/mesh":              {ImportPath: module + "/mesh", Module: own},
		module + "/datapath/netstack": {ImportPath: module + "/datapath/netstack", Module: own},
		"example.org/x/y":             {ImportPath: "example.org/x/y", Module: &struct{ Path string }{"example.org/x"}},
		"fmt":                         {ImportPath: "fmt", Standard: true},
	}
	p := pkg{ImportPath: module + "/prefixes", Module: own, Deps: slices.Sorted(maps.Keys(ps))}
	for _, test := range []struct {
		rule rule
		want []string
	}{
		{rule{only: []string{}, from: []string{}}, []string{"datapath/netstack", "example.org/x", "mesh"}},
		{rule{only: []string{"mesh"}}, []string{"datapath/netstack"}},
		{rule{not: []string{"mesh/..."}}, []string{"mesh"}},
		{rule{from: []string{"example.org/x"}}, nil},
	} {
		if got := test.rule.broken(p, ps); !slices.Equal(got, test.want) {
			t.Errorf("%+v: got %v, want %v", test.rule, got, test.want)
		}
	}
}

// Every rule is about a package there is, or is planned: a renamed package must not escape.
func TestRulesAreAboutSomething(t *testing.T) {
	planned := []string{"roles", "mesh/control/..."}
	ps := load(t)
	for _, r := range rules() {
		for _, of := range r.of {
			found := slices.Contains(planned, of)
			for _, p := range ps {
				found = found || p.ours() && matches(p.short(), of)
			}
			if !found {
				t.Errorf("no package is %s", of)
			}
		}
	}
}

// Deciding does no I/O and has no clock: mesh/internal/core and the planner of package datapath are
// told the time, read nothing and start nothing.
func TestDecidingIsPure(t *testing.T) {
	ps := load(t)
	for _, name := range []string{"mesh/internal/core", "mesh/view", "mesh/record", "datapath", "prefixes", "datapath/internal/uapi"} {
		p := ps[module+"/"+name]
		for _, banned := range []string{"os", "os/exec", "net/http", "io/ioutil", "syscall", "math/rand", "math/rand/v2", "crypto/rand", "log"} {
			if slices.Contains(p.Imports, banned) {
				t.Errorf("%s imports %s", name, banned)
			}
		}
		if name != "prefixes" && slices.Contains(p.Imports, "net") { // which converts to and from net.IPNet
			t.Errorf("%s imports net, and net/netip should do", name)
		}
		for _, file := range p.GoFiles {
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, file), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for pos, what := range impure(f) {
				t.Errorf("%s/%s:%d: %s: time is an argument, and what acts is elsewhere", name, file, fset.Position(pos).Line, what)
			}
		}
	}
	core := ps[module+"/mesh/internal/core"]
	for _, banned := range []string{"context", "mesh/registry", "mesh/watch"} {
		if slices.Contains(core.Imports, banned) || slices.Contains(core.Imports, module+"/"+banned) {
			t.Errorf("core imports %s", banned)
		}
	}
}

// impure returns where f asks for the time, waits or starts a goroutine.
func impure(f *ast.File) map[token.Pos]string {
	found := make(map[token.Pos]string)
	banned := []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker"}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			found[n.Pos()] = "go"
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" && slices.Contains(banned, n.Sel.Name) {
				found[n.Pos()] = "time." + n.Sel.Name
			}
		}
		return true
	})
	return found
}

func TestImpureIsSeen(t *testing.T) {
	src := "package p\nfunc f() { go f(); _ = time.Now(); _ = t.After(u); time.Sleep(time.Second) }"
	f, err := parser.ParseFile(token.NewFileSet(), "p.go", src, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(slices.Sorted(maps.Values(impure(f))), " "); got != "go time.Now time.Sleep" {
		t.Errorf("got %q", got)
	}
}

// heavy are modules that only those who import the package that needs them may get.
var heavy = map[string][]string{ // name -> module paths, as prefixes
	"etcd":       {"go.etcd.io"},
	"server":     {"go.etcd.io/etcd/server", "go.etcd.io/raft", "go.etcd.io/bbolt"}, // etcd's, which only tests may have
	"gRPC":       {"google.golang.org/grpc"},
	"protobuf":   {"google.golang.org/protobuf", "github.com/golang/protobuf", "github.com/gogo/protobuf"},
	"Kubernetes": {"k8s.io", "sigs.k8s.io"},
	"Prometheus": {"github.com/prometheus"},
	"netlink":    {"github.com/vishvananda", "github.com/mdlayher", "golang.zx2c4.com/wireguard/wgctrl", "github.com/google/nftables"},
	"gVisor":     {"gvisor.dev"},
	"WireGuard":  {"golang.zx2c4.com/wireguard"},
}

// linked returns which of the heavy ones are among the dependencies of the named packages.
func linked(ps map[string]pkg, names ...string) []string {
	found := make(map[string]bool)
	for _, n := range names {
		for _, dep := range ps[module+"/"+n].Deps {
			m := ps[dep].Module
			for what, paths := range heavy {
				if m != nil && slices.ContainsFunc(paths, func(p string) bool { return m.Path == p || strings.HasPrefix(m.Path, p+"/") }) {
					found[what] = true
				}
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

func TestWeightIsOptIn(t *testing.T) {
	ps := load(t)
	for _, test := range []struct {
		program []string
		want    []string
	}{
		{[]string{"mesh"}, nil},
		{[]string{"mesh", "datapath/memory", "mesh/registry/memory"}, nil},
		{[]string{"mesh", "datapath/netstack", "mesh/registry/memory"}, []string{"WireGuard", "gVisor"}},
		{[]string{"examples/quickstart"}, []string{"WireGuard", "gVisor"}},
		{[]string{"mesh/registry/registrytest"}, nil},
		{[]string{"mesh", "mesh/registry/etcd"}, []string{"etcd", "gRPC", "protobuf"}},
	} {
		for _, n := range test.program {
			if _, ok := ps[module+"/"+n]; !ok {
				t.Errorf("there is no package %s", n)
			}
		}
		if got := linked(ps, test.program...); !slices.Equal(got, test.want) {
			t.Errorf("a program of %v links %v, want %v", test.program, got, test.want)
		}
	}
}

// Of each heavy module, few packages may bring it in.
func TestWhoBringsWeightIn(t *testing.T) {
	ps := load(t)
	allowed := map[string][]string{
		"etcd":      {"mesh/registry/etcd/...", "mesh/control/...", "examples/...", "roles/*"},
		"gRPC":      {"mesh/registry/etcd/...", "mesh/control/...", "examples/...", "roles/*"},
		"protobuf":  {"mesh/registry/etcd/...", "mesh/control/...", "examples/...", "roles/*"},
		"server":    {"mesh/registry/etcd/etcdtest"},
		"gVisor":    {"datapath/netstack", "datapath/netstack/internal/offload", "datapath/auto", "examples/...", "roles/*"},
		"WireGuard": {"datapath/internal/wggo", "datapath/internal/sockets", "datapath/internal/tunio", "datapath/internal/nettest", "datapath/netstack", "datapath/tun", "datapath/auto", "examples/...", "roles/*"},
	}
	brought := make(map[string]bool)
	for _, p := range ps {
		if !p.ours() {
			continue
		}
		for _, what := range linked(ps, p.short()) {
			brought[what] = true
			if of, ok := allowed[what]; ok && !matches(p.short(), of...) {
				t.Errorf("%s links %s", p.short(), what)
			}
		}
	}
	for what := range allowed {
		if !brought[what] {
			t.Errorf("nobody links %s: does this test look at anything?", what)
		}
	}
}
