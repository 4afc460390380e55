package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/ulikunitz/xz"
)

// consoleModules carry what the program writes. Without them there is nothing to see, so that they are
// loaded first.
var consoleModules = []string{"virtio_pci", "virtio_console"}

// defaultModules are loaded into every guest, as far as its kernel has them: nothing in the guest loads
// a module on demand.
var defaultModules = []string{
	"wireguard", "udp_tunnel", "ip6_udp_tunnel",
	"dummy", "veth", "tun", "bridge", "macvlan", "vrf",
	"sch_netem", "sch_tbf", "sch_ingress", "cls_u32", "cls_matchall", "act_mirred",
	"nf_tables", "nf_conntrack", "nft_ct", "nft_nat", "nft_masq", "nft_chain_nat", "nft_reject_inet", "nft_fib_inet", "nft_log", "nft_limit",
}

// moduleOptions are what modules are loaded with. No interface is there that nobody asked for.
var moduleOptions = map[string]string{"dummy": "numdummies=0"}

// kernel is an unpacked kernel.
type kernel struct {
	release string
	image   string // path of its vmlinuz
	modules string // folder of its modules; empty if it has none
}

// module is a kernel module, unpacked.
type module struct {
	name string
	file string // that it was read from
	data []byte
}

// openKernel finds the kernel at path: a vmlinuz, or a folder that a kernel's packages are unpacked in.
func openKernel(file string) (kernel, error) {
	info, err := os.Stat(file)
	if err != nil {
		return kernel{}, err
	}
	if info.IsDir() {
		var images []string
		for _, pattern := range []string{"boot/vmlinuz-*", "lib/modules/*/vmlinuz", "usr/lib/modules/*/vmlinuz"} {
			found, err := filepath.Glob(filepath.Join(file, pattern))
			if err != nil {
				return kernel{}, err
			}
			images = append(images, found...)
		}
		switch {
		case len(images) == 0:
			return kernel{}, fmt.Errorf("%s: no boot/vmlinuz-* and no lib/modules/*/vmlinuz in it", file)
		case len(images) > 1:
			return kernel{}, fmt.Errorf("%s has %d kernels; name one of them: %s", file, len(images), strings.Join(images, " "))
		}
		file = images[0]
	}
	k := kernel{image: file}
	release, ok := strings.CutPrefix(filepath.Base(file), "vmlinuz-")
	if !ok {
		k.release = filepath.Base(filepath.Dir(file))
		k.modules = filepath.Dir(file)
		return k, nil
	}
	k.release = release
	above := filepath.Dir(filepath.Dir(file))
	for _, dir := range []string{filepath.Join(above, "lib/modules", release), filepath.Join(above, "usr/lib/modules", release)} {
		if info, err := os.Stat(dir); err == nil && info.IsDir() {
			k.modules = dir
			break
		}
	}
	return k, nil
}

// load returns the modules of the names and all they depend on, in an order in which they can be loaded,
// and of the names those that the kernel has not got.
func (k kernel) load(names ...string) (modules []module, missing []string, err error) {
	files := make(map[string]string)
	builtin := make(map[string]bool)
	if k.modules != "" {
		err := filepath.WalkDir(filepath.Join(k.modules, "kernel"), func(file string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				if name, ok := moduleName(file); ok {
					files[name] = file
				}
			}
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, nil, err
		}
		list, err := os.ReadFile(filepath.Join(k.modules, "modules.builtin"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, nil, err
		}
		for line := range strings.Lines(string(list)) {
			if name, ok := moduleName(strings.TrimSpace(line)); ok {
				builtin[name] = true
			}
		}
	}
	read := make(map[string][]byte)
	order, missing, err := loadOrder(names, builtin, func(name string) ([]string, error) {
		file, ok := files[name]
		if !ok {
			return nil, fs.ErrNotExist
		}
		data, err := readModule(file)
		if err != nil {
			return nil, err
		}
		read[name] = data
		return depends(data)
	})
	for _, name := range order {
		modules = append(modules, module{name, files[name], read[name]})
	}
	return modules, missing, err
}

// decompress replaces the modules of the names and those they depend on with decompressed ones, which
// takes longer than all else that is done to start a guest.
func (k kernel) decompress(names ...string) error {
	modules, _, err := k.load(names...)
	if err != nil {
		return err
	}
	for _, m := range modules {
		ext := filepath.Ext(m.file)
		if ext == ".ko" {
			continue
		}
		if err := os.WriteFile(strings.TrimSuffix(m.file, ext), m.data, 0o644); err != nil {
			return err
		}
		if err := os.Remove(m.file); err != nil {
			return err
		}
	}
	return nil
}

// loadOrder sorts the modules of the names, and those they depend on, so that each comes after what it
// depends on. depends returns the latter, or fs.ErrNotExist if there is no such module; a name that is
// not there is returned in missing, while one that a module depends on is an error.
func loadOrder(names []string, builtin map[string]bool, depends func(string) ([]string, error)) (order, missing []string, err error) {
	const (
		begun = iota + 1
		done
	)
	state := make(map[string]int)
	var visit func(name string) error
	visit = func(name string) error {
		if state[name] == done || builtin[name] {
			return nil
		}
		if state[name] == begun {
			return fmt.Errorf("module %s depends on itself", name)
		}
		state[name] = begun
		deps, err := depends(name)
		if err != nil {
			delete(state, name)
			return err
		}
		for _, d := range deps {
			switch err := visit(canonical(d)); {
			case errors.Is(err, fs.ErrNotExist):
				return fmt.Errorf("module %s depends on %s, which the kernel has not got", name, d)
			case err != nil:
				return err
			}
		}
		state[name] = done
		order = append(order, name)
		return nil
	}
	for _, name := range names {
		switch err := visit(canonical(name)); {
		case errors.Is(err, fs.ErrNotExist):
			missing = append(missing, name)
		case err != nil:
			return nil, nil, err
		}
	}
	return order, missing, nil
}

// moduleName is the name of the module in a file.
func moduleName(file string) (string, bool) {
	base, _, ok := strings.Cut(path.Base(filepath.ToSlash(file)), ".ko")
	return canonical(base), ok
}

// canonical is the one of a module's names that the kernel uses: to modprobe, - and _ are the same.
func canonical(name string) string { return strings.ReplaceAll(name, "-", "_") }

func readModule(file string) ([]byte, error) {
	var data []byte
	var err error
	switch filepath.Ext(file) {
	case ".xz":
		data, err = readXZ(file)
	case ".zst":
		data, err = exec.Command("zstd", "-dcq", "--", file).Output()
	default:
		data, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	return data, nil
}

func readXZ(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := xz.NewReader(f)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(r)
}

// depends returns what a module says it depends on.
func depends(data []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errors.New("no kernel module: it has no .modinfo")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for field := range bytes.SplitSeq(info, []byte{0}) {
		if value, ok := strings.CutPrefix(string(field), "depends="); ok {
			return strings.FieldsFunc(value, func(r rune) bool { return r == ',' }), nil
		}
	}
	return nil, nil
}

// interpreter returns the dynamic linker that the program in file asks for, or "" if it is static. A
// file that is no program is an error.
func interpreter(file string) (string, error) {
	f, err := elf.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if f.Machine != elf.EM_X86_64 {
		return "", fmt.Errorf("it is for %v, and the guest is an x86-64", f.Machine)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			b, err := io.ReadAll(p.Open())
			return string(bytes.TrimRight(b, "\x00")), err
		}
	}
	return "", nil
}
