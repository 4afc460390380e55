//go:build amd64

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// build builds vmrun and, with it to be run, testdata/guest.
func build(t *testing.T) (vmrun, guest string) {
	t.Helper()
	dir := t.TempDir()
	vmrun, guest = filepath.Join(dir, "vmrun"), filepath.Join(dir, "guest.test")
	for _, args := range [][]string{
		{"build", "-o", vmrun, "."},
		{"test", "-c", "-o", guest, "./testdata/guest"},
	} {
		cmd := exec.CommandContext(t.Context(), "go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	return vmrun, guest
}

// need skips the test, or fails it where everything has to run, if kernel cannot be booted here.
func need(t *testing.T, vmrun, kernel string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), vmrun, "-check", "-kernel", kernel).CombinedOutput()
	switch {
	case err == nil:
	case os.Getenv("CI") == "true":
		t.Fatalf("with CI=true everything has to run: %s", out)
	case statusOf(err) == statusCannot:
		t.Skip(strings.TrimSpace(string(out)))
	default:
		t.Fatalf("%v: %s", err, out)
	}
}

func statusOf(err error) int {
	if err == nil {
		return 0
	}
	if e := (*exec.ExitError)(nil); errors.As(err, &e) {
		return e.ExitCode()
	}
	return -1
}

// result is what came of running vmrun.
type result struct {
	status      int
	out, errors string
	time        time.Duration
}

// do runs vmrun with flags and then the guest's TestDo.
func do(t *testing.T, vmrun, guest, what string, flags ...string) result {
	t.Helper()
	args := append([]string{"-timeout", "3m"}, flags...)
	cmd := exec.CommandContext(t.Context(), vmrun, append(args, guest, "-test.run=TestDo")...)
	cmd.Dir = "testdata/guest"
	cmd.Env = append(os.Environ(), "WARREN_TEST_DO="+what)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	start := time.Now()
	err := cmd.Run()
	return result{statusOf(err), out.String(), errs.String(), time.Since(start)}
}

