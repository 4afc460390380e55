package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ulikunitz/xz"
	"pgregory.net/rapid"
)

// elfFile returns a file in ELF with a program header for the dynamic linker, unless it is "", and a
// section .modinfo, unless it is nil.
func elfFile(interp string, modinfo []byte) []byte {
	const headers = 64 + 56
	names := "\x00.modinfo\x00.shstrtab\x00"
	data := append([]byte(interp+"\x00"), modinfo...)
	data = append(data, names...)
	le := binary.LittleEndian
	b := []byte("\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 9))
	programs := uint16(0)
	if interp != "" {
		programs = 1
	}
	b = le.AppendUint16(b, 1)  // relocatable
	b = le.AppendUint16(b, 62) // x86-64
	b = le.AppendUint32(b, 1)
	b = le.AppendUint64(b, 0)
	b = le.AppendUint64(b, 64)                        // program headers
	b = le.AppendUint64(b, uint64(headers+len(data))) // section headers
	b = le.AppendUint32(b, 0)                         // flags
	for _, n := range []uint16{64, 56, programs, 64, 3, 2} {
		b = le.AppendUint16(b, n)
	}
	b = le.AppendUint32(b, 3) // PT_INTERP
	b = le.AppendUint32(b, 4)
	for _, n := range []int{headers, 0, 0, len(interp) + 1, len(interp) + 1, 1} {
		b = le.AppendUint64(b, uint64(n))
	}
	b = append(b, data...)
	b = append(b, make([]byte, 64)...)
	section := func(name, kind uint32, at, size int) {
		b = le.AppendUint32(b, name)
		b = le.AppendUint32(b, kind)
		for _, n := range []int{0, 0, at, size, 0, 1, 0} {
			b = le.AppendUint64(b, uint64(n))
		}
	}
	at := headers + len(interp) + 1
	name := uint32(1)
	if modinfo == nil {
		name = 0
	}
	section(name, 1, at, len(modinfo))
	section(10, 3, at+len(modinfo), len(names))
	return b
}

func TestInterpreter(t *testing.T) {
	dir := t.TempDir()
	arm := elfFile("", nil)
	arm[18] = 183
	for _, test := range []struct {
		name, want, err string
		data            []byte
	}{
		{"static", "", "", elfFile("", nil)},
		{"dynamic", "/lib64/ld.so", "", elfFile("/lib64/ld.so", nil)},
		{"script", "", "bad magic", []byte("#!/bin/sh\nexit 0\n")},
		{"arm", "", "AARCH64", arm},
	} {
		file := filepath.Join(dir, test.name)
		if err := os.WriteFile(file, test.data, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := interpreter(file)
		if got != test.want || (err != nil) != (test.err != "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s: %q, %v", test.name, got, err)
		}
	}
}

func TestDepends(t *testing.T) {
	for _, test := range []struct {
		modinfo string
		want    []string
	}{
		{"license=GPL\x00depends=udp_tunnel,ip6_udp_tunnel\x00name=x\x00", []string{"udp_tunnel", "ip6_udp_tunnel"}},
		{"depends=\x00", nil},
		{"xdepends=a\x00", nil},
	} {
		got, err := depends(elfFile("", []byte(test.modinfo)))
		if err != nil || !slices.Equal(got, test.want) {
			t.Errorf("%q: %q, %v", test.modinfo, got, err)
		}
	}
	if _, err := depends(elfFile("", nil)); err == nil {
		t.Error("a program is no module")
	}
	if _, err := depends([]byte("no ELF")); err == nil {
		t.Error("a text is no module")
	}
}

func TestLoadOrder(t *testing.T) {
	graph := map[string][]string{
		"wireguard": {"udp_tunnel", "libcurve25519-generic", "ipv6"}, "udp_tunnel": nil, "libcurve25519_generic": {"udp-tunnel"},
		"loop": {"pool"}, "pool": {"loop"}, "broken": {"gone"},
	}
	find := func(name string) ([]string, error) {
		if deps, ok := graph[name]; ok {
			return deps, nil
		}
		return nil, fs.ErrNotExist
	}
	order, missing, err := loadOrder([]string{"absent", "wireguard", "udp-tunnel", "ipv6"}, map[string]bool{"ipv6": true}, find)
	if err != nil || !slices.Equal(order, []string{"udp_tunnel", "libcurve25519_generic", "wireguard"}) || !slices.Equal(missing, []string{"absent"}) {
		t.Errorf("%q, missing %q, %v", order, missing, err)
	}
	for name, want := range map[string]string{"loop": "itself", "broken": "gone"} {
		if _, _, err := loadOrder([]string{name}, nil, find); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// In any graph without loops every module that is reached, and no other, is loaded once, after all that
// it depends on.
func TestLoadOrderProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 20).Draw(t, "modules")
		name := func(i int) string { return fmt.Sprintf("m%d", i) }
		deps := make(map[string][]string)
		for i := range n {
			deps[name(i)] = nil
			for j := range i {
				if rapid.Bool().Draw(t, "depends") {
					deps[name(i)] = append(deps[name(i)], name(j))
				}
			}
		}
		asked := rapid.SliceOf(rapid.Map(rapid.IntRange(0, n-1), name)).Draw(t, "asked")
		order, missing, err := loadOrder(asked, nil, func(m string) ([]string, error) { return deps[m], nil })
		if err != nil || len(missing) > 0 {
			t.Fatal(missing, err)
		}
		wanted := make(map[string]bool)
		for more := slices.Clone(asked); len(more) > 0; more = more[1:] {
			wanted[more[0]] = true
			more = append(more, deps[more[0]]...)
			if len(wanted) == n {
				break
			}
		}
		loaded := make(map[string]bool)
		for _, m := range order {
			if loaded[m] {
				t.Fatalf("%s twice in %q", m, order)
			}
			for _, d := range deps[m] {
				if !loaded[d] {
					t.Fatalf("%s before %s in %q", m, d, order)
				}
			}
			loaded[m] = true
		}
		for m := range wanted {
			if !loaded[m] {
				t.Fatalf("%s is not in %q", m, order)
			}
		}
		if len(loaded) != len(wanted) {
			t.Fatalf("%q, though only %d are wanted", order, len(wanted))
		}
	})
}

