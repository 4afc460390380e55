//go:build amd64

package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const qemu = "qemu-system-x86_64"

// runner is one run of vmrun.
type runner struct {
	options
	ctx   context.Context
	start time.Time
}

func (r *runner) note(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "vmrun: "+format+"\n", args...)
}

func (r *runner) log(format string, args ...any) {
	if r.verbose {
		r.note("%5.1fs "+format, append([]any{time.Since(r.start).Seconds()}, args...)...)
	}
}

// run does what the options ask for and returns the status to exit with.
func run(o options) (int, error) {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	parent := os.Getppid()
	go func() {
		for {
			select {
			case s := <-signals:
				cancel(statusError{128 + int(s.(syscall.Signal)), fmt.Sprintf("ended by a signal: %v", s)})
			case <-time.After(500 * time.Millisecond):
				// go run and go test are killed at times, and pass nothing on then.
				if os.Getppid() != parent {
					cancel(statusError{statusDied, "whoever started it has gone"})
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	r := &runner{o, ctx, time.Now()}
	status, err := r.run()
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return status, err
}

func (r *runner) run() (int, error) {
	if r.list {
		return 0, r.listKernels()
	}
	if r.fetch && r.program == "" {
		k, err := r.kernelOf(true)
		if err == nil {
			fmt.Printf("%s\t%s\t%s\n", r.kernel, k.release, k.image)
		}
		return 0, err
	}
	if r.check {
		return 0, r.canRun()
	}
	program, err := filepath.Abs(r.program)
	if err != nil {
		return 0, err
	}
	switch interp, err := interpreter(program); {
	case err != nil:
		return 0, cannot("%s cannot be run in a guest: %v", r.program, err)
	case interp != "":
		return 0, cannot("%s is linked dynamically, with %s, which a guest has not got: build it with CGO_ENABLED=0 and without -race", r.program, interp)
	}
	if err := canBoot(); err != nil {
		return 0, err
	}
	k, err := r.kernelOf(r.fetch)
	if err != nil {
		return 0, err
	}
	r.log("kernel %s: %s", k.release, k.image)

	work, err := os.MkdirTemp("", "vmrun-")
	if err != nil {
		return 0, err
	}
	if r.keep {
		defer r.note("kept %s", work)
	} else {
		defer os.RemoveAll(work)
	}
	g, err := r.build(k, program, filepath.Join(work, "initrd"))
	if err != nil {
		return 0, err
	}
	g.work = work
	r.log("built the guest's file system")
	return g.boot(r)
}

// canBoot returns what is missing to boot any kernel.
func canBoot() error {
	if interp, err := interpreter("/proc/self/exe"); err != nil || interp != "" {
		return cannot("vmrun is the guest's init, and this one is linked dynamically: build it with CGO_ENABLED=0 and without -race")
	}
	if _, err := exec.LookPath(qemu); err != nil {
		return cannot("%s is missing: apt-get install qemu-system-x86", qemu)
	}
	return nil
}

// canRun returns what is missing to run a program.
func (r *runner) canRun() error {
	if err := canBoot(); err != nil {
		return err
	}
	_, err := r.kernelOf(false)
	return err
}

// kernelOf returns the kernel that -kernel names.
func (r *runner) kernelOf(fetch bool) (kernel, error) {
	i := slices.IndexFunc(releases, func(rel release) bool { return rel.name == r.kernel })
	if i < 0 {
		k, err := openKernel(r.kernel)
		if errors.Is(err, fs.ErrNotExist) && !strings.ContainsRune(r.kernel, '/') {
			return k, cannot("-kernel %s: neither 6.1, 6.12 or newest, nor a file", r.kernel)
		}
		return k, err
	}
	c, err := openCache(r.log, r.note)
	if err != nil {
		return kernel{}, err
	}
	return c.kernel(r.ctx, releases[i], time.Now(), fetch)
}

func (r *runner) listKernels() error {
	c, err := openCache(r.log, r.note)
	if err != nil {
		return err
	}
	for _, rel := range releases {
		e, k, err := c.current(rel.name)
		if err != nil {
			fmt.Printf("%s\tnot fetched\t%s\n", rel.name, rel.about)
			continue
		}
		fmt.Printf("%s\t%s\t%s, as of %s\t%s\n", rel.name, k.release, rel.about, e.Checked.Format(time.DateOnly), k.image)
	}
	return nil
}

// guestMachine is a guest that is ready to boot.
type guestMachine struct {
	kernel
	config
	work    string
	timeout time.Duration
}

// What a working directory may have at most: it is all in the guest's memory.
const (
	maxDirBytes = 64 << 20
	maxDirFiles = 20000
)

// build writes the guest's file system to initrd.
func (r *runner) build(k kernel, program, initrd string) (*guestMachine, error) {
	dir, err := filepath.Abs(r.dir)
	if err != nil {
		return nil, err
	}
	g := &guestMachine{kernel: k, timeout: r.timeout}
	args, out, testTime := guestArgs(r.args, dir)
	if g.timeout == 0 {
		g.timeout = 15 * time.Minute
		if testTime > 0 {
			g.timeout = testTime + bootTime
		}
	}
	g.config = config{
		Path: program, Args: args, Dir: dir, Release: k.release, Date: r.date, Merge: sameFile(os.Stdout, os.Stderr), Out: out,
		// Of two variables of a name, Go takes the first.
		Env: append([]string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "USER=root", "TMPDIR=/tmp", "PWD=" + dir, "WARREN_VMRUN=" + k.release,
		}, guestEnv(os.Environ())...),
	}
	f, err := os.Create(initrd)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	a := newArchive(f)
	for _, d := range []string{"/proc", "/sys", "/dev", "/run/lock", outDir, "/var/lib", "/etc", "/bin", "/sbin", "/usr/bin", "/usr/sbin"} {
		a.dir(d, 0o755)
	}
	a.dir("/root", 0o700)
	a.dir("/tmp", 0o777|fs.ModeSticky)
	a.dir("/var/tmp", 0o777|fs.ModeSticky)
	a.symlink("/var/run", "/run")
	for name, text := range map[string]string{
		"/etc/passwd":   "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
		"/etc/group":    "root:x:0:\nnogroup:x:65534:\n",
		"/etc/hosts":    "127.0.0.1 localhost vmrun\n::1 localhost\n",
		"/etc/hostname": "vmrun\n",
	} {
		a.file(name, 0o644, int64(len(text)), strings.NewReader(text))
	}
	added := make(map[string]bool)
	add := func(name, from string) {
		if !added[name] {
			added[name] = true
			a.copy(name, from)
		}
	}
	add("/init", "/proc/self/exe")
	add(program, program)
	for _, name := range r.with {
		files, err := programFiles(name)
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			add(file, file)
		}
	}
	if err := a.tree(dir, added); err != nil {
		return nil, err
	}
	if err := g.addModules(r, a); err != nil {
		return nil, err
	}
	b, err := json.Marshal(g.config)
	if err != nil {
		return nil, err
	}
	a.file(configFile, 0o600, int64(len(b)), strings.NewReader(string(b)))
	if err := errors.Join(a.close(), f.Close()); err != nil {
		return nil, fmt.Errorf("write the guest's file system: %w", err)
	}
	return g, nil
}

func sameFile(a, b *os.File) bool {
	x, errx := a.Stat()
	y, erry := b.Stat()
	return errx == nil && erry == nil && os.SameFile(x, y)
}

// copy adds a file of the machine, following links.
func (a *archive) copy(name, from string) {
	f, err := os.Open(from)
	if err == nil {
		defer f.Close()
		var info fs.FileInfo
		if info, err = f.Stat(); err == nil {
			a.file(name, info.Mode(), info.Size(), f)
		}
	}
	if err != nil && a.err == nil {
		a.err = err
	}
}

// tree adds a folder and all that is in it, but for what is added already. Links stay links.
func (a *archive) tree(dir string, added map[string]bool) error {
	var bytes, files int64
	a.dir(dir, 0o755)
	return filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == dir || added[name] {
			return err
		}
		switch {
		case d.IsDir() && d.Name() == ".git":
			return fs.SkipDir
		case d.IsDir():
			a.dir(name, 0o755)
		case d.Type() == fs.ModeSymlink:
			to, err := os.Readlink(name)
			if err != nil {
				return err
			}
			a.symlink(name, to)
		case d.Type().IsRegular():
			info, err := d.Info()
			if err != nil {
				return err
			}
			bytes += info.Size()
			a.copy(name, name)
		}
		if files++; bytes > maxDirBytes || files > maxDirFiles {
			return cannot("%s is too much to take along, which is %d MiB and %d files at most: name a smaller folder with -dir", dir, maxDirBytes>>20, maxDirFiles)
		}
		return a.err
	})
}

