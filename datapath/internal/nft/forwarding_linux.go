package nft

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	procSys = "/proc/sys/"
	// routes6 are the IPv6 routes of the namespace of the thread that reads it: /proc/net is the process's.
	routes6 = "/proc/thread-self/net/ipv6_route"
	// advertised marks routes that the kernel learned from a router advertisement: RTF_ADDRCONF, linux/ipv6_route.h.
	advertised = 0x40000
)

// ReadForwarding reports what Linux forwards in the network namespace of the thread that do runs functions on; nil: of
// the one that calls.
func ReadForwarding(do func(f func() error) error) (f Forwarding, err error) {
	if do == nil {
		do = here
	}
	err = do(func() error {
		for _, name := range names {
			on, there, err := readSysctl(name)
			if err != nil {
				return err
			}
			switch {
			case !there:
			case !on:
				f.Off = append(f.Off, name)
			case name == ForwardIPv4:
				f.IPv4 = true
			case name == ForwardIPv6:
				f.IPv6 = true
			}
		}
		if slices.Contains(f.Off, ForwardIPv6) {
			f.Notice = losses()
		}
		return nil
	})
	return f, err
}

// TurnOn turns on those of the named sysctls, some of Forwarding.Off, that are off, and returns those that it turned
// on. To be sure to turn them off again, put their names into Rules.Turned before. One whose family the kernel lacks is
// left out without an error; one that fails does not keep the other from being turned on. A nil do is as with
// ReadForwarding. What Linux changes along is put into before, unless that is nil.
func TurnOn(do func(f func() error) error, sysctls []string, before Before) (turned []string, err error) {
	return turn(do, sysctls, true, before)
}

// TurnOff turns off those of the named sysctls that are on, such as Rules.Turned. Linux then turns the forwarding of
// that family off on every interface, also where it was turned on for one alone before TurnOn: that one is turned on
// again, if before has it and nobody turned it off meanwhile. Linux also turns on net.ipv4.conf.all.accept_redirects:
// it gets the value that before has, or else keeps the one that it had while packets were forwarded. A name that is not
// one of those that TurnOn takes is an error, and left alone: a table may have it from anybody.
func TurnOff(do func(f func() error) error, sysctls []string, before Before) error {
	_, err := turn(do, sysctls, false, before)
	return err
}

// ForwardFrom has Linux forward the IPv4 packets that come in by an interface. A nil do is as with ReadForwarding.
func ForwardFrom(do func(f func() error) error, iface string) error {
	if do == nil {
		do = here
	}
	return do(func() error { return write1(confDir4+iface+"/forwarding", InterfaceSysctl(iface), "1") })
}