func TestOpenKernel(t *testing.T) {
	write := func(t *testing.T, dir, name string, data []byte) {
		t.Helper()
		file := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var packed bytes.Buffer
	w, err := xz.NewWriter(&packed)
	if err != nil {
		t.Fatal(err)
	}
	plain := elfFile("", []byte("depends=b-b\x00"))
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for _, layout := range []struct{ image, modules string }{
		{"boot/vmlinuz-1.2-x", "lib/modules/1.2-x"},
		{"boot/vmlinuz-1.2-x", "usr/lib/modules/1.2-x"},
		{"lib/modules/1.2-x/vmlinuz", "lib/modules/1.2-x"},
		{"usr/lib/modules/1.2-x/vmlinuz", "usr/lib/modules/1.2-x"},
	} {
		dir := t.TempDir()
		write(t, dir, layout.image, []byte("kernel"))
		write(t, dir, layout.modules+"/kernel/net/a.ko.xz", packed.Bytes())
		write(t, dir, layout.modules+"/kernel/lib/b-b.ko", elfFile("", []byte("depends=\x00")))
		write(t, dir, layout.modules+"/modules.builtin", []byte("kernel/net/ipv6/ipv6.ko\n"))
		for _, at := range []string{dir, filepath.Join(dir, filepath.FromSlash(layout.image))} {
			k, err := openKernel(at)
			if err != nil || k.release != "1.2-x" || k.image != filepath.Join(dir, filepath.FromSlash(layout.image)) {
				t.Errorf("%s: %+v, %v", layout.image, k, err)
				continue
			}
			ms, missing, err := k.load("a", "ipv6", "none")
			if err != nil || len(ms) != 2 || ms[0].name != "b_b" || ms[1].name != "a" || !bytes.Equal(ms[1].data, plain) || !slices.Equal(missing, []string{"none"}) {
				t.Errorf("%s: %d modules, missing %q, %v", layout.image, len(ms), missing, err)
			}
		}
		k, err := openKernel(dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := k.decompress("a"); err != nil {
			t.Error(err)
		}
		ms, _, err := k.load("a")
		if err != nil || len(ms) != 2 || filepath.Base(ms[1].file) != "a.ko" || !bytes.Equal(ms[1].data, plain) {
			t.Errorf("%s: decompressed: %d modules, %v", layout.image, len(ms), err)
		}
		write(t, dir, "boot/vmlinuz-2", nil)
		if _, err := openKernel(dir); err == nil || !strings.Contains(err.Error(), "2 kernels") {
			t.Errorf("two kernels: %v", err)
		}
	}
	if _, err := openKernel(t.TempDir()); err == nil {
		t.Error("a kernel in an empty folder")
	}
}