// programFiles returns a program of the machine and the libraries it is linked with.
func programFiles(name string) ([]string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, cannot("-with %s: %v", name, err)
	}
	path, err = filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	files := []string{path}
	switch interp, err := interpreter(path); {
	case err != nil:
		return nil, cannot("-with %s: no program to take along: %s: %v", name, path, err)
	case interp == "":
		return files, nil
	}
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		return nil, fmt.Errorf("find what %s is linked with: ldd: %w", path, err)
	}
	for field := range strings.FieldsSeq(string(out)) { // "name => path (address)" and "path (address)"
		if filepath.IsAbs(field) {
			files = append(files, field)
		}
	}
	return files, nil
}

// addModules adds the modules and says in the config in which order to load them.
func (g *guestMachine) addModules(r *runner, a *archive) error {
	first, _, err := g.load(consoleModules...) // built in, or else the port does not turn up
	if err != nil {
		return err
	}
	all, missing, err := g.load(slices.Concat(consoleModules, defaultModules, r.modules)...)
	if err != nil {
		return err
	}
	for _, name := range missing {
		if slices.Contains(r.modules, name) {
			return cannot("kernel %s has no module %s", g.release, name)
		}
		r.log("kernel %s has no module %s", g.release, name)
	}
	have := make(map[string]bool)
	put := func(m module) {
		if have[m.name] {
			return
		}
		have[m.name] = true
		file := "/lib/modules/" + g.release + "/" + m.name + ".ko"
		a.file(file, 0o644, int64(len(m.data)), strings.NewReader(string(m.data)))
		g.Modules = append(g.Modules, file)
	}
	for _, m := range first {
		put(m)
	}
	g.Modules = append(g.Modules, "") // see guest
	for _, m := range all {
		put(m)
	}
	return nil
}

