package core_test

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/tools/txtar"

	"github.com/warren-mesh/warren/datapath"
	"github.com/warren-mesh/warren/mesh/identity"
	"github.com/warren-mesh/warren/mesh/internal/core"
	"github.com/warren-mesh/warren/mesh/record"
	"github.com/warren-mesh/warren/prefixes"
)

var update = flag.Bool("update", false, "write what happens into the scenarios, as what should")

// TestScenarios runs testdata/*.txtar. A scenario's comment says what it shows; its file "script" is what
// happens to node m and what it does about it. Lines that begin with > are what happens:
//
//	> config [address ADDRESS] [nat] [ports FIRST-LAST]     before anything else
//	> found PEER PREFIX...                                  a device that is there at the start, with a peer
//	> shared | connected PREFIX...                          the host
//	> problems [SUBJECT: MESSAGE] [; SUBJECT: MESSAGE]...   what is wrong with the host from now on
//	> start                                                 the node starts
//	> announce [PREFIX...]                                  what m announces from now on
//	> reset [RECORD [; RECORD]...]                          all that the registry has
//	> put RECORD [; RECORD]...                              what changed in it
//	> delete NODE...
//	> registry down
//	> fail TEXT | unsupported TEXT | mend                   ops that begin so fail, or no longer
//	> sends NODE | hears NODE                               the device sent something to a peer; it answered
//	> vanish                                                the device is removed by someone else
//	> lose peer NODE                                        a peer is removed by someone else
//	> wait DURATION
//
// A RECORD is: NODE [key=NAME] [generation=N] [ENDPOINT...] [PREFIX...], or NODE bad, NODE revoked, or
// NODE foreign, which for m is one that another process published. The other lines are what m does.
func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scenarios: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if len(a.Files) != 1 || a.Files[0].Name != "script" {
				t.Fatal("want one file, script")
			}
			want := string(a.Files[0].Data)
			got := runScenario(t, want)
			if got == want {
				return
			}
			if *update {
				a.Files[0].Data = []byte(got)
				if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			t.Errorf("got\n%s\nwant\n%s", got, want)
		})
	}
}

type scenario struct {
	*sim
	dev    *fakeDevice
	change []func(*core.Config)
	fails  map[string]error
}

func runScenario(t *testing.T, script string) string {
	sc := &scenario{dev: newDevice(), fails: map[string]error{}}
	var b strings.Builder
	for line := range strings.Lines(script) {
		command, ok := strings.CutPrefix(strings.TrimSpace(line), "> ")
		if !ok {
			continue
		}
		if b.Len() > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(&b, "> %s\n", command)
		if err := sc.do(t, command); err != nil {
			t.Fatalf("%s: %v", command, err)
		}
		if sc.sim == nil {
			continue
		}
		for _, l := range sc.log {
			fmt.Fprintf(&b, "%s\n", l)
		}
		sc.take()
	}
	return b.String()
}

func (sc *scenario) do(t *testing.T, command string) error {
	verb, rest, _ := strings.Cut(command, " ")
	args := strings.Fields(rest)
	switch verb {
	case "config":
		return sc.config(args)
	case "found":
		s := sc.dev.model.State().Clone()
		s.Device = datapath.Device{Key: privateKey("m"), ListenPort: 40000, MTU: 1420}
		if s.Peers == nil {
			s = datapath.NewModel(s).State()
		}
		has := set(args[1:]...)
		s.Peers[publicKey(args[0])] = datapath.Peer{Endpoint: netip.MustParseAddrPort("198.51.100.77:7"), Prefixes: has}
		for p := range has.All() {
			s.Routes[p] = netip.Addr{}
		}
		sc.dev.model = *datapath.NewModel(s)
	case "shared":
		sc.dev.host.Underlay = datapath.UnderlayShared
	case "connected":
		sc.dev.host.Connected = set(args...)
	case "problems":
		sc.dev.problems = nil
		for text := range strings.SplitSeq(rest, ";") {
			if subject, message, ok := strings.Cut(strings.TrimSpace(text), ": "); ok {
				sc.dev.problems = append(sc.dev.problems, datapath.Problem{Subject: subject, Message: message, Remedy: "change that"})
			}
		}
	case "start":
		sc.sim = simOn(t, sc.dev, sc.change...)
		sc.dev.fail = func(op datapath.Op) error {
			for text, err := range sc.fails {
				if strings.HasPrefix(sc.named(op.String()), text) {
					return err
				}
			}
			return nil
		}
		sc.step(announce())
	case "announce":
		sc.step(announce(args...))
	case "reset", "put":
		in := core.Records{Reset: verb == "reset"}
		for text := range strings.SplitSeq(rest, ";") {
			if f := strings.Fields(text); len(f) > 0 {
				o, err := parseRecord(f)
				if err != nil {
					return err
				}
				in.Put = append(in.Put, o)
			}
		}
		sc.step(in)
	case "delete":
		sc.step(deleted(args...))
	case "registry":
		sc.step(core.RegistryFailed{Err: errors.New("no answer")})
	case "fail":
		sc.fails[rest] = errTest
	case "unsupported":
		sc.fails[rest] = errors.ErrUnsupported
	case "mend":
		clear(sc.fails)
	case "sends":
		sc.dev.sends(publicKey(args[0]), 400)
	case "hears":
		now := epoch
		if sc.sim != nil {
			now = sc.now
		}
		sc.dev.hears(publicKey(args[0]), now)
	case "vanish":
		sc.dev.vanish()
	case "lose":
		sc.dev.edit(func(s *datapath.State) { delete(s.Peers, publicKey(args[1])) })
		sc.step(core.Touched{})
	case "wait":
		d, err := time.ParseDuration(rest)
		if err != nil {
			return err
		}
		sc.run(d)
	default:
		return errors.New("not a command")
	}
	return nil
}

func (sc *scenario) config(args []string) error {
	for len(args) > 0 {
		value := ""
		if len(args) > 1 {
			value = args[1]
		}
		switch args[0] {
		case "nat":
			sc.change = append(sc.change, func(c *core.Config) { c.Endpoints = nil })
			args = args[1:]
			continue
		case "address":
			sc.change = append(sc.change, func(c *core.Config) { c.Addresses = set(value) })
		case "ports":
			var first, last uint16
			if _, err := fmt.Sscanf(value, "%d-%d", &first, &last); err != nil {
				return err
			}
			sc.change = append(sc.change, func(c *core.Config) { c.PortFirst, c.PortLast = first, last })
		default:
			return errors.New("no such setting")
		}
		args = args[2:]
	}
	return nil
}

func parseRecord(f []string) (core.Opened, error) {
	r := rec(f[0])
	for _, s := range f[1:] {
		switch name, value, _ := strings.Cut(s, "="); name {
		case "bad":
			return bad(r.ID, errors.New(`field "key": is missing`)), nil
		case "revoked":
			return bad(r.ID, identity.ErrRevoked), nil
		case "foreign":
			r.Instance = "77"
		case "key":
			r.Key = publicKey(value)
		case "generation":
			n, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return core.Opened{}, err
			}
			r.Generation = n
		default:
			if e, err := record.ParseEndpoint(s); err == nil {
				r.Endpoints = append(r.Endpoints, e)
				continue
			}
			p, err := prefixes.Parse(s)
			if err != nil {
				return core.Opened{}, err
			}
			r.Prefixes = r.Prefixes.Union(p)
		}
	}
	return good(r), nil
}
