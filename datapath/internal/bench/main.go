package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/warren-mesh/warren/datapath/internal/bench/measure"
)

func main() {
	child := flag.String("child", "", "do one measure in this process: as warren, wireguard-go or floor")
	what := flag.String("what", "tcp,1,2s", "the measure of -child: tcp, udp, request or loaded; streams, bytes or requests; for how long")
	mtu := flag.Int("mtu", 1420, "of -child")
	delay := flag.Duration("delay", 0, "of -child, there and back")
	loss := flag.Float64("loss", 0, "of -child, a probability")
	rounds := flag.Int("rounds", 5, "how often everybody has a turn")
	only := flag.String("only", "", "rows whose name matches this")
	short := flag.Bool("short", false, "a few rows, three rounds")
	readme := flag.String("readme", "", "a README to put the table into, between its marks")
	picture := flag.String("picture", "", "where to put the picture, with -readme")
	profile := flag.String("profile", "", "of -child: where to put a processor profile")
	flag.Parse()
	if *profile != "" {
		f, err := os.Create(*profile)
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			fail(err)
		}
		measure.AtEnd = pprof.StopCPUProfile
	}
	if *child != "" {
		w, err := measure.Parse(*what)
		if err != nil {
			fail(err)
		}
		be(*child, path{*mtu, *delay, *loss}, w)
		return
	}
	if err := run(*rounds, *only, *short, *readme, *picture); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "bench:", err)
	os.Exit(1)
}

// be is a child.
func be(who string, p path, w measure.What) {
	open := map[string]func(path) (measure.Pair, error){"warren": warren, "wireguard-go": wireguardGo}[who]
	switch {
	case open != nil:
		measure.Main(func() (measure.Pair, error) { return open(p) }, w)
	case who == "floor":
		r, err := floor(w.For)
		if err != nil {
			r.Err = err.Error()
		}
		_ = json.NewEncoder(os.Stdout).Encode(r)
	default:
		fail(fmt.Errorf("nobody is called %q", who))
	}
}

// runner does measures, and has what it takes for that built once.
type runner struct {
	bin     string
	self    string
	failed  map[string]error // by program
	results map[string]measure.Result
}

// programs are what is built, by what is called so, where: a folder of a module, and a package.
var programs = map[string][2]string{
	"tunnode":     {".", "./tunnode"},
	"wireguard":   {".", "golang.zx2c4.com/wireguard"},
	"tsnode":      {"tsnode", "."},
	"nebula":      {"nebula", "github.com/slackhq/nebula/cmd/nebula"},
	"nebula-cert": {"nebula", "github.com/slackhq/nebula/cmd/nebula-cert"},
}

// needs are the programs that a contender takes, in one process or across namespaces.
func needs(who string, across bool) []string {
	switch {
	case who == "tsnet":
		return []string{"tsnode"}
	case who == "nebula":
		return []string{"nebula", "nebula-cert"}
	case across && who == "warren":
		return []string{"tunnode"}
	case across && who == "wireguard-go":
		return []string{"wireguard"}
	}
	return nil
}

// build builds a program once, or says why it cannot be.
func (r *runner) build(name string) error {
	if err, known := r.failed[name]; known {
		return err
	}
	p := programs[name]
	fmt.Fprintln(os.Stderr, "building", name)
	cmd := exec.Command("go", "build", "-o", filepath.Join(r.bin, name), p[1])
	cmd.Dir = p[0]
	out, err := cmd.CombinedOutput()
	if err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		err = fmt.Errorf("%s cannot be built: %s", name, lines[len(lines)-1])
	}
	r.failed[name] = err
	return err
}