// console keeps the end of what the kernel writes.
type console struct {
	mu   sync.Mutex
	b    []byte
	copy io.Writer // or nil
}

const consoleKept = 256 << 10

func (c *console) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.copy != nil {
		_, _ = c.copy.Write(b)
	}
	c.b = append(c.b, b...)
	if over := len(c.b) - consoleKept; over > 0 {
		c.b = slices.Delete(c.b, 0, over)
	}
	return len(b), nil
}

func (c *console) bytes() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.b)
}

// How much of a console is worth showing: a panic with its stack, and what came before another end.
const (
	panicLines = 120
	tailLines  = 40
)

// panicked returns the line in which the kernel says why it gave up, if it did.
func (c *console) panicked() (string, bool) {
	for line := range strings.Lines(string(c.bytes())) {
		if _, why, ok := strings.Cut(line, "Kernel panic - "); ok {
			return strings.TrimSpace(printable(why)), true
		}
	}
	return "", false
}

// tail is the end of the console, to be shown: from where things went wrong, as far as that can be seen.
func (c *console) tail() string {
	lines := strings.Split(strings.TrimSpace(printable(string(c.bytes()))), "\n")
	if len(lines) == 1 && lines[0] == "" {
		return "the kernel wrote nothing to its console"
	}
	wrong := slices.IndexFunc(lines, func(line string) bool {
		return strings.Contains(line, "BUG:") || strings.Contains(line, "Oops") || strings.Contains(line, "Kernel panic")
	})
	switch {
	case wrong >= 0:
		lines = lines[wrong:min(len(lines), wrong+panicLines)]
	case len(lines) > tailLines:
		lines = lines[len(lines)-tailLines:]
	}
	return "the kernel's console:\n| " + strings.Join(lines, "\n| ")
}

// printable leaves out what would do something to a terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' && r != '\n' && r != '\t' || r == 0x7f {
			return -1
		}
		return r
	}, s)
}

