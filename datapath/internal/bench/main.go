// Program bench compares Warren with others, each as its users would run it, and prints a table of ratios. make bench
// runs it.
//
// In process, a contender is two nodes of one process over loopback, and every round is a process of its own, so that
// processor time, memory and the garbage collector are its own. Between network namespaces, which need root, a
// contender is a program in each of two namespaces, joined by a veth, with iperf3 at both ends. Contenders take turns,
// round after round, and each round gives a ratio: the table has the median and the spread of those. Absolute figures
// are of the machine, and stand beside only to show what was measured. What could not be built or run has a line with
// the reason.
//
// It runs on Linux.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/warren-mesh/warren/datapath/internal/bench/load"
)

func main() {
	runtime.LockOSThread() // processes are tied to the life of this thread
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	names := make([]string, len(measures))
	for i, m := range measures {
		names[i] = m.name
	}
	only := flag.String("run", "", "regular `expression` of the measures to take; all where it is empty:\n"+strings.Join(names, " "))
	without := flag.String("without", "", "regular `expression` of contenders to leave out")
	rounds := flag.Int("rounds", 5, "how often each contender has its turn")
	duration := flag.Duration("duration", 2*time.Second, "what is counted of each turn")
	short := flag.Bool("short", false, "three rounds of one second: quicker, and less sure")
	write := flag.Bool("write", false, "write README.md's table and the picture .github/bench.svg; by a whole run only")
	root := flag.String("root", "../../..", "`folder` of the repository")
	child := flag.String("child", "", "for bench itself: the contender that this process is")
	embedFile := flag.String("embed", "", "for bench itself: run Warren's tun as this file says")
	flag.Parse()
	switch {
	case *embedFile != "":
		return embed(*embedFile)
	case *child != "":
		return asChild(*child, flag.Arg(0))
	case *write && (*only != "" || *without != "" || *short || *rounds < 5 || *duration < 2*time.Second):
		return errors.New("-write is for whole runs: not with -run, -without, -short, fewer than five rounds or less than 2s")
	case *write && os.Geteuid() != 0:
		return errors.New("-write is for whole runs, which need root")
	case *rounds < 1 || *duration <= 0:
		return errors.New("-rounds and -duration are to be positive")
	}
	warm := time.Second
	if *short {
		given := make(map[string]bool)
		flag.Visit(func(f *flag.Flag) { given[f.Name] = true })
		if !given["rounds"] {
			*rounds = 3
		}
		if !given["duration"] {
			*duration = time.Second
		}
		warm = 500 * time.Millisecond
	}
	match, err := regexp.Compile("^(" + cmp.Or(*only, ".*") + ")$")
	if err != nil {
		return err
	}
	leave, err := regexp.Compile("^(" + cmp.Or(*without, "-") + ")$")
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	p, err := build(ctx, dir, *root)
	if err != nil {
		return err
	}
	b := bencher{p: p, rounds: *rounds, warm: warm, duration: *duration, rigs: make(map[rigSpec]*rig), broken: make(map[rigSpec]error)}
	defer b.close()
	var all []ratio
	start := time.Now()
	for _, m := range measures {
		if !match.MatchString(m.name) {
			continue
		}
		rs, err := b.take(ctx, m, leave.MatchString)
		if err != nil {
			return err
		}
		fmt.Println(table(rs))
		all = append(all, rs...)
	}
	if err := ctx.Err(); err != nil { // in the last turn
		return err
	}
	if len(all) == 0 {
		return fmt.Errorf("-run %s: no measure is called that; there are %s", *only, strings.Join(names, " "))
	}
	t := table(all)
	command := "make bench"
	if *only != "" || *without != "" || *short || *rounds != 5 || *duration != 2*time.Second {
		command = "bench " + strings.Join(os.Args[1:], " ")
	}
	fmt.Printf("%s: medians of %d rounds, on %d processors, in %v\n\n%s", command, *rounds, runtime.NumCPU(), time.Since(start).Round(time.Second), t)
	if !*write {
		return nil
	}
	return publish(*root, fmt.Sprintf("\n![How many times better Warren is](.github/bench.svg)\n\n`%s`: ratios of Warren to others, medians of %d rounds with the least and the greatest, on %d processors, %s.\n\n%s\n",
		command, *rounds, runtime.NumCPU(), runtime.GOARCH, t), picture(all))
}

// publish writes what a run found into the repository.
func publish(root, text, svg string) error {
	readme := filepath.Join(root, "README.md")
	old, err := os.ReadFile(readme)
	if err != nil {
		return err
	}
	text2, err := between(old, text)
	if err != nil {
		return fmt.Errorf("%s: %w", readme, err)
	}
	if err := os.WriteFile(filepath.Join(root, ".github", "bench.svg"), []byte(svg), 0o644); err != nil {
		return err
	}
	return os.WriteFile(readme, text2, 0o644)
}

