package podnetwork

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/warren-mesh/warren/mesh/view"
	"github.com/warren-mesh/warren/prefixes"
	"github.com/warren-mesh/warren/roles"
	"github.com/warren-mesh/warren/roles/internal/textfile"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// table is a roles.Mesh without a mesh.
type table struct{ *prefixes.Table }

func (table) Current() (view.View, <-chan struct{}) { return view.View{}, nil }
func (t table) Prefixes() prefixes.Prefixes         { return t.Table }

func (t table) text() string {
	s, _ := t.Table.Current()
	var all []string
	for _, a := range s.Announcements {
		all = append(all, a.Prefix.String()+" from "+a.Source.String())
	}
	return strings.Join(all, ", ")
}

// run runs a Role in a bubble until stop is called.
func run(t *testing.T, s Source) (tab table, m *roles.Manager, stop func()) {
	t.Helper()
	tab = table{prefixes.NewTable()}
	m, err := roles.New(roles.Config{Roles: []roles.Role{New(s)}, Assigned: roles.Static(Name), Mesh: tab})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	time.Sleep(time.Second)
	synctest.Wait()
	return tab, m, func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if got := tab.text(); got != "" {
			t.Errorf("announced at the end: %s", got)
		}
	}
}

func TestValue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tab, m, stop := run(t, Value(netip.MustParsePrefix("fd00:1::/64"), netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("10.244.1.0/24")))
		if got := tab.text(); got != "10.244.1.0/24 from 10.244.1.1, fd00:1::/64 from fd00:1::1" {
			t.Error(got)
		}
		if v, _ := m.Current(); !v.Settled() {
			t.Errorf("%+v", v)
		}
		stop()
	})
}

func TestFirst(t *testing.T) {
	for p, want := range map[string]string{
		"10.1.0.0/16": "10.1.0.1", "10.1.2.3/32": "10.1.2.3", "10.1.2.2/31": "10.1.2.2", "fd00::/64": "fd00::1", "fd00::5/128": "fd00::5", "fd00::4/127": "fd00::4",
	} {
		if got := First(netip.MustParsePrefix(p)); got.String() != want {
			t.Errorf("%s: %v, want %s", p, got, want)
		}
	}
}

const conflist = `{"cniVersion":"1.0.0","name":"pods","plugins":[
 {"type":"bridge","bridge":"cni0","isGateway":true,"ipam":{"type":"host-local","ranges":[[{"subnet":"10.244.1.0/24","gateway":"10.244.1.254"}],[{"subnet":"fd00:1::/64"}]]}},
 {"type":"portmap"}]}`

// A file that is not there, half written or nonsense changes nothing of what is announced, and is said.
func TestFiles(t *testing.T) {
	const text = "# pods\n10.244.1.0/24\n\nfd00:1::/64 # too\n"
	for name, test := range map[string]struct {
		source     func(string) Source
		good, want string
		bad        []string
	}{
		"text": {File, text, "10.244.1.0/24 from 10.244.1.1, fd00:1::/64 from fd00:1::1",
			[]string{"10.244.1", "10.244.1.0/24 10.244.2.0/24", "10.244.1.5/24", "::ffff:10.0.0.0/8", "a\x00b", strings.Repeat("x", textfile.Max+1)}},
		"CNI": {CNI, conflist, "10.244.1.0/24 from 10.244.1.254, fd00:1::/64 from fd00:1::1",
			[]string{conflist[:100], "", "[]", `{}`, `{"ipam":{"type":"dhcp"}}`, `{"ipam":{"type":"host-local"}}`, `{"ipam":{"type":"host-local","subnet":"10.1"}}`,
				`{"ipam":{"type":"host-local","subnet":"10.1.0.0/24","gateway":"10.2.0.1"}}`, `{"ipam":{"type":"host-local","subnet":"10.1.0.0/24","gateway":"x"}}`}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "file.conf")
				put := func(text string) {
					t.Helper()
					if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
						t.Fatal(err)
					}
					time.Sleep(2 * Every)
					synctest.Wait()
				}
				tab, m, stop := run(t, test.source(path))
				wrong := func() bool {
					v, _ := m.Current()
					return slices.ContainsFunc(v.Conditions, func(c view.Condition) bool {
						return c.Kind == Unreadable && strings.Contains(c.Message, path) && c.Subject == Name
					})
				}
				if v, _ := m.Current(); !wrong() || tab.text() != "" || v.Roles[0].Phase != roles.Starting {
					t.Errorf("no file: %q, %+v", tab.text(), v)
				}
				put(test.good)
				if v, _ := m.Current(); wrong() || tab.text() != test.want || v.Roles[0].Phase != roles.Healthy {
					t.Errorf("announced are %q, %+v", tab.text(), v)
				}
				for _, bad := range test.bad {
					put(bad)
					if !wrong() || tab.text() != test.want {
						t.Errorf("%.40q: announced are %q, said: %v", bad, tab.text(), wrong())
					}
				}
				put(strings.ReplaceAll(test.good, "10.244.1.", "10.244.2."))
				if got := tab.text(); wrong() || got != strings.ReplaceAll(test.want, "10.244.1.", "10.244.2.") {
					t.Errorf("another network: %q", got)
				}
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
				time.Sleep(2 * Every)
				synctest.Wait()
				if !wrong() || tab.text() == "" {
					t.Errorf("gone: %q", tab.text())
				}
				stop()
			})
		})
	}
}

// In a folder the first configuration by name is the one, as for container runtimes.
func TestCNIFolder(t *testing.T) {
	dir := t.TempDir()
	if _, err := cniFile(dir); err == nil {
		t.Error("an empty folder has one")
	}
	for _, f := range []string{"20-b.conf", "10-a.conflist", "00-readme.txt"} {
		if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "05.conf"), 0o700); err != nil {
		t.Fatal(err)
	}
	if got, err := cniFile(dir); err != nil || filepath.Base(got) != "10-a.conflist" {
		t.Error(got, err)
	}
	old := `{"cniVersion":"0.3.1","name":"x","type":"bridge","ipam":{"type":"host-local","subnet":"10.1.2.3/24","rangeStart":"10.1.2.9","gateway":"10.1.2.1"}}`
	nets, err := parseCNI("x", []byte(old))
	if err != nil || len(nets) != 1 || nets[0].Prefix.String() != "10.1.2.0/24" || nets[0].Gateway.String() != "10.1.2.1" {
		t.Error(nets, err)
	}
}

func FuzzCNI(f *testing.F) {
	f.Add([]byte(conflist))
	f.Add([]byte(`{"ipam":{"type":"host-local","subnet":"10.1.0.0/24"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		nets, err := parseCNI("x", data)
		if err == nil && len(nets) == 0 {
			t.Error("neither a network nor an error")
		}
		for _, a := range Announcements(nets...) {
			if !a.Prefix.Contains(a.Source) || a.Prefix != a.Prefix.Masked() {
				t.Errorf("%+v", a)
			}
		}
	})
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("10.0.0.0/8\nfd00::/8 # x\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		nets, _ := parseLines("x", data)
		for _, a := range Announcements(nets...) {
			if !a.Prefix.Contains(a.Source) || a.Prefix != a.Prefix.Masked() {
				t.Errorf("%+v", a)
			}
		}
	})
}
