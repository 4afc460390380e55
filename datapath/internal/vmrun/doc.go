// Vmrun runs a static program, most often a test binary, as root under a real Debian kernel in QEMU. It
// is meant for go test's -exec:
//
//	CGO_ENABLED=0 go test -exec "go run github.com/warren-mesh/warren/datapath/internal/vmrun -kernel 6.12" ./datapath/kernel
//
// What the program writes is written as it comes, without a line of the kernel's, and vmrun ends with
// the program's exit status. It ends with another one, and says why, where there is none to pass on:
//
//	124  the time was up
//	125  it could not be run: what is missing is named, with the way to get it
//	126  the guest ended before the program did, by a panic of the kernel or a reboot; the end of the
//	     kernel's console is shown
//
// go run makes 1 of each of them: whoever wants to tell them apart builds vmrun first.
//
// # Acceleration
//
// The guest runs in software (-accel tcg), slowly and on every machine alike. That a machine has /dev/kvm does
// not say that it works: in a virtual machine itself, it may stop QEMU, or start and run nothing. Where it
// works, -accel kvm is many times as fast.
//
// # Kernels
//
// -kernel is 6.1, 6.12 or newest, or the path of a vmlinuz, or of a folder that a kernel package was
// unpacked in. The three are Debian's cloud kernels of bookworm, of bookworm (6.12) and of
// trixie-backports. They are taken from the package sources of the machine where those have them, else
// from Debian's archive through an apt directory of vmrun's own; nothing is installed, and root is not
// needed. They are kept in $XDG_CACHE_HOME/warren-vmrun, looked for again once they are a week old, and
// used as they are where that fails: with a warm cache no network is needed. -fetch gets the kernel now
// and -list shows what is there. -check says whether a program could be run.
//
// # Guest
//
// The guest has the program at its path; the working directory with what is in it, writable and not
// written back; of the environment, CI, WARREN_*, TERM, TZ, LANG, NO_COLOR and what the Go runtime heeds, and
// WARREN_VMRUN, the release of the kernel; a loopback interface and no other; no standard input. Its
// modules are loaded: WireGuard, netem and what else a mesh may meet (see defaultModules), and those of
// -modules. -with takes programs of the machine along, with the libraries they need. /tmp and all else
// is in memory.
//
// The profiles that -test flags ask for are written on the machine, by the name they were given there. go
// test caches no result of vmrun, as it does not know the kernel that the result depends on.
package main