func TestGuest(t *testing.T) {
	if testing.Short() {
		t.Skip("boots virtual machines: leave out -short")
	}
	vmrun, guest := build(t)

	// As it is meant to be used.
	for _, test := range []struct{ kernel, release string }{{"6.1", "6.1."}, {"6.12", "6.12."}, {"newest", ""}} {
		t.Run("kernel "+test.kernel, func(t *testing.T) {
			t.Parallel()
			need(t, vmrun, test.kernel)
			exe, flags := vmrun+" -kernel "+test.kernel, []string{"test", "-count=1", "-timeout=3m"}
			env := append(os.Environ(), "CGO_ENABLED=0", "WARREN_TEST_RELEASE="+test.release)
			profile := filepath.Join(t.TempDir(), "cover.out")
			if test.kernel != "6.12" {
				exe += " -append ipv6.disable=1 -date '2031-05-06 07:08:09'"
				env = append(env, "WARREN_TEST_NO_IPV6=1", "WARREN_TEST_DATE=2031-05-06 07:08:09")
			} else {
				flags = append(flags, "-coverprofile="+profile)
				if _, err := exec.LookPath("ip"); err == nil {
					exe += " -with ip"
					env = append(env, "WARREN_TEST_TOOLS=ip")
				}
			}
			cmd := exec.CommandContext(t.Context(), "go", append(flags, "-v", "-exec", exe, "./testdata/guest")...)
			cmd.Env = env
			start := time.Now()
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			t.Logf("%v", time.Since(start).Round(100*time.Millisecond))
			for _, name := range []string{"TestKernel", "TestFiles", "TestLoopback", "TestLinks", "TestTools"} {
				if !strings.Contains(string(out), "--- PASS: "+name) {
					t.Errorf("%s did not pass\n%s", name, out)
				}
			}
			if test.kernel == "6.12" {
				if b, err := os.ReadFile(profile); !strings.HasPrefix(string(b), "mode:") {
					t.Errorf("the profile is %q, %v", b, err)
				}
			} else if !strings.Contains(string(out), "--- PASS: TestClock") {
				t.Errorf("TestClock did not pass\n%s", out)
			}
			if _, err := os.Stat("testdata/guest/testdata/new"); err == nil {
				t.Error("the guest wrote to the machine's tree")
			}
		})
	}

	t.Run("status", func(t *testing.T) {
		t.Parallel()
		need(t, vmrun, "6.1")
		r := do(t, vmrun, guest, "exit", "-kernel", "6.1")
		if r.status != 3 || r.out != "to standard output\n" || r.errors != "to standard error\n" {
			t.Errorf("%+v", r)
		}
	})

	t.Run("output", func(t *testing.T) {
		t.Parallel()
		need(t, vmrun, "6.1")
		cmd := exec.CommandContext(t.Context(), vmrun, "-kernel", "6.1", guest, "-test.run=TestDo")
		cmd.Dir = "testdata/guest"
		cmd.Env = append(os.Environ(), "WARREN_TEST_DO=stream")
		cmd.Stderr = os.Stderr
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		in := bufio.NewReader(stdout)
		first, _ := in.ReadString('\n')
		at := time.Now()
		second, _ := in.ReadString('\n')
		if between := time.Since(at); first != "first\n" || second != "second\n" || between < time.Second {
			t.Errorf("%q, and %v later %q", first, between, second)
		}
		rest, err := io.ReadAll(in)
		if err := errors.Join(err, cmd.Wait()); err != nil {
			t.Error(err)
		}
		if want := strings.Repeat(strings.Repeat("x", 999)+"\n", 4000); string(rest) != want {
			t.Errorf("%d bytes, not the %d that were written", len(rest), len(want))
		}
	})

	t.Run("panic", func(t *testing.T) {
		t.Parallel()
		need(t, vmrun, "6.1")
		r := do(t, vmrun, guest, "panic", "-kernel", "6.1")
		if r.status != statusDied || r.out != "about to panic\n" || !strings.Contains(r.errors, "the guest's kernel panicked: not syncing: sysrq triggered crash") || !strings.Contains(r.errors, "Call Trace") {
			t.Errorf("%+v", r)
		}
	})

	t.Run("reboot", func(t *testing.T) {
		t.Parallel()
		need(t, vmrun, "6.1")
		r := do(t, vmrun, guest, "reboot", "-kernel", "6.1")
		if r.status != statusDied || !strings.Contains(r.errors, "before the program did") {
			t.Errorf("%+v", r)
		}
	})

	t.Run("killed in the guest", func(t *testing.T) {
		t.Parallel()
		need(t, vmrun, "6.1")
		r := do(t, vmrun, guest, "signal", "-kernel", "6.1")
		if r.status != 128+int(syscall.SIGKILL) || !strings.Contains(r.errors, "ended by a signal: killed") {
			t.Errorf("%+v", r)
		}
	})

	t.Run("timeout", func(t *testing.T) {
		t.Parallel()
		need(t, vmrun, "6.1")
		r := do(t, vmrun, guest, "hang", "-kernel", "6.1", "-timeout", "20s")
		if r.status != statusTimeout || r.time > 40*time.Second {
			t.Errorf("%+v", r)
		}
		if r.out != "about to hang\n" && !strings.Contains(r.errors, "did not start the program within") {
			t.Errorf("%+v", r)
		}
	})

	// Whether told to end or killed, it leaves no QEMU.
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			need(t, vmrun, "6.1")
			cmd := exec.CommandContext(t.Context(), vmrun, "-kernel", "6.1", guest, "-test.run=TestDo")
			cmd.Dir = "testdata/guest"
			cmd.Env = append(os.Environ(), "WARREN_TEST_DO=hang", "TMPDIR="+t.TempDir())
			var errs bytes.Buffer
			cmd.Stderr = &errs
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
				t.Errorf("%q, %v", line, err)
			}
			children := childrenOf(t, cmd.Process.Pid)
			if len(children) == 0 {
				t.Error("there is no QEMU to begin with")
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Error(err)
			}
			err = cmd.Wait()
			if sig == syscall.SIGTERM && (statusOf(err) != 128+int(sig) || !strings.Contains(errs.String(), "ended by a signal: terminated")) {
				t.Errorf("%v\n%s", err, errs.String())
			}
			for _, pid := range children {
				end := time.Now().Add(10 * time.Second)
				for running(pid) && time.Now().Before(end) {
					time.Sleep(20 * time.Millisecond)
				}
				if running(pid) {
					t.Errorf("process %d is left", pid)
				}
			}
		})
	}
}

