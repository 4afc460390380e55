//go:build amd64

package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

const (
	configFile = "/vmrun.json"
	portName   = "warren.vmrun"
)

// isInit reports whether this is the first process of a guest, and not vmrun in a container.
func isInit() bool {
	_, err := os.Stat(configFile)
	return os.Getpid() == 1 && os.Args[0] == "/init" && err == nil
}

// initGuest is what the guest does. It does not return.
func initGuest() {
	if err := guest(); err != nil {
		fmt.Printf("vmrun: init: %v\n", err) // on the console
	}
	// By now vmrun has ended this machine, unless it has gone.
	time.Sleep(5 * time.Second)
	syscall.Sync()
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// guest runs the program and returns only if there is nobody to tell how that went.
func guest() error {
	b, err := os.ReadFile(configFile)
	if err != nil {
		return err
	}
	var c config
	if err := json.Unmarshal(b, &c); err != nil {
		return err
	}
	notes := mountAll()
	first := len(c.Modules)
	for i, file := range c.Modules {
		if file == "" { // the console's modules end here
			first = i
			break
		}
		notes = append(notes, loadModule(file)...)
	}
	port, err := openPort()
	if err != nil {
		return err
	}
	f := &frames{w: port}
	for _, file := range c.Modules[min(first+1, len(c.Modules)):] {
		notes = append(notes, loadModule(file)...)
	}
	notes = append(notes, setUp(c)...)
	for _, n := range notes {
		if err := f.send(frameNote, []byte(n)); err != nil {
			return err
		}
	}
	if err := f.send(frameHello, nil); err != nil {
		return err
	}
	before := warned()
	status, err := runProgram(c, f)
	if err != nil {
		return f.send(frameCannot, []byte(err.Error()))
	}
	if warned() && !before {
		if err := f.send(frameNote, []byte("the kernel warned of something: -v shows its console")); err != nil {
			return err
		}
	}
	for i, out := range c.Out {
		if err := sendFile(f, i, out.Guest); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return f.send(frameExit, binary.BigEndian.AppendUint32(nil, uint32(status)))
}

// mountAll mounts what programs expect to be there, and says what it could not.
func mountAll() (notes []string) {
	for _, m := range []struct{ kind, at, data string }{
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
		{"devtmpfs", "/dev", ""},
		{"devpts", "/dev/pts", "mode=0620,ptmxmode=0666"},
		{"tmpfs", "/dev/shm", "mode=1777"},
	} {
		err := os.MkdirAll(m.at, 0o755)
		if err == nil {
			err = syscall.Mount(m.kind, m.at, m.kind, 0, m.data)
		}
		if err != nil {
			notes = append(notes, fmt.Sprintf("mount %s: %v", m.at, err))
		}
	}
	for name, to := range map[string]string{"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"} {
		if err := os.Symlink(to, "/dev/"+name); err != nil {
			notes = append(notes, err.Error())
		}
	}
	return notes
}

// loadModule loads one module. It says what went wrong, as what needs the module says so again.
func loadModule(file string) []string {
	data, err := os.ReadFile(file)
	if err != nil {
		return []string{err.Error()}
	}
	name, _ := moduleName(file)
	options := append([]byte(moduleOptions[name]), 0)
	_, _, errno := syscall.Syscall(syscall.SYS_INIT_MODULE, uintptr(unsafe.Pointer(&data[0])), uintptr(len(data)), uintptr(unsafe.Pointer(&options[0])))
	if errno != 0 && errno != syscall.EEXIST {
		return []string{fmt.Sprintf("load module %s: %v", filepath.Base(file), errno)}
	}
	return nil
}

// openPort opens the serial port to vmrun.
func openPort() (*os.File, error) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, file := range names {
			b, err := os.ReadFile(file)
			if err != nil || strings.TrimSpace(string(b)) != portName {
				continue
			}
			// Not through os.OpenFile, which would make it non-blocking: then a write returns before
			// what it wrote is out.
			fd, err := syscall.Open("/dev/"+filepath.Base(filepath.Dir(file)), syscall.O_RDWR|syscall.O_CLOEXEC, 0)
			if err == nil {
				return os.NewFile(uintptr(fd), portName), nil
			}
		}
		if time.Now().After(end) {
			return nil, errors.New("no serial port to vmrun")
		}
	}
}