func turn(do func(f func() error) error, list []string, on bool, before Before) (written []string, err error) {
	if do == nil {
		do = here
	}
	err = do(func() error {
		var errs []error
		for _, name := range sorted(list) {
			if !slices.Contains(names, name) {
				errs = append(errs, fmt.Errorf("sysctl %q: none of those that a mesh turns on, which are %s", name, strings.Join(names, " and ")))
				continue
			}
			is, there, err := readSysctl(name)
			if err == nil && there && is != on {
				now := along(name)
				if err = writeSysctl(name, on); err == nil {
					written = append(written, name)
					switch {
					case on && before != nil:
						maps.Copy(before, now)
					case !on:
						err = restore(now, before)
					}
				}
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	return written, err
}

const (
	confDir4  = "net/ipv4/conf/"
	confDir6  = "net/ipv6/conf/"
	redirects = confDir4 + "all/accept_redirects"
)

// along returns what Linux changes along with a sysctl (inet_forward_change in net/ipv4/devinet.c,
// addrconf_fixup_forwarding in net/ipv6/addrconf.c). What cannot be read is left out.
func along(name string) Before {
	values := make(Before)
	read := func(path string) {
		if b, err := os.ReadFile(procSys + path); err == nil {
			values[path] = string(bytes.TrimSpace(b))
		}
	}
	dir := confDir6
	if name == ForwardIPv4 {
		dir = confDir4
		read(redirects)
	}
	of, _ := os.ReadDir(procSys + dir)
	for _, e := range of {
		if e.Name() != "all" {
			read(dir + e.Name() + "/forwarding")
		}
	}
	return values
}

// restore has what was changed along with turning a sysctl off be as it was before that was turned on. now is what it
// was just before it was turned off.
func restore(now, before Before) error {
	var errs []error
	for path, value := range now {
		old, known := before[path]
		switch {
		case path == redirects && !known:
			old = value
		case path != redirects && (!known || old == "0" || value == "0"):
			continue
		}
		err := write1(path, strings.ReplaceAll(path, "/", "."), old)
		if !errors.Is(err, fs.ErrNotExist) { // the interface is gone
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func sysctlPath(name string) string { return procSys + strings.ReplaceAll(name, ".", "/") }

// readSysctl reports whether one is on; there is false where the kernel lacks its family.
func readSysctl(name string) (on, there bool, err error) {
	b, err := os.ReadFile(sysctlPath(name))
	if errors.Is(err, fs.ErrNotExist) && name == ForwardIPv6 {
		if _, err := os.Stat(sysctlPath(ForwardIPv4)); err == nil {
			return false, false, nil // ipv6.disable=1
		}
	}
	if err != nil {
		return false, false, fmt.Errorf("sysctl %s: %w", name, err)
	}
	n, err := strconv.Atoi(string(bytes.TrimSpace(b)))
	if err != nil {
		return false, false, fmt.Errorf("sysctl %s: it is %q, not a number", name, b)
	}
	return n != 0, true, nil
}

func writeSysctl(name string, on bool) error {
	value := "0"
	if on {
		value = "1"
	}
	return write1(strings.TrimPrefix(sysctlPath(name), procSys), name, value)
}

// write1 writes one value.
func write1(path, name, value string) error {
	f, err := os.OpenFile(procSys+path, os.O_WRONLY, 0) // os.WriteFile would create what is not there
	if err == nil {
		_, err = f.WriteString(value)
		err = errors.Join(err, f.Close())
	}
	switch {
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("sysctl %s: %w: have it set to %s from outside of this container (docker run --sysctl %s=%s, or the sysctls of a pod)", name, err, value, name, value)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("sysctl %s: %w: it takes root; or set it to %s by other means (sysctl -w %s=%s)", name, err, value, name, value)
	case err != nil:
		return fmt.Errorf("sysctl %s: set it to %s: %w", name, value, err)
	}
	return nil
}

// losses is what IPv6 forwarding would cost: nil or an *AdvertisedError. What cannot be read costs nothing.
func losses() error {
	f, err := os.Open(routes6)
	if err != nil {
		return nil
	}
	defer f.Close()
	var e AdvertisedError
	for s := bufio.NewScanner(f); s.Scan(); {
		iface, ok := advertisedDefault(s.Text())
		if !ok || slices.Contains(e.Interfaces, iface) {
			continue
		}
		if b, err := os.ReadFile(procSys + "net/ipv6/conf/" + iface + "/accept_ra"); err == nil && string(bytes.TrimSpace(b)) != "2" {
			e.Interfaces = append(e.Interfaces, iface)
		}
	}
	if e.Interfaces == nil {
		return nil
	}
	slices.Sort(e.Interfaces)
	return &e
}

// advertisedDefault returns the interface of a default route from a router advertisement, as a line of routes6
// has it (ipv6_route_native_seq_show in net/ipv6/ip6_fib.c).
func advertisedDefault(line string) (iface string, ok bool) {
	f := strings.Fields(line)
	if len(f) != 10 || f[1] != "00" || f[3] != "00" {
		return "", false
	}
	flags, err := strconv.ParseUint(f[8], 16, 32)
	return f[9], err == nil && flags&advertised != 0
}