// What a guest may take from its start to that of the program, on a slow machine with other things to do.
const bootLimit = 5 * time.Minute

// boots is how often a guest is booted whose kernel panics before the program is started. With several emulated
// processors it does so now and then, while it rewrites its own code (int3 in sched_clock_cpu, of one of 50 boots).
const boots = 3

// boot boots the guest and returns the program's status.
func (g *guestMachine) boot(r *runner) (status int, err error) {
	for n := 1; ; n++ {
		var again bool
		if status, again, err = g.bootOnce(r); !again || n == boots {
			return status, err
		}
		r.note("the guest is booted again: %v", err)
	}
}

// bootOnce boots the guest. again: its kernel panicked before the program was started.
func (g *guestMachine) bootOnce(r *runner) (status int, again bool, err error) {
	ctx, cancel := context.WithTimeout(r.ctx, g.timeout)
	defer cancel()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, false, err
	}
	theirs, ours := os.NewFile(uintptr(fds[0]), "guest"), os.NewFile(uintptr(fds[1]), "guest")
	defer ours.Close()
	con := new(console)
	if r.verbose {
		con.copy = os.Stderr
	}
	args := g.qemuArgs(r)
	r.log("%s %s", qemu, strings.Join(args, " "))
	vm, err := startQEMU(args, con, theirs)
	if err != nil {
		return 0, false, cannot("start %s: %v", qemu, err)
	}
	defer vm.kill()

	said := make(chan outcome, 1)
	started := make(chan struct{})
	go func() { said <- g.read(r, ours, started) }()
	slow := time.AfterFunc(bootLimit, cancel)
	defer slow.Stop()

	var out outcome
	for out.end == unended && ctx.Err() == nil {
		select {
		case <-started:
			slow.Stop()
			out.started, started = true, nil
		case got := <-said:
			out.end, out.status, out.text = got.end, got.status, got.text
		case <-ctx.Done():
		}
	}
	switch {
	case out.end == ended: // so has QEMU, or else something is wrong with it
		select {
		case <-vm.exited:
			out.text = how(vm.err)
		case <-time.After(5 * time.Second):
		}
	case out.end == unended:
		// What the program wrote before its time was up is still to be read.
		vm.kill()
		select {
		case <-said:
		case <-time.After(2 * time.Second):
		}
	}
	vm.kill()
	if r.keep {
		if err := os.WriteFile(filepath.Join(g.work, "console"), con.bytes(), 0o644); err != nil {
			r.note("%v", err)
		}
	}
	if r.ctx.Err() != nil && out.end == unended {
		return 0, false, context.Cause(r.ctx)
	}
	_, panicked := con.panicked()
	status, err = g.verdict(out, con)
	return status, panicked && !out.started && out.end != exited && out.end != notStarted, err
}

// verdict says what an outcome means to whoever ran vmrun.
func (g *guestMachine) verdict(out outcome, con *console) (int, error) {
	failed := func(status int, format string, args ...any) (int, error) {
		return 0, statusError{status, fmt.Sprintf(format, args...) + "; " + con.tail()}
	}
	why, panicked := con.panicked()
	switch {
	case out.end == exited:
		return out.status, nil
	case out.end == notStarted:
		return 0, cannot("the guest cannot run %s: %s", g.Path, out.text)
	case panicked:
		return failed(statusDied, "the guest's kernel panicked: %s", why)
	case out.end == unended && !out.started:
		return failed(statusTimeout, "the guest did not start the program within %v", min(g.timeout, bootLimit))
	case out.end == unended:
		return failed(statusTimeout, "the program did not end within %v (-timeout), boot included", g.timeout)
	case !out.started:
		return failed(statusDied, "the guest ended (%s) before it could start the program", out.text)
	}
	return failed(statusDied, "the guest ended (%s) before the program did", out.text)
}

// vm is a QEMU that was started.
type vm struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed once it has ended
	err    error         // how, from then on
}