// setUp does what an init does of which programs notice it: lo, name, clock, limits.
func setUp(c config) (notes []string) {
	failed := func(what string, err error) {
		if err != nil {
			notes = append(notes, fmt.Sprintf("%s: %v", what, err))
		}
	}
	failed("set the name", syscall.Sethostname([]byte("vmrun")))
	failed("bring lo up", linkUp("lo"))
	failed("raise the limit of open files", syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1 << 16, Max: 1 << 20}))
	failed("make mounts private", syscall.Mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""))
	if !c.Date.IsZero() {
		tv := syscall.NsecToTimeval(c.Date.UnixNano())
		failed("set the clock", syscall.Settimeofday(&tv))
	}
	return notes
}

func linkUp(name string) error {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	var req struct { // ifreq, netdevice(7)
		name  [syscall.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(req.name[:], name)
	req.flags = syscall.IFF_UP | syscall.IFF_RUNNING
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), syscall.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return errno
	}
	return nil
}

// warned reports whether the kernel has met something that should not be (a WARN, an oops, a lockup).
func warned() bool {
	const dead, warn, lockup = 1 << 7, 1 << 9, 1 << 14 // Documentation/admin-guide/tainted-kernels.rst
	b, err := os.ReadFile("/proc/sys/kernel/tainted")
	if err != nil {
		return false
	}
	taint, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	return err == nil && taint&(dead|warn|lockup) != 0
}

// runProgram runs the program, sends what it writes, and returns its status once nothing is left that
// could write more. It is an error if it could not be started.
func runProgram(c config, f *frames) (status int, err error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	var readers sync.WaitGroup
	pipe := func(kind byte) (*os.File, error) {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		readers.Go(func() {
			defer r.Close()
			forward(f, kind, nil, r)
		})
		return w, nil
	}
	stdout, err := pipe(frameOut)
	if err != nil {
		return 0, err
	}
	defer stdout.Close()
	stderr := stdout
	if !c.Merge {
		if stderr, err = pipe(frameErr); err != nil {
			return 0, err
		}
		defer stderr.Close()
	}
	p, err := os.StartProcess(c.Path, append([]string{c.Path}, c.Args...), &os.ProcAttr{
		Dir:   c.Dir,
		Env:   c.Env,
		Files: []*os.File{null, stdout, stderr},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		return 0, err
	}
	stdout.Close()
	stderr.Close()

	// What loses its parent is ours to wait for, too, as the first process.
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, 0, nil)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return 0, fmt.Errorf("wait for the program: %w", err)
		case pid != p.Pid:
			continue
		}
		status = ws.ExitStatus()
		if ws.Signaled() {
			status = 128 + int(ws.Signal())
			if err := f.send(frameNote, fmt.Appendf(nil, "the program was ended by a signal: %v", ws.Signal())); err != nil {
				return 0, err
			}
		}
		break
	}
	// Children that it left may hold the pipes open.
	_ = syscall.Kill(-1, syscall.SIGKILL)
	readers.Wait()
	return status, nil
}

// forward sends all that there is to read, in frames that begin with prefix.
func forward(f *frames, kind byte, prefix []byte, r io.Reader) {
	b := make([]byte, 64<<10)
	copy(b, prefix)
	for {
		n, err := r.Read(b[len(prefix):])
		if n > 0 {
			if err := f.send(kind, b[:len(prefix)+n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func sendFile(f *frames, index int, name string) error {
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	forward(f, frameFile, binary.BigEndian.AppendUint32(nil, uint32(index)), file)
	return nil
}