// build makes the programs that are compared, each in the module that names its version. One that cannot be built is
// no reason to end.
func build(ctx context.Context, dir, root string) (programs, error) {
	self, err := os.Executable()
	if err != nil {
		return programs{}, err
	}
	p := programs{self: self, path: make(map[string]string), broken: make(map[string]error)}
	here := filepath.Join(root, "datapath/internal/bench")
	for _, b := range []struct{ name, module, pkg string }{
		{"wireguard-go", ".", "golang.zx2c4.com/wireguard"},
		{"tsnet", "tsnet", "."},
		{"nebula", "nebula", "github.com/slackhq/nebula/cmd/nebula"},
		{"nebula-cert", "nebula", "github.com/slackhq/nebula/cmd/nebula-cert"},
	} {
		fmt.Fprintln(os.Stderr, "building", b.name)
		p.path[b.name] = filepath.Join(dir, b.name)
		c := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", p.path[b.name], b.pkg)
		c.Dir = filepath.Join(here, b.module)
		c.Env = append(os.Environ(), "GOWORK=off")
		if out, err := c.CombinedOutput(); err != nil {
			p.broken[b.name] = fmt.Errorf("cannot be built: %w: %s", err, bytes.TrimSpace(out))
			fmt.Fprintln(os.Stderr, b.name, p.broken[b.name])
		}
	}
	return p, ctx.Err()
}

// asChild is one turn of a contender.
func asChild(contender, spec string) error {
	switch contender {
	case warrenNet:
		load.Main(spec, openWarren)
	case theirNet:
		load.Main(spec, openTheirs)
	case floorName:
		var s load.Spec
		if err := json.Unmarshal([]byte(spec), &s); err != nil {
			return err
		}
		r, err := floor(s.Duration)
		load.Print(r, err)
	default:
		return fmt.Errorf("contender %q: unknown", contender)
	}
	return nil
}

type bencher struct {
	p              programs
	rounds         int
	warm, duration time.Duration
	rigs           map[rigSpec]*rig
	broken         map[rigSpec]error
}

func (b *bencher) close() {
	for _, r := range b.rigs {
		r.close()
	}
}

// take has the contenders of m take turns. One that fails is left out from then on, and said to be.
func (b *bencher) take(ctx context.Context, m measure, without func(string) bool) ([]ratio, error) {
	s := make(samples)
	missing := make(map[string]string)
	for round := range b.rounds {
		for _, c := range m.contenders() {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if without(c) {
				missing[c] = "left out"
			}
			if missing[c] != "" {
				continue
			}
			v, note, err := b.turn(ctx, m, c, round)
			if err != nil {
				missing[c] = err.Error()
				fmt.Fprintf(os.Stderr, "%s, round %d, %s: %v\n", m.name, round+1, c, err)
				continue
			}
			s[c] = append(s[c], v)
			fmt.Fprintf(os.Stderr, "%s, round %d, %s:", m.name, round+1, c)
			for _, f := range []string{"rate", "packets", "asks", "p50", "p99", "cpu", "peak", "mallocs"} {
				if x, ok := v[f]; ok {
					fmt.Fprintf(os.Stderr, " %s %s", f, figures[f].show(x))
				}
			}
			fmt.Fprintln(os.Stderr, "", note)
		}
	}
	for c, why := range missing {
		if len(s[c]) > 0 && why != "" {
			fmt.Printf("%s, %s: only %d rounds: %s\n", m.name, c, len(s[c]), why)
		}
	}
	return ratios(m, s, missing), nil
}

// turn is one measurement of one contender.
func (b *bencher) turn(ctx context.Context, m measure, contender string, round int) (map[string]float64, string, error) {
	if m.rigs != nil {
		r, err := b.rig(m.rigs[contender])
		if err != nil {
			return nil, "", err
		}
		v, err := r.iperf(append([]string{"-O", "1", "-t", fmt.Sprint(max(1, int(b.duration.Seconds())))}, m.iperf...)...)
		return v, "", err
	}
	s := m.spec
	s.Seed = uint64(round + 1)
	s.Warm, s.Duration = max(s.Warm, b.warm), max(s.Duration, b.duration)
	if s.Size < 0 {
		s.Size = fullSize(contender)
	}
	spec, err := json.Marshal(s)
	if err != nil {
		return nil, "", err
	}
	program, args := b.p.self, []string{"-child", contender, string(spec)}
	if contender == tsnetName {
		args = args[2:]
		if program, err = b.p.get("tsnet"); err != nil {
			return nil, "", err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	c := tied(exec.CommandContext(ctx, program, args...))
	said := new(tail)
	c.Stderr = said
	out, err := c.Output()
	var r load.Result
	if err := cmp.Or(err, json.Unmarshal(out, &r)); err != nil {
		return nil, "", fmt.Errorf("%w: %s", err, said)
	}
	if r.Error != "" {
		return nil, "", errors.New(r.Error)
	}
	return r.Values, r.Note, nil
}

// rig returns the rig of s, which lasts until the end of the run.
func (b *bencher) rig(s rigSpec) (*rig, error) {
	if b.rigs[s] == nil && b.broken[s] == nil {
		r, err := newRig(s, b.p)
		if err != nil {
			b.broken[s] = err
			return nil, err
		}
		b.rigs[s] = r
	}
	return b.rigs[s], b.broken[s]
}
