package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The exit statuses that are not the program's own.
const (
	statusTimeout = 124
	statusCannot  = 125
	statusDied    = 126
)

// options are what the command line asks for.
type options struct {
	kernel  string
	append  string
	accel   string
	memory  int // MiB
	smp     int
	timeout time.Duration // 0: what -test.timeout says, and some
	date    time.Time     // zero: that of the machine
	modules []string
	with    []string
	dir     string
	keep    bool
	list    bool
	fetch   bool
	check   bool
	verbose bool

	program string
	args    []string
}

// What a guest gets beyond the time that a test gives itself: to be built, to boot and to end. go test
// ends vmrun a minute after that time, and does not say why.
const bootTime = 50 * time.Second

// parseArgs reads the command line without its first element, and writes usage to usage where asked to.
func parseArgs(args []string, usage io.Writer) (options, error) {
	var o options
	fs := flag.NewFlagSet("vmrun", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.StringVar(&o.kernel, "kernel", "6.12", "`kernel` to boot: 6.1, 6.12, newest, or a path")
	fs.StringVar(&o.append, "append", "", "`words` to append to the kernel's command line")
	fs.StringVar(&o.accel, "accel", "tcg", "`how` QEMU runs the guest: tcg (in software, on every machine alike) or kvm (fast, where /dev/kvm works)")
	fs.IntVar(&o.memory, "memory", 1024, "`MiB` of memory")
	fs.IntVar(&o.smp, "smp", 2, "`number` of processors")
	fs.DurationVar(&o.timeout, "timeout", 0, "end the guest after this `time`, which includes the boot (default -test.timeout and 50s, or 15m)")
	fs.Func("date", "`time` in the guest when the program starts, UTC: 2026-01-31, \"2026-01-31 15:04:05\" or RFC 3339", func(s string) (err error) {
		o.date, err = parseDate(s)
		return err
	})
	fs.Func("modules", "further kernel modules to load, as a `list` with commas", list(&o.modules))
	fs.Func("with", "programs to take along, as a `list` with commas, such as ip,wg", list(&o.with))
	fs.StringVar(&o.dir, "dir", ".", "`folder` to take along and start in")
	fs.BoolVar(&o.keep, "keep", false, "keep the guest's file system and console, and say where")
	fs.BoolVar(&o.list, "list", false, "list the kernels and where they are")
	fs.BoolVar(&o.fetch, "fetch", false, "get the kernel, even if it is there, and run nothing")
	fs.BoolVar(&o.check, "check", false, "get the kernel if it is not there, say what is missing to run a program, and run nothing")
	fs.BoolVar(&o.verbose, "v", false, "say what is done, and show the kernel's console")

	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(usage, "usage: vmrun [flags] program [argument ...]\n\n")
		fs.SetOutput(usage)
		fs.PrintDefaults()
		return o, err
	case err != nil:
		return o, err
	}
	if fs.NArg() > 0 {
		o.program, o.args = fs.Arg(0), fs.Args()[1:]
	}
	switch {
	case o.program == "" && !o.list && !o.fetch && !o.check:
		return o, errors.New("no program to run: usage: vmrun [flags] program [argument ...]")
	case o.accel != "tcg" && o.accel != "kvm":
		return o, fmt.Errorf("-accel %q: neither tcg nor kvm", o.accel)
	case o.memory < 128:
		return o, fmt.Errorf("-memory %d: a guest needs 128 MiB", o.memory)
	case o.smp < 1:
		return o, fmt.Errorf("-smp %d: a guest needs a processor", o.smp)
	case o.timeout < 0:
		return o, fmt.Errorf("-timeout %v: less than nothing", o.timeout)
	}
	return o, nil
}

func list(to *[]string) func(string) error {
	return func(s string) error {
		for word := range strings.FieldsFuncSeq(s, func(r rune) bool { return r == ',' || r == ' ' }) {
			*to = append(*to, word)
		}
		return nil
	}
}

func parseDate(s string) (time.Time, error) {
	for _, layout := range []string{time.RFC3339, time.DateTime, time.DateOnly} {
		if t, err := time.Parse(layout, s); err == nil {
			return t.UTC(), nil
		}
	}
	return time.Time{}, errors.New("not a time as 2026-01-31, 2026-01-31 15:04:05 or 2026-01-31T15:04:05Z")
}

// outFile is a file that the program writes and the machine is to have.
type outFile struct {
	Guest string // in the guest
	host  string
}

// outDir is the guest's folder of what is copied out.
const outDir = "/run/vmrun"

// guestArgs returns what to call a test binary with in the guest, where the files that args name on the
// machine do not exist, those that come back, and the time that the test gives itself, which is 0 for
// none. cwd is the machine's folder that names are relative to.
func guestArgs(args []string, cwd string) (guest []string, out []outFile, timeout time.Duration) {
	end := slices.IndexFunc(args, func(a string) bool { return a == "--" || !strings.HasPrefix(a, "-") })
	if end < 0 {
		end = len(args)
	}
	named := make(map[int]string) // index in guest -> value
	dir := cwd
	for _, arg := range args[:end] {
		name, value, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		switch name {
		case "test.testlogfile", "test.gocoverdir":
			continue
		case "test.outputdir":
			dir = absolute(value, cwd)
			continue
		case "test.coverprofile", "test.cpuprofile", "test.memprofile", "test.blockprofile", "test.mutexprofile", "test.trace":
			if value != "" {
				named[len(guest)] = value
			}
		case "test.timeout":
			if d, err := time.ParseDuration(value); err == nil && d > 0 {
				timeout = d
			}
		}
		guest = append(guest, arg)
	}
	for i, arg := range guest {
		if value, ok := named[i]; ok {
			name, _, _ := strings.Cut(arg, "=")
			path := outDir + "/" + strings.TrimLeft(name, "-")
			guest[i] = name + "=" + path
			out = append(out, outFile{Guest: path, host: absolute(value, dir)})
		}
	}
	return append(guest, args[end:]...), out, timeout
}

func absolute(path, dir string) string {
	if filepath.IsAbs(path) {
		return filepath.Clean(path)
	}
	return filepath.Join(dir, path)
}

// guestEnv picks from env what a program in the guest may know.
func guestEnv(env []string) []string {
	var guest []string
	for _, e := range env {
		name, _, _ := strings.Cut(e, "=")
		switch name {
		case "CI", "TERM", "TZ", "LANG", "NO_COLOR", "GODEBUG", "GOTRACEBACK", "GOMAXPROCS", "GOGC", "GOMEMLIMIT":
			guest = append(guest, e)
		case "WARREN_VMRUN": // the guest's is another
		default:
			if strings.HasPrefix(name, "WARREN_") {
				guest = append(guest, e)
			}
		}
	}
	return guest
}