// do has a contender do a measure.
func (r *runner) do(w row, who string, as *tunnel) (measure.Result, error) {
	across := w.tunnel != (tunnel{})
	for _, p := range needs(who, across) {
		if err := r.build(p); err != nil {
			return measure.Result{}, err
		}
	}
	if across {
		t := w.tunnel
		if as != nil {
			t = *as
		}
		return between(who, t, w.what, r.bin)
	}
	args := []string{r.self, "-child", who, "-mtu", fmt.Sprint(w.path.mtu), "-delay", w.path.delay.String(), "-loss", fmt.Sprint(w.path.loss)}
	if who == "tsnet" {
		args = []string{filepath.Join(r.bin, "tsnode")}
	}
	what := w.what
	if who == "floor" {
		what.For = time.Second
	}
	ctx, cancel := context.WithTimeout(context.Background(), what.For+2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], append(args[1:], "-what", what.String())...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	var res measure.Result
	if err == nil {
		err = json.Unmarshal(out, &res)
	}
	if err == nil && res.Err != "" {
		err = fmt.Errorf("%s: %s", who, res.Err)
	}
	if err != nil {
		last := strings.Split(strings.TrimSpace(errs.String()), "\n")
		err = fmt.Errorf("%w %s", err, last[0])
	}
	return res, err
}

func run(rounds int, only string, short bool, readme, picture string) error {
	pattern, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	bin, err := os.MkdirTemp("", "bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(bin)
	if short {
		rounds = min(rounds, 3)
	}
	r := &runner{bin: bin, self: self, failed: make(map[string]error), results: make(map[string]measure.Result)}
	start := time.Now()
	var lines []line
	for _, w := range rows() {
		if !pattern.MatchString(w.name) || short && !w.short {
			continue
		}
		lines = append(lines, r.compare(w, rounds, start)...)
	}
	text := table(lines)
	fmt.Print("\n", text)
	if readme == "" {
		return nil
	}
	return write(readme, picture, lines, heading(rounds, time.Since(start))+text)
}

// heading says where figures are from.
func heading(rounds int, took time.Duration) string {
	return fmt.Sprintf("\n![ratios](.github/bench.svg)\n\n`make bench`: %s/%s, %s, %d processors, %d rounds in turns, %v. Medians of ratios within a round.\n\n",
		runtime.GOOS, runtime.GOARCH, runtime.Version(), runtime.NumCPU(), rounds, took.Round(time.Minute))
}

// compare has everybody of a row take turns. Who fails twice has no further turn. A measure that was done in another
// row is not done again.
func (r *runner) compare(w row, rounds int, start time.Time) (lines []line) {
	all := append([]other{{name: "warren"}}, w.others...)
	figures := make([][]float64, len(all))
	failed := make([]error, len(all))
	tries := make([]int, len(all))
	for round := range rounds {
		for i, o := range all {
			if tries[i] > 1 {
				continue
			}
			t := w.tunnel
			if o.as != nil {
				t = *o.as
			}
			id := fmt.Sprint(o.name, round, w.path, t, w.what)
			res, known := r.results[id]
			if !known {
				var err error
				if res, err = r.do(w, o.name, o.as); err != nil {
					failed[i], tries[i] = err, tries[i]+1
					figures[i] = append(figures[i], 0)
					fmt.Fprintf(os.Stderr, "%s: %s: %v\n", w.name, o.name, err)
					continue
				}
				r.results[id] = res
			}
			figures[i] = append(figures[i], w.figure.of(res))
			fmt.Fprintf(os.Stderr, "%6v %s: %s: %.4g\n", time.Since(start).Round(time.Second), w.name, o.name, w.figure.of(res))
		}
	}
	for i, o := range all[1:] {
		l := line{row: w.name, against: o.label, floor: o.floor}
		if l.against == "" {
			l.against = o.name
		}
		if rs := ratios(figures[0], figures[i+1], w.figure.less); len(rs) > 0 {
			l.ratio = spreadOf(rs)
		} else if l.err = "nothing to compare"; failed[0] != nil {
			l.err = failed[0].Error()
		} else if failed[i+1] != nil {
			l.err = failed[i+1].Error()
		}
		lines = append(lines, l)
	}
	return lines
}