// startQEMU starts QEMU. It takes port over, as QEMU's descriptor 3.
func startQEMU(args []string, con io.Writer, port *os.File) (*vm, error) {
	v := &vm{cmd: exec.Command(qemu, args...), exited: make(chan struct{})}
	v.cmd.Stdout, v.cmd.Stderr = con, con
	v.cmd.ExtraFiles = []*os.File{port}
	v.cmd.WaitDelay = time.Second
	// In a group of its own, since it would end by the signals that a terminal sends to vmrun, which has
	// to say so.
	v.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error, 1)
	go func() {
		// Pdeathsig is about the thread, not the process: it has to stay as long as QEMU does.
		runtime.LockOSThread()
		err := v.cmd.Start()
		port.Close()
		started <- err
		if err == nil {
			v.err = v.cmd.Wait()
			close(v.exited)
		}
	}()
	return v, <-started
}

// kill ends QEMU, if it has not ended, and waits for that.
func (v *vm) kill() {
	_ = v.cmd.Process.Kill() // fails if it has ended
	<-v.exited
}

// how says how QEMU ended.
func how(err error) string {
	if err == nil {
		return "a reboot, or switched off"
	}
	return fmt.Sprintf("%s: %v", qemu, err)
}

// qemuArgs is the command line of QEMU.
func (g *guestMachine) qemuArgs(r *runner) []string {
	accel, cpu := "tcg,thread=multi", "max"
	if r.accel == "kvm" {
		accel, cpu = "kvm", "host"
	}
	// An oops is a panic, so that no test passes on a kernel that broke.
	words := "console=ttyS0 panic=-1 oops=panic rdinit=/init"
	if !r.verbose {
		words += " quiet loglevel=4"
	}
	if r.append != "" {
		words += " " + r.append
	}
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none",
		"-machine", "q35", "-accel", accel, "-cpu", cpu, "-smp", strconv.Itoa(r.smp), "-m", strconv.Itoa(r.memory),
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-chardev", "socket,id=guest,fd=3",
		"-device", "virtio-serial-pci", "-device", "virtserialport,chardev=guest,name=" + portName,
		"-kernel", g.image, "-initrd", filepath.Join(g.work, "initrd"), "-append", words,
	}
	if !r.date.IsZero() {
		args = append(args, "-rtc", "base="+r.date.Format("2006-01-02T15:04:05"))
	}
	return args
}

// outcome is how a guest ended.
type outcome struct {
	end     end
	started bool // the program was
	status  int  // exited: the program's
	text    string
}

type end int

const (
	unended    end = iota // it has not
	exited                // the program did, as it should
	notStarted            // the program could not be started, or what it left not be written: text says why
	ended                 // QEMU did: text says how
)

// read passes on what the guest sends, and closes started when the program starts.
func (g *guestMachine) read(r *runner, from io.Reader, started chan<- struct{}) outcome {
	files := make(map[uint32]*os.File)
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	for {
		kind, data, err := readFrame(from)
		if err != nil {
			return outcome{end: ended, text: err.Error()}
		}
		switch kind {
		case frameHello:
			r.log("booted")
			close(started)
		case frameOut:
			_, _ = os.Stdout.Write(data)
		case frameErr:
			_, _ = os.Stderr.Write(data)
		case frameNote:
			r.note("%s", data)
		case frameCannot:
			return outcome{end: notStarted, text: string(data)}
		case frameFile:
			if err := g.writeFile(files, data); err != nil {
				return outcome{end: notStarted, text: err.Error()}
			}
		case frameExit:
			if len(data) != 4 {
				return outcome{end: ended, text: "an exit status that is none"}
			}
			r.log("the program ended")
			return outcome{end: exited, status: int(int32(binary.BigEndian.Uint32(data)))}
		default:
			return outcome{end: ended, text: fmt.Sprintf("a frame of unknown kind %q", kind)}
		}
	}
}

// writeFile writes a part of a file that the program left.
func (g *guestMachine) writeFile(files map[uint32]*os.File, data []byte) error {
	if len(data) < 4 {
		return errors.New("a part of no file")
	}
	i := binary.BigEndian.Uint32(data)
	if i >= uint32(len(g.Out)) {
		return errors.New("a part of no file")
	}
	f, ok := files[i]
	if !ok {
		var err error
		if f, err = os.Create(g.Out[i].host); err != nil {
			return err
		}
		files[i] = f
	}
	_, err := f.Write(data[4:])
	return err
}
