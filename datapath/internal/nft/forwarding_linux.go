package nft

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
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
// ReadForwarding.
func TurnOn(do func(f func() error) error, sysctls []string) (turned []string, err error) {
	return turn(do, sysctls, true)
}

// TurnOff turns off those of the named sysctls that are on, such as Rules.Turned. Linux then turns the forwarding of
// that family off on every interface, also where it was turned on for one alone. A name that is not one of those that
// TurnOn takes is an error, and left alone: a table may have it from anybody.
func TurnOff(do func(f func() error) error, sysctls []string) error {
	_, err := turn(do, sysctls, false)
	return err
}

func turn(do func(f func() error) error, list []string, on bool) (written []string, err error) {
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
				if err = writeSysctl(name, on); err == nil {
					written = append(written, name)
				}
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
	return written, err
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
	f, err := os.OpenFile(sysctlPath(name), os.O_WRONLY, 0) // os.WriteFile would create what is not there
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