// childrenOf returns the processes that any thread of pid started.
func childrenOf(t *testing.T, pid int) (pids []int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "task/*/children"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // a thread that ended
		}
		for field := range strings.FieldsSeq(string(b)) {
			child, err := strconv.Atoi(field)
			if err != nil {
				t.Fatal(err)
			}
			pids = append(pids, child)
		}
	}
	return pids
}

// running reports whether there is a process that has not ended.
func running(pid int) bool {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z")
}

// What is missing is said, with the way to get it.
func TestMissing(t *testing.T) {
	if testing.Short() {
		t.Skip("builds vmrun: leave out -short")
	}
	vmrun, guest := build(t)
	empty := t.TempDir()
	dynamic := filepath.Join(t.TempDir(), "dynamic")
	if err := os.WriteFile(dynamic, elfFile("/lib64/ld-linux-x86-64.so.2", nil), 0o755); err != nil {
		t.Fatal(err)
	}
	fakeQEMU := t.TempDir()
	if err := os.Symlink("/bin/false", filepath.Join(fakeQEMU, qemu)); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		path string
		args []string
		want string
	}{
		{"no QEMU", empty, []string{guest}, "apt-get install qemu-system-x86"},
		{"no QEMU to check", empty, []string{"-check"}, "apt-get install qemu-system-x86"},
		{"no apt", fakeQEMU, []string{guest}, "apt-cache is missing"},
		{"dynamic", empty, []string{dynamic}, "CGO_ENABLED=0"},
		{"no program", empty, []string{"/proc/version"}, "cannot be run in a guest"},
		{"not there", empty, []string{"/nowhere"}, "no such file"},
		{"no such kernel", fakeQEMU, []string{"-kernel", "5.10", guest}, "neither 6.1, 6.12 or newest"},
		{"no kernel in it", fakeQEMU, []string{"-kernel", empty, guest}, "no boot/vmlinuz-*"},
		{"nothing", empty, nil, "usage"},
		{"no such flag", empty, []string{"-kernels"}, "not defined"},
	} {
		t.Run(test.name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), vmrun, test.args...)
			cmd.Env = []string{"PATH=" + test.path, "XDG_CACHE_HOME=" + t.TempDir(), "HOME=" + empty}
			out, err := cmd.CombinedOutput()
			if statusOf(err) != statusCannot || !strings.Contains(string(out), test.want) || !strings.HasPrefix(string(out), "vmrun: ") {
				t.Errorf("status %d, %s", statusOf(err), out)
			}
		})
	}
}

// A guest whose kernel panics before the program is started is booted again, and then again, but no more.
func TestBootAgain(t *testing.T) {
	if testing.Short() {
		t.Skip("boots virtual machines: leave out -short")
	}
	vmrun, guest := build(t)
	need(t, vmrun, "6.1")
	real, err := exec.LookPath(qemu)
	if err != nil {
		t.Fatal(err)
	}
	for panics, want := range map[int]int{boots - 1: 0, boots: statusDied} {
		dir := t.TempDir()
		count := filepath.Join(dir, "count")
		script := fmt.Sprintf("#!/bin/sh\necho x >> %[1]s\nif [ $(wc -l < %[1]s) -le %[2]d ]; then echo 'Kernel panic - not syncing: at boot'; exit 0; fi\nexec %[3]s \"$@\"\n", count, panics, real)
		if err := os.WriteFile(filepath.Join(dir, qemu), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
		r := do(t, vmrun, guest, "", "-kernel", "6.1")
		tries, _ := os.ReadFile(count)
		if r.status != want || len(tries)/2 != boots || strings.Count(r.errors, "booted again: the guest's kernel panicked: not syncing: at boot") != boots-1 {
			t.Errorf("%d panics: %d boots, %+v", panics, len(tries)/2, r)
		}
	}
}
