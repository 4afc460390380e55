package nft

import (
	"bytes"
	"os"

	"golang.org/x/sys/unix"
)

// Loaded reports whether Linux has nf_tables in it, as far as can be known without having it load the module, as Open
// does: without, there is no table. It reports true where it is not known.
func Loaded() bool {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return true
	}
	return loaded("/proc/modules", "/lib/modules/"+unix.ByteSliceToString(u.Release[:])+"/modules.builtin")
}

// loaded is Loaded by the list of modules that are loaded, and of those that are built in.
func loaded(modules, builtin string) bool {
	b, err := os.ReadFile(modules)
	if err != nil || bytes.HasPrefix(b, []byte("nf_tables ")) || bytes.Contains(b, []byte("\nnf_tables ")) {
		return true // without such a file everything is built in
	}
	b, err = os.ReadFile(builtin)
	return err != nil || bytes.Contains(b, []byte("/nf_tables.ko"))
}
